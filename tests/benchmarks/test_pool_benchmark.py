"""``python -m benchmarks pool`` at toy size."""

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("pandas")
pytest.importorskip("sklearn")

from benchmarks import datasets, generated_worlds, pool


def make_pool(folder):
    rng = np.random.default_rng(0)
    path = folder / "pool" / "servo"
    path.mkdir(parents=True)
    x = rng.random((60, 2))
    np.savetxt(path / "data.csv.gz", np.column_stack([x, 100 * x[:, 0] + rng.normal(size=60)]), delimiter=",")
    np.savetxt(path / "test_mask.csv.gz", np.arange(60)[:, None] % 10 == np.arange(10), delimiter=",", fmt="%d")


def test_rows_are_kept_and_compared(tmp_path, monkeypatch):
    make_pool(tmp_path)

    def mean_of_ours(x, y, test_x, test_y, seed):
        return pool.Predicted(y.mean().expand(len(test_y)), y.std().expand(len(test_y)))

    monkeypatch.setitem(pool.MODELS, pool.OURS, mean_of_ours)
    monkeypatch.setitem(pool.MODELS, pool.SPARSE, pool.fit_boosting)
    parser = argparse.ArgumentParser()
    pool.add_arguments(parser)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--output", type=Path, default=tmp_path)
    options = ["--data-dir", str(tmp_path), "--sets", "servo", "--folds", "2"]
    report = pool.run(parser.parse_args([*options, "--models", "exact GP", "SVGP-512"]))
    assert [(row["fold"], row["model"]) for row in report.rows] == [
        (0, "SVGP-512"), (0, "exact GP"), (1, "SVGP-512"), (1, "exact GP"),
    ]  # fmt: skip
    path = tmp_path / "pool.json"  # written row by row
    written = json.loads(path.read_text())["rows"]
    assert sorted(map(str, written)) == sorted(map(str, report.rows))
    again = pool.run(parser.parse_args([*options, "--models", "T-KRR", "--previous", str(path)]))
    assert len(again.rows) == 6 and [row for row in again.rows if row["model"] != "T-KRR"] == report.rows
    ours = [row for row in again.rows if row["model"] == "T-KRR"]
    assert all(row["rmse"] > 0.8 and row["nlpd"] == row["nlpd_normal"] for row in ours)
    monkeypatch.setitem(pool.MODELS, pool.SPARSE, None)  # cannot be run
    kept = pool.run(parser.parse_args([*options, "--models", "SVGP-512", "--missing", "--previous", str(path)]))
    assert kept.rows == again.rows
    text = "\n".join(again.notes)
    assert "better on 0 of 1" in text and "above 1.05 on ['servo']" in text
    with pytest.raises(datasets.DatasetNotFoundError, match="pool/stock"):
        pool.load(parser.parse_args(options), "stock", 0)


def test_generated_worlds_are_what_they_say():
    x, y, test_x, test_y = generated_worlds.interactions(0, num_rows=4000, num_dims=6, noise=0.0)
    assert (x.shape, len(test_y), test_x.shape) == ((3600, 6), 400, (400, 6))
    correlation = torch.corrcoef(torch.cat([x.mT, y.unsqueeze(0)]))[-1, :-1]
    assert correlation.abs().max() < 0.06  # no main effects
    x, y, *_ = generated_worlds.robot_arm(0, num_rows=100, noise=0.0)
    tip = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64) - 0.1
    straight = generated_worlds._turn(torch.zeros(1, 3, dtype=torch.float64), torch.zeros(1), 0)
    assert x.shape == (90, 8) and y.max() <= tip.norm() + 0.2 and straight.abs().max() == 0
    x, *_ = generated_worlds.crowded_table(0, num_rows=2000)
    assert x[:, 0].max() > 5 and x.shape[1] == 12
