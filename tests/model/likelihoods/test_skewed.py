"""Skewed noise: distributions against SciPy, latent numbers and parameters against simulation, the mean of y."""

from __future__ import annotations

import pickle

import gpytorch
import numpy as np
import pytest
import scipy.stats
import torch

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.data.source import Batch
from gpytorch_tkrr.model.likelihoods.noise import NOISE_SCALE, NOISE_SHAPE, NoiseModel
from gpytorch_tkrr.model.likelihoods.registry import observe
from gpytorch_tkrr.model.likelihoods.skewed import FIRST_SHARE, OTHER_SHARE, SKEW_SD, SkewedAugmentation
from gpytorch_tkrr.model.likelihoods.skewed_noise import WIDTHS, SkewedNoise

SHARES = torch.tensor([[0.6, 0.1, 0.1, 0.1, 0.05, 0.05], [0.98, 0.01, 0.01, 0.0, 0.0, 0.0]], dtype=torch.float64)
SKEW = torch.tensor([[1.0, -2.0, 0.0, 4.0, 0.5, 0.5], [-3.0, 0.0, 1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
PARAMETERS = {"noise": torch.tensor([0.5, 2.0], dtype=torch.float64), "shares": SHARES, "skew": SKEW}
F = torch.tensor([[-1.0, 0.2, 2.0], [0.5, -0.3, 1.0]], dtype=torch.float64)
FACTOR = torch.tensor([[1.0, 0.25, 4.0], [2.0, 1.0, 0.1]], dtype=torch.float64)


def reference(draw, row):
    """Shares and SciPy's skewed normal distributions of one row in one draw."""
    sigma = float((PARAMETERS["noise"][draw] * FACTOR[draw, row]).sqrt())
    skew = SKEW[draw].numpy()
    scale = sigma * np.array(WIDTHS) * np.sqrt(1 + skew**2)
    return SHARES[draw].numpy(), scipy.stats.skewnorm(skew, float(F[draw, row]), scale)


def test_the_distribution_is_a_mixture_of_those_of_scipy():
    observation, rows = observe(tkrr.HeteroskedasticLikelihood(skewed=True)), {"factor": FACTOR}
    y = torch.tensor([-9.0, -1.0, 0.3, 4.0, 60.0], dtype=torch.float64)
    density = observation.log_density(y.reshape(-1, 1, 1), F, PARAMETERS, rows).exp()
    below = observation.cdf(y.reshape(-1, 1, 1), F, PARAMETERS, rows)
    mean, variance = observation.mean(F, PARAMETERS, rows), observation.variance(F, PARAMETERS, rows)
    torch.testing.assert_close(observation.noise_variance(F, PARAMETERS, rows), variance)
    for draw in range(2):
        for row in range(3):
            shares, parts = reference(draw, row)
            at = y.numpy()[:, None]
            np.testing.assert_allclose(density[:, draw, row], parts.pdf(at) @ shares, rtol=1e-9, atol=1e-14)
            np.testing.assert_allclose(below[:, draw, row], parts.cdf(at) @ shares, rtol=1e-7, atol=1e-12)
            first = parts.mean() @ shares
            np.testing.assert_allclose(mean[draw, row], first, rtol=1e-10)
            second = (parts.var() + parts.mean() ** 2) @ shares
            np.testing.assert_allclose(variance[draw, row], second - first**2, rtol=1e-10)
    many = {name: values[:1].expand(4000, *values.shape[1:]) for name, values in PARAMETERS.items()}
    wide = {"factor": FACTOR[:1].expand(4000, 3)}
    drawn = observation.sample(F[:1].expand(4000, 3), many, wide, torch.Generator().manual_seed(0))
    for row in range(3):
        shares, parts = reference(0, row)
        levels = parts.cdf(drawn[:, row].numpy()[:, None]) @ shares
        assert scipy.stats.kstest(levels, "uniform").pvalue > 1e-3


def test_a_spread_of_f_is_integrated_over():
    observation, spread = observe(tkrr.HeteroskedasticLikelihood(skewed=True)), torch.tensor([0.1, 1.0, 5.0]).double()
    z = np.linspace(-9, 9, 2001)
    weight = scipy.stats.norm.pdf(z) * (z[1] - z[0])
    nodes = torch.from_numpy(z).reshape(-1, 1, 1)
    y, rows = torch.tensor([0.3], dtype=torch.float64), {"factor": FACTOR, "spread": spread}
    moved = F + nodes * spread.sqrt()
    for name in ("log_density", "cdf"):
        made = getattr(observation, name)(y, F, PARAMETERS, rows)
        at = getattr(observation, name)(y, moved, PARAMETERS, {"factor": FACTOR})
        at = at.exp() if name == "log_density" else at
        expected = np.einsum("k,kij->ij", weight, at.numpy())
        np.testing.assert_allclose(made.exp() if name == "log_density" else made, expected, rtol=1e-6)
    plain = observation.variance(F, PARAMETERS, {"factor": FACTOR})
    torch.testing.assert_close(observation.variance(F, PARAMETERS, rows), plain + spread)


def test_the_distribution_function_has_a_gradient():
    f, square = F.clone().requires_grad_(), FACTOR.clone().requires_grad_()
    spread = torch.tensor([0.1, 0.5, 1.0], dtype=torch.float64).requires_grad_()

    def cdf(f, square, spread):
        return SkewedNoise(f, square, SHARES, SKEW, spread).cdf(torch.tensor([0.4], dtype=torch.float64))

    assert torch.autograd.gradcheck(cdf, (f, square, spread))


# The sampler


def augmentation():
    return SkewedAugmentation(NoiseModel(True, 0.0, np.inf), 1.0, 1.0)


def simulated(parameters, num, rng):
    """Components, h, residuals and row weights of a set of parameters."""
    index = rng.choice(len(WIDTHS), num, p=parameters["shares"].numpy())
    h, weight = np.abs(rng.standard_normal(num)), rng.uniform(0.2, 4.0, num)
    width, skew = np.array(WIDTHS)[index], parameters["skew"].numpy()[index]
    scale = np.sqrt(float(parameters["noise"]) / weight) * width
    y = scale * (skew * h + rng.standard_normal(num))
    return index, h, torch.from_numpy(y), torch.from_numpy(weight)


def test_latent_numbers_have_their_distribution():
    """Drawn given y, they are distributed as those that y was made from."""
    parameters = {name: values[0] for name, values in PARAMETERS.items()}
    index, h, y, weight = simulated(parameters, 20000, np.random.default_rng(0))
    batch, f, rng = Batch(torch.zeros(20000, 1), y, weight), torch.zeros(20000).double(), np.random.default_rng(1)
    u, drawn, chosen = augmentation()._latent(parameters, rng)(batch, f, 0)
    assert scipy.stats.ks_2samp(drawn, h).pvalue > 1e-3
    counts = np.bincount(chosen, minlength=len(WIDTHS))
    assert scipy.stats.chisquare(counts, SHARES[0].numpy() * 20000).pvalue > 1e-3
    for k in (0, 1, 3):
        assert scipy.stats.ks_2samp(drawn[chosen == k], h[index == k]).pvalue > 1e-3
        noise = u - SKEW[0, k] * drawn
        assert scipy.stats.kstest(noise[chosen == k], "norm").pvalue > 1e-3
    for square in augmentation().squares(parameters, rng)(batch, f, 0):
        assert scipy.stats.kstest(square * weight / 0.5, scipy.stats.chi2(1).cdf).pvalue > 1e-3
    e, w = augmentation().working(parameters, rng)(batch, f, 0)
    assert scipy.stats.kstest((e.square() * w * weight / 0.5), scipy.stats.chi2(1).cdf).pvalue > 1e-3


def test_parameters_and_targets_drawn_in_turn_keep_the_prior():
    """The joint distribution (Geweke 2004): targets given parameters, then parameters given targets."""
    rng, model = np.random.default_rng(0), augmentation()
    prior = [FIRST_SHARE, *[OTHER_SHARE] * (len(WIDTHS) - 1)]

    def fresh():
        shares = rng.dirichlet(prior).clip(1e-12)
        noise = NOISE_SCALE / rng.gamma(NOISE_SHAPE)
        skew = torch.from_numpy(SKEW_SD * rng.standard_normal(len(WIDTHS)))
        return {"noise": torch.tensor(noise).double(), "shares": torch.from_numpy(shares / shares.sum()), "skew": skew}

    found = []
    for _ in range(300):  # chains of their own, so that draws are independent
        parameters = fresh()
        for _ in range(10):
            _, _, y, weight = simulated(parameters, 12, rng)
            batch, f = Batch(torch.zeros(12, 1), y, weight), torch.zeros(12).double()
            parameters = model.before_sweep(
                parameters, lambda rows, size, batch=batch, f=f: rows(batch, f, 0), rng, progress=1.0
            )
        found.append([float(parameters["noise"]), *parameters["shares"][:2].tolist(), *parameters["skew"][:2].tolist()])
    noise, first, second, *skews = np.transpose(found)
    rest = sum(prior)
    assert scipy.stats.kstest(1 / noise, scipy.stats.gamma(NOISE_SHAPE, scale=1 / NOISE_SCALE).cdf).pvalue > 1e-3
    assert scipy.stats.kstest(first, scipy.stats.beta(FIRST_SHARE, rest - FIRST_SHARE).cdf).pvalue > 1e-3
    assert scipy.stats.kstest(second, scipy.stats.beta(OTHER_SHARE, rest - OTHER_SHARE).cdf).pvalue > 1e-3
    for skew in skews:
        assert scipy.stats.kstest(skew, scipy.stats.norm(0, SKEW_SD).cdf).pvalue > 1e-3


# Fits


def delays(num=500, seed=0):
    """Targets above f by an exponential number, whose size is a function of the second input; their mean."""
    rng = np.random.default_rng(seed)
    x = rng.random((num, 2))
    f, size = np.sin(6 * x[:, 0]), 0.3 * np.exp(1.5 * x[:, 1])
    y = f + size * rng.exponential(size=num) + 0.05 * rng.standard_normal(num)
    return tuple(torch.from_numpy(part) for part in (x, y, f + size))


def test_the_mean_of_skewed_targets_is_found():
    x, y, mean = delays()
    errors, densities = {}, {}
    new_x, new_y, new_mean = delays(1000, seed=1)
    for kind, options in {"student": {"student": True}, "skewed": {"skewed": True}}.items():
        model = tkrr.TKRR(x, y, tkrr.HeteroskedasticLikelihood(**options), rank=3, num_basis=6)
        tkrr.fit_gibbs(model, num_draws=40, num_warmup=80, seed=0)
        with torch.no_grad():
            prediction = model.predict(new_x.clamp(0.01, 0.99))
            errors[kind] = float((prediction.mean - new_mean).square().mean().sqrt())
            densities[kind] = float(prediction.log_prob(new_y).mean())
    assert errors["skewed"] < 0.6 * errors["student"] and errors["skewed"] < 0.25 * float(mean.std())
    assert densities["skewed"] > densities["student"] + 0.1
    levels = prediction.cdf(new_y).detach()
    assert 0.87 < float(((levels > 0.05) & (levels < 0.95)).double().mean()) < 0.97


def test_gaussian_noise_is_found_gaussian():
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.random((800, 2)))
    y = torch.sin(6 * x[:, 0]) + 0.3 * torch.from_numpy(rng.standard_normal(800))
    scores = []
    for likelihood in (tkrr.HeteroskedasticLikelihood(), tkrr.HeteroskedasticLikelihood(skewed=True)):
        model = tkrr.TKRR(x[:500], y[:500], likelihood, rank=3, num_basis=6)
        tkrr.fit_gibbs(model, num_draws=40, num_warmup=80, seed=0)
        with torch.no_grad():
            scores.append(float(model.predict(x[500:].clamp(0.01, 0.99)).log_prob(y[500:]).mean()))
    assert scores[1] > scores[0] - 0.03


def test_states_and_calls():
    x, y, _ = delays(100)
    likelihood = tkrr.HeteroskedasticLikelihood(skewed=True, rank=2).double()
    model = tkrr.TKRR(x, y, likelihood, rank=2, num_basis=5)
    tkrr.fit_gibbs(model, num_draws=6, num_warmup=10, seed=0)
    loaded = tkrr.TKRR(None, None, tkrr.HeteroskedasticLikelihood(skewed=True)).double()
    loaded.load_state_dict(model.state_dict())
    torch.testing.assert_close(loaded.predict(x).log_prob(y), model.predict(x).log_prob(y))
    torch.testing.assert_close(pickle.loads(pickle.dumps(model)).predict(x).mean, model.predict(x).mean)
    torch.testing.assert_close(likelihood.shares, model.posterior.parameters["shares"].mean(0))
    torch.testing.assert_close(model.log_noise.draws(x), 2 * model.predict(x).noise.draws.log(), rtol=1e-6, atol=1e-6)
    for each in (model, loaded):
        tkrr.fit_gibbs(each, data=(x, y), num_draws=6, num_warmup=0, seed=0)
    torch.testing.assert_close(loaded.posterior.parameters, model.posterior.parameters)
    assert model.posterior.num_draws == 12
    with gpytorch.settings.num_likelihood_samples(7):
        marginal = loaded.likelihood(loaded.eval()(x[:5]), x[:5])
    assert isinstance(marginal, SkewedNoise) and marginal.batch_shape == (7, 5)
    assert marginal.sample(torch.Size([3])).shape == (3, 7, 5) and marginal.log_prob(y[:5]).shape == (7, 5)
    with pytest.raises(tkrr.InputError, match="student or skewed"):
        tkrr.HeteroskedasticLikelihood(student=True, skewed=True)
