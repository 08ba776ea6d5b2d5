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
        >>> from gpytorch_tkrr.bases.trigonometry import cosines
        >>> theta = torch.tensor([0.0, 3.0], dtype=torch.float64)
        >>> torch.allclose(cosines(theta, 3), torch.stack([torch.ones(2), theta.cos(), (2 * theta).cos()]))
        True
    """
    theta = theta.detach().double()
    values = theta.new_empty(num, theta.shape[-1]) if out is None else out
    _harmonics(theta, values, theta.new_empty(num // 2, theta.shape[-1]))  # sines are needed up to half the multiples
    return values


def harmonics(
    theta: Tensor, num_cosines: int, num_sines: int, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    r"""
    :math:`\cos(k \theta_n), k = 0 \ldots` and :math:`\sin(j \theta_n), j = 1 \ldots` together.

    :param theta: Angles `(N,)`.
    :param num_cosines: Number of cosines, between `num_sines + 1` and `2 num_sines + 1`.
    :param num_sines: Number of sines.
    :param out: Optional float64 buffers `(num_cosines, N)` and `(num_sines, N)`.
    :return: `(num_cosines, N)` and `(num_sines, N)`, float64.
    """
    if not num_sines + 1 <= num_cosines <= 2 * num_sines + 1:
        raise ValueError(f"num_cosines must lie in [num_sines + 1, 2 num_sines + 1]; got {num_cosines}, {num_sines}.")
    theta = theta.detach().double()
    num = theta.shape[-1]
    cos, sin = (theta.new_empty(num_cosines, num), theta.new_empty(num_sines, num)) if out is None else out
    _harmonics(theta, cos, sin)
    return cos, sin


def _harmonics(theta: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Fill cosines 0 ... K - 1 and sines 1 ... J, K <= 2 J + 1, by turning known multiples by the largest of them."""
    cos[0] = 1.0
    if cos.shape[0] > 1:
        torch.cos(theta, out=cos[1])
        torch.sin(theta, out=sin[0])
    known = 1  # the largest multiple that is filled
    while known < cos.shape[0] - 1:
        turn = min(known, sin.shape[0])  # rotations: errors grow with the multiple, no faster
        first, num = known + 1 - turn, min(2 * turn - known, cos.shape[0] - 1 - known)
        new = cos[known + 1 : known + 1 + num]
        torch.mul(cos[first : first + num], cos[turn], out=new)
        new.addcmul_(sin[first - 1 : first - 1 + num], sin[turn - 1], value=-1)
        num_sines = min(num, sin.shape[0] - known)
        if num_sines > 0:
            new = sin[known : known + num_sines]
            torch.mul(sin[first - 1 : first - 1 + num_sines], cos[turn], out=new)
            new.addcmul_(cos[first : first + num_sines], sin[turn - 1])
        known += num


def sine_series(
    theta: Tensor, coefficients: Tensor, *, out: Tensor, buffers: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    r"""
    :math:`\sum_{j=1}^M a_{rj} \sin(j t_n)`, from half as many sines and cosines:
    :math:`\sin((B + j) t) = 2 \sin(B t) \cos(j t) - \sin((B - j) t)` with :math:`B = \lceil M / 2 \rceil`.

    :param theta: Angles `(n,)`.
    :param coefficients: a, `(R, M)`.
    :param out: Where to put the sums, `(R, n)`.
    :param buffers: Optional float64 buffers `(B + 1, n)` and `(B, n)`.
    :return: `out`.
    """
    block = -(-coefficients.shape[1] // 2)
    low, high = coefficients[:, :block].clone(), coefficients[:, block:]
    mirrored = min(high.shape[1], block - 1)  # sin(0) drops out
    low[:, block - 1 - mirrored : block - 1] -= high[:, :mirrored].flip(1)
    cos, sin = harmonics(theta, block + 1, block, out=buffers)
    torch.mm(low, sin, out=out)
    return out.addcmul_((2 * high) @ cos[1 : high.shape[1] + 1], sin[-1])
