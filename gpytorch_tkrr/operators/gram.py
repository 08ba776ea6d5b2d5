r"""The Gram matrix :math:`\Phi^\top W \Phi` of an expansion's features, with row weights, in float64.

Where the one-dimensional functions have moment functions :math:`\psi` (see :mod:`gpytorch_tkrr.bases.basis`), it
follows from the moments :math:`\sum_n w_n \prod_d \psi_{k_d}(x_{nd})`: with M sines in one dimension, a cost of
:math:`N (2 M + 1)` instead of :math:`N M^2`.

Reference: Viset, Kok, Solin & Särkkä (2024), *Exploiting Hankel-Toeplitz structures for fast computation of kernel
precision matrices*.
"""

from __future__ import annotations

import math
from functools import reduce

import torch
from torch import Tensor

from ..features.expansion import BasisProducts

#: Rows per batch: a batch of features stays in cache.
BATCH_ROWS = 4096


def weighted_product(left: Tensor, right: Tensor, weights: Tensor | None) -> Tensor:
    """
    `left.T @ diag(weights) @ right`, in batches of rows.

    :param left: `(..., N, P)`.
    :param right: `(..., N, Q)`.
    :param weights: `(..., N)`, or None for ones.
    :return: `(..., P, Q)`.
    """
    if weights is None:
        return left.mT @ right
    pieces = []
    for start in range(0, left.shape[-2], BATCH_ROWS):
        rows = slice(start, start + BATCH_ROWS)
        pieces.append((left[..., rows, :] * weights[..., rows, None].double()).mT @ right[..., rows, :])
    return reduce(torch.add, pieces)


def moments_pay(products: BasisProducts) -> bool:
    """
    Whether there are fewer moment functions than pairs of functions.

    :param products: The functions.
    """
    num_moments = [basis.num_moments for basis in products.bases]
    return None not in num_moments and 2 * math.prod(n for n in num_moments if n) < len(products.indices) ** 2


@torch.no_grad()
def product_gram(products: BasisProducts, x: Tensor, weights: Tensor | None = None) -> Tensor:
    """
    The Gram matrix of products of functions of one input each, by their moment functions.

    :param products: The functions.
    :param x: Inputs `(N, D)`.
    :param weights: Row weights `(N,)`, or None for ones.
    :return: `(M, M)`, float64.
    """
    bases, columns = products.bases, products.columns
    shape = [basis.num_moments or 0 for basis in bases]
    moments = torch.zeros(math.prod(shape[:-1]), shape[-1], dtype=torch.float64, device=x.device)
    for start in range(0, x.shape[0], BATCH_ROWS):
        rows = slice(start, start + BATCH_ROWS)
        waves = [basis.moments(x[rows, column]) for basis, column in zip(bases, columns, strict=True)]  # each (K_d, n)
        if weights is not None:
            waves[-1] = waves[-1] * weights[rows].double()
        left = torch.ones(1, waves[-1].shape[-1], dtype=torch.float64, device=x.device)
        for wave in waves[:-1]:
            left = (left.unsqueeze(1) * wave.unsqueeze(0)).flatten(0, 1)
        moments.addmm_(left, waves[-1].mT)
    if len(shape) == 1:
        index, factor = (part.to(x.device) for part in bases[0].product_formula())
        i = products.indices[:, 0].to(x.device)
        return (moments[0][index] * factor).sum(0)[i][:, i]
    return _combine_moments(products, moments.reshape(shape))


def _combine_moments(products: BasisProducts, moments: Tensor) -> Tensor:
    """
    The Gram matrix `(M, M)` from moments `(K_1, ..., K_D)`.

    In each dimension a product of two functions is a sum of two moment functions. For one function of the first
    dimension at a time these sums are made for all others of it: a small table, in which each row of the matrix is read
    at the same places, :math:`2^{D - 1}` for each entry.
    """
    device, indices = moments.device, products.indices.to(moments.device)
    formulas = [[part.to(device) for part in basis.product_formula()] for basis in products.bases]
    (index, factor), rest = formulas[0], moments.flatten(1)  # (K_1, K_2 ... K_D)
    factor = factor.expand(index.shape)
    others, which = indices[:, 1:].unique(dim=0, return_inverse=True)  # functions of the other dimensions, (P, D - 1)
    reads = _reads(formulas[1:], others, indices[:, 1:], moments.shape[1:])
    start = indices[:, 0] * rest.shape[-1]
    reads = [(start + position, weight) for position, weight in reads]  # (P, M) each
    result = torch.empty(len(indices), len(indices), dtype=torch.float64, device=device)
    for i in range(index.shape[-1]):
        rows = (indices[:, 0] == i).nonzero().squeeze(-1)
        terms = (rest[k[i]] * f[i].unsqueeze(-1) for k, f in zip(index, factor, strict=True))
        table = reduce(torch.add, terms).flatten()  # (M_1 K_2 ... K_D,)
        p = which[rows]
        result[rows] = reduce(torch.add, (table[at[p]] * (w if w.dim() == 0 else w[p]) for at, w in reads))
    return result


def _reads(
    formulas: list[list[Tensor]], others: Tensor, indices: Tensor, shape: torch.Size
) -> list[tuple[Tensor, Tensor]]:
    """
    The positions `(P, M)` in a table of moments of the given shape, and the factors, of products of functions `others`
    `(P, D)` with functions `indices` `(M, D)`.
    """
    one = torch.ones((), dtype=torch.float64, device=indices.device)
    reads = [(indices.new_zeros(len(others), len(indices)), one)]
    for d, (index, factor) in enumerate(formulas):
        i, j, stride = others[:, d].unsqueeze(-1), indices[:, d], math.prod(shape[d + 1 :])
        pairs = [
            (k[i, j] * stride, f.squeeze() if f.numel() == 1 else f[i, j]) for k, f in zip(index, factor, strict=True)
        ]
        reads = [(position + more, weight * f) for position, weight in reads for more, f in pairs]
    return reads
