"""Convergence diagnostics against known autocorrelations."""

from __future__ import annotations

import numpy as np
import pytest

from gpytorch_tkrr.sampling.diagnostics import effective_sample_size, split_rhat


def _autoregression(coefficient: float, num_chains: int = 4, length: int = 4000) -> np.ndarray:
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(num_chains, length))
    values = np.zeros_like(noise)
    for t in range(1, length):
        values[:, t] = coefficient * values[:, t - 1] + noise[:, t]
    return values


@pytest.mark.parametrize("coefficient", [0.0, 0.5, 0.9])
def test_effective_sample_size_of_an_autoregression(coefficient):
    values = _autoregression(coefficient)
    exact = values.size * (1 - coefficient) / (1 + coefficient)
    np.testing.assert_allclose(effective_sample_size(values), exact, rtol=0.15)


def test_rhat_sees_a_chain_that_stands_apart_and_one_that_drifts():
    values = _autoregression(0.3)
    assert split_rhat(values) < 1.01
    assert split_rhat(values + np.array([0.0, 0.0, 0.0, 2.0])[:, None]) > 1.2
    assert split_rhat(values[:1] + np.linspace(0, 3, values.shape[1])) > 1.2


def test_quantities_side_by_side_equal_one_by_one():
    values = np.stack([_autoregression(0.2), _autoregression(0.8)], axis=-1)
    for function in (split_rhat, effective_sample_size):
        np.testing.assert_allclose(function(values), [function(values[..., 0]), function(values[..., 1])])


def test_a_constant_has_converged():
    constant = np.full((2, 10), 3.0)
    assert split_rhat(constant) == 1.0
    assert effective_sample_size(constant) == 20
