"""Two classes: Bayesian T-KRR with a probit likelihood on spambase and banana."""

from __future__ import annotations

import argparse
import sys
import time

import gpytorch
import torch
from torch import Tensor

import gpytorch_tkrr as tkrr

from . import datasets
from .harness import Report
from .scores import mean_and_error

#: Largest misclassification and, where one is claimed, largest negative log likelihood.
TARGETS: dict[str, dict[str, float]] = {"spambase": {"error": 0.065, "nll": 0.20}, "banana": {"error": 0.11}}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--splits", type=int, default=5, help="random splits 90/10 of each data set")
    parser.add_argument("--sets", nargs="+", choices=list(TARGETS), default=list(TARGETS), help="data sets")
    parser.add_argument("--rank", type=int, default=12, help="R")
    datasets.add_arguments(parser)


def run(args: argparse.Namespace) -> Report:
    report = Report(
        "classification",
        f"Bayesian T-KRR, probit, rank {args.rank}; {args.splits} random splits 90/10: means and standard errors (_se)",
    )
    for name in args.sets:
        data = datasets.load(name, data_dir=args.data_dir)
        x, y = torch.from_numpy(data.x), (torch.from_numpy(data.y) > 0).double()
        splits = []
        for seed in range(args.splits):
            splits.append(evaluate(x, y, rank=args.rank, seed=seed))
            print(f"{name}  split {seed}  {splits[-1]}", file=sys.stderr, flush=True)
        row: dict[str, float | None] = {}
        for score in splits[0]:
            row[score], error = mean_and_error([split[score] for split in splits])
            if score != "seconds":
                row[f"{score}_se"] = error
        report.add(data=name, N=int(0.9 * len(y)), D=x.shape[1], **row)
        report.notes += check_targets(report.rows[-1])
    report.notes.append(
        "error: share of wrong classes. nll: mean negative log of the probability of the true class. "
        "seconds: training and prediction. Raw data, one chain, 100 warm-up sweeps and 100 draws."
    )
    return report


def evaluate(x: Tensor, y: Tensor, *, rank: int, seed: int) -> dict[str, float]:
    """
    Test error and negative log likelihood on one split.

    :param x: Inputs `(N, D)`.
    :param y: Classes 0 and 1, `(N,)`.
    :param rank: R.
    :param seed: Number of the split.
    """
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    train, test = order[: int(0.9 * len(y))], order[int(0.9 * len(y)) :]
    start = time.perf_counter()
    likelihood = gpytorch.likelihoods.BernoulliLikelihood()
    model = tkrr.TKRR(x[train], y[train], likelihood, rank=rank)
    tkrr.fit_gibbs(model, num_draws=100, num_warmup=100, num_chains=1, seed=seed)
    with torch.no_grad():
        probability = likelihood(model.eval()(x[test])).mean
    seconds = time.perf_counter() - start
    wrong = ((probability > 0.5) != (y[test] > 0.5)).double().mean()
    nll = torch.nn.functional.binary_cross_entropy(probability.clamp(1e-12, 1 - 1e-12), y[test])
    return {"error": float(wrong), "nll": float(nll), "seconds": seconds}


def check_targets(row: dict) -> list[str]:
    """
    One sentence for each claim: whether it holds in this row.

    :param row: A row of the report.
    """
    return [
        f"{'met' if row[score] <= bound else 'MISSED'}: {row['data']} {score} <= {bound:g}."
        for score, bound in TARGETS[row["data"]].items()
    ]
