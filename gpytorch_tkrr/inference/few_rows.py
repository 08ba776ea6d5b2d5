r"""Many Gibbs chains side by side, for few rows.

With few rows the posterior of CP weights has many modes and is close to the prior in most directions: many short chains
say more than a long one. Here all of them move together, by algebra with N x N matrices, so that neither the rank nor
the number of functions matters much. The hyperparameters stay as they are.

The prior is that of sparse components, :class:`~gpytorch_tkrr.inference.priors.SparsePrior`, not that of
:func:`~gpytorch_tkrr.fit_gibbs`.

A visit of mode d, given everything else, sees targets with the covariance

.. math:: S = \Bigl(\sum_{r \in A} p_r p_r^\top\Bigr) \circ \frac{1}{q_d} \Phi_d V_d \Phi_d^\top + \text{diag}(s^2),

where A are the components that use the other functions of this mode, which alone stand in
:math:`\Phi_d V_d \Phi_d^\top`, and :math:`p_r` are the products of all other factors at the rows. It proposes to let
one component per chain enter or leave A (Metropolis, with the weights integrated out), then draws the weights by
conditioning a draw from the prior (Matheron's rule).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..features.represented import range_grids
from ..linalg import jittered_cholesky
from ..model.draws import DrawsPosterior
from .priors import SparsePrior

if TYPE_CHECKING:
    from ..model.tkrr import TKRR

#: Sweeps before the first draw, and draws of all chains together.
NUM_WARMUP, NUM_DRAWS = 20, 256

#: Chains get fewer with more rows, whose N x N matrices are costly.
MIN_CHAINS, MAX_CHAINS, MAX_ENTRIES = 16, 64, 64 * 60**2

#: However little of a mode's variance is in its first function, some components use only that.
MAX_SHARE = 0.99


class SparseComponents:
    """
    Chains of the sparse CP model.

    :param features: The functions of each mode at the rows, D tensors `(N, M_d)`, float64.
    :param prior: The prior of the components.
    :param num_chains: C.
    :param generator: Source of random numbers.
    """

    def __init__(self, features: Sequence[Tensor], prior: SparsePrior, num_chains: int, generator: torch.Generator):
        self.features, self.prior, self.generator = list(features), prior, generator
        self.kernels = [(phi * v) @ phi.mT for phi, v in zip(self.features, prior.others, strict=True)]
        self.amplitudes = prior.scale * self._normal(num_chains, prior.rank)  # (C, R)
        self.is_active = [self._uniform(num_chains, prior.rank) < q for q in prior.shares]  # (C, R) of each mode
        self.weights = [self._prior_weights(d) for d in range(len(self.features))]  # (C, R, M_d)
        self.values = [w @ phi.mT for w, phi in zip(self.weights, self.features, strict=True)]  # (C, R, N)

    def _normal(self, *shape: int) -> Tensor:
        like = self.features[0]
        return torch.randn(shape, dtype=like.dtype, generator=self.generator).to(like.device)

    def _uniform(self, *shape: int) -> Tensor:
        like = self.features[0]
        return torch.rand(shape, dtype=like.dtype, generator=self.generator).to(like.device)

    def _noise(self, variances: Tensor) -> Tensor:
        """Observation noise of all chains, `(C, N)`."""
        return variances.sqrt() * self._normal(len(self.amplitudes), len(variances))

    def _prior_weights(self, d: int) -> Tensor:
        noise = self._normal(*self.amplitudes.shape, len(self.prior.first[d]))
        return torch.where(self.is_active[d].unsqueeze(-1), self.prior.others[d].sqrt() * noise, self.prior.first[d])

    def function_values(self) -> Tensor:
        """f at the rows, `(C, N)`."""
        products = self.amplitudes.unsqueeze(-1)
        for values in self.values:
            products = products * values
        return products.sum(-2)

    def factors(self) -> list[Tensor]:
        """The amplitudes and weights as raw factors of a CP model, D tensors `(C, R, M_d)`."""
        return [self.amplitudes.unsqueeze(-1) * self.weights[0], *(weights.clone() for weights in self.weights[1:])]

    def sweep(self, targets: Tensor, noise: Tensor) -> None:
        """
        Draw the amplitudes, then visit all modes.

        :param targets: `(N,)`, or `(C, N)` where each chain has targets of its own.
        :param noise: Noise variances `(N,)`.
        """
        after = [torch.ones_like(self.values[0])]  # products of the modes that follow
        for values in reversed(self.values):
            after.append(after[-1] * values)
        self._draw_amplitudes(after.pop(), targets, noise)
        before = self.amplitudes.unsqueeze(-1)
        for d in range(len(self.features)):
            others = before * after.pop()
            if self.prior.shares[d] > 0:
                self._visit(d, others, targets, noise)
            before = before * self.values[d]

    def _draw_amplitudes(self, products: Tensor, targets: Tensor, noise: Tensor) -> None:
        factor, _ = jittered_cholesky(self.prior.scale**2 * products.mT @ products + torch.diag_embed(noise))
        draw = self.prior.scale * self._normal(*self.amplitudes.shape)
        error = targets - (draw.unsqueeze(-2) @ products).squeeze(-2) - self._noise(noise)
        solved = torch.cholesky_solve(error.unsqueeze(-1), factor)
        self.amplitudes = draw + self.prior.scale**2 * (products @ solved).squeeze(-1)

    def _visit(self, d: int, products: Tensor, targets: Tensor, noise: Tensor) -> None:
        """
        Activity and weights of one mode.

        :param d: The mode.
        :param products: p, all other factors and the amplitudes at the rows, `(C, R, N)`.
        :param targets: As for :meth:`sweep`.
        :param noise: As for :meth:`sweep`.
        """
        phi, kernel, first = self.features[d], self.kernels[d], self.features[d] @ self.prior.first[d]
        active = self.is_active[d]
        rest = targets - first * (products * ~active.unsqueeze(-1)).sum(-2)  # what the active components explain
        used = products * active.unsqueeze(-1)
        covariance = (used.mT @ used) * kernel + torch.diag_embed(noise)
        factor, _ = jittered_cholesky(covariance)

        # One component of each chain may enter or leave.
        chosen = torch.randint(active.shape[1], (len(active), 1), generator=self.generator).to(active.device)
        proposed = self._uniform(len(active), 1) < self.prior.shares[d]
        present = active.gather(1, chosen)
        sign = proposed.to(noise.dtype) - present.to(noise.dtype)  # (C, 1): +1 enters, -1 leaves
        product = products.gather(1, chosen.unsqueeze(-1).expand(-1, -1, products.shape[-1])).squeeze(1)  # (C, N)
        other_rest = rest + sign * first * product
        other_covariance = covariance + sign.unsqueeze(-1) * (product.unsqueeze(-1) * product.unsqueeze(-2)) * kernel
        other_factor, _ = jittered_cholesky(other_covariance)
        change = _log_density(other_rest, other_factor) - _log_density(rest, factor)
        accepted = self._uniform(len(active)).log() < change
        active = active.scatter(1, chosen, torch.where(accepted.unsqueeze(-1), proposed, present))
        factor = torch.where(accepted.reshape(-1, 1, 1), other_factor, factor)
        self.is_active[d] = active
        used = products * active.unsqueeze(-1)

        weights = self._prior_weights(d)
        error = targets - (products * (weights @ phi.mT)).sum(-2) - self._noise(noise)
        solved = torch.cholesky_solve(error.unsqueeze(-1), factor).squeeze(-1)  # (C, N)
        self.weights[d] = weights + self.prior.others[d] * ((used * solved.unsqueeze(-2)) @ phi)
        self.values[d] = self.weights[d] @ phi.mT


def _log_density(x: Tensor, factor: Tensor) -> Tensor:
    """Log density of N(0, L L'), up to a constant; `(C, N)` and `(C, N, N)` -> `(C,)`."""
    half = torch.linalg.solve_triangular(factor, x.unsqueeze(-1), upper=False).squeeze(-1)
    return -0.5 * half.square().sum(-1) - factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)


@torch.no_grad()
def sample_few_rows(
    model: TKRR, x: Tensor, y: Tensor, noise: Tensor, ends: tuple[Tensor, Tensor], *, seed: int
) -> None:
    """
    Give a model draws of its factors at its present hyperparameters, box and sizes.

    :param model: The model; its posterior is replaced, nothing else.
    :param x: Inputs `(N, D)`.
    :param y: Targets `(N,)`.
    :param noise: Their noise variances, `(N,)` or a scalar.
    :param ends: Smallest and largest inputs, `(D,)` each, between which components should be sparse.
    :param seed: Seed of all chains.
    """
    separable = model.separate()
    covariances = [mode.covariance() for mode in separable.modes]
    features, variances, shares = [], [], []
    for d, (mode, grid) in enumerate(zip(separable.modes, range_grids(*ends), strict=True)):
        v = covariances[d].variances
        squares = covariances[d].mix(mode.basis(grid)).square() * v
        features.append(covariances[d].mix(mode.basis(x[:, d].double())))
        variances.append(v)
        shares.append(min(float(1 - (squares[:, 0] / squares.sum(-1)).mean()), MAX_SHARE))
    prior = SparsePrior(variances, shares, float(separable.outputscale()), model.rank)
    num_chains = min(max(MAX_ENTRIES // len(y) ** 2, MIN_CHAINS), MAX_CHAINS)
    chains = SparseComponents(features, prior, num_chains, torch.Generator().manual_seed(seed))
    targets = (y - model.mean_module(x)).double()
    noise = noise.double().expand(targets.shape)
    for _ in range(NUM_WARMUP):
        chains.sweep(targets, noise)
    draws: list[list[Tensor]] = []
    while len(draws) * num_chains < NUM_DRAWS:
        chains.sweep(targets, noise)
        draws.append(chains.factors())
    parts = zip(covariances, zip(*draws, strict=True), strict=True)
    factors = [covariance.unmix(torch.cat(each)) for covariance, each in parts]  # (S, R, M_d)
    numbers = torch.arange(num_chains, device=targets.device).repeat(len(draws))
    bases = [mode.basis for mode in separable.modes]
    parameters = {"noise": noise.mean().expand(len(numbers)).clone()}
    model.set_posterior(DrawsPosterior(bases, factors, parameters, {}, numbers, {}))
