"""The protocol of the paper's experiments, on small synthetic data."""

from __future__ import annotations

import argparse
import itertools
import json

import numpy as np
import pytest
import torch
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.kernel_ridge import KernelRidge

pytest.importorskip("pandas")

from benchmarks import airline, datasets, paper, protocol
from benchmarks.protocol import Hyperparameters


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def regression() -> datasets.Dataset:
    rng = np.random.default_rng(0)
    x = np.column_stack([rng.uniform(-3, 5, 120), rng.uniform(100, 900, 120), np.full(120, 7.0)])
    y = 40 + 9 * np.sin(x[:, 0]) + 0.01 * x[:, 1] + 0.1 * rng.normal(size=120)
    return datasets.Dataset("toy", "regression", x, y, ("a", "b", "constant"), "y", "made up")


@pytest.fixture
def classification(regression) -> datasets.Dataset:
    y = (regression.y > np.median(regression.y)).astype(float)
    return datasets.Dataset("toy", "classification", regression.x, y, regression.columns, "class", "made up")


def test_split_is_a_partition_in_the_training_scale(regression):
    parts = protocol.split(regression, generator())
    assert len(parts.train_y) == 108 and len(parts.test_y) == 12
    assert torch.cat([parts.train_x, parts.test_x]).isfinite().all()  # the constant column
    torch.testing.assert_close(parts.train_x[:, :2].amin(0), torch.zeros(2, dtype=torch.float64))
    torch.testing.assert_close(parts.train_x[:, :2].amax(0), torch.ones(2, dtype=torch.float64))
    assert parts.train_y.mean().item() == pytest.approx(0, abs=1e-12)
    assert parts.train_y.std(correction=1).item() == pytest.approx(1)
    # Every row is in one part: the affine map of the first column can be undone by two of its values.
    first = np.concatenate([parts.train_x[:, 0], parts.test_x[:, 0]])
    slope = np.ptp(regression.x[:, 0]) / np.ptp(first)
    np.testing.assert_allclose(
        np.sort(first - first.min()) * slope, np.sort(regression.x[:, 0] - regression.x[:, 0].min()), atol=1e-12
    )


def test_splits_differ_and_can_be_repeated(regression):
    first, again, other = (protocol.split(regression, generator(seed)).test_x for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_rows_and_labels(classification):
    parts = protocol.split(classification, generator(), train=2 / 3, rows=60)
    assert (len(parts.train_y), len(parts.test_y)) == (40, 20)
    assert set(parts.train_y.tolist()) == {-1.0, 1.0}


def test_misclassification():
    response, y = torch.tensor([0.3, -2.0, 0.1, -0.1]), torch.tensor([1.0, -1.0, -1.0, 1.0])
    assert protocol.misclassification(response, y) == 0.5


def test_initial_factors_have_spectral_norm_one():
    factors = protocol.initial_factors(4, 7, 3, generator())
    assert [tuple(factor.shape) for factor in factors] == [(7, 3)] * 4
    for factor in factors:
        assert np.linalg.svd(factor.numpy(), compute_uv=False)[0] == pytest.approx(1)


def test_krr_agrees_with_scikit_learn(regression):
    parts = protocol.split(regression, generator())
    ours = protocol.fit_krr(parts.train_x, parts.train_y, Hyperparameters(0.4, 0.02))
    theirs = KernelRidge(kernel="rbf", gamma=1 / (2 * 0.4**2), alpha=0.02).fit(parts.train_x, parts.train_y)
    np.testing.assert_allclose(ours.predict(parts.test_x), theirs.predict(parts.test_x), atol=1e-8)


def test_hyperparameters_agree_with_scikit_learn(regression):
    parts = protocol.split(regression, generator())
    ours = protocol.exact_gp_hyperparameters(parts.train_x, parts.train_y)
    kernel = ConstantKernel() * RBF(1.0, (1e-2, 1e2)) + WhiteKernel(0.1, (1e-8, 10))
    fitted = GaussianProcessRegressor(kernel, n_restarts_optimizer=0).fit(parts.train_x, parts.train_y).kernel_
    assert ours.lengthscale == pytest.approx(fitted.k1.k2.length_scale, rel=1e-2)
    assert ours.ridge == pytest.approx(fitted.k2.noise_level / fitted.k1.k1.constant_value, rel=5e-2)


def test_many_random_features_approach_krr(regression):
    parts = protocol.split(regression, generator())
    theta = Hyperparameters(0.4, 0.1)
    full = protocol.fit_krr(parts.train_x, parts.train_y, theta).predict(parts.test_x)
    rff = protocol.fit_rff(parts.train_x, parts.train_y, theta, num_features=4000, generator=generator())
    assert (rff.predict(parts.test_x) - full).square().mean() < 1e-2 * full.square().mean()


def test_tkrr_approaches_krr(regression):
    parts = protocol.split(regression, generator())
    theta = Hyperparameters(0.3, 0.01)
    full = protocol.fit_krr(parts.train_x, parts.train_y, theta).predict(parts.test_x)
    tkrr = protocol.fit_tkrr(parts.train_x, parts.train_y, theta, num_basis=15, rank=6, generator=generator())
    assert (tkrr.predict(parts.test_x) - full).square().mean() < 1e-2 * full.square().mean()


@pytest.mark.parametrize("task", ["regression", "classification"])
def test_table_row(task, request):
    experiment = paper.Experiment(8, 3, {"RFF": (0.3, 0.1), "T-KRR": (0.1, 0.05), "KRR": (0.09, 0.04)})
    report = paper.table_row(request.getfixturevalue(task), experiment, splits=2)
    assert [row["method"] for row in report.rows] == ["RFF", "T-KRR", "KRR"]
    for row in report.rows:
        assert set(row) == {"method", "mean", "sd", "paper_mean", "paper_sd", "seconds"}
        assert 0 <= row["mean"] < 1 and row["sd"] >= 0
    assert report.rows[1]["paper_mean"] == 0.1


def test_banana(tmp_path, classification):
    """With every product of sines available (R = M^2) the boundary is that of the full Hilbert GP."""
    data = datasets.Dataset("banana", "classification", classification.x[:, :2], classification.y, ("a", "b"), "y", "-")
    report = paper.banana(data, 1, tmp_path, ranks=(2, 12))
    assert [row["rank"] for row in report.rows] == [2, 12]
    assert report.rows[1]["agreement_min"] > 0.995
    assert (tmp_path / "paper_banana.png").stat().st_size > 10_000


def test_convergence_figure(tmp_path, classification):
    experiment = paper.Experiment(6, 2, {})
    loss, errors = paper.trace_convergence(classification, experiment)
    assert len(loss) == 10 * 2 * (3 - 1) + 1
    assert all(after <= before * (1 + 1e-10) for before, after in itertools.pairwise(loss))
    assert len(errors["training"]) == len(errors["test"]) == 11
    paper.draw_convergence(loss, errors, tmp_path)
    assert (tmp_path / "paper_spambase.png").stat().st_size > 10_000


def test_paper_arguments():
    parser = argparse.ArgumentParser()
    paper.add_arguments(parser)
    assert parser.parse_args(["yacht"]).splits == 10
    with pytest.raises(SystemExit):
        parser.parse_args(["mnist"])


def test_airline(tmp_path, monkeypatch):
    rng = np.random.default_rng(1)
    x = rng.uniform(size=(240, 8))
    y = np.sin(6 * x[:, 0]) + x[:, 1] + 0.1 * rng.normal(size=240)
    data = datasets.Dataset("airline_nyc2013", "regression", x, y, tuple("abcdefgh"), "delay", "made up")
    monkeypatch.setattr(datasets, "load", lambda name, data_dir: data)
    monkeypatch.setattr(airline, "RANKS", (2,))
    monkeypatch.setattr(airline, "NUM_BASIS", 15)
    parser = argparse.ArgumentParser()
    airline.add_arguments(parser)
    report = airline.run(parser.parse_args(["--rows", "180", "--svgp-epochs", "1", "--hilbert-steps", "20"]))
    mse = {row["method"].partition(",")[0]: row["mse"] for row in report.rows}
    assert set(mse) == {"T-KRR", "RFF", "additive Hilbert GP", "SVGP", "A-VFF", "A-GPR"}
    assert mse["additive Hilbert GP"] < 0.2  # the function is additive
    assert "N = 180" in report.title
    assert json.loads(report.write(tmp_path).read_text())["rows"]
