"""A chain that takes the limit of many components; see :mod:`gpytorch_tkrr.sampling.process`."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..sampling.hyperparameters import Hyperparameters
from ..sampling.process import FIRST_LEAP, ProcessChain, ProcessPosterior
from .chain import Chain
from .problem import GibbsProblem

#: Steps uphill on few rows, so many at most, and on those of the first stage.
FIRST_STEPS, FIRST_ROWS, LATER_STEPS = 100, 300, 30

#: Proposals of the warm-up: on the rows of the first stage, and on all.
STAGE_MOVES, LAST_MOVES = 6, 6

#: Sweeps of the warm-up in all, the two uphill among them.
WARMUP_SWEEPS = 2 + STAGE_MOVES + LAST_MOVES

#: How far chains start from each other, in units of the prior's spread.
START_SPREAD = 0.3


class LimitChain(Chain):
    """
    A chain over hyperparameters and noise, with f integrated out. Its first two sweeps are steps uphill, on few rows
    and on those of the first stage; each later one is a proposal for all hyperparameters.

    :param problem: What it samples.
    :param number: Its number.
    :param resume: Where a chain of an earlier fit stopped; it has been uphill.
    """

    kept: ClassVar[tuple[str, ...]] = (*Chain.kept, "coordinates", "log_leap")

    coordinates: Tensor  # all hyperparameters
    log_leap: float  # size of a leapfrog step
    posterior: ProcessPosterior | None = None  # on the rows of the present stage

    def __init__(self, problem: GibbsProblem, number: int, resume: dict[str, Any] | None = None):
        super().__init__(problem, number, resume)
        assert problem.joint is not None
        self.joint: Hyperparameters = problem.joint
        self.slots = range(len(self.joint.slots))

    def begin(self) -> None:
        if self.earlier is not None:
            self.rng.bit_generator.state = self.earlier["rng"]
            self.ends = [0, LAST_MOVES if self.problem.plan.ends[-1] > 0 else 0]
            self.coordinates, self.log_leap = self.earlier["coordinates"].cpu(), self.earlier["log_leap"]
            return
        spread = torch.tensor(self.joint.spreads, dtype=torch.float64)
        away = START_SPREAD * spread * torch.from_numpy(self.rng.standard_normal(len(spread)))
        assert self.problem.joint_start is not None
        self.coordinates = self.joint.inside(self.slots, self.problem.joint_start + away)
        self.ends, self.log_leap = [WARMUP_SWEEPS - LAST_MOVES, WARMUP_SWEEPS], math.log(FIRST_LEAP)

    def _sweep(self) -> None:
        problem, is_new = self.problem, self.before == 0
        self.joint.set(self.slots, self.coordinates)
        if self.posterior is None or (is_new and self.sweeps in (0, 1, self.ends[0])):
            self.posterior = self._posterior()
        chain = ProcessChain(self.posterior, self.rng, self.log_leap)
        if is_new and self.sweeps == 0:
            chain.ascend(FIRST_STEPS)
            if problem.model.adapts_num_basis:
                problem.adapt_functions()
        elif is_new and self.sweeps == 1:
            chain.ascend(LATER_STEPS)
        else:
            chain.move(0.0 if self.is_warm else 1 / math.sqrt(self.sweeps + 1))
            if problem.held_out is not None and self.sweeps < self.ends[0]:
                self.scores.append(self.posterior.log_densities(problem.held_out.dense(own=True)))
            if self.is_warm:
                self._keep(self.posterior)
        self.coordinates, self.log_leap = self.joint.get(self.slots), chain.log_leap

    def _posterior(self) -> ProcessPosterior:
        """On the rows of the sweep that comes next."""
        problem = self.problem
        if self.before == 0 and self.sweeps == 0:
            design = problem.designs[0].thinned(FIRST_ROWS, problem.row_key)
        else:
            design = problem.designs[0 if self.sweeps < self.ends[0] else -1]
        unit = problem.training.scale**2
        return ProcessPosterior(design.dense(), problem.separable, self.joint, unit, problem.grids)

    def _keep(self, posterior: ProcessPosterior) -> None:
        factors, square = posterior.draw(self.rng)
        self.factors.append(factors)
        self.parameters.append({"noise": posterior.noise().detach().clone()})
        self.hyperparameters.append(self.joint.values()[: len(self.problem.hyperparameters.slots)])
        self.energies.append(torch.tensor([square], dtype=torch.float64, device=factors[0].device))

    @property
    def noise(self) -> float:
        return float(self.problem.model.likelihood.noise)

    def resume(self) -> dict[str, Any]:
        return {
            "kind": "process",
            "coordinates": self.coordinates,
            "log_leap": self.log_leap,
            "rng": self.rng.bit_generator.state,
            "sweeps": self.before + self.sweeps,
        }

    def load(self, saved: dict[str, Any]) -> None:
        super().load(saved)
        self.coordinates = self.coordinates.cpu()
