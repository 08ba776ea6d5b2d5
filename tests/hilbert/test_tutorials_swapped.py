"""GPyTorch's tutorials, written anew, with one line changed: they agree with the exact models or are refused."""

from __future__ import annotations

import io
import math
from collections.abc import Callable

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.kernels import (
    GaussianSymmetrizedKLKernel,
    IndexKernel,
    Kernel,
    MultitaskKernel,
    RBFKernel,
    RBFKernelGrad,
    ScaleKernel,
    SpectralMixtureKernel,
)
from gpytorch.likelihoods import GaussianLikelihood, MultitaskGaussianLikelihood
from gpytorch.means import ConstantMean, MultitaskMean
from gpytorch.mlls import ExactMarginalLogLikelihood, VariationalELBO
from gpytorch.priors import GammaPrior, LogNormalPrior
from torch import Tensor

from gpytorch_tkrr import Domain, HilbertKernel, UnsupportedKernelError

pytestmark = [
    pytest.mark.filterwarnings("ignore:The input matches the stored training data"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
    pytest.mark.filterwarnings("ignore::linear_operator.utils.warnings.NumericalWarning"),
]

#: Largest difference of means and standard deviations, in units of the targets' standard deviation.
TOLERANCE = 0.05

Swap = Callable[[Kernel, Tensor], Kernel]


def keep(kernel: Kernel, x: Tensor) -> Kernel:
    """The exact model."""
    return kernel


def by_hand(kernel: Kernel, x: Tensor) -> Kernel:
    """More functions in a wider box than any of these problems needs."""
    num_basis = 240 if isinstance(kernel, SpectralMixtureKernel) else 80
    return HilbertKernel(kernel, Domain.from_data(x, boundary_factor=6.0), num_basis)


def by_functions(kernel: Kernel, x: Tensor) -> Kernel:
    """By functions although there are few rows."""
    hilbert = HilbertKernel.from_tolerance(kernel, x)
    hilbert.by_functions().__enter__()
    return hilbert


BY_HAND = pytest.param(by_hand, id="by hand")
FROM_TOLERANCE = pytest.param(HilbertKernel.from_tolerance, id="from tolerance")
BY_FUNCTIONS = pytest.param(by_functions, id="by functions")


class Regression(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood, kernel, batch_shape=()):
        super().__init__(x, y, likelihood)
        self.mean_module = ConstantMean(batch_shape=torch.Size(batch_shape))
        self.covar_module = kernel

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def train(model, *inputs, steps=50, lr=0.1):
    """As the tutorials do it."""
    model.train()
    model.likelihood.train()
    objective = ExactMarginalLogLikelihood(model.likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = -objective(model(*inputs), model.train_targets).sum()
        loss.backward()
        optimizer.step()
    return model.eval()


@torch.no_grad()
def predict(model, *inputs):
    model.eval()
    model.likelihood.eval()
    with gpytorch.settings.fast_pred_var():
        prediction = model.likelihood(model(*inputs))
    return prediction.mean, prediction.variance.sqrt()


def assert_agree(left, right, targets, tolerance=TOLERANCE):
    for one, other in zip(left, right, strict=True):
        assert float((one - other).abs().max() / targets.std()) < tolerance


@pytest.mark.parametrize("swap", [BY_HAND, FROM_TOLERANCE, BY_FUNCTIONS])
def test_simple_regression(swap: Swap):
    x = torch.linspace(0, 1, 100)
    y = torch.sin(x * (2 * math.pi)) + math.sqrt(0.04) * torch.randn(100)

    def run(swap):
        kernel = swap(ScaleKernel(RBFKernel()), x)
        return predict(train(Regression(x, y, GaussianLikelihood(), kernel), x), torch.linspace(0, 1, 51))

    assert_agree(run(swap), run(keep), y)


@pytest.mark.parametrize("swap", [BY_HAND, FROM_TOLERANCE, BY_FUNCTIONS])
def test_batch_mode(swap: Swap):
    shape = torch.Size([2])
    x = torch.linspace(0, 1, 11).view(1, 11, 1).repeat(2, 1, 1)
    waves = [torch.sin(2 * math.pi * x[0, :, 0]), torch.cos(2 * math.pi * x[0, :, 0])]
    y = torch.stack(waves) + 0.1 * torch.randn(2, 11)

    def run(swap):
        kernel = swap(ScaleKernel(RBFKernel(batch_shape=shape), batch_shape=shape), x)
        model = Regression(x, y, GaussianLikelihood(batch_shape=shape), kernel, batch_shape=shape)
        return predict(train(model, x), torch.linspace(0, 1, 51).view(1, 51, 1).repeat(2, 1, 1))

    assert_agree(run(swap), run(keep), y)


@pytest.mark.parametrize("swap", [BY_HAND, FROM_TOLERANCE, BY_FUNCTIONS])
def test_spectral_mixture(swap: Swap):
    x = torch.linspace(0, 1, 15)
    y = torch.sin(x * (2 * math.pi)) + 0.1 * torch.randn(15)

    def run(swap):
        torch.manual_seed(2)  # frequencies and widths start at random values
        kernel = SpectralMixtureKernel(num_mixtures=3)
        kernel.initialize_from_data(x, y)
        model = Regression(x, y, GaussianLikelihood(), swap(kernel, x))
        return predict(train(model, x, steps=60), torch.linspace(0, 1, 51))

    assert_agree(run(swap), run(keep), y)


class Multitask(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood, kernel):
        super().__init__(x, y, likelihood)
        self.mean_module = MultitaskMean(ConstantMean(), num_tasks=2)
        self.covar_module = MultitaskKernel(kernel, num_tasks=2, rank=1)

    def forward(self, x):
        return MultitaskMultivariateNormal(self.mean_module(x), self.covar_module(x))


@pytest.mark.parametrize("swap", [BY_HAND, FROM_TOLERANCE, BY_FUNCTIONS])
def test_multitask(swap: Swap):
    x = torch.linspace(0, 1, 60)
    y = torch.stack([torch.sin(2 * math.pi * x), torch.cos(2 * math.pi * x)], -1) + 0.2 * torch.randn(60, 2)

    def run(swap):
        torch.manual_seed(2)
        model = Multitask(x, y, MultitaskGaussianLikelihood(num_tasks=2), swap(RBFKernel(), x))
        return predict(train(model, x), torch.linspace(0, 1, 51))

    assert_agree(run(swap), run(keep), y)


class Hadamard(gpytorch.models.ExactGP):
    def __init__(self, inputs, y, likelihood, kernel):
        super().__init__(inputs, y, likelihood)
        self.mean_module = ConstantMean()
        self.covar_module = kernel
        self.task_covar_module = IndexKernel(num_tasks=2, rank=1)

    def forward(self, x, i):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x).mul(self.task_covar_module(i)))


@pytest.mark.parametrize("swap", [BY_HAND, FROM_TOLERANCE, BY_FUNCTIONS])
def test_hadamard_multitask(swap: Swap):
    x = torch.rand(100)
    tasks = (torch.arange(100) >= 50).long().unsqueeze(-1)
    y = torch.where(tasks[:, 0] == 0, torch.sin(2 * math.pi * x), torch.cos(2 * math.pi * x)) + 0.2 * torch.randn(100)
    test_x = torch.linspace(0, 1, 51)

    def run(swap):
        torch.manual_seed(2)
        model = train(Hadamard((x, tasks), y, GaussianLikelihood(), swap(RBFKernel(), x)), x, tasks)
        predictions = [predict(model, test_x, torch.full((51, 1), task)) for task in (0, 1)]
        return [torch.cat(parts) for parts in zip(*predictions, strict=True)]

    assert_agree(run(swap), run(keep), y)


@pytest.mark.parametrize("swap", [BY_HAND, FROM_TOLERANCE, BY_FUNCTIONS])
def test_fully_bayesian_by_nuts(swap: Swap):
    pyro = pytest.importorskip("pyro")
    from pyro.infer.mcmc import MCMC, NUTS

    x = torch.linspace(0, 1, 20)
    y = torch.sin(x * (2 * math.pi)) + 0.2 * torch.randn(20)

    def make(swap):
        base = RBFKernel()
        base.register_prior("lengthscale_prior", LogNormalPrior(-1.0, 0.3), "lengthscale")
        kernel = ScaleKernel(base)
        kernel.register_prior("outputscale_prior", GammaPrior(4.0, 4.0), "outputscale")
        base.lengthscale = 0.3
        likelihood = GaussianLikelihood()
        likelihood.register_prior("noise_prior", LogNormalPrior(-3.0, 0.5), "noise")
        return Regression(x, y, likelihood, swap(kernel, x))

    model = make(swap)
    model.likelihood.train()

    def joint(x, y):
        sampled = model.pyro_sample_from_prior()
        pyro.sample("obs", sampled.likelihood(sampled(x)), obs=y)

    chain = MCMC(NUTS(joint, max_tree_depth=4), num_samples=8, warmup_steps=8, disable_progbar=True)
    chain.run(x, y)
    samples = chain.get_samples()
    exact = make(keep)
    exact.pyro_load_from_samples({name.replace("base_kernel.", "", 1): value for name, value in samples.items()})
    model.pyro_load_from_samples(samples)
    test_x = torch.linspace(0, 1, 31).view(1, 31, 1).expand(8, 31, 1)
    assert_agree(predict(model, test_x), predict(exact, test_x), y)


class LearnedFeatures(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood, kernel):
        super().__init__(x, y, likelihood)
        layers = [torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)]
        self.feature_extractor = torch.nn.Sequential(*layers)
        self.scale_to_bounds = gpytorch.utils.grid.ScaleToBounds(-1.0, 1.0)
        self.mean_module = ConstantMean()
        self.covar_module = kernel

    def forward(self, x):
        features = self.scale_to_bounds(self.feature_extractor(x))
        return MultivariateNormal(self.mean_module(features), self.covar_module(features))


@pytest.mark.parametrize("swap", [BY_HAND, FROM_TOLERANCE, BY_FUNCTIONS])
def test_deep_kernel_learning(swap: Swap):
    """The kernel sees learned features; the bounds that they are scaled to stand in for data."""
    x = torch.rand(80, 3)
    y = torch.sin(3 * x.sum(-1)) + 0.1 * torch.randn(80)

    def run(swap):
        torch.manual_seed(3)
        kernel = swap(ScaleKernel(RBFKernel()), torch.tensor([-1.0, 1.0]))
        model = train(LearnedFeatures(x, y, GaussianLikelihood(), kernel), x, steps=40, lr=0.02)
        return predict(model, torch.rand(30, 3, generator=torch.Generator().manual_seed(4)))

    assert_agree(run(swap), run(keep), y)


class Variational(gpytorch.models.ApproximateGP):
    def __init__(self, points, kernel):
        q = gpytorch.variational.CholeskyVariationalDistribution(len(points))
        super().__init__(gpytorch.variational.VariationalStrategy(self, points, q, learn_inducing_locations=False))
        self.mean_module = ConstantMean()
        self.covar_module = kernel

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


@pytest.mark.parametrize("swap", [BY_HAND, FROM_TOLERANCE, BY_FUNCTIONS])
def test_uncertain_inputs(swap: Swap):
    """Inputs are drawn anew for each step of a variational model; the box is that of their range."""
    mean, sd = torch.linspace(0, 1, 30, dtype=torch.float64), 0.03
    y = torch.sin(mean * (2 * math.pi)) + 0.1 * torch.randn(30, dtype=torch.float64)

    def run(swap):
        torch.manual_seed(5)
        base = RBFKernel().double()
        base.lengthscale = 0.2
        kernel = swap(ScaleKernel(base).double(), torch.tensor([-0.2, 1.2]))
        model, likelihood = Variational(mean[::4].unsqueeze(-1), kernel).double(), GaussianLikelihood().double()
        likelihood.noise = 0.05
        objective = VariationalELBO(likelihood, model, num_data=30)
        optimizer = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.05)
        for _ in range(30):
            optimizer.zero_grad()
            draw = (mean + sd * torch.randn(30, dtype=torch.float64)).clamp(-0.2, 1.2).unsqueeze(-1)
            loss = -objective(model(draw), y)
            loss.backward()
            optimizer.step()
        model.likelihood = likelihood
        return predict(model, mean.unsqueeze(-1))

    assert_agree(run(swap), run(keep), y)


def test_inputs_that_are_distributions_are_refused():
    x = torch.cat([torch.rand(20, 1), torch.rand(20, 1).log()], dim=-1)  # means and log variances
    with pytest.raises(UnsupportedKernelError, match=r"compares probability distributions.*Keep the exact kernel"):
        HilbertKernel.from_tolerance(ScaleKernel(GaussianSymmetrizedKLKernel()), x)


@pytest.mark.parametrize("swap", [BY_HAND, FROM_TOLERANCE, BY_FUNCTIONS])
def test_saving_and_loading(swap: Swap):
    x = torch.linspace(0, 1, 50)
    y = torch.sin(x * (2 * math.pi)) + 0.2 * torch.randn(50)
    test_x = torch.linspace(0, 1, 21)
    model = train(Regression(x, y, GaussianLikelihood(), swap(ScaleKernel(RBFKernel()), x)), x, steps=20)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    fresh = Regression(x, y, GaussianLikelihood(), swap(ScaleKernel(RBFKernel()), x))
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    assert_agree(predict(fresh, test_x), predict(model, test_x), y, tolerance=1e-6)


@pytest.mark.parametrize("swap", [BY_HAND, FROM_TOLERANCE, BY_FUNCTIONS])
def test_fantasies(swap: Swap):
    x = torch.linspace(0, 1, 30, dtype=torch.float64)
    y = torch.sin(x * (2 * math.pi)) + 0.1 * torch.randn(30, dtype=torch.float64)
    new_x = torch.tensor([0.15, 0.35], dtype=torch.float64)
    new_y = torch.randn(4, 2, dtype=torch.float64)  # four fantasies at the same inputs
    test_x = torch.linspace(0, 1, 21, dtype=torch.float64)

    def run(swap):
        base = RBFKernel()
        base.lengthscale = 0.3
        model = Regression(x, y, GaussianLikelihood(), swap(ScaleKernel(base), x)).double()
        model.likelihood.noise = 0.01
        predict(model, test_x)
        return predict(model.get_fantasy_model(new_x, new_y), test_x.unsqueeze(-1))

    assert_agree(run(swap), run(keep), y)


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
def test_derivative_observations_are_refused():
    """And not by the advice to register a density, which would lose the derivatives."""
    x = torch.linspace(0, 5, 20)
    with pytest.raises(UnsupportedKernelError, match=r"derivatives.*Keep the exact kernel") as caught:
        HilbertKernel.from_tolerance(ScaleKernel(RBFKernelGrad()), x)
    assert "register" not in str(caught.value)
