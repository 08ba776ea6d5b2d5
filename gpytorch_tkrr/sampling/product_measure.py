r"""Where there are no rows: a weak pull of f towards the mean, for rows whose inputs are independent of each other.

Inputs of real tables depend on each other, so that much of the box is empty. There the data say nothing, and a product
of many functions may take any value: its prior has heavy tails. A row that comes from an empty corner is then predicted
by whatever a chain happens to do there. So the prior of models that choose their kernel themselves has one more factor,

.. math:: \exp\Bigl(-\frac{\lambda}{2}\, E f(x)^2\Bigr), \qquad x_1, \dots, x_D \text{ independent, each as its column,}

for targets of mean zero and variance one, where f has their units. It is worth :math:`\lambda` rows with targets at the
mean and a noise as large as the targets' variance; where there are data these outweigh it by far. For CP weights the
mean is known without any row,

.. math:: E f(x)^2 = \operatorname{vec}(A_d)^\top (H_d \otimes \bar G_d) \operatorname{vec}(A_d), \qquad
    H_d = \prod_{k \ne d} A_k \bar G_k A_k^\top,

with :math:`\bar G_d` the mean of :math:`\phi_d \phi_d^\top` over the rows: a Gaussian factor for each mode.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..cp.conditional import DenseGram
from ..cp.design import Design
from ..cp.levels import LevelGram

#: :math:`\lambda` as a fraction of the rows; and of few rows, for which it is not above so many.
SHARE, SHARE_OF_FEW, MOST_OF_FEW = 0.005, 0.1, 20.0


def pull(num_rows: int) -> float:
    r"""
    :math:`\lambda`: with few rows components are freer, and the pull is worth more of them.

    :param num_rows: N.

    Example:
        >>> from gpytorch_tkrr.sampling.product_measure import pull
        >>> pull(50), pull(1000), pull(100_000)
        (5.0, 20.0, 500.0)
    """
    return max(SHARE * num_rows, min(SHARE_OF_FEW * num_rows, MOST_OF_FEW))


class ProductMeasure:
    r"""
    The pull for CP weights.

    :param design: The rows, whose columns are taken one by one.
    """

    def __init__(self, design: Design):
        self.grams = [marginal.gram for marginal in design.marginals()]
        self.weight = pull(design.data.summary.num_rows)
        self._known: dict[int, tuple[Tensor, Tensor]] = {}  # a factor, and what was made of it

    def added_to(
        self, gram: DenseGram | LevelGram, d: int, factors: Sequence[Tensor], noise: float
    ) -> DenseGram | LevelGram:
        r"""
        :math:`G + s^2 \lambda\, H_d \otimes \bar G_d`.

        :param gram: G of the data.
        :param d: The mode.
        :param factors: Raw factors, D tensors `(R, M_k)`; not to be changed in place.
        :param noise: :math:`s^2`.
        """
        rank = len(factors[d])
        others = [self._between(k, factor) for k, factor in enumerate(factors) if k != d]
        form = torch.stack(others).prod(0) if others else factors[d].new_ones(rank, rank)
        return gram.plus(noise * self.weight * form, self.grams[d])  # type: ignore[arg-type]  # of the same kind

    def _between(self, k: int, factor: Tensor) -> Tensor:
        r""":math:`A_k \bar G_k A_k^\top`."""
        if k not in self._known or self._known[k][0] is not factor:
            self._known[k] = factor, self.grams[k].between(factor)
        return self._known[k][1]
