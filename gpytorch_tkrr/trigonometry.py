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


class SineSums:
    r"""
    Sums over rows for M sines, from few cosines and sines and more weights.

    Since :math:`\cos((m B + j) t) = 2 \cos(m B t) \cos(j t) - \cos((m B - j) t)`, all cosine moments of weights
    :math:`w` up to 2M follow from the sums of :math:`w \cos(m B t) \cos(j t)` with :math:`j \le B` only, and likewise
    :math:`\sum_n u_n \sin(j t_n)`. With few weights that is cheaper than evaluating 2M cosines.

    :param num_sines: M.
    :param num_weights: The number of weights w.
    :param num_targets: The number of weights u.
    :param num_blocks: How many blocks the 2M cosines are divided into.
    :param device: Where the sums live.
    """

    def __init__(self, num_sines: int, num_weights: int, num_targets: int, num_blocks: int, device: torch.device):
        self.num_sines, self.num_weights, self.num_targets = num_sines, num_weights, num_targets
        self.block = -(-2 * num_sines // num_blocks)  # B
        self.num_blocks = -(-2 * num_sines // self.block)
        self.num_sine_blocks = -(-num_sines // self.block)
        size = self.num_blocks * num_weights + (self.num_sine_blocks - 1) * num_targets
        self._with_cosines = torch.zeros(self.block + 1, size, dtype=torch.float64, device=device)
        self._with_sines = torch.zeros(self.block, num_targets, dtype=torch.float64, device=device)
        self._buffers: tuple[Tensor, Tensor, Tensor] | None = None

    def weights(self, num_rows: int) -> Tensor:
        """
        Where the caller puts the weights w of the next rows, `(num_weights, num_rows)`.

        :param num_rows: At most as many as the first time.
        """
        if self._buffers is None:
            total = self._with_cosines
            self._buffers = (
                total.new_empty(self.block + 1, num_rows),
                total.new_empty(self.block, num_rows),
                total.new_empty(total.shape[1], num_rows),
            )
        return self._buffers[2][: self.num_weights, :num_rows]

    def add(self, theta: Tensor, targets: Tensor) -> None:
        """
        Add rows; their weights w have been put into :meth:`weights`.

        :param theta: Angles `(n,)`.
        :param targets: Weights u, `(num_targets, n)`.
        """
        assert self._buffers is not None
        cos, sin, products = (buffer[:, : theta.shape[0]] for buffer in self._buffers)
        _harmonics(theta, cos, sin)
        for m in range(1, self.num_blocks):
            turned = products[m * self.num_weights : (m + 1) * self.num_weights]
            turn = cos[-1] if m == 1 else torch.cos(m * self.block * theta)
            torch.mul(products[: self.num_weights], turn, out=turned)
        start = self.num_blocks * self.num_weights
        for m in range(1, self.num_sine_blocks):
            turned = products[start : start + self.num_targets]
            turn = sin[-1] if m == 1 else torch.sin(m * self.block * theta)
            torch.mul(targets, turn, out=turned)
            start += self.num_targets
        self._with_cosines.addmm_(cos, products.mT)
        self._with_sines.addmm_(sin, targets.mT)

    def cosine_moments(self) -> Tensor:
        r""":math:`\sum_n w_n \cos(k t_n)` for :math:`k = 0 \ldots 2 M`, `(2 M + 1, num_weights)`."""
        blocks = self._with_cosines[:, : self.num_blocks * self.num_weights]
        blocks = blocks.reshape(self.block + 1, self.num_blocks, self.num_weights)
        total = blocks[:, 0]
        for m in range(1, self.num_blocks):
            mirrored = total[(m - 1) * self.block : m * self.block].flip(0)  # k = m B - 1, ..., m B - B
            total = torch.cat([total, 2 * blocks[1:, m] - mirrored])
        return total[: 2 * self.num_sines + 1]

    def sine_sums(self) -> Tensor:
        r""":math:`\sum_n u_n \sin(j t_n)` for :math:`j = 1 \ldots M`, `(M, num_targets)`."""
        blocks = self._with_cosines[:, self.num_blocks * self.num_weights :]
        blocks = blocks.reshape(self.block + 1, self.num_sine_blocks - 1, self.num_targets)
        total = torch.cat([torch.zeros_like(self._with_sines[:1]), self._with_sines])  # j = 0 ... B
        for m in range(1, self.num_sine_blocks):
            mirrored = total[(m - 1) * self.block : m * self.block].flip(0)
            total = torch.cat([total, 2 * blocks[1:, m - 1] - mirrored])
        return total[1 : self.num_sines + 1]


def count_blocks(num_sines: int, num_weights: int) -> int:
    """
    The cheapest number of blocks of :class:`SineSums`, by the number of passes over the rows.

    :param num_sines: M.
    :param num_weights: The number of weights w.
    """
    return min(range(1, 9), key=lambda q: 4 * num_sines / q + q * num_weights)


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
