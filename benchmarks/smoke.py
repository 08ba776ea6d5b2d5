"""A few ratios against fixed references in one run, stored for each commit: the history of the package's speed."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import gpytorch
import torch

import gpytorch_tkrr as tkrr

from . import als_gram
from .exact_gp import hilbert_model, make_data, rff_model
from .harness import Report, best_of
from .hilbert_predict import predictor
from .hilbert_training import step

#: Measure -> what is divided by what.
MEASURES = {
    "hilbert_step": "a training step of HilbertKernel over one of RFFKernel, 10 000 rows, 196 features",
    "hilbert_predict": "a prediction of HilbertKernel at 64 points over one of RFFKernel",
    "als_update": "a factor update of fit_als over its dense Gram matrix alone, 20 000 rows, 6 inputs, rank 10",
    "gibbs_visit": "a visit of fit_gibbs over the bare matrix product of its sums, 20 000 rows, 4 inputs, rank 32",
    "small_visit": "a visit of fit_gibbs at 1 000 rows, 4 inputs, rank 8, over a Cholesky factor of 500 x 500",
    "import": "importing the package over importing GPyTorch, in processes of their own",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeat", type=int, default=5, help="rounds of each measure; the best of each side counts")
    parser.add_argument("--measures", nargs="+", choices=list(MEASURES), default=list(MEASURES))


def run(args: argparse.Namespace) -> Report:
    notes = [f"{name}: {text}." for name, text in MEASURES.items()]
    report = Report("smoke", "Seconds over those of a fixed reference in the same run, commit by commit", notes=notes)
    report.rows += earlier_rows(args.output / "smoke.json")
    measured = {name: globals()[f"_{name}"](args.repeat) for name in args.measures}
    report.add(commit=commit(), date=datetime.now(timezone.utc).date().isoformat(), **measured)
    return report


def earlier_rows(path: Path) -> list[dict[str, Any]]:
    """
    The rows of earlier commits.

    :param path: The JSON file, if there is one.
    """
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    return [row for row in rows if row["commit"] != commit()]


def commit() -> str:
    """The commit that is checked out, with a plus where files have changed since; outside of a clone the version."""
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=9", "--exclude=*"]
    try:
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return tkrr.__version__
    return found.stdout.strip()


def _ratio(ours: Any, reference: Any, repeat: int) -> float:
    best = best_of({"ours": ours, "reference": reference}, repeat=repeat)
    return best["ours"] / best["reference"]


def _hilbert_step(repeat: int) -> float:
    x, y = make_data(10_000, torch.float64)
    return _ratio(step(hilbert_model(x, y, 14).train()), step(rff_model(x, y, 196).train()), repeat)


def _hilbert_predict(repeat: int) -> float:
    ours, reference = (predictor(name, 10_000, 14, torch.float64) for name in ("ours", "rff"))
    return _ratio(ours, reference, repeat)


def _als_update(repeat: int) -> float:
    settings = argparse.Namespace(rows=20_000, dims=6, basis=20, ranks=[10], distinct=1440, repeat=repeat)
    first = als_gram.run(settings).rows[0]
    return first["update"] / first["dense_gram"]


def _gibbs_visit(repeat: int) -> float:
    rows, rank, num_basis = 20_000, 32, 20
    psi = torch.randn(2 * num_basis + 1, rows, dtype=torch.float64)
    products = torch.randn(rank * (rank + 1) // 2, 2048, dtype=torch.float64)
    reference = best_of({"gemm": lambda: als_gram._bare_product(psi, products)}, repeat=repeat)["gemm"]
    return _visit(rows, rank, num_basis, min(repeat, 3)) / reference


def _small_visit(repeat: int) -> float:
    matrix = torch.eye(500, dtype=torch.float64) + 1e-3
    reference = best_of({"cholesky": lambda: torch.linalg.cholesky(matrix)}, repeat=10 * repeat)["cholesky"]
    return _visit(1_000, 8, 12, repeat) / reference


def _visit(num_rows: int, rank: int, num_basis: int, repeat: int) -> float:
    """Seconds of one visit of a mode: longer fits against shorter ones."""
    torch.manual_seed(0)
    x = torch.rand(num_rows, 4)
    y = torch.sin(6 * x[:, 0]) * x[:, 1] + x[:, 2] + 0.3 * torch.randn(num_rows)

    def fit(num_draws: int) -> float:
        model = tkrr.TKRR(x, y, gpytorch.likelihoods.GaussianLikelihood(), rank=rank, num_basis=num_basis)
        start = time.perf_counter()
        tkrr.fit_gibbs(model, num_draws=num_draws, num_warmup=2, num_chains=1, seed=0)
        return time.perf_counter() - start

    short, long = 4, 10
    return max(min(fit(long) for _ in range(repeat)) - min(fit(short) for _ in range(repeat)), 1e-9) / (6 * 4)


def _import(repeat: int) -> float:
    def load(module: str) -> Any:
        return lambda: subprocess.run([sys.executable, "-W", "ignore", "-c", f"import {module}"], check=True)

    return _ratio(load("gpytorch_tkrr"), load("gpytorch"), min(repeat, 3))
