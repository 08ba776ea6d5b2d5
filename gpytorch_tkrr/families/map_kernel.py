r"""Feature maps with a kernel of their own.

A map is a list of functions of one input on the box, with fixed variances, and that is its kernel:

.. math:: k(x, x') = \prod_d \sum_j v_j \phi_j(x_d) \phi_j(x_d').

There is nothing to approximate and no lengthscale. No other kernel object can be given together with a map.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from gpytorch.kernels import Kernel, ScaleKernel
from torch import Tensor

from ..bases.basis import Basis
from ..bases.domain import Domain
from ..features.expansion import BasisFamily, Box, Expansion, OneInput, Term
from ..features.finite import register_finite_basis
from ..features.separable import DEFAULT_NUM_BASIS
from ..features.tree import Node, unsupported


class FeatureMap(BasisFamily):
    """Functions of one input with fixed variances."""

    @abstractmethod
    def functions(self, center: Tensor, half_width: Tensor, num_basis: int) -> Basis:
        """
        The functions.

        :param center: Centre of the box, a scalar.
        :param half_width: Its half width.
        :param num_basis: How many were asked for.
        """

    def term(self, node: Node, box: Box) -> Term:
        raise unsupported(
            node,
            f"cannot be represented by {self}, a map with a kernel of its own. Give no kernel, or "
            f"{self}.kernel(domain, num_basis); or another basis, such as the default, with this kernel.",
        )

    def expand(self, node: Node, box: Box) -> Expansion:
        return OneInput(box.columns[0], self.term(node, box))  # refused for any number of columns

    def kernel(self, domain: Domain, num_basis: int | Sequence[int] = DEFAULT_NUM_BASIS) -> MapKernel:
        """
        The kernel of this map, a GPyTorch kernel like any other.

        :param domain: The box.
        :param num_basis: Number of functions, for all inputs or for each.
        """
        return MapKernel(self, domain, num_basis)

    def scaled_kernel(self, domain: Domain, num_basis: int | Sequence[int], outputscale: float = 1.0) -> ScaleKernel:
        """
        The kernel of this map with an output scale, for a model without a kernel.

        :param domain: The box.
        :param num_basis: Number of functions, for all inputs or for each.
        :param outputscale: Its first value.
        """
        kernel = ScaleKernel(self.kernel(domain, num_basis))
        kernel.outputscale = outputscale
        return kernel


class MapKernel(Kernel):
    """
    The kernel of a feature map. It is zero outside of the box.

    :param map: The map.
    :param domain: The box.
    :param num_basis: Number of functions, for all inputs or for each.
    :param kwargs: As for :class:`~gpytorch.kernels.Kernel`.

    Example:
        >>> import torch, gpytorch_tkrr as tkrr
        >>> kernel = tkrr.Polynomial(degree=1).kernel(tkrr.Domain(0.0, 1.0))
        >>> kernel(torch.tensor([[0.0], [1.0]])).to_dense()  # (1 + 3 x x') / 2
        tensor([[0.5000, 0.5000],
                [0.5000, 2.0000]])
    """

    def __init__(
        self, map: FeatureMap, domain: Domain, num_basis: int | Sequence[int] = DEFAULT_NUM_BASIS, **kwargs: Any
    ):
        super().__init__(**kwargs)
        self.map, self.domain, self.num_basis = map, domain, num_basis

    def functions(self, position: int) -> Basis:
        """
        The functions of one column.

        :param position: The number of the column.
        """
        num_dims = position + 1 if self.domain.num_dims is None else self.domain.num_dims
        center, half_width = self.domain.sides(num_dims)
        num_basis = self.num_basis if isinstance(self.num_basis, int) else self.num_basis[position]
        return self.map.functions(center[position], half_width[position], num_basis)

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Tensor:
        parts = []
        for d in range(x1.shape[-1]):
            basis = self.functions(d)
            left, right = basis(x1[..., d]) / basis.num_functions, basis(x2[..., d])
            parts.append((left * right).sum(-1) if diag else left @ right.mT)
        return reduce(torch.mul, parts).to(x1.dtype)

    # It has no parameters: the same for all entries of a batch.

    def expand_batch(self, *sizes: Any) -> MapKernel:
        return self

    def __getitem__(self, index: Any) -> MapKernel:
        return self


@register_finite_basis(MapKernel)
class MapTerm(Term):
    """
    The functions of one column of a map, all with the same variance.

    :param kernel: The kernel of the map, which knows its box and its numbers of functions.
    :param position: Which column.
    :param num_basis: Not used.
    """

    def __init__(self, kernel: MapKernel, position: int, num_basis: int = 1):
        self.kernel, self._basis = kernel, kernel.functions(position)
        self.side = [part[min(position, part.numel() - 1)] for part in kernel.domain.sides(kernel.domain.num_dims or 1)]

    @property
    def basis(self) -> Basis:
        return self._basis

    def variances(self) -> Tensor:
        num = self.basis.num_functions
        return torch.full((num,), 1 / num, dtype=torch.float64, device=self.kernel.domain.center.device)

    def prior_variance(self, x: Tensor) -> Tensor:
        center, half_width = self.side
        held = center + (x.double() - center).clamp(-half_width, half_width)  # outside of the box as at its edge
        return self.basis(held).square().mean(-1)
