r"""Products of basis functions as combinations of a few moment functions.

Every product :math:`\phi_i \phi_j` of two functions of a basis is a combination of at most two functions
:math:`\psi_k`, and there are far fewer :math:`\psi` than pairs: :math:`2 M + 1` cosines serve M sines. So a Gram matrix
with any row weights needs the sums :math:`\sum_n w_n \psi_k(x_n)` only. Constant and linear functions ride along: their
products with the others are moment functions of their own.

All arrays are function-major, `(functions, N)`, and carry no gradients.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..features.basis import Basis, ConcatenatedBasis, ConstantBasis, FourierBasis, MonomialBasis, SineBasis
from ..features.trigonometry import harmonics, sine_series


class MomentTable:
    r"""
    The moment functions of a basis, and how Gram matrices follow from their sums:

    .. math:: \phi_i \phi_j = \alpha_{ij} \psi_{k(i, j)} + \beta_{ij} \psi_{l(i, j)}.

    :param basis: One-dimensional functions; a concatenation is taken part by part. A basis without product formulas, or
        with so few functions that they do not pay, uses all its pairs.

    Example:
        >>> import torch
        >>> from gpytorch_tkrr.features.basis import SineBasis
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
                index, weight = _formula(self.parts[a]) if by_formula else _pairs(sizes[a], sizes[b], a == b)
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
            _fill_features(part, x, out[rows])
        return out

    def band(self, low: float, high: float) -> tuple[float, int] | None:
        """
        The largest angular frequency and polynomial degree among the moment functions, as analytic functions on an
        interval, or None if there is no such bound.

        :param low: Lower end of the interval.
        :param high: Upper end.
        """
        frequency, degree = 0.0, 0
        for part in self.parts:
            if isinstance(part, SineBasis):
                if low < part.center - part.half_width or high > part.center + part.half_width:
                    return None  # sines vanish outside of the box: not smooth at its edge
                frequency = max(frequency, float(part.frequencies[-1]))
            elif isinstance(part, FourierBasis):
                frequency = max(frequency, 2 * math.pi * part.num_harmonics / float(part.period))
            elif isinstance(part, MonomialBasis):
                degree = max(degree, part.power)
            elif not isinstance(part, ConstantBasis):
                return None
        return 2 * frequency, 2 * degree

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
            size = part.num_functions
            block = -(-size // 2)
            buffers = total.new_empty(block + 1, rows), total.new_empty(max(block, size), rows)
            coefficients = factor[:, span]
            if isinstance(part, SineBasis):
                coefficients = coefficients * part.half_width.rsqrt()
            for start in range(0, x.shape[0], rows):
                chunk = x[start : start + rows]
                out = total[:, start : start + rows] if a == 0 else total.new_empty(factor.shape[0], chunk.shape[0])
                cos, sin = (buffer[:, : chunk.shape[0]] for buffer in buffers)
                if isinstance(part, SineBasis):
                    sine_series(part.angle(chunk), coefficients, out=out, buffers=(cos, sin[:block]))
                else:
                    _fill_features(part, chunk, sin[:size])
                    torch.mm(coefficients, sin[:size], out=out)
                if a > 0:
                    total[:, start : start + rows] += out
        return total

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
                _fill_features(part, x, features[self._features[a]])
        for a, b, rows in self._products:
            if a == b and a in formulas:
                _fill_formula(self.parts[a], x, features[self._features[a]], moments[rows])
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

    @staticmethod
    def _buffer(num: int, x: Tensor) -> Tensor:
        return torch.empty(num, x.shape[-1], dtype=torch.float64, device=x.device)


def _spans(sizes: list[int]) -> list[slice]:
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def _pays(part: Basis) -> bool:
    """Whether a product formula exists and has fewer moment functions than there are pairs."""
    size = part.num_functions
    num_moments = {SineBasis: 2 * size + 1, FourierBasis: 2 * size - 1}.get(type(part), math.inf)
    return num_moments < size * (size + 1) / 2


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


def _formula(part: Basis) -> tuple[Tensor, Tensor]:
    """Indices and weights of a basis' own product formula."""
    if isinstance(part, SineBasis):  # sin i sin j = (cos(i - j) - cos(i + j)) / 2
        j = torch.arange(1, part.num_functions + 1)
        index = torch.stack([(j.unsqueeze(-1) - j).abs(), j.unsqueeze(-1) + j])
        half = torch.full(index.shape[1:], 0.5, dtype=torch.float64) / part.half_width.cpu()
        return index, torch.stack([half, -half])
    assert isinstance(part, FourierBasis)
    top = 2 * part.num_harmonics  # psi: cos(0 ... top), then sin(1 ... top)
    harmonic = (torch.arange(part.num_functions) + 1) // 2  # 0, 1, 1, 2, 2, ...
    sine = (torch.arange(part.num_functions) % 2 == 0) & (harmonic > 0)
    i, j = harmonic.unsqueeze(-1), harmonic
    is_sine_i, is_sine_j = sine.unsqueeze(-1), sine
    mixed = is_sine_i ^ is_sine_j
    difference, total = (i - j).abs(), i + j
    index = torch.stack([torch.where(mixed, top + difference, difference), torch.where(mixed, top + total, total)])
    # sin(s) cos(c) = (sin(s + c) + sign(s - c) sin|s - c|) / 2; cos cos and sin sin: (cos(i - j) +- cos(i + j)) / 2
    lead = torch.where(is_sine_i, i - j, j - i).sign().double()
    weight_difference = torch.where(mixed, lead, torch.ones_like(lead)) / 2
    weight_total = torch.where(is_sine_i & is_sine_j, -0.5, 0.5).double().expand_as(weight_difference)
    return index, torch.stack([weight_difference, weight_total])


def _fill_features(part: Basis, x: Tensor, out: Tensor) -> None:
    if isinstance(part, SineBasis):
        j = torch.arange(1, part.num_functions + 1, dtype=torch.float64, device=x.device).unsqueeze(-1)
        torch.sin(torch.mul(j, part.angle(x), out=out), out=out)  # without cosines, doubling saves nothing
        out.mul_(part.half_width.rsqrt())
    elif isinstance(part, ConstantBasis):
        out.fill_(1.0)
    else:
        out.copy_(part(x).mT)


def _fill_formula(part: Basis, x: Tensor, features: Tensor, moments: Tensor) -> None:
    if isinstance(part, SineBasis):
        harmonics(part.angle(x), moments.shape[0], features.shape[0], out=(moments, features))
        features.mul_(part.half_width.rsqrt())
        return
    assert isinstance(part, FourierBasis)
    top = 2 * part.num_harmonics
    phase = 2 * math.pi * (x.double() / part.period).remainder(1.0)
    cos, sin = harmonics(phase, top + 1, top, out=(moments[: top + 1], moments[top + 1 :]))
    features[0] = 1.0
    features[1::2], features[2::2] = cos[1 : part.num_harmonics + 1], sin[: part.num_harmonics]


def _fill_pairs(left: Tensor, right: Tensor, out: Tensor, symmetric: bool) -> None:
    start = 0
    for i in range(left.shape[0]):
        others = right[i:] if symmetric else right
        torch.mul(left[i], others, out=out[start : start + others.shape[0]])
        start += others.shape[0]
