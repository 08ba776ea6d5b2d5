"""What a model is made of where the user does not say: kernel, input warp, box, numbers of functions."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from gpytorch.kernels import IndexKernel, Kernel
from torch import Tensor

from ..bases.domain import Domain
from ..data.training import Summary
from ..errors import DomainError, InputError, SeparableKernelWarning
from ..families.map_kernel import FeatureMap
from ..features.box import choose_box
from ..features.categorical import require_levels
from ..features.expansion import BasisFamily
from ..features.separable import DEFAULT_NUM_BASIS, SeparableKernel, separate
from .anova import anova_kernel, times_outputs
from .warp import InputWarp


@dataclass
class Setup:
    """
    Kernel, warp, box and counts of a model, each given or still to be chosen.

    :param kernel: The kernel; None to be chosen.
    :param domain: The box; None to be chosen.
    :param warp: The input warp; None for none.
    :param num_basis: Numbers of sines.
    :param family: Which functions stationary kernels get; a map brings a kernel of its own.
    :param categorical: The columns that the default kernel takes as categories.
    :param outputs: The covariance of several outputs, where the last column is the number of the output.
    """

    kernel: Kernel | None
    domain: Domain | None
    warp: InputWarp | None
    num_basis: int | tuple[int, ...]
    family: BasisFamily
    categorical: tuple[int, ...] = ()
    outputs: IndexKernel | None = None

    def completed(
        self, summary: Summary, *, adapts_warp: bool, adapts_num_basis: bool, dtype: torch.dtype | None = None
    ) -> Setup:
        """
        The same with all that is missing chosen from the data.

        :param summary: The data.
        :param adapts_warp: Whether columns that crowd are warped.
        :param adapts_num_basis: Whether columns with few values get few functions, with the default kernel.
        :param dtype: That of the default kernel.
        """
        warp, num_basis, kernel = self.warp, self.num_basis, self.kernel
        if kernel is None and adapts_num_basis:
            num_basis = tuple(min(DEFAULT_NUM_BASIS, most) for most in most_functions(summary))
        domain = self.domain
        if kernel is None and isinstance(self.family, FeatureMap):
            domain = Domain.from_bounds(summary.lower, summary.upper, boundary_factor=1.2) if domain is None else domain
            kernel = self.family.scaled_kernel(domain, num_basis, summary.variance or 1.0)
            kernel = kernel.to(summary.lower.device, dtype)
        if kernel is None:
            kernel = default_kernel(summary, summary.variance or 1.0, dtype, self.categorical, self.outputs)
        draft = Domain.from_bounds(summary.lower, summary.upper)
        categories = separate(kernel, draft, 1, summary.num_dims).categorical
        require_levels({d: summary.levels[d] is not None for d in categories})
        unwarped = [] if self.outputs is None else [summary.num_dims - 1]
        if adapts_warp and warp is None:
            found = InputWarp.from_data(summary.sample, summary.lower, summary.upper, keep=[*categories, *unwarped])
            warp = found if found.columns.numel() else None
        if domain is None:
            domain = choose_box(kernel, summary.lower, summary.upper, 0.01 / summary.num_dims)
        return Setup(kernel, domain, warp, num_basis, self.family, self.categorical, self.outputs)


def default_kernel(
    summary: Summary,
    variance: float,
    dtype: torch.dtype | None = None,
    categorical: Sequence[int] = (),
    outputs: IndexKernel | None = None,
) -> Kernel:
    """
    The kernel of a function of the inputs where the user gives none.

    :param summary: The data.
    :param variance: Its variance in the middle of the inputs.
    :param dtype: That of its parameters, by default PyTorch's.
    :param categorical: The columns that are categories.
    :param outputs: The covariance of several outputs, where the last column is the number of the output.
    """
    num_dims = summary.num_dims - (outputs is not None)
    kernel = anova_kernel(
        num_dims,
        center=(summary.upper + summary.lower)[:num_dims] / 2,
        half_range=(summary.upper - summary.lower)[:num_dims] / 2,
        outputscale=variance,
        categorical=categorical,
        dtype=dtype,
    ).to(summary.lower.device)
    return kernel if outputs is None else times_outputs(kernel, outputs.to(kernel.raw_outputscale))


def most_functions(summary: Summary) -> tuple[int, ...]:
    """
    How many sines each mode may get, at most: as many as its column has values.

    :param summary: The data.
    """
    return tuple(max(count, 2) for count in summary.num_distinct())


def check_num_dims(given: int | None, known: int | None, what: str = "data have") -> None:
    """
    An error where data, or a box, have another number of inputs than the model.

    :param given: Theirs; None for any.
    :param known: That of the model; None while it has none.
    :param what: Subject and verb of the message.
    """
    if None not in (given, known) and given != known:
        raise InputError(f"The {what} {given} input dimensions; the model has {known}.")


def check_inside(domain: Domain, lower: Tensor, upper: Tensor) -> None:
    """
    An error where data lie outside of the box.

    :param domain: The box.
    :param lower: Smallest inputs `(D,)`.
    :param upper: Largest inputs `(D,)`.
    """
    inside = domain.contains(torch.stack([lower, upper])).all(0)
    if not inside.all():
        outside = (~inside).nonzero().flatten().tolist()
        raise DomainError(
            f"Training inputs lie outside of the domain in dimensions {outside}. Use a larger Domain: the basis "
            "cannot represent functions there."
        )


def announce_products(separable: SeparableKernel) -> None:
    """
    Say where a kernel is not taken literally.

    :param separable: The kernel, read mode by mode.
    """
    for path in separable.radial:
        warnings.warn(
            f"{path} is not a product over input dimensions; the model uses the product of its one-dimensional "
            "kernels.",
            SeparableKernelWarning,
            stacklevel=5,
        )
