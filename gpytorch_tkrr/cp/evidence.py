r"""The evidence of one factor as a function of its hyperparameters, without the data.

In the raw basis the sums G and b of a factor do not depend on its hyperparameters, so with all other factors fixed

.. math:: \log p(y \mid A_{-d}, \theta) = -\tfrac12 \log |P| + \tfrac{M R}{2} \log q
    + \tfrac12 c^\top P^{-1} c - \tfrac{N}{2} \log(2 \pi s^2) - \frac{y^\top y}{2 s^2},
    \qquad P = V^{1/2} G V^{1/2} / s^2 + q I, \quad c = V^{1/2} b / s^2,

costs :math:`(M R)^3` and no N. Components are mixed such that their prior precision is a multiple q of the identity.

It depends on the hyperparameters through the *natural coordinates*
:math:`\eta = (\log v_1, \dots, \log v_M, \log q, \log s^2)` alone, in which gradient and Fisher information are cheap.
With :math:`u = P^{-1} c`, :math:`T = I - q P^{-1}` and :math:`t_j = \operatorname{tr} T_{jj}`,

.. math:: g_j = \tfrac12 \bigl(q\, u_j^\top u_j - t_j\bigr), \qquad F_{jk} = \tfrac12 \|T_{jk}\|^2,
    \qquad F_{js} = \tfrac12 t_j - \sum_k F_{jk},

where j, k are functions and the blocks run over components. The covariance of y is a sum of one matrix for each
function and one for the noise, which gives the last formula and :math:`F_{ss}`; q divides all of the former. Where
weights are correlated, a change of V is :math:`V^{1/2} E V^{1/2}` with a symmetric E in place of the change of one
:math:`\log v_j`: :math:`t_j` becomes :math:`\operatorname{tr} T E` and :math:`F_{jk}` becomes
:math:`\tfrac12 \operatorname{tr} T E_j T E_k`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ..bases.covariance import Covariance
from .conditional import Conditional, DenseGram, whitened_precision
from .levels import LevelGram
from .sums import FactorSums

#: Mixtures of components with less prior precision than this, relative to the largest, count as zero.
COLLINEAR = 1e-10


@dataclass
class FactorData:
    r"""
    All that the evidence of one factor needs of the data.

    :param gram: G in the raw basis.
    :param rhs: :math:`b = C^\top y`, `(R, M)`.
    :param square: :math:`y^\top y`.
    :param count: N.
    """

    gram: DenseGram | LevelGram
    rhs: Tensor
    square: Tensor
    count: Tensor

    @classmethod
    def from_residuals(cls, sums: FactorSums, gram: DenseGram | LevelGram, raw: Tensor) -> FactorData:
        """
        The sums for the targets themselves, from those for the residuals of a model with a given raw factor.

        :param sums: Sums with the residuals as target.
        :param gram: Their Gram matrix.
        :param raw: The raw factor, scales of its components multiplied in, `(R, M)`.
        """
        product = gram.apply(raw)
        square = sums.square + (raw * (2 * sums.rhs + product)).sum()
        return cls(gram, sums.rhs + product, square, sums.count)

    def mixed(self, form: Tensor) -> FactorData:
        """
        The same data for mixtures of the components whose prior precision is a multiple of the identity. Directions in
        which components do not differ, and the prior says nothing, are left out.

        :param form: H, the prior precision over components but for a multiplier, `(R, R)`.
        """
        scale = form.diagonal().clamp(min=torch.finfo(form.dtype).tiny).rsqrt()
        values, vectors = torch.linalg.eigh(form * scale.unsqueeze(-1) * scale)
        kept = values > COLLINEAR * values[-1]
        mixture = scale.unsqueeze(-1) * vectors[:, kept] * values[kept].rsqrt()  # (R, R')
        rank, size = self.rhs.shape
        right = torch.einsum("isk,st->itk", self.gram.dense().reshape(-1, rank, size), mixture)  # (R M, R', M)
        gram = (mixture.mT @ right.reshape(rank, -1)).reshape(-1, size, mixture.shape[1], size)
        return replace(self, gram=DenseGram(gram), rhs=mixture.mT @ self.rhs)


class FactorEvidence:
    r"""
    :math:`\log p(y \mid A_{-d}, \theta)` at one value of the hyperparameters.

    :param data: Sums over the data, components :meth:`~FactorData.mixed`.
    :param covariance: V, of M weights.
    :param strength: q, the prior precision of the whitened weights.
    :param noise: :math:`s^2`.
    """

    def __init__(self, data: FactorData, covariance: Covariance, strength: Tensor, noise: Tensor):
        variances = covariance.variances.clamp(min=1e-250)
        self.strength, self.count, self.misfit = strength, data.count, data.square / noise
        self.log_noise = torch.log(2 * math.pi * noise)
        rank = data.rhs.shape[0]
        prior = strength * torch.eye(rank, dtype=strength.dtype, device=strength.device)
        self.precision = whitened_precision(data.gram.dense(), Covariance(variances / noise, covariance.mixing), prior)
        self.conditional = Conditional(self.precision)
        c = (covariance.mix(data.rhs) * variances.sqrt() / noise).reshape(-1)
        mean = self.conditional.solve(c)
        self.explained = c @ mean
        self.mean = mean.reshape(data.rhs.shape)  # (R, M)

    def value(self) -> float:
        """The log density."""
        logdet = self.mean.numel() * self.strength.log() - self.conditional.logdet()
        return float(logdet + self.explained - self.count * self.log_noise - self.misfit) / 2

    @cached_property
    def _determined(self) -> Tensor:
        """T: how far each weight is determined by the data, `(R M, R M)`."""
        determined = self.conditional.covariance().mul_(-self.strength)
        determined.diagonal().add_(1.0)
        return determined

    def derivatives(self, directions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        r"""
        Gradient and Fisher information in K directions of V, in :math:`\log q` and in :math:`\log s^2`.

        :param directions: E of each, `(K, M, M)`; by default those of :math:`\log v_1, \dots, \log v_M`.
        :return: `(K + 2,)` and `(K + 2, K + 2)`.
        """
        rank, size = self.mean.shape
        blocks = self._determined.reshape(rank, size, rank, size)
        total, total_square = self._determined.diagonal().sum(), self._determined.square().sum()
        squares = self.strength * self.mean.square().sum()
        if directions is None:
            traces = self._determined.diagonal().reshape(rank, size).sum(0)  # tr T E, (K,)
            energies = self.strength * self.mean.square().sum(0)  # q u' E u
            pairs = blocks.square().sum((0, 2))  # tr T E T E, (K, K)
            with_all = pairs.sum(1)  # tr T E T
        else:
            turned = torch.einsum("rjsk,pkl->prjsl", blocks, directions).flatten(3, 4).flatten(1, 2)  # T E
            traces = turned.diagonal(dim1=1, dim2=2).sum(-1)
            energies = self.strength * torch.einsum("rj,pjk,rk->p", self.mean, directions, self.mean)
            pairs = torch.einsum("pij,qji->pq", turned, turned)
            with_all = (turned * self._determined).sum((1, 2))
        by_noise = self.misfit - self.explained - squares + total - self.count
        gradient = torch.cat([energies - traces, torch.stack([total - squares, by_noise])]) / 2
        with_noise, both = traces - with_all, total - total_square
        fisher = pairs.new_empty(len(traces) + 2, len(traces) + 2)
        fisher[:-2, :-2] = pairs
        fisher[-2, :-2] = fisher[:-2, -2] = -with_all
        fisher[-1, :-2] = fisher[:-2, -1] = with_noise
        fisher[-2, -2], fisher[-1, -1] = total_square, self.count - total - both
        fisher[-2, -1] = fisher[-1, -2] = -both
        return gradient, fisher / 2

    def num_parameters(self) -> float:
        r"""
        The effective number of parameters of this factor alone: :math:`\operatorname{tr} T`, less the sizes of the
        components, which belong to all factors.
        """
        rank, size = self.mean.shape
        norms = self.mean.norm(dim=1)
        unit = self.mean.new_zeros(rank, size, rank)  # the direction of each component's size
        unit.diagonal(dim1=0, dim2=2).copy_((self.mean / norms.unsqueeze(-1)).mT)
        unit = unit.reshape(rank * size, rank)[:, norms > 0]
        of_sizes = Conditional(unit.mT @ (self.precision @ unit))
        sizes = unit.shape[1] - float(self.strength * of_sizes.covariance().diagonal().sum())
        return max(float(self._determined.diagonal().sum()) - sizes, 0.0)
