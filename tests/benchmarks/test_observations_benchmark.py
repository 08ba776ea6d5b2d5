"""The benchmark of likelihoods: scores do not depend on units, claims are read from rows."""

from __future__ import annotations

import pytest
import torch

import gpytorch_tkrr as tkrr

pytest.importorskip("pandas")
pytest.importorskip("sklearn")

from benchmarks import observations
from benchmarks.observations import MODELS, TRUTHS, check_targets, evaluate, gaussian_losses


def test_scores_do_not_depend_on_units():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(200, 2, dtype=torch.float64, generator=generator)
    y = torch.sin(6 * x[:, 0]) + 0.1 * torch.randn(200, dtype=torch.float64, generator=generator)
    rows = []
    for scale in (1.0, 64.0):  # trees split at the same places for powers of two
        targets = scale * y
        rows.append(evaluate(MODELS["boosting"], (x[:150], targets[:150], x[150:], targets[150:]), 0))
    for name in ("nlpd", "rmse", "mae", "crps", "coverage"):
        assert rows[0][name] == pytest.approx(rows[1][name], rel=1e-3), name
    assert rows[0]["rmse"] < 0.6  # standardised


def test_claims_are_read_from_the_rows():
    rows = [
        {"data": "flights", "model": "T-KRR, auto", "nlpd": 0.8, "rmse": 0.9, "mae": 0.4},
        {"data": "flights", "model": "boosting", "nlpd": 0.9, "rmse": 0.85, "mae": 0.5},
        {"data": "stock", "model": "T-KRR, gaussian", "nlpd": 0.1},
        {"data": "stock", "model": "T-KRR, student", "nlpd": 0.105},
        {"data": "stock", "model": "T-KRR, auto", "nlpd": 0.2},
    ]
    notes = check_targets(rows)
    assert [note.split(":")[0] for note in notes] == ["met", "MISSED", "met", "met", "MISSED"]
    assert len(TRUTHS) == 7


def test_auto_is_the_kind_that_it_chose(monkeypatch):
    monkeypatch.setattr(observations, "NUM_TEST_ROWS", 50)
    for name, value in (("RANK", 2), ("NUM_WARMUP", 6), ("NUM_DRAWS", 6)):
        monkeypatch.setattr(observations, name, value)
    choice = tkrr.NoiseChoice("student", {}, {}, 0)
    monkeypatch.setattr(tkrr, "choose_noise", lambda *args, **kwargs: choice)
    found = gaussian_losses(40, 0)
    assert list(found) == ["gaussian", "student", "auto"] and found["auto"][2] == "student"
    assert found["auto"][0] == found["student"][0] != found["gaussian"][0]
    assert abs(found["gaussian"][0]) < 3.0  # standardised
