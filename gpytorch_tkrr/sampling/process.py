r"""The limit of many components: a Gaussian process, for few rows.

With R components of variance :math:`\sigma^2 / R` each, f tends to a Gaussian process with the kernel
:math:`\sigma^2 \prod_d k_d` as R grows. For few rows this limit costs less than many components. f is integrated out,

.. math:: y \sim N(0, A), \qquad A = \sigma^2 K_1 \circ \cdots \circ K_D + s^2 W^{-1}, \qquad
    K_d = \Phi_d V_d(\theta) \Phi_d^\top,

and the gradient of its logarithm moves all hyperparameters and the noise at once, first uphill and then by Hamiltonian
Monte Carlo. A draw of f is again a sum of products, so that predictions, effects and files need not know of it. By
Matheron's rule it is a draw from the prior, corrected by one component for each row,

.. math:: f(x) = f_0(x) + \sum_n \alpha_n\, \sigma^2 \prod_d \phi_d(x_d)^\top V_d\, \phi_d(x_{nd}), \qquad
    \alpha = A^{-1} (y - f_0 - \epsilon),

with :math:`f_0` of so many components that its covariance is the kernel's, and :math:`\epsilon` drawn as the noise.

References: Neal (2011), *MCMC using Hamiltonian dynamics*; Wilson et al. (2020), *Efficiently sampling functions from
Gaussian process posteriors*.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..bases.covariance import Covariance
from ..cp.design import DenseRows
from ..features.represented import MAX_MISSING, ModeGrid
from ..features.separable import SeparableKernel
from ..linalg import jittered_cholesky
from .hyperparameters import Hyperparameters

#: Components of a draw from the prior.
NUM_PRIOR_COMPONENTS = 64

#: Steps uphill, at first and late, in units of the prior's spread, and when late begins.
FIRST_ASCENT, LATE_ASCENT, LATE = 0.1, 0.03, 0.7

#: Steps uphill between two looks at whether functions and box still represent the kernel.
ASCENT_LOOKS = 10

#: Leapfrog steps of a proposal, the acceptance rate that their size is tuned to, and the size to begin with.
NUM_LEAPS, TARGET_ACCEPTANCE, FIRST_LEAP = 6, 0.8, 0.1

#: A proposal that moves a coordinate farther than this has diverged.
MAX_MOVE = 20.0

#: Rows of a matrix that are worked on at a time.
BLOCK_ROWS = 128


class ProcessPosterior:
    """
    Hyperparameters and noise with f integrated out, and f given these.

    :param rows: The rows, targets in units of their standard deviation.
    :param separable: The kernel, read mode by mode.
    :param hyperparameters: Its free hyperparameters and those of the likelihood.
    :param unit: The variance of the targets.
    :param grids: Points of each mode where its prior variance must be represented.
    """

    def __init__(
        self,
        rows: DenseRows,
        separable: SeparableKernel,
        hyperparameters: Hyperparameters,
        unit: float,
        grids: Sequence[Tensor],
    ):
        self.rows, self.separable, self.hyperparameters, self.unit = rows, separable, hyperparameters, unit
        self.grids = [ModeGrid(mode, grid) for mode, grid in zip(separable.modes, grids, strict=True)]
        self.slots = range(len(hyperparameters.slots))

    def noise(self) -> Tensor:
        """:math:`s^2`, in units of the targets' variance."""
        likelihood = self.hyperparameters.likelihood
        assert likelihood is not None
        return likelihood.noise.double().sum() / self.unit

    def outputscale(self) -> Tensor:
        r""":math:`\sigma^2`, in units of the targets' variance."""
        return self.separable.outputscale() / self.unit

    def represents(self) -> list[bool]:
        """For each mode whether its functions represent its prior variance."""
        return [float(grid.missing().max()) <= MAX_MISSING for grid in self.grids]

    def _products(self, covariances: Sequence[Covariance], others: Sequence[Tensor]) -> Tensor:
        """The kernel between other rows, given by their features, and the rows, without the output scale."""
        total: Tensor | None = None
        for features, own, covariance in zip(others, self.rows.features, covariances, strict=True):
            gram = covariance_times(covariance, features) @ own.mT
            total = gram if total is None else total.mul_(gram)
        assert total is not None
        return total

    def _matrix(self, kernel: Tensor, scale: float, noise: float) -> Tensor:
        """A, made of the kernel without its output scale."""
        matrix = scale * kernel
        matrix.diagonal().add_(noise / self.rows.weight)
        return matrix

    def expand(self) -> tuple[float, Tensor]:
        """The log density of the present coordinates, and its gradient `(P,)`; minus infinity where it has none."""
        hyper, rows = self.hyperparameters, self.rows
        with torch.enable_grad():
            covariances = [mode.covariance() for mode in self.separable.modes]
            outputscale, noise = self.outputscale(), self.noise()
        plain = [covariance.detach() for covariance in covariances]
        scale, variance = float(outputscale), float(noise)
        kernel = self._products(plain, rows.features)
        factor, info = torch.linalg.cholesky_ex(self._matrix(kernel, scale, variance))
        if int(info):
            return -math.inf, torch.zeros(len(self.slots), dtype=torch.float64)
        solved = torch.cholesky_solve(rows.y.unsqueeze(-1), factor)
        value = -0.5 * float(rows.y @ solved[:, 0]) - float(factor.diagonal().log().sum())
        slope = (solved @ solved.mT).sub_(torch.cholesky_inverse(factor)).mul_(0.5)  # by the entries of A
        by_noise = (slope.diagonal() / rows.weight).sum()
        by_scale = (slope * kernel).sum()
        by_covariance = self._slopes(plain, slope.mul_(scale))
        with torch.enable_grad():
            surrogate = by_noise * noise + by_scale * outputscale
            for slope_of_mode, covariance in zip(by_covariance, covariances, strict=True):
                surrogate = surrogate + (slope_of_mode * covariance.to_dense()).sum()
        value += hyper.log_prior(self.slots)
        return value, hyper.gradient(surrogate) + hyper.log_prior_slopes(self.slots)

    def _slopes(self, covariances: Sequence[Covariance], slope: Tensor) -> list[Tensor]:
        """Derivatives by the covariances of all modes, given those by the kernel: D tensors `(M_d, M_d)`."""
        features = self.rows.features
        total = [f.new_zeros(f.shape[1], f.shape[1]) for f in features]
        for start in range(0, len(slope), BLOCK_ROWS):
            block = slice(start, start + BLOCK_ROWS)
            grams = [covariance_times(v, f[block]) @ f.mT for v, f in zip(covariances, features, strict=True)]
            after = [grams[-1].new_ones(())] * len(grams)  # products over later modes
            for d in range(len(grams) - 2, -1, -1):
                after[d] = after[d + 1] * grams[d + 1]
            before = slope[block]
            for d, gram in enumerate(grams):
                total[d] += features[d][block].mT @ ((before * after[d]) @ features[d])
                before = before * gram
        return total

    def log_densities(self, other: DenseRows) -> Tensor:
        """
        The log density of each of other rows at the present coordinates, without its constant, `(n,)`.

        :param other: The other rows.
        """
        covariances = [mode.covariance() for mode in self.separable.modes]
        scale, noise = float(self.outputscale()), float(self.noise())
        factor, _ = jittered_cholesky(self._matrix(self._products(covariances, self.rows.features), scale, noise))
        cross = scale * self._products(covariances, other.features)  # (n, N)
        mean = cross @ torch.cholesky_solve(self.rows.y.unsqueeze(-1), factor)[:, 0]
        prior = scale * torch.stack([v.quadratic(f) for v, f in zip(covariances, other.features, strict=True)]).prod(0)
        known = torch.linalg.solve_triangular(factor, cross.mT, upper=False).square().sum(0)
        variance = (prior - known).clamp(min=0) + noise / other.weight
        return -0.5 * ((other.y - mean).square() / variance + variance.log())

    def draw(self, rng: np.random.Generator) -> tuple[list[Tensor], float]:
        """
        Raw factors of a draw of f, D tensors `(R', M_d)`, and the mean square of f over the rows.

        :param rng: Source of random numbers.
        """
        covariances = [mode.covariance() for mode in self.separable.modes]
        scale, noise = float(self.outputscale()), float(self.noise())
        factor, _ = jittered_cholesky(self._matrix(self._products(covariances, self.rows.features), scale, noise))
        factors, prior = [], self.rows.y.new_full((NUM_PRIOR_COMPONENTS,), (scale / NUM_PRIOR_COMPONENTS) ** 0.5)
        start = prior.unsqueeze(-1) * torch.ones_like(self.rows.y)  # (R, N)
        for covariance, features in zip(covariances, self.rows.features, strict=True):
            # Signs instead of normal numbers: the same covariance, and products of many with lighter tails.
            signs = torch.from_numpy(2.0 * rng.integers(2, size=(NUM_PRIOR_COMPONENTS, features.shape[1])) - 1)
            drawn = covariance.unwhiten(signs.to(features))
            start = start * (drawn @ features.mT)
            factors.append(torch.cat([drawn, covariance_times(covariance, features)]))
        f = start.sum(0)
        epsilon = torch.from_numpy(rng.standard_normal(len(f))).to(f) * (noise / self.rows.weight).sqrt()
        solved = torch.cholesky_solve((self.rows.y - f - epsilon).unsqueeze(-1), factor)[:, 0]
        factors[0] = factors[0] * torch.cat([prior, scale * solved]).unsqueeze(-1)
        fitted = self.rows.y - epsilon - noise / self.rows.weight * solved
        return factors, float(fitted.square().mean())


def covariance_times(covariance: Covariance, features: Tensor) -> Tensor:
    r"""
    :math:`\Phi V`, `(N, M)`.

    :param covariance: V.
    :param features: :math:`\Phi`, `(N, M)`.
    """
    if covariance.mixing is None:
        return features * covariance.variances
    return features @ covariance.to_dense()


class ProcessChain:
    """
    A chain of hyperparameters and noise.

    :param posterior: Their density; its kernel object stands where the chain is.
    :param rng: Source of random numbers.
    :param log_leap: Logarithm of the size of a leapfrog step, in units of the prior's spread.
    """

    def __init__(self, posterior: ProcessPosterior, rng: np.random.Generator, log_leap: float = math.log(FIRST_LEAP)):
        self.posterior, self.rng, self.log_leap = posterior, rng, log_leap
        spreads = posterior.hyperparameters.spreads
        self.spread = torch.tensor(spreads, dtype=torch.float64)

    def ascend(self, num_steps: int) -> None:
        """
        Go uphill, by Adam, as far as the functions represent the kernel.

        :param num_steps: How many steps.
        """
        posterior, hyper = self.posterior, self.posterior.hyperparameters
        slots = posterior.slots
        first, second = torch.zeros(2, len(slots), dtype=torch.float64)
        good = hyper.get(slots)
        for step in range(num_steps):
            value, gradient = posterior.expand()
            if not math.isfinite(value) or not bool(torch.isfinite(gradient).all()):
                break
            gradient = gradient * self.spread
            first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient.square()
            width = FIRST_ASCENT if step < LATE * num_steps else LATE_ASCENT
            move = first / (1 - 0.9 ** (step + 1)) / ((second / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8)
            hyper.set(slots, hyper.inside(slots, hyper.get(slots) + width * self.spread * move))
            if (step + 1) % ASCENT_LOOKS == 0 or step == num_steps - 1:
                here = hyper.get(slots)
                for d, is_good in enumerate(posterior.represents()):
                    if not is_good:
                        index = sorted(hyper.variance_users[d])
                        here[index] = good[index]
                hyper.set(slots, here)
                good = here

    def move(self, adapt: float = 0.0) -> None:
        """
        One proposal, accepted or not.

        :param adapt: How far the size of its steps is tuned.
        """
        posterior, hyper, slots = self.posterior, self.posterior.hyperparameters, self.posterior.slots
        start = hyper.get(slots)
        value, gradient = posterior.expand()
        momentum = torch.from_numpy(self.rng.standard_normal(len(slots)))
        energy = value - 0.5 * float(momentum @ momentum)
        leap = math.exp(self.log_leap) * self.rng.uniform(0.8, 1.2)
        coordinates, threshold = start, math.log(self.rng.random())
        change = -math.inf
        for turn in range(NUM_LEAPS):
            momentum = momentum + 0.5 * leap * self.spread * gradient
            coordinates = coordinates + leap * self.spread * momentum
            has_diverged = not float((coordinates - start).abs().max()) < MAX_MOVE
            if has_diverged or not hyper.set(slots, coordinates):
                break
            value, gradient = posterior.expand()
            momentum = momentum + 0.5 * leap * self.spread * gradient
            if not math.isfinite(value):
                break
            if turn == NUM_LEAPS - 1 and all(posterior.represents()):
                change = value - 0.5 * float(momentum @ momentum) - energy
        if not threshold < change:
            hyper.set(slots, start)
        acceptance = math.exp(min(change, 0.0)) if not math.isnan(change) else 0.0
        self.log_leap += adapt * (acceptance - TARGET_ACCEPTANCE)
