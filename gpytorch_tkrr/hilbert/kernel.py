"""The Hilbert-space feature kernel."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel
from gpytorch.models.exact_prediction_strategies import DefaultPredictionStrategy
from gpytorch.module import RandomModuleMixin
from gpytorch.utils.memoize import clear_cache_hook
from linear_operator.operators import DiagLinearOperator, LinearOperator, MatmulLinearOperator
from torch import Tensor

from ..errors import (
    ApproximationWarning,
    DomainError,
    OutOfDomainWarning,
    SizeError,
    TKRRError,
    UnsupportedKernelError,
)
from ..features.box import MAX_MISSING, choose_basis
from ..features.domain import Domain, as_inputs, as_rows
from ..features.expansion import Box, Expansion, Sines, expand_child
from ..features.index_set import MAX_FUNCTIONS, FullTensor, IndexSet, as_num_basis
from .gram import GramCache
from .lazy_operators import HilbertCrossLinearOperator, RefusedLinearOperator
from .operator import HilbertLinearOperator
from .prediction import HilbertPredictionStrategy
from .sampled import random_twin, reject_failed_steps

_NUM_PROBES = 64


class HilbertKernel(Kernel):
    r"""
    A deterministic reduced-rank version of another kernel,

    .. math:: k(x, x') \approx \sum_i v_i(\theta)\, \phi_i(x)\, \phi_i(x'),

    with fixed functions :math:`\phi` on a box and variances :math:`v` taken from the kernel's spectral density. Sums,
    products over dimensions, constant, linear, polynomial and periodic kernels anywhere in the tree keep their
    structure: put the whole tree inside one HilbertKernel rather than adding or multiplying several.

    Parameters, priors and constraints stay on `base_kernel`. In an :class:`~gpytorch.models.ExactGP` the marginal
    likelihood is exact and deterministic for any number of data, and after the first step the data are touched only
    through :math:`\Phi^\top (y - m)`.

    Outside the box, and wherever the functions represent less than 95 % of :math:`k(x, x)`, the missing variance is
    added back as independent variance in eval mode, with one :class:`~gpytorch_tkrr.OutOfDomainWarning`.

    :param base_kernel: The kernel to approximate.
    :param domain: The box; its dimensions are the columns that this kernel sees.
    :param num_basis: Number of sines, for all input dimensions or for each.
    :param index_set: Which products of sines are kept; all of them by default.
    :param active_dims: Input columns that this kernel sees; all by default.

    Example:
        >>> import gpytorch, torch, gpytorch_tkrr as tkrr
        >>> x = torch.rand(100, 2)
        >>> base = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=2))
        >>> kernel = tkrr.HilbertKernel(base, tkrr.Domain.from_data(x, boundary_factor=5.0), num_basis=[16, 16])
        >>> bool((kernel(x).to_dense() - base(x).to_dense()).abs().max() < 1e-2)
        True

    Reference: Solin & Särkkä (2020), *Hilbert space methods for reduced-rank Gaussian process regression*.
    """

    training: bool

    def __init__(
        self,
        base_kernel: Kernel,
        domain: Domain,
        num_basis: int | Sequence[int] | Tensor,
        *,
        index_set: IndexSet | None = None,
        active_dims: Sequence[int] | Tensor | None = None,
    ):
        super().__init__(active_dims=active_dims)
        if not isinstance(domain, Domain):
            raise TypeError(f"domain must be a gpytorch_tkrr.Domain; got {type(domain).__name__}.")
        self.base_kernel = base_kernel
        self.domain = domain
        self.num_basis = as_num_basis(num_basis)
        self.index_set = FullTensor() if index_set is None else index_set
        if domain.num_dims is not None:
            self.expansion(domain.num_dims)  # an unsupported kernel or a size that does not fit is refused here
        self._cache = _FeatureCache()
        self._warned: set[type[Warning]] = set()
        self._accepted_error = MAX_MISSING

    @classmethod
    def from_tolerance(
        cls,
        base_kernel: Kernel,
        x: Tensor,
        tol: float = 1e-2,
        *,
        active_dims: Sequence[int] | Tensor | None = None,
    ) -> HilbertKernel:
        r"""
        Choose the box and the number of functions from an error bound at the kernel's current parameters.

        :math:`\max |K_\text{approx} - K| \le \text{tol} \cdot k(0)` holds over the range of `x`. Parameters
        that training moves towards longer or shorter lengthscales can need another box: see
        :meth:`approximation_error`.

        :param base_kernel: The kernel to approximate.
        :param x: Inputs `(..., N, D)`, or `(N,)` for one dimension.
        :param tol: The relative error.
        :param active_dims: Input columns that the kernel sees; all by default.
        :raises SizeError: Where more than 4 000 functions would be needed.

        Example:
            >>> import gpytorch, torch, gpytorch_tkrr as tkrr
            >>> x = torch.linspace(0, 1, 50)
            >>> kernel = tkrr.HilbertKernel.from_tolerance(gpytorch.kernels.MaternKernel(nu=2.5), x, tol=1e-3)
            >>> kernel.approximation_error(x) < 1e-3
            True
        """
        columns = as_inputs(x)
        if active_dims is not None:
            columns = columns[:, list(active_dims)]
        domain, num_basis = choose_basis(base_kernel, columns, tol)
        kernel = cls(base_kernel, domain.to(columns.device), num_basis, active_dims=active_dims)
        kernel._accepted_error = max(tol, MAX_MISSING)
        return kernel

    @property
    def is_stationary(self) -> bool:
        return False

    def expansion(self, num_dims: int | None = None) -> Expansion:
        """
        The features and variances.

        :param num_dims: Number of input columns; only needed where the domain broadcasts to any.
        """
        num_dims = self.domain.num_dims if num_dims is None else num_dims
        if num_dims is None:
            raise DomainError("This kernel's domain broadcasts to any number of dimensions: say how many in num_dims.")
        center, half_width = self.domain.sides(num_dims)
        num_basis = (self.num_basis,) * num_dims if isinstance(self.num_basis, int) else self.num_basis
        if len(num_basis) != num_dims:
            raise SizeError(f"num_basis has {len(num_basis)} entries but the inputs have {num_dims} columns.")
        box = Box(tuple(range(num_dims)), center, half_width, num_basis, self.index_set)
        expansion = expand_child(self.base_kernel, box)
        if expansion.num_functions > MAX_FUNCTIONS:
            raise SizeError(
                f"{expansion.num_functions} functions (num_basis {list(num_basis)} with {self.index_set}) are more "
                f"than {MAX_FUNCTIONS}. Use fewer per dimension, a HyperbolicCross or TotalDegree index set, or the "
                "CP-weight model TKRR, whose size is linear in the number of dimensions."
            )
        return expansion

    def approximation_error(self, x: Tensor, *, max_rows: int = 500) -> float:
        r"""
        Measure :math:`\max |K_\text{approx} - K| / \max k(x, x)` on (a subset of) given inputs.

        :param x: Inputs `(..., N, D)`, or `(N,)` for one dimension.
        :param max_rows: At most so many rows, evenly spread and with the extremes of each column, are compared.
        """
        x = as_inputs(x).to(self.dtype).double()  # the base kernel is evaluated in its own precision
        if self.active_dims is not None:
            x = x[:, self.active_dims]
        x = x[_spread_rows(x, max_rows)]
        with torch.no_grad():
            expansion = self.expansion(x.shape[-1])
            features = expansion.features(x)
            approximate = (features * expansion.variances().unsqueeze(-2)) @ features.mT
            # One column more than rows: for equal inputs some sums of kernels go through an inexact root.
            columns = torch.cat([x, x[:1]]).to(self.dtype)
            exact = self.base_kernel(x.to(self.dtype), columns).to_dense()[..., :-1].double()
            scale = exact.diagonal(dim1=-2, dim2=-1).amax(-1)
            error = (approximate - exact).abs().amax((-2, -1))
            return float(torch.where(error == 0, error, error / scale).max())  # k(x, x) may be zero at all inputs

    def forward(
        self, x1: Tensor, x2: Tensor, diag: bool = False, last_dim_is_batch: bool = False, **params: Any
    ) -> Tensor | LinearOperator:
        if last_dim_is_batch:
            raise UnsupportedKernelError(
                "HilbertKernel cannot be the base of an AdditiveStructureKernel or ProductStructureKernel. Put the "
                "structure kernel inside: HilbertKernel(AdditiveStructureKernel(base, num_dims), ...)."
            )
        try:
            same = x1 is x2 or (x1.shape == x2.shape and torch.equal(x1, x2))
            return self._covariance(x1, diag) if same else self._cross_covariance(x1, x2, diag)
        except TKRRError as error:
            if diag:
                raise
            batch_shape = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2], self.batch_shape)
            return RefusedLinearOperator(x1, torch.Size((*batch_shape, x1.shape[-2], x2.shape[-2])), error)

    def _covariance(self, x: Tensor, diag: bool) -> Tensor | LinearOperator:
        expansion = self.expansion(x.shape[-1])
        batch_shape = x.shape[:-2]
        x = _without_copies(x)
        # Inputs that are learned (deep kernels, inducing points) may leave the box while they are trained.
        is_data = self.training and not x.requires_grad
        features, gram_cache = self._evaluate(expansion, x, is_data)
        variances = expansion.variances()
        if self.training and not isinstance(self, RandomModuleMixin):  # proposals of a sampler are not judged
            self._check_approximation(expansion, x, features, variances)
        missing = None if is_data else self._missing_variance(expansion, x, features, variances)
        dtype = torch.promote_types(x.dtype, self.dtype)
        batch_shape = torch.broadcast_shapes(batch_shape, variances.shape[:-1])
        variances = variances.expand(*batch_shape, variances.shape[-1])
        covariance = HilbertLinearOperator(features, variances.to(dtype), gram_cache)
        missing = None if missing is None else missing.expand(*batch_shape, x.shape[-2])
        if diag:
            represented = covariance._diagonal()
            return represented if missing is None else represented + missing.to(dtype)
        return covariance if missing is None else covariance + DiagLinearOperator(missing.to(dtype))

    def _cross_covariance(self, x1: Tensor, x2: Tensor, diag: bool) -> Tensor | LinearOperator:
        as_rows(x1)  # two equal sets of inputs that hold NaN come here too
        expansion = self.expansion(x1.shape[-1])
        dtype = torch.promote_types(x1.dtype, self.dtype)
        variances = expansion.variances()
        if diag:
            products = expansion.features(x1) * expansion.features(x2)
            return (products * variances.unsqueeze(-2)).sum(-1).to(dtype)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in expansion.basis_parameters()):
            weighted = expansion.features(x1) * variances.unsqueeze(-2)
            return MatmulLinearOperator(weighted.to(dtype), expansion.features(x2).mT.to(dtype))
        return HilbertCrossLinearOperator(x1, x2, variances.to(dtype), expansion)

    def prediction_strategy(
        self, train_inputs: Any, train_prior_dist: MultivariateNormal, train_labels: Tensor, likelihood: Any
    ) -> DefaultPredictionStrategy:
        evaluate = partial(self._evaluate_as_training, train_prior_dist.lazy_covariance_matrix)
        return HilbertPredictionStrategy(train_inputs, train_prior_dist, train_labels, likelihood, evaluate)

    def _evaluate_as_training(self, covariance: LinearOperator) -> LinearOperator:
        """The covariance of training data, whatever mode the model is in."""
        clear_cache_hook(covariance)  # a graph that a backward pass has freed must not be used again
        mode = self.training
        self.training = True
        try:
            return covariance.evaluate_kernel()
        finally:
            self.training = mode

    def _evaluate(self, expansion: Expansion, x: Tensor, is_data: bool) -> tuple[Tensor, GramCache | None]:
        """Features, from the cache where inputs and basis have the same content as last time."""
        key = [x, *expansion.basis_parameters()]  # everything that the features depend on
        is_learned = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in key)
        cached = None if is_learned else self._cache.find(key)
        if cached is not None:
            return cached
        self._check_inputs(x, is_data)
        if is_learned:
            return expansion.features(x), None
        with torch.no_grad():
            features = expansion.features(x)
            if self.training:  # function-major in memory: products with one vector run twice as fast
                features = features.mT.contiguous().mT
        gram_cache = GramCache(expansion, x.detach().clone(), features)
        if self.training:
            self._cache.store(key, features, gram_cache)
        return features, gram_cache

    def _check_inputs(self, x: Tensor, is_data: bool) -> None:
        """Refuse inputs that are not finite and, where they are training data, inputs outside the box."""
        rows = as_inputs(x) if is_data else as_rows(x)
        inside = self.domain.contains(rows)
        if is_data and not inside.all():
            outside = (~inside).nonzero()
            dims = sorted(set(outside[:, 1].tolist()))
            raise DomainError(
                f"{int((~inside).any(-1).sum())} of {len(rows)} training inputs lie outside the domain {self.domain}, "
                f"in input dimension(s) {dims}; the first is row {int(outside[0, 0])}: {rows[outside[0, 0]].tolist()}. "
                "Make the domain from these inputs: Domain.from_data(train_x)."
            )

    @torch.no_grad()
    def _check_approximation(self, expansion: Expansion, x: Tensor, features: Tensor, variances: Tensor) -> None:
        if ApproximationWarning in self._warned:
            return
        if x.dim() > 2:
            first = (0,) * (x.dim() - 2)
            x = x[first]
            features = features[first] if features.dim() == x.dim() + len(first) else features
        rows = _spread_rows(x, _NUM_PROBES)
        exact = expansion.prior_variance(x[rows])
        represented = (features[..., rows, :].square() * variances.unsqueeze(-2)).sum(-1)
        error = float(torch.where(exact > 0, (exact - represented).abs() / exact.clamp_min(1e-300), 0.0).max())
        if error <= self._accepted_error:
            return
        self._warned.add(ApproximationWarning)
        few = any(isinstance(leaf, Sines) and _is_truncated(leaf) for leaf, _ in expansion.leaves())
        cause = "too few functions for the lengthscale" if few else "the box is too small for the lengthscale"
        remedy = "raise num_basis" if few else "widen the Domain (a larger boundary_factor)"
        warnings.warn(
            f"HilbertKernel represents the prior variance of its base kernel with a relative error of {error:.2g} at "
            f"the current hyperparameters: {cause}. Use HilbertKernel.from_tolerance, or {remedy}; "
            "kernel.approximation_error(x) measures the error. This is said once per kernel.",
            ApproximationWarning,
            stacklevel=3,
        )

    def _missing_variance(self, expansion: Expansion, x: Tensor, features: Tensor, variances: Tensor) -> Tensor | None:
        """Prior variance that the functions do not represent, where that is a sizeable part; `(..., N)`, or None."""
        represented = (features.square() * variances.unsqueeze(-2)).sum(-1)
        exact = expansion.prior_variance(x)
        missing = exact - represented
        missing = torch.where(missing > self._accepted_error * exact, missing, torch.zeros_like(missing))
        short = missing.detach() > 0
        if not short.any():
            return None
        if OutOfDomainWarning not in self._warned:
            self._warned.add(OutOfDomainWarning)
            center, half_width = self.domain.sides(x.shape[-1])
            position = (x.detach().double() - center).abs() / half_width
            position = position.expand(*short.shape, x.shape[-1])[short]  # (points, D)
            dims = (position.amax(0) > 2 / 3).nonzero().flatten().tolist()
            where = f"near or outside the box in input dimension(s) {dims}" if dims else "inside the box"
            warnings.warn(
                f"At {len(position)} of {short.numel()} inputs, {where}, the functions of HilbertKernel represent less "
                f"than {1 - self._accepted_error:.0%} of the prior variance. The missing part is added as independent "
                f"variance: the mean there tends to the prior mean. The domain is {self.domain}. This is said "
                "once per kernel.",
                OutOfDomainWarning,
                stacklevel=3,
            )
        return missing

    def expand_batch(self, *sizes: Any) -> HilbertKernel:
        return self._with_base(self.base_kernel.expand_batch(*sizes))

    def __getitem__(self, index: Any) -> HilbertKernel:
        if len(self.batch_shape) == 0:
            return self
        return self._with_base(self.base_kernel[index])

    def _with_base(self, base_kernel: Kernel) -> HilbertKernel:
        """This kernel over another base kernel: the domain and active_dims have no batch dimensions to index."""
        if base_kernel is self.base_kernel:
            return self
        kernel = copy.copy(self)
        kernel._modules = {**self._modules, "base_kernel": base_kernel}
        kernel._batch_shape = torch.Size([])
        return kernel

    def __getstate__(self) -> dict[str, Any]:
        return dict(super().__getstate__())  # a shallow copy must not share the dictionary itself

    def to_random_module(self) -> Kernel:
        reject_failed_steps()
        return random_twin(self)


class _FeatureCache:
    """
    Features of the training inputs seen last, found again by content.

    Deep copies of a kernel share it, since samplers copy the whole model at every step; pickles leave it behind.
    """

    def __init__(self) -> None:
        self.content: tuple[list[Tensor], tuple[Tensor, GramCache]] | None = None

    def find(self, key: list[Tensor]) -> tuple[Tensor, GramCache] | None:
        """
        The features and their Gram matrix, or None.

        :param key: Everything that they depend on.
        """
        if self.content is None or not _same_content(self.content[0], key):
            return None
        return self.content[1]

    def store(self, key: list[Tensor], features: Tensor, gram_cache: GramCache) -> None:
        """
        :param key: Everything that the features depend on.
        :param features: `(..., N, M)`.
        :param gram_cache: Their Gram matrix.
        """
        self.content = ([tensor.detach().clone() for tensor in key], (features, gram_cache))

    def __deepcopy__(self, memo: dict[int, Any]) -> _FeatureCache:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _FeatureCache, ()


def _without_copies(x: Tensor) -> Tensor:
    """
    Inputs `(..., N, D)` without batch dimensions that only repeat them; Gaussian processes with sampled
    hyperparameters come with such inputs.
    """
    if x.dim() == 2 or x.requires_grad:
        return x
    first = x[(0,) * (x.dim() - 2)]
    return first if torch.equal(x, first.expand_as(x)) else x


def _same_content(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(
        a is b or (a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b))
        for a, b in zip(left, right, strict=True)
    )


def _spread_rows(x: Tensor, num: int) -> Tensor:
    """Indices of up to `num` rows of `x` `(N, D)`: the extremes of each column, then evenly spread ones."""
    extremes = torch.cat([x.argmin(0), x.argmax(0)])[:num]
    even = torch.linspace(0, len(x) - 1, num - len(extremes), device=x.device).long()
    return torch.cat([extremes, even]).unique()


def _is_truncated(leaf: Sines) -> bool:
    """Whether the density at the highest kept frequency of some dimension is still a sizeable part of its largest."""
    variances = leaf.variances()
    largest = variances.amax(-1)
    indices = leaf.indices
    ends = [variances[..., indices[:, d] == indices[:, d].max()].amax(-1) for d in range(indices.shape[-1])]
    return any(bool((end > 1e-2 * largest).any()) for end in ends)
