r"""Linear operators :math:`\Phi V \Phi^\top` and :math:`\Phi V \Phi^\top + D`, exact and deterministic at any size.

Only :math:`v` and the noise change while a Gaussian process is trained, so the Gram matrix :math:`\Phi^\top \Phi` is
computed once. Everything after it costs :math:`O(M^3)`, with two passes over :math:`\Phi` for the targets. All sums and
factorisations are in float64; what is returned has the user's dtype.
"""

from __future__ import annotations

import warnings
from functools import reduce
from typing import Any

import torch
from gpytorch.settings import observation_nan_policy
from linear_operator import settings
from linear_operator.operators import (
    AddedDiagLinearOperator,
    ConstantDiagLinearOperator,
    DiagLinearOperator,
    LinearOperator,
    LowRankRootLinearOperator,
    MatmulLinearOperator,
    RootLinearOperator,
)
from linear_operator.utils.getitem import _equal_indices, _is_noop_index
from linear_operator.utils.memoize import cached
from torch import Tensor

from ..bases.covariance import Covariance, block_diagonal
from ..errors import DenseFallbackWarning, SizeError
from ..features.expansion import concatenate
from ..linalg import robust_cholesky
from .capacitance import capacitance_factor, capacitance_terms, root
from .gram import weighted_product
from .lazy_features import LazyFeatures
from .lazy_operators import multiply
from .observer import Observer, SumObserver

#: A likelihood of more rows is not computed from a dense matrix.
MAX_DENSE_ROWS = 5000


def diagonal_for(operator: LinearOperator, diag: Tensor) -> DiagLinearOperator:
    """
    A diagonal operator that can be added to another one.

    :param operator: The other one, `(..., n, n)`.
    :param diag: `(..., n)`, or one number for all of the diagonal, `()` or `(..., 1)`.
    """
    if diag.dim() == 0 or diag.shape[-1] == 1:
        diag = diag.unsqueeze(-1) if diag.dim() == 0 else diag
        return ConstantDiagLinearOperator(diag, diag_shape=operator.shape[-1])
    return DiagLinearOperator(diag.expand(*torch.broadcast_shapes(operator.shape[:-1], diag.shape)))


class HilbertLinearOperator(LinearOperator):
    r"""
    The covariance matrix :math:`\Phi V \Phi^\top` of a reduced-rank kernel with
    :math:`V = T \operatorname{diag}(v) T^\top`.

    :param features: :math:`\Phi`, `(..., N, M)`; its batch shape need only broadcast with that of `variances`. Those of
        fixed rows may be :class:`~gpytorch_tkrr.operators.lazy_features.LazyFeatures`.
    :param variances: :math:`v \ge 0`, `(..., M)`. Its dtype is that of the operator.
    :param mixing: T, `(..., M, M)`, float64; None for the identity.
    :param observer: Hears of the noise that is added, and of the residuals.

    Example:
        >>> import torch
        >>> from gpytorch_tkrr.operators.operator import HilbertLinearOperator
        >>> covariance = HilbertLinearOperator(torch.eye(3)[:, :2], torch.tensor([1.0, 2.0]))
        >>> covariance.to_dense()
        tensor([[1., 0., 0.],
                [0., 2., 0.],
                [0., 0., 0.]])
        >>> covariance.add_jitter(1.0).logdet()  # by the M x M capacitance matrix
        tensor(1.7918)
    """

    def __init__(
        self,
        features: Tensor | LazyFeatures,
        variances: Tensor,
        mixing: Tensor | None = None,
        *,
        observer: Observer | None = None,
    ):
        super().__init__(features, variances, *([] if mixing is None else [mixing]), observer=observer)
        self._features = features
        self.variances = variances
        self.mixing = mixing
        self.observer = observer

    def _check_args(
        self,
        features: Tensor | LazyFeatures,
        variances: Tensor,
        mixing: Tensor | None = None,
        observer: Observer | None = None,
    ) -> str | None:
        if not (isinstance(features, (Tensor, LazyFeatures)) and torch.is_tensor(variances)):
            return "HilbertLinearOperator takes two tensors: features (..., N, M) and variances (..., M)."
        if features.dim() < 2 or variances.dim() < 1 or features.shape[-1] != variances.shape[-1]:
            return (
                f"HilbertLinearOperator takes features (..., N, M) and variances (..., M); got {tuple(features.shape)} "
                f"and {tuple(variances.shape)}."
            )
        return None

    @property
    def dtype(self) -> torch.dtype:
        return self.variances.dtype

    @property
    def features(self) -> Tensor:
        r""":math:`\Phi`, `(..., N, M)`."""
        return self._features.to_dense() if isinstance(self._features, LazyFeatures) else self._features

    @property
    def lazy_features(self) -> LazyFeatures | None:
        r""":math:`\Phi` of fixed rows; None where it is a tensor."""
        return self._features if isinstance(self._features, LazyFeatures) else None

    @property
    def num_features(self) -> int:
        """M."""
        return self._features.shape[-1]

    @property
    def scale(self) -> Tensor:
        r""":math:`v^{1/2}`, `(..., M)`, float64; where v has underflowed its gradient is zero, not NaN."""
        return root(self.variances.double())

    @property
    def prior(self) -> Covariance:
        """V, the covariance of the weights, float64."""
        return Covariance(self.variances.double(), self.mixing)

    @property
    def mixed_features(self) -> Tensor:
        r""":math:`\Phi T`, `(..., N, M)`, float64: the functions whose weights are uncorrelated, with variances v."""
        return self.prior.mix(self.features.double())

    def gram(self, weights: Tensor | None = None) -> Tensor:
        r"""
        :math:`T^\top \Phi^\top W \Phi T`.

        :param weights: Row weights `(..., N)`, or None for ones.
        :return: `(..., M, M)`, float64.
        """
        return self.prior.mix_gram(self.feature_gram(weights))

    def feature_gram(self, weights: Tensor | None = None) -> Tensor:
        r"""
        :math:`\Phi^\top W \Phi`.

        :param weights: Row weights `(..., N)`, or None for ones.
        :return: `(..., M, M)`, float64.
        """
        if self.lazy_features is not None:
            return self.lazy_features.gram(weights)
        features = self.features.double()
        return weighted_product(features, features, weights)

    def feature_sums(self, rhs: Tensor) -> Tensor:
        r"""
        :math:`\Phi^\top r`.

        :param rhs: `(..., N, K)`.
        :return: `(..., M, K)`, float64.
        """
        if self.lazy_features is not None:
            return self.lazy_features.project(rhs.double())
        return self.features.double().mT @ rhs.double()

    def project(self, rhs: Tensor) -> Tensor:
        r"""
        :math:`T^\top \Phi^\top r`.

        :param rhs: `(..., N, K)`.
        :return: `(..., M, K)`, float64.
        """
        sums = self.feature_sums(rhs)
        return sums if self.mixing is None else self.mixing.mT @ sums

    def evaluate(self, weights: Tensor) -> Tensor:
        r"""
        :math:`\Phi T u`.

        :param weights: u, `(..., M, K)`.
        :return: `(..., N, K)`, float64.
        """
        weights = weights.double() if self.mixing is None else self.mixing @ weights.double()
        if self.lazy_features is not None:
            return self.lazy_features.evaluate(weights)
        return self.features.double() @ weights

    def mean_variance(self) -> Tensor:
        """The prior variance that the functions represent, its mean over the rows, `(...)`, float64."""
        return mean_represented(self.prior, self._features)

    @torch.no_grad()
    def tell(self, diagonal: Tensor, residual: Tensor | None = None) -> None:
        """
        Tell the kernel that this is the covariance of how precise the data are.

        :param diagonal: Independent variance of the rows, also what the kernel has added, `(..., N)` or `(..., 1)`.
        :param residual: Targets minus prior mean `(..., N)`, where they are known.
        """
        if self.observer is not None:
            num_rows = self.shape[-1] if type(self) is HilbertLinearOperator else None
            self.observer.hear(self.mean_variance(), diagonal, residual, num_rows)

    @property
    def row_scale(self) -> Tensor:
        """By which factor each row multiplies the prior variance of the kernel, `(..., N)` or `(1,)`, float64."""
        return torch.ones(1, dtype=torch.float64, device=self.device)

    def _root(self) -> Tensor:
        return (self.mixed_features * self.scale.unsqueeze(-2)).to(self.dtype)

    def _full_batch(self) -> list[Tensor]:
        """Features, variances and mixing, all with the whole batch shape."""
        parts = [(self.features, 2), (self.variances, 1), *([] if self.mixing is None else [(self.mixing, 2)])]
        return [part.expand(*self.batch_shape, *part.shape[-dims:]) for part, dims in parts]

    def _size(self) -> torch.Size:
        *batch_shape, num_rows, _ = self._features.shape
        return torch.Size((*torch.broadcast_shapes(batch_shape, self.variances.shape[:-1]), num_rows, num_rows))

    def _matmul(self, rhs: Tensor) -> Tensor:
        if observation_nan_policy.value() == "mask" and self.shape[-1] > settings.max_cholesky_size.value():
            # Nothing but an iteration on a masked operator multiplies in this mode.
            warnings.warn(
                "With observation_nan_policy('mask') and more than max_cholesky_size = "
                f"{settings.max_cholesky_size.value()} rows GPyTorch estimates the marginal likelihood by a random "
                "iteration. Drop the rows with missing targets before training, which is exact and fast, or raise "
                "gpytorch.settings.max_cholesky_size. Predictions are exact either way.",
                DenseFallbackWarning,
                stacklevel=2,
            )
        is_vector = rhs.dim() == 1
        rhs_ = rhs.unsqueeze(-1) if is_vector else rhs
        result = self.evaluate(self.variances.double().unsqueeze(-1) * self.project(rhs_))
        return (result.squeeze(-1) if is_vector else result).to(self.dtype)

    def _t_matmul(self, rhs: Tensor) -> Tensor:
        return self._matmul(rhs)

    def _transpose_nonbatch(self) -> HilbertLinearOperator:
        return self

    def _diagonal(self) -> Tensor:
        return self.prior.quadratic(self.features.double()).to(self.dtype)

    def _expand_batch(self, batch_shape: torch.Size | list[int]) -> HilbertLinearOperator:
        # The features need not be expanded: what is known of them stays valid and shared.
        variances = self.variances.expand(*batch_shape, self.num_features)
        return self.__class__(self._features, variances, self.mixing, observer=self.observer)

    def _permute_batch(self, *dims: int) -> HilbertLinearOperator:
        num_batch = len(dims)
        parts = self._full_batch()
        return HilbertLinearOperator(*(part.permute(*dims, *range(num_batch, part.dim())) for part in parts))

    def _unsqueeze_batch(self, dim: int) -> HilbertLinearOperator:
        return HilbertLinearOperator(*(part.unsqueeze(dim) for part in self._full_batch()))

    def _get_indices(self, row_index: Any, col_index: Any, *batch_indices: Any) -> Tensor:
        return self._as_root()._get_indices(row_index, col_index, *batch_indices)

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        batch_untouched = all(_is_noop_index(index) for index in batch_indices)
        if batch_untouched and _equal_indices(row_index, col_index):
            if _is_noop_index(row_index):
                return self
            return HilbertLinearOperator(self.features[..., row_index, :], self.variances, self.mixing)
        if batch_untouched and not (torch.is_tensor(row_index) and torch.is_tensor(col_index)):
            right = self.mixed_features
            left = right * self.variances.double().unsqueeze(-2)
            return MatmulLinearOperator(
                left[..., row_index, :].to(self.dtype), right[..., col_index, :].mT.to(self.dtype)
            )
        return self._as_root()._getitem(row_index, col_index, *batch_indices)

    def _as_root(self) -> LowRankRootLinearOperator:
        return LowRankRootLinearOperator(self._root())

    def _mul_constant(self, other: Tensor) -> LinearOperator:
        if not (other > 0).all():
            return super()._mul_constant(other)
        variances = self.variances * other.unsqueeze(-1)
        return self.__class__(self._features, variances, self.mixing, observer=self.observer)

    def mul(self, other: Any) -> LinearOperator:
        return multiply(self, other)

    @cached
    def to_dense(self) -> Tensor:
        features = self.mixed_features
        return ((features * self.variances.double().unsqueeze(-2)) @ features.mT).to(self.dtype)

    @cached(name="root_decomposition")
    def root_decomposition(self, method: str | None = None) -> LinearOperator:
        # A square root: base samples have the size of the distribution.
        num_rows = self.shape[-1]
        if self.num_features <= num_rows and method is None:
            return RootLinearOperator(torch.nn.functional.pad(self._root(), (0, num_rows - self.num_features)))
        return super().root_decomposition(method=method)

    def zero_mean_mvn_samples(self, num_samples: int) -> Tensor:
        weights = torch.randn(
            num_samples, *self.batch_shape, self.num_features, dtype=torch.float64, device=self.device
        )
        weights = (weights * self.scale).movedim(0, -1)  # (..., M, S)
        return self.evaluate(weights).movedim(-1, 0).to(self.dtype)

    def add_diagonal(self, diag: Tensor) -> LinearOperator:
        return self + diagonal_for(self, diag)

    def __add__(self, other: Any) -> LinearOperator:
        if isinstance(other, DiagLinearOperator):
            return HilbertAddedDiagLinearOperator(self, other)
        if isinstance(other, HilbertAddedDiagLinearOperator):
            return HilbertAddedDiagLinearOperator(self + other.low_rank, other._diag_tensor)
        if isinstance(other, HilbertLinearOperator):
            return HilbertLinearOperator(
                concatenate([self.features.double(), other.features.double()]),
                concatenate([self.variances, other.variances]),
                block_diagonal([self.mixing, other.mixing], [self.num_features, other.num_features]),
                observer=_observer_of_sum(self, other),
            )
        return super().__add__(other)


def mean_represented(prior: Covariance, features: Tensor | LazyFeatures) -> Tensor:
    """
    The prior variance that functions represent, its mean over rows, `(...)`, float64.

    :param prior: The covariance of the weights, float64.
    :param features: `(..., N, M)`.
    """
    if not isinstance(features, LazyFeatures):
        return prior.quadratic(features.double()).mean(-1)
    if prior.mixing is None:
        mean_squares = features.mean_square()
    else:
        mean_squares = prior.mix_gram(features.gram()).diagonal(dim1=-2, dim2=-1) / features.shape[-2]
    return (mean_squares * prior.variances).sum(-1)


@torch.no_grad()
def _observer_of_sum(*terms: HilbertLinearOperator) -> SumObserver | None:
    """Hears for all terms of a sum; None where no kernel listens."""
    if all(term.observer is None for term in terms):
        return None
    variances = [term.mean_variance() for term in terms]
    total = reduce(torch.add, variances).clamp_min(1e-300)
    return SumObserver([(term.observer, part / total) for term, part in zip(terms, variances, strict=True)])


class HilbertAddedDiagLinearOperator(AddedDiagLinearOperator):
    r"""
    :math:`\Phi V \Phi^\top + D` with exact solves and log determinants by the capacitance matrix

    .. math:: C = I + V^{1/2} \Phi^\top D^{-1} \Phi V^{1/2}, \qquad \log |\Phi V \Phi^\top + D| = \log |C| + \log |D|.

    :param linear_ops: A :class:`HilbertLinearOperator` and a :class:`~linear_operator.operators.DiagLinearOperator`.
    """

    def __init__(self, *linear_ops: LinearOperator, preconditioner_override: Any = None):
        super().__init__(*linear_ops, preconditioner_override=preconditioner_override)
        if not isinstance(self._linear_op, HilbertLinearOperator):
            raise TypeError(
                "HilbertAddedDiagLinearOperator adds a diagonal to a HilbertLinearOperator; got a "
                f"{type(self._linear_op).__name__}."
            )

    @property
    def low_rank(self) -> HilbertLinearOperator:
        """The operator without its diagonal."""
        return self._linear_op

    @property
    def noise(self) -> Tensor:
        """The diagonal D, `(..., N)`, or `(..., 1)` where all its entries are the same; float64."""
        if isinstance(self._diag_tensor, ConstantDiagLinearOperator):
            return self._diag_tensor.diag_values.double()
        return self._diag_tensor._diag.double()

    @property
    @cached(name="capacitance_cholesky")
    def capacitance_cholesky(self) -> Tensor:
        """Lower Cholesky factor of the capacitance matrix, `(..., M, M)`, float64."""
        return capacitance_factor(self.low_rank.prior, data_precision(self.low_rank, self.noise))

    def project(self, rhs: Tensor) -> Tensor:
        r"""
        :math:`V^{1/2} \Phi^\top D^{-1} r`.

        :param rhs: `(..., N, K)`.
        :return: `(..., M, K)`, float64.
        """
        scale, noise = self.low_rank.scale.unsqueeze(-1), self.noise.unsqueeze(-1)
        if noise.shape[-2] == 1:  # its gradient does not go through the rows
            return scale * self.low_rank.project(rhs) / noise
        return scale * self.low_rank.project(rhs.double() / noise)

    def whiten(self, rhs: Tensor) -> Tensor:
        r"""
        :math:`D^{-1/2} r`.

        :param rhs: `(..., N, K)`.
        """
        return rhs.double() / self.noise.sqrt().unsqueeze(-1)

    def _solve(self, rhs: Tensor, preconditioner: Any = None, num_tridiag: int | None = 0) -> Tensor:
        scale = self.low_rank.scale.unsqueeze(-1)
        weights = scale * torch.cholesky_solve(self.project(rhs), self.capacitance_cholesky)
        residual = rhs.double() - self.low_rank.evaluate(weights)
        return (residual / self.noise.unsqueeze(-1)).to(self.dtype)

    def solve(self, right_tensor: Tensor, left_tensor: Tensor | None = None) -> Tensor:
        is_vector = right_tensor.dim() == 1
        solution = self._solve(right_tensor.unsqueeze(-1) if is_vector else right_tensor)
        solution = solution.squeeze(-1) if is_vector else solution
        return solution if left_tensor is None else left_tensor @ solution

    def inv_quad_logdet(
        self, inv_quad_rhs: Tensor | None = None, logdet: bool | None = False, reduce_inv_quad: bool | None = True
    ) -> tuple[Tensor | None, Tensor | None]:
        if inv_quad_rhs is None:
            return None, self._logdet() if logdet else None
        rhs = (inv_quad_rhs.unsqueeze(-1) if inv_quad_rhs.dim() == 1 else inv_quad_rhs).double()
        noise, variances = self.noise, self.low_rank.variances.double()
        self.low_rank.tell(noise, rhs[..., 0])
        if 2 * self.shape[-1] < self.low_rank.num_features:  # few rows: by the N x N matrix, with the same determinant
            whitener = noise.rsqrt().unsqueeze(-1)
            left = whitener * self.low_rank.mixed_features * self.low_rank.scale.unsqueeze(-2)
            identity = torch.eye(self.shape[-1], dtype=torch.float64, device=self.device)
            factor = robust_cholesky(identity + left @ left.mT)
            logdet_ = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
            quadratic = torch.linalg.solve_triangular(factor, whitener * rhs, upper=False).square().sum(-2)
        elif noise.shape[-1] == 1:  # sums over rows first, then the noise
            logdet_, fitted = capacitance_terms(variances / noise, self.low_rank.gram(), self.low_rank.project(rhs))
            quadratic = (rhs.square().sum(-2) - fitted) / noise  # (..., K)
        else:
            scaled = rhs / noise.unsqueeze(-1)
            projected = self.low_rank.project(scaled)
            logdet_, fitted = capacitance_terms(variances, self.low_rank.gram(1 / noise), projected)
            quadratic = (rhs * scaled).sum(-2) - fitted
        quadratic = (quadratic.sum(-1) if reduce_inv_quad else quadratic).to(self.dtype)
        return quadratic, self._add_noise(logdet_) if logdet else None

    def inv_quad(self, inv_quad_rhs: Tensor, reduce_inv_quad: bool = True) -> Tensor:
        return self.inv_quad_logdet(inv_quad_rhs, reduce_inv_quad=reduce_inv_quad)[0]  # type: ignore[return-value]

    def _logdet(self) -> Tensor:
        return self._add_noise(2 * self.capacitance_cholesky.diagonal(dim1=-2, dim2=-1).log().sum(-1))

    def _add_noise(self, capacitance: Tensor) -> Tensor:
        """The log determinant from that of the capacitance matrix."""
        noise = self.noise.log().sum(-1) * (self.shape[-1] // self.noise.shape[-1])
        return (capacitance + noise).expand(self.batch_shape).to(self.dtype)

    def logdet(self) -> Tensor:
        return self._logdet()

    def _preconditioner(self) -> tuple[None, None, None]:
        return None, None, None

    def _solve_preconditioner(self) -> None:
        return None

    def zero_mean_mvn_samples(self, num_samples: int) -> Tensor:
        samples = self.low_rank.zero_mean_mvn_samples(num_samples)
        noise = torch.randn(num_samples, *self.shape[:-1], dtype=self.dtype, device=self.device)
        return samples + noise * self.noise.sqrt().to(self.dtype)

    def mul(self, other: Any) -> LinearOperator:
        return multiply(self, other)

    def _mul_constant(self, other: Tensor) -> LinearOperator:
        low_rank = self._linear_op._mul_constant(other)
        values = self.noise.to(self.dtype) * other.unsqueeze(-1)
        added = (
            HilbertAddedDiagLinearOperator if isinstance(low_rank, HilbertLinearOperator) else AddedDiagLinearOperator
        )
        return added(low_rank, diagonal_for(low_rank, values))

    def _sum_batch(self, dim: int) -> LinearOperator:
        return LinearOperator._sum_batch(self, dim)

    @cached(name="root_decomposition")
    def root_decomposition(self, method: str | None = None) -> LinearOperator:
        # Exact at any size: the default turns to a random Lanczos iteration for large matrices.
        return super().root_decomposition(method="cholesky" if method is None else method)

    def __add__(self, other: Any) -> LinearOperator:
        if isinstance(other, DiagLinearOperator):
            return self.__class__(self._linear_op, self._diag_tensor + other)
        if isinstance(other, (HilbertLinearOperator, HilbertAddedDiagLinearOperator)):
            return self._linear_op + other + self._diag_tensor
        return AddedDiagLinearOperator(self._linear_op + other, self._diag_tensor)

    @cached
    def to_dense(self) -> Tensor:
        if self.requires_grad:
            warn_of_dense_likelihood(self.low_rank)
            self.low_rank.tell(self.noise)
        return super().to_dense()


def warn_of_dense_likelihood(low_rank: HilbertLinearOperator) -> None:
    """
    Say that a likelihood is about to throw a low-rank structure away; refuse it where the dense matrix is large.

    :param low_rank: What a dense matrix is about to be made of.
    :raises SizeError: Beyond :data:`MAX_DENSE_ROWS` rows.
    """
    num_rows, num_features = low_rank.shape[-1], low_rank.num_features
    if settings.fast_computations.log_prob.on() or num_rows <= num_features:
        return
    message = (
        f"A reduced-rank covariance ({num_rows} rows, {num_features} functions) is about to be factorised as a dense "
        "matrix, because gpytorch.settings.fast_computations.log_prob is off (importing botorch switches it off). "
        "Return gpytorch_tkrr.ReducedRankNormal(mean, covariance) from the model's forward (for several tasks "
        "gpytorch_tkrr.ReducedRankMultitaskNormal), or train inside\n"
        "    with gpytorch.settings.fast_computations(log_prob=True):"
    )
    if num_rows > MAX_DENSE_ROWS:
        gigabytes = num_rows**2 * low_rank.dtype.itemsize / 1e9
        raise SizeError(f"{message}\nThe dense matrix would take {gigabytes:.1f} GB; it is refused.")
    warnings.warn(message, DenseFallbackWarning, stacklevel=3)


def data_precision(low_rank: HilbertLinearOperator, noise: Tensor, observed: Tensor | None = None) -> Tensor:
    r"""
    :math:`\Phi^\top D^{-1} \Phi`, what the data say about the weights.

    :param low_rank: Carries :math:`\Phi`.
    :param noise: The diagonal D, `(..., N)`, or `(..., 1)` where all entries are the same.
    :param observed: Rows that count, `(..., N)` booleans, or None for all.
    :return: `(..., M, M)`, float64.
    """
    if noise.shape[-1] == 1 and low_rank.shape[-1] != 1:
        weights = None if observed is None else observed.double()
        return low_rank.feature_gram(weights) / noise.double().unsqueeze(-1)
    weights = 1 / noise.double()
    return low_rank.feature_gram(weights if observed is None else weights * observed)
