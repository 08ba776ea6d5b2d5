"""Weak scaling of ALS: one and two processes with the same rows each, and what they exchange in a sweep.

Every process has one thread. A sweep moves, for each factor update, one packed vector of sums through `all_reduce`; its
size depends on the rank and the number of functions, not on the rows. From the constants of one process the time on a
cluster is extrapolated, on paper, by the model of docs/scaling.md.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import sys
import tempfile
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from queue import Empty
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import gpytorch_tkrr as tkrr
from benchmarks.harness import Report
from gpytorch_tkrr.data.parallel import ProcessGroup

from .generated_flights import LOWER, NUM_BASIS, make_model, write_flights

#: Factor updates of a sweep.
UPDATES = 2 * (len(LOWER) - 1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=500_000, help="of each process")
    parser.add_argument("--ranks", type=int, nargs="+", default=[5, 20], help="R")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--sweeps", type=int, default=2, help="timed sweeps, after a first one")
    parser.add_argument("--memory", type=int, default=1024, help="MiB beyond the data, of each process")


#: What the extrapolation assumes of the network: bytes per second, and seconds of one message.
BANDWIDTH, LATENCY = 1e9, 50e-6

#: Sweeps of the extrapolation, and its rows and processes.
SWEEPS = 10
CLUSTERS = ((10**9, 100), (10**9, 1000), (10**10, 1000), (10**10, 10_000))


def run(args: argparse.Namespace) -> Report:
    report = Report(
        "weak_scaling",
        f"ALS with {args.rows} rows and one thread per process, D = {len(LOWER)}, M = {NUM_BASIS}",
        notes=[
            "efficiency: seconds of one process / seconds of several, each with the same number of rows.",
            "t_row_us: microseconds of one row in one factor update; t_solve_ms: milliseconds of an update after its "
            "sums are known; both of the slowest process. kilobytes_per_update, megabytes_per_sweep: handed to "
            "all_reduce by each process; they do not depend on the rows. seconds_waiting: in all_reduce, of the "
            "slowest process; it is also waiting for the others.",
            f"kind 'on paper': not measured, but {SWEEPS} sweeps by the model of docs/scaling.md with t_row_us, "
            f"t_solve_ms and kilobytes_per_update of one process above, {BANDWIDTH / 1e9:g} GB/s and "
            f"{LATENCY * 1e6:g} microseconds per message; efficiency: the share of the rows' sums.",
        ],
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "flights.npy"
        write_flights(path, args.rows * max(args.processes))
        for rank in args.ranks:
            report.attempt(f"R = {rank}", partial(_measure_rank, report, args, path, rank))
    return report


def _measure_rank(report: Report, args: argparse.Namespace, path: Path, rank: int) -> None:
    rows: list[dict[str, Any]] = []
    for size in args.processes:
        outcomes = _run_together(size, path, max(args.processes), rank, args.sweeps, args.memory << 20)
        slowest = {name: max(outcome[name] for outcome in outcomes) for name in outcomes[0]}
        rows.append(
            {
                "kind": "measured",
                "R": rank,
                "processes": size,
                "rows": args.rows * size,
                "seconds_per_sweep": slowest["seconds"],
                "efficiency": (rows[0]["seconds_per_sweep"] if rows else slowest["seconds"]) / slowest["seconds"],
                "t_row_us": 1e6 * slowest["summing"] / UPDATES / args.rows,
                "t_solve_ms": 1e3 * slowest["solving"] / UPDATES,
                "kilobytes_per_update": slowest["bytes"] / UPDATES / 1e3,
                "megabytes_per_sweep": slowest["bytes"] / 1e6,
                "seconds_waiting": slowest["waiting"],
            }
        )
        report.add(**rows[-1])
    t_row, t_solve = 1e-6 * rows[0]["t_row_us"], 1e-3 * rows[0]["t_solve_ms"]
    for num_rows, size in CLUSTERS:
        seconds, share = extrapolate(num_rows, size, t_row, t_solve, 1e3 * rows[0]["kilobytes_per_update"])
        report.add(
            kind="on paper",
            R=rank,
            processes=size,
            rows=num_rows,
            seconds_per_sweep=seconds,
            efficiency=share,
            minutes_10_sweeps=SWEEPS * seconds / 60,
        )


def extrapolate(num_rows: int, size: int, t_row: float, t_solve: float, volume: float) -> tuple[float, float]:
    """
    Seconds of a sweep on a cluster, and the share of them that is spent on rows.

    :param num_rows: N.
    :param size: P, the number of processes.
    :param t_row: Seconds of one row in one update.
    :param t_solve: Seconds of an update after its sums are known.
    :param volume: Bytes of the sums of one update.
    """
    rows = num_rows / size * t_row
    network = 2 * volume / BANDWIDTH + 2 * math.ceil(math.log2(size)) * LATENCY
    return UPDATES * (rows + t_solve + network), rows / (rows + t_solve + network)


def _run_together(size: int, *args: Any) -> list[dict[str, float]]:
    """Start processes and return what each of them measured."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        processes = [context.Process(target=_measure, args=(queue, store, rank, size, *args)) for rank in range(size)]
        for process in processes:
            process.start()
        outcomes: dict[int, dict[str, float]] = {}
        while len(outcomes) < size:
            try:
                outcomes.update([queue.get(timeout=5)])
            except Empty:
                if any(process.exitcode for process in processes):
                    raise RuntimeError("A process has failed; its message stands above.") from None
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
    marks: dict[int, dict[str, float]] = {}

    def mark(model: tkrr.TKRR, update: int) -> None:
        processes.end_update()
        marks[update] = {
            "seconds": time.perf_counter(),
            "bytes": float(processes.volume),
            "summing": processes.summing,
            "waiting": processes.waiting,
            "solving": processes.solving,
        }
        if number == 0:
            print(f"R = {rank}, {size} processes: update {update} of {1 + UPDATES * (1 + sweeps)}", file=sys.stderr)

    tkrr.fit_als(
        make_model(rank), data=data, max_sweeps=1 + sweeps, rel_tol=0.0, penalty=penalty, seed=0, memory=memory,
        group=processes, callback=mark,
    )  # fmt: skip
    first, last = marks[1 + UPDATES], marks[1 + UPDATES * (1 + sweeps)]
    queue.put((number, {name: (last[name] - first[name]) / sweeps for name in first}))
    dist.destroy_process_group()


class _TimedGroup(ProcessGroup):
    """Also takes the time of an update before, in and after :meth:`sum`."""

    summing = waiting = solving = 0.0
    last = 0.0

    def sum(self, tensor: Tensor) -> Tensor:
        start = time.perf_counter()
        total = super().sum(tensor)
        end = time.perf_counter()
        self.summing, self.waiting, self.last = self.summing + start - self.last, self.waiting + end - start, end
        return total

    def end_update(self) -> None:
        """The factor has been solved for."""
        now = time.perf_counter()
        self.solving, self.last = self.solving + now - self.last, now
