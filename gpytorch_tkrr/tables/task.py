"""Regression or classification: inputs and targets, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError
from .columns import Columns, ColumnScan, require_finite

Task = Literal["regression", "classification"]

#: More different values are no classes.
MAX_CLASSES = 100


@dataclass(frozen=True)
class TaskData:
    """
    Inputs and targets of a task.

    :param task: Regression or classification.
    :param x: Inputs `(N, D)`, float64; categories are level numbers.
    :param y: Targets `(N,)`, float64; classes are 0, 1, ...
    :param columns: What the inputs are.
    :param classes: What the classes stand for.
    """

    task: Task
    x: Tensor
    y: Tensor
    columns: Columns
    classes: tuple[str, ...] | None = None


def check_data(x: Any, y: Any, task: Task | None = None, *, min_rows: int = 2) -> TaskData:
    """
    Inputs and targets of any kind as those of a task.

    :param x: Inputs `(N, D)`: an array or a tensor of numbers, or a DataFrame with columns of any kind.
    :param y: Targets `(N,)`; for classification values of any kind.
    :param task: By default classification if targets are no numbers, or two different ones; else regression.
    :param min_rows: Least number of rows.

    Example:
        >>> from gpytorch_tkrr.tables.task import check_data
        >>> data = check_data([[0.0], [1.0], [2.0]], ["no", "yes", "no"])
        >>> data.task, data.classes, data.y.tolist()
        ('classification', ('no', 'yes'), [0.0, 1.0, 0.0])
    """
    if hasattr(x, "iloc"):
        columns = Columns.learn(x)
        inputs = torch.as_tensor(columns.matrix(x))
    else:
        try:
            array = np.asarray(x.detach().cpu() if isinstance(x, Tensor) else x, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise InputError(f"The inputs must be numbers: {error}.") from None
        array = array[:, None] if array.ndim == 1 else array
        columns = Columns.learn(array) if array.ndim == 2 else Columns([])
        inputs = torch.as_tensor(array)
    values = np.asarray(y.detach().cpu() if isinstance(y, Tensor) else y).reshape(-1)
    if inputs.dim() != 2 or len(inputs) != len(values):
        raise InputError(f"Inputs must have shape (N, D), targets (N,); got {tuple(inputs.shape)} and {values.shape}.")
    if len(values) < min_rows:
        raise InputError(f"There are {len(values)} rows; at least {min_rows} are needed.")
    is_number = values.dtype.kind in "fiub"
    values = values.astype(np.float64) if is_number else values
    require_finite(inputs.numpy(), columns.names, what="The table")
    if is_number:
        require_finite(values[:, None], ["target"], what="The table")
    if task is None:
        task = default_task(values, "target", ask=False)
    targets, classes = encode_targets(values, task)
    return TaskData(task, inputs, torch.as_tensor(targets), columns, classes)


def default_task(values: Any, name: str, *, ask: bool) -> Task:
    """
    Classification for text, categories, booleans and two different numbers; regression for other numbers.

    :param values: The targets `(N,)`, without missing ones: a pandas Series or an array.
    :param name: Name of the target.
    :param ask: Whether two different numbers are an error that asks which task it is.
    """
    kind = getattr(values.dtype, "kind", "O")
    if kind not in "fiu":
        if kind == "b":
            return "classification"
        scan = ColumnScan(name)
        scan.update(values)
        column = scan.column()
        if column.kind == "date":
            raise InputError(f"The target {name!r} is a date; expected a number or classes. Make it a number of days.")
        if column.kind != "number":
            return "classification"
        values = column.encode(values)[:, 0]
    distinct = np.unique(np.asarray(values, dtype=np.float64))
    if len(distinct) == 2 and ask:
        low, high = (_label(value) for value in distinct)
        raise InputError(
            f"The target {name!r} has two values only, {low} and {high}: are these classes or numbers? Say --task "
            "classification or --task regression."
        )
    return "classification" if len(distinct) == 2 else "regression"


def encode_targets(values: Any, task: Task) -> tuple[np.ndarray, tuple[str, ...] | None]:
    """
    Targets as numbers, and what classes stand for.

    :param values: Targets `(N,)`, without missing ones.
    :param task: The task.
    """
    values = np.asarray(values)
    distinct = np.unique(values.astype(str) if values.dtype.kind == "O" else values)
    if len(distinct) == 1:
        raise InputError(f"The target is constant: all values are {_label(distinct[0])}. There is nothing to learn.")
    if task == "classification":
        if len(distinct) > MAX_CLASSES:
            raise InputError(
                f"The target has {len(distinct)} different values; a classification takes at most {MAX_CLASSES} "
                "classes. If it is a number, say --task regression."
            )
        values = values.astype(str) if values.dtype.kind == "O" else values
        codes = np.searchsorted(distinct, values).astype(np.float64)
        return codes, tuple(_label(value) for value in distinct)
    if task != "regression":
        raise InputError(f"task must be 'regression' or 'classification'; got {task!r}.")
    try:
        return values.astype(np.float64), None
    except (TypeError, ValueError):
        raise InputError(f"The target of a regression must be numbers; got, for instance, {values[0]!r}.") from None


def _label(value: Any) -> str:
    return f"{value:g}" if isinstance(value, (float, np.floating)) else str(value)
