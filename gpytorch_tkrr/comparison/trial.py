"""One model, trained and scored on one split of the data."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError, NotApplicableError
from ..tables.task import Task
from .distribution import Distribution, distribution_scores
from .process import Outcome, peak_resident_bytes
from .scores import classification_scores, normal_levels, regression_scores

Status = Literal["done", "not applicable", "failed", "out of time", "out of memory", "interrupted"]


@dataclass(frozen=True)
class Split:
    """
    Training and test rows.

    :param train_x: `(N, D)`.
    :param train_y: `(N,)`; classes are 0, 1, ...
    :param test_x: `(n, D)`.
    :param test_y: `(n,)`.
    """

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


@dataclass
class Trial:
    """
    The outcome of one model on one split.

    :param model: Name of the model.
    :param split: Number of the split.
    :param status: "done", or what prevented it.
    :param message: Why, if it is not done.
    :param scores: Name of a score -> value.
    :param fit_seconds: Time of `fit`.
    :param predict_seconds: Time of `predict` on all test rows.
    :param memory: Peak resident memory in bytes, beyond that of the process before `fit`; None if unknown.
    :param num_parameters: Trained numbers; None if unknown.
    :param warnings: What was warned of, each once.
    :param chosen: What the training rows have decided, in a word or two.
    :param remark: What the model has to say of its fit.
    :param prediction: Test targets `y`; `mean` and, where there is a distribution, `level`, `lower` and `upper` (see
        :func:`~gpytorch_tkrr.comparison.distribution.distribution_scores`); or `probability`.
    """

    model: str
    split: int
    status: Status
    message: str = ""
    scores: dict[str, float] = field(default_factory=dict)
    fit_seconds: float | None = None
    predict_seconds: float | None = None
    memory: int | None = None
    num_parameters: int | None = None
    warnings: list[str] = field(default_factory=list)
    chosen: str = ""
    remark: str = ""
    prediction: dict[str, Tensor] = field(default_factory=dict)


def run_trial(name: str, model: Any, task: Task, number: int, split: Split, num_threads: int | None = None) -> Trial:
    """
    Train and score.

    :param name: Name of the model.
    :param model: An object with `fit` and `predict`.
    :param task: Regression or classification.
    :param number: Number of the split.
    :param split: The rows.
    :param num_threads: Threads of torch; None leaves them as they are.
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    before = peak_resident_bytes()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        start = time.perf_counter()
        model.fit(split.train_x, split.train_y)
        fitted = time.perf_counter()
        answer = _predict(model, task, split.test_x)
        end = time.perf_counter()
    after = peak_resident_bytes()
    if isinstance(answer, Distribution):
        with torch.no_grad():
            scores, prediction = distribution_scores(split.test_y, answer)
        _require_finite(prediction["mean"], "mean")
    else:
        prediction = _checked(answer, task, len(split.test_y))
        if task == "regression":
            scores = regression_scores(split.test_y, prediction["mean"], prediction.get("sd"))
        else:
            scores = classification_scores(split.test_y, prediction["probability"])
        if "sd" in prediction:
            prediction |= normal_levels(split.test_y, prediction["mean"], prediction.pop("sd"))
    prediction["y"] = split.test_y
    return Trial(
        name,
        number,
        "done",
        scores=scores,
        fit_seconds=fitted - start,
        predict_seconds=end - fitted,
        memory=None if before is None or after is None else after - before,
        num_parameters=getattr(model, "num_parameters", None),
        warnings=list(dict.fromkeys(map(_summary, filter(_concerns_users, caught)))),
        chosen=getattr(model, "chosen", ""),
        remark=getattr(model, "remark", ""),
        prediction=prediction,
    )


def as_trial(outcome: Outcome, name: str, number: int) -> Trial:
    """
    The trial, or a record of what prevented it.

    :param outcome: Of :func:`run_trial`.
    :param name: Name of the model.
    :param number: Number of the split.
    """
    if outcome.ending == "returned":
        return outcome.value
    status: dict[str, Status] = {"out of time": "out of time", "out of memory": "out of memory"}
    if isinstance(outcome.value, NotApplicableError):
        return Trial(name, number, "not applicable", str(outcome.value))
    return Trial(name, number, status.get(outcome.ending, "failed"), outcome.message)


def _concerns_users(caught: warnings.WarningMessage) -> bool:
    return issubclass(caught.category, (UserWarning, RuntimeWarning))


def _summary(caught: warnings.WarningMessage) -> str:
    return f"{caught.category.__name__}: {caught.message}".partition("\n")[0]


def _predict(model: Any, task: Task, x: Tensor) -> Any:
    if task == "classification" and hasattr(model, "predict_proba"):
        return np.asarray(model.predict_proba(x))
    return model.predict(x)


def _require_finite(values: Tensor, name: str) -> None:
    if not torch.isfinite(values).all():
        raise InputError(f"predict returned a {name} with NaN or infinite values.")


def _checked(answer: Any, task: Task, num_rows: int) -> dict[str, Tensor]:
    """What a model has predicted, as float64 tensors; an error if it cannot be scored."""
    names = ["probability"] if task == "classification" else ["mean", "sd"]
    parts = answer if isinstance(answer, tuple) else (answer,)
    if len(parts) > len(names):
        raise InputError(f"predict returned {len(parts)} values; for {task} it is {' and '.join(names)}.")
    checked = {}
    for name, part in zip(names, parts, strict=False):
        values = torch.as_tensor(np.asarray(part.detach().cpu() if isinstance(part, Tensor) else part)).double()
        is_table = name == "probability" and values.dim() == 2 and len(values) == num_rows and values.shape[1] > 1
        if values.numel() != num_rows and not is_table:
            raise InputError(f"predict returned a {name} of shape {tuple(values.shape)}; expected ({num_rows},).")
        _require_finite(values, name)
        checked[name] = values if is_table else values.reshape(-1)
    if "sd" in checked and not (checked["sd"] > 0).all():
        raise InputError("predict returned an sd that is not positive.")
    if task == "classification" and not ((0 <= checked["probability"]) & (checked["probability"] <= 1)).all():
        raise InputError("predict returned a probability outside of [0, 1]. It is that of class 1.")
    return checked
