"""What all estimators share: from a table to rows of numbers, random numbers, files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import (
    _check_sample_weight,
    _check_y,
    check_consistent_length,
    check_is_fitted,
    validate_data,
)
from torch import Tensor

from ..data.whole_file import whole_file
from ..errors import InputError
from ..tables.columns import MAX_NUMBER, Columns, require_finite

#: Changes when files of older versions can no longer be read.
FORMAT = 2


Method = TypeVar("Method", bound=Callable[..., Any])


def all_or_nothing(method: Method) -> Method:
    """
    A method of an estimator that leaves it as it was where it ends in an error.

    :param method: `fit` or `partial_fit`.
    """

    @wraps(method)
    def guarded(self: BaseEstimator, *args: Any, **kwargs: Any) -> Any:
        before = dict(self.__dict__)
        try:
            return method(self, *args, **kwargs)
        except BaseException:
            self.__dict__.clear()
            self.__dict__.update(before)
            raise

    return cast("Method", guarded)


class TableEstimator(BaseEstimator):
    """
    An estimator that takes arrays and tables. Columns of text, categories, booleans and dates of a DataFrame become
    numbers as :class:`~gpytorch_tkrr.tables.columns.Columns` says.
    """

    #: Estimators by the name of their class, for files.
    kinds: ClassVar[dict[str, type[TableEstimator]]] = {}

    columns_: Columns
    categorical: Sequence[str | int] | None

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        TableEstimator.kinds[cls.__name__] = cls

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        tags.input_tags.string = True
        tags.input_tags.categorical = True
        return tags

    def _checked_table(self, X: Any, *, reset: bool) -> Any:
        """A DataFrame, or an array of numbers `(N, D)`; names and number of columns are those of the fit."""
        if hasattr(X, "columns") and hasattr(X, "dtypes"):
            validate_data(self, X, reset=reset, skip_check_array=True)
            if not len(X):
                raise InputError(f"Found array with 0 sample(s) (shape={X.shape}) while a minimum of 1 is required.")
            frame = X if hasattr(X, "iloc") else X.to_pandas()
            return frame.set_axis([str(name) for name in frame.columns], axis=1)
        finite = "allow-nan" if self.allows_missing else True
        least = 2 if reset else 1
        return validate_data(self, X, reset=reset, dtype=np.float64, ensure_min_samples=least, ensure_all_finite=finite)

    @property
    def allows_missing(self) -> bool:
        """Whether inputs may be NaN."""
        return False

    def _learn_rows(self, X: Any) -> Tensor:
        """Inputs of the training rows `(N, D)`, in float64; what the columns are is learned from them."""
        table = self._checked_table(X, reset=True)
        if len(table) < 2:
            raise InputError(f"There is n_samples = {len(table)} row; at least 2 are needed.")
        self.columns_ = Columns.learn(table, categorical=self.categorical or ())
        return self._encoded(table)

    def _rows(self, X: Any) -> Tensor:
        """Inputs of new rows `(n, D)`, in float64."""
        check_is_fitted(self)
        return self._encoded(self._checked_table(X, reset=False))

    def _more_rows(self, X: Any) -> tuple[Tensor, bool]:
        """Inputs of rows to be appended `(n, D)`, and whether categories have got new levels by them."""
        table = self._checked_table(X, reset=False)
        known, self.columns_ = self.columns_, self.columns_.grown(table)
        return self._encoded(table), self.columns_ != known

    def _encoded(self, table: Any) -> Tensor:
        x = self.columns_.matrix(table)
        require_finite(x, self.columns_.names, allow_missing=self.allows_missing)
        return torch.as_tensor(x)

    def _numbers(self, y: Any) -> np.ndarray:
        """Targets of a regression `(n,)`, in float64."""
        if y is None:
            raise ValueError(f"{type(self).__name__} requires y to be passed, but the target y is None.")
        values = _check_y(y, y_numeric=True, estimator=self).astype(np.float64)
        good = np.abs(values) < MAX_NUMBER
        if not good.all():
            row = int((~good).argmax())
            raise InputError(
                f"The target of data row {row + 1} is {values[row]:g}: its square is beyond float64. Rescale y."
            )
        return values

    def _weights(self, sample_weight: Any, X: Any, y: Any) -> Tensor | None:
        """Row weights `(N,)`, or None for ones."""
        check_consistent_length(X, y)
        if sample_weight is None:
            return None
        weights = _check_sample_weight(sample_weight, np.empty((len(y), 1)), dtype=np.float64, ensure_non_negative=True)
        if not weights.any():
            raise InputError("All sample weights are zero: there are no rows left.")
        return None if (weights == 1).all() else torch.as_tensor(weights)

    # Files

    def save(self, path: str | Path) -> None:
        """
        Write the fitted estimator to a file that :func:`gpytorch_tkrr.load` reads without executing anything that is in
        it. The training rows are not part of it.

        :param path: The file; it is replaced if it exists, whole or not at all.
        """
        check_is_fitted(self)
        parameters = self.get_params(deep=False)
        for name, value in parameters.items():
            if not _is_plain(value):
                raise InputError(
                    f"{name}={type(value).__name__}(...) is an object of its own, which a file that is loaded safely "
                    "cannot hold. Use pickle or joblib for this estimator, among people who trust each other."
                )
        content = {
            "format": FORMAT,
            "estimator": type(self).__name__,
            "parameters": parameters,
            "columns": self.columns_.plain(),
            "names": [str(name) for name in getattr(self, "feature_names_in_", ())],
            "num_features": self.n_features_in_,
            "facts": getattr(self, "facts_", {}),
            "state": self._fitted_state(),
        }
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as part:
            torch.save(content, part)

    @classmethod
    def from_content(cls, content: dict[str, Any]) -> TableEstimator:
        """
        The estimator that :meth:`save` wrote.

        :param content: What is in the file.
        """
        estimator = cls.kinds[content["estimator"]](**content["parameters"])
        estimator.columns_ = Columns.from_plain(content["columns"])
        estimator.n_features_in_ = content["num_features"]
        if content["names"]:
            estimator.feature_names_in_ = np.array(content["names"], dtype=object)
        estimator.facts_ = content["facts"]
        estimator._load_fitted_state(content["state"])
        return estimator

    def _fitted_state(self) -> dict[str, Any]:
        """What a fit has learned: tensors and plain values."""
        raise NotImplementedError

    def _load_fitted_state(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`_fitted_state` returned."""
        raise NotImplementedError


def as_seed(random_state: Any) -> int:
    """
    The seed that scikit-learn's `random_state` stands for.

    :param random_state: A number, a RandomState or None.
    """
    return int(check_random_state(random_state).randint(2**31 - 1))


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def positive_rows(x: Tensor, y: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """
    Rows without those of weight zero, which are as good as absent.

    :param x: Inputs `(N, D)`.
    :param y: Targets `(N, ...)`.
    :param weights: Row weights `(N,)`, or None for ones.
    """
    if weights is None or bool((weights > 0).all()):
        return x, y, weights
    kept = weights > 0
    return x[kept], y[kept], weights[kept]


def joined_weights(old: Tensor | None, num_old: int, new: Tensor | None, num_new: int) -> Tensor | None:
    """
    The weights of rows and of those that are appended to them; None where all are one.

    :param old: Row weights `(N,)`, or None for ones.
    :param num_old: N.
    :param new: Those of the new rows `(n,)`, or None for ones.
    :param num_new: n.
    """
    if old is None and new is None:
        return None
    parts = ((old, num_old), (new, num_new))
    return torch.cat([torch.ones(num, dtype=torch.float64) if part is None else part for part, num in parts])


def as_numpy(values: Tensor) -> Any:
    """
    A detached array.

    :param values: A tensor.
    """
    return values.detach().cpu().numpy()
