r"""Convergence of several chains: split :math:`\hat R` and effective sample size.

Reference: Gelman et al. (2013), *Bayesian data analysis*, section 11.4-11.5.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def split_chains(draws: ArrayLike) -> NDArray[np.float64]:
    """
    Each chain cut in two halves.

    :param draws: `(chains, draws, ...)`.
    :return: `(2 chains, draws // 2, ...)`.
    """
    values = np.asarray(draws, dtype=float)
    half = values.shape[1] // 2
    return np.concatenate([values[:, :half], values[:, values.shape[1] - half :]])


def split_rhat(draws: ArrayLike) -> NDArray[np.float64]:
    r"""
    :math:`\hat R`, the factor by which intervals might still shrink; 1 where all halves of all chains agree.

    :param draws: `(chains, draws, ...)` with at least four draws.
    :return: `(...)`; 1 for a quantity that does not vary.

    Example:
        >>> import numpy as np
        >>> from gpytorch_tkrr.sampling.diagnostics import split_rhat
        >>> rng = np.random.default_rng(0)
        >>> bool(split_rhat(rng.normal(size=(4, 500))) < 1.01)
        True
        >>> bool(split_rhat(rng.normal(size=(4, 500)) + np.arange(4)[:, None]) > 1.2)
        True
    """
    halves = split_chains(draws)
    within, total = _variances(halves)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.sqrt(total / within)
    return np.where(total <= 1e-300, 1.0, ratio)


def effective_sample_size(draws: ArrayLike) -> NDArray[np.float64]:
    """
    The number of independent draws that would tell the mean as well, by the initial positive sequence of the
    autocorrelations.

    :param draws: `(chains, draws, ...)` with at least four draws.
    :return: `(...)`.
    """
    halves = split_chains(draws)
    num_chains, length = halves.shape[:2]
    within, total = _variances(halves)
    centered = halves - halves.mean(1, keepdims=True)
    spectrum = np.fft.rfft(centered, n=2 * length, axis=1)
    covariance = np.fft.irfft(np.abs(spectrum) ** 2, n=2 * length, axis=1)[:, :length] / length
    with np.errstate(divide="ignore", invalid="ignore"):
        rho = 1 - (within - covariance.mean(0) * length / (length - 1)) / total  # (length, ...)
    rho[0] = 1.0
    num_pairs = length // 2
    pairs = rho[: 2 * num_pairs].reshape(num_pairs, 2, *rho.shape[1:]).sum(1)
    positive = np.logical_and.accumulate(pairs > 0, axis=0)
    pairs = np.minimum.accumulate(np.where(positive, pairs, 0.0), axis=0)
    tau = np.maximum(2 * pairs.sum(0) - 1, 1 / np.log10(num_chains * length))
    size = num_chains * length / tau
    return np.where(total <= 1e-300, float(num_chains * length), size)


def _variances(chains: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean variance within chains, and the variance that also counts the distance between them."""
    length = chains.shape[1]
    within = chains.var(1, ddof=1).mean(0)
    between = chains.mean(1).var(0, ddof=1)
    return within, within * (length - 1) / length + between
