r"""What a low-rank form of the weights has to say: the contract behind :class:`CP` and :class:`TensorTrain`.

A format is linear in each of its factors. Factor d is a matrix :math:`A_d` of :math:`K_d` rows and :math:`M_d` columns,
and its *projections* at a point are the :math:`K_d` numbers :math:`A_d\,\phi_d(x_d)`. They are multiplied along the
chain of modes, from the left and from the right, up to any mode:

.. math:: f(x) = \sum_k p_k(x)\, (A_d\,\phi_d(x_d))_k, \qquad p = \text{join}(\text{left}_d, \text{right}_d).

So row n of the design of factor d is :math:`p(x_n) \otimes \phi_d(x_{nd})`, whatever the format. The model, the sums
over data and both fits know no more of it than this file says. All arrays have the rows first: `(K, ...)`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from ..bases.basis import Basis
from ..errors import SizeError

#: Root-mean-square over the data of the functions of a factor's rows: mode, factor `(K, M)` -> `(K,)`.
Norms = Callable[[int, Tensor], Tensor]

#: Kept products of a bond, by its place in the chain, and the matrix by which they change: see :meth:`Weights.move_to`.
Turn = tuple[int, Tensor]

#: Formats by name, to restore them from a `state_dict`; a subclass that has a name is entered here.
FORMATS: dict[str, type[WeightFormat]] = {}

_Format = TypeVar("_Format", bound="WeightFormat")


class Weights(ABC):
    """
    Whitened weights as ALS sees them: one factor may be replaced at a time.

    :ivar factors: D tensors `(K_d, M_d)`, float64, never changed in place.
    """

    factors: list[Tensor]

    @property
    def num_dims(self) -> int:
        """D, the number of modes."""
        return len(self.factors)

    @property
    @abstractmethod
    def rank(self) -> int:
        """The rank of these weights."""

    @abstractmethod
    def scales(self) -> Tensor:
        """What the terms of f are multiplied by beside their factors: one number, or one for each row."""

    @abstractmethod
    def scaled_factor(self, d: int) -> Tensor:
        """
        One factor with all scales multiplied in, `(K_d, M_d)`.

        :param d: The mode.
        """

    @abstractmethod
    def move_to(self, d: int) -> tuple[list[int], list[Turn]]:
        """
        Bring the weights into the form in which factor d is updated; the tensor stays the same.

        :param d: The mode.
        :return: Modes whose factors have changed, and for each bond that was passed the matrix that products kept
            there are multiplied by (see :meth:`gpytorch_tkrr.cp.design.Design.turn`).
        """

    @abstractmethod
    def replace(self, d: int, factor: Tensor, norms: Tensor) -> None:
        """
        Set one factor, given with all scales multiplied in.

        :param d: The mode.
        :param factor: `(K_d, M_d)`.
        :param norms: Norms of its rows, `(K_d,)`, for formats that keep their scales apart.
        """

    @abstractmethod
    def set_factor(self, d: int, factor: Tensor) -> None:
        """
        Set one factor, leaving scales alone: the same functions, whitened in another way.

        :param d: The mode.
        :param factor: `(K_d, M_d)`.
        """

    @abstractmethod
    def vanish(self, d: int) -> None:
        """
        Let the tensor be zero, by one mode.

        :param d: The mode.
        """

    @abstractmethod
    def multiply(self, number: float) -> None:
        """
        Multiply the tensor by a number.

        :param number: Positive.
        """

    @abstractmethod
    def normalise(self, norms: Norms) -> None:
        """
        Choose the scales of all factors, where the format leaves them free.

        :param norms: Norms of a factor's rows.
        """

    @abstractmethod
    def balance(self) -> None:
        """Choose the form in which a finished fit is kept: every factor's rows are as uncorrelated as can be."""

    @abstractmethod
    def balanced(self) -> list[Tensor]:
        """Plain factors `(K_d, M_d)`, their sizes spread evenly over the modes."""

    @abstractmethod
    def frobenius_form(self, d: int) -> Tensor:
        r"""
        H such that :math:`\|W\|_F^2 = u^\top (H \otimes I) u` for the scaled factor u of mode d.

        :param d: The mode.
        :return: `(K_d, K_d)`.
        """

    @abstractmethod
    def squared_norm(self) -> Tensor:
        r""":math:`\|W\|_F^2`, a scalar."""

    @abstractmethod
    def clone(self) -> Weights:
        """An independent copy; factors are shared, as they are never changed in place."""

    @abstractmethod
    def to(self, device: torch.device) -> Weights:
        """
        The same weights on another device.

        :param device: The device.
        """

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Tensors and numbers that describe the weights, for a `state_dict`."""


class WeightFormat(ABC):
    """
    A low-rank form of the weight tensor. Its algebra depends on the shapes that it is given alone.

    :param rank: The rank; None where the fit chooses it.
    """

    #: Names the format in a `state_dict`.
    kind: ClassVar[str]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        FORMATS[cls.kind] = cls

    def __init__(self, rank: int | None = None):
        if rank is not None and (isinstance(rank, (bool, float, str)) or rank < 1):
            raise SizeError(f"rank must be an integer, at least 1; got {rank!r}.")
        self.rank = None if rank is None else int(rank)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.rank})"

    def with_rank(self: _Format, rank: int | None) -> _Format:
        """
        The same format with another rank.

        :param rank: The rank.
        """
        return type(self)(rank)

    # The order of the modes

    @property
    def is_undecided(self) -> bool:
        """Whether the format leaves something to the data, which :meth:`arranged` decides."""
        return False

    def chain(self, num_dims: int) -> Sequence[int]:
        """
        The modes in the order in which their projections are multiplied, by default that of the columns.

        :param num_dims: D.
        """
        return range(num_dims)

    def arranged(self: _Format, interactions: Tensor) -> _Format:
        """
        The same format with the order of its modes decided.

        :param interactions: Variance that each pair of inputs explains beyond what they do alone, `(D, D)`.
        """
        return self

    def state(self) -> dict[str, Any]:
        """What names the format in a `state_dict`, beside its rank."""
        return {"format": self.kind}

    @staticmethod
    def from_state(state: dict[str, Any]) -> WeightFormat:
        """
        The format that :meth:`state` described, of any rank.

        :param state: The description, among other things.
        """
        return FORMATS[state.get("format", "cp")].described(state)

    @classmethod
    def described(cls, state: dict[str, Any]) -> WeightFormat:
        """
        A format of this class.

        :param state: As for :meth:`from_state`.
        """
        return cls()

    # Shapes

    @abstractmethod
    def heights(self, sizes: Sequence[int]) -> list[int]:
        """
        :math:`K_d`, the number of rows of each factor.

        :param sizes: :math:`M_d`, the number of functions of each mode.
        """

    @abstractmethod
    def bonds(self, heights: Sequence[int]) -> list[int]:
        """
        Sizes of the products that are passed on between neighbouring modes, D - 1 of them, along the chain.

        :param heights: :math:`K_d`.
        """

    @abstractmethod
    def rank_of(self, heights: Sequence[int]) -> int:
        """
        The rank of factors with given numbers of rows.

        :param heights: :math:`K_d`.
        """

    @abstractmethod
    def union(self, heights: Sequence[Sequence[int]]) -> list[int]:
        """
        The smallest numbers of rows that several sets of factors can be brought to by :meth:`resized`.

        :param heights: :math:`K_d` of each set.
        """

    @abstractmethod
    def resized(self, factors: Sequence[Tensor], heights: Sequence[int]) -> list[Tensor]:
        """
        Factors with other numbers of rows: what they lack is zero, what is too much is left out.

        :param factors: D tensors `(..., K_d, M_d)`.
        :param heights: The new :math:`K_d`.
        """

    # Products of projections along the chain

    @abstractmethod
    def advance(self, left: Tensor | None, projection: Tensor) -> Tensor:
        """
        The product of all modes to the left, taken over one mode more.

        :param left: The product so far; None at the first mode.
        :param projection: Of the mode that is passed, `(K, ...)`; may be overwritten where it needs no gradient.
        """

    @abstractmethod
    def retreat(self, projection: Tensor, right: Tensor | None) -> Tensor:
        """
        The product of all modes to the right, taken over one mode more.

        :param projection: Of the mode that is passed, `(K, ...)`; may be overwritten where it needs no gradient.
        :param right: The product so far; None at the last mode.
        """

    @abstractmethod
    def join(self, left: Tensor | None, right: Tensor | None) -> Tensor:
        """
        p, from the products on both sides of a mode; one of them may be None.

        :param left: Of the modes before it.
        :param right: Of the modes after it.
        :return: `(K, ...)`.
        """

    @abstractmethod
    def pairs(self, matrices: Sequence[Tensor]) -> list[Tensor]:
        """
        Projections of a product of two functions of this format, as such of one function.

        :param matrices: For each mode all products of two projections, `(K_d, K_d, ...)`.
        :return: `(K_d^2, ...)` each, in the order in which :meth:`advance` and :meth:`join` take them.
        """

    def functions(self, bases: Sequence[Basis], factors: Sequence[Tensor], x: Tensor) -> Tensor:
        """
        The values of S functions.

        :param bases: The basis of each mode.
        :param factors: Their raw factors, D tensors `(S, K_d, M_d)`.
        :param x: Inputs `(n, D)`.
        :return: `(S, n)`, differentiable in `x`.
        """
        left: Tensor | None = None
        for d in self.chain(len(bases)):
            basis, rows = bases[d], factors[d].transpose(0, 1)  # (K, S, M)
            projection = basis.combine(x[:, d], rows.flatten(0, 1)).mT.unflatten(0, rows.shape[:2])  # (K, S, n)
            left = self.advance(left, projection)
        assert left is not None
        return left.sum(0)

    def multiplied(self, projections: Sequence[Tensor]) -> Tensor:
        """
        The values of functions whose projections are known.

        :param projections: Of all modes, D tensors `(K_d, ...)`, in the order of the columns; may be overwritten.
        :return: `(...)`.
        """
        left: Tensor | None = None
        for d in self.chain(len(projections)):
            left = self.advance(left, projections[d])
        assert left is not None
        return left.sum(0)

    def products_but_one(self, projections: Sequence[Tensor]) -> list[Tensor]:
        """
        p of every mode, by products from both sides: no division, O(D).

        :param projections: Of all modes, D tensors `(K_d, ...)`.
        :return: D tensors `(K_d, ...)`.
        """
        if len(projections) == 1:
            return [torch.ones_like(projections[0])]
        chain = self.chain(len(projections))
        rights: list[Tensor | None] = [None]
        for d in chain[:0:-1]:
            rights.append(self.retreat(projections[d].clone(), rights[-1]))
        left: Tensor | None = None
        products = list(projections)
        for d, right in zip(chain, reversed(rights), strict=True):
            products[d] = self.join(left, right)
            if right is not None:
                left = self.advance(left, projections[d].clone())
        return products

    # Weights

    @abstractmethod
    def weights(self, factors: Sequence[Tensor]) -> Weights:
        """
        Weights for ALS.

        :param factors: Whitened factors, D tensors `(K_d, M_d)`.
        """

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> Weights:
        """
        The weights that :meth:`Weights.state` described.

        :param state: The description, among other things.
        """

    @abstractmethod
    def num_components(self, num_dims: int) -> int:
        """
        How many terms a start looks for.

        :param num_dims: D.
        """

    @abstractmethod
    def from_components(self, factors: Sequence[Tensor]) -> list[Tensor]:
        """
        Factors of this format that are nearest to a sum of products, the start of a fit, of sizes that are balanced.

        :param factors: Whitened weights of the terms, D tensors `(num_components, M_d)`.
        :return: D tensors `(K_d, M_d)`.
        """

    # What users see

    @abstractmethod
    def shapes(self, sizes: Sequence[int]) -> list[tuple[int, ...]]:
        """
        Shapes of the factors as users see them.

        :param sizes: :math:`M_d`.
        """

    @abstractmethod
    def shown(self, factors: Sequence[Tensor]) -> list[Tensor]:
        """
        Factors as users see them.

        :param factors: D tensors `(K_d, M_d)`.
        """

    @abstractmethod
    def read(self, factors: Sequence[Tensor]) -> list[Tensor]:
        """
        The inverse of :meth:`shown`.

        :param factors: D tensors of the shapes :meth:`shapes`.
        :return: D tensors `(K_d, M_d)`.
        """
