r"""Alternating least squares: one factor at a time, each by an exact linear solve.

Reference: Wesel & Batselier (2021), *Large-scale learning with Fourier features and tensor decompositions*.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from gpytorch.means import ConstantMean, ZeroMean
from torch import Tensor

from ..cp.penalty import FrobeniusPenalty, Penalty
from ..data.checkpoint import Checkpoint, as_checkpoint, fit_identity, require_same_fit
from ..data.parallel import as_processes
from ..data.progress import progress_bar
from ..errors import ConstraintWarning, ConvergenceWarning, InputError, StalePosteriorWarning
from ..model.low_rank import require_low_rank
from ..model.rollback import rollback_on_error
from ..sampling.hyperparameters import require_representable
from .factor_updates import ALSFit
from .hinge import MarginLoss
from .results import ALSResult

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
    of squared errors plus the penalty. With a StudentTLikelihood it is the sum of
    :math:`-2 s^2 \log p(y_n \mid f_n)`, up to a constant, plus the penalty; the rows then get new weights before each
    update.

    A fit continues from the weights of an earlier fit. Otherwise it starts from the strongest main effects and pairwise
    interactions, which it finds in two passes over the data. If you interrupt it (Ctrl-C), the model keeps the weights
    reached so far. If it fails, the model and its training data stay as they were.

    :param model: The model; its posterior is replaced.
    :param data: `(x, y)`, tensors or arrays (also :class:`numpy.memmap`), or an iterable of such batches that starts
        from the beginning each time: a DataLoader, a file opened by :func:`~gpytorch_tkrr.open_table`. By default the
        training data of the model.
    :param new_rows: Rows `(x, y)` that are first appended to the training data of the model.
    :param max_sweeps: Largest number of sweeps; there are `max_sweeps * 2 (D - 1) + 1` updates in all.
    :param rel_tol: Stop when a sweep improves the objective by less than this fraction; 0.0 never stops early.
    :param penalty: The penalty, by default :class:`FrobeniusPenalty`.
    :param loss: For two classes: :class:`~gpytorch_tkrr.Hinge` or :class:`~gpytorch_tkrr.SquaredHinge` instead of
        squared errors, a support vector machine. The sign of the response is the class; variances and probabilities
        remain those of least squares around it.
    :param initial_factors: D tensors `(M_d, R)` to start from, weights of :math:`z = \sqrt v \phi` with the outermost
        output scale left out of v; for a tensor train cores `(r, M_d, r')`.
    :param learn_hyperparameters: Whether to learn lengthscales, output scales and noise during the fit, by the evidence
        of each factor, through the raw parameters of kernel and likelihood. The objective may then rise. The variances
        of a category whose factor has more than 1 024 weights stay as they are; fit_gibbs learns them.
    :param seed: Seed of the random part of the start.
    :param progress: Whether to show a progress bar (needs tqdm).
    :param memory: Bytes that the fit may use, in addition to the data, to keep products over modes; the rest is
        computed again when needed.
    :param group: A group of :mod:`torch.distributed` whose processes fit the model together: each passes its own rows
        as `data` (see :class:`~gpytorch_tkrr.Shard`), and all end with the same factors. None for one process.
    :param checkpoint: A file, or a :class:`~gpytorch_tkrr.Checkpoint`, from which the same call resumes a fit that was
        stopped.
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
    require_low_rank(model, "fit_als")
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
    if new_rows is not None:
        require_new_rows(new_rows, data)
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


def require_new_rows(new_rows: Any, data: Any) -> None:
    """
    An error unless new rows are inputs and targets, and the only data that are given.

    :param new_rows: The rows.
    :param data: Other data of the same call.
    """
    if data is not None:
        raise ValueError(
            "new_rows are appended to the model's own training data; data replaces these. Pass one of them."
        )
    if not (isinstance(new_rows, (tuple, list)) and len(new_rows) == 2):
        found = type(new_rows).__name__ + (f" of length {len(new_rows)}" if hasattr(new_rows, "__len__") else "")
        raise InputError(f"new_rows must be a pair (x, y) of inputs and targets; got a {found}.")


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
    sweeps = "1 sweep" if result.sweeps == 1 else f"{result.sweeps} sweeps"
    if result.converged:
        result.message = f"Converged: the last of {sweeps} changed the objective by < {rel_tol:g}."
    elif not num_sweeps and last == 0:
        result.converged, result.message = True, "One input dimension: solved exactly by one update."
    elif not num_sweeps:
        result.message = "Stopped after the first update, as max_sweeps=0 asks."
    else:
        before, after = result.objective[-1 - len(order)], result.objective[-1]
        result.message = (
            f"Stopped after {sweeps}; the last one improved the objective by "
            f"{(before - after) / max(abs(before), 1e-300):.2g}. Call fit_als again to go on."
        )
    if last > 0 and result.objective and fit.has_died(result.objective[-1]):
        message = (
            "All components have died: the model predicts the mean, also after other starts. The penalty is stronger "
            "than what the data say: lower the noise of the likelihood, or the strength of the penalty."
        )
        warnings.warn(message, ConvergenceWarning, stacklevel=4)
        result.message += f" {message}"
