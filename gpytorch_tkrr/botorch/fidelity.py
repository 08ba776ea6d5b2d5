r"""A kernel of fidelities: :math:`k(s, s') = 1 + w (1 - s)(1 - s')`.

A function with this kernel times another is :math:`f(x) + (1 - s)\, g(x)`: what is wanted, which is seen at s = 1, and
a bias that fades as s grows. It needs two functions of s.
"""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.constraints import Positive
from gpytorch.kernels import Kernel
from gpytorch.priors import GammaPrior
from torch import Tensor

from ..bases.basis import Basis
from ..features.expansion import Term
from ..features.finite import register_finite_basis


class FidelityKernel(Kernel):
    """
    The kernel of one column of fidelities, from 0 to 1.

    :param kwargs: As for :class:`~gpytorch.kernels.Kernel`; for instance `active_dims` and `batch_shape`.

    Example:
        >>> import torch
        >>> from gpytorch_tkrr.botorch.fidelity import FidelityKernel
        >>> kernel = FidelityKernel()
        >>> kernel.bias_variance = 0.5
        >>> kernel(torch.tensor([[0.0], [1.0]])).to_dense().detach()
        tensor([[1.5000, 1.0000],
                [1.0000, 1.0000]])
    """

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.register_parameter("raw_bias_variance", torch.nn.Parameter(torch.zeros(*self.batch_shape, 1, 1)))
        self.register_constraint("raw_bias_variance", Positive())
        prior = GammaPrior(1.1, 0.5)  # wide: from no bias at all to one as large as the function
        self.register_prior("bias_variance_prior", prior, _bias_variance, _set_bias_variance)

    @property
    def bias_variance(self) -> Tensor:
        """w, `(*batch, 1, 1)`: the variance of the bias at s = 0, relative to that of the function."""
        return self.raw_bias_variance_constraint.transform(self.raw_bias_variance)

    @bias_variance.setter
    def bias_variance(self, value: Tensor | float) -> None:
        _set_bias_variance(self, value)

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Tensor:
        left, right = 1 - x1, 1 - x2
        if diag:
            return 1 + self.bias_variance.squeeze(-1) * (left * right).squeeze(-1)
        return 1 + self.bias_variance * left * right.mT


def _bias_variance(kernel: FidelityKernel) -> Tensor:
    return kernel.bias_variance


def _set_bias_variance(kernel: FidelityKernel, value: Tensor | float) -> None:
    value = torch.as_tensor(value).to(kernel.raw_bias_variance).expand_as(kernel.raw_bias_variance)
    kernel.initialize(raw_bias_variance=kernel.raw_bias_variance_constraint.inverse_transform(value))


class BiasBasis(Basis):
    """The constant 1, and 1 - s."""

    @property
    def num_functions(self) -> int:
        return 2

    def __call__(self, x: Tensor) -> Tensor:
        x = x.double()
        return torch.stack([torch.ones_like(x), 1 - x], -1)


@register_finite_basis(FidelityKernel, over_columns=None)
class FidelityTerm(Term):
    """
    The two functions and their variances, 1 and w.

    :param kernel: The kernel.
    :param position: Not used.
    :param num_basis: Not used.
    """

    basis = BiasBasis()

    def __init__(self, kernel: FidelityKernel, position: int, num_basis: int):
        self.kernel = kernel

    def variances(self) -> Tensor:
        bias = self.kernel.bias_variance.double().squeeze(-1)  # (*batch, 1)
        return torch.cat([torch.ones_like(bias), bias], -1)

    def prior_variance(self, x: Tensor) -> Tensor:
        return 1 + self.kernel.bias_variance.double().squeeze(-1) * (1 - x.double()).square()
