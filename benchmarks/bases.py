"""Families of functions side by side: error of the kernel against their number, and NLPD of T-KRR with each."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import gpytorch
import torch
from gpytorch.kernels import AdditiveKernel, ConstantKernel, Kernel, MaternKernel, ProductKernel, RBFKernel, ScaleKernel
from torch import Tensor

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.features.expansion import BasisFamily

from . import calibration, datasets, pool
from .generated_worlds import WORLDS
from .harness import Report

LENGTHSCALE = 0.2  # of inputs in [0, 1]
BOXES = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0)  # half widths over the half range
COUNTS = {1: (6, 12, 24, 48, 96), 2: (4, 8, 12, 16, 24, 32)}
NUM_SEEDS = 10

STATIONARY: dict[str, BasisFamily] = {
    "Sines": tkrr.Sines(),
    "GaussLegendre": tkrr.GaussLegendre(),
    "GaussHermite": tkrr.GaussHermite(),
    "VariationalFourier": tkrr.VariationalFourier(),
    "RandomFourier": tkrr.RandomFourier(),
}
MAPS: dict[str, BasisFamily] = {
    "FourierSeries": tkrr.FourierSeries(),
    "Trigonometric": tkrr.Trigonometric(),
    "Polynomial": tkrr.Polynomial(3),
}
PAPER_SETS = ("yacht", "energy", "airfoil")
POOL_SETS = ("servo", "machine", "concreteslump")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--splits", type=int, default=3, help="splits of each data set; 0 leaves them out")
    parser.add_argument("--sets", nargs="+", default=[*PAPER_SETS, *POOL_SETS], help="data sets, or generated worlds")
    parser.add_argument("--rank", type=int, default=10, help="R")
    parser.add_argument("--num-basis", type=int, default=20, help="functions per input")
    parser.add_argument("--draws", type=int, default=50, help="draws, after as many warm-up sweeps")
    datasets.add_arguments(parser)


def run(args: argparse.Namespace) -> Report:
    report = Report("bases", "Other functions than the sines: kernel errors and NLPD of T-KRR, the same for all")
    curves: dict[tuple[str, int], dict[str, list[tuple[int, float]]]] = {}
    for name, num_dims in (("RBF", 1), ("RBF", 2), ("Matern-3/2", 1), ("Matern-3/2", 2)):
        curve = curves[name, num_dims] = dict(kernel_errors(name, num_dims))
        for family, points in curve.items():
            for count, error in points:
                report.add(kernel=name, inputs=num_dims, family=family, functions=count, error=error)
    _plot(curves, args.output / "bases.png")
    report.notes += [
        f"error: largest difference of kernel matrices over 81 points of [0, 1] or 200 of [0, 1]^2, lengthscale "
        f"{LENGTHSCALE}, relative to k(0); of {len(BOXES)} boxes the best for each number; RandomFourier: the mean of "
        f"{NUM_SEEDS} seeds. Two inputs of Matern kernels multiply. functions: of all inputs together. The plot is "
        "bases.png.",
    ]
    if args.splits:
        for name in args.sets:
            report.attempt(name, partial(_run_set, report, args, name))
        report.notes += [
            f"nlpd: T-KRR, rank {args.rank}, {args.num_basis} functions per input, Gibbs with {args.draws} warm-up "
            f"sweeps and as many draws, one chain; {args.splits} splits 90/10. Kernel: a product over inputs of "
            "constant plus Matern 5/2, hyperparameters sampled (RandomFourier: lengthscales fixed at half the range of "
            "an input); maps: their own. Polynomial: degree 3.",
            *best_families(report.rows),
        ]
    return report


# Kernel errors


def make_kernel(name: str, num_dims: int) -> Kernel:
    """
    A kernel with one lengthscale.

    :param name: RBF or Matern-3/2.
    :param num_dims: D.
    """
    if name == "RBF":
        kernel: Kernel = RBFKernel().double()
        kernel.lengthscale = LENGTHSCALE
        return kernel
    parts = [MaternKernel(nu=1.5, active_dims=[d]).double() for d in range(num_dims)]
    for part in parts:
        part.lengthscale = LENGTHSCALE
    return ProductKernel(*parts)


def kernel_errors(name: str, num_dims: int) -> Iterator[tuple[str, list[tuple[int, float]]]]:
    """
    For each family the numbers of functions and the errors of the kernel with the best box.

    :param name: Which kernel.
    :param num_dims: D.
    """
    kernel = make_kernel(name, num_dims)
    generator = torch.Generator().manual_seed(0)
    x = torch.linspace(0, 1, 81).double().unsqueeze(-1)
    if num_dims > 1:
        x = torch.cat(
            [torch.rand(196, 2, generator=generator), torch.cartesian_prod(torch.arange(2.0), torch.arange(2.0))]
        )
    for family, basis in STATIONARY.items():
        if family == "VariationalFourier" and name == "RBF":
            continue
        points = []
        for count in COUNTS[num_dims]:
            found = [_error(kernel, x, count, basis, box) for box in BOXES]
            points.append(min(found, key=lambda point: point[1]))
        yield family, points


def _error(kernel: Kernel, x: Tensor, num_basis: int, basis: BasisFamily, box: float) -> tuple[int, float]:
    """The number of functions and the error, for random ones the mean over seeds."""
    domain = tkrr.Domain(torch.full((x.shape[1],), 0.5), 0.5 * box)
    seeds = range(NUM_SEEDS) if isinstance(basis, tkrr.RandomFourier) else [None]
    errors = []
    for seed in seeds:
        family = basis if seed is None else tkrr.RandomFourier(seed)
        reduced = tkrr.HilbertKernel(kernel, domain, num_basis, basis=family)
        errors.append(reduced.approximation_error(x))
    return reduced.expansion().num_functions, fmean(errors)


# T-KRR


def _run_set(report: Report, args: argparse.Namespace, name: str) -> None:
    for split in range(args.splits):
        parts = load(args, name, split)
        for family, basis in {**STATIONARY, **MAPS}.items():
            scores = pool.evaluate(partial(fit, args, basis), *parts, split)
            kept = {score: scores[score] for score in ("nlpd", "rmse", "coverage", "seconds")}
            report.add(data=name, split=split, N=len(parts[1]), D=parts[0].shape[1], family=family, **kept)


def load(args: argparse.Namespace, name: str, split: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """
    Training inputs and targets, test inputs and targets, raw.

    :param args: The options.
    :param name: Data set.
    :param split: Number of the split.
    """
    if name in POOL_SETS or name in WORLDS:
        return pool.load(args, name, split)
    data = datasets.load(name, data_dir=args.data_dir, inputs=8 if name == "energy" else None)
    return calibration.split(data, split)


def fit(
    args: argparse.Namespace, basis: BasisFamily, x: Tensor, y: Tensor, test_x: Tensor, test_y: Tensor, seed: int
) -> pool.Predicted:
    """
    T-KRR with one family.

    :param args: The options.
    :param basis: The family.
    :param x: Training inputs `(N, D)`.
    :param y: Training targets `(N,)`.
    :param test_x: Test inputs `(n, D)`.
    :param test_y: Test targets `(n,)`.
    :param seed: Seed.
    """
    kernel = None
    if not isinstance(basis, tuple(map(type, MAPS.values()))):
        kernel = product_kernel(x, float(y.var()))
        if isinstance(basis, tkrr.RandomFourier):
            for part in kernel.modules():
                if isinstance(part, MaternKernel):
                    part.raw_lengthscale.requires_grad_(False)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tkrr.TKRRWarning)
        model = tkrr.TKRR(x, y, likelihood, kernel=kernel, basis=basis, rank=args.rank, num_basis=args.num_basis)
        tkrr.fit_gibbs(model, num_draws=args.draws, num_warmup=args.draws, num_chains=1, seed=seed)
        prediction = model.predict(test_x)
        with torch.no_grad():
            return pool.Predicted(prediction.mean, prediction.stddev, prediction.log_prob(test_y))


def product_kernel(x: Tensor, outputscale: float) -> ScaleKernel:
    """
    A product over inputs of constant plus Matern 5/2, lengthscales half of the range of an input.

    :param x: Inputs `(N, D)`.
    :param outputscale: The first variance of f.
    """
    num_dims = x.shape[1]
    factors = []
    for d, width in enumerate((x.amax(0) - x.amin(0)).tolist()):
        smooth = ScaleKernel(MaternKernel(nu=2.5, active_dims=[d]))
        smooth.base_kernel.lengthscale, smooth.outputscale = (width or 1.0) / 2, 1 / num_dims
        constant = ConstantKernel(active_dims=[d])
        constant.constant = torch.ones(1)
        factors.append(AdditiveKernel(constant, smooth))
    kernel = ScaleKernel(ProductKernel(*factors)).to(x)
    kernel.outputscale = outputscale / (1 + 1 / num_dims) ** num_dims
    return kernel


def best_families(rows: list[dict[str, Any]]) -> list[str]:
    """
    One line for each data set: mean NLPD of all families.

    :param rows: The rows of the report.
    """
    lines = []
    for name in dict.fromkeys(row["data"] for row in rows if "data" in row):
        of_set = [row for row in rows if row.get("data") == name]
        families = dict.fromkeys(row["family"] for row in of_set)
        means = {f: fmean(row["nlpd"] for row in of_set if row["family"] == f) for f in families}
        lines.append(f"{name}, mean nlpd: {', '.join(f'{f} {value:.3f}' for f, value in means.items())}.")
    return lines


def _plot(curves: dict[tuple[str, int], dict[str, list[tuple[int, float]]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(curves), figsize=(3.6 * len(curves), 3.4), sharey=True, layout="constrained")
    for axis, ((name, num_dims), families) in zip(axes, curves.items(), strict=True):
        for number, family in enumerate(STATIONARY):
            if family in families:
                counts, errors = zip(*families[family], strict=True)
                axis.loglog(counts, errors, "o-", color=f"C{number}", label=family, markersize=4)
        axis.set_title(f"{name}, {num_dims} input{'s' if num_dims > 1 else ''}")
        axis.set_xlabel("number of functions")
        axis.set_ylim(1e-10, 2)
    axes[0].set_ylabel("error of the kernel")
    axes[-1].legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
