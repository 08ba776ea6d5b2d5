"""Pieces of a long benchmark that survive an interruption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Finished:
    """
    Results by key, each written to a file as soon as it is known; a later run finds them there.

    :param path: A file of JSON lines, made if it does not exist; None to keep results in memory only.
    """

    def __init__(self, path: Path | None = None):
        self.path = path
        self._results: dict[str, Any] = {}
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                key, result = json.loads(line)
                self._results[json.dumps(key)] = result

    def __contains__(self, key: Any) -> bool:
        return json.dumps(key) in self._results

    def __getitem__(self, key: Any) -> Any:
        return self._results[json.dumps(key)]

    def __setitem__(self, key: Any, result: Any) -> None:
        self._results[json.dumps(key)] = result
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([key, result]) + "\n")
