"""Distributions of numbers that belong to rows (see :mod:`gpytorch_tkrr.data.keyed`)."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import scipy.special
import torch
from torch import Tensor

from ...data.keyed import row_uniform


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
        >>> from gpytorch_tkrr.model.augmentation.keyed import row_gamma
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
