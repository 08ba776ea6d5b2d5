"""Timing side by side, peak memory, and the report that every benchmark returns."""

from __future__ import annotations

import json
import math
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gpytorch_tkrr.comparison.process import machine_facts, peak_resident_bytes
from gpytorch_tkrr.data.whole_file import whole_file


def best_of(candidates: Mapping[str, Callable[[], object]], *, repeat: int = 5, warmup: int = 1) -> dict[str, float]:
    """
    The shortest of several timings of each candidate, in seconds.

    The candidates take turns, so that a change of the machine's speed meets all of them.

    :param candidates: Functions without arguments, by name.
    :param repeat: Number of timed rounds.
    :param warmup: Number of rounds before them that are not timed.
    """
    if repeat < 1:
        raise ValueError(f"repeat must be at least 1; got {repeat}.")
    best = dict.fromkeys(candidates, math.inf)
    for turn in range(-warmup, repeat):
        for name, function in candidates.items():
            start = time.perf_counter()
            function()
            seconds = time.perf_counter() - start
            if turn >= 0:
                best[name] = min(best[name], seconds)
    return best


def peak_memory(function: Callable[..., object], *args: Any) -> int:
    """
    Peak resident memory, in bytes, of a fresh process that imports and runs `function`.

    :param function: A function of an importable module.
    :param args: Its arguments; they are pickled.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_run_and_measure, function, torch.get_num_threads(), args).result()


def _run_and_measure(function: Callable[..., object], num_threads: int, args: tuple[Any, ...]) -> int:
    torch.set_num_threads(num_threads)
    function(*args)
    peak = peak_resident_bytes()
    assert peak is not None
    return peak


@dataclass
class Report:
    """
    A table of measurements that can be printed and written as JSON.

    :param name: Name of the JSON file, without its suffix.
    :param title: One line that says what the numbers are.
    :param rows: One dictionary per row, column name -> value.
    :param notes: Sentences for the reader, below the table.
    """

    name: str
    title: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, **row: Any) -> None:
        """Append a row and show it on stderr, to follow a long run; a row may lack columns that others have."""
        self.rows.append(row)
        print(", ".join(f"{column} {_format(value)}" for column, value in row.items()), file=sys.stderr, flush=True)

    def attempt(self, name: str, function: Callable[[], object]) -> None:
        """
        Run a part of a long benchmark. If it fails, a note says so and the other parts are still run and written.

        :param name: What the part measures.
        :param function: Adds its rows.
        """
        try:
            function()
        except Exception as error:
            traceback.print_exc()
            self.notes.append(f"FAILED: {name}: {type(error).__name__}: {error}")

    def table(self) -> str:
        """The title, the rows in aligned columns, and the notes."""
        columns = list(dict.fromkeys(column for row in self.rows for column in row))
        cells = [columns, *([_format(row.get(column)) for column in columns] for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        numeric = [all(isinstance(row.get(c), int | float | None) for row in self.rows) for c in columns]
        lines = [
            "  ".join(c.rjust(w) if right else c.ljust(w) for c, w, right in zip(line, widths, numeric, strict=True))
            for line in cells
        ]
        return "\n".join([self.title, "", *(line.rstrip() for line in lines), *self.notes])

    def write(self, directory: Path, options: Mapping[str, Any] | None = None) -> Path:
        """
        Write the report to `directory`/`name`.json, whole or not at all.

        :param directory: Made if it does not exist.
        :param options: The settings of the run; paths among them are left out.
        :return: The path of the file.
        """

        def names_path(value: Any) -> bool:
            return isinstance(value, Path) or (isinstance(value, list) and any(map(names_path, value)))

        content = {
            "name": self.name,
            "title": self.title,
            "options": {key: value for key, value in (options or {}).items() if not names_path(value)},
            "machine": machine_facts(),
            "rows": self.rows,
            "notes": self.notes,
        }
        text = json.dumps(_jsonable(content), indent=2, allow_nan=False) + "\n"
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{self.name}.json"
        with whole_file(path) as part:
            part.write_text(text, encoding="utf-8")
        return path


def _format(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def _jsonable(value: Any) -> Any:
    """JSON has neither tensors nor NaN: numbers become Python's own, those that are not finite become null."""
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
