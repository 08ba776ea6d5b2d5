"""What the two kinds of chains have in common: draws that are kept, and a state to go on from."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ..model.likelihoods.augmented import Parameters
from .problem import GibbsProblem, is_limit


@dataclass
class ChainDraws:
    """
    The draws of a chain that has ended, for targets of unit variance, and what it needs to go on.

    :param factors: D tensors `(S, R, M_d)`.
    :param parameters: Of the observation model, each `(S, ...)`.
    :param hyperparameters: `(S, P)`.
    :param energies: Mean square of each component, `(S, R)`.
    :param num_basis: M.
    :param scores: Log densities of rows held out, `(n,)`.
    :param resume: What the chain needs to go on after its last draw.
    """

    factors: list[Tensor]
    parameters: Parameters
    hyperparameters: Tensor
    energies: Tensor
    num_basis: int | tuple[int, ...]
    scores: Tensor
    resume: dict[str, Any]

    @property
    def is_limit(self) -> bool:
        """Whether the chain takes the limit of many components."""
        return is_limit(self.resume)


class Chain(ABC):
    """
    A chain that is being run, for targets of unit variance. Before its first sweep it needs a call of :meth:`begin` or
    :meth:`load`.

    :param problem: What it samples.
    :param number: Its number.
    :param resume: Where a chain of an earlier fit stopped, to go on from there.
    """

    #: What a checkpoint holds of it, beside its random numbers.
    kept: ClassVar[tuple[str, ...]] = (
        "sweeps", "ends", "num_draws", "scores", "factors", "parameters", "hyperparameters", "energies",
    )  # fmt: skip

    ends: list[int]  # the sweep before which each stage of the warm-up ends

    def __init__(self, problem: GibbsProblem, number: int, resume: dict[str, Any] | None):
        self.problem, self.number, self.earlier = problem, number, resume
        seeds = np.random.SeedSequence(problem.entropy).spawn(problem.plan.num_chains)
        self.rng = np.random.default_rng(seeds[number])
        self.before = 0 if resume is None else resume["sweeps"]  # sweeps of an earlier fit
        self.sweeps = 0
        self.num_draws = problem.plan.num_draws
        self.scores: list[Tensor] = []  # log densities of rows held out, each (n,)
        self.factors: list[list[Tensor]] = []  # S lists of D tensors (R, M_d)
        self.parameters: list[Parameters] = []
        self.hyperparameters: list[Tensor] = []
        self.energies: list[Tensor] = []

    @abstractmethod
    def begin(self) -> None:
        """Take the state before the first sweep."""

    def sweep(self) -> None:
        """One sweep; draws are kept after the warm-up."""
        self._sweep()
        self.sweeps += 1

    @abstractmethod
    def _sweep(self) -> None: ...

    @property
    def is_warm(self) -> bool:
        """Whether the warm-up is over."""
        return self.sweeps >= self.ends[-1]

    @property
    def has_ended(self) -> bool:
        """Whether all draws have been made."""
        return self.sweeps >= self.ends[-1] + self.num_draws

    @property
    @abstractmethod
    def noise(self) -> float:
        """The present noise variance, in the units of the targets."""

    @abstractmethod
    def resume(self) -> dict[str, Any]:
        """What the chain needs to go on after its last draw."""

    def draws(self) -> ChainDraws:
        """All that it has kept, side by side."""
        device = self.problem.training.summary.lower.device
        scores = self.energies[0].new_empty(0)
        if self.scores:
            scores = torch.logsumexp(torch.stack(self.scores), 0) - math.log(len(self.scores))
        return ChainDraws(
            [torch.stack(draws) for draws in zip(*self.factors, strict=True)],
            {name: torch.stack([each[name] for each in self.parameters]).to(device) for name in self.parameters[0]},
            torch.stack(self.hyperparameters).to(device),
            torch.stack(self.energies),
            self.problem.model.num_basis,
            scores,
            self.resume(),
        )

    def state(self) -> dict[str, Any]:
        """What is needed to go on after a sweep, for a checkpoint."""
        return {**{name: getattr(self, name) for name in self.kept}, "rng": self.rng.bit_generator.state}

    def load(self, saved: dict[str, Any]) -> None:
        """
        Take the state after a sweep.

        :param saved: As :meth:`state` returned it.
        """
        for name in self.kept:
            setattr(self, name, saved[name])
        self.hyperparameters = [values.cpu() for values in self.hyperparameters]
        self.rng.bit_generator.state = saved["rng"]
