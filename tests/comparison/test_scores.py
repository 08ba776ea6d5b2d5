"""Scores against numerical integrals, sampling and scikit-learn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats
from sklearn.metrics import log_loss

from gpytorch_tkrr.comparison.distribution import level_coverage
from gpytorch_tkrr.comparison.scores import (
    LEVELS,
    classification_scores,
    normal_crps,
    normal_levels,
    regression_scores,
    reliability,
)

finite = st.floats(-3, 3)


@given(y=finite, mean=finite, sd=st.floats(0.1, 3))
def test_crps_is_the_integrated_squared_distance_of_distribution_functions(y, mean, sd):
    def integrand(t):
        return (stats.norm.cdf(t, mean, sd) - (t >= y)) ** 2

    expected = sum(integrate.quad(integrand, a, b)[0] for a, b in [(mean - 12 * sd - 6, y), (y, mean + 12 * sd + 6)])
    actual = normal_crps(*(torch.tensor([value], dtype=torch.float64) for value in (y, mean, sd)))
    assert float(actual) == pytest.approx(expected, abs=1e-6)


def test_regression_scores_against_scipy():
    rng = np.random.default_rng(0)
    y, mean, sd = rng.normal(size=50), rng.normal(size=50), rng.uniform(0.5, 2, size=50)
    scores = regression_scores(*(torch.as_tensor(value) for value in (y, mean, sd)))
    assert scores["rmse"] == pytest.approx(math.sqrt(np.mean((y - mean) ** 2)))
    assert scores["nlpd"] == pytest.approx(-stats.norm.logpdf(y, mean, sd).mean())
    low, high = stats.norm.interval(0.95, mean, sd)
    assert scores["coverage"] == np.mean((low <= y) & (y <= high))


def test_a_mean_alone_has_an_error_only():
    assert regression_scores(torch.zeros(3), torch.ones(3), None) == {"rmse": 1.0}


def test_coverage_of_the_true_distribution():
    y = torch.randn(100_000, dtype=torch.float64)
    for level in LEVELS:
        found = normal_levels(y, torch.zeros_like(y), torch.ones_like(y))
        assert level_coverage(found["level"], level) == pytest.approx(level, abs=0.006)


def test_classification_scores():
    rng = np.random.default_rng(0)
    probability = rng.uniform(size=20_000)
    y = (rng.uniform(size=20_000) < probability).astype(float)
    scores = classification_scores(torch.as_tensor(y), torch.as_tensor(probability))
    assert scores["nll"] == pytest.approx(log_loss(y, probability))
    assert scores["error"] == np.mean((probability >= 0.5) != y)
    assert scores["calibration_error"] < 0.015  # the probabilities are the true ones
    overconfident = classification_scores(torch.as_tensor(y), torch.as_tensor((probability >= 0.5).astype(float)))
    assert overconfident["calibration_error"] == pytest.approx(overconfident["error"])
    assert math.isfinite(overconfident["nll"])


def test_reliability_counts_every_row_once():
    probability = torch.tensor([0.0, 0.05, 0.95, 1.0], dtype=torch.float64)
    predicted, observed, count = reliability(torch.tensor([0.0, 1.0, 1.0, 1.0]), probability)
    assert predicted.tolist() == pytest.approx([0.025, 0.975])
    assert observed.tolist() == [0.5, 1.0] and count.tolist() == [2, 2]
