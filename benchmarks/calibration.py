"""Accuracy and calibration on four UCI sets: Bayesian T-KRR, exact GP, SVGP, RFF, ALS + block Laplace; same splits."""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gpytorch
import torch
from gpytorch.kernels import Kernel, RBFKernel, RFFKernel, ScaleKernel
from torch import Tensor

import gpytorch_tkrr as tkrr

from . import datasets
from .exact_gp import SwappableGP
from .harness import Report
from .scores import Mixture, mean_and_error
from .svgp import fit_svgp

SETS = ("yacht", "energy", "airfoil", "concrete")
RANK, NUM_FEATURES = 12, 240  # random features: as many as the CP weights have numbers in one dimension, 12 x 20

Fit = Callable[[Tensor, Tensor, Tensor, int], Mixture]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--splits", type=int, default=10, help="random splits 90/10 of each data set")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS), help="data sets")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=DEFAULT_MODELS, help="models")
    parser.add_argument("--previous", type=Path, help="an earlier report: rows of models that are not run are kept")
    datasets.add_arguments(parser)


def run(args: argparse.Namespace) -> Report:
    report = Report(
        "calibration",
        f"{args.splits} random splits 90/10, the same for all models: means and standard errors (_se) of test scores, "
        "in units of the standardised target",
    )
    stored = [] if args.previous is None else json.loads(args.previous.read_text(encoding="utf-8"))["rows"]
    num_train = {}
    for name in args.sets:
        data = datasets.load(name, data_dir=args.data_dir, inputs=8 if name == "energy" else None)
        results: dict[str, list[dict[str, float]]] = {model: [] for model in args.models}
        for seed in range(args.splits):
            parts = split(data, seed)
            num_train[name] = len(parts[1])
            for model in args.models:
                results[model].append(evaluate(MODELS[model], *parts, seed))
                shown = "  ".join(f"{score} {value:.4g}" for score, value in results[model][-1].items())
                print(f"{name}  split {seed}  {model:<16}  {shown}", file=sys.stderr, flush=True)
        for model, splits in results.items():
            report.add(data=name, N=num_train[name], model=model, **summarise(splits))
        report.write(args.output, options=vars(args))
    if stored:
        run_now = {(row["data"], row["model"]) for row in report.rows}
        report.rows += [row for row in stored if (row["data"], row["model"]) not in run_now]
        report.rows.sort(key=lambda row: (SETS.index(row["data"]), list(MODELS).index(row["model"])))
    report.notes += [
        "Scores of the normal distributions that likelihood(model(x)) gives; nlpd_mixture: of the mixture over draws "
        "(log_predictive_density). coverage: of the central 95 % interval. seconds: processor time of training and "
        "prediction.",
        "Bayesian T-KRR: raw data, nothing given. ALS: raw data, rank "
        f"{RANK}, learned hyperparameters, block Laplace. Exact GP and RFF ({NUM_FEATURES} features): ARD RBF, 150 "
        "steps of Adam (0.1), Cholesky, float64. SVGP: 512 inducing points, ARD RBF, batches of 1024, Adam (0.01), "
        "30 epochs or 1000 steps, whichever is more, float32. The last three see standardised inputs.",
        *check_targets(report.rows),
    ]
    return report


def split(data: datasets.Dataset, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """
    Training inputs and targets, test inputs and targets, raw.

    :param data: The data.
    :param seed: Number of the split.
    """
    x, y = torch.from_numpy(data.x), torch.from_numpy(data.y)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    train, test = order[: int(0.9 * len(y))], order[int(0.9 * len(y)) :]
    return x[train], y[train], x[test], y[test]


def evaluate(fit: Fit, x: Tensor, y: Tensor, test_x: Tensor, test_y: Tensor, seed: int) -> dict[str, float]:
    """
    Scores and seconds of a model on one split.

    :param fit: Training data, test inputs and seed -> predictive distributions.
    :param x: Training inputs `(N, D)`.
    :param y: Training targets `(N,)`.
    :param test_x: Test inputs `(n, D)`.
    :param test_y: Test targets `(n,)`.
    :param seed: Seed.
    """
    torch.manual_seed(seed)
    start = time.process_time()
    prediction = fit(x, y, test_x, seed)
    seconds = time.process_time() - start
    center, unit = y.mean(), y.std()
    prediction, target = prediction.rescaled(center, unit), (test_y - center) / unit
    mixture = -float(prediction.log_density(target).mean())
    return {**prediction.collapsed().scores(target), "nlpd_mixture": mixture, "seconds": seconds}


def summarise(splits: list[dict[str, float]]) -> dict[str, float | None]:
    """
    Means over splits, with standard errors of all but the seconds.

    :param splits: Scores of each split.
    """
    row: dict[str, float | None] = {}
    for score in splits[0]:
        row[score], error = mean_and_error([split[score] for split in splits])
        if score != "seconds":
            row[f"{score}_se"] = error
    return row


# Models


def fit_bayesian(x: Tensor, y: Tensor, test_x: Tensor, seed: int, **settings: Any) -> Mixture:
    """Bayesian T-KRR with nothing given, in the user's units."""
    model = tkrr.TKRR(x, y, gpytorch.likelihoods.GaussianLikelihood(), **settings)
    result = tkrr.fit_gibbs(model, seed=seed)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", tkrr.ExtrapolationWarning)
        means = model.eval().draws(test_x)
    return Mixture(means, result.posterior.noise.unsqueeze(-1).expand_as(means))


def fit_laplace(x: Tensor, y: Tensor, test_x: Tensor, seed: int) -> Mixture:
    """ALS with learned hyperparameters, block Laplace around it, in the user's units."""
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = tkrr.TKRR(x, y, likelihood, rank=RANK)
    tkrr.fit_als(model, learn_hyperparameters=True, seed=seed)
    with torch.no_grad():
        return _as_mixture(likelihood(model.eval()(test_x)))


def fit_exact(x: Tensor, y: Tensor, test_x: Tensor, seed: int) -> Mixture:
    """GPyTorch's exact GP, trained by its marginal likelihood."""
    return _train_exact(ScaleKernel(RBFKernel(ard_num_dims=x.shape[1])), x, y, test_x)


def fit_random_features(x: Tensor, y: Tensor, test_x: Tensor, seed: int) -> Mixture:
    """An exact GP with GPyTorch's random Fourier features."""
    num_dims = x.shape[1]
    base = RFFKernel(num_samples=NUM_FEATURES // 2, num_dims=num_dims, ard_num_dims=num_dims)
    return _train_exact(ScaleKernel(base), x, y, test_x)


def fit_variational(x: Tensor, y: Tensor, test_x: Tensor, seed: int) -> Mixture:
    """SVGP with 512 inducing points."""
    mean, variance = fit_svgp(x, y, epochs=30, min_steps=1000).predict(test_x)
    return Mixture(mean.unsqueeze(0), variance.unsqueeze(0))


def standardised(fit: Fit) -> Fit:
    """
    The same model for standardised inputs and targets.

    :param fit: The model.
    """

    def wrapped(x: Tensor, y: Tensor, test_x: Tensor, seed: int) -> Mixture:
        center, unit = x.mean(0), x.std(0)
        unit = torch.where(unit > 0, unit, torch.ones_like(unit))
        prediction = fit((x - center) / unit, (y - y.mean()) / y.std(), (test_x - center) / unit, seed)
        return prediction.rescaled(-y.mean() / y.std(), 1 / y.std())

    return wrapped


def _train_exact(kernel: Kernel, x: Tensor, y: Tensor, test_x: Tensor) -> Mixture:
    model = SwappableGP(x, y, kernel).to(x)
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with gpytorch.settings.max_cholesky_size(len(y)):
        for _ in range(150):
            optimizer.zero_grad()
            loss = -objective(model(x), y)
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The input matches the stored training data")
            return _as_mixture(model.likelihood(model(test_x)))


def _as_mixture(prediction: Any) -> Mixture:
    return Mixture(prediction.mean.unsqueeze(0), prediction.variance.unsqueeze(0))


BAYESIAN, EXACT = "Bayesian T-KRR", "exact GP"
MODELS: dict[str, Fit] = {
    BAYESIAN: fit_bayesian,
    EXACT: standardised(fit_exact),
    "SVGP-512": standardised(fit_variational),
    "RFF": standardised(fit_random_features),
    "ALS + Laplace": fit_laplace,
    "with warp": partial(fit_bayesian, warp=True),
}
DEFAULT_MODELS = [name for name in MODELS if name != "with warp"]


# What is claimed


def check_targets(rows: list[dict[str, Any]]) -> list[str]:
    """
    One sentence for each claim: whether it holds in these rows.

    :param rows: The rows of the report.
    """
    ours = {row["data"]: row for row in rows if row["model"] == BAYESIAN}
    exact = {row["data"]: row for row in rows if row["model"] == EXACT}
    coverage = {name: row["coverage"] for name, row in ours.items()}
    slack = {name: 2 * (row["coverage_se"] or 0.0) for name, row in ours.items()}
    near = all(0.92 - slack[name] <= value <= 0.98 + slack[name] for name, value in coverage.items())
    claims = [
        _claim("coverage in 0.90-0.99 on every set", all(0.9 <= c <= 0.99 for c in coverage.values()), coverage),
        _claim("coverage within two standard errors of 0.92-0.98 on every set", near, coverage),
    ]
    both = [name for name in ours if name in exact]
    excess = {name: ours[name]["nlpd"] - exact[name]["nlpd"] for name in both}
    ratio = {name: exact[name]["seconds"] / ours[name]["seconds"] for name in both if ours[name]["N"] > 1000}
    if both:
        claims.append(_claim("NLPD at most the exact GP's + 0.05 on every set", max(excess.values()) <= 0.05, excess))
    if len(both) >= 2:
        claims.append(_claim("NLPD below the exact GP's on two sets or more", sorted(excess.values())[1] < 0, excess))
    if ratio:
        claims.append(_claim("less time than the exact GP where N > 1000", min(ratio.values()) > 1, ratio))
    return claims if ours else []


def _claim(text: str, holds: bool, evidence: dict[str, float]) -> str:
    shown = ", ".join(f"{name} {value:.3g}" for name, value in evidence.items())
    return f"{'met' if holds else 'MISSED'}: {text} ({shown})."
