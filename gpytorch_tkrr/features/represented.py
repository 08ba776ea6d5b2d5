r"""Does the basis represent the kernel here?

The functions represent the prior variance :math:`\phi(x)^\top V \phi(x)` of the exact :math:`k(x, x)`. What is missing
says whether the box is too small, the functions too few, or the point outside of the box. Likelihoods, warnings,
predictions and samplers all ask here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..bases.covariance import Covariance
from .separable import Mode

#: Up to this fraction of the prior variance may be missing without a warning; beyond it is warned about and made up
#: for, and hyperparameters are not drawn there.
MAX_MISSING = 0.05

#: Hyperparameters that are learned may leave this fraction missing, summed over the inputs.
MAX_LEARNED_MISSING = 0.02

#: Points over the range of an input where its mode is looked at.
NUM_GRID_POINTS = 33


def missing_fraction(represented: Tensor, exact: Tensor) -> Tensor:
    """
    The fraction of the prior variance that is missing; zero where there is none to represent.

    :param represented: What the functions represent, `(...)`.
    :param exact: The kernel's own, `(...)`.
    """
    return torch.where(exact > 0, 1 - represented / exact.clamp_min(1e-300), 0.0)


def missing_variance(represented: Tensor, exact: Tensor, accepted: float = MAX_MISSING) -> Tensor:
    """
    The prior variance that is missing where that is more than an accepted fraction, and zero elsewhere.

    :param represented: What the functions represent, `(...)`.
    :param exact: The kernel's own, `(...)`.
    :param accepted: The fraction.
    """
    missing = exact - represented
    return torch.where(missing > accepted * exact, missing, torch.zeros_like(missing))


def range_grids(lower: Tensor, upper: Tensor, num: int = NUM_GRID_POINTS) -> list[Tensor]:
    """
    Points over the range of each input.

    :param lower: Smallest inputs `(D,)`.
    :param upper: Largest inputs `(D,)`.
    :param num: How many.
    :return: D tensors `(num,)`.
    """
    fraction = torch.linspace(0, 1, num, dtype=torch.float64, device=lower.device)
    return [low + fraction * (high - low) for low, high in zip(lower, upper, strict=True)]


class ModeGrid:
    """
    A mode on a grid: asked again and again, at changing hyperparameters.

    :param mode: The mode.
    :param grid: Points `(n,)`.
    """

    def __init__(self, mode: Mode, grid: Tensor):
        self.mode, self.grid = mode, grid
        self.features = mode.basis(grid)
        self.squares = self.features.square()

    def missing(self, covariance: Covariance | None = None) -> Tensor:
        """
        The fraction of the prior variance that is missing at each point, `(n,)`.

        :param covariance: That of the mode's weights, where it is known already.
        """
        covariance = self.mode.covariance() if covariance is None else covariance
        if covariance.mixing is None:
            represented = self.squares @ covariance.variances
        else:
            represented = covariance.quadratic(self.features)
        return missing_fraction(represented, self.mode.prior_variance(self.grid))


@dataclass
class MissingOfModes:
    """
    What a product of modes does not represent at given points.

    :param total: The prior variance, `(...)`.
    :param fraction: The fraction of it that is missing, `(...)`, zero where that is little.
    :param is_short: For each mode whether it is the cause, D tensors `(...)`.
    """

    total: Tensor
    fraction: Tensor
    is_short: list[Tensor]


def missing_of_modes(modes: Sequence[Mode], x: Tensor) -> MissingOfModes:
    """
    The prior variance that a product of modes does not represent.

    :param modes: D modes.
    :param x: Inputs `(..., D)`.
    """
    total = kept = torch.ones((), dtype=torch.float64, device=x.device)
    short = []
    for d, mode in enumerate(modes):
        exact = mode.prior_variance(x[..., d])
        represented = torch.minimum(mode.covariance().detach().quadratic(mode.basis(x[..., d])), exact)
        short.append(represented < (1 - MAX_MISSING) * exact)
        # Dimensions that represent their part count as complete: small shortfalls of many must not add up.
        total = total * exact
        kept = kept * torch.where(short[-1], represented, exact)
    fraction = torch.where(torch.stack(short).any(0), missing_fraction(kept, total), torch.zeros_like(total))
    return MissingOfModes(total, fraction, short)
