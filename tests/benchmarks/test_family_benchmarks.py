"""The benchmarks of families, losses and additive models, at small size."""

from __future__ import annotations

import argparse
import json

import pytest
import torch

import gpytorch_tkrr as tkrr

pytest.importorskip("pandas")
pytest.importorskip("sklearn")

from benchmarks import airline, bases, hinge

pytest.importorskip("matplotlib")


def test_kernel_errors_fall_with_the_number_of_functions(monkeypatch):
    monkeypatch.setattr(bases, "COUNTS", {1: (6, 24), 2: (4,)})
    monkeypatch.setattr(bases, "BOXES", (1.5, 2.0))
    monkeypatch.setattr(bases, "NUM_SEEDS", 2)
    curves = dict(bases.kernel_errors("Matern-3/2", 1))
    assert list(curves) == list(bases.STATIONARY)
    for (_, first), (count, last) in curves.values():
        assert last < first and count in (23, 24)
    assert "VariationalFourier" not in dict(bases.kernel_errors("RBF", 1))


@pytest.mark.parametrize("family", [tkrr.VariationalFourier(), tkrr.RandomFourier(), tkrr.Polynomial(2)], ids=repr)
def test_a_fit_of_each_kind(family):
    x = torch.rand(60, 2, dtype=torch.float64)
    y = torch.sin(5 * x[:, 0]) + x[:, 1]
    args = argparse.Namespace(rank=2, num_basis=7, draws=5)
    predicted = bases.fit(args, family, x[:50], y[:50], x[50:], y[50:], 0)
    assert predicted.log_prob.shape == (10,) and (predicted.sd > 0).all()


def test_lines_of_the_bases_report():
    rows = [{"kernel": "RBF", "error": 0.1}]
    rows += [{"data": "a", "family": f, "nlpd": value} for f, value in (("Sines", 1.0), ("Sines", 2.0), ("Other", 0.5))]
    assert bases.best_families(rows) == ["a, mean nlpd: Sines 1.500, Other 0.500."]


def test_earlier_rows_are_kept(tmp_path):
    path = tmp_path / "airline.json"
    path.write_text(json.dumps({"rows": [{"method": "a", "mse": 1.0}, {"method": "b", "mse": 2.0}]}))
    rows = airline.keep_earlier([{"method": "b", "mse": 3.0}, {"method": "c", "mse": 4.0}], path)
    assert [(row["method"], row["mse"]) for row in rows] == [("a", 1.0), ("b", 3.0), ("c", 4.0)]
    assert airline.keep_earlier(rows, None) is rows


def test_claim_about_additive_models():
    error = torch.tensor([1.0, 2.0, 3.0, 2.0])
    assert airline.check_additive({airline.A_VFF: error + 0.1, airline.A_HILBERT: error}).startswith("met")
    assert airline.check_additive({airline.A_VFF: error + 5, airline.A_HILBERT: error}).startswith("MISSED")


def test_the_ridge_is_chosen_by_training_rows(monkeypatch):
    monkeypatch.setattr(hinge, "RIDGES", (1.0, 2.0))
    x = torch.linspace(-1, 1, 40).unsqueeze(-1)[torch.randperm(40)]
    y = torch.where(x[:, 0] > 0, 1.0, -1.0)

    def fit(x, y, ridge):
        return lambda test: test[:, 0] * (1 if ridge == 2.0 else -1)

    assert hinge.evaluate(fit, x[:30], y[:30], x[30:], y[30:])["ridge"] == 2.0
