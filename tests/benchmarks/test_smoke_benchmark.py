"""The small suite that follows speed over commits."""

from __future__ import annotations

import argparse
import json

from benchmarks import smoke


def test_runs_are_added_commit_by_commit(tmp_path, monkeypatch):
    args = argparse.Namespace(repeat=1, measures=["hilbert_step", "import"], output=tmp_path)
    for name in ("first", "second", "second"):  # a commit that is measured again replaces its row
        monkeypatch.setattr(smoke, "commit", lambda name=name: name)
        smoke.run(args).write(tmp_path)
    rows = json.loads((tmp_path / "smoke.json").read_text())["rows"]
    assert [row["commit"] for row in rows] == ["first", "second"]
    assert all(0 < row["hilbert_step"] < 10 and 0.5 < row["import"] < 10 for row in rows)


def test_every_measure_is_described():
    assert all(callable(getattr(smoke, f"_{name}")) for name in smoke.MEASURES)
