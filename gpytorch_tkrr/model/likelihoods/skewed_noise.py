r"""The distribution of skewed noise: a mixture of skewed normal distributions of several widths.

.. math:: y = f + \sigma \tau_k (\delta_k |h| + \epsilon), \qquad h, \epsilon \sim N(0, 1), \quad P(k) = \pi_k

Given k this is a skewed normal distribution (Azzalini 1985), whose distribution function is made of Owen's T.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import scipy.special
import torch
from torch import Tensor

#: Widths :math:`\tau` of the components, in units of the narrowest: each is :data:`RATIO` times the one before it.
RATIO = 2.0
WIDTHS = tuple(RATIO**k for k in range(6))


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
        >>> from gpytorch_tkrr.model.likelihoods.skewed_noise import SkewedNoise
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
