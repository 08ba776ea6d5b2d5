"""Counts: distributions against SciPy, draws against quadrature and simulation, the limit of Poisson counts."""

from __future__ import annotations

import math
import warnings

import gpytorch
import numpy as np
import pytest
import scipy.stats
import torch
import torch.distributed
from calibration import check_ranks_are_uniform
from gpytorch.constraints import Interval
from gpytorch.priors import LogNormalPrior
from processes import run_processes

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.chains.chain import Chain
from gpytorch_tkrr.model.likelihoods.registry import observe
from gpytorch_tkrr.sampling.priors import SoftRankPrior

F = torch.tensor([[-1.0, 0.2, 2.0], [0.5, -0.3, 1.0]], dtype=torch.float64)
PARAMETERS = {"dispersion": torch.tensor([0.8, 20.0], dtype=torch.float64)}
EXPOSURE = torch.tensor([1.0, 0.3, 4.0], dtype=torch.float64)


def counts(num=200, dispersion=3.0, seed=0):
    """Inputs, counts, exposures, and f."""
    rng = np.random.default_rng(seed)
    x, exposure = rng.random((num, 2)), rng.uniform(0.5, 4.0, num)
    f = 0.5 + np.sin(6 * x[:, 0]) * x[:, 1]
    y = rng.poisson(exposure * np.exp(f) * rng.gamma(dispersion, 1 / dispersion, num))
    return tuple(torch.from_numpy(np.asarray(part, dtype=float)) for part in (x, y, exposure, f))


def fit(data, likelihood=None, **kwargs):
    likelihood = tkrr.NegativeBinomialLikelihood() if likelihood is None else likelihood
    model = tkrr.TKRR(None, None, likelihood, rank=3, num_basis=6).double()
    return tkrr.fit_gibbs(model, data=data, num_draws=8, num_warmup=12, seed=0, **kwargs)


def reference():
    mean, r = (EXPOSURE * F.exp()).numpy(), PARAMETERS["dispersion"].numpy()[:, None]
    return scipy.stats.nbinom(r, r / (r + mean))


def test_distribution_is_that_of_scipy():
    observation, nb, rows = observe(tkrr.NegativeBinomialLikelihood()), reference(), {"exposure": EXPOSURE}
    y = torch.tensor([0.0, 1.0, 7.0, 300.0], dtype=torch.float64).reshape(-1, 1, 1)
    np.testing.assert_allclose(observation.log_density(y, F, PARAMETERS, rows), nb.logpmf(y), rtol=1e-9)
    np.testing.assert_allclose(observation.mean(F, PARAMETERS, rows), nb.mean(), rtol=1e-12)
    np.testing.assert_allclose(observation.variance(F, PARAMETERS, rows), nb.var(), rtol=1e-12)
    between = torch.tensor([-3.0, -0.5, 0.0, 0.7, 7.0, 300.0], dtype=torch.float64).reshape(-1, 1, 1)
    np.testing.assert_allclose(observation.cdf(between, F, PARAMETERS, rows), nb.cdf(between), rtol=1e-9)


def test_the_distribution_function_has_a_gradient():
    observation, y = observe(tkrr.NegativeBinomialLikelihood()), torch.tensor([[-1.0, 0.0, 6.3]], dtype=torch.float64)
    for known in ({}, {"spread": torch.tensor([0.1, 0.5, 1.0], dtype=torch.float64)}):
        rows = {"exposure": EXPOSURE, **known}
        f = F.clone().requires_grad_()
        assert torch.autograd.gradcheck(lambda f, rows=rows: observation.cdf(y, f, PARAMETERS, rows), f)


@pytest.mark.parametrize("level", [1e-6, 0.05, 0.5, 0.9, 1 - 1e-6])
def test_quantiles_of_few_and_of_many_counts_are_those_of_scipy(level):
    """From 1e-4 to a million counts, and mixtures of both, found in a few evaluations of the distribution function."""
    observation, calls = observe(tkrr.NegativeBinomialLikelihood()), []
    cdf = observation.cdf
    observation.cdf = lambda *args: calls.append(1) or cdf(*args)
    f = torch.tensor([-9.0, -1.0, 0.0, 3.0, 9.0, 13.8], dtype=torch.float64)
    single = {"dispersion": torch.tensor([2.5], dtype=torch.float64)}
    x = torch.zeros(6, 1, dtype=torch.float64)
    made = tkrr.Prediction(observation, lambda x: (f.unsqueeze(0), {}), single, x, {"exposure": torch.ones(6).double()})
    expected = scipy.stats.nbinom(2.5, 2.5 / (2.5 + f.exp())).ppf(level)
    np.testing.assert_array_equal(made.quantile(level), expected)
    assert len(calls) < 40
    two = {"dispersion": torch.tensor([0.5, 1e4], dtype=torch.float64)}
    both = torch.stack([f, f + 2])  # two humps
    made = tkrr.Prediction(observation, lambda x: (both, {}), two, x, {"exposure": torch.ones(6).double()})
    found = made.quantile(level)
    below = made.cdf((found - 1).clamp(min=0))[found > 0]
    assert bool((made.cdf(found) >= level).all()) and bool((below < level).all())


def test_a_spread_of_f_is_integrated_over():
    observation, z = observe(tkrr.NegativeBinomialLikelihood()), np.linspace(-10, 10, 4001)
    spread = torch.tensor([0.01, 0.3, 1.0], dtype=torch.float64)
    rows, weight = {"exposure": EXPOSURE, "spread": spread}, scipy.stats.norm.pdf(z) * (z[1] - z[0])
    mean = np.exp((F + EXPOSURE.log()).numpy()[..., None] + spread.sqrt().numpy()[:, None] * z)  # (2, 3, nodes)
    r = PARAMETERS["dispersion"].numpy()[:, None, None]
    nb, y = scipy.stats.nbinom(r, r / (r + mean)), np.array([0.0, 2.0, 9.0]).reshape(-1, 1, 1)
    density, below = (nb.pmf(y[..., None]) * weight).sum(-1), (nb.cdf(y[..., None]) * weight).sum(-1)
    targets = torch.from_numpy(y)
    np.testing.assert_allclose(observation.log_density(targets, F, PARAMETERS, rows), np.log(density), atol=1e-3)
    np.testing.assert_allclose(observation.cdf(targets, F, PARAMETERS, rows), below, atol=1e-3)
    first = (mean * weight).sum(-1)
    second = ((mean + mean**2 * (1 + 1 / r)) * weight).sum(-1)
    np.testing.assert_allclose(observation.mean(F, PARAMETERS, rows), first, rtol=1e-8)
    np.testing.assert_allclose(observation.variance(F, PARAMETERS, rows), second - first**2, rtol=1e-8)


def test_samples_have_the_distribution():
    observation, rows = observe(tkrr.NegativeBinomialLikelihood()), {"exposure": EXPOSURE}
    for known in (rows, {**rows, "spread": torch.full((3,), 0.2, dtype=torch.float64)}):
        f, r = F[:1].expand(20000, -1), {"dispersion": torch.full((20000,), 0.8, dtype=torch.float64)}
        draws = observation.sample(f, r, known, torch.Generator().manual_seed(0))
        first = {"dispersion": PARAMETERS["dispersion"][:1]}
        expected = observation.cdf(torch.arange(6.0).double().reshape(-1, 1, 1), F[:1], first, known)[:, 0]
        shares = torch.stack([(draws <= k).double().mean(0) for k in range(6)])
        torch.testing.assert_close(shares, expected, rtol=0, atol=4 * 0.5 / math.sqrt(20000))


def test_draws_are_those_of_a_numerical_integral():
    """A constant f with a Student prior (its precision is drawn) and the dispersion, on a grid of both."""
    rng = np.random.default_rng(3)
    exposure = rng.uniform(0.5, 3.0, 12)
    y = rng.poisson(exposure * 2.0 * rng.gamma(1.5, 1 / 1.5, 12)).astype(float)
    kernel = gpytorch.kernels.ConstantKernel().double()
    kernel.constant = torch.tensor(0.6)
    kernel.raw_constant.requires_grad_(False)
    likelihood = tkrr.NegativeBinomialLikelihood(
        torch.from_numpy(exposure),
        dispersion_prior=LogNormalPrior(0.5, 0.8),
        dispersion_constraint=Interval(0.05, 50.0),
    )
    x = torch.linspace(0, 1, 12, dtype=torch.float64).unsqueeze(-1)
    mean_module = gpytorch.means.ConstantMean()
    mean_module.constant = 0.2
    model = tkrr.TKRR(x, torch.from_numpy(y), likelihood, kernel=kernel, rank=1, mean_module=mean_module)
    tkrr.fit_gibbs(model, num_draws=3000, num_warmup=100, seed=0)
    f, r = np.linspace(-4, 5, 901)[:, None], np.exp(np.linspace(math.log(0.05), math.log(50.0), 801))
    soft = SoftRankPrior(1, 1)
    prior = scipy.stats.t(2 * soft.shape, 0.2, math.sqrt(0.6 * soft.rate / soft.shape)).logpdf(f)
    log_p = prior + scipy.stats.norm(0.5, 0.8).logpdf(np.log(r))
    for count, e in zip(y, exposure, strict=True):
        log_p = log_p + scipy.stats.nbinom(r, r / (r + e * np.exp(f))).logpmf(count)
    p = np.exp(log_p - log_p.max())
    for grid, marginal, draws in (
        (f[:, 0], p.sum(1), model.draws(x[:1]).detach()[:, 0]),
        (np.log(r), p.sum(0), model.posterior.parameters["dispersion"].log()),
    ):
        cdf = np.cumsum(marginal) / marginal.sum()
        levels = np.interp(draws.numpy()[::15], grid, cdf)
        assert scipy.stats.kstest(levels, "uniform").pvalue > 1e-3
        expected = (grid * marginal).sum() / marginal.sum()
        sd = math.sqrt(((grid - expected) ** 2 * marginal).sum() / marginal.sum())
        assert abs(float(draws.mean()) - expected) < 0.15 * sd and abs(float(draws.std()) / sd - 1) < 0.15


@pytest.mark.slow  # by default tests/sampling/test_joint_distribution.py draws from the same model
def test_posterior_ranks_are_uniform():
    prior = (math.log(3.0), 0.5)

    def simulate(f, rng):
        r, exposure = rng.lognormal(*prior), rng.uniform(0.5, 4.0, len(f))
        mean = exposure * np.exp(f.numpy()) * rng.gamma(r, 1 / r, len(f))
        y = torch.from_numpy(rng.poisson(np.minimum(mean, 1e9)).astype(float))
        likelihood = tkrr.NegativeBinomialLikelihood(
            torch.from_numpy(exposure),
            dispersion_prior=LogNormalPrior(*prior),
            dispersion_constraint=Interval(1e-3, 1e3),
        )
        return [r], y, likelihood

    check_ranks_are_uniform(
        simulate, lambda posterior: posterior.parameters["dispersion"].unsqueeze(-1), outputscale=0.5, num_fits=24
    )


def test_known_truth_is_found():
    x, y, exposure, f = counts(1500)
    model = tkrr.TKRR(x, y, tkrr.NegativeBinomialLikelihood(exposure), rank=4)
    result = tkrr.fit_gibbs(model, num_draws=60, num_warmup=60, seed=0)
    r = model.posterior.parameters["dispersion"]
    assert 2.3 < float(r.mean()) < 4.0 and "dispersion" in result.summary()
    torch.testing.assert_close(model.likelihood.dispersion, r.mean().reshape(1), check_dtype=False)
    draws = model.draws(x).detach()
    assert float((draws.mean(0) - f).square().mean().sqrt()) < 0.12
    lower, upper = torch.quantile(draws, torch.tensor([0.025, 0.975]).double(), dim=0)
    assert 0.85 < float(((f > lower) & (f < upper)).double().mean()) <= 1
    prediction = model.predict(x)  # the training rows have their own exposures
    expected = scipy.stats.nbinom(r[:, None], r[:, None] / (r[:, None] + exposure * draws.exp()))
    np.testing.assert_allclose(prediction.log_prob(y).detach(), np.log(expected.pmf(y).mean(0)), rtol=1e-8)
    np.testing.assert_allclose(prediction.mean.detach(), expected.mean().mean(0), rtol=1e-8)
    median = prediction.quantile(0.5)
    assert bool((median == median.round()).all())
    assert bool(
        (prediction.cdf(median) >= 0.5).all() and (prediction.cdf((median - 1).clamp(min=0))[median > 0] < 0.5).all()
    )
    torch.testing.assert_close(model.predict(x, exposure=1.0).mean * exposure, prediction.mean)


def test_large_dispersion_is_poisson_regression():
    """Against scikit-learn's Poisson regression on functions that hold the truth."""
    linear_model = pytest.importorskip("sklearn.linear_model")
    rng = np.random.default_rng(0)
    x, exposure = rng.random(1000), rng.uniform(0.5, 4.0, 1000)
    y = rng.poisson(exposure * np.exp(1.5 + np.sin(6 * x)))
    likelihood = tkrr.NegativeBinomialLikelihood(torch.from_numpy(exposure))
    likelihood.dispersion = 300.0
    likelihood.raw_dispersion.requires_grad_(False)
    model = tkrr.TKRR(torch.from_numpy(x), torch.from_numpy(y).double(), likelihood, rank=2, num_basis=8)
    result = tkrr.fit_gibbs(model, num_draws=300, num_warmup=200, seed=0)
    assert "dispersion" not in result.rhat
    features = np.stack([np.sin(6 * x), np.cos(6 * x), x, x**2], -1)
    poisson = linear_model.PoissonRegressor(alpha=0, max_iter=1000, tol=1e-8)
    poisson.fit(features, y / exposure, sample_weight=exposure)
    estimate = model.predict(torch.from_numpy(x), exposure=1.0).mean.detach().numpy()
    inside = (x > 0.05) & (x < 0.95)
    np.testing.assert_allclose(estimate[inside], poisson.predict(features)[inside], rtol=0.12)
    f = torch.tensor([[0.3]], dtype=torch.float64)
    log_p = observe(likelihood).log_density(
        torch.tensor([[2.0]]), f, {"dispersion": torch.tensor([1e6]).double()}, {"exposure": torch.ones(1).double()}
    )
    np.testing.assert_allclose(log_p, scipy.stats.poisson(math.exp(0.3)).logpmf([[2]]), atol=1e-5)


def test_poisson_counts_lead_to_a_large_dispersion():
    """Up to twenty times the mean count, or the bound that the user sets."""
    x, _, exposure, f = counts(1000)
    y = torch.from_numpy(np.random.default_rng(1).poisson((exposure * f.exp()).numpy())).double()
    for constraint, bound in ((None, 20 * float(y.mean())), (Interval(0.1, 1000.0), 1000.0)):
        likelihood = tkrr.NegativeBinomialLikelihood(exposure, dispersion_constraint=constraint)
        model = tkrr.TKRR(x, y, likelihood, rank=3, num_basis=6)
        tkrr.fit_gibbs(model, num_draws=40, num_warmup=60, seed=0)
        dispersion = model.posterior.parameters["dispersion"]
        assert float(dispersion.min()) > 15 and bound / 4 < float(dispersion.max()) <= bound


@pytest.mark.parametrize("size", [300.0, 1e4, 1e6])
def test_large_counts_are_found_from_the_start(size):
    """A chain whose dispersion falls before f has come to its level stays far away from it."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(100, 2, generator=generator, dtype=torch.float64)
    y = torch.poisson(size * torch.exp(2 * x[:, 0]), generator=generator)
    model = tkrr.TKRR(x, y, tkrr.NegativeBinomialLikelihood(), rank=4)
    tkrr.fit_gibbs(model, num_warmup=60, num_draws=20, seed=0)
    inside = torch.linspace(0.1, 0.9, 30, dtype=torch.float64).unsqueeze(-1).expand(30, 2)
    ratio = model.predict(inside).mean / (size * torch.exp(2 * inside[:, 0]))
    assert (ratio.log().abs() < max(0.05, 1 / size**0.5)).all()
    assert model.likelihood.dispersion.detach() > min(size, 1e4)


def test_counts_that_are_too_large_for_their_dispersion_are_announced():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(60, 1, generator=generator, dtype=torch.float64)
    spread = torch.randn(60, generator=generator, dtype=torch.float64)
    y = torch.poisson(1e4 * torch.exp(x[:, 0] + spread), generator=generator)
    model = tkrr.TKRR(x, y, tkrr.NegativeBinomialLikelihood(), rank=1)
    with pytest.warns(tkrr.ConvergenceWarning, match=r"mean count is .* times the dispersion.*the logarithm"):
        tkrr.fit_gibbs(model, num_warmup=20, num_draws=5, seed=0)


def test_draws_do_not_depend_on_batches_or_memory():
    x, y, exposure, _ = counts(150)
    whole = fit((x, y, exposure)).posterior
    for cut, options in ((40, {}), (90, {"memory": 0})):
        data = [(x[:cut], y[:cut], exposure[:cut]), (x[cut:], y[cut:], exposure[cut:])]
        parts = fit(data, **options).posterior
        torch.testing.assert_close(parts.parameters["dispersion"], whole.parameters["dispersion"], rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(parts.functions(x), whole.functions(x), rtol=1e-5, atol=1e-7)


def test_exposures_of_the_likelihood_are_those_of_the_data():
    x, y, exposure, _ = counts(150)
    model = tkrr.TKRR(x, y, tkrr.NegativeBinomialLikelihood(exposure), rank=3, num_basis=6)
    own = tkrr.fit_gibbs(model, num_draws=8, num_warmup=12, seed=0).posterior
    other = fit((x, y, exposure)).posterior
    torch.testing.assert_close(own.parameters["dispersion"], other.parameters["dispersion"], rtol=1e-6, atol=1e-9)


def fit_part(group):
    x, y, exposure, _ = counts(150)
    rows = slice(0, 60) if torch.distributed.get_rank(group) == 0 else slice(60, None)
    return fit((x[rows], y[rows], exposure[rows]), group=group).posterior.parameters


def test_draws_do_not_depend_on_processes(tmp_path):
    x, y, exposure, _ = counts(150)
    whole = fit((x, y, exposure)).posterior.parameters["dispersion"]
    for parameters in run_processes(fit_part, 2, tmp_path):
        torch.testing.assert_close(parameters["dispersion"], whole, rtol=1e-6, atol=1e-9)


def test_a_fit_goes_on_from_a_checkpoint_and_a_model_from_its_state(tmp_path, monkeypatch):
    x, y, exposure, _ = counts(100)
    whole = fit((x, y, exposure)).posterior
    sweep, count = Chain.sweep, 0

    def stopped(*args):
        nonlocal count
        count += 1
        if count == 15:
            raise KeyboardInterrupt
        sweep(*args)

    monkeypatch.setattr(Chain, "sweep", stopped)
    with pytest.raises(KeyboardInterrupt):
        fit((x, y, exposure), checkpoint=tkrr.Checkpoint(tmp_path / "run.pt", seconds=0))
    result = fit((x, y, exposure), checkpoint=tkrr.Checkpoint(tmp_path / "run.pt", seconds=0))
    assert count == 21 and torch.equal(result.posterior.parameters["dispersion"], whole.parameters["dispersion"])
    model = tkrr.TKRR(None, None, tkrr.NegativeBinomialLikelihood()).double()
    model.load_state_dict(result.model.state_dict())
    for exposures in (2.0, exposure):
        expected = result.model.predict(x, exposure=exposures).log_prob(y)
        assert torch.equal(model.predict(x, exposure=exposures).log_prob(y), expected)
    more = tkrr.fit_gibbs(model, data=(x, y, exposure), num_draws=4, num_warmup=0, seed=1)
    assert more.posterior.num_draws == 12


def test_arviz_has_the_log_likelihood():
    pytest.importorskip("arviz")
    x, y, exposure, _ = counts(60)
    model = tkrr.TKRR(x, y, tkrr.NegativeBinomialLikelihood(exposure), rank=2, num_basis=5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tkrr.ConvergenceWarning)
        result = tkrr.fit_gibbs(model, num_draws=10, num_warmup=10, num_chains=2, seed=0)
    data = result.to_arviz(seed=0)
    r = data.posterior["dispersion"].values[..., None]
    mean = (exposure * model.draws(x).detach().exp()).numpy().reshape(2, 10, 60)
    expected = scipy.stats.nbinom(r, r / (r + mean)).logpmf(y.numpy())
    np.testing.assert_allclose(data.log_likelihood["y"].values, expected, rtol=1e-8)
    replicates = data.posterior_predictive["y"].values
    assert (replicates >= 0).all() and (replicates == replicates.round()).all()
    with pytest.raises(tkrr.InputError, match="exposures of its 60 training rows"):
        result.to_arviz(data=(x[:5], y[:5]))


def test_calls_of_gpytorch():
    x, y, exposure, _ = counts(60)
    likelihood = tkrr.NegativeBinomialLikelihood(exposure)
    model = tkrr.TKRR(x, y, likelihood, rank=2, num_basis=5)
    tkrr.fit_gibbs(model, num_draws=10, num_warmup=10, seed=0)
    with torch.no_grad():
        posterior = model.eval()(x)
        for options, e in (({}, exposure), ({"exposure": 2.0}, torch.tensor(2.0))):
            marginal = likelihood(posterior, **options)
            assert isinstance(marginal, torch.distributions.NegativeBinomial)
            given = likelihood(posterior.mean, **options)
            torch.testing.assert_close(given.mean, e * posterior.mean.exp())
            torch.testing.assert_close(given.variance, given.mean + given.mean**2 / likelihood.dispersion)
        assert likelihood.expected_log_prob(y, posterior).shape == (60,)
    part = observe(likelihood).of_rows(torch.arange(5))
    assert torch.equal(part.exposure, exposure[:5]) and torch.equal(part.dispersion, likelihood.dispersion)


def test_only_zeros():
    x = torch.rand(40, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model = tkrr.TKRR(x, torch.zeros(40, dtype=torch.float64), tkrr.NegativeBinomialLikelihood(), rank=2, num_basis=5)
    tkrr.fit_gibbs(model, num_draws=20, num_warmup=20, seed=0)
    assert bool((model.predict(x).mean < 0.5).all())


@pytest.mark.parametrize("bad", [[0.0, 1.5], [-1.0, 2.0]])
def test_targets_that_are_no_counts(bad):
    x = torch.rand(2, 1, dtype=torch.float64)
    with pytest.raises(tkrr.InputError, match="targets must be counts"):
        tkrr.TKRR(x, torch.tensor(bad, dtype=torch.float64), tkrr.NegativeBinomialLikelihood())


def test_exposures_that_do_not_fit():
    x, y, exposure, _ = counts(30)
    for bad in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(tkrr.InputError, match="positive and finite"):
            tkrr.NegativeBinomialLikelihood(torch.tensor([1.0, bad]))
    with pytest.raises(tkrr.InputError, match="29 exposures for 30 training rows"):
        tkrr.TKRR(x, y, tkrr.NegativeBinomialLikelihood(exposure[1:]))
    model = tkrr.TKRR(x, y, tkrr.NegativeBinomialLikelihood(exposure), rank=2, num_basis=4)
    with pytest.raises(tkrr.InputError, match=r"data=\(x, y, exposure\)"):
        tkrr.fit_gibbs(model, data=(x, y))
    with pytest.raises(tkrr.InputError, match="Use fit_gibbs"):
        tkrr.fit_als(model)
    tkrr.fit_gibbs(model, num_draws=4, num_warmup=4, seed=0)
    with pytest.raises(tkrr.InputError, match="Pass exposure="):
        model.predict(x[:3])
    with pytest.raises(tkrr.InputError, match="one for each of 3 rows; got 2"):
        model.predict(x[:3], exposure=exposure[:2])
    with pytest.raises(tkrr.InputError, match="nothing is given for each row; got noise"):
        model.predict(x, noise=1.0)


@pytest.mark.parametrize(
    "likelihood", [gpytorch.likelihoods.PoissonLikelihood(), gpytorch.likelihoods.NegativeBinomialLikelihood()]
)
def test_the_counts_of_gpytorch_have_another_link(likelihood):
    with pytest.raises(tkrr.InputError, match=r"softplus\(f\).*gpytorch_tkrr.NegativeBinomialLikelihood"):
        tkrr.TKRR(None, None, likelihood)
