r"""The moment functions of an input that may be missing.

Rows without a value have the functions' means m in their place, so that their products are :math:`m m^\top`: one more
moment function, the indicator of these rows, serves all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..bases.basis import Basis
from ..bases.integrated import IntegratedBasis
from .levels import moment_table as table_of_observed
from .moments import MomentTable


class MissingTable(MomentTable):
    """
    The moment functions of another basis, zero where the input is missing, and the indicator of those rows.

    :param basis: The functions.
    """

    def __init__(self, basis: IntegratedBasis):
        self.basis, self.integrated, self.observed = basis, basis, table_of_observed(basis.basis)
        self.parts = [basis]
        self.num_functions, self.num_moments = self.observed.num_functions, self.observed.num_moments + 1

    @property
    def mean(self) -> Tensor:
        """m, `(M,)`."""
        return self.integrated.moments_of_missing[0]

    def features(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        missing = x.isnan()
        out = self.observed.features(torch.where(missing, torch.zeros_like(x), x), out=out)
        out[:, missing] = self.mean.to(out).unsqueeze(-1)
        return out

    def band(self, low: float, high: float) -> None:
        return None

    def project(self, factor: Tensor, x: Tensor, *, rows: int) -> Tensor:
        missing = x.isnan()
        values = self.observed.project(factor, torch.where(missing, torch.zeros_like(x), x), rows=rows)
        values[:, missing] = (factor @ self.mean.to(factor)).unsqueeze(-1)
        return values

    def __call__(self, x: Tensor, *, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        missing = x.isnan()
        if out is None:
            out = self._buffer(self.num_functions, x), self._buffer(self.num_moments, x)
        features, moments = out
        self.observed(torch.where(missing, torch.zeros_like(x), x), out=(features, moments[:-1]))
        features[:, missing] = self.mean.to(features).unsqueeze(-1)
        moments[:-1, missing] = 0.0
        moments[-1] = missing
        return features, moments

    def gram(self, sums: Tensor) -> Tensor:
        products = self.mean.to(sums).unsqueeze(-1) * self.mean.to(sums)  # (M, M)
        return self.observed.gram(sums[:-1]) + sums[-1].unsqueeze(-1).unsqueeze(-1) * products

    def gram_weights(self, variances: Tensor) -> Tensor:
        of_missing = (variances * self.mean.to(variances).square()).sum().square()  # that of m m^T
        return 2 * torch.cat([self.observed.gram_weights(variances), of_missing.reshape(1)])


def moment_table(basis: Basis, *, has_missing: bool) -> MomentTable:
    """
    The moment functions of a mode.

    :param basis: Its functions.
    :param has_missing: Whether rows lack this input.
    """
    if not isinstance(basis, IntegratedBasis):
        return table_of_observed(basis)
    return MissingTable(basis) if has_missing else table_of_observed(basis.basis)
