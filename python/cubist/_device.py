"""Devices, and how a call on one is made."""

from __future__ import annotations

import functools
import inspect
import os
from typing import Any, Callable, Mapping, NoReturn, TypeVar

from cubist import _cubist
from cubist._arrays import Array, Maker, Spec, dtype_of, is_jax, shape_of

Profile = dict[str, Any]
"""What the model predicts of a call: the fields of ``cubist profile --json``, under the same names."""

_kernels: dict[str, Callable[..., Any]] = {}


class Device:
    """Where calls run. Made by `host` and `npu`; every kernel of the package is a method too: ``device.matmul(a, b)``."""

    def __init__(self, device: _cubist.Device):
        self._device = device

    @property
    def chip(self) -> str:
        """Name of the chip, or of the host's SIMD target."""
        return self._device.chip

    @property
    def is_host(self) -> bool:
        return self._device.is_host

    @property
    def computes(self) -> bool:
        """Whether calls read and write the elements of arrays."""
        return self._device.computes

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a device has no kernel '{name}'; there are {', '.join(sorted(_kernels))}")

    def __repr__(self) -> str:
        return f"<cubist.{type(self).__name__} {self.chip}>"


class Host(Device):
    """This machine: its methods give arrays."""


class Npu(Device):
    """A modelled chip: its methods give a `Profile`."""


def host(threads: int = 0, *, pin: bool = False, tuning: str | os.PathLike[str] = "") -> Host:
    """This machine: calls compute, and give arrays. Several threads of Python may call at once.

    threads   Up to 1024; 0: what CUBIST_NUM_THREADS says, else all that the machine has. Results do not depend on it.
    pin       each thread stays on a processor while it computes
    tuning    a file of tilings, as ``cubist tune --output`` writes them
    """
    return Host(_cubist.host(threads, os.fspath(tuning), pin))


def npu(
    chip: str,
    *,
    set: Mapping[str, float] = {},
    with_data: bool = False,
    policy: str = "minimal",
    details: bool = True,
    timeline: str | os.PathLike[str] = "",
    tuning: str | os.PathLike[str] = "",
) -> Npu:
    """A chip, as the model sees it: calls give a `Profile`.

    chip       one of `chips()`, as "ascend910b2"
    set        constants of the chip that are changed, by name: ``{"memory.hbm_bytes_per_s": 1.6e12}``
    with_data  compute too, slowly, into the outputs that a call is given; without, arrays of floats are not read, and
               `spec` may stand for them
    policy     flags that hold instructions back: "minimal", or "per-tile" as compilers place them
    details    profiles tell pipes, critical path, source lines, occupancy and roofline (of single kernels)
    timeline   a file for the Chrome trace of each call, which opens in Perfetto
    tuning     as for `host`
    """
    return Npu(
        _cubist.npu(chip, dict(set), with_data, policy, details, os.fspath(timeline), os.fspath(tuning))
    )


@functools.cache
def default_device() -> Host:
    return host()


Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def kernel(function: Kernel) -> Kernel:
    """A function with a `device` keyword becomes a method of devices; stubs.py tells type checkers."""

    @functools.wraps(function)
    def method(self: Device, *args: Any, **kwargs: Any) -> Any:
        return function(*args, device=self, **kwargs)

    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.name != "device"]
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    method.__signature__ = signature.replace(parameters=[own, *parameters])  # type: ignore[attr-defined]
    setattr(Device, function.__name__, method)
    _kernels[function.__name__] = function
    return function


class Call:
    """One call of an extension's kernel: makes the outputs that the caller did not give."""

    def __init__(
        self, name: str, device: Device | None, like: Array, state: _cubist.BlockState | None = None
    ):
        self._name, self._state = name, state
        self._device = device or default_device()
        self._maker = Maker(like)
        self._values: dict[str, Any] = {}
        self._outputs: list[str] = []
        self._made: set[str] = set()

    def output(self, field: str, given: Any, shape: tuple[int, ...], dtype: str) -> Call:
        """An output, which is made where `given` is None or True, and left out where it is False."""
        self._outputs.append(field)
        if given is False:
            self._values[field] = None
        elif given is not None and given is not True:
            if is_jax(given):
                raise TypeError(f"{self._name}: {field} is an array of JAX, which may not be written")
            self._values[field] = given
        elif self._device.computes:
            self._values[field] = self._maker.empty(shape, dtype)
            self._made.add(field)
        else:
            self._values[field] = Spec([max(n, 0) for n in shape], dtype)
        return self

    def made(self, field: str) -> bool:
        """Whether the output has memory of the call's own."""
        return field in self._made

    def added_to(self, field: str, flag: str, keyword: str) -> Call:
        """Refuses to have made an output that the call adds to."""
        if field in self._made:
            raise ValueError(f"{self._name}: {keyword} is not given, {flag} adds to it")
        return self

    def optional(self, field: str, given: Any, shape: tuple[int, ...], dtype: str) -> Call:
        """The same, but None leaves it out."""
        return self.output(field, False if given is None else given, shape, dtype)

    def gradients(
        self,
        weights: Mapping[str, Array],
        wanted: Mapping[str, Any] | None,
        *,
        rename: Mapping[str, str] = {},
    ) -> list[str]:
        """Gradients of a block's weights, of all that have one where nothing else is wanted; their names in order."""
        if wanted is None:
            wanted = {name: True for name in weights if name != "router_bias"}
        for name, given in wanted.items():
            of = weights.get(name)
            self.optional(f"d_{rename.get(name, name)}", given, shape_of(of), dtype_of(of))
        return list(wanted)

    def __call__(self, **values: Any) -> Profile | tuple[Any, ...]:
        """The profile on a chip; on a host all outputs in order, None for those left out."""
        state = () if self._state is None else (self._state,)
        profile = getattr(_cubist, self._name)(self._device._device, *state, {**values, **self._values})
        if profile is not None:
            return profile
        return tuple(
            self._maker.finished(self._values[field]) if field in self._made else self._values[field]
            for field in self._outputs
        )


def first(result: Any) -> Any:
    """The only output, or the profile."""
    return result[0] if isinstance(result, tuple) else result


def given(result: Any) -> Any:
    """The outputs that were asked for: one alone, or a tuple; or the profile."""
    if not isinstance(result, tuple):
        return result
    outputs = tuple(x for x in result if x is not None)
    return outputs[0] if len(outputs) == 1 else outputs
