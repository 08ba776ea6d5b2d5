r"""Alternating least squares: one factor at a time, each by an exact linear solve.

Reference: Wesel & Batselier (2021), *Large-scale learning with Fourier features and tensor decompositions*.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from gpytorch.means import ConstantMean, ZeroMean
from torch import Tensor

from ..bases.covariance import covariance_state, covariances_from_state
from ..cp.conditional import Conditional, DenseGram
from ..cp.design import Design
from ..cp.evidence import FactorData
from ..cp.format import WeightFormat, Weights
from ..cp.levels import LevelConditional
from ..cp.penalty import FrobeniusPenalty, Penalty
from ..cp.start import Screening, near_constant
from ..cp.sums import FactorSums
from ..data.checkpoint import Checkpoint, as_checkpoint, fit_identity, move_tensors, require_same_fit
from ..data.parallel import as_processes
from ..data.progress import progress_bar
from ..data.source import Batch
from ..data.training import TrainingData
from ..errors import ConstraintWarning, ConvergenceWarning, InputError, StalePosteriorWarning
from ..features.represented import range_grids
from ..features.separable import SeparableKernel
from ..model.laplace import LaplacePosterior, laplace_blocks
from ..model.likelihoods.base import Observation
from ..model.rollback import rollback_on_error
from ..sampling.hyperparameters import Hyperparameters, require_representable
from .hinge import MarginLoss, WorkingMargins
from .results import ALSResult
from .scoring import FactorTerm, HyperparameterStep

if TYPE_CHECKING:
    from ..model.tkrr import TKRR


@torch.no_grad()
def fit_als(
    model: TKRR,
    *,
    data: Any = None,
    new_rows: tuple[Tensor, Tensor] | None = None,
    max_sweeps: int = 10,
    rel_tol: float = 1e-6,
    penalty: Penalty | None = None,
    loss: MarginLoss | None = None,
    initial_factors: Sequence[Tensor] | None = None,
    learn_hyperparameters: bool = False,
    seed: int | None = None,
    progress: bool = False,
    memory: int = 2 << 30,
    group: Any = None,
    checkpoint: Checkpoint | str | Path | None = None,
    callback: Callable[[TKRR, int], object] | None = None,
) -> ALSResult:
    r"""
    Fit a model by alternating least squares.

    A sweep updates the factors in the order 1 -> D -> 1; the objective never rises. With a
    :class:`~gpytorch_tkrr.TensorTrain` all cores but the one that is updated are orthogonal. The objective is the sum
    of squared errors plus the penalty; with a StudentTLikelihood that of :math:`-2 s^2 \log p(y_n \mid f_n)`, up to a
    constant, and rows are weighted anew before each update, at the likelihood's noise and degrees of freedom.

    A model that has been fitted before is continued from where it stands; otherwise the strongest main effects and
    pairwise interactions, which two passes over the data find, are the first components. Interrupting the fit (Ctrl-C)
    keeps what has been reached; a fit that fails leaves the model as it was, its training data too.

    :param model: The model; its posterior is replaced.
    :param data: `(x, y)`, tensors or arrays (also :class:`numpy.memmap`), or an iterable of such batches that starts
        afresh each time: a DataLoader, a file opened by :func:`~gpytorch_tkrr.open_table`. By default the training data
        of the model.
    :param new_rows: `(x, y)` to be appended to the training data of the model first.
    :param max_sweeps: Largest number of sweeps; there are `max_sweeps * 2 (D - 1) + 1` updates in all.
    :param rel_tol: Stop when a sweep improves the objective by less than this fraction; 0.0 never stops early.
    :param penalty: The penalty, by default :class:`FrobeniusPenalty`.
    :param loss: For two classes: :class:`~gpytorch_tkrr.Hinge` or :class:`~gpytorch_tkrr.SquaredHinge` instead of
        squared errors, a support vector machine. The sign of the response is the class; variances and probabilities
        remain those of least squares around it.
    :param initial_factors: D tensors `(M_d, R)` to start from, weights of :math:`z = \sqrt v \phi` with the outermost
        output scale left out of v; for a tensor train cores `(r, M_d, r')`.
    :param learn_hyperparameters: Whether lengthscales, output scales and noise are learned along the way, by the
        evidence of each factor, through the raw parameters of kernel and likelihood. The objective may rise then. The
        variances of a category whose factor has more than 1 024 weights stay as they are; fit_gibbs learns them.
    :param seed: Seed of the random part of the start.
    :param progress: Whether to show a progress bar (needs tqdm).
    :param memory: Bytes that may be used beyond the data to keep products over modes; what does not fit is recomputed.
    :param group: A group of :mod:`torch.distributed` whose processes fit the model together: each passes rows of its
        own as `data` (see :class:`~gpytorch_tkrr.Shard`), and all end with the same factors. None: this process alone.
    :param checkpoint: A file, or a :class:`~gpytorch_tkrr.Checkpoint`, to go on from if the fit is stopped.
    :param callback: Called as `callback(model, number)` after each factor update, to follow a fit. The model then holds
        the weights reached so far: `model.posterior.mean(x)` are the values of f without the mean module. (`model(x)`
        would compute the covariance each time, too.)

    Example:
        >>> import torch, gpytorch
        >>> import gpytorch_tkrr as tkrr
        >>> x = torch.linspace(0, 1, 100).unsqueeze(-1)
        >>> y = torch.sin(6 * x[:, 0])
        >>> model = tkrr.TKRR(x, y, gpytorch.likelihoods.GaussianLikelihood(), rank=2)
        >>> result = tkrr.fit_als(model, penalty=tkrr.FrobeniusPenalty(1e-6), seed=0)
        >>> bool((model.eval()(x).mean - y).abs().max() < 1e-2)
        True
    """
    penalty = FrobeniusPenalty() if penalty is None else penalty
    if learn_hyperparameters and getattr(penalty, "strength", None) is not None:
        raise ValueError(
            f"learn_hyperparameters=True learns noise and outputscale, but {penalty!r} fixes their ratio. Use "
            "strength=None."
        )
    if max_sweeps < 0 or rel_tol < 0:
        raise ValueError(f"max_sweeps and rel_tol must not be negative; got {max_sweeps} and {rel_tol}.")
    if not isinstance(penalty, Penalty):
        raise TypeError(f"penalty must be a Penalty, for instance FrobeniusPenalty(); got {penalty!r}.")
    if penalty.formats is not None and model.weights.kind not in penalty.formats:
        raise InputError(
            f"{penalty!r} is not a quadratic form in each factor of {model.weights!r}. Use FrobeniusPenalty, or "
            f"weights of the kind {' or '.join(map(repr, penalty.formats))}."
        )
    if not model.observation.has_least_squares:
        raise InputError(
            f"fit_als minimises squared errors, which a {type(model.likelihood).__name__} has none of. Use fit_gibbs."
        )
    if loss is not None:
        _check_loss(model, loss, learn_hyperparameters)
    if new_rows is not None and data is not None:
        raise ValueError(
            "new_rows are appended to the model's own training data; data replaces these. Pass one of them."
        )
    with rollback_on_error(model):
        if new_rows is not None:
            append_rows(model, *new_rows)
        processes, checkpoint = as_processes(group), as_checkpoint(checkpoint)
        training = model.training_data(data, processes, memory=memory)
        model.prepare(training)
        if loss is not None:
            _check_mean(model)
        starts = {f"initial_factors.{d}": factor.detach().cpu() for d, factor in enumerate(initial_factors or ())}
        identity = fit_identity("fit_als", model, training.summary, seed=seed, penalty=repr(penalty), rel_tol=rel_tol,
                                loss=repr(loss), learn_hyperparameters=learn_hyperparameters, **starts)  # fmt: skip
        require_same_fit(identity, processes)
        saved = checkpoint.open(identity, processes)
        if learn_hyperparameters:
            require_representable(model, training.summary.variance)
        if learn_hyperparameters and not model.is_fitted:
            _start_scales(model, training.summary.variance)
        fit = ALSFit(model, training, penalty, learn_hyperparameters, memory, loss)
        seed = processes.share(int(torch.randint(2**63 - 1, ())) if seed is None else seed)
        generator = torch.Generator().manual_seed(seed)
        result = ALSResult()
        if saved is None:
            fit.start(initial_factors, generator)
        else:
            fit.restore(saved, result, generator)
        num_updates = max_sweeps * 2 * (fit.num_dims - 1) + 1
        bar = progress_bar(progress and processes.rank == 0, num_updates, "ALS", "update", done=len(result.objective))

        def after_update() -> None:
            bar.update(f"objective {result.objective[-1]:.6g}")
            if callback is not None:
                fit.store(None)
                callback(model, len(result.objective))

        try:
            _run(fit, result, max_sweeps, rel_tol, generator, after_update, checkpoint)
            fit.finish(result)
        except KeyboardInterrupt:
            reached = f"{len(result.objective)} factor updates"
            result.message = f"Interrupted after {reached}; the model holds what was reached."
            fit.store(None)
        finally:
            bar.close()
            checkpoint.close()
    result.objective = [value * training.scale**2 for value in result.objective]
    if learn_hyperparameters:
        result.message += _at_noise_bound(model, training.scale)
        model.warn_if_missing(training.summary.lower, training.summary.upper)
    return result


def _check_loss(model: TKRR, loss: MarginLoss, learn_hyperparameters: bool) -> None:
    """Refuse a loss of classes where there are none, and evidences that it does not have."""
    if not isinstance(loss, MarginLoss):
        raise TypeError(f"loss must be gpytorch_tkrr.Hinge() or gpytorch_tkrr.SquaredHinge(); got {loss!r}.")
    if model.observation.num_classes != 2 or not model.observation.has_link:
        raise InputError(
            f"{loss!r} is a loss of two classes; the model has a {type(model.likelihood).__name__}. Use a "
            "BernoulliLikelihood."
        )
    if learn_hyperparameters:
        raise ValueError(
            f"{loss!r} has no evidence to learn hyperparameters by. Learn them with squared errors first, or choose "
            "them by held-out rows."
        )


def _check_mean(model: TKRR) -> None:
    """Margins are read off the targets minus the mean, which must lie between the classes."""
    mean = model.mean_module
    if isinstance(mean, ZeroMean) or (isinstance(mean, ConstantMean) and bool((mean.constant.abs() < 1).all())):
        return
    raise InputError(
        f"With a loss of the margin the mean must be a constant between the classes -1 and +1; got {mean}. Leave out "
        "mean_module, or use ZeroMean()."
    )


def append_rows(model: TKRR, x: Tensor, y: Tensor) -> None:
    """
    New rows before a fit; that the posterior is stale need not be said.

    :param model: The model.
    :param x: Inputs `(n, D)`.
    :param y: Targets `(n,)`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StalePosteriorWarning)
        model.append_train_data(x, y)


def _start_scales(model: TKRR, variance: float) -> None:
    """
    Let noise and output scale start near the targets' variance where they say nothing about it: GPyTorch's default
    values, and those that are orders of magnitude away.
    """
    if variance == 0:
        return  # constant targets are no scale
    assert model.covar_module is not None
    model.observation.start_noise(variance)
    separable = model.separate()
    scale = separable.scales[0] if separable.scales else None
    total = float(separable.outputscale())
    if scale is not None and scale.raw_outputscale.requires_grad:
        is_default = not scale.raw_outputscale.detach().any()
        if is_default or not 1e-4 <= total / variance <= 1e4:
            scale.initialize(outputscale=scale.outputscale.double() * (variance / total))


def _at_noise_bound(model: TKRR, scale: float) -> str:
    """A sentence where the noise lies at its bound, and the warning of :func:`~gpytorch_tkrr.fit_gibbs`."""
    concern = model.observation.augmentation(scale, 0.0).concern({"noise": model.noise().detach().reshape(1)})
    if concern is not None:
        warnings.warn(concern, ConstraintWarning, stacklevel=4)
    bound = model.observation.noise_bound()
    if bound is None or float(model.noise()) > 1.01 * bound:
        return ""
    return (
        f" The noise variance is at its lower bound {bound:g}: scale the targets up, or lower the bound "
        "(noise_constraint of the likelihood)."
    )


def _learns(sweep: int, last: int) -> bool:
    """Whether hyperparameters move: not before one plain sweep, and in every other sweep after the first few."""
    return last == 0 or 0 < sweep <= 4 or (sweep > 4 and sweep % 2 == 0)


def _run(
    fit: ALSFit,
    result: ALSResult,
    max_sweeps: int,
    rel_tol: float,
    generator: torch.Generator,
    after_update: Callable[[], None],
    checkpoint: Checkpoint,
) -> None:
    """The sweeps: update the first mode of the chain, then back and forth."""
    last, chain = fit.num_dims - 1, fit.model.weights.chain(fit.num_dims)
    order = [*chain[1:], *chain[-2::-1]] or [0]
    # One dimension is solved by one update.
    num_sweeps = max_sweeps if last > 0 or fit.step is not None or fit.reweights else 0
    if not result.objective:
        fit.update(chain[0], result.objective)
        after_update()
    while result.sweeps < num_sweeps and not result.converged:
        before = result.objective[-1]
        learns = fit.step is not None and _learns(result.sweeps, last)
        for position, d in enumerate(order):
            fit.update(d, result.objective, learn=learns and (position < last or d == chain[0]))  # once for each mode
            after_update()
        result.sweeps += 1
        after = result.objective[-1]
        is_over = result.sweeps == num_sweeps
        if last > 0 and fit.restarts and not is_over and fit.has_died(after):
            fit.restart(generator, after)  # nothing explained: another start
        elif learns == (fit.step is not None) and rel_tol > 0 and abs(before - after) <= rel_tol * abs(before):
            is_over = result.converged = True
        checkpoint.save(lambda: fit.state(result, generator), last=is_over)
    if result.converged:
        result.message = f"Converged: the last of {result.sweeps} sweeps changed the objective by < {rel_tol:g}."
    elif not num_sweeps and last == 0:
        result.converged, result.message = True, "One input dimension: solved exactly by one update."
    elif not num_sweeps:
        result.message = "Stopped after the first update, as max_sweeps=0 asks."
    else:
        before, after = result.objective[-1 - len(order)], result.objective[-1]
        result.message = (
            f"Stopped after {result.sweeps} sweeps; the last one improved the objective by "
            f"{(before - after) / max(abs(before), 1e-300):.2g}. Call fit_als again to go on."
        )
    if last > 0 and result.objective and fit.has_died(result.objective[-1]):
        message = (
            "All components have died: the model predicts the mean, also after other starts. The penalty is stronger "
            "than what the data say: lower the noise of the likelihood, or the strength of the penalty."
        )
        warnings.warn(message, ConvergenceWarning, stacklevel=4)
        result.message += f" {message}"


@dataclass
class _Memory:
    """What the evidence of one factor needs: sums over the residuals, its raw factor, and the form of the penalty."""

    sums: FactorSums
    raw: Tensor
    form: Tensor


class _Reweighted:
    """
    Working targets of iteratively reweighted least squares.

    :param observation: Gives the weights.
    :param noise: Noise variance in the units of the scaled targets.

    :ivar excess: The sum of the losses minus the weighted sum of squares, of all rows seen.
    """

    def __init__(self, observation: Observation, noise: float):
        self.observation, self.noise = observation, noise
        self.excess = 0.0

    def __call__(self, batch: Batch, f: Tensor, first_row: int) -> tuple[Tensor, Tensor]:
        residual = batch.y - f
        weight, loss, square = self._losses(batch, residual)
        self.excess += float((loss - weight * square).sum())
        return residual, weight

    def loss(self, batch: Batch, f: Tensor, first_row: int) -> Tensor:
        """
        The sum of the losses, `(1,)`.

        :param batch: The rows.
        :param f: The model's values `(n,)`.
        :param first_row: Not used.
        """
        return self._losses(batch, batch.y - f)[1].sum().reshape(1)

    def _losses(self, batch: Batch, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        square = residual.square() if batch.weight is None else residual.square() * batch.weight
        seen = self.observation.reweight(square, self.noise)
        assert seen is not None
        return *seen, square


class ALSFit:
    """The state of a fit: whitened weights, for CP with columns of unit root-mean-square on the data."""

    def __init__(
        self,
        model: TKRR,
        training: TrainingData,
        penalty: Penalty,
        learn_hyperparameters: bool,
        memory: int,
        loss: MarginLoss | None = None,
    ):
        self.model, self.training, self.penalty, self.loss = model, training, penalty, loss
        self.separable: SeparableKernel = model.separate()
        self.num_dims = len(self.separable.modes)
        self.covariances = [mode.covariance().detach() for mode in self.separable.modes]
        bases = [mode.basis for mode in self.separable.modes]
        self.design = Design(training, bases, memory=memory, weights=model.weights)
        self.marginals = self.design.marginals()
        self.reweights = self._working() is not None
        self.total = math.inf  # the objective of zero weights
        self.step = self._hyperparameter_step() if learn_hyperparameters else None
        self.memories: dict[int, _Memory] = {}
        self.restarts = 3
        self.fallback: tuple[Weights, list[Tensor], float] | None = None
        self.weights: Weights
        self.raw: list[Tensor]  # the factors' functions in the raw basis

    def _working(self) -> _Reweighted | WorkingMargins | None:
        """Working targets at the present hyperparameters; None for squared errors."""
        if self.loss is not None:
            return WorkingMargins(self.loss, self.training.scale)
        observation = self.model.observation
        if observation.reweight(torch.zeros(1, dtype=torch.float64), 1.0) is None:
            return None
        return _Reweighted(observation, float(self.noise()))

    def noise(self) -> Tensor:
        """Noise variance in the units of the scaled targets."""
        return self.model.noise() / self.training.scale**2

    def outputscale(self) -> Tensor:
        """Output scale in the units of the scaled targets."""
        return self.separable.outputscale() / self.training.scale**2

    def strength(self) -> Tensor:
        """The multiplier of the penalty."""
        return self.penalty.strength_for(self.noise(), self.outputscale(), self.weights)

    def _hyperparameter_step(self) -> HyperparameterStep:
        summary = self.training.summary
        grids = range_grids(summary.lower, summary.upper)
        with torch.enable_grad():
            hyperparameters = Hyperparameters(
                self.model.covar_module,
                self.separable,
                (summary.upper - summary.lower) / 2,
                likelihood=self.model.likelihood,
                unit=self.training.scale**2,
            )
        return HyperparameterStep(self.separable, hyperparameters, self.noise, self.outputscale, grids)

    def start(self, initial_factors: Sequence[Tensor] | None, generator: torch.Generator) -> None:
        """Given factors, those of an earlier fit, or components that the data show."""
        form = self.model.weights
        expected = form.shapes([mode.num_functions for mode in self.separable.modes])
        if initial_factors is not None and form.is_undecided:
            raise InputError(
                f"initial_factors belong to an order of the inputs, which {form!r} has not decided yet. Give the order "
                "as a list."
            )
        if initial_factors is not None:
            shapes = [tuple(factor.shape) for factor in initial_factors]
            if shapes != expected:
                raise InputError(f"initial_factors must have the shapes {expected} ({form!r}); got {shapes}.")
            device = self.marginals[0].mean.device
            self._set(form.read([factor.detach().double().to(device) for factor in initial_factors]), True)
            return
        fitted = self.model.factors_to_start_from()
        if fitted is not None and [tuple(factor.shape) for factor in self.model.factors] == expected:
            parts = zip(fitted.weights.balanced(), self.covariances, fitted.covariances, strict=True)
            self._set([w if new.equals(old) else new.rewhiten(w, old) for w, new, old in parts], True)
        else:
            screening = Screening.of(self.design, self.covariances)
            self._decide(form.arranged(screening.interactions()))
            self._set(self._factors(screening.start, generator), False)

    def _decide(self, form: WeightFormat) -> None:
        """Go on with a format that leaves nothing to the data."""
        self.model.weights = form
        self.design.set_format(form)

    def _factors(
        self, start: Callable[[int, torch.Generator], list[Tensor]], generator: torch.Generator
    ) -> list[Tensor]:
        """Factors from components of a kind of start."""
        form = self.model.weights
        return form.from_components(start(form.num_components(self.num_dims), generator))

    def restart(self, generator: torch.Generator, reached: float) -> None:
        """A random start near the constant function; present weights come back if its first update is no better."""
        self.fallback = self.weights, self.raw, reached
        self.restarts -= 1
        self._set(self._factors(partial(near_constant, self.design, self.covariances), generator), False)

    def has_died(self, objective: float) -> bool:
        """Whether the weights are no better than zero."""
        return objective > (1 - 1e-9) * self.total

    def _set(self, factors: list[Tensor], user_units: bool) -> None:
        self.weights = self.model.weights.weights(factors)
        if user_units:
            self.weights.multiply(1 / self.training.scale)
        self.weights.normalise(self._norms)
        self.raw = [self.covariances[d].unwhiten(factor) for d, factor in enumerate(self.weights.factors)]
        self.design.reset()

    def _norms(self, d: int, factor: Tensor) -> Tensor:
        """Root-mean-square over the data of each column's function; never zero for a column that is not."""
        raw, marginal = self.covariances[d].unwhiten(factor), self.marginals[d]
        squares = marginal.squares(raw)
        # Functions may have units of their own.
        squares = squares + 1e-16 * (marginal.diagonal() * raw.square()).sum(-1)
        tiny = squares <= torch.finfo(torch.float64).tiny
        return torch.where(tiny, factor.norm(dim=-1), squares.clamp(min=0).sqrt())

    def _sums(self, d: int, scale: Tensor) -> tuple[FactorSums, float]:
        """Sums of one factor, and what the objective has beyond the sum of (weighted) squares and the penalty."""
        working = self._working()
        if working is None:
            return self.design.sums(d, self.raw, scale), 0.0
        sums = self.design.sums(d, self.raw, scale, working)
        return sums, float(self.training.processes.sum(torch.full_like(sums.square, working.excess)))

    def update(self, d: int, objective: list[float], *, learn: bool = False) -> None:
        """Solve for one factor, after a step on its hyperparameters where these are to be learned."""
        weights = self.weights
        changed, turns = weights.move_to(d)
        for k in changed:
            self.raw[k] = self.covariances[k].unwhiten(weights.factors[k])
        for bond, matrix in turns:
            self.design.turn(bond, matrix)
        sums, excess = self._sums(d, weights.scales())
        gram, current = sums.gram_for_solving(), weights.scaled_factor(d)
        self._refresh(float(sums.square) + excess, objective)
        raw = self.covariances[d].unwhiten(current)
        data = FactorData.from_residuals(sums, gram, raw)
        self.total = float(data.square) + excess
        learn = learn and isinstance(gram, DenseGram)  # not for thousands of levels: see fit_als
        if self.step is not None and isinstance(gram, DenseGram):
            self.memories[d] = _Memory(sums, raw, self.penalty.form(weights, d))
        if learn:
            self._learn(d, data)
        strength, form = self.strength(), self.penalty.form(weights, d)
        rhs, square, penalty = sums.rhs, float(sums.square) + excess, float(self.penalty.value(weights))
        if learn or not square + float(strength) * penalty <= self.total:
            # Worse than nothing, or whitened by variances that have changed: start from zero, not from huge weights.
            current, rhs, square, penalty = torch.zeros_like(current), data.rhs, self.total, 0.0
        before = square + float(strength) * penalty
        covariance = self.covariances[d]
        gradient = covariance.mix(rhs) * covariance.root - strength * form @ current  # (R, M)
        conditional = gram.conditional(covariance, strength * form, 1.0)
        # The step is taken from the current factor: where a jitter was needed, this is a proximal step, still downhill.
        change = conditional.solve(gradient.reshape(-1)).reshape_as(current)
        explained = covariance.mix(gram.apply(covariance.unwhiten(change))) * covariance.root
        gain = float((change * (2 * gradient - explained - strength * form @ change)).sum())
        if gain < 0:
            change, gain = torch.zeros_like(change), 0.0
        factor = current + change
        updated = weights.clone()
        updated.replace(d, factor, self._norms(d, factor))
        if not float(strength * self.penalty.value(updated)) <= before:
            # Rounding has spoilt the solution: components so large that they do not cancel. Keep what was there.
            updated, gain = weights.clone(), 0.0
            if not current.any():
                updated.vanish(d)
        self.weights = updated
        self.raw[d] = self.covariances[d].unwhiten(updated.factors[d])
        objective.append(before - gain)
        if self.fallback is not None:
            if objective[-1] >= self.fallback[2]:
                self.weights, self.raw, objective[-1] = self.fallback
                self.design.reset()
            self.fallback = None

    def _refresh(self, square: float, objective: list[float]) -> None:
        """Replace the predicted last objective by the one computed from the residuals."""
        if objective and self.fallback is None:
            objective[-1] = square + float(self.strength() * self.penalty.value(self.weights))

    def _term(self, memory: _Memory) -> FactorTerm:
        """Sums stay small until the Gram matrix is made of them."""
        weights = self.weights
        return FactorTerm(
            lambda: FactorData.from_residuals(memory.sums, memory.sums.gram_for_solving(), memory.raw).mixed(
                memory.form
            ),
            lambda noise, outputscale: self.penalty.strength_for(noise, outputscale, weights),
        )

    def _learn(self, d: int, data: FactorData) -> None:
        """Improve the hyperparameters by this factor's evidence; all functions stay as they are."""
        assert self.step is not None
        sharers = self.step.sharers(d)
        if len(sharers) > 2 and d not in (sharers[0], sharers[-1]):
            return  # the sum over many modes is costly: twice per sweep is enough
        terms = {k: self._term(self.memories[k]) for k in sharers if k in self.memories}
        mixed = data.mixed(self.memories[d].form)
        terms[d].data = lambda: mixed
        try:
            self.step(d, terms)
        except BaseException:  # Ctrl-C keeps the fit: not with hyperparameters that were only tried
            self.step.undo()
            raise
        for k in sharers:
            old, new = self.covariances[k], self.separable.modes[k].covariance()
            if not new.equals(old):
                self.weights.set_factor(k, new.rewhiten(self.weights.factors[k], old))
            self.covariances[k] = new

    def state(self, result: ALSResult, generator: torch.Generator) -> dict[str, Any]:
        """What is needed to go on after a sweep."""
        fallback = None if self.fallback is None else (self.fallback[0].state(), *self.fallback[1:])
        return {
            "objective": list(result.objective),
            "sweeps": result.sweeps,
            "converged": result.converged,
            "generator": generator.get_state(),
            "restarts": self.restarts,
            **self.model.weights.state(),
            "weights": self.weights.state(),
            "raw": self.raw,
            **covariance_state(self.covariances),
            "fallback": fallback,
            "memories": {d: (m.sums.pack(), m.raw, m.form) for d, m in self.memories.items()},
            "parameters": [parameter.detach() for parameter in self.model.parameters()],
            "step": None if self.step is None else self.step.state(),
        }

    def restore(self, state: dict[str, Any], result: ALSResult, generator: torch.Generator) -> None:
        """Go on from where :meth:`state` was asked for."""
        result.objective, result.sweeps = list(state["objective"]), state["sweeps"]
        result.converged = state["converged"]
        generator.set_state(state["generator"])
        device = self.marginals[0].mean.device
        state = move_tensors(state, device)
        self.restarts, self.raw = state["restarts"], state["raw"]
        self.covariances = covariances_from_state(state)
        self._decide(WeightFormat.from_state(state).with_rank(self.model.rank))
        self.weights = self.model.weights.restore(state["weights"])
        if state["fallback"] is not None:
            weights, raw, reached = state["fallback"]
            self.fallback = self.model.weights.restore(weights), raw, reached
        for d, (packed, raw, form) in state["memories"].items():
            sums = FactorSums.zeros(self.design.tables[d], len(raw), device).unpack(packed)
            self.memories[d] = _Memory(sums, raw, form)
        if self.step is not None:
            self.step.restore(state["step"])
        for parameter, value in zip(self.model.parameters(), state["parameters"], strict=True):
            parameter.data.copy_(value)
        self.design.reset()
        self.design.fill(self.raw, self.weights.scales())

    def finish(self, result: ALSResult) -> None:
        """The block Laplace approximation; its residuals give the final objective."""
        self.weights.balance()
        self.raw = [v.unwhiten(w) for v, w in zip(self.covariances, self.weights.factors, strict=True)]
        self.design.reset()
        strength = self.strength()
        observation = self.model.observation
        blocks, square = laplace_blocks(
            self.design, self.weights, self.covariances, self.penalty, strength, observation.information
        )
        working, losses = self._working(), square
        if working is not None:
            losses = self.design.sum_rows(self.raw, self.weights.scales(), working.loss, 1)
        self._refresh(float(losses), result.objective)
        self.store(blocks, float(square))

    def store(self, blocks: Sequence[Conditional | LevelConditional] | None, square: float | None = None) -> None:
        """Hand the weights to the model."""
        if self.fallback is not None:  # interrupted between a new start and its first update
            self.weights = self.fallback[0]
        scale = self.training.scale
        weights = self.weights.clone()
        weights.multiply(scale)
        if blocks is None:
            weights.balance()
        noise = self.model.noise()
        if self.model.observation.noise() is None and square is not None:  # that of the residuals
            noise = torch.as_tensor(square * scale**2 / self.training.summary.num_rows).to(weights.factors[0])
        bases = [mode.basis for mode in self.separable.modes]
        noise = noise.detach().double()
        form = self.model.weights
        posterior = LaplacePosterior(bases, weights, self.covariances, noise, blocks, weight_format=form)
        self.model.set_posterior(posterior, self.penalty)
