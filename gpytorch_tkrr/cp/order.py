r"""In which order the inputs of a tensor train stand.

The rank of a bond is the number of products by which the inputs on its left act together with those on its right. It is
small where inputs that interact are neighbours. With :math:`w_{dk}` the variance that the interaction of two inputs
explains, the sum over all bonds of what crosses them is

.. math:: \sum_{d < k} w_{dk}\, |\text{place}_d - \text{place}_k| ,

the cost of a *linear arrangement* of the inputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

#: Interactions are told apart by this fraction of the strongest; a smaller difference does not change the order.
RESOLUTION = 1e-6


class InputOrder(ABC):
    """
    A rule by which the inputs of a :class:`~gpytorch_tkrr.TensorTrain` are ordered, once their data are known.

    Example:
        >>> import torch, gpytorch_tkrr as tkrr
        >>> class StrongestFirst(tkrr.InputOrder):
        ...     def choose(self, interactions):
        ...         return interactions.sum(-1).argsort(descending=True).tolist()
        >>> StrongestFirst().choose(torch.tensor([[0.0, 0.0, 0.1], [0.0, 0.0, 0.4], [0.1, 0.4, 0.0]]))
        [2, 1, 0]
        >>> weights = tkrr.TensorTrain(3, order=StrongestFirst())
    """

    @abstractmethod
    def choose(self, interactions: Tensor) -> Sequence[int]:
        """
        The inputs from left to right.

        :param interactions: Variance that each pair of inputs explains beyond what they do alone, `(D, D)`.
        """


class ByInteraction(InputOrder):
    r"""
    Inputs that interact are neighbours, by the main effects and pairwise interactions that a fit starts from.

    Of all orders that differ from it by the place of one input, none has a smaller cost
    :math:`\sum_{d<k} w_{dk} |\text{place}_d - \text{place}_k|`. Where inputs do not interact they keep the order of
    their columns. It costs two passes over the rows, which a first fit makes anyway.

    Example:
        >>> import torch, gpytorch_tkrr as tkrr
        >>> strengths = torch.zeros(4, 4)
        >>> strengths[0, 3] = strengths[3, 0] = 1.0  # the first and the last input act together
        >>> tkrr.ByInteraction().choose(strengths)
        [0, 3, 1, 2]
    """

    def __repr__(self) -> str:
        return "ByInteraction()"

    def choose(self, interactions: Tensor) -> list[int]:
        """
        See :meth:`InputOrder.choose`.

        :param interactions: `(D, D)`.
        """
        strongest = float(interactions.max()) if len(interactions) > 1 else 0.0
        if not strongest > 0:
            return list(range(len(interactions)))
        # Whole numbers: neither the units of the targets nor rounding decide about the order.
        steps = (interactions.double().cpu() / (RESOLUTION * strongest)).round().fill_diagonal_(0)
        first = steps.sum(-1).argsort(descending=True, stable=True).tolist()
        order: list[int] = []
        for d in first:
            order, _ = _placed(order, d, steps)
        cost, improves = arrangement_cost(order, steps), True
        while improves:
            improves = False
            for d in first:
                rest = [k for k in order if k != d]
                moved, added = _placed(rest, d, steps)
                total = arrangement_cost(rest, steps) + added
                if total < cost:
                    order, cost, improves = moved, total, True
        return min(order, order[::-1])


def arrangement_cost(order: Sequence[int], weights: Tensor) -> float:
    """
    The sum over all bonds of the weights of pairs that they separate.

    :param order: Inputs from left to right.
    :param weights: Of pairs, symmetric, zero on the diagonal, `(D, D)`.
    """
    return float(_crossing(order, weights).sum())


def _crossing(order: Sequence[int], weights: Tensor) -> Tensor:
    """The weights of pairs on both sides of each gap of n inputs, the ends too, `(n + 1,)`."""
    index = torch.as_tensor(order, dtype=torch.long)
    own = weights[index][:, index]
    degrees, within = own.sum(-1).cumsum(0), own.triu(1).sum(0).cumsum(0)
    return torch.nn.functional.pad(degrees - 2 * within, (1, 0))


def _placed(order: list[int], d: int, weights: Tensor) -> tuple[list[int], float]:
    """
    An input put where it adds least to the cost, and what it adds. Of such places it is the last one, so that inputs
    that do not interact keep their order.
    """
    near = weights[d][torch.as_tensor(order, dtype=torch.long)]  # (n,)
    places = torch.arange(len(order) + 1).to(weights)
    sums, moments = (torch.nn.functional.pad(each.cumsum(0), (1, 0)) for each in (near, places[:-1] * near))
    left = places * sums - moments
    right = (moments[-1] - moments) + (1 - places) * (sums[-1] - sums)
    added = _crossing(order, weights) + left + right
    place = len(order) - int(added.flip(0).argmin())
    return [*order[:place], d, *order[place:]], float(added[place])
