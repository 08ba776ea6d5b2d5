"""One training step of an ExactGP: HilbertKernel against RFFKernel with as many features."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import gpytorch
import torch

from .exact_gp import SwappableGP, hilbert_model, make_data, rff_model
from .harness import Report, best_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 20_000, 40_000, 80_000])
    parser.add_argument(
        "--num-basis", type=int, default=14, help="sines per dimension; their square is the feature count"
    )
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float64")


def step(model: SwappableGP) -> Callable[[], None]:
    """Forward and backward of the marginal likelihood."""
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)

    def run() -> None:
        model.zero_grad()
        loss = -objective(model(*model.train_inputs), model.train_targets)
        loss.backward()

    return run


def run(args: argparse.Namespace) -> Report:
    num_features = args.num_basis**2
    report = Report(
        "hilbert_training", f"One training step of an ExactGP on 2 inputs, {num_features} features, {args.dtype}"
    )
    dtype = getattr(torch, args.dtype)
    seconds = {}
    for num_rows in args.rows:
        x, y = make_data(num_rows, dtype)
        models = {"ours": hilbert_model(x, y, args.num_basis), "rff": rff_model(x, y, num_features)}
        best = best_of({name: step(model.train()) for name, model in models.items()}, repeat=args.repeat, warmup=2)
        seconds[num_rows] = best["ours"]
        report.add(
            rows=num_rows,
            hilbert_ms=1e3 * best["ours"],
            rff_ms=1e3 * best["rff"],
            speedup=best["rff"] / best["ours"],
            growth=best["ours"] / seconds[args.rows[0]],
        )
    report.notes.append(
        "growth: our step relative to the first row. Best of several interleaved steps, Gram matrix cached."
    )
    return report
