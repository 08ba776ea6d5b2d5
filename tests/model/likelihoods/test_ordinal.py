"""Ordered classes: probabilities against SciPy, draws against the model."""

from __future__ import annotations

import gpytorch
import numpy as np
import pytest
import scipy.stats
import torch
import torch.distributed
from calibration import check_ranks_are_uniform
from processes import run_processes

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.data.source import Batch
from gpytorch_tkrr.model.likelihoods.ordinal import CUT_SD, log_between, truncated_normal
from gpytorch_tkrr.model.likelihoods.registry import observe

F = torch.tensor([[-1.0, 0.2, 2.0]], dtype=torch.float64)
CUTS = torch.tensor([[-0.5, 0.1, 1.4]], dtype=torch.float64)
PARAMETERS = {"noise": torch.ones(1, dtype=torch.float64), "cutpoints": CUTS}


def graded(num=300):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(num, 2, dtype=torch.float64, generator=generator)
    f = 2 * torch.sin(5 * x[:, 0]) + x[:, 1]
    z = f + torch.randn(num, dtype=torch.float64, generator=generator)
    return x, torch.bucketize(z, torch.tensor([-1.0, 0.5, 1.5]).double()), f


def fit(data, **kwargs):
    model = tkrr.TKRR(None, None, tkrr.OrdinalLikelihood(4), rank=2, num_basis=6).double()
    return tkrr.fit_gibbs(model, data=data, num_draws=20, num_warmup=30, seed=0, **kwargs)


def test_probabilities_between_bounds():
    a = torch.tensor([-np.inf, -2.0, 0.5, 8.0, -9.0, -40.0, 3.0], dtype=torch.float64)
    b = torch.tensor([0.3, 1.0, 0.6, 8.5, -8.0, -39.0, np.inf], dtype=torch.float64)
    norm = scipy.stats.norm
    expected = np.where(a > 0, norm.sf(a) - norm.sf(b), norm.cdf(b) - norm.cdf(a))
    np.testing.assert_allclose(log_between(a, b).exp(), expected, rtol=1e-9, atol=1e-300)
    u = torch.linspace(0.001, 0.999, 999, dtype=torch.float64)
    for low, high in zip(a.tolist(), b.tolist(), strict=True):
        z = truncated_normal(torch.full_like(u, low), torch.full_like(u, high), u)
        assert bool(((z >= low) & (z <= high)).all())
        if low > -39:
            assert scipy.stats.kstest(z, scipy.stats.truncnorm(low, high).cdf).statistic < 0.01


def test_probabilities_moments_and_samples_agree():
    observation = observe(tkrr.OrdinalLikelihood(4))
    for spread in (0.0, 2.0):
        rows = {"spread": torch.full((3,), spread, dtype=torch.float64)} if spread else {}
        y = torch.arange(4.0, dtype=torch.float64).reshape(-1, 1, 1)
        p = observation.log_density(y, F, PARAMETERS, rows).exp()
        edges = np.concatenate([[-np.inf], CUTS[0], [np.inf]])
        cdf = scipy.stats.norm(F.numpy(), np.sqrt(1 + spread)).cdf(edges.reshape(-1, 1, 1))
        np.testing.assert_allclose(p, np.diff(cdf, axis=0), rtol=1e-9)
        mean, variance = observation.mean(F, PARAMETERS, rows), observation.variance(F, PARAMETERS, rows)
        torch.testing.assert_close(mean, (p * y).sum(0))
        torch.testing.assert_close(variance, (p * (y - mean) ** 2).sum(0))
        torch.testing.assert_close(observation.cdf(y + 0.3, F, PARAMETERS, rows), p.cumsum(0))
        assert float(observation.cdf(y[:1] - 0.1, F, PARAMETERS, rows).max()) == 0
        many = {name: values.expand(4000, *values.shape[1:]) for name, values in PARAMETERS.items()}
        draws = observation.sample(F.expand(4000, -1), many, rows, torch.Generator().manual_seed(0))
        for i in range(3):
            counts = np.bincount(draws[:, i].long(), minlength=4)
            assert scipy.stats.chisquare(counts, 4000 * p[:, 0, i].numpy()).pvalue > 1e-3


def test_cut_points_are_drawn_from_their_posterior():
    """With f known, two cut points, against a fine grid."""
    rng = np.random.default_rng(0)
    f = torch.from_numpy(rng.standard_normal(40))
    y = torch.bucketize(f + torch.from_numpy(rng.standard_normal(40)), torch.tensor([-0.3, 0.8]).double()).double()
    augmentation, batch = observe(tkrr.OrdinalLikelihood(3)).augmentation(1.0, 0.0), Batch(torch.zeros(40, 1), y)
    state, draws = augmentation.start(), []
    for _ in range(1500):
        state = augmentation.before_sweep(state, lambda g, k: g(batch, f, 0), rng, 1.0)
        draws.append(state["cutpoints"].numpy())
    grid = np.linspace(-3, 3, 301)
    cdf = scipy.stats.norm.cdf(grid[:, None] - f.numpy())
    label = y.numpy()
    log_p = np.log(cdf[:, label == 0]).sum(1)[:, None] + np.log1p(-cdf[:, label == 2]).sum(1)[None]
    with np.errstate(invalid="ignore", divide="ignore"):
        middle = np.log(np.maximum(cdf[None, :, label == 1] - cdf[:, None, label == 1], 0)).sum(-1)
    log_p = log_p + middle - (grid[:, None] ** 2 + grid**2) / (2 * CUT_SD**2)
    p = np.exp(log_p - log_p.max())
    for axis, values in enumerate(np.transpose(draws[10::5])):
        marginal = p.sum(1 - axis)
        levels = np.interp(values, grid + 0.01, np.cumsum(marginal) / marginal.sum())
        assert scipy.stats.kstest(levels, "uniform").pvalue > 1e-3


@pytest.mark.slow  # by default tests/sampling/test_joint_distribution.py draws from the same model
def test_ranks_are_uniform():
    def simulate(f, rng):
        cuts = np.sort(CUT_SD * rng.standard_normal(2))
        z = f + torch.from_numpy(rng.standard_normal(len(f)))
        return cuts.tolist(), torch.bucketize(z, torch.from_numpy(cuts)), tkrr.OrdinalLikelihood(3)

    check_ranks_are_uniform(simulate, lambda p: p.parameters["cutpoints"])


def test_classes_are_predicted():
    pytest.importorskip("arviz")
    x, y, f = graded()
    result = fit((x, y))
    model = result.model
    assert {"cutpoints", "f"} <= set(result.rhat) and "cutpoints" in result.summary()
    distances = model.posterior.parameters["cutpoints"].diff().mean(0)
    np.testing.assert_allclose(distances, [1.5, 1.0], atol=0.4)
    torch.testing.assert_close(model.likelihood.cutpoints.detach(), model.posterior.parameters["cutpoints"].mean(0))
    prediction = model.predict(x)
    p = prediction.probabilities.detach()
    assert p.shape == (300, 4)
    torch.testing.assert_close(p.sum(-1), torch.ones(300).double())
    torch.testing.assert_close((p * torch.arange(4)).sum(-1), prediction.mean.detach())
    torch.testing.assert_close(p.gather(1, y[:, None])[:, 0].log(), prediction.log_prob(y).detach())
    median = prediction.quantile(0.5)
    assert bool((p.cumsum(-1).gather(1, median.long()[:, None]) >= 0.5).all())
    truth = np.diff(scipy.stats.norm.cdf(np.array([-np.inf, -1, 0.5, 1.5, np.inf]) - f.numpy()[:, None]), axis=1)
    assert np.abs(p.numpy() - truth).mean() < 0.06
    data = result.to_arviz((x, y), seed=0)
    np.testing.assert_allclose(
        np.log(np.exp(data["log_likelihood"]["y"].values[0]).mean(0)), prediction.log_prob(y).detach(), rtol=1e-8
    )
    loaded = tkrr.TKRR(None, None, tkrr.OrdinalLikelihood(4)).double()
    loaded.load_state_dict(model.state_dict())
    torch.testing.assert_close(loaded.predict(x).probabilities, prediction.probabilities)
    with gpytorch.settings.num_likelihood_samples(7):
        marginal = model.likelihood(model.eval()(x[:5]))
    assert isinstance(marginal, torch.distributions.Categorical) and marginal.probs.shape == (7, 5, 4)


def test_two_classes_are_the_probit_model():
    x, y, _ = graded()
    labels = (y > 1).double()
    ordinal = tkrr.TKRR(x, labels, tkrr.OrdinalLikelihood(2), rank=2, num_basis=6)
    probit = tkrr.TKRR(x, labels, gpytorch.likelihoods.BernoulliLikelihood(), rank=2, num_basis=6)
    for model in (ordinal, probit):
        tkrr.fit_gibbs(model, num_draws=60, num_warmup=40, seed=0)
    difference = ordinal.class_probabilities(x) - probit.class_probabilities(x)
    assert difference.detach().abs().mean().item() < 0.04
    torch.testing.assert_close(probit.predict(x).probabilities[:, 1], probit.class_probabilities(x))


def fit_part(group):
    x, y, _ = graded(120)
    rows = slice(0, 50) if torch.distributed.get_rank(group) == 0 else slice(50, None)
    return fit((x[rows], y[rows]), group=group).posterior.parameters


def test_draws_depend_neither_on_batches_nor_on_processes(tmp_path):
    x, y, _ = graded(120)
    whole = fit((x, y)).posterior.parameters
    parts = fit([(x[:33], y[:33]), (x[33:], y[33:])], memory=0).posterior.parameters
    for each in (parts, *run_processes(fit_part, 2, tmp_path)):
        torch.testing.assert_close(each, whole, rtol=1e-6, atol=1e-9)


def test_fixed_cut_points_stay():
    x, y, _ = graded(60)
    likelihood = tkrr.OrdinalLikelihood(4).double()
    likelihood.cutpoints = torch.tensor([-1.0, 0.5, 1.5])
    likelihood.raw_cutpoints.requires_grad_(False)
    model = tkrr.TKRR(x, y.double(), likelihood, rank=2, num_basis=5)
    tkrr.fit_gibbs(model, num_draws=4, num_warmup=4, seed=0)
    torch.testing.assert_close(model.posterior.parameters["cutpoints"], likelihood.cutpoints.expand(4, -1))
    tkrr.fit_gibbs(model, num_draws=4, num_warmup=0, seed=0)
    assert model.posterior.num_draws == 8


def test_bad_input():
    x, y, _ = graded(20)
    with pytest.raises(tkrr.InputError, match="num_classes must be an integer, at least 2; got 1"):
        tkrr.OrdinalLikelihood(1)
    with pytest.raises(tkrr.InputError, match=r"of 3 classes targets must be 0, ..., 2; got \[3.0"):
        tkrr.TKRR(x, torch.arange(20) % 4, tkrr.OrdinalLikelihood(3))
    with pytest.raises(tkrr.InputError, match="There must be 2 increasing cut points"):
        tkrr.OrdinalLikelihood(3).cutpoints = torch.tensor([1.0, 0.0])
    with pytest.raises(tkrr.InputError, match="fit_als minimises squared errors"):
        tkrr.fit_als(tkrr.TKRR(x, y, tkrr.OrdinalLikelihood(4)))
    model = tkrr.TKRR(x, y.double(), gpytorch.likelihoods.GaussianLikelihood(), rank=1, num_basis=4)
    tkrr.fit_als(model, seed=0)
    with pytest.raises(tkrr.InputError, match="There are no classes"):
        _ = model.predict(x).probabilities
