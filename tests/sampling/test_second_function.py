"""Two functions drawn in turn: with targets they keep the joint distribution that they are drawn from."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel

from gpytorch_tkrr import Domain, HeteroskedasticLikelihood
from gpytorch_tkrr.bases.basis import sum_products
from gpytorch_tkrr.cp.design import Design
from gpytorch_tkrr.data.source import TensorSource
from gpytorch_tkrr.data.training import TrainingData
from gpytorch_tkrr.features.separable import separate
from gpytorch_tkrr.model.likelihoods.noise import NOISE_SCALE, NOISE_SHAPE
from gpytorch_tkrr.model.likelihoods.noise_function import factors_of
from gpytorch_tkrr.model.likelihoods.registry import observe
from gpytorch_tkrr.model.likelihoods.skewed import FIRST_SHARE, OTHER_SHARE, SKEW_SD
from gpytorch_tkrr.sampling.hyperparameters import Hyperparameters
from gpytorch_tkrr.sampling.priors import TAU_SHAPE, GibbsState
from gpytorch_tkrr.sampling.second_function import JointSampler, SecondFit

RANK, NUM_BASIS, NUM_ROWS = 2, 4, 10
WATCHED = torch.tensor([[0.2], [0.6]], dtype=torch.float64)


def fixed_kernel(outputscale):
    kernel = ScaleKernel(RBFKernel()).double()
    kernel.outputscale, kernel.base_kernel.lengthscale = outputscale, 0.5
    return kernel.requires_grad_(False)


class Problem:
    """One input, fixed kernels, noise and tails free; all can be drawn from their prior."""

    def __init__(self, tails: dict[str, bool]):
        domain = Domain(torch.full((1,), 0.5), 1.1)
        self.x = torch.linspace(0, 1, NUM_ROWS, dtype=torch.float64).unsqueeze(-1)
        likelihood = HeteroskedasticLikelihood(fixed_kernel(0.6), **tails, rank=RANK, num_basis=NUM_BASIS).double()
        likelihood.noise_domain, likelihood.num_basis = domain, (NUM_BASIS,)
        self.observation = observe(likelihood)
        self.augmentation = self.observation.augmentation(1.0, 0.0)
        self.kernel = fixed_kernel(0.01)
        self.separable = separate(self.kernel, domain, NUM_BASIS, 1)
        self.hyper = Hyperparameters(self.kernel, self.separable, torch.full((1,), 0.5, dtype=torch.float64))
        summary = TrainingData(TensorSource(self.x, torch.zeros(NUM_ROWS, dtype=torch.float64))).summary
        self.fit = SecondFit(self.augmentation.second, summary, None)

    def draw_prior(self, rng: np.random.Generator) -> GibbsState:
        def function(mode, outputscale):
            tau = torch.from_numpy(rng.gamma(TAU_SHAPE, RANK / TAU_SHAPE, RANK))
            sd = (mode.covariance().variances * outputscale / tau.unsqueeze(-1)).sqrt()
            return sd * torch.from_numpy(rng.standard_normal(sd.shape)), tau

        f, precisions = function(self.separable.modes[0], 0.01)
        g, second = function(self.fit.second.separable.modes[0], 0.6)
        empty = torch.zeros(0, dtype=torch.float64)
        drawn = {"noise": NOISE_SCALE / rng.gamma(NOISE_SHAPE), "log_noise.floor": 1e-30}  # the floor is no prior
        if self.observation.likelihood.student:
            drawn["deg_free"] = 2 + rng.gamma(2.0, 10.0)
        if self.observation.likelihood.skewed:
            drawn["shares"] = rng.dirichlet([FIRST_SHARE, *[OTHER_SHARE] * 5])
            drawn["skew"] = SKEW_SD * rng.standard_normal(6)
        parameters = {name: torch.as_tensor(value, dtype=torch.float64) for name, value in drawn.items()}
        parameters |= {"log_noise.factors.0": g, "log_noise.precisions": second}
        parameters |= {f"log_noise.{name}": empty for name in ("steps", "coordinates", "centers")}
        return GibbsState([f], parameters, precisions, empty)

    def draw_targets(self, state: GibbsState, rng: np.random.Generator) -> torch.Tensor:
        f = sum_products([self.separable.modes[0].basis], state.scaled_factors(), self.x).unsqueeze(0)
        parameters = {name: value.unsqueeze(0) for name, value in state.parameters.items()}
        rows = self.observation.function_rows(self.x, parameters)
        generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
        return self.observation.sample(f, parameters, rows, generator)[0]

    def sweep(self, state: GibbsState, y: torch.Tensor, rng: np.random.Generator) -> None:
        design = Design(TrainingData(TensorSource(self.x, y)), [self.separable.modes[0].basis])
        grids = [torch.linspace(0, 1, 9, dtype=torch.float64)]
        sampler = JointSampler(
            self.fit, design, self.separable, self.hyper, 1.0, self.augmentation, grids, rng, rank=RANK
        )
        sampler.sweep(state, [0])

    def watched(self, state: GibbsState) -> list[float]:
        f = sum_products([self.separable.modes[0].basis], state.scaled_factors(), WATCHED)
        g = sum_products(self.observation.bases(), factors_of(state.parameters), WATCHED)
        names = [name for name in ("noise", "deg_free", "shares", "skew") if name in state.parameters]
        shape = [state.parameters[name].reshape(-1)[:2].tolist() for name in names]
        return [*f.tolist(), *g.tolist(), *(value for values in shape for value in values)]


@torch.no_grad()
@pytest.mark.parametrize(
    "tails",
    [
        {"skewed": True},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"student": True}, marks=pytest.mark.slow),
    ],
)
def test_functions_and_targets_drawn_in_turn_keep_the_prior(tails):
    """Geweke (2004): targets given all else, then all else given targets, in chains of their own."""
    problem, rng, found = Problem(tails), np.random.default_rng(0), []
    for _ in range(150):
        state = problem.draw_prior(rng)
        for _ in range(4):
            problem.sweep(state, problem.draw_targets(state, rng), rng)
        found.append(problem.watched(state))
    expected = [problem.watched(problem.draw_prior(rng)) for _ in range(3000)]
    for number, (drawn, prior) in enumerate(zip(np.transpose(found), np.transpose(expected), strict=True)):
        assert scipy.stats.ks_2samp(drawn, prior).pvalue > 1e-3, number
