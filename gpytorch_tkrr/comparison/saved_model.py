"""Fitted estimators in files."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..errors import InputError

if TYPE_CHECKING:
    from ..sklearn.table_estimator import TableEstimator


def load(path: str | Path) -> TableEstimator:
    """
    A fitted estimator from a file that `gpytorch-tkrr fit` or `estimator.save` wrote. The file is not trusted: nothing
    in it is executed (``torch.load(weights_only=True)``).

    :param path: The file.
    :return: An estimator of :mod:`gpytorch_tkrr.sklearn`.

    Example:
        >>> import tempfile, numpy as np, gpytorch_tkrr as tkrr
        >>> X = np.random.default_rng(0).uniform(size=(50, 2))
        >>> model = tkrr.sklearn.TKRRRegressor(rank=2, method="als", random_state=0).fit(X, X.sum(1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model.save(f"{folder}/model.pt")
        ...     loaded = tkrr.load(f"{folder}/model.pt")
        >>> bool(np.allclose(loaded.predict(X), model.predict(X)))
        True
    """
    from ..sklearn import classifier, hilbert_regressor, regressor  # noqa: F401  they are known by their names
    from ..sklearn.table_estimator import FORMAT, TableEstimator

    if not Path(path).is_file():
        raise InputError(f"{path} is a folder." if Path(path).is_dir() else f"There is no file {path}.")
    file = io.BytesIO(Path(path).read_bytes())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, on archives of other kinds
            content = torch.load(file, map_location="cpu", weights_only=True)
        found = dict(content)["format"]
        if found == FORMAT:
            return TableEstimator.from_content(content)
    except Exception as error:  # whatever torch, pickle and zipfile raise for a file of another kind
        raise InputError(f"{path} is not a model written by `gpytorch-tkrr fit`, or it is damaged.") from error
    raise InputError(f"{path} has format {found}; this version reads format {FORMAT}. Fit again.")
