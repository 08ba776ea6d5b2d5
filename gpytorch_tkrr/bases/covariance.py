r"""The prior covariance of the weights of fixed functions, as the kernel gives it.

It is :math:`V = T \operatorname{diag}(v) T^\top`. Most kernels have uncorrelated weights: T is the identity, and all
algebra is that of the vector v. A basis whose weights are correlated (levels of a category, variational Fourier
features) gives a small matrix T. Everybody who uses V *whitens* by its root: with :math:`a = T v^{1/2} w` the weights w
are standard normal, features are :math:`\Phi T v^{1/2}` and a Gram matrix is :math:`v^{1/2} T^\top G T v^{1/2}`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Covariance:
    r"""
    :math:`V = T \operatorname{diag}(v) T^\top`.

    :param variances: v, `(..., M)`, float64.
    :param mixing: T, `(..., M, M)`, invertible; None for the identity.

    Example:
        >>> import torch
        >>> from gpytorch_tkrr.bases.covariance import Covariance
        >>> matrix = torch.tensor([[2.0, 1.0], [1.0, 3.0]], dtype=torch.float64)
        >>> covariance = Covariance.from_matrix(matrix)
        >>> torch.allclose(covariance.to_dense(), matrix)
        True
        >>> whitened = covariance.whiten(torch.eye(2, dtype=torch.float64))  # rows are vectors of weights
        >>> torch.allclose(whitened @ whitened.mT, matrix.inverse())
        True
    """

    variances: Tensor
    mixing: Tensor | None = None

    @classmethod
    def from_matrix(cls, matrix: Tensor) -> Covariance:
        """
        A dense covariance.

        :param matrix: V, `(..., M, M)`, positive definite.
        """
        factor = torch.linalg.cholesky(matrix)
        return cls(torch.ones_like(factor[..., 0]), factor)

    @property
    def root(self) -> Tensor:
        """:math:`v^{1/2}`, `(..., M)`."""
        return self.variances.sqrt()

    def detach(self) -> Covariance:
        """The same covariance without gradients."""
        return Covariance(self.variances.detach(), None if self.mixing is None else self.mixing.detach())

    def to(self, device: torch.device) -> Covariance:
        """
        The same covariance on another device.

        :param device: The device.
        """
        return Covariance(self.variances.to(device), None if self.mixing is None else self.mixing.to(device))

    def to_dense(self) -> Tensor:
        """V, `(..., M, M)`."""
        if self.mixing is None:
            return torch.diag_embed(self.variances)
        return (self.mixing * self.variances.unsqueeze(-2)) @ self.mixing.mT

    def equals(self, other: Covariance) -> bool:
        """
        Whether another covariance is the same, number by number.

        :param other: The other one, of the same kernel.
        """
        return torch.equal(self.numbers(), other.numbers())

    def numbers(self) -> Tensor:
        """All numbers in one vector."""
        if self.mixing is None:
            return self.variances.reshape(-1)
        return torch.cat([self.variances.reshape(-1), self.mixing.reshape(-1)])

    # T alone: what follows is the diagonal algebra of v

    def mix(self, features: Tensor) -> Tensor:
        r"""
        :math:`\Phi T`, the functions whose weights are uncorrelated; also :math:`T^\top b` for rows b.

        :param features: :math:`\Phi`, `(..., N, M)`.
        """
        return features if self.mixing is None else features @ self.mixing

    def mix_gram(self, gram: Tensor) -> Tensor:
        r"""
        :math:`T^\top G T`.

        :param gram: G, `(..., M, M)`.
        """
        return gram if self.mixing is None else self.mixing.mT @ gram @ self.mixing

    def mix_blocks(self, gram: Tensor) -> Tensor:
        """
        :meth:`mix_gram` of every block of the Gram matrix of several components.

        :param gram: `(R, M, R, M)`.
        """
        return gram if self.mixing is None else self.mix_gram(gram.transpose(1, 2)).transpose(1, 2).contiguous()

    def unmix(self, weights: Tensor) -> Tensor:
        r"""
        :math:`T u` for rows u.

        :param weights: u, `(..., K, M)`.
        """
        return weights if self.mixing is None else weights @ self.mixing.mT

    def demix(self, weights: Tensor) -> Tensor:
        r"""
        :math:`T^{-1} a` for rows a, the inverse of :meth:`unmix`.

        :param weights: a, `(..., K, M)`.
        """
        return weights if self.mixing is None else torch.linalg.solve(self.mixing, weights.mT).mT

    # Whole root

    def unwhiten(self, weights: Tensor) -> Tensor:
        r"""
        :math:`T v^{1/2} w` for rows w.

        :param weights: w, `(..., K, M)`.
        """
        return self.unmix(weights * self.root)

    def whiten(self, weights: Tensor) -> Tensor:
        r"""
        :math:`v^{-1/2} T^{-1} a` for rows a; zero where v has underflowed.

        :param weights: a, `(..., K, M)`.
        """
        weights = self.demix(weights)
        return torch.where(self.variances > 0, weights / self.root, torch.zeros_like(weights))

    def rewhiten(self, weights: Tensor, old: Covariance) -> Tensor:
        r"""
        Weights whitened by this covariance from those whitened by another one; zero where v has underflowed.

        :param weights: `(..., K, M)`.
        :param old: The other covariance.
        """
        if self.mixing is not None or old.mixing is not None:
            return self.whiten(old.unwhiten(weights))
        new = self.variances
        ratio = torch.where(new > 0, (old.variances / new).sqrt(), torch.zeros_like(new))
        return weights * ratio.nan_to_num(posinf=0.0)

    def logdet_mixing(self) -> Tensor:
        r""":math:`\log |T|^2`, what :math:`\log |V|` has beside :math:`\sum_j \log v_j`; zero for the identity."""
        if self.mixing is None:
            return torch.zeros_like(self.variances[..., 0])
        logdet: Tensor = torch.linalg.slogdet(self.mixing)[1]
        return 2 * logdet

    def between(self, left: Tensor, right: Tensor) -> Tensor:
        r"""
        :math:`\Phi_1 V \Phi_2^\top`.

        :param left: :math:`\Phi_1`, `(..., N, M)`.
        :param right: :math:`\Phi_2`, `(..., n, M)`.
        :return: `(..., N, n)`.
        """
        return (self.mix(left) * self.variances.unsqueeze(-2)) @ self.mix(right).mT

    def quadratic(self, features: Tensor) -> Tensor:
        r"""
        :math:`\phi_n^\top V \phi_n`, the prior variance that the functions represent.

        :param features: `(..., N, M)`.
        :return: `(..., N)`.
        """
        return (self.mix(features).square() @ self.variances.unsqueeze(-1)).squeeze(-1)


def block_diagonal(mixings: Sequence[Tensor | None], sizes: Sequence[int]) -> Tensor | None:
    """
    The mixing of weights side by side, or None where no part has one.

    :param mixings: Those of the parts, `(..., M_i, M_i)`.
    :param sizes: The numbers of weights.
    """
    known = [mixing for mixing in mixings if mixing is not None]
    if not known:
        return None
    batch_shape = torch.broadcast_shapes(*(mixing.shape[:-2] for mixing in known))
    total = known[0].new_zeros(*batch_shape, sum(sizes), sum(sizes))
    start = 0
    for mixing, size in zip(mixings, sizes, strict=True):
        block = slice(start, start + size)
        total[..., block, block] = torch.eye(size).to(total) if mixing is None else mixing
        start += size
    return total


def kronecker(mixings: Sequence[Tensor | None], sizes: Sequence[int]) -> Tensor | None:
    """
    The mixing of all pairs of weights, the left ones running slowest, or None where no part has one.

    :param mixings: Those of the factors, `(..., M_i, M_i)`.
    :param sizes: The numbers of weights.
    """
    known = [mixing for mixing in mixings if mixing is not None]
    if not known:
        return None
    total = known[0].new_ones(1, 1)
    for mixing, size in zip(mixings, sizes, strict=True):
        right = torch.eye(size).to(total) if mixing is None else mixing
        pairs = total[..., :, None, :, None] * right[..., None, :, None, :]
        total = pairs.flatten(-4, -3).flatten(-2, -1)
    return total


def covariance_state(covariances: Sequence[Covariance]) -> dict[str, list[Any]]:
    """
    Tensors that describe the covariances of all modes, for a `state_dict`.

    :param covariances: The covariances.
    """
    state: dict[str, list[Any]] = {"variances": [covariance.variances for covariance in covariances]}
    if any(covariance.mixing is not None for covariance in covariances):
        state["mixings"] = [covariance.mixing for covariance in covariances]
    return state


def covariances_from_state(state: Mapping[str, Any]) -> list[Covariance]:
    """
    The covariances that :func:`covariance_state` described.

    :param state: The description, among other things.
    """
    mixings = state.get("mixings", [None] * len(state["variances"]))
    return [Covariance(*parts) for parts in zip(state["variances"], mixings, strict=True)]
