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

The shape is Gaussian in the first part of the warm-up, and skews leave zero by small steps: with few rows (tens) take
hundreds of sweeps.

By default :math:`\pi \sim \text{Dirichlet}(1, 0.2, ..., 0.2)` and :math:`\delta_k \sim N(0, 2^2)`.

Reference: Frühwirth-Schnatter & Pyne (2010), *Bayesian inference for finite mixtures of univariate and multivariate
skew-normal and skew-t distributions*.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import scipy.special
import torch
from torch import Tensor

from ...data.keyed import row_uniform
from ...data.source import Batch, Working, residuals
from .base import Augmentation, Parameters, Rows, SumRows
from .gaussian import GaussianObservation
from .noise import NoiseModel
from .probit import truncated_noise

#: Widths of the components, in units of the narrowest.
WIDTHS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)

#: The Dirichlet prior of the shares, for the narrowest component and for each of the others, and the skews' prior sd.
FIRST_SHARE, OTHER_SHARE, SKEW_SD = 1.0, 0.2, 2.0

#: The part of the warm-up with Gaussian noise, and the share of the narrowest component that follows it.
GAUSSIAN_PART, START_SHARE = 0.5, 0.9


class SkewedNoise(torch.distributions.Distribution):
    """
    The distribution of y given f.

    :param loc: f, `(..., n)`.
    :param square: :math:`\\sigma^2`, which broadcasts with f.
    :param shares: :math:`\\pi`, `(..., K)`: for each draw of f.
    :param skew: :math:`\\delta`, `(..., K)`.
    :param spread: Variance of f about its given value.

    Example:
        >>> import torch
        >>> from gpytorch_tkrr.model.likelihoods.skewed import SkewedNoise
        >>> shares, skew = torch.tensor([0.8, 0.2, 0, 0, 0, 0]).double(), torch.tensor([0.0, 3, 0, 0, 0, 0]).double()
        >>> noise = SkewedNoise(torch.zeros(2).double(), torch.ones(()).double(), shares, skew)
        >>> noise.mean, bool((noise.cdf(noise.mean) > 0.5).all())  # most values lie below the mean
        (tensor([0.9575, 0.9575], dtype=torch.float64), True)
    """

    arg_constraints: ClassVar[dict] = {}

    def __init__(self, loc: Tensor, square: Tensor, shares: Tensor, skew: Tensor, spread: Tensor | float = 0.0):
        widths = torch.tensor(WIDTHS, dtype=loc.dtype, device=loc.device).square()
        self.loc, self.shares = loc, shares.unsqueeze(-2)  # (..., 1, K)
        variance = square.unsqueeze(-1) * widths  # (..., n, K)
        self.shift = variance.sqrt() * skew.unsqueeze(-2)
        self.normal = variance + (spread.unsqueeze(-1) if isinstance(spread, Tensor) else spread)
        self.total = self.shift.square() + self.normal
        super().__init__(loc.shape, validate_args=False)

    @property
    def mean(self) -> Tensor:
        return self.loc + self._mean_noise()

    @property
    def variance(self) -> Tensor:
        return (self.shares * self.total).sum(-1).expand_as(self.loc) - self._mean_noise().square()

    def _mean_noise(self) -> Tensor:
        return math.sqrt(2 / math.pi) * (self.shares * self.shift).sum(-1)

    def log_prob(self, value: Tensor) -> Tensor:
        e = (value - self.loc).unsqueeze(-1)
        normal = -0.5 * (torch.log(2 * math.pi * self.total) + e.square() / self.total)
        skewed = torch.special.log_ndtr(e * self.shift / (self.total * self.normal).sqrt())
        return torch.logsumexp(self.shares.log() + math.log(2.0) + normal + skewed, -1)

    def cdf(self, value: Tensor) -> Tensor:
        z = (value - self.loc).unsqueeze(-1) / self.total.sqrt()
        skew = (self.shift / self.normal.sqrt()).expand_as(z)
        below = torch.special.erfc(-z / math.sqrt(2)) / 2 - 2 * OwensT.apply(z, skew)
        return (self.shares * below).sum(-1).clamp(0.0, 1.0)

    def draw(self, generator: torch.Generator | None = None) -> Tensor:
        """
        One draw for each value of f.

        :param generator: Source of random numbers.
        """
        options: dict[str, Any] = {"dtype": self.loc.dtype, "device": self.loc.device, "generator": generator}
        u = torch.rand((*self.loc.shape, 1), **options)
        index = (u > self.shares.cumsum(-1)).sum(-1, keepdim=True).clamp(max=len(WIDTHS) - 1)
        shape = (*self.loc.shape, len(WIDTHS))
        shift, normal = (each.expand(shape).gather(-1, index).squeeze(-1) for each in (self.shift, self.normal))
        h, z = torch.randn(self.loc.shape, **options).abs(), torch.randn(self.loc.shape, **options)
        return self.loc + shift * h + normal.sqrt() * z

    @torch.no_grad()
    def sample(self, sample_shape: Any = ()) -> Tensor:
        return self.expand(torch.Size(sample_shape) + self.loc.shape).draw()

    def expand(self, batch_shape: Any, _instance: Any = None) -> SkewedNoise:
        new = SkewedNoise.__new__(SkewedNoise)
        new.loc, new.shares = self.loc.expand(batch_shape), self.shares
        new.shift, new.normal, new.total = self.shift, self.normal, self.total
        super(SkewedNoise, new).__init__(new.loc.shape, validate_args=False)
        return new


def shape_variance(shares: Tensor, skew: Tensor) -> Tensor:
    r"""
    The variance of the noise where :math:`\sigma = 1`, `(...)`.

    :param shares: :math:`\pi`, `(..., K)`.
    :param skew: :math:`\delta`, `(..., K)`.
    """
    one = torch.ones((*shares.shape[:-1], 1), dtype=shares.dtype, device=shares.device)
    return SkewedNoise(torch.zeros_like(one), one, shares, skew).variance.squeeze(-1)


class OwensT(torch.autograd.Function):
    """Owen's T function, by SciPy, with its gradient."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, a: Tensor) -> Tensor:
        """
        :param h: Where.
        :param a: Slope, of the same shape.
        """
        ctx.save_for_backward(h, a)
        return torch.from_numpy(scipy.special.owens_t(h.detach().cpu().numpy(), a.detach().cpu().numpy())).to(h)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """
        :param grads: The gradient of the result.
        """
        h, a = ctx.saved_tensors
        in_h = -torch.exp(-h.square() / 2) / math.sqrt(2 * math.pi) * torch.erf(a * h / math.sqrt(2)) / 2
        in_a = torch.exp(-h.square() * (1 + a.square()) / 2) / (2 * math.pi * (1 + a.square()))
        return grads[0] * in_h, grads[0] * in_a


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
