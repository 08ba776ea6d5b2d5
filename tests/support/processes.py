"""Several processes that talk by Gloo, for tests."""

from __future__ import annotations

import multiprocessing
import pickle
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def start_processes(function: Callable[..., Any], size: int, folder: Path, *args: Any, timeout: float = 60.0) -> list:
    """
    Start `size` processes that call ``function(group, *args)``; see :func:`results_of`.

    :param function: A function of an importable module.
    :param size: Number of processes.
    :param folder: An empty folder for what they return.
    :param args: More arguments.
    :param timeout: Seconds after which a process counts as lost.
    """
    context = multiprocessing.get_context("forkserver")  # imports once, not in every process
    context.set_forkserver_preload(["gpytorch_tkrr", "torch.distributed"])
    processes = [
        context.Process(target=_main, args=(function, rank, size, folder, timeout, args)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    return processes


def results_of(processes: list, folder: Path, seconds: float = 300.0) -> list[Any]:
    """
    What each process returned, or the exception that it raised; None for one that was killed.

    :param processes: As returned by :func:`start_processes`.
    :param folder: The same folder.
    :param seconds: How long to wait at most; a process that still runs then is ended, and the test fails.
    """
    results = []
    for rank, process in enumerate(processes):
        process.join(seconds)
        if process.is_alive():
            for each in processes:
                each.kill()
            raise AssertionError(f"Process {rank} hangs.")
        path = folder / f"result_{rank}.pickle"
        results.append(pickle.loads(path.read_bytes()) if path.exists() else None)
    return results


def run_processes(function: Callable[..., Any], size: int, folder: Path, *args: Any) -> list[Any]:
    """
    Start processes and wait for what they return; an exception in one of them is raised here.

    :param function: A function of an importable module; called as ``function(group, *args)``.
    :param size: Number of processes.
    :param folder: An empty folder.
    :param args: More arguments.
    """
    results = results_of(start_processes(function, size, folder, *args), folder)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def _main(function: Callable[..., Any], rank: int, size: int, folder: Path, timeout: float, args: tuple) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
    )
    try:
        result = function(dist.group.WORLD, *args)
    except Exception as error:
        result = error
        print(f"process {rank}: {type(error).__name__}: {error}", file=sys.stderr)
    (folder / f"result_{rank}.pickle").write_bytes(pickle.dumps(result))
