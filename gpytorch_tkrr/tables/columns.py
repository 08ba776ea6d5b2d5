"""Tables as people have them: which columns are numbers, categories or dates, and the numbers that they become."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np

from ..errors import InputError

Kind = Literal["number", "category", "ordered", "date"]

#: A category has at most so many levels.
MAX_LEVELS = 10_000

#: Larger inputs and targets have squares that float64 cannot hold.
MAX_NUMBER = 1e150

#: A column of text with more than so many levels, most of them in one row only, is taken for a name or an identifier.
MIN_IDENTIFIERS = 50

#: Text of which this share are numbers, or dates, is a column of them with mistakes, not a category.
ALMOST_ALL = 0.9

#: What a date becomes, in this order, where the training rows differ in it. The season is a year's fraction; less than
#: a year is described by its days.
DATE_PARTS = ("day", "season", "weekday", "hour")

#: How dates are written; the first that fits all values of a column is taken, unless another fits them as well.
DATE_FORMATS = (
    *("ISO8601", "%d.%m.%Y", "%d.%m.%Y %H:%M", "%d/%m/%Y", "%m/%d/%Y", "%Y/%m/%d", "%d/%m/%Y %H:%M"),
    *("%m/%d/%Y %H:%M", "%Y/%m/%d %H:%M", "%d-%m-%Y", "%m-%d-%Y", "%d %b %Y", "%b %d, %Y"),
)
_LOOKS_LIKE_DATE = re.compile(
    r"\d{1,4}[-/.]\d{1,2}([-/.]\d{1,4}|$)|\d{1,2} [A-Za-z]{3} \d{4}|[A-Za-z]{3} \d{1,2}, \d{4}"
)


@dataclass
class Column:
    """
    An input column of a table, made of plain values, to be stored with a model.

    :param name: Its name.
    :param kind: What it holds. An ordered category becomes the numbers of its levels.
    :param levels: The values of a category, as text.
    :param parts: What a date becomes, of :data:`DATE_PARTS`.
    :param date_format: How dates are written.
    """

    name: str
    kind: Kind = "number"
    levels: list[str] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    date_format: str = "ISO8601"

    @property
    def outputs(self) -> list[str]:
        """Names of the numbers that it becomes."""
        return [f"{self.name}.{part}" for part in self.parts] if self.kind == "date" else [self.name]

    def encode(self, values: Any) -> np.ndarray:
        """
        The numbers `(N, k)`; NaN where a value is missing. A level that is not known has the number of levels.

        :param values: The column: a pandas Series, or an array.
        """
        if self.kind == "number":
            return _numbers(values, self.name)[:, None]
        if self.kind == "date":
            return _date_parts(_as_dates(values, self.name, self.date_format), self.parts)
        numbers = {level: number for number, level in enumerate(self.levels)}
        rows = _objects(values)
        unknown = math.nan if self.kind == "ordered" else len(self.levels)
        codes = {value: numbers.get(_text(value), unknown) for value in _distinct(rows, self.name)}
        if self.kind == "ordered" and any(math.isnan(code) for code in codes.values()):
            new = next(value for value, code in codes.items() if math.isnan(code))
            raise InputError(
                f"The ordered column {self.name!r} holds {new!r}, which is none of its levels {self._listed()}."
            )
        return np.array([codes.get(value, math.nan) for value in rows], dtype=np.float64).reshape(-1, 1)

    def describe(self) -> str:
        """What the column is taken for, in a few words."""
        if self.kind == "date":
            return f"a date, taken apart into {', '.join(self.parts)}"
        if self.kind == "number":
            return "a number"
        return f"{len(self.levels)} {'ordered ' if self.kind == 'ordered' else ''}categories: {self._listed()}"

    def _listed(self) -> str:
        return ", ".join(self.levels[:5]) + (", ..." if len(self.levels) > 5 else "")


class ColumnScan:
    """
    Looks through a column, at once or piece by piece, and says what it is.

    :param name: Its name.
    :param is_category: Whether it is a category in any case.
    """

    def __init__(self, name: str, *, is_category: bool = False):
        self.name, self.is_category = name, is_category
        self.num_rows = 0
        self.num_values = 0
        self.kind: Kind | None = "category" if is_category else None  # known from the type of the column
        self.counts: dict[str, int] = {}  # text -> rows
        self.first_rows: dict[str, int] = {}
        self.levels: list[str] = []  # of a categorical type
        self.dates: list[np.ndarray] = []  # distinct ones

    def update(self, values: Any) -> None:
        """
        Look at the next rows.

        :param values: A pandas Series, or an array.
        """
        kind, levels = (None, []) if self.is_category else _kind_of_type(values)
        if kind == "number" and self.kind in (None, "number") and not self.counts:
            self.kind, self.num_rows = "number", self.num_rows + len(values)
            return
        if kind == "date":
            self.kind = "date"
            self.dates.append(np.unique(_as_dates(values, self.name, "ISO8601")))
        elif kind in ("category", "ordered"):
            self.kind = kind
            self.levels += [level for level in levels if level not in self.levels]
        else:
            self._count(values)
        self.num_rows += len(values)

    def _count(self, values: Any) -> None:
        if self.kind == "number":  # earlier rows were numbers by their type; these are not, or not all
            self.counts.setdefault("0", self.num_rows)
            self.first_rows.setdefault("0", 0)
            self.kind = None
        for row, value in enumerate(_objects(values)):
            if _is_missing(value):
                continue
            text = _text(value, self.name)
            self.num_values += 1
            if text in self.counts:
                self.counts[text] += 1
            else:
                self.counts[text], self.first_rows[text] = 1, self.num_rows + row
                if len(self.counts) > MAX_LEVELS * 20:  # numbers and dates are allowed to differ
                    self._forget()

    def _forget(self) -> None:
        """Keep in memory what the verdict needs: all that is neither number nor date."""
        others = [text for text in self.counts if not _is_number(text) and not _LOOKS_LIKE_DATE.match(text)]
        if len(others) > MAX_LEVELS:
            raise self._too_many(len(others))

    def _too_many(self, number: int) -> InputError:
        return InputError(
            f"The column {self.name!r} has {number} different values in {self.num_rows} rows, as a name or an "
            "identifier has: they say nothing about new rows. Leave the column out (--exclude), or, if its values do "
            f"return, name it as a category (--categorical {self.name})."
        )

    def column(self) -> Column:
        """What the column is, after all rows."""
        if self.kind in ("number", "ordered") or (self.kind == "category" and not self.is_category):
            return Column(self.name, self.kind, self.levels)
        if self.kind == "date":
            return self._date_column(np.concatenate(self.dates), "ISO8601")
        texts, total = list(self.counts), sum(self.counts.values())
        if not self.is_category:
            bad = [text for text in texts if not _is_number(text)]
            if not bad:
                return Column(self.name)
            if 1 - sum(self.counts[text] for text in bad) / total >= ALMOST_ALL:
                raise self._mistake(bad, "numbers")
            if all(_is_number(text.replace(",", ".")) for text in texts):
                raise InputError(
                    f"The column {self.name!r} holds {bad[0]!r}. If that is a number with a decimal comma, read the "
                    "file with decimal=',' (--decimal ,)."
                )
            date_format = self._date_format(texts, total)
            if date_format is not None:
                return self._date_column(_parse(texts, date_format), date_format)
            if len(texts) > max(MIN_IDENTIFIERS, total / 2):
                raise self._too_many(len(texts))
        if len(texts) > MAX_LEVELS:
            raise self._too_many(len(texts))
        is_numeric = all(map(_is_number, texts))
        return Column(self.name, "category", sorted(texts, key=float if is_numeric else str))

    def _mistake(self, bad: list[str], kind: str) -> InputError:
        first = min(bad, key=lambda text: self.first_rows[text])
        others = sum(self.counts[text] for text in bad) - 1
        more = f", and {others} more like it" if others else ""
        return InputError(
            f"The column {self.name!r} holds {kind}, but data row {self.first_rows[first] + 1} has {first!r}{more}. "
            "Correct it, leave it empty if it is missing (--missing-value), or name the column as a category "
            f"(--categorical {self.name})."
        )

    def _date_format(self, texts: list[str], total: int) -> str | None:
        """How the dates are written; None where this is a category."""
        likely = [text for text in texts if _LOOKS_LIKE_DATE.match(text)]
        share = sum(self.counts[text] for text in likely) / total if total else 0.0
        if share < ALMOST_ALL:
            return None
        fitting = [each for each in DATE_FORMATS if not np.isnat(_parse(likely, each)).any()]
        if not fitting:
            return None
        if len(likely) < len(texts):
            raise self._mistake([text for text in texts if text not in likely], "dates")
        if len(fitting) > 1 and not np.array_equal(_parse(texts, fitting[0]), _parse(texts, fitting[1])):
            raise InputError(
                f"The dates in the column {self.name!r}, for instance {texts[0]!r}, can be read day first or month "
                "first. Write them as 2024-12-31."
            )
        return fitting[0]

    def _date_column(self, dates: np.ndarray, date_format: str) -> Column:
        known = dates[~np.isnat(dates)]
        if not len(known):
            return Column(self.name, "date", parts=["day"], date_format=date_format)
        values = _date_parts(known, DATE_PARTS)
        varies = dict(zip(DATE_PARTS, np.ptp(values, axis=0) > 0, strict=True))
        varies["season"] = bool(np.ptp(values[:, 0]) > 366)
        parts = [part for part in DATE_PARTS if varies[part]]
        return Column(self.name, "date", parts=parts or ["day"], date_format=date_format)


@dataclass
class Columns:
    """
    The input columns of a table, and how they become numbers.

    Numbers and booleans stay what they are. Text becomes a category, a category the number of its level, counted from
    zero; the levels are those of the training rows. Dates become days since 1970, the fraction of the year, the weekday
    (0 is Monday) and the hour, where they differ in it. A table without names is an array `(N, D)` of numbers.

    :param inputs: The columns, in order.

    Example:
        >>> import pandas as pd
        >>> from gpytorch_tkrr.tables.columns import Columns
        >>> frame = pd.DataFrame({"size": [1.0, 2.0, 4.0], "kind": ["b", "a", "b"]})
        >>> columns = Columns.learn(frame)
        >>> columns.names, columns.matrix(frame).tolist()
        (['size', 'kind'], [[1.0, 1.0], [2.0, 0.0], [4.0, 1.0]])
        >>> columns.categories, columns.expanded_names
        ({1: 2}, ['size', 'kind=b'])
    """

    inputs: list[Column]

    @classmethod
    def learn(cls, table: Any, *, categorical: Sequence[str | int] = ()) -> Columns:
        """
        What the columns of a table are.

        :param table: A pandas DataFrame, or an array `(N, D)`.
        :param categorical: Names or numbers of columns that are categories although they look like numbers.
        """
        return scan([table], categorical=categorical)

    @property
    def names(self) -> list[str]:
        """Names of the numbers, D of them."""
        return [name for column in self.inputs for name in column.outputs]

    @property
    def categories(self) -> dict[int, int]:
        """Which of the D numbers are levels of a category, and how many levels each has."""
        levels = [len(c.levels) if c.kind == "category" else 0 for c in self.inputs for _ in c.outputs]
        return {d: number for d, number in enumerate(levels) if number}

    def matrix(self, table: Any) -> np.ndarray:
        """
        The inputs as numbers `(N, D)`, NaN where values are missing.

        :param table: A table with these columns, in any order; or an array with them in this order.
        """
        if hasattr(table, "columns"):
            require_columns(table, [column.name for column in self.inputs])
            parts = [column.encode(table[column.name]) for column in self.inputs]
        else:
            parts = [column.encode(table[:, d]) for d, column in enumerate(self.inputs)]
        return np.concatenate(parts, axis=1) if parts else np.empty((len(table), 0))

    @property
    def expanded_names(self) -> list[str]:
        """Names of the numbers of :meth:`expand`."""
        names: list[str] = []
        for column in self.inputs:
            is_category = column.kind == "category"
            names += [f"{column.name}={level}" for level in column.levels[1:]] if is_category else column.outputs
        return names

    def expand(self, x: np.ndarray) -> np.ndarray:
        """
        One-hot coding, for models that know numbers only: a column of zeros and ones for each level but the first.

        :param x: As :meth:`matrix` returns them, `(N, D)`.
        """
        levels = self.categories
        parts = [
            (x[:, d, None] == np.arange(1, levels[d])).astype(np.float64) if d in levels else x[:, d, None]
            for d in range(x.shape[1])
        ]
        return np.concatenate(parts, axis=1) if parts else x

    def grown(self, table: Any) -> Columns:
        """
        These columns, with the levels of new rows that categories do not have yet after those that they have.

        :param table: A table with these columns.
        """
        inputs = []
        for d, column in enumerate(self.inputs):
            if column.kind == "category":
                rows = _objects(table[column.name] if hasattr(table, "columns") else table[:, d])
                new = {_text(value) for value in _distinct(rows, column.name)} - set(column.levels)
                column = replace(column, levels=[*column.levels, *sorted(new)])
            inputs.append(column)
        return Columns(inputs)

    def is_unknown(self, x: np.ndarray) -> np.ndarray:
        """
        Which rows have a level that the training rows did not have, `(N,)`.

        :param x: As :meth:`matrix` returns them, `(N, D)`.
        """
        unknown = np.zeros(len(x), dtype=bool)
        for d, number in self.categories.items():
            unknown |= x[:, d] == number
        return unknown

    def plain(self) -> list[dict[str, Any]]:
        """Plain values, to be stored."""
        return [asdict(column) for column in self.inputs]

    @classmethod
    def from_plain(cls, columns: Iterable[dict[str, Any]]) -> Columns:
        """
        The columns that :meth:`plain` described.

        :param columns: As returned by it.
        """
        return cls([Column(**column) for column in columns])


def scan(pieces: Iterable[Any], *, categorical: Sequence[str | int] = ()) -> Columns:
    """
    What the columns of a table are that comes in pieces, one after the other.

    :param pieces: DataFrames with the same columns, or arrays.
    :param categorical: See :meth:`Columns.learn`.
    """
    scans: list[ColumnScan] = []
    for piece in pieces:
        is_frame = hasattr(piece, "columns")
        names = [str(name) for name in piece.columns] if is_frame else [f"x{d}" for d in range(piece.shape[1])]
        if not scans:
            _check_names(names, categorical)
            chosen = {names[each] if isinstance(each, (int, np.integer)) else each for each in categorical}
            scans = [ColumnScan(name, is_category=name in chosen) for name in names]
        for d, each in enumerate(scans):
            each.update(piece.iloc[:, d] if is_frame else piece[:, d])
    return Columns([each.column() for each in scans])


def _check_names(names: list[str], categorical: Sequence[str | int]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InputError(f"There is more than one column {twice[0]!r}. Give columns different names.")
    for each in categorical:
        if isinstance(each, str) and each not in names:
            raise InputError(f"There is no column {each!r} to be a category.{_nearest(each, names)}")
        if not isinstance(each, str) and not -len(names) <= each < len(names):
            raise InputError(f"There is no column number {each} to be a category; there are {len(names)} columns.")


def require_columns(frame: Any, names: Sequence[str]) -> None:
    """
    An error that names the first missing column, and the nearest one there is.

    :param frame: The table, a DataFrame.
    :param names: Columns that it must have.
    """
    present = [str(name) for name in frame.columns]
    for name in names:
        if name not in present:
            raise InputError(f"There is no column {name!r}.{_nearest(name, present)}")
        if present.count(name) > 1:
            raise InputError(f"There is more than one column {name!r}. Give columns different names.")


def _nearest(name: str, present: Sequence[str]) -> str:
    import difflib

    near = difflib.get_close_matches(name, present, 1)
    return f" Did you mean {near[0]!r}?" if near else f" There are: {', '.join(present[:20])}."


def require_finite(
    x: np.ndarray, names: list[str], *, allow_missing: bool = False, what: str = "Input X", first_row: int = 0
) -> None:
    """
    An error that names the first row and column with a missing, infinite or huge value.

    :param x: Numbers `(N, D)`.
    :param names: Those of the columns.
    :param allow_missing: Whether values may be missing.
    :param what: What the numbers are.
    :param first_row: How many rows there are before these.
    """
    good = (np.abs(x) < MAX_NUMBER) | (np.isnan(x) & allow_missing)
    if good.all():
        return
    row, column = np.argwhere(~good)[0]
    value, name = x[row, column], names[column]
    shown = "NaN (a missing value)" if np.isnan(value) else "infinity" if np.isinf(value) else f"{value:g}"
    advice = (
        "Drop or impute such rows; an estimator with missing='integrate' takes missing values."
        if not np.isfinite(value)
        else "Its square is beyond float64: rescale the column, or correct the value."
    )
    raise InputError(f"{what} contains {shown} in data row {first_row + row + 1}, column {name!r}. {advice}")


# Single values


def _is_missing(value: Any) -> bool:
    return value is None or value != value or type(value).__name__ in ("NAType", "NaTType")


def _text(value: Any, name: str = "") -> str:
    """A value as the name of a level: 1 and 1.0 and "1" are the same."""
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, (float, np.floating)) and float(value).is_integer():
        return str(int(value))
    if isinstance(value, (list, tuple, dict, set, np.ndarray)):
        raise InputError(
            f"The column {name!r} holds a {type(value).__name__}; expected numbers, text, booleans or dates."
        )
    return str(value)


def _is_number(text: str) -> bool:
    if text in ("True", "False"):
        return True
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text  # Python reads 1_000 as a number, other programs do not


def _objects(values: Any) -> list[Any]:
    return values.tolist() if isinstance(values, np.ndarray) else values.astype(object).tolist()


def _distinct(rows: list[Any], name: str) -> list[Any]:
    try:
        return [value for value in dict.fromkeys(rows) if not _is_missing(value)]
    except TypeError:
        raise InputError(f"The column {name!r} holds lists or other values that are no categories.") from None


# Whole columns


def _kind_of_type(values: Any) -> tuple[Kind | None, list[str]]:
    """What the type of a column says, and the levels of a categorical one."""
    dtype = values.dtype
    if type(dtype).__name__ == "CategoricalDtype":
        used = values.cat.categories if dtype.ordered else values.cat.remove_unused_categories().cat.categories
        return "ordered" if dtype.ordered else "category", [_text(level) for level in used]
    kind = getattr(dtype, "kind", "O")
    if kind in "Mm":
        return ("date", []) if kind == "M" else ("number", [])
    if kind == "c":
        raise InputError("Complex data not supported: expected numbers, text, booleans or dates.")
    if type(dtype).__name__ == "PeriodDtype":
        return "date", []
    return ("number", []) if kind in "biuf" else (None, [])


def _numbers(values: Any, name: str) -> np.ndarray:
    """A column of numbers in float64 `(N,)`, missing ones as NaN."""
    if getattr(values.dtype, "kind", "O") == "m":
        return np.asarray(values, dtype="timedelta64[ns]").astype(np.float64) / 86_400e9  # days
    try:
        if hasattr(values, "to_numpy"):
            return values.to_numpy(dtype=np.float64, na_value=np.nan)
        return values.astype(np.float64)
    except (TypeError, ValueError, OverflowError):
        pass
    numbers = np.empty(len(values))
    for row, value in enumerate(_objects(values)):
        try:
            is_missing = _is_missing(value) or (isinstance(value, str) and not value.strip())
            text = "nan" if is_missing else _text(value, name)
            numbers[row] = float({"True": 1.0, "False": 0.0}.get(text, text))
        except (TypeError, ValueError, OverflowError):
            raise InputError(f"The column {name!r} must hold numbers, but data row {row + 1} has {value!r}.") from None
    return numbers


def _parse(texts: list[str], date_format: str) -> np.ndarray:
    """Dates, `NaT` where a text is none."""
    import pandas as pd

    parsed = pd.to_datetime(pd.Series(texts, dtype=object), format=date_format, errors="coerce", utc=True)
    return parsed.dt.tz_localize(None).to_numpy().astype("datetime64[s]")


def _as_dates(values: Any, name: str, date_format: str) -> np.ndarray:
    """A column of dates `(N,)`, in local time."""
    dtype = values.dtype
    if type(dtype).__name__ == "PeriodDtype":
        values = values.dt.to_timestamp()
    if getattr(dtype, "kind", "O") == "M":
        values = values.dt.tz_localize(None) if getattr(dtype, "tz", None) is not None else values
        return np.asarray(values).astype("datetime64[s]")
    rows = _objects(values)
    texts = {value: _text(value, name) for value in _distinct(rows, name)}
    parsed = dict(zip(texts, _parse(list(texts.values()), date_format), strict=True))
    for value, date in parsed.items():
        if np.isnat(date):
            row = rows.index(value) + 1
            raise InputError(f"The column {name!r} must hold dates, but data row {row} has {value!r}.")
    nothing = np.datetime64("NaT", "s")
    return np.array([parsed.get(value, nothing) for value in rows], dtype="datetime64[s]")


def _date_parts(dates: np.ndarray, parts: Sequence[str]) -> np.ndarray:
    """The numbers of each part, `(N, k)`."""
    seconds = dates.astype("datetime64[s]").astype(np.int64)
    days = seconds / 86_400.0
    year = dates.astype("datetime64[Y]").astype("datetime64[s]").astype(np.int64)
    length = (dates.astype("datetime64[Y]") + 1).astype("datetime64[s]").astype(np.int64) - year
    values = {
        "day": days,
        "season": (seconds - year) / np.where(length > 0, length, 1),
        "weekday": (np.floor(days) + 3) % 7,  # 1970-01-01 was a Thursday
        "hour": (days - np.floor(days)) * 24,
    }
    result = np.column_stack([values[part] for part in parts]).astype(np.float64)
    result[np.isnat(dates)] = np.nan
    return result
