"""A posterior held as draws of the CP weights: whole functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..features.basis import Basis

#: Values of all components of all draws that are held at once: 256 MB.
MAX_ENTRIES = 2**25


class DrawsPosterior:
    r"""
    S draws of the factors, each a function :math:`f_s(x) = \sum_r \prod_d \phi_d(x_d)^\top a_{sdr}`.

    :param factors: Raw factors, D tensors `(S, R, M_d)`, float64, in the units of the targets.
    :param noise: Noise variances `(S,)`.
    :param hyperparameters: Constrained values of the kernel's free hyperparameters by name, each `(S,)`.
    :param chains: Which chain each draw belongs to, `(S,)`.
    :param resume: What a sampler needs to go on, tensors and numbers only.
    """

    kind = "draws"

    def __init__(
        self,
        factors: Sequence[Tensor],
        noise: Tensor,
        hyperparameters: dict[str, Tensor],
        chains: Tensor,
        resume: dict[str, Any],
    ):
        self.factors, self.noise, self.hyperparameters = list(factors), noise, hyperparameters
        self.chains, self.resume = chains, resume
        self.bases: list[Basis] = []  # set by the model, which knows the box

    @property
    def num_draws(self) -> int:
        """S."""
        return self.factors[0].shape[0]

    @property
    def rank(self) -> int:
        """R."""
        return self.factors[0].shape[1]

    def draws(self, x: Tensor) -> Tensor:
        """
        The drawn functions.

        :param x: Inputs `(..., n, D)`.
        :return: `(S, ..., n)`, float64, differentiable in `x`.
        """
        rows = x.reshape(-1, x.shape[-1])
        has_gradient = torch.is_grad_enabled() and x.requires_grad
        num_kept = 2 * x.shape[-1] if has_gradient else 1  # of each entry, for the gradient
        pieces = rows.split(max(MAX_ENTRIES // (self.num_draws * self.rank * num_kept), 1))
        if len(pieces) == 1:
            values = self._draws(rows)
        elif has_gradient:  # computed again, piece by piece, in the backward pass
            values = torch.cat([checkpoint(self._draws, piece, use_reentrant=False) for piece in pieces], dim=-1)
        else:
            values = torch.cat([self._draws(piece) for piece in pieces], dim=-1)
        return values.reshape(self.num_draws, *x.shape[:-1])

    def _draws(self, x: Tensor) -> Tensor:
        """`(n, D)` -> `(S, n)`."""
        product: Tensor | None = None
        for d, (basis, factor) in enumerate(zip(self.bases, self.factors, strict=True)):
            projection = basis(x[:, d]) @ factor.reshape(self.num_draws * self.rank, -1).mT  # (n, S R)
            product = projection if product is None else product * projection
        assert product is not None
        return product.reshape(len(x), self.num_draws, self.rank).sum(-1).mT

    def mean(self, x: Tensor) -> Tensor:
        """
        Mean of the draws.

        :param x: Inputs `(..., n, D)`.
        :return: `(..., n)`, float64.
        """
        return self.draws(x).mean(0)

    def root(self, x: Tensor) -> Tensor:
        """
        A root of the draws' covariance.

        :param x: Inputs `(..., n, D)`.
        :return: `(..., n, S)`, float64.
        """
        draws = self.draws(x)
        return (draws - draws.mean(0)).movedim(0, -1) / max(self.num_draws - 1, 1) ** 0.5

    def subset(self, index: Tensor) -> DrawsPosterior:
        """
        Some of the draws.

        :param index: Which ones.
        """
        chosen = DrawsPosterior(
            [factor[index] for factor in self.factors],
            self.noise[index],
            {name: values[index] for name, values in self.hyperparameters.items()},
            self.chains[index],
            self.resume,
        )
        chosen.bases = self.bases
        return chosen

    def extended(self, later: DrawsPosterior) -> DrawsPosterior:
        """
        These draws followed by others of the same chains.

        :param later: The others.
        """
        return DrawsPosterior(
            [torch.cat(pair) for pair in zip(self.factors, later.factors, strict=True)],
            torch.cat([self.noise, later.noise]),
            {name: torch.cat([values, later.hyperparameters[name]]) for name, values in self.hyperparameters.items()},
            torch.cat([self.chains, later.chains]),
            later.resume,
        )

    def state(self) -> dict[str, Any]:
        """Tensors and numbers that describe the posterior."""
        return {
            "kind": self.kind,
            "factors": self.factors,
            "noise": self.noise,
            "hyperparameters": self.hyperparameters,
            "chains": self.chains,
            "resume": self.resume,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> DrawsPosterior:
        """
        The posterior that :meth:`state` described.

        :param state: The description.
        """
        return cls(state["factors"], state["noise"], state["hyperparameters"], state["chains"], state["resume"])

    def to(self, device: torch.device) -> DrawsPosterior:
        """
        The same posterior on another device, always float64.

        :param device: The device.
        """
        return DrawsPosterior(
            [factor.to(device) for factor in self.factors],
            self.noise.to(device),
            {name: values.to(device) for name, values in self.hyperparameters.items()},
            self.chains.to(device),
            self.resume,
        )
