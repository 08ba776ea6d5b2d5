"""Predictive distributions that are not normal: quantiles, scores from draws, and models that return them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import scipy.stats
import torch
from gpytorch.likelihoods import StudentTLikelihood
from scipy import integrate

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.comparison.baselines import LEVELS, GradientBoosting
from gpytorch_tkrr.comparison.distribution import (
    Distribution,
    QuantileDistribution,
    Rescaled,
    distribution_scores,
    sampled_crps,
)
from gpytorch_tkrr.comparison.gp_contenders import StudentSVGP
from gpytorch_tkrr.comparison.scores import normal_crps, regression_scores
from gpytorch_tkrr.comparison.trial import Split, run_trial


def by_quantiles(scale=(1.0, 3.0)):
    levels = torch.tensor(LEVELS, dtype=torch.float64)
    z = torch.from_numpy(scipy.stats.norm.ppf(LEVELS))
    quantiles = torch.stack([z * each + 1 for each in scale])
    return QuantileDistribution(levels, quantiles, torch.ones(len(scale)).double(), 1e-9)


def test_a_distribution_of_quantiles_is_one():
    made = by_quantiles()
    for i in range(2):

        def at(function, y, i=i):
            return float(function(torch.full((2,), float(y), dtype=torch.float64))[i])

        def probability(low, high, at=at):
            return integrate.quad(lambda t: np.exp(at(made.log_prob, t)), low, high)[0]

        pieces = list(itertools.pairwise([-80.0, *made.values[i].tolist(), 82.0]))
        assert sum(probability(*piece) for piece in pieces) == pytest.approx(1.0, abs=1e-6)
        for y in (-9.0, 0.4, 12.0):
            below = sum(probability(low, min(high, y)) for low, high in pieces if low < y)
            assert at(made.cdf, y) == pytest.approx(below, abs=1e-6)
    for level, values in zip(LEVELS, made.values.mT, strict=True):
        torch.testing.assert_close(made.cdf(values), torch.full((2,), level).double())
    draws = made.sample(20000, seed=0)
    levels = torch.stack([made.cdf(row) for row in draws[:4000]])
    assert all(scipy.stats.kstest(levels[:, i].numpy(), "uniform").pvalue > 1e-3 for i in range(2))
    torch.testing.assert_close(made.stddev, draws.std(0), rtol=0.05, atol=0)


def test_quantiles_that_cross_or_coincide_are_mended():
    levels = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    made = QuantileDistribution(levels, torch.tensor([[2.0, 1.0, 3.0], [0.0, 0.0, 0.0]]), torch.zeros(2), 0.01)
    assert made.values.tolist()[0] == [1.0, 2.0, 3.0]
    np.testing.assert_allclose(made.values[1], [-0.01, 0.0, 0.01])
    assert torch.isfinite(made.log_prob(torch.zeros(2))).all()


def test_scores_of_a_normal_distribution_are_those_in_closed_form():
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(400, dtype=torch.float64, generator=generator)
    mean, sd = 0.5 * y, torch.full_like(y, 0.8)

    class Normal(torch.distributions.Normal):
        def sample(self, num_samples, *, seed=None):
            return super().sample((num_samples,))

    torch.manual_seed(0)
    made = Normal(mean, sd)
    assert isinstance(made, Distribution)
    scores, found = distribution_scores(y, made)
    for name, value in regression_scores(y, mean, sd).items():
        assert scores[name] == pytest.approx(value, rel=0.01), name
    torch.testing.assert_close(found["upper"], mean + 1.96 * sd, rtol=0, atol=0.4)
    samples = made.sample(4000)
    torch.testing.assert_close(sampled_crps(y, samples), normal_crps(y, mean, sd), rtol=0, atol=0.05)


def test_units_go_through():
    base = by_quantiles()
    made = Rescaled(base, torch.tensor(10.0), torch.tensor(2.0))
    y = torch.tensor([9.0, 14.0], dtype=torch.float64)
    torch.testing.assert_close(made.cdf(y), base.cdf((y - 10) / 2))
    torch.testing.assert_close(made.log_prob(y), base.log_prob((y - 10) / 2) - np.log(2.0))
    torch.testing.assert_close(made.mean, 10 + 2 * base.mean)
    torch.testing.assert_close(made.stddev, 2 * base.stddev)
    torch.testing.assert_close(made.sample(3, seed=1), 10 + 2 * base.sample(3, seed=1))


def rows(num, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(num, 2, dtype=torch.float64, generator=generator)
    e = torch.from_numpy(np.random.default_rng(seed).standard_t(2.5, num))
    return x, 20 * (torch.sin(6 * x[:, 0]) + 0.1 * (1 + 3 * x[:, 1]) * e) + 100


def test_boosting_and_variational_models_return_distributions():
    (x, y), (test_x, test_y) = rows(600), rows(300, 1)
    split = Split(x, y, test_x, test_y)
    results = {}
    for model in (GradientBoosting(), StudentSVGP(num_inducing=30, num_steps=150, num_epochs=1)):
        trial = run_trial(type(model).__name__, model, "regression", 1, split)
        assert trial.status == "done" and set(trial.prediction) == {"y", "mean", "level", "lower", "upper"}
        assert 0.85 < trial.scores["coverage"] <= 1.0
        results[trial.model] = trial
    made = StudentSVGP(num_inducing=30, num_steps=150, num_epochs=1)
    made.fit(x, y)
    torch.manual_seed(0)
    answer, likelihood = made.predict(test_x), made.likelihood
    f = made.model(made.inputs(test_x).float()).sample(torch.Size([4000])).double()
    nu, scale = likelihood.deg_free.item(), likelihood.noise.item() ** 0.5
    z = (test_y - made.targets.mean) / made.targets.sd
    expected = scipy.stats.t.pdf(z.numpy(), nu, f.numpy(), scale).mean(0) / made.targets.sd.item()
    np.testing.assert_allclose(answer.log_prob(test_y).exp(), expected, rtol=0.25)
    with pytest.raises(tkrr.NotApplicableError):
        StudentSVGP(task="classification").fit(x, (y > 100).double())


def test_a_prediction_is_a_distribution():
    x, y = rows(80)
    model = tkrr.TKRR(x, y, StudentTLikelihood(), rank=2, num_basis=5)
    tkrr.fit_gibbs(model, num_draws=20, num_warmup=20, seed=0)
    with torch.no_grad():
        made = model.predict(x)
        assert isinstance(made, Distribution)
        scores, _ = distribution_scores(y, made)
    assert scores["nlpd"] == pytest.approx(-float(made.log_prob(y).mean()))
