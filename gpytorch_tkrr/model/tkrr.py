"""The model with low-rank weights as a GPyTorch model."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from gpytorch import settings
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.means import Mean
from linear_operator.operators import DiagLinearOperator
from torch import Tensor

from ..bases.basis import Basis
from ..bases.domain import Domain, at_least_single
from ..cp.design import Design
from ..cp.format import WeightFormat
from ..cp.penalty import PENALTIES, FrobeniusPenalty, Penalty
from ..data.parallel import as_processes
from ..errors import (
    InputError,
    NotFittedError,
    OutOfDomainWarning,
    SizeError,
)
from ..families.map_kernel import FeatureMap
from ..features.expansion import BasisFamily
from ..features.represented import MAX_MISSING, missing_of_modes
from ..features.separable import SeparableKernel
from ..features.stationary import Sines
from .anova import anova_kernel, times_outputs
from .draws import DrawsPosterior
from .extrapolation import TrainingRange
from .laplace import LaplacePosterior, laplace_blocks
from .likelihoods.heteroskedastic import HeteroskedasticObservation
from .likelihoods.noise_function import factors_of, log_size
from .log_noise import LogNoise
from .low_rank import LowRankModel
from .measure import EmpiricalMeasure, Measure
from .missing import spread_of_missing
from .posterior import Posterior, PosteriorCovariance
from .prediction import Prediction
from .rollback import rollback_on_error
from .warp import InputWarp

#: Posteriors that can be restored from a `state_dict`, by their kind.
POSTERIORS: dict[str, type[Posterior]] = {cls.kind: cls for cls in (LaplacePosterior, DrawsPosterior)}


class TKRR(LowRankModel):
    r"""
    Tensor kernel ridge regression: a Gaussian process whose weights on a product basis are a low-rank CP tensor,

    .. math:: f(x) = m(x) + \sum_{r=1}^R \prod_{d=1}^D z_d(x_d)^\top w_{dr}, \qquad z_d = \sqrt{v_d(\theta)}\, \phi_d.

    Use it like an :class:`~gpytorch.models.ExactGP`: in train mode a call returns the prior, in eval mode the
    posterior. Instead of a training loop call :func:`~gpytorch_tkrr.fit_gibbs` (draws from the posterior) or
    :func:`~gpytorch_tkrr.fit_als` (one solution). Inputs and targets may have any units.

    :param train_x: Training inputs `(N, D)`, or `(N,)` for one input: a tensor, an array or a DataFrame of numbers
        (arrays and DataFrames become float64). None for a model without data.
    :param train_y: Training targets `(N,)`, of the same kinds.
    :param likelihood: A GPyTorch likelihood, or one of this package. With a BernoulliLikelihood the targets are classes
        {0, 1} or {-1, +1}: a probit model with :func:`~gpytorch_tkrr.fit_gibbs`, a least-squares support vector machine
        with :func:`~gpytorch_tkrr.fit_als`.
    :param kernel: A product over inputs of GPyTorch kernels, stored as `covar_module`; by default
        :func:`~gpytorch_tkrr.anova_kernel`.
    :param rank: R, the number of components, short for ``weights=CP(rank)``. By default
        :func:`~gpytorch_tkrr.fit_gibbs` chooses it; :func:`~gpytorch_tkrr.fit_als` uses 10.
    :param num_basis: M, the number of sines, one number for all inputs or one for each. By default 20, with the default
        kernel fewer for columns with fewer distinct values; :func:`~gpytorch_tkrr.fit_gibbs` then adapts the numbers to
        the lengthscales.
    :param domain: The box. By default it is chosen once, from the data and the kernel's lengthscales.
    :param basis: The functions for stationary kernels, by default :class:`~gpytorch_tkrr.Sines`. A feature map with its
        own kernel (:class:`~gpytorch_tkrr.Polynomial` and others) also replaces the kernel.
    :param mean_module: The mean; by default a ConstantMean that a fit sets to the mean of the targets.
    :param warp: A map of the inputs for kernel and box (the mean sees the inputs unchanged). True for
        :meth:`InputWarp.from_data` of the training inputs, False for none. By default the first
        :func:`~gpytorch_tkrr.fit_gibbs` of a model with its own kernel, its own box and Gaussian noise tests with
        held-out training rows which columns, if any, to warp.
    :param missing: By default an input that is NaN raises an error. With ``"integrate"``, f is averaged over the values
        of its column in the training rows (a sample of 16 384 rows if there are more), or over a Measure that you pass,
        such as :class:`~gpytorch_tkrr.UniformMeasure`. :mod:`gpytorch_tkrr.model.missing` tells what is exact.
    :param categorical: Columns that are categories, whole numbers without an order: their numbers, or their names in a
        DataFrame. For the default kernel only; your own kernel uses :class:`~gpytorch_tkrr.CategoricalKernel`.
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
        super().__init__(
            train_x,
            train_y,
            likelihood,
            kernel=kernel,
            rank=rank,
            num_basis=num_basis,
            domain=domain,
            basis=basis,
            mean_module=mean_module,
            warp=warp,
            categorical=categorical,
            weights=weights,
            missing=missing,
        )
        self._warned_out_of_domain = False
        self._fitted_with: tuple[Domain, int | tuple[int, ...]] | None = None  # box and counts of the posterior
        self._loaded: dict[str, Any] | None = None  # of a posterior, until the box has been loaded too
        self._penalty: Penalty = FrobeniusPenalty()
        self.register_load_state_dict_post_hook(_restore_posterior)

    # Noise and posterior

    def separate_as_fitted(self) -> SeparableKernel:
        """The same on the box and with the counts of the posterior, which :meth:`resize` may have left behind."""
        assert self.covar_module is not None and self._fitted_with is not None
        return self._separate(self.num_dims, *self._fitted_with)

    def noise(self) -> Tensor:
        """The noise variance, a float64 scalar, differentiable; 1 for a likelihood without one."""
        noise = self.observation.noise()
        return torch.ones((), dtype=torch.float64, device=next(self.parameters()).device) if noise is None else noise

    @property
    def posterior(self) -> Posterior:
        """The posterior over the weights; :class:`NotFittedError` before a fit."""
        if self._posterior is None:
            raise NotFittedError("The model has not been fitted. Call fit_gibbs(model) or fit_als(model) first.")
        return self._posterior

    def __repr__(self) -> str:
        """Three lines; `model.covar_module` and `model.likelihood` show the modules inside."""
        state = "not fitted" if self._posterior is None else "fitted"
        parts = {"kernel": self.covar_module, "likelihood": self.likelihood, "mean": self.mean_module}
        named = ", ".join(f"{name} {type(part).__name__}" for name, part in parts.items() if part is not None)
        box = "no box yet: data choose it" if self.domain is None else repr(self.domain)
        return f"{type(self).__name__}: {self.weights!r}, num_basis={self.num_basis_text()}, {state}\n{named}\n{box}"

    def num_basis_text(self) -> str:
        """M in words: one number, or the smallest and the largest of all inputs."""
        sizes = [self.num_basis] if isinstance(self.num_basis, int) else self.num_basis
        return f"{min(sizes)}" if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}"

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
        over the draws, after :func:`~gpytorch_tkrr.fit_als` that of its Gaussian f. It includes variance of f that the
        basis does not represent. Rows outside the range of the training rows give a warning and are marked by
        `extrapolates`; there f has at least the variance that the prior has if f is known at the edge of the range. If
        the model has chosen kernel and box itself, f is constant from a tenth of the range outside on, and everywhere
        limited to the range of the targets, extended on both sides by a quarter of its width; what is cut off counts as
        uncertainty.

        :param x: Inputs `(..., n, D)`, or `(n,)` for one dimension: a tensor, an array or a DataFrame.
        :param rows: What the likelihood needs to know about each row, one number or one for each row `(..., n)`:
            `noise=` variances with a FixedNoiseGaussianLikelihood, `exposure=` with a NegativeBinomialLikelihood,
            `censoring=` with a CensoredLikelihood. Not needed for the model's own training inputs.

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
            action = "the data say nothing there; see `extrapolates` of the prediction."
            self.training_range.warn(self._distinct_rows(x), action)

        held = self.held

        def components(x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            """Values of f at inputs `(n, D)`, and what is known of the rows there."""
            warped = self.warped(x)
            functions, variances = posterior.components(warped)
            free = self.mean_module(x).double() + functions
            f = self._bounded(free, x)
            missing = self._missing_variance(warped)
            if missing is not None:
                variances = missing if variances is None else variances + missing
            lost = spread_of_missing(posterior, warped)
            if lost is not None:
                variances = lost if variances is None else variances + lost
            unknown = self._unknown_variance(x, free - f)
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

    def _distinct_rows(self, x: Tensor) -> Tensor:
        """The rows that the user has given, `(..., D)`, of those that f is asked at."""
        return x

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

    def _bounded(self, f: Tensor, x: Tensor) -> Tensor:
        """Values of f, mean included, as :meth:`predict` gives them: none that the targets make unbelievable."""
        if not self.is_flat_outside or self.training_range is None or self.observation.has_link:
            return f
        bounded = self.training_range.bounded(f)
        return bounded if self.observation.shows_range else torch.where(self.extrapolates(x), bounded, f)

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
        free = self.mean_module(x) + posterior.functions(warped).to(x.dtype)
        f = self._bounded(free, x)
        mean = f.mean(0)
        covariance = PosteriorCovariance(warped.to(x.dtype), posterior=posterior)
        missing = self._missing_variance(warped)
        if missing is not None:
            covariance = covariance + DiagLinearOperator(missing.to(x.dtype))
        lost = None if self._measure is None else spread_of_missing(posterior, warped.reshape(-1, x.shape[-1]))
        if lost is not None:
            covariance = covariance + DiagLinearOperator(lost.mean(0).reshape(x.shape[:-1]).to(x.dtype))
        unknown = self._unknown_variance(x, free - f)
        if unknown is not None:
            lacking = (unknown.to(x.dtype) - covariance.diagonal(dim1=-1, dim2=-2)).clamp(min=0)
            covariance = covariance + DiagLinearOperator(lacking)
        return MultivariateNormal(mean.to(x.dtype), covariance)

    def _checked_inputs(self, x: Any, finite: bool = True) -> Tensor:
        """Inputs `(..., n, D)`."""
        x = self.as_inputs(x)
        given = tuple(x.shape)
        x = at_least_single(x.unsqueeze(-1) if x.dim() == 1 else x)
        if self.covar_module is None:
            raise NotFittedError("The model has neither kernel nor data. Give one of them, or load a state_dict.")
        if x.shape[-1] != self.num_dims:
            hint = " A single row is x[None]." if given == (self.num_dims,) else ""
            raise InputError(f"Inputs must have {self.num_dims} columns; got shape {given}.{hint}")
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
        variance = separable.outputscale() * missing.total
        if self.training_range is not None and self.is_flat_outside:
            variance = variance.clamp(max=self.training_range.variance)  # as for rows outside the training range
        return variance * missing.fraction

    def _unknown_variance(self, x: Tensor, cut: Tensor | None = None) -> Tensor | None:
        """
        What f has at least outside the training range and where values were cut off, `(..., n)`; None where neither is.

        :param x: Inputs `(..., n, D)`.
        :param cut: By how much values of f were too large to be believed, `(S, ..., n)`; by default not at all.
        """
        if self.training_range is None:
            return None
        most = self.training_range.variance if self.is_flat_outside else math.inf
        unknown = self.training_range.unknown_variance(self.separate_as_fitted(), x, self._warped, most)
        if cut is None or not bool(cut.any()):
            return unknown
        lost = cut.double().square().mean(0).clamp(max=most)
        return lost if unknown is None else torch.maximum(unknown, lost)

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
