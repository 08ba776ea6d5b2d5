"""Weak scaling of ALS: one and two processes with the same rows each, and what they exchange in a sweep.

Every process has one thread. A sweep moves, for each factor update, one packed vector of sums through `all_reduce`; its
size depends on the rank and the number of functions, not on the rows.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import gpytorch_tkrr as tkrr
from benchmarks.harness import Report
from gpytorch_tkrr.parallel import ProcessGroup

from .generated_flights import LOWER, NUM_BASIS, make_model, write_flights


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=500_000, help="of each process")
    parser.add_argument("--ranks", type=int, nargs="+", default=[5, 20], help="R")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--sweeps", type=int, default=2, help="timed sweeps, after a first one")
    parser.add_argument("--memory", type=int, default=1024, help="MiB beyond the data, of each process")


def run(args: argparse.Namespace) -> Report:
    report = Report(
        "weak_scaling",
        f"ALS with {args.rows} rows and one thread per process, D = {len(LOWER)}, M = {NUM_BASIS}",
        notes=[
            "efficiency: seconds of one process / seconds of several, each with the same number of rows.",
            "megabytes_per_sweep: handed to all_reduce by each process; it does not depend on the rows.",
            "seconds_waiting: in all_reduce, of the slowest process; it is also waiting for the others.",
        ],
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "flights.npy"
        write_flights(path, args.rows * max(args.processes))
        for rank in args.ranks:
            alone: float | None = None
            for size in args.processes:
                outcomes = _run_together(size, path, max(args.processes), rank, args.sweeps, args.memory << 20)
                seconds = max(outcome["seconds"] for outcome in outcomes)
                alone = seconds if alone is None else alone
                report.add(
                    R=rank,
                    processes=size,
                    rows=args.rows * size,
                    seconds_per_sweep=seconds,
                    efficiency=alone / seconds,
                    megabytes_per_sweep=outcomes[0]["bytes"] / 1e6,
                    seconds_waiting=max(outcome["waiting"] for outcome in outcomes),
                )
    return report


def _run_together(size: int, *args: Any) -> list[dict[str, float]]:
    """Start processes and return what each of them measured."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        processes = [context.Process(target=_measure, args=(queue, store, rank, size, *args)) for rank in range(size)]
        for process in processes:
            process.start()
        outcomes = dict(queue.get() for _ in processes)
        for process in processes:
            process.join()
    return [outcomes[rank] for rank in range(size)]


def _measure(
    queue: Any, store: str, number: int, size: int, path: Path, num_shards: int, rank: int, sweeps: int, memory: int
) -> None:
    """Fit in one of the processes; the first sweep is not timed."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=number, world_size=size, timeout=timedelta(minutes=10))
    processes = _TimedGroup(dist.group.WORLD)
    data = tkrr.Shard(tkrr.NpySource(path, target=len(LOWER)), number, num_shards)
    penalty = tkrr.FrobeniusPenalty(100 / (data.num_rows * size))
    marks: dict[int, tuple[float, float, float]] = {}

    def mark(model: tkrr.TKRR, update: int) -> None:
        marks[update] = time.perf_counter(), float(processes.volume), processes.waiting

    tkrr.fit_als(
        make_model(rank), data=data, max_sweeps=1 + sweeps, rel_tol=0.0, penalty=penalty, seed=0, memory=memory,
        group=processes, callback=mark,
    )  # fmt: skip
    per_sweep = 2 * (len(LOWER) - 1)
    first, last = marks[1 + per_sweep], marks[1 + per_sweep * (1 + sweeps)]
    seconds, volume, waiting = ((b - a) / sweeps for a, b in zip(first, last, strict=True))
    queue.put((number, {"seconds": seconds, "bytes": volume, "waiting": waiting}))
    dist.destroy_process_group()


class _TimedGroup(ProcessGroup):
    """Also takes the time that is spent in :meth:`sum`."""

    waiting = 0.0

    def sum(self, tensor: Tensor) -> Tensor:
        start = time.perf_counter()
        total = super().sum(tensor)
        self.waiting += time.perf_counter() - start
        return total
