"""Polya-Gamma variates against their known moments and Laplace transform."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
import torch

from gpytorch_tkrr.model.augmentation.polya_gamma import gamma, moments, polya_gamma

NUM = 20000


def full(value):
    return torch.full((NUM,), value, dtype=torch.float64)


def log_laplace(b, z, s):
    """log E exp(-s omega), in closed form."""
    before, after = z / 2, math.sqrt(z**2 / 4 + s / 2)
    return b * (np.logaddexp(before, -before) - np.logaddexp(after, -after))


@pytest.mark.parametrize("shape", [0.02, 0.7, 1.0, 3.3, 500.0])
def test_gammas_are_those_of_scipy(shape):
    draws = gamma(full(shape).reshape(-1, 4), 0, key=5)
    assert scipy.stats.kstest(draws.flatten().numpy(), scipy.stats.gamma(shape).cdf).pvalue > 1e-3
    assert float((torch.corrcoef(draws.mT) - torch.eye(4)).abs().max()) < 0.06


@pytest.mark.parametrize("b", [0.3, 1.0, 7.7, 1500.5])
@pytest.mark.parametrize("z", [0.0, -1.5, 6.0, 15.0])
def test_moments_and_laplace_transform(b, z):
    draws = polya_gamma(full(b), full(z), 0, key=11)
    mean = b / 4 if z == 0 else b / (2 * z) * math.tanh(z / 2)
    variance = b / 24 if z == 0 else b / (4 * z**3) * (math.sinh(z) - z) / math.cosh(z / 2) ** 2
    assert (draws > 0).all() and abs(float(draws.mean()) - mean) < 4 * math.sqrt(variance / NUM)
    squares = (draws - mean).square()
    assert abs(float(squares.mean()) - variance) < 4 * float(squares.std()) / math.sqrt(NUM)
    for s in (0.5 / mean, 3 / mean, 1 / math.sqrt(variance)):
        values = torch.exp(-s * draws)
        assert abs(float(values.mean()) - math.exp(log_laplace(b, z, s))) < 4 * float(values.std()) / math.sqrt(NUM)


@pytest.mark.parametrize("z", [0.001, 1.0, 5.0, 30.0, 100.0])
def test_moments_are_derivatives_of_the_laplace_transform(z):
    mean, variance = moments(torch.tensor(2.5), torch.tensor(z, dtype=torch.float64))
    h = 1e-2 * max(z**2 / 4, 1.0)
    low, middle, high = (log_laplace(2.5, z, s) for s in (h, 2 * h, 3 * h))
    # Extrapolated from s > 0, where the transform is defined for all z.
    first, second = (18 * low - 9 * middle + 2 * high) / (6 * h), (-5 * low + 4 * middle - high) / h**2
    np.testing.assert_allclose([-first, second], [float(mean), float(variance)], rtol=2e-2)


def test_small_shapes_are_half_of_the_sum_of_two():
    """PG(b, z) is infinitely divisible: sums over rows of PG(0.5, z) are PG(1, z)."""
    halves = polya_gamma(full(0.5), full(2.0), 0, key=1) + polya_gamma(full(0.5), full(2.0), 0, key=2)
    assert scipy.stats.ks_2samp(halves.numpy(), polya_gamma(full(1.0), full(2.0), 0, key=3).numpy()).pvalue > 1e-3


def test_numbers_belong_to_rows():
    generator = torch.Generator().manual_seed(0)
    b, z = torch.rand(1000, generator=generator) * 5 + 0.01, torch.randn(1000, generator=generator) * 3
    whole = polya_gamma(b, z, 100, key=4)
    parts = torch.cat([polya_gamma(b[:333], z[:333], 100, key=4), polya_gamma(b[333:], z[333:], 433, key=4)])
    torch.testing.assert_close(whole, parts, rtol=1e-12, atol=0)
    assert not torch.allclose(whole, polya_gamma(b, z, 101, key=4))
    other = polya_gamma(full(3.0), full(1.0), 0, key=5)
    assert abs(float(torch.corrcoef(torch.stack([other[1:], other[:-1]]))[0, 1])) < 0.03
