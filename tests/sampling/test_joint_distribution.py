"""Observation models whose parameters are drawn: f, they and the targets keep their joint distribution."""

from __future__ import annotations

import numpy as np
import pytest
from gpytorch.constraints import Interval
from gpytorch.likelihoods import GaussianLikelihood, StudentTLikelihood
from joint import JointProblem, check_prior_is_kept

from gpytorch_tkrr import CensoredLikelihood, NegativeBinomialLikelihood, OrdinalLikelihood
from gpytorch_tkrr.model.likelihoods.noise import NOISE_SCALE, NOISE_SHAPE
from gpytorch_tkrr.model.likelihoods.ordinal import CUT_SD


class Censored(JointProblem):
    """What is recorded ends at a limit."""

    def draw_targets(self, state, rng):
        return super().draw_targets(state, rng).clamp(max=self.observation.likelihood.high)


def noise_variance(rng):
    """Within GPyTorch's bound."""
    while True:
        value = NOISE_SCALE / rng.gamma(NOISE_SHAPE)
        if value >= 1e-4:
            return value


def dispersion(rng):
    """1 / sqrt(r) is half-normal, within the bounds."""
    while True:
        value = 1 / rng.standard_normal() ** 2
        if 0.05 <= value <= 50.0:
            return value


CASES = {
    "gaussian": (JointProblem, GaussianLikelihood, 0.01, lambda rng: {"noise": noise_variance(rng)}),
    "student": (
        JointProblem,
        StudentTLikelihood,
        0.01,
        lambda rng: {"noise": noise_variance(rng), "deg_free": 2 + rng.gamma(2.0, 10.0)},
    ),
    "counts": (
        JointProblem,
        lambda: NegativeBinomialLikelihood(dispersion_constraint=Interval(0.05, 50.0)),
        3.0,
        lambda rng: {"dispersion": dispersion(rng)},
    ),
    "ordinal": (
        JointProblem,
        lambda: OrdinalLikelihood(4),
        4.0,
        lambda rng: {"noise": 1.0, "cutpoints": np.sort(CUT_SD * rng.standard_normal(3))},
    ),
    "censored": (Censored, lambda: CensoredLikelihood(high=0.02), 0.01, lambda rng: {"noise": noise_variance(rng)}),
}


@pytest.mark.parametrize("num_chains, num_sweeps", [(100, 4), pytest.param(600, 8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", list(CASES))
def test_parameters_and_targets_drawn_in_turn_keep_the_prior(name, num_chains, num_sweeps):
    kind, likelihood, outputscale, draw = CASES[name]
    check_prior_is_kept(kind(likelihood(), outputscale, draw), num_chains=num_chains, num_sweeps=num_sweeps)
