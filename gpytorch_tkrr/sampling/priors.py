r"""Priors of low-rank weights.

All have the covariance of the kernel, :math:`\sigma^2 \prod_d k_d`; they differ in how a function of low rank departs
from a Gaussian process.

:class:`WeightPrior` is what :mod:`.sampler` knows of one: every weight is normal, and precisions can switch parts of
the weights off. :class:`SoftRankPrior` is that of CP weights; the other formats have a file each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ..cp.conditional import DenseGram
from ..cp.format import WeightFormat
from ..cp.levels import LevelGram
from ..model.likelihoods.augmented import Parameters
from .hyperparameters import TOTAL_SPREAD

#: Smallest shape of the Gamma prior of the components' precisions.
TAU_SHAPE = 2.0

#: Width of the Gaussian proposal of moves of scale, relative to that of the target at its mode.
PROPOSAL_WIDENING = 1.2

#: Components count for the effective rank above this mean square, in units of the targets' variance.
MIN_EFFECT = 1e-3


@dataclass
class GibbsState:
    """
    Everything that a chain carries from one update to the next, beside the kernel object's hyperparameters.

    :param factors: Raw factors, D tensors `(K_d, M_d)`, for targets scaled to unit variance.
    :param parameters: Those of the observation model, for the scaled targets.
    :param precisions: Of the components: :math:`\\tau`, `(R,)` for CP weights.
    :param steps: Logarithm of the proposal width of each hyperparameter.
    :param log_scales: c, by which the factors' rows are to be multiplied, `(D, R)` or D tensors `(K_d,)`; by default
        zero, for CP weights.
    """

    factors: list[Tensor]
    parameters: Parameters
    precisions: Tensor
    steps: Tensor
    log_scales: Tensor | list[Tensor] = field(default_factory=lambda: torch.empty(0))

    def __post_init__(self):
        if isinstance(self.log_scales, Tensor) and self.log_scales.numel() == 0:
            self.log_scales = self.precisions.new_zeros(len(self.factors), len(self.precisions))

    def scaled_factors(self) -> list[Tensor]:
        """The factors with their scales, D tensors `(K_d, M_d)`."""
        return [factor * c.exp().unsqueeze(-1) for factor, c in zip(self.factors, self.log_scales, strict=True)]


class WeightPrior(ABC):
    """
    The prior of one format's weights: given precisions of its *components*, all weights are independent and normal.

    A component is a part of the weights that can be switched off: a product of CP weights, an index of a bond.
    """

    #: Priors of the formats, by the format's name.
    of_kind: ClassVar[dict[str, type[WeightPrior]]] = {}

    def __init_subclass__(cls, kind: str) -> None:
        super().__init_subclass__()
        WeightPrior.of_kind[kind] = cls

    @classmethod
    @abstractmethod
    def of(cls, weights: WeightFormat, sizes: Sequence[int]) -> WeightPrior:
        """
        The prior for a format of some rank.

        :param weights: The format.
        :param sizes: Number of functions of each mode.
        """

    @abstractmethod
    def start(self, factors: list[Tensor], parameters: Parameters, steps: Tensor) -> GibbsState:
        """
        The state of a new chain.

        :param factors: Raw factors.
        :param parameters: Those of the observation model.
        :param steps: Proposal widths of the hyperparameters.
        """

    @abstractmethod
    def rows(self, state: GibbsState, d: int) -> Tensor:
        """
        Precisions of the whitened weights in each row of a factor without its scales, `(K_d,)`.

        :param state: The chain's state.
        :param d: The mode.
        """

    @abstractmethod
    def mean_squares(self, found: Tensor | None, state: GibbsState, d: int, gram: DenseGram | LevelGram) -> Tensor:
        """
        Sums over the rows of the squared values of each component, as far as one mode shows them.

        :param found: What the mode visited before has shown; None at the first.
        :param state: The chain's state.
        :param d: The mode.
        :param gram: G of its factor.
        """

    @abstractmethod
    def draw(self, state: GibbsState, energies: list[np.ndarray], counts: np.ndarray, rng: np.random.Generator) -> None:
        """
        Draw the precisions given the weights; `state` is changed in place.

        :param state: The chain's state.
        :param energies: Squared whitened weights of each row, scales multiplied in, D arrays `(K_d,)`.
        :param counts: The number of weights in a row, `(D,)`.
        :param rng: Source of random numbers.
        """

    @abstractmethod
    def balance(
        self, state: GibbsState, energies: list[np.ndarray], counts: np.ndarray, rng: np.random.Generator
    ) -> None:
        """
        Move scale between modes such that f stays the same (Liu & Sabatti 2000); `state` and `energies` are changed.

        :param state: The chain's state.
        :param energies: As for :meth:`draw`.
        :param counts: As for :meth:`draw`.
        :param rng: Source of random numbers.
        """

    @abstractmethod
    def keep(self, state: GibbsState, alive: Tensor, energies: Tensor) -> None:
        """
        Drop components, but not all; `state` is changed in place.

        :param state: The chain's state.
        :param alive: Numbers of the components to keep.
        :param energies: Their mean squares; the largest ones are kept in any case.
        """

    @abstractmethod
    def effective_rank(self, energies: Tensor) -> float:
        """
        How many components matter, on average over draws.

        :param energies: Their mean squares in units of the targets' variance, `(S, components)`.
        """


def move_scales(a: np.ndarray, b: np.ndarray, difference: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    r"""
    How far scale moves between pairs of groups of weights: t, by a Metropolis step.

    With one group multiplied by :math:`e^t` and the other divided by it, the density of t is

    .. math:: \log p(t) = t (M_1 - M_2) - \tfrac12 (e^{2t} a + e^{-2t} b) + \text{const}.

    It is log-concave with tails lighter than a Gaussian's: the Gaussian at its mode is a good proposal.

    :param a: Squared weights of the first group, times their precisions.
    :param b: Those of the second.
    :param difference: :math:`M_1 - M_2`, by how many weights the first group has more.
    :param rng: Source of random numbers.
    """
    root = np.sqrt(difference**2 + 4 * a * b)
    size = np.abs(difference) + root
    mode = 0.5 * np.log(np.where(difference > 0, size / (2 * a), 2 * b / size))
    width = PROPOSAL_WIDENING / np.sqrt(2 * (np.exp(2 * mode) * a + np.exp(-2 * mode) * b))
    proposal = mode + width * rng.standard_normal(a.shape)

    def log_ratio(t: np.ndarray) -> np.ndarray:
        """Target over proposal density."""
        target = t * difference - 0.5 * (np.exp(2 * t) * a + np.exp(-2 * t) * b)
        return target + 0.5 * ((t - mode) / width) ** 2

    accepted = np.log(rng.random(a.shape)) < log_ratio(proposal) - log_ratio(np.zeros_like(proposal))
    return np.where(accepted, proposal, 0.0)


class SoftRankPrior(WeightPrior, kind="cp"):
    r"""
    Normal weights whose components can be switched off,

    .. math:: a_{dr} \sim N(0, \sigma^{2/D} V_d / \tau_r), \qquad \tau_r \sim \text{Gamma}(a_0, a_0 R^{-1/D}) .

    A component as a whole has the prior variance :math:`\tau_r^{-D}`: in many dimensions the shape :math:`a_0` grows,
    so that the standard deviation of :math:`D \log \tau_r` stays below 4.

    :param num_dims: D.
    :param rank: R.

    :ivar shape: :math:`a_0`.
    :ivar rate: :math:`a_0 R^{-1/D}`.
    """

    def __init__(self, num_dims: int, rank: int):
        self.shape = max(TAU_SHAPE, (num_dims / TOTAL_SPREAD) ** 2)
        self.rate = self.shape * rank ** (-1 / num_dims)
        self.num_dims, self.rank = num_dims, rank

    @classmethod
    def of(cls, weights: WeightFormat, sizes: Sequence[int]) -> SoftRankPrior:
        assert weights.rank is not None
        return cls(len(sizes), weights.rank)

    def start(self, factors: list[Tensor], parameters: Parameters, steps: Tensor) -> GibbsState:
        precisions = factors[0].new_full((len(factors[0]),), self.rank ** (1 / self.num_dims))
        return GibbsState(factors, parameters, precisions, steps)

    def rows(self, state: GibbsState, d: int) -> Tensor:
        return state.precisions * (2 * state.log_scales[d]).exp()

    def mean_squares(self, found: Tensor | None, state: GibbsState, d: int, gram: DenseGram | LevelGram) -> Tensor:
        return gram.squares(state.factors[d])

    def draw(self, state: GibbsState, energies: list[np.ndarray], counts: np.ndarray, rng: np.random.Generator) -> None:
        rate = self.rate + sum(energies) / 2
        draws = rng.standard_gamma(self.shape + counts.sum() / 2, len(rate)) / rate
        state.precisions = torch.from_numpy(draws).to(state.precisions.device)

    def balance(
        self, state: GibbsState, energies: list[np.ndarray], counts: np.ndarray, rng: np.random.Generator
    ) -> None:
        """
        Between random pairs of modes, component by component.

        :param state: The chain's state.
        :param energies: As for :meth:`draw`.
        :param counts: As for :meth:`draw`.
        :param rng: Source of random numbers.
        """
        order, half = rng.permutation(self.num_dims), self.num_dims // 2
        if half == 0:
            return
        one, two = order[:half], order[half : 2 * half]
        tau = state.precisions.cpu().numpy()
        a, b = (
            tau * np.maximum(np.reshape([energies[d] for d in index], (half, -1)), 1e-300) for index in (one, two)
        )  # (D / 2, R)
        t = move_scales(a, b, (counts[one] - counts[two])[:, None].astype(float), rng)
        move = torch.from_numpy(t).to(state.precisions.device)
        for i in range(half):
            energies[one[i]] = energies[one[i]] * np.exp(2 * t[i])
            energies[two[i]] = energies[two[i]] * np.exp(-2 * t[i])
            state.log_scales[one[i]] += move[i]
            state.log_scales[two[i]] -= move[i]

    def keep(self, state: GibbsState, alive: Tensor, energies: Tensor) -> None:
        assert isinstance(state.log_scales, Tensor)
        alive = alive.clone()
        alive[energies.argmax()] = True
        state.factors = [factor[alive] for factor in state.factors]
        state.precisions, state.log_scales = state.precisions[alive], state.log_scales[:, alive]

    def grown(self, state: GibbsState, factors: Sequence[Tensor]) -> GibbsState:
        """
        A state with more components; they share no memory.

        :param state: The chain's state.
        :param factors: Raw factors of the new components.
        """
        assert isinstance(state.log_scales, Tensor)
        parameters = {name: value.clone() for name, value in state.parameters.items()}
        new = self.start(list(factors), parameters, state.steps.clone())
        new.factors = [torch.cat(pair) for pair in zip(state.factors, new.factors, strict=True)]
        new.precisions = torch.cat([state.precisions, new.precisions])
        new.log_scales = torch.cat([state.log_scales, new.log_scales], -1)  # type: ignore[list-item]
        return new

    def effective_rank(self, energies: Tensor) -> float:
        return float((energies > MIN_EFFECT).sum(-1).double().mean())
