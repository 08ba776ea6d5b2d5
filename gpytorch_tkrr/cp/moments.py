r"""The moment functions of a mode: those of its parts, and products between parts.

Every product :math:`\phi_i \phi_j` of two functions of a basis is a combination of at most two moment functions
:math:`\psi_k` (see :mod:`gpytorch_tkrr.bases.basis`). Where a part has no product identity, or so few functions that
it does not pay, and for products between parts, the products themselves are the moment functions.

All arrays are function-major, `(functions, N)`, and carry no gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..bases.basis import Basis, ConcatenatedBasis
from .conditional import DenseGram


class MomentTable:
    r"""
    The moment functions of a basis, and how Gram matrices follow from their sums:

    .. math:: \phi_i \phi_j = \alpha_{ij} \psi_{k(i, j)} + \beta_{ij} \psi_{l(i, j)}.

    :param basis: One-dimensional functions; a concatenation is taken part by part. A basis without product formulas, or
        with so few functions that they do not pay, uses all its pairs.

    Example:
        >>> import torch
        >>> from gpytorch_tkrr.bases.basis import SineBasis
        >>> from gpytorch_tkrr.cp.moments import MomentTable
        >>> table = MomentTable(SineBasis(0.0, 1.0, 40))
        >>> table.num_functions, table.num_moments
        (40, 81)
        >>> features, moments = table(torch.linspace(-1, 1, 7))
        >>> gram = table.gram(moments.sum(-1, keepdim=True))[0]
        >>> torch.allclose(gram, features @ features.mT)
        True
    """

    def __init__(self, basis: Basis):
        self.basis = basis
        self.parts = list(basis.bases) if isinstance(basis, ConcatenatedBasis) else [basis]
        sizes = [part.num_functions for part in self.parts]
        self.num_functions = sum(sizes)
        self._features = _spans(sizes)
        self._products: list[tuple[int, int, slice]] = []  # (part, part, rows of psi)
        first = torch.zeros(self.num_functions, self.num_functions, dtype=torch.long)
        second = torch.zeros_like(first)
        weights = torch.zeros(2, *first.shape, dtype=torch.float64)
        start = 0
        for a in range(len(sizes)):
            for b in range(a, len(sizes)):
                by_formula = a == b and _pays(self.parts[a])
                index, weight = self.parts[a].product_formula() if by_formula else _pairs(sizes[a], sizes[b], a == b)
                rows, columns = self._features[a], self._features[b]
                first[rows, columns], second[rows, columns] = start + index[0], start + index[1]
                weights[:, rows, columns] = weight
                if a != b:
                    first[columns, rows], second[columns, rows] = start + index[0].mT, start + index[1].mT
                    weights[:, columns, rows] = weight.mT
                stop = start + int(index.max()) + 1
                self._products.append((a, b, slice(start, stop)))
                start = stop
        self.num_moments = start
        self._index, self._weights = torch.stack([first, second]), weights

    def features(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """
        The basis functions.

        :param x: Inputs `(N,)`.
        :param out: Optional float64 buffer `(M, N)`.
        :return: `(M, N)`, float64.
        """
        out = self._buffer(self.num_functions, x) if out is None else out
        for part, rows in zip(self.parts, self._features, strict=True):
            part.fill(x, out[rows])
        return out

    def band(self, low: float, high: float) -> tuple[float, int] | None:
        """
        The largest angular frequency and polynomial degree among the moment functions, as analytic functions on an
        interval, or None if there is no such bound.

        :param low: Lower end of the interval.
        :param high: Upper end.
        """
        band = ConcatenatedBasis(*self.parts).band(low, high)
        return None if band is None else (2 * band[0], 2 * band[1])

    def project(self, factor: Tensor, x: Tensor, *, rows: int) -> Tensor:
        r"""
        :math:`\sum_j a_{rj} \phi_j(x_n)`.

        :param factor: a, `(R, M)`.
        :param x: Inputs `(N,)`.
        :param rows: How many rows to take at a time.
        :return: `(R, N)`, float64.
        """
        total = self._buffer(factor.shape[0], x)
        rows = min(rows, x.shape[0])
        for a, (part, span) in enumerate(zip(self.parts, self._features, strict=True)):
            buffer = total.new_empty(part.num_functions + 2, rows)
            for start in range(0, x.shape[0], rows):
                chunk = x[start : start + rows]
                out = total[:, start : start + rows] if a == 0 else total.new_empty(factor.shape[0], chunk.shape[0])
                part.series(chunk, factor[:, span], out, buffer[:, : chunk.shape[0]])
                if a > 0:
                    total[:, start : start + rows] += out
        return total

    def at_nodes(self, factor: Tensor, nodes: Tensor) -> Tensor:
        r"""
        :math:`\sum_j a_{rj} \phi_j(\xi_u)` at the nodes of grouped rows (see :mod:`.cells`).

        :param factor: a, `(R, M)`.
        :param nodes: `(U,)`.
        :return: `(R, U)`.
        """
        return factor @ self.features(nodes)

    def add_nodes(self, moments: Tensor, rhs: Tensor, nodes: Tensor, per_node: Tensor) -> None:
        """
        Add sums over the rows of each node to those of the moment functions and of the functions.

        :param moments: Where to add products of projections, `(K, R (R + 1) / 2)`.
        :param rhs: Where to add products with the targets, `(R, M)`.
        :param nodes: `(U,)`.
        :param per_node: Both side by side, `(U, R (R + 1) / 2 + R)`.
        """
        phi, psi = self(nodes)
        num_products = moments.shape[1]
        moments.addmm_(psi, per_node[:, :num_products])
        rhs.addmm_(per_node[:, num_products:].mT, phi.mT)

    def __call__(self, x: Tensor, *, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """
        The basis functions and the moment functions.

        :param x: Inputs `(N,)`.
        :param out: Optional float64 buffers `(M, N)` and `(K, N)`.
        :return: `(M, N)` and `(K, N)`, float64.
        """
        if out is None:
            out = self._buffer(self.num_functions, x), self._buffer(self.num_moments, x)
        features, moments = out
        formulas = [a for a, part in enumerate(self.parts) if _pays(part)]
        for a, part in enumerate(self.parts):
            if a not in formulas:
                part.fill(x, features[self._features[a]])
        for a, b, rows in self._products:
            if a == b and a in formulas:
                self.parts[a].fill_with_moments(x, features[self._features[a]], moments[rows])
        for a, b, rows in self._products:
            if a == b and a in formulas:
                continue
            _fill_pairs(features[self._features[a]], features[self._features[b]], moments[rows], a == b)
        return features, moments

    def gram(self, sums: Tensor) -> Tensor:
        r"""
        :math:`\sum_n w_n \phi_i(x_n) \phi_j(x_n)` from :math:`\sum_n w_n \psi_k(x_n)`.

        :param sums: `(K, ...)`, any number of weights side by side.
        :return: `(..., M, M)` for one trailing dimension, in general `(M, M)` moved to the end.
        """
        index, weights = self._index.to(sums.device), self._weights.to(sums.device)
        flat = sums.reshape(sums.shape[0], -1)  # (K, Q)
        shape = (self.num_functions, self.num_functions, *sums.shape[1:])
        total = flat.index_select(0, index[0].flatten()).mul_(weights[0].reshape(-1, 1))
        total.addcmul_(flat.index_select(0, index[1].flatten()), weights[1].reshape(-1, 1))
        return total.reshape(shape).movedim((0, 1), (-2, -1))

    def gram_weights(self, variances: Tensor) -> Tensor:
        r"""
        c with :math:`\|V^{1/2} G V^{1/2}\|_F^2 \le \sum_k c_k m_k^2` for the Gram matrix G of sums m.

        :param variances: Diagonal of V, `(M,)`.
        :return: `(K,)`.
        """
        index, weights = self._index.to(variances.device), self._weights.to(variances.device)
        terms = 2 * variances.unsqueeze(-1) * variances * weights.square()  # (2, M, M)
        return variances.new_zeros(self.num_moments).index_add_(0, index.flatten(), terms.flatten())

    def structured(self, sums: Tensor) -> Any:
        """
        The Gram matrix of R components, in a form that serves its factor's conditional best.

        :param sums: :math:`\\sum_n w_n p_{nr} p_{ns} \\psi_k(x_n)`, `(K, R, R)`.
        """
        return DenseGram(self.gram(sums).permute(0, 2, 1, 3).contiguous())

    @staticmethod
    def _buffer(num: int, x: Tensor) -> Tensor:
        return torch.empty(num, x.shape[-1], dtype=torch.float64, device=x.device)


def _spans(sizes: list[int]) -> list[slice]:
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def _pays(part: Basis) -> bool:
    """Whether a product formula exists and has fewer moment functions than there are pairs."""
    size = part.num_functions
    return part.num_moments is not None and part.num_moments < size * (size + 1) / 2


def _pairs(rows: int, columns: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Indices and weights of explicit products."""
    if symmetric:
        upper = torch.triu_indices(rows, rows)
        first = torch.zeros(rows, rows, dtype=torch.long)
        first[upper[0], upper[1]] = first[upper[1], upper[0]] = torch.arange(upper.shape[1])
    else:
        first = torch.arange(rows * columns).reshape(rows, columns)
    one = torch.ones(first.shape, dtype=torch.float64)
    return torch.stack([first, torch.zeros_like(first)]), torch.stack([one, torch.zeros_like(one)])


def _fill_pairs(left: Tensor, right: Tensor, out: Tensor, symmetric: bool) -> None:
    start = 0
    for i in range(left.shape[0]):
        others = right[i:] if symmetric else right
        torch.mul(left[i], others, out=out[start : start + others.shape[0]])
        start += others.shape[0]
