"""The Hilbert-space feature kernel."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel, LinearKernel
from gpytorch.models.exact_prediction_strategies import DefaultPredictionStrategy
from gpytorch.module import RandomModuleMixin
from linear_operator.operators import ConstantDiagLinearOperator, DiagLinearOperator, LinearOperator
from torch import Tensor

from ..bases.covariance import Covariance
from ..bases.domain import Domain, as_inputs, as_rows
from ..bases.index_set import MAX_FUNCTIONS, Ellipsoid, FullTensor, IndexSet, as_num_basis
from ..errors import (
    ApproximationWarning,
    DomainError,
    InputError,
    OutOfDomainWarning,
    SizeError,
    TKRRError,
    UnsupportedKernelError,
)
from ..families.map_kernel import FeatureMap
from ..features.box import MAX_CHOSEN_FUNCTIONS, require_categories
from ..features.expansion import BasisFamily, Box, Expansion, expand
from ..features.represented import MAX_MISSING, missing_fraction, missing_variance
from ..features.stationary import Sines, SpectralProducts, as_family
from ..operators.exact import MAX_EXACT_ROWS, ExactLinearOperator
from ..operators.lazy_features import LazyFeatures
from ..operators.lazy_operators import HilbertCrossLinearOperator, RefusedLinearOperator
from ..operators.observer import DataFacts, Observer
from ..operators.operator import HilbertLinearOperator, mean_represented
from .feature_cache import FeatureCache
from .multitask import ReducedRankKernel, evaluate_as_training, keep_structure_of_tasks
from .prediction import HilbertPredictionStrategy
from .sampled import random_twin, reject_failed_steps
from .tolerance import Tolerance
from .transparent import make_transparent

_NUM_PROBES = 64
_INNER = "base_kernel."
_ROUNDING = 1e-10  # of the prior variance: as much is missing by rounding


class HilbertKernel(ReducedRankKernel):
    r"""
    A deterministic reduced-rank version of another kernel,

    .. math:: k(x, x') \approx \sum_i v_i(\theta)\, \phi_i(x)\, \phi_i(x'),

    with fixed functions :math:`\phi` on a box and variances :math:`v` taken from the kernel's spectral density. Sums,
    products over dimensions, constant, linear, polynomial and periodic kernels anywhere in the tree keep their
    structure: put the whole tree inside one HilbertKernel rather than adding or multiplying several.

    Parameters, priors and constraints stay on `base_kernel`. In an :class:`~gpytorch.models.ExactGP` the marginal
    likelihood is exact and deterministic for any number of data, and after the first step the data are touched only
    through :math:`\Phi^\top (y - m)`.

    What the functions do not represent, :math:`\delta(x) = k(x, x) - \sum_i v_i \phi_i(x)^2`, counts as independent
    variance: at each input by itself in eval mode, and with its mean over the rows for the rows that the model is
    trained and conditioned on. So training gains nothing by leaving variance out. If more than 5 % is missing, there is
    an :class:`~gpytorch_tkrr.OutOfDomainWarning` at new inputs, and an :class:`~gpytorch_tkrr.ApproximationWarning` at
    the training rows, once per fit.

    Attributes that this kernel does not have itself are those of `base_kernel`: ``kernel.lengthscale``,
    ``kernel.outputscale`` and their raw parameters are found, and set, where they were before the kernel was wrapped.
    The `state_dict` has the keys of `base_kernel`'s own; box, counts and what they were chosen for travel in its
    metadata.

    :param base_kernel: The kernel to approximate; None with a map that has a kernel of its own.
    :param domain: The box; its dimensions are the columns that this kernel sees.
    :param num_basis: Number of functions, for all input dimensions or for each.
    :param basis: The functions for stationary kernels, by default :class:`~gpytorch_tkrr.Sines`.
    :param index_set: The products of functions to keep; all of them by default.
    :param accepted_missing: The part of the prior variance that the functions may leave out on purpose. Where it is not
        zero the reduced-rank covariance itself is the prior: what is missing does not count at training rows, and at
        new inputs (near the ends of the box and outside) only where it is more than this. For a number of functions
        that is set by what they may cost; lengthscales are then those that suit the functions.
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
        base_kernel: Kernel | None,
        domain: Domain,
        num_basis: int | Sequence[int] | Tensor,
        *,
        basis: BasisFamily | None = None,
        index_set: IndexSet | None = None,
        accepted_missing: float = 0.0,
        active_dims: Sequence[int] | Tensor | None = None,
    ):
        super().__init__(active_dims=active_dims)
        keep_structure_of_tasks()
        if not 0 <= accepted_missing < 1:
            raise ValueError(f"accepted_missing is a part of the prior variance, from 0 to 1; got {accepted_missing}.")
        if not isinstance(domain, Domain):
            raise TypeError(
                f"domain must be a gpytorch_tkrr.Domain; got a {type(domain).__name__}. HilbertKernel.from_tolerance("
                "kernel, x) makes the box from inputs x."
            )
        self.family = as_family(basis)
        if base_kernel is None:
            if not isinstance(self.family, FeatureMap):
                raise TypeError(f"HilbertKernel needs a base kernel: {self.family} has none of its own.")
            base_kernel = self.family.scaled_kernel(domain, as_num_basis(num_basis))
        make_transparent(base_kernel)
        self.base_kernel = base_kernel
        self.domain = domain
        self.index_set = FullTensor() if index_set is None else index_set
        self._num_basis: int | tuple[int, ...] = 1
        self.num_basis = num_basis  # an unsupported kernel or a size that does not fit is refused here
        self._cache = FeatureCache()
        self._tolerance: Tolerance | None = None
        self._is_part_of_exact = False  # a part of a kernel that is evaluated without functions
        self._warned: set[type[Warning]] = set()
        self._is_conditioning = False  # the rows are those that a prediction is conditioned on
        self._is_summed = False  # sums over rows are collected, of functions that stay for a whole step
        self.accepted_missing = accepted_missing

    def extra_repr(self) -> str:
        return f"num_basis={self.num_basis}"

    @classmethod
    def from_tolerance(
        cls,
        base_kernel: Kernel,
        x: Tensor,
        tol: float = 3e-3,
        *,
        bounds: Tensor | None = None,
        basis: BasisFamily | None = None,
        active_dims: Sequence[int] | Tensor | None = None,
    ) -> HilbertKernel:
        r"""
        A box and numbers of functions from an error bound, which holds while hyperparameters are trained.

        :math:`\max |K_\text{approx} - K| \le \text{tol} \cdot \max k(x, x)` over the range of `x`. Whenever the present
        hyperparameters ask for it, box and numbers are chosen again, with headroom, so that it happens a handful of
        times while a model is trained; when they need much less, the basis shrinks. The objective is smooth in between.
        Within samplers (NUTS) the basis stays as it is. While an optimiser takes large steps, a basis of more than
        1 000 functions may be one for a larger error, as far as the noise hides it.

        As soon as a likelihood has told the standard deviations of the noise, :math:`\sigma`, and of the targets, s,
        the bound is :math:`\text{tol} \cdot \min(\max k(x, x), 3 s \sigma)`: with the default the posterior mean is
        off by about 0.01 s at most. Up to 500 training rows, and up to 2 000 where many functions would be needed, the
        model is trained and evaluated with the kernel as it is, which takes no more time then: `is_exact` says so, and
        :meth:`by_functions` is for those who want the functions in any case.

        At most 4 000 functions are used. Where the bound takes more, a smaller error than these permit is not reached:
        what is missing counts as independent variance, and after training one
        :class:`~gpytorch_tkrr.ApproximationWarning` says what would be needed.

        :param base_kernel: The kernel to approximate.
        :param x: Inputs `(..., N, D)`, or `(N,)` for one dimension.
        :param tol: The relative error.
        :param bounds: Lower and upper ends of inputs that are not in `x`, `(2, D)`: where the model is to be evaluated,
            or where new rows will come from.
        :param basis: Which functions stationary kernels get; one whose error is known.
        :param active_dims: Input columns that the kernel sees; all by default.

        Example:
            >>> import gpytorch, torch, gpytorch_tkrr as tkrr
            >>> x = torch.linspace(0, 1, 50)
            >>> kernel = tkrr.HilbertKernel.from_tolerance(gpytorch.kernels.MaternKernel(nu=2.5), x, tol=1e-3)
            >>> kernel.approximation_error(x) < 1e-3
            True
            >>> kernel.lengthscale = 0.05  # reaches the Matern kernel
            >>> kernel.approximation_error(x) < 1e-3
            True
        """
        columns = as_inputs(x)
        if bounds is not None:
            bounds = as_inputs(bounds).to(columns)
            if bounds.shape != (2, columns.shape[-1]):
                raise InputError(
                    f"bounds are the lower and upper ends of the inputs, of shape (2, {columns.shape[-1]}); got "
                    f"{tuple(bounds.shape)}."
                )
            columns = torch.cat([columns, bounds])
        if active_dims is not None:
            columns = columns[:, list(active_dims)]
        require_categories(base_kernel, columns)
        tolerance = Tolerance(columns.amin(0), columns.amax(0), tol)
        domain, num_basis = tolerance.start(base_kernel)
        domain, num_basis = as_family(basis).as_accurate(domain, num_basis, tolerance.half_range)
        kernel = cls(
            base_kernel,
            domain.to(columns.device),
            num_basis,
            basis=basis,
            index_set=Ellipsoid() if isinstance(as_family(basis), Sines) else None,
            active_dims=active_dims,
        )
        kernel._tolerance = tolerance
        expansion = kernel.expansion()
        tolerance.accept(expansion, expansion.covariance().detach())
        return kernel

    @property
    def num_basis(self) -> int | tuple[int, ...]:
        """Number of functions, for all input dimensions or for each."""
        return self._num_basis

    @num_basis.setter
    def num_basis(self, value: int | Sequence[int] | Tensor) -> None:
        old, self._num_basis = self._num_basis, as_num_basis(value)
        if self.domain.num_dims is None:
            return
        try:
            self.expansion(self.domain.num_dims)
        except TKRRError:
            self._num_basis = old
            raise

    @property
    def is_exact(self) -> bool:
        """Whether there are so few rows that the kernel is evaluated as it is, see :meth:`from_tolerance`."""
        return self._is_part_of_exact or (self._tolerance is not None and self._tolerance.is_exact)

    def _evaluates_exactly(self) -> bool:
        return self.is_exact

    @contextmanager
    def by_functions(self) -> Iterator[None]:
        """A context in which the kernel is evaluated by its functions, however few rows there are."""
        tolerance = self._tolerance
        if tolerance is None:
            yield
            return
        before, tolerance.allows_exact = tolerance.allows_exact, False
        try:
            yield
        finally:
            tolerance.allows_exact = before

    def tell_noise(self, prior: Tensor, noise: Tensor, spread: Tensor) -> None:
        """
        Tell how precise the data are; likelihoods of :class:`~gpytorch.models.ExactGP` do so by themselves.

        :param prior: Mean prior variance of the rows, a scalar.
        :param noise: Variance of the noise.
        :param spread: Variance of the residuals.
        """
        if self._tolerance is not None:
            self._tolerance.facts.note(prior.detach(), noise.detach(), spread.detach())

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
        box = Box(tuple(range(num_dims)), center, half_width, num_basis, self.index_set, self.family)
        expansion = expand(self.base_kernel, box)
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
        :param max_rows: Largest number of rows to compare; they are evenly spread and include the extremes of each
            column.
        """
        with self.by_functions():
            self.follow()
        x = as_inputs(x).to(self.dtype).double()  # the base kernel is evaluated in its own precision
        if self.active_dims is not None:
            x = x[:, self.active_dims]
        x = x[_spread_rows(x, max_rows)]
        with torch.no_grad():
            expansion = self.expansion(x.shape[-1])
            features = expansion.features(x)
            approximate = expansion.covariance().between(features, features)
            exact = _dense(self.base_kernel, x.to(self.dtype)).double()
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
            features = self._revise(x1.shape[-1], x1 if self.training and not x1.requires_grad else None)
            same = x1 is x2 or (x1.shape == x2.shape and torch.equal(x1, x2))
            if features is None:
                return self.base_kernel(x1, x2, diag=True) if diag else self._as_it_is(x1, x2, same)
            if same:
                return self._covariance(x1, *features, diag=diag)
            return self._cross_covariance(x1, x2, *features, diag=diag)
        except TKRRError as error:
            if diag:
                raise
            batch_shape = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2], self.batch_shape)
            return RefusedLinearOperator(x1, torch.Size((*batch_shape, x1.shape[-2], x2.shape[-2])), error)

    def _as_it_is(self, x1: Tensor, x2: Tensor, same: bool) -> LinearOperator:
        """The base kernel's own covariance; one that is square has a deterministic likelihood."""
        if not same or x1.shape[-2] > MAX_EXACT_ROWS:
            return self.base_kernel(x1, x2).evaluate_kernel()
        return ExactLinearOperator(_dense(self.base_kernel, x1), observer=self._observer())

    def _observer(self, missing: float = 0.0) -> Observer | None:
        """Hears what likelihoods tell of training rows; proposals of a sampler tell nothing."""
        if self._tolerance is None or not self.training or isinstance(self, RandomModuleMixin):
            return None
        return Observer(self._tolerance.facts, missing)

    def _covariance(self, x: Tensor, expansion: Expansion, prior: Covariance, *, diag: bool) -> Tensor | LinearOperator:
        batch_shape = x.shape[:-2]
        x = _without_copies(x)
        # Inputs that are learned (deep kernels, inducing points) may leave the box while they are trained.
        is_data = self.training and not x.requires_grad
        features = self._evaluate(expansion, x, is_data)
        if self._is_conditioning:
            self.check_approximation(x)
        missing = self._missing_variance(expansion, x, features, prior)
        dtype = torch.promote_types(x.dtype, self.dtype)
        batch_shape = torch.broadcast_shapes(batch_shape, prior.variances.shape[:-1])
        variances = prior.variances.expand(*batch_shape, features.shape[-1])
        part = 0.0
        if self.training and missing is not None:
            part = float((missing.detach() / mean_represented(prior, features).detach().unsqueeze(-1)).max())
        covariance = HilbertLinearOperator(features, variances.to(dtype), prior.mixing, observer=self._observer(part))
        if missing is None:
            return covariance._diagonal() if diag else covariance
        missing = missing.expand(*batch_shape, missing.shape[-1]).to(dtype)
        if diag:
            return covariance._diagonal() + missing
        if self.training:
            return covariance + ConstantDiagLinearOperator(missing, diag_shape=x.shape[-2])
        return covariance + DiagLinearOperator(missing)

    def _cross_covariance(
        self, x1: Tensor, x2: Tensor, expansion: Expansion, prior: Covariance, *, diag: bool
    ) -> Tensor | LinearOperator:
        as_rows(x1)  # two equal sets of inputs that hold NaN come here too
        dtype = torch.promote_types(x1.dtype, self.dtype)
        if diag:
            products = prior.mix(expansion.features(x1)) * prior.mix(expansion.features(x2))
            return (products * prior.variances.unsqueeze(-2)).sum(-1).to(dtype)
        cross = HilbertCrossLinearOperator(x1, x2, prior.variances.to(dtype), prior.mixing, expansion=expansion)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in expansion.basis_parameters()):
            return cross.evaluated()
        return cross

    def prediction_strategy(
        self, train_inputs: Any, train_prior_dist: MultivariateNormal, train_labels: Tensor, likelihood: Any
    ) -> DefaultPredictionStrategy:
        evaluate = partial(evaluate_as_training, [self], train_prior_dist.lazy_covariance_matrix)
        strategy = HilbertPredictionStrategy(
            train_inputs,
            train_prior_dist,
            train_labels,
            likelihood,
            evaluate,
            basis=self.follow,
            is_exact=self._evaluates_exactly,
            counts_missing=self.accepted_missing == 0,
        )
        strategy.tell_noise()
        return strategy

    @contextmanager
    def as_training(self) -> Iterator[None]:
        mode = self.training, self._is_conditioning
        self.training, self._is_conditioning = True, True
        try:
            yield
        finally:
            self.training, self._is_conditioning = mode

    @contextmanager
    def as_summed(self) -> Iterator[None]:
        """Evaluates functions for sums over rows: a basis that is provisional for one step would not be theirs."""
        before, self._is_summed = self._is_summed, True
        try:
            yield
        finally:
            self._is_summed = before

    def follow(self, x: Tensor | None = None) -> Hashable:
        """
        Choose box and counts again where the present hyperparameters ask for it.

        Does nothing for a basis that was given by hand, and for proposals of a sampler.

        :param x: Training inputs `(..., N, D)`, which then belong to the range over which the error bound holds.
        :return: What tells one basis from another.
        """
        if self._tolerance is not None:
            self._revise(len(self._tolerance.lower), x)
        if self.is_exact:
            return tuple(torch.cat([p.detach().flatten().double() for p in self.base_kernel.parameters()]).tolist())
        sides = torch.stack([self.domain.center, self.domain.half_width])
        return self._num_basis, self.family, self.index_set, *sides.flatten().tolist()

    def _revise(self, num_dims: int, x: Tensor | None) -> tuple[Expansion, Covariance] | None:
        """
        The features and the covariance of their weights, on a box that suits the present hyperparameters; None where
        the kernel is evaluated as it is.
        """
        tolerance = None if isinstance(self, RandomModuleMixin) else self._tolerance
        if tolerance is not None and x is not None:
            tolerance.see(x)
        if self.is_exact and (tolerance is None or tolerance.stays_exact(self.base_kernel)):
            return None
        expansion = self.expansion(num_dims)
        prior = expansion.covariance()
        if tolerance is None:
            return expansion, prior
        is_step = x is not None and not (self._is_conditioning or self._is_summed)
        basis = tolerance.revise(self.base_kernel, expansion, prior.detach(), is_step=is_step)
        if basis is not None:
            domain, num_basis = self.family.as_accurate(*basis, tolerance.half_range)
            self.domain = domain.to(self.domain.center.device)
            self.num_basis = num_basis
            expansion = self.expansion(num_dims)
            prior = expansion.covariance()
            tolerance.accept(expansion, prior.detach())
        return None if self.is_exact else (expansion, prior)

    def _evaluate(self, expansion: Expansion, x: Tensor, is_data: bool) -> Tensor | LazyFeatures:
        """Features, from the cache where inputs and basis have the same content as last time."""
        key = [x, *expansion.basis_parameters()]  # with the structure, everything that the features depend on
        is_learned = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in key)
        cached = None if is_learned else self._cache.find(expansion.structure, key)
        if cached is not None:
            return cached
        self._check_inputs(x, is_data)
        if is_learned:
            return expansion.features(x)
        features = LazyFeatures(x.detach().clone(), expansion=expansion)
        if self.training:
            self._cache.store(expansion.structure, key, features)
        return features

    def _check_inputs(self, x: Tensor, is_data: bool) -> None:
        """Refuse inputs that are not finite and, where they are training data, inputs outside the box."""
        rows = as_inputs(x) if is_data else as_rows(x)
        inside = self.domain.contains(rows)
        if is_data and not inside.all():
            outside = (~inside).nonzero()
            dims = sorted(set(outside[:, 1].tolist()))
            raise DomainError(
                f"{int((~inside).any(-1).sum())} of {len(rows)} training inputs lie outside the domain {self.domain}, "
                f"in input dimensions {dims}; the first is row {int(outside[0, 0])}: {rows[outside[0, 0]].tolist()}. "
                "Make the domain from these inputs: Domain.from_data(train_x)."
            )

    def _missing_variance(
        self, expansion: Expansion, x: Tensor, features: Tensor | LazyFeatures, prior: Covariance
    ) -> Tensor | None:
        """
        Prior variance that the functions do not represent: its mean over training rows `(..., 1)`, that of each row
        `(..., N)` in eval mode, or None where it is nowhere more than is ignored.
        """
        if self.training and self.accepted_missing > 0:
            return None
        exact = expansion.prior_variance(x)
        if self.training:
            exact = exact.mean(-1, keepdim=True)
            represented = mean_represented(prior, features).unsqueeze(-1)
        else:
            represented = prior.quadratic(features if isinstance(features, Tensor) else features.to_dense())
        missing = missing_variance(represented, exact, max(self.accepted_missing, _ROUNDING))
        if not self.training:
            self._check_new_inputs(x, missing.detach() > max(self.accepted_missing, self._accepted_error) * exact)
        return missing if bool((missing.detach() > 0).any()) else None

    @property
    def _accepted_error(self) -> float:
        """The part of the prior variance that may be missing before a warning is given."""
        return MAX_MISSING if self._tolerance is None else max(MAX_MISSING, self._tolerance.tol)

    def _check_new_inputs(self, x: Tensor, short: Tensor) -> None:
        """
        Say so, once per fit, where much is missing.

        :param x: New inputs `(..., N, D)`.
        :param short: Where that is, booleans `(..., N)`.
        """
        if OutOfDomainWarning in self._warned or not short.any():
            return
        self._warned.add(OutOfDomainWarning)
        center, half_width = self.domain.sides(x.shape[-1])
        position = (x.detach().double() - center).abs() / half_width
        position = position.expand(*short.shape, x.shape[-1])[short]  # (points, D)
        dims = (position.amax(0) > 2 / 3).nonzero().flatten().tolist()
        where = f"near or outside the box in input dimensions {dims}" if dims else "inside the box"
        warnings.warn(
            f"At {len(position)} of {short.numel()} inputs, {where}, the functions of HilbertKernel represent less "
            f"than {1 - self._accepted_error:.0%} of the prior variance. The missing part is added as independent "
            f"variance: the mean there tends to the prior mean. The domain is {self.domain}. This is said "
            "once per fit.",
            OutOfDomainWarning,
            stacklevel=3,
        )

    @torch.no_grad()
    def check_approximation(self, x: Tensor) -> None:
        """
        Say so, once per fit, where the basis has been left behind by the hyperparameters.

        :param x: Training inputs `(..., N, D)`, the columns that this kernel sees; of a batch the first is looked at.
        """
        if ApproximationWarning in self._warned or self.accepted_missing > 0 or isinstance(self, RandomModuleMixin):
            return
        if self._tolerance is not None and self._tolerance.facts == DataFacts():
            return  # the rows are being counted: another basis, or none at all, may be taken for them
        self._warned.add(ApproximationWarning)
        x = x[(0,) * (x.dim() - 2)]
        rows = x[_spread_rows(x, _NUM_PROBES)]
        expansion = self.expansion(x.shape[-1])
        exact = expansion.prior_variance(rows)
        represented = expansion.covariance().quadratic(expansion.features(rows))
        error = float(missing_fraction(represented, exact).abs().max())
        if error <= self._accepted_error:
            return
        leaves = [leaf.expansion for leaf in expansion.leaves(x)]
        few = any(isinstance(leaf, SpectralProducts) and _is_truncated(leaf) for leaf in leaves)
        cause = "too few functions for the lengthscale" if few else "the box is too small for the lengthscale"
        remedy = "raise num_basis" if few else "widen the Domain (a larger boundary_factor)"
        remedy = f"Use HilbertKernel.from_tolerance, or {remedy}"
        if self._tolerance is not None and self._tolerance.is_limited:
            remedy = (
                f"tol={self._tolerance.tol:g} needs about {self._tolerance.num_needed} functions, more than "
                f"{MAX_CHOSEN_FUNCTIONS}. Ask for a larger tol; or choose by hand with HilbertKernel(kernel, domain, "
                "num_basis, index_set=HyperbolicCross(limit)); or use the CP-weight model TKRR, whose size is linear "
                "in the number of dimensions"
            )
        warnings.warn(
            f"HilbertKernel represents the prior variance of its base kernel with a relative error of {error:.2g} at "
            f"the present hyperparameters ({expansion.num_functions} functions on {self.domain}): {cause}. What is "
            f"missing counts as independent variance. {remedy}; kernel.approximation_error(x) measures the error. This "
            "is said once per fit.",
            ApproximationWarning,
            stacklevel=3,
        )

    def train(self, mode: bool = True) -> HilbertKernel:
        if mode and not self.training:
            self._warned.clear()  # another fit begins
        return super().train(mode)

    def basis(self, num_dims: int) -> Tensor:
        """
        Centre and half width of the box, and number of functions, `(3, D)`, float64.

        :param num_dims: D.
        """
        sides = torch.stack(self.domain.sides(num_dims))
        counts = (self._num_basis,) * num_dims if isinstance(self._num_basis, int) else self._num_basis
        return torch.cat([sides, sides.new_tensor(counts).unsqueeze(0)])

    def set_basis(self, basis: Tensor) -> None:
        """
        Take another box and other counts, and keep them whatever the hyperparameters ask for.

        :param basis: As :meth:`basis` returns it.
        """
        self.keep_basis()
        self.domain = Domain(basis[0], basis[1])
        self.num_basis = basis[2].long()

    def keep_basis(self) -> None:
        """Keep box and counts from now on, whatever the hyperparameters ask for."""
        self._tolerance = None

    @property
    def num_revisions(self) -> int:
        """How often box and counts of :meth:`from_tolerance` have been chosen again."""
        return 0 if self._tolerance is None else self._tolerance.num_revisions

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
        kernel._is_part_of_exact = self.is_exact
        kernel._tolerance = None  # a part of this kernel has the same basis
        return kernel

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """
        The state of `base_kernel`, under the keys that it has when it is not wrapped. Box, counts and, of a kernel with
        a tolerance, what they were chosen for are in the metadata of the dictionary, which :func:`torch.save` keeps.

        :param args: See :meth:`torch.nn.Module.state_dict`.
        :param destination: See there.
        :param prefix: See there.
        :param keep_vars: See there.
        """
        if destination is None:
            destination = OrderedDict()
            destination._metadata = OrderedDict()
        state = super().state_dict(keep_vars=keep_vars)
        inner = {key[len(_INNER) :]: value for key, value in state.items() if key.startswith(_INNER)}
        own = {key: value for key, value in state.items() if not key.startswith((_INNER, "domain."))}
        destination.update({prefix + key: value for key, value in {**own, **inner}.items()})
        for path, facts in state._metadata.items():
            if path.startswith(_INNER):
                destination._metadata[prefix + path[len(_INNER) :]] = facts
        num_basis = self.num_basis if isinstance(self.num_basis, int) else list(self.num_basis)
        sides = {"center": self.domain.center.tolist(), "half_width": self.domain.half_width.tolist()}
        destination._metadata[prefix[:-1]] = {
            **state._metadata[""],
            "num_basis": num_basis,
            "basis": repr(self.family),
            "index_set": self._rule(),
            **sides,
            **({} if self._tolerance is None else {"tolerance": self._tolerance.state()}),
        }
        return destination

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing: Any,
        unexpected: Any,
        errors: Any,
    ) -> None:
        """Takes the keys of the wrapped kernel, with or without box and counts, and those of older versions."""
        if not any(key.startswith(f"{prefix}domain.") for key in state_dict):
            inner = set(self.base_kernel.state_dict())
            own = {name for name in self._buffers if name not in inner}  # active_dims
            for key in [key for key in state_dict if key.startswith(prefix) and key[len(prefix) :] not in own]:
                state_dict[f"{prefix}{_INNER}{key[len(prefix) :]}\0"] = state_dict.pop(
                    key
                )  # two keys may change places
            for key in [key for key in state_dict if key.endswith("\0")]:
                state_dict[key[:-1]] = state_dict.pop(key)
            if "num_basis" in local_metadata:
                self._load_basis(local_metadata, errors)
            elif self._tolerance is not None:
                self._tolerance.forget()
            state_dict.update({f"{prefix}domain.{name}": value for name, value in self.domain.state_dict().items()})
            hidden = {name: value for name, value in self._buffers.items() if name in inner and value is not None}
            state_dict.update({prefix + name: value for name, value in hidden.items()})
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)

    def _load_basis(self, facts: Any, errors: list[str]) -> None:
        sides = (torch.tensor(facts[name], dtype=torch.float64) for name in ("center", "half_width"))
        domain = Domain(*sides)
        if facts.get("basis", repr(Sines())) != repr(self.family):
            errors.append(f"The state is that of a kernel with basis={facts['basis']}; this kernel has {self.family}.")
            return
        own = self._rule()
        if facts.get("index_set", own) != own:
            errors.append(
                f"The state is that of a kernel with index_set={facts['index_set']}; this kernel has {own}. Make it "
                f"with index_set=gpytorch_tkrr.{facts['index_set']}, or with HilbertKernel.from_tolerance where the "
                "other one was made so."
            )
            return
        if domain.num_dims != self.domain.num_dims:
            errors.append(f"The box has {domain.num_dims} dimensions in the state, and {self.domain.num_dims} here.")
            return
        old, self.domain = self.domain, domain.to(self.domain.center.device)
        try:
            self.num_basis = facts["num_basis"]
        except TKRRError as error:
            self.domain = old
            errors.append(str(error))
        if self._tolerance is not None:
            self._tolerance.load_state(facts.get("tolerance"))

    def _rule(self) -> str:
        """Which products are kept, for a `state_dict`; of one input an ellipsoid is all of them."""
        is_line = self.domain.num_dims == 1 and self.index_set == Ellipsoid()
        return repr(FullTensor() if is_line else self.index_set)

    def __getstate__(self) -> dict[str, Any]:
        return dict(super().__getstate__())  # a shallow copy must not share the dictionary itself

    def __setstate__(self, state: dict[str, Any]) -> None:
        keep_structure_of_tasks()  # a pickle may be the first kernel of a process
        super().__setstate__(state)

    def to_random_module(self) -> Kernel:
        reject_failed_steps()
        return random_twin(self)


def _without_copies(x: Tensor) -> Tensor:
    """
    Inputs `(..., N, D)` without batch dimensions that only repeat them; Gaussian processes with sampled
    hyperparameters come with such inputs.
    """
    if x.dim() == 2 or x.requires_grad:
        return x
    first = x[(0,) * (x.dim() - 2)]
    return first if torch.equal(x, first.expand_as(x)) else x


def _dense(kernel: Kernel, x: Tensor) -> Tensor:
    """
    The covariance `(..., N, N)` of a kernel as it is.

    Kernels that evaluate to a root make a sum with others go through an inexact root of those, for equal inputs only:
    one column more than rows avoids it.
    """
    if not any(isinstance(part, LinearKernel) for part in kernel.modules()):
        return kernel(x).to_dense()
    return kernel(x, torch.cat([x, x[..., :1, :]], dim=-2)).to_dense()[..., :-1]


def _spread_rows(x: Tensor, num: int) -> Tensor:
    """Indices of up to `num` rows of `x` `(N, D)`: the extremes of each column, then evenly spread ones."""
    extremes = torch.cat([x.argmin(0), x.argmax(0)])[:num]
    even = torch.linspace(0, len(x) - 1, num - len(extremes), device=x.device).long()
    return torch.cat([extremes, even]).unique()


def _is_truncated(leaf: SpectralProducts) -> bool:
    """Whether the density at the highest kept frequency of some dimension is still a sizeable part of its largest."""
    variances = leaf.variances()
    largest = variances.amax(-1)
    indices = leaf.indices
    ends = [variances[..., indices[:, d] == indices[:, d].max()].amax(-1) for d in range(indices.shape[-1])]
    return any(bool((end > 1e-2 * largest).any()) for end in ends)
