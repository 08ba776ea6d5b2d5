"""``python -m benchmarks bayesopt`` at toy size."""

import argparse
from concurrent.futures import Future

import pytest
import torch

pytest.importorskip("botorch.models")
pytest.importorskip("pandas")

from benchmarks import bayesopt
from benchmarks.finished import Finished
from benchmarks.harness import Report


def parse(*arguments):
    parser = argparse.ArgumentParser()
    bayesopt.add_arguments(parser)
    return parser.parse_args(arguments)


SIZES = (
    *"--seeds 1 --initial 4 --evaluations 5 --own-forms 5 0 --workers 1 --rows 40 60 --exact-rows 40".split(),
    *"--many 30 1 1 --more 40 1 1 --corrupted 12 1".split(),
)


def test_rows_and_quartiles(tmp_path, monkeypatch):
    for name in ("levy4", "rosenbrock8"):  # the others are one that both models take, and one that Hilbert's does not
        monkeypatch.delitem(bayesopt.PROBLEMS, name)
    path = tmp_path / "finished.jsonl"
    args = parse(*SIZES, "--finished", str(path))
    args.output = tmp_path
    report = bayesopt.run(args)
    assert not [note for note in report.notes if note.startswith("FAILED")]
    assert all(row["difference"] == 0 for row in report.rows if "difference" in row)
    loops = {(row["problem"], row["model"]): row for row in report.rows if "median" in row}
    contests = bayesopt.make_contests(args)
    assert set(loops) == {(contest.loop.name, name) for contest in contests for name in contest.models}
    assert not [model for problem, model in loops if problem.startswith("ackley10") and model.startswith("Hilbert")]
    for row in loops.values():
        values = [float(value) for value in row["seeds"].split()]
        assert len(values) == 1 and row["lower_quartile"] <= row["median"] <= row["upper_quartile"]
        assert row["median"] == pytest.approx(values[0], rel=1e-3)  # printed with four digits
    steps = {(row["rows"], row["model"]): row for row in report.rows if row.get("rows")}
    assert steps[40, "SingleTaskGP"]["times_faster"] == 1 and (60, "SingleTaskGP") not in steps
    assert {row["model"] for row in report.rows if row.get("error")} == set(bayesopt.ROBUST_MODELS)
    assert (tmp_path / "bayesopt.png").exists()

    def never(*args):
        raise AssertionError("run again")

    for name in ("step", "time_step", "timed_loop", "outlier_error"):
        monkeypatch.setattr(bayesopt, name, never)
    assert bayesopt.run(args).rows == report.rows  # all of it was kept


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
            job.set_result((float(best[name][seed]), 1.0, 0.1))
            return job

    monkeypatch.setattr(bayesopt, "ProcessPoolExecutor", Pool)
    report = Report("bayesopt", "")
    sizes = "--seeds 5 --initial 4 --evaluations 5 --workers 1 --own-forms 5 0 --many 6 1 0 --more 6 1 0"
    args = parse(*sizes.split())
    bayesopt.run_loops(report, args, Finished())
    reaches = [row["reaches"] for row in report.rows if row["problem"] == "hartmann6"]
    assert reaches == [True, False, True]
    differences = [row.get("difference") for row in report.rows if row["problem"] == "hartmann6"]
    assert differences[0] is None and differences[1] > 0


def test_loops_of_a_seed_start_alike():
    loop = bayesopt.Loop("hartmann6", "hartmann6", 4, 5, 0.1)
    loops = [bayesopt.closed_loop(loop, bayesopt.MODELS[name], 3)[0] for name in ("SingleTaskGP", "TKRRModel")]
    assert loops[0][:4] == loops[1][:4] and all(len(loop) == 5 for loop in loops)
    assert all(torch.tensor(loop).diff().min() >= 0 for loop in loops)


def test_error_of_a_mean():
    class Zero:
        def posterior(self, x):
            return torch.distributions.Normal(0 * x[:, :1], 1.0)

    class Truth:
        def posterior(self, x):
            return torch.distributions.Normal(bayesopt.evaluate(problem, x), 1.0)

    problem = bayesopt.make_problem("levy4")
    x = torch.rand(100_000, 4, dtype=torch.float64)
    values = bayesopt.evaluate(problem, x)
    assert bayesopt.mean_error(Truth(), problem) == 0
    assert bayesopt.mean_error(Zero(), problem) == pytest.approx(
        float(values.square().mean().sqrt() / values.std()), rel=0.2
    )
