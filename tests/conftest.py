"""Settings shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import gpytorch
import pytest
import torch
from hypothesis import settings

from gpytorch_tkrr import HilbertKernel
from gpytorch_tkrr.chains import race
from gpytorch_tkrr.features.expansion import Expansion
from gpytorch_tkrr.hilbert import tolerance

# One thread: the matrices of the tests are small, and workers of pytest-xdist must not compete for cores.
torch.set_num_threads(1)

# The first example of a property test pays for imports and caches, so a deadline would measure the machine.
settings.register_profile("tests", deadline=None, max_examples=25, derandomize=True)
settings.register_profile("long", deadline=None, max_examples=100_000, print_blob=True)
settings.load_profile("tests")


@pytest.fixture(autouse=True)
def computations(request: pytest.FixtureRequest) -> Iterator[None]:
    """Importing BoTorch changes GPyTorch's settings for the whole process: tests see them as their users would."""
    fast = "botorch" not in request.module.__name__
    names = ("covar_root_decomposition", "log_prob", "solves")
    with gpytorch.settings.fast_computations(**dict.fromkeys(names, fast)):
        with gpytorch.settings.max_cholesky_size(800 if fast else 4096):
            yield


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test starts from the same random state, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture
def functions_for_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have kernels with a tolerance use functions for few rows, too, so that small data test what large data meet."""
    monkeypatch.setattr(tolerance, "FEW_ROWS", 0)


@pytest.fixture
def short_races(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the chains that decide about warped inputs take two sweeps, where a test asks nothing of the decision."""
    monkeypatch.setattr(race, "RACE_SWEEPS", 2)


@pytest.fixture
def count_features(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of rows of all feature matrices that a HilbertKernel has computed, but those without any."""
    counts: list[int] = []
    original = HilbertKernel.expansion

    def expansion(self: HilbertKernel, num_dims: int | None = None) -> Expansion:
        built = original(self, num_dims)
        evaluate = built.features
        built.features = lambda x: (counts.extend([x.shape[:-1].numel()] * bool(x.numel())), evaluate(x))[1]  # type: ignore[method-assign]
        return built

    monkeypatch.setattr(HilbertKernel, "expansion", expansion)
    return counts


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The directory of data files named by ``TKRR_DATA_DIR``; tests that need it are skipped without it."""
    value = os.environ.get("TKRR_DATA_DIR")
    if not value:
        pytest.skip("TKRR_DATA_DIR is not set")
    return Path(value)
