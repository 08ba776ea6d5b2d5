"""Support vector machines: T-KRR with squared errors, squared hinge and hinge loss beside scikit-learn's SVC."""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial

import gpytorch
import torch
from gpytorch.kernels import RBFKernel
from torch import Tensor

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.inference.hinge import MarginLoss

from . import datasets
from .harness import Report
from .protocol import mean_sd_lengthscale, misclassification, split
from .scores import mean_and_error

#: Number of functions per input, and rank.
SIZES = {"banana": (12, 12), "spambase": (20, 10)}

#: Multipliers of the penalty; C = 1 / (2 lambda).
RIDGES = (1e-5, 1e-4, 1e-3, 1e-2)

Fit = Callable[[Tensor, Tensor, float], Callable[[Tensor], Tensor]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--splits", type=int, default=3, help="random splits 90/10 of each data set")
    parser.add_argument("--sets", nargs="+", choices=list(SIZES), default=list(SIZES), help="data sets")
    parser.add_argument("--sweeps", type=int, default=10, help="sweeps of ALS")
    datasets.add_arguments(parser)


def run(args: argparse.Namespace) -> Report:
    name = "hinge" if args.sets == list(SIZES) else f"hinge_{'_'.join(args.sets)}"
    report = Report(name, f"Two classes, {args.splits} random splits 90/10: share of wrong classes")
    for name in args.sets:
        data = datasets.load(name, data_dir=args.data_dir)
        num_basis, rank = SIZES[name]
        methods: dict[str, Fit] = {
            f"T-KRR, {title}": partial(fit_tkrr, num_basis=num_basis, rank=rank, loss=loss, sweeps=args.sweeps)
            for title, loss in (
                ("squared errors", None),
                ("squared hinge", tkrr.SquaredHinge()),
                ("hinge", tkrr.Hinge()),
            )
        }
        methods["SVC"] = fit_svc
        results: dict[str, list[dict[str, float]]] = {method: [] for method in methods}
        for seed in range(args.splits):
            parts = split(data, torch.Generator().manual_seed(seed))
            for method, fit in methods.items():
                results[method].append(evaluate(fit, parts.train_x, parts.train_y, parts.test_x, parts.test_y))
                print(f"{name}  split {seed}  {method}  {results[method][-1]}", file=sys.stderr, flush=True)
        for method, splits in results.items():
            error, spread = mean_and_error([each["error"] for each in splits])
            ridges = sorted({each["ridge"] for each in splits})
            seconds = sum(each["seconds"] for each in splits) / len(splits)
            row = {"data": name, "method": method, "error": error, "error_se": spread, "ridges": str(ridges)}
            report.add(**row, seconds=seconds)
    report.notes.append(
        f"RBF kernel, inputs in [0, 1], lengthscale: the mean of their standard deviations, as in the paper. Of the "
        f"ridges {list(RIDGES)} (C = 1 / (2 ridge)) that with the fewest errors on a fifth of the training rows. "
        f"T-KRR: M and R {SIZES}, {args.sweeps} sweeps. seconds: processor time of one fit on all training rows."
    )
    return report


def evaluate(fit: Fit, x: Tensor, y: Tensor, test_x: Tensor, test_y: Tensor) -> dict[str, float]:
    """
    Choose the ridge by held-out training rows, fit all of them, count errors.

    :param fit: Training data and ridge -> response.
    :param x: Training inputs `(N, D)`.
    :param y: Training classes -1 and +1, `(N,)`.
    :param test_x: Test inputs.
    :param test_y: Test classes.
    """
    held_out = len(y) // 5
    errors = {
        ridge: misclassification(fit(x[held_out:], y[held_out:], ridge)(x[:held_out]), y[:held_out]) for ridge in RIDGES
    }
    ridge = min(RIDGES, key=lambda each: errors[each])
    start = time.process_time()
    response = fit(x, y, ridge)
    seconds = time.process_time() - start
    return {"error": misclassification(response(test_x), test_y), "ridge": ridge, "seconds": seconds}


def fit_tkrr(
    x: Tensor, y: Tensor, ridge: float, *, num_basis: int, rank: int, loss: MarginLoss | None, sweeps: int
) -> Callable[[Tensor], Tensor]:
    """
    T-KRR with a loss of the margin.

    :param x: Inputs `(N, D)` in [0, 1].
    :param y: Classes -1 and +1, `(N,)`.
    :param ridge: Multiplier of the penalty.
    :param num_basis: M.
    :param rank: R.
    :param loss: The loss; None for squared errors.
    :param sweeps: Sweeps of ALS.
    """
    kernel = RBFKernel().to(x)
    kernel.lengthscale = mean_sd_lengthscale(x)
    domain = tkrr.Domain(torch.full((x.shape[1],), 0.5), 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tkrr.TKRRWarning)
        likelihood = gpytorch.likelihoods.BernoulliLikelihood()
        settings = {"kernel": kernel, "rank": rank, "num_basis": num_basis, "domain": domain}
        model = tkrr.TKRR(x, y, likelihood, mean_module=gpytorch.means.ZeroMean(), **settings)
        tkrr.fit_als(model, loss=loss, penalty=tkrr.FrobeniusPenalty(ridge), max_sweeps=sweeps, seed=0)
    return lambda test: model.posterior.mean(test)


def fit_svc(x: Tensor, y: Tensor, ridge: float) -> Callable[[Tensor], Tensor]:
    """
    scikit-learn's support vector machine with the same kernel.

    :param x: Inputs `(N, D)`.
    :param y: Classes -1 and +1, `(N,)`.
    :param ridge: 1 / (2 C).
    """
    from sklearn.svm import SVC

    gamma = 1 / (2 * mean_sd_lengthscale(x) ** 2)
    machine = SVC(C=1 / (2 * ridge), gamma=gamma).fit(x.numpy(), y.numpy())
    return lambda test: torch.from_numpy(machine.decision_function(test.numpy()))
