"""Chains of a Gibbs fit that take the limit of many components; see :mod:`gpytorch_tkrr.sampling.process`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..cp.design import Design
from ..features.separable import SeparableKernel
from ..model.likelihoods.base import Parameters
from ..sampling.hyperparameters import Hyperparameters
from ..sampling.process import FIRST_LEAP, ProcessChain, ProcessPosterior

#: Steps uphill on few rows, so many at most, and on those of the first stage.
FIRST_STEPS, FIRST_ROWS, LATER_STEPS = 100, 300, 30

#: Proposals of the warm-up: on the rows of the first stage, and on all.
STAGE_MOVES, LAST_MOVES = 6, 6

#: Sweeps of the warm-up in all, the two uphill among them.
WARMUP_SWEEPS = 2 + STAGE_MOVES + LAST_MOVES

#: How far chains start from each other, in units of the prior's spread.
START_SPREAD = 0.3


@dataclass
class ProcessRun:
    """
    A chain that is being run, and the draws that it has kept. Its first two sweeps are steps uphill, on few rows and on
    those of the first stage; each later one is a proposal for all hyperparameters.
    """

    number: int
    rng: np.random.Generator
    before: int  # sweeps of an earlier fit
    ends: list[int]  # the sweep before which each stage of the warm-up ends: the first stage, all rows
    coordinates: Tensor  # all hyperparameters
    log_leap: float  # size of a leapfrog step
    sweep: int = 0
    scores: list[Tensor] = field(default_factory=list)  # log densities of rows held out, each (n,)
    factors: list[list[Tensor]] = field(default_factory=list)  # S lists of D tensors (R, M_d)
    parameters: list[Parameters] = field(default_factory=list)
    hyperparameters: list[Tensor] = field(default_factory=list)
    energies: list[Tensor] = field(default_factory=list)
    posterior: ProcessPosterior | None = None  # on the rows of the present stage


#: What a checkpoint holds of such a chain, beside its random numbers.
PROCESS_STATE = (
    "ends", "coordinates", "log_leap", "sweep", "scores", "factors", "parameters", "hyperparameters", "energies",
)  # fmt: skip


class Host(Protocol):
    """What such chains ask of the fit that they belong to."""

    separable: SeparableKernel
    designs: list[Design]
    held_out: Design | None
    grids: list[Tensor]

    def few_rows(self, num_rows: int) -> Design: ...

    def adapt_functions(self) -> None: ...


class ProcessChains:
    """
    What all such chains of a fit have in common.

    :param host: The fit.
    :param hyperparameters: Those of the kernel, then those of the likelihood.
    :param num_kernel: How many of them are the kernel's.
    :param unit: The variance of the targets.
    """

    def __init__(self, host: Host, hyperparameters: Hyperparameters, num_kernel: int, unit: float):
        self.host, self.hyperparameters, self.num_kernel, self.unit = host, hyperparameters, num_kernel, unit
        self.slots = range(len(hyperparameters.slots))
        self.start_coordinates = hyperparameters.get(self.slots)

    def start(self, number: int, rng: np.random.Generator, resume: dict[str, Any] | None, *, warm: bool) -> ProcessRun:
        """
        A chain before its first sweep.

        :param number: Its number.
        :param rng: Source of random numbers.
        :param resume: Where a chain of an earlier fit stopped, to go on from there; it has been uphill.
        :param warm: Whether there is a warm-up.
        """
        if resume is not None:
            rng.bit_generator.state = resume["rng"]
            ends = [0, LAST_MOVES if warm else 0]
            return ProcessRun(number, rng, resume["sweeps"], ends, resume["coordinates"].cpu(), resume["log_leap"])
        spread = torch.tensor(self.hyperparameters.spreads, dtype=torch.float64)
        away = START_SPREAD * spread * torch.from_numpy(rng.standard_normal(len(spread)))
        coordinates = self.hyperparameters.inside(self.slots, self.start_coordinates + away)
        ends = [WARMUP_SWEEPS - LAST_MOVES, WARMUP_SWEEPS]
        return ProcessRun(number, rng, 0, ends, coordinates, math.log(FIRST_LEAP))

    def sweep(self, run: ProcessRun) -> None:
        """
        One sweep; draws are kept after the warm-up.

        :param run: The chain.
        """
        host, hyper = self.host, self.hyperparameters
        hyper.set(self.slots, run.coordinates)
        is_new = run.before == 0
        if run.posterior is None or (is_new and run.sweep in (0, 1, run.ends[0])):
            run.posterior = self._posterior_of(run)
        chain = ProcessChain(run.posterior, run.rng, run.log_leap)
        if is_new and run.sweep == 0:
            chain.ascend(FIRST_STEPS)
            host.adapt_functions()
        elif is_new and run.sweep == 1:
            chain.ascend(LATER_STEPS)
        else:
            is_warm = run.sweep >= run.ends[-1]
            chain.move(0.0 if is_warm else 1 / math.sqrt(run.sweep + 1))
            if host.held_out is not None and run.sweep < run.ends[0]:
                run.scores.append(run.posterior.log_densities(host.held_out.dense(own=True)))
            if is_warm:
                self._keep(run, run.posterior)
        run.coordinates, run.log_leap = hyper.get(self.slots), chain.log_leap
        run.sweep += 1

    def _posterior_of(self, run: ProcessRun) -> ProcessPosterior:
        """On the rows of the sweep that comes next."""
        host = self.host
        if run.before == 0 and run.sweep == 0:
            design = host.few_rows(FIRST_ROWS)
        else:
            design = host.designs[0 if run.sweep < run.ends[0] else -1]
        return ProcessPosterior(design.dense(), host.separable, self.hyperparameters, self.unit, host.grids)

    def _keep(self, run: ProcessRun, posterior: ProcessPosterior) -> None:
        factors, square = posterior.draw(run.rng)
        run.factors.append(factors)
        run.parameters.append({"noise": posterior.noise().detach().clone()})
        run.hyperparameters.append(self.hyperparameters.values()[: self.num_kernel])
        run.energies.append(torch.tensor([square], dtype=torch.float64, device=factors[0].device))

    def resume(self, run: ProcessRun) -> dict[str, Any]:
        """
        What a chain needs to go on after its last draw.

        :param run: The chain.
        """
        return {
            "kind": "process",
            "coordinates": run.coordinates,
            "log_leap": run.log_leap,
            "rng": run.rng.bit_generator.state,
            "sweeps": run.before + run.sweep,
        }
