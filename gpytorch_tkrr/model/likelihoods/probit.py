r"""Latent targets of a probit model, for exact Gibbs sampling (Albert & Chib 1993).

A label :math:`y = \pm 1` is the sign of :math:`z = f(x) + \epsilon` with standard normal noise. Given f, each z is a
truncated normal number; given all z, the model is a regression with noise variance 1. The random number of a row is a
hash of its number, so that it depends neither on batches nor on how rows are shared between processes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InputError


def truncated_noise(labels: Tensor, mean: Tensor, first_row: int, key: int) -> Tensor:
    r"""
    A draw of :math:`z - f(x)` for each row, given its label.

    :param labels: :math:`\pm 1`, `(n,)`.
    :param mean: :math:`f(x)`, `(n,)`.
    :param first_row: The number of the first row among all rows; the others follow.
    :param key: A number for this draw of all rows, at most 63 bits.

    Example:
        >>> import torch
        >>> from gpytorch_tkrr.model.probit import truncated_noise
        >>> labels, mean = torch.tensor([1.0, -1.0, 1.0]), torch.tensor([0.0, 3.0, -8.0])
        >>> (torch.sign(mean + truncated_noise(labels, mean, 0, key=7)) == labels).all().item()
        True
    """
    u = uniform(torch.arange(first_row, first_row + labels.shape[0], device=labels.device), key)
    # label * noise is standard normal above -label * mean: its tail probability is uniform below that of the bound.
    above = torch.special.erfc(-labels * mean.double() / 2**0.5) / 2  # torch's ndtr cancels in the tail
    tail = (u * above).clamp(min=torch.finfo(torch.float64).tiny)
    return labels * torch.maximum(-torch.special.ndtri(tail), -labels * mean)


def as_signs(y: Tensor) -> Tensor:
    """
    Class labels {0, 1} or {-1, +1} as numbers -1 and +1.

    :param y: Labels `(N,)`.
    """
    y = y.double()
    if ((y == 0) | (y == 1)).all():
        return 2 * y - 1
    if ((y == -1) | (y == 1)).all():
        return y
    values = y.unique()[:5].tolist()
    raise InputError(f"With a BernoulliLikelihood targets must be 0 and 1, or -1 and +1; got {values}.")


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
