"""Random numbers that belong to rows: they depend neither on batches nor on how rows are shared between processes."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import scipy.special
import torch
from torch import Tensor


def row_uniform(num_rows: int, first_row: int, key: int, device: torch.device | None = None) -> Tensor:
    """
    A number between 0 and 1 for each row of a batch.

    :param num_rows: n.
    :param first_row: The number of the first row among the rows of all processes; the others follow.
    :param key: A number for this draw of all rows, at most 63 bits.
    :param device: Where the rows are.
    :return: `(n,)`, float64, neither 0 nor 1.

    Example:
        >>> import torch
        >>> from gpytorch_tkrr.model.likelihoods.keyed import row_uniform
        >>> whole, parts = row_uniform(5, 0, key=7), [row_uniform(2, 0, key=7), row_uniform(3, 2, key=7)]
        >>> torch.equal(whole, torch.cat(parts))
        True
    """
    return uniform(torch.arange(first_row, first_row + num_rows, device=device), key)


def row_gamma(shape: float, num_rows: int, first_row: int, key: int, device: torch.device | None = None) -> Tensor:
    """
    A number with a Gamma distribution of unit scale for each row of a batch: its quantiles at :func:`row_uniform`,
    interpolated in a table, exact to about nine digits.

    :param shape: The shape of the distribution, at least 0.5.
    :param num_rows: See :func:`row_uniform`.
    :param first_row: See :func:`row_uniform`.
    :param key: See :func:`row_uniform`.
    :param device: See :func:`row_uniform`.
    :return: `(n,)`, float64, positive.

    Example:
        >>> import torch
        >>> from gpytorch_tkrr.model.likelihoods.keyed import row_gamma
        >>> abs(row_gamma(2.5, 10000, 0, key=7).mean().item() - 2.5) < 0.05
        True
    """
    z = torch.special.ndtri(row_uniform(num_rows, first_row, key, device)).clamp(-LARGEST_SCORE, LARGEST_SCORE)
    table = torch.from_numpy(_log_gamma_quantiles(shape)).to(z.device)  # (2, K): values and slopes
    step = 2 * LARGEST_SCORE / (table.shape[1] - 1)
    position = (z + LARGEST_SCORE) / step
    left = position.floor().clamp(max=table.shape[1] - 2)
    t, left = position - left, left.long()
    (y0, m0), (y1, m1) = table[:, left], table[:, left + 1]
    cubic = (2 * (y0 - y1) + step * (m0 + m1)) * t + 3 * (y1 - y0) - step * (2 * m0 + m1)
    return ((cubic * t + step * m0) * t + y0).exp()


#: Normal scores beyond this do not occur among uniform numbers of 53 bits.
LARGEST_SCORE = 8.5


@lru_cache(maxsize=8)
def _log_gamma_quantiles(shape: float, num_nodes: int = 1025) -> np.ndarray:
    """Logarithms of Gamma quantiles at evenly spaced normal scores, and their slopes, `(2, num_nodes)`."""
    z = np.linspace(-LARGEST_SCORE, LARGEST_SCORE, num_nodes)
    below = scipy.special.gammaincinv(shape, scipy.special.ndtr(np.minimum(z, 0)))
    x = np.where(z < 0, below, scipy.special.gammainccinv(shape, scipy.special.ndtr(-np.maximum(z, 0))))
    log_density = shape * np.log(x) - x - scipy.special.gammaln(shape)  # of log x
    return np.stack([np.log(x), np.exp(-0.5 * z**2 - log_density) / np.sqrt(2 * np.pi)])


def uniform(index: Tensor, key: int) -> Tensor:
    """
    Numbers between 0 and 1 that are a function of index and key alone (SplitMix64, Steele, Lea & Flood 2014).

    :param index: Integers `(n,)`.
    :param key: At most 63 bits.
    :return: `(n,)`, float64, neither 0 nor 1.
    """
    z = (index.long() + 1) * _signed(0x9E3779B97F4A7C15) + key
    z = (z ^ _shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * _signed(0x94D049BB133111EB)
    return (_shift(z ^ _shift(z, 31), 11).double() + 0.5) * 2.0**-53


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical shift to the right."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
