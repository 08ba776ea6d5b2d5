"""Several tasks: GPyTorch's multitask models of a HilbertKernel against the same models of the same features, dense."""

from __future__ import annotations

import copy
import pickle
import time

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.kernels import IndexKernel, Kernel, LCMKernel, MultitaskKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import (
    FixedNoiseGaussianLikelihood,
    GaussianLikelihood,
    HadamardGaussianLikelihood,
    MultitaskGaussianLikelihood,
)
from gpytorch.mlls import ExactMarginalLogLikelihood
from linear_operator.operators import ConstantDiagLinearOperator, DiagLinearOperator, KroneckerProductLinearOperator
from repository import run_python

from gpytorch_tkrr import (
    DenseFallbackWarning,
    Domain,
    HilbertKernel,
    OutOfDomainWarning,
    ReducedRankMultitaskNormal,
    SizeError,
    UnsupportedKernelError,
)
from gpytorch_tkrr.hilbert.multitask import TaskPredictionStrategy
from gpytorch_tkrr.hilbert.prediction import HilbertPredictionStrategy
from gpytorch_tkrr.operators.operator import HilbertAddedDiagLinearOperator, HilbertLinearOperator
from gpytorch_tkrr.operators.task_operators import HilbertTaskLinearOperator, HilbertTaskNoiseLinearOperator

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
    pytest.mark.filterwarnings("ignore:The input matches the stored training data"),
]

NUM_TASKS = 3


class DenseKernel(Kernel):
    """The features of a HilbertKernel, multiplied out, with the variance that they do not represent."""

    def __init__(self, kernel, train_x):
        super().__init__()
        self.kernel, self.train_x = kernel, train_x

    def forward(self, x1, x2, diag=False, **params):
        expansion = self.kernel.expansion(x1.shape[-1])
        covariance = expansion.covariance().between(expansion.features(x1), expansion.features(x2))
        if torch.equal(x1, x2):
            missing = expansion.prior_variance(x1) - covariance.diagonal(dim1=-2, dim2=-1)
            if torch.equal(x1, self.train_x):
                missing = missing.mean(-1, keepdim=True).expand_as(missing)
            covariance = covariance + torch.diag_embed(missing)
        return covariance.diagonal(dim1=-2, dim2=-1) if diag else covariance


class Multitask(gpytorch.models.ExactGP):
    distribution: type = MultitaskMultivariateNormal

    def __init__(self, x, y, likelihood, kernel):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.MultitaskMean(gpytorch.means.ConstantMean(), num_tasks=y.shape[-1])
        self.covar_module = kernel

    def forward(self, x):
        return self.distribution(self.mean_module(x), self.covar_module(x))


class ReducedRankMultitask(Multitask):
    distribution = ReducedRankMultitaskNormal


class Hadamard(gpytorch.models.ExactGP):
    def __init__(self, inputs, y, likelihood, kernel):
        super().__init__(inputs, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = kernel
        self.task_covar_module = IndexKernel(num_tasks=NUM_TASKS, rank=2)

    def forward(self, x, i):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x).mul(self.task_covar_module(i)))


class Product(gpytorch.models.ExactGP):
    """The task is the last column of the inputs."""

    def __init__(self, x, y, likelihood, kernel):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = kernel

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def hilbert(**kwargs):
    """Few functions: 0.4 % of the variance are missing, far more than the tolerances below."""
    return HilbertKernel(RBFKernel(), Domain(0.5, 2.5), 6, **kwargs).double()


def make_data(num=30):
    x = torch.rand(num, 1, dtype=torch.float64)
    y = torch.cat([torch.sin(6 * x), torch.cos(5 * x), x], dim=-1) + 0.1 * torch.randn(num, 3, dtype=torch.float64)
    return x, y


def dense_twin(model, train_x):
    """The same model with DenseKernel in the place of each HilbertKernel."""
    twin = copy.deepcopy(model)
    for module in list(twin.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, HilbertKernel):
                setattr(module, name, DenseKernel(child, train_x))
    return twin


def assert_same_model(model, inputs, test_inputs, targets):
    """Likelihood, gradients, mean, variance and covariance."""
    results = []
    for each in (model, dense_twin(model, inputs[0])):
        each.train()
        value = ExactMarginalLogLikelihood(each.likelihood, each)(each(*inputs), targets, list(inputs))
        value.backward()
        gradients = [parameter.grad for parameter in each.parameters()]
        each.eval()
        with torch.no_grad():
            prediction = each(*test_inputs)
            observed = each.likelihood(prediction, list(test_inputs))
        results.append([value, *gradients, prediction.mean, prediction.covariance_matrix, observed.variance])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)


NOISES = {
    "task and global noise": {},
    "global noise": {"has_task_noise": False},
    "task noise": {"has_global_noise": False},
    "correlated noise": {"rank": 2},
}


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
def test_kronecker_model_equals_dense_algebra(noise, scaled):
    x, y = make_data()
    kernel = MultitaskKernel(ScaleKernel(hilbert()) if scaled else hilbert(), num_tasks=NUM_TASKS, rank=2)
    likelihood = MultitaskGaussianLikelihood(num_tasks=NUM_TASKS, **noise)
    model = Multitask(x, y, likelihood, kernel).double()
    assert isinstance(model.covar_module(x).evaluate_kernel(), HilbertTaskNoiseLinearOperator)
    assert_same_model(model, [x], [torch.rand(7, 1, dtype=torch.float64)], y)
    assert type(model.prediction_strategy) is TaskPredictionStrategy


def test_scaled_multitask_kernel_and_sums_of_them():
    x, y = make_data()
    test_x = torch.rand(7, 1, dtype=torch.float64)
    for kernel in (
        ScaleKernel(MultitaskKernel(hilbert(), num_tasks=NUM_TASKS)),
        LCMKernel([hilbert(), hilbert()], num_tasks=NUM_TASKS),
    ):
        model = Multitask(x, y, MultitaskGaussianLikelihood(num_tasks=NUM_TASKS), kernel).double()
        assert isinstance(model.covar_module(x).evaluate_kernel(), HilbertTaskNoiseLinearOperator)
        assert_same_model(model, [x], [test_x], y)
        assert type(model.prediction_strategy) is TaskPredictionStrategy


def test_tasks_of_features_with_correlated_weights():
    """An IndexKernel inside the HilbertKernel, for a category among the inputs."""
    x, y = make_data()
    x = torch.cat([x, torch.randint(0, 2, (30, 1))], dim=-1)
    tree = RBFKernel(active_dims=0) * IndexKernel(num_tasks=2, active_dims=1)
    reduced = HilbertKernel(tree, Domain([0.5, 0.5], [2.5, 1.0]), 6)
    model = Multitask(
        x, y, MultitaskGaussianLikelihood(num_tasks=NUM_TASKS, rank=1), MultitaskKernel(reduced, num_tasks=NUM_TASKS)
    ).double()
    assert_same_model(model, [x], [x[:7] + torch.tensor([0.01, 0.0])], y)
    tasks = torch.randint(0, NUM_TASKS, (30, 1))
    y = y.gather(1, tasks).squeeze(-1)
    model = Hadamard((x, tasks), y, GaussianLikelihood(), copy.deepcopy(reduced)).double()
    assert_same_model(model, [x, tasks], [x[:7] + torch.tensor([0.01, 0.0]), tasks[:7]], y)


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("noise", ["one", "by task", "by row"])
def test_hadamard_model_equals_dense_algebra(scaled, noise):
    x, y = make_data()
    tasks = torch.randint(0, NUM_TASKS, (30, 1))
    y = y.gather(1, tasks).squeeze(-1)
    if noise == "one":
        likelihood = GaussianLikelihood()
    elif noise == "by task":
        likelihood = HadamardGaussianLikelihood(num_tasks=NUM_TASKS, task_feature_index=-1)
    else:
        likelihood = FixedNoiseGaussianLikelihood(0.1 + torch.rand(30, dtype=torch.float64))
    model = Hadamard((x, tasks), y, likelihood, ScaleKernel(hilbert()) if scaled else hilbert()).double()
    num_test = 30 if noise == "by row" else 7
    test_inputs = [torch.rand(num_test, 1, dtype=torch.float64), torch.randint(0, NUM_TASKS, (num_test, 1))]
    assert_same_model(model, [x, tasks], test_inputs, y)
    assert type(model.prediction_strategy) is HilbertPredictionStrategy


@pytest.mark.parametrize("order", [1, -1])
def test_product_with_an_index_kernel_equals_dense_algebra(order):
    x, y = make_data()
    tasks = torch.randint(0, NUM_TASKS, (30, 1))
    inputs = torch.cat([x, tasks], dim=-1)
    factors = [hilbert(active_dims=(0,)), IndexKernel(num_tasks=NUM_TASKS, rank=2, active_dims=(1,))][::order]
    kernel = gpytorch.kernels.ProductKernel(*factors)
    model = Product(inputs, y.gather(1, tasks).squeeze(-1), GaussianLikelihood(), kernel).double()
    covariance = model.covar_module(inputs).evaluate_kernel()
    assert isinstance(covariance, HilbertAddedDiagLinearOperator)
    assert isinstance(covariance.low_rank, HilbertTaskLinearOperator)
    twin = dense_twin(model, x)
    for index, factor in enumerate(twin.covar_module.kernels):
        if isinstance(factor, DenseKernel):
            factor.active_dims = torch.tensor([0])
            assert index == (0 if order == 1 else 1)
    test_inputs = torch.cat([torch.rand(7, 1), torch.randint(0, NUM_TASKS, (7, 1))], dim=-1).double()
    with torch.no_grad():
        ours, theirs = (each.eval()(test_inputs) for each in (model, twin))
        torch.testing.assert_close(ours.mean, theirs.mean, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(ours.covariance_matrix, theirs.covariance_matrix, rtol=1e-8, atol=1e-8)
        cross = model.covar_module(inputs, test_inputs).to_dense()
        torch.testing.assert_close(cross, twin.covar_module(inputs, test_inputs).to_dense())
        diagonal = model.covar_module(inputs, diag=True)
        torch.testing.assert_close(diagonal, model.covar_module(inputs).to_dense().diagonal())


def test_other_multitask_models_are_as_before():
    x, _ = make_data()
    base = RBFKernel().double()
    covariance = MultitaskKernel(base, num_tasks=2).double()(x).evaluate_kernel()
    assert isinstance(covariance, KroneckerProductLinearOperator)
    product = (base(x) * IndexKernel(num_tasks=2).double()(torch.zeros(30, 1).long())).evaluate_kernel()
    assert not isinstance(product, HilbertLinearOperator)
    two = (hilbert() * base)(x).to_dense()
    torch.testing.assert_close(two, hilbert()(x).to_dense() * base(x).to_dense())


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
def test_multitask_fantasies_equal_a_model_of_all_data(noise):
    x, y = make_data()
    likelihood = MultitaskGaussianLikelihood(num_tasks=NUM_TASKS, **noise)
    model = Multitask(x, y, likelihood, MultitaskKernel(hilbert(), num_tasks=NUM_TASKS)).double().eval()
    new_x, new_y = torch.rand(2, 1, dtype=torch.float64), torch.randn(2, NUM_TASKS, dtype=torch.float64)
    everything = dense_twin(model, torch.cat([x, new_x]))
    everything.set_train_data(torch.cat([x, new_x]), torch.cat([y, new_y]), strict=False)
    with torch.no_grad():
        model(x[:2])
        ours, theirs = model.get_fantasy_model(new_x, new_y)(x[:5]), everything(x[:5])
    torch.testing.assert_close(ours.mean, theirs.mean, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(ours.variance, theirs.variance, rtol=1e-8, atol=1e-8)


def test_lcm_fantasies_equal_a_model_of_all_data():
    x, y = make_data()
    kernel = LCMKernel([hilbert(), ScaleKernel(hilbert())], num_tasks=NUM_TASKS)
    model = Multitask(x, y, MultitaskGaussianLikelihood(num_tasks=NUM_TASKS), kernel).double().eval()
    new_x, new_y = torch.rand(2, 1, dtype=torch.float64), torch.randn(2, NUM_TASKS, dtype=torch.float64)
    everything = dense_twin(model, torch.cat([x, new_x]))
    everything.set_train_data(torch.cat([x, new_x]), torch.cat([y, new_y]), strict=False)
    with torch.no_grad():
        model(x[:2])
        ours, theirs = model.get_fantasy_model(new_x, new_y)(x[:5]), everything(x[:5])
    torch.testing.assert_close(ours.mean, theirs.mean, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(ours.variance, theirs.variance, rtol=1e-8, atol=1e-8)


def test_hadamard_fantasies_equal_a_model_of_all_data():
    x, y = make_data()
    tasks = torch.randint(0, NUM_TASKS, (30, 1))
    inputs = torch.cat([x, tasks], dim=-1)
    y = y.gather(1, tasks).squeeze(-1)
    kernel = hilbert(active_dims=(0,)) * IndexKernel(num_tasks=NUM_TASKS, active_dims=(1,))
    model = Product(inputs, y, GaussianLikelihood(), kernel).double().eval()
    new_x = torch.cat([torch.rand(2, 1), torch.tensor([[0.0], [2.0]])], dim=-1).double()
    new_y = torch.randn(2, dtype=torch.float64)
    everything = copy.deepcopy(model)
    everything.set_train_data(torch.cat([inputs, new_x]), torch.cat([y, new_y]), strict=False)
    with torch.no_grad():
        model(inputs[:2])
        ours, theirs = model.get_fantasy_model(new_x, new_y)(inputs[:5]), everything(inputs[:5])
    torch.testing.assert_close(ours.mean, theirs.mean, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(ours.variance, theirs.variance, rtol=1e-8, atol=1e-8)


def test_gpytorch_is_as_it_was_until_the_first_kernel():
    """And a pickle may be that kernel."""
    code = f"""
import pickle, gpytorch, gpytorch_tkrr
from gpytorch.kernels import LCMKernel, MultitaskKernel, ProductKernel
from gpytorch.lazy import LazyEvaluatedKernelTensor
places = [MultitaskKernel.forward, MultitaskKernel.prediction_strategy, LCMKernel.prediction_strategy,
          ProductKernel.forward, ProductKernel.prediction_strategy, LazyEvaluatedKernelTensor._mul_matrix]
assert not any(hasattr(place, "__wrapped__") for place in places)
pickle.loads({pickle.dumps(hilbert())!r})
assert MultitaskKernel.forward.__wrapped__ is places[0]
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_outside_the_box_the_tasks_keep_their_prior():
    x, y = make_data()
    kernel = MultitaskKernel(hilbert(), num_tasks=NUM_TASKS).double()
    model = Multitask(x, y, MultitaskGaussianLikelihood(num_tasks=NUM_TASKS), kernel).double().eval()
    with pytest.warns(OutOfDomainWarning), torch.no_grad():
        prediction = model(torch.full((1, 1), 9.0, dtype=torch.float64))
    prior = kernel.task_covar_module._eval_covar_matrix()
    torch.testing.assert_close(prediction.covariance_matrix, prior.detach())


def test_outside_the_box_each_row_keeps_the_prior_of_its_task():
    x, y = make_data()
    tasks = torch.randint(0, NUM_TASKS, (30, 1))
    model = Hadamard((x, tasks), y.gather(1, tasks).squeeze(-1), GaussianLikelihood(), hilbert()).double().eval()
    far = torch.full((1, 1), 9.0, dtype=torch.float64)
    with pytest.warns(OutOfDomainWarning), torch.no_grad():
        variance = model(far, torch.ones(1, 1).long()).variance
    torch.testing.assert_close(variance, model.task_covar_module._eval_covar_matrix()[[1], [1]].detach())


def test_missing_targets_are_refused():
    x, y = make_data()
    y[3, 1] = torch.nan
    likelihood = MultitaskGaussianLikelihood(num_tasks=NUM_TASKS)
    model = Multitask(x, y, likelihood, MultitaskKernel(hilbert(), num_tasks=NUM_TASKS)).double().eval()
    with gpytorch.settings.observation_nan_policy("mask"), pytest.raises(UnsupportedKernelError, match="IndexKernel"):
        model(x[:3])


def test_training_inputs_outside_the_box_are_named():
    x, y = make_data()
    kernel = MultitaskKernel(HilbertKernel(RBFKernel(), Domain(0.0, 0.2), 5), num_tasks=NUM_TASKS)
    model = Multitask(x, y, MultitaskGaussianLikelihood(num_tasks=NUM_TASKS), kernel).double()
    with pytest.raises(ValueError, match="lie outside the domain"):
        ExactMarginalLogLikelihood(model.likelihood, model)(model(x), y)


def test_with_fast_computations_off():
    """As after ``import botorch``: the low-rank likelihood, a warning, or beyond 5 000 rows an error."""

    def step(model_class, num):
        x, y = make_data(num)
        kernel = MultitaskKernel(hilbert(), num_tasks=NUM_TASKS)
        model = model_class(x, y, MultitaskGaussianLikelihood(num_tasks=NUM_TASKS), kernel).double()
        return ExactMarginalLogLikelihood(model.likelihood, model)(model(x), y)

    with gpytorch.settings.fast_computations(log_prob=False, solves=False, covar_root_decomposition=False):
        step(ReducedRankMultitask, 2_000).backward()
        with pytest.warns(DenseFallbackWarning, match="ReducedRankMultitaskNormal"):
            step(Multitask, 30)
        with pytest.raises(SizeError, match=r"would take 0\.3 GB(.|\n)*") as caught:
            step(Multitask, 2_000)
    assert "with gpytorch.settings.fast_computations(log_prob=True):" in str(caught.value)


@pytest.mark.parametrize("hadamard", [False, True], ids=["kronecker", "hadamard"])
def test_many_rows(hadamard):
    """A dense matrix would take 29 GB, or 3.2 GB for one task per row."""
    x, y = make_data(20_000)
    if hadamard:
        inputs = [x, torch.randint(0, NUM_TASKS, (20_000, 1))]
        y = y.gather(1, inputs[1]).squeeze(-1)
        model = Hadamard(inputs, y, GaussianLikelihood(), hilbert()).double()
    else:
        inputs = [x]
        kernel = MultitaskKernel(hilbert(), num_tasks=NUM_TASKS)
        model = Multitask(x, y, MultitaskGaussianLikelihood(num_tasks=NUM_TASKS), kernel).double()
    (-ExactMarginalLogLikelihood(model.likelihood, model)(model(*inputs), y)).backward()
    with torch.no_grad(), gpytorch.settings.fast_pred_var():
        assert (model.eval()(*(each[:9] for each in inputs)).variance > 0).all()


@pytest.mark.slow
def test_a_training_step_is_much_faster_than_the_exact_one():
    """At 3 000 rows of two tasks the ratio is above a thousand; with half of them some hundreds."""
    x, y = make_data(1_500)

    def seconds(kernel, repeats):
        model = Multitask(x, y, MultitaskGaussianLikelihood(num_tasks=NUM_TASKS), kernel).double()
        objective = ExactMarginalLogLikelihood(model.likelihood, model)
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            (-objective(model(x), y)).backward()
            times.append(time.perf_counter() - start)
        return min(times)

    exact = MultitaskKernel(RBFKernel(), num_tasks=NUM_TASKS)
    assert seconds(exact, 1) > 20 * seconds(MultitaskKernel(hilbert(), num_tasks=NUM_TASKS), 5)


def operator(tasks=None, num=5):
    features = torch.rand(num, 4, dtype=torch.float64, requires_grad=True)
    variances = torch.rand(4, dtype=torch.float64, requires_grad=True)
    root = torch.rand(2, 2, dtype=torch.float64).tril()
    return HilbertTaskLinearOperator(HilbertLinearOperator(features, variances), root, tasks)


@pytest.mark.parametrize("tasks", [None, torch.tensor([0, 1, 1, 0, 1])], ids=["all", "one each"])
def test_operator_methods_agree_with_its_features(tasks):
    covariance = operator(tasks)
    features = covariance.features
    dense = (features * covariance.variances) @ features.mT
    num_rows = len(dense)
    rhs = torch.randn(num_rows, 3, dtype=torch.float64)
    weights = torch.rand(num_rows, dtype=torch.float64)
    torch.testing.assert_close(covariance.to_dense(), dense)
    torch.testing.assert_close(covariance @ rhs, dense @ rhs)
    torch.testing.assert_close(covariance.diagonal(), dense.diagonal())
    torch.testing.assert_close(covariance.gram(), features.mT @ features)
    torch.testing.assert_close(covariance.gram(weights), features.mT @ (weights.unsqueeze(-1) * features))
    torch.testing.assert_close(covariance.project(rhs), features.mT @ rhs)
    coefficients = torch.randn(features.shape[-1], 2, dtype=torch.float64)
    torch.testing.assert_close(covariance.evaluate(coefficients), features @ coefficients)
    torch.testing.assert_close((covariance * 2.0).to_dense(), 2 * dense)
    torch.testing.assert_close((covariance * -2.0).to_dense(), -2 * dense)
    torch.testing.assert_close(covariance[1:4, 1:4].to_dense(), dense[1:4, 1:4])
    torch.testing.assert_close(covariance.expand(3, num_rows, num_rows).to_dense(), dense.expand(3, -1, -1))
    assert isinstance(covariance.add_jitter(0.1), HilbertAddedDiagLinearOperator)
    samples = covariance.zero_mean_mvn_samples(20_000)
    torch.testing.assert_close(samples.mT.cov(), dense, atol=0.1 * float(dense.detach().max()), rtol=0.0)


def test_noise_of_tasks_agrees_with_dense_algebra():
    covariance = operator()
    noise = torch.tensor([[0.5, 0.2], [0.2, 0.3]], dtype=torch.float64, requires_grad=True)
    identity = ConstantDiagLinearOperator(torch.ones(1, dtype=torch.float64), diag_shape=5)
    total = covariance + KroneckerProductLinearOperator(identity, noise)
    assert isinstance(total, HilbertTaskNoiseLinearOperator)
    more = total.add_jitter(0.25) + KroneckerProductLinearOperator(identity, noise)
    assert isinstance(more, HilbertTaskNoiseLinearOperator)
    rhs = torch.randn(10, 2, dtype=torch.float64)
    for ours, task_noise in ((total, noise), (more, 2 * noise + 0.25 * torch.eye(2))):
        dense = covariance.to_dense() + torch.kron(torch.eye(5, dtype=torch.float64), task_noise)
        torch.testing.assert_close(ours.to_dense(), dense)
        torch.testing.assert_close(ours.solve(rhs), torch.linalg.solve(dense, rhs))
        torch.testing.assert_close(ours.solve(rhs[:, 0], rhs.mT), rhs.mT @ torch.linalg.solve(dense, rhs[:, 0]))
        torch.testing.assert_close(ours.logdet(), dense.logdet())
        quadratic, logdet = ours.inv_quad_logdet(rhs, logdet=True, reduce_inv_quad=False)
        torch.testing.assert_close(quadratic, (rhs * torch.linalg.solve(dense, rhs)).sum(0))
        torch.testing.assert_close(logdet, dense.logdet())
        root = ours.root_decomposition().root.to_dense()
        torch.testing.assert_close(root @ root.mT, dense)
        samples = ours.zero_mean_mvn_samples(20_000)
        torch.testing.assert_close(samples.mT.cov(), dense, atol=0.1 * float(dense.detach().max()), rtol=0.0)
    rows = total + DiagLinearOperator(torch.rand(10, dtype=torch.float64))  # another noise for each row: no structure
    assert not isinstance(rows, HilbertTaskNoiseLinearOperator)
