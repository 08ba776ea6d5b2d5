r"""The prior of tensor trains: independent normal cores whose covariance is that of the kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..cp.conditional import DenseGram
from ..cp.format import WeightFormat
from ..cp.levels import LevelGram
from ..cp.train import bond_sizes
from ..model.likelihoods.augmented import Parameters
from .hyperparameters import TOTAL_SPREAD
from .priors import MIN_EFFECT, GibbsState, WeightPrior, move_scales

#: Smallest shape of the Gamma prior of the bonds' precisions: f has a finite kurtosis above 4.
TAU_SHAPE = 6.0


class SoftBondPrior(WeightPrior, kind="train"):
    r"""
    Normal weights whose bonds can be narrowed: with :math:`a_{d,bc}` the weights of the entry (b, c) of core d,

    .. math:: a_{d,bc} \sim N\Bigl(0, \frac{\sigma^{2/D} V_d}{\tau_{d-1,b}\, \tau_{d,c}}\Bigr), \qquad
        \tau_{d,c} \sim \text{Gamma}\bigl(a_0, \sqrt{(a_0 - 1)(a_0 - 2) / r_d}\bigr), \qquad
        \tau_0 = \tau_D = 1 .

    Paths through different indices of the bonds are uncorrelated, and :math:`E\,\tau_{d,c}^{-2} = 1 / r_d`, so that the
    :math:`r_1 \cdots r_{D-1}` paths add up: the prior covariance of f is the kernel exactly. Given :math:`\tau` at
    :math:`\sqrt{r_d}` a path changes from bond to bond by a sum of :math:`r_d` terms, and the kurtosis of f is
    :math:`3 \prod_d (1 + 2 / r_d)`, where that of CP weights with as many components R is :math:`3 + (3^D - 3) / R`. In
    many dimensions the shape :math:`a_0` grows, so that the standard deviation of
    :math:`2 \sum_d \log \tau_{d,c_d}` over a path stays below 4.

    The components are the indices of all bonds, after f as a whole, whose precision is always 1.

    :param ranks: :math:`r_1, \dots, r_{D-1}`.
    :param chain: The modes from left to right; None for their own order.

    :ivar shape: :math:`a_0`.
    """

    def __init__(self, ranks: Sequence[int], chain: Sequence[int] | None = None):
        self.ranks = list(ranks)
        self.chain = range(len(self.ranks) + 1) if chain is None else chain
        self.shape = max(TAU_SHAPE, 4 * len(self.ranks) / TOTAL_SPREAD**2)

    @classmethod
    def of(cls, weights: WeightFormat, sizes: Sequence[int]) -> SoftBondPrior:
        return cls(weights.bonds(weights.heights(sizes)), weights.chain(len(sizes)))

    def rate(self, bond: int) -> float:
        """
        The rate of the Gamma distribution of a bond's precisions.

        :param bond: Its number, from 1 on.
        """
        return math.sqrt((self.shape - 1) * (self.shape - 2) / self.ranks[bond - 1])

    def start(self, factors: list[Tensor], parameters: Parameters, steps: Tensor) -> GibbsState:
        bonds = self._bonds(factors)
        values = [1.0] + [math.sqrt(rank) for rank in bonds[1:-1] for _ in range(rank)]
        zeros = [factor.new_zeros(len(factor)) for factor in factors]
        return GibbsState(factors, parameters, factors[0].new_tensor(values), steps, zeros)

    def rows(self, state: GibbsState, d: int) -> Tensor:
        place = self.chain.index(d)
        left, right = self._by_bond(state.precisions, state)[place : place + 2]
        return torch.outer(left, right).flatten() * (2 * state.log_scales[d]).exp()

    def mean_squares(self, found: Tensor | None, state: GibbsState, d: int, gram: DenseGram | LevelGram) -> Tensor:
        found = torch.zeros_like(state.precisions) if found is None else found.clone()
        bonds, factor, place = self._bonds(state.factors), state.factors[d], self.chain.index(d)
        core = factor.reshape(bonds[place], bonds[place + 1], -1)
        start = 1 + sum(bonds[1:place])  # where the indices of the bond before this core are
        if place == 0:
            found[0] = (factor * gram.apply(factor)).sum()
        last = len(bonds) - 2
        for side, first, is_inner in ((0, start, place > 0), (1, start + (bonds[place] if place else 0), place < last)):
            for i in range(bonds[place + side] if is_inner else 0):
                part = torch.zeros_like(core)
                part.select(side, i).copy_(core.select(side, i))
                part = part.reshape(factor.shape)
                found[first + i] = (part * gram.apply(part)).sum()
        return found

    def draw(self, state: GibbsState, energies: list[np.ndarray], counts: np.ndarray, rng: np.random.Generator) -> None:
        tau = [values.cpu().numpy().copy() for values in self._by_bond(state.precisions, state)]
        for bond in range(1, len(tau) - 1):
            before, after, num = self._around(bond, tau, energies, counts)
            rate = self.rate(bond) + (before + after) / 2
            tau[bond] = rng.standard_gamma(self.shape + num.sum() / 2, len(rate)) / rate
        joined = np.concatenate([tau[0], *tau[1:-1]])
        state.precisions = torch.from_numpy(joined).to(state.precisions.device)

    def balance(
        self, state: GibbsState, energies: list[np.ndarray], counts: np.ndarray, rng: np.random.Generator
    ) -> None:
        """
        Between the cores on both sides of each bond, index by index.

        :param state: The chain's state.
        :param energies: As for :meth:`draw`.
        :param counts: As for :meth:`draw`.
        :param rng: Source of random numbers.
        """
        tau = [values.cpu().numpy() for values in self._by_bond(state.precisions, state)]
        for bond in range(1, len(tau) - 1):
            before, after, num = self._around(bond, tau, energies, counts)
            a, b = (np.maximum(tau[bond] * each, 1e-300) for each in (before, after))
            t = move_scales(a, b, np.full_like(a, num[0] - num[1]), rng)
            columns, rows = np.tile(t, len(tau[bond - 1])), np.repeat(t, len(tau[bond + 1]))
            left, right = self.chain[bond - 1], self.chain[bond]
            energies[left] = energies[left] * np.exp(2 * columns)
            energies[right] = energies[right] * np.exp(-2 * rows)
            device = state.precisions.device
            state.log_scales[left] += torch.from_numpy(columns).to(device)
            state.log_scales[right] -= torch.from_numpy(rows).to(device)

    def keep(self, state: GibbsState, alive: Tensor, energies: Tensor) -> None:
        masks = self._by_bond(alive, state)
        for mask, sizes in zip(masks, self._by_bond(energies, state), strict=True):
            mask[sizes.argmax()] = True
        masks[0][:] = masks[-1][:] = True
        factors, scales = list(state.factors), list(state.log_scales)
        for place, d in enumerate(self.chain):
            both = torch.outer(masks[place], masks[place + 1]).flatten()
            factors[d], scales[d] = factors[d][both], scales[d][both]
        state.precisions = state.precisions[torch.cat(masks[:-1])]
        state.factors, state.log_scales = factors, scales

    def effective_rank(self, energies: Tensor) -> float:
        """
        The mean over bonds of the number of indices that matter.

        :param energies: See :meth:`WeightPrior.effective_rank`.
        """
        if not self.ranks:
            return 1.0
        return float((energies[:, 1:] > MIN_EFFECT).sum(-1).double().mean()) / len(self.ranks)

    def _bonds(self, factors: Sequence[Tensor]) -> list[int]:
        """:math:`r_0, \\dots, r_D`, fewer than the prior was made for where indices have been dropped."""
        return bond_sizes([len(factors[d]) for d in self.chain])

    def _by_bond(self, values: Tensor, state: GibbsState) -> list[Tensor]:
        """Values of the components, bond by bond from 0 to D; those at both ends stand for f as a whole."""
        whole, *inner = values.split([1, *self._bonds(state.factors)[1:-1]])
        return [whole.clone(), *(part.clone() for part in inner), whole.clone()]

    def _around(
        self, bond: int, tau: Sequence[np.ndarray], energies: Sequence[np.ndarray], counts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For each index of a bond the weighted energies of the core before and after it, and their weights' number."""
        left, here, right = tau[bond - 1 : bond + 2]
        one, two = self.chain[bond - 1], self.chain[bond]
        before = left @ energies[one].reshape(len(left), len(here))
        after = energies[two].reshape(len(here), len(right)) @ right
        return before, after, np.array([len(left) * counts[one], len(right) * counts[two]])
