"""The data sets of the benchmarks: the same numbers from every source, and clear words when there is none."""

from __future__ import annotations

import hashlib
import zipfile
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from repository import is_installed

pd = pytest.importorskip("pandas")

from benchmarks import datasets, flights
from benchmarks.datasets import ChecksumError, DatasetNotFoundError, load
from gpytorch_tkrr.tables.flights import read_nycflights13

# name, inputs -> shape, mean and standard deviation (n - 1) of the target: published facts about the sets
FACTS = {
    ("banana", None): ((5300, 2), -548 / 5300, 0.9947),
    ("yacht", None): ((308, 6), 10.4954, 15.1605),
    ("energy", 9): ((768, 9), 24.5878, 9.5133),
    ("energy", 8): ((768, 8), 22.3072, 10.0902),
    ("airfoil", None): ((1503, 5), 124.8359, 6.8987),
    ("concrete", None): ((1030, 8), 35.8178, 16.7057),
    ("spambase", None): ((4601, 57), 1813 / 4601, 0.4887),
    ("adult", None): ((45222, 96), 11208 / 45222, 0.4318),
    ("airline_nyc2013", None): ((273853, 8), 7.036, 44.930),
    ("airline_2001", 5): ((3000000, 5), 6.668, 32.383),
    ("airline_2001", 9): ((3000000, 9), 6.668, 32.383),
    ("airline_2008", None): ((91541, 8), 9.765, 38.281),
}


@pytest.fixture
def nothing_around(monkeypatch, tmp_path):
    """No data directory, no packages, an empty cache and no network."""

    def no_package(name):
        raise metadata.PackageNotFoundError(name)

    def no_network(url, timeout):
        raise OSError("no network")

    monkeypatch.delenv("TKRR_DATA_DIR", raising=False)
    monkeypatch.setenv("TKRR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(metadata, "distribution", no_package)
    monkeypatch.setattr("urllib.request.urlopen", no_network)


def from_package(monkeypatch, tmp_path, name):
    """Load from an installed package alone, or skip."""
    packages = [source for source in datasets._RECIPES[name].sources if isinstance(source, datasets.Package)]
    if not any(is_installed(package.distribution) for package in packages):
        pytest.skip(f"no package that carries {name} is installed")
    monkeypatch.delenv("TKRR_DATA_DIR", raising=False)
    monkeypatch.setenv("TKRR_CACHE_DIR", str(tmp_path))
    return load(name)


def assert_facts(data, inputs=None):
    shape, mean, deviation = FACTS[data.name, inputs]
    assert data.x.shape == shape and data.y.shape == shape[:1] and len(data.columns) == shape[1]
    assert data.x.dtype == data.y.dtype == np.float64 and data.x.flags.c_contiguous
    assert data.y.mean() == pytest.approx(mean, abs=6e-4)
    assert data.y.std(ddof=1) == pytest.approx(deviation, abs=6e-4)
    assert (len(set(data.y)) == 2) == (data.task == "classification")
    assert data.target not in data.columns


@pytest.mark.parametrize("name, inputs", [key for key in FACTS if key[0] != "concrete"])
def test_data_directory(data_dir, name, inputs):
    assert_facts(load(name, data_dir=data_dir, inputs=inputs), inputs)


@pytest.mark.parametrize("name", ["yacht", "airfoil", "concrete", "airline_nyc2013", "adult"])
def test_package(monkeypatch, tmp_path, name):
    data = from_package(monkeypatch, tmp_path, name)
    assert_facts(data)
    assert not Path(data.source).is_absolute()


def test_banana_package(monkeypatch, tmp_path):
    data = from_package(monkeypatch, tmp_path, "banana")
    assert data.x.shape == (5300, 2)
    assert (data.y == -1).sum() == 2924 and (data.y == 1).sum() == 2376


@pytest.mark.parametrize("name", ["yacht", "airfoil", "airline_nyc2013", "adult"])
def test_package_equals_data_directory(monkeypatch, tmp_path, data_dir, name):
    expected = load(name, data_dir=data_dir)
    data = from_package(monkeypatch, tmp_path, name)
    np.testing.assert_array_equal(data.x, expected.x)
    np.testing.assert_array_equal(data.y, expected.y)
    assert (data.columns, data.target) == (expected.columns, expected.target)


def test_adult_raw_equals_prepared(data_dir):
    expected = load("adult", data_dir=data_dir)
    frame = datasets.read_adult(data_dir / "adult_raw/adult.data.gz", data_dir / "adult_raw/adult.test.gz")
    np.testing.assert_array_equal(frame.to_numpy(), np.column_stack([expected.x, expected.y]))
    assert tuple(frame.columns) == (*expected.columns, expected.target)


def test_spambase_columns(data_dir):
    data = load("spambase", data_dir=data_dir)
    assert [*data.columns, data.target] == datasets._SPAMBASE


def test_energy_versions(data_dir):
    paper, usual = load("energy", data_dir=data_dir), load("energy", data_dir=data_dir, inputs=8)
    np.testing.assert_array_equal(paper.x[:, 8], usual.y)
    assert (paper.target, usual.target) == ("cooling_load", "heating_load")


def test_adult_recipe(tmp_path):
    row = "{age}, {work}, 1, 11th, 7, Divorced, Sales, Husband, White, {sex}, 0, 0, 40, Cuba, {label}\n"
    train, test = tmp_path / "adult.data", tmp_path / "adult.test"
    train.write_text(
        row.format(age=30, work="Private", sex="Male", label="<=50K")
        + row.format(age=31, work="?", sex="Male", label=">50K")
        + row.format(age=32, work="Federal-gov", sex="Female", label=">50K")
        + "\n"
    )
    test.write_text("|1x3 Cross validator\n" + row.format(age=33, work="State-gov", sex="Male", label=">50K."))
    frame = datasets.read_adult(train, test)
    assert list(frame.columns)[6:] == ["workclass_Private", "workclass_State-gov", "sex_Male", "income_gt_50K"]
    assert frame["age"].tolist() == [30, 32, 33]
    assert frame.iloc[:, 6:].to_numpy().tolist() == [[1, 0, 1, 0], [0, 0, 0, 1], [0, 1, 1, 1]]


def test_river_banana(tmp_path):
    with zipfile.ZipFile(tmp_path / "banana.zip", "w") as archive:
        archive.writestr("banana.all.txt", "-1 1:1.617466 2:-0.919233 \n1 1:-0.215209 2:0.5 \n")
    frame = datasets.read_river_banana(tmp_path / "banana.zip")
    assert frame.to_numpy().tolist() == [[1.617466, -0.919233, -1], [-0.215209, 0.5, 1]]


# Flights


def test_data_expo(tmp_path):
    """A cancelled flight, an unknown plane and build years that are no years are dropped; hhmm becomes minutes."""
    columns = "Year,Month,DayofMonth,DayOfWeek,DepTime,ArrTime,UniqueCarrier,TailNum,AirTime,ArrDelay,Distance"
    lines = [
        "2008,1,3,4,1955,2211,WN,N1,116,-14,810",
        "2008,1,3,4,NA,NA,WN,N1,NA,NA,810",  # cancelled
        "2008,1,4,5,2400,5,WN,N2,90,2,500",
        "2008,1,4,5,700,800,WN,N3,50,0,200",  # year None
        "2008,1,4,5,700,800,WN,N4,50,0,200",  # year 0
        "2008,1,4,5,700,800,WN,N9,50,0,200",  # not in the table of planes
        "2008,1,4,5,700,800,WN,,50,0,200",
    ]
    (tmp_path / "plane-data.csv").write_text(
        "tailnum,type,year\nN0\nN1,Corporation,1999\nN2,Corporation,2008\nN3,Corporation,None\nN4,Corporation,0000\n"
    )
    frame = pd.DataFrame([line.split(",") for line in lines], columns=columns.split(","))
    frame.to_csv(tmp_path / "2008.csv.bz2", index=False)
    data = load("airline_2008_full", data_dir=tmp_path)
    assert [*data.columns, data.target] == flights.COLUMNS
    assert data.x.tolist() == [[1, 3, 4, 9, 116, 810, 1331, 1195], [1, 4, 5, 0, 90, 500, 5, 1440]]
    assert data.y.tolist() == [-14, 2]


def test_raw_sample_is_part_of_the_excerpt(data_dir):
    sample = flights.read_data_expo(
        data_dir / "airline_2008_raw_sample.csv.gz", data_dir / "airline_2008_planes.csv.gz"
    )
    excerpt = load("airline_2008", data_dir=data_dir)
    rows = iter(map(tuple, np.column_stack([excerpt.x, excerpt.y])))
    assert 1700 < len(sample) < 2000
    assert all(row in rows for row in map(tuple, sample.to_numpy()))  # in the same order


def test_airline_pickle(tmp_path):
    frame = pd.DataFrame(np.arange(18.0).reshape(2, 9), columns=flights.COLUMNS)
    frame["ArrTime"], frame["DepTime"] = [130, 2359], [5, 1200]
    frame.to_pickle(tmp_path / "airline.pickle")
    data = load("airline_2008_full", data_dir=tmp_path)
    assert data.x[:, 6:].tolist() == [[90, 5], [1439, 720]]
    assert data.y.tolist() == [8, 17]


def test_nycflights13(tmp_path):
    (tmp_path / "planes.csv").write_text("tailnum,year\nN1,1999\nN2,NA\n")
    header = "year,month,day,dep_time,arr_time,arr_delay,tailnum,air_time,distance\n"
    with zipfile.ZipFile(tmp_path / "flights.csv.zip", "w") as archive:
        archive.writestr("flights.csv", header + "2013,1,1,517,830,11,N1,227,1400\n2013,1,6,533,850,20,N2,227,1416\n")
    frame = read_nycflights13(tmp_path / "flights.csv.zip", tmp_path / "planes.csv")
    assert frame.to_numpy().tolist() == [[1, 1, 2, 14, 227, 1400, 510, 317, 11]]  # 1 January 2013 was a Tuesday


# Downloads


def test_fetch(monkeypatch, tmp_path):
    monkeypatch.setenv("TKRR_CACHE_DIR", str(tmp_path / "cache"))
    original = tmp_path / "numbers.data"
    original.write_bytes(b"1 2 3\n")
    url, sha256 = original.as_uri(), hashlib.sha256(b"1 2 3\n").hexdigest()
    path = datasets.fetch(url, sha256)
    assert path.read_bytes() == b"1 2 3\n" and path.parent == tmp_path / "cache"

    path.write_bytes(b"damaged")
    assert datasets.fetch(url, sha256).read_bytes() == b"1 2 3\n"
    original.unlink()
    assert datasets.fetch(url, sha256) == path  # from the cache
    assert [file.name for file in path.parent.iterdir()] == ["numbers.data"]


def test_fetch_refuses_a_changed_file(monkeypatch, tmp_path):
    monkeypatch.setenv("TKRR_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "numbers.data").write_bytes(b"something else")
    with pytest.raises(ChecksumError, match="expected 0000"):
        datasets.fetch((tmp_path / "numbers.data").as_uri(), "0" * 64)
    assert not (tmp_path / "cache").exists()


def test_download_is_the_last_resort(nothing_around, monkeypatch, tmp_path):
    content = b"-2.3 0.568 4.78 3.99 3.17 0.125 0.11\n-2.3 0.568 4.78 3.99 3.17 0.150 0.27\n"
    asked = []

    def open_url(url, timeout):
        asked.append(url)
        return (tmp_path / "served").open("rb")

    (tmp_path / "served").write_bytes(content)
    monkeypatch.setattr("urllib.request.urlopen", open_url)
    with pytest.raises(ChecksumError):
        load("yacht")  # not the published file
    monkeypatch.setattr(hashlib, "sha256", lambda data: _Digest())
    data = load("yacht")
    assert data.x.shape == (2, 6) and data.y.tolist() == [0.11, 0.27]
    assert data.source == asked[0] == datasets.UCI + "00243/yacht_hydrodynamics.data"


class _Digest:
    def hexdigest(self):
        return "00dfecc0fc01ddd4c90b558a3ac11b246df8ebcfea130724223475a9a67f0ea1"


def test_energy_excel(data_dir, tmp_path):
    frame = pd.read_csv(data_dir / "energy.csv.gz")
    frame.to_excel(tmp_path / "ENB2012_data.xlsx", index=False)
    data = load("energy", data_dir=tmp_path)
    np.testing.assert_array_equal(np.column_stack([data.x, data.y]), frame.to_numpy())


def test_energy_excel_is_checked(tmp_path):
    path = tmp_path / "ENB2012_data.xlsx"
    pd.DataFrame(np.ones((3, 10))).to_excel(path, index=False)
    with pytest.raises(ChecksumError, match="SHA-256"):
        load("energy", data_dir=tmp_path)
    path.write_text("<html>moved</html>")
    with pytest.raises(ChecksumError, match="not the expected Excel file"):
        load("energy", data_dir=tmp_path)


# Errors


@pytest.mark.parametrize("name", datasets.NAMES)
def test_not_found_says_what_to_do(nothing_around, name):
    with pytest.raises(DatasetNotFoundError, match="TKRR_DATA_DIR") as caught:
        load(name)
    sources = datasets._RECIPES[name].sources
    assert str(caught.value).count("\n  - ") == len(sources)
    for package in (source for source in sources if isinstance(source, datasets.Package)):
        assert f"{package.install}" in str(caught.value)


def test_package_without_the_file(nothing_around, monkeypatch, tmp_path):
    class Other:
        version = "9.9"

        def locate_file(self, file):
            return tmp_path / file

    monkeypatch.setattr(metadata, "distribution", lambda name: Other())
    with pytest.raises(DatasetNotFoundError, match=r"9\.9 is installed and lacks"):
        load("concrete")


def test_wrong_arguments():
    with pytest.raises(ValueError, match="known are banana, yacht"):
        load("bananas")
    with pytest.raises(ValueError, match=r"must be one of \[9, 8\]; got 7"):
        load("energy", inputs=7)
    with pytest.raises(ValueError, match=r"must be one of \[None\]; got 6"):
        load("yacht", inputs=6)


def test_missing_values_are_refused(tmp_path):
    pd.DataFrame({"a": [1.0, None], "y": [0.0, 1.0]}).to_csv(tmp_path / "yacht.csv.gz", index=False)
    with pytest.raises(ValueError, match="missing or infinite"):
        load("yacht", data_dir=tmp_path)
