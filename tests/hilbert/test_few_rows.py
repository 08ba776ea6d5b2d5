"""Up to 500 rows a kernel with a tolerance is the user's own kernel, from the first step of training on."""

from __future__ import annotations

import copy

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal
from gpytorch.kernels import (
    IndexKernel,
    Kernel,
    LCMKernel,
    LinearKernel,
    MaternKernel,
    MultitaskKernel,
    RBFKernel,
    ScaleKernel,
)
from gpytorch.likelihoods import GaussianLikelihood, MultitaskGaussianLikelihood
from gpytorch.means import ConstantMean, MultitaskMean
from gpytorch.mlls import ExactMarginalLogLikelihood
from support.models import GP
from torch import Tensor

from gpytorch_tkrr import HilbertKernel

pytestmark = [
    pytest.mark.filterwarnings("ignore:The input matches the stored training data"),
    pytest.mark.filterwarnings("ignore::linear_operator.utils.warnings.NumericalWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
]

NUM_TASKS = 2


def gp(x: Tensor, y: Tensor, kernel: Kernel) -> GP:
    return GP(x, y, GaussianLikelihood(batch_shape=kernel.batch_shape), kernel)


class TaskGP(gpytorch.models.ExactGP):
    def __init__(self, x, y, kernel):
        super().__init__(x, y, MultitaskGaussianLikelihood(num_tasks=NUM_TASKS))
        self.mean_module = MultitaskMean(ConstantMean(), num_tasks=NUM_TASKS)
        self.covar_module = kernel

    def forward(self, x):
        return MultitaskMultivariateNormal(self.mean_module(x), self.covar_module(x))


def train_and_predict(model: gpytorch.models.ExactGP, x: Tensor, steps: int = 30) -> tuple[Tensor, Tensor]:
    model.double().train()
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        (-mll(model(*model.train_inputs), model.train_targets).sum()).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        prediction = model.likelihood(model(x))
        return prediction.mean, prediction.variance


def make_data(num: int, dims: int = 1, width: float = 1.0) -> tuple[Tensor, Tensor]:
    x = torch.rand(num, dims, dtype=torch.float64)
    y = torch.sin(3 * x[:, 0]) + x[:, -1].square() + 0.1 * torch.randn(num, dtype=torch.float64)
    return width * x, y


def swap(kernel: Kernel, x: Tensor) -> HilbertKernel:
    return HilbertKernel.from_tolerance(copy.deepcopy(kernel).double(), x)


KERNELS = {
    "rbf": lambda: ScaleKernel(RBFKernel(ard_num_dims=3)),
    "matern": lambda: ScaleKernel(MaternKernel(nu=1.5)),
    "sum": lambda: ScaleKernel(RBFKernel()) + LinearKernel(),
    "batch": lambda: ScaleKernel(RBFKernel(batch_shape=torch.Size([2])), batch_shape=torch.Size([2])),
}


@pytest.mark.parametrize("width", [0.1, 50.0])
@pytest.mark.parametrize("name", KERNELS)
def test_a_trained_model_is_the_exact_one(name, width):
    """Narrow inputs: gradients in the lengthscales are nearly zero, and Adam follows their signs."""
    x, y = make_data(120, 3, width)
    kernel = KERNELS[name]()
    y = torch.stack([y, y.square()]) if kernel.batch_shape else y
    swapped = swap(kernel, x)
    exact = train_and_predict(gp(x, y, kernel), x[:20] + 0.01 * width)
    own = train_and_predict(gp(x, y, swapped), x[:20] + 0.01 * width)
    assert swapped.is_exact
    for one, other in zip(own, exact, strict=True):  # GPyTorch adds a jitter of 1e-8 to a sum with a linear kernel
        torch.testing.assert_close(one, other, rtol=0, atol=1e-3 if name == "sum" else 1e-7)


def test_sums_of_kernels_with_tolerances():
    x, y = make_data(80)
    parts = [ScaleKernel(RBFKernel()), ScaleKernel(MaternKernel(nu=1.5))]
    exact = train_and_predict(gp(x, y, copy.deepcopy(parts[0]) + copy.deepcopy(parts[1])), x[:9] + 0.01)
    own = train_and_predict(gp(x, y, swap(parts[0], x) + swap(parts[1], x)), x[:9] + 0.01)
    for one, other in zip(own, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("is_sum", [False, True])
def test_all_tasks_at_all_inputs(is_sum):
    x, y = make_data(60)
    y = torch.stack([y, -2 * y.square()], dim=-1)

    def make(wrap):
        if is_sum:
            bases = [wrap(RBFKernel()), wrap(MaternKernel(nu=2.5))]
            return LCMKernel(bases, num_tasks=NUM_TASKS, rank=1)
        return MultitaskKernel(wrap(RBFKernel()), num_tasks=NUM_TASKS, rank=1)

    results = []
    for wrap in (lambda kernel: kernel, lambda kernel: swap(kernel, x)):
        torch.manual_seed(1)
        results.append(train_and_predict(TaskGP(x, y, make(wrap)), x[:9] + 0.01))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_one_task_at_each_input():
    x, y = make_data(60, 2)
    x[:, 1] = (torch.arange(60) % NUM_TASKS).double()
    test_x = x[:9] + torch.tensor([0.01, 0.0])
    results = []
    for wrap in (lambda kernel: kernel, lambda kernel: HilbertKernel.from_tolerance(kernel.double(), x[:, :1])):
        torch.manual_seed(1)
        tasks = IndexKernel(num_tasks=NUM_TASKS, rank=1, active_dims=[1])
        data = wrap(RBFKernel())
        data.active_dims = torch.tensor([0])
        results.append(train_and_predict(gp(x, y, data * tasks), test_x))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_more_rows_are_evaluated_by_functions():
    x, y = make_data(700)
    model = gp(x[:400], y[:400], swap(ScaleKernel(RBFKernel()), x[:400]))
    train_and_predict(model, x[:5], steps=5)
    assert model.covar_module.is_exact
    model.set_train_data(x, y, strict=False)
    own = train_and_predict(model, x[:20] + 1e-3, steps=5)
    assert not model.covar_module.is_exact
    exact = gp(x, y, copy.deepcopy(model.covar_module.base_kernel))
    exact.likelihood, exact.mean_module = model.likelihood, model.mean_module
    for one, other in zip(own, train_and_predict(exact, x[:20] + 1e-3, steps=0), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=5e-3)


def test_the_state_travels_with_few_and_with_many_rows():
    x, y = make_data(600)
    few = gp(x[:100], y[:100], swap(RBFKernel(), x))
    expected = train_and_predict(few, x[:9], steps=10)
    other = gp(x[:100], y[:100], swap(RBFKernel(), x)).double()
    other.load_state_dict(few.state_dict())
    for one, two in zip(train_and_predict(other, x[:9], steps=0), expected, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-9)
    many = gp(x, y, swap(RBFKernel(), x)).double()
    many.load_state_dict(few.state_dict())
    assert all(torch.isfinite(each).all() for each in train_and_predict(many, x[:9], steps=1))
    assert not many.covar_module.is_exact


def test_the_state_of_a_sum_gives_the_same_predictions():
    """The parts of a sum are not told how many rows a likelihood has; they have seen them."""
    x, y = make_data(150)

    def make():
        return gp(x, y, swap(ScaleKernel(RBFKernel()), x) + swap(ScaleKernel(MaternKernel(nu=0.5)), x)).double()

    saved, loaded = make(), make()
    expected = train_and_predict(saved, x[:20] + 1e-3)
    loaded.load_state_dict(saved.state_dict())
    loaded.eval()
    with torch.no_grad():
        found = loaded.likelihood(loaded(x[:20] + 1e-3))
    torch.testing.assert_close(found.mean, expected[0], rtol=0, atol=1e-9)
    torch.testing.assert_close(found.variance, expected[1], rtol=0, atol=1e-9)
