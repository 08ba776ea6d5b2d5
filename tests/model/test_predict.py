"""The distribution of new observations: mixtures against scipy, one object for every likelihood and posterior."""

from __future__ import annotations

import gpytorch
import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from gpytorch.likelihoods import BernoulliLikelihood, FixedNoiseGaussianLikelihood, GaussianLikelihood

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.model import prediction as prediction_module
from gpytorch_tkrr.model.likelihoods.registry import observe
from gpytorch_tkrr.model.prediction import Prediction, find_root

S, N = 7, 11


def mixture(likelihood, spread=None, seed=0):
    """A prediction of S components at N points, and what it is made of."""
    generator = torch.Generator().manual_seed(seed)
    f = 2 * torch.randn(S, N, dtype=torch.float64, generator=generator)
    noise = 0.1 + torch.rand(S, dtype=torch.float64, generator=generator)
    x = torch.arange(N, dtype=torch.float64).unsqueeze(-1)
    made = Prediction(
        observe(likelihood),
        lambda x: (f[:, x[:, 0].long()], {} if spread is None else {"spread": spread}),
        {"noise": noise},
        x,
        {},
    )
    return made, f.numpy(), noise.numpy()


def test_gaussian_mixture_equals_scipy():
    made, f, noise = mixture(GaussianLikelihood())
    components = scipy.stats.norm(f, np.sqrt(noise)[:, None])
    y = torch.linspace(-3, 3, N, dtype=torch.float64)
    np.testing.assert_allclose(made.mean, f.mean(0), rtol=1e-12)
    second = components.moment(2).mean(0)
    np.testing.assert_allclose(made.variance, second - f.mean(0) ** 2, rtol=1e-10)
    np.testing.assert_allclose(made.cdf(y), components.cdf(y).mean(0), rtol=1e-10)
    np.testing.assert_allclose(made.log_prob(y), np.log(components.pdf(y).mean(0)), rtol=1e-10)
    many = torch.randn(4, N, dtype=torch.float64)  # several targets for each point
    np.testing.assert_allclose(made.cdf(many)[2], made.cdf(many[2]), rtol=1e-12)
    assert made.log_prob(many).shape == (4, N)


@pytest.mark.parametrize("q", [1e-9, 0.02, 0.5, 0.9, 1 - 1e-9])
def test_quantiles_invert_the_distribution_function(q):
    made, _, _ = mixture(GaussianLikelihood())
    np.testing.assert_allclose(made.cdf(made.quantile(q)), np.full(N, q), rtol=1e-9 if q < 0.99 else 1e-15)


def test_confidence_region_holds_95_percent():
    made, _, _ = mixture(GaussianLikelihood())
    lower, upper = made.confidence_region()
    np.testing.assert_allclose(made.cdf(upper) - made.cdf(lower), np.full(N, 0.95), rtol=1e-9)


def test_quantiles_of_targets_are_the_targets():
    made, _, _ = mixture(GaussianLikelihood())
    y = torch.linspace(-2, 2, N, dtype=torch.float64)
    levels = made.cdf(y)
    back = torch.stack([made.quantile(level)[i] for i, level in enumerate(levels)])
    torch.testing.assert_close(back, y, rtol=1e-9, atol=1e-9)
    both = made.quantile(torch.tensor([0.1, 0.8], dtype=torch.float64))
    assert both.shape == (2, N) and bool((both[0] < both[1]).all())
    torch.testing.assert_close(both[1], made.quantile(0.8), rtol=1e-12, atol=1e-12)


def test_components_far_apart_and_very_narrow():
    """Two peaks of width 1e-6 at -1000 and 1000: the distribution function is flat in between."""
    x = torch.zeros(1, 1, dtype=torch.float64)
    f = torch.tensor([[-1000.0], [1000.0]], dtype=torch.float64)
    noise = torch.full((2,), 1e-12, dtype=torch.float64)
    made = Prediction(observe(GaussianLikelihood()), lambda x: (f, {}), {"noise": noise}, x, {})
    for q, center in ((0.2, -1000.0), (0.8, 1000.0)):
        expected = center + 1e-6 * scipy.stats.norm.ppf(0.4 if q < 0.5 else 0.6)
        np.testing.assert_allclose(float(made.quantile(q)), expected, rtol=1e-12)


def test_samples_have_the_distribution():
    made, _, _ = mixture(GaussianLikelihood())
    draws = made.sample(4000, seed=1)
    levels = torch.stack([made.cdf(draw) for draw in draws]).numpy()
    assert all(scipy.stats.kstest(levels[:, i], "uniform").pvalue > 1e-3 for i in range(N))
    assert torch.equal(draws, made.sample(4000, seed=1)) and not torch.equal(draws, made.sample(4000, seed=2))


def test_variance_of_f_is_integrated_out():
    """A spread of each component, against numerical integrals over f."""
    spread = torch.linspace(0.1, 3.0, N, dtype=torch.float64)
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    weights = weights / weights.sum()
    for likelihood, y in ((GaussianLikelihood(), 0.7), (BernoulliLikelihood(), 1.0)):
        made, f, noise = mixture(likelihood, spread)
        moved = f[..., None] + np.sqrt(spread.numpy())[:, None] * nodes  # (S, N, nodes)
        scale = np.sqrt(noise)[:, None, None]
        if y == 1.0:
            density = scipy.special.ndtr(moved / scale)
        else:
            density = scipy.stats.norm.pdf(y, moved, scale)
        expected = (density @ weights).mean(0)
        tolerance = 1e-3 if y == 1.0 else 1e-2  # of the integral, where the noise is small beside the spread
        np.testing.assert_allclose(made.log_prob(torch.full((N,), y)).exp(), expected, rtol=tolerance)


def test_two_classes():
    made, f, noise = mixture(BernoulliLikelihood())
    p = scipy.special.ndtr(f / np.sqrt(noise)[:, None]).mean(0)
    np.testing.assert_allclose(made.mean, p, rtol=1e-12)
    np.testing.assert_allclose(made.variance, p * (1 - p), rtol=1e-10)
    for ones, zeros in ((1.0, 0.0), (1.0, -1.0)):
        np.testing.assert_allclose(made.log_prob(torch.full((N,), ones)), np.log(p), rtol=1e-10)
        np.testing.assert_allclose(made.log_prob(torch.full((N,), zeros)), np.log(1 - p), rtol=1e-10)
    for q in (0.1, 0.5, 0.9):
        np.testing.assert_array_equal(made.quantile(q), (1 - p < q).astype(float))
    share = made.sample(4000, seed=0).mean(0).numpy()
    assert np.all(np.abs(share - p) < 5 * np.sqrt(p * (1 - p) / 4000) + 1e-9)


def test_pieces_change_nothing(monkeypatch):
    whole, _, _ = mixture(GaussianLikelihood())
    y = torch.zeros(N, dtype=torch.float64)
    expected = [whole.mean, whole.variance, whole.quantile(0.3), whole.cdf(y), whole.log_prob(y)]
    monkeypatch.setattr(prediction_module, "PIECE_ROWS", 4)
    for kept in (prediction_module.MAX_KEPT, 0):
        monkeypatch.setattr(prediction_module, "MAX_KEPT", kept)
        made, _, _ = mixture(GaussianLikelihood())
        for value, known in zip(
            [made.mean, made.variance, made.quantile(0.3), made.cdf(y), made.log_prob(y)], expected, strict=True
        ):
            torch.testing.assert_close(value, known, rtol=1e-12, atol=1e-12)
        assert made.sample(3, seed=0).shape == (3, N)
        assert (made._kept is None) == (kept == 0)


def test_find_root_of_steps_and_steep_functions():
    target = torch.tensor([0.3, 5.0, -2.0], dtype=torch.float64)
    low, high = torch.full_like(target, -100.0), torch.full_like(target, 100.0)
    step = find_root(lambda y: torch.where(y >= target, 1.0, -1.0).double(), low, high, torch.tensor(1e-15))
    torch.testing.assert_close(step, target, rtol=1e-14, atol=1e-14)
    assert bool((step >= target).all())
    steep = find_root(lambda y: torch.tanh(1e6 * (y - target)), low, high, torch.tensor(1e-15))
    torch.testing.assert_close(steep, target, rtol=1e-12, atol=1e-12)


# Fitted models


def data(num=80, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(num, 2, dtype=dtype, generator=generator)
    y = 5 + torch.sin(6 * x[:, 0]) * x[:, 1] + 0.1 * torch.randn(num, dtype=dtype, generator=generator)
    return x, y


@pytest.fixture(scope="module")
def gibbs():
    x, y = data()
    model = tkrr.TKRR(x, y, GaussianLikelihood(), rank=3, num_basis=7)
    return tkrr.fit_gibbs(model, num_draws=12, num_warmup=12, seed=0), x, y


def test_after_gibbs_it_is_the_mixture_over_the_draws(gibbs):
    result, x, y = gibbs
    model, posterior = result.model, result.posterior
    f = model.draws(x[:20]).detach().numpy()
    components = scipy.stats.norm(f, posterior.noise.sqrt().numpy()[:, None])
    prediction = model.predict(x[:20])
    np.testing.assert_allclose(prediction.mean.detach(), f.mean(0), rtol=1e-10)
    np.testing.assert_allclose(prediction.log_prob(y[:20]).detach(), np.log(components.pdf(y[:20]).mean(0)), rtol=1e-9)
    np.testing.assert_allclose(result.log_predictive_density(x, y), model.predict(x).log_prob(y).detach(), rtol=1e-12)
    variance = float(posterior.noise.mean()) + f.var(0)
    np.testing.assert_allclose(prediction.variance.detach(), variance, rtol=1e-9)


@pytest.mark.parametrize("noise", [1e-4, 0.3])
def test_few_draws_stand_for_a_smooth_density_where_the_noise_is_small(noise):
    """f is normal and known by 60 draws: the density must come near the exact one, not be a row of spikes."""
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(60, 400, dtype=torch.float64, generator=generator)
    observation = observe(GaussianLikelihood())
    parameters = {"noise": torch.full((60,), noise, dtype=torch.float64)}
    y = torch.randn(400, dtype=torch.float64, generator=generator) * (1 + noise) ** 0.5
    x = torch.zeros(400, 1, dtype=torch.float64)
    spiky, smooth = (
        Prediction(observation, lambda x: (f, {}), parameters, x, {}, is_sample=each) for each in (False, True)
    )
    exact = torch.distributions.Normal(0.0, (1 + noise) ** 0.5).log_prob(y).mean()
    assert abs(smooth.log_prob(y).mean() - exact) < 0.05
    if noise < 0.01:
        assert spiky.log_prob(y).mean() < exact - 0.5
    torch.testing.assert_close(smooth.variance, spiky.variance)
    grid = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    density = smooth.log_prob(grid.unsqueeze(-1).expand(-1, 400)).exp()
    step = grid[1] - grid[0]
    torch.testing.assert_close(density.sum(0) * step, torch.ones(400, dtype=torch.float64), rtol=1e-4, atol=0)
    mean = (density * grid.unsqueeze(-1)).sum(0) * step
    torch.testing.assert_close(mean, f.mean(0), rtol=0, atol=1e-4)
    second = (density * (grid.unsqueeze(-1) - mean).square()).sum(0) * step
    torch.testing.assert_close(second, spiky.variance, rtol=1e-3, atol=0)
    torch.testing.assert_close(smooth.cdf(smooth.quantile(0.2)), torch.full((400,), 0.2, dtype=torch.float64))


def test_shapes_dtypes_and_gradients(gibbs):
    model = gibbs[0].model
    x = torch.rand(3, 4, 2, dtype=torch.float64, requires_grad=True)
    prediction = model.predict(x)
    assert prediction.mean.shape == prediction.quantile(0.5).shape == (3, 4)
    assert prediction.quantile(torch.tensor([[0.1, 0.9]])).shape == (1, 2, 3, 4)
    assert prediction.sample(5, seed=0).shape == (5, 3, 4) and prediction.cdf(torch.zeros(6, 3, 4)).shape == (6, 3, 4)
    (gradient,) = torch.autograd.grad(prediction.mean.sum(), x)
    (expected,) = torch.autograd.grad(model.draws(x).mean(0).sum(), x)
    torch.testing.assert_close(gradient, expected)
    empty = model.predict(torch.empty(0, 2, dtype=torch.float64))
    assert empty.mean.shape == empty.quantile(0.5).shape == (0,) and empty.sample(2).shape == (2, 0)
    half = model.predict(x.detach().float())
    assert half.mean.dtype == half.quantile(0.5).dtype == half.log_prob(torch.zeros(3, 4)).dtype == torch.float32


def test_gradients_are_those_of_the_inputs_alone(gibbs):
    """No gradients unless the inputs ask for them, and they are not lost where quantiles are asked for first."""
    model = gibbs[0].model
    prediction = model.predict(torch.rand(5, 2, dtype=torch.float64))
    for value in (prediction.mean, prediction.stddev, prediction.log_prob(torch.zeros(5)), prediction.noise.mean):
        assert not value.requires_grad
    x = torch.rand(5, 2, dtype=torch.float64, requires_grad=True)
    first, later = model.predict(x), model.predict(x)
    later.quantile(0.5)
    (expected,) = torch.autograd.grad(first.variance.sum(), x)
    (gradient,) = torch.autograd.grad(later.variance.sum(), x)
    assert expected.abs().max() > 0
    torch.testing.assert_close(gradient, expected)


def test_bad_requests(gibbs):
    model, x = gibbs[0].model, gibbs[1]
    with pytest.raises(tkrr.InputError, match="between 0 and 1"):
        model.predict(x).quantile(1.0)
    with pytest.raises(tkrr.InputError, match="shape"):
        model.predict(x).log_prob(torch.zeros(3))
    with pytest.raises(tkrr.InputError, match="GaussianLikelihood nothing is given"):
        model.predict(x, noise=0.1)
    with pytest.raises(tkrr.InputError, match="NaN"):
        model.predict(torch.full((2, 2), torch.nan))
    with pytest.raises(tkrr.NotFittedError, match="fit"):
        tkrr.TKRR(x, gibbs[2], GaussianLikelihood()).predict(x)


def test_after_als_it_is_the_gaussian_of_the_likelihood():
    x, y = data()
    likelihood = GaussianLikelihood()
    likelihood.noise = 0.02
    model = tkrr.TKRR(x, y, likelihood, rank=3, num_basis=7)
    tkrr.fit_als(model, seed=0)
    with torch.no_grad():
        expected = likelihood(model.eval()(x))
        prediction = model.predict(x)
        torch.testing.assert_close(prediction.mean, expected.mean, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(prediction.variance, expected.variance, rtol=1e-6, atol=0)
        normal = scipy.stats.norm(prediction.mean.numpy(), prediction.stddev.numpy())
        np.testing.assert_allclose(prediction.quantile(0.9), normal.ppf(0.9), rtol=1e-9)
        np.testing.assert_allclose(prediction.log_prob(y), normal.logpdf(y), rtol=1e-7, atol=1e-9)


def test_classes_after_als_are_those_of_the_sign_of_the_response():
    x, y = data()
    labels = (y > y.median()).double()
    model = tkrr.TKRR(x, labels, BernoulliLikelihood(), rank=3, num_basis=7)
    tkrr.fit_als(model, seed=0, penalty=tkrr.FrobeniusPenalty(1e-2))
    with torch.no_grad():
        response = model.eval()(x)
        sd = (response.variance + model.posterior.noise).sqrt()  # the residuals' variance
        p = model.predict(x).mean
    np.testing.assert_allclose(p, scipy.special.ndtr((response.mean / sd).numpy()), rtol=1e-7)
    torch.testing.assert_close(model.class_probabilities(x).detach(), p)
    assert bool(((p > 0.5) == (response.mean > 0)).all())


@pytest.mark.filterwarnings("ignore::gpytorch_tkrr.OutOfDomainWarning")
def test_variance_that_the_basis_does_not_represent_is_part_of_it():
    x, y = data()
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()).double()
    model = tkrr.TKRR(x, y, GaussianLikelihood(), kernel=kernel, rank=2, num_basis=7)
    tkrr.fit_gibbs(model, num_draws=6, num_warmup=6, seed=0)
    far = torch.full((1, 2), 50.0, dtype=torch.float64)
    with torch.no_grad():
        missing = model._missing_variance(model.warped(far))
        f = model.draws(far)
        variance = model.posterior.noise.mean() + f.var(0, unbiased=False) + missing
        torch.testing.assert_close(model.predict(far).variance, variance)
        assert float(missing) > float(model.posterior.noise.max())
        density = scipy.stats.norm(f.numpy(), (model.posterior.noise.unsqueeze(-1) + missing).sqrt().numpy()).pdf(4.0)
        np.testing.assert_allclose(model.predict(far).log_prob(torch.tensor([4.0])).exp(), density.mean(0), rtol=1e-9)


def test_covariance_after_gibbs_is_refused_with_a_sentence(gibbs):
    with pytest.raises(tkrr.InputError, match="fitted by fit_als"):
        gibbs[0].model.compute_covariance()


# Known noise of each row


@pytest.fixture(scope="module")
def fixed():
    x, _ = data()
    generator = torch.Generator().manual_seed(5)
    noise = torch.where(torch.arange(80) % 2 == 0, 0.01, 1.0).double()
    y = torch.sin(6 * x[:, 0]) * x[:, 1] + noise.sqrt() * torch.randn(80, dtype=torch.float64, generator=generator)
    model = tkrr.TKRR(x, y, FixedNoiseGaussianLikelihood(noise), rank=3, num_basis=7)
    return tkrr.fit_gibbs(model, num_draws=12, num_warmup=12, seed=0), x, y, noise


def test_training_rows_have_their_own_noise(fixed):
    result, x, y, noise = fixed
    f = result.model.draws(x).detach().numpy()
    expected = np.log(scipy.stats.norm(f, noise.sqrt().numpy()).pdf(y).mean(0))
    np.testing.assert_allclose(result.log_predictive_density(x, y), expected, rtol=1e-9)
    wrong = np.log(scipy.stats.norm(f, noise.mean().sqrt().numpy()).pdf(y).mean(0))
    assert expected.sum() > wrong.sum() + 20
    samples = result.model.predict(x).sample(3000, seed=0)
    ratio = (samples.var(0) / (noise + torch.from_numpy(f).var(0, unbiased=False))).numpy()
    assert 0.85 < ratio.min() and ratio.max() < 1.15


def test_new_rows_need_their_noise(fixed):
    result, x, y, noise = fixed
    with pytest.raises(tkrr.InputError, match=r"80 training rows, not those of the 10 rows.*noise="):
        result.model.predict(x[:10])
    with pytest.raises(tkrr.InputError, match="noise="):
        result.log_predictive_density(x[:10], y[:10])
    given = result.model.predict(x[:10], noise=noise[:10]).log_prob(y[:10])
    torch.testing.assert_close(given, result.model.predict(x).log_prob(y)[:10])
    one = result.model.predict(x[:10], noise=0.25).variance
    batch = result.model.predict(x[:10].reshape(2, 5, 2), noise=torch.full((2, 5), 0.25)).variance
    torch.testing.assert_close(batch.flatten(), one)
    for bad in (torch.ones(3), -1.0, torch.nan):
        with pytest.raises(tkrr.InputError, match="one finite variance"):
            result.model.predict(x[:10], noise=bad)


def test_after_als_known_noise_is_that_of_gpytorch(fixed):
    _, x, y, noise = fixed
    model = tkrr.TKRR(x, y, FixedNoiseGaussianLikelihood(noise), rank=2, num_basis=6)
    tkrr.fit_als(model, seed=0)
    with torch.no_grad():
        new = torch.rand(5, 2, dtype=torch.float64)
        known = torch.linspace(0.1, 0.5, 5, dtype=torch.float64)
        expected = model.likelihood(model.eval()(new), noise=known)
        torch.testing.assert_close(model.predict(new, noise=known).variance, expected.variance, rtol=1e-6, atol=0)
        torch.testing.assert_close(model.predict(x).variance, model.likelihood(model(x)).variance, rtol=1e-6, atol=0)


def test_export_has_the_noise_of_each_row(fixed):
    pytest.importorskip("arviz")
    result, x, y, noise = fixed
    exported = result.to_arviz(seed=0)
    f = result.model.draws(x).detach().numpy()
    expected = scipy.stats.norm(f, noise.sqrt().numpy()).logpdf(y)
    np.testing.assert_allclose(exported.log_likelihood["y"].values[0], expected, rtol=1e-9)
    spread = (exported.posterior_predictive["y"].values[0] - f).std(0)
    assert 0.05 < spread[::2].mean() < 0.15 and 0.7 < spread[1::2].mean() < 1.3
    with pytest.raises(tkrr.InputError, match="noise="):
        result.to_arviz(data=(x[:5], y[:5]))
    part = result.to_arviz(data=(x[:5], y[:5]), noise=noise[:5])
    np.testing.assert_allclose(part.log_likelihood["y"].values[0], expected[:, :5], rtol=1e-9)


def test_a_saved_model_predicts_the_same(gibbs):
    result, x, _ = gibbs
    fresh = tkrr.TKRR(None, None, GaussianLikelihood().double(), rank=3, num_basis=7)
    fresh.load_state_dict(result.model.state_dict())
    for name in ("mean", "variance"):
        torch.testing.assert_close(getattr(fresh.predict(x), name), getattr(result.model.predict(x), name))
    assert isinstance(fresh.likelihood, gpytorch.likelihoods.GaussianLikelihood)
