r"""A separable kernel as one basis with variances per input dimension.

The CP-weight model needs :math:`k(x, x') = \sigma^2 \prod_d k_d(x_d, x'_d)` with
:math:`k_d(x, x') \approx \sum_j v_{dj}(\theta) \phi_{dj}(x) \phi_{dj}(x')`. A :class:`Mode` holds the functions
:math:`\phi_d`, which never change, and computes the variances :math:`v_d` from the user's kernel object. The outermost
output scale :math:`\sigma^2` is kept apart; scales further inside belong to the modes of the dimensions they multiply.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce

import torch
from gpytorch import kernels
from gpytorch.kernels import Kernel
from torch import Tensor

from ..errors import SizeError, UnsupportedKernelError
from .basis import Basis, ConcatenatedBasis, ConstantBasis, FourierBasis, MonomialBasis, SineBasis
from .bessel import periodic_variances
from .domain import Domain
from .spectral import has_density, marginal_density

#: Number of sines per dimension where the user gives none.
DEFAULT_NUM_BASIS = 20


class Term(ABC):
    """One summand of a one-dimensional kernel: functions of one variable and their prior variances."""

    basis: Basis

    @abstractmethod
    def variances(self) -> Tensor:
        """Prior variances `(M,)`, float64, differentiable in the kernel's raw parameters."""

    @abstractmethod
    def prior_variance(self, x: Tensor) -> Tensor:
        """
        The exact :math:`k_d(x, x)`.

        :param x: Inputs `(...)`.
        :return: `(...)`, or `(1,)` where it does not depend on x.
        """


class SpectralTerm(Term):
    r"""
    Sines with the spectral density of a stationary kernel restricted to one of its columns.

    A kernel over n columns with :math:`k(0) \ne 1` contributes :math:`k(0)^{1/n}` to each of them.

    :param kernel: The kernel.
    :param num_columns: n, the number of columns it sees.
    :param position: Which of them this term stands for.
    :param basis: The sines.
    """

    basis: SineBasis

    def __init__(self, kernel: Kernel, num_columns: int, position: int, basis: SineBasis):
        self.kernel, self.num_columns, self.position, self.basis = kernel, num_columns, position, basis

    def variances(self) -> Tensor:
        omega = self.basis.frequencies.unsqueeze(-1)
        density = marginal_density(self.kernel, omega, (self.position,), num_dims=self.num_columns)
        if self.num_columns == 1:
            return density
        return density * self._at_zero() ** (1 / self.num_columns - 1)

    def prior_variance(self, x: Tensor) -> Tensor:
        return self._at_zero() ** (1 / self.num_columns)

    def _at_zero(self) -> Tensor:
        origin = self.basis.center.new_zeros(1, self.num_columns).to(self.kernel.dtype)
        return self.kernel.forward(origin, origin, diag=True).double().reshape(1)

    def covariance(self, lag: Tensor) -> Tensor:
        """
        The kernel at lags along its column, as a fraction of its value at zero.

        :param lag: `(T,)`.
        :return: `(T,)`, float64.
        """
        ends = lag.new_zeros(lag.shape[0], self.num_columns)
        ends[:, self.position] = lag
        ends = ends.to(self.kernel.dtype)
        return self.kernel.forward(torch.zeros_like(ends), ends, diag=True).double() / self._at_zero()


class ConstantTerm(Term):
    """
    The function 1.

    :param kernel: A ConstantKernel.
    :param share: The constant enters to this power, 1 / n where n columns share it.
    """

    def __init__(self, kernel: kernels.ConstantKernel, share: float = 1.0):
        self.kernel, self.share, self.basis = kernel, share, ConstantBasis()

    def variances(self) -> Tensor:
        return self.kernel.constant.double().reshape(1) ** self.share

    def prior_variance(self, x: Tensor) -> Tensor:
        return self.variances()


class UnseenTerm(Term):
    """
    The function 1 with variance 1, for an input dimension that the kernel does not see.

    :param device: Where the variance lives.
    """

    def __init__(self, device: torch.device):
        self.device, self.basis = device, ConstantBasis()

    def variances(self) -> Tensor:
        return torch.ones(1, dtype=torch.float64, device=self.device)

    def prior_variance(self, x: Tensor) -> Tensor:
        return self.variances()


class LinearTerm(Term):
    """
    The function x - c, where c is the kernel's `center` if it has one, else 0.

    :param kernel: A LinearKernel of one column.
    """

    def __init__(self, kernel: kernels.LinearKernel):
        self.kernel = kernel
        self.basis = MonomialBasis(1, getattr(kernel, "center", 0.0))

    def variances(self) -> Tensor:
        return self.kernel.variance.double().reshape(1)

    def prior_variance(self, x: Tensor) -> Tensor:
        return self.basis(x).squeeze(-1).square() * self.variances()


class PeriodicTerm(Term):
    """
    Harmonics of a fixed period.

    :param kernel: A PeriodicKernel.
    :param position: Which of its columns.
    :param num_harmonics: The number of harmonics, a cosine and a sine each.
    """

    def __init__(self, kernel: kernels.PeriodicKernel, position: int, num_harmonics: int):
        self.kernel, self.position, self.num_harmonics = kernel, position, num_harmonics
        self.basis = FourierBasis(self._pick(kernel.period_length).detach(), num_harmonics)

    def _pick(self, parameter: Tensor) -> Tensor:
        flat = parameter.reshape(-1)
        return flat[min(self.position, flat.numel() - 1)].double()

    def variances(self) -> Tensor:
        q = periodic_variances(1 / self._pick(self.kernel.lengthscale), self.num_harmonics)  # (J + 1,)
        return torch.cat([q[:1], q[1:].repeat_interleave(2)])

    def prior_variance(self, x: Tensor) -> Tensor:
        return torch.ones(1, dtype=torch.float64, device=x.device)


class ScaledTerm(Term):
    """
    Another term times an inner scale.

    :param term: The term.
    :param kernel: A ScaleKernel or ConstantKernel.
    :param share: The scale enters to this power, 1 / n where n columns share it.
    """

    def __init__(self, term: Term, kernel: Kernel, share: float):
        self.term, self.kernel, self.share, self.basis = term, kernel, share, term.basis

    def _scale(self) -> Tensor:
        kernel = self.kernel
        scale = kernel.outputscale if isinstance(kernel, kernels.ScaleKernel) else kernel.constant
        return scale.double().reshape(1) ** self.share

    def variances(self) -> Tensor:
        return self._scale() * self.term.variances()

    def prior_variance(self, x: Tensor) -> Tensor:
        return self._scale() * self.term.prior_variance(x)


class MergedTerm(Term):
    """
    Several terms on the same sines: one basis, variances added.

    :param terms: The terms.
    """

    def __init__(self, terms: Sequence[Term]):
        self.terms, self.basis = tuple(terms), terms[0].basis

    def variances(self) -> Tensor:
        return reduce(torch.add, (term.variances() for term in self.terms))

    def prior_variance(self, x: Tensor) -> Tensor:
        return reduce(torch.add, (term.prior_variance(x) for term in self.terms))


class Mode:
    """
    One input dimension: its functions and their variances.

    :param terms: The summands of the one-dimensional kernel.
    """

    def __init__(self, terms: Sequence[Term]):
        sines = [term for term in terms if isinstance(term.basis, SineBasis)]
        others = [term for term in terms if not isinstance(term.basis, SineBasis)]
        self.terms = (*others, *([MergedTerm(sines)] if len(sines) > 1 else sines))
        self.basis = ConcatenatedBasis(*(term.basis for term in self.terms))

    @property
    def num_functions(self) -> int:
        """M, the number of functions."""
        return self.basis.num_functions

    def variances(self) -> Tensor:
        """Prior variances `(M,)`, float64, differentiable in the kernel's raw parameters."""
        return torch.cat([term.variances() for term in self.terms])

    def prior_variance(self, x: Tensor) -> Tensor:
        """
        The exact :math:`k_d(x, x)` that the functions should represent.

        :param x: Inputs `(...)`.
        :return: `(...)`, float64.
        """
        return reduce(torch.add, (term.prior_variance(x) for term in self.terms)).expand(x.shape)

    def represented_variance(self, x: Tensor) -> Tensor:
        r"""
        :math:`\sum_j v_j \phi_j(x)^2`.

        :param x: Inputs `(...)`.
        :return: `(...)`, float64.
        """
        return self.basis(x).square() @ self.variances()

    def num_basis_for(self, tail: float) -> int:
        """
        How many sines, or functions of a period, a mode needs at the present hyperparameters.

        :param tail: The fraction of a term's prior variance that may be left out.
        """
        return max(_num_needed(term.variances(), tail) for term in self.terms)

    def spectral_terms(self) -> list[SpectralTerm]:
        """The stationary summands, without their scales."""
        found: list[SpectralTerm] = []
        stack: list[Term] = list(self.terms)
        while stack:
            term = stack.pop(0)
            if isinstance(term, SpectralTerm):
                found.append(term)
            elif isinstance(term, ScaledTerm):
                stack.append(term.term)
            elif isinstance(term, MergedTerm):
                stack.extend(term.terms)
        return found


def _num_needed(variances: Tensor, tail: float) -> int:
    """How many of the first functions carry all but a fraction of the variance."""
    left_out = variances.sum() - variances.cumsum(0)
    return int((left_out > tail * variances.sum()).sum()) + 1


@dataclass
class SeparableKernel:
    """
    A kernel tree, read as a scale times a product of one-dimensional kernels.

    :param modes: One :class:`Mode` per input dimension.
    :param scales: The outermost ScaleKernels.
    :param radial: Paths of radial kernels that are used as products of their one-dimensional kernels.
    """

    modes: list[Mode]
    scales: list[kernels.ScaleKernel] = field(default_factory=list)
    radial: list[str] = field(default_factory=list)

    def outputscale(self) -> Tensor:
        """The outermost output scale, a float64 scalar, differentiable."""
        one = torch.ones((), dtype=torch.float64, device=self.scales[0].outputscale.device if self.scales else None)
        return reduce(torch.mul, (scale.outputscale.double().reshape(()) for scale in self.scales), one)


def separate(kernel: Kernel, domain: Domain, num_basis: int | Sequence[int], num_dims: int) -> SeparableKernel:
    """
    Read a kernel tree as a product of one-dimensional kernels, or raise an error that names the node in the way.

    :param kernel: A GPyTorch kernel.
    :param domain: The box.
    :param num_basis: Number of sines, for all dimensions or for each.
    :param num_dims: D, the number of input dimensions.

    Example:
        >>> from gpytorch.kernels import RBFKernel, ScaleKernel
        >>> from gpytorch_tkrr import Domain
        >>> from gpytorch_tkrr.features.separable import separate
        >>> separable = separate(ScaleKernel(RBFKernel(ard_num_dims=2)), Domain(0.0, 2.0), 5, num_dims=2)
        >>> [tuple(mode.variances().shape) for mode in separable.modes]
        [(5,), (5,)]
    """
    sizes = count_per_dimension(num_basis, num_dims)
    center, half_width = domain.sides(num_dims)
    sines = [SineBasis(c, w, m) for c, w, m in zip(center, half_width, sizes, strict=True)]
    scales: list[kernels.ScaleKernel] = []
    columns = _columns(kernel, tuple(range(num_dims)))
    path, core = type(kernel).__name__, kernel
    while _is(core, kernels.ScaleKernel):
        _check_batch(core, path)
        scales.append(core)
        core = core.base_kernel
        path += ".base_kernel"
    splitter = _Splitter(sines)
    terms = splitter.split(core, columns, path)
    modes = [Mode(terms.get(d, [UnseenTerm(center.device)])) for d in range(num_dims)]
    return SeparableKernel(modes, scales, splitter.radial)


def num_basis_needed(kernel: Kernel, domain: Domain, most: Sequence[int], tail: float) -> list[int]:
    """
    How many functions each mode needs at the present hyperparameters.

    :param kernel: The kernel.
    :param domain: The box.
    :param most: No more than these.
    :param tail: The fraction of the prior variance of a mode that may be left out.
    """
    return [mode.num_basis_for(tail) for mode in separate(kernel, domain, most, len(most)).modes]


def count_per_dimension(num_basis: int | Sequence[int], num_dims: int) -> list[int]:
    """
    The number of sines of each dimension, checked.

    :param num_basis: One number for all dimensions, or one for each.
    :param num_dims: D.
    """
    sizes = [num_basis] * num_dims if isinstance(num_basis, int) else list(num_basis)
    if len(sizes) != num_dims:
        raise SizeError(f"num_basis has {len(sizes)} entries but there are {num_dims} input dimensions.")
    if min(sizes) < 1:
        raise SizeError(f"num_basis must be at least 1 in every dimension; got {num_basis}.")
    return sizes


def _is(kernel: Kernel, kernel_class: type[Kernel]) -> bool:
    """Whether a kernel is of a class, or of a subclass (of sampled parameters) that has no `forward` of its own."""
    return isinstance(kernel, kernel_class) and type(kernel).forward is kernel_class.forward


def _columns(kernel: Kernel, columns: tuple[int, ...]) -> tuple[int, ...]:
    """The columns a kernel sees of those offered to it."""
    return columns if kernel.active_dims is None else tuple(columns[i] for i in kernel.active_dims.tolist())


def _check_batch(kernel: Kernel, path: str) -> None:
    if len(kernel.batch_shape):
        raise UnsupportedKernelError(
            f"{path}: {type(kernel).__name__} has batch_shape {tuple(kernel.batch_shape)}; a CP-weight model takes one "
            "kernel. Fit one model per batch entry."
        )


class _Splitter:
    """Walks a kernel tree and collects the terms of each input dimension."""

    def __init__(self, sines: list[SineBasis]):
        self.sines = sines
        self.radial: list[str] = []

    def split(self, kernel: Kernel, columns: tuple[int, ...], path: str) -> dict[int, list[Term]]:
        """
        :param kernel: A node, whose own `active_dims` have been applied.
        :param columns: The input dimensions it sees.
        :param path: Where it stands in the tree, for messages.
        """
        _check_batch(kernel, path)
        if _is(kernel, kernels.ScaleKernel):  # repeats its child's active_dims: they are applied already
            return _scaled(self.split(kernel.base_kernel, columns, f"{path}.base_kernel"), kernel)
        if _is(kernel, kernels.ProductKernel):
            return self._product(kernel, columns, path)
        if _is(kernel, kernels.AdditiveKernel):
            return self._sum(kernel, columns, path)
        if _is(kernel, kernels.ProductStructureKernel):
            base = kernel.base_kernel
            parts = (self.split(base, (d,), f"{path}.base_kernel") for d in _columns(base, columns))
            return reduce(lambda left, right: {**left, **right}, parts, {})
        if _is(kernel, kernels.ConstantKernel):
            return {d: [ConstantTerm(kernel, 1 / len(columns))] for d in columns}
        if _is(kernel, kernels.PeriodicKernel):
            harmonics = [-(-self.sines[d].num_functions // 2) for d in columns]
            return {d: [PeriodicTerm(kernel, i, harmonics[i])] for i, d in enumerate(columns)}
        if isinstance(kernel, kernels.LinearKernel):
            if len(columns) > 1:
                raise UnsupportedKernelError(
                    f"{path}: a LinearKernel over {len(columns)} input dimensions is a sum over them, not a product. "
                    "Use one per dimension (active_dims=(d,)), added to that dimension's kernel."
                )
            return {columns[0]: [LinearTerm(kernel)]}
        return self._leaf(kernel, columns, path)

    def _leaf(self, kernel: Kernel, columns: tuple[int, ...], path: str) -> dict[int, list[Term]]:
        if not has_density(kernel, len(columns)):
            raise UnsupportedKernelError(
                f"{path}: {type(kernel).__name__} over input dimensions {list(columns)} is not a product of "
                "one-dimensional kernels with a known basis. Supported are stationary kernels with a spectral density, "
                "ConstantKernel, LinearKernel and PeriodicKernel, their products over dimensions and their sums within "
                "one dimension; see gpytorch_tkrr.anova_kernel for a general-purpose choice."
            )
        if len(columns) > 1 and not isinstance(kernel, (kernels.RBFKernel, kernels.SpectralMixtureKernel)):
            self.radial.append(f"{path}: {type(kernel).__name__}")
        return {d: [SpectralTerm(kernel, len(columns), i, self.sines[d])] for i, d in enumerate(columns)}

    def _product(self, kernel: Kernel, columns: tuple[int, ...], path: str) -> dict[int, list[Term]]:
        result: dict[int, list[Term]] = {}
        constants = [child for child in kernel.kernels if _is(child, kernels.ConstantKernel)]
        for i, child in enumerate(kernel.kernels):
            if child in constants and len(constants) < len(kernel.kernels):
                continue
            for d, terms in self.split(child, _columns(child, columns), f"{path}.kernels[{i}]").items():
                if d in result:
                    if len(columns) == 1 and has_density(kernel, 1):
                        return {columns[0]: [SpectralTerm(kernel, 1, 0, self.sines[columns[0]])]}
                    raise UnsupportedKernelError(
                        f"{path}: two factors of this ProductKernel act on input dimension {d}. A CP-weight model "
                        "takes products over different dimensions; write the factor on this dimension as one kernel."
                    )
                result[d] = terms
        for constant in constants if len(constants) < len(kernel.kernels) else ():
            result = _scaled(result, constant)
        return result

    def _sum(self, kernel: Kernel, columns: tuple[int, ...], path: str) -> dict[int, list[Term]]:
        children = [(child, _columns(child, columns)) for child in kernel.kernels]
        seen = {seen for child, seen in children if not _is(child, kernels.ConstantKernel)} or {columns}
        if len(kernel.kernels) > 1 and (len(seen) > 1 or len(next(iter(seen))) > 1):
            raise UnsupportedKernelError(
                f"{path}: a sum over input dimensions {sorted({d for s in seen for d in s})} is not a product of "
                "one-dimensional kernels. Sums are allowed within one dimension (give every summand active_dims=(d,)), "
                "products over dimensions outside of them, as gpytorch_tkrr.anova_kernel does. For sums over different "
                "dimensions use HilbertKernel."
            )
        (only,) = seen
        terms: list[Term] = []
        for i, (child, _) in enumerate(children):
            part = self.split(child, only, f"{path}.kernels[{i}]")
            if len(kernel.kernels) == 1:
                return part
            terms.extend(part[only[0]])
        return {only[0]: terms}


def _scaled(parts: dict[int, list[Term]], kernel: Kernel) -> dict[int, list[Term]]:
    """Spread an inner scale evenly over the dimensions it multiplies."""
    return {d: [ScaledTerm(term, kernel, 1 / len(parts)) for term in terms] for d, terms in parts.items()}
