"""Scores of predictive distributions, and the benchmark of calibration on synthetic data."""

from __future__ import annotations

import argparse
from pathlib import Path

import gpytorch
import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import torch

import gpytorch_tkrr as tkrr

pytest.importorskip("pandas")

from benchmarks import calibration, classification, datasets, flights_bayes
from benchmarks.scores import Mixture


@pytest.fixture
def mixture() -> Mixture:
    means = torch.tensor([[0.0, 2.0], [1.0, 2.5], [-0.5, 4.0]], dtype=torch.float64)
    variances = torch.tensor([[1.0, 0.3], [0.2, 0.3], [2.0, 0.1]], dtype=torch.float64)
    return Mixture(means, variances)


def test_density_and_distribution_function_agree_with_scipy(mixture):
    y = torch.tensor([0.7, 3.0], dtype=torch.float64)
    parts = scipy.stats.norm(mixture.means.numpy(), mixture.variances.sqrt().numpy())
    np.testing.assert_allclose(mixture.log_density(y), np.log(parts.pdf(y.numpy()).mean(0)))
    np.testing.assert_allclose(mixture.distribution_function(y), parts.cdf(y.numpy()).mean(0))


def test_crps_is_the_integral_over_the_distribution_function(mixture):
    y = torch.tensor([0.7, 3.0], dtype=torch.float64)
    grid = torch.linspace(-12, 14, 200_001, dtype=torch.float64)
    for n in range(2):
        one = Mixture(mixture.means[:, n : n + 1], mixture.variances[:, n : n + 1])
        squared = (one.distribution_function(grid) - (grid >= y[n]).double()).square()
        expected = scipy.integrate.trapezoid(squared.numpy(), grid.numpy())
        assert one.crps(y[n : n + 1]).item() == pytest.approx(expected, rel=1e-3)


def test_collapsed_and_rescaled_mixtures_have_the_moments_of_draws(mixture):
    rng = np.random.default_rng(0)
    component = rng.integers(3, size=400_000)
    draws = rng.normal(mixture.means.numpy()[component], mixture.variances.sqrt().numpy()[component])
    other = mixture.rescaled(torch.tensor(3.0), torch.tensor(0.5)).collapsed()
    np.testing.assert_allclose(other.mean, (draws.mean(0) - 3) / 0.5, atol=0.02)
    np.testing.assert_allclose(other.variances[0], draws.var(0) / 0.25, rtol=0.01)


def test_scores_of_a_perfect_forecast():
    rng = np.random.default_rng(0)
    y = torch.from_numpy(rng.normal(size=20_000))
    scores = Mixture(torch.zeros(1, 20_000).double(), torch.ones(1, 20_000).double()).scores(y)
    assert scores["coverage"] == pytest.approx(0.95, abs=0.005)
    assert scores["rmse"] == pytest.approx(1, abs=0.02)
    assert scores["nlpd"] == pytest.approx(scipy.stats.norm.entropy(), abs=0.02)
    assert scores["crps"] == pytest.approx(1 / np.sqrt(np.pi), abs=0.01)


def test_mixture_of_draws_is_the_predictive_mixture_of_the_fit():
    x = torch.rand(60, 2, dtype=torch.float64)
    y = 50 + 20 * torch.sin(5 * x[:, 0]) + 5 * torch.randn(60, dtype=torch.float64)
    model = tkrr.TKRR(x, y, gpytorch.likelihoods.GaussianLikelihood(), rank=2, num_basis=6)
    result = tkrr.fit_gibbs(model, num_draws=60, num_warmup=20, seed=0)  # so many that nothing is smoothed
    means = model.draws(x).detach()
    mixture = Mixture(means, result.posterior.noise.unsqueeze(-1).expand_as(means))
    torch.testing.assert_close(mixture.log_density(y), result.log_predictive_density(x, y))


def test_standardised_model_answers_in_the_units_of_the_data():
    def regression_to_the_mean(x, y, test_x, seed):
        assert y.std().item() == pytest.approx(1) and x[:, 0].mean().item() == pytest.approx(0, abs=1e-9)
        return Mixture(torch.zeros(1, len(test_x)).double(), torch.ones(1, len(test_x)).double())

    x = torch.cat([torch.rand(30, 1), torch.ones(30, 1)], dim=-1).double()  # one column is constant
    y = 100 + 7 * torch.randn(30).double()
    found = calibration.standardised(regression_to_the_mean)(x, y, x[:4], 0)
    torch.testing.assert_close(found.means[0], y.mean().expand(4))
    torch.testing.assert_close(found.variances[0], y.var().expand(4))


def test_benchmark(monkeypatch, tmp_path):
    rng = np.random.default_rng(0)
    x = np.column_stack([rng.uniform(size=80), rng.uniform(100, 900, 80)])
    y = 40 + 9 * np.sin(6 * x[:, 0]) + 0.01 * x[:, 1] + 0.3 * rng.normal(size=80)
    data = datasets.Dataset("yacht", "regression", x, y, ("a", "b"), "y", "made up")
    monkeypatch.setattr(datasets, "load", lambda name, **kwargs: data)
    monkeypatch.setattr(calibration, "RANK", 3)
    parser = argparse.ArgumentParser()
    calibration.add_arguments(parser)
    parser.add_argument("--output", type=Path, default=tmp_path)
    models = ["Bayesian T-KRR", "exact GP", "RFF", "ALS + Laplace"]
    options = ["--splits", "1", "--sets", "yacht", "--models"]
    others = calibration.run(parser.parse_args([*options, *models[1:]]))
    previous = ["--previous", str(tmp_path / "calibration.json")]
    report = calibration.run(parser.parse_args([*options, models[0], *previous]))
    assert [row["model"] for row in others.rows] == models[1:] and str(report.rows[1:]) == str(others.rows)
    assert [row["model"] for row in report.rows] == models
    for row in report.rows:
        assert row["N"] == 72 and row["rmse"] < 0.3 and row["nlpd"] < 0.5, row
    assert any("exact GP's + 0.05" in note for note in report.notes)


def test_claims_are_checked():
    def rows(ours: float, coverage: float) -> list[dict]:
        shared = {"coverage": coverage, "coverage_se": 0.01, "N": 2000}
        return [
            {"data": name, "model": model, "nlpd": nlpd, "seconds": seconds, **shared}
            for name in ("a", "b")
            for model, nlpd, seconds in (("Bayesian T-KRR", ours, 1.0), ("exact GP", 0.0, 2.0))
        ]

    assert all(note.startswith("met") for note in calibration.check_targets(rows(-0.1, 0.95)))
    missed = [note for note in calibration.check_targets(rows(0.1, 0.895)) if note.startswith("MISSED")]
    assert len(missed) == 4
    assert sum(note.startswith("MISSED") for note in calibration.check_targets(rows(0.04, 0.905))) == 1


def test_flights(monkeypatch):
    rng = np.random.default_rng(0)
    x = rng.uniform(size=(150, 3))
    y = 5 + 30 * x[:, 0] + rng.normal(size=150)
    data = datasets.Dataset("airline_nyc2013", "regression", x, y, tuple("abc"), "delay", "made up")
    monkeypatch.setattr(datasets, "load", lambda name, **kwargs: data)
    parser = argparse.ArgumentParser()
    flights_bayes.add_arguments(parser)
    options = ["--rows", "100", "--test-rows", "50", "--rank", "2", "--svgp-epochs", "1"]
    ours, ranked, other = flights_bayes.run(parser.parse_args(options)).rows
    assert all(row["mse"] < 0.1 and row["nlpd"] < 0.0 and row["coverage"] > 0.8 for row in (ours, ranked))
    assert ranked["model"] == "Bayesian T-KRR, rank 2" and other["mse"] > ours["mse"]  # one step of Adam learns nothing
    notes = flights_bayes.check_targets([{**ours, "seconds": 1.0}, ranked, {**other, "seconds": 2.0}])
    assert len(notes) == 5 and all(note.startswith("met") for note in notes)


def test_classification(monkeypatch):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 2))
    y = np.where(x[:, 0] * x[:, 1] + 0.1 * rng.normal(size=200) > 0, 1.0, -1.0)
    data = datasets.Dataset("banana", "classification", x, y, ("a", "b"), "class", "made up")
    monkeypatch.setattr(datasets, "load", lambda name, **kwargs: data)
    parser = argparse.ArgumentParser()
    classification.add_arguments(parser)
    report = classification.run(parser.parse_args(["--splits", "2", "--sets", "banana", "--rank", "3"]))
    (row,) = report.rows
    assert row["error"] <= 0.2 and row["nll"] < 0.5 and row["error_se"] >= 0
    assert report.notes[0] == f"{'met' if row['error'] <= 0.11 else 'MISSED'}: banana error <= 0.11."
