"""Estimators fitted to files that are read in batches, again and again, by one process or several."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..data.parallel import ONE_PROCESS, Processes
from ..data.source import Shard
from ..errors import InputError
from ..model.tkrr import TKRR
from ..tables.columns import Column, Columns, ColumnScan, scan
from ..tables.encoded import EncodedSource
from ..tables.files import TableSource
from .classifier import TKRRClassifier
from .regressor import TKRRRegressor
from .table_estimator import as_seed
from .tkrr_estimator import TKRREstimator


def fit_file(
    estimator: TKRREstimator,
    table: TableSource,
    *,
    memory: int = 2 << 30,
    checkpoint: str | Path | None = None,
    processes: Processes = ONE_PROCESS,
    without: np.ndarray | None = None,
) -> None:
    r"""
    Fit an estimator to a file. One pass finds out what the columns are and the levels of categories; every process
    makes it over all rows. The fit then reads batches again and again, each process its part of the rows.

    :param estimator: A :class:`TKRRRegressor` or a :class:`TKRRClassifier`.
    :param table: The file, see :func:`~gpytorch_tkrr.open_table`.
    :param memory: Bytes that may be used to keep what was read.
    :param checkpoint: A file to go on from if the fit is stopped.
    :param processes: The processes that fit together.
    :param without: Numbers of rows that the fit does not see, ascending.

    Example:
        >>> import tempfile
        >>> import numpy as np, pandas as pd, gpytorch_tkrr as tkrr
        >>> from gpytorch_tkrr.sklearn.streamed import fit_file
        >>> size, kind = np.linspace(0, 1, 90), np.array(["a", "b", "c"] * 30)
        >>> frame = pd.DataFrame({"size": size, "kind": kind, "price": size + (kind == "a")})
        >>> model = tkrr.sklearn.TKRRRegressor(rank=2, method="als", random_state=0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     frame.to_csv(f"{folder}/things.csv", index=False)
        ...     fit_file(model, tkrr.open_table(f"{folder}/things.csv", target="price"))
        >>> bool(model.score(frame[["size", "kind"]], frame["price"]) > 0.99)
        True
    """
    is_classifier = isinstance(estimator, TKRRClassifier)
    columns, target = scan_file(table, categorical=estimator.categorical or (), is_class=is_classifier)
    estimator.columns_ = columns
    estimator.n_features_in_ = len(table.inputs)
    estimator.feature_names_in_ = np.array(table.inputs, dtype=object)
    options: dict[str, Any] = {"group": processes, "memory": memory}
    seed = as_seed(estimator.random_state)
    encoded = partial(EncodedSource, table, columns, allow_missing=estimator.allows_missing, without=without)
    if isinstance(estimator, TKRRClassifier):
        estimator.classes_ = np.array(target.levels)
        for number, (model, is_positive) in enumerate(estimator.empty_models(len(target.levels))):
            source = encoded(partial(_is_class, target, is_positive))
            part = None if checkpoint is None else Path(f"{checkpoint}.{number}" if number else checkpoint)
            data = _training(model, source, processes, memory)
            estimator.fit_model(model, seed + number, data=data, checkpoint=part, **options)
            model.cpu()
        return
    assert isinstance(estimator, TKRRRegressor)
    source = encoded(lambda values: target.encode(values)[:, 0])
    estimator.learn_target(source.sample, seed)
    source.target = lambda values: estimator.transformed(target.encode(values)[:, 0]).numpy()
    model = estimator.new_model()
    data = _training(model, source, processes, memory)
    if data.summary.variance == 0:
        raise InputError(f"The target is constant: all values are {data.summary.mean:g}. There is nothing to learn.")
    estimator.result_ = estimator.fit_model(model, seed, data=data, checkpoint=checkpoint, **options)
    estimator.model_ = model.cpu()


def scan_file(table: TableSource, *, categorical: Any = (), is_class: bool = False) -> tuple[Columns, Column]:
    """
    What the inputs of a file are, and its target, in one pass.

    :param table: The file.
    :param categorical: Columns that are categories although they hold numbers.
    :param is_class: Whether the target is a class.
    """
    targets = ColumnScan(table.target, is_category=is_class)

    def pieces() -> Iterator[Any]:
        for frame in table.frames(0, table.num_rows, [*table.inputs, table.target]):
            targets.update(frame[table.target])
            yield frame[table.inputs]

    columns = scan(pieces(), categorical=[each for each in categorical if each in table.inputs])
    if not columns.inputs:
        raise InputError(f"{table.path.name} has no rows.")
    column = targets.column()
    if is_class and len(column.levels) < 2:
        raise InputError(f"The target is constant: all values are {column.levels[0]}. There is nothing to learn.")
    if not is_class and column.kind != "number":
        raise InputError(f"The target {table.target!r} of a regression must be numbers; it is {column.describe()}.")
    return columns, column


def _is_class(target: Column, number: int, values: Any) -> np.ndarray:
    return (target.encode(values)[:, 0] == number).astype(np.float64)


def _training(model: TKRR, source: EncodedSource, processes: Processes, memory: int) -> Any:
    model.to(processes.device)
    return model.training_data(Shard(source, processes.rank, processes.size), processes, memory=memory)
