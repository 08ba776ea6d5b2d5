"""Drawing one number by its density at a few candidates, where only sums over all rows can tell that density.

The candidates are laid around a random one of them, near and far, so that to choose among them by their density leaves
the distribution invariant (Tjelmeland 2004). No step width has to be tuned.
"""

from __future__ import annotations

import math

import numpy as np

#: How many candidates there are, and the range of their distances.
NUM_CANDIDATES, NEAREST, FARTHEST = 16, 1e-3, 3.0


def steps(
    rng: np.random.Generator, num: int = NUM_CANDIDATES, nearest: float = NEAREST, farthest: float = FARTHEST
) -> np.ndarray:
    """
    Steps to the candidates, `(num,)`; the first is zero.

    :param rng: Source of random numbers.
    :param num: How many there are.
    :param nearest: The smallest distance from the centre of them all.
    :param farthest: The largest.
    """
    distances = np.exp(rng.uniform(math.log(nearest), math.log(farthest), num))
    offsets = distances * rng.choice([-1.0, 1.0], num)
    return offsets - offsets[0]


def choose(log_density: np.ndarray, rng: np.random.Generator) -> int:
    """
    The number of one candidate, chosen by its density.

    :param log_density: Its logarithm, up to a constant, `(K,)`.
    :param rng: Source of random numbers.

    Example:
        >>> import numpy as np
        >>> from gpytorch_tkrr.model.augmentation.candidates import choose
        >>> choose(np.array([-np.inf, 3.0, -np.inf]), np.random.default_rng(0))
        1
    """
    cumulative = np.cumsum(np.exp(log_density - log_density.max()))
    return min(int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right")), len(cumulative) - 1)
