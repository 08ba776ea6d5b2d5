r"""The Gaussian conditional of one factor's whitened weights.

With prior precision :math:`Q \otimes I` on the whitened weights :math:`w = V^{-1/2} a` their posterior precision is

.. math:: P = V^{1/2} G V^{1/2} / s^2 + Q \otimes I .

Weights are whitened throughout because :math:`V^{-1}` overflows for smooth kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from linear_operator.utils.errors import NotPSDError
from torch import Tensor

from ..bases.covariance import Covariance
from ..errors import InputError
from ..linalg import jittered_cholesky

#: Fractions of the largest diagonal element that are added to all of them, one after the other, where sums over data
#: have lost the small ones by rounding: functions that vanish at all rows, with next to no noise.
FLOORS = (0.0, 1e-14, 1e-12, 1e-10, 1e-8)


def whitened_precision(gram: Tensor, covariance: Covariance, prior: Tensor) -> Tensor:
    r"""
    :math:`P = V^{1/2} G V^{1/2} + Q \otimes I`, differentiable.

    :param gram: G, divided by the noise variance where that is not 1, `(R, M, R, M)`.
    :param covariance: V, of M weights.
    :param prior: Q, `(R, R)`.
    :return: `(R M, R M)`.
    """
    root = covariance.root
    rank, size = gram.shape[:2]
    precision = covariance.mix_blocks(gram) * root.reshape(-1, 1, 1) * root
    precision.diagonal(dim1=1, dim2=3).add_(prior.unsqueeze(-1))
    return precision.reshape(rank * size, rank * size)


def design_rows(p: Tensor, z: Tensor) -> Tensor:
    r"""
    :math:`p_n \otimes z_n`.

    :param p: `(..., n, R)`.
    :param z: `(..., n, M)`.
    :return: `(..., n, R M)`.
    """
    return (p.unsqueeze(-1) * z.unsqueeze(-2)).flatten(-2)


class Conditional:
    r"""
    A factorised precision matrix: :math:`P = S^{-1} L L^\top S^{-1}` with S chosen to give unit diagonal.

    Unit diagonal makes the factorisation indifferent to the scales of components and functions, which may differ by
    hundreds of orders of magnitude. If rounding has made the matrix indefinite, a relative jitter is added.

    :param precision: P, `(K, K)`, symmetric.
    """

    def __init__(self, precision: Tensor):
        diagonal = precision.diagonal()
        for floor in FLOORS:
            self.scale = unit_scale(diagonal + floor * diagonal.amax() if floor else diagonal)
            scaled = precision * self.scale.unsqueeze(-1) * self.scale
            if floor:
                scaled.diagonal().fill_(1.0)
            try:
                self.factor, self.jitter = jittered_cholesky(scaled)
                return
            except NotPSDError:
                if floor == FLOORS[-1]:
                    raise

    @classmethod
    def from_gram(cls, gram: Tensor, weight: Tensor, prior: Tensor) -> Conditional:
        r"""
        For :math:`P = \operatorname{diag}(u)\, G \operatorname{diag}(u) + \operatorname{diag}(q)`, scaled in two passes
        over G.

        :param gram: G, `(K, K)`.
        :param weight: u, `(K,)`.
        :param prior: q, `(K,)`.
        """
        scale = unit_scale(gram.diagonal() * weight.square() + prior)
        both = weight * scale
        scaled = (gram * both.unsqueeze(-1)).mul_(both)
        scaled.diagonal().fill_(1.0)
        factor, jitter = jittered_cholesky(scaled)
        conditional = cls.from_factor(factor, scale)
        conditional.jitter = jitter
        return conditional

    @classmethod
    def from_factor(cls, factor: Tensor, scale: Tensor) -> Conditional:
        """
        From a stored factorisation.

        :param factor: L, `(K, K)`.
        :param scale: S, `(K,)`.
        """
        conditional = cls.__new__(cls)
        conditional.factor, conditional.scale, conditional.jitter = factor, scale, 0.0
        return conditional

    def solve(self, rhs: Tensor) -> Tensor:
        """
        :math:`P^{-1}` times a vector.

        :param rhs: `(K,)`.
        """
        return self.scale * torch.cholesky_solve((self.scale * rhs).unsqueeze(-1), self.factor).squeeze(-1)

    def half_solve(self, rhs: Tensor) -> Tensor:
        r"""
        :math:`L^{-1} S b`, whose squared norm is :math:`b^\top P^{-1} b`.

        :param rhs: `(K, n)`.
        """
        half: Tensor = torch.linalg.solve_triangular(self.factor, self.scale.unsqueeze(-1) * rhs, upper=False)
        return half

    def half_covariance(self, noise: Tensor) -> Tensor:
        r"""
        :math:`S L^{-\top} \epsilon`, a draw of covariance :math:`P^{-1}` where the noise is standard normal.

        :param noise: `(K,)`.
        """
        draw: Tensor = torch.linalg.solve_triangular(self.factor.mT, noise.unsqueeze(-1), upper=True)
        return self.scale * draw.squeeze(-1)

    def covariance(self) -> Tensor:
        """:math:`P^{-1}`, `(K, K)`."""
        return torch.cholesky_inverse(self.factor) * self.scale.unsqueeze(-1) * self.scale

    @property
    def size(self) -> int:
        """K, the number of weights."""
        return self.factor.shape[-1]

    def to(self, device: torch.device) -> Conditional:
        """
        The same on another device.

        :param device: The device.
        """
        return Conditional.from_factor(self.factor.to(device), self.scale.to(device))

    def row_variances(self, p: Tensor, z: Tensor) -> Tensor:
        r"""
        :math:`g_n^\top P^{-1} g_n` for the design rows :math:`g_n = p_n \otimes z_n`.

        :param p: `(n, R)`.
        :param z: Whitened features, `(n, M)`.
        :return: `(n,)`.
        """
        return self.half_solve(design_rows(p, z).mT).square().sum(0)

    def logdet(self) -> Tensor:
        """:math:`\\log |P|`."""
        return 2 * (self.factor.diagonal().log() - self.scale.log()).sum()


@dataclass(frozen=True)
class DenseGram:
    """
    The Gram matrix of one factor.

    :param matrix: G, `(R, M, R, M)`.
    """

    matrix: Tensor

    def dense(self) -> Tensor:
        """G as `(R, M, R, M)`."""
        return self.matrix

    def apply(self, factor: Tensor) -> Tensor:
        """
        G times a factor.

        :param factor: `(R, M)`.
        """
        return (self.matrix.reshape(factor.numel(), -1) @ factor.reshape(-1)).reshape(factor.shape)

    def diagonal(self) -> Tensor:
        """The diagonal of G, `(R, M)`."""
        rank, size = self.matrix.shape[:2]
        return self.matrix.reshape(rank * size, -1).diagonal().reshape(rank, size)

    def of_functions(self, index: Tensor) -> DenseGram:
        """
        The part of some functions.

        :param index: Their numbers.
        """
        return DenseGram(self.matrix[:, index][..., index])

    def squares(self, factor: Tensor) -> Tensor:
        """
        The sum of squares of each component alone.

        :param factor: `(R, M)`.
        :return: `(R,)`.
        """
        blocks = self.matrix.diagonal(dim1=0, dim2=2).permute(2, 0, 1)  # (R, M, M)
        return (factor * torch.bmm(blocks, factor.unsqueeze(-1)).squeeze(-1)).sum(-1)

    def between(self, factor: Tensor) -> Tensor:
        r"""
        :math:`A G A^\top`, where G is that of one component.

        :param factor: A, `(R, M)`.
        :return: `(R, R)`.
        """
        return factor @ self.matrix[0, :, 0] @ factor.mT

    def plus(self, form: Tensor, other: DenseGram) -> DenseGram:
        r"""
        :math:`G + H \otimes G_1`.

        :param form: H, `(R, R)`.
        :param other: :math:`G_1`, of one component.
        """
        return DenseGram(torch.addcmul(self.matrix, form[:, None, :, None], other.matrix))

    def conditional(self, covariance: Covariance, prior: Tensor, noise: float) -> Conditional:
        r"""
        The conditional of the whitened weights, :math:`P = V^{1/2} G V^{1/2} / s^2 + Q \otimes I`.

        :param covariance: V, of M weights.
        :param prior: Q, `(R, R)`, or its diagonal `(R,)`.
        :param noise: :math:`s^2`.
        """
        if prior.dim() == 2:
            scaled = Covariance(covariance.variances / noise, covariance.mixing)
            return Conditional(whitened_precision(self.matrix, scaled, prior))
        rank, size = self.matrix.shape[:2]
        root = covariance.variances.clamp(min=1e-300).sqrt()
        square = covariance.mix_blocks(self.matrix).reshape(rank * size, rank * size)
        weight = (root / math.sqrt(noise)).repeat(rank)
        return Conditional.from_gram(square, weight, prior.repeat_interleave(size))


def unit_scale(diagonal: Tensor) -> Tensor:
    """
    What makes a diagonal one; where it is finite so are all entries of a positive semi-definite matrix.

    :param diagonal: `(...)`.
    """
    if not bool(torch.isfinite(diagonal).all()):
        raise InputError("The sums over the data overflowed. Are inputs or targets of extreme magnitude?")
    return diagonal.clamp(min=torch.finfo(torch.float64).tiny).rsqrt()
