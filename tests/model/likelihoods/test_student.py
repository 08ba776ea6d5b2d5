"""Student noise: distributions against SciPy, draws against the model, ALS by reweighting."""

from __future__ import annotations

import math

import gpytorch
import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
import torch.distributed
from calibration import check_ranks_are_uniform
from gpytorch.constraints import GreaterThan, Interval
from gpytorch.likelihoods import GaussianLikelihood, StudentTLikelihood
from gpytorch.priors import GammaPrior, LogNormalPrior
from processes import run_processes

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.data.keyed import row_uniform
from gpytorch_tkrr.data.source import Batch
from gpytorch_tkrr.model.augmentation.keyed import row_gamma
from gpytorch_tkrr.model.likelihoods.registry import observe
from gpytorch_tkrr.model.likelihoods.student import GAUSSIAN_PART, DegreesOfFreedom, StudentCDF

F = torch.tensor([[-1.0, 0.2, 2.0]], dtype=torch.float64)
SPREAD = torch.tensor([0.01, 1.0, 9.0], dtype=torch.float64)


def parameters(nu):
    return {"noise": torch.tensor([0.49], dtype=torch.float64), "deg_free": torch.tensor([nu], dtype=torch.float64)}


def outliers(num=240):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(num, 2, dtype=torch.float64, generator=generator)
    f = torch.sin(6 * x[:, 0]) + x[:, 1]
    y = f + 0.1 * torch.randn(num, dtype=torch.float64, generator=generator)
    y[::12] += 4.0
    return x, y, f


def fit(data, **kwargs):
    model = tkrr.TKRR(None, None, StudentTLikelihood(), rank=3, num_basis=6).double()
    return tkrr.fit_gibbs(model, data=data, num_draws=10, num_warmup=20, seed=0, **kwargs)


@pytest.mark.parametrize("nu", [2.1, 4.0, 30.0, 300.0])
def test_densities_are_those_of_scipy(nu):
    observation, t = observe(StudentTLikelihood()), scipy.stats.t(nu, F.numpy(), 0.7)
    y = torch.tensor([-200.0, -8.0, -1.1, 0.2, 1.0, 2.5, 40.0], dtype=torch.float64).reshape(-1, 1, 1)
    np.testing.assert_allclose(observation.log_density(y, F, parameters(nu), {}), t.logpdf(y), rtol=1e-9)
    np.testing.assert_allclose(observation.cdf(y, F, parameters(nu), {}), t.cdf(y), atol=1e-10)
    np.testing.assert_allclose(observation.variance(F, parameters(nu), {}), t.var().reshape(1, 3), rtol=1e-9)
    assert torch.equal(observation.mean(F, parameters(nu), {}), F)


@pytest.mark.parametrize("nu", [2.1, 4.0, 30.0])
def test_a_spread_of_f_is_integrated_over(nu):
    observation, z = observe(StudentTLikelihood()), np.linspace(-12, 12, 20001)
    y = torch.tensor([-50.0, -1.1, 0.2, 3.0], dtype=torch.float64).reshape(-1, 1, 1)
    rows, weight = {"spread": SPREAD}, scipy.stats.norm.pdf(z) * (z[1] - z[0])
    f = F.numpy()[..., None] + SPREAD.sqrt().numpy()[:, None] * z  # (1, 3, nodes)
    t = scipy.stats.t(nu, f, 0.7)
    density = (t.pdf(y.numpy()[..., None]) * weight).sum(-1)
    np.testing.assert_allclose(observation.log_density(y, F, parameters(nu), rows), np.log(density), rtol=1e-5)
    np.testing.assert_allclose(
        observation.cdf(y, F, parameters(nu), rows), (t.cdf(y.numpy()[..., None]) * weight).sum(-1), atol=1e-9
    )
    expected = scipy.stats.t(nu, 0, 0.7).var() + SPREAD
    np.testing.assert_allclose(observation.variance(F, parameters(nu), rows)[0], expected, rtol=1e-9)


def test_without_a_variance_it_is_infinite_and_quantiles_are_finite():
    x, y, _ = outliers(60)
    likelihood = StudentTLikelihood(deg_free_constraint=GreaterThan(0.5))
    likelihood.deg_free, likelihood.noise = 1.5, 0.04
    likelihood.raw_deg_free.requires_grad_(False)
    model = tkrr.TKRR(x, y, likelihood, rank=2, num_basis=5)
    result = tkrr.fit_gibbs(model, num_draws=10, num_warmup=20, seed=0)
    prediction = model.predict(x)
    assert torch.isinf(prediction.variance).all()
    quantiles = prediction.quantile(torch.tensor([0.05, 0.95]))
    torch.testing.assert_close(prediction.cdf(quantiles), torch.tensor([[0.05], [0.95]]).double().expand(2, 60))
    assert "deg_free" not in result.rhat and bool((model.posterior.parameters["deg_free"] == 1.5).all())


def test_samples_have_the_distribution():
    observation = observe(StudentTLikelihood())
    many = {name: values.expand(4000) for name, values in parameters(3.0).items()}
    for rows in ({}, {"spread": SPREAD}):
        draws = observation.sample(F.expand(4000, -1), many, rows, torch.Generator().manual_seed(0))
        levels = observation.cdf(draws, F, parameters(3.0), rows)
        assert all(scipy.stats.kstest(levels[:, i], "uniform").pvalue > 1e-3 for i in range(3))


@pytest.mark.parametrize("shape", [0.8, 1.5, 4.0, 200.0])
def test_row_gammas_are_quantiles(shape):
    u = row_uniform(5000, 10, key=3).numpy()
    np.testing.assert_allclose(row_gamma(shape, 5000, 10, key=3), scipy.special.gammaincinv(shape, u), rtol=1e-8)


def test_degrees_of_freedom_are_drawn_from_their_posterior():
    """The draws before a sweep, with f and noise known, against the normalised posterior on a fine grid."""
    rng = np.random.default_rng(0)
    e = torch.from_numpy(rng.standard_t(4.0, 60))
    batch = Batch(torch.zeros(60, 1), e)
    likelihood = StudentTLikelihood(deg_free_prior=GammaPrior(3.0, 0.3), deg_free_constraint=Interval(2.5, 40.0))
    for each in (likelihood, StudentTLikelihood()):
        augmentation = observe(each).augmentation(1.0, 0.0)
        state = {**augmentation.start(), "noise": torch.tensor(1.2, dtype=torch.float64)}
        draws = []
        for _ in range(2400):
            state = augmentation.before_sweep(state, lambda g, k: g(batch, torch.zeros(60).double(), 0), rng, 1.0)
            draws.append(float(state["deg_free"]))
        model = DegreesOfFreedom.of(each)
        grid = np.linspace(model.lower, min(model.upper, 300.0), 40001)[1:-1]
        log_p = scipy.stats.t.logpdf(e.numpy(), grid[:, None], 0, math.sqrt(1.2)).sum(-1)
        above = grid - model.lower
        prior = np.log(above) - 0.1 * above if model.log_prior is None else 2 * np.log(grid) - 0.3 * grid
        p = np.exp(log_p + prior - (log_p + prior).max())
        levels = np.interp(draws[8::8], grid, np.cumsum(p) / p.sum())
        assert scipy.stats.kstest(levels, "uniform").pvalue > 1e-3


def test_the_tails_are_freed_late():
    augmentation = observe(StudentTLikelihood()).augmentation(1.0, 0.0)
    rng, start = np.random.default_rng(0), augmentation.start()
    assert augmentation.before_sweep(start, None, rng, 0.9 * GAUSSIAN_PART) is start
    batch, f = Batch(torch.zeros(5, 1), torch.ones(5).double()), torch.zeros(5).double()
    assert augmentation.working(start, rng)(batch, f, 0)[1] is None
    freed = augmentation.before_sweep(start, lambda g, k: g(batch, f, 0), rng, GAUSSIAN_PART)
    assert 2 < float(freed["deg_free"]) < math.inf and augmentation.working(freed, rng)(batch, f, 0)[1] is not None


@pytest.mark.slow  # by default tests/sampling/test_joint_distribution.py draws from the same model
def test_ranks_are_uniform():
    def simulate(f, rng):
        noise, nu = rng.lognormal(0.0, 0.5), 2 + rng.gamma(2.0, 10.0)
        y = f + math.sqrt(noise) * torch.from_numpy(rng.standard_t(nu, len(f)))
        return [noise, nu], y, StudentTLikelihood(noise_prior=LogNormalPrior(0.0, 0.5))

    check_ranks_are_uniform(simulate, lambda p: torch.stack([p.parameters["noise"], p.parameters["deg_free"]], -1))


def test_outliers_do_not_disturb():
    pytest.importorskip("arviz")
    x, y, f = outliers()
    result = fit((x, y))
    posterior = result.posterior
    assert {"noise", "deg_free", "f"} <= set(result.rhat) and "deg_free" in result.summary()
    assert float((result.model.draws(x).mean(0) - f).detach().square().mean().sqrt()) < 0.1
    assert float(posterior.parameters["deg_free"].mean()) < 4 and float(posterior.noise.mean()) < 0.03
    likelihood = result.model.likelihood
    assert likelihood.deg_free.item() == pytest.approx(float(posterior.parameters["deg_free"].mean()))
    expected = scipy.stats.t(
        posterior.parameters["deg_free"][:, None], result.model.draws(x).detach(), posterior.noise.sqrt()[:, None]
    )
    np.testing.assert_allclose(result.log_predictive_density(x, y), np.log(expected.pdf(y).mean(0)), rtol=1e-8)
    data = result.to_arviz((x, y), seed=0)
    np.testing.assert_allclose(data["log_likelihood"]["y"].values[0], expected.logpdf(y), rtol=1e-8)
    assert "deg_free" in data["posterior"]


def test_gaussian_noise_is_found_to_be_gaussian():
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(400, 1, dtype=torch.float64, generator=generator)
    y = torch.sin(6 * x[:, 0]) + 0.3 * torch.randn(400, dtype=torch.float64, generator=generator)
    densities = []
    for likelihood in (GaussianLikelihood(), StudentTLikelihood()):
        model = tkrr.TKRR(x[:300], y[:300], likelihood, rank=2, num_basis=8)
        tkrr.fit_gibbs(model, num_draws=60, num_warmup=60, seed=0)
        densities.append(model.predict(x[300:]).log_prob(y[300:]).mean().item())
    assert densities[1] > densities[0] - 0.01 and float(model.posterior.parameters["deg_free"].mean()) > 8


def test_draws_do_not_depend_on_batches_or_memory():
    x, y, _ = outliers(150)
    whole = fit((x, y)).posterior
    for data, options in (
        ([(x[:40], y[:40]), (x[40:], y[40:])], {}),
        ([(x[:90], y[:90]), (x[90:], y[90:])], {"memory": 0}),
    ):
        parts = fit(data, **options).posterior
        for name, values in whole.parameters.items():
            torch.testing.assert_close(parts.parameters[name], values, rtol=1e-6, atol=1e-9)


def fit_part(group):
    x, y, _ = outliers(150)
    rows = slice(0, 60) if torch.distributed.get_rank(group) == 0 else slice(60, None)
    return fit((x[rows], y[rows]), group=group).posterior.parameters


def test_draws_do_not_depend_on_processes(tmp_path):
    x, y, _ = outliers(150)
    whole = fit((x, y)).posterior.parameters
    for each in run_processes(fit_part, 2, tmp_path):
        for name, values in whole.items():
            torch.testing.assert_close(each[name], values, rtol=1e-6, atol=1e-9)


def test_states_checkpoints_and_more_draws(tmp_path):
    x, y, _ = outliers(100)
    model = tkrr.TKRR(x, y, StudentTLikelihood(), rank=2, num_basis=5)
    path = tmp_path / "fit.pt"
    calls = []

    class Stop(Exception):
        pass

    original = tkrr.Checkpoint.save

    def save(self, state, last):
        original(self, state, last=last)
        calls.append(1)
        if len(calls) == 15:
            raise Stop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tkrr.Checkpoint, "save", save)
        with pytest.raises(Stop):
            tkrr.fit_gibbs(model, num_draws=6, num_warmup=14, seed=0, checkpoint=tkrr.Checkpoint(path, seconds=0))
    tkrr.fit_gibbs(model, num_draws=6, num_warmup=14, seed=0, checkpoint=path)
    other = tkrr.TKRR(x, y, StudentTLikelihood(), rank=2, num_basis=5)
    tkrr.fit_gibbs(other, num_draws=6, num_warmup=14, seed=0)
    torch.testing.assert_close(model.posterior.parameters, other.posterior.parameters)
    loaded = tkrr.TKRR(None, None, StudentTLikelihood()).double()
    loaded.load_state_dict(model.state_dict())
    torch.testing.assert_close(loaded.predict(x).log_prob(y), model.predict(x).log_prob(y))
    tkrr.fit_gibbs(model, num_draws=6, num_warmup=0, seed=0)
    assert model.posterior.num_draws == 12 and bool(torch.isfinite(model.posterior.parameters["deg_free"]).all())


def test_gpytorchs_call_returns_what_it_returns_for_other_models():
    x, y, _ = outliers(80)
    result = fit((x, y))
    with gpytorch.settings.num_likelihood_samples(7):
        marginal = result.model.likelihood(result.model.eval()(x[:5]))
    assert isinstance(marginal, torch.distributions.StudentT) and marginal.batch_shape == (7, 5)


def test_a_batch_of_likelihoods_is_refused():
    with pytest.raises(tkrr.InputError, match="noise variances"):
        tkrr.TKRR(None, None, StudentTLikelihood(batch_shape=torch.Size([2])))


# Alternating least squares


def als_model(x, y, nu=4.0, **kwargs):
    likelihood = StudentTLikelihood().double()
    likelihood.deg_free, likelihood.noise = nu, 0.01
    return tkrr.TKRR(x, y, likelihood, rank=3, num_basis=6, **kwargs)


def loss(model, x, y):
    """-2 s^2 log p, zero at zero, without the penalty."""
    t = scipy.stats.t(model.likelihood.deg_free.item(), 0, math.sqrt(model.likelihood.noise.item()))
    e = (y - model.mean_module(x) - model.posterior.mean(model.warped(x))).detach()
    return -2 * model.likelihood.noise.item() * float((t.logpdf(e) - t.logpdf(0.0)).sum())


def test_als_lowers_the_penalised_log_likelihood():
    x, y, f = outliers()
    model, reached = als_model(x, y), []
    result = tkrr.fit_als(
        model, max_sweeps=8, rel_tol=0.0, seed=0, callback=lambda model, number: reached.append(loss(model, x, y))
    )
    objective = np.array(result.objective)
    assert len(objective) == len(reached) and (np.diff(objective) <= 1e-9 * objective[:-1]).all()
    fixed = als_model(x, y)
    result = tkrr.fit_als(fixed, max_sweeps=8, rel_tol=0.0, seed=0, penalty=tkrr.FrobeniusPenalty(0.01))
    penalty = 0.01 * torch.stack([w.mT @ w for w in fixed.factors]).prod(0).sum().item()
    assert result.objective[-1] == pytest.approx(loss(fixed, x, y) + penalty, rel=1e-6)
    gaussian = tkrr.TKRR(x, y, GaussianLikelihood(), rank=3, num_basis=6)
    tkrr.fit_als(gaussian, max_sweeps=8, seed=0)

    def error(model):
        return (model.eval()(x).mean - f).square().mean().sqrt().item()

    assert error(model) < 0.06 < error(gaussian) / 2


def test_als_with_one_input_finds_the_minimum():
    """Against a general optimiser of the penalised log likelihood; one input makes it a robust ridge regression."""
    x, y, _ = outliers(80)
    x = x[:, :1]
    model = als_model(x, y, kernel=gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()).double())
    result = tkrr.fit_als(model, max_sweeps=300, rel_tol=1e-13, seed=0, penalty=tkrr.FrobeniusPenalty(0.01))
    mode = model.separate().modes[0]
    z = (mode.basis(x[:, 0]) * mode.covariance().variances.sqrt()).detach()  # (N, M)
    center, nu, noise = y.mean(), 4.0, model.likelihood.noise.item()
    w = torch.zeros(z.shape[1], dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS([w], max_iter=2000, tolerance_grad=1e-10, tolerance_change=1e-15)

    def value():
        e = y - center - z @ w
        return noise * (nu + 1) * torch.log1p(e.square() / (nu * noise)).sum() + 0.01 * w.square().sum()

    def closure():
        optimiser.zero_grad()
        value().backward()
        return value().detach()

    with torch.no_grad():
        w.copy_(torch.linalg.solve(z.T @ z + 0.01 * torch.eye(len(w)), z.T @ (y - center)))
    optimiser.step(closure)
    assert min(result.objective[-1], value().item()) > 0.999 * max(result.objective[-1], value().item())


def test_als_does_not_depend_on_batches_and_its_variance_has_the_information_of_the_tails():
    x, y, _ = outliers(100)
    whole, parts = als_model(x, y), als_model(None, None)
    tkrr.fit_als(whole, seed=0, max_sweeps=3)
    result = tkrr.fit_als(parts.double(), data=[(x[:30], y[:30]), (x[30:], y[30:])], seed=0, max_sweeps=3, memory=0)
    assert result.objective[-1] > 0
    torch.testing.assert_close(parts.eval()(x).mean, whole.eval()(x).mean, rtol=1e-6, atol=1e-8)
    before = whole(x).variance
    whole.compute_covariance()
    torch.testing.assert_close(whole(x).variance, before)
    prediction = whole.predict(x)
    assert bool((prediction.quantile(0.9) > prediction.mean).all())
    expected = whole(x).variance + 0.01 * 2  # nu / (nu - 2)
    torch.testing.assert_close(prediction.variance, expected, rtol=1e-4, atol=0)


def test_als_learns_the_noise_of_the_rows_that_are_no_outliers():
    x, y, _ = outliers()
    model = als_model(x, y)
    tkrr.fit_als(model, learn_hyperparameters=True, seed=0)
    assert model.likelihood.noise.item() < 0.05 and model.likelihood.deg_free.item() == pytest.approx(4.0)


def test_the_gradient_of_the_distribution_function_is_the_density():
    z = torch.tensor([-30.0, -1.0, 0.3, 4.0], dtype=torch.float64, requires_grad=True)
    nu = torch.tensor([[2.5], [40.0]], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda z: StudentCDF.apply(z, nu), (z,))
    expected = scipy.stats.t.cdf(z.detach().numpy(), nu.numpy())
    torch.testing.assert_close(StudentCDF.apply(z, nu), torch.from_numpy(expected), rtol=1e-10, atol=0.0)
