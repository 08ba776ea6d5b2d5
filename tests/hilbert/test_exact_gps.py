"""HilbertKernel in GPyTorch's models against dense algebra with the same features, and against exact GPs."""

from __future__ import annotations

import copy
import math
import pickle
import warnings

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import (
    AdditiveKernel,
    AdditiveStructureKernel,
    ConstantKernel,
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    PolynomialKernel,
    ProductKernel,
    RBFKernel,
    ScaleKernel,
)
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood
from models import GP, ReducedRankGP, wavy_data
from repository import is_installed, run_python

from gpytorch_tkrr import DenseFallbackWarning, Domain, HilbertKernel, HyperbolicCross

pytestmark = [
    pytest.mark.usefixtures("functions_for_few_rows"),
    pytest.mark.filterwarnings("ignore::gpytorch_tkrr.ApproximationWarning"),
    pytest.mark.filterwarnings("ignore::gpytorch_tkrr.OutOfDomainWarning"),
    pytest.mark.filterwarnings("ignore:.*StructureKernel is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The last_dim_is_batch argument is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The input matches the stored training data"),
]


def hilbert(base, **kwargs):
    return HilbertKernel(base, Domain(0.5, 1.5), 7, **kwargs)


def precise():
    """A kernel with next to nothing missing."""
    base = RBFKernel()
    base.lengthscale = 0.5
    return HilbertKernel(base, Domain(0.5, 3.0), 26)


def make_data(num=40, dims=2, batch=()):
    x = torch.rand(*batch, num, dims, dtype=torch.float64)
    y = torch.sin(5 * x).sum(-1) + 0.3 * torch.randn(*batch, num, dtype=torch.float64)
    return x, y


def make_model(kernel, num=40, dims=2, likelihood=None, model=GP, batch=()):
    x, y = wavy_data(num, dims, batch)
    likelihood = GaussianLikelihood(batch_shape=kernel.batch_shape) if likelihood is None else likelihood
    gp = model(x, y, likelihood, kernel).double()
    gp.mean_module.initialize(constant=0.3)
    if isinstance(likelihood, GaussianLikelihood):
        likelihood.noise = 0.05
    return gp


def features_of(kernel, x):
    """Features with the square root of the variances: the kernel's own expansion, used densely."""
    if isinstance(kernel, ScaleKernel):
        return features_of(kernel.base_kernel, x) * kernel.outputscale.sqrt().unsqueeze(-1).unsqueeze(-1)
    x = x if kernel.active_dims is None else x[..., kernel.active_dims]
    expansion = kernel.expansion(x.shape[-1])
    return expansion.features(x) * expansion.variances().sqrt().unsqueeze(-2)


def dense_noise(model):
    """The likelihood's noise and what the features lack of the prior variance, its mean over the training rows."""
    noise = model.likelihood.noise
    lacking = unrepresented(model.covar_module, model.train_inputs[0]).mean(-1, keepdim=True).clamp_min(0)
    noise = noise + lacking
    return noise.expand(*noise.shape[:-1], model.train_targets.shape[-1])


def dense_mll(model):
    """The marginal log likelihood per datum by torch's dense normal distribution."""
    x, y = model.train_inputs[0], model.train_targets
    root = features_of(model.covar_module, x)
    covariance = root @ root.mT + torch.diag_embed(dense_noise(model))
    return torch.distributions.MultivariateNormal(model.mean_module(x), covariance).log_prob(y) / y.shape[-1]


def dense_posterior(model, test_x, noise=None):
    x, y = model.train_inputs[0], model.train_targets
    train, test = features_of(model.covar_module, x), features_of(model.covar_module, test_x)
    covariance = train @ train.mT + torch.diag_embed(dense_noise(model) if noise is None else noise)
    cross = test @ train.mT
    residual = (y - model.mean_module(x)).unsqueeze(-1)
    mean = model.mean_module(test_x) + (cross @ torch.linalg.solve(covariance, residual)).squeeze(-1)
    covariance = test @ test.mT - cross @ torch.linalg.solve(covariance, cross.mT)
    return mean, covariance + torch.diag_embed(unrepresented(model.covar_module, test_x).clamp_min(0))


def unrepresented(kernel, x):
    """What the features lack of the exact kernel's own variance."""
    if isinstance(kernel, ScaleKernel):
        return unrepresented(kernel.base_kernel, x) * kernel.outputscale.unsqueeze(-1)
    exact = kernel.base_kernel(x if kernel.active_dims is None else x[..., kernel.active_dims], diag=True)
    return exact - features_of(kernel, x).square().sum(-1)


def assert_close(actual, expected, tolerance=1e-8):
    assert actual.shape == expected.shape
    error = (actual - expected).detach().abs().max() / expected.detach().abs().max()
    assert error < tolerance


BASES = {
    "rbf": lambda: ScaleKernel(RBFKernel(ard_num_dims=2)),
    "matern": lambda: MaternKernel(nu=1.5),
    "scale_outside": None,
    "sum_over_columns": lambda: AdditiveKernel(
        RBFKernel(active_dims=[0]), ScaleKernel(MaternKernel(active_dims=[1])), ConstantKernel()
    ),
    "additive_structure": lambda: AdditiveStructureKernel(ScaleKernel(RBFKernel()), num_dims=2),
    "product_over_columns": lambda: ProductKernel(RBFKernel(active_dims=[0]), MaternKernel(nu=0.5, active_dims=[1])),
    "periodic_by_other": lambda: ProductKernel(PeriodicKernel(active_dims=[0]), RBFKernel(active_dims=[1])),
    "periodic_by_same": lambda: AdditiveKernel(
        ProductKernel(PeriodicKernel(active_dims=[0]), RBFKernel(active_dims=[0])), RBFKernel(active_dims=[1])
    ),
    "linear": lambda: AdditiveKernel(LinearKernel(), RBFKernel()),
    "polynomial": lambda: AdditiveKernel(PolynomialKernel(power=2), MaternKernel(nu=2.5)),
}


def make_kernel(name):
    if name == "scale_outside":
        return ScaleKernel(hilbert(RBFKernel()))
    return hilbert(BASES[name]())


@pytest.mark.parametrize("num", [40, 200])  # fewer and more data than the 49 functions
@pytest.mark.parametrize("name", BASES)
def test_likelihood_gradients_and_predictions_equal_dense_algebra(name, num):
    model = make_model(make_kernel(name), num)
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    value = mll(model(*model.train_inputs), model.train_targets)
    expected = dense_mll(model)
    assert_close(value, expected)
    parameters = dict(model.named_parameters())
    gradient = torch.autograd.grad(value, parameters.values())
    expected_gradient = torch.autograd.grad(expected, parameters.values())
    scale = max(float(g.abs().max()) for g in expected_gradient)
    for key, actual, reference in zip(parameters, gradient, expected_gradient, strict=True):
        assert float((actual - reference).abs().max()) < 1e-8 * scale, key

    test_x = torch.rand(15, 2, dtype=torch.float64)
    model.eval()
    posterior = model(test_x)
    mean, covariance = dense_posterior(model, test_x)
    assert_close(posterior.mean, mean)
    assert_close(posterior.covariance_matrix, covariance)
    assert_close(posterior.variance, covariance.diagonal())


@pytest.mark.parametrize("name", ["rbf", "periodic_by_other"])
def test_gradients_agree_with_finite_differences(name):
    model = make_model(make_kernel(name), 60)
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    vector = torch.nn.utils.parameters_to_vector(model.parameters()).detach()

    def value(entries):
        torch.nn.utils.vector_to_parameters(entries, model.parameters())
        with torch.no_grad():
            return float(mll(model(*model.train_inputs), model.train_targets))

    steps = 1e-5 * torch.eye(len(vector), dtype=torch.float64)
    numerical = torch.tensor([(value(vector + step) - value(vector - step)) / 2e-5 for step in steps])
    torch.nn.utils.vector_to_parameters(vector, model.parameters())
    mll(model(*model.train_inputs), model.train_targets).backward()
    analytic = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert torch.allclose(analytic, numerical.double(), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("num", [40, 200])
def test_fixed_noise_equals_dense_algebra(num, learned):
    noise = 0.01 + torch.rand(num, dtype=torch.float64)
    likelihood = FixedNoiseGaussianLikelihood(noise, learn_additional_noise=learned)
    model = make_model(hilbert(RBFKernel()), num, likelihood=likelihood)
    mll = ExactMarginalLogLikelihood(likelihood, model)
    value, expected = mll(model(*model.train_inputs), model.train_targets), dense_mll(model)
    assert_close(value, expected)
    parameters = list(model.parameters())
    for actual, reference in zip(
        torch.autograd.grad(value, parameters), torch.autograd.grad(expected, parameters), strict=True
    ):
        assert_close(actual, reference)
    test_x = torch.rand(15, 2, dtype=torch.float64)
    posterior = model.eval()(test_x)
    mean, covariance = dense_posterior(model, test_x)
    assert_close(posterior.mean, mean)
    assert_close(posterior.covariance_matrix, covariance)


@pytest.mark.parametrize("periodic", [False, True])
def test_batch_of_models_equals_dense_algebra(periodic):
    shape = torch.Size([3])
    base = PeriodicKernel(batch_shape=shape) if periodic else MaternKernel(batch_shape=shape)
    base.lengthscale = torch.tensor([0.3, 0.6, 1.2]).reshape(3, 1, 1)
    if periodic:
        base.period_length = torch.tensor([0.5, 1.0, 2.0]).reshape(3, 1, 1)
    for batch in [(3,), ()]:  # three data sets, and three models of one
        kernel = hilbert(ScaleKernel(copy.deepcopy(base), batch_shape=shape))
        x, y = wavy_data(30, 1, batch)
        model = GP(x, y.expand(3, 30), GaussianLikelihood(batch_shape=shape), kernel).double()
        mll = ExactMarginalLogLikelihood(model.likelihood, model)
        value, expected = mll(model(x), model.train_targets), dense_mll(model)
        assert_close(value, expected)
        parameters = list(model.parameters())
        for actual, reference in zip(
            torch.autograd.grad(value.sum(), parameters), torch.autograd.grad(expected.sum(), parameters), strict=True
        ):
            assert_close(actual, reference)
        test_x = torch.rand(5, 1, dtype=torch.float64)
        posterior = model.eval()(test_x.expand(*batch, 5, 1))
        mean, covariance = dense_posterior(model, test_x)
        assert_close(posterior.mean, mean)
        assert_close(posterior.covariance_matrix, covariance)


@pytest.mark.parametrize("base", [RBFKernel, lambda: MaternKernel(nu=2.5), lambda: MaternKernel(nu=1.5)])
def test_tends_to_the_exact_process_as_functions_are_added(base):
    exact_kernel = ScaleKernel(base()).double()
    exact_kernel.base_kernel.lengthscale = 0.2
    exact = make_model(exact_kernel, 60, 1)
    x, y = exact.train_inputs[0], exact.train_targets
    test_x = torch.linspace(0, 1, 31, dtype=torch.float64).unsqueeze(-1)

    def evaluate(kernel):
        model = GP(x, y, exact.likelihood, kernel).double()
        model.mean_module.initialize(constant=0.3)
        value = ExactMarginalLogLikelihood(model.likelihood, model)(model(x), y)
        posterior = model.eval()(test_x)
        return torch.cat([value.reshape(1), posterior.mean, posterior.variance]).detach()

    with gpytorch.settings.fast_pred_var(False):
        reference = evaluate(exact_kernel)
    errors = [
        float((evaluate(HilbertKernel(exact_kernel, Domain(0.5, 2.5), m)) - reference).abs().max())
        for m in (12, 48, 384)
    ]
    assert errors[0] > 2 * errors[1] and errors[1] > 2 * errors[2]
    assert errors[2] < 1e-2


def test_training_equals_training_of_the_exact_process():
    x, y = wavy_data(100, 1)
    learned = []
    for wrap in (lambda k: k, lambda k: HilbertKernel(k, Domain(0.5, 3.0), 60)):
        model = GP(x, y, GaussianLikelihood(), wrap(ScaleKernel(RBFKernel()))).double()
        mll = ExactMarginalLogLikelihood(model.likelihood, model)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=60, line_search_fn="strong_wolfe")

        def closure(model=model, mll=mll, optimizer=optimizer):
            optimizer.zero_grad()
            loss = -mll(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
        learned.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach())
    assert torch.allclose(learned[0], learned[1], atol=1e-3)


def test_large_data_stay_exact_and_deterministic():
    """Above GPyTorch's limits for Cholesky (800) its generic operators turn to random iterations."""
    model = make_model(make_kernel("rbf"), 1500)
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    values = [mll(model(*model.train_inputs), model.train_targets) for _ in range(2)]
    assert values[0] == values[1]
    assert_close(values[0], dense_mll(model))


@pytest.mark.parametrize("num", [30, 900])
def test_sum_of_two_hilbert_kernels_is_exact(num):
    domain = Domain(0.5, 2.5)
    kernel = AdditiveKernel(
        HilbertKernel(RBFKernel(), domain, 20, active_dims=[0]), HilbertKernel(RBFKernel(), domain, 20)
    )
    model = make_model(kernel, num)
    inside = HilbertKernel(AdditiveKernel(RBFKernel(active_dims=[0]), RBFKernel()), domain, 20)
    same = GP(model.train_inputs[0], model.train_targets, model.likelihood, inside).double()
    same.mean_module = model.mean_module
    values = [ExactMarginalLogLikelihood(m.likelihood, m)(m(*m.train_inputs), m.train_targets) for m in (model, same)]
    assert_close(*values, 1e-6)
    test_x = torch.rand(5, 2, dtype=torch.float64)
    posteriors = [m.eval()(test_x) for m in (model, same)]
    assert_close(posteriors[0].mean, posteriors[1].mean, 1e-6)
    if num == 30:  # above 800 rows GPyTorch's own strategy solves for this by conjugate gradients
        assert_close(posteriors[0].covariance_matrix, posteriors[1].covariance_matrix, 1e-7)


def test_product_of_two_hilbert_kernels_is_the_product():
    first, second = hilbert(RBFKernel(), active_dims=[0]), hilbert(MaternKernel(), active_dims=[1])
    x, _ = wavy_data(20)
    product = ProductKernel(first, second).double()
    assert_close(product(x).to_dense(), first(x).to_dense() * second(x).to_dense())
    model = make_model(product, 20)
    covariance = product(model.train_inputs[0]).to_dense() + model.likelihood.noise * torch.eye(20)
    mean = model.mean_module(model.train_inputs[0])
    expected = torch.distributions.MultivariateNormal(mean, covariance).log_prob(model.train_targets) / 20
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    assert_close(mll(model(*model.train_inputs), model.train_targets), expected)


def test_multitask_kernel_equals_dense_kronecker_algebra():
    class Multitask(gpytorch.models.ExactGP):
        def __init__(self, x, y, likelihood):
            super().__init__(x, y, likelihood)
            self.mean_module = gpytorch.means.MultitaskMean(gpytorch.means.ZeroMean(), num_tasks=2)
            self.covar_module = gpytorch.kernels.MultitaskKernel(precise(), num_tasks=2, rank=1)

        def forward(self, x):
            return gpytorch.distributions.MultitaskMultivariateNormal(self.mean_module(x), self.covar_module(x))

    x, y = wavy_data(25)
    y = torch.stack([y, y.cos()], -1)
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=2, has_task_noise=False)
    model = Multitask(x, y, likelihood).double()
    root = features_of(model.covar_module.data_covar_module, x)
    tasks = model.covar_module.task_covar_module.covar_matrix.to_dense()
    prior = torch.kron(root @ root.mT, tasks)
    covariance = prior + likelihood.noise * torch.eye(50)
    normal = torch.distributions.MultivariateNormal(torch.zeros(50, dtype=torch.float64), covariance)
    value = ExactMarginalLogLikelihood(likelihood, model)(model(x), y)
    assert_close(value, normal.log_prob(y.flatten()) / 50)
    test_x = torch.rand(4, 2, dtype=torch.float64)
    test = features_of(model.covar_module.data_covar_module, test_x)
    cross = torch.kron(test @ root.mT, tasks)
    posterior = model.eval()(test_x)
    assert_close(posterior.mean.flatten(), cross @ torch.linalg.solve(covariance, y.flatten()))
    expected = torch.kron(test @ test.mT, tasks) - cross @ torch.linalg.solve(covariance, cross.mT)
    assert_close(posterior.covariance_matrix, expected, 1e-7)


def test_list_of_models():
    models = [make_model(make_kernel(name), 30) for name in ("rbf", "linear")]
    together = gpytorch.models.IndependentModelList(*models)
    likelihood = gpytorch.likelihoods.LikelihoodList(*(m.likelihood for m in models))
    mll = gpytorch.mlls.SumMarginalLogLikelihood(likelihood, together)
    assert_close(mll(together(*together.train_inputs), together.train_targets), sum(dense_mll(m) for m in models) / 2)
    together.eval()
    test_x = torch.rand(4, 2, dtype=torch.float64)
    for prediction, model in zip(likelihood.eval()(*together(test_x, test_x)), models, strict=True):
        mean, covariance = dense_posterior(model, test_x)
        assert_close(prediction.mean, mean)
        assert_close(prediction.variance, covariance.diagonal() + model.likelihood.noise)


def test_deep_kernel_learning_reaches_the_network():
    class Deep(GP):
        def forward(self, x):
            return super().forward(self.network(x))

    x, y = wavy_data(30, 3)
    model = Deep(x, y, GaussianLikelihood(), hilbert(RBFKernel()))
    model.network = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Sigmoid())
    model.double()
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    parameters = list(model.parameters())
    for _ in range(2):  # a graph kept from the first step would fail in the second
        value = mll(model(x), y)
        root = features_of(model.covar_module, model.network(x))
        noise = model.likelihood.noise + (1 - root.square().sum(-1)).mean()
        covariance = root @ root.mT + noise * torch.eye(30)
        expected = torch.distributions.MultivariateNormal(model.mean_module(x), covariance).log_prob(y) / 30
        assert_close(value, expected)
        for actual, reference in zip(
            torch.autograd.grad(value, parameters), torch.autograd.grad(expected, parameters), strict=True
        ):
            assert_close(actual, reference)
        with torch.no_grad():
            for parameter in model.network.parameters():
                parameter.add_(0.1)
    test_x = torch.rand(4, 3, dtype=torch.float64)
    model.eval()
    with torch.no_grad():
        train, test = (features_of(model.covar_module, model.network(inputs)) for inputs in (x, test_x))
        noise = model.likelihood.noise + (1 - train.square().sum(-1)).mean()
        covariance = train @ train.mT + noise * torch.eye(30)
        solved = torch.linalg.solve(covariance, (y - model.mean_module(x)).unsqueeze(-1))
        expected = model.mean_module(test_x) + (test @ train.mT @ solved).squeeze(-1)
    for _ in range(2):
        posterior = model(test_x)
        assert_close(posterior.mean.detach(), expected)
        posterior.mean.sum().backward()


def test_deepcopy_pickle_and_state_dict():
    model = make_model(make_kernel("periodic_by_other"), 30)
    model.covar_module.base_kernel.kernels[0].period_length = 0.7
    test_x = torch.rand(5, 2, dtype=torch.float64)
    expected = model.eval()(test_x).mean
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    fresh = make_model(HilbertKernel(BASES["periodic_by_other"](), Domain(0.0, 9.0), 7), 30)
    fresh.set_train_data(*model.train_inputs, model.train_targets)
    assert not torch.allclose(fresh.eval()(test_x).mean, expected)
    fresh.train()  # a cached evaluation in the old domain must not survive
    fresh(*fresh.train_inputs).lazy_covariance_matrix.evaluate_kernel()
    fresh.load_state_dict(model.state_dict())
    for twin in (*twins, fresh):
        assert_close(twin.eval()(test_x).mean, expected)


def test_conversion_of_dtype_and_back():
    model = make_model(make_kernel("rbf"), 30)
    test_x = torch.rand(5, 2, dtype=torch.float64)
    expected = model.eval()(test_x)
    single = copy.deepcopy(model).float().eval()
    posterior = single(test_x.float())
    assert posterior.mean.dtype == posterior.covariance_matrix.dtype == torch.float32
    assert posterior.rsample(torch.Size([2])).dtype == torch.float32
    assert_close(posterior.mean.double(), expected.mean, 1e-4)
    single.train()
    value = ExactMarginalLogLikelihood(single.likelihood, single)(single(*single.train_inputs), single.train_targets)
    assert value.dtype == torch.float32
    assert_close(single.double().eval()(test_x).mean, expected.mean, 1e-4)


def test_new_data_and_new_parameters_are_noticed():
    model = make_model(make_kernel("rbf"), 30)
    test_x = torch.rand(5, 2, dtype=torch.float64)

    def check():
        model.train()
        mll = ExactMarginalLogLikelihood(model.likelihood, model)
        assert_close(mll(model(*model.train_inputs), model.train_targets), dense_mll(model))
        model.eval()
        assert_close(model(test_x).mean, dense_posterior(model, test_x)[0])

    check()
    model.covar_module.base_kernel.base_kernel.lengthscale = 0.3
    check()
    model.train_inputs[0][3] = 0.123  # in place
    check()
    model.set_train_data(*wavy_data(30))
    check()
    model.set_train_data(*wavy_data(50), strict=False)
    check()
    model.set_train_data(targets=torch.randn(50, dtype=torch.float64))
    check()


@pytest.mark.parametrize("active_dims", [None, [0, 2]])
def test_training_rows_are_never_evaluated(count_features, active_dims):
    """Sums over rows of products of functions need the functions of each input only."""
    kernel = HilbertKernel(RBFKernel(), Domain(0.5, 1.5), 5, active_dims=active_dims)
    model = make_model(ScaleKernel(kernel), 100, 3 if active_dims else 2)
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        (-mll(model(*model.train_inputs), model.train_targets)).backward()
        optimizer.step()
    assert count_features == []
    model.eval()
    test_x = torch.rand(4, 7, model.train_inputs[0].shape[-1], dtype=torch.float64)
    for _ in range(3):
        posterior = model(test_x)
        posterior.variance, posterior.mean  # noqa: B018
    probes, *others = count_features  # where the approximation is checked, once per fit
    assert probes <= 64 and others == [28, 28, 28]


def test_features_are_evaluated_anew_while_the_period_is_trained(count_features):
    model = make_model(make_kernel("periodic_by_other"), 30)
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    for _ in range(3):
        mll(model(*model.train_inputs), model.train_targets).backward()
    assert count_features == [30, 30, 30]
    model.covar_module.base_kernel.kernels[0].raw_period_length.requires_grad_(False)
    for _ in range(3):
        mll(model(*model.train_inputs), model.train_targets).backward()
    assert count_features == [30, 30, 30, 30]


def test_cache_holds_no_graph():
    model = make_model(make_kernel("rbf"), 30)
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    for _ in range(2):
        mll(model(*model.train_inputs), model.train_targets).backward()
    _, key, features = model.covar_module._cache.content
    assert not any(tensor.requires_grad for tensor in (*key, features.to_dense(), features.gram()))


def test_single_precision_with_little_noise():
    """Float32 sums would lose the noise: at 1e-4 their Cholesky fails, at 1e-3 their variances are wrong."""
    num = 20_000
    x = torch.rand(num, 2)
    y = torch.sin(6 * x).sum(-1) + 0.01 * torch.randn(num)
    test_x = torch.rand(50, 2)
    for noise in (1e-3, 1e-4):
        results = []
        for dtype in (torch.float32, torch.float64):
            likelihood = GaussianLikelihood(noise_constraint=gpytorch.constraints.GreaterThan(1e-5))
            base = ScaleKernel(RBFKernel())
            base.base_kernel.lengthscale = 0.3
            model = GP(x.to(dtype), y.to(dtype), likelihood, HilbertKernel(base, Domain(0.5, 1.2), 14)).to(dtype)
            likelihood.noise = noise
            value = ExactMarginalLogLikelihood(likelihood, model)(model(model.train_inputs[0]), model.train_targets)
            value.backward()
            assert all(torch.isfinite(p.grad).all() for p in model.parameters())
            posterior = model.eval()(test_x.to(dtype))
            variance = posterior.lazy_covariance_matrix.diagonal()  # GPyTorch would round it up to 1e-6
            assert value.dtype == posterior.mean.dtype == variance.dtype == dtype
            results.append([t.detach().double() for t in (value, posterior.mean, variance)])
        for single, double in zip(*results, strict=True):
            assert ((single - double).abs() <= 1e-3 * double.abs() + 1e-9).all()


def test_dense_fallback_warns_and_names_the_setting():
    model = make_model(make_kernel("rbf"), 60)
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    expected = dense_mll(model)
    with gpytorch.settings.fast_computations.log_prob(False):  # as importing botorch does
        with pytest.warns(DenseFallbackWarning, match=r"fast_computations\.log_prob"):
            assert_close(mll(model(*model.train_inputs), model.train_targets), expected, 1e-7)
        model.__class__ = ReducedRankGP
        assert_close(mll(model(*model.train_inputs), model.train_targets), expected)  # a warning would fail the test


def test_after_importing_botorch():
    if not is_installed("botorch"):  # importing it here would change the settings of this process
        pytest.skip("botorch is not installed")
    script = """
import warnings
import botorch, gpytorch, torch, gpytorch_tkrr as tkrr
assert gpytorch.settings.fast_computations.log_prob.off()
class GP(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = tkrr.HilbertKernel.from_tolerance(gpytorch.kernels.RBFKernel(), x)
    def forward(self, x):
        return self.distribution(self.mean_module(x), self.covar_module(x))
x = torch.rand(600, 1, dtype=torch.float64)
for distribution, expected in ((gpytorch.distributions.MultivariateNormal, 1), (tkrr.ReducedRankNormal, 0)):
    GP.distribution = distribution
    model = GP(x, torch.sin(6 * x[:, 0]), gpytorch.likelihoods.GaussianLikelihood()).double()
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            (-mll(model(x), model.train_targets)).backward()
    names = [w.category for w in caught]
    assert names.count(tkrr.DenseFallbackWarning) == expected, names
print("ok")
"""
    result = run_python(script)
    assert result.stdout.strip() == "ok", result.stderr


def test_works_in_an_approximate_process():
    class Approximate(gpytorch.models.ApproximateGP):
        def __init__(self, inducing):
            distribution = gpytorch.variational.CholeskyVariationalDistribution(len(inducing))
            super().__init__(gpytorch.variational.VariationalStrategy(self, inducing, distribution))
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = HilbertKernel(ScaleKernel(RBFKernel()), Domain(0.5, 2.0), 20)

        def forward(self, x):
            return MultivariateNormal(self.mean_module(x), self.covar_module(x))

    x, y = wavy_data(200, 1)
    model, likelihood = Approximate(x[:12].clone()).double(), GaussianLikelihood().double()
    elbo = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=200)
    optimizer = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.05)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = -elbo(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    exact = GP(x, y, likelihood, model.covar_module)
    exact.mean_module = model.mean_module
    bound = -ExactMarginalLogLikelihood(likelihood, exact)(exact(x), y).item()
    assert bound - 1e-6 < losses[-1] < losses[0] - 0.5  # the bound never passes the marginal likelihood


def test_priors_constraints_and_initialisation_work_through_the_kernel():
    base = RBFKernel(lengthscale_prior=gpytorch.priors.GammaPrior(2.0, 3.0))
    kernel = hilbert(ScaleKernel(base))
    assert [name for name, *_ in kernel.named_priors()] == ["base_kernel.base_kernel.lengthscale_prior"]
    assert {name for name, _ in kernel.named_hyperparameters()} == {
        "base_kernel.raw_outputscale",
        "base_kernel.base_kernel.raw_lengthscale",
    }
    kernel.initialize(**{"base_kernel.base_kernel.lengthscale": 0.4})
    assert math.isclose(base.lengthscale.item(), 0.4, rel_tol=1e-5)
    model = make_model(kernel, 30)
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    prior = base.lengthscale_prior.log_prob(base.lengthscale).sum() / 30
    assert_close(mll(model(*model.train_inputs), model.train_targets), dense_mll(model) + prior)


def test_fully_bayesian_parameter_batches():
    """Loading samples of the parameters makes a batch of models."""
    model = make_model(hilbert(ScaleKernel(RBFKernel())), 30)
    kernel = hilbert(ScaleKernel(RBFKernel(batch_shape=torch.Size([4])), batch_shape=torch.Size([4])))
    kernel.base_kernel.base_kernel.lengthscale = torch.rand(4, 1, 1) + 0.1
    test_x = torch.rand(3, 1, 2, dtype=torch.float64)
    batch = GP(model.train_inputs[0], model.train_targets.expand(4, 30), model.likelihood, kernel).double().eval()
    posterior = batch(test_x.unsqueeze(1))  # (3, 1, q, d) inputs on a batch of four models
    assert posterior.mean.shape == (3, 4, 1)
    mean, covariance = dense_posterior(batch, test_x.unsqueeze(1))
    assert_close(posterior.mean, mean)
    assert_close(posterior.covariance_matrix, covariance)


def test_no_warning_from_leave_one_out():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = make_model(make_kernel("rbf"), 30)
        loo = gpytorch.mlls.LeaveOneOutPseudoLikelihood(model.likelihood, model)
        value = loo(model(*model.train_inputs), model.train_targets)
    root = features_of(model.covar_module, model.train_inputs[0])
    inverse = torch.linalg.inv(root @ root.mT + torch.diag_embed(dense_noise(model)))
    y = model.train_targets
    residual = inverse @ (y - model.mean_module(*model.train_inputs))
    left_out = torch.distributions.Normal(y - residual / inverse.diagonal(), inverse.diagonal().rsqrt())
    assert_close(value, left_out.log_prob(y).mean())


def test_hyperbolic_cross_in_five_dimensions():
    kernel = HilbertKernel(RBFKernel(ard_num_dims=5), Domain(0.5, 1.5), 8, index_set=HyperbolicCross(8))
    model = make_model(kernel, 50, 5)
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    assert_close(mll(model(*model.train_inputs), model.train_targets), dense_mll(model))
