"""Prediction for BoTorch-shaped inputs (64, 1, 2): HilbertKernel against RFFKernel, time and memory."""

from __future__ import annotations

import argparse

import gpytorch
import torch

from .exact_gp import hilbert_model, make_data, rff_model
from .harness import Report, best_of, peak_memory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument(
        "--num-basis", type=int, default=14, help="sines per dimension; their square is the feature count"
    )
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float64")


def predictor(name: str, num_rows: int, num_basis: int, dtype: torch.dtype):
    """A function that predicts mean and variance at new inputs (64, 1, 2) with a model in eval mode."""
    x, y = make_data(num_rows, dtype)
    model = hilbert_model(x, y, num_basis) if name == "ours" else rff_model(x, y, num_basis**2)
    model.eval()
    test_x = torch.rand(64, 1, 2, generator=torch.Generator().manual_seed(1)).to(dtype)

    def predict() -> None:
        with torch.no_grad(), gpytorch.settings.fast_pred_var():
            output = model(test_x)
            _ = output.mean, output.variance

    return predict


def predict_twice(name: str, num_rows: int, num_basis: int, dtype: torch.dtype) -> None:
    """The work whose peak memory is measured."""
    predict = predictor(name, num_rows, num_basis, dtype)
    predict()
    predict()


def run(args: argparse.Namespace) -> Report:
    dtype = getattr(torch, args.dtype)
    settings = (args.rows, args.num_basis, dtype)
    title = f"Predicting at inputs (64, 1, 2) after {args.rows} rows, {args.num_basis**2} features, {args.dtype}"
    report = Report("hilbert_predict", title)
    best = best_of({name: predictor(name, *settings) for name in ("ours", "rff")}, repeat=args.repeat, warmup=1)
    memory = {name: peak_memory(predict_twice, name, *settings) for name in ("ours", "rff")}
    for name, label in (("ours", "HilbertKernel"), ("rff", "RFFKernel")):
        report.add(
            kernel=label,
            milliseconds=1e3 * best[name],
            peak_memory_gb=memory[name] / 1e9,
            speedup=best["rff"] / best[name],
        )
    report.notes.append("After a first prediction that fills the caches; peak resident memory of a process of its own.")
    return report
