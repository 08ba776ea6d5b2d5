"""Random numbers that belong to rows: they depend neither on batches nor on how rows are shared between processes."""

from __future__ import annotations

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
        >>> from gpytorch_tkrr.data.keyed import row_uniform
        >>> whole, parts = row_uniform(5, 0, key=7), [row_uniform(2, 0, key=7), row_uniform(3, 2, key=7)]
        >>> torch.equal(whole, torch.cat(parts))
        True
    """
    return uniform(torch.arange(first_row, first_row + num_rows, device=device), key)


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
