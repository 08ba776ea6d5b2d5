r"""Where a fit starts: components that the data show at once, found by sums over the rows.

An update sees one mode at a time. An interaction of two inputs that do nothing alone is invisible to it while both
modes are nearly constant. So the first components are looked for in all inputs and all pairs of them.

1. Each mode has a few *directions* :math:`z_{dq}`, the functions with zero mean and unit variance over the data that
   carry the largest prior variance: eigenvectors of :math:`V^{1/2} (G - m m^\top) V^{1/2}`, from the marginal sums.
2. Main effects are a ridge regression of the targets on all directions together. It leaves a residual e.
3. The sums :math:`\tfrac1N \sum_n e_n z_{dq}(x_n) z_{kp}(x_n)` say for each pair of inputs how much of the
   residual a product of their directions explains: a small matrix, whose singular vectors are the two functions.

Every step is a sum over rows, so that it streams and is shared by processes. The strongest terms become components, all
their other modes the best fit of the constant 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..bases.covariance import Covariance
from ..data.source import Batch
from ..linalg import steady_signs
from .conditional import Conditional
from .design import Design, Marginal
from .levels import LevelGram, LevelTable

#: Directions of each mode that are looked at.
NUM_DIRECTIONS = 3

#: A function is taken as constant over the data where its variance is below this fraction of the mode's.
MIN_VARIANCE = 1e-10

#: Effects below this fraction of the strongest are rounding.
MIN_SIZE = 1e-6

#: Smallest ridge of the regression on main effects, for directions of unit variance.
MIN_RIDGE = 1e-3

#: Ridge of the starting functions' fit to the constant 1, relative to the mean diagonal.
CONSTANT_RIDGE = 1e-2

#: Root-mean-square distance of the starting functions from the constant 1.
SPREAD = 0.2


@dataclass
class Mode:
    r"""
    What the start needs of a mode: whitened weights `w` stand for the function :math:`\phi^\top V^{1/2} w`.

    :param gram: :math:`V^{1/2} G V^{1/2}` over the data, `(M, M)`.
    :param mean: The functions' means over the data, `(M,)`.
    :param constant: The best fit of 1, `(M,)`.
    """

    gram: Tensor
    mean: Tensor
    constant: Tensor

    @classmethod
    def from_marginal(cls, marginal: Marginal, covariance: Covariance) -> Mode:
        """
        From sums over the data.

        :param marginal: The mode's functions, averaged over the data.
        :param covariance: V.
        """
        root = covariance.root
        gram = covariance.mix_gram(marginal.dense()) * root.unsqueeze(-1) * root
        mean = covariance.mix(marginal.mean.unsqueeze(0))[0] * root
        ridge = CONSTANT_RIDGE * gram.diagonal().mean().clamp(min=1e-300)
        return cls(gram, mean, Conditional(gram + ridge * torch.eye(*gram.shape).to(gram)).solve(mean))

    def squares(self, weights: Tensor) -> Tensor:
        """
        Mean squares of functions over the data, `(R,)`.

        :param weights: Whitened weights `(R, M)`.
        """
        return ((weights @ self.gram) * weights).sum(-1)

    def draws(self, rank: int, generator: torch.Generator) -> Tensor:
        """
        Draws from the prior with a mean square of one over the data, `(R, M)`.

        :param rank: R.
        :param generator: Source of random numbers.
        """
        draws = torch.randn(rank, len(self.mean), dtype=torch.float64, generator=generator).to(self.mean.device)
        sizes = self.squares(draws).sqrt()
        return draws / torch.where(sizes > 0, sizes, torch.ones_like(sizes)).unsqueeze(-1)

    def directions(self) -> Tensor:
        """Functions of unit variance that carry the largest prior variance, `(Q, M)`; zeros where there are fewer."""
        values, vectors = torch.linalg.eigh(self.gram - self.mean.unsqueeze(-1) * self.mean)
        values, vectors = values[-NUM_DIRECTIONS:].flip(0), vectors[:, -NUM_DIRECTIONS:].flip(1).mT
        vectors = vectors * steady_signs(vectors)
        varies = values > MIN_VARIANCE * self.gram.diagonal().sum()
        scale = torch.where(varies, values, torch.ones_like(values)).rsqrt() * varies
        found = scale.unsqueeze(-1) * vectors
        return torch.nn.functional.pad(found, (0, 0, 0, NUM_DIRECTIONS - len(found)))


@dataclass
class Category(Mode):
    r"""
    A mode whose inputs are levels of a category, of which there may be thousands. Most of its functions are alike, so
    the data choose its directions.

    The first one is what the targets do: their means on each level, shrunk towards the common mean as far as chance
    explains them. The others are, level by level, what the targets do with the directions of the other inputs,
    :math:`\sum_{n: x_n = l} y_n z_{kp}(x_n)`, shrunk alike: the leading singular vectors of these sums.

    :param gram: All that is needed of the Gram matrix: the share of the rows that have each level, `(L,)`.
    :param mean: The functions' means over the data, `(M,)`.
    :param constant: The best fit of 1, `(M,)`.
    :param roots: Roots of the variances of the levels' weights, `(L,)`.
    :param values: The other functions at each level times the roots of their variances, `(L, M')`.
    :param first: Where the levels stand among the functions.
    """

    roots: Tensor
    values: Tensor
    first: int

    @classmethod
    def from_marginal(cls, marginal: Marginal, covariance: Covariance) -> Category:
        gram, root = marginal.gram, covariance.root
        assert isinstance(gram, LevelGram)
        mean = marginal.mean * root
        ridge = CONSTANT_RIDGE * (marginal.diagonal() * covariance.variances).mean().clamp(min=1e-300)
        constant = gram.conditional(covariance, ridge.reshape(1), 1.0).solve(mean)
        values = gram.table.values.to(root.device) * root[gram.table.others]
        levels = gram.table.levels
        return cls(gram.blocks[:, 0, 0], mean, constant, root[levels], values, levels.start)

    def squares(self, weights: Tensor) -> Tensor:
        levels = slice(self.first, self.first + len(self.roots))
        others = torch.cat([weights[:, : levels.start], weights[:, levels.stop :]], -1)
        return (weights[:, levels] * self.roots + others @ self.values.mT).square() @ self.gram

    def directions(self) -> Tensor:
        """None before :meth:`choose`, `(0, M)`."""
        return self.mean.new_zeros(0, len(self.mean))

    def choose(self, sums: Tensor, num_rows: int) -> Tensor:
        """
        The directions, `(Q, M)`; zeros where there are fewer.

        :param sums: Means over all rows, for each level those of the rows that have it: of the targets, of variance 1,
            and of their products with other inputs' directions, `(1 + P, L)`.
        :param num_rows: N.
        """
        share, is_seen = self.gram, self.gram > 0
        safe = torch.where(is_seen, share, torch.ones_like(share))
        means = (sums / safe - sums.sum(-1, keepdim=True)) * is_seen
        chance = 1 / (safe * num_rows)  # variance of the mean of a level by chance
        between = ((means.square() - chance) * share).sum(-1, keepdim=True).clamp(min=0)
        shrunk = means * between / (between + chance)
        found = [shrunk[0]]
        if len(shrunk) > 1:
            vectors = torch.linalg.svd(shrunk[1:] * share.sqrt(), full_matrices=False)[2]
            found += list(vectors[: NUM_DIRECTIONS - 1] / safe.sqrt() * is_seen)
        kept: list[Tensor] = []
        for values in found:  # functions of the level: zero mean, unit variance, orthogonal over the rows
            for other in (is_seen.to(values), *kept):
                values = values - (share * values * other).sum() * other
            square = (share * values.square()).sum()
            if square > MIN_VARIANCE:
                kept.append(values * steady_signs(values) * square.rsqrt())
        chosen = self.mean.new_zeros(NUM_DIRECTIONS, len(self.mean))
        for row, values in zip(chosen, kept, strict=False):
            weights = values / torch.where(self.roots > 0, self.roots, torch.ones_like(self.roots))
            row[self.first : self.first + len(self.roots)] = weights
        return chosen


@dataclass
class Effects:
    """
    What one or two inputs explain, the strongest first.

    :param sizes: Root-mean-square of each term, `(T,)`.
    :param modes: The two inputs of each term, `(T, 2)`; the same one twice for a main effect.
    :param left: Coefficients of the first input's directions, unit vectors `(T, Q)`.
    :param right: Those of the second; not used for a main effect.
    """

    sizes: Tensor
    modes: Tensor
    left: Tensor
    right: Tensor

    @classmethod
    def find(cls, design: Design, directions: Sequence[Tensor], means: Tensor) -> Effects:
        """
        Two passes over the rows.

        :param design: The rows.
        :param directions: Raw weights of each mode's directions, D tensors `(Q, M_d)`.
        :param means: Their means, `(D, Q)`.
        """
        num_dims, num = means.shape
        size = num_dims * num + 1

        def regressors(z: Tensor) -> Tensor:
            """Directions without their means, and 1."""
            return torch.cat([z - means.reshape(-1, 1), torch.ones_like(z[:1])])

        def moments(batch: Batch, z: Tensor) -> Tensor:
            z = regressors(z)
            weighted = z if batch.weight is None else z * batch.weight
            return (weighted @ torch.cat([z, batch.y.unsqueeze(0)]).mT).reshape(-1)

        total = design.sum_projections(directions, moments, size * (size + 1)).reshape(size, size + 1)
        mass = total[-1, -2]
        ridge = torch.full_like(means, max(MIN_RIDGE, size / design.data.summary.num_rows)).reshape(-1)
        precision = total[:, :-1] / mass + torch.cat([ridge, ridge.new_zeros(1)]).diag_embed()
        coefficients = Conditional(precision).solve(total[:, -1] / mass)

        def products(batch: Batch, z: Tensor) -> Tensor:
            z = regressors(z)
            residual = batch.y - coefficients @ z
            residual = residual if batch.weight is None else residual * batch.weight
            return ((z[:-1] * residual) @ z[:-1].mT).reshape(-1)

        pairs = design.sum_projections(directions, products, (size - 1) ** 2) / mass
        blocks = pairs.reshape(num_dims, num, num_dims, num).transpose(1, 2)  # (D, D, Q, Q)
        first, second = torch.triu_indices(num_dims, num_dims, 1, device=means.device)
        left, sizes, right = torch.linalg.svd(blocks[first, second])  # (P, Q, Q), (P, Q), (P, Q, Q)
        signs = steady_signs(left.mT)
        left, right = left * signs.mT, right * signs
        main = coefficients[:-1].reshape(num_dims, num)
        main_sizes, alone = main.norm(dim=-1), torch.arange(num_dims, device=means.device)
        unit = main / torch.where(main_sizes > 0, main_sizes, torch.ones_like(main_sizes)).unsqueeze(-1)
        found = cls(
            torch.cat([main_sizes, sizes.reshape(-1)]),
            torch.cat([torch.stack([alone, alone], -1), torch.stack([first, second], -1).repeat_interleave(num, 0)]),
            torch.cat([unit, left.mT.reshape(-1, num)]),
            torch.cat([unit, right.reshape(-1, num)]),
        )
        # Where f has a scale of its own, such as the logarithm of a count, that of the targets says nothing about it.
        scale = max(math.sqrt(design.data.summary.variance) / design.data.scale, 1.0)
        steps = (found.sizes / (MIN_SIZE * found.sizes.max().clamp(min=1e-300))).round()  # equal but for rounding
        order = steps.argsort(descending=True, stable=True)
        order = order[steps[order] > 0]
        return cls(found.sizes[order] / scale, found.modes[order], found.left[order], found.right[order])


def near_constant(
    design: Design, covariances: Sequence[Covariance], rank: int, generator: torch.Generator
) -> list[Tensor]:
    """
    Components that are the constant 1 in every mode plus draws from the prior of comparable size, times random sizes.

    :param design: The rows.
    :param covariances: V of each mode.
    :param rank: R.
    :param generator: Source of random numbers.
    :return: Whitened weights, D tensors `(R, M_d)`.
    """
    return _near_constant(_modes(design, covariances), rank, generator)


def _near_constant(modes: Sequence[Mode], rank: int, generator: torch.Generator) -> list[Tensor]:
    factors = [mode.constant + SPREAD * mode.draws(rank, generator) for mode in modes]
    factors[0] *= _sizes(rank, generator).to(factors[0])
    return factors


@dataclass
class Screening:
    """
    What the data show of main effects and pairwise interactions, found once for all chains of a fit.

    :param modes: What is known of each mode.
    :param directions: Whitened weights of each mode's directions, D tensors `(Q, M_d)`.
    :param means: Their means, `(D, Q)`.
    :param effects: What one or two inputs explain; None where rows are so few that the directions of every input
        explain the targets equally well.
    """

    modes: list[Mode]
    directions: list[Tensor]
    means: Tensor
    effects: Effects | None

    @classmethod
    def of(cls, design: Design, covariances: Sequence[Covariance]) -> Screening:
        """
        Two passes over the rows.

        :param design: The rows.
        :param covariances: V of each mode.
        """
        modes = _modes(design, covariances)
        directions = _directions(design, modes, covariances)
        means = torch.stack([each @ mode.mean for each, mode in zip(directions, modes, strict=True)])  # (D, Q)
        if design.data.summary.num_rows <= NUM_DIRECTIONS + 1:
            return cls(modes, directions, means, None)
        raw = [covariance.unwhiten(each) for covariance, each in zip(covariances, directions, strict=True)]
        return cls(modes, directions, means, Effects.find(design, raw, means))

    def start(self, rank: int, generator: torch.Generator) -> list[Tensor]:
        """
        Components that are the strongest main effects and pairwise interactions, perturbed at random; where there are
        fewer than R the others are near the constant function, with random sizes.

        :param rank: R.
        :param generator: Source of random numbers.
        :return: Whitened weights, D tensors `(R, M_d)`.
        """
        modes, effects = self.modes, self.effects
        if effects is None:
            return _near_constant(modes, rank, generator)
        # Over many modes perturbations multiply: their product must stay near one.
        spread = min(SPREAD, len(modes) ** -0.5)
        noise = [spread * mode.draws(rank, generator) for mode in modes]
        factors = [mode.constant + draws for mode, draws in zip(modes, noise, strict=True)]
        for r, (first, second) in enumerate(effects.modes[:rank].tolist()):
            for d, coefficients in {first: effects.left[r], second: effects.right[r]}.items():
                function = coefficients @ self.directions[d] - (coefficients @ self.means[d]) * modes[d].constant
                factors[d][r] = function + noise[d][r]
            factors[first][r] *= effects.sizes[r]
        others = slice(len(effects.sizes), None)
        factors[0][others] *= _sizes(rank, generator)[others].to(self.means)
        return factors

    def interactions(self) -> Tensor:
        """Variance that each pair of inputs explains beyond what they do alone, `(D, D)`, zero on the diagonal."""
        found = self.means.new_zeros(len(self.modes), len(self.modes))
        if self.effects is not None:
            first, second = self.effects.modes.mT
            found.index_put_((first, second), self.effects.sizes.square() * (first != second), accumulate=True)
        return found + found.mT

    def state(self) -> dict[str, Any]:
        """Tensors and numbers that :meth:`from_state` reads."""
        return {
            "modes": [vars(mode) for mode in self.modes],
            "directions": self.directions,
            "means": self.means,
            "effects": None if self.effects is None else vars(self.effects),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Screening:
        """
        What :meth:`state` described.

        :param state: The description.
        """
        effects = state["effects"]
        return cls(
            [Category(**mode) if "roots" in mode else Mode(**mode) for mode in state["modes"]],
            state["directions"],
            state["means"],
            None if effects is None else Effects(**effects),
        )


def _sizes(rank: int, generator: torch.Generator) -> Tensor:
    """Random amplitudes of components that add up to a unit variance, `(R, 1)`."""
    return torch.randn(rank, 1, dtype=torch.float64, generator=generator) * math.pow(rank, -0.5)


def _modes(design: Design, covariances: Sequence[Covariance]) -> list[Mode]:
    modes = []
    for marginal, covariance in zip(design.marginals(), covariances, strict=True):
        is_category = isinstance(marginal.gram, LevelGram) and covariance.mixing is None
        modes.append((Category if is_category else Mode).from_marginal(marginal, covariance))
    return modes


def _directions(design: Design, modes: Sequence[Mode], covariances: Sequence[Covariance]) -> list[Tensor]:
    """The directions of all modes, `(Q, M_d)`; where some are categories these take one more pass over the rows."""
    found = [mode.directions() for mode in modes]
    categories = {d: mode for d, mode in enumerate(modes) if isinstance(mode, Category)}
    if not categories:
        return found
    raw = [covariance.unwhiten(each) for covariance, each in zip(covariances, found, strict=True)]
    tables = {d: table for d in categories if isinstance(table := design.tables[d], LevelTable)}
    num = 1 + sum(len(each) for each in raw)
    sizes = [num * table.num_moments for table in tables.values()]

    def by_level(batch: Batch, z: Tensor) -> Tensor:
        y = batch.y if batch.weight is None else batch.y * batch.weight
        rows, sums = torch.cat([y.unsqueeze(0), z * y]), []
        for d, table in tables.items():
            total = rows.new_zeros(num, table.num_moments)
            sums.append(total.index_add_(1, table.level_basis.codes(batch.x[:, d]), rows).reshape(-1))
        return torch.cat(sums)

    summary = design.data.summary
    total = design.sum_projections(raw, by_level, sum(sizes)) / summary.mass
    scale = max(math.sqrt(summary.variance) / design.data.scale, 1e-300)
    for d, part in zip(tables, total.split(sizes), strict=True):
        found[d] = categories[d].choose(part.reshape(num, -1) / scale, summary.num_rows)
    return found
