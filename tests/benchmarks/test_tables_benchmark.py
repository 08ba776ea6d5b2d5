"""The benchmark of tables, at a small size."""

from __future__ import annotations

import argparse

import numpy as np
import pytest

pytest.importorskip("sklearn")
pandas = pytest.importorskip("pandas")

from benchmarks import tables
from benchmarks.harness import Report


@pytest.fixture
def args():
    parser = argparse.ArgumentParser()
    tables.add_arguments(parser)
    small = ["--rows", "300", "--test-rows", "100", "--rank", "3", "--sweeps", "5", "--output-rows", "40"]
    return parser.parse_args([*small, "--output-seeds", "1", "--exact-rows", "20"])


@pytest.mark.parametrize("name", ["flights", "adult"])
def test_codings(name, args, monkeypatch):
    rng = np.random.default_rng(0)
    level = rng.choice(["a", "b", "c", "d"], 500)
    number = rng.random(500)
    target = (level == "b") + number + 0.1 * rng.standard_normal(500)
    target = (target > 0.8).astype(float) if name == "adult" else target
    frame = pandas.DataFrame({"number": number, "level": level, "target": target})
    frame.loc[499, "level"] = "rare"
    monkeypatch.setattr(tables.datasets, "load_table", lambda *args, **kwargs: (frame, "made up"))
    report = Report("tables", "")
    tables.compare_codings(report, name, args)
    assert [row["model"] for row in report.rows] == ["modes", "one-hot", "boosting"]
    assert all(np.isfinite(row["nll"]) and row["error"] < 0.5 and row["size"] > 0 for row in report.rows)
    train, test = frame.iloc[:300], frame.iloc[300:]
    codes = tables._codes(train, test, ["level"])
    assert codes[1]["level"].max() == 4 and codes[0]["level"].max() == 3  # a level that nobody has seen
    coded, _ = tables._one_hot(train, test, ["level"])
    assert coded.iloc[:, 1:-1].sum(axis=1).eq(1).all()
