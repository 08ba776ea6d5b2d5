"""The small suite that follows speed over commits."""

from __future__ import annotations

import argparse
import json

from benchmarks import smoke


def test_runs_are_added_commit_by_commit(tmp_path, monkeypatch):
    args = argparse.Namespace(repeat=1, measures=["hilbert_step", "import"], output=tmp_path)

    def measure(name):
        monkeypatch.setattr(smoke, "commit", lambda: name)
        smoke.run(args).write(tmp_path)

    measure("first")
    for ratio in (3.0, 4.0):  # a commit that is measured again replaces its row
        for name in args.measures:
            monkeypatch.setattr(smoke, f"_{name}", lambda repeat, ratio=ratio: ratio)
        measure("second")
    first, second = json.loads((tmp_path / "smoke.json").read_text())["rows"]
    assert (first["commit"], second["commit"]) == ("first", "second")
    assert 0 < first["hilbert_step"] < 10 and 0.5 < first["import"] < 10
    assert second["hilbert_step"] == second["import"] == 4.0


def test_every_measure_is_described():
    assert all(callable(getattr(smoke, f"_{name}")) for name in smoke.MEASURES)
