"""``python -m benchmarks bayesopt`` at toy size."""

import argparse
from concurrent.futures import Future

import pytest
import torch

pytest.importorskip("botorch.models")
pytest.importorskip("pandas")

from benchmarks import bayesopt
from benchmarks.harness import Report


def test_rows_and_quartiles(tmp_path):
    parser = argparse.ArgumentParser()
    bayesopt.add_arguments(parser)
    sizes = "--seeds 1 --initial 4 --evaluations 5 --workers 1 --rows 40 60 --exact-rows 40".split()
    sizes += "--many-initial 30 --many-evaluations 1 --many-seeds 1 --corrupted-rows 30".split()
    report = bayesopt.run(parser.parse_args(sizes))
    assert not [note for note in report.notes if note.startswith("FAILED")]
    loops = {(row["problem"], row["model"]): row for row in report.rows if "median" in row}
    expected = bayesopt.make_loops(parser.parse_args(sizes))
    assert set(loops) == {(loop.name, name) for loop in expected for name in loop.models}
    assert ("ackley10", "HilbertGPModel") not in loops
    for row in loops.values():
        values = [float(value) for value in row["seeds"].split()]
        assert len(values) == 1 and row["lower_quartile"] <= row["median"] <= row["upper_quartile"]
        assert row["median"] == pytest.approx(values[0], rel=1e-3)  # printed with four digits
    steps = {(row["rows"], row["model"]): row for row in report.rows if row.get("rows")}
    assert steps[40, "SingleTaskGP"]["times_faster"] == 1 and (60, "SingleTaskGP") not in steps
    assert {row["model"] for row in report.rows if row.get("error")} >= {"SingleTaskGP", "TKRRModel, Student"}

    def again(sizes):
        return bayesopt.run(parser.parse_args([*sizes, "--models", "HilbertGPModel", "--previous", str(path)]))

    path = report.write(tmp_path, options=vars(parser.parse_args(sizes)))
    rows = {(row["problem"], row["model"]): row for row in again(sizes).rows}
    assert rows["ackley10", "TKRRModel"] == loops["ackley10", "TKRRModel"]
    assert rows["hartmann6", "HilbertGPModel"]["median"] == loops["hartmann6", "HilbertGPModel"]["median"]
    with pytest.raises(SystemExit, match="initial = 4"):
        again([*sizes, "--initial", "3"])
    with pytest.raises(SystemExit, match="must name a report"):
        bayesopt.run(parser.parse_args(["--models", "TKRRModel"]))


def test_reaches_compares_the_median_with_the_lower_quartile(monkeypatch):
    best = {
        "SingleTaskGP": [1.0, 2.0, 3.0, 4.0, 5.0],
        "HilbertGPModel": [0, 0, 1.9, 9, 9],
        "TKRRModel": [0, 0, 2, 9, 9],
    }

    class Pool:
        def __init__(self, *args, **kwargs):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *args):
            pass

        def submit(self, function, loop, name, seed):
            job = Future()
            job.set_result((float(best[name][seed]), 1.0))
            return job

    monkeypatch.setattr(bayesopt, "ProcessPoolExecutor", Pool)
    report = Report("bayesopt", "")
    parser = argparse.ArgumentParser()
    bayesopt.add_arguments(parser)
    args = parser.parse_args("--seeds 5 --initial 4 --evaluations 5 --workers 1".split())
    bayesopt._run_loops(report, args, {})
    reaches = {row["model"]: row["reaches"] for row in report.rows if row["problem"] == "hartmann6"}
    assert reaches == {"SingleTaskGP": True, "HilbertGPModel": False, "TKRRModel": True}


def test_loops_of_a_seed_start_alike():
    loop = bayesopt.Loop("hartmann6", "hartmann6", 4, 5, 0.1, 1)
    loops = [bayesopt.closed_loop(loop, bayesopt.MODELS[name], 3) for name in ("SingleTaskGP", "TKRRModel")]
    assert loops[0][:4] == loops[1][:4] and all(len(loop) == 5 for loop in loops)
    assert all(torch.tensor(loop).diff().min() >= 0 for loop in loops)
