"""A posterior over functions, and its covariance as a linear operator that is evaluated when needed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from linear_operator.operators import (
    AddedDiagLinearOperator,
    DiagLinearOperator,
    LinearOperator,
)
from linear_operator.utils.memoize import cached
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..bases.basis import Basis
from ..cp.format import WeightFormat
from ..cp.weights import CP
from ..operators.operator import HilbertLinearOperator, diagonal_for

#: Values of all components of all functions that are held at once: 256 MB.
MAX_ENTRIES = 2**25

#: Rows whose covariance root is held at a time where only variances or products are asked for.
CHUNK_ROWS = 1024


class Posterior(ABC):
    r"""
    What a model knows after a fit: S functions, draws or one solution, and parameters of the observation model for each
    of them. For CP weights :math:`f_s(x) = \sum_r \prod_d \phi_d(x_d)^\top a_{sdr}`. It knows functions, not kernels or
    data.

    :param bases: The basis of each mode.
    :param factors: Raw factors :math:`a`, D tensors `(S, K_d, M_d)`, float64, in the units of the targets.
    :param parameters: Parameters of the observation model by name, each `(S, ...)`, in the units of the targets.
    :param weights: The format of the factors, by default :class:`CP`.
    """

    #: Names the class in a `state_dict`.
    kind: ClassVar[str]

    def __init__(
        self,
        bases: Sequence[Basis],
        factors: Sequence[Tensor],
        parameters: Mapping[str, Tensor],
        weights: WeightFormat | None = None,
    ):
        self.bases, self.factors, self.parameters = list(bases), list(factors), dict(parameters)
        heights = [factor.shape[1] for factor in self.factors]
        weights = CP() if weights is None else weights
        self.format = weights.with_rank(weights.rank_of(heights))
        self._max_height = max(heights)

    @property
    def num_draws(self) -> int:
        """S."""
        return self.factors[0].shape[0]

    @property
    def rank(self) -> int:
        """R, or what takes its place in another format."""
        assert self.format.rank is not None
        return self.format.rank

    @property
    def device(self) -> torch.device:
        """Where the factors are."""
        return self.factors[0].device

    @property
    def noise(self) -> Tensor:
        """Noise variances `(S,)`, for observation models that have one."""
        return self.parameters["noise"]

    @property
    def has_covariance(self) -> bool:
        """Whether :meth:`root` is known."""
        return True

    def functions(self, x: Tensor) -> Tensor:
        """
        The values of all functions, without the mean module.

        :param x: Inputs `(..., n, D)`.
        :return: `(S, ..., n)`, float64, differentiable in `x`.
        """
        rows = x.reshape(-1, x.shape[-1])
        has_gradient = torch.is_grad_enabled() and x.requires_grad
        num_kept = 2 * x.shape[-1] if has_gradient else 1  # of each entry, for the gradient
        pieces = rows.split(max(MAX_ENTRIES // (self.num_draws * self._max_height * num_kept), 1))
        if len(pieces) == 1:
            values = self._functions(rows)
        elif has_gradient:  # computed again, piece by piece, in the backward pass
            values = torch.cat([checkpoint(self._functions, piece, use_reentrant=False) for piece in pieces], dim=-1)
        else:
            values = torch.cat([self._functions(piece) for piece in pieces], dim=-1)
        return values.reshape(self.num_draws, *x.shape[:-1])

    def _functions(self, x: Tensor) -> Tensor:
        """`(n, D)` -> `(S, n)`."""
        return self.format.functions(self.bases, self.factors, x)

    def mean(self, x: Tensor) -> Tensor:
        """
        The posterior mean without the mean module.

        :param x: Inputs `(..., n, D)`.
        :return: `(..., n)`, float64, differentiable in `x`.
        """
        return self.functions(x).mean(0)

    def root(self, x: Tensor) -> Tensor:
        """
        A root of the posterior covariance.

        :param x: Inputs `(..., n, D)`.
        :return: `(..., n, K)`, float64, differentiable in `x`.
        """
        return self.mean_and_root(x)[1]

    @abstractmethod
    def mean_and_root(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """
        :meth:`mean` and :meth:`root`, with all that they share computed once.

        :param x: Inputs `(..., n, D)`.
        """

    @abstractmethod
    def components(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """
        The posterior at single points, as an equal mixture of Gaussians.

        :param x: Inputs `(n, D)`.
        :return: Their means `(S, n)` and their variances `(S, n)`, None for zeros.
        """

    @abstractmethod
    def draw_weights(self, sample_shape: torch.Size) -> Tensor:
        r"""
        Draw z of whole functions :math:`\bar f(x) + r(x)^\top z`, with r the :meth:`root`.

        :param sample_shape: How many.
        :return: `(*sample_shape, K)`, float64.
        """

    @abstractmethod
    def to(self, device: torch.device, bases: Sequence[Basis]) -> Posterior:
        """
        The same posterior on another device, always float64.

        :param device: The device.
        :param bases: The bases, there.
        """

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Tensors and numbers that describe the posterior, for a `state_dict`."""

    @classmethod
    @abstractmethod
    def from_state(cls, state: dict[str, Any], bases: Sequence[Basis]) -> Posterior:
        """
        The posterior that :meth:`state` described.

        :param state: The description.
        :param bases: The bases.
        """


class PosteriorCovariance(LinearOperator):
    """
    The covariance of a posterior at given points, of low rank and never formed unless asked for.

    Variances and products with vectors go through the root in chunks of rows, so that memory does not grow with the
    number of points times the rank. All else forms the root and goes on with a
    :class:`~gpytorch_tkrr.operators.operator.HilbertLinearOperator`.

    :param x: Inputs `(..., n, D)`; results have their dtype.
    :param posterior: The posterior.
    """

    def __init__(self, x: Tensor, *, posterior: Posterior):
        super().__init__(x, posterior=posterior)
        self.x, self.posterior = x, posterior

    def _size(self) -> torch.Size:
        return torch.Size([*self.x.shape[:-1], self.x.shape[-2]])

    def _transpose_nonbatch(self) -> PosteriorCovariance:
        return self

    def _chunks(self) -> list[Tensor]:
        return list(self.x.split(CHUNK_ROWS, dim=-2))

    def _matmul(self, rhs: Tensor) -> Tensor:
        vector = rhs.dim() == 1
        rhs_ = (rhs.unsqueeze(-1) if vector else rhs).double()
        chunks = self._chunks()
        inner: Tensor | None = None
        for x, part in zip(chunks, rhs_.split(CHUNK_ROWS, dim=-2), strict=True):
            piece = self.posterior.root(x).mT @ part
            inner = piece if inner is None else inner + piece
        assert inner is not None
        product = torch.cat([self.posterior.root(x) @ inner for x in chunks], dim=-2).to(self.dtype)
        return product.squeeze(-1) if vector else product

    def _diagonal(self) -> Tensor:
        parts = [self.posterior.root(x).square().sum(-1) for x in self._chunks()]
        return torch.cat(parts, dim=-1).to(self.dtype)

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        if isinstance(row_index, slice) and row_index == col_index:
            return PosteriorCovariance(self.x[(*batch_indices, row_index, slice(None))], posterior=self.posterior)
        return self.low_rank()._getitem(row_index, col_index, *batch_indices)

    def _get_indices(self, row_index: Tensor, col_index: Tensor, *batch_indices: Tensor) -> Tensor:
        return self.low_rank()._get_indices(row_index, col_index, *batch_indices)

    def _expand_batch(self, batch_shape: torch.Size | list[int]) -> PosteriorCovariance:
        return PosteriorCovariance(self.x.expand(*batch_shape, *self.x.shape[-2:]), posterior=self.posterior)

    def _permute_batch(self, *dims: int) -> PosteriorCovariance:
        return PosteriorCovariance(self.x.permute(*dims, -2, -1), posterior=self.posterior)

    def _unsqueeze_batch(self, dim: int) -> PosteriorCovariance:
        return PosteriorCovariance(self.x.unsqueeze(dim), posterior=self.posterior)

    def _mul_constant(self, other: Tensor) -> LinearOperator:
        return self.low_rank()._mul_constant(other)

    def _prod_batch(self, dim: int) -> LinearOperator:
        return self.low_rank()._prod_batch(dim)

    @cached(name="low_rank")
    def low_rank(self) -> HilbertLinearOperator:
        """The same covariance with its root formed."""
        root = self.posterior.root(self.x)
        return HilbertLinearOperator(root, torch.ones(root.shape[-1], dtype=self.dtype, device=root.device))

    @cached
    def to_dense(self) -> Tensor:
        root = self.posterior.root(self.x)
        return (root @ root.mT).to(self.dtype)

    def root_decomposition(self, method: str | None = None) -> LinearOperator:
        return self.low_rank().root_decomposition(method=method)

    def zero_mean_mvn_samples(self, num_samples: int) -> Tensor:
        return self.low_rank().zero_mean_mvn_samples(num_samples)

    def add_diagonal(self, diag: Tensor) -> LinearOperator:
        return self + diagonal_for(self, diag)

    def __add__(self, other: Any) -> LinearOperator:
        if isinstance(other, DiagLinearOperator):
            return NoisyPosteriorCovariance(self, other)
        return super().__add__(other)


class NoisyPosteriorCovariance(AddedDiagLinearOperator):
    """
    The covariance of a posterior plus a diagonal, whose solves and log determinants are exact for any number of points.

    :param linear_ops: A :class:`PosteriorCovariance` and a diagonal.
    """

    @cached(name="evaluated")
    def evaluated(self) -> LinearOperator:
        """The same covariance with the root of its posterior part formed."""
        return self._linear_op.low_rank() + self._diag_tensor

    def _solve(self, rhs: Tensor, preconditioner: Any = None, num_tridiag: int | None = 0) -> Tensor:
        return self.evaluated()._solve(rhs)

    def solve(self, right_tensor: Tensor, left_tensor: Tensor | None = None) -> Tensor:
        return self.evaluated().solve(right_tensor, left_tensor)

    def inv_quad_logdet(
        self, inv_quad_rhs: Tensor | None = None, logdet: bool | None = False, reduce_inv_quad: bool | None = True
    ) -> tuple[Tensor | None, Tensor | None]:
        return self.evaluated().inv_quad_logdet(inv_quad_rhs, logdet, reduce_inv_quad)

    def inv_quad(self, inv_quad_rhs: Tensor, reduce_inv_quad: bool = True) -> Tensor:
        return self.evaluated().inv_quad(inv_quad_rhs, reduce_inv_quad)

    def logdet(self) -> Tensor:
        return self.evaluated().logdet()

    def root_decomposition(self, method: str | None = None) -> LinearOperator:
        return self.evaluated().root_decomposition(method=method)

    def zero_mean_mvn_samples(self, num_samples: int) -> Tensor:
        return self.evaluated().zero_mean_mvn_samples(num_samples)

    def mul(self, other: Any) -> LinearOperator:
        return self.evaluated().mul(other)

    def _sum_batch(self, dim: int) -> LinearOperator:
        return LinearOperator._sum_batch(self, dim)

    def __add__(self, other: Any) -> LinearOperator:
        if isinstance(other, DiagLinearOperator):
            return self.__class__(self._linear_op, self._diag_tensor + other)
        return AddedDiagLinearOperator(self._linear_op + other, self._diag_tensor)
