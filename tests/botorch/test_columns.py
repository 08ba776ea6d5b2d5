"""Columns that are no numbers: tasks, fidelities, categories with noise of their own."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("botorch.models")  # not the folder of this name
from botorch.acquisition import LogExpectedImprovement, qKnowledgeGradient
from botorch.acquisition.objective import ScalarizedPosteriorTransform
from botorch.fit import fit_gpytorch_mll
from botorch.models import MultiTaskGP
from botorch.optim import optimize_acqf, optimize_acqf_mixed
from botorch.utils.datasets import SupervisedDataset
from gpytorch.mlls import ExactMarginalLogLikelihood

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.botorch import HilbertGPModel, TKRRModel
from gpytorch_tkrr.botorch.fidelity import FidelityKernel

EXACT = {"HilbertGPModel": (HilbertGPModel, {}), "TKRRModel": (TKRRModel, {})}
OWN = {"HilbertGPModel": (HilbertGPModel, {"num_functions": 192}), "TKRRModel": (TKRRModel, {"rank": 6})}

MODELS = pytest.mark.parametrize("name", list(EXACT))
FEW_STEPS = {"optimizer_kwargs": {"options": {"maxiter": 40}}}
BUDGET = {"num_restarts": 2, "raw_samples": 8, "options": {"maxiter": 4, "batch_limit": 2}}

pytestmark = [
    pytest.mark.filterwarnings("ignore::gpytorch_tkrr.errors.ApproximationWarning"),  # few functions on purpose
    pytest.mark.filterwarnings("ignore::botorch.exceptions.warnings.OptimizationWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),  # torch, from within botorch
]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def fit(model, **kwargs):
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model), **kwargs)
    return model


def task_data(num_rows, noise=(0.02, 0.02, 0.2)):
    """Inputs with tasks in column 1, and outcomes whose noise depends on the task."""
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.rand(num_rows, 3, dtype=torch.float64, generator=generator)
    x[:, 1] = torch.randint(3, (num_rows,), generator=generator)
    sd = torch.tensor(noise, dtype=torch.float64)[x[:, 1].long()].unsqueeze(-1)
    return x, task_function(x) + sd * torch.randn(num_rows, 1, dtype=torch.float64, generator=generator)


def task_function(x):
    return torch.sin(5 * x[..., :1]) * (1 + 0.3 * x[..., 1:2]) + x[..., 2:3] + 0.5 * (x[..., 1:2] == 1)


def all_tasks(x):
    """`(n, 3)`: the function of each task at inputs without their column."""
    columns = [torch.cat([x[:, :1], torch.full_like(x[:, :1], task), x[:, 1:]], -1) for task in range(3)]
    return torch.cat([task_function(each) for each in columns], -1)


# Tasks


@MODELS
def test_few_observations_are_those_of_a_multi_task_gp(name):
    """Likelihood, state and posterior, with and without the column of tasks, with noise, in any order of tasks."""
    x, y = task_data(30)
    cls, _ = EXACT[name]
    ours, theirs = (
        cls(x, y, task_feature=1, output_tasks=[2, 0]),
        MultiTaskGP(x, y, task_feature=1, output_tasks=[2, 0]),
    )
    state = theirs.state_dict()
    ours.load_state_dict({key: value for key, value in state.items() if key != "_task_mapper"})
    values = []
    for model in (ours, theirs):
        mll = ExactMarginalLogLikelihood(model.likelihood, model).train()
        values.append(mll(model(*model.train_inputs), model.train_targets, *model.train_inputs))
    torch.testing.assert_close(*values)
    test_x = torch.rand(4, 2, 2, dtype=torch.float64)
    full_x = torch.cat([test_x[..., :1], torch.ones_like(test_x[..., :1]), test_x[..., 1:]], -1)
    assert ours.num_outputs == theirs.num_outputs == 2
    for inputs in (test_x, full_x):
        for noise in (False, True):
            left, right = (model.posterior(inputs, observation_noise=noise) for model in (ours, theirs))
            torch.testing.assert_close(left.mean, right.mean)
            torch.testing.assert_close(left.variance, right.variance)
            covariances = [each.distribution.covariance_matrix for each in (left, right)]
            torch.testing.assert_close(*covariances)
    torch.testing.assert_close(
        ours.posterior(test_x, output_indices=[1]).mean, theirs.posterior(test_x, output_indices=[1]).mean
    )


@MODELS
def test_tasks_in_the_form_for_many_observations(name):
    x, y = task_data(240)
    cls, own = OWN[name]
    model = fit(cls(x, y, task_feature=-2, **own), **(FEW_STEPS if name == "HilbertGPModel" else {}))
    test_x = torch.rand(50, 2, dtype=torch.float64)
    posterior = model.posterior(test_x)
    assert posterior.mean.shape == (50, 3) and model.num_outputs == 3
    errors = (posterior.mean - all_tasks(test_x)).square().mean(0).sqrt()
    assert (errors < 0.15).all()  # the outcomes have a standard deviation of about one
    noise = model.posterior(test_x, observation_noise=True).variance - posterior.variance
    assert (noise[:, 2] > 3 * noise[:, 0]).all()
    weights = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64)
    scalar = model.posterior(test_x, posterior_transform=ScalarizedPosteriorTransform(weights))
    torch.testing.assert_close(scalar.mean, posterior.mean @ weights[:, None])
    torch.testing.assert_close(model.subset_output([2]).posterior(test_x).mean, posterior.mean[:, 2:])
    fresh = cls(x, y, task_feature=-2, **own)
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(fresh.posterior(test_x).mean, posterior.mean, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("forms", [EXACT, OWN], ids=["exact", "own"])
@MODELS
def test_the_target_task_is_optimised(name, forms):
    """Candidates have no column of tasks; fantasies of the one output task need none either."""
    x, y = task_data(40)
    cls, own = forms[name]
    model = fit(
        cls(x, y, task_feature=1, output_tasks=[0], **own), **(FEW_STEPS if not own or cls is HilbertGPModel else {})
    )
    bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    for acquisition in (LogExpectedImprovement(model, best_f=y.max()), qKnowledgeGradient(model, num_fantasies=2)):
        candidate, _ = optimize_acqf(acquisition, bounds, q=1, **BUDGET)
        assert candidate.shape == (1, 2)
    new_x = torch.tensor([[0.31, 0.5]], dtype=torch.float64)
    full_x = torch.tensor([[0.31, 0.0, 0.5]], dtype=torch.float64)
    value = torch.tensor([[5.0]], dtype=torch.float64)
    conditioned = [model.condition_on_observations(each, value) for each in (new_x, full_x)]
    means = [each.posterior(new_x).mean for each in conditioned]
    torch.testing.assert_close(*means)
    assert means[0] > model.posterior(new_x).mean + 0.1


def test_columns_that_cannot_be():
    x, y = task_data(9)
    with pytest.raises(tkrr.InputError, match="different columns"):
        TKRRModel(x, y, cat_dims=[1], task_feature=-2)
    with pytest.raises(tkrr.InputError, match="without task_feature"):
        TKRRModel(x, y, output_tasks=[0])
    with pytest.raises(tkrr.InputError, match="numbered 0, 1"):
        TKRRModel(x, y, task_feature=0)
    with pytest.raises(tkrr.InputError, match="one model per outcome"):
        TKRRModel(x, y.expand(9, 2), task_feature=1)
    with pytest.raises(tkrr.InputError, match="one model per batch"):
        TKRRModel(x.expand(2, 9, 3), y.expand(2, 9, 1), task_feature=1)
    model = TKRRModel(x, y, task_feature=1)
    with pytest.raises(tkrr.InputError, match="column of their tasks"):
        model.condition_on_observations(x[:, ::2], y)


# Fidelities


def test_fidelity_kernel_is_its_expansion():
    """Against its own forward, alone and in a product, for both readers of a kernel tree."""
    kernel = FidelityKernel(active_dims=(1,))
    kernel.bias_variance = 0.7
    x = torch.rand(6, 2, dtype=torch.float64)
    expected = 1 + 0.7 * torch.outer(1 - x[:, 1], 1 - x[:, 1])
    torch.testing.assert_close(kernel(x).to_dense(), expected)
    torch.testing.assert_close(kernel(x, diag=True), expected.diagonal())
    product = kernel * tkrr.CategoricalKernel(active_dims=(0,))
    x[:, 0] = torch.arange(6) % 3
    hilbert = tkrr.HilbertKernel(product, tkrr.Domain(torch.tensor([1.0, 0.5]), torch.tensor([2.0, 1.0])), 2).eval()
    torch.testing.assert_close(hilbert(x).to_dense(), product(x).to_dense())
    batch = FidelityKernel(batch_shape=torch.Size([2]))
    batch.bias_variance = torch.tensor([0.0 + 0.7, 0.2]).reshape(2, 1, 1)
    assert batch(x[:, 1:]).to_dense().shape == (2, 6, 6) and batch(x[:, 1:], diag=True).shape == (2, 6)


@pytest.mark.parametrize("forms", [EXACT, OWN], ids=["exact", "own"])
@MODELS
def test_low_fidelities_help_the_target(name, forms):
    """Many biased observations and few of the thing itself: better than the few alone."""
    x = torch.rand(90, 3, dtype=torch.float64)
    x[:, 1] = 0.3 + 0.4 * (x[:, 1] > 0.5)
    x[::8, 1] = 1.0

    def function(x):
        return torch.sin(5 * x[:, :1]) + x[:, 2:] + (1 - x[:, 1:2]) * torch.cos(3 * x[:, 2:])

    cls, own = forms[name]
    model = fit(cls(x, function(x), data_fidelities=[1], **own))
    test_x = torch.rand(60, 3, dtype=torch.float64)
    test_x[:, 1] = 1.0
    few = fit(TKRRModel(x[::8][:, ::2], function(x[::8])))
    errors = [
        (each - function(test_x)).square().mean().sqrt()
        for each in (model.posterior(test_x).mean, few.posterior(test_x[:, ::2]).mean)
    ]
    assert errors[0] < 0.05 and errors[0] < 0.5 * errors[1]
    dataset = SupervisedDataset(x, function(x), feature_names=list("abc"), outcome_names=["y"])
    assert cls.construct_inputs(dataset, fidelity_features=[1])["data_fidelities"] == [1]


# Categories with a noise variance of each row


@pytest.mark.parametrize("forms", [EXACT, OWN], ids=["exact", "own"])
@MODELS
def test_noise_of_each_row_with_categories(name, forms):
    """The rows that are said to be noisy are: where they are not told apart, the error is larger."""
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(150, 3, dtype=torch.float64, generator=generator)
    x[:, 2] = torch.randint(3, (150,), generator=generator)
    sd = torch.where(torch.rand(150, 1, generator=generator) < 0.5, 0.02, 1.0).double()

    def function(x):
        return torch.sin(5 * x[:, :1]) * (x[:, 2:] - 0.5) + x[:, 1:2]

    y = function(x) + sd * torch.randn(150, 1, dtype=torch.float64, generator=generator)
    test_x = torch.rand(80, 3, dtype=torch.float64, generator=generator)
    test_x[:, 2] = torch.randint(3, (80,), generator=generator)
    cls, own = forms[name]
    told, same = (
        fit(cls(x, y, noise, cat_dims=[2], **own)) for noise in (sd.square(), sd.square().mean().expand_as(y))
    )
    errors = [(model.posterior(test_x).mean - function(test_x)).square().mean().sqrt() for model in (told, same)]
    assert errors[0] < 0.5 * errors[1] and errors[0] < 0.2
    acquisition = LogExpectedImprovement(told, best_f=told.posterior(x).mean.max().detach())
    bounds = torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, 2.0]], dtype=torch.float64)
    candidate, _ = optimize_acqf_mixed(
        acquisition, bounds, q=1, fixed_features_list=[{2: float(level)} for level in range(3)], **BUDGET
    )
    assert candidate[0, 2] in (0.0, 1.0, 2.0)
