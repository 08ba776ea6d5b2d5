from __future__ import annotations

import pytest
import torch

from gpytorch_tkrr.bases.trigonometry import (
    cosines,
    harmonics,
    sine_series,
)

THETA = torch.cat([torch.linspace(0, torch.pi, 101, dtype=torch.float64), torch.tensor([1e-9, 3.0]).double()])


@pytest.mark.parametrize("num", [1, 2, 3, 4, 5, 8, 81, 200])
def test_cosines_by_doubling_are_cosines(num):
    direct = torch.cos(torch.arange(num, dtype=torch.float64).unsqueeze(-1) * THETA)
    torch.testing.assert_close(cosines(THETA, num), direct, rtol=0, atol=2e-13)


@pytest.mark.parametrize("num_cosines, num_sines", [(1, 0), (2, 1), (3, 1), (3, 2), (81, 40), (41, 40), (50, 40)])
def test_harmonics(num_cosines, num_sines):
    cos, sin = harmonics(THETA, num_cosines, num_sines)
    j = torch.arange(num_cosines, dtype=torch.float64).unsqueeze(-1)
    torch.testing.assert_close(cos, torch.cos(j[:num_cosines] * THETA), rtol=0, atol=2e-13)
    torch.testing.assert_close(sin, torch.sin(j[1 : num_sines + 1] * THETA), rtol=0, atol=2e-13)


def test_buffers_are_filled_and_returned():
    out = torch.full((7, THETA.numel()), torch.nan, dtype=torch.float64)
    assert cosines(THETA, 7, out=out) is out
    assert torch.equal(out, cosines(THETA, 7))


def test_harmonics_refuses_more_cosines_than_the_sines_carry():
    with pytest.raises(ValueError, match="num_cosines"):
        harmonics(THETA, 10, 3)


def test_float32_and_gradients_do_not_leak():
    theta = THETA.float().requires_grad_()
    values = cosines(theta, 4)
    assert values.dtype == torch.float64 and not values.requires_grad


@pytest.mark.parametrize("num_sines", [1, 2, 3, 7, 8, 40])
def test_sine_series(num_sines):
    coefficients = torch.randn(3, num_sines, dtype=torch.float64)
    expected = coefficients @ torch.sin(torch.arange(1, num_sines + 1).unsqueeze(-1) * THETA)
    out = torch.empty(3, THETA.numel(), dtype=torch.float64)
    torch.testing.assert_close(sine_series(THETA, coefficients, out=out), expected, rtol=1e-12, atol=1e-12)
