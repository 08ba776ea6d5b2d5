r"""Box and number of functions from an error bound.

Dirichlet ends add images: with S the data's half range and L that of the box, the error at the edge of the data is
about :math:`k(2 (L - S)) + k(2 (L + S))`. Leaving out the functions beyond M costs at most
:math:`\frac1L \sum_{j > M} S(\omega_j)`. Box and number are chosen so that each of the two is below half of the
tolerance, for each input dimension in turn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from ..errors import SizeError, UnsupportedKernelError
from .bessel import periodic_variances
from .domain import Domain, as_inputs
from .expansion import Box, Expansion, Periodic, Sines, expand_child
from .index_set import FullTensor
from .spectral import marginal_density

#: Up to this fraction of the prior variance may be missing in the basis without a word; beyond it is warned about and
#: made up for, and hyperparameters are not drawn there.
MAX_MISSING = 0.05

#: `from_tolerance` refuses to choose more functions than this.
MAX_CHOSEN_FUNCTIONS = 4_000

_NUM_LAGS = 4096
_MAX_SINES = 2**14
_PRECISE = 1_000  # a number of functions of this size tells the highest frequency precisely enough
_MAX_RESCALINGS = 60


@dataclass(frozen=True)
class _Axis:
    """One input column of a leaf, with the relative error that it may contribute."""

    leaf: Sines
    position: int
    tolerance: float

    @property
    def column(self) -> int:
        return self.leaf.box.columns[self.position]

    def covariance(self, lag: Tensor) -> Tensor:
        """:math:`k(t) / k(0)` along this axis; the largest of a batch. `(T,)` -> `(T,)`."""
        lags = lag.new_zeros(len(lag) + 1, len(self.leaf.box.columns))
        lags[1:, self.position] = lag
        values = self.leaf.covariance(lags)
        ratio = values[..., 1:] / values[..., :1]
        return ratio.reshape(-1, len(lag)).abs().amax(0)

    def density(self, omega: Tensor) -> Tensor:
        """:math:`S(w) / k(0)` of the kernel along this axis. `(T,)` -> `(batch, T)`."""
        total = torch.zeros((), dtype=torch.float64)
        for kernel, columns, kept in self.leaf.terms:
            dim = next(position for position in kept if columns[position] == self.column)
            pieces = omega.unsqueeze(-1).split(512)  # quadratures and sums of shifts take much memory per frequency
            densities = [marginal_density(kernel, piece, (dim,), num_dims=len(columns)) for piece in pieces]
            total = total + torch.cat(densities, dim=-1)
        variance = self.leaf.covariance(omega.new_zeros(1, len(self.leaf.box.columns)))
        return (total / variance).reshape(-1, len(omega))


def choose_basis(kernel: Kernel, x: Tensor, tol: float) -> tuple[Domain, list[int]]:
    r"""
    A box and numbers of functions for which :math:`\max |K_\text{approx} - K| \le \text{tol} \cdot k(0)` over the
    data's range.

    :param kernel: The kernel, at its current parameters.
    :param x: Inputs `(..., N, D)`.
    :param tol: The relative error.
    :raises SizeError: Where more than `MAX_CHOSEN_FUNCTIONS` would be needed.
    """
    x = as_inputs(x)
    domain, num_basis = needed_basis(kernel, x.amin(0), x.amax(0), tol)
    size = basis_size(kernel, domain, num_basis)
    if size > MAX_CHOSEN_FUNCTIONS:
        raise SizeError(
            f"tol={tol:g} needs about {size} functions ({num_basis} per input dimension), more than "
            f"{MAX_CHOSEN_FUNCTIONS}. Ask for a larger tol; or choose by hand with HilbertKernel(kernel, domain, "
            "num_basis, index_set=HyperbolicCross(limit)); or use the CP-weight model TKRR, whose size is "
            "linear in the number of dimensions. Rough or heavy-tailed kernels (Matern-1/2, rational quadratic with "
            "small alpha) need the most."
        )
    return domain, num_basis


@torch.no_grad()
def needed_basis(kernel: Kernel, lower: Tensor, upper: Tensor, tol: float) -> tuple[Domain, list[int]]:
    r"""
    As :func:`choose_basis`, for a range of inputs and however many functions that takes.

    :param kernel: The kernel, at its current parameters; of a batch, the largest need counts.
    :param lower: Lower ends `(D,)`.
    :param upper: Upper ends `(D,)`.
    :param tol: The relative error.
    """
    if not 0 < tol < 1:
        raise ValueError(f"tol is a relative error between 0 and 1; got {tol}.")
    draft, leaves = _draft(kernel, lower, upper)
    axes = list(_axes(leaves, tol))
    half_width = _half_widths(axes, (upper - lower) / 2)
    num_basis = [1] * len(lower)
    for axis in axes:
        needed = _num_sines(axis, float(half_width[axis.column]))
        num_basis[axis.column] = max(num_basis[axis.column], needed)
    for leaf, share in leaves:
        if isinstance(leaf, Periodic):
            for d, column in enumerate(leaf.box.columns):
                budget = tol * share / len(leaf.box.columns)
                harmonics = _num_harmonics(leaf.concentration(d), budget)
                num_basis[column] = max(num_basis[column], 2 * harmonics)
    return Domain(draft.center, half_width), num_basis


def basis_size(kernel: Kernel, domain: Domain, num_basis: Sequence[int]) -> int:
    """
    How many functions a kernel has on a box.

    :param kernel: The kernel.
    :param domain: The box.
    :param num_basis: Number of sines of each dimension.
    """
    center, half_width = domain.sides(len(num_basis))
    box = Box(tuple(range(len(num_basis))), center, half_width, tuple(num_basis), FullTensor())
    return expand_child(kernel, box).num_functions


@torch.no_grad()
def choose_domain(kernel: Kernel, lower: Tensor, upper: Tensor, tol: float) -> Domain:
    r"""
    The smallest box whose ends change the kernel by at most :math:`\text{tol} \cdot k(0) / 2` within given bounds.

    :param kernel: The kernel, at its current parameters; of a batch, the one that needs the largest box.
    :param lower: Lower ends `(D,)`.
    :param upper: Upper ends `(D,)`.
    :param tol: The relative error, shared by all input dimensions.
    """
    draft, leaves = _draft(kernel, lower, upper)
    return Domain(draft.center, _half_widths(list(_axes(leaves, tol)), (upper - lower) / 2))


def _draft(kernel: Kernel, lower: Tensor, upper: Tensor) -> tuple[Box, list[tuple[Expansion, float]]]:
    """A box of the right place and any size, and the leaves of the kernel's expansion on it."""
    num_dims = len(lower)
    box = Box(tuple(range(num_dims)), (lower + upper) / 2, torch.ones(num_dims), (1,) * num_dims, FullTensor())
    return box, list(expand_child(kernel, box).leaves())


def _half_widths(axes: list[_Axis], half_range: Tensor) -> Tensor:
    """Half widths `(D,)` that suffice for all axes; 1.5 times the range where none asks for more."""
    half_width = torch.where(half_range > 0, 1.5 * half_range, torch.ones_like(half_range))
    for column in {axis.column for axis in axes}:
        half_width[column] = max(_half_width(axis, float(half_range[column])) for axis in axes if axis.column == column)
    return half_width


def _axes(leaves: list[tuple[Expansion, float]], tol: float) -> Iterator[_Axis]:
    for leaf, share in leaves:
        if isinstance(leaf, Sines):
            for position in range(len(leaf.box.columns)):
                yield _Axis(leaf, position, tol * share / len(leaf.box.columns))


def _half_width(axis: _Axis, half_range: float) -> float:
    """The smallest L whose images are together below half of the axis's tolerance."""
    bound = axis.tolerance / 2
    reach = half_range or 1.0
    for _ in range(_MAX_RESCALINGS):
        lag = torch.linspace(0, reach, _NUM_LAGS, dtype=torch.float64)
        beyond = axis.covariance(torch.linspace(reach, 64 * reach, _NUM_LAGS, dtype=torch.float64)).max()
        supremum = axis.covariance(lag).flip(0).cummax(0).values.flip(0).clamp_min(beyond)  # of |k| from each lag on
        if supremum[_NUM_LAGS // 2] > bound / 2:
            reach *= 2
            continue
        shift = min(int(4 * half_range / lag[1]), _NUM_LAGS)  # from 2 (L - S) to 2 (L + S)
        second = torch.cat([supremum[shift:], beyond.expand(shift)])
        first = int((supremum + second <= bound).nonzero()[0, 0])
        if first >= 64:
            return half_range + float(lag[first]) / 2
        reach /= 16  # zoom in
    raise UnsupportedKernelError(
        f"The covariance along input column {axis.column} does not fall below {bound / 2:g} of its value at zero: no "
        "box is large enough. Give the Domain by hand, or use a kernel that decays."
    )


def _num_sines(axis: _Axis, half_width: float) -> int:
    """
    The smallest M with a truncation error of at most half of the axis's tolerance; where too large for use, about M.

    The frequency up to which functions are needed hardly depends on the box. It is sought in the smallest sensible box
    first, whose frequencies are far enough apart to reach it, and then in larger ones until it is known precisely. A
    number that can be used is that of the box itself.
    """
    width = min(half_width, _half_width(axis, 0.0))
    num = _num_sines_in_box(axis, width)
    while width < half_width and (num < _PRECISE or num * half_width / width <= MAX_CHOSEN_FUNCTIONS):
        width = min(2 * width, half_width)
        num = _num_sines_in_box(axis, width)
    return math.ceil(num * (half_width / width))


def _num_sines_in_box(axis: _Axis, half_width: float) -> int:
    r"""
    The number of functions of one box; above `_MAX_SINES` an estimate.

    All variances are found when they add up as Poisson's formula says, so that no spectral peak beyond a gap is missed:

    .. math:: \frac{S(0)}{4 L} + \sum_{j \ge 1} \frac{S(\omega_j)}{2 L} = \sum_n k(4 n L).
    """
    spacing = math.pi / (2 * half_width)
    images = 2 * axis.covariance(4 * half_width * torch.arange(1, 3, dtype=torch.float64)).sum()
    at_zero = axis.density(torch.zeros(1, dtype=torch.float64)) / (4 * half_width)
    density = at_zero[:, :0]
    while True:
        block = torch.arange(density.shape[-1] + 1, max(2 * density.shape[-1], 256) + 1, dtype=torch.float64)
        density = torch.cat([density, axis.density(spacing * block)], dim=-1)  # (batch, T)
        # What lies beyond the last, as if it fell like w^-2.
        beyond = 2 / math.pi * spacing * density.shape[-1] * density[:, -1:]
        found = (at_zero + density.sum(-1, keepdim=True) / (2 * half_width)).nan_to_num(posinf=1.0)
        lost = 1 - images - found
        complete = (beyond <= 0.01 * axis.tolerance) & (lost <= 0.1 * axis.tolerance)
        if complete.all() or density.shape[-1] >= _MAX_SINES:
            break
    beyond = torch.where(lost <= 0.1 * axis.tolerance, beyond, torch.maximum(beyond, 2 * lost))
    tail = density.flip(-1).cumsum(-1).flip(-1) / half_width + beyond  # tail[m]: functions m + 1, m + 2, ...
    enough = (torch.cat([tail, beyond], dim=-1).amax(0) <= axis.tolerance / 2).nonzero()
    if not len(enough):  # too many to be used; how many, by the same law
        return math.ceil(density.shape[-1] * float(beyond.max()) / (axis.tolerance / 2))
    return max(int(enough[0, 0]), 1)


def _num_harmonics(concentration: Tensor, budget: float) -> int:
    num = 4
    while True:
        q = periodic_variances(concentration, num).reshape(-1, num + 1).amax(0)
        tail = 1 - q.cumsum(0)
        enough = (tail <= max(budget, 1e-12)).nonzero()
        if len(enough):
            return max(int(enough[0, 0]), 1)
        num *= 2
