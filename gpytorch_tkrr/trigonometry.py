r"""Multiple-angle cosines and sines by doubling, their moments, and Gram matrices from moments.

A product of two sines is a difference of two cosines,

.. math:: \sin(i t) \sin(j t) = \tfrac12 [\cos((i - j) t) - \cos((i + j) t)],

so the Gram matrix of M sines is a Toeplitz minus a Hankel matrix of :math:`2 M + 1` cosine moments. All arrays are
function-major, `(functions, N)`: one function's values are contiguous. Nothing here carries gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor


def cosines(theta: Tensor, num: int, *, out: Tensor | None = None) -> Tensor:
    r"""
    :math:`\cos(k \theta_n)` for :math:`k = 0 \ldots \text{num} - 1`.

    :param theta: Angles `(N,)`.
    :param num: Number of cosines, at least 1.
    :param out: Optional float64 buffer `(num, N)`.
    :return: `(num, N)`, float64.

    Example:
        >>> import torch
        >>> from gpytorch_tkrr.trigonometry import cosines
        >>> theta = torch.tensor([0.0, 3.0], dtype=torch.float64)
        >>> torch.allclose(cosines(theta, 3), torch.stack([torch.ones(2), theta.cos(), (2 * theta).cos()]))
        True
    """
    theta = theta.detach().double()
    half = (num + 1) // 2  # sines are needed up to half the largest multiple only
    values = theta.new_empty(num, theta.shape[-1]) if out is None else out
    _harmonics(theta, values, theta.new_empty(half, theta.shape[-1]))
    return values


def harmonics(
    theta: Tensor, num_cosines: int, num_sines: int, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    r"""
    :math:`\cos(k \theta_n), k = 0 \ldots` and :math:`\sin(j \theta_n), j = 0 \ldots`; the first sine is identically 0.

    :param theta: Angles `(N,)`.
    :param num_cosines: Number of cosines, at least `num_sines` and at most `2 num_sines - 1` (or 1).
    :param num_sines: Number of sines, the zero function included.
    :param out: Optional float64 buffers `(num_cosines, N)` and `(num_sines, N)`.
    :return: `(num_cosines, N)` and `(num_sines, N)`, float64.
    """
    if not num_sines <= num_cosines <= max(2 * num_sines - 1, 1):
        raise ValueError(f"num_cosines must lie in [num_sines, 2 num_sines - 1]; got {num_cosines} and {num_sines}.")
    theta = theta.detach().double()
    num = theta.shape[-1]
    cos, sin = (theta.new_empty(num_cosines, num), theta.new_empty(num_sines, num)) if out is None else out
    _harmonics(theta, cos, sin)
    return cos, sin


def _harmonics(theta: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Fill `cos` (K, N) and `sin` (J, N), J <= K <= 2 J: multiples m + 1 ... 2 m are multiples 1 ... m turned by m."""
    cos[0] = 1.0
    sin[:1] = 0.0
    filled = 1  # multiples below `filled` are known
    while filled < cos.shape[0]:
        turn = max(filled - 1, 1)  # the angle added: its cosine and sine are taken afresh, so errors do not build up
        cos_turn, sin_turn = torch.cos(turn * theta), torch.sin(turn * theta)
        if filled == 1:
            cos[1] = cos_turn
            sin[1:2] = sin_turn
            filled = 2
            continue
        stop = min(2 * filled - 1, cos.shape[0])
        known = slice(1, stop - filled + 1)
        torch.mul(cos[known], cos_turn, out=cos[filled:stop])
        cos[filled:stop].addcmul_(sin[known], sin_turn, value=-1)
        stop_sin = min(stop, sin.shape[0])
        if stop_sin > filled:
            known = slice(1, stop_sin - filled + 1)
            torch.mul(sin[known], cos_turn, out=sin[filled:stop_sin])
            sin[filled:stop_sin].addcmul_(cos[known], sin_turn)
        filled = stop


def cosine_moments(theta: Tensor, weights: Tensor, num: int, *, batch_size: int = 4096) -> Tensor:
    r"""
    :math:`c_q(k) = \sum_n w_{qn} \cos(k \theta_n)`, in batches that stay in cache.

    :param theta: Angles `(N,)`.
    :param weights: `(..., N)`.
    :param num: Number of moments, :math:`k = 0 \ldots \text{num} - 1`.
    :param batch_size: Rows per batch.
    :return: `(..., num)`, float64.
    """
    weights = weights.detach().double()
    flat = weights.reshape(-1, weights.shape[-1])  # (Q, N)
    total = flat.new_zeros(flat.shape[0], num)
    for start in range(0, theta.shape[-1], batch_size):
        rows = slice(start, start + batch_size)
        total.addmm_(flat[:, rows], cosines(theta[rows], num).mT)
    return total.reshape(*weights.shape[:-1], num)


def sine_gram(moments: Tensor) -> Tensor:
    r"""
    :math:`\sum_n w_n \sin(i \theta_n) \sin(j \theta_n)`, :math:`i, j = 1 \ldots M`, from cosine moments of the weights.

    :param moments: `(..., 2 M + 1)`: :math:`\sum_n w_n \cos(k \theta_n)` for :math:`k = 0 \ldots 2 M`.
    :return: `(..., M, M)`.

    Example:
        >>> import torch
        >>> from gpytorch_tkrr.trigonometry import cosine_moments, sine_gram
        >>> theta = torch.linspace(0.1, 3.0, 50, dtype=torch.float64)
        >>> sines = torch.sin(theta * torch.arange(1, 5).unsqueeze(-1))
        >>> torch.allclose(sine_gram(cosine_moments(theta, torch.ones_like(theta), 9)), sines @ sines.mT)
        True
    """
    j = torch.arange(1, (moments.shape[-1] - 1) // 2 + 1, device=moments.device)
    difference, total = (j.unsqueeze(-1) - j).abs(), j.unsqueeze(-1) + j
    return (moments[..., difference] - moments[..., total]) / 2
