"""What tests of several kernels compare by."""

import numpy as np
import pytest

F32 = np.float32


def close(actual, exact, atol=2e-5):
    np.testing.assert_allclose(np.asarray(actual, np.float64), exact, rtol=1e-5, atol=atol)


def slope_of(function, arrays, gradients, rng, step=2e-3):
    """Whether the gradients of sum(function(*arrays)) say how it changes along a random direction."""
    directions = [rng.standard_normal(x.shape).astype(F32) * F32(step) for x in arrays]

    def value(sign):
        moved = [x + F32(sign) * d for x, d in zip(arrays, directions)]
        return np.asarray(function(*moved), np.float64).sum()

    slope = sum((g.astype(np.float64) * d).sum() for g, d in zip(gradients, directions))
    assert slope == pytest.approx((value(1) - value(-1)) / 2, rel=2e-2, abs=1e-5)
