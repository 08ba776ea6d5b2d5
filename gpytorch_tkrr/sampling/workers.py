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

#: What a process sends: a text, its result, or why it has none.
TOLD, DONE, FAILED = "told", "done", "failed"


def num_parallel() -> int:
    """
    How many processes may run at once: as many as torch has threads, and no more than there are cores.

    So ``torch.set_num_threads(1)`` keeps all in this process. Processes are not forked on Windows and macOS, where this
    is not safe, nor from a process that is itself a child or has used a GPU.
    """
    if sys.platform != "linux" or multiprocessing.parent_process() is not None or torch.cuda.is_initialized():
        return 1
    return min(torch.get_num_threads(), len(os.sched_getaffinity(0)))


#: Says how far a task is, by a short text.
Tell = Callable[[str], None]


def run_forked(
    function: Callable[[int, Tell], T], num_tasks: int, num_workers: int, tell: Tell = lambda text: None
) -> list[T]:
    """
    `function(0, tell)`, `function(1, tell)`, ... in forked processes.

    :param function: Its result is pickled. What it tells is told in this process.
    :param num_tasks: How many.
    :param num_workers: Processes that run at once.
    :param tell: Called with every text that a task tells.
    :raises ProcessError: Where a process ends without a result.

    Example:
        >>> from gpytorch_tkrr.sampling.workers import run_forked
        >>> run_forked(lambda number, tell: number**2, 3, num_workers=2)
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
            ready: list[Any] = multiprocessing.connection.wait(list(running))
            for receiver in ready:
                number, process = running[receiver]
                is_done, value = _receive(receiver, number)
                if not is_done:
                    tell(value)
                    continue
                del running[receiver]
                receiver.close()
                results[number] = value
                process.join()
    finally:
        for _, process in running.values():
            process.terminate()
            process.join()
    return [results[number] for number in range(num_tasks)]


def _work(function: Callable[[int, Tell], Any], number: int, sender: Any) -> None:
    """What a process does: one task, on one thread."""
    torch.set_num_threads(1)

    def send(kind: str, value: Any) -> None:
        sender.send_bytes(pickle.dumps((kind, value)))

    try:
        send(DONE, function(number, lambda text: send(TOLD, text)))
    except BaseException:
        send(FAILED, traceback.format_exc())
    sender.close()


def _receive(receiver: Any, number: int) -> tuple[bool, Any]:
    """Whether a task is done, and its result, or a text that it tells."""
    try:
        kind, value = pickle.loads(receiver.recv_bytes())
    except EOFError as error:
        raise ProcessError(
            f"The process of chain {number} ended without a result: it was killed, or ran out of memory. Call "
            "torch.set_num_threads(1) to run all chains in one process."
        ) from error
    if kind == FAILED:
        raise ProcessError(f"Chain {number} failed in its process.\n{value}")
    return kind == DONE, value
