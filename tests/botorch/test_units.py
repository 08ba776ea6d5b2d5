"""Hyperparameters in units of their own size, and fits that start from those of an earlier one."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

pytest.importorskip("botorch.models")  # not the folder of this name
from botorch.fit import fit_gpytorch_mll
from botorch.models import ModelListGP, SingleTaskGP
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood
from test_botorch import unit_data

from gpytorch_tkrr.botorch import HilbertGPModel, TKRRModel
from gpytorch_tkrr.botorch.units import fit_in_units


def noisy_data(num_rows):
    x, y = unit_data(num_rows)
    return x, y + 0.1 * torch.randn(y.shape, generator=torch.Generator().manual_seed(3), dtype=y.dtype)


def count(model, **kwargs):
    """Fit, and return how often likelihoods were evaluated, those of a first look among them, and what was reached."""
    numbers = []
    forward = ExactMarginalLogLikelihood.forward

    def counted(self, *args, **kwargs):
        numbers.append(1)
        return forward(self, *args, **kwargs)

    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    with mock.patch.object(ExactMarginalLogLikelihood, "forward", counted):
        fit_gpytorch_mll(mll, **kwargs)
    mll.train()
    with torch.no_grad():
        reached = mll(model(*model.train_inputs), model.train_targets)
    mll.eval()
    return len(numbers), float(reached)


def test_the_same_optimum_with_half_of_the_evaluations():
    x, y = noisy_data(60)
    model, in_units = SingleTaskGP(x, y), SingleTaskGP(x, y)
    num, reached = count(model)
    num_in_units, reached_in_units = count(in_units, optimizer=fit_in_units)
    assert num_in_units < num / 2
    assert reached_in_units > reached - 1e-6
    torch.testing.assert_close(in_units.covar_module.lengthscale, model.covar_module.lengthscale, rtol=0.01, atol=0.0)


def test_bounds_and_fixed_parameters():
    x, y = noisy_data(30)
    model = SingleTaskGP(x, y)
    model.covar_module.lengthscale = torch.tensor([0.2, 0.3])
    model.mean_module.raw_constant.requires_grad_(False)
    bounds = {"model.covar_module.raw_lengthscale": (0.1, torch.tensor([0.25, 0.35]))}
    count(model, optimizer=fit_in_units, optimizer_kwargs={"bounds": bounds})
    torch.testing.assert_close(  # the data ask for longer ones
        model.covar_module.lengthscale.detach(), torch.tensor([[0.25, 0.35]], dtype=torch.float64)
    )
    assert float(model.mean_module.constant) == 0.0


def test_parameters_with_a_transform_keep_their_scale():
    x, y = noisy_data(40)
    kernel = ScaleKernel(RBFKernel(ard_num_dims=2))

    def make():
        return SingleTaskGP(x, y, likelihood=GaussianLikelihood(), covar_module=kernel)

    start = {name: value.clone() for name, value in kernel.state_dict().items()}
    num, reached = count(make())
    kernel.load_state_dict(start)
    assert count(make(), optimizer=fit_in_units) == (num, pytest.approx(reached, abs=1e-12))


# Warm starts


def assert_same_posterior(model, expected, x):
    with torch.no_grad():
        first, second = model.posterior(x), expected.posterior(x)
    torch.testing.assert_close(first.mean, second.mean, rtol=0.0, atol=0.01)
    torch.testing.assert_close(first.variance.sqrt(), second.variance.sqrt(), rtol=0.0, atol=0.01)


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize(
    "num_rows, kwargs", [(40, {}), (300, {"num_functions": 64}), (1100, {})], ids=["exact", "given", "many"]
)
def test_a_hilbert_model_with_more_rows_starts_where_the_last_one_ended(num_rows, kwargs, as_list):
    x, y = noisy_data(num_rows + 20)
    last = HilbertGPModel(x[:num_rows], y[:num_rows], **kwargs)
    count(last)
    cold, warm = (HilbertGPModel(x, y, **kwargs) for _ in range(2))
    if as_list:
        ModelListGP(warm).load_state_dict(ModelListGP(last).state_dict())
    else:
        warm.load_state_dict(last.state_dict())
    num_cold, _ = count(cold)
    num_warm, _ = count(warm)
    assert num_warm < 0.7 * num_cold
    assert_same_posterior(warm, cold, x[:100])


def test_a_start_that_is_far_off_has_a_first_look():
    x, y = noisy_data(1100)
    cold, warm, other = (HilbertGPModel(x, y) for _ in range(3))
    other.covar_module.base_kernel.lengthscale = torch.tensor([5.0, 0.05])
    warm.load_state_dict(other.state_dict())
    count(cold)
    count(warm)
    assert_same_posterior(warm, cold, x[:100])


@pytest.mark.parametrize("as_list", [False, True])
def test_a_sampled_model_needs_no_second_first_look(as_list):
    x, y = noisy_data(520)
    last, model = (TKRRModel(x[:num], y[:num], rank=3, num_basis=8) for num in (510, 520))
    quick = {"num_warmup": 4, "num_draws": 4, "seed": 0}
    assert count(last, optimizer_kwargs=quick)[0] > 0
    if as_list:
        ModelListGP(model).load_state_dict(ModelListGP(last).state_dict())
    else:
        model.load_state_dict(last.state_dict())
    assert count(model, optimizer_kwargs=quick)[0] == 0
    with torch.no_grad():
        error = (model.posterior(x).mean - y).square().mean().sqrt()
    assert error < 0.15
