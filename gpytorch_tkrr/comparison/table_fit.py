"""What the command line does with a table: fit a model, say what it found, predict."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch

from ..data.parallel import Processes
from ..errors import ExtrapolationWarning, InputError
from ..model.effects import EmpiricalMeasure, MainEffects, main_effects, sobol_indices
from ..model.tkrr import TKRR
from ..tables.columns import Columns, require_columns, require_finite
from ..tables.encoded import EncodedSource
from ..tables.files import TableSource
from ..tables.table import complete_rows, require_complete
from ..tables.task import Task, default_task, encode_targets
from .scores import classification_scores, regression_scores

if TYPE_CHECKING:
    from ..sklearn.classifier import TKRRClassifier
    from ..sklearn.regressor import TKRRRegressor

#: Share of the rows that are held out for a score, and their smallest and largest number.
HELD_OUT, MIN_HELD_OUT, MAX_HELD_OUT = 0.1, 10, 2000

#: What is said instead of a score.
TOO_FEW = f"There are too few rows to hold {MIN_HELD_OUT} out for a score."

#: Rows over which the shares of inputs are averaged.
MEASURE_ROWS = 1000

#: Points at which the effect of an input is looked at.
NUM_POINTS = 20

#: Inputs with a line of their own.
MAX_LINES = 20


@dataclass
class FitOptions:
    """
    How a table is fitted.

    :param method: "gibbs" or "als".
    :param rank: R; None for the default of the method.
    :param num_basis: Sines per input; None for the model's own choice.
    :param noise: Kind of noise of a regression, or "auto".
    :param target_transform: "log", "yeo-johnson" or None.
    :param categorical: Columns of numbers that are categories.
    :param missing: "integrate" where inputs may be missing, or None.
    :param sweeps: Options of :func:`~gpytorch_tkrr.fit_gibbs`: `num_draws`, `num_warmup`, `num_chains`.
    :param seed: Seed of all that is random.
    :param progress: Whether to show a progress bar.
    """

    method: str = "gibbs"
    rank: int | None = None
    num_basis: int | None = None
    noise: str = "auto"
    target_transform: str | None = None
    categorical: Sequence[str] = ()
    missing: str | None = None
    sweeps: dict[str, int] = field(default_factory=dict)
    seed: int = 0
    progress: bool = False

    def estimator(self, task: Task) -> TKRRClassifier | TKRRRegressor:
        """
        The estimator before it is fitted.

        :param task: Regression or classification.
        """
        from ..sklearn.classifier import TKRRClassifier
        from ..sklearn.regressor import TKRRRegressor

        options: dict[str, Any] = {
            "rank": self.rank,
            "num_basis": self.num_basis,
            "method": self.method,
            "categorical": list(self.categorical) or None,
            "missing": self.missing,
            "random_state": self.seed,
            "progress": self.progress,
            **self.sweeps,
        }
        if task == "classification":
            if self.target_transform is not None:
                raise InputError("--transform is for numbers; the target is a class.")
            return TKRRClassifier(**options)
        return TKRRRegressor(noise=self.noise, target_transform=self.target_transform, **options)


def fit_table(
    frame: pd.DataFrame, target: str, inputs: Sequence[str], task: Task, options: FitOptions
) -> tuple[TKRRClassifier | TKRRRegressor, list[str]]:
    """
    Fit a table: a tenth of the rows is held out for a score, then the fit goes on with all rows.

    :param frame: The table, without missing values in the columns that are used.
    :param target: Name of the target.
    :param inputs: Names of the inputs.
    :param task: Regression or classification.
    :param options: How it is fitted.
    :return: The estimator, and lines that say how good it is and what its inputs do.
    """
    estimator = options.estimator(task)
    x, values = frame[list(inputs)], frame[target]
    columns = Columns.learn(x, categorical=options.categorical)  # what is wrong, in rows of the file
    require_finite(columns.matrix(x), columns.names, allow_missing=estimator.allows_missing, what="The table")
    encode_targets(values, task)  # constant targets, too many classes
    y = as_targets(values, task)
    estimator.facts_ = {"target": target, "task": task, "rows": len(frame)}
    test = _held_out(y, task, options.seed)
    if not test.any():
        estimator.fit(x, y)
        lines = [TOO_FEW]
    else:
        estimator.fit(x[~test], y[~test])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExtrapolationWarning)  # held out by chance
            scores = held_out_scores(estimator, x[test], y[test])
            estimator.facts_["held out"] = scores
            lines = [_score_line(scores, f"Score of {int(test.sum())} held-out rows (the final fit uses them): ", task)]
            estimator.partial_fit(x[test], y[test])
    if task == "regression":
        lines.append(noise_line(estimator))
    rows = torch.as_tensor(estimator.columns_.matrix(x.iloc[:: max(1, len(x) // MEASURE_ROWS)]))
    head = f"{task.capitalize()} of {target!r}: {len(frame)} rows, {len(inputs)} inputs."
    return estimator, [head, *column_lines(estimator.columns_), *lines, *input_lines(estimator, rows)]


def fit_stream(
    table: TableSource,
    task: Task | None,
    options: FitOptions,
    *,
    memory: int,
    checkpoint: str | Path | None,
    processes: Processes,
) -> tuple[TKRRClassifier | TKRRRegressor, list[str]]:
    """
    Fit a file that is read in batches, again and again, each process its part of the rows. A tenth of the rows, at most
    :data:`MAX_HELD_OUT`, is held out for a score and not seen by the fit.

    :param table: The file.
    :param task: Regression or classification; None to decide by its first rows.
    :param options: How it is fitted.
    :param memory: Bytes that may be used to keep what was read.
    :param checkpoint: A file to go on from if the fit is stopped.
    :param processes: The processes that fit together.
    :return: The estimator, and lines that say how good it is and what its inputs do.
    """
    from ..sklearn.streamed import fit_file

    if table.num_rows < 2:
        raise InputError(f"{table.path.name} has {table.num_rows} rows; at least 2 are needed.")
    if task is None:
        (first, *_) = table.frames(0, min(table.num_rows, table.batch_rows), [table.target])
        task = default_task(first[table.target].dropna(), table.target, ask=True)
    estimator = options.estimator(task)
    numbers, test = _held_out_of_file(table, task, options.seed)
    fit_file(estimator, table, memory=memory, checkpoint=checkpoint, processes=processes, without=numbers)
    estimator.facts_ = {"target": table.target, "task": task, "rows": table.num_rows}
    head = f"{task.capitalize()} of {table.target!r}: {table.num_rows} rows, {len(table.inputs)} inputs, in batches."
    noise = [noise_line(estimator)] if task == "regression" else []
    score = TOO_FEW
    if len(test):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExtrapolationWarning)  # held out by chance
            estimator.facts_["held out"] = held_out_scores(
                estimator, test[table.inputs], as_targets(test[table.target], task)
            )
        score = _score_line(estimator.facts_["held out"], f"Score of {len(test)} held-out rows: ", task)
    zeros = lambda values: np.zeros(len(values))  # noqa: E731  targets are not needed
    x, _ = EncodedSource(table, estimator.columns_, zeros, allow_missing=estimator.allows_missing).sample()
    rows = x[:: max(1, len(x) // MEASURE_ROWS)]
    return estimator, [head, *column_lines(estimator.columns_), score, *noise, *input_lines(estimator, rows)]


def as_targets(values: pd.Series, task: Task) -> np.ndarray:
    """
    A column of targets as estimators take it, `(n,)`.

    :param values: The column.
    :param task: Regression or classification.
    """
    return np.array(values, dtype=np.float64) if task == "regression" else values.astype(str).to_numpy(dtype=str)


def _num_held_out(num_rows: int) -> int:
    number = min(int(HELD_OUT * num_rows), MAX_HELD_OUT)
    return number if number >= MIN_HELD_OUT else 0


def _held_out_of_file(table: TableSource, task: Task, seed: int) -> tuple[np.ndarray, pd.DataFrame]:
    """Numbers of rows that are held out, ascending, and these rows, in one pass; none that lacks a value."""
    number = _num_held_out(table.num_rows)
    names = [*table.inputs, table.target]
    if not number:
        return np.zeros(0, dtype=np.int64), pd.DataFrame(columns=names)
    chosen = np.sort(np.random.default_rng(seed).choice(table.num_rows, number, replace=False))
    parts, counts, start = [], pd.Series(dtype=np.int64), 0
    for frame in table.frames(0, table.num_rows, names):
        is_chosen = np.isin(np.arange(start, start + len(frame)), chosen)
        parts.append(frame[is_chosen])
        if task == "classification":
            counts = counts.add(frame[table.target][~is_chosen].astype(str).value_counts(), fill_value=0)
        start += len(frame)
    test = pd.concat(parts, ignore_index=True)
    is_kept = test.notna().all(axis=1).to_numpy()
    if task == "classification":  # no class that has less than two rows elsewhere
        is_kept = is_kept & (test[table.target].astype(str).map(counts).fillna(0) >= 2).to_numpy()
    return chosen[is_kept], test[is_kept]


def _held_out(y: np.ndarray, task: Task, seed: int) -> np.ndarray:
    """Which rows are held out, `(N,)`; of classes none that has less than two rows elsewhere."""
    number = _num_held_out(len(y))
    chosen = np.zeros(len(y), dtype=bool)
    if not number:
        return chosen
    chosen[np.random.default_rng(seed).permutation(len(y))[:number]] = True
    if task == "classification":
        rest, counts = np.unique(y[~chosen], return_counts=True)
        chosen &= np.isin(y, rest[counts >= 2])
    return chosen


def held_out_scores(estimator: Any, x: pd.DataFrame, y: np.ndarray) -> dict[str, float]:
    """
    Scores of rows that the model has not seen.

    :param estimator: A fitted estimator.
    :param x: Their inputs.
    :param y: Their targets.
    """
    log_density = float(estimator.log_predictive_density(x, y).mean())
    if hasattr(estimator, "classes_"):
        codes = torch.as_tensor(np.searchsorted(estimator.classes_, y)).double()
        return classification_scores(codes, torch.as_tensor(estimator.predict_proba(x)))
    mean, quantiles = estimator.predict(x, return_quantiles=[0.025, 0.975])
    rmse = regression_scores(torch.as_tensor(y), torch.as_tensor(mean), None)["rmse"]
    inside = (quantiles[:, 0] <= y) & (y <= quantiles[:, 1])
    return {"rmse": rmse, "sd": float(y.std()), "log density": log_density, "coverage": float(inside.mean())}


def _score_line(scores: dict[str, float], head: str, task: Task) -> str:
    if task == "classification":
        return f"{head}{scores['error']:.1%} wrong, mean negative log likelihood {scores['nll']:.3g}."
    return (
        f"{head}RMSE {scores['rmse']:.4g} (the target's standard deviation is {scores['sd']:.4g}), 95 % intervals hold "
        f"{scores['coverage']:.0%}, mean log density {scores['log density']:.3g}."
    )


def noise_line(estimator: TKRRRegressor) -> str:
    """
    Which noise the model has, and why.

    :param estimator: A fitted regressor.
    """
    choice = estimator.noise_choice_
    return f"Noise: {estimator.noise_}." if choice is None else choice.message


def column_lines(columns: Columns) -> Iterator[str]:
    """
    What the columns that are no plain numbers are taken for.

    :param columns: The columns.
    """
    width = max((len(column.name) for column in columns.inputs if column.kind != "number"), default=0)
    for column in columns.inputs:
        if column.kind != "number":
            yield f"  {column.name:{width}}  {column.describe()}"


@torch.no_grad()
def input_lines(estimator: Any, x: torch.Tensor) -> list[str]:
    """
    A line for each input: its share of what the model explains, and the direction of its effect.

    :param estimator: A fitted estimator.
    :param x: Encoded rows `(n, D)` over which the others are averaged.
    """
    columns, measure = estimator.columns_, EmpiricalMeasure(x)
    models: list[TKRR] = estimator.models()
    total = torch.stack([sobol_indices(model, measure=measure).total.mean(0) for model in models]).mean(0)
    effects = main_effects(models[0], measure=measure, num_points=NUM_POINTS) if len(models) == 1 else None
    names = columns.names
    width = max(map(len, names))
    lines = ["Shares of the variation that the model explains (total Sobol indices):"]
    for d in total.argsort(descending=True).tolist()[:MAX_LINES]:
        effect = "" if effects is None or total[d] < 0.01 else _direction(columns, effects, d)
        lines.append(f"  {names[d]:{width}}  {float(total[d]):6.1%}  {effect}".rstrip())
    if len(names) > MAX_LINES:
        lines.append(f"  ... and {len(names) - MAX_LINES} more")
    return lines


def _direction(columns: Columns, effects: MainEffects, d: int) -> str:
    """How f moves with one input, all others averaged over."""
    levels, values = columns.categories, effects.mean(d).tolist()
    if d in levels:
        texts = next(column.levels for column in columns.inputs if column.outputs == [columns.names[d]])
        known = [
            (value, int(level)) for value, level in zip(values, effects.grids[d], strict=True) if level < levels[d]
        ]
        return f"highest for {texts[max(known)[1]]}, lowest for {texts[min(known)[1]]}"
    steps = np.diff(values)
    if not np.abs(steps).sum() > 0:
        return ""
    rising = float(np.clip(steps, 0, None).sum() / np.abs(steps).sum())
    return "rises" if rising > 0.9 else "falls" if rising < 0.1 else "rises and falls"


@torch.no_grad()
def predict_table(
    estimator: Any, frame: pd.DataFrame, *, drop_missing: bool = False, keep: Sequence[str] = ()
) -> pd.DataFrame:
    """
    Predictions for the rows of a table, in their order: `mean` (with a transform of the target `median`), `sd`, `lower`
    and `upper` (95 %) of new observations; for two classes `probability` (of the second) and `class`; for several
    `class` and the probability of each; `extrapolates` says which rows lie outside the range of the training rows, or
    have a category that these did not have.

    :param estimator: A fitted estimator.
    :param frame: A table with the input columns, in any order.
    :param drop_missing: Whether rows with missing values are left without a prediction.
    :param keep: Columns of the table that come before the predictions.
    """
    names = [column.name for column in estimator.columns_.inputs]
    needed = [] if estimator.allows_missing else names
    require_columns(frame, names)
    if not drop_missing:
        require_complete(frame, needed, drop_missing=False)
    complete = complete_rows(frame, needed)
    rows = frame.loc[complete, names]
    if not hasattr(estimator, "feature_names_in_"):
        rows = rows.to_numpy(dtype=np.float64)
    values = _answers(estimator, rows) if complete.any() else _answers(estimator, None)
    answer = pd.DataFrame(values, index=frame.index[complete]).reindex(frame.index)
    for name in reversed(list(keep)):
        if name in answer:
            raise InputError(f"The predictions have a column {name!r} of their own; rename it to keep it.")
        answer.insert(0, name, frame[name])
    return answer


def _answers(estimator: Any, rows: Any) -> dict[str, Any]:
    """Columns of the answer; without rows empty ones."""
    nothing: np.ndarray = np.empty(0)
    if hasattr(estimator, "classes_"):
        probabilities = np.empty((0, len(estimator.classes_))) if rows is None else estimator.predict_proba(rows)
        classes = estimator.classes_[probabilities.argmax(1)] if rows is not None else nothing
        if len(estimator.classes_) == 2:
            values: dict[str, Any] = {"probability": probabilities[:, 1], "class": classes}
        else:
            values = {"class": classes}
            values |= {f"probability {name}": probabilities[:, k] for k, name in enumerate(estimator.classes_)}
    else:
        point = "mean" if estimator.transform_ is None else "median"
        if rows is None:
            return {name: nothing for name in (point, "sd", "lower", "upper", "extrapolates")}
        mean, sd, quantiles = estimator.predict(rows, return_std=True, return_quantiles=[0.025, 0.975])
        values = {point: mean, "sd": sd, "lower": quantiles[:, 0], "upper": quantiles[:, 1]}
    values["extrapolates"] = nothing if rows is None else estimator.extrapolates(rows)
    return values
