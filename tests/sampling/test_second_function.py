"""Two functions drawn in turn: with targets they keep the joint distribution that they are drawn from."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from joint import (
    DOMAIN,
    GRIDS,
    NUM_BASIS,
    NUM_ROWS,
    RANK,
    WATCHED,
    JointProblem,
    check_prior_is_kept,
    draw_function,
    fixed_kernel,
)

from gpytorch_tkrr import HeteroskedasticLikelihood
from gpytorch_tkrr.bases.basis import sum_products
from gpytorch_tkrr.data.source import TensorSource
from gpytorch_tkrr.data.training import TrainingData
from gpytorch_tkrr.model.likelihoods.noise import NOISE_SCALE, NOISE_SHAPE
from gpytorch_tkrr.model.likelihoods.noise_function import factors_of
from gpytorch_tkrr.model.likelihoods.skewed import FIRST_SHARE, OTHER_SHARE, SKEW_SD
from gpytorch_tkrr.sampling.second_function import JointSampler, SecondFit

NOISE_VARIANCE = 0.6


class NoiseProblem(JointProblem):
    """Noise that is a function of the input, and tails that are free."""

    def __init__(self, tails: dict[str, bool]):
        kernel = fixed_kernel(NOISE_VARIANCE)
        likelihood = HeteroskedasticLikelihood(kernel, **tails, rank=RANK, num_basis=NUM_BASIS)
        likelihood.noise_domain, likelihood.num_basis = DOMAIN, (NUM_BASIS,)
        super().__init__(likelihood, 0.01, self._parameters)
        summary = TrainingData(TensorSource(self.x, torch.zeros(NUM_ROWS, dtype=torch.float64))).summary
        self.fit = SecondFit(self.augmentation.second, summary, None)

    def _parameters(self, rng):
        drawn = {"noise": NOISE_SCALE / rng.gamma(NOISE_SHAPE), "log_noise.floor": 1e-30}  # the floor is no prior
        if self.observation.likelihood.student:
            drawn["deg_free"] = 2 + rng.gamma(2.0, 10.0)
        if self.observation.likelihood.skewed:
            drawn["shares"] = rng.dirichlet([FIRST_SHARE, *[OTHER_SHARE] * 5])
            drawn["skew"] = SKEW_SD * rng.standard_normal(6)
        g, precisions = draw_function(self.fit.second.separable.modes[0], NOISE_VARIANCE, rng)
        drawn |= {"log_noise.factors.0": g, "log_noise.precisions": precisions}
        return drawn | {f"log_noise.{name}": np.zeros(0) for name in ("steps", "coordinates", "centers")}

    def sampler(self, design, rng):
        return JointSampler(self.fit, design, self.separable, self.hyper, 1.0, self.augmentation, GRIDS, rng, rank=RANK)

    def watched(self, state):
        g = sum_products(self.observation.bases(), factors_of(state.parameters), WATCHED)
        return [*super().watched(state), *g.tolist()]


@pytest.mark.parametrize(
    "tails",
    [
        {"skewed": True},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"student": True}, marks=pytest.mark.slow),
    ],
)
def test_functions_and_targets_drawn_in_turn_keep_the_prior(tails):
    check_prior_is_kept(NoiseProblem(tails), num_chains=150, num_sweeps=4)
