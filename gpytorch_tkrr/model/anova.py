r"""The recommended kernel of a CP-weight model, built from GPyTorch objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from gpytorch.kernels import (
    AdditiveKernel,
    ConstantKernel,
    IndexKernel,
    Kernel,
    LinearKernel,
    ProductKernel,
    RBFKernel,
    ScaleKernel,
)
from linear_operator import to_dense
from torch import Tensor, nn

from ..errors import InputError, SizeError
from ..features.categorical import IndicatorKernel
from ..features.expansion import Sum
from ..features.finite import LinearTerm, register_finite_basis

#: Number of inputs from which on the variances beside the constants fall faster than their number grows.
MANY_DIMS = 20


class _Center(nn.Module):
    """Holds a constant apart from the kernel, whose own buffers GPyTorch indexes by batch."""

    value: Tensor

    def __init__(self, value: Tensor):
        super().__init__()
        self.register_buffer("value", value)


class CenteredLinearKernel(LinearKernel):
    r"""
    :math:`k(x, x') = v (x - c)(x' - c)`, a :class:`~gpytorch.kernels.LinearKernel` with an origin of its own.

    :param center: The origin c.
    :param kwargs: As for LinearKernel.

    Example:
        >>> import torch
        >>> from gpytorch_tkrr import CenteredLinearKernel
        >>> kernel = CenteredLinearKernel(center=3.0)
        >>> kernel.variance = 1.0
        >>> kernel(torch.tensor([[3.0], [5.0]])).to_dense().detach()
        tensor([[0., 0.],
                [0., 4.]])
    """

    def __init__(self, center: float | Tensor = 0.0, **kwargs: Any):
        super().__init__(**kwargs)
        self.origin = _Center(torch.as_tensor(center, dtype=torch.float64).detach().clone())

    @property
    def center(self) -> Tensor:
        """The origin c."""
        return self.origin.value

    def forward(self, x1: Tensor, x2: Tensor, **params: Any) -> Any:
        # Dense, since GPyTorch multiplies low-rank operators only approximately.
        return to_dense(super().forward(x1 - self.center.to(x1), x2 - self.center.to(x2), **params))


register_finite_basis(CenteredLinearKernel, over_columns=Sum)(LinearTerm)


def anova_kernel(
    num_dims: int,
    *,
    center: float | Tensor = 0.0,
    half_range: float | Tensor = 1.0,
    outputscale: float = 1.0,
    categorical: Sequence[int] = (),
    dtype: torch.dtype | None = None,
) -> ScaleKernel:
    r"""
    A product over dimensions of constant + linear + RBF kernels:

    .. math:: k(x, x') = \sigma^2 \prod_d
        \bigl(c_d + \rho_d (x_d - m_d)(x'_d - m_d) + \alpha_d k_{\ell_d}(x_d, x'_d)\bigr).

    Multiplied out it is a sum over all subsets of the inputs, a functional analysis of variance: the constants let a
    term ignore an input. For a category the factor is :math:`c_d + \alpha_d [x_d = x'_d]`
    (:class:`~gpytorch_tkrr.IndicatorKernel`): levels have something in common, and each has a value of its own. Every
    summand is a GPyTorch kernel with its own raw parameters; change priors, constraints or initial values as usual.

    :param num_dims: D.
    :param center: :math:`m`, the middle of the inputs, a number or `(D,)`.
    :param half_range: Half the range of the inputs, a number or `(D,)`: lengthscales start at half of it, and
        linear functions have their variance there.
    :param outputscale: The variance that f starts with in the middle of the inputs.
    :param categorical: The dimensions whose inputs are levels of a category, whole numbers without an order.
    :param dtype: The dtype of its parameters, by default PyTorch's.

    Example:
        >>> from gpytorch_tkrr import anova_kernel
        >>> kernel = anova_kernel(2, half_range=3.0)
        >>> kernel.base_kernel.kernels[1].kernels[2].base_kernel.lengthscale.item()
        1.5
        >>> len(anova_kernel(2, categorical=[1]).base_kernel.kernels[1].kernels)  # a constant, and levels
        2
    """
    if num_dims < 1:
        raise SizeError(f"num_dims must be at least 1; got {num_dims}.")
    categories = _checked_categories(categorical, num_dims)
    centers = _per_dimension("center", center, num_dims)
    half_ranges = _per_dimension("half_range", half_range, num_dims)
    # Variances beside a constant of 1. They fall with the number of inputs, and for many inputs so does their sum: the
    # product must not have heavy tails, or components chase single points.
    fall = min(1.0, MANY_DIMS / num_dims) / num_dims
    slope = 0.5 * fall
    bend = max(0.1, 0.4 / num_dims) * fall
    factors: list[Kernel] = []
    for d, (middle, half) in enumerate(zip(centers, half_ranges, strict=True)):
        half = half if half > 0 else 1.0
        constant = ConstantKernel(active_dims=(d,)).double()
        constant.constant = _double(1.0)
        if d in categories:
            levels = ScaleKernel(IndicatorKernel(active_dims=(d,))).double()
            levels.outputscale = _double(slope)
            factors.append(AdditiveKernel(constant, levels))
            continue
        linear = CenteredLinearKernel(middle, active_dims=(d,)).double()
        linear.variance = _double(slope / half**2)
        smooth = ScaleKernel(RBFKernel(active_dims=(d,))).double()
        smooth.outputscale, smooth.base_kernel.lengthscale = _double(bend), _double(half / 2)
        factors.append(AdditiveKernel(constant, linear, smooth))
    kernel = ScaleKernel(ProductKernel(*factors) if num_dims > 1 else factors[0]).double()
    num_categories = len(categories)
    kernel.outputscale = _double(
        outputscale / ((1 + bend) ** (num_dims - num_categories) * (1 + slope) ** num_categories)
    )
    dtype = torch.get_default_dtype() if dtype is None else dtype
    for d, (factor, half) in enumerate(zip(factors, half_ranges, strict=True)):
        if not all(bool(torch.isfinite(parameter.to(dtype)).all()) for parameter in factor.parameters()):
            raise InputError(
                f"Input dimension {d} has the half range {half:.3g}, whose square {dtype} cannot hold. Scale this "
                "input to moderate numbers, or use float64."
            )
    return kernel.to(dtype)


def output_kernel(num_outputs: int, column: int, *, rank: int = 1, dtype: torch.dtype | None = None) -> IndexKernel:
    """
    A covariance of several outputs, for outputs of unit variance: correlations of one half to start from.

    :param num_outputs: T.
    :param column: The column of the inputs that holds the number of the output.
    :param rank: The rank of what outputs have in common.
    :param dtype: The dtype of its parameters, by default PyTorch's.
    """
    kernel = IndexKernel(num_tasks=num_outputs, rank=rank, active_dims=(column,)).double()
    # Columns of alternating signs beyond the first, so that they are not the same.
    signs = torch.tensor([[(-1.0) ** (t // 2**r) if r else 1.0 for r in range(rank)] for t in range(num_outputs)])
    kernel.covar_factor.data = signs.double() * (0.5 / rank) ** 0.5
    kernel.var = torch.full((num_outputs,), 0.5, dtype=torch.float64)
    return kernel.to(torch.get_default_dtype() if dtype is None else dtype)


def times_outputs(kernel: ScaleKernel, outputs: IndexKernel) -> ScaleKernel:
    """
    The kernel of :func:`anova_kernel` times a covariance of outputs.

    :param kernel: The former; it is taken apart.
    :param outputs: The latter.
    """
    base = kernel.base_kernel
    factors = list(base.kernels) if isinstance(base, ProductKernel) else [base]
    kernel.base_kernel = ProductKernel(*factors, outputs)
    return kernel


def _checked_categories(categorical: Sequence[int], num_dims: int) -> set[int]:
    categories = {int(d) for d in categorical}
    if not all(0 <= d < num_dims for d in categories) or len(categories) < len(list(categorical)):
        raise SizeError(
            f"categorical must name different input dimensions from 0 to {num_dims - 1}; got {list(categorical)}."
        )
    return categories


def _double(value: float) -> Tensor:
    """GPyTorch's setters take a float through float32."""
    return torch.tensor(value, dtype=torch.float64)


def _per_dimension(name: str, value: float | Tensor, num_dims: int) -> list[float]:
    tensor = torch.as_tensor(value, dtype=torch.float64).detach()
    if tensor.dim() > 1 or tensor.numel() not in (1, num_dims):
        raise SizeError(f"{name} must be a number or have {num_dims} entries; got shape {tuple(tensor.shape)}.")
    return tensor.expand(num_dims).tolist()
