"""The model with low-rank weights as a GPyTorch model."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from gpytorch import settings
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import IndexKernel, Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.means import ConstantMean, Mean
from gpytorch.models import GP
from linear_operator.operators import DiagLinearOperator
from torch import Tensor

from ..bases.basis import Basis
from ..bases.domain import Domain, as_inputs, at_least_single
from ..bases.index_set import as_num_basis
from ..cp.design import Design
from ..cp.format import WeightFormat
from ..cp.penalty import PENALTIES, FrobeniusPenalty, Penalty
from ..cp.weights import CP
from ..data.parallel import ONE_PROCESS, Processes, as_processes
from ..data.source import TensorSource, as_source, as_tensor, is_frame
from ..data.training import Summary, TrainingData
from ..errors import (
    ApproximationWarning,
    InputError,
    NotFittedError,
    OutOfDomainWarning,
    SizeError,
    StalePosteriorWarning,
)
from ..families.map_kernel import FeatureMap
from ..features.categorical import require_levels
from ..features.expansion import BasisFamily
from ..features.represented import MAX_MISSING, ModeGrid, missing_of_modes, range_grids
from ..features.separable import DEFAULT_NUM_BASIS, SeparableKernel, count_per_dimension, separate
from ..features.stationary import Sines, as_family
from .anova import anova_kernel, times_outputs
from .draws import DrawsPosterior
from .extrapolation import MARGIN, HeldInputs, TrainingRange
from .laplace import LaplacePosterior, laplace_blocks
from .likelihoods.base import Observation, observe
from .likelihoods.heteroskedastic import HeteroskedasticObservation, factors_of, log_size
from .log_noise import LogNoise
from .measure import EmpiricalMeasure, Measure
from .missing import spread_of_missing
from .posterior import Posterior, PosteriorCovariance
from .prediction import Prediction
from .rollback import rollback_on_error
from .setup import Setup, announce_products, check_inside, check_num_dims, default_kernel, most_functions
from .warp import InputWarp

#: R of :func:`~gpytorch_tkrr.fit_als` where none is given.
DEFAULT_RANK = 10

#: Posteriors that can be restored from a `state_dict`, by their kind.
POSTERIORS: dict[str, type[Posterior]] = {cls.kind: cls for cls in (LaplacePosterior, DrawsPosterior)}


class TKRR(GP):
    r"""
    Tensor kernel ridge regression: a Gaussian process whose weights on a product basis are a low-rank CP tensor,

    .. math:: f(x) = m(x) + \sum_{r=1}^R \prod_{d=1}^D z_d(x_d)^\top w_{dr}, \qquad z_d = \sqrt{v_d(\theta)}\, \phi_d.

    It is used like an :class:`~gpytorch.models.ExactGP`. In train mode a call returns the prior, in eval mode the
    posterior, once the model has been fitted by :func:`~gpytorch_tkrr.fit_als`. Inputs and targets may have any units.

    :param train_x: Training inputs `(N, D)`, or `(N,)` for one dimension: a tensor, an array or a DataFrame of numbers
        (the latter two as float64). None for a model without data.
    :param train_y: Training targets `(N,)`, likewise.
    :param likelihood: A GPyTorch likelihood. With a BernoulliLikelihood the targets are classes {0, 1} or {-1, +1},
        taken as the numbers -1 and +1: the sign of the response decides (least-squares support vector machine).
    :param kernel: A separable kernel, stored as `covar_module`; by default :func:`~gpytorch_tkrr.anova_kernel`.
    :param rank: R, the number of components, short for ``weights=CP(rank)``. By default
        :func:`~gpytorch_tkrr.fit_gibbs` finds out how many are needed; :func:`~gpytorch_tkrr.fit_als` takes 10.
    :param num_basis: Number of sines, for all dimensions or for each. By default 20, with the default kernel fewer for
        columns with fewer distinct values; :func:`~gpytorch_tkrr.fit_gibbs` then adapts them to the lengthscales that
        it finds.
    :param domain: The box. By default it is chosen from the data and the kernel's lengthscales, once.
    :param basis: Which functions stationary kernels get; by default :class:`~gpytorch_tkrr.Sines`. A map with a kernel
        of its own (:class:`~gpytorch_tkrr.Polynomial` and others) takes the place of the kernel, too.
    :param mean_module: The mean; by default a ConstantMean that a fit sets to the mean of the targets.
    :param warp: A map of the inputs that kernel and box see, not the mean. True for :meth:`InputWarp.from_data` of the
        training inputs, False for none. By default the first :func:`~gpytorch_tkrr.fit_gibbs` decides which columns, if
        any, are predicted better with it, by short chains and training rows held out, where kernel and box are the
        model's own choice and the noise is Gaussian.
    :param missing: What is done with inputs that are NaN: by default they are an error. With ``"integrate"`` they are
        missing, and f is integrated over the distribution of their column among the training rows (a sample of 16 384
        of them where they are more); a Measure such as :class:`~gpytorch_tkrr.UniformMeasure` gives another one. See
        :mod:`gpytorch_tkrr.model.missing` for what is exact.
    :param categorical: The columns that the default kernel takes as categories, whole numbers without an order: their
        numbers, or their names in a DataFrame. A kernel of your own says so itself
        (:class:`~gpytorch_tkrr.CategoricalKernel`).
    :param weights: The format of the weights, by default :class:`~gpytorch_tkrr.CP`; or a
        :class:`~gpytorch_tkrr.TensorTrain`.

    Example:
        >>> import torch, gpytorch
        >>> import gpytorch_tkrr as tkrr
        >>> x = torch.rand(200, 2, dtype=torch.float64)
        >>> y = torch.sin(6 * x[:, 0]) * x[:, 1]
        >>> likelihood = gpytorch.likelihoods.GaussianLikelihood()
        >>> likelihood.noise = 1e-3
        >>> model = tkrr.TKRR(x, y, likelihood, rank=4)
        >>> result = tkrr.fit_als(model, seed=0)
        >>> prediction = likelihood(model.eval()(x))
        >>> bool((prediction.mean - y).abs().max() < 0.1)
        True

    Reference: Wesel & Batselier (2021), *Large-scale learning with Fourier features and tensor decompositions*.
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
        self.races_warp = warp is None and kernel is None and domain is None and isinstance(self.family, Sines)
        self.is_flat_outside = kernel is None and domain is None
        self.train_inputs: tuple[Tensor, ...] | None = None
        self.train_targets: Tensor | None = None
        self.training_range: TrainingRange | None = None
        self.is_stale = False
        self._warned_out_of_domain = False
        self._posterior: Posterior | None = None
        self._fitted_with: tuple[Domain, int | tuple[int, ...]] | None = None  # box and counts of the posterior
        self._loaded: dict[str, Any] | None = None  # of a posterior, until the box has been loaded too
        self._penalty: Penalty = FrobeniusPenalty()
        self.register_load_state_dict_post_hook(_restore_posterior)
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

    # What the model is made of

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

    def separate_as_fitted(self) -> SeparableKernel:
        """The same on the box and with the counts of the posterior, which :meth:`resize` may have left behind."""
        assert self.covar_module is not None and self._fitted_with is not None
        return self._separate(self.num_dims, *self._fitted_with)

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
                stacklevel=4,
            )

    # Data

    def _outputs(self, num_dims: int) -> IndexKernel | None:
        """The covariance of several outputs, where the last of the columns is the number of the output."""
        return None

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
        if self.train_inputs is not None and self.train_targets is not None:
            if x.shape[-1] != self.train_inputs[0].shape[-1]:
                raise InputError(
                    f"The new rows have {x.shape[-1]} columns; the training data have {self.train_inputs[0].shape[-1]}."
                )
            x = torch.cat([self.train_inputs[0], x.to(self.train_inputs[0])])
            y = torch.cat([self.train_targets, y.to(self.train_targets)])
        self.set_train_data(x, y, strict=False)

    # Noise and posterior

    @property
    def observation(self) -> Observation:
        """How the likelihood sees f: see :mod:`gpytorch_tkrr.model.likelihoods.base`."""
        return observe(self.likelihood)

    def noise(self) -> Tensor:
        """The noise variance, a float64 scalar, differentiable; 1 for a likelihood without one."""
        noise = self.observation.noise()
        return torch.ones((), dtype=torch.float64, device=next(self.parameters()).device) if noise is None else noise

    @property
    def is_fitted(self) -> bool:
        """Whether there is a posterior."""
        return self._posterior is not None

    @property
    def posterior(self) -> Posterior:
        """The posterior over the weights; :class:`NotFittedError` before a fit."""
        if self._posterior is None:
            raise NotFittedError("The model has not been fitted. Call gpytorch_tkrr.fit_als(model) first.")
        return self._posterior

    def set_posterior(self, posterior: Posterior, penalty: Penalty | None = None) -> None:
        """
        Hand the model a posterior; done by the fit functions.

        :param posterior: The posterior.
        :param penalty: The penalty it was fitted with, where there is one.
        """
        assert self.domain is not None
        self._fitted_with = copy.deepcopy(self.domain), self.num_basis
        self._hold(posterior)
        self._penalty = penalty if penalty is not None else self._penalty
        self.is_stale = False

    def _hold(self, posterior: Posterior) -> None:
        """Take a posterior, and let the likelihood know of it."""
        self._posterior = posterior
        self.observation.adopt(posterior.parameters, self.held)

    @property
    def factors(self) -> list[Tensor]:
        r"""
        D tensors `(M_d, R)`: weights of :math:`z = \sqrt v \phi`, the outermost output scale left out of v, every
        component spread evenly over the dimensions. With a :class:`~gpytorch_tkrr.TensorTrain` cores `(r, M_d, r')`.
        """
        posterior = self.posterior
        if not isinstance(posterior, LaplacePosterior):
            raise NotFittedError("The model holds draws, not one set of factors: see model.posterior.factors.")
        return posterior.format.shown(posterior.weights.balanced())

    def factors_to_start_from(self) -> LaplacePosterior | None:
        """The result of an earlier :func:`~gpytorch_tkrr.fit_als`, where box and rank are still those of the model."""
        if self._fitted_with is None or not isinstance(self._posterior, LaplacePosterior) or self.domain is None:
            return None
        old, new = (torch.stack(domain.sides(self.num_dims)) for domain in (self._fitted_with[0], self.domain))
        factors = self._posterior.factors
        sizes = [each.shape[-1] for each in factors]
        old_form, num_dims = self._posterior.format, len(factors)
        is_same = old_form.kind == self.weights.kind
        is_same = is_same and list(old_form.chain(num_dims)) == list(self.weights.chain(num_dims))
        is_same = is_same and self.weights.heights(sizes) == [each.shape[-2] for each in factors]
        return self._posterior if is_same and torch.equal(old, new) else None

    def draws(self, x: Any) -> Tensor:
        """
        Whole functions drawn from the posterior, after :func:`~gpytorch_tkrr.fit_gibbs`.

        :param x: Inputs `(..., n, D)`, or `(n,)` for one dimension.
        :return: `(S, ..., n)`: row s is the same function in every call.
        """
        posterior, x = self._draws_posterior(), self.as_inputs(x)
        x = at_least_single(x.unsqueeze(-1) if x.dim() == 1 else x)
        return self._bounded(self.mean_module(x) + posterior.functions(self.warped(x)).to(x.dtype), x)

    @property
    def log_noise(self) -> LogNoise:
        """
        The log variance of the noise as a function of the inputs, after :func:`~gpytorch_tkrr.fit_gibbs` with a
        :class:`~gpytorch_tkrr.HeteroskedasticLikelihood`.
        """
        posterior, observation = self._draws_posterior(), self.observation
        if not isinstance(observation, HeteroskedasticObservation):
            raise InputError(
                f"With a {type(self.likelihood).__name__} the noise is no function of the inputs. Use a "
                "HeteroskedasticLikelihood."
            )
        bases, factors = observation.bases(), factors_of(posterior.parameters)
        own = DrawsPosterior(bases, factors, {}, {}, posterior.chains, {})
        return LogNoise(own, log_size(posterior.parameters), self.held, self.train_inputs)

    def predict(self, x: Any, **rows: Tensor | float) -> Prediction:
        r"""
        The distribution of new observations y, for any likelihood: after :func:`~gpytorch_tkrr.fit_gibbs` the mixture
        over the draws, after :func:`~gpytorch_tkrr.fit_als` that of its Gaussian f. Variance of f that the basis does
        not represent is part of it. Rows outside the range of the training rows are announced, and flagged by
        `extrapolates`; f has at least the variance there that the prior has given f at the edge of the range. Where the
        model has chosen kernel and box itself, f is held from a tenth of the range's width outside on, and goes no
        further beyond the targets than these reach themselves.

        :param x: Inputs `(..., n, D)`, or `(n,)` for one dimension: a tensor, an array or a DataFrame.
        :param rows: What the likelihood needs to know of each row: with a FixedNoiseGaussianLikelihood `noise=`, one
            variance or one for each row `(..., n)`, with a NegativeBinomialLikelihood `exposure=`, likewise. For the
            model's own training inputs it may be left out.

        Example:
            >>> import torch, gpytorch, gpytorch_tkrr as tkrr
            >>> x = torch.rand(100, 2)
            >>> y = torch.sin(6 * x[:, 0]) * x[:, 1]
            >>> model = tkrr.TKRR(x, y, gpytorch.likelihoods.GaussianLikelihood(), rank=3, num_basis=8)
            >>> result = tkrr.fit_gibbs(model, num_draws=20, num_warmup=20, seed=0)
            >>> prediction = model.predict(x)
            >>> prediction.mean.shape, prediction.quantile(torch.tensor([0.05, 0.95])).shape
            (torch.Size([100]), torch.Size([2, 100]))
            >>> prediction.log_prob(y).shape, prediction.sample(5, seed=0).shape
            (torch.Size([100]), torch.Size([5, 100]))
        """
        x = self._checked_inputs(x)
        posterior, known = self._known_posterior(), self.observed_rows(x, **rows)
        if self.training_range is not None:
            self.training_range.warn(x, "the data say nothing there; see `extrapolates` of the prediction.")

        held = self.held

        def components(x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            """Values of f at inputs `(n, D)`, and what is known of the rows there."""
            warped = self.warped(x)
            functions, variances = posterior.components(warped)
            f = self._bounded(self.mean_module(x).double() + functions, x)
            missing = self._missing_variance(warped)
            if missing is not None:
                variances = missing if variances is None else variances + missing
            lost = spread_of_missing(posterior, warped)
            if lost is not None:
                variances = lost if variances is None else variances + lost
            unknown = self._unknown_variance(x)
            if unknown is not None:
                spread = f.var(0, correction=0)
                spread = spread if variances is None else spread + variances
                lacking = (unknown - spread).clamp(min=0)  # (n,), or (S, n)
                variances = lacking if variances is None else variances + lacking
            rows = self.observation.function_rows(held(x), posterior.parameters)
            if variances is not None:
                rows["spread"] = variances
            return self._in_units(x, f, rows)

        is_sample = isinstance(posterior, DrawsPosterior)
        outside = self.extrapolates(x)
        return Prediction(self.observation, components, posterior.parameters, x, known, outside, is_sample=is_sample)

    def _in_units(self, x: Tensor, f: Tensor, rows: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Values of f and what is known of the rows, in the units of the user."""
        return f, rows

    def extrapolates(self, x: Any) -> Tensor:
        """
        Which rows lie outside the range of the training rows, in any column, or have levels never seen, `(..., n)`.

        :param x: Inputs `(..., n, D)`.
        """
        x = self.as_inputs(x)
        if self.training_range is None:
            return torch.zeros_like(x[..., 0], dtype=torch.bool)
        return self.training_range.outside(x).any(-1)

    def observed_rows(self, x: Tensor, **rows: Tensor | float) -> dict[str, Tensor]:
        """
        What the likelihood knows of each row beside inputs and targets.

        :param x: Inputs `(..., n, D)`.
        :param rows: As for :meth:`predict`.
        """
        own = None if self.train_inputs is None else self.train_inputs[0]
        is_training = own is not None and (own.shape, own.dtype) == (x.shape, x.dtype) and torch.equal(own, x)
        return self.observation.rows(x.shape[:-1].numel(), is_training, **rows)

    def class_probabilities(self, x: Tensor) -> Tensor:
        r"""
        The probability of the class 1 with a BernoulliLikelihood, the mean of :meth:`predict`. After
        :func:`~gpytorch_tkrr.fit_gibbs` it is the mean of :math:`\Phi(f_s(x))` over the draws
        (``likelihood(model(x))`` replaces the draws by a Gaussian). After :func:`~gpytorch_tkrr.fit_als` it is the
        probability of a positive response.

        :param x: Inputs `(..., n, D)`.
        :return: `(..., n)`.
        """
        if self.observation.num_classes != 2:
            raise InputError(
                f"Class probabilities need a BernoulliLikelihood; the model has a {type(self.likelihood).__name__}."
            )
        return self.predict(x).mean

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

    def _bounded(self, f: Tensor, x: Tensor) -> Tensor:
        """Values of f, mean included, as :meth:`predict` gives them outside the training range."""
        if not self.is_flat_outside or self.training_range is None or self.observation.has_link:
            return f
        return self.training_range.bounded(f, x)

    def _warped(self, x: Tensor) -> Tensor:
        """Inputs as the kernel sees them."""
        return x if self.warp is None else self.warp(x)

    def thin(self, num_draws: int) -> None:
        """
        Keep evenly spaced draws only, to make the model small.

        :param num_draws: How many to keep.
        """
        posterior = self._draws_posterior()
        if not 1 <= num_draws <= posterior.num_draws:
            raise SizeError(f"num_draws must lie between 1 and {posterior.num_draws}; got {num_draws}.")
        kept = torch.linspace(0, posterior.num_draws - 1, num_draws, device=posterior.device).round().long()
        self._hold(posterior.subset(kept))

    def _draws_posterior(self) -> DrawsPosterior:
        posterior = self.posterior
        if not isinstance(posterior, DrawsPosterior):
            raise NotFittedError("The model holds no draws. Call gpytorch_tkrr.fit_gibbs(model) first.")
        return posterior

    @torch.no_grad()
    def compute_covariance(self, *, data: Any = None, group: Any = None, memory: int = 2 << 30) -> None:
        """
        Compute the posterior covariance around the present weights, in one more pass over the data.

        :param data: As for :func:`~gpytorch_tkrr.fit_als`; by default the training data.
        :param group: As for :func:`~gpytorch_tkrr.fit_als`.
        :param memory: As for :func:`~gpytorch_tkrr.fit_als`.
        """
        posterior = self.posterior
        if not isinstance(posterior, LaplacePosterior):
            raise InputError(
                "The model holds draws of fit_gibbs, whose covariance is known; compute_covariance is for a model "
                "fitted by fit_als."
            )
        training = self.training_data(data, as_processes(group), memory=memory)
        self.center(training)
        separable = self.separate_as_fitted()
        bases = [mode.basis for mode in separable.modes]
        design = Design(training, bases, memory=memory, weights=posterior.format)
        weights = posterior.weights.clone()
        weights.multiply(1 / training.scale)
        noise, outputscale = self.noise() / training.scale**2, separable.outputscale() / training.scale**2
        strength = self._penalty.strength_for(noise, outputscale, weights)
        information = self.observation.information
        posterior.blocks, _ = laplace_blocks(
            design, weights, posterior.covariances, self._penalty, strength, information
        )

    # Calls

    def forward(self, x: Tensor) -> MultivariateNormal:
        """
        The prior, lazily.

        :param x: Inputs `(..., n, D)`.
        """
        assert self.covar_module is not None
        return MultivariateNormal(self.mean_module(x), self.covar_module(self._warped(x)))

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

    def __call__(self, x: Any, **kwargs: Any) -> MultivariateNormal:
        x = self._checked_inputs(x, finite=not self.training)
        if self.training:
            if settings.debug.on() and self.train_inputs is not None and not torch.equal(x, self.train_inputs[0]):
                raise RuntimeError(
                    "You must train on the training inputs! Other inputs are predicted at after model.eval()."
                )
            return self.forward(x)
        posterior = self._known_posterior()
        warped = self.warped(x)
        mean = self._bounded(self.mean_module(x) + posterior.functions(warped).to(x.dtype), x).mean(0)
        covariance = PosteriorCovariance(warped.to(x.dtype), posterior=posterior)
        missing = self._missing_variance(warped)
        if missing is not None:
            covariance = covariance + DiagLinearOperator(missing.to(x.dtype))
        lost = None if self._measure is None else spread_of_missing(posterior, warped.reshape(-1, x.shape[-1]))
        if lost is not None:
            covariance = covariance + DiagLinearOperator(lost.mean(0).reshape(x.shape[:-1]).to(x.dtype))
        unknown = self._unknown_variance(x)
        if unknown is not None:
            lacking = (unknown.to(x.dtype) - covariance.diagonal(dim1=-1, dim2=-2)).clamp(min=0)
            covariance = covariance + DiagLinearOperator(lacking)
        return MultivariateNormal(mean.to(x.dtype), covariance)

    def _checked_inputs(self, x: Any, finite: bool = True) -> Tensor:
        """Inputs `(..., n, D)`."""
        x = self.as_inputs(x)
        x = at_least_single(x.unsqueeze(-1) if x.dim() == 1 else x)
        if self.covar_module is None:
            raise NotFittedError("The model has neither kernel nor data. Give one of them, or load a state_dict.")
        if x.shape[-1] != self.num_dims:
            raise InputError(f"Inputs must have {self.num_dims} columns; got shape {tuple(x.shape)}.")
        if finite and (bool(x.isinf().any()) or (self.missing is None and bool(x.isnan().any()))):
            raise InputError(
                "The test inputs hold NaN or infinite values. (A model with missing='integrate' takes NaN as missing.)"
            )
        return x

    def _known_posterior(self) -> Posterior:
        """The posterior with its covariance, which is computed now where the model has the data to do so."""
        posterior = self.posterior
        if not posterior.has_covariance and self.train_inputs is not None and not self.is_stale:
            self.compute_covariance()
        return posterior

    def _missing_variance(self, x: Tensor) -> Tensor | None:
        """Prior variance that the basis does not represent at x, `(..., n)`, where that is more than a little."""
        separable = self.separate_as_fitted()
        missing = missing_of_modes(separable.modes, x)
        poor = torch.stack(missing.is_short).any(0)
        if not poor.any():
            return None
        if not self._warned_out_of_domain:
            self._warned_out_of_domain = True
            dims = [d for d, flags in enumerate(missing.is_short) if flags.any()]
            warnings.warn(
                f"The basis represents less than {1 - MAX_MISSING:.0%} of the prior variance at {int(poor.sum())} of "
                f"{poor.numel()} points, because of input dimensions {dims}: they lie near or outside the edge of the "
                "domain, or the lengthscale does not suit the box. The missing part is added as independent variance. "
                "This is said once per model.",
                OutOfDomainWarning,
                stacklevel=3,
            )
        return separable.outputscale() * missing.variance

    def _unknown_variance(self, x: Tensor) -> Tensor | None:
        """What f has at least outside the training range, `(..., n)`; None where there are no such rows."""
        if self.training_range is None:
            return None
        most = self.training_range.variance if self.is_flat_outside else math.inf
        return self.training_range.unknown_variance(self.separate_as_fitted(), x, self._warped, most)

    # State

    def get_extra_state(self) -> dict[str, Any]:
        """The posterior, for `state_dict`."""
        state: dict[str, Any] = {"stale": self.is_stale, "num_basis": self.num_basis, "basis": repr(self.family)}
        state["rank"], state["flat_outside"] = self.rank, self.is_flat_outside
        if self.training_range is not None:
            known = self.training_range
            state["range"] = (known.lower, known.upper, known.variance, known.levels, known.ends)
        if self.missing == "integrate" and isinstance(self._measure, EmpiricalMeasure):
            state["missing"] = self._measure.x
        if self.categorical:
            state["categorical"] = self.categorical
        if self._posterior is not None:
            assert self._fitted_with is not None
            domain, num_basis = self._fitted_with
            state["posterior"] = self._posterior.state()
            state["fitted_with"] = domain.center, domain.half_width, num_basis
            strength = getattr(self._penalty, "strength", None)
            state["penalty"] = (type(self._penalty).__name__, strength)
        return state

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """
        Restore the posterior from a `state_dict`.

        :param state: As returned by :meth:`get_extra_state`.
        """
        if state.get("basis", repr(Sines())) != repr(self.family):
            raise InputError(
                f"The state is that of a model with basis={state['basis']}; this model has {self.family}. Make it with "
                "the same basis."
            )
        self.is_stale = state["stale"]
        self.num_basis = state["num_basis"]
        self.weights = self.weights.with_rank(state.get("rank", self.rank))
        self.training_range = TrainingRange(*state["range"]) if "range" in state else None
        self.is_flat_outside = state.get("flat_outside", False)
        self.categorical = tuple(state.get("categorical", ()))
        if "missing" in state:
            self.missing, self._measure = "integrate", EmpiricalMeasure(state["missing"])
            self._missing_moments = {}
        self._posterior, self._fitted_with, self._loaded = None, None, state if "posterior" in state else None
        if self._loaded is not None:
            name, strength = state["penalty"]
            self._penalty = PENALTIES[name]() if strength is None else PENALTIES[name](strength)

    def load_state_dict(self, state_dict: Any, strict: bool = True, **kwargs: Any) -> Any:
        """
        Load parameters, box and posterior; a model made without data takes its box, and its default kernel, from there.

        :param state_dict: As returned by :meth:`state_dict`.
        :param strict: Whether all keys must match.
        """
        with rollback_on_error(self):
            if "domain.center" in state_dict:
                center, half_width = state_dict["domain.center"], state_dict["domain.half_width"]
                known = self._known_num_dims()
                if known not in (None, center.numel()) and center.dim():
                    raise InputError(
                        f"The state is that of a model of {center.numel()} input dimensions; this model has {known}. "
                        "Load it into TKRR(None, None, likelihood), or into a model of as many."
                    )
                if self.domain is None or self.domain.center.shape != center.shape:
                    self.domain = Domain(center, half_width)
                if self.covar_module is None and isinstance(self.family, FeatureMap):
                    num_basis = state_dict["_extra_state"]["num_basis"]
                    self.covar_module = self.family.scaled_kernel(self.domain, num_basis).to(center.dtype)
                categorical = state_dict.get("_extra_state", {}).get("categorical", ())
                outputs = self._outputs(center.numel())
                num_dims = center.numel() - (outputs is not None)
                default = anova_kernel(num_dims, categorical=categorical, dtype=center.dtype)
                default = default if outputs is None else times_outputs(default, outputs.to(center.dtype))
                if self.covar_module is None:
                    self.covar_module = default
                own = {k.removeprefix("likelihood."): v for k, v in state_dict.items() if k.startswith("likelihood.")}
                self.observation.expect(own, copy.deepcopy(default))
                names = ("columns", "knots", "levels")
                self.warp = InputWarp(*(state_dict[f"warp.{n}"] for n in names)) if "warp.knots" in state_dict else None
            return super().load_state_dict(state_dict, strict=strict, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> TKRR:
        super()._apply(fn, recurse)
        if self.train_inputs is not None and self.train_targets is not None:
            self.train_inputs = tuple(fn(x) for x in self.train_inputs)
            self.train_targets = fn(self.train_targets)
        if self._posterior is not None and self.domain is not None:
            assert self._fitted_with is not None
            domain, num_basis = self._fitted_with
            self._fitted_with = domain.to(self.domain.center.device), num_basis
            self._hold(self._posterior.to(self.domain.center.device, self._bases()))
        return self

    def _bases(self) -> list[Basis]:
        """Those of the posterior."""
        return [mode.basis for mode in self.separate_as_fitted().modes]


def _restore_posterior(model: TKRR, *ignore: Any) -> None:
    """Make the posterior of a state that has been loaded, with the functions of the box that came with it."""
    if model._loaded is not None:
        loaded, model._loaded = model._loaded, None
        state, device = loaded["posterior"], next(model.parameters()).device
        assert model.domain is not None
        *sides, num_basis = loaded.get("fitted_with", (model.domain.center, model.domain.half_width, model.num_basis))
        model._fitted_with = Domain(*sides).to(device), num_basis
        bases = model._bases()
        posterior = POSTERIORS[state["kind"]].from_state(state, bases)
        model._hold(posterior.to(device, bases))
        model.weights = posterior.format.with_rank(loaded.get("rank", posterior.rank))


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
    y = y.reshape(-1)
    if not torch.isfinite(y).all():
        first = int((~torch.isfinite(y)).nonzero()[0, 0])
        raise InputError(f"The targets hold NaN or infinite values (the first is in row {first}). Drop these rows.")
    return (at_least_single(x.detach()),), at_least_single(y.detach())
