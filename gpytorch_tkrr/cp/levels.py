r"""The sums and the conditional of a category's factor, at a cost that is linear in the number of its levels.

All functions of a category are constant on each level, so that the data enter through one small matrix for each level,
:math:`S_l = \sum_{n: x_n = l} w_n p_n p_n^\top` `(R, R)`. Two indicators never meet. The precision of the whitened
weights, those of the M' other functions first, is an arrow,

.. math:: P = \begin{pmatrix} A & B_1^\top & B_2^\top & \cdots \\ B_1 & D_1 \\ B_2 & & D_2 \\ \vdots & & & \ddots
    \end{pmatrix}, \qquad D_l = v_l S_l / s^2 + Q, \quad B_l = \sqrt{v_l}\, S_l / s^2 \otimes z_l^\top,

with :math:`z_l` the other functions at level l. The levels are eliminated one by one, which leaves the Schur complement
:math:`A - \sum_l B_l^\top D_l^{-1} B_l` of size R M'. It is the same Gaussian as that of the whole matrix, exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..bases.basis import Basis, ConcatenatedBasis
from ..bases.covariance import Covariance
from ..bases.levels import LevelBasis
from ..linalg import jittered_cholesky
from .cells import DistinctValues
from .conditional import Conditional, DenseGram, design_rows, unit_scale
from .moments import MomentTable


class LevelTable(MomentTable):
    """
    The moment functions of a category: the indicators of its levels.

    :param basis: Functions of one input, among them one set of levels.
    """

    def __init__(self, basis: ConcatenatedBasis):
        self.basis, self.parts = basis, list(basis.bases)
        position = next(i for i, part in enumerate(self.parts) if isinstance(part, LevelBasis))
        self.level_basis: LevelBasis = self.parts[position]  # type: ignore[assignment]
        start = sum(part.num_functions for part in self.parts[:position])
        self.num_functions = basis.num_functions
        self.num_moments = self.level_basis.num_functions
        self.levels = slice(start, start + self.num_moments)
        self.others = [j for j in range(self.num_functions) if not start <= j < start + self.num_moments]
        rest = [part for i, part in enumerate(self.parts) if i != position]
        nodes = self.level_basis.levels
        self.nodes = nodes
        self.values = ConcatenatedBasis(*rest)(nodes) if rest else nodes.new_zeros(len(nodes), 0)  # (L, M')

    @classmethod
    def applies(cls, basis: Basis) -> bool:
        """
        Whether a basis is that of a category.

        :param basis: Functions of one input.
        """
        parts = basis.bases if isinstance(basis, ConcatenatedBasis) else (basis,)
        return sum(isinstance(part, LevelBasis) for part in parts) == 1

    def features(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        out = self._buffer(self.num_functions, x) if out is None else out
        self.basis.fill(x, out)
        return out

    def band(self, low: float, high: float) -> None:
        return None

    def project(self, factor: Tensor, x: Tensor, *, rows: int) -> Tensor:
        return self.at_levels(factor).index_select(1, self.level_basis.codes(x))

    def group(self, x: Tensor) -> DistinctValues:
        return DistinctValues(self.nodes.to(x.device), self.level_basis.codes(x))

    def at_nodes(self, factor: Tensor, nodes: Tensor) -> Tensor:
        return self.at_levels(factor)

    def at_levels(self, factor: Tensor) -> Tensor:
        """
        The functions at all levels.

        :param factor: Their weights, `(R, M)`.
        :return: `(R, L)`.
        """
        return factor[:, self.levels] + factor[:, self.others] @ self.values.to(factor.device).mT

    def from_levels(self, sums: Tensor) -> Tensor:
        """
        Sums over rows of the functions, from those of each level.

        :param sums: `(R, L)`.
        :return: `(R, M)`.
        """
        total = sums.new_empty(sums.shape[0], self.num_functions)
        total[:, self.levels], total[:, self.others] = sums, sums @ self.values.to(sums.device)
        return total

    def add_nodes(self, moments: Tensor, rhs: Tensor, nodes: Tensor, per_node: Tensor) -> None:
        num_products = moments.shape[1]
        moments.add_(per_node[:, :num_products])
        rhs.add_(self.from_levels(per_node[:, num_products:].mT))

    def __call__(self, x: Tensor, *, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        features = self.features(x, out=None if out is None else out[0])
        if out is None:
            return features, features[self.levels]
        out[1].copy_(features[self.levels])
        return out

    def gram(self, sums: Tensor) -> Tensor:
        values = torch.zeros(self.num_moments, self.num_functions, dtype=torch.float64, device=sums.device)
        values[:, self.levels].fill_diagonal_(1.0)
        values[:, self.others] = self.values.to(sums.device)
        flat = sums.reshape(len(sums), -1)
        weighted = (flat.mT.unsqueeze(-1) * values).mT  # (Q, M, L)
        return (weighted @ values).reshape(*sums.shape[1:], self.num_functions, self.num_functions)

    def gram_weights(self, variances: Tensor) -> Tensor:
        at_levels = torch.ones(self.num_moments, self.num_functions, dtype=torch.float64, device=variances.device)
        at_levels[:, self.levels] = torch.eye(self.num_moments, dtype=torch.float64, device=variances.device)
        at_levels[:, self.others] = self.values.to(variances).square()
        return self.num_moments * (at_levels @ variances).square()  # G is a sum of one matrix of rank one for each

    def structured(self, sums: Tensor) -> LevelGram:
        return LevelGram(self, sums)


@dataclass(frozen=True)
class LevelGram:
    """
    The Gram matrix of a category's factor.

    :param table: The functions.
    :param blocks: :math:`S_l`, `(L, R, R)`.
    """

    table: LevelTable
    blocks: Tensor

    def dense(self) -> Tensor:
        """G as `(R, M, R, M)`."""
        return self.table.gram(self.blocks).permute(0, 2, 1, 3).contiguous()

    def apply(self, factor: Tensor) -> Tensor:
        """
        G times a factor.

        :param factor: `(R, M)`.
        """
        values = self.table.at_levels(factor)  # (R, L)
        return self.table.from_levels(torch.bmm(self.blocks, values.mT.unsqueeze(-1)).squeeze(-1).mT)

    def squares(self, factor: Tensor) -> Tensor:
        """
        The sum of squares of each component alone.

        :param factor: `(R, M)`.
        :return: `(R,)`.
        """
        return (self.blocks.diagonal(dim1=1, dim2=2).mT * self.table.at_levels(factor).square()).sum(-1)

    def between(self, factor: Tensor) -> Tensor:
        """
        See :meth:`DenseGram.between`.

        :param factor: A, `(R, M)`.
        """
        values = self.table.at_levels(factor)
        return (values * self.blocks[:, 0, 0]) @ values.mT

    def plus(self, form: Tensor, other: LevelGram) -> LevelGram:
        """
        See :meth:`DenseGram.plus`.

        :param form: H, `(R, R)`.
        :param other: The Gram matrix of one component, with the same functions.
        """
        return LevelGram(self.table, torch.addcmul(self.blocks, form, other.blocks))

    def conditional(self, covariance: Covariance, prior: Tensor, noise: float) -> Conditional | LevelConditional:
        """
        See :meth:`DenseGram.conditional`.

        :param covariance: V, of M weights.
        :param prior: Q, `(R, R)`, or its diagonal `(R,)`.
        :param noise: The noise variance.
        """
        if covariance.mixing is not None:
            return DenseGram(self.dense()).conditional(covariance, prior, noise)
        prior = prior.diag() if prior.dim() == 1 else prior
        root = covariance.root
        values = self.table.values.to(root.device) * root[self.table.others]
        return LevelConditional(self.table, self.blocks / noise, values, root[self.table.levels], prior)


class LevelConditional:
    r"""
    The factorised precision of a category's factor, with the methods of
    :class:`~gpytorch_tkrr.cp.conditional.Conditional`: vectors are the whitened weights `(R, M)`, flattened.

    :param table: The functions.
    :param blocks: :math:`S_l / s^2`, `(L, R, R)`.
    :param values: z, the other functions at each level times the roots of their variances, `(L, M')`.
    :param roots: :math:`\sqrt{v_l}`, `(L,)`.
    :param prior: Q, `(R, R)`.
    """

    jitter = 0.0

    def __init__(self, table: LevelTable, blocks: Tensor, values: Tensor, roots: Tensor, prior: Tensor):
        self.table = table
        rank, num_others = len(prior), values.shape[1]
        diagonal = prior.diagonal()
        squares = blocks.diagonal(dim1=1, dim2=2)  # (L, R)
        self.level_scale = unit_scale(roots.square().unsqueeze(-1) * squares + diagonal)  # (L, R)
        self.other_scale = unit_scale(squares.mT @ values.square() + diagonal.unsqueeze(-1))  # (R, M')
        inner = roots.square().reshape(-1, 1, 1) * blocks + prior
        inner = inner * self.level_scale.unsqueeze(-1) * self.level_scale.unsqueeze(-2)
        self.level_factor, _ = jittered_cholesky(inner)  # (L, R, R)
        cross = (blocks * (roots.unsqueeze(-1) * self.level_scale).unsqueeze(-1)).unsqueeze(-1)
        cross = cross * values[:, None, None, :] * self.other_scale  # (L, R, R, M')
        self.cross = torch.linalg.solve_triangular(
            self.level_factor, cross.reshape(len(blocks), rank, rank * num_others), upper=False
        )
        corner = torch.einsum("lrs,lj,lk->rjsk", blocks, values, values)
        corner.diagonal(dim1=1, dim2=3).add_(prior.unsqueeze(-1))
        corner = corner * self.other_scale.unsqueeze(-1).unsqueeze(-1) * self.other_scale
        flat = self.cross.flatten(0, 1)
        schur = corner.reshape(rank * num_others, rank * num_others) - flat.mT @ flat
        self.other_factor: Tensor = schur
        if num_others:
            self.other_factor, self.jitter = jittered_cholesky(schur)

    def _split(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """`(R M, n)` as `(L, R, n)` and `(R M', n)`."""
        cube = vectors.reshape(self.level_scale.shape[1], self.table.num_functions, vectors.shape[-1])
        return cube[:, self.table.levels].transpose(0, 1), cube[:, self.table.others].flatten(0, 1)

    def _join(self, levels: Tensor, others: Tensor) -> Tensor:
        """The inverse of :meth:`_split`."""
        rank = levels.shape[1]
        cube = levels.new_empty(rank, self.table.num_functions, levels.shape[-1])
        cube[:, self.table.levels] = levels.transpose(0, 1)
        cube[:, self.table.others] = others.reshape(rank, len(self.table.others), levels.shape[-1])
        return cube.flatten(0, 1)

    def half_solve(self, rhs: Tensor) -> Tensor:
        """
        As that of :class:`Conditional`.

        :param rhs: `(R M, n)`.
        """
        levels, others = self._split(rhs)
        levels = torch.linalg.solve_triangular(self.level_factor, self.level_scale.unsqueeze(-1) * levels, upper=False)
        others = self.other_scale.reshape(-1, 1) * others - torch.einsum("lrk,lrn->kn", self.cross, levels)
        return self._join(levels, torch.linalg.solve_triangular(self.other_factor, others, upper=False))

    def half_covariance(self, noise: Tensor) -> Tensor:
        """
        As that of :class:`Conditional`.

        :param noise: `(R M,)`.
        """
        levels, others = self._split(noise.unsqueeze(-1))
        others = torch.linalg.solve_triangular(self.other_factor.mT, others, upper=True)
        levels = torch.linalg.solve_triangular(self.level_factor.mT, levels - self.cross @ others, upper=True)
        scaled = self._join(self.level_scale.unsqueeze(-1) * levels, self.other_scale.reshape(-1, 1) * others)
        return scaled.squeeze(-1)

    def solve(self, rhs: Tensor) -> Tensor:
        """
        As that of :class:`Conditional`.

        :param rhs: `(R M,)`.
        """
        return self.half_covariance(self.half_solve(rhs.unsqueeze(-1)).squeeze(-1))

    def row_variances(self, p: Tensor, z: Tensor) -> Tensor:
        """
        As that of :class:`Conditional`. A row has one level, and only its block is asked.

        :param p: `(n, R)`.
        :param z: Whitened features, `(n, M)`.
        """
        size, code = z[:, self.table.levels].max(-1)
        own: Tensor = (self.level_scale[code] * p * size.unsqueeze(-1)).unsqueeze(-1)
        own = torch.linalg.solve_triangular(self.level_factor[code], own, upper=False)  # (n, R, 1)
        others = self.other_scale.reshape(1, -1) * design_rows(p, z[:, self.table.others])
        others = others - (self.cross[code].mT @ own).squeeze(-1)
        rest: Tensor = torch.linalg.solve_triangular(self.other_factor, others.mT, upper=False)
        return own.square().sum((1, 2)) + rest.square().sum(0)

    @property
    def size(self) -> int:
        """K, the number of weights."""
        return self.level_scale.shape[1] * self.table.num_functions

    def to(self, device: torch.device) -> LevelConditional:
        """
        The same on another device.

        :param device: The device.
        """
        moved = LevelConditional.__new__(LevelConditional)
        vars(moved).update({k: v.to(device) if isinstance(v, Tensor) else v for k, v in vars(self).items()})
        return moved

    def logdet(self) -> Tensor:
        r""":math:`\log |P|`."""
        factors = self.level_factor.diagonal(dim1=1, dim2=2).log().sum() + self.other_factor.diagonal().log().sum()
        return 2 * (factors - self.level_scale.log().sum() - self.other_scale.log().sum())


def moment_table(basis: Basis) -> MomentTable:
    """
    The moment functions of a mode.

    :param basis: Its functions.
    """
    if LevelTable.applies(basis):
        return LevelTable(basis if isinstance(basis, ConcatenatedBasis) else ConcatenatedBasis(basis))
    return MomentTable(basis)
