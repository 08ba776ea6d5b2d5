r"""Noise that is skewed and has heavy tails of any shape: a mixture of skewed normal distributions of several widths.

.. math:: y = f(x) + \sigma \tau_k (\delta_k |h| + \epsilon), \qquad h, \epsilon \sim N(0, 1), \quad P(k) = \pi_k

with fixed widths :math:`\tau = 1, 2, 4, ...`, shares :math:`\pi` and skews :math:`\delta` that are drawn. Where
:math:`\pi_1 = 1` and :math:`\delta = 0` the noise is Gaussian. f is no mean here, the mean is f and a multiple of
:math:`\sigma`: with delays, prices and other targets of which large ones are far away, most rows lie below the mean,
and the more so the wider the noise.

Given the component and :math:`b = \sigma \tau \delta |h|` the target is normal,
:math:`y - b \sim N(f, \sigma^2 \tau^2)`. Both are drawn for each row at each visit of a mode, the component with h
integrated out. Given b, two squares are :math:`\sigma^2 \chi^2_1`: those of :math:`(y - f - b) / \tau` and of
:math:`b / (\tau \delta)`.

Rows hardly tell narrow components of wide noise from wide components of narrow noise, or a large skew from a large
:math:`\sigma`, but given components and h they seem to know both well: draws in turn move slowly along these two
directions. So there are two moves more, with components and h integrated out. One shifts all shares and skews to the
next component and divides :math:`\sigma` by the ratio of their widths; the other changes one skew and leaves
:math:`\sigma^2 (1 + \delta^2)` as it is, up to a small factor.

The shape is Gaussian in the first part of the warm-up. With few rows (tens) take hundreds of sweeps.

By default :math:`\pi \sim \text{Dirichlet}(1, 0.2, ..., 0.2)` and :math:`\delta_k \sim N(0, 2^2)`.

Reference: Frühwirth-Schnatter & Pyne (2010), *Bayesian inference for finite mixtures of univariate and multivariate
skew-normal and skew-t distributions*.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ...data.keyed import row_uniform
from ...data.source import Batch, Working, residuals
from ..augmentation.candidates import choose, steps
from .augmented import Augmentation, Parameters, SumRows
from .base import Rows
from .gaussian import GaussianObservation
from .noise import NoiseModel
from .probit import truncated_noise
from .skewed_noise import RATIO, WIDTHS, SkewedNoise

#: The Dirichlet prior of the shares, for the narrowest component and for each of the others, and the skews' prior sd.
FIRST_SHARE, OTHER_SHARE, SKEW_SD = 1.0, 0.2, 2.0

#: How many candidates each move has, and the distances of :math:`\log \sigma^2` and of skews that it tries.
NUM_CANDIDATES, LEVELS, SKEWS = 8, (0.02, 2.0), (0.05, 4.0)

#: The part of the warm-up with Gaussian noise, and the share of the narrowest component that follows it.
GAUSSIAN_PART, START_SHARE = 0.5, 0.9


class SkewedObservation(GaussianObservation):
    """
    Targets with skewed noise.

    :param likelihood: A likelihood with a noise variance, `shares` and `skew`.
    """

    def augmentation(self, scale: float, offset: float) -> Augmentation:
        return SkewedAugmentation(NoiseModel.of(self.likelihood, scale**2), float(self.noise().detach()), scale**2)

    def set_parameters(self, draws: Parameters) -> None:
        super().set_parameters(draws)
        self.likelihood.shares = draws["shares"].mean(0)
        self.likelihood.initialize(skew=draws["skew"].mean(0).to(self.likelihood.skew))

    def _distribution(self, f: Tensor, parameters: Parameters, rows: Rows) -> SkewedNoise:
        square, spread = self.own_noise(parameters, rows), rows.get("spread", 0.0)
        return SkewedNoise(f, square, parameters["shares"], parameters["skew"], spread)

    def log_density(self, y: Tensor, f: Tensor, parameters: Parameters, rows: Rows) -> Tensor:
        return self._distribution(f, parameters, rows).log_prob(y)

    def mean(self, f: Tensor, parameters: Parameters, rows: Rows) -> Tensor:
        return self._distribution(f, parameters, rows).mean

    def variance(self, f: Tensor, parameters: Parameters, rows: Rows) -> Tensor:
        return self._distribution(f, parameters, rows).variance

    def noise_variance(self, f: Tensor, parameters: Parameters, rows: Rows) -> Tensor:
        known = {name: values for name, values in rows.items() if name != "spread"}
        return self._distribution(f, parameters, known).variance

    def cdf(self, y: Tensor, f: Tensor, parameters: Parameters, rows: Rows) -> Tensor:
        return self._distribution(f, parameters, rows).cdf(y)

    def sample(self, f: Tensor, parameters: Parameters, rows: Rows, generator: torch.Generator) -> Tensor:
        return self._distribution(f, parameters, rows).draw(generator)


class SkewedAugmentation(Augmentation):
    """
    Components and shifts, drawn anew at each visit; noise, shares and skews, before each sweep.

    :param model: How the noise is drawn.
    :param present: The likelihood object's noise, in the units of the targets.
    :param unit: Variance of the targets.
    """

    warmup_part = 0.8  # the shape is freed in its middle
    sweep_factor = 2.0  # so that it has time to settle; scale and shape of the noise move slowly

    def __init__(self, model: NoiseModel, present: float, unit: float):
        self.model, self.present, self.unit = model, present, unit
        self.free = (*(("noise",) if model.is_free else ()), "shares", "skew")

    @property
    def watched(self) -> tuple[str, ...]:
        return ()  # a narrow component of wide noise is a wide one of narrow noise: the data see the shape alone

    def start(self) -> Parameters:
        shares = torch.zeros(len(WIDTHS), dtype=torch.float64)
        shares[0] = 1.0
        noise = torch.tensor(self.model.start(self.present / self.unit), dtype=torch.float64)
        return {"noise": noise, "shares": shares, "skew": torch.zeros_like(shares)}

    def scaled(self, parameters: Parameters) -> Parameters:
        return {**_own(parameters), "noise": parameters["noise"] / self.unit}

    def natural(self, parameters: Parameters) -> Parameters:
        return {**_own(parameters), "noise": parameters["noise"] * self.unit}

    def noise(self, parameters: Parameters) -> float:
        return float(parameters["noise"])

    def before_sweep(
        self, parameters: Parameters, sum_rows: SumRows, rng: np.random.Generator, progress: float
    ) -> Parameters:
        if progress < GAUSSIAN_PART:
            return parameters
        parameters = _own(parameters)
        if _is_gaussian(parameters):
            rest = (1 - START_SHARE) / (len(WIDTHS) - 1)
            parameters["shares"] = torch.tensor([START_SHARE, *[rest] * (len(WIDTHS) - 1)], dtype=torch.float64)
        parameters = self._drawn(parameters, sum_rows, rng)
        for candidates in (self._shifted_components, self._other_skews):
            parameters = self._chosen(candidates(parameters, rng), sum_rows, rng)
        return parameters

    def _drawn(self, parameters: Parameters, sum_rows: SumRows, rng: np.random.Generator) -> Parameters:
        """Noise, skews and shares from their conditionals, given components and h."""
        latent, size = self._latent(parameters, rng), len(WIDTHS)

        def sums(batch: Batch, f: Tensor, first_row: int) -> Tensor:
            u, h, index = latent(batch, f, first_row)
            parts = torch.stack([torch.ones_like(u), h * u, h.square(), u.square()])  # (4, n)
            return torch.zeros(4, size, dtype=u.dtype, device=u.device).index_add_(1, index, parts).reshape(-1)

        count, cross, squares, total = sum_rows(sums, 4 * size).cpu().reshape(4, size)
        # The noise, given shifts b: squares of b / (tau delta) and of (e - b) / tau.
        skew, noise = parameters["skew"], float(parameters["noise"])
        square = float((total - 2 * skew * cross + (skew.square() + 1) * squares).sum())
        drawn = self.model.draw(noise, noise * square, 2 * float(count.sum()), rng)
        # Skews and shares, given h = b / (sigma tau delta).
        precision = squares * (noise / drawn) + 1 / SKEW_SD**2
        normal = torch.from_numpy(rng.standard_normal(size))
        skew = cross * (noise / drawn) / precision + normal / precision.sqrt()
        prior = np.array([FIRST_SHARE, *[OTHER_SHARE] * (size - 1)])
        gammas = rng.standard_gamma(prior + count.numpy()).clip(min=1e-300)
        shares = torch.from_numpy(gammas / gammas.sum())
        return {"noise": torch.tensor(drawn, dtype=torch.float64), "shares": shares, "skew": skew}

    def _shifted_components(self, parameters: Parameters, rng: np.random.Generator) -> list[Parameters]:
        """Shares and skews moved by a component or two, in turn, and a noise that makes up for it, nearly."""
        if not self.model.is_free:
            return [parameters]
        by, level = rng.integers(-1, 2, NUM_CANDIDATES), steps(rng, NUM_CANDIDATES, *LEVELS)
        moves = [(int(shift), float(change)) for shift, change in zip(by - by[0], level, strict=True)]
        return [
            {
                "noise": parameters["noise"] * math.exp(change) * RATIO ** (-2 * shift),
                "shares": parameters["shares"].roll(shift),
                "skew": parameters["skew"].roll(shift),
            }
            for shift, change in moves
        ]

    def _other_skews(self, parameters: Parameters, rng: np.random.Generator) -> list[Parameters]:
        """One component's skew changed, and a noise that makes up for it, nearly."""
        shares, skew, noise = parameters["shares"], parameters["skew"], parameters["noise"]
        k = min(int(torch.searchsorted(shares.cumsum(0), rng.random())), len(WIDTHS) - 1)
        by, level = steps(rng, NUM_CANDIDATES, *SKEWS), steps(rng, NUM_CANDIDATES, *LEVELS)
        candidates = []
        for change, factor in zip(by, np.exp(level), strict=True):
            other = skew.clone()
            other[k] += change
            same_width = (1 + skew[k].square()) / (1 + other[k].square())
            level_noise = noise * same_width * factor if self.model.is_free else noise
            candidates.append({"noise": level_noise, "shares": shares, "skew": other})
        return candidates

    def _chosen(self, candidates: list[Parameters], sum_rows: SumRows, rng: np.random.Generator) -> Parameters:
        """One of them, by its density with components and h integrated out."""
        if len(candidates) == 1:
            return candidates[0]

        def log_likelihoods(batch: Batch, f: Tensor, first_row: int) -> Tensor:
            e = batch.y - f if batch.weight is None else (batch.y - f) * batch.weight.sqrt()
            noises = (
                SkewedNoise(torch.zeros_like(e), *(each[name].to(e) for name in ("noise", "shares", "skew")))
                for each in candidates
            )
            return torch.stack([noise.log_prob(e).sum() for noise in noises])

        log_prior = np.array([self._log_prior(each) for each in candidates])
        return candidates[choose(sum_rows(log_likelihoods, len(candidates)).cpu().numpy() + log_prior, rng)]

    def _log_prior(self, parameters: Parameters) -> float:
        """The log density of log noise, shares and skews, up to a constant."""
        noise, log_shares = float(parameters["noise"]), parameters["shares"].log()
        shares = (FIRST_SHARE - 1) * log_shares[0] + (OTHER_SHARE - 1) * log_shares[1:].sum()
        own = self.model.log_density(noise) + math.log(noise) if self.model.is_free else 0.0
        return own + float(shares - parameters["skew"].square().sum() / (2 * SKEW_SD**2))

    def _latent(
        self, parameters: Parameters, rng: np.random.Generator
    ) -> Callable[[Batch, Tensor, int], tuple[Tensor, Tensor, Tensor]]:
        """For each row: its residual in units of the component's width, h, and the component's number."""
        keys = [int(key) for key in rng.integers(2**62, size=2)]
        noise, shares, skew = float(parameters["noise"]), parameters["shares"], parameters["skew"]
        log_shares = shares.log() - torch.tensor(WIDTHS, dtype=torch.float64).log() - (1 + skew.square()).log() / 2

        def latent(batch: Batch, f: Tensor, first_row: int) -> tuple[Tensor, Tensor, Tensor]:
            widths, delta = torch.tensor(WIDTHS, dtype=f.dtype, device=f.device), skew.to(f.device)
            e = (batch.y - f) / math.sqrt(noise)
            e = e if batch.weight is None else e * batch.weight.sqrt()
            u, size = e.unsqueeze(-1) / widths, (1 + delta.square())  # (n, K)
            skewed = torch.special.log_ndtr(u * delta / size.sqrt())
            log_p = log_shares.to(f.device) - u.square() / (2 * size) + skewed
            chosen = row_uniform(batch.num_rows, first_row, keys[0], f.device).unsqueeze(-1)
            index = (chosen > torch.softmax(log_p, -1).cumsum(-1)).sum(-1).clamp(max=len(WIDTHS) - 1)
            u, sd = u.gather(-1, index.unsqueeze(-1)).squeeze(-1), size[index].rsqrt()
            mean = delta[index] * u * sd  # of h, in units of its sd
            return u, sd * (mean + truncated_noise(torch.ones_like(mean), mean, first_row, keys[1])), index

        return latent

    def working(self, parameters: Parameters, rng: np.random.Generator) -> Working:
        if _is_gaussian(parameters):
            return residuals
        return self._shifted(parameters, self._latent(parameters, rng))

    def _shifted(self, parameters: Parameters, latent: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> Working:
        noise, skew = float(parameters["noise"]), parameters["skew"]

        def working(batch: Batch, f: Tensor, first_row: int) -> tuple[Tensor, Tensor]:
            u, h, index = latent(batch, f, first_row)
            width = torch.tensor(WIDTHS, dtype=f.dtype, device=f.device)[index]
            scale = width * math.sqrt(noise)
            scale = scale if batch.weight is None else scale / batch.weight.sqrt()
            return scale * (u - skew.to(f.device)[index] * h), width.square().reciprocal()

        return working

    def squares(
        self, parameters: Parameters, rng: np.random.Generator
    ) -> Callable[[Batch, Tensor, int], tuple[Tensor, ...]]:
        if _is_gaussian(parameters):
            return super().squares(parameters, rng)
        noise, skew, latent = float(parameters["noise"]), parameters["skew"], self._latent(parameters, rng)

        def squares(batch: Batch, f: Tensor, first_row: int) -> tuple[Tensor, Tensor]:
            u, h, index = latent(batch, f, first_row)
            unit = noise if batch.weight is None else noise / batch.weight
            return unit * (u - skew.to(f.device)[index] * h).square(), unit * h.square()

        return squares

    def after_visit(self, parameters: Parameters, square: float, count: float, rng: np.random.Generator) -> Parameters:
        if not _is_gaussian(parameters):
            return _own(parameters)  # shifts depend on the noise: it is drawn together with them
        noise = self.model.draw(float(parameters["noise"]), square, count, rng)
        return {**_own(parameters), "noise": torch.tensor(noise, dtype=torch.float64)}


def _is_gaussian(parameters: Parameters) -> bool:
    return float(parameters["shares"][0]) == 1.0


def _own(parameters: Parameters) -> Parameters:
    return {name: parameters[name] for name in ("noise", "shares", "skew")}
