"""What `gpytorch-tkrr compare` prints for its own data, flight delays, with all models that it knows."""

from __future__ import annotations

import argparse
from pathlib import Path

from gpytorch_tkrr import compare
from gpytorch_tkrr.__main__ import FLIGHT_SIZES
from gpytorch_tkrr.tables import flights

from .harness import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", help="names of models (default: all)")
    parser.add_argument("--splits", type=int, default=2)
    parser.add_argument("--max-train", type=int, default=FLIGHT_SIZES["max_train"])
    parser.add_argument("--max-test", type=int, default=FLIGHT_SIZES["max_test"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--time-limit", type=float, default=300.0, help="seconds per model and split")
    parser.add_argument("--figure", type=Path, help="where to draw the figure, for instance docs/_static/compare.png")


def run(args: argparse.Namespace) -> Report:
    frame = flights.load_new_york()
    sizes = {"splits": args.splits, "max_train": args.max_train, "max_test": args.max_test}
    x, y = frame[flights.COLUMNS[:-1]], frame[flights.COLUMNS[-1]]
    result = compare(x, y, models=args.models, seed=args.seed, time_limit=args.time_limit, progress=True, **sizes)
    if args.figure is not None:
        result.plot().savefig(args.figure)
    title = (
        f"Arrival delays in minutes, {args.max_train} training rows, 8 inputs; mean ± standard deviation over splits"
    )
    report = Report("compare", title, notes=result.remarks())
    for name, row in result.table().iterrows():
        report.add(model=name, **row)
    return report
