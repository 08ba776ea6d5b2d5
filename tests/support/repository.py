"""The files of this repository, and Python in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "gpytorch_tkrr"


def read(name: str | Path) -> str:
    """
    The text of a file.

    :param name: Its path from the root of the repository.
    """
    return (ROOT / name).read_text(encoding="utf-8")


def is_installed(distribution: str) -> bool:
    """
    Whether a distribution is installed; it is not imported.

    :param distribution: Its name on PyPI.
    """
    return any(metadata.distributions(name=distribution))


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    """
    Run a program in a process of its own.

    :param code: The program.
    """
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
