from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpytorch_tkrr.trigonometry import cosine_moments, cosines, harmonics, sine_gram

THETA = torch.cat([torch.linspace(0, torch.pi, 101, dtype=torch.float64), torch.tensor([1e-9, 3.0]).double()])


@pytest.mark.parametrize("num", [1, 2, 3, 4, 5, 8, 81, 200])
def test_cosines_by_doubling_are_cosines(num):
    direct = torch.cos(torch.arange(num, dtype=torch.float64).unsqueeze(-1) * THETA)
    torch.testing.assert_close(cosines(THETA, num), direct, rtol=0, atol=2e-13)


@pytest.mark.parametrize("num_cosines, num_sines", [(1, 0), (1, 1), (2, 2), (3, 2), (81, 41), (41, 41), (50, 41)])
def test_harmonics(num_cosines, num_sines):
    cos, sin = harmonics(THETA, num_cosines, num_sines)
    j = torch.arange(max(num_cosines, num_sines), dtype=torch.float64).unsqueeze(-1)
    torch.testing.assert_close(cos, torch.cos(j[:num_cosines] * THETA), rtol=0, atol=2e-13)
    torch.testing.assert_close(sin, torch.sin(j[:num_sines] * THETA), rtol=0, atol=2e-13)


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


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(1, 40), st.integers(0, 1000))
def test_sine_gram_from_moments(num_functions, num_rows, seed):
    generator = torch.Generator().manual_seed(seed)
    theta = torch.rand(num_rows, dtype=torch.float64, generator=generator) * torch.pi
    weights = torch.randn(2, 3, num_rows, dtype=torch.float64, generator=generator)
    moments = cosine_moments(theta, weights, 2 * num_functions + 1, batch_size=7)
    sines = torch.sin(theta * torch.arange(1, num_functions + 1).unsqueeze(-1))
    direct = torch.einsum("abn,in,jn->abij", weights, sines, sines)
    torch.testing.assert_close(sine_gram(moments), direct, rtol=1e-12, atol=1e-12)
