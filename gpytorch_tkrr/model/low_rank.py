"""What a model with low-rank weights is made of, and its rows; its posterior is not known here."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import IndexKernel, Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.means import ConstantMean, Mean
from gpytorch.models import GP
from torch import Tensor

from ..bases.basis import Basis
from ..bases.domain import Domain, as_inputs, at_least_single
from ..bases.index_set import as_num_basis
from ..cp.format import WeightFormat
from ..cp.weights import CP
from ..data.parallel import ONE_PROCESS, Processes
from ..data.source import TensorSource, as_source, as_tensor, is_frame
from ..data.training import Summary, TrainingData
from ..errors import (
    ApproximationWarning,
    InputError,
    NotFittedError,
    StalePosteriorWarning,
    UnsupportedKernelError,
)
from ..features.categorical import require_levels
from ..features.expansion import BasisFamily
from ..features.represented import MAX_MISSING, ModeGrid, range_grids
from ..features.separable import DEFAULT_NUM_BASIS, SeparableKernel, count_per_dimension, separate
from ..features.stationary import Sines, as_family
from ..hilbert.kernel import HilbertKernel
from .extrapolation import MARGIN, HeldInputs, TrainingRange
from .likelihoods.base import Observation
from .likelihoods.registry import observe
from .measure import EmpiricalMeasure, Measure
from .posterior import Posterior
from .rollback import rollback_on_error
from .setup import Setup, announce_products, check_inside, check_num_dims, default_kernel, most_functions
from .warp import InputWarp

#: R of :func:`~gpytorch_tkrr.fit_als` where none is given.
DEFAULT_RANK = 10


class LowRankModel(GP):
    """
    Kernel, box, numbers of functions, format of the weights, mean, input warp and training rows of a
    :class:`~gpytorch_tkrr.TKRR`, each given or chosen from the data.

    :param train_x: See :class:`~gpytorch_tkrr.TKRR`, as for all others.
    :param train_y: See there.
    :param likelihood: See there.
    :param kernel: See there.
    :param rank: See there.
    :param num_basis: See there.
    :param domain: See there.
    :param basis: See there.
    :param mean_module: See there.
    :param warp: See there.
    :param categorical: See there.
    :param weights: See there.
    :param missing: See there.
    """

    def __init__(
        self,
        train_x: Any,
        train_y: Any,
        likelihood: Likelihood,
        *,
        kernel: Kernel | None = None,
        rank: int | None = None,
        num_basis: int | Sequence[int] | None = None,
        domain: Domain | None = None,
        basis: BasisFamily | None = None,
        mean_module: Mean | None = None,
        warp: InputWarp | bool | None = None,
        categorical: Sequence[int | str] = (),
        weights: WeightFormat | None = None,
        missing: Measure | str | None = None,
    ):
        super().__init__()
        observe(likelihood).check()
        if (train_x is None) != (train_y is None):
            raise InputError("Give both train_x and train_y, or neither.")
        self.likelihood = likelihood
        weights = _as_format(rank, weights)
        self.adapts_rank = weights.rank is None
        self.weights = weights if weights.rank is not None else weights.with_rank(DEFAULT_RANK)
        self.num_basis = DEFAULT_NUM_BASIS if num_basis is None else as_num_basis(num_basis)
        self.family = as_family(basis)
        self.adapts_num_basis = num_basis is None and isinstance(self.family, Sines)
        self.limits_num_basis = kernel is None and self.adapts_num_basis
        self.max_num_basis: tuple[int, ...] | None = None  # where it is limited: by distinct values of the columns
        self.mean_module = ConstantMean() if mean_module is None else mean_module
        self.fits_mean = mean_module is None
        if isinstance(kernel, HilbertKernel):
            raise UnsupportedKernelError("A TKRR expands kernels itself: give it the kernel inside, .base_kernel.")
        if kernel is not None and len(categorical):
            raise InputError(
                "categorical is for the default kernel. In a kernel of your own use CategoricalKernel or "
                "IndicatorKernel for such columns."
            )
        self.feature_names = list(train_x.columns) if hasattr(train_x, "columns") else None
        self.categorical = tuple(map(self._column_number, categorical))
        if not (missing is None or missing == "integrate" or isinstance(missing, Measure)):
            raise InputError(
                f"missing must be 'integrate', a Measure such as EmpiricalMeasure(x), or None; got {missing!r}."
            )
        self.missing = missing
        self._measure = missing if isinstance(missing, Measure) else None  # of inputs that are missing
        self._missing_moments: dict[Any, tuple[Tensor, Tensor]] = {}
        self.covar_module = kernel
        self.domain = domain
        self.warp = warp if isinstance(warp, InputWarp) else None
        self.adapts_warp = warp is True
        self.is_flat_outside = kernel is None and domain is None
        self.chooses_kernel = self.is_flat_outside and isinstance(self.family, Sines)
        self.races_warp = self.chooses_kernel and warp is None
        self.train_inputs: tuple[Tensor, ...] | None = None
        self.train_targets: Tensor | None = None
        self.training_range: TrainingRange | None = None
        self.is_stale = False
        self._posterior: Posterior | None = None
        if train_x is not None and train_y is not None:
            self.train_inputs, self.train_targets = self._checked_rows(train_x, train_y)
            summary = self._summarise()
            self.weights.chain(summary.num_dims)  # an order of other inputs is refused
            self._choose(summary)
            self._prepare_observation(summary)
            self.training_range = self._range_of(summary)
            if self.fits_mean:
                self.mean_module.to(self.train_inputs[0])
        elif self.covar_module is not None and self.domain is not None and self._known_num_dims() is not None:
            announce_products(self.separate())

    @property
    def rank(self) -> int:
        """R, or what takes its place in another format."""
        assert self.weights.rank is not None
        return self.weights.rank

    def _column_number(self, column: int | str) -> int:
        """The number of a column that is given by its number, or by its name in a DataFrame."""
        if isinstance(column, str):
            if self.feature_names is None or column not in self.feature_names:
                raise InputError(f"There is no column {column!r} in the training inputs: {self.feature_names}.")
            return self.feature_names.index(column)
        return int(column)

    def _known_num_dims(self) -> int | None:
        if self.domain is not None and self.domain.num_dims is not None:
            return self.domain.num_dims
        return None if self.train_inputs is None else self.train_inputs[0].shape[-1]

    @property
    def observation(self) -> Observation:
        """How the likelihood sees f: see :mod:`gpytorch_tkrr.model.likelihoods.base`."""
        return observe(self.likelihood)

    @property
    def is_fitted(self) -> bool:
        """Whether there is a posterior."""
        return self._posterior is not None

    @property
    def num_dims(self) -> int:
        """D, the number of input dimensions."""
        num_dims = self._known_num_dims()
        if num_dims is None:
            raise NotFittedError(
                "The number of input dimensions is not known yet. Give training data or a Domain with one entry per "
                "dimension, or load a state_dict."
            )
        return num_dims

    def separate(self) -> SeparableKernel:
        """The kernel, read mode by mode at its current hyperparameters."""
        num_dims = self.num_dims
        return self._separate(num_dims, self.domain, self.num_basis)

    def _separate(self, num_dims: int, domain: Domain | None, num_basis: int | tuple[int, ...]) -> SeparableKernel:
        assert self.covar_module is not None and domain is not None
        separable = separate(self.covar_module, domain, num_basis, num_dims, self.family)
        if self._measure is not None:
            for d, mode in enumerate(separable.modes):
                mode.integrate_missing(partial(self._moments_of_missing, d, num_dims))
        return separable

    @torch.no_grad()
    def _moments_of_missing(self, d: int, num_dims: int, basis: Basis) -> tuple[Tensor, Tensor]:
        """Mean and covariance of functions of an input that is missing."""
        assert self._measure is not None
        key = (d, basis.structure, *(tuple(p.reshape(-1).tolist()) for p in basis.parameters()))
        if key not in self._missing_moments:
            if len(self._missing_moments) > 4 * num_dims:
                self._missing_moments.clear()
            warped = lambda x: self._warped(x.double().unsqueeze(-1).expand(-1, num_dims))[:, d]  # noqa: E731
            self._missing_moments[key] = self._measure.moments(d, lambda x: basis(warped(x)))
        return self._missing_moments[key]

    def _warped(self, x: Tensor) -> Tensor:
        """Inputs as the kernel sees them."""
        return x if self.warp is None else self.warp(x)

    def warped(self, x: Tensor) -> Tensor:
        """
        Inputs as box and posterior see them. Where the model has chosen kernel and box itself, columns further outside
        the training range than a tenth of its width are moved there: f is held, since products of linear functions
        would run away.

        :param x: Inputs `(..., D)`.
        """
        if self.is_flat_outside and self.training_range is not None:
            x = self.training_range.nearest(x, MARGIN)
        return self._warped(x)

    @property
    def held(self) -> HeldInputs:
        """Inputs as functions of the likelihood see them, which are held outside the training range."""
        return HeldInputs(self.training_range, self.warp)

    def forward(self, x: Tensor) -> MultivariateNormal:
        """
        The prior, lazily.

        :param x: Inputs `(..., n, D)`.
        """
        assert self.covar_module is not None
        return MultivariateNormal(self.mean_module(x), self.covar_module(self._warped(x)))

    def prepare(self, data: Any = None) -> None:
        """
        Choose what has not been given, from the data, once: kernel, input warp, box, numbers of functions. The default
        mean is set to the mean of the targets. The fits do this first; nothing else changes these.

        :param data: As for :func:`~gpytorch_tkrr.fit_als`, or a :class:`~gpytorch_tkrr.Summary`; by default the
            training data. What :meth:`training_data` has read is also centred (:meth:`center`).

        Example:
            >>> import gpytorch, torch, gpytorch_tkrr as tkrr
            >>> model = tkrr.TKRR(None, None, gpytorch.likelihoods.GaussianLikelihood())
            >>> model.prepare((torch.rand(100, 2), torch.ones(100)))
            >>> model.num_dims, model.mean_module.constant.item()
            (2, 1.0)
        """
        data = data if isinstance(data, Summary) else self.training_data(data)
        summary = data if isinstance(data, Summary) else data.summary
        check_num_dims(summary.num_dims, self._known_num_dims())
        self.weights.chain(summary.num_dims)
        with rollback_on_error(self):
            if self.covar_module is None or self.domain is None:
                self._choose(summary)
            else:
                check_inside(self.domain, summary.lower, summary.upper)
                require_levels({d: summary.levels[d] is not None for d in self.separate_for(summary).categorical})
            if self.limits_num_basis:
                self.max_num_basis = most_functions(summary)
            if self.domain is not None and self.domain.num_dims is None:
                self.domain = Domain(*self.domain.sides(summary.num_dims))
            self._prepare_observation(summary)
            if self.fits_mean:
                # A tensor, since GPyTorch would take a float through float32.
                self.mean_module.initialize(constant=torch.tensor(summary.mean, dtype=torch.float64))
            if self.training_range is not None:
                action = "box and kernel were chosen for that range. They are learned from all the same."
                self.training_range.warn(summary.sample, action, summary.stride, stacklevel=5)
            self.training_range = self._range_of(summary)
        if isinstance(data, TrainingData):
            self.center(data)

    def separate_for(self, summary: Summary) -> SeparableKernel:
        """
        As :meth:`separate`, also where only the data tell the number of input dimensions.

        :param summary: The data.
        """
        return self._separate(summary.num_dims, self.domain, self.num_basis)

    def _range_of(self, summary: Summary) -> TrainingRange:
        """What the model has seen of each column; also the distribution of missing values, the first time."""
        if self.missing == "integrate" and self._measure is None:
            self._measure = EmpiricalMeasure(summary.sample)
        seen = {d: summary.levels[d] for d in self.separate_for(summary).categorical}
        levels = {d: values for d, values in seen.items() if values is not None}
        return TrainingRange(summary.lower, summary.upper, summary.variance, levels, summary.ends)

    def _choose(self, summary: Summary) -> None:
        """Kernel, warp, box and counts from the data, where none were given; warnings about what does not fit."""
        dtype = None if self.train_inputs is None else self.train_inputs[0].dtype
        given = Setup(
            self.covar_module,
            self.domain,
            self.warp,
            self.num_basis,
            self.family,
            self.categorical,
            self._outputs(summary.num_dims),
        )
        chosen = given.completed(
            summary, adapts_warp=self.adapts_warp, adapts_num_basis=self.adapts_num_basis, dtype=dtype
        )
        self.warp, self.covar_module, self.domain = chosen.warp, chosen.kernel, chosen.domain
        self.num_basis = chosen.num_basis
        assert self.domain is not None
        check_inside(self.domain, summary.lower, summary.upper)
        announce_products(self.separate())
        self.warn_if_missing(summary.lower, summary.upper)

    def _prepare_observation(self, summary: Summary) -> None:
        """What the likelihood has to choose from the data."""
        dtype = None if self.train_inputs is None else self.train_inputs[0].dtype
        self.observation.prepare(summary, lambda variance: default_kernel(summary, variance, dtype, self.categorical))

    def resize(
        self,
        *,
        domain: Domain | None = None,
        num_basis: int | Sequence[int] | None = None,
        rank: int | None = None,
    ) -> None:
        """
        Change the box, the numbers of functions or the rank. A posterior that the model holds is then stale: it keeps
        its own functions until the next fit.

        :param domain: The new box, which must hold the training inputs; None to keep the present one.
        :param num_basis: Numbers of sines, for all dimensions or for each; None to keep them.
        :param rank: R; None to keep it.

        Example:
            >>> import gpytorch, torch, gpytorch_tkrr as tkrr
            >>> model = tkrr.TKRR(torch.rand(9, 2), torch.rand(9), gpytorch.likelihoods.GaussianLikelihood(), rank=2)
            >>> model.resize(rank=3, num_basis=5)
            >>> model.rank, model.num_basis
            (3, 5)
        """
        counts = self.num_basis if num_basis is None else as_num_basis(num_basis)
        weights = self.weights if rank is None else self.weights.with_rank(rank)
        is_same = (counts, weights.rank) == (self.num_basis, self.rank) and domain is None
        num_dims = self._known_num_dims()
        if num_dims is not None:
            count_per_dimension(counts, num_dims)
        if domain is not None:
            check_num_dims(domain.num_dims, num_dims, "box has")
            if self.train_inputs is not None:
                rows = as_inputs(self.train_inputs[0])
                check_inside(domain, rows.amin(0), rows.amax(0))
        self.domain = self.domain if domain is None else domain
        self.num_basis, self.weights = counts, weights
        self.is_stale = self.is_stale or (self.is_fitted and not is_same)

    def warn_if_missing(self, lower: Tensor, upper: Tensor) -> None:
        """
        Say so if the basis represents the kernel poorly over the range of the data.

        :param lower: Smallest inputs `(D,)`.
        :param upper: Largest inputs `(D,)`.
        """
        with torch.no_grad():
            grids = range_grids(lower, upper)
            modes = zip(self.separate().modes, grids, strict=True)
            missing = [float(ModeGrid(mode, grid).missing().mean()) for mode, grid in modes]
        poor = [d for d, value in enumerate(missing) if value > MAX_MISSING]
        if poor:
            worst = max(poor, key=lambda d: missing[d])
            warnings.warn(
                f"The basis represents only {1 - missing[worst]:.0%} of the kernel's variance in input dimension "
                f"{worst} (poor in dimensions {poor}): the lengthscale is too long for the box, or too short for "
                f"num_basis={self.num_basis}. Set the lengthscale to suit the data, enlarge the Domain, or increase "
                "num_basis.",
                ApproximationWarning,
                stacklevel=5,
            )

    # Data

    def _outputs(self, num_dims: int) -> IndexKernel | None:
        """The covariance of several outputs, where the last of the columns is the number of the output."""
        return None

    def as_inputs(self, x: Any) -> Tensor:
        """
        Inputs as a tensor. The columns of a DataFrame are found by their names, where the model has seen names.

        :param x: A tensor, an array or a DataFrame of numbers.
        """
        if hasattr(x, "columns") and self.feature_names is not None:
            missing = [name for name in self.feature_names if name not in list(x.columns)]
            if missing:
                raise InputError(
                    f"The table has no column {missing[0]!r}; the model was made with {self.feature_names}."
                )
            x = x[self.feature_names]
        return x if isinstance(x, Tensor) else as_tensor(np.asarray(x) if isinstance(x, (list, tuple)) else x)

    def _checked_rows(self, x: Any, y: Any) -> tuple[tuple[Tensor], Tensor]:
        """Inputs and targets as the model keeps them."""
        return _checked(x, y, allow_missing=self.missing is not None)

    def mode_inputs(self, x: Tensor) -> Tensor:
        """
        Inputs with one column for each mode.

        :param x: Inputs `(n, D)`.
        """
        return x

    def _source(self) -> Any:
        assert self.train_inputs is not None and self.train_targets is not None
        self.observation.check_rows(len(self.train_targets))
        weight = self.observation.row_weights(len(self.train_targets))
        return TensorSource(self.train_inputs[0], self.train_targets, weight)

    def training_data(self, data: Any = None, processes: Processes = ONE_PROCESS, *, memory: int = 0) -> TrainingData:
        """
        The data of a fit, read and checked, targets mapped to numbers. The model is not changed.

        :param data: As for :func:`~gpytorch_tkrr.fit_als`; what has been read already is returned.
        :param processes: The processes that take part, each with rows of its own.
        :param memory: Bytes that may be used to keep the rows.
        """
        if isinstance(data, TrainingData):
            return data
        if data is None and self.train_inputs is None:
            raise InputError("The model holds no training data. Pass data=(x, y), or call set_train_data first.")
        has_weights = isinstance(data, tuple) and len(data) == 3
        if data is not None and self.observation.has_own_rows and not has_weights:
            raise InputError(
                "The likelihood has a value for each of its own rows, which data=(x, y) cannot be matched with. Pass "
                f"them too, in the place of row weights: data=(x, y, {self.observation.row_part})."
            )
        source = self._source() if data is None else as_source(data)
        parameter = next(self.parameters(), None)
        device = None if parameter is None else parameter.device
        observation = self.observation
        training = TrainingData(
            source,
            targets=observation.encode,
            processes=processes,
            device=device,
            memory=memory,
            allow_missing=self.missing is not None,
        )
        observation.check_rows(training.summary.num_rows)
        return training

    def _summarise(self) -> Summary:
        """The summary of the model's own training data."""
        allowed = self.missing is not None
        return TrainingData(self._source(), targets=self.observation.encode, allow_missing=allowed).summary

    def center(self, training: TrainingData) -> None:
        """
        Let rows be seen as the weights see them: mean removed, targets of unit variance, inputs warped.

        :param training: As :meth:`training_data` returns them.
        """
        check_num_dims(training.summary.num_dims, self._known_num_dims())
        training.center(self._mean, self.warp)

    @torch.no_grad()
    def _mean(self, x: Tensor) -> Tensor:
        parameter = next(self.mean_module.parameters(), x)
        return self.mean_module(x.to(parameter.dtype)).double()

    def set_train_data(self, inputs: Any = None, targets: Any = None, strict: bool = True) -> None:
        """
        Replace the training data. A posterior that the model holds is then stale: fit again.

        :param inputs: New inputs `(N, D)`.
        :param targets: New targets `(N,)`.
        :param strict: Whether shape, dtype and device must be those of the old data.
        """
        old_x = self.train_inputs[0] if self.train_inputs is not None else None
        x = old_x if inputs is None else inputs[0] if isinstance(inputs, (tuple, list)) else self.as_inputs(inputs)
        y = self.train_targets if targets is None else targets
        if x is None or y is None:
            raise InputError("Give both inputs and targets.")
        (x,), y = self._checked_rows(x, y)
        for name, old, new in (("inputs", old_x, x), ("targets", self.train_targets, y)):
            if strict and old is not None and (old.shape, old.dtype, old.device) != (new.shape, new.dtype, new.device):
                raise RuntimeError(
                    f"Cannot modify shape, dtype or device of {name} (expected {tuple(old.shape)}, {old.dtype}, "
                    f"{old.device}; found {tuple(new.shape)}, {new.dtype}, {new.device}). Pass strict=False."
                )
        if self.domain is not None:
            rows = as_inputs(self.mode_inputs(x), allow_missing=self.missing is not None)
            lower, upper = (torch.where(rows.isnan(), end, rows) for end in (torch.inf, -torch.inf))
            check_inside(self.domain, lower.amin(0), upper.amax(0))
        with rollback_on_error(self):
            self.train_inputs, self.train_targets = (x,), y
            if self.domain is None or self.covar_module is None:
                self._choose(self._summarise())
        if self.is_fitted and not self.is_stale:
            self.is_stale = True
            warnings.warn(
                "The training data of a fitted model were changed: its posterior is that of the old data until the "
                "next fit.",
                StalePosteriorWarning,
                stacklevel=2,
            )

    def append_train_data(self, x: Any, y: Any) -> None:
        """
        Add rows to the training data. A posterior that the model holds is then stale; `new_rows` of
        :func:`~gpytorch_tkrr.fit_als` adds and fits at once.

        :param x: Inputs `(n, D)`.
        :param y: Targets `(n,)`.
        """
        (x,), y = self._checked_rows(self.as_inputs(x), y)
        if self.train_inputs is None and self.is_fitted:
            raise InputError(
                "The model holds no training rows to add to: it was fitted to those of a source. Fit it with data= to "
                "a source that has the old rows and the new ones."
            )
        if self.train_inputs is not None and self.train_targets is not None:
            if x.shape[-1] != self.train_inputs[0].shape[-1]:
                raise InputError(
                    f"The new rows have {x.shape[-1]} columns; the training data have {self.train_inputs[0].shape[-1]}."
                )
            x = torch.cat([self.train_inputs[0], x.to(self.train_inputs[0])])
            y = torch.cat([self.train_targets, y.to(self.train_targets)])
        self.set_train_data(x, y, strict=False)


def _as_format(rank: int | None, weights: WeightFormat | None) -> WeightFormat:
    if weights is None:
        return CP(rank)
    if not isinstance(weights, WeightFormat):
        raise InputError(f"weights must be a format such as CP(10) or TensorTrain(4); got {weights!r}.")
    if rank is not None:
        raise InputError(f"rank={rank} is short for weights=CP({rank}): give one of rank and weights.")
    return weights


def _checked(x: Any, y: Any, *, allow_missing: bool = False) -> tuple[tuple[Tensor], Tensor]:
    x, y = (as_tensor(part) if isinstance(part, np.ndarray) or is_frame(part) else part for part in (x, y))
    as_inputs(x, allow_missing=allow_missing)
    if not x.is_floating_point():
        raise InputError(f"Inputs must be floating-point tensors; got {x.dtype}. Use x.double().")
    x = x.unsqueeze(-1) if x.dim() == 1 else x
    if not isinstance(y, Tensor):
        raise InputError(f"Targets must be a tensor, an array or a column of a DataFrame; got a {type(y).__name__}.")
    if x.dim() != 2 or y.shape not in (x.shape[:1], (x.shape[0], 1)):
        shapes = f"{tuple(x.shape)} and {tuple(y.shape)}"
        raise InputError(f"Inputs must have shape (N, D) and targets (N,); got {shapes}.")
    if y.is_complex():
        raise InputError(f"Targets must be real numbers; got {y.dtype}.")
    y = y.reshape(-1)
    if not torch.isfinite(y).all():
        first = int((~torch.isfinite(y)).nonzero()[0, 0])
        raise InputError(f"The targets hold NaN or infinite values (the first is in row {first}). Drop these rows.")
    return (at_least_single(x.detach()),), at_least_single(y.detach())


def require_low_rank(model: object, caller: str) -> None:
    """
    Refuse what is no :class:`LowRankModel`.

    :param model: What was given.
    :param caller: The function that it was given to.

    Example:
        >>> import gpytorch, gpytorch_tkrr as tkrr
        >>> from gpytorch_tkrr.model.low_rank import require_low_rank
        >>> require_low_rank(tkrr.TKRR(None, None, gpytorch.likelihoods.GaussianLikelihood()), "fit_als")
    """
    if not isinstance(model, LowRankModel):
        raise InputError(
            f"{caller} takes a TKRR; got a {type(model).__name__}. An ExactGP, also one with a HilbertKernel, is "
            "trained by its marginal likelihood in a loop; a fitted estimator holds its TKRR as model_."
        )
