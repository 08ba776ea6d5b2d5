"""The joint distribution of parameters and targets, drawn in turn (Geweke 2004, *Getting it right*)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import scipy.stats
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import Likelihood
from torch import Tensor

from gpytorch_tkrr import Domain
from gpytorch_tkrr.bases.basis import sum_products
from gpytorch_tkrr.cp.design import Design
from gpytorch_tkrr.data.source import TensorSource
from gpytorch_tkrr.data.training import TrainingData
from gpytorch_tkrr.features.separable import Mode, separate
from gpytorch_tkrr.model.likelihoods.registry import observe
from gpytorch_tkrr.sampling.hyperparameters import Hyperparameters
from gpytorch_tkrr.sampling.priors import TAU_SHAPE, GibbsState
from gpytorch_tkrr.sampling.sampler import GibbsSampler

RANK, NUM_BASIS, NUM_ROWS = 2, 4, 10
DOMAIN = Domain(torch.full((1,), 0.5), 1.1)
GRIDS = [torch.linspace(0, 1, 9, dtype=torch.float64)]
WATCHED = torch.tensor([[0.2], [0.6]], dtype=torch.float64)

#: Draws the parameters of an observation model from their prior.
DrawParameters = Callable[[np.random.Generator], dict[str, float | np.ndarray]]


def fixed_kernel(outputscale: float) -> ScaleKernel:
    """A kernel of one input without free hyperparameters."""
    kernel = ScaleKernel(RBFKernel()).double()
    kernel.outputscale, kernel.base_kernel.lengthscale = outputscale, 0.5
    return kernel.requires_grad_(False)


def draw_function(mode: Mode, outputscale: float, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Weights and precisions of components from their prior."""
    tau = torch.from_numpy(rng.gamma(TAU_SHAPE, RANK / TAU_SHAPE, RANK))
    sd = (mode.covariance().variances * outputscale / tau.unsqueeze(-1)).sqrt()
    return sd * torch.from_numpy(rng.standard_normal(sd.shape)), tau


class JointProblem:
    """
    One input, a fixed kernel, and an observation model whose parameters are free; all can be drawn from their prior.

    :param likelihood: The likelihood.
    :param outputscale: Prior variance of f.
    :param draw_parameters: Draws the likelihood's parameters from their prior.
    """

    def __init__(self, likelihood: Likelihood, outputscale: float, draw_parameters: DrawParameters):
        self.x = torch.linspace(0, 1, NUM_ROWS, dtype=torch.float64).unsqueeze(-1)
        self.observation = observe(likelihood.double())
        self.augmentation = self.observation.augmentation(1.0, 0.0)
        kernel = fixed_kernel(outputscale)
        self.outputscale, self.draw_parameters = outputscale, draw_parameters
        self.separable = separate(kernel, DOMAIN, NUM_BASIS, 1)
        self.hyper = Hyperparameters(kernel, self.separable, torch.full((1,), 0.5, dtype=torch.float64))

    def draw_prior(self, rng: np.random.Generator) -> GibbsState:
        """A state of a chain."""
        f, precisions = draw_function(self.separable.modes[0], self.outputscale, rng)
        drawn = self.draw_parameters(rng)
        parameters = {name: torch.as_tensor(value, dtype=torch.float64) for name, value in drawn.items()}
        return GibbsState([f], parameters, precisions, torch.zeros(0, dtype=torch.float64))

    def draw_targets(self, state: GibbsState, rng: np.random.Generator) -> Tensor:
        """Targets given all else."""
        f = sum_products([self.separable.modes[0].basis], state.scaled_factors(), self.x).unsqueeze(0)
        parameters = {name: value.unsqueeze(0) for name, value in state.parameters.items()}
        rows = self.observation.rows(NUM_ROWS, True) | self.observation.function_rows(self.x, parameters)
        generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
        return self.observation.sample(f, parameters, rows, generator)[0]

    def sampler(self, design: Design, rng: np.random.Generator) -> GibbsSampler:
        """What draws all else given targets."""
        return GibbsSampler(design, self.separable, self.hyper, 1.0, self.augmentation, GRIDS, rng, rank=RANK)

    def sweep(self, state: GibbsState, y: Tensor, rng: np.random.Generator) -> None:
        """All else, given targets."""
        design = Design(TrainingData(TensorSource(self.x, y)), [self.separable.modes[0].basis])
        self.sampler(design, rng).sweep(state, [0])

    def watched(self, state: GibbsState) -> list[float]:
        """Numbers whose distributions are compared."""
        f = sum_products([self.separable.modes[0].basis], state.scaled_factors(), WATCHED)
        shape = [value.reshape(-1)[:2].tolist() for name, value in state.parameters.items() if "." not in name]
        return [*f.tolist(), *state.precisions.tolist(), *(value for values in shape for value in values)]


@torch.no_grad()
def check_prior_is_kept(problem: JointProblem, *, num_chains: int, num_sweeps: int) -> None:
    """
    Draw targets given all else, then all else given targets, in chains of their own: the prior stays the prior.

    :param problem: What is drawn.
    :param num_chains: How many chains.
    :param num_sweeps: Sweeps of each.
    """
    rng, found = np.random.default_rng(0), []
    for _ in range(num_chains):
        state = problem.draw_prior(rng)
        for _ in range(num_sweeps):
            problem.sweep(state, problem.draw_targets(state, rng), rng)
        found.append(problem.watched(state))
    expected = [problem.watched(problem.draw_prior(rng)) for _ in range(3000)]
    for number, (drawn, prior) in enumerate(zip(np.transpose(found), np.transpose(expected), strict=True)):
        assert scipy.stats.ks_2samp(drawn, prior).pvalue > 1e-3, number
