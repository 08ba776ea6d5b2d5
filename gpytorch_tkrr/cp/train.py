r"""Weights as a tensor train: pure algebra that knows neither data nor kernels.

A weight tensor of ranks :math:`r_1, \dots, r_{D-1}` is a product of matrices, one chosen by each index,

.. math:: W_{j_1 \dots j_D} = A_1(j_1)\, A_2(j_2) \cdots A_D(j_D), \qquad A_d(j) \in \mathbb{R}^{r_{d-1} \times r_d},

with :math:`r_0 = r_D = 1`. *Core* d is kept as a factor `(r_{d-1} r_d, M_d)`, the right index of its rows running
fastest. A matrix and its inverse may be put between neighbouring cores without any change of W. ALS uses this freedom
to keep all cores but the one that it updates orthogonal: then :math:`\|W\|_F` is the norm of that core.

Reference: Oseledets (2011), *Tensor-train decomposition*; Holtz, Rohwedder & Schneider (2012), *The alternating linear
scheme for tensor optimization in the tensor train format*.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import mul
from typing import Any

import torch
from torch import Tensor

from .format import Norms, Turn, WeightFormat, Weights

#: Singular values at a bond below this fraction of the largest one are rounding.
NEGLIGIBLE = 1e-13

#: Terms that a start looks for, for each unit of rank: one bond holds many of them, such as all main effects.
TERMS_PER_RANK = 4


def bond_sizes(heights: Sequence[int]) -> list[int]:
    """
    :math:`r_0, \\dots, r_D` from the numbers of rows.

    :param heights: :math:`r_{d-1} r_d` of each core.
    """
    return list(accumulate(heights, lambda rank, height: height // rank, initial=1))


class TrainWeights(Weights):
    """
    Cores of a tensor train, and a scale of W apart.

    :param factors: Whitened cores, D tensors `(r_{d-1} r_d, M_d)`.
    :param scale: What W is multiplied by.
    :param center: The mode whose core carries the norm; None where the form is another one.
    :param is_orthogonal: Whether all cores but that one are known to be orthogonal.
    """

    def __init__(
        self, factors: Sequence[Tensor], scale: float = 1.0, center: int | None = None, is_orthogonal: bool = False
    ):
        self.factors = [factor.detach().double() for factor in factors]
        self.bonds = bond_sizes([len(factor) for factor in self.factors])
        self.scale, self.center = scale, center
        self.is_orthogonal = is_orthogonal

    def core(self, d: int) -> Tensor:
        """
        One core, `(r_{d-1}, r_d, M_d)`.

        :param d: The mode.
        """
        return self.factors[d].reshape(self.bonds[d], self.bonds[d + 1], -1)

    @property
    def rank(self) -> int:
        """The largest rank of a bond."""
        return max(self.bonds)

    def scales(self) -> Tensor:
        """The scale of W, `(1,)`."""
        return self.factors[0].new_full((1,), self.scale)

    def scaled_factor(self, d: int) -> Tensor:
        return self.scale * self.factors[d]

    def set_factor(self, d: int, factor: Tensor) -> None:
        self.is_orthogonal = self.is_orthogonal and d == self.center
        self._set(d, factor)

    def _set(self, d: int, factor: Tensor) -> None:
        self.factors[d] = factor.reshape(-1, factor.shape[-1])

    def replace(self, d: int, factor: Tensor, norms: Tensor) -> None:
        self.set_factor(d, factor)
        self.scale = 1.0

    def vanish(self, d: int) -> None:
        self.factors[d] = torch.zeros_like(self.factors[d])

    def multiply(self, number: float) -> None:
        self.scale *= number

    def normalise(self, norms: Norms) -> None:
        """
        The first core carries the norm.

        :param norms: Not used: orthogonal cores have no scales.
        """
        self.center = self.num_dims - 1
        self.move_to(0)
        self.is_orthogonal = True

    def move_to(self, d: int) -> tuple[list[int], list[Turn]]:
        """
        Pass the norm on to a core; those that it passes become orthogonal.

        :param d: The mode.
        """
        if self.center is None:
            self.normalise(lambda _, factor: factor.norm(dim=-1))
        assert self.center is not None
        start, turns = self.center, []
        while self.center < d:
            turns.append((self.center + 1, self._pass_right(self.center)))
            self.center += 1
        while self.center > d:
            turns.append((self.center, self._pass_left(self.center)))
            self.center -= 1
        return (list(range(min(start, d), max(start, d) + 1)) if turns else []), turns

    def _pass_right(self, d: int) -> Tensor:
        """Make core d orthogonal seen from the left; what products to the right of its bond are multiplied by."""
        core = self.core(d)
        q, r = torch.linalg.qr(core.transpose(1, 2).reshape(-1, core.shape[1]))  # (r M, r')
        self._set(d, q.reshape(core.shape[0], -1, core.shape[1]).transpose(1, 2))
        self._set(d + 1, torch.einsum("ab,bcm->acm", r, self.core(d + 1)))
        return r

    def _pass_left(self, d: int) -> Tensor:
        """Make core d orthogonal seen from the right; what products to the left of its bond are multiplied by."""
        core = self.core(d)
        q, r = torch.linalg.qr(core.reshape(core.shape[0], -1).mT)  # (r' M, r)
        self._set(d, q.mT.reshape(core.shape))
        self._set(d - 1, torch.einsum("abm,cb->acm", self.core(d - 1), r))
        return r

    def balance(self) -> None:
        r"""
        The symmetric form: on both sides of every bond the functions are orthogonal, and have the same norms
        :math:`\sigma^{1/2}`, with :math:`\sigma` the singular values of W at that bond.
        """
        self.factors, self.center = self._symmetric(), None

    def balanced(self) -> list[Tensor]:
        """Cores `(r_{d-1} r_d, M_d)` of the symmetric form (see :meth:`balance`), the scale spread over all."""
        return [self.scale ** (1 / self.num_dims) * factor for factor in self._symmetric()]

    def _symmetric(self) -> list[Tensor]:
        copy = self.clone()
        copy.normalise(lambda _, factor: factor.norm(dim=-1))
        before = copy.factors[0].new_ones(1)  # what the left side of a core has been multiplied by
        for d in range(self.num_dims - 1):
            core = copy.core(d)
            u, sigma, v = torch.linalg.svd(core.transpose(1, 2).reshape(-1, core.shape[1]), full_matrices=False)
            root = torch.where(sigma > NEGLIGIBLE * sigma[0], sigma, torch.zeros_like(sigma)).sqrt()
            left = (u * root).reshape(core.shape[0], -1, core.shape[1]).transpose(1, 2)
            copy.set_factor(d, left * _inverse(before).reshape(-1, 1, 1))
            copy.set_factor(d + 1, torch.einsum("ab,bcm->acm", sigma.unsqueeze(-1) * v, copy.core(d + 1)))
            before = root
        last = copy.core(self.num_dims - 1) * _inverse(before).reshape(-1, 1, 1)
        copy.set_factor(self.num_dims - 1, last)
        return copy.factors

    def frobenius_form(self, d: int) -> Tensor:
        if self.is_orthogonal and d == self.center:
            return torch.eye(len(self.factors[d])).to(self.factors[d])
        left = right = self.factors[0].new_ones(1, 1)
        for k in range(d):
            left = torch.einsum("ab,acm,bem->ce", left, self.core(k), self.core(k))
        for k in range(self.num_dims - 1, d, -1):
            right = torch.einsum("ce,acm,bem->ab", right, self.core(k), self.core(k))
        return torch.kron(left.contiguous(), right.contiguous())

    def squared_norm(self) -> Tensor:
        d = 0 if self.center is None else self.center
        return self.scale**2 * (self.frobenius_form(d) * (self.factors[d] @ self.factors[d].mT)).sum()

    def clone(self) -> TrainWeights:
        return TrainWeights(self.factors, self.scale, self.center, self.is_orthogonal)

    def to(self, device: torch.device) -> TrainWeights:
        return TrainWeights([factor.to(device) for factor in self.factors], self.scale, self.center, self.is_orthogonal)

    def state(self) -> dict[str, Any]:
        return {
            "factors": list(self.factors),
            "scale": self.scale,
            "center": self.center,
            "is_orthogonal": self.is_orthogonal,
        }


def _inverse(values: Tensor) -> Tensor:
    """One by each value, zero for zeros."""
    return torch.where(values > 0, 1 / values, torch.zeros_like(values))


class TensorTrain(WeightFormat):
    r"""
    Weights as a tensor train: f is a product of matrices, one for each input,

    .. math:: f(x) = A_1(x_1)\, A_2(x_2) \cdots A_D(x_D), \qquad A_d(x_d) = \sum_j z_{dj}(x_d)\, A_{dj} \in
        \mathbb{R}^{r_{d-1} \times r_d}, \qquad r_0 = r_D = 1 .

    Its number of weights is :math:`\sum_d r_{d-1} r_d M_d`, about that of :class:`CP` of rank :math:`r^2`, and so is
    the cost of an update. A sum over all inputs has rank 2, whatever their number. The inputs are taken in the order of
    their columns: those that interact should be neighbours.

    :param rank: The largest rank of a bond. A bond has fewer where the modes on one side of it have fewer functions.

    Example:
        >>> import gpytorch, torch, gpytorch_tkrr as tkrr
        >>> x = torch.rand(200, 3)
        >>> y = torch.sin(6 * x[:, 0]) * x[:, 1] + x[:, 2] ** 2
        >>> likelihood = gpytorch.likelihoods.GaussianLikelihood()
        >>> likelihood.noise = 1e-3
        >>> model = tkrr.TKRR(x, y, likelihood, weights=tkrr.TensorTrain(3), num_basis=8)
        >>> result = tkrr.fit_als(model, seed=0)
        >>> bool((model.eval()(x).mean - y).square().mean() < 1e-3)
        True
        >>> [tuple(core.shape) for core in model.factors]
        [(1, 10, 3), (3, 10, 3), (3, 10, 1)]

    Reference: Oseledets (2011), *Tensor-train decomposition*; Wahls et al. (2014), *Learning multidimensional Fourier
    series with tensor trains*.
    """

    kind = "train"

    def __init__(self, rank: int = 4):
        super().__init__(rank)

    def heights(self, sizes: Sequence[int]) -> list[int]:
        assert self.rank is not None
        left = list(accumulate(sizes, mul, initial=1))
        right = list(accumulate(reversed(sizes), mul, initial=1))[::-1]
        bonds = [min(self.rank, *pair) for pair in zip(left, right, strict=True)]
        return [a * b for a, b in pairwise(bonds)]

    def bonds(self, heights: Sequence[int]) -> list[int]:
        return bond_sizes(heights)[1:-1]

    def rank_of(self, heights: Sequence[int]) -> int:
        return max(bond_sizes(heights))

    def union(self, heights: Sequence[Sequence[int]]) -> list[int]:
        bonds = [max(each) for each in zip(*map(bond_sizes, heights), strict=True)]
        return [left * right for left, right in pairwise(bonds)]

    def resized(self, factors: Sequence[Tensor], heights: Sequence[int]) -> list[Tensor]:
        old, new = bond_sizes([factor.shape[-2] for factor in factors]), bond_sizes(heights)
        found = []
        for d, factor in enumerate(factors):
            core = factor.unflatten(-2, (old[d], old[d + 1]))
            core = torch.nn.functional.pad(core, (0, 0, 0, new[d + 1] - old[d + 1], 0, new[d] - old[d]))
            found.append(core.flatten(-3, -2))
        return found

    def advance(self, left: Tensor | None, projection: Tensor) -> Tensor:
        if left is None:
            return projection
        cores = projection.unflatten(0, (len(left), -1))  # (r, r', ...)
        total = left[0] * cores[0]
        for value, core in zip(left[1:], cores[1:], strict=True):
            total = torch.addcmul(total, value, core)
        return total

    def retreat(self, projection: Tensor, right: Tensor | None) -> Tensor:
        if right is None:
            return projection
        cores = projection.unflatten(0, (-1, len(right)))  # (r, r', ...)
        total = cores[:, 0] * right[0]
        for c in range(1, len(right)):
            total = torch.addcmul(total, cores[:, c], right[c])
        return total

    def join(self, left: Tensor | None, right: Tensor | None) -> Tensor:
        if left is not None and right is not None:
            return (left.unsqueeze(1) * right).flatten(0, 1)
        product = left if right is None else right
        assert product is not None
        return product

    def pairs(self, matrices: Sequence[Tensor]) -> list[Tensor]:
        bonds = bond_sizes([len(matrix) for matrix in matrices])
        found = []
        for matrix, left, right in zip(matrices, bonds, bonds[1:], strict=False):
            four = matrix.unflatten(1, (left, right)).unflatten(0, (left, right))  # (r, r', r, r', ...)
            found.append(four.transpose(1, 2).flatten(0, 3))
        return found

    def weights(self, factors: Sequence[Tensor]) -> TrainWeights:
        return TrainWeights(factors)

    def restore(self, state: dict[str, Any]) -> TrainWeights:
        return TrainWeights(*(state[name] for name in ("factors", "scale", "center", "is_orthogonal")))

    def num_components(self, num_dims: int) -> int:
        assert self.rank is not None
        return TERMS_PER_RANK * self.rank

    def from_components(self, factors: Sequence[Tensor]) -> list[Tensor]:
        """
        The sum of products as a train of diagonal cores, rounded to the rank by singular values (Oseledets 2011).

        :param factors: Whitened weights of at least `rank` terms, D tensors `(C, M_d)`.
        """
        num, last = len(factors[0]), len(factors) - 1
        sizes = [factor.shape[-1] for factor in factors]
        bonds = bond_sizes(self.heights(sizes))
        if last == 0:
            return [factors[0].sum(0, keepdim=True)]
        eye = torch.eye(num).to(factors[0])
        cores = [eye.unsqueeze(-1) * factor.unsqueeze(1) for factor in factors]  # (C, C, M)
        cores[0], cores[last] = factors[0].unsqueeze(0), factors[last].unsqueeze(1)
        for d in range(last, 0, -1):  # orthogonal seen from the right
            q, r = torch.linalg.qr(cores[d].reshape(len(cores[d]), -1).mT)
            cores[d] = q.mT.reshape(-1, *cores[d].shape[1:])
            cores[d - 1] = torch.einsum("abm,cb->acm", cores[d - 1], r)
        for d in range(last):
            core = cores[d]
            u, sigma, v = torch.linalg.svd(core.transpose(1, 2).reshape(-1, core.shape[1]), full_matrices=False)
            rank = bonds[d + 1]
            cores[d] = u[:, :rank].reshape(len(core), -1, rank).transpose(1, 2)
            cores[d + 1] = torch.einsum("ab,bcm->acm", sigma[:rank].unsqueeze(-1) * v[:rank], cores[d + 1])
        return TrainWeights([core.flatten(0, 1) for core in cores]).balanced()

    def shapes(self, sizes: Sequence[int]) -> list[tuple[int, ...]]:
        bonds = bond_sizes(self.heights(sizes))
        return [(left, size, right) for left, size, right in zip(bonds, sizes, bonds[1:], strict=False)]

    def shown(self, factors: Sequence[Tensor]) -> list[Tensor]:
        bonds = bond_sizes([len(factor) for factor in factors])
        return [factor.unflatten(0, (left, -1)).mT for factor, left in zip(factors, bonds, strict=False)]

    def read(self, factors: Sequence[Tensor]) -> list[Tensor]:
        return [factor.mT.flatten(0, 1) for factor in factors]
