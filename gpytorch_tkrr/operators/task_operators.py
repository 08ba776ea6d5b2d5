r"""Covariances of several tasks, :math:`\Phi V \Phi^\top` times a covariance :math:`B = L L^\top` of the tasks.

An observation of task t at the input x has the features :math:`\phi(x) \otimes l_t`, with :math:`l_t` the row t of L.
These change while B is learned, but all sums over rows of their products follow from sums over the rows of each task of
:math:`\phi \phi^\top`, which do not.
"""

from __future__ import annotations

import operator
from functools import reduce
from typing import Any

import torch
from linear_operator.operators import (
    BlockDiagLinearOperator,
    ConstantDiagLinearOperator,
    DiagLinearOperator,
    KroneckerProductLinearOperator,
    LinearOperator,
    SumLinearOperator,
    to_linear_operator,
)
from linear_operator.utils.memoize import cached
from torch import Tensor

from ..bases.covariance import kronecker
from ..linalg import robust_cholesky
from .capacitance import capacitance_terms
from .exact import ExactLinearOperator
from .gram import weighted_product
from .lazy_operators import RefusedLinearOperator, multiply
from .observer import Observer
from .operator import (
    HilbertAddedDiagLinearOperator,
    HilbertLinearOperator,
    diagonal_for,
    warn_of_dense_likelihood,
)


class HilbertTaskLinearOperator(HilbertLinearOperator):
    r"""
    The covariance of several tasks with features :math:`\phi(x_n) \otimes l_t`.

    Either every input has an observation of every task, the tasks of an input side by side (:math:`\Phi V \Phi^\top
    \otimes B`), or each of one task, :math:`(\Phi V \Phi^\top)_{nm} B_{t_n t_m}`.

    :param data: :math:`\Phi V \Phi^\top`, `(..., N, N)`.
    :param task_root: L, `(..., T, T)`.
    :param tasks: The task of each row, `(..., N)` integers; None where every input has all tasks.

    Example:
        >>> import torch
        >>> from gpytorch_tkrr.operators.operator import HilbertLinearOperator
        >>> from gpytorch_tkrr.operators.task_operators import HilbertTaskLinearOperator
        >>> data = HilbertLinearOperator(torch.ones(2, 1), torch.ones(1))
        >>> HilbertTaskLinearOperator(data, torch.tensor([[1.0, 0.0], [2.0, 1.0]]), torch.tensor([0, 1])).to_dense()
        tensor([[1., 2.],
                [2., 5.]])
    """

    def __init__(self, data: HilbertLinearOperator, task_root: Tensor, tasks: Tensor | None = None):
        LinearOperator.__init__(self, data, task_root, tasks=tasks)
        self.data = data
        self.task_root = task_root
        self.tasks = tasks

    def _check_args(self, *args: Any, **kwargs: Any) -> str | None:
        return None

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def num_tasks(self) -> int:
        """T."""
        return self.task_root.shape[-2]

    @property
    def num_features(self) -> int:
        return self.data.num_features * self.task_root.shape[-1]

    @property
    def variances(self) -> Tensor:  # type: ignore[override]
        return self.data.variances.repeat_interleave(self.task_root.shape[-1], dim=-1)

    @property
    def mixing(self) -> Tensor | None:  # type: ignore[override]
        return kronecker([self.data.mixing, None], [self.data.num_features, self.task_root.shape[-1]])

    @property
    def observer(self) -> Observer | None:  # type: ignore[override]
        return self.data.observer

    def mean_variance(self) -> Tensor:
        return self.data.mean_variance() * self.row_scale.mean(-1)

    @property
    def row_scale(self) -> Tensor:
        variances = self.task_root.double().square().sum(-1)  # (..., T)
        if self.tasks is None:
            return variances.repeat(*[1] * (variances.dim() - 1), self.data.shape[-1])
        return torch.take_along_dim(variances, self.tasks, dim=-1)

    @property
    @cached(name="features")
    def features(self) -> Tensor:
        features, task_root = self.data.features.double(), self.task_root.double()
        if self.tasks is None:
            products = torch.einsum("...nm,...tq->...ntmq", features, task_root)
            return products.flatten(-2).flatten(-3, -2)
        rows = torch.take_along_dim(task_root, self.tasks.unsqueeze(-1), dim=-2)  # (..., N, T)
        return (features.unsqueeze(-1) * rows.unsqueeze(-2)).flatten(-2)

    def _size(self) -> torch.Size:
        *batch_shape, num_rows, _ = self.data.shape
        num_rows = num_rows * self.num_tasks if self.tasks is None else num_rows
        task_batch = torch.broadcast_shapes(
            self.task_root.shape[:-2], () if self.tasks is None else self.tasks.shape[:-1]
        )
        return torch.Size((*torch.broadcast_shapes(batch_shape, task_batch), num_rows, num_rows))

    def _membership(self) -> Tensor:
        """Which rows are of which task, `(T, N)`, float64."""
        assert self.tasks is not None
        return torch.nn.functional.one_hot(self.tasks, self.num_tasks).mT.double()

    def feature_gram(self, weights: Tensor | None = None) -> Tensor:
        if self.tasks is None and weights is None:
            return kronecker_product(self.data.feature_gram(), self.task_root.double().mT @ self.task_root.double())
        if self.data._features.dim() > 2 or (self.tasks is not None and self.tasks.dim() > 1):
            return weighted_product(self.features, self.features, weights)
        if self.tasks is None:
            task_weights = weights.double().unflatten(-1, (-1, self.num_tasks)).mT  # type: ignore[union-attr]
        else:
            task_weights = (
                self._membership() if weights is None else self._membership() * weights.double().unsqueeze(-2)
            )
        grams = self.data.feature_gram(task_weights)  # (..., T, M, M)
        root = self.task_root.double()
        return torch.einsum("...tij,...tq,...tr->...iqjr", grams, root, root).flatten(-2).flatten(-3, -2)

    def project(self, rhs: Tensor) -> Tensor:
        return self.project_on(rhs, self.task_root.double())

    def project_on(self, rhs: Tensor, task_root: Tensor) -> Tensor:
        r"""
        :math:`\Psi^\top r` for features with another root of the covariance of tasks.

        :param rhs: r, `(..., N, K)`.
        :param task_root: `(..., T, Q)`, float64.
        :return: `(..., M Q, K)`, float64.
        """
        return self._multiply_tasks(self.data.project(self._by_task(rhs)), task_root)

    def feature_sums(self, rhs: Tensor) -> Tensor:
        return self._multiply_tasks(self.data.feature_sums(self._by_task(rhs)), self.task_root.double())

    def _by_task(self, rhs: Tensor) -> Tensor:
        """Right-hand sides `(..., N, K)` with a column for each task, `(..., N, T K)`, N being the rows of `data`."""
        if self.tasks is None:
            return rhs.double().unflatten(-2, (-1, self.num_tasks)).flatten(-2)
        member = torch.nn.functional.one_hot(self.tasks, self.num_tasks).double()
        return (member.unsqueeze(-1) * rhs.double().unsqueeze(-2)).flatten(-2)

    def _multiply_tasks(self, sums: Tensor, task_root: Tensor) -> Tensor:
        """Sums of each task `(..., M, T K)` times a root of the covariance of tasks, `(..., M Q, K)`."""
        by_task = sums.unflatten(-1, (self.num_tasks, -1))  # (..., M, T, K)
        return torch.einsum("...mtk,...tq->...mqk", by_task, task_root).flatten(-3, -2)

    def evaluate(self, weights: Tensor) -> Tensor:
        by_function = weights.double().unflatten(-2, (self.data.num_features, -1))  # (..., M, Q, K)
        num_columns = weights.shape[-1]
        root = self.task_root.double()
        by_task = torch.einsum("...mqk,...tq->...mtk", by_function, root).flatten(-2)
        values = self.data.evaluate(by_task).unflatten(-1, (self.num_tasks, num_columns))  # (..., N, T, K)
        if self.tasks is None:
            return values.flatten(-3, -2)
        return torch.take_along_dim(values, self.tasks.unsqueeze(-1).unsqueeze(-1), dim=-2).squeeze(-2)

    def _expand_batch(self, batch_shape: torch.Size | list[int]) -> HilbertTaskLinearOperator:
        return self.__class__(self.data._expand_batch(batch_shape), self.task_root, self.tasks)

    def _mul_constant(self, other: Tensor) -> LinearOperator:
        if not (other > 0).all():
            return HilbertLinearOperator(self.features, self.variances, self.mixing)._mul_constant(other)
        return self.__class__(self.data._mul_constant(other), self.task_root, self.tasks)

    def __add__(self, other: Any) -> LinearOperator:
        if self.tasks is None and is_task_noise(other, self.num_tasks):
            return HilbertTaskNoiseLinearOperator(self, other)
        if isinstance(other, HilbertTaskNoiseLinearOperator):
            return other + self
        return super().__add__(other)


class HilbertTaskNoiseLinearOperator(SumLinearOperator):
    r"""
    :math:`\Psi V \Psi^\top + I \otimes \Sigma` with exact solves and log determinants by the capacitance matrix

    .. math:: C = I + V^{1/2} \Psi^\top (I \otimes \Sigma^{-1}) \Psi V^{1/2},

    which for the features :math:`\Psi = \Phi \otimes L` of all tasks at all inputs is
    :math:`I + V^{1/2} \Phi^\top \Phi V^{1/2} \otimes L^\top \Sigma^{-1} L`.

    :param linear_ops: A :class:`HilbertTaskLinearOperator`, or a sum of several, and the Kronecker product of a
        multiple of the identity and :math:`\Sigma`.
    """

    def __init__(self, *linear_ops: LinearOperator):
        super().__init__(*linear_ops)
        self.low_rank: HilbertLinearOperator
        self.low_rank, self._noise = self.linear_ops

    @classmethod
    def from_matrix(cls, low_rank: HilbertLinearOperator, task_noise: Tensor) -> HilbertTaskNoiseLinearOperator:
        r"""
        :param low_rank: The low-rank part, `(..., N T, N T)`.
        :param task_noise: :math:`\Sigma`, `(..., T, T)`.
        """
        task_noise = task_noise.to(low_rank.dtype)
        ones = torch.ones_like(task_noise[..., 0, :1])
        identity = ConstantDiagLinearOperator(ones, diag_shape=low_rank.shape[-1] // task_noise.shape[-1])
        return cls(low_rank, KroneckerProductLinearOperator(identity, task_noise))

    @property
    def num_tasks(self) -> int:
        """T."""
        return self._noise.linear_ops[1].shape[-1]

    @property
    def task_noise(self) -> Tensor:
        r""":math:`\Sigma`, `(..., T, T)`, float64."""
        identity, task_noise = self._noise.linear_ops
        return task_noise.to_dense().double() * identity.diag_values.double().unsqueeze(-1)

    @property
    @cached(name="noise_cholesky")
    def _noise_cholesky(self) -> Tensor:
        return robust_cholesky(self.task_noise)

    def whiten(self, rhs: Tensor) -> Tensor:
        r"""
        :math:`(I \otimes S^{-1}) r` with :math:`\Sigma = S S^\top`.

        :param rhs: `(..., N T, K)`.
        """
        by_task = rhs.double().unflatten(-2, (-1, self.num_tasks))  # (..., N, T, K)
        factor = self._noise_cholesky.unsqueeze(-3)
        return torch.linalg.solve_triangular(factor, by_task, upper=False).flatten(-3, -2)

    def _scaled(self, rhs: Tensor) -> Tensor:
        r""":math:`(I \otimes \Sigma^{-1}) r` for `rhs` `(..., N T, K)`."""
        by_task = rhs.double().unflatten(-2, (-1, self.num_tasks))  # (..., N, T, K)
        precision = torch.cholesky_inverse(self._noise_cholesky)
        return torch.einsum("...st,...ntk->...nsk", precision, by_task).flatten(-3, -2)

    @property
    def _scaled_root(self) -> Tensor:
        r""":math:`\Sigma^{-1} L`, `(..., T, T)`, for all tasks at all inputs."""
        return torch.cholesky_solve(self.low_rank.task_root.double(), self._noise_cholesky)

    def _gram(self) -> Tensor:
        r""":math:`\Psi^\top (I \otimes \Sigma^{-1}) \Psi`, of features whose weights are uncorrelated."""
        if isinstance(self.low_rank, HilbertTaskLinearOperator):
            root = self.low_rank.task_root.double()
            return kronecker_product(self.low_rank.data.gram(), root.mT @ self._scaled_root)
        whitened = self.whiten(self.low_rank.mixed_features)
        return whitened.mT @ whitened

    def _projected(self, rhs: Tensor) -> Tensor:
        r""":math:`\Psi^\top (I \otimes \Sigma^{-1}) r`, of the same features."""
        if isinstance(self.low_rank, HilbertTaskLinearOperator):  # sums over rows first: they stay when noise changes
            return self.low_rank.project_on(rhs, self._scaled_root)
        return self.low_rank.project(self._scaled(rhs))

    @property
    @cached(name="capacitance_cholesky")
    def capacitance_cholesky(self) -> Tensor:
        """Lower Cholesky factor of the capacitance matrix, `(..., M T, M T)`, float64."""
        scale = self.low_rank.scale
        identity = torch.eye(scale.shape[-1], dtype=scale.dtype, device=scale.device)
        return robust_cholesky(identity + scale.unsqueeze(-1) * self._gram() * scale.unsqueeze(-2))

    def project(self, rhs: Tensor) -> Tensor:
        r"""
        :math:`V^{1/2} \Psi^\top (I \otimes \Sigma^{-1}) r`.

        :param rhs: `(..., N T, K)`.
        :return: `(..., M T, K)`, float64.
        """
        return self.low_rank.scale.unsqueeze(-1) * self._projected(rhs)

    def solve(self, right_tensor: Tensor, left_tensor: Tensor | None = None) -> Tensor:
        is_vector = right_tensor.dim() == 1
        rhs = (right_tensor.unsqueeze(-1) if is_vector else right_tensor).double()
        weights = self.low_rank.scale.unsqueeze(-1) * torch.cholesky_solve(self.project(rhs), self.capacitance_cholesky)
        solution = self._scaled(rhs - self.low_rank.evaluate(weights)).to(self.dtype)
        solution = solution.squeeze(-1) if is_vector else solution
        return solution if left_tensor is None else left_tensor @ solution

    def inv_quad_logdet(
        self, inv_quad_rhs: Tensor | None = None, logdet: bool | None = False, reduce_inv_quad: bool | None = True
    ) -> tuple[Tensor | None, Tensor | None]:
        if inv_quad_rhs is None:
            return None, self.logdet() if logdet else None
        rhs = (inv_quad_rhs.unsqueeze(-1) if inv_quad_rhs.dim() == 1 else inv_quad_rhs).double()
        self.tell(rhs[..., 0])
        logdet_, fitted = capacitance_terms(self.low_rank.variances.double(), self._gram(), self._projected(rhs))
        quadratic = (rhs * self._scaled(rhs)).sum(-2) - fitted  # (..., K)
        quadratic = (quadratic.sum(-1) if reduce_inv_quad else quadratic).to(self.dtype)
        return quadratic, self._add_noise(logdet_) if logdet else None

    def tell(self, residual: Tensor) -> None:
        """
        Tell the kernels of the data how precise these are.

        :param residual: Targets minus prior mean `(..., N T)`.
        """
        self.low_rank.tell(self.task_noise.diagonal(dim1=-2, dim2=-1), residual)

    def inv_quad(self, inv_quad_rhs: Tensor, reduce_inv_quad: bool = True) -> Tensor:
        return self.inv_quad_logdet(inv_quad_rhs, reduce_inv_quad=reduce_inv_quad)[0]  # type: ignore[return-value]

    def _add_noise(self, capacitance: Tensor) -> Tensor:
        """The log determinant from that of the capacitance matrix."""
        noise = 2 * self._noise_cholesky.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        num_rows = self.shape[-1] // self.num_tasks
        return (capacitance + num_rows * noise).expand(self.batch_shape).to(self.dtype)

    def logdet(self) -> Tensor:
        return self._add_noise(2 * self.capacitance_cholesky.diagonal(dim1=-2, dim2=-1).log().sum(-1))

    def zero_mean_mvn_samples(self, num_samples: int) -> Tensor:
        samples = self.low_rank.zero_mean_mvn_samples(num_samples)  # (S, ..., N T)
        noise = torch.randn(*samples.shape, dtype=torch.float64, device=self.device)
        noise = noise.unflatten(-1, (-1, self.num_tasks)) @ self._noise_cholesky.mT
        return samples + noise.flatten(-2).to(self.dtype)

    @cached(name="root_decomposition")
    def root_decomposition(self, method: str | None = None) -> LinearOperator:
        # Exact at any size: the default turns to a random Lanczos iteration for large matrices.
        return super().root_decomposition(method="cholesky" if method is None else method)

    def add_diagonal(self, diag: Tensor) -> LinearOperator:
        return self + diagonal_for(self, diag)

    def _mul_constant(self, other: Tensor) -> LinearOperator:
        if not (other > 0).all():
            return SumLinearOperator(*self.linear_ops)._mul_constant(other)
        return self.from_matrix(self.low_rank._mul_constant(other), self.task_noise * other[..., None, None])

    def mul(self, other: Any) -> LinearOperator:
        return multiply(self, other)

    def __add__(self, other: Any) -> LinearOperator:
        if isinstance(other, HilbertTaskNoiseLinearOperator):
            return self.from_matrix(self.low_rank + other.low_rank, self.task_noise + other.task_noise)
        if isinstance(other, HilbertLinearOperator):
            return self.from_matrix(self.low_rank + other, self.task_noise)
        if isinstance(other, ConstantDiagLinearOperator):
            identity = torch.eye(self.num_tasks, dtype=torch.float64, device=self.device)
            added = other.diag_values.double().unsqueeze(-1) * identity
        elif is_task_noise(other, self.num_tasks):
            added = HilbertTaskNoiseLinearOperator(self.low_rank, other).task_noise
        else:
            return SumLinearOperator(*self.linear_ops) + other
        return self.from_matrix(self.low_rank, self.task_noise + added)

    @cached
    def to_dense(self) -> Tensor:
        if self.requires_grad:
            warn_of_dense_likelihood(self.low_rank)
        return super().to_dense()


def is_task_noise(operator: Any, num_tasks: int) -> bool:
    r"""
    Whether an operator is the Kronecker product of a multiple of the identity and a covariance of tasks.

    :param operator: Any object.
    :param num_tasks: T.
    """
    if not isinstance(operator, KroneckerProductLinearOperator) or len(operator.linear_ops) != 2:
        return False
    identity, tasks = operator.linear_ops
    return isinstance(identity, ConstantDiagLinearOperator) and tasks.shape[-1] == num_tasks


def kronecker_product(left: Tensor, right: Tensor) -> Tensor:
    """
    The Kronecker product of two matrices or batches of them.

    :param left: `(..., M, N)`.
    :param right: `(..., P, Q)`.
    :return: `(..., M P, N Q)`.
    """
    return torch.einsum("...ij,...ab->...iajb", left, right).flatten(-2).flatten(-3, -2)


def all_tasks(data: LinearOperator, task_covariance: Tensor) -> LinearOperator | None:
    r"""
    The covariance :math:`K \otimes B` of all tasks at all inputs; None where K has no low-rank structure.

    The variance :math:`\delta_n` that the functions do not represent at input n is that of all its tasks,
    :math:`\delta_n B`.

    :param data: K, what a :class:`~gpytorch_tkrr.HilbertKernel`, scaled or not, evaluates to.
    :param task_covariance: B, `(..., T, T)`.
    """
    if isinstance(data, HilbertLinearOperator):
        return HilbertTaskLinearOperator(data, robust_cholesky(task_covariance.double()))
    if not isinstance(data, HilbertAddedDiagLinearOperator):
        return None
    low_rank = HilbertTaskLinearOperator(data.low_rank, robust_cholesky(task_covariance.double()))
    blocks = data.noise.unsqueeze(-1).unsqueeze(-1) * task_covariance.double().unsqueeze(-3)  # (..., N or 1, T, T)
    if blocks.shape[-3] == 1:
        return HilbertTaskNoiseLinearOperator.from_matrix(low_rank, blocks.squeeze(-3))
    return SumLinearOperator(low_rank, BlockDiagLinearOperator(to_linear_operator(blocks.to(data.dtype))))


def split_tasks(covariance: LinearOperator) -> tuple[HilbertLinearOperator, Tensor | None]:
    """
    The low-rank part of the covariance of all tasks at all inputs, and what the functions do not represent of the
    covariance of the tasks at each input, `(..., N, T, T)`, or `(..., 1, T, T)` where it is the same at all of them.

    :param covariance: What :func:`all_tasks` returns, or a sum of such covariances.
    """
    if isinstance(covariance, RefusedLinearOperator):
        raise covariance.error
    if isinstance(covariance, HilbertLinearOperator):
        return covariance, None
    if isinstance(covariance, HilbertTaskNoiseLinearOperator):
        return covariance.low_rank, covariance.task_noise.unsqueeze(-3)
    if not isinstance(covariance, SumLinearOperator):
        raise TypeError(f"Expected the covariance of tasks of a HilbertKernel, got a {type(covariance).__name__}.")
    blocks = [each for each in covariance.linear_ops if isinstance(each, BlockDiagLinearOperator)]
    parts = [split_tasks(each) for each in covariance.linear_ops if not isinstance(each, BlockDiagLinearOperator)]
    missing = [each.base_linear_op.to_dense().double() for each in blocks]
    missing += [each for _, each in parts if each is not None]
    low_ranks = [low_rank for low_rank, _ in parts]
    return reduce(operator.add, low_ranks), reduce(operator.add, missing) if missing else None


def one_task_each(data: LinearOperator, task_covariance: Tensor, tasks: Tensor) -> LinearOperator | None:
    r"""
    The covariance :math:`K_{nm} B_{t_n t_m}` of one task at each input; None where K is none of this package's.

    :param data: K, what a :class:`~gpytorch_tkrr.HilbertKernel`, scaled or not, evaluates to.
    :param task_covariance: B, `(..., T, T)`.
    :param tasks: t, `(..., N)` integers.
    """
    if isinstance(data, HilbertAddedDiagLinearOperator):  # variance that the functions do not represent
        low_rank = one_task_each(data.low_rank, task_covariance, tasks)
        task_variance = task_covariance.diagonal(dim1=-2, dim2=-1)
        missing = data._diag_tensor._diagonal() * torch.take_along_dim(task_variance, tasks, dim=-1)
        return low_rank + DiagLinearOperator(missing)
    if isinstance(data, ExactLinearOperator):
        task_rows = torch.take_along_dim(task_covariance, tasks.unsqueeze(-1), dim=-2)  # (..., N, T)
        return ExactLinearOperator(data.tensor * torch.take_along_dim(task_rows, tasks.unsqueeze(-2), dim=-1))
    if not isinstance(data, HilbertLinearOperator):
        return None
    return HilbertTaskLinearOperator(data, robust_cholesky(task_covariance.double()), tasks)
