"""Noise that depends on the inputs: its own function, drawn with f."""

from __future__ import annotations

import math
import pickle

import gpytorch
import numpy as np
import pytest
import scipy.stats
import torch
import torch.distributed
from calibration import check_ranks_are_uniform
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.priors import LogNormalPrior
from processes import run_processes

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.bases.basis import sum_products
from gpytorch_tkrr.data.source import Batch
from gpytorch_tkrr.model.augmentation.log_chi_squared import MEANS, PROBABILITIES, VARIANCES, draw_components
from gpytorch_tkrr.model.likelihoods.noise_function import CONSTANT_PART, factors_of
from gpytorch_tkrr.model.likelihoods.registry import observe
from gpytorch_tkrr.model.likelihoods.skewed import FIRST_SHARE, OTHER_SHARE, SKEW_SD
from gpytorch_tkrr.model.likelihoods.skewed_noise import WIDTHS
from gpytorch_tkrr.sampling.priors import TAU_SHAPE
from gpytorch_tkrr.sampling.second_function import JointSampler


def varying(num=300, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(num, 2, dtype=torch.float64, generator=generator)
    f, sd = torch.sin(6 * x[:, 0]), 0.1 * torch.exp(2 * x[:, 1])
    return x, f + sd * torch.randn(num, dtype=torch.float64, generator=generator), f, sd


TAILS = [{}, {"student": True}, {"skewed": True}]


def fit(data, tails=None, num_draws=8, num_warmup=16, **kwargs):
    likelihood = tkrr.HeteroskedasticLikelihood(**(tails or {}), rank=2, num_basis=5)
    model = tkrr.TKRR(None, None, likelihood, rank=3, num_basis=6).double()
    return tkrr.fit_gibbs(model, data=data, num_draws=num_draws, num_warmup=num_warmup, seed=0, **kwargs)


# The mixture


def test_the_mixture_is_the_logarithm_of_a_squared_normal():
    mixture = list(zip(PROBABILITIES, MEANS, VARIANCES, strict=True))
    assert sum(PROBABILITIES) == pytest.approx(1.0, abs=1e-4)
    x = np.linspace(-25, 5, 2001)
    cdf = sum(p * scipy.stats.norm.cdf(x, m, math.sqrt(v)) for p, m, v in mixture)
    np.testing.assert_allclose(cdf, scipy.stats.chi2(1).cdf(np.exp(x)), atol=2.5e-4)


def test_components_are_drawn_by_their_probability():
    xi = torch.full((40000,), -3.0, dtype=torch.float64)
    mean, variance = draw_components(xi, 0, key=3)
    p = np.array(PROBABILITIES) * scipy.stats.norm.pdf(-3.0, MEANS, np.sqrt(VARIANCES))
    counts = np.array([int((mean == m).sum()) for m in MEANS])
    large = p / p.sum() > 1e-3
    expected = np.append((p / p.sum())[large], (p / p.sum())[~large].sum()) * len(xi)
    assert scipy.stats.chisquare(np.append(counts[large], counts[~large].sum()), expected).pvalue > 1e-3
    assert torch.equal(torch.cat([draw_components(xi[:7], 0, 3)[1], draw_components(xi[7:], 7, 3)[1]]), variance)


# Given g, it is a regression with known noise


@pytest.mark.parametrize("student", [False, True])
def test_distributions_are_those_of_scipy(student):
    observation = observe(tkrr.HeteroskedasticLikelihood(student=student))
    f = torch.tensor([[-1.0, 0.2], [0.5, 3.0]], dtype=torch.float64)
    parameters = {"noise": torch.tensor([0.49, 1.0]).double(), "deg_free": torch.tensor([3.0, 8.0]).double()}
    rows = {"factor": torch.tensor([[1.0, 4.0], [0.25, 9.0]]).double()}
    scale = np.sqrt(parameters["noise"].numpy()[:, None] * rows["factor"].numpy())
    expected = scipy.stats.t([[3.0], [8.0]], f, scale) if student else scipy.stats.norm(f, scale)
    y = torch.tensor([-2.0, 0.3, 5.0], dtype=torch.float64).reshape(-1, 1, 1)
    np.testing.assert_allclose(observation.log_density(y, f, parameters, rows), expected.logpdf(y), rtol=1e-9)
    np.testing.assert_allclose(observation.cdf(y, f, parameters, rows), expected.cdf(y), atol=1e-10)
    np.testing.assert_allclose(observation.variance(f, parameters, rows), expected.var(), rtol=1e-9)
    np.testing.assert_allclose(observation.noise_variance(f, parameters, rows), expected.var(), rtol=1e-9)
    many = {name: values[:1].expand(3000) for name, values in parameters.items()}
    wide = {"factor": rows["factor"][:1].expand(3000, 2)}
    draws = observation.sample(f[:1].expand(3000, 2), many, wide, torch.Generator().manual_seed(0))
    levels = expected.cdf(draws.unsqueeze(1))[:, 0]
    assert all(scipy.stats.kstest(levels[:, i], "uniform").pvalue > 1e-3 for i in range(2))


def test_targets_of_the_second_regression_are_log_squares():
    """With f known and g far off, t + g recovers the log squares up to the component that was drawn."""
    x, y, f, _ = varying(50)
    likelihood = tkrr.HeteroskedasticLikelihood()
    model = tkrr.TKRR(x, y, likelihood.double(), rank=1)
    second = model.observation.augmentation(2.0, 0.0).second
    parameters = {"noise": torch.tensor(0.3).double(), "log_noise.floor": torch.tensor(1e-4).double()}
    weight = torch.linspace(0.5, 2.0, 50, dtype=torch.float64)
    working = second.working(parameters, lambda batch, first_row: f, np.random.default_rng(0))
    g = torch.linspace(-1, 1, 50, dtype=torch.float64)
    t, w = working(Batch(x, y, weight), g, 0)
    rest = ((y - f).square() * weight / 0.3).log() - g - t  # the means of the components
    nearest = (rest.unsqueeze(-1) - torch.tensor(MEANS).double()).abs().min(-1)
    assert nearest.values.max() < 1e-6
    torch.testing.assert_close(1 / (w * weight), torch.tensor(VARIANCES).double()[nearest.indices])


def kernel_of_g(outputscale):
    kernel = ScaleKernel(RBFKernel(ard_num_dims=2)).double()
    kernel.outputscale, kernel.base_kernel.lengthscale = outputscale, 0.5
    for parameter in kernel.parameters():
        parameter.requires_grad_(False)
    return kernel


@pytest.mark.filterwarnings("ignore:All components have died")
@pytest.mark.parametrize("tails", ["normal", *(pytest.param(t, marks=pytest.mark.slow) for t in ("student", "skewed"))])
def test_ranks_are_uniform(tails):
    """
    Simulation-based calibration: the log noise at two points, and parameters of the tails. Wide components of narrow
    noise and narrow ones of wide noise are nearly the same: with skewed noise chains are longer.
    """
    x = torch.from_numpy(np.random.default_rng(0).random((30, 2)))
    watched = torch.tensor([[0.2, 0.7], [0.6, 0.3]], dtype=torch.float64)
    is_free = tails == "skewed"  # the level of the noise has a parameter of its own
    outputscale = 0.5 if is_free else 1.5

    def new():
        options = {} if tails == "normal" else {tails: True}
        if is_free:
            options["noise_prior"] = LogNormalPrior(-0.7, 1.0)
        kernel = kernel_of_g(outputscale)
        likelihood = tkrr.HeteroskedasticLikelihood(kernel, **options, rank=2, num_basis=5).double()
        likelihood.noise_domain, likelihood.num_basis = tkrr.Domain(torch.full((2,), 0.5), 1.1), (5, 5)
        likelihood.noise = 0.5
        likelihood.raw_noise.requires_grad_(is_free)
        return likelihood

    modes = new().separate().modes
    bases = [mode.basis for mode in modes]

    def simulate(f, rng):
        tau = torch.from_numpy(rng.gamma(TAU_SHAPE, 2 ** (1 / 2) / TAU_SHAPE, (2, 1)))
        sds = [(mode.covariance().variances.detach() * outputscale**0.5 / tau).sqrt() for mode in modes]
        factors = [sd * torch.from_numpy(rng.standard_normal(sd.shape)) for sd in sds]
        shape, noise, e = [], 0.5, rng.standard_normal(30)
        if tails == "student":
            shape = [2 + rng.gamma(2.0, 10.0)]
            e = rng.standard_t(shape[0], 30)
        elif tails == "skewed":
            noise = rng.lognormal(-0.7, 1.0)
            shares, skew = rng.dirichlet([FIRST_SHARE, *[OTHER_SHARE] * 5]), SKEW_SD * rng.standard_normal(6)
            k = rng.choice(6, 30, p=shares)
            e = np.array(WIDTHS)[k] * (skew[k] * np.abs(e) + rng.standard_normal(30))
            shape = [shares[0], float((shares * skew) @ WIDTHS)]
        y = f + math.sqrt(noise) * (sum_products(bases, factors, x) / 2).exp() * torch.from_numpy(e)
        return [*(sum_products(bases, factors, watched) + math.log(noise)).tolist(), *shape], y, new()

    def watch(posterior):
        drawn = posterior.parameters
        g = sum_products(bases, factors_of(drawn), watched) + drawn["noise"].log().unsqueeze(-1)  # (S, 2)
        shape = [drawn["deg_free"]] if tails == "student" else []
        if tails == "skewed":
            shape = [drawn["shares"][:, 0], (drawn["shares"] * drawn["skew"]) @ torch.tensor(WIDTHS).double()]
        return torch.cat([g, *(values.unsqueeze(-1) for values in shape)], -1)

    options = {"num_fits": 12 if tails == "normal" else 30, "num_warmup": 20, "num_draws": 40}
    if tails == "skewed":
        options = {"num_fits": 30, "num_warmup": 200, "num_draws": 300, "thin": 15}
    check_ranks_are_uniform(simulate, watch, num_rows=30, **options)


# Fits


def test_noise_of_inputs_is_found():
    pytest.importorskip("arviz")
    x, y, _, sd = varying(500)
    model = tkrr.TKRR(x, y, tkrr.HeteroskedasticLikelihood(), rank=3, num_basis=6)
    result = tkrr.fit_gibbs(model, num_draws=40, num_warmup=60, seed=0)
    prediction = model.predict(x)
    level = prediction.noise
    assert float((level.mean / sd).log().square().mean().sqrt()) < 0.15
    covered = (level.quantile(0.05) < sd) & (sd < level.quantile(0.95))
    assert float(covered.double().mean()) > 0.6
    assert {"log_noise", "f"} <= set(result.rhat) and "noise" not in result.rhat
    assert "log_noise (worst watched value)" in result.summary()
    expected = scipy.stats.norm(model.draws(x).detach(), level.draws.detach())
    np.testing.assert_allclose(prediction.log_prob(y).detach(), np.log(expected.pdf(y).mean(0)), rtol=1e-8)
    np.testing.assert_allclose(model.log_noise.draws(x), 2 * level.draws.detach().log(), rtol=1e-8)
    data = result.to_arviz(seed=0)
    np.testing.assert_allclose(data["log_likelihood"]["y"].values[0], expected.logpdf(y), rtol=1e-8)
    assert not [name for name in data["posterior"] if name.startswith("log_noise.")]
    gaussian = tkrr.TKRR(x, y, GaussianLikelihood(), rank=3, num_basis=6)
    tkrr.fit_gibbs(gaussian, num_draws=40, num_warmup=60, seed=0)
    new = varying(500, seed=1)
    scores = [each.predict(new[0].clamp(0.01, 0.99)).log_prob(new[1]).mean().item() for each in (gaussian, model)]
    assert scores[1] > scores[0] + 0.15
    # The noise is a function of the second input alone, and log-linear in it.
    total = tkrr.sobol_indices(model.log_noise).total.mean(0)
    assert total[1] > 0.8 and total[0] < 0.3
    effects = tkrr.main_effects(model.log_noise)
    assert float(effects.mean(1)[-1] - effects.mean(1)[0]) == pytest.approx(4.0, abs=1.0)
    values = model.log_noise.draws(torch.rand(20000, 2, dtype=torch.float64))
    uniform = tkrr.main_effects(model.log_noise, measure=tkrr.UniformMeasure(torch.zeros(2), torch.ones(2)))
    torch.testing.assert_close(uniform.expectation.double(), values.mean(-1), rtol=0, atol=0.03)
    # GPyTorch's call, with the inputs as GPyTorch's own noise models take them.
    marginal = model.likelihood(model.eval()(x[:5]), x[:5])
    assert isinstance(marginal, gpytorch.distributions.MultivariateNormal)
    noise = level.draws[:, :5].square().mean(0)
    torch.testing.assert_close(marginal.variance, model(x[:5]).variance + noise, rtol=1e-6, atol=1e-9)
    with pytest.raises(tkrr.InputError, match=r"likelihood\(model\(x\), x\)"):
        model.likelihood(model(x[:5]))


def test_effects_of_log_noise_with_heavy_tails():
    """The log of the squared scale is a function of the second input alone, with a slope of 4, whatever the tails."""
    x, _, f, sd = varying(600)
    noise = torch.from_numpy(scipy.stats.t(4.0).rvs(600, random_state=0))
    model = tkrr.TKRR(x, f + sd * noise, tkrr.HeteroskedasticLikelihood(student=True), rank=3, num_basis=6)
    tkrr.fit_gibbs(model, num_draws=30, num_warmup=60, seed=0)
    assert float(model.posterior.parameters["deg_free"].mean()) < 15
    total = tkrr.sobol_indices(model.log_noise).total.mean(0)
    assert total[1] > 0.8 and total[0] < 0.3
    measure = tkrr.UniformMeasure(torch.zeros(2), torch.ones(2))
    effects = tkrr.main_effects(model.log_noise, measure=measure)
    assert float(effects.mean(1)[-1] - effects.mean(1)[0]) == pytest.approx(4.0, abs=1.0)
    values = model.log_noise.draws(torch.rand(20000, 2, dtype=torch.float64))  # the effects are those of these draws
    torch.testing.assert_close(effects.expectation.double(), values.mean(-1), rtol=0, atol=0.03)
    # The sd of the noise is that of a Student distribution with this scale.
    nu = model.posterior.parameters["deg_free"].unsqueeze(-1)
    expected = model.log_noise.draws(x[:9]) + (nu / (nu - 2)).log()
    torch.testing.assert_close(2 * model.predict(x[:9]).noise.draws.detach().log(), expected)


def test_constant_noise_is_found_constant():
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(600, 3, dtype=torch.float64, generator=generator)
    y = 50 * (torch.sin(6 * x[:, 0]) + 0.3 * torch.randn(600, dtype=torch.float64, generator=generator)) + 1000
    scores = []
    for likelihood in (GaussianLikelihood(), tkrr.HeteroskedasticLikelihood()):
        model = tkrr.TKRR(x[:400], y[:400], likelihood, rank=3, num_basis=6)
        tkrr.fit_gibbs(model, num_draws=40, num_warmup=60, seed=0)
        prediction = model.predict(x[400:].clamp(0.01, 0.99))
        scores.append(prediction.log_prob(y[400:]).mean().item())
    assert scores[1] > scores[0] - 0.02
    assert float((prediction.noise.mean / 15).log().abs().max()) < 0.35


def test_g_is_freed_late():
    x, y, _, _ = varying(60)
    model = tkrr.TKRR(x, y, tkrr.HeteroskedasticLikelihood(student=True).double(), rank=1, num_basis=4)
    freed = []
    original = JointSampler.sweep

    def sweep(self, state, modes, adapt=0.0, progress=1.0):
        original(self, state, modes, adapt, progress)
        factors = factors_of(state.parameters)
        freed.append((progress, bool(factors[0].any()), math.isfinite(float(state.parameters["deg_free"]))))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JointSampler, "sweep", sweep)
        tkrr.fit_gibbs(model, num_draws=4, num_warmup=20, seed=0)
    assert [is_free for _, is_free, _ in freed] == [progress >= CONSTANT_PART for progress, _, _ in freed]
    assert [has_tails for *_, has_tails in freed] == [progress >= 0.75 for progress, _, _ in freed]


def test_row_weights_are_known_precisions():
    """Weights of the data multiply the precision: rows of weight 4 have half the noise."""
    x, y, f, sd = varying(400)
    weight = torch.where(torch.arange(400) % 2 == 0, 4.0, 1.0).double()
    y = f + (y - f) / sd * 0.3 / weight.sqrt()
    model = tkrr.TKRR(None, None, tkrr.HeteroskedasticLikelihood(rank=2), rank=3, num_basis=6).double()
    tkrr.fit_gibbs(model, data=(x, y, weight), num_draws=20, num_warmup=40, seed=0)
    assert float((model.predict(x).noise.mean / 0.3).log().abs().mean()) < 0.15


@pytest.mark.parametrize("tails", TAILS)
def test_draws_do_not_depend_on_batches_or_memory(tails):
    x, y, _, _ = varying(120)
    whole = fit((x, y), tails).posterior
    for data, options in (
        ([(x[:40], y[:40]), (x[40:], y[40:])], {}),
        ([(x[:90], y[:90]), (x[90:], y[90:])], {"memory": 0}),
    ):
        parts = fit(data, tails, **options).posterior
        for name, values in whole.parameters.items():
            torch.testing.assert_close(parts.parameters[name], values, rtol=1e-5, atol=1e-7)


def fit_parts(group):
    x, y, _, _ = varying(120)
    rows = slice(0, 50) if torch.distributed.get_rank(group) == 0 else slice(50, None)
    return [fit((x[rows], y[rows]), tails, group=group).posterior.parameters for tails in TAILS]


def test_draws_do_not_depend_on_processes(tmp_path):
    x, y, _, _ = varying(120)
    whole = [fit((x, y), tails).posterior.parameters for tails in TAILS]
    for found in run_processes(fit_parts, 2, tmp_path):
        for each, expected in zip(found, whole, strict=True):
            torch.testing.assert_close(each, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("stop", [6, 14])
def test_states_checkpoints_and_more_draws(tmp_path, stop):
    x, y, _, _ = varying(80)

    def new():
        likelihood = tkrr.HeteroskedasticLikelihood(student=True, rank=2).double()
        return tkrr.TKRR(x, y, likelihood, rank=2, num_basis=5)

    model, other, path, calls = new(), new(), tmp_path / "fit.pt", []

    class Stop(Exception):
        pass

    original = tkrr.Checkpoint.save

    def save(self, state, last):
        original(self, state, last=last)
        calls.append(1)
        if len(calls) == stop:
            raise Stop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tkrr.Checkpoint, "save", save)
        with pytest.raises(Stop):
            tkrr.fit_gibbs(model, num_draws=6, num_warmup=10, seed=0, checkpoint=tkrr.Checkpoint(path, seconds=0))
    before = {name: value.clone() for name, value in model.named_parameters()}
    fresh = dict(new().named_parameters())
    for name, value in before.items():  # what was interrupted has changed nothing
        assert torch.equal(value, fresh[name]), name
    tkrr.fit_gibbs(model, num_draws=6, num_warmup=10, seed=0, checkpoint=path)
    tkrr.fit_gibbs(other, num_draws=6, num_warmup=10, seed=0)
    torch.testing.assert_close(model.posterior.parameters, other.posterior.parameters, rtol=0, atol=0)
    loaded = tkrr.TKRR(None, None, tkrr.HeteroskedasticLikelihood(student=True)).double()
    loaded.load_state_dict(model.state_dict())
    torch.testing.assert_close(loaded.predict(x).log_prob(y), model.predict(x).log_prob(y))
    torch.testing.assert_close(loaded.predict(x).noise.draws, model.predict(x).noise.draws)
    with gpytorch.settings.num_likelihood_samples(7):
        marginal = loaded.likelihood(loaded.eval()(x[:5]), x[:5])
    assert isinstance(marginal, torch.distributions.StudentT) and marginal.batch_shape == (7, 5)
    torch.testing.assert_close(pickle.loads(pickle.dumps(model)).predict(x).mean, model.predict(x).mean)
    for each in (model, loaded):
        tkrr.fit_gibbs(each, data=(x, y), num_draws=6, num_warmup=0, seed=0)
        assert each.posterior.num_draws == 12
    torch.testing.assert_close(loaded.posterior.parameters, model.posterior.parameters)
    model.thin(3)
    assert model.predict(x[:2]).noise.draws.shape == (3, 2) and model.log_noise.draws(x[:2]).shape == (3, 2)


def test_outside_the_range_the_noise_is_held():
    x, y, _, _ = varying(100)
    model = fit((x, y)).model
    with pytest.warns(tkrr.ExtrapolationWarning):
        far = model.predict(torch.tensor([[0.5, 50.0], [0.5, 1.2]], dtype=torch.float64)).noise
    torch.testing.assert_close(far.mean[0], far.mean[1])


def test_equal_targets_do_not_draw_all_weight():
    """Where half of the targets are zero, a variance of zero there has an unbounded density: there is a floor."""
    x, _, f, _ = varying(300)
    y = 100 * f.clamp(min=0.0)
    model = tkrr.TKRR(x, y, tkrr.HeteroskedasticLikelihood(), rank=3, num_basis=8)
    tkrr.fit_gibbs(model, num_draws=10, num_warmup=40, seed=0)
    with torch.no_grad():
        prediction, unit = model.predict(x), float(y.std())
        smallest, mean = float(prediction.noise.draws.min()), prediction.mean
    assert 0.0099 * unit < smallest < 0.1 * unit
    assert float((mean - y).square().mean().sqrt()) < 0.3 * unit


def test_bad_requests():
    x, y, _, _ = varying(30)
    with pytest.raises(tkrr.InputError, match="fit_gibbs"):
        tkrr.fit_als(tkrr.TKRR(x, y, tkrr.HeteroskedasticLikelihood(), rank=1))
    with pytest.raises(tkrr.InputError, match="student=True"):
        tkrr.HeteroskedasticLikelihood(deg_free_prior=gpytorch.priors.GammaPrior(2.0, 0.1))
    with pytest.raises(tkrr.InputError, match="at least 1"):
        tkrr.HeteroskedasticLikelihood(rank=0)
    with pytest.raises(tkrr.NotFittedError, match="seen no data"):
        tkrr.HeteroskedasticLikelihood().separate()
    model = tkrr.TKRR(x, y, GaussianLikelihood(), rank=1, num_basis=4)
    with pytest.raises(tkrr.NotFittedError):
        model.log_noise.draws(x)
    tkrr.fit_gibbs(model, num_draws=4, num_warmup=4, seed=0)
    with pytest.raises(tkrr.InputError, match="HeteroskedasticLikelihood"):
        model.log_noise.draws(x)
    assert model.predict(x).noise.draws.shape == (4, 30)
    counts = tkrr.TKRR(x, y.abs().round(), tkrr.NegativeBinomialLikelihood(), rank=1, num_basis=4)
    tkrr.fit_gibbs(counts, num_draws=4, num_warmup=4, seed=0)
    with pytest.raises(tkrr.InputError, match="additive noise"):
        _ = counts.predict(x).noise
