"""Six million generated flights streamed from disk beside the dense Gram matrix; three million real flights.

The generated flights are written to a file and fitted in a process of their own, which never holds them all. The dense
Gram matrix, the cost of plain ALS, is timed on a part of the rows and extrapolated to all of them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import gpytorch
import torch
from torch import Tensor

import gpytorch_tkrr as tkrr
from benchmarks.harness import Report, best_of
from gpytorch_tkrr.comparison.process import peak_resident_bytes

from . import datasets
from .generated_flights import LOWER, NOISE, NUM_BASIS, make_model, write_flights
from .protocol import mean_squared_error, predict_mean, unit_scaler
from .svgp import fit_svgp

SWEEPS = 10
TEST_ROWS = 100_000

#: Seconds in Table 2 of Wesel & Batselier (2021), six million flights on other hardware.
PAPER_SECONDS = {5: 1565, 20: 7141}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", choices=["generated", "real", "both"], default="both")
    parser.add_argument("--rows", type=int, default=6_000_000, help="generated flights")
    parser.add_argument("--ranks", type=int, nargs="+", default=[5, 20], help="R, generated flights")
    parser.add_argument("--sweeps", type=int, default=3, help=f"of ALS; seconds are also scaled to {SWEEPS}")
    parser.add_argument("--memory", type=int, default=1024, help="MiB that a streamed fit may use beyond the data")
    parser.add_argument("--dense-rows", type=int, default=30_000, help="rows that the dense Gram matrix is timed on")
    parser.add_argument("--folder", type=Path, help="where the generated flights are kept (default: a temporary one)")
    parser.add_argument("--real-rows", type=int, default=3_000_000, help="real flights; two thirds train")
    parser.add_argument("--real-ranks", type=int, nargs="+", default=[5, 10, 20], help="R, real flights")
    parser.add_argument("--real-sweeps", type=int, default=5, help="of ALS on the real flights")
    parser.add_argument("--gibbs", type=int, default=15, help="warm-up sweeps, and draws, of Bayesian T-KRR; 0: none")
    parser.add_argument("--svgp-epochs", type=int, default=2, help="0 leaves SVGP out")
    datasets.add_arguments(parser)


def run(args: argparse.Namespace) -> Report:
    report = Report("airline_scale", f"Flight delays at scale: M = {NUM_BASIS} sines, float64")
    if args.part != "real":
        with tempfile.TemporaryDirectory() as temporary:
            report.attempt("generated flights", partial(_generated, report, args, args.folder or Path(temporary)))
    if args.part != "generated":
        report.attempt("real flights", partial(_real, report, args))
    return report


# Generated flights, streamed


def _generated(report: Report, args: argparse.Namespace, folder: Path) -> None:
    train, test = folder / f"flights_{args.rows}.npy", folder / f"flights_test_{TEST_ROWS}.npy"
    _say(f"writing {args.rows} flights")
    write_flights(train, args.rows)
    write_flights(test, TEST_ROWS, first_chunk=1_000_000)
    for rank in args.ranks:
        report.attempt(f"generated, R = {rank}", partial(_fit_generated, report, args, train, test, rank))
    for fraction in (4, 2, 1):
        report.attempt("memory", partial(_fit_in_little_memory, report, args, folder, test, args.rows // fraction))
    report.notes += [
        f"generated: 8 inputs, 2 of them continuous, read from a .npy file in batches; {args.memory} MiB beyond the "
        f"data. {args.sweeps} sweeps were run; seconds_10_sweeps: scaled to {SWEEPS} by the number of passes. "
        "rows_per_second: rows of all passes; t_row_us: microseconds per row and pass, all threads. peak_gb: resident "
        "memory of a fresh process, libraries included. "
        f"mse: of standardised delays; the noise alone is {_noise_share(test):.3f} of their variance.",
        f"dense_10_sweeps: the dense Gram matrices alone, timed on {args.dense_rows} rows and extrapolated. speed_up: "
        "these against all of our fit, its number of sweeps. paper_seconds: another machine, for orientation.",
        "128 MiB, 0 sweeps: one update and the Laplace blocks, to show that memory does not grow with the rows.",
    ]


def _fit_generated(report: Report, args: argparse.Namespace, train: Path, test: Path, rank: int) -> None:
    num_dims = len(LOWER)
    updates = args.sweeps * 2 * (num_dims - 1) + 1 + num_dims  # and one pass for each Laplace block
    full = SWEEPS * 2 * (num_dims - 1) + 1 + num_dims
    outcome = _in_fresh_process(fit_stream, train, test, rank, args.sweeps, args.memory << 20)
    _say(f"dense Gram matrix, R = {rank}, {args.dense_rows} rows")
    dense = dense_seconds(rank, args.dense_rows) * args.rows / args.dense_rows
    seconds = outcome["seconds"]
    report.add(
        data="generated, streamed",
        method=f"T-KRR, R = {rank}",
        rows=args.rows,
        sweeps=args.sweeps,
        mse=outcome["mse"],
        seconds=seconds,
        seconds_10_sweeps=seconds * full / updates,
        rows_per_second=args.rows * updates / seconds,
        t_row_us=1e6 * seconds / updates / args.rows,
        peak_gb=outcome["peak"] / 1e9,
        dense_10_sweeps=dense * full,
        speed_up=dense * updates / seconds,
        paper_seconds=PAPER_SECONDS.get(rank),
    )


def _fit_in_little_memory(report: Report, args: argparse.Namespace, folder: Path, test: Path, num_rows: int) -> None:
    path = folder / f"flights_{num_rows}.npy"
    write_flights(path, num_rows)
    outcome = _in_fresh_process(fit_stream, path, test, args.ranks[0], 0, 128 << 20)
    report.add(
        data="generated, streamed, 128 MiB",
        method=f"T-KRR, R = {args.ranks[0]}",
        rows=num_rows,
        sweeps=0,
        seconds=outcome["seconds"],
        peak_gb=outcome["peak"] / 1e9,
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def fit_stream(train: Path, test: Path, rank: int, sweeps: int, memory: int) -> dict[str, float]:
    """
    A model of Wesel & Batselier (2021) fitted to a file of flights.

    :param train: The file.
    :param test: Another one to predict.
    :param rank: R.
    :param sweeps: Sweeps of ALS.
    :param memory: Bytes that may be used beyond the data.
    """
    start = time.perf_counter()
    source = tkrr.NpySource(train, target=len(LOWER))
    model = make_model(rank)
    penalty = tkrr.FrobeniusPenalty(100 / source.num_rows)
    tkrr.fit_als(
        model, data=source, max_sweeps=sweeps, rel_tol=0.0, penalty=penalty, seed=0, memory=memory, progress=True
    )
    seconds = time.perf_counter() - start
    (x, y), *_ = tkrr.NpySource(test, target=len(LOWER), batch_rows=TEST_ROWS)
    error = mean_squared_error(predict_mean(model, x), y) / float(y.var())
    return {"seconds": seconds, "mse": error, "peak": float(peak_resident_bytes() or 0)}


def _noise_share(test: Path) -> float:
    (_, y), *_ = tkrr.NpySource(test, target=len(LOWER), batch_rows=TEST_ROWS)
    return NOISE / float(y.var())


def _in_fresh_process(function: Callable[..., dict[str, float]], *args: Any) -> dict[str, float]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_with_threads, torch.get_num_threads(), partial(function, *args)).result()


def _with_threads(num_threads: int, function: Callable[[], dict[str, float]]) -> dict[str, float]:
    torch.set_num_threads(num_threads)
    return function()


def dense_seconds(rank: int, num_rows: int, batch_rows: int = 8192) -> float:
    """
    Seconds of one dense Gram matrix C'C, the rows of C being products of R projections and M features.

    :param rank: R.
    :param num_rows: N.
    :param batch_rows: Rows per batch.
    """
    p = torch.randn(num_rows, rank, dtype=torch.float64)
    features = torch.randn(num_rows, NUM_BASIS, dtype=torch.float64)
    size = rank * NUM_BASIS

    def gram() -> None:
        total = torch.zeros(size, size, dtype=torch.float64)
        for chunk, phi in zip(p.split(batch_rows), features.split(batch_rows), strict=True):
            design = (chunk.unsqueeze(-1) * phi.unsqueeze(1)).reshape(-1, size)
            total.addmm_(design.mT, design)

    return best_of({"dense": gram}, repeat=2)["dense"]


# Real flights


def _real(report: Report, args: argparse.Namespace) -> None:
    data = datasets.load("airline_2001", data_dir=args.data_dir, inputs=9)
    order = torch.randperm(len(data.y), generator=torch.Generator().manual_seed(0))[: args.real_rows]
    first, rest = order[: 2 * len(order) // 3], order[2 * len(order) // 3 :]
    raw_x, raw_y = torch.from_numpy(data.x), torch.from_numpy(data.y)
    scale = unit_scaler(raw_x[first])
    x, test_x = scale(raw_x[first]), scale(raw_x[rest])
    center, unit = raw_y[first].mean(), raw_y[first].std()
    y, test_y = (raw_y[first] - center) / unit, (raw_y[rest] - center) / unit

    def add(method: str, sweeps: int | None, train: Callable[[], Callable[[Tensor], Tensor]]) -> None:
        start = time.perf_counter()
        predict = train()
        seconds = time.perf_counter() - start
        mse = mean_squared_error(predict(test_x), test_y)
        report.add(data=data.name, method=method, rows=len(y), sweeps=sweeps, mse=mse, seconds=seconds)

    def attempt(method: str, sweeps: int | None, train: Callable[[], Callable[[Tensor], Tensor]]) -> None:
        _say(f"{data.name}: {method}")
        report.attempt(f"{data.name}, {method}", partial(add, method, sweeps, train))

    for rank in args.real_ranks:
        attempt(f"T-KRR, R = {rank}", args.real_sweeps, partial(_als, x, y, rank, args.real_sweeps))
    if args.gibbs:
        rank = args.real_ranks[-1]
        attempt(f"Bayesian T-KRR, R = {rank}", 2 * args.gibbs, partial(_gibbs, x, y, rank, args.gibbs))
    if args.svgp_epochs:
        attempt(f"SVGP-512, {args.svgp_epochs} epochs", None, partial(_svgp, x, y, args.svgp_epochs))
    report.notes.append(
        f"{data.name}: {len(x)} training and {len(test_x)} test rows of {x.shape[1]} inputs, standardised test MSE. "
        f"T-KRR: the default kernel, lengthscales and noise learned, {args.real_sweeps} sweeps. Bayesian T-KRR: one "
        f"chain, {args.gibbs} warm-up sweeps and {args.gibbs} draws. SVGP: 512 inducing points, ARD RBF, batches of "
        f"1024, Adam (0.01), float32. Data: {data.source}."
    )


def _als(x: Tensor, y: Tensor, rank: int, sweeps: int) -> Callable[[Tensor], Tensor]:
    model = tkrr.TKRR(x, y, gpytorch.likelihoods.GaussianLikelihood().double(), rank=rank, num_basis=NUM_BASIS)
    tkrr.fit_als(model, max_sweeps=sweeps, rel_tol=0.0, learn_hyperparameters=True, seed=0, progress=True)
    return partial(predict_mean, model)


def _gibbs(x: Tensor, y: Tensor, rank: int, num: int) -> Callable[[Tensor], Tensor]:
    model = tkrr.TKRR(x, y, gpytorch.likelihoods.GaussianLikelihood().double(), rank=rank, num_basis=NUM_BASIS)
    tkrr.fit_gibbs(model, num_warmup=num, num_draws=num, seed=0, progress=True)
    return partial(predict_mean, model)


def _svgp(x: Tensor, y: Tensor, epochs: int) -> Callable[[Tensor], Tensor]:
    torch.manual_seed(0)
    model = fit_svgp(x, y, epochs=epochs, lengthscale=0.2)
    return lambda test: model.predict(test)[0]
