"""Whatever a kernel takes in C++, its function takes in Python."""

import inspect

import pytest

import cubist
from cubist import _cubist

# Fields that stand together in one argument.
GROUPS = {
    "rope": cubist.Rope,
    "alibi": cubist.Alibi,
    "dropout": cubist.Dropout,
}
MOE_WEIGHTS = {
    "norm", "router", "router_bias", "gate_up", "down", "shared_gate_up", "shared_down", "post_norm"
}  # fmt: skip
MLA_WEIGHTS = {
    "norm", "q_down", "q_norm", "q_up", "kv_down", "kv_norm", "kv_up", "out_projection", "post_norm"
}  # fmt: skip
# The C++ name of a field, where the function has another.
RENAMED = {"c": "out", "weight_list": "weights", "dw_list": "dw", "route_eps": "eps"}


def options_of(function):
    """Parameters, with those of the forward call behind **options."""
    parameters = inspect.signature(function).parameters
    names = set(parameters)
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        names |= options_of(getattr(cubist, function.__name__.removesuffix("_grad")))
    return names


@pytest.mark.parametrize("name", sorted(_cubist.fields))
def test_fields_are_parameters(name):
    function = getattr(cubist, name)
    known = options_of(function)
    for group, fields in GROUPS.items():
        if group in known and name.startswith("flash_attention") or group == "rope":
            known |= {f"{group}_{field}" for field in fields._fields}
    if "window" in known:
        known |= {"window_left", "window_right", "window_anchor"}
    if "weights" in known and name.startswith(("moe_block", "mla_block")):
        weights = MOE_WEIGHTS if name.startswith("moe_block") else MLA_WEIGHTS
        known |= weights | {f"d_{weight}" for weight in weights}
    if name.startswith("moe_block"):
        known |= options_of(cubist.route)
    if name.endswith("_block_grad"):
        known |= {"out"}
    missing = {field for field in _cubist.fields[name] if RENAMED.get(field, field) not in known}
    assert not missing, f"cubist.{name} lacks {sorted(missing)}"


def test_every_kernel_is_a_function():
    assert set(_cubist.fields) <= set(cubist.__all__)
