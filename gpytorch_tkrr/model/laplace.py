r"""Uncertainty after ALS: a Gaussian around the weights, one block for each factor.

With all factors but one fixed the model is linear in that one and its posterior is Gaussian,
:math:`w_d \sim N(\hat w_d, s^2 P_d^{-1})`. The block Laplace approximation lets every factor vary about its mode on its
own,

.. math:: \operatorname{var} f(x) = s^2 \sum_d g_d(x)^\top P_d^{-1} g_d(x),

with :math:`g_d(x)` the design row of factor d. It sees neither correlations between factors, which can make it too wide
or too narrow, nor other modes of the posterior and the error of the rank, which make it too narrow. Varying the last
factor only would leave most of the uncertainty out.

It is no continuous function of the weights where two components are the same: their difference then moves f by nothing,
while that of components that are however nearly the same moves it in a direction of its own, by a small design over a
small precision. ALS finds such components where rows are few, at most twice the rank or so. When they differ by less
than the root of the rounding error, rounding decides about this variance, and so do the units of the data; the mean
does not depend on it. A smaller rank is the remedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ..bases.basis import Basis
from ..bases.covariance import Covariance, covariance_state, covariances_from_state
from ..cp.conditional import Conditional, design_rows
from ..cp.design import Design
from ..cp.format import WeightFormat, Weights
from ..cp.levels import LevelConditional
from ..cp.penalty import Penalty
from ..errors import NotFittedError
from .posterior import Posterior

#: Laplace blocks are stored in a `state_dict` up to this many bytes; larger ones are recomputed from data.
MAX_STORED_BYTES = 64 << 20


class LaplacePosterior(Posterior):
    """
    Weights with a Gaussian around each factor.

    :param bases: The basis of each mode.
    :param weights: Whitened weights.
    :param covariances: The prior covariances they are whitened by, one for each mode.
    :param noise: Noise variance, a scalar.
    :param blocks: The conditional of each factor at unit noise, or None while they have not been computed.
    :param weight_format: The format of the weights.
    """

    kind = "laplace"

    def __init__(
        self,
        bases: Sequence[Basis],
        weights: Weights,
        covariances: Sequence[Covariance],
        noise: Tensor,
        blocks: Sequence[Conditional | LevelConditional] | None = None,
        *,
        weight_format: WeightFormat | None = None,
    ):
        balanced = zip(weights.balanced(), covariances, strict=True)
        factors = [v.unwhiten(w).unsqueeze(0) for w, v in balanced]
        super().__init__(bases, factors, {"noise": noise.reshape(1)}, weight_format)
        self.weights, self.covariances = weights, list(covariances)
        self.blocks = None if blocks is None else list(blocks)

    @property
    def has_covariance(self) -> bool:
        return self.blocks is not None

    def _features(self, x: Tensor) -> list[Tensor]:
        """Whitened features `(..., n, M_d)` of each mode."""
        return [
            v.mix(basis(x[..., d])) * v.root
            for d, (basis, v) in enumerate(zip(self.bases, self.covariances, strict=True))
        ]

    def mean_and_root(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """
        The mean, and the factors' blocks side by side.

        :param x: Inputs `(..., n, D)`.
        :return: `(..., n)` and `(..., n, sum_d K_d M_d)`, float64.
        """
        features, projections, products = self._rows(x)
        roots = []
        for z, p, block in zip(features, products, self._known_blocks(), strict=True):
            design = design_rows(p.movedim(0, -1), z)  # (..., n, K M)
            roots.append(block.half_solve(design.reshape(-1, design.shape[-1]).mT).mT.reshape(design.shape))
        return self._combined(projections, products), torch.cat(roots, dim=-1) * self.noise.sqrt()

    def _rows(self, x: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Features `(..., n, M_d)`, projections and products of all others, `(K, ..., n)`, of each mode."""
        features = self._features(x)
        projections = [(z @ factor.mT).movedim(-1, 0) for z, factor in zip(features, self.weights.factors, strict=True)]
        return features, projections, self.format.products_but_one(projections)

    def _combined(self, projections: Sequence[Tensor], products: Sequence[Tensor]) -> Tensor:
        """The mean, `(..., n)`."""
        return (products[0] * projections[0]).movedim(0, -1) @ self.weights.scales().expand(len(products[0]))

    def components(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features, projections, products = self._rows(x)
        rows = zip(features, products, self._known_blocks(), strict=True)
        variance = reduce(torch.add, (block.row_variances(p.mT, z) for z, p, block in rows))
        return self._combined(projections, products).unsqueeze(0), (self.noise * variance).unsqueeze(0)

    def draw_weights(self, sample_shape: torch.Size) -> Tensor:
        size = sum(block.size for block in self._known_blocks())
        return torch.randn(*sample_shape, size, dtype=torch.float64, device=self.device)

    def _known_blocks(self) -> list[Conditional | LevelConditional]:
        if self.blocks is None:
            raise NotFittedError(
                "The posterior covariance has not been computed for these weights (they were loaded without it, or the "
                "fit was interrupted). Call model.compute_covariance(), with data=(x, y) if the model holds no data. "
                "The posterior mean is available."
            )
        return self.blocks

    def state(self) -> dict[str, Any]:
        """Tensors that describe the posterior; blocks only while they are small."""
        state: dict[str, Any] = {
            "kind": self.kind,
            **self.format.state(),
            **self.weights.state(),
            **covariance_state(self.covariances),
            "noise": self.noise.squeeze(0),
        }
        stored = [block for block in self.blocks or () if isinstance(block, Conditional)]
        num_bytes = 8 * sum(block.factor.numel() for block in stored)
        if self.blocks is not None and len(stored) == len(self.blocks) and num_bytes <= MAX_STORED_BYTES:
            state["blocks"] = [(block.factor, block.scale) for block in stored]
        return state

    @classmethod
    def from_state(cls, state: dict[str, Any], bases: Sequence[Basis]) -> LaplacePosterior:
        blocks = [Conditional.from_factor(*block) for block in state["blocks"]] if "blocks" in state else None
        weight_format = WeightFormat.from_state(state)
        covariances = covariances_from_state(state)
        weights = weight_format.restore(state)
        return cls(bases, weights, covariances, state["noise"], blocks, weight_format=weight_format)

    def to(self, device: torch.device, bases: Sequence[Basis]) -> LaplacePosterior:
        blocks = None
        if self.blocks is not None:
            blocks = [block.to(device) for block in self.blocks]
        covariances = [covariance.to(device) for covariance in self.covariances]
        weights, noise = self.weights.to(device), self.noise.to(device)
        return LaplacePosterior(bases, weights, covariances, noise, blocks, weight_format=self.format)


def laplace_blocks(
    design: Design,
    weights: Weights,
    covariances: Sequence[Covariance],
    penalty: Penalty,
    strength: Tensor,
    information: float = 1.0,
) -> tuple[list[Conditional | LevelConditional], Tensor]:
    """
    The conditional of every factor at unit noise.

    :param design: The data.
    :param weights: Whitened weights at a mode of the objective.
    :param covariances: The prior covariances they are whitened by.
    :param penalty: The penalty of the objective.
    :param strength: Its strength.
    :param information: The mean curvature of the loss, relative to that of squared errors.
    :return: The conditionals, and the residual sum of squares.
    """
    raw = [covariance.unwhiten(factor) for factor, covariance in zip(weights.factors, covariances, strict=True)]
    scale = weights.scales()
    blocks: dict[int, Conditional | LevelConditional] = {}
    for d in design.format.chain(weights.num_dims):
        sums = design.sums(d, raw, scale)
        form = strength * penalty.form(weights, d)
        blocks[d] = sums.gram_for_solving().conditional(covariances[d], form, 1 / information)
    return [blocks[d] for d in range(weights.num_dims)], sums.square
