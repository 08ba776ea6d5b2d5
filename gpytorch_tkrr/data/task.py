"""Regression or classification: inputs and targets, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError

Task = Literal["regression", "classification"]


@dataclass(frozen=True)
class TaskData:
    """
    Inputs and targets of a task.

    :param task: Regression, or classification of two classes.
    :param x: Inputs `(N, D)`, float64.
    :param y: Targets `(N,)`, float64; classes are 0 and 1.
    :param classes: What classes 0 and 1 stand for.
    """

    task: Task
    x: Tensor
    y: Tensor
    classes: tuple[str, str] | None = None


def check_data(x: Any, y: Any, task: Task | None = None, *, min_rows: int = 2) -> TaskData:
    """
    Inputs and targets of any kind as those of a task.

    :param x: Inputs `(N, D)`, numbers.
    :param y: Targets `(N,)`; for classification two different values of any kind.
    :param task: By default classification if there are two different targets, else regression.
    :param min_rows: Least number of rows.

    Example:
        >>> data = check_data([[0.0], [1.0], [2.0]], ["no", "yes", "no"])
        >>> data.task, data.classes, data.y.tolist()
        ('classification', ('no', 'yes'), [0.0, 1.0, 0.0])
    """
    try:
        inputs = torch.as_tensor(np.asarray(x.detach().cpu() if isinstance(x, Tensor) else x, dtype=np.float64))
    except (TypeError, ValueError) as error:
        raise InputError(f"The inputs must be numbers: {error}.") from None
    values = np.asarray(y.detach().cpu() if isinstance(y, Tensor) else y).reshape(-1)
    inputs = inputs.unsqueeze(-1) if inputs.dim() == 1 else inputs
    if inputs.dim() != 2 or len(inputs) != len(values):
        raise InputError(f"Inputs must have shape (N, D), targets (N,); got {tuple(inputs.shape)} and {values.shape}.")
    if len(values) < min_rows:
        raise InputError(f"There are {len(values)} rows; at least {min_rows} are needed.")
    is_number = values.dtype.kind in "fiub"
    values = values.astype(np.float64) if is_number else values
    if not torch.isfinite(inputs).all() or (is_number and not np.isfinite(values).all()):
        raise InputError("Inputs or targets hold NaN or infinite values. Drop these rows.")
    distinct = np.unique(values)
    if len(distinct) == 1:
        raise InputError(f"The target is constant: all values are {distinct[0]}. There is nothing to learn.")
    if task is None:
        task = "classification" if len(distinct) == 2 or not is_number else "regression"
    if task == "classification":
        if len(distinct) != 2:
            raise InputError(f"Classification takes two classes; the target has {len(distinct)} different values.")
        targets = torch.as_tensor((values == distinct[1]).astype(np.float64))
        return TaskData(task, inputs, targets, (_label(distinct[0]), _label(distinct[1])))
    if task != "regression":
        raise InputError(f"task must be 'regression' or 'classification'; got {task!r}.")
    if not is_number:
        raise InputError(f"The target of a regression must be numbers; got, for instance, {values[0]!r}.")
    return TaskData(task, inputs, torch.as_tensor(values))


def _label(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
