from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpytorch_tkrr.trigonometry import (
    SineSums,
    cosine_moments,
    cosines,
    count_blocks,
    harmonics,
    sine_gram,
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


@settings(max_examples=40)
@given(st.integers(1, 13), st.integers(1, 8), st.integers(1, 30))
def test_blocked_sums_equal_plain_ones(num_sines, num_blocks, num_rows):
    theta = torch.rand(num_rows, dtype=torch.float64) * torch.pi
    weights = torch.randn(3, num_rows, dtype=torch.float64)
    targets = torch.randn(2, num_rows, dtype=torch.float64)
    sums = SineSums(num_sines, 3, 2, num_blocks, theta.device)
    for start in range(0, num_rows, 7):
        rows = slice(start, start + 7)
        sums.weights(weights[:, rows].shape[1] if start else 7)[:, : weights[:, rows].shape[1]] = weights[:, rows]
        sums.add(theta[rows], targets[:, rows])
    j = torch.arange(2 * num_sines + 1, dtype=torch.float64).unsqueeze(-1)
    torch.testing.assert_close(sums.cosine_moments(), torch.cos(j * theta) @ weights.mT, rtol=1e-12, atol=1e-12)
    sines = torch.sin(j[1 : num_sines + 1] * theta)
    torch.testing.assert_close(sums.sine_sums(), sines @ targets.mT, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_sines", [1, 2, 3, 7, 8, 40])
def test_sine_series(num_sines):
    coefficients = torch.randn(3, num_sines, dtype=torch.float64)
    expected = coefficients @ torch.sin(torch.arange(1, num_sines + 1).unsqueeze(-1) * THETA)
    out = torch.empty(3, THETA.numel(), dtype=torch.float64)
    torch.testing.assert_close(sine_series(THETA, coefficients, out=out), expected, rtol=1e-12, atol=1e-12)


def test_blocks_are_for_few_weights():
    assert count_blocks(40, 15) > 2 and count_blocks(40, 1000) == 1
