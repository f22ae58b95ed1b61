"""What the package tells of itself."""

import importlib.metadata
import importlib.util
import inspect
import re

import pytest

import cubist
from cubist._device import _kernels

FUNCTIONS = dict(_kernels)
if importlib.util.find_spec("torch"):
    import cubist.torch

    FUNCTIONS |= {f"torch.{name}": getattr(cubist.torch, name) for name in cubist.torch.__all__}


def test_version():
    assert cubist.__version__ == importlib.metadata.version("cubist")


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_docstrings_tell_of_every_argument(name):
    """All but the device, of which the package's own text tells."""
    text = inspect.getdoc(FUNCTIONS[name])
    for argument in inspect.signature(FUNCTIONS[name]).parameters:
        assert argument == "device" or re.search(rf"\b{argument}\b", text), argument
    assert re.search(r"\(\w.*\)", text), "no shape"


@pytest.mark.parametrize("name", cubist.__all__)
def test_every_public_name_has_a_docstring(name):
    assert name == "__version__" or getattr(cubist, name).__doc__
