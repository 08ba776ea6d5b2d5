"""Censored targets: densities against SciPy, draws against the model, limits and flags."""

from __future__ import annotations

import math

import gpytorch
import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import torch
import torch.distributed
from calibration import check_ranks_are_uniform
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.priors import LogNormalPrior
from processes import run_processes

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.data.source import Batch
from gpytorch_tkrr.model.likelihoods.registry import observe
from gpytorch_tkrr.sampling import plan

F = torch.tensor([[-1.0, 0.2, 2.0]], dtype=torch.float64)
PARAMETERS = {"noise": torch.tensor([0.7], dtype=torch.float64)}


def limited(num=200, high=1.0):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(num, 1, dtype=torch.float64, generator=generator)
    f = 100 + 2 * torch.sin(5 * x[:, 0])
    y = f + 0.3 * torch.randn(num, dtype=torch.float64, generator=generator)
    return x, y.clamp(max=100 + high), f


def fit(data, likelihood, **kwargs):
    model = tkrr.TKRR(None, None, likelihood, rank=2, num_basis=8).double()
    return tkrr.fit_gibbs(model, data=data, num_draws=20, num_warmup=30, seed=0, **kwargs)


def test_densities_and_probabilities_of_what_is_recorded_sum_to_one():
    observation = observe(tkrr.CensoredLikelihood(low=-0.5, high=1.5))
    for rows in ({}, {"spread": torch.tensor([0.1, 1.0, 3.0], dtype=torch.float64)}):
        y = torch.linspace(-0.5, 1.5, 4001, dtype=torch.float64).reshape(-1, 1, 1)
        density = observation.log_density(y, F, PARAMETERS, rows).exp().numpy()
        inside = scipy.integrate.simpson(np.concatenate([2 * density[1:2] - density[2:3], density[1:-1],
                                                         2 * density[-2:-1] - density[-3:-2]]),
                                         x=y.numpy().ravel(), axis=0)  # fmt: skip
        np.testing.assert_allclose(inside + density[0] + density[-1], 1.0, rtol=1e-6)
    variance = torch.tensor(0.7, dtype=torch.float64)
    normal = scipy.stats.norm(F.numpy(), math.sqrt(variance))
    flags = torch.tensor([-1, 0, 1], dtype=torch.int8)
    y = torch.tensor([-9.0, 0.3, 9.0], dtype=torch.float64)
    given = observe(tkrr.CensoredLikelihood()).rows(3, False, censoring=flags)
    result = observe(tkrr.CensoredLikelihood()).log_density(y, F, PARAMETERS, given)
    expected = np.where(flags < 0, normal.logcdf(y), np.where(flags > 0, normal.logsf(y), normal.logpdf(y)))
    np.testing.assert_allclose(result, expected, rtol=1e-7)


def test_targets_beyond_a_limit_are_truncated_normal():
    n = 4000
    flags = torch.tensor([-1, 0, 1]).repeat(n)
    augmentation = observe(tkrr.CensoredLikelihood(censoring=flags)).augmentation(1.0, 0.0)
    batch = Batch(torch.zeros(3 * n, 1), torch.full((3 * n,), 0.5).double())
    parameters = {"noise": torch.tensor(0.49, dtype=torch.float64)}
    e, weight = augmentation.working(parameters, np.random.default_rng(0))(batch, torch.zeros(3 * n).double(), 0)
    e, bound = e.reshape(n, 3).numpy(), 0.5 / 0.7
    assert weight is None and (e[:, 1] == 0.5).all() and e[:, 0].max() <= 0.5 <= e[:, 2].min()
    assert scipy.stats.kstest(e[:, 0], scipy.stats.truncnorm(-np.inf, bound, 0, 0.7).cdf).pvalue > 1e-3
    assert scipy.stats.kstest(e[:, 2], scipy.stats.truncnorm(bound, np.inf, 0, 0.7).cdf).pvalue > 1e-3


@pytest.mark.slow  # by default tests/sampling/test_joint_distribution.py draws from the same model
def test_ranks_are_uniform():
    def simulate(f, rng):
        noise = rng.lognormal(0.0, 0.5)
        y = f + math.sqrt(noise) * torch.from_numpy(rng.standard_normal(len(f)))
        likelihood = tkrr.CensoredLikelihood(low=-1.0, high=0.5, noise_prior=LogNormalPrior(0.0, 0.5))
        return [noise], y.clamp(-1.0, 0.5), likelihood

    check_ranks_are_uniform(simulate, lambda p: p.parameters["noise"].unsqueeze(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_lies_beyond_a_limit_is_found(dtype):
    x, y, f = limited(high=1.1)
    y = y.to(dtype)
    share = float((y >= y.max()).double().mean())
    result = fit((x.to(dtype), y), tkrr.CensoredLikelihood(high=101.1))
    gaussian = fit((x, y), GaussianLikelihood())
    mean = result.model.draws(x.double()).mean(0).detach()
    top = f > 101.5
    assert 0.2 < share < 0.6 and 0.05 < float(result.posterior.noise.mean()) < 0.2
    missed = (f - gaussian.model.draws(x).mean(0).detach())[top].mean()
    assert float((mean - f)[top].mean().abs()) < 0.35 < 0.6 < float(missed)
    prediction = result.model.predict(x.double())
    assert prediction.mean.max().item() > 101.5  # of the uncensored target
    expected = scipy.stats.norm(result.model.draws(x.double()).detach(), result.posterior.noise.sqrt()[:, None])
    at_limit = (y >= y.max()).numpy()
    density = np.where(at_limit, expected.sf(y), expected.pdf(y)).mean(0)
    np.testing.assert_allclose(prediction.log_prob(y.double()).detach(), np.log(density), rtol=1e-4)


def test_flags_of_rows_are_limits_of_rows():
    pytest.importorskip("arviz")
    x, y, _ = limited()
    flags = (y >= 101).int()
    by_limit = fit((x, y), tkrr.CensoredLikelihood(high=101.0))
    model = tkrr.TKRR(x, y, tkrr.CensoredLikelihood(censoring=flags), rank=2, num_basis=8)
    result = tkrr.fit_gibbs(model, num_draws=20, num_warmup=30, seed=0)
    torch.testing.assert_close(result.posterior.noise, by_limit.posterior.noise, rtol=1e-5, atol=0)
    data = result.to_arviz(seed=0)
    by_limit_data = by_limit.to_arviz((x, y), seed=0)
    np.testing.assert_allclose(
        data["log_likelihood"]["y"].values, by_limit_data["log_likelihood"]["y"].values, rtol=1e-4
    )
    torch.testing.assert_close(
        model.predict(x[:9], censoring=flags[:9]).log_prob(y[:9]), model.predict(x).log_prob(y)[:9]
    )
    loaded = tkrr.TKRR(None, None, tkrr.CensoredLikelihood()).double()
    loaded.load_state_dict(model.state_dict())
    torch.testing.assert_close(loaded.predict(x).mean, model.predict(x).mean)


def fit_part(group):
    x, y, _ = limited(120)
    rows = slice(0, 50) if torch.distributed.get_rank(group) == 0 else slice(50, None)
    likelihood = tkrr.CensoredLikelihood(high=101.0, censoring=-(torch.arange(120) % 7 == 0).int())
    return fit((x[rows], y[rows]), likelihood, group=group).posterior.parameters


def test_draws_depend_neither_on_batches_nor_on_processes(tmp_path):
    x, y, _ = limited(120)
    likelihood = tkrr.CensoredLikelihood(high=101.0, censoring=-(torch.arange(120) % 7 == 0).int())
    whole = fit((x, y), likelihood).posterior.parameters
    parts = fit([(x[:33], y[:33]), (x[33:], y[33:])], likelihood, memory=0).posterior.parameters
    for each in (parts, *run_processes(fit_part, 2, tmp_path)):
        torch.testing.assert_close(each, whole, rtol=1e-6, atol=1e-9)


def test_variational_models_see_the_same_likelihood():
    likelihood = tkrr.CensoredLikelihood(high=1.0).double()
    likelihood.noise = 0.3
    y = torch.tensor([0.2, 1.0], dtype=torch.float64)
    f = gpytorch.distributions.MultivariateNormal(torch.tensor([0.1, 0.8]).double(), 0.25 * torch.eye(2).double())
    z, w = np.polynomial.hermite_e.hermegauss(40)
    values = []
    for mean, target, limit in ((0.1, 0.2, False), (0.8, 1.0, True)):
        normal = scipy.stats.norm(np.float32(mean) + 0.5 * z, math.sqrt(0.3))
        values.append((normal.logsf(target) if limit else normal.logpdf(target)) @ w / w.sum())
    np.testing.assert_allclose(likelihood.expected_log_prob(y, f).detach(), values, rtol=1e-5)
    marginal = scipy.stats.norm([0.1, 0.8], math.sqrt(0.55))
    expected = [marginal.logpdf(0.2)[0], marginal.logsf(1.0)[1]]
    np.testing.assert_allclose(likelihood.log_marginal(y, f).detach(), expected, rtol=1e-5)
    np.testing.assert_allclose(likelihood(f).variance.detach(), 0.55, rtol=1e-5)


def test_bad_input():
    x, y, _ = limited(20)
    with pytest.raises(tkrr.InputError, match="low must be smaller than high; got 2 and 1"):
        tkrr.CensoredLikelihood(low=2, high=1)
    with pytest.raises(tkrr.InputError, match=r"censoring must hold -1, 0 and \+1; got \[2\]"):
        tkrr.CensoredLikelihood(censoring=torch.tensor([2]))
    flags = torch.zeros(5)
    with pytest.raises(tkrr.InputError, match=r"5 flags .* for 20 training rows"):
        tkrr.TKRR(x, y, tkrr.CensoredLikelihood(censoring=flags))
    with pytest.raises(tkrr.InputError, match=r"5 flags .* for 20 training rows"):
        fit((x, y), tkrr.CensoredLikelihood(censoring=flags))
    model = tkrr.TKRR(x, y, tkrr.CensoredLikelihood(high=101.0), mean_module=gpytorch.means.LinearMean(1).double())
    with pytest.raises(tkrr.InputError, match="ConstantMean"):
        tkrr.fit_gibbs(model, num_draws=4, num_warmup=4)
    with pytest.raises(tkrr.InputError, match="fit_als minimises squared errors"):
        tkrr.fit_als(tkrr.TKRR(x, y, tkrr.CensoredLikelihood(high=101.0)))
    with pytest.raises(tkrr.InputError, match="one for each of 20 rows; got 3"):
        observe(tkrr.CensoredLikelihood()).rows(20, False, censoring=torch.zeros(3))


@pytest.mark.parametrize("options", [{"high": 101.0}, {"low": 103.0}, {"censoring": torch.tensor([1, -1]).repeat(10)}])
def test_nothing_but_limits(options):
    x, y, _ = limited(20)
    y = y if "censoring" in options else torch.full_like(y, 102.0)
    with pytest.warns(tkrr.ConstraintWarning, match="All 20 targets are censored"):
        model = fit((x, y), tkrr.CensoredLikelihood(**options)).model
    assert bool(torch.isfinite(model.predict(x).mean).all())
    fit((x, y), tkrr.CensoredLikelihood(**options, noise_prior=LogNormalPrior(0.0, 0.5)))  # no warning


@pytest.mark.parametrize("unit", [1e-6, 1e6])
def test_units_do_not_matter(unit):
    x, y, _ = limited(60)
    one = fit((x, y), tkrr.CensoredLikelihood(high=101.0)).model.predict(x)
    other = fit((x, unit * y), tkrr.CensoredLikelihood(high=unit * 101.0)).model.predict(x)
    torch.testing.assert_close(other.mean / unit, one.mean, rtol=1e-5, atol=0)
    torch.testing.assert_close(other.stddev / unit, one.stddev, rtol=1e-3, atol=0)


def test_flags_follow_rows_that_are_taken_out(monkeypatch):
    """The first stages of a warm-up see some of the rows: these keep their own flags."""
    monkeypatch.setattr(plan, "FEW_ROWS", 50)
    seen, original = [], tkrr.CensoredLikelihood.flags

    def flags(self, y, given=None, slack=0.0):
        seen.append(len(given))
        assert torch.equal(given == 1, y < -2)  # recorded far below
        return original(self, y, given, slack)

    monkeypatch.setattr(tkrr.CensoredLikelihood, "flags", flags)
    x = torch.rand(300, 1, dtype=torch.float64)
    is_censored = torch.arange(300) % 4 == 0
    y = torch.where(is_censored, x[:, 0] - 5, x[:, 0])
    model = tkrr.TKRR(x, y, tkrr.CensoredLikelihood(censoring=is_censored.long()), rank=2, num_basis=4)
    tkrr.fit_gibbs(model, num_warmup=8, num_draws=4, num_chains=1, seed=0)
    assert min(seen) < 100 and max(seen) == 300


def test_flags_of_other_rows_are_refused():
    x, y, _ = limited(40)
    model = tkrr.TKRR(x, y, tkrr.CensoredLikelihood(censoring=torch.zeros(40)), rank=2, num_basis=4)
    with pytest.raises(tkrr.InputError, match=r"40 flags .* for 20 training rows"):
        tkrr.fit_gibbs(model, data=(x[20:], y[20:]), num_warmup=2, num_draws=4, seed=0)
