r"""Sums over subsets of the inputs: elementary symmetric polynomials of one-dimensional kernels,

.. math:: k(x, x') = \sum_{n = 1}^{P} \sigma_n^2 \sum_{|A| = n} \prod_{d \in A} k_d(x_d, x_d').

Reference: Duvenaud, Nickisch & Rasmussen (2011), *Additive Gaussian processes*.
"""

from __future__ import annotations

import itertools
import math

from gpytorch.kernels import NewtonGirardAdditiveKernel
from torch import Tensor

from ..errors import SizeError
from .expansion import Expansion, Product, Scaled, Sum
from .tree import ColumnByColumn, Node, register

_MAX_SUBSETS = 1_000


class _Degree(Scaled):
    """The scale of all terms of one degree."""

    def __init__(self, kernel: NewtonGirardAdditiveKernel, degree: int, base: Expansion):
        super().__init__(kernel, base)
        self.degree = degree

    @property
    def scale(self) -> Tensor:
        return self.kernel.outputscale.double()[..., self.degree - 1, None]


def _over_subsets(node: Node, parts: list[Expansion]) -> Expansion:
    num_dims, degrees = len(parts), range(1, node.kernel.max_degree + 1)
    num_subsets = sum(math.comb(num_dims, degree) for degree in degrees)
    if num_subsets > _MAX_SUBSETS:
        raise SizeError(
            f"{node} of degree {node.kernel.max_degree} over {num_dims} inputs is a sum over {num_subsets} subsets of "
            f"them, more than {_MAX_SUBSETS}. Lower max_degree, or use the CP-weight model TKRR, whose default kernel "
            "has all of them."
        )
    return Sum(
        [
            _Degree(node.kernel, degree, Sum([Product(subset) for subset in itertools.combinations(parts, degree)]))
            for degree in degrees
        ]
    )


register(NewtonGirardAdditiveKernel, ColumnByColumn(_over_subsets))
