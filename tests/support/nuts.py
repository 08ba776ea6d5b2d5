"""Short runs of Pyro's NUTS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
from pyro.infer import MCMC, NUTS


def run_nuts(
    model: Callable[..., Any], *args: Any, num_samples: int = 20, warmup_steps: int = 20, max_tree_depth: int = 5
) -> MCMC:
    """One chain from a fixed seed."""
    pyro.set_rng_seed(0)
    kernel = NUTS(model, max_tree_depth=max_tree_depth)
    mcmc = MCMC(kernel, num_samples=num_samples, warmup_steps=warmup_steps, disable_progbar=True)
    mcmc.run(*args)
    return mcmc
