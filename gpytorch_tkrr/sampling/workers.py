"""Chains in processes of their own, on one machine.

Small problems are bound by Python, not by arithmetic: threads do not help them, processes do. The processes are forked,
as those of torch's DataLoader are: they share the data without copying, and each has one thread.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import pickle
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ..errors import ProcessError

T = TypeVar("T")


def num_parallel() -> int:
    """
    How many processes may run at once: as many as torch has threads, and no more than there are cores.

    So ``torch.set_num_threads(1)`` keeps all in this process. Processes are not forked on Windows and macOS, where this
    is not safe, nor from a process that is itself a child or has used a GPU.
    """
    if sys.platform != "linux" or multiprocessing.parent_process() is not None or torch.cuda.is_initialized():
        return 1
    return min(torch.get_num_threads(), len(os.sched_getaffinity(0)))


def run_forked(function: Callable[[int], T], num_tasks: int, num_workers: int) -> list[T]:
    """
    `function(0)`, `function(1)`, ... in forked processes.

    :param function: Its result is pickled.
    :param num_tasks: How many.
    :param num_workers: Processes that run at once.
    :raises ProcessError: Where a process ends without a result.

    Example:
        >>> from gpytorch_tkrr.sampling.workers import run_forked
        >>> run_forked(lambda number: number**2, 3, num_workers=2)
        [0, 1, 4]
    """
    context: Any = multiprocessing.get_context("fork")
    results: dict[int, T] = {}
    running: dict[Any, tuple[int, Any]] = {}  # by the end of a pipe
    waiting = list(range(num_tasks))
    try:
        while waiting or running:
            while waiting and len(running) < num_workers:
                number = waiting.pop(0)
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(function, number, sender), daemon=True)
                with warnings.catch_warnings():  # Python 3.12 warns of forks where there are threads
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
                sender.close()
                running[receiver] = number, process
            for receiver in multiprocessing.connection.wait(list(running)):
                number, process = running.pop(receiver)
                results[number] = _receive(receiver, number)
                process.join()
    finally:
        for _, process in running.values():
            process.terminate()
            process.join()
    return [results[number] for number in range(num_tasks)]


def _work(function: Callable[[int], Any], number: int, sender: Any) -> None:
    """What a process does: one task, on one thread."""
    torch.set_num_threads(1)
    try:
        answer = True, function(number)
    except BaseException:
        answer = False, traceback.format_exc()
    sender.send_bytes(pickle.dumps(answer))
    sender.close()


def _receive(receiver: Any, number: int) -> Any:
    try:
        is_done, value = pickle.loads(receiver.recv_bytes())
    except EOFError as error:
        raise ProcessError(
            f"The process of chain {number} ended without a result: it was killed, or ran out of memory. Call "
            "torch.set_num_threads(1) to run all chains in one process."
        ) from error
    finally:
        receiver.close()
    if not is_done:
        raise ProcessError(f"Chain {number} failed in its process.\n{value}")
    return value
