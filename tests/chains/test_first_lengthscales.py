"""Fast functions are not taken for noise: chains start with lengthscales that each input alone asks for."""

from __future__ import annotations

import math

import gpytorch
import numpy as np
import pytest
import torch
from torch.distributions import MultivariateNormal

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.bases.covariance import Covariance
from gpytorch_tkrr.chains.first_lengthscales import RATIOS, Evidence, shorten_lengthscales
from gpytorch_tkrr.chains.problem import GibbsProblem
from gpytorch_tkrr.data.parallel import as_processes


def make_rows(speed: float, num_rows: int = 600, num_dims: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """The first input acts as a sine, the second linearly, the others not at all."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(num_rows, num_dims, dtype=torch.float64, generator=generator)
    noise = 0.1 * torch.randn(num_rows, dtype=torch.float64, generator=generator)
    return x, torch.sin(speed * x[:, 0]) + (0.5 * x[:, 1] if num_dims > 1 else 0.0) + noise


def make_problem(x: torch.Tensor, y: torch.Tensor, **kwargs) -> GibbsProblem:
    model = tkrr.TKRR(x, y, gpytorch.likelihoods.GaussianLikelihood(), **kwargs)
    training = model.training_data(None, as_processes(None), memory=1 << 30)
    model.prepare(training)
    return GibbsProblem(model, training, None, 1 << 30, np.random.SeedSequence(0).entropy)


@pytest.mark.parametrize("num_functions", [3, 40, 100])
def test_evidence_is_that_of_dense_algebra(num_functions):
    torch.manual_seed(0)
    features, y = torch.randn(40, num_functions, dtype=torch.float64), torch.randn(40, dtype=torch.float64)
    y = y + features[:, 0]
    variances = torch.linspace(1.0, 0.1, num_functions, dtype=torch.float64)
    found = Evidence.of(features, y, Covariance(variances))
    kernel = features @ variances.diag() @ features.mT
    unit = kernel.diagonal().mean()
    best = -math.inf
    for ratio in RATIOS:
        matrix = ratio / unit * kernel + torch.eye(40, dtype=torch.float64)
        noise = float(y @ torch.linalg.solve(matrix, y)) / 40  # the best one for this ratio
        best = max(best, float(MultivariateNormal(torch.zeros_like(y), noise * matrix).log_prob(y)))
    constant = -20 * math.log(2 * math.pi) - 20 + 20 * math.log(40)
    assert found.log_density + constant == pytest.approx(best, rel=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("spread", [1.0, 2.0])
def test_rows_of_large_weight_are_not_followed(spread):
    """What the other inputs explain is not smaller there."""
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(1000, 3, dtype=torch.float64, generator=generator)
    weight = 10.0 ** (spread * (2 * torch.rand(1000, dtype=torch.float64, generator=generator) - 1))
    noise = 0.1 * torch.randn(1000, dtype=torch.float64, generator=generator) / weight.sqrt()
    y = torch.sin(6 * x[:, 0]) * x[:, 1] + x[:, 2] ** 2 + noise
    model = tkrr.TKRR(None, None, gpytorch.likelihoods.GaussianLikelihood())
    training = model.training_data([(x, y, weight)], as_processes(None), memory=1 << 30)
    model.prepare(training)
    problem = GibbsProblem(model, training, None, 1 << 30, np.random.SeedSequence(0).entropy)
    before = problem.start.clone()
    shorten_lengthscales(problem)
    assert not problem.too_fast and torch.equal(before, problem.start)


@torch.no_grad()
@pytest.mark.parametrize(("speed", "halvings"), [(3.0, 0), (40.0, 2)])
def test_the_start_is_shortened_where_an_input_hides_and_only_there(speed, halvings):
    problem = make_problem(*make_rows(speed))
    before = problem.start.clone()
    shorten_lengthscales(problem)
    moved = ((before - problem.start) / math.log(2.0)).round().int()
    slot = next(i for i in problem.hyperparameters.own[0] if problem.hyperparameters.slots[i].is_lengthscale)
    assert moved[slot] == halvings and int(moved.abs().sum()) == halvings
    assert problem.model.num_basis == ((32, 20, 20) if halvings else (20, 20, 20))
    torch.testing.assert_close(problem.hyperparameters.get(problem.all_slots), problem.start)


@pytest.mark.parametrize("speed", [5.0, 60.0, 200.0])
def test_a_function_of_one_input_is_found_whatever_its_speed(speed):
    x, y = make_rows(speed, 500, num_dims=1)
    model = tkrr.TKRR(x[:400], y[:400], gpytorch.likelihoods.GaussianLikelihood())
    result = tkrr.fit_gibbs(model, seed=0, num_warmup=30, num_draws=20)
    assert model.rank == 1 and result.posterior.rank == 1
    inside = (x[400:] > x[:400].min()).all(-1) & (x[400:] < x[:400].max()).all(-1)
    truth = torch.sin(speed * x[400:, 0])[inside]
    assert (model.predict(x[400:][inside]).mean - truth).square().mean().sqrt() < 0.1


def test_an_input_that_is_too_fast_is_announced_and_can_be_followed():
    x, y = make_rows(250.0, 1200, num_dims=2)
    model = tkrr.TKRR(x, y, gpytorch.likelihoods.GaussianLikelihood(), rank=4)
    with pytest.warns(tkrr.ConvergenceWarning, match="Input 0 acts so fast that about [0-9]+ functions"):
        tkrr.fit_gibbs(model, seed=0, num_warmup=6, num_draws=4)
    model = tkrr.TKRR(x, y, gpytorch.likelihoods.GaussianLikelihood(), rank=2, num_basis=[220, 8])
    tkrr.fit_gibbs(model, seed=0, num_warmup=20, num_draws=10)
    assert model.likelihood.noise.item() < 0.02


def test_a_lengthscale_that_is_given_stays():
    x, y = make_rows(40.0, 200)
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=3))
    kernel.base_kernel.raw_lengthscale.requires_grad_(False)
    before = kernel.base_kernel.lengthscale.clone()
    model = tkrr.TKRR(x, y, gpytorch.likelihoods.GaussianLikelihood(), kernel=kernel, rank=2)
    tkrr.fit_gibbs(model, seed=0, num_warmup=4, num_draws=4)
    torch.testing.assert_close(kernel.base_kernel.lengthscale, before)
