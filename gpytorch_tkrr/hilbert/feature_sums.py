r"""All that a Gaussian process on fixed features needs of its data.

With :math:`y = c 1 + \Phi a + \epsilon`, :math:`a \sim N(0, V)`, :math:`\epsilon \sim N(0, s^2 W^{-1})` and a diagonal
matrix W of row weights, by default ones, the marginal likelihood and the posterior of a depend on the data through

.. math:: \Phi^\top W \Phi, \quad \Phi^\top W y, \quad \Phi^\top W 1, \quad y^\top W y, \quad 1^\top W y, \quad
    1^\top W 1, \quad \log |W|, \quad N,

which are collected in one pass over the rows. Afterwards v, :math:`s^2` and c are free.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import reduce
from typing import Any

import torch
from gpytorch.kernels import Kernel
from torch import Tensor, nn

from ..bases.covariance import Covariance
from ..data.parallel import ONE_PROCESS, Processes
from ..data.source import Source, checked_batches
from ..errors import InputError
from ..features.expansion import Expansion, Scaled, Sum
from ..operators.capacitance import capacitance_terms
from ..operators.operator import HilbertLinearOperator
from .kernel import HilbertKernel
from .prediction import by_functions, split_covariance
from .weights import WeightPosterior, weight_posterior

#: Numbers held at a time as features of a batch of rows.
CHUNK_NUMBERS = 1 << 22


class FeatureSums(nn.Module):
    r"""
    Sums over the rows of a source, float64, for targets from which a number near their mean is taken first.

    :param gram: :math:`\Phi^\top W \Phi`, `(M, M)`.
    :param rhs: :math:`\Phi^\top W (y - y_0)`, `(M,)`.
    :param ones: :math:`\Phi^\top W 1`, `(M,)`.
    :param square: :math:`\sum_n w_n (y_n - y_0)^2`.
    :param total: :math:`\sum_n w_n (y_n - y_0)`.
    :param count: N.
    :param mass: :math:`\sum_n w_n`.
    :param log_weights: :math:`\sum_n \log w_n`.
    :param shift: :math:`y_0`.
    :param rows: The rows of inputs at the edges of the data: with the smallest or largest value of a column, `(P, D)`.
    :param basis: Which functions were summed: centre and half width of the box, and number of sines, `(3, D)`.
    """

    NAMES = ("gram", "rhs", "ones", "square", "total", "count", "mass", "log_weights", "shift", "rows", "basis")
    gram: Tensor
    rhs: Tensor
    ones: Tensor
    square: Tensor
    total: Tensor
    count: Tensor
    mass: Tensor
    log_weights: Tensor
    shift: Tensor
    rows: Tensor
    basis: Tensor

    def __init__(self, *sums: Tensor):
        super().__init__()
        for name, value in zip(self.NAMES, sums, strict=True):
            self.register_buffer(name, value)

    @classmethod
    def empty(cls) -> FeatureSums:
        """Sums that are to be loaded from a `state_dict`."""
        return cls(*(torch.zeros((0,) * dims, dtype=torch.float64) for dims in (2, 1, 1, 0, 0, 0, 0, 0, 0, 2, 2)))

    @property
    def num_rows(self) -> int:
        """N."""
        return int(self.count)

    def _apply(self, fn: Any, recurse: bool = True) -> FeatureSums:
        """Move to another device; stay in float64."""

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(move, recurse)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        if f"{prefix}count" in state_dict:  # files of older versions have no weights, and do not say which basis
            state_dict.setdefault(f"{prefix}mass", state_dict[f"{prefix}count"])
            state_dict.setdefault(f"{prefix}log_weights", torch.zeros_like(state_dict[f"{prefix}count"]))
        state_dict.setdefault(f"{prefix}basis", self.basis.new_zeros(0, 0))
        for name in self.NAMES:
            if prefix + name in state_dict:
                value, old = state_dict[prefix + name], getattr(self, name)
                if value.shape != old.shape:
                    setattr(self, name, old.new_empty(value.shape))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def mean_missing(self, expansion: Expansion, rows: Tensor) -> Tensor:
        r"""
        The weighted mean over all rows of the variance that the functions do not represent, `(..., 1)`.

        Where :math:`k(x, x)` depends on x, a product of such a kernel with a stationary one is judged by the rows at
        the edges of the data only.

        :param expansion: The functions that were summed, with their present variances.
        :param rows: The columns of :attr:`rows` that the expansion sees.
        """
        missing = _mean_missing(expansion, self.gram / self.mass, rows)
        return torch.where(missing > 0, missing, torch.zeros_like(missing))

    def centered(self, constant: Tensor) -> tuple[Tensor, Tensor]:
        r"""
        :math:`\Phi^\top W (y - c)`, `(M,)`, and :math:`\sum_n w_n (y_n - c)^2`.

        :param constant: c, a scalar.
        """
        change = constant.double() - self.shift
        return self.rhs - change * self.ones, self.square - 2 * change * self.total + change**2 * self.mass

    def log_marginal(self, prior: Covariance, constant: Tensor, noise: Tensor) -> Tensor:
        r"""
        :math:`\log N(y; c 1, \Phi V \Phi^\top + s^2 W^{-1})`, differentiable in all arguments.

        :param prior: V, of M weights.
        :param constant: c.
        :param noise: :math:`s^2`.
        """
        noise = noise.double()
        rhs, square = self.centered(constant)
        target = prior.mix(rhs.unsqueeze(-2)).mT  # (M, 1)
        logdet, fitted = capacitance_terms(prior.variances / noise, prior.mix_gram(self.gram), target)
        misfit = (square - fitted.squeeze(-1)) / noise + self.count * (2 * math.pi * noise).log()
        return -(misfit + logdet - self.log_weights) / 2

    def posterior(self, prior: Covariance, constant: Tensor, noise: Tensor) -> WeightPosterior:
        """
        The posterior of the weights.

        :param prior: V, of M weights.
        :param constant: c.
        :param noise: :math:`s^2`.
        """
        noise = noise.double()
        rhs, _ = self.centered(constant)
        return weight_posterior(prior, self.gram / noise, rhs / noise)


def _mean_missing(expansion: Expansion, gram: Tensor, rows: Tensor) -> Tensor:
    """As :meth:`FeatureSums.mean_missing`, from the mean `(M, M)` of products of the functions."""
    if isinstance(expansion, Scaled):
        return expansion.kernel.outputscale.double().unsqueeze(-1) * _mean_missing(expansion.base, gram, rows)
    if isinstance(expansion, Sum):
        sizes = [part.num_functions for part in expansion.parts]
        blocks = [piece.split(sizes, dim=-1)[i] for i, piece in enumerate(gram.split(sizes, dim=-2))]
        return reduce(torch.add, map(_mean_missing, expansion.parts, blocks, [rows] * len(blocks)))
    exact, prior = expansion.prior_variance(rows), expansion.covariance()
    if exact.shape[-1] == 1:
        squares = prior.mix_gram(gram).diagonal(dim1=-2, dim2=-1)
        return exact - (squares * prior.variances).sum(-1, keepdim=True)
    return (exact - prior.quadratic(expansion.features(rows))).mean(-1, keepdim=True)


@torch.no_grad()
def collect_sums(kernel: Kernel, source: Source, processes: Processes = ONE_PROCESS) -> FeatureSums:
    """
    The sums of a kernel's features, in one pass over the rows.

    :param kernel: Evaluates to a :class:`~gpytorch_tkrr.operators.operator.HilbertLinearOperator`.
    :param source: The rows of this process.
    :param processes: The processes that take part; the sums are those of all of them.
    """
    device = next(kernel.parameters()).device
    own: list[FeatureSums] = []

    def collect() -> tuple[float, Tensor] | None:
        for sums in _running_sums(kernel, source, device):
            own[:] = [sums]
        return (float(own[0].shift), own[0].rows.cpu()) if own else None

    facts = [fact for fact in processes.collect(collect) if fact is not None]
    if not facts:
        raise InputError("There are no rows of data.")
    rows = _at_edges(torch.cat([rows for _, rows in facts])).to(device)
    shift = torch.tensor(facts[0][0], dtype=torch.float64, device=device)
    size = low_rank_part(kernel, rows).num_features
    if own:
        (rhs, square), total = own[0].centered(shift), own[0].total - (shift - own[0].shift) * own[0].mass
        parts = [own[0].gram, rhs, own[0].ones, square, total, own[0].count, own[0].mass, own[0].log_weights]
    else:
        parts = _zeros(size, shift)
    packed = processes.sum(torch.cat([part.reshape(-1) for part in parts]))
    parts = [
        piece.reshape_as(part) for piece, part in zip(packed.split([p.numel() for p in parts]), parts, strict=True)
    ]
    part = hilbert_part(kernel)
    return FeatureSums(
        *parts, shift, rows, part.basis(rows.shape[-1] if part.active_dims is None else len(part.active_dims))
    )


def _running_sums(kernel: Kernel, source: Source, device: torch.device) -> Iterator[FeatureSums]:
    """The sums so far after each batch; always the same object."""
    sums: FeatureSums | None = None
    for batch in checked_batches(source, device=device):
        if sums is None:
            size = low_rank_part(kernel, batch.x[:1]).num_features
            sums = FeatureSums(*_zeros(size, batch.y), batch.y.mean(), batch.x[:1], batch.x.new_zeros(0, 0))
        weight = torch.ones_like(batch.y) if batch.weight is None else batch.weight
        pieces = (part.split(max(CHUNK_NUMBERS // len(sums.rhs), 1)) for part in (batch.x, batch.y, weight))
        for x, y, w in zip(*pieces, strict=True):
            low_rank, residual = low_rank_part(kernel, x), y - sums.shift
            sums.gram += low_rank.feature_gram(None if batch.weight is None else w)
            rhs, ones = low_rank.feature_sums(torch.stack([w * residual, w], dim=-1)).unbind(-1)
            sums.rhs += rhs
            sums.ones += ones
            sums.square += residual @ (w * residual)
            sums.total += residual @ w
            sums.count += len(y)
            sums.mass += w.sum()
            sums.log_weights += w.log().sum()
        sums.rows = _at_edges(torch.cat([sums.rows, batch.x]))
        yield sums


def _zeros(size: int, like: Tensor) -> list[Tensor]:
    """Sums before the first row, without those that are not added: for M functions."""
    shapes: list[tuple[int, ...]] = [(size, size), (size,), (size,), (), (), (), (), ()]
    return [like.new_zeros(shape) for shape in shapes]


def _at_edges(x: Tensor) -> Tensor:
    """For each column of x `(n, D)` the rows with its smallest and its largest value, at most 2 D of them."""
    return x[torch.cat([x.argmin(0), x.argmax(0)]).unique()]


def low_rank_part(kernel: Kernel, x: Tensor) -> HilbertLinearOperator:
    """
    Features and variances of a kernel at rows of training data, whatever mode the kernel is in.

    :param kernel: A :class:`~gpytorch_tkrr.HilbertKernel`, scaled or not.
    :param x: Inputs `(n, D)`.
    """
    modules = [module for module in kernel.modules() if not module.training]
    try:
        kernel.train()
        with by_functions(kernel), hilbert_part(kernel).as_summed():
            return split_covariance(kernel(x).evaluate_kernel())[0]
    finally:
        for module in modules:
            module.training = False


def hilbert_part(kernel: Kernel) -> HilbertKernel:
    """
    The HilbertKernel inside a kernel.

    :param kernel: A HilbertKernel, scaled or not.
    """
    return next(module for module in kernel.modules() if isinstance(module, HilbertKernel))
