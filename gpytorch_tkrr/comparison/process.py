"""
Functions run one after another, each in a process of its own, with limits of time and memory; what a reader must know
of the machine, and the memory of a process.

A helper process imports this package once and starts a child for every call: a fork where the system has that, so that
nothing is imported again. The helper itself never computes, so there are no threads that a fork could lose, and the
caller's script is not run again, as :mod:`multiprocessing` would do.
"""

from __future__ import annotations

import importlib
import json
import math
import multiprocessing
import os
import pickle
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, TextIO

import torch

from ..data.whole_file import whole_file

Ending = Literal["returned", "raised", "out of time", "out of memory", "crashed"]


@dataclass(frozen=True)
class Outcome:
    """
    How a call ended.

    :param ending: The way it did.
    :param value: What the function returned, or the exception that it raised.
    :param message: One line for the reader; empty if the function returned.
    """

    ending: Ending
    value: Any = None
    message: str = ""


def call(function: Callable[..., Any], *args: Any) -> Outcome:
    """
    Run a function here and now; exceptions become an outcome.

    :param function: The function.
    :param args: Its arguments.

    Example:
        >>> call(max, 1, 2).value, call(max).ending
        (2, 'raised')
    """
    try:
        return Outcome("returned", function(*args))
    except Exception as error:
        out_of_memory = isinstance(error, MemoryError) or "allocate memory" in str(error)
        message = f"{type(error).__name__}: {error}".partition("\n")[0]
        return Outcome("out of memory" if out_of_memory else "raised", error, message)


class Isolation:
    """
    Runs functions in processes of their own. To be used in a `with` statement.

    :param time_limit: Seconds that a call may take, or None.
    :param memory_limit: Bytes that a call may allocate, or None; only where the system has such limits (Linux).
    :param preload: Modules that are imported once, before any call, where they are installed.

    Example:
        >>> with Isolation(time_limit=60.0) as isolation:
        ...     isolation.call(max, 1, 2).value
        2
    """

    def __init__(
        self, time_limit: float | None = None, memory_limit: int | None = None, *, preload: Sequence[str] = ()
    ):
        self.time_limit, self.memory_limit, self.preload = time_limit, memory_limit, list(preload)

    def __enter__(self) -> Isolation:
        self._folder = tempfile.TemporaryDirectory(prefix="gpytorch_tkrr")
        self._helper = subprocess.Popen(
            [sys.executable, "-c", f"from gpytorch_tkrr.comparison.process import serve; serve({self.preload})"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={
                "TQDM_LEAVE": "",  # progress bars vanish when they are done
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), *sys.path])),
            },
        )
        return self

    def __exit__(self, *_: Any) -> None:
        if hasattr(os, "killpg"):
            os.killpg(self._helper.pid, signal.SIGKILL)  # the helper and what it has started
        else:
            self._helper.kill()
        self._helper.communicate()
        self._folder.cleanup()

    def call(self, function: Callable[..., Any], *args: Any) -> Outcome:
        """
        Run a function in a process of its own.

        :param function: The function; it and its arguments are pickled, also where they are defined in a notebook.
        :param args: Its arguments.
        """
        try:
            import cloudpickle
        except ImportError as error:
            raise ImportError("Processes of their own need cloudpickle: pip install gpytorch_tkrr[compare].") from error

        assert self._helper.stdin is not None and self._helper.stdout is not None
        task, result = Path(self._folder.name) / "task", Path(self._folder.name) / "result"
        try:
            task.write_bytes(cloudpickle.dumps((function, args)))
        except Exception as error:
            return Outcome("raised", error, f"It cannot be sent to a process of its own: {error}. Try isolate=False.")
        result.unlink(missing_ok=True)
        request = [str(task), str(result), self.time_limit, self.memory_limit]
        self._helper.stdin.write(json.dumps(request) + "\n")
        self._helper.stdin.flush()
        answer = self._helper.stdout.readline()
        if not answer:
            raise RuntimeError("The process that starts the calls has ended. Try isolate=False.")
        code = json.loads(answer)
        if result.exists():
            return pickle.loads(result.read_bytes())
        if code is None:
            return Outcome("out of time", None, f"More than {self.time_limit:g} s.")
        if code == -signal.SIGKILL:
            return Outcome("out of memory", None, "The system ended it, most likely for want of memory.")
        return Outcome("crashed", None, f"Its process ended with code {code}.")


def serve(preload: Sequence[str]) -> None:
    """
    The helper: one line in, one child, one line out, until the input ends.

    :param preload: Modules to import first.
    """
    for name in preload:
        with suppress(ImportError):
            importlib.import_module(name)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the functions print must not be taken for an answer
    if "fork" in multiprocessing.get_all_start_methods():
        multiprocessing.set_start_method("fork")
    for line in sys.stdin:
        task, result, time_limit, memory_limit = json.loads(line)
        child = multiprocessing.Process(target=_run, args=(task, result, memory_limit))
        child.start()
        in_time = _wait(child, time_limit)
        _answer(answers, child.exitcode if in_time else None)


def _wait(child: BaseProcess, time_limit: float | None) -> bool:
    """Wait for a child, and end it after its time or when nobody waits for the answer any more."""
    parent, end = os.getppid(), math.inf if time_limit is None else time.monotonic() + time_limit
    while child.is_alive() and time.monotonic() < end and os.getppid() == parent:
        child.join(min(1.0, end - time.monotonic()))
    in_time = not child.is_alive()
    if not in_time:
        child.kill()
        child.join()
    return in_time


def _answer(answers: TextIO, code: int | None) -> None:
    answers.write(json.dumps(code) + "\n")
    answers.flush()


def _run(task: str, result: str, memory_limit: int | None) -> None:
    """In the child: read, call, write whole or not at all."""
    if memory_limit is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (memory_limit, memory_limit))
    outcome = call(_load_and_call, task)
    try:
        content = pickle.dumps(outcome)
    except Exception as error:  # what was returned or raised cannot be sent
        content = pickle.dumps(Outcome("raised", None, outcome.message or f"{type(error).__name__}: {error}"))
    with whole_file(result) as part:
        part.write_bytes(content)


def _load_and_call(task: str) -> Any:
    function, args = pickle.loads(Path(task).read_bytes())
    return function(*args)


def machine_facts() -> dict[str, Any]:
    """Processor, cores, threads, versions, date."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
        "python": platform.python_version(),
        **{package: metadata.version(package) for package in ("torch", "gpytorch", "linear_operator", "numpy")},
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def peak_resident_bytes() -> int | None:
    """The largest resident memory of this process so far; None where the system does not say."""
    try:
        # Linux hands ru_maxrss down from the parent process, so the high-water mark of this one is read instead.
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])
    except (OSError, IndexError):
        pass
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
