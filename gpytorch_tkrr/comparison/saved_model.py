"""A fitted T-KRR model in a file, with the names of the columns that it takes."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from ..data.files import open_table
from ..data.parallel import ONE_PROCESS, Processes
from ..data.source import Shard
from ..data.table import Columns, complete_rows, require_complete
from ..data.task import Task, check_data
from ..data.whole_file import whole_file
from ..errors import InputError
from ..inference.als import fit_als
from ..inference.gibbs import fit_gibbs
from .contender import CONTENDERS
from .tkrr_contenders import ALSContender

#: Changes when files of older versions can no longer be read.
FORMAT = 1


@dataclass
class SavedModel:
    """
    A fitted model and its columns.

    :param method: "tkrr-als" or "tkrr-gibbs".
    :param contender: The fitted model.
    :param columns: Its inputs.
    :param target: Name of its target.
    :param classes: What classes 0 and 1 stand for, or None for regression.
    """

    method: str
    contender: ALSContender
    columns: Columns
    target: str
    classes: tuple[str, str] | None

    def save(self, path: str | Path) -> None:
        """
        Write the model, whole or not at all.

        :param path: The file; it is replaced if it exists.
        """
        path = Path(path)
        content = {
            "format": FORMAT,
            "method": self.method,
            "settings": {"rank": self.contender.rank, "num_basis": self.contender.num_basis},
            "columns": asdict(self.columns),
            "target": self.target,
            "classes": self.classes,
            "state_dict": self.contender.model.state_dict(),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as part:
            torch.save(content, part)

    @classmethod
    def load(cls, path: str | Path) -> SavedModel:
        """
        Read a model; the file is not trusted (``weights_only=True``).

        :param path: The file.
        """
        if not Path(path).is_file():
            raise InputError(f"{path} is a folder." if Path(path).is_dir() else f"There is no file {path}.")
        file = io.BytesIO(Path(path).read_bytes())
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's, on archives of other kinds
                content = torch.load(file, map_location="cpu", weights_only=True)
            found = dict(content)["format"]
            if found == FORMAT:
                return cls._from_content(content)
        except Exception as error:  # whatever torch, pickle and zipfile raise for a file of another kind
            raise InputError(f"{path} is not a model written by `gpytorch-tkrr fit`, or it is damaged.") from error
        raise InputError(f"{path} has format {found}; this version reads format {FORMAT}. Fit again.")

    @classmethod
    def _from_content(cls, content: dict[str, Any]) -> SavedModel:
        """The model that :meth:`save` has written."""
        task: Task = "classification" if content["classes"] else "regression"
        contender = _contender(content["method"], task, **content["settings"])
        contender.model = contender.new_model().double()
        contender.model.load_state_dict(content["state_dict"])
        contender.model.eval()
        columns = Columns(**content["columns"])
        return cls(content["method"], contender, columns, content["target"], content["classes"])

    @torch.no_grad()
    def predict(self, frame: pd.DataFrame, *, drop_missing: bool = False) -> pd.DataFrame:
        """
        Predictions for the rows of a table, in their order: `mean`, `sd`, `lower` and `upper` (95 %) of new
        observations; for classes `probability` (of the second) and `class`; `extrapolates` says which rows lie outside
        the range of the training rows.

        :param frame: A table with the input columns, in any order.
        :param drop_missing: Whether rows with missing values are left without a prediction.
        """
        if not drop_missing:
            require_complete(frame, self.columns.inputs, drop_missing=False)
        complete = complete_rows(frame, self.columns.inputs)
        x = torch.as_tensor(self.columns.matrix(frame[complete]), dtype=torch.float64)
        values: dict[str, Any]
        if self.classes is not None:
            probability = np.asarray(self.contender.predict(x))
            values = {"probability": probability, "class": np.array(self.classes)[(probability >= 0.5).astype(int)]}
        else:
            prediction = self.contender.model.predict(x)
            lower, upper = prediction.quantile(torch.tensor([0.025, 0.975])).numpy()
            values = {"mean": prediction.mean.numpy(), "sd": prediction.stddev.numpy(), "lower": lower, "upper": upper}
        values["extrapolates"] = self.contender.model.extrapolates(x).numpy()
        return pd.DataFrame(values, index=frame.index[complete]).reindex(frame.index)


def fit_table(
    frame: pd.DataFrame,
    columns: Columns,
    target: str,
    *,
    task: Task | None = None,
    method: str = "tkrr-gibbs",
    rank: int | None = None,
    num_basis: int | None = None,
    seed: int = 0,
    progress: bool = False,
) -> SavedModel:
    """
    Fit T-KRR to a table.

    :param frame: The table, without missing values.
    :param columns: Its inputs.
    :param target: Name of its target.
    :param task: Regression or classification; by default classification if the target has two values.
    :param method: "tkrr-als" or "tkrr-gibbs".
    :param rank: R; None for the default of the method.
    :param num_basis: Sines per input; None for the default of the method.
    :param seed: Seed of the fit.
    :param progress: Whether to show a progress bar.
    """
    data = check_data(columns.matrix(frame), frame[target].to_numpy(), task)
    contender = _contender(method, data.task, rank, num_basis)
    contender.seed, contender.progress = seed, progress
    contender.fit(data.x, data.y)
    return SavedModel(method, contender, columns, target, data.classes)


def fit_file(
    path: str | Path,
    target: str,
    *,
    inputs: Sequence[str] | None = None,
    method: str = "tkrr-gibbs",
    rank: int | None = None,
    num_basis: int | None = None,
    seed: int = 0,
    progress: bool = False,
    memory: int = 2 << 30,
    checkpoint: str | Path | None = None,
    processes: Processes = ONE_PROCESS,
) -> SavedModel:
    """
    Fit T-KRR to a file that is read in batches, again and again, each process its part of the rows. Regression only.

    :param path: The file; see :func:`~gpytorch_tkrr.open_table`.
    :param target: Name of its target.
    :param inputs: Names of its inputs; by default all other columns.
    :param method: "tkrr-als" or "tkrr-gibbs".
    :param rank: R; None for the default of the method.
    :param num_basis: Sines per input; None for the default of the method.
    :param seed: Seed of the fit.
    :param progress: Whether to show a progress bar.
    :param memory: Bytes that may be used to keep what was read.
    :param checkpoint: A file to go on from if the fit is stopped.
    :param processes: The processes that fit together.
    """
    contender = _contender(method, "regression", rank, num_basis)
    table = open_table(path, target=target, inputs=inputs)
    rows = Shard(table, processes.rank, processes.size)
    contender.model = contender.new_model().double().to(processes.device)
    data = contender.model.training_data(rows, processes, memory=memory)
    if data.summary.variance == 0:
        raise InputError(f"The target is constant: all values are {data.summary.mean:g}. There is nothing to learn.")
    fit = fit_gibbs if method == "tkrr-gibbs" else partial(fit_als, learn_hyperparameters=True)
    fit(
        contender.model, data=data, seed=seed, progress=progress, memory=memory, group=processes, checkpoint=checkpoint
    )  # fmt: skip
    contender.model.cpu()
    return SavedModel(method, contender, Columns(table.inputs), target, None)


def _contender(method: str, task: Task, rank: int | None, num_basis: int | None) -> ALSContender:
    contender = CONTENDERS[method](task=task)
    assert isinstance(contender, ALSContender)
    contender.rank = contender.rank if rank is None else rank
    contender.num_basis = contender.num_basis if num_basis is None else num_basis
    return contender
