"""Bessel functions with the gradients that torch and scipy leave out."""

from __future__ import annotations

import math
from typing import Any

import scipy.special
import torch
from torch import Tensor


class _ScaledBessel(torch.autograd.Function):
    """`scipy.special.ive` with its derivative in the argument; the derivative is built from itself, to any order."""

    @staticmethod
    def forward(ctx: Any, order: Tensor, a: Tensor) -> Tensor:
        ctx.save_for_backward(order, a)
        values = scipy.special.ive(order.detach().cpu().numpy(), a.detach().cpu().numpy())
        return torch.as_tensor(values, dtype=torch.float64, device=a.device)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, Tensor]:
        order, a = ctx.saved_tensors
        neighbours = _ScaledBessel.apply(order - 1, a) + _ScaledBessel.apply(order + 1, a)
        slope = neighbours / 2 - _ScaledBessel.apply(order, a)
        return None, grad_outputs[0] * slope


def scaled_bessel(order: Tensor, a: Tensor) -> Tensor:
    r"""
    The exponentially scaled modified Bessel function of the first kind, :math:`e^{-a} I_j(a)`.

    Differentiable in `a` to any order, by
    :math:`\frac{d}{da} e^{-a} I_j = \tfrac12 e^{-a} (I_{j-1} + I_{j+1}) - e^{-a} I_j`.

    :param order: Integer orders :math:`j`, any shape that broadcasts with `a`.
    :param a: Arguments :math:`a \ge 0`.
    :return: Values of the broadcast shape, float64.

    Example:
        >>> import torch
        >>> from gpytorch_tkrr.features.bessel import scaled_bessel
        >>> scaled_bessel(torch.tensor([0, 1]), torch.tensor(2.0))
        tensor([0.3085, 0.2153], dtype=torch.float64)
    """
    order, a = torch.broadcast_tensors(order.to(a.device), a.double())
    return _ScaledBessel.apply(order, a)


def periodic_variances(a: Tensor, num_harmonics: int) -> Tensor:
    r"""
    The cosine coefficients of GPyTorch's periodic kernel, whose lengthscale is not squared:

    .. math:: \exp\!\left(-2 \sin^2(\pi t / p) / \ell\right) = \sum_{j \ge 0} q_j \cos(2 \pi j t / p), \qquad
        q_0 = e^{-a} I_0(a), \quad q_j = 2 e^{-a} I_j(a), \quad a = 1 / \ell.

    They are positive and sum to one.

    :param a: :math:`a = 1 / \ell`, shape `(*batch,)`.
    :param num_harmonics: J, the highest harmonic.
    :return: :math:`q_0 \ldots q_J`, shape `(*batch, J + 1)`, float64, differentiable in `a`.
    """
    order = torch.arange(num_harmonics + 1, device=a.device)
    twice = torch.where(order == 0, 1.0, 2.0).double()
    return twice * scaled_bessel(order, a.unsqueeze(-1))


def count_harmonics(a: Tensor, tol: float = 1e-12) -> int:
    r"""
    The smallest J with :math:`\sum_{j > J} q_j \le` `tol` for every entry of `a`; see :func:`periodic_variances`.

    :param a: :math:`a = 1 / \ell`, any shape.
    :param tol: The mass that may be left out, as a fraction of the whole.

    Example:
        >>> import torch
        >>> from gpytorch_tkrr.features.bessel import count_harmonics
        >>> count_harmonics(torch.tensor(1.0))
        11
    """
    largest = a.detach().max().double()
    bound = 16
    while True:
        variances = periodic_variances(largest, bound)
        tails = variances.flip(0).cumsum(0).flip(0)  # mass of j, j + 1, ..., bound; what lies beyond is far smaller
        if variances[-1] <= tol * 1e-3 / (bound + 1):
            return max(int((tails > tol).sum()) - 1, 0)
        bound *= 2


class _BesselJ0(torch.autograd.Function):
    """`scipy.special.j0` with its derivative; `torch.special.bessel_j0` has none and errs by 1e-7 near x = 6."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.as_tensor(scipy.special.j0(x.detach().cpu().numpy()), device=x.device)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return -grad_outputs[0] * torch.as_tensor(scipy.special.j1(x.cpu().numpy()), device=x.device)


def bessel_j0(x: Tensor) -> Tensor:
    """
    The Bessel function of the first kind of order zero, once differentiable.

    :param x: Arguments, any shape.
    """
    return _BesselJ0.apply(x)


def log_bessel_k(order: Tensor, x: Tensor) -> Tensor:
    r"""
    :math:`\log (x^\nu K_\nu(x))` of the modified Bessel function of the second kind, differentiable in both arguments.

    With :math:`\mu = |\nu|` and :math:`C = \sqrt{x^2 + \mu^2}`, the integrand of
    :math:`K_\nu(x) = \tfrac12 \int e^{-x \cosh t + \mu t} dt` is centred at its peak:

    .. math:: K_\nu(x) = \tfrac12 e^{-C} \Bigl(\frac{\mu + C}{x}\Bigr)^{\mu}
        \int \exp\bigl(-(C - \mu) (\cosh u - 1) - \mu (e^u - 1 - u)\bigr) du.

    The integral is a trapezoidal sum, which converges exponentially here, over the interval outside of which the
    integrand is below :math:`e^{-40}`. The power of x is carried along because :math:`x^\nu K_\nu(x)` tends to
    :math:`2^{\nu - 1} \Gamma(\nu)` at :math:`x = 0` for :math:`\nu > 0`; for :math:`\nu \le 0` it is infinite there.

    :param order: Real orders :math:`\nu`, any shape that broadcasts with `x`.
    :param x: Arguments :math:`x \ge 0`.
    :return: Values of the broadcast shape, float64.

    Example:
        >>> import torch
        >>> from gpytorch_tkrr.features.bessel import log_bessel_k
        >>> log_bessel_k(torch.tensor(0.5), torch.tensor(2.0)).exp() / 2**0.5  # sqrt(pi / 4) exp(-2)
        tensor(0.1199, dtype=torch.float64)
    """
    order, x = torch.broadcast_tensors(order.double(), x.double())
    at_zero = x == 0
    x = torch.where(at_zero, torch.ones_like(x), x)
    mu = order.abs()
    peak = torch.hypot(x, mu)  # C
    gap = x.square() / (peak + mu)  # C - mu, without cancellation

    with torch.no_grad():
        right = torch.acosh(1 + 40 / peak)  # the exponent has fallen by 40 at u = right and u = -left
        left = torch.minimum(torch.acosh(1 + 40 / gap), 40 / mu + torch.sqrt(80 / mu))
        step = torch.clamp(0.7 / peak.sqrt(), max=0.25)
        num_intervals = int(torch.ceil((left + right) / step).max()) if x.numel() else 1
        width = (left + right) / num_intervals
        nodes = torch.arange(num_intervals + 1, device=x.device, dtype=torch.float64)
        u = nodes * width.unsqueeze(-1) - left.unsqueeze(-1)  # (..., nodes)
        even, odd = 2 * torch.sinh(u / 2).square(), torch.expm1(u) - u

    log_integral = torch.logsumexp(-gap.unsqueeze(-1) * even - mu.unsqueeze(-1) * odd, dim=-1) + torch.log(width / 2)
    value = (order - mu) * torch.log(x) - peak + mu * torch.log(mu + peak) + log_integral
    positive = torch.where(order > 0, order, torch.ones_like(order))
    limit = torch.where(order > 0, (positive - 1) * math.log(2) + torch.lgamma(positive), torch.inf)
    return torch.where(at_zero, limit, value)
