"""Every tutorial runs from start to end without a warning."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from repository import ROOT

TUTORIALS = sorted((ROOT / "tutorials").glob("*.py"))


def test_tutorials_are_found():
    assert "01_hilbert_kernel.py" in {path.name for path in TUTORIALS}


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial_runs(path, tmp_path):
    pytest.importorskip("matplotlib", reason="the tutorials need matplotlib: install the extra 'examples'")
    if "\nfrom botorch" in path.read_text():
        pytest.importorskip("botorch.models", reason="BoTorch is not installed; it needs Python 3.11")
    environment = {
        **os.environ,
        "MPLBACKEND": "Agg",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "TKRR_TUTORIAL_FAST": "1",
    }
    filters = [
        "error",
        "ignore:`torch.jit.script` is deprecated:DeprecationWarning",  # as in pyproject.toml
        "ignore:FigureCanvasAgg is non-interactive:UserWarning",  # plt.show() where there is a display
    ]
    command = [sys.executable, *(f"-W{each}" for each in filters), str(path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{path.name} failed:\n{done.stdout}\n{done.stderr}"
    assert done.stdout or "plt.show()" in path.read_text(), f"{path.name} shows nothing"
