"""Inputs where the data say nothing: what the models know there, and what they say of it."""

from __future__ import annotations

import warnings

import pytest
import torch

pytest.importorskip("botorch.models")  # not the folder of this name
from botorch.acquisition import LogExpectedImprovement, qKnowledgeGradient
from botorch.fit import fit_gpytorch_mll
from gpytorch.mlls import ExactMarginalLogLikelihood

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.botorch import HilbertGPModel, TKRRModel


def fit(model):
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    return model


def data(num_dims=2, num_rows=40):
    x = torch.rand(num_rows, num_dims, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    return x, torch.sin(5 * x).sum(-1, keepdim=True)


@pytest.mark.filterwarnings("ignore::gpytorch_tkrr.errors.OutOfDomainWarning")
def test_sampled_model_knows_no_more_than_the_prior_allows():
    """
    Outside the range of one column the variance is at least what a process with this kernel has that knows all of the
    function at the edge; far away it is that of the prior; at the edge it does not jump.
    """
    torch.manual_seed(0)
    x, y = data(2, 60)
    model = fit(TKRRModel(x, y, rank=4))
    cp = model.outcome(0).model
    scale = model.outcome_transform.stdvs.item() ** 2
    edge = x[:, 0].max().item()
    steps = torch.tensor([0.0, 1e-4, 0.1, 0.3, 0.8, 30.0], dtype=torch.float64)
    points = torch.stack([edge + steps, torch.full_like(steps, 0.5)], -1)
    with torch.no_grad():
        variance = model.posterior(points).variance.squeeze(-1) / scale
        kernel = cp.covar_module
        lengthscale = kernel.lengthscale[0, 0]
    floor = 1 - torch.exp(-(steps / lengthscale).square())  # RBF with unit variance: 1 - k^2
    assert (variance >= 0.8 * floor).all()
    assert variance[-1] == pytest.approx(1.0, rel=0.01)
    assert variance[1] < 1.2 * variance[0] + 1e-4
    x_grad = points[:4].clone().requires_grad_()
    model.posterior(x_grad).variance.sum().backward()
    assert x_grad.grad.isfinite().all() and x_grad.grad[2, 0] > 0
    # A fantasy out there is an observation with that variance as noise of its own.
    far = points[2:3]
    conditioned = model.condition_on_observations(far, model.posterior(far).mean.detach() + 1.0)
    assert conditioned.posterior(far).variance <= model.posterior(far).variance + 1e-9


@pytest.mark.parametrize("acquisition", ["LogExpectedImprovement", "qKnowledgeGradient"])
@pytest.mark.parametrize(
    ("num_dims", "make"),
    [
        (2, lambda x, y: HilbertGPModel(x, y, num_functions=100)),
        (4, lambda x, y: HilbertGPModel(x, y, num_functions=150)),  # a hyperbolic cross
        (2, lambda x, y: TKRRModel(x, y, rank=3, num_basis=6)),
    ],
    ids=["HilbertGPModel", "cross", "TKRRModel"],
)
def test_inputs_outside_the_box_are_said_once(num_dims, make, acquisition):
    """Once for a fitted model, however often an acquisition function asks, with a true fraction."""
    torch.manual_seed(0)
    x, y = data(num_dims, 20)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = fit(make(x, y))
    if acquisition == "LogExpectedImprovement":
        function, q = LogExpectedImprovement(model, best_f=y.max()), 1
    else:
        function, q = qKnowledgeGradient(model, num_fantasies=2), 3
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            function(20 + 10 * torch.rand(5, q, num_dims, dtype=torch.float64))
    said = [str(each.message) for each in caught if issubclass(each.category, tkrr.TKRRWarning)]
    assert len(said) == 1
    assert "less than 95% of the prior variance" in said[0]
