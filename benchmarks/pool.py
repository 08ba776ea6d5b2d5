"""Thirteen regression sets and generated worlds with nothing given: T-KRR, SVGP, exact GP and boosting, fold by fold.

Defaults are chosen by these sets, together with the generated worlds, and by no others. The sets are those of the
public collection `treforevans/uci_datasets`: `DATA_DIR/pool/NAME/data.csv.gz` (no header, target last) and
`test_mask.csv.gz` (ten folds). Where they are missing, the generated worlds are run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import gpytorch
import numpy as np
import torch
from torch import Tensor

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.comparison.baselines import GradientBoosting
from gpytorch_tkrr.comparison.distribution import Distribution
from gpytorch_tkrr.comparison.scores import regression_scores

from . import datasets
from .calibration import fit_exact, fit_variational, standardised
from .generated_worlds import WORLDS
from .harness import Report

SETS = (
    "autompg", "breastcancer", "concreteslump", "forest", "gas", "housing", "keggundirected", "machine", "pendulum",
    "servo", "sml", "stock", "tamielectric",
)  # fmt: skip

#: Sets of which only the first fold is run.
LARGE = ("keggundirected", "tamielectric")

#: Exact GPs are trained up to this number of rows.
MAX_EXACT = 1700

OURS, SPARSE, EXACT = "T-KRR", "SVGP-512", "exact GP"


@dataclass
class Predicted:
    """
    Predictions in the units of the targets.

    :param mean: `(n,)`.
    :param sd: `(n,)`.
    :param log_prob: Log density of the test targets where that is not of a normal distribution, `(n,)`.
    :param facts: What the fit says of itself.
    """

    mean: Tensor
    sd: Tensor
    log_prob: Tensor | None = None
    facts: str = ""


Fit = Callable[[Tensor, Tensor, Tensor, Tensor, int], Predicted]


def fit_ours(x: Tensor, y: Tensor, test_x: Tensor, test_y: Tensor, seed: int) -> Predicted:
    """
    T-KRR with nothing given. Inputs have the units of the data, targets are standardised as for the others, since
    GPyTorch's GaussianLikelihood allows no noise variance below 1e-4.
    """
    center, unit = y.mean(), y.std()
    model = tkrr.TKRR(x, (y - center) / unit, gpytorch.likelihoods.GaussianLikelihood())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tkrr.ConvergenceWarning)
        warnings.simplefilter("ignore", tkrr.ExtrapolationWarning)
        result = tkrr.fit_gibbs(model, seed=seed)
        prediction = model.predict(test_x)
        with torch.no_grad():
            log_prob = prediction.log_prob((test_y - center) / unit) - unit.log()
            return Predicted(center + unit * prediction.mean, unit * prediction.stddev, log_prob, result.message)


def fit_boosting(x: Tensor, y: Tensor, test_x: Tensor, test_y: Tensor, seed: int) -> Predicted:
    """Boosted trees, of the mean and of quantiles."""
    model = GradientBoosting(seed=seed)
    model.fit(x, y)
    made = model.predict(test_x)
    assert isinstance(made, Distribution)
    return Predicted(made.mean, made.stddev, made.log_prob(test_y))


def as_fit(model: Callable[..., Any]) -> Fit:
    """
    A model of the calibration benchmark, which predicts normal distributions.

    :param model: The model.
    """

    def fit(x: Tensor, y: Tensor, test_x: Tensor, test_y: Tensor, seed: int) -> Predicted:
        mixture = model(x, y, test_x, seed)
        return Predicted(mixture.means[0], mixture.variances[0].sqrt())

    return fit


MODELS: dict[str, Fit] = {
    OURS: fit_ours,
    SPARSE: as_fit(standardised(fit_variational)),
    EXACT: as_fit(standardised(fit_exact)),
    "boosting": fit_boosting,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sets", nargs="+", choices=[*SETS, *WORLDS], help="default: all that are found")
    parser.add_argument("--folds", type=int, default=3, help=f"folds of each set; of {', '.join(LARGE)} the first")
    parser.add_argument("--first-fold", type=int, default=0, help="number of the first one")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="which to run")
    parser.add_argument(
        "--previous", nargs="+", type=Path, default=[], help="earlier reports: what they hold and is not run is kept"
    )
    parser.add_argument(
        "--missing", action="store_true", help="run only what the earlier reports lack: after an interruption"
    )
    datasets.add_arguments(parser)


def run(args: argparse.Namespace) -> Report:
    torch.set_num_threads(args.threads or 1)
    report = Report("pool", "Test scores in units of the standardised target, nothing given, one thread each")
    sets = args.sets or [*(name for name in SETS if _directory(args, name) is not None), *WORLDS]
    rows = [row for path in args.previous for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]
    kept = {(row["data"], row["fold"], row["model"]): row for row in rows}
    report.rows = list(kept.values())
    for name in sets:
        report.attempt(name, partial(_run_set, report, args, name))
    report.rows.sort(key=lambda row: (row["data"], row["fold"], list(MODELS).index(row["model"])))
    report.notes += [
        "nlpd: of the predictive distribution (T-KRR: a mixture over draws; the others: normal), nlpd_normal: of a "
        "normal distribution of the same mean and variance. seconds: processor time of "
        "training and prediction, one thread.",
        *summarise(report.rows),
    ]
    return report


def _run_set(report: Report, args: argparse.Namespace, name: str) -> None:
    """All models asked for on all folds; the report is written after each, so that nothing is lost."""
    for fold in range(args.first_fold, 1 if name in LARGE or name in WORLDS else args.first_fold + args.folds):
        parts = load(args, name, fold)
        num_rows, num_dims = parts[0].shape
        for model in args.models:
            stored = [row for row in report.rows if (row["data"], row["fold"], row["model"]) == (name, fold, model)]
            if (model == EXACT and num_rows > MAX_EXACT) or (stored and args.missing):
                continue
            report.rows = [row for row in report.rows if row not in stored]
            row = evaluate(MODELS[model], *parts, fold)
            report.add(data=name, fold=fold, N=num_rows, D=num_dims, model=model, **row)
            report.write(args.output, options=vars(args))


def _directory(args: argparse.Namespace, name: str) -> Path | None:
    root = args.data_dir or os.environ.get("TKRR_DATA_DIR")
    path = None if root is None else Path(root) / "pool" / name
    return path if path is not None and (path / "data.csv.gz").exists() else None


def load(args: argparse.Namespace, name: str, fold: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """
    Training inputs and targets, test inputs and targets, raw.

    :param args: The options.
    :param name: A set of the pool, or a generated world.
    :param fold: Number of the split.
    """
    if name in WORLDS:
        return WORLDS[name](fold)
    directory = _directory(args, name)
    if directory is None:
        raise datasets.DatasetNotFoundError(f"There is no pool/{name} in --data-dir or TKRR_DATA_DIR.")
    values = torch.from_numpy(np.loadtxt(directory / "data.csv.gz", delimiter=",", ndmin=2))
    test = torch.from_numpy(np.loadtxt(directory / "test_mask.csv.gz", delimiter=",", ndmin=2)[:, fold] > 0)
    x, y = values[:, :-1].contiguous(), values[:, -1].contiguous()
    return x[~test], y[~test], x[test], y[test]


def evaluate(fit: Fit, x: Tensor, y: Tensor, test_x: Tensor, test_y: Tensor, seed: int) -> dict[str, Any]:
    """
    Scores and seconds of a model on one split.

    :param fit: The model.
    :param x: Training inputs `(N, D)`.
    :param y: Training targets `(N,)`.
    :param test_x: Test inputs `(n, D)`.
    :param test_y: Test targets `(n,)`.
    :param seed: Seed.
    """
    torch.manual_seed(seed)
    start = time.process_time()
    predicted = fit(x, y, test_x, test_y, seed)
    seconds = time.process_time() - start
    center, unit = y.mean(), y.std()
    scores = regression_scores((test_y - center) / unit, (predicted.mean - center) / unit, predicted.sd / unit)
    normal = scores["nlpd"]
    log_prob = predicted.log_prob
    nlpd = normal if log_prob is None else -float((log_prob + unit.log()).mean())
    farthest = float(((predicted.mean - center).abs() / (y - center).abs().max()).max())
    found = {"rmse": scores["rmse"], "nlpd": nlpd, "nlpd_normal": normal, "coverage": scores["coverage"]}
    return {**found, "farthest": farthest, "seconds": seconds, "facts": predicted.facts}


# What is claimed


def summarise(rows: list[dict[str, Any]]) -> list[str]:
    """
    Means over folds, one line for each set; then wins, losses, the worst loss, coverage and seconds.

    :param rows: The rows of the report.
    """
    means = dict(_means(rows))
    found = [name for name in (*SETS, *WORLDS) if (name, OURS) in means]
    if not found:
        return []
    lines = []
    for name in found:
        cells = [
            f"{model} {means[name, model]['nlpd']:.3f} / {means[name, model]['rmse']:.3f} / "
            f"{means[name, model]['coverage']:.2f} / {means[name, model]['seconds']:.0f} s"
            for model in MODELS
            if (name, model) in means
        ]
        lines.append(f"{name} (nlpd / rmse / coverage): {'; '.join(cells)}.")
    pool = [name for name in found if name in SETS]
    lines += _against(means, pool, SPARSE) + _against(means, pool, EXACT)
    if pool:
        lines.append(f"Mean coverage of 95 % intervals: {fmean(means[name, OURS]['coverage'] for name in pool):.3f}.")
    ratios = {}
    for name in pool:
        others = [means[name, model]["rmse"] for model in (SPARSE, EXACT) if (name, model) in means]
        if others:
            ratios[name] = means[name, OURS]["rmse"] / min(others)
    if ratios:
        worst = max(ratios, key=lambda name: ratios[name])
        lines.append(
            f"RMSE over the better of {SPARSE} and {EXACT}: at most {ratios[worst]:.3f} ({worst}); above 1.05 on "
            f"{[name for name in ratios if ratios[name] > 1.05]}."
        )
    return lines


def _against(means: dict[tuple[str, str], dict[str, float]], names: list[str], other: str) -> list[str]:
    """Wins and losses in NLPD, and seconds."""
    both = [name for name in names if (name, other) in means]
    if not both:
        return []
    excess = {name: means[name, OURS]["nlpd"] - means[name, other]["nlpd"] for name in both}
    worst = max(excess, key=lambda name: excess[name])
    near = [name for name in both if excess[name] <= 0.02]
    slower = [
        name
        for name in both
        if means[name, OURS]["N"] > 1000 and means[name, OURS]["seconds"] > means[name, other]["seconds"]
    ]
    return [
        f"NLPD against {other}: better on {sum(value < 0 for value in excess.values())} of {len(both)}, at most 0.02 "
        f"worse on {len(near)}; worst loss {excess[worst]:.3f} ({worst}). More than 1 000 rows and slower: {slower}."
    ]


def _means(rows: list[dict[str, Any]]) -> Iterator[tuple[tuple[str, str], dict[str, float]]]:
    keys = dict.fromkeys((row["data"], row["model"]) for row in rows)
    for key in keys:
        own = [row for row in rows if (row["data"], row["model"]) == key]
        names = ("rmse", "nlpd", "nlpd_normal", "coverage", "seconds", "N")
        known = {name: [row[name] for row in own if row.get(name) is not None] for name in names}
        yield key, {name: fmean(values) if values else math.nan for name, values in known.items()}


if __name__ == "__main__":
    sys.exit("Run it by: python -m benchmarks pool")
