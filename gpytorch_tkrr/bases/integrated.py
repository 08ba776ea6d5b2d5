r"""Functions of an input that may be missing."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cached_property

import torch
from torch import Tensor

from .basis import Basis


class IntegratedBasis(Basis):
    r"""
    Other functions, and their mean under a distribution of x where x is missing (NaN):

    .. math:: \phi(\text{NaN}) = E\,\phi(x).

    A model that is linear in the functions of this input then has the value :math:`E f`.

    :param basis: The functions.
    :param moments: Returns their mean `(M,)` and their covariance `(M, M)`.

    Example:
        >>> import torch
        >>> from gpytorch_tkrr.bases.basis import MonomialBasis
        >>> from gpytorch_tkrr.bases.integrated import IntegratedBasis
        >>> basis = IntegratedBasis(MonomialBasis(1), lambda: (torch.tensor([3.0]), torch.tensor([[2.0]])))
        >>> basis(torch.tensor([5.0, float("nan")])).flatten().tolist()
        [5.0, 3.0]
    """

    def __init__(self, basis: Basis, moments: Callable[[], tuple[Tensor, Tensor]]):
        self.basis, self._moments = basis, moments

    @cached_property
    def moments_of_missing(self) -> tuple[Tensor, Tensor]:
        """Mean `(M,)` and covariance `(M, M)` of the functions where x is missing, float64."""
        mean, covariance = self._moments()
        return mean.double(), covariance.double()

    @property
    def num_functions(self) -> int:
        return self.basis.num_functions

    def parameters(self) -> list[Tensor]:
        return self.basis.parameters()

    @property
    def structure(self) -> Hashable:
        return type(self), self.basis.structure

    def detach(self) -> IntegratedBasis:
        return IntegratedBasis(self.basis.detach(), self._moments)

    def __call__(self, x: Tensor) -> Tensor:
        missing = x.isnan()
        if not missing.any():
            return self.basis(x)
        values = self.basis(torch.where(missing, torch.zeros_like(x), x))
        return torch.where(missing.unsqueeze(-1), self.moments_of_missing[0].to(values), values)

    def combine(self, x: Tensor, coefficients: Tensor) -> Tensor:
        missing = x.isnan()
        if not missing.any():
            return self.basis.combine(x, coefficients)
        values = self.basis.combine(torch.where(missing, torch.zeros_like(x), x), coefficients)
        return torch.where(missing.unsqueeze(-1), coefficients @ self.moments_of_missing[0].to(values), values)
