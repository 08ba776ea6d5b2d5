"""One ALS factor update against the plain dense Gram matrix alone, and our Gram matrix against its bare matrix product.

The update is the whole of it, as inside `fit_als`: products over modes, Gram matrix, right-hand side, residuals, solve.
The dense Gram matrix is given its design's two factors for free and formed in batches of rows; nothing else is timed.
"""

from __future__ import annotations

import argparse
import itertools

import gpytorch
import torch
from torch import Tensor

from benchmarks.harness import Report, best_of
from gpytorch_tkrr import TKRR, Domain, FrobeniusPenalty
from gpytorch_tkrr.cp.design import Design
from gpytorch_tkrr.cp.sums import FactorSums
from gpytorch_tkrr.inference.factor_updates import ALSFit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=100_000, help="N")
    parser.add_argument("--dims", type=int, default=8, help="D")
    parser.add_argument("--basis", type=int, default=40, help="M, sines per dimension")
    parser.add_argument("--ranks", type=int, nargs="+", default=[5, 20, 50], help="R")
    parser.add_argument("--distinct", type=int, default=1440, help="distinct values per column in the second part")
    parser.add_argument("--repeat", type=int, default=5, help="least number of rounds; the best of each counts")


def run(args: argparse.Namespace) -> Report:
    report = Report(
        "als_gram",
        f"Seconds of one factor update, N = {args.rows}, D = {args.dims}, M = {args.basis} sines, float64",
        notes=[
            "speed_up: dense Gram matrix alone / our whole update. gram: the sums over data for Gram matrix and "
            "right-hand side as the update forms them, by cells, distinct values or rows. gram_per_gemm: against the "
            "bare matrix product of the same moments over all rows, its operands given.",
        ],
    )
    x = torch.rand(args.rows, args.dims, dtype=torch.float64)
    y = torch.sin(6 * x[:, 0]) * x[:, 1] + 0.1 * torch.randn(args.rows, dtype=torch.float64)
    for rank in args.ranks:
        _measure(report, args, "continuous", x, y, rank)
    coarse = (x * (args.distinct - 1)).round() / (args.distinct - 1)
    for rank in args.ranks if len(args.ranks) < 2 else args.ranks[1:2]:
        _measure(report, args, f"{args.distinct} distinct values", coarse, y, rank)
    return report


def _measure(report: Report, args: argparse.Namespace, inputs: str, x: Tensor, y: Tensor, rank: int) -> None:
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()).double()
    kernel.base_kernel.lengthscale = 0.2
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    model = TKRR(x, y, likelihood, kernel=kernel, rank=rank, num_basis=args.basis, domain=Domain(0.5, 1.0))
    with torch.no_grad():
        training = model.training_data(memory=8 << 30)
        model.prepare(training)
        fit = ALSFit(model, training, FrobeniusPenalty(), False, 8 << 30)
        fit.start(None, torch.Generator().manual_seed(0))
        objective: list[float] = []
        for d in (0, 1):  # the first builds the kept products
            fit.update(d, objective)
        last = args.dims - 1
        sweep = itertools.cycle([*range(2, last + 1), *range(last - 1, -1, -1), 1])

        p = torch.randn(rank, args.rows, dtype=torch.float64)
        features = model.separate().modes[0].basis(x[:, 0])  # (N, M)
        sums = FactorSums.zeros(fit.design.tables[0], rank, p.device)
        moments = torch.randn(sums.moments.shape[0], args.rows, dtype=torch.float64)
        products = torch.randn(sums.moments.shape[1], 4096, dtype=torch.float64)
        seconds = best_of(
            {
                "update": lambda: fit.update(next(sweep), objective),
                "gram": lambda: _add_up(fit.design, sums, p, y),
                "gemm": lambda: _bare_product(moments, products),
                "dense": lambda: _dense_gram(p.mT.contiguous(), features),
            },
            repeat=max(args.repeat, 100 // rank),  # short timings need more rounds
        )
    report.add(
        inputs=inputs,
        R=rank,
        dense_gram=seconds["dense"],
        update=seconds["update"],
        speed_up=seconds["dense"] / seconds["update"],
        gram=seconds["gram"],
        gemm=seconds["gemm"],
        gram_per_gemm=seconds["gram"] / seconds["gemm"],
    )


def _add_up(design: Design, sums: FactorSums, p: Tensor, y: Tensor) -> None:
    """The sums of mode 0 over the batches that the update keeps."""
    start = 0
    for rows in design._kept or ():
        chunk = slice(start, start + rows.batch.num_rows)
        rows.add_to(sums, 0, p[:, chunk], y[chunk])
        start = chunk.stop
    assert start == p.shape[1]


def _dense_gram(p: Tensor, features: Tensor, rows: int = 8192) -> Tensor:
    """C' C for the rows p (x) phi of the design, in batches."""
    size = p.shape[1] * features.shape[1]
    total = torch.zeros(size, size, dtype=torch.float64)
    for chunk, phi in zip(p.split(rows), features.split(rows), strict=True):
        design = (chunk.unsqueeze(-1) * phi.unsqueeze(1)).reshape(-1, size)
        total.addmm_(design.mT, design)
    return total


def _bare_product(moments: Tensor, products: Tensor) -> Tensor:
    """The matrix products of all chunks of rows."""
    total = torch.zeros(moments.shape[0], products.shape[0], dtype=torch.float64)
    for chunk in moments.split(products.shape[1], dim=1):
        total.addmm_(chunk, products[:, : chunk.shape[1]].mT)
    return total
