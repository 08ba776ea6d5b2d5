"""The machinery of ``python -m benchmarks``."""

from __future__ import annotations

import json
import math
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch

import benchmarks
from benchmarks import harness
from benchmarks.__main__ import find_benchmarks, main
from benchmarks.harness import Report, best_of, peak_memory
from benchmarks.weak_scaling import extrapolate

TOY = '''"""A toy that doubles.

More words.
"""
from pathlib import Path
from benchmarks.harness import Report

def add_arguments(parser):
    parser.add_argument("--size", type=int, default=3)
    parser.add_argument("--data-dir", type=Path)

def run(args):
    report = Report("toy_result", "doubles")
    report.add(size=args.size, double=2 * args.size)
    return report
'''


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A benchmark `toy`, and a module beside it that is none and cannot be imported."""
    name = f"toy_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(TOY)
    (tmp_path / "not_a_benchmark.py").write_text('"""Helper."""\nraise RuntimeError("imported")\n')
    monkeypatch.setattr(benchmarks, "__path__", [*benchmarks.__path__, str(tmp_path)])
    yield name
    sys.modules.pop(f"benchmarks.{name}", None)


def test_list(toy, capsys):
    assert find_benchmarks()[toy] == "A toy that doubles."
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert toy in listed and "A toy that doubles." in listed
    for other in ("harness", "datasets", "flights", "not_a_benchmark", "__main__"):
        assert other not in find_benchmarks()


def test_every_benchmark_is_described():
    assert all(find_benchmarks().values())


def test_unknown_name(capsys):
    assert main(["no_such_thing"]) == 2
    assert "There is no benchmark 'no_such_thing'" in capsys.readouterr().err


def test_run(toy, tmp_path, capsys):
    output = tmp_path / "results"
    assert main([toy, "--size", "21", "--data-dir", str(tmp_path), "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert "doubles" in printed and "42" in printed
    text = (output / "toy_result.json").read_text()
    content = json.loads(text)
    assert content["rows"] == [{"size": 21, "double": 42}]
    assert content["options"] == {"size": 21, "threads": None}
    assert content["machine"]["torch"] == metadata.version("torch")
    assert str(tmp_path) not in text
    assert [path.name for path in output.iterdir()] == ["toy_result.json"]


def test_threads(toy, tmp_path):
    before = torch.get_num_threads()
    try:
        main([toy, "--threads", "2", "--output", str(tmp_path)])
        assert json.loads((tmp_path / "toy_result.json").read_text())["machine"]["threads"] == 2
    finally:
        torch.set_num_threads(before)


def test_module_command():
    root = Path(benchmarks.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks"], cwd=root, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.startswith("usage: python -m benchmarks NAME")


def test_best_of_takes_turns_and_the_shortest(monkeypatch):
    clock = [0.0]
    calls = []
    durations = {"a": iter([9.0, 3.0, 2.0, 4.0]), "b": iter([9.0, 5.0, 6.0, 7.0])}

    def candidate(name):
        def run():
            calls.append(name)
            clock[0] += next(durations[name])

        return run

    monkeypatch.setattr(harness.time, "perf_counter", lambda: clock[0])
    assert best_of({"a": candidate("a"), "b": candidate("b")}, repeat=3, warmup=1) == {"a": 2.0, "b": 5.0}
    assert calls == ["a", "b"] * 4
    with pytest.raises(ValueError, match="at least 1"):
        best_of({}, repeat=0)


def test_peak_memory():
    """256 MB more in the child are seen; 512 MB held by this process are not."""
    ballast = np.ones(2**26)
    small, large = peak_memory(np.ones, 1), peak_memory(np.ones, 2**25)
    assert large - small == pytest.approx(2**28, rel=0.1)
    assert small < ballast.nbytes


def test_peak_memory_passes_errors_on():
    with pytest.raises(ValueError, match=r"math domain error|nonnegative"):
        peak_memory(math.sqrt, -1.0)


def test_table():
    report = Report("r", "Title", notes=["A note."])
    report.add(model="RFF", seconds=1.23456789, ratio=1.0)
    report.add(model="Hilbert kernel", seconds=0.01, features=196)
    assert report.table().splitlines() == [
        "Title",
        "",
        "model           seconds  ratio  features",
        "RFF               1.235      1",
        "Hilbert kernel     0.01              196",
        "A note.",
    ]


def test_a_part_that_fails_leaves_the_others(capsys):
    report = Report("r", "Title")
    report.attempt("first", lambda: report.add(seconds=1.5))
    report.attempt("second", lambda: math.sqrt(-1.0))
    report.attempt("third", lambda: report.add(seconds=2.5))
    assert [row["seconds"] for row in report.rows] == [1.5, 2.5]
    assert len(report.notes) == 1 and report.notes[0].startswith("FAILED: second: ValueError")
    assert "seconds 1.5" in capsys.readouterr().err  # shown as it is measured


def test_time_on_a_cluster():
    """2 seconds for rows, 0.5 for the solve, 0.2 ms for 100 kB at 1 GB/s there and back, 14 messages of 50 us."""
    seconds, share = extrapolate(10**8, 100, t_row=2e-6, t_solve=0.5, volume=1e5)
    assert seconds == pytest.approx(14 * (2 + 0.5 + 2e-4 + 14 * 50e-6))
    assert share == pytest.approx(2 / (2 + 0.5 + 2e-4 + 14 * 50e-6))


def test_write_replaces_and_takes_any_number(tmp_path):
    report = Report("r", "Title")
    report.add(tensor=torch.tensor(2.0), array=np.float32(0.5), count=np.int64(3), worst=math.inf, list=[math.nan, 1])
    path = report.write(tmp_path / "new" / "folder")
    assert path == report.write(path.parent)
    assert json.loads(path.read_text())["rows"] == [
        {"tensor": 2.0, "array": 0.5, "count": 3, "worst": None, "list": [None, 1]}
    ]
    report.rows[0]["bad"] = object()
    with pytest.raises(TypeError):
        report.write(path.parent)
    assert json.loads(path.read_text())["rows"][0]["count"] == 3  # the former file is whole


def test_machine_facts_name_no_host():
    facts = harness.machine_facts()
    assert facts["processor"] and facts["cores"] >= 1 and facts["threads"] == torch.get_num_threads()
    assert set(facts) >= {"python", "gpytorch", "linear_operator", "numpy", "date"}
    assert platform.node() not in map(str, facts.values())
