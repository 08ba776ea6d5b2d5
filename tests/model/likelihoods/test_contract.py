"""What the sampler asks of an observation model suffices for one it does not know: outliers with a label."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import torch
import torch.distributed
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    FixedNoiseGaussianLikelihood,
    GaussianLikelihood,
    LaplaceLikelihood,
)
from processes import run_processes

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.data.keyed import row_uniform
from gpytorch_tkrr.data.source import Batch
from gpytorch_tkrr.model.likelihoods import registry
from gpytorch_tkrr.model.likelihoods.augmented import Augmentation
from gpytorch_tkrr.model.likelihoods.base import Observation
from gpytorch_tkrr.model.likelihoods.gaussian import GaussianObservation
from gpytorch_tkrr.model.likelihoods.noise import NoiseModel
from gpytorch_tkrr.model.likelihoods.registry import observe, register

#: Of the outliers, in units of the noise.
WIDTH = 10.0


class Contaminated(GaussianLikelihood):
    """A likelihood of the user's own: an unknown share of the rows has ten times the noise's standard deviation."""

    share = 0.1

    def forward(self, function_samples, *params, **kwargs):
        sd = self.noise.sqrt() * torch.tensor([1.0, WIDTH])
        shares = torch.distributions.Categorical(torch.tensor([1 - self.share, self.share]))
        parts = torch.distributions.Normal(function_samples.unsqueeze(-1), sd)
        return torch.distributions.MixtureSameFamily(shares, parts)


class ContaminatedObservation(GaussianObservation):
    def augmentation(self, scale, offset):
        return ContaminatedAugmentation(NoiseModel.of(self.likelihood, scale**2), scale**2)

    def log_density(self, y, f, parameters, rows):
        sd, share = parameters["noise"][..., None].sqrt(), parameters["share"][..., None]
        clean, wide = (torch.distributions.Normal(f, scale).log_prob(y) for scale in (sd, WIDTH * sd))
        return torch.logaddexp((1 - share).log() + clean, share.log() + wide)


class ContaminatedAugmentation(Augmentation):
    """Labels given residuals, drawn anew for each visit; their share from its Beta distribution, before each sweep."""

    free = ("noise", "share")

    def __init__(self, model, unit):
        self.model, self.unit = model, unit

    def start(self):
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in (("noise", 1.0), ("share", 0.01))}

    def natural(self, parameters):
        return {**parameters, "noise": parameters["noise"] * self.unit}

    def noise(self, parameters):
        return float(parameters["noise"])

    def before_sweep(self, parameters, sum_rows, rng, progress):
        assert 0 <= progress <= 1
        weighted = self.working(parameters, rng)

        def count(batch: Batch, f: torch.Tensor, first_row: int) -> torch.Tensor:
            is_wide = (weighted(batch, f, first_row)[1] < 1).double()
            return torch.stack([is_wide.sum(), (1 - is_wide).sum()])

        wide, clean = sum_rows(count, 2).tolist()
        return {**parameters, "share": torch.tensor(rng.beta(1 + wide, 9 + clean), dtype=torch.float64)}

    def working(self, parameters, rng):
        key, noise, share = int(rng.integers(2**62)), float(parameters["noise"]), float(parameters["share"])

        def weighted(batch: Batch, f: torch.Tensor, first_row: int) -> tuple[torch.Tensor, torch.Tensor]:
            e = batch.y - f
            odds = share / (1 - share) / WIDTH * torch.exp(e.square() / (2 * noise) * (1 - WIDTH**-2))
            is_wide = row_uniform(len(e), first_row, key) * (1 + 1 / odds) < 1
            return e, torch.where(is_wide, WIDTH**-2, 1.0).double()

        return weighted

    def after_visit(self, parameters, square, count, rng):
        drawn = self.model.draw(float(parameters["noise"]), square, count, rng)
        return {**parameters, "noise": torch.tensor(drawn, dtype=torch.float64)}


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(registry, "_OBSERVATIONS", dict(registry._OBSERVATIONS))
    register(Contaminated)(ContaminatedObservation)


def outliers(num=240):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(num, 2, dtype=torch.float64, generator=generator)
    f = torch.sin(6 * x[:, 0]) + x[:, 1]
    y = f + 0.1 * torch.randn(num, dtype=torch.float64, generator=generator)
    y[::12] += 4.0
    return x, y, f


def fit(data, **kwargs):
    model = tkrr.TKRR(None, None, Contaminated(), rank=3, num_basis=6).double()
    return tkrr.fit_gibbs(model, data=data, num_draws=10, num_warmup=20, seed=0, **kwargs)


def test_row_weights_and_parameters_of_an_unknown_model(registered):
    x, y, f = outliers()
    result = fit((x, y))
    posterior = result.posterior
    assert set(posterior.parameters) == {"noise", "share"} and posterior.parameters["share"].shape == (10,)
    assert float(posterior.parameters["share"].mean()) == pytest.approx(1 / 12, abs=0.04)
    assert {"noise", "share", "f"} <= set(result.rhat) and "share" in result.summary()
    assert float((result.model.draws(x).mean(0) - f).detach().square().mean().sqrt()) < 0.1
    gaussian = tkrr.TKRR(x, y, GaussianLikelihood(), rank=3, num_basis=6)
    tkrr.fit_gibbs(gaussian, num_draws=10, num_warmup=20, seed=0)
    assert float(gaussian.posterior.noise.mean()) > 10 * float(posterior.noise.mean())
    density = result.log_predictive_density(x, y)
    share, sd = (values.numpy()[:, None] for values in (posterior.parameters["share"], posterior.noise.sqrt()))
    f = result.model.draws(x).detach()
    expected = (1 - share) * scipy.stats.norm(f, sd).pdf(y) + share * scipy.stats.norm(f, WIDTH * sd).pdf(y)
    np.testing.assert_allclose(density, np.log(expected.mean(0)), rtol=1e-8)


def test_draws_do_not_depend_on_batches_or_memory(registered):
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
    register(Contaminated)(ContaminatedObservation)
    x, y, _ = outliers(150)
    rows = slice(0, 60) if torch.distributed.get_rank(group) == 0 else slice(60, None)
    return fit((x[rows], y[rows]), group=group).posterior.parameters


def test_draws_do_not_depend_on_processes(registered, tmp_path):
    x, y, _ = outliers(150)
    whole = fit((x, y)).posterior.parameters
    for parameters in run_processes(fit_part, 2, tmp_path):
        for name, values in whole.items():
            torch.testing.assert_close(parameters[name], values, rtol=1e-6, atol=1e-9)


def test_a_subclass_that_only_adds_is_the_same_model_and_one_that_changes_is_not():
    class Named(GaussianLikelihood):
        title = "mine"

    assert type(observe(Named())) is GaussianObservation
    with pytest.raises(tkrr.InputError, match="Contaminated changes forward of GaussianLikelihood"):
        observe(Contaminated())
    with pytest.raises(tkrr.InputError, match=r"BernoulliLikelihood, .*GaussianLikelihood, .*got a LaplaceLikelihood"):
        observe(LaplaceLikelihood())
    with pytest.raises(tkrr.InputError, match="2 noise variances"):
        tkrr.TKRR(None, None, GaussianLikelihood(batch_shape=torch.Size([2])))


@pytest.mark.parametrize(
    "likelihood", [GaussianLikelihood(), FixedNoiseGaussianLikelihood(torch.ones(3)), BernoulliLikelihood()]
)
def test_densities_sum_to_one_and_moments_are_theirs(likelihood):
    """Every registered model, by a sum or an integral over y, at several f and with a spread of f."""
    observation: Observation = observe(likelihood)
    f = torch.tensor([[-1.0, 0.2, 2.0]], dtype=torch.float64)
    parameters = {"noise": torch.tensor([0.7], dtype=torch.float64)}
    for spread in (None, torch.tensor([0.1, 1.0, 3.0], dtype=torch.float64)):
        rows = dict(observation.rows(3, True))
        if spread is not None:
            rows["spread"] = spread
        if observation.is_discrete:
            y, step = torch.tensor([0.0, 1.0], dtype=torch.float64).reshape(-1, 1, 1), 1.0
        else:
            y = torch.linspace(-25, 25, 20001, dtype=torch.float64).reshape(-1, 1, 1)
            step = float(y[1] - y[0])
        p = observation.log_density(y, f, parameters, rows).exp() * step
        mean, variance = observation.mean(f, parameters, rows), observation.variance(f, parameters, rows)
        torch.testing.assert_close(p.sum(0), torch.ones_like(f))
        torch.testing.assert_close((p * y).sum(0), mean)
        torch.testing.assert_close((p * (y - mean) ** 2).sum(0), variance)
        torch.testing.assert_close(observation.cdf(y, f, parameters, rows), p.cumsum(0), rtol=0, atol=1e-3)
        many = observation.sample(
            f.expand(4000, -1), {"noise": parameters["noise"].expand(4000)}, rows, torch.Generator().manual_seed(0)
        )
        assert bool(((many.mean(0) - mean[0]).abs() < 5 * (variance[0] / 4000).sqrt()).all())
