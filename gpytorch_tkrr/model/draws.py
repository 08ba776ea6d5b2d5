"""A posterior held as draws of the weights: whole functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..bases.basis import Basis
from ..cp.format import WeightFormat
from .posterior import Posterior


class DrawsPosterior(Posterior):
    r"""
    S draws of the factors and of all parameters.

    :param bases: The basis of each mode.
    :param factors: Raw factors, D tensors `(S, K_d, M_d)`, float64, in the units of the targets.
    :param parameters: Parameters of the observation model by name, each `(S, ...)`.
    :param hyperparameters: Constrained values of the kernel's free hyperparameters by name, each `(S,)`.
    :param chains: Which chain each draw belongs to, `(S,)`.
    :param resume: What a sampler needs to go on, tensors and numbers only.
    :param weights: The format of the factors, by default :class:`CP`.
    """

    kind = "draws"

    def __init__(
        self,
        bases: Sequence[Basis],
        factors: Sequence[Tensor],
        parameters: Mapping[str, Tensor],
        hyperparameters: dict[str, Tensor],
        chains: Tensor,
        resume: dict[str, Any],
        weights: WeightFormat | None = None,
    ):
        super().__init__(bases, factors, parameters, weights)
        self.hyperparameters, self.chains, self.resume = hyperparameters, chains, resume

    def mean_and_root(self, x: Tensor) -> tuple[Tensor, Tensor]:
        functions = self.functions(x).movedim(0, -1)  # (..., n, S)
        mean = functions.mean(-1)
        return mean, (functions - mean.unsqueeze(-1)) / max(self.num_draws - 1, 1) ** 0.5

    def components(self, x: Tensor) -> tuple[Tensor, None]:
        return self.functions(x), None

    def draw_weights(self, sample_shape: torch.Size) -> Tensor:
        chosen = torch.randint(self.num_draws, sample_shape, device=self.device)
        return (self.num_draws - 1) ** 0.5 * torch.nn.functional.one_hot(chosen, self.num_draws).double()

    def subset(self, index: Tensor) -> DrawsPosterior:
        """
        Some of the draws.

        :param index: Their numbers.
        """
        return DrawsPosterior(
            self.bases,
            [factor[index] for factor in self.factors],
            {name: values[index] for name, values in self.parameters.items()},
            {name: values[index] for name, values in self.hyperparameters.items()},
            self.chains[index],
            self.resume,
            self.format,
        )

    def extended(self, later: DrawsPosterior) -> DrawsPosterior:
        """
        These draws followed by others of the same chains.

        :param later: The others.
        """
        return DrawsPosterior(
            later.bases,
            [torch.cat(pair) for pair in zip(self.factors, later.factors, strict=True)],
            {name: torch.cat([values, later.parameters[name]]) for name, values in self.parameters.items()},
            {name: torch.cat([values, later.hyperparameters[name]]) for name, values in self.hyperparameters.items()},
            torch.cat([self.chains, later.chains]),
            later.resume,
            later.format,
        )

    def state(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            **self.format.state(),
            "factors": self.factors,
            "parameters": self.parameters,
            "hyperparameters": self.hyperparameters,
            "chains": self.chains,
            "resume": self.resume,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any], bases: Sequence[Basis]) -> DrawsPosterior:
        parameters = state["parameters"] if "parameters" in state else {"noise": state["noise"]}  # earlier files
        draws = (parameters, state["hyperparameters"], state["chains"], state["resume"])
        return cls(bases, state["factors"], *draws, WeightFormat.from_state(state))

    def to(self, device: torch.device, bases: Sequence[Basis]) -> DrawsPosterior:
        return DrawsPosterior(
            bases,
            [factor.to(device) for factor in self.factors],
            {name: values.to(device) for name, values in self.parameters.items()},
            {name: values.to(device) for name, values in self.hyperparameters.items()},
            self.chains.to(device),
            self.resume,
            self.format,
        )
