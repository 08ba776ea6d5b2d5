r"""Choosing a box: for a kernel and a range of inputs, with the number of functions or for a given one.

Dirichlet ends add images: with S the data's half range and L that of the box, the error at the edge of the data is
about :math:`k(2 (L - S)) + k(2 (L + S))`. Leaving out the functions beyond M costs, on average over the inputs,
:math:`\frac{1}{2 L} \sum_{j > M} S(\omega_j)`. Box and number are chosen so that each of the two is below half of the
tolerance. Of several inputs, the functions with frequencies in an ellipsoid are kept
(:class:`~gpytorch_tkrr.Ellipsoid`), the smallest one that leaves out no more.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from ..bases.domain import Domain, as_inputs
from ..bases.index_set import Ellipsoid
from ..errors import SizeError, UnsupportedKernelError
from . import cosine, symmetric, task_table  # noqa: F401  they register their kernels
from .bessel import periodic_variances
from .categorical import require_levels
from .expansion import Box, Leaf, OneInput, expand
from .finite import PeriodicTerm
from .separable import has_levels, separate
from .spectral import node_density, num_copies
from .stationary import Sines, SpectralProducts, SpectralTerm

#: The box of a category reaches so far beyond its first and its last level.
LEVEL_MARGIN = 0.5

#: `from_tolerance` refuses to choose more functions than this.
MAX_CHOSEN_FUNCTIONS = 4_000

_NUM_LAGS = 4096
_MAX_GRID = 2**14
_UNRESOLVED = 0.1  # by how much the variances on a grid may miss that of the kernel
_MAX_SINES = 2**14
_LEAST_GRID, _LEAST_SINES = 2**6, 2**8
_MAX_EVALUATIONS = 2**16  # of densities of simple kernels, at one look
_PRECISE = 1_000  # a number of functions of this size tells the highest frequency precisely enough
_MAX_RESCALINGS = 60


@dataclass(frozen=True)
class _Axis:
    """
    One input column of a leaf.

    :param leaf: The leaf.
    :param position: Which of its columns.
    :param image: What the images of the ends of the box may add up to, relative to the leaf's variance.
    :param truncation: What the functions left out may, on average over the inputs.
    """

    leaf: SpectralProducts
    position: int
    image: float
    truncation: float

    @property
    def column(self) -> int:
        return self.leaf.box.columns[self.position]

    def covariance(self, lag: Tensor) -> Tensor:
        """:math:`k(t) / k(0)` along this axis; the largest of a batch. `(T,)` -> `(T,)`."""
        lags = lag.new_zeros(len(lag) + 1, len(self.leaf.box.columns))
        lags[1:, self.position] = lag
        values = self.leaf.at_lag(lags)
        ratio = values[..., 1:] / values[..., :1]
        return ratio.reshape(-1, len(lag)).abs().amax(0)

    def density(self, omega: Tensor) -> Tensor:
        """:math:`S(w) / k(0)` of the kernel along this axis. `(T,)` -> `(batch, T)`."""
        pieces = omega.split(512)  # quadratures and sums of shifts take much memory per frequency
        total = reduce(
            torch.add,
            (
                torch.cat([node_density(node, {self.column: piece}) for piece in pieces], dim=-1)
                for node in self.leaf.nodes
            ),
        )
        variance = self.leaf.at_lag(omega.new_zeros(1, len(self.leaf.box.columns)))
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
    lower, upper = x.amin(0), x.amax(0)
    require_categories(kernel, x)
    domain, num_basis = needed_basis(kernel, lower, upper, tol)
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


def require_categories(kernel: Kernel, x: Tensor) -> None:
    """
    An error where a column that the kernel takes as a category has values that are no levels.

    :param kernel: The kernel.
    :param x: Inputs `(N, D)`.
    """
    _, leaves = _draft(kernel, x.amin(0), x.amax(0))
    require_levels({d: bool((x[:, d] == x[:, d].round()).all()) for d in _categories(leaves)})


@torch.no_grad()
def needed_basis(
    kernel: Kernel, lower: Tensor, upper: Tensor, tol: float, allowed: float = math.inf, *, image: float = 1.0
) -> tuple[Domain, list[int]]:
    r"""
    As :func:`choose_basis`, for a range of inputs and however many functions that takes.

    :param kernel: The kernel, at its current parameters; of a batch, the largest need counts.
    :param lower: Lower ends `(D,)`.
    :param upper: Upper ends `(D,)`.
    :param tol: The relative error.
    :param allowed: The error of the prior variance that is allowed where that is less.
    :param image: The part of it that is allowed to the images.
    """
    if not 0 < tol < 1:
        raise ValueError(f"tol is a relative error between 0 and 1; got {tol}.")
    draft, leaves = _draft(kernel, lower, upper)
    groups = list(_axes(leaves, tol, allowed, image))
    half_width = _half_widths(list(itertools.chain(*groups)), (upper - lower) / 2, _categories(leaves))
    num_basis = [1] * len(lower)
    for axes in groups:
        counts = [_num_sines(axis, float(half_width[axis.column])) for axis in axes]
        if len(counts) > 1:
            counts = _ellipsoid(axes, half_width, counts)
        for axis, count in zip(axes, counts, strict=True):
            num_basis[axis.column] = max(num_basis[axis.column], count)
    for leaf in leaves:
        expansion = leaf.expansion
        if isinstance(expansion, OneInput) and isinstance(expansion.term, PeriodicTerm):
            harmonics = _num_harmonics(expansion.term.concentration(), _budget(leaf, 1.0, tol, allowed))
            num_basis[expansion.column] = max(num_basis[expansion.column], 2 * harmonics)
    return Domain(draft.center, half_width), num_basis


def _budget(leaf: Leaf, variance: float, tol: float, allowed: float) -> float:
    """The relative error that is allowed to a leaf with a given variance."""
    return leaf.share * min(tol, allowed / max(leaf.scale * variance, 1e-300))


def _ellipsoid(axes: list[_Axis], half_width: Tensor, counts: list[int]) -> list[int]:
    """
    Numbers of functions of a leaf whose ellipsoid leaves out no more than may be.

    :param axes: All columns of the leaf.
    :param half_width: Half widths of all columns of the kernel.
    :param counts: Numbers for which next to nothing lies beyond them in any one column.
    """
    leaf, budget = axes[0].leaf, 3 * sum(axis.truncation for axis in axes)  # a quarter is spent
    num = int(max(_num_affordable(leaf, leaf.box.columns, _MAX_GRID), _LEAST_GRID) ** (1 / len(axes)))
    grids, levels, weight = [], [], 1.0
    for axis, count in zip(axes, counts, strict=True):
        step = max(count / num, 1.0)  # a coarser grid for the same integral
        j = step * (torch.arange(1, min(count, num) + 1, dtype=torch.float64) - (0.5 if step > 1 else 0.0))
        width = float(half_width[axis.column])
        grids.append(math.pi * j / (2 * width))
        levels.append(((j - 1).clamp_min(0) / count).square())
        weight *= step / (2 * width)
    omega = torch.cartesian_prod(*grids)
    level = torch.cartesian_prod(*levels).sum(-1)
    order = level.argsort(descending=True)
    density = torch.cat([leaf_density(leaf, piece) for piece in omega[order].split(512)], dim=-1)
    if float((weight * density.sum(-1) - 1).abs().max()) > _UNRESOLVED:
        return counts  # peaks fall between the points of the grid
    left_out = (weight * density.cumsum(-1)).amax(0)  # by an ellipsoid that ends before the function
    kept = (left_out > budget).nonzero()
    scale = math.sqrt(float(level[order[int(kept[0, 0])]])) if len(kept) else 0.0
    return [max(math.ceil(count * scale), 1) for count in counts]


def _num_affordable(leaf: SpectralProducts, columns: Sequence[int], most: int) -> int:
    """At how many frequencies of some columns a density is looked at, where `most` are enough."""
    return min(most, _MAX_EVALUATIONS // sum(num_copies(node, columns) for node in leaf.nodes))


def leaf_density(leaf: SpectralProducts, omega: Tensor) -> Tensor:
    r"""
    :math:`S(\omega) / k(0)` of a leaf.

    :param leaf: The leaf.
    :param omega: Frequencies `(T, D)` in the order of its columns.
    :return: `(batch, T)`.
    """
    frequencies = dict(zip(leaf.box.columns, omega.unbind(-1), strict=True))
    total = reduce(torch.add, (node_density(node, frequencies) for node in leaf.nodes))
    return (total / leaf.at_lag(torch.zeros_like(omega[:1]))).reshape(-1, len(omega))


def basis_size(kernel: Kernel, domain: Domain, num_basis: Sequence[int]) -> int:
    """
    How many functions a kernel has on a box.

    :param kernel: The kernel.
    :param domain: The box.
    :param num_basis: Number of sines of each dimension.
    """
    center, half_width = domain.sides(len(num_basis))
    box = Box(tuple(range(len(num_basis))), center, half_width, tuple(num_basis), Ellipsoid(), Sines())
    return expand(kernel, box).num_functions


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
    axes = list(itertools.chain(*_axes(leaves, tol)))
    return Domain(draft.center, _half_widths(axes, (upper - lower) / 2, _categories(leaves)))


@torch.no_grad()
def choose_box(kernel: Kernel, lower: Tensor, upper: Tensor, tol: float, *, room: float = 1.0) -> Domain:
    r"""
    The box: the range of the data plus a margin that makes the sines' images small at the edge of the data,
    :math:`|k_d(2 (L - S))| \le` tol.

    :param kernel: A separable kernel, at its present hyperparameters.
    :param lower: Smallest inputs `(D,)`.
    :param upper: Largest inputs `(D,)`.
    :param tol: What a single image may be, relative to the variance.
    :param room: The smallest margin, in units of half the range, for lengthscales that are yet to be learned.
    """
    half_range = (upper - lower) / 2
    unit = torch.where(half_range > 0, half_range, torch.ones_like(half_range))
    modes = separate(kernel, Domain((lower + upper) / 2, unit), 1, lower.numel()).modes
    margins = [
        max([room * float(unit[d]), *(_margin(term, float(unit[d]), tol) for term in mode.spectral_terms())])
        if not mode.is_categorical
        else LEVEL_MARGIN
        for d, mode in enumerate(modes)
    ]
    return Domain((lower + upper) / 2, half_range + torch.tensor(margins, dtype=torch.float64, device=lower.device))


def _margin(term: SpectralTerm, unit: float, tol: float) -> float:
    """The smallest margin beyond which twice the lag leaves no correlation, up to a million half ranges."""
    lags = unit * torch.logspace(-2, 6, 799, dtype=torch.float64, device=term.basis.center.device)
    large = (term.at_lag(2 * lags).abs() > tol).nonzero()
    return float(lags[min(int(large[-1]) + 1, len(lags) - 1)]) if large.numel() else float(lags[0])


def represented_lengthscales(
    domain: Domain, half_range: Tensor, num_basis: int, missing: float, *, growth: float = 1.0
) -> tuple[Tensor, Tensor]:
    """
    The shortest and longest lengthscales of an RBF kernel that a box and a number of functions represent.

    :param domain: The box.
    :param half_range: Half the range of the inputs, `(D,)`.
    :param num_basis: Functions per input.
    :param missing: The fraction of the prior variance that may be missing in each input.
    :param growth: The longest is at least this many times the shortest.
    :return: Two tensors `(D,)`.
    """
    _, half_width = domain.sides(len(half_range))
    image, highest = _rbf_quantiles(missing)
    shortest = 2 * highest * half_width / (math.pi * num_basis)
    return shortest, torch.maximum((half_width - half_range) / image, growth * shortest)


def suit_short_lengthscales(
    domain: Domain, shortest: Tensor, half_range: Tensor, num_basis: int, missing: float, *, room: float
) -> Domain:
    """
    A box that suits short lengthscales of an RBF kernel where no box suits all of a batch.

    :param domain: The box that suits the long ones.
    :param shortest: The shortest lengthscale of each input, `(D,)`.
    :param half_range: Half the range of the inputs, `(D,)`.
    :param num_basis: Functions per input.
    :param missing: The fraction of the prior variance that may be missing in each input.
    :param room: By which factor the shortest may still get shorter.
    """
    shortest = shortest.to(domain.half_width)
    image, highest = _rbf_quantiles(missing)
    least = half_range + image * shortest
    most = math.pi * num_basis * shortest / (2 * highest * room)
    return Domain(domain.center, domain.half_width.minimum(least.maximum(most)))


def _rbf_quantiles(missing: float) -> tuple[float, float]:
    """
    How a box must fit a lengthscale of an RBF kernel: the margin L - S, in lengthscales, where k(2 (L - S)) is what may
    be missing, and the highest frequency, times the lengthscale, beyond which as much of the variance lies.
    """
    beyond = math.sqrt(2) * float(torch.erfinv(torch.tensor(1 - missing, dtype=torch.float64)))
    return math.sqrt(-2 * math.log(missing)) / 2, beyond


def _draft(kernel: Kernel, lower: Tensor, upper: Tensor) -> tuple[Box, list[Leaf]]:
    """A box of the right place and any size, and the leaves of the kernel's expansion on it."""
    num_dims = len(lower)
    box = Box(tuple(range(num_dims)), (lower + upper) / 2, torch.ones(num_dims), (1,) * num_dims, Ellipsoid(), Sines())
    return box, list(expand(kernel, box).leaves(torch.stack([lower, upper])))


def _categories(leaves: list[Leaf]) -> list[int]:
    """The columns that are categories."""
    inputs = [leaf.expansion for leaf in leaves if isinstance(leaf.expansion, OneInput)]
    return sorted({part.column for part in inputs if has_levels(part.term.basis)})


def _half_widths(axes: list[_Axis], half_range: Tensor, categories: Sequence[int] = ()) -> Tensor:
    """
    Half widths `(D,)` that suffice for all axes; 1.5 times the range where none asks for more, and a little more than
    the range of the levels of a category.
    """
    half_width = torch.where(half_range > 0, 1.5 * half_range, torch.ones_like(half_range))
    half_width[list(categories)] = half_range[list(categories)] + LEVEL_MARGIN
    for column in {axis.column for axis in axes}:
        half_width[column] = max(_half_width(axis, float(half_range[column])) for axis in axes if axis.column == column)
    return half_width


def _axes(leaves: list[Leaf], tol: float, allowed: float = math.inf, image: float = 1.0) -> Iterator[list[_Axis]]:
    """The columns of each leaf that is made of sines."""
    for leaf in leaves:
        expansion = leaf.expansion
        if isinstance(expansion, SpectralProducts):
            num = len(expansion.box.columns)
            variance = float(expansion.at_lag(torch.zeros(1, num, dtype=torch.float64)).max())
            # Half for the images and half for what is left out; of that a quarter for what lies beyond in one column.
            half = _budget(leaf, variance, tol, allowed) / 2
            left_out = half if num == 1 else half / (4 * num)
            yield [_Axis(expansion, position, image * half / num, left_out) for position in range(num)]


def _half_width(axis: _Axis, half_range: float) -> float:
    """The smallest L whose images are together below half of the axis's tolerance."""
    bound = axis.image
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
    The number of functions of one box; where there are too many to be looked at, an estimate.

    All variances are found when they add up as Poisson's formula says, so that no spectral peak beyond a gap is missed:

    .. math:: \frac{S(0)}{4 L} + \sum_{j \ge 1} \frac{S(\omega_j)}{2 L} = \sum_n k(4 n L).
    """
    spacing, tolerance = math.pi / (2 * half_width), axis.truncation
    images = 2 * axis.covariance(4 * half_width * torch.arange(1, 3, dtype=torch.float64)).sum()
    at_zero = axis.density(torch.zeros(1, dtype=torch.float64)) / (4 * half_width)
    density = at_zero[:, :0]
    most = max(_num_affordable(axis.leaf, [axis.column], _MAX_SINES), _LEAST_SINES)
    while True:
        block = torch.arange(density.shape[-1] + 1, max(2 * density.shape[-1], 256) + 1, dtype=torch.float64)
        density = torch.cat([density, axis.density(spacing * block)], dim=-1)  # (batch, T)
        # What lies beyond the last, as if it fell like w^-2.
        beyond = spacing * density.shape[-1] * density[:, -1:] / math.pi
        found = (at_zero + density.sum(-1, keepdim=True) / (2 * half_width)).nan_to_num(posinf=1.0)
        lost = 1 - images - found
        complete = (beyond <= 0.02 * tolerance) & (lost <= 0.2 * tolerance)
        if complete.all() or density.shape[-1] >= most:
            break
    beyond = torch.where(lost <= 0.2 * tolerance, beyond, torch.maximum(beyond, lost))
    tail = density.flip(-1).cumsum(-1).flip(-1) / (2 * half_width) + beyond  # tail[m]: functions m + 1, m + 2, ...
    enough = (torch.cat([tail, beyond], dim=-1).amax(0) <= tolerance).nonzero()
    if not len(enough):  # too many to be used; how many, by the same law
        return math.ceil(density.shape[-1] * float(beyond.max()) / tolerance)
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
