"""Sphinx settings. Build: ``sphinx-build -W --keep-going docs docs/_build/html``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path[:0] = [str(DOCS), str(ROOT)]

import generate  # noqa: E402

import gpytorch_tkrr  # noqa: E402

project = "gpytorch_tkrr"
author = "The gpytorch_tkrr developers"
copyright = author
version = release = gpytorch_tkrr.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx-mathjax-offline"]
exclude_patterns = ["_build"]
default_role = "code"
add_module_names = False
autodoc_typehints = "none"
autodoc_inherit_docstrings = False  # what a method of GPyTorch does is said in GPyTorch
autodoc_member_order = "bysource"
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "cache"
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_merge_streams = True

html_theme = "furo"
html_title = f"gpytorch_tkrr {release}"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["layout.css"]

# For the kernels that run the tutorials: tqdm, which Pyro imports, would like widgets in the notebook.
os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found"

GENERATED = generate.GENERATED
generate.write_if_changed(GENERATED / "api.md", generate.api_page(gpytorch_tkrr, ["botorch", "pyro", "sklearn"]))
generate.draw_history(ROOT / "benchmarks" / "results", GENERATED / "smoke.png")
generate.write_if_changed(GENERATED / "benchmarks.md", generate.benchmark_page(ROOT / "benchmarks" / "results"))
generate.tutorials(ROOT / "tutorials", GENERATED)


def skip_requests(app: object, what: str, name: str, obj: object, skip: bool, options: object) -> bool | None:
    """scikit-learn gives every estimator methods `set_fit_request` and the like; they are said there."""
    return True if name.startswith("set_") and name.endswith("_request") else None


def setup(app: object) -> None:
    app.connect("autodoc-skip-member", skip_requests)  # type: ignore[attr-defined]
