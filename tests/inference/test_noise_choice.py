"""The noise of a fit, chosen by its own training rows."""

from __future__ import annotations

import math

import pytest
import torch
from gpytorch.likelihoods import GaussianLikelihood

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.inference.noise_choice import MAX_ERROR, MAX_ROWS, hint_at_counts

SMALL = {"rank": 2, "num_basis": 5}


def rows(num, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(num, 2, dtype=torch.float64, generator=generator)
    return x, torch.sin(6 * x[:, 0]), torch.randn(num, dtype=torch.float64, generator=generator)


def test_gaussian_noise_stays_gaussian():
    x, f, e = rows(200)
    choice = tkrr.choose_noise(x, 100 * (f + 0.2 * e) - 7, **SMALL)  # any units
    assert set(choice.scores) == {"gaussian", *choice.gains} and choice.num_held_out == 40
    assert choice.kind == "gaussian"


def test_a_small_gain_is_chance(monkeypatch):
    x, f, e = rows(200)
    kinds = ["gaussian", "student"]
    y = f + 0.2 * e * (1 + 4 * (e.roll(7) > 1.2))  # heavy tails
    choice = tkrr.choose_noise(x, y, kinds=kinds, **SMALL)
    gain, error = choice.gains["student"]
    assert choice.kind == "student" and gain > error > 0
    monkeypatch.setattr("gpytorch_tkrr.inference.noise_choice.MIN_RATIO", math.exp(1.01 * gain * choice.num_held_out))
    assert tkrr.choose_noise(x, y, kinds=kinds, **SMALL).kind == "gaussian"


def test_few_rows_decide_nothing():
    x, f, e = rows(30)
    choice = tkrr.choose_noise(x, f + e**3)
    assert choice.kind == "gaussian" and not choice.scores and "too few" in choice.message
    assert isinstance(choice.likelihood(), GaussianLikelihood)


def test_decision_depends_on_nothing_but_rows_and_seed(monkeypatch):
    monkeypatch.setattr("gpytorch_tkrr.inference.noise_choice.NUM_DRAWS", 4)
    monkeypatch.setattr("gpytorch_tkrr.inference.noise_choice.NUM_WARMUP", 2)
    x, f, e = rows(80)
    first, second = (tkrr.choose_noise(x.float(), (f + e).float(), seed=3, **SMALL) for _ in range(2))
    assert first == second


def test_many_rows_are_thinned(monkeypatch):
    seen = []

    class Recorded(tkrr.TKRR):
        def __init__(self, x, *args, **kwargs):
            seen.append(len(x))
            super().__init__(x, *args, **kwargs)

    for name, value in (("TKRR", Recorded), ("NUM_DRAWS", 4), ("NUM_WARMUP", 2)):
        monkeypatch.setattr(f"gpytorch_tkrr.inference.noise_choice.{name}", value)
    x, f, e = rows(MAX_ROWS + 100)
    tkrr.choose_noise(x, f + e, kinds=["gaussian", "student"], rank=1, num_basis=2)
    assert seen == [MAX_ROWS * 4 // 5] * 2


def test_a_density_is_not_bought_by_the_mean(monkeypatch):
    """Where most of the targets are next to equal, heavy tails take the others for outliers."""
    x, f, e = rows(200)
    problem = {"x": x, "y": (f > 0.9).double() + 0.001 * e, "kinds": ["gaussian", "student"], "seed": 1}
    choice = tkrr.choose_noise(**problem, rank=3, num_basis=6)
    assert set(choice.errors) == {"gaussian", "student"}
    assert choice.scores["student"] > choice.scores["gaussian"] + 1  # the density alone would choose it
    assert choice.errors["student"] > MAX_ERROR * choice.errors["gaussian"] and choice.kind == "gaussian"
    monkeypatch.setattr("gpytorch_tkrr.inference.noise_choice.MAX_ERROR", 1e9)
    assert tkrr.choose_noise(**problem, rank=3, num_basis=6).kind == "student"


def test_wrong_names_are_refused_before_the_work():
    with pytest.raises(tkrr.InputError, match=r"noise must be one of gaussian, student.*got 'cauchy'"):
        tkrr.choose_noise(torch.rand(9, 1), torch.rand(9), kinds=["gaussian", "cauchy"])


def test_counts_are_hinted_at():
    counts = torch.poisson(torch.ones(100), generator=torch.Generator().manual_seed(0))
    assert "NegativeBinomialLikelihood" in hint_at_counts(counts)
    assert "NegativeBinomialLikelihood" in tkrr.choose_noise(torch.rand(30, 1), counts[:30]).message
    for y in (counts - 5, counts + 5, counts.clamp(max=1), counts + 0.5):
        assert hint_at_counts(y) is None
