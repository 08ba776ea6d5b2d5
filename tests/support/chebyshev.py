"""A basis with a product identity of its own, which the package does not know."""

from __future__ import annotations

import torch

from gpytorch_tkrr.bases.basis import Basis


class ChebyshevBasis(Basis):
    """T_0 ... T_{M - 1} on [-1, 1]: 2 T_i T_j = T_{i + j} + T_{|i - j|}."""

    def __init__(self, num_functions):
        self.num = num_functions

    @property
    def num_functions(self):
        return self.num

    def _values(self, x, num):
        return torch.cos(torch.arange(num).double() * torch.acos(x.double().clamp(-1, 1)).unsqueeze(-1))

    def __call__(self, x):
        return self._values(x, self.num)

    @property
    def num_moments(self):
        return 2 * self.num - 1

    def product_formula(self):
        j = torch.arange(self.num)
        index = torch.stack([j.unsqueeze(-1) + j, (j.unsqueeze(-1) - j).abs()])
        return index, torch.full((2, 1, 1), 0.5, dtype=torch.float64)

    def moments(self, x):
        return self._values(x, self.num_moments).mT
