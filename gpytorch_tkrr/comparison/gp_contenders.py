"""
Gaussian processes trained by their marginal likelihood, and their approximations in GPyTorch and here.

Inputs and targets are standardised. All have an RBF kernel with a lengthscale per input, so that they differ in the
approximation only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import AdditiveKernel, InducingPointKernel, Kernel, RBFKernel, RFFKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood, GaussianLikelihood, Likelihood, StudentTLikelihood
from gpytorch.variational import CholeskyVariationalDistribution, VariationalStrategy
from torch import Tensor

from ..bases.domain import Domain
from ..errors import NotApplicableError
from ..hilbert.kernel import HilbertKernel
from ..model.likelihoods.registry import observe
from ..model.prediction import Prediction as Predicted
from .contender import BATCH, Contender, Prediction, Scaler, register_contender
from .distribution import Rescaled

#: Exact GPs are factorised by Cholesky up to this number of rows; above, GPyTorch's estimates would be random.
MAX_CHOLESKY = 10_000

#: More functions than this are left to others.
MAX_FUNCTIONS = 4000


class ExactModel(gpytorch.models.ExactGP):
    """
    An ExactGP with a given kernel.

    :param x: Inputs `(N, D)`.
    :param y: Targets `(N,)`.
    :param likelihood: The likelihood.
    :param kernel: The kernel.
    """

    def __init__(self, x: Tensor, y: Tensor, likelihood: GaussianLikelihood, kernel: Kernel):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = kernel

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


@dataclass
class MarginalLikelihoodGP(Contender):
    """
    What models trained by their marginal likelihood have in common.

    :param num_steps: Steps of Adam.
    :param rate: Its step size.
    """

    num_steps: int = 50
    rate: float = 0.1

    def kernel(self, x: Tensor, likelihood: GaussianLikelihood) -> Kernel:
        """
        The kernel to train.

        :param x: Standardised inputs `(N, D)`.
        :param likelihood: The likelihood, for kernels that need to know it.
        """
        raise NotImplementedError

    def fit(self, x: Tensor, y: Tensor) -> None:
        self._needs_regression()
        torch.manual_seed(self.seed)
        self.inputs, self.targets = Scaler(x), Scaler(y)
        x, y = self.inputs(x), self.targets(y)
        likelihood = GaussianLikelihood()
        self.model = ExactModel(x, y, likelihood, self.kernel(x, likelihood)).double()
        objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, self.model)
        optimizer = torch.optim.Adam(self.model.parameters(), lr=self.rate)
        with gpytorch.settings.max_cholesky_size(MAX_CHOLESKY), self._bar(self.num_steps) as bar:
            for _ in range(self.num_steps):
                optimizer.zero_grad()
                loss = -objective(self.model(x), y)
                loss.backward()
                optimizer.step()
                bar.update(f"loss {loss.item():.4g}")
        self.model.eval()

    @torch.no_grad()
    def predict(self, x: Tensor) -> Prediction:
        with gpytorch.settings.max_cholesky_size(MAX_CHOLESKY):
            parts = [self.model.likelihood(self.model(rows)) for rows in self.inputs(x).split(BATCH)]
            mean = torch.cat([part.mean for part in parts])
            variance = torch.cat([part.variance for part in parts])
        return self.targets.mean + self.targets.sd * mean, self.targets.sd * variance.sqrt()

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters()) + self._num_weights()

    def _num_weights(self) -> int:
        return 0


@register_contender("exact")
@dataclass
class SubsetExactGP(MarginalLikelihoodGP):
    """
    An exact GP on a random subset of the training rows.

    :param num_rows: Its size.
    """

    title: ClassVar[str] = "ExactGP on a subset"
    note: ClassVar[str] = "trained on at most 1000 random rows. All full-batch models: 50 steps of Adam (0.1)."
    num_rows: int = 1000

    def fit(self, x: Tensor, y: Tensor) -> None:
        rows = torch.randperm(len(y), generator=torch.Generator().manual_seed(self.seed))[: self.num_rows]
        super().fit(x[rows], y[rows])

    def kernel(self, x: Tensor, likelihood: GaussianLikelihood) -> Kernel:
        return ScaleKernel(RBFKernel(ard_num_dims=x.shape[1]))


class VariationalModel(gpytorch.models.ApproximateGP):
    """
    A sparse variational GP.

    :param inducing_points: Where the inducing points start, `(m, D)`.
    """

    def __init__(self, inducing_points: Tensor):
        distribution = CholeskyVariationalDistribution(len(inducing_points))
        super().__init__(VariationalStrategy(self, inducing_points, distribution))
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = ScaleKernel(RBFKernel(ard_num_dims=inducing_points.shape[1]))

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


@register_contender("svgp")
@dataclass
class SVGP(Contender):
    """
    A sparse variational GP trained by Adam in batches, in single precision.

    :param num_inducing: Number of inducing points.
    :param num_epochs: Passes over the data, at least.
    :param num_steps: Steps, at least.
    :param batch_size: Rows per step.
    :param rate: Step size.

    Reference: Hensman, Matthews & Ghahramani (2015), *Scalable variational Gaussian process classification*.
    """

    title: ClassVar[str] = "SVGP"
    note: ClassVar[str] = (
        "at most 512 inducing points; Adam (0.02), batches of 512, 30 epochs or 400 steps, whichever is more."
    )
    num_inducing: int = 512
    num_epochs: int = 30
    num_steps: int = 400
    batch_size: int = 512
    rate: float = 0.02

    def fit(self, x: Tensor, y: Tensor) -> None:
        self._needs_two_classes()
        torch.manual_seed(self.seed)
        self.inputs = Scaler(x)
        self.targets = Scaler(y) if self.task == "regression" else None
        x = self.inputs(x).float()
        y = (y if self.targets is None else self.targets(y)).float()
        self.likelihood = self.new_likelihood()
        self.model = VariationalModel(_some_rows(x, self.num_inducing, self.seed))
        objective = gpytorch.mlls.VariationalELBO(self.likelihood, self.model, num_data=len(y))
        optimizer = torch.optim.Adam([*self.model.parameters(), *self.likelihood.parameters()], lr=self.rate)
        num_batches = -(-len(y) // self.batch_size)
        num_epochs = max(self.num_epochs, -(-self.num_steps // num_batches))
        with self._bar(num_epochs * num_batches) as bar:
            for _ in range(num_epochs):
                for rows in torch.randperm(len(y)).split(self.batch_size):
                    optimizer.zero_grad()
                    loss = -objective(self.model(x[rows]), y[rows])
                    loss.backward()
                    optimizer.step()
                    bar.update(f"loss {loss.item():.4g}")
        self.model.eval()
        self.likelihood.eval()

    def new_likelihood(self) -> Likelihood:
        """The likelihood before training."""
        return GaussianLikelihood() if self.task == "regression" else BernoulliLikelihood()

    @torch.no_grad()
    def predict(self, x: Tensor) -> Prediction:
        parts = [self.likelihood(self.model(rows)) for rows in self.inputs(x).float().split(BATCH)]
        mean = torch.cat([part.mean for part in parts]).double()
        if self.targets is None:
            return mean
        sd = torch.cat([part.variance for part in parts]).double().sqrt()
        return self.targets.mean + self.targets.sd * mean, self.targets.sd * sd

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for module in (self.model, self.likelihood) for p in module.parameters())


@register_contender("svgp-student")
@dataclass
class StudentSVGP(SVGP):
    """A sparse variational GP with Student noise."""

    title: ClassVar[str] = "SVGP, Student"
    note: ClassVar[str] = "as SVGP, with a StudentTLikelihood; scored by its whole predictive distribution."

    def new_likelihood(self) -> Likelihood:
        self._needs_regression()
        return StudentTLikelihood()

    @torch.no_grad()
    def predict(self, x: Tensor) -> Prediction:
        assert self.targets is not None
        parts = [self.model(rows) for rows in self.inputs(x).float().split(BATCH)]
        mean = torch.cat([part.mean for part in parts]).double().unsqueeze(0)  # (1, n)
        variance = torch.cat([part.variance for part in parts]).double().unsqueeze(0)
        rows = torch.arange(len(x), dtype=torch.float64).unsqueeze(-1)

        def components(rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            index = rows[:, 0].long()
            return mean[:, index], {"spread": variance[:, index]}

        names = ("noise", "deg_free")
        parameters = {name: getattr(self.likelihood, name).detach().double().reshape(1) for name in names}
        made = Predicted(observe(self.likelihood), components, parameters, rows, {})
        return Rescaled(made, self.targets.mean, self.targets.sd)


@register_contender("sgpr")
@dataclass
class SGPR(MarginalLikelihoodGP):
    """
    A Nyström approximation with trained inducing points (Titsias 2009), `InducingPointKernel` in an `ExactGP`.

    :param num_inducing: Number of inducing points.
    """

    title: ClassVar[str] = "SGPR"
    note: ClassVar[str] = "InducingPointKernel with at most 512 trained inducing points."
    num_inducing: int = 512

    def kernel(self, x: Tensor, likelihood: GaussianLikelihood) -> Kernel:
        base = ScaleKernel(RBFKernel(ard_num_dims=x.shape[1]))
        return InducingPointKernel(base, _some_rows(x, self.num_inducing, self.seed), likelihood)


@register_contender("rff")
@dataclass
class RandomFeaturesGP(MarginalLikelihoodGP):
    """
    Random Fourier features, `RFFKernel` in an `ExactGP`.

    :param num_samples: Number of frequencies; there is a sine and a cosine for each.
    """

    title: ClassVar[str] = "RFF"
    note: ClassVar[str] = "RFFKernel with 128 frequencies: 256 features."
    num_samples: int = 128

    def kernel(self, x: Tensor, likelihood: GaussianLikelihood) -> Kernel:
        return ScaleKernel(RFFKernel(self.num_samples, num_dims=x.shape[1], ard_num_dims=x.shape[1]))

    def _num_weights(self) -> int:
        return 2 * self.num_samples


@register_contender("additive-hilbert")
@dataclass
class AdditiveHilbert(MarginalLikelihoodGP):
    """
    A sum of one-dimensional kernels, each expanded by a `HilbertKernel`.

    :param num_basis: Functions per input.
    """

    title: ClassVar[str] = "additive HilbertKernel"
    note: ClassVar[str] = "a sum of one-dimensional RBF kernels: no interactions."
    num_basis: int = 20

    def kernel(self, x: Tensor, likelihood: GaussianLikelihood) -> Kernel:
        num_dims = x.shape[1]
        self._check_size(num_dims)
        parts = [ScaleKernel(RBFKernel(active_dims=[d])) for d in range(num_dims)]
        for part in parts:
            part.outputscale = 1 / num_dims
        return HilbertKernel(AdditiveKernel(*parts), wide_box(x), self.num_basis)

    def _check_size(self, num_dims: int) -> None:
        if num_dims * self.num_basis > MAX_FUNCTIONS:
            raise NotApplicableError(f"{num_dims} inputs with {self.num_basis} functions each are too many for it.")

    def _num_weights(self) -> int:
        return self.model.covar_module.expansion().num_functions


@register_contender("hilbert")
@dataclass
class FullHilbert(MarginalLikelihoodGP):
    """An `ExactGP` whose RBF kernel is expanded in all products of functions: up to three inputs."""

    title: ClassVar[str] = "HilbertKernel"

    #: Number of inputs -> functions per input.
    num_basis: ClassVar[dict[int, int]] = {1: 64, 2: 28, 3: 12}

    def kernel(self, x: Tensor, likelihood: GaussianLikelihood) -> Kernel:
        num_dims = x.shape[1]
        if num_dims not in self.num_basis:
            raise NotApplicableError(f"the product basis takes at most {max(self.num_basis)} inputs; got {num_dims}.")
        return HilbertKernel(ScaleKernel(RBFKernel(ard_num_dims=num_dims)), wide_box(x), self.num_basis[num_dims])

    def _num_weights(self) -> int:
        return self.model.covar_module.expansion().num_functions


def _some_rows(x: Tensor, number: int, seed: int) -> Tensor:
    return x[torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:number]].clone()


def wide_box(x: Tensor) -> Domain:
    """
    A box twice as wide as the data, and not narrower than three standard deviations.

    :param x: Standardised inputs `(N, D)`.
    """
    lower, upper = x.amin(0), x.amax(0)
    return Domain((lower + upper) / 2, torch.maximum(upper - lower, torch.full_like(upper, 3.0)))
