r"""Spectral densities of GPyTorch kernel objects.

The convention is that of angular frequencies,

.. math:: k(t) = (2 \pi)^{-D} \int S(\omega) e^{i \omega^\top t} d\omega.

A density is a rule registered for a kernel class. Leaves (RBF, Matern, ...) have a formula; scales, sums and products
combine the densities of their children. All values are float64 and carry gradients to the kernel's raw parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import reduce
from operator import add, mul

import numpy as np
import torch
from gpytorch.kernels import (
    AdditiveKernel,
    Kernel,
    MaternKernel,
    PeriodicKernel,
    PiecewisePolynomialKernel,
    ProductKernel,
    ProductStructureKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
    SpectralMixtureKernel,
)
from torch import Tensor

from ..errors import InputError, UnsupportedKernelError
from .bessel import bessel_j0, count_harmonics, log_bessel_k, periodic_variances
from .tree import (
    ColumnByColumn,
    Density,
    FiniteBasis,
    Frequencies,
    Node,
    Structure,
    check_kernel_class,
    is_a,
    register,
    unsupported,
)

DensityFunction = Callable[[Kernel, Tensor, tuple[int, ...]], Tensor]


def spectral_density(kernel: Kernel, omega: Tensor) -> Tensor:
    r"""
    The spectral density of a stationary kernel,

    .. math:: S(\omega) = \int k(t) e^{-i \omega^\top t} dt.

    Covered are RBF, Matern, rational quadratic, spectral mixture and piecewise polynomial kernels (the last in up to
    three dimensions), scales and sums of them, products over disjoint input dimensions and, over shared ones, products
    of RBF kernels and of periodic kernels with any of the above. :func:`register_spectral_density` adds others.

    The rational quadratic density with :math:`\alpha \le D / 2` is infinite at :math:`\omega = 0`.

    :param kernel: The kernel.
    :param omega: Angular frequencies `(M, D)`, one column per input dimension that the kernel sees, that is after its
        own ``active_dims``.
    :return: Densities `(*kernel.batch_shape, M)`, float64, differentiable in the kernel's parameters.
    :raises UnsupportedKernelError: Names the node of the kernel tree that has no density.

    Example:
        >>> import torch
        >>> from gpytorch.kernels import RBFKernel
        >>> from gpytorch_tkrr.features.spectral import spectral_density
        >>> kernel = RBFKernel(ard_num_dims=2)
        >>> kernel.lengthscale = torch.tensor([[1.0, 2.0]])
        >>> spectral_density(kernel, torch.tensor([[0.0, 0.0], [1.0, 0.5]])).detach()  # 2 pi l_1 l_2 exp(...)
        tensor([12.5664,  4.6229], dtype=torch.float64)
    """
    omega = _as_omega(omega)
    num_dims = omega.shape[-1]
    return _restricted_density(kernel, omega, tuple(range(num_dims)), num_dims)


def marginal_density(kernel: Kernel, omega: Tensor, dims: Sequence[int], *, num_dims: int | None = None) -> Tensor:
    r"""
    The spectral density of a kernel restricted to some of its input columns, the lag in all others held at zero,

    .. math:: S_A(\omega_A) = \int k(t_A, 0) e^{-i \omega_A^\top t_A} dt_A.

    :param kernel: The kernel.
    :param omega: Angular frequencies `(M, len(dims))`.
    :param dims: The columns kept, numbered as the kernel sees them, that is after its own ``active_dims``.
    :param num_dims: D, the number of columns that the kernel sees. By default it is read off ``ard_num_dims`` and
        ``active_dims``; most kernels without either do not depend on it.
    :return: Densities `(*kernel.batch_shape, M)`, float64, differentiable in the kernel's parameters.
    :raises UnsupportedKernelError: Names the node of the kernel tree that has no density.

    Example:
        >>> import torch
        >>> from gpytorch.kernels import MaternKernel
        >>> from gpytorch_tkrr.features.spectral import marginal_density
        >>> kernel = MaternKernel(nu=0.5, ard_num_dims=3)
        >>> kernel.lengthscale = torch.tensor([[1.0, 2.0, 3.0]])
        >>> marginal_density(kernel, torch.tensor([[0.1], [1.0]]), dims=(1,)).detach()  # 2 l / (1 + (l w)^2)
        tensor([3.8462, 0.8000], dtype=torch.float64)
    """
    omega = _as_omega(omega)
    dims = tuple(int(d) for d in dims)
    if num_dims is None:
        num_dims = _known_num_dims(kernel)
        if num_dims is None and any(isinstance(m, _NEED_NUM_DIMS) for m in kernel.modules()):
            raise InputError(
                f"The {type(kernel).__name__} depends on how many input columns it sees, and neither ard_num_dims nor "
                "active_dims says so. Pass num_dims."
            )
        num_dims = num_dims or max(dims, default=0) + 1
    if not dims or len(set(dims)) < len(dims) or min(dims) < 0 or max(dims) >= num_dims:
        raise InputError(f"dims must be distinct columns between 0 and {num_dims - 1}; got {dims}.")
    if omega.shape[-1] != len(dims):
        raise InputError(f"omega must have one column for each of dims={dims}; got shape {tuple(omega.shape)}.")
    return _restricted_density(kernel, omega, dims, num_dims)


def has_density(kernel: Kernel, num_dims: int) -> bool:
    """
    Whether a kernel has a spectral density over all the input columns it sees.

    A sum over different columns, a constant, a linear or a periodic kernel has none.

    :param kernel: The kernel.
    :param num_dims: D, the number of input columns that the kernel sees.
    """
    return node_has_density(Node(kernel, tuple(range(num_dims)), type(kernel).__name__))


def node_has_density(node: Node) -> bool:
    """
    Whether a node has a spectral density over all its free columns.

    :param node: The node.
    """
    one = torch.ones(1, dtype=torch.float64, device=node.kernel.device)
    try:
        with torch.no_grad():
            node_density(node, dict.fromkeys(node.free, one))
    except UnsupportedKernelError:
        return False
    return True


def node_density(node: Node, frequencies: Frequencies) -> Tensor:
    """
    The spectral density of a node restricted to some of its columns.

    :param node: The node.
    :param frequencies: Angular frequencies `(M,)` of the columns that are kept.
    :return: `(*kernel.batch_shape, M)`, float64.
    """
    density = _density(node, frequencies)
    shape = (*node.kernel.batch_shape, next(iter(frequencies.values())).shape[0])
    try:
        return density.expand(shape)
    except RuntimeError as error:
        raise InputError(
            f"The density of {node} came out with shape {tuple(density.shape)}; a registered density must broadcast to "
            f"{shape}."
        ) from error


def register_spectral_density(kernel_class: type[Kernel]) -> Callable[[DensityFunction], DensityFunction]:
    r"""
    Decorator that registers the spectral density of a kernel class.

    The function takes `kernel`, `omega` and `dims` and returns the density of the kernel restricted to the columns
    `dims` (see :func:`marginal_density`; in :func:`spectral_density` they are all its columns). `omega` is float64
    `(..., M, len(dims))`, where leading dimensions, if any, broadcast with ``kernel.batch_shape``; the result is
    `(*kernel.batch_shape, M)`, or broadcasts to it. Subclasses inherit the density as long as they do not override
    ``forward``. A later registration replaces an earlier one.

    :param kernel_class: The class.

    Example:
        >>> import torch
        >>> from gpytorch.kernels import Kernel, RBFKernel, ScaleKernel
        >>> from gpytorch_tkrr.features.spectral import register_spectral_density, spectral_density
        >>> class SechKernel(Kernel):
        ...     has_lengthscale = True
        ...     def forward(self, x1, x2, diag=False, **params):
        ...         t = self.covar_dist(x1 / self.lengthscale, x2 / self.lengthscale, diag=diag, **params)
        ...         return 1 / torch.cosh(t)
        >>> @register_spectral_density(SechKernel)
        ... def sech_density(kernel, omega, dims):  # in one dimension
        ...     scale = torch.pi * kernel.lengthscale.double().squeeze(-1)  # (*batch, 1)
        ...     return scale / torch.cosh(scale * omega.squeeze(-1) / 2)
        >>> kernel = ScaleKernel(SechKernel(active_dims=0)) * RBFKernel(active_dims=1)
        >>> spectral_density(kernel, torch.tensor([[0.1, 0.1], [1.0, 2.0]])).detach()
        tensor([2.6008, 0.6067], dtype=torch.float64)
    """
    check_kernel_class(kernel_class)

    def decorator(density: DensityFunction) -> DensityFunction:
        def rule(node: Node, frequencies: Frequencies) -> Tensor:
            kept = [column for column in node.columns if column in frequencies]
            dims = tuple(node.columns.index(column) for column in kept)
            omega = torch.stack(torch.broadcast_tensors(*(frequencies[column] for column in kept)), dim=-1)
            return density(node.kernel, omega, dims)

        register(kernel_class, Density(rule))
        return density

    return decorator


def _density(node: Node, frequencies: Frequencies) -> Tensor:
    """The density of a node restricted to the columns that `frequencies` names."""
    unseen = sorted(set(frequencies) - set(node.columns))
    if unseen:
        raise _no_density(
            node,
            f"it is constant along input columns {unseen}. A sum over different columns has a basis, but no density "
            "in all of them.",
        )
    kind = node.kind
    if isinstance(kind, Density):
        return kind.rule(node, frequencies)
    if kind is Structure.SCALE:
        return node.kernel.outputscale.double().unsqueeze(-1) * _density(node.base(), frequencies)
    if kind is Structure.SUM:
        return reduce(add, (_density(child, frequencies) for child in node.children()))
    if kind is Structure.PRODUCT:
        return _product_density(node, node.children(), frequencies)
    if kind is Structure.COLUMN_PRODUCT:
        return _product_density(node, node.by_column(), frequencies)
    if isinstance(kind, FiniteBasis) or kind is Structure.CONSTANT:
        raise _no_density(node, "it is a finite sum of basis functions, which have no density on their own.")
    if kind is Structure.COLUMN_SUM or isinstance(kind, ColumnByColumn):
        raise _no_density(node, "a sum over different columns has a basis, but no density in all of them.")
    name = type(node.kernel).__name__
    raise _no_density(node, f"none is registered for {name}, and none is inherited through a forward of its own.")


def _no_density(node: Node, reason: str) -> UnsupportedKernelError:
    return unsupported(node, f"has no spectral density: {reason}")


def _restricted_density(kernel: Kernel, omega: Tensor, dims: tuple[int, ...], num_dims: int) -> Tensor:
    if kernel.active_dims is not None and kernel.active_dims.numel() != num_dims:
        raise InputError(
            f"The {type(kernel).__name__} has active_dims={kernel.active_dims.tolist()} and so sees "
            f"{kernel.active_dims.numel()} columns, not {num_dims}. Frequencies are counted after active_dims."
        )
    node = Node(kernel, tuple(range(num_dims)), type(kernel).__name__)
    return node_density(node, {d: omega[:, i] for i, d in enumerate(dims)})


_NEED_NUM_DIMS = (PiecewisePolynomialKernel, ProductStructureKernel)


def _as_omega(omega: Tensor) -> Tensor:
    if not isinstance(omega, Tensor) or omega.dim() != 2 or omega.shape[-1] == 0:
        found = tuple(omega.shape) if isinstance(omega, Tensor) else type(omega).__name__
        raise InputError(f"omega must be a tensor of angular frequencies of shape (M, D); got {found}.")
    if not torch.isfinite(omega).all():
        raise InputError("omega must be finite; it holds NaN or infinite values.")
    return omega.double()


def _known_num_dims(kernel: Kernel) -> int | None:
    """How many columns a kernel sees, as far as its own or its children's settings tell."""
    if kernel.active_dims is not None:
        return kernel.active_dims.numel()
    if kernel.ard_num_dims is not None:
        return kernel.ard_num_dims
    if isinstance(kernel, ScaleKernel):
        return _known_num_dims(kernel.base_kernel)
    if isinstance(kernel, ProductStructureKernel):
        return kernel.num_dims
    if isinstance(kernel, AdditiveKernel | ProductKernel):
        known = [
            _known_num_dims(child) if child.active_dims is None else int(child.active_dims.max()) + 1
            for child in kernel.kernels
        ]
        return max((n for n in known if n is not None), default=None)
    return None


def _lengthscale(kernel: Kernel, dims: Iterable[int]) -> Tensor:
    """Lengthscales of the kept columns, `(*batch, 1, len(dims))`, whether there is one for all or one for each."""
    lengthscale = kernel.lengthscale.double()
    dims = list(dims) if lengthscale.shape[-1] > 1 else [0 for _ in dims]
    return lengthscale[..., dims]


def _gaussian(precision: Tensor, omega: Tensor) -> Tensor:
    r"""
    The density of :math:`\exp(-\tfrac12 \sum_d p_d t_d^2)`.

    :param precision: :math:`p`, `(..., 1, D)`.
    :param omega: `(..., M, D)`.
    """
    return torch.exp(-omega.square() / (2 * precision) + 0.5 * torch.log(2 * math.pi / precision)).prod(dim=-1)


@register_spectral_density(RBFKernel)
def _rbf(kernel: Kernel, omega: Tensor, dims: tuple[int, ...]) -> Tensor:
    return _gaussian(_lengthscale(kernel, dims) ** -2, omega)


@register_spectral_density(MaternKernel)
def _matern(kernel: Kernel, omega: Tensor, dims: tuple[int, ...]) -> Tensor:
    r"""
    .. math:: S = \frac{2^D \pi^{D/2} \Gamma(\nu + D/2) (2 \nu)^\nu}{\Gamma(\nu)} \prod_d \ell_d \,
        \bigl(2 \nu + \|\ell \omega\|^2\bigr)^{-(\nu + D/2)}.
    """
    nu, half = kernel.nu, len(dims) / 2
    lengthscale = _lengthscale(kernel, dims)
    log_constant = half * math.log(4 * math.pi) + math.lgamma(nu + half) - math.lgamma(nu) + nu * math.log(2 * nu)
    squared = (lengthscale * omega).square().sum(dim=-1)  # (*batch, M)
    return math.exp(log_constant) * lengthscale.prod(dim=-1) * (2 * nu + squared) ** (-nu - half)


@register_spectral_density(RQKernel)
def _rational_quadratic(kernel: Kernel, omega: Tensor, dims: tuple[int, ...]) -> Tensor:
    r"""
    A Gamma mixture of Gaussian densities. With :math:`\nu = \alpha - D/2` and :math:`x = \sqrt{2 \alpha}\,
    \|\ell \omega\|`:

    .. math:: S = \frac{2 (2 \pi)^{D/2} \alpha^\alpha}{\Gamma(\alpha)} \prod_d \ell_d \,
        (2 \alpha)^{-\nu} x^\nu K_\nu(x).
    """
    half = len(dims) / 2
    alpha = kernel.alpha.double()  # (*batch, 1)
    lengthscale = _lengthscale(kernel, dims)
    squared = 2 * alpha * (lengthscale * omega).square().sum(dim=-1)  # (*batch, M)
    positive = torch.where(squared > 0, squared, torch.ones_like(squared))
    x = torch.where(squared > 0, positive.sqrt(), torch.zeros_like(squared))  # no 0 / 0 in the gradient of the root
    nu = alpha - half
    log_constant = alpha * torch.log(alpha) - torch.lgamma(alpha) - nu * torch.log(2 * alpha)
    log_constant = log_constant + math.log(2) + half * math.log(2 * math.pi)
    return lengthscale.prod(dim=-1) * torch.exp(log_constant + log_bessel_k(nu, x))


@register_spectral_density(SpectralMixtureKernel)
def _spectral_mixture(kernel: Kernel, omega: Tensor, dims: tuple[int, ...]) -> Tensor:
    r"""
    A product over dimensions of sums over components,
    :math:`\prod_d \sum_q w_q e^{-2 \pi^2 \sigma_{qd}^2 t_d^2} \cos(2 \pi \mu_{qd} t_d)`: one pair of Gaussians, at
    :math:`\pm 2 \pi \mu_{qd}`, per component and dimension.
    """
    weights = kernel.mixture_weights.double()  # (*batch, Q)
    means = 2 * math.pi * kernel.mixture_means.double()[..., list(dims)]  # (*batch, Q, 1, D)
    scales = 2 * math.pi * kernel.mixture_scales.double()[..., list(dims)]
    omega = omega.unsqueeze(-3)  # (..., 1, M, D)
    precision = scales.square()
    bumps = torch.exp(-(omega - means).square() / (2 * precision)) + torch.exp(
        -(omega + means).square() / (2 * precision)
    )
    bumps = 0.5 * math.sqrt(2 * math.pi) / scales * bumps  # (*batch, Q, M, D)
    density = (weights[..., None, None] * bumps).sum(dim=-3).prod(dim=-1)  # (*batch, M)
    return density * weights.sum(dim=-1, keepdim=True) ** (kernel.ard_num_dims - len(dims))


def _piecewise_polynomial(node: Node, frequencies: Frequencies) -> Tensor:
    r"""
    The radial transform over the compact support :math:`r \le 1`, by Gauss-Legendre quadrature of the kernel's own
    profile on enough panels for the highest frequency:

    .. math:: S = \prod_d \ell_d \int_0^1 k(r) g_D(s, r) dr, \qquad s = \|\ell \omega\|, \qquad g_D = 2 \cos(s r),\
        2 \pi r J_0(s r),\ 4 \pi r^2 \operatorname{sinc}(s r).

    The profile depends on the number of columns that the kernel sees, the transform on how many are kept.
    """
    kept = [column for column in node.columns if column in frequencies]
    if len(kept) > 3:
        raise _no_density(node, f"its radial transform is there for 1, 2 or 3 dimensions; these are {len(kept)}.")
    lengthscale = _lengthscale(node.kernel, (node.columns.index(column) for column in kept))
    omega = torch.stack(torch.broadcast_tensors(*(frequencies[column] for column in kept)), dim=-1)
    # the tiny shift keeps the gradient of the root finite at zero
    s = ((lengthscale * omega).square().sum(dim=-1) + 1e-300).sqrt().unsqueeze(-1)  # (*batch, M, 1)

    num_panels = 1 + int(s.detach().max() / 20) if s.numel() else 1
    nodes, weights = (torch.as_tensor(a, device=s.device) for a in np.polynomial.legendre.leggauss(24))
    edges = torch.arange(num_panels, device=s.device).unsqueeze(-1)
    r = ((edges + (nodes + 1) / 2) / num_panels).flatten()
    weights = (weights / (2 * num_panels)).repeat(num_panels)

    unit = PiecewisePolynomialKernel(q=node.kernel.q).to(device=s.device, dtype=torch.float64)
    unit.lengthscale = 1.0
    points = torch.zeros(r.numel(), len(node.columns), dtype=torch.float64, device=s.device)
    points[:, 0] = r
    with torch.no_grad():
        profile = weights * unit.forward(torch.zeros_like(points[:1]), points).squeeze(-2)

    if len(kept) == 1:
        waves = 2 * torch.cos(s * r)
    elif len(kept) == 2:
        waves = 2 * math.pi * r * bessel_j0(s * r)
    else:
        waves = 4 * math.pi * r.square() * torch.sinc(s * r / math.pi)
    density = waves @ profile  # positive but for round-off
    return lengthscale.prod(dim=-1) * density.clamp_min(0.0)


register(PiecewisePolynomialKernel, Density(_piecewise_polynomial))


def _product_density(node: Node, factors: Iterable[Node], frequencies: Frequencies) -> Tensor:
    """
    The density of a product: factors that share columns are taken together, the groups multiply.

    :param node: The product, for error messages.
    """
    factors, multiplier = _flatten(factors)
    groups = _group_by_columns(factors)
    unseen = set(frequencies).difference(*(columns for columns, _ in groups))
    if unseen:
        raise _no_density(node, f"it is constant along input columns {sorted(unseen)}.")
    density = multiplier
    for columns, group in groups:
        kept = {column: omega for column, omega in frequencies.items() if column in columns}
        if kept:
            density = density * _shared_density(node, group, kept)
        else:
            density = reduce(mul, map(_variance, group), density)
    return density


def _flatten(factors: Iterable[Node]) -> tuple[list[Node], Tensor]:
    """Nested products and scales as one list of factors and what multiplies them, `(*batch, 1)`."""
    leaves: list[Node] = []
    multiplier = torch.ones((), dtype=torch.float64)
    pending = list(factors)
    while pending:
        factor = pending.pop(0)
        if factor.kind is Structure.SCALE:
            multiplier = multiplier * factor.kernel.outputscale.double().unsqueeze(-1)
            pending.insert(0, factor.base())
        elif factor.kind is Structure.PRODUCT:
            pending = factor.children() + pending
        elif factor.kind is Structure.CONSTANT:
            multiplier = multiplier * factor.kernel.constant.double()
        else:
            leaves.append(factor)
    return leaves, multiplier


def _group_by_columns(factors: list[Node]) -> list[tuple[set[int], list[Node]]]:
    """Groups of factors that share columns, directly or through others, each with its columns."""
    groups: list[tuple[set[int], list[Node]]] = []
    for factor in factors:
        columns, members = factor.support(), [factor]
        apart = []
        for group in groups:
            if group[0] & columns:
                columns, members = columns | group[0], group[1] + members
            else:
                apart.append(group)
        groups = [*apart, (columns, members)]
    return groups


def _shared_density(node: Node, factors: list[Node], frequencies: Frequencies) -> Tensor:
    """The density of a product of factors that share columns."""
    if len(factors) == 1:
        return _density(factors[0], frequencies)

    for i, factor in enumerate(factors):
        rest = factors[:i] + factors[i + 1 :]
        if factor.kind is Structure.SUM:
            return reduce(add, (_product_density(node, [child, *rest], frequencies) for child in factor.children()))
        if is_a(factor.kernel, PeriodicKernel):
            return _shifted_density(node, factor, rest, frequencies)

    if all(is_a(factor.kernel, RBFKernel) for factor in factors):
        precision: dict[int, Tensor] = {}  # precisions add, column by column
        for factor in factors:
            scales = _lengthscale(factor.kernel, range(len(factor.columns))).unbind(-1)  # each (*batch, 1)
            for column, scale in zip(factor.columns, scales, strict=True):
                precision[column] = precision.get(column, 0) + scale**-2
        return reduce(mul, (_gaussian(precision[c].unsqueeze(-1), w.unsqueeze(-1)) for c, w in frequencies.items()))

    names = " x ".join(type(factor.kernel).__name__ for factor in factors)
    raise _no_density(
        node,
        f"{names} share input columns, where only products of RBF kernels, and of periodic kernels with kernels that "
        "have a density, are known. Use separate active_dims, or a kernel class of your own.",
    )


def _shifted_density(node: Node, periodic: Node, rest: list[Node], frequencies: Frequencies) -> Tensor:
    r"""
    A periodic kernel :math:`\prod_d \sum_j q_j \cos(j \omega_d t_d)` times another kernel: copies of the other density,
    shifted by :math:`\pm j \omega_d` and weighted by :math:`q_j / 2`.
    """
    kept = [column for column in periodic.columns if column in frequencies]
    lengthscale = periodic.kernel.lengthscale.double().squeeze(-2)  # (*batch, 1 or D)
    period = periodic.kernel.period_length.double().squeeze(-2)
    if not kept:
        return _product_density(node, rest, frequencies)

    weights = torch.ones(1, dtype=torch.float64, device=period.device)  # (*batch, H)
    shifts: dict[int, Tensor] = {}
    for column in kept:
        d = periodic.columns.index(column)
        a = 1 / lengthscale[..., d if lengthscale.shape[-1] > 1 else 0]  # (*batch)
        step = 2 * math.pi / period[..., d if period.shape[-1] > 1 else 0]
        q = periodic_variances(a, count_harmonics(a))
        q = torch.cat([q[..., 1:].flip(-1) / 2, q[..., :1], q[..., 1:] / 2], dim=-1)  # (*batch, 2 J + 1)
        j = torch.arange(q.shape[-1], device=q.device) - q.shape[-1] // 2
        shift = step.unsqueeze(-1) * j
        num_old, num_new = weights.shape[-1], q.shape[-1]
        shifts = {c: s.repeat_interleave(num_new, dim=-1) for c, s in shifts.items()}
        shifts[column] = shift.repeat(*[1] * (shift.dim() - 1), num_old)
        weights = (weights.unsqueeze(-1) * q.unsqueeze(-2)).flatten(-2)

    shifted = {}
    for column, omega in frequencies.items():
        moved = omega.unsqueeze(-1) - shifts.get(column, torch.zeros_like(weights)).unsqueeze(-2)  # (*batch, M, H)
        shifted[column] = moved.flatten(-2)
    density = _product_density(node, rest, shifted)  # (*batch, M H)
    num_frequencies = next(iter(frequencies.values())).shape[-1]
    density = density.unflatten(-1, (num_frequencies, weights.shape[-1]))
    return (density * weights.unsqueeze(-2)).sum(dim=-1)


def num_copies(node: Node, columns: Collection[int]) -> int:
    """
    Of how many densities of simple kernels one value of a node's density is made: each harmonic of a periodic factor
    makes a copy of the others.

    :param node: The node.
    :param columns: The columns that are kept.
    """
    kernel, kind = node.kernel, node.kind
    if kind is Structure.SCALE:
        return num_copies(node.base(), columns)
    if kind is Structure.SUM:
        return sum(num_copies(child, columns) for child in node.children())
    if kind is Structure.PRODUCT:
        return math.prod(num_copies(child, columns) for child in node.children())
    if kind is Structure.COLUMN_PRODUCT:
        return math.prod(num_copies(child, columns) for child in node.by_column())
    if not is_a(kernel, PeriodicKernel):
        return 1
    num_kept = len([column for column in node.columns if column in columns])
    return (2 * count_harmonics(1 / kernel.lengthscale) + 1) ** num_kept


def _variance(node: Node) -> Tensor:
    """The value k(0) of a stationary kernel, `(*batch, 1)`: what it contributes where its lag is held at zero."""
    kernel, kind = node.kernel, node.kind
    if kind is Structure.SCALE:
        return kernel.outputscale.double().unsqueeze(-1) * _variance(node.base())
    if kind is Structure.CONSTANT:
        return kernel.constant.double()
    if kind is Structure.SUM:
        return reduce(add, map(_variance, node.children()))
    if kind is Structure.PRODUCT:
        return reduce(mul, map(_variance, node.children()))
    if kind is Structure.COLUMN_PRODUCT:
        return reduce(mul, map(_variance, node.by_column()))
    if not (isinstance(kind, Density) or is_a(kernel, PeriodicKernel)):
        reason = "it is not known to be stationary, so its variance at lag zero may depend on the input."
        raise _no_density(node, reason)
    origin = torch.zeros(1, len(node.columns), dtype=kernel.dtype, device=kernel.device)
    return kernel.forward(origin, origin, diag=True).double()
