"""The box on which a kernel is expanded."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import DomainError, InputError

#: So many sides of a box are printed.
MAX_SHOWN = 6


class Domain(nn.Module):
    r"""
    The box :math:`\prod_d [c_d - L_d, c_d + L_d]` that carries the basis functions.

    A domain is fixed when it is made, travels in the ``state_dict``, and is never refitted from new data: the basis
    depends on it. Scalars broadcast to any number of input dimensions.

    :param center: Centre :math:`c`, a number or a tensor `(D,)`.
    :param half_width: Half width :math:`L > 0`, a number or a tensor `(D,)`.

    Example:
        >>> import torch
        >>> from gpytorch_tkrr import Domain
        >>> domain = Domain.from_data(torch.tensor([[0.0, 10.0], [2.0, 30.0]]), boundary_factor=1.5)
        >>> domain
        Domain([-0.5, 2.5] x [5, 35])
        >>> domain.contains(torch.tensor([[1.0, 36.0]]))
        tensor([[ True, False]])
    """

    center: Tensor
    half_width: Tensor

    def __init__(self, center: float | Tensor, half_width: float | Tensor):
        super().__init__()
        center_ = torch.as_tensor(center, dtype=torch.float64).detach()
        half_width_ = torch.as_tensor(half_width, dtype=torch.float64).detach()
        if center_.dim() > 1 or half_width_.dim() > 1:
            raise DomainError(
                f"Domain takes a centre and a half width that are numbers or tensors of shape (D,); got shapes "
                f"{tuple(center_.shape)} and {tuple(half_width_.shape)}."
            )
        try:
            center_, half_width_ = torch.broadcast_tensors(center_, half_width_)
        except RuntimeError as error:
            raise DomainError(
                f"The centre has {center_.numel()} dimensions and the half width {half_width_.numel()}."
            ) from error
        if not (torch.isfinite(center_).all() and torch.isfinite(half_width_).all() and (half_width_ > 0).all()):
            raise DomainError(
                f"A box needs a finite centre and finite, positive half widths; got centre {center_.tolist()} and half "
                f"width {half_width_.tolist()}."
            )
        self.register_buffer("center", center_.clone())
        self.register_buffer("half_width", half_width_.clone())

    @classmethod
    def from_bounds(
        cls, lower: float | Tensor, upper: float | Tensor, *, boundary_factor: float | Tensor = 1.5
    ) -> Domain:
        """
        The box around `[lower, upper]`, widened by `boundary_factor` about its centre.

        A dimension with ``lower == upper`` (a constant column) gets the half width `boundary_factor`.

        :param lower: Lower ends, a number or `(D,)`.
        :param upper: Upper ends, a number or `(D,)`.
        :param boundary_factor: Half width of the box divided by the half width of the bounds; at least 1.

        Example:
            >>> from gpytorch_tkrr import Domain
            >>> Domain.from_bounds(0.0, 1.0, boundary_factor=2.0)
            Domain([-0.5, 1.5], any number of dimensions)
        """
        factor = torch.as_tensor(boundary_factor, dtype=torch.float64)
        if not (factor >= 1).all():
            raise DomainError(
                f"boundary_factor must be at least 1 (the box must hold the data); got {boundary_factor}."
            )
        lower_ = torch.as_tensor(lower, dtype=torch.float64)
        upper_ = torch.as_tensor(upper, dtype=torch.float64)
        if (upper_ < lower_).any():
            raise DomainError(f"upper must not be below lower; got {lower_.tolist()} and {upper_.tolist()}.")
        half_range = (upper_ - lower_) / 2
        half_range = torch.where(half_range > 0, half_range, torch.ones_like(half_range))
        return cls((lower_ + upper_) / 2, half_range * factor)

    @classmethod
    def from_data(cls, x: Tensor, boundary_factor: float | Tensor = 1.5) -> Domain:
        """
        The box around the range of the data, widened by `boundary_factor` about its centre.

        :param x: Inputs `(..., N, D)`, or `(N,)` for one dimension.
        :param boundary_factor: Half width of the box divided by the half range of the data; at least 1.
        """
        x = as_inputs(x)
        lower, upper = x.amin(dim=0), x.amax(dim=0)
        return cls.from_bounds(lower, upper, boundary_factor=boundary_factor)

    @property
    def num_dims(self) -> int | None:
        """Number of dimensions, or None where the box broadcasts to any."""
        return self.center.numel() if self.center.dim() else None

    def sides(self, num_dims: int) -> tuple[Tensor, Tensor]:
        """
        Centre and half width as float64 tensors `(D,)`.

        :param num_dims: D, the number of input dimensions.
        """
        if self.num_dims not in (None, num_dims):
            raise DomainError(
                f"The domain has {self.num_dims} dimensions but the inputs have {num_dims}. Make the Domain from "
                "inputs with the same columns, or set active_dims."
            )
        return self.center.double().expand(num_dims), self.half_width.double().expand(num_dims)

    def contains(self, x: Tensor) -> Tensor:
        """
        Which coordinates lie inside the closed box (a relative 1e-6 of the half width is forgiven: float32).

        :param x: Inputs `(..., N, D)`.
        :return: Booleans of the shape of `x`.
        """
        center, half_width = self.sides(x.shape[-1])
        return (x.double() - center).abs() <= half_width * (1 + 1e-6)

    def extra_repr(self) -> str:
        lower, upper = self.center - self.half_width, self.center + self.half_width
        if self.num_dims is None:
            return f"[{lower.item():.4g}, {upper.item():.4g}], any number of dimensions"
        sides = [f"[{a:.4g}, {b:.4g}]" for a, b in zip(lower.tolist(), upper.tolist(), strict=True)]
        if len(sides) > MAX_SHOWN:
            return " x ".join([*sides[: MAX_SHOWN - 1], "...", sides[-1]]) + f", {len(sides)} dimensions"
        return " x ".join(sides)


def as_rows(x: Tensor, *, allow_missing: bool = False) -> Tensor:
    """
    Inputs as a detached float64 matrix, or an :class:`InputError` that says what is wrong. There may be no rows.

    :param x: Inputs `(..., N, D)`, or `(N,)` for one dimension.
    :param allow_missing: Whether values may be NaN.
    :return: The rows of all batches, `(N, D)`.
    """
    if not isinstance(x, Tensor):
        raise InputError(f"Inputs must be a torch.Tensor of shape (..., N, D); got a {type(x).__name__}.")
    x = x.detach().double()
    x = x.unsqueeze(-1) if x.dim() == 1 else x
    if x.dim() < 2 or x.shape[-1] == 0:
        raise InputError(f"Inputs must have shape (..., N, D) with D >= 1; got {tuple(x.shape)}.")
    x = x.reshape(-1, x.shape[-1])
    finite = ((torch.isfinite(x) | x.isnan()) if allow_missing else torch.isfinite(x)).all(dim=-1)
    if not finite.all():
        first = int((~finite).nonzero()[0, 0])
        raise InputError(
            f"{int((~finite).sum())} of {x.shape[0]} input rows hold NaN or infinite values (the first is row "
            f"{first}). Drop or impute them."
        )
    return x


def as_inputs(x: Tensor, *, allow_missing: bool = False) -> Tensor:
    """
    The same as :func:`as_rows` where at least one row is needed.

    :param x: Inputs `(..., N, D)`, or `(N,)` for one dimension.
    :param allow_missing: Whether values may be NaN.
    :return: The rows of all batches, `(N, D)`.
    """
    rows = as_rows(x, allow_missing=allow_missing)
    if not len(rows):
        raise InputError(f"Inputs must have shape (..., N, D) with N >= 1 and D >= 1; got {tuple(x.shape)}.")
    return rows


def at_least_single(x: Tensor) -> Tensor:
    """
    The same numbers, as float32 where they are of half precision: GPyTorch's algebra has no halves.

    :param x: A tensor.
    """
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
