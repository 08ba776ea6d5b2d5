"""CP weights against tensor trains with as many weights: error, NLPD and seconds of fit_gibbs and fit_als."""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import gpytorch
import torch
from torch import Tensor

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.cp.format import WeightFormat

from . import calibration, datasets, pool
from .generated_worlds import robot_arm
from .harness import Report

ROBOT_ARM, FLIGHTS = "robot arm", "airline_nyc2013"
SETS = ("yacht", "energy", "airfoil", ROBOT_ARM, FLIGHTS)

#: Rows of the two large sets, a tenth of them for testing.
LARGE_ROWS = 3000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS), help="which to run")
    parser.add_argument("--ranks", type=int, nargs="+", default=[3], help="ranks of the tensor trains")
    parser.add_argument("--splits", type=int, default=3, help="splits 90/10 of each set")
    parser.add_argument("--num-basis", type=int, default=12, help="sines per input")
    parser.add_argument("--draws", type=int, default=50, help="draws, after as many warm-up sweeps")
    parser.add_argument("--rows", type=int, default=LARGE_ROWS, help=f"rows of {ROBOT_ARM} and {FLIGHTS}")
    parser.add_argument(
        "--previous", nargs="+", type=Path, default=[], help="earlier reports: what they hold and is not run is kept"
    )
    datasets.add_arguments(parser)


def run(args: argparse.Namespace) -> Report:
    torch.set_num_threads(args.threads or 1)
    report = Report("formats", "CP weights and tensor trains with as many weights, in units of the standardised target")
    rows = [row for path in args.previous for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]
    report.rows = [row for row in rows if row["data"] not in args.sets]
    for name in args.sets:
        report.attempt(name, partial(_run_set, report, args, name))
    report.rows.sort(key=lambda row: SETS.index(row["data"]))
    report.notes += [
        f"Default kernel, {args.num_basis} sines per input; inputs in the order of their columns, and in that of "
        f"ByInteraction(); {args.splits} splits 90/10. CP: the rank whose number of weights is nearest to that of the "
        f"tensor train. Gibbs: one chain, {args.draws} warm-up sweeps and as many draws. ALS: hyperparameters learned, "
        f"at most 20 sweeps, block Laplace. {ROBOT_ARM} and {FLIGHTS}: {args.rows} rows chosen at random. seconds: "
        "processor time, one thread.",
        *summarise(report.rows),
    ]
    return report


def load(args: argparse.Namespace, name: str, split: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """
    Training inputs and targets, test inputs and targets, raw.

    :param args: The options.
    :param name: The set.
    :param split: Number of the split.
    """
    if name == ROBOT_ARM:
        return robot_arm(split, num_rows=args.rows)
    data = datasets.load(name, data_dir=args.data_dir, inputs=8 if name == "energy" else None)
    x, y, test_x, test_y = calibration.split(data, split)
    if name == FLIGHTS:
        num_test = args.rows // 10
        return x[: args.rows - num_test], y[: args.rows - num_test], test_x[:num_test], test_y[:num_test]
    return x, y, test_x, test_y


def formats_of(rank: int, sizes: list[int]) -> dict[str, tuple[WeightFormat, int]]:
    """
    A tensor train in both orders of the inputs, and CP weights that are nearest to it in number; with these numbers.

    :param rank: Of the tensor train.
    :param sizes: Number of functions of each mode.
    """
    train = tkrr.TensorTrain(rank)
    num = sum(height * size for height, size in zip(train.heights(sizes), sizes, strict=True))
    components = max(round(num / sum(sizes)), 1)
    return {
        "TensorTrain": (train, num),
        "TensorTrain, ordered": (tkrr.TensorTrain(rank, order=tkrr.ByInteraction()), num),
        "CP": (tkrr.CP(components), components * sum(sizes)),
    }


def fit_gibbs(model: tkrr.TKRR, args: argparse.Namespace, seed: int) -> None:
    """
    Draws of everything.

    :param model: The model.
    :param args: The options.
    :param seed: Seed.
    """
    tkrr.fit_gibbs(model, num_warmup=args.draws, num_draws=args.draws, num_chains=1, seed=seed)


def fit_als(model: tkrr.TKRR, args: argparse.Namespace, seed: int) -> None:
    """
    Point estimates of everything.

    :param model: The model.
    :param args: The options.
    :param seed: Seed.
    """
    tkrr.fit_als(model, learn_hyperparameters=True, max_sweeps=20, seed=seed)


FITS: dict[str, Callable[[tkrr.TKRR, argparse.Namespace, int], None]] = {"Gibbs": fit_gibbs, "ALS": fit_als}


def _run_set(report: Report, args: argparse.Namespace, name: str) -> None:
    for split in range(args.splits):
        parts = load(args, name, split)
        num_rows, num_dims = parts[0].shape
        sizes = [args.num_basis + 2] * num_dims  # a constant, a linear function, and sines
        for rank in args.ranks:
            for label, (weights, num) in formats_of(rank, sizes).items():
                for fit in FITS:
                    scores = pool.evaluate(partial(_predict, args, weights, FITS[fit]), *parts, split)
                    kept = {score: scores[score] for score in ("rmse", "nlpd", "coverage", "seconds")}
                    report.add(
                        data=name, split=split, N=num_rows, D=num_dims, fit=fit, format=label, rank=weights.rank,
                        train_rank=rank, weights=num, **kept,
                    )  # fmt: skip


def _predict(
    args: argparse.Namespace,
    weights: WeightFormat,
    fit: Callable[[tkrr.TKRR, argparse.Namespace, int], None],
    x: Tensor,
    y: Tensor,
    test_x: Tensor,
    test_y: Tensor,
    seed: int,
) -> pool.Predicted:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tkrr.TKRRWarning)
        likelihood = gpytorch.likelihoods.GaussianLikelihood()
        model = tkrr.TKRR(x, y, likelihood, weights=weights, num_basis=args.num_basis)
        fit(model, args, seed)
        prediction = model.predict(test_x)
        with torch.no_grad():
            return pool.Predicted(prediction.mean, prediction.stddev, prediction.log_prob(test_y))


def summarise(rows: list[dict[str, Any]]) -> list[str]:
    """
    One line for each set, fit and number of weights: means over splits, and on how many a tensor train is better.

    :param rows: The rows of the report.
    """
    lines = []
    for name, fit, rank in dict.fromkeys((row["data"], row["fit"], row["train_rank"]) for row in rows):
        own = [row for row in rows if (row["data"], row["fit"], row["train_rank"]) == (name, fit, rank)]
        own.sort(key=lambda row: row["split"])
        by_format = {
            form: [row for row in own if row["format"] == form] for form in dict.fromkeys(r["format"] for r in own)
        }
        cells = [
            f"{form} ({each[0]['weights']} weights) {fmean(r['nlpd'] for r in each):.3f} / "
            f"{fmean(r['rmse'] for r in each):.4f} / {fmean(r['seconds'] for r in each):.1f} s"
            for form, each in by_format.items()
        ]
        cp = by_format.pop("CP")
        wins = [
            f"{form} is better than CP in nlpd on {sum(a['nlpd'] < b['nlpd'] for a, b in zip(each, cp, strict=True))}, "
            f"in rmse on {sum(a['rmse'] < b['rmse'] for a, b in zip(each, cp, strict=True))} of {len(cp)} splits."
            for form, each in by_format.items()
        ]
        lines.append(f"{name}, {fit}, rank {rank} (nlpd / rmse): {'; '.join(cells)}. {' '.join(wins)}")
    return lines
