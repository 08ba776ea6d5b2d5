"""The benchmarks of the one-line swap, on a small scale."""

from __future__ import annotations

import argparse

import pytest

from benchmarks import swap, swap_speed


def arguments(module, *words):
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return parser.parse_args(words)


def test_accuracy():
    report = swap.run(arguments(swap, "--only", "RBF, sine"))
    (row,) = report.rows
    assert row["problem"] == "RBF, sine" and row["bases"] >= 1
    assert row["is_exact"] and 0 <= row["mean"] < 1e-5 and 0 <= row["sd"] < 1e-5
    assert 0 < row["functions_mean"] < 0.02 and 0 < row["functions_sd"] < 0.02
    assert any("tuned on, 1 problems, mean" in note for note in report.notes)


def test_speed():
    report = swap_speed.run(
        arguments(swap_speed, "--rows", "60", "--many-rows", "400", "--steps", "2", "--repeat", "1")
    )
    assert not [note for note in report.notes if "FAILED" in note]
    fixed, exact = report.rows[:3], report.rows[3:]
    assert len(exact) == len(swap_speed.TIMED)
    for row in fixed:
        assert row["ratio_to_fixed"] == pytest.approx(row["seconds"] / row["fixed_seconds"])
    for row in exact:
        assert row["speedup"] == pytest.approx(row["exact_seconds"] / row["seconds"]) and row["steps"] == 2
