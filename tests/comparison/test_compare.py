"""Comparisons: every model beats the mean, splits are those asked for, nothing stops the others."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsRegressor

pd = pytest.importorskip("pandas")

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.comparison.contender import CONTENDERS, Contender
from gpytorch_tkrr.comparison.gp_contenders import SVGP, SubsetExactGP
from gpytorch_tkrr.comparison.tkrr_contenders import GibbsContender
from gpytorch_tkrr.comparison.trial import Split, run_trial


def make_data(num_rows=200, num_dims=2):
    """A smooth function in units far from one, with noise of standard deviation 20."""
    x = 1000 + 50 * torch.rand(num_rows, num_dims, dtype=torch.float64)
    f = 300 * torch.sin((x[:, 0] - 1000) / 10)
    return x, 5000 + f + 20 * torch.randn(num_rows, dtype=torch.float64)


def small(name, task):
    """A contender with few steps."""
    contender = CONTENDERS[name](task=task)
    if isinstance(contender, SVGP):
        contender.num_inducing, contender.num_epochs, contender.num_steps, contender.rate = 32, 1, 200, 0.05
    if name == "tkrr-gibbs":
        contender.options = {"rank": 6, "num_draws": 40, "num_warmup": 40}
        if task == "regression":
            contender.options["noise"] = "gaussian"
    return contender


class Line:
    """A model of the user's own: least squares."""

    name = "least squares"
    num_parameters = 3

    def fit(self, x, y):
        self.weights = torch.linalg.lstsq(torch.cat([x, torch.ones_like(x[:, :1])], 1), y.unsqueeze(-1)).solution

    def predict(self, x):
        return torch.cat([x, torch.ones_like(x[:, :1])], 1) @ self.weights


class Broken:
    def fit(self, x, y):
        raise RuntimeError("no luck")

    def predict(self, x):
        raise AssertionError


@pytest.mark.parametrize("name", CONTENDERS)
def test_regression(name):
    x, y = make_data()
    trial = run_trial(name, small(name, "regression"), "regression", 1, Split(x[:150], y[:150], x[150:], y[150:]))
    assert trial.status == "done" and trial.fit_seconds > 0
    if name in ("mean", "linear"):
        assert trial.scores["rmse"] > 100
    else:
        assert 10 < trial.scores["rmse"] < 50  # the noise is 20
        assert trial.scores["nlpd"] < 5.5 and trial.scores["coverage"] > 0.8


#: Additive models, exact for a Gaussian likelihood.
ADDITIVE = ("additive-exact", "additive-vff")


@pytest.mark.parametrize("name", CONTENDERS)
def test_classification(name):
    x, y = make_data(300)
    y = (y > 5000).double()
    split = Split(x[:200], y[:200], x[200:], y[200:])
    contender = small(name, "classification")
    if name in ("exact", "svgp-student", "sgpr", "rff", "additive-hilbert", "hilbert", *ADDITIVE):
        with pytest.raises(tkrr.NotApplicableError, match="classes"):
            run_trial(name, contender, "classification", 1, split)
        return
    trial = run_trial(name, contender, "classification", 1, split)
    assert trial.scores["error"] < (0.6 if name in ("mean", "linear") else 0.15)
    assert trial.scores["nll"] < (0.75 if name in ("mean", "linear") else 0.45)


def test_many_inputs_are_not_for_the_product_basis():
    x, y = make_data(30, num_dims=4)
    result = tkrr.compare(x, y, models=["hilbert", "mean"], splits=1, isolate=False)
    assert [trial.status for trial in result.trials] == ["not applicable", "done"]
    assert "at most 3 inputs; got 4" in result.remarks()[-1]
    assert result.table().loc["HilbertKernel", "status"] == "not applicable"


def test_the_subset_is_one():
    x, y = make_data(100)
    contender = SubsetExactGP(num_rows=30, num_steps=1)
    contender.fit(x, y)
    assert contender.model.train_inputs[0].shape == (30, 2)


def test_scores_are_those_of_the_rows_held_out():
    x, y = make_data(100)
    result = tkrr.compare(x, y, models=[Line()], splits=2, train_fraction=0.7, seed=3, isolate=False)
    assert (result.facts["training rows"], result.facts["test rows"]) == (70, 30)
    for trial in result.trials:
        test_y = trial.prediction["y"]
        test = (y.unsqueeze(0) == test_y.unsqueeze(1)).double().argmax(1)
        train = torch.tensor([row for row in range(100) if row not in test.tolist()])
        line = Line()
        line.fit(x[train], y[train])
        expected = (line.predict(x[test]).squeeze(-1) - test_y).square().mean().sqrt()
        assert trial.scores == {"rmse": pytest.approx(float(expected))}
    first, second = (set(trial.prediction["y"].tolist()) for trial in result.trials)
    assert first != second
    again = tkrr.compare(x, y, models=[Line()], splits=2, train_fraction=0.7, seed=3, isolate=False)
    for trial, same in zip(result.trials, again.trials, strict=True):
        assert same.scores == {"rmse": pytest.approx(trial.scores["rmse"], rel=1e-9)}


def test_isolated_equals_in_process(tmp_path):
    x, y = make_data(60)
    options = {"models": ["linear", Line(), Broken(), "tkrr-als"], "splits": 2, "max_train": 40, "max_test": 10}
    inside = tkrr.compare(x, y, isolate=False, **options)
    outside = tkrr.compare(x, y, time_limit=120, **options)
    for a, b in zip(inside.trials, outside.trials, strict=True):
        assert (a.model, a.split, a.status, a.scores) == (b.model, b.split, b.status, pytest.approx(b.scores))
    failed = [trial for trial in outside.trials if trial.status != "done"]
    assert [trial.model for trial in failed] == ["Broken", "Broken"]
    assert all(trial.status == "failed" and trial.message == "RuntimeError: no luck" for trial in failed)
    assert outside.trials[0].memory is not None and inside.trials[0].memory is None


def test_the_time_limit_ends_one_model_only():
    class Sleeper(Line):
        name = "sleeper"

        def fit(self, x, y):
            import time

            time.sleep(60)

    x, y = make_data(30)
    result = tkrr.compare(x, y, models=[Sleeper(), Line()], splits=1, time_limit=5.0)
    assert [trial.status for trial in result.trials] == ["out of time", "done"]


def test_interrupted_runs_keep_what_is_done(monkeypatch):
    class Impatient(Line):
        name = "impatient"

        def fit(self, x, y):
            raise KeyboardInterrupt

    x, y = make_data(30)
    result = tkrr.compare(x, y, models=["mean", Impatient(), Line()], splits=1, isolate=False)
    assert [trial.status for trial in result.trials] == ["done", "interrupted", "interrupted"]
    assert result.is_interrupted and not tkrr.compare(x, y, models=["mean"], splits=1, isolate=False).is_interrupted


def test_models_of_scikit_learn():
    x, y = make_data(100)
    result = tkrr.compare(x, y, models={"neighbours": KNeighborsRegressor(), "mine": Line()}, splits=1, isolate=False)
    assert list(result.table().index) == ["neighbours", "mine"]
    assert result.trials[0].scores["rmse"] < result.trials[1].scores["rmse"]
    labels = np.where(y > 5000, "late", "early")
    result = tkrr.compare(x - 1000, labels, models=[LogisticRegression()], splits=1, isolate=False)
    assert result.task == "classification" and result.facts["classes"] == "early, late"
    assert result.trials[0].scores["nll"] < 0.8


@pytest.mark.parametrize(
    "answer, task, message",
    [
        (torch.zeros(3), "regression", r"shape \(3,\)"),
        (torch.full((6,), torch.nan), "regression", "NaN"),
        ((torch.zeros(6), torch.zeros(6)), "regression", "not positive"),
        ((torch.zeros(6), torch.ones(6), 1), "regression", "3 values"),
        (torch.full((6,), 1.5), "classification", r"outside of \[0, 1\]"),
    ],
)
def test_predictions_that_cannot_be_scored(answer, task, message):
    class Odd(Contender):
        def fit(self, x, y):
            pass

        def predict(self, x):
            return answer

    x = torch.rand(30, 1)
    y = torch.randn(30) if task == "regression" else (torch.rand(30) > 0.5).double()
    (trial,) = tkrr.compare(x, y, models={"odd": Odd()}, splits=1, isolate=False).trials
    assert trial.status == "failed" and re.search(message, trial.message)


@pytest.mark.parametrize(
    "x, y, options, message",
    [
        (torch.rand(10, 2), torch.rand(10), {}, "10 rows; at least 20"),
        (torch.rand(30, 2), torch.ones(30), {}, "constant"),
        (torch.rand(30, 2), torch.rand(29), {}, "shape"),
        (torch.full((30, 2), torch.nan), torch.rand(30), {}, "NaN"),
        ([["a"]] * 30, torch.rand(30), {}, "numbers"),
        (torch.rand(30, 2), ["a", "b"] * 15, {"task": "regression"}, "numbers"),
        (torch.rand(30, 2), torch.rand(30), {"models": ["svpg"]}, "known are mean, linear"),
        (torch.rand(30, 2), torch.rand(30), {"models": [object()]}, "fit and predict"),
        (torch.rand(30, 2), torch.rand(30), {"models": [Line(), Line()]}, "Two models"),
        (torch.rand(30, 2), torch.rand(30), {"models": []}, "no models"),
        (torch.rand(30, 2), torch.rand(30), {"train_fraction": 1.0}, "train_fraction"),
        (torch.rand(30, 2), torch.rand(30), {"time_limit": 0.0}, "time_limit must be positive; got 0"),
        (torch.rand(30, 2), torch.rand(30), {"memory_limit": -1}, "memory_limit must be positive; got -1"),
    ],
)
def test_bad_input(x, y, options, message):
    with pytest.raises(tkrr.InputError, match=message):
        tkrr.compare(x, y, **options)


def test_the_noise_is_chosen_and_reported(monkeypatch):
    for name, value in (("NUM_WARMUP", 8), ("NUM_DRAWS", 6)):
        monkeypatch.setattr(f"gpytorch_tkrr.inference.noise_choice.{name}", value)
    made = []

    class Small(GibbsContender):
        def fit(self, x, y):
            made.append(self)
            self.options = {"rank": 2, "num_basis": 4, "num_draws": 4, "num_warmup": 4}
            super().fit(x, y)

    monkeypatch.setitem(CONTENDERS, "tkrr-gibbs", Small)
    x, y = make_data(80, 1)
    options = {"models": ["tkrr-gibbs"], "splits": 1, "isolate": False}
    result = tkrr.compare(x, y, **options)
    assert any("Noise: " in line and "held out" in line for line in result.remarks())
    assert '"remark": "Noise: ' in result._json()
    chosen = made[-1].estimator.noise_choice_.kind
    assert result.table().loc["T-KRR, Bayesian", "chosen"] == f"noise {chosen}"
    other = replace(result.trials[0], split=2, chosen="noise student")
    both = replace(result, trials=[replace(other, split=1, chosen="noise gaussian"), other])
    assert both.table().loc["T-KRR, Bayesian", "chosen"] == "noise gaussian (1 of 2), noise student (1 of 2)"
    fixed = tkrr.compare(x, y, noise="by-inputs", **options)
    assert fixed.trials[0].status == "done" and not any("Noise: " in line for line in fixed.remarks())
    assert "chosen" not in fixed.table()
    assert made[-1].estimator.noise_ == "by-inputs"
    with pytest.raises(tkrr.InputError, match="noise must be one of"):
        tkrr.compare(x, y, noise="cauchy", **options)


def test_table():
    x, y = make_data(100)
    result = tkrr.compare(x, y, models=["mean", "tkrr-als", Line(), Broken()], splits=2, isolate=False)
    table, scores = result.table(), result.scores()
    assert table.loc["T-KRR, ALS", "RMSE"].endswith("*") and "*" not in table.loc["mean", "RMSE"]
    assert table.loc["least squares", "NLPD"] == "" and table.loc["Broken", "status"] == "failed"
    assert table.loc["least squares", "parameters"] == "3"
    mean, spread = (float(number) for number in re.findall(r"[\d.]+", table.loc["mean", "RMSE"]))
    of_mean = scores[scores["model"] == "mean"]["rmse"]
    assert mean == pytest.approx(of_mean.mean(), abs=0.1) and spread == pytest.approx(of_mean.std(), abs=0.1)
    assert isinstance(table, pd.DataFrame) and len(scores) == 8
    assert str(result).startswith("Comparison of models\n")


def test_equal_scores_are_both_the_best():
    x, _ = make_data(60)
    y = x.sum(1) + torch.sin(100 * x[:, 0])  # a perfect fit would compare rounding errors
    result = tkrr.compare(x, y, models={"one": Line(), "two": Line(), "mean": CONTENDERS["mean"]()}, isolate=False)
    assert [cell.endswith("*") for cell in result.table()["RMSE"]] == [True, True, False]


@pytest.mark.parametrize("task", ["regression", "classification"])
def test_report(task, tmp_path):
    x, y = make_data(100)
    y = y if task == "regression" else (y > 5000).double()
    models = ["mean", "linear", "hilbert", "tkrr-als", Broken()]
    result = tkrr.compare(x, y, models=models, splits=2, isolate=False, title="<delays> & more")
    page, results = result.write(tmp_path / "new")
    text = page.read_text(encoding="utf-8")
    assert "&lt;delays&gt; &amp; more" in text and "no luck" in text and "T-KRR, ALS" in text
    assert text.count('src="data:image/png;base64,') == 2
    assert not re.search(r'(?:src|href)="(?!data:)', text)  # self-contained
    stored = json.loads(results.read_text(encoding="utf-8"))
    assert stored["task"] == task and len(stored["trials"]) == 10 and "torch" in stored["facts"]
    assert stored["trials"][0]["scores"] == result.trials[0].scores
    with pytest.raises(FileExistsError, match="exists already"):
        result.write(tmp_path / "new")
    result.write(tmp_path / "new", overwrite=True)
    panels = [axis for axis in result.plot_predictions().axes if axis.get_visible()]
    assert [axis.get_title() for axis in panels] == [
        name for name in result.table().index if result.table().loc[name, "status"] == ""
    ]


def test_figures_without_a_single_success():
    x, y = make_data(30)
    result = tkrr.compare(x, y, models=[Broken()], splits=1, isolate=False)
    assert result.plot().axes and result.table().loc["Broken", "status"] == "failed"


def test_notebooks_show_figures():
    """Also where pyplot has not been used: IPython asks a value for `_repr_png_`."""
    x, y = make_data(30)
    result = tkrr.compare(x, y, models=["mean"], splits=1, isolate=False)
    for figure in (result.plot(), result.plot_predictions()):
        assert figure._repr_png_().startswith(b"\x89PNG")
