r"""Weights as a tensor train: pure algebra that knows neither data nor kernels.

A weight tensor of ranks :math:`r_1, \dots, r_{D-1}` is a product of matrices, one chosen by each index,

.. math:: W_{j_1 \dots j_D} = A_1(j_1)\, A_2(j_2) \cdots A_D(j_D), \qquad A_d(j) \in \mathbb{R}^{r_{d-1} \times r_d},

with :math:`r_0 = r_D = 1`; the modes may stand in any order in this chain. *Core* d is kept as a factor
`(r_{d-1} r_d, M_d)`, the right index of its rows running fastest. A matrix and its inverse may be put between
neighbouring cores without any change of W. ALS uses this freedom to keep all cores but the one that it updates
orthogonal: then :math:`\|W\|_F` is the norm of that core.

Reference: Oseledets (2011), *Tensor-train decomposition*; Holtz, Rohwedder & Schneider (2012), *The alternating linear
scheme for tensor optimization in the tensor train format*.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..errors import InputError
from ..linalg import steady_signs
from .format import Norms, Turn, WeightFormat, Weights
from .order import InputOrder

#: Singular values at a bond below this fraction of the largest one are rounding.
NEGLIGIBLE = 1e-13

#: Terms that a start looks for, for each unit of rank: one bond holds many of them, such as all main effects.
TERMS_PER_RANK = 4

_Item = TypeVar("_Item")


def bond_sizes(heights: Sequence[int]) -> list[int]:
    """
    :math:`r_0, \\dots, r_D` from the numbers of rows.

    :param heights: :math:`r_{d-1} r_d` of each core, along the chain.
    """
    return list(accumulate(heights, lambda rank, height: height // rank, initial=1))


class TrainWeights(Weights):
    """
    Cores of a tensor train, and a scale of W apart. Cores, bonds and the center are known by their place in the chain,
    factors by their mode.

    :param factors: Whitened cores, D tensors `(r_{d-1} r_d, M_d)`.
    :param scale: What W is multiplied by.
    :param center: Where the core is that carries the norm; None where the form is another one.
    :param is_orthogonal: Whether all cores but that one are known to be orthogonal.
    :param chain: The modes from left to right; None for their own order.
    """

    def __init__(
        self,
        factors: Sequence[Tensor],
        scale: float = 1.0,
        center: int | None = None,
        is_orthogonal: bool = False,
        chain: Sequence[int] | None = None,
    ):
        self.factors = [factor.detach().double() for factor in factors]
        self.chain = range(len(factors)) if chain is None else chain
        self.bonds = bond_sizes([len(self.factors[d]) for d in self.chain])
        self.scale, self.center = scale, center
        self.is_orthogonal = is_orthogonal

    def core(self, place: int) -> Tensor:
        """
        One core, `(r, r', M)`.

        :param place: Where it is in the chain.
        """
        return self.factors[self.chain[place]].reshape(self.bonds[place], self.bonds[place + 1], -1)

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
        self.is_orthogonal = self.is_orthogonal and self.chain.index(d) == self.center
        self.factors[d] = factor.reshape(-1, factor.shape[-1])

    def _set(self, place: int, core: Tensor) -> None:
        self.factors[self.chain[place]] = core.reshape(-1, core.shape[-1])

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
        self.move_to(self.chain[0])
        self.is_orthogonal = True

    def move_to(self, d: int) -> tuple[list[int], list[Turn]]:
        """
        Pass the norm on to a core; those that it passes become orthogonal.

        :param d: The mode.
        """
        if self.center is None:
            self.normalise(lambda _, factor: factor.norm(dim=-1))
        assert self.center is not None
        start, place, turns = self.center, self.chain.index(d), []
        while self.center < place:
            turns.append((self.center + 1, self._pass_right(self.center)))
            self.center += 1
        while self.center > place:
            turns.append((self.center, self._pass_left(self.center)))
            self.center -= 1
        return (list(self.chain[min(start, place) : max(start, place) + 1]) if turns else []), turns

    def _pass_right(self, place: int) -> Tensor:
        """Make a core orthogonal seen from the left; what products to the right of its bond are multiplied by."""
        core = self.core(place)
        q: Tensor
        r: Tensor
        q, r = torch.linalg.qr(core.transpose(1, 2).reshape(-1, core.shape[1]))  # (r M, r')
        self._set(place, q.reshape(core.shape[0], -1, core.shape[1]).transpose(1, 2))
        self._set(place + 1, torch.einsum("ab,bcm->acm", r, self.core(place + 1)))
        return r

    def _pass_left(self, place: int) -> Tensor:
        """Make a core orthogonal seen from the right; what products to the left of its bond are multiplied by."""
        core = self.core(place)
        q: Tensor
        r: Tensor
        q, r = torch.linalg.qr(core.reshape(core.shape[0], -1).mT)  # (r' M, r)
        self._set(place, q.mT.reshape(core.shape))
        self._set(place - 1, torch.einsum("abm,cb->acm", self.core(place - 1), r))
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
        last = self.num_dims - 1
        for place in range(last):
            core = copy.core(place)
            u, sigma, v = torch.linalg.svd(core.transpose(1, 2).reshape(-1, core.shape[1]), full_matrices=False)
            signs = steady_signs(u.mT)
            u, v = u * signs.mT, v * signs
            root = torch.where(sigma > NEGLIGIBLE * sigma[0], sigma, torch.zeros_like(sigma)).sqrt()
            left = (u * root).reshape(core.shape[0], -1, core.shape[1]).transpose(1, 2)
            copy._set(place, left * _inverse(before).reshape(-1, 1, 1))
            copy._set(place + 1, torch.einsum("ab,bcm->acm", sigma.unsqueeze(-1) * v, copy.core(place + 1)))
            before = root
        copy._set(last, copy.core(last) * _inverse(before).reshape(-1, 1, 1))
        return copy.factors

    def frobenius_form(self, d: int) -> Tensor:
        place = self.chain.index(d)
        if self.is_orthogonal and place == self.center:
            return torch.eye(len(self.factors[d])).to(self.factors[d])
        left = right = self.factors[0].new_ones(1, 1)
        for k in range(place):
            left = torch.einsum("ab,acm,bem->ce", left, self.core(k), self.core(k))
        for k in range(self.num_dims - 1, place, -1):
            right = torch.einsum("ce,acm,bem->ab", right, self.core(k), self.core(k))
        return torch.kron(left.contiguous(), right.contiguous())

    def squared_norm(self) -> Tensor:
        d = self.chain[0 if self.center is None else self.center]
        return self.scale**2 * (self.frobenius_form(d) * (self.factors[d] @ self.factors[d].mT)).sum()

    def clone(self) -> TrainWeights:
        return TrainWeights(self.factors, self.scale, self.center, self.is_orthogonal, self.chain)

    def to(self, device: torch.device) -> TrainWeights:
        factors = [factor.to(device) for factor in self.factors]
        return TrainWeights(factors, self.scale, self.center, self.is_orthogonal, self.chain)

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
    the cost of an update. A sum over all inputs has rank 2, whatever their number. Inputs that interact should be
    neighbours: their order decides which rank a function needs, and nothing else.

    :param rank: The largest rank of a bond. A bond has fewer where the modes on one side of it have fewer functions.
    :param order: The inputs from left to right, such as ``[2, 0, 1]``; or a rule by which the first fit orders them,
        such as :class:`~gpytorch_tkrr.ByInteraction`, once. By default the order of their columns.

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
        >>> weights = tkrr.TensorTrain(3, order=tkrr.ByInteraction())
        >>> model = tkrr.TKRR(x[:, [0, 2, 1]], y, likelihood, weights=weights, num_basis=8)
        >>> result = tkrr.fit_als(model, seed=0)
        >>> abs(model.weights.order.index(0) - model.weights.order.index(2))
        1

    Reference: Oseledets (2011), *Tensor-train decomposition*; Wahls et al. (2014), *Learning multidimensional Fourier
    series with tensor trains*.
    """

    kind = "train"

    def __init__(self, rank: int = 4, order: Sequence[int] | InputOrder | None = None):
        super().__init__(rank)
        self.order = order if order is None or isinstance(order, InputOrder) else _checked_order(order)

    def __repr__(self) -> str:
        return f"TensorTrain({self.rank})" if self.order is None else f"TensorTrain({self.rank}, order={self.order!r})"

    def with_rank(self, rank: int | None) -> TensorTrain:
        return TensorTrain(4 if rank is None else rank, self.order)

    # The order of the modes

    @property
    def is_undecided(self) -> bool:
        """Whether the order is left to the data of the first fit."""
        return isinstance(self.order, InputOrder)

    def chain(self, num_dims: int) -> Sequence[int]:
        if self.order is None or isinstance(self.order, InputOrder):
            return range(num_dims)
        if len(self.order) != num_dims:
            raise InputError(
                f"order={self.order} of a TensorTrain has {len(self.order)} inputs; the model has {num_dims}."
            )
        return self.order

    def arranged(self, interactions: Tensor) -> TensorTrain:
        if not isinstance(self.order, InputOrder):
            return self
        assert self.rank is not None
        return TensorTrain(self.rank, self.order.choose(interactions))

    def state(self) -> dict[str, Any]:
        order = None if self.order is None or isinstance(self.order, InputOrder) else list(self.order)
        return {**super().state(), "order": order}

    @classmethod
    def described(cls, state: dict[str, Any]) -> TensorTrain:
        return cls(order=state.get("order"))

    def _along(self, items: Sequence[_Item]) -> list[_Item]:
        """What belongs to the modes, from left to right."""
        return [items[d] for d in self.chain(len(items))]

    def _by_mode(self, items: Iterable[_Item]) -> list[_Item]:
        """The inverse of :meth:`_along`."""
        items = list(items)
        places = {d: place for place, d in enumerate(self.chain(len(items)))}
        return [items[places[d]] for d in range(len(items))]

    # Shapes

    def heights(self, sizes: Sequence[int]) -> list[int]:
        assert self.rank is not None
        left = list(accumulate(self._along(sizes), operator.mul, initial=1))
        right = list(accumulate(reversed(self._along(sizes)), operator.mul, initial=1))[::-1]
        bonds = [min(self.rank, *pair) for pair in zip(left, right, strict=True)]
        return self._by_mode(a * b for a, b in pairwise(bonds))

    def _bond_sizes(self, heights: Sequence[int]) -> list[int]:
        """:func:`bond_sizes` of rows that are given mode by mode."""
        return bond_sizes(self._along(heights))

    def _sides(self, heights: Sequence[int]) -> list[tuple[int, int]]:
        """The ranks on the left and on the right of each mode."""
        return self._by_mode(pairwise(self._bond_sizes(heights)))

    def bonds(self, heights: Sequence[int]) -> list[int]:
        return self._bond_sizes(heights)[1:-1]

    def rank_of(self, heights: Sequence[int]) -> int:
        return max(self._bond_sizes(heights))

    def union(self, heights: Sequence[Sequence[int]]) -> list[int]:
        bonds = [max(each) for each in zip(*map(self._bond_sizes, heights), strict=True)]
        return self._by_mode(left * right for left, right in pairwise(bonds))

    def resized(self, factors: Sequence[Tensor], heights: Sequence[int]) -> list[Tensor]:
        old, new = self._sides([factor.shape[-2] for factor in factors]), self._sides(heights)
        found = []
        for factor, before, after in zip(factors, old, new, strict=True):
            core = factor.unflatten(-2, before)
            core = torch.nn.functional.pad(core, (0, 0, 0, after[1] - before[1], 0, after[0] - before[0]))
            found.append(core.flatten(-3, -2))
        return found

    def advance(self, left: Tensor | None, projection: Tensor) -> Tensor:
        if left is None:
            return projection
        cores: Tensor = projection.unflatten(0, (len(left), -1))  # (r, r', ...)
        total = left[0] * cores[0]
        for value, core in zip(left[1:], cores[1:], strict=True):
            total = torch.addcmul(total, value, core)
        return total

    def retreat(self, projection: Tensor, right: Tensor | None) -> Tensor:
        if right is None:
            return projection
        cores: Tensor = projection.unflatten(0, (-1, len(right)))  # (r, r', ...)
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
        found = []
        for matrix, sides in zip(matrices, self._sides([len(matrix) for matrix in matrices]), strict=True):
            four = matrix.unflatten(1, sides).unflatten(0, sides)  # (r, r', r, r', ...)
            found.append(four.transpose(1, 2).flatten(0, 3))
        return found

    # Weights

    def weights(self, factors: Sequence[Tensor]) -> TrainWeights:
        return TrainWeights(factors, chain=self.chain(len(factors)))

    def restore(self, state: dict[str, Any]) -> TrainWeights:
        factors, is_orthogonal = state["factors"], state["is_orthogonal"]
        return TrainWeights(factors, state["scale"], state["center"], is_orthogonal, self.chain(len(factors)))

    def num_components(self, num_dims: int) -> int:
        assert self.rank is not None
        return TERMS_PER_RANK * self.rank

    def from_components(self, factors: Sequence[Tensor]) -> list[Tensor]:
        """
        The sum of products as a train of diagonal cores, rounded to the rank by singular values (Oseledets 2011).

        :param factors: Whitened weights of at least `rank` terms, D tensors `(C, M_d)`.
        """
        num, last, terms = len(factors[0]), len(factors) - 1, self._along(factors)
        bonds = self._bond_sizes(self.heights([factor.shape[-1] for factor in factors]))
        if last == 0:
            return [factors[0].sum(0, keepdim=True)]
        eye = torch.eye(num).to(factors[0])
        cores = [eye.unsqueeze(-1) * factor.unsqueeze(1) for factor in terms]  # (C, C, M)
        cores[0], cores[last] = terms[0].unsqueeze(0), terms[last].unsqueeze(1)
        for place in range(last, 0, -1):  # orthogonal seen from the right
            q, r = torch.linalg.qr(cores[place].reshape(len(cores[place]), -1).mT)
            cores[place] = q.mT.reshape(-1, *cores[place].shape[1:])
            cores[place - 1] = torch.einsum("abm,cb->acm", cores[place - 1], r)
        for place in range(last):
            core = cores[place]
            u, sigma, v = torch.linalg.svd(core.transpose(1, 2).reshape(-1, core.shape[1]), full_matrices=False)
            rank = bonds[place + 1]
            cores[place] = u[:, :rank].reshape(len(core), -1, rank).transpose(1, 2)
            cores[place + 1] = torch.einsum("ab,bcm->acm", sigma[:rank].unsqueeze(-1) * v[:rank], cores[place + 1])
        return self.weights(self._by_mode(core.flatten(0, 1) for core in cores)).balanced()

    # What users see

    def shapes(self, sizes: Sequence[int]) -> list[tuple[int, ...]]:
        sides = self._sides(self.heights(sizes))
        return [(left, size, right) for size, (left, right) in zip(sizes, sides, strict=True)]

    def shown(self, factors: Sequence[Tensor]) -> list[Tensor]:
        sides = self._sides([len(factor) for factor in factors])
        return [factor.unflatten(0, side).mT for factor, side in zip(factors, sides, strict=True)]

    def read(self, factors: Sequence[Tensor]) -> list[Tensor]:
        return [factor.mT.flatten(0, 1) for factor in factors]


def _checked_order(order: Sequence[int]) -> tuple[int, ...]:
    """The inputs from left to right, each of them once."""
    try:
        found = tuple(operator.index(d) for d in order)
    except TypeError as error:
        raise InputError(f"order must hold the numbers of the inputs, or be ByInteraction(); got {order!r}.") from error
    if sorted(found) != list(range(len(found))):
        raise InputError(f"order must hold each of the inputs 0 to {len(found) - 1} once; got {list(found)}.")
    return found
