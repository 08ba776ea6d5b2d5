r"""Terms of a reduced-rank Gaussian likelihood, with gradients in closed form.

Low-rank likelihoods need the log determinant of the capacitance matrix :math:`C = I + V^{1/2} G V^{1/2}` and a
quadratic form in its inverse. With :math:`z = C^{-1} V^{1/2} b` their derivatives are

.. math:: \frac{\partial \log |C|}{\partial \log v_i} = 1 - (C^{-1})_{ii}, \qquad
    \frac{\partial\, b^\top V^{1/2} C^{-1} V^{1/2} b}{\partial \log v_i} = z_i^2,

several times cheaper than the derivative of a Cholesky factor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..bases.covariance import Covariance
from ..linalg import robust_cholesky

#: Triangular matrices up to this size are inverted at once.
_LEAF = 128


def capacitance_terms(variances: Tensor, gram: Tensor, rhs: Tensor) -> tuple[Tensor, Tensor]:
    r"""
    :math:`\log |C|` and :math:`b_k^\top V^{1/2} C^{-1} V^{1/2} b_k` with :math:`C = I + V^{1/2} G V^{1/2}`.

    Differentiable in all arguments, any number of times.

    :param variances: v, `(..., M)`, float64; where they have underflowed their gradient is zero.
    :param gram: G, `(..., M, M)`, float64.
    :param rhs: b, `(..., M, K)`, float64.
    :return: `(...)` and `(..., K)`.

    Example:
        >>> import torch
        >>> from gpytorch_tkrr.operators.capacitance import capacitance_terms
        >>> one = torch.ones(1, dtype=torch.float64)
        >>> capacitance_terms(2 * one, one.view(1, 1), 2 * one.view(1, 1))  # log 3, and 2 * 2 / 3 * 2
        (tensor(1.0986, dtype=torch.float64), tensor([2.6667], dtype=torch.float64))
    """
    return _CapacitanceTerms.apply(variances, gram, rhs)


def root(variances: Tensor) -> Tensor:
    r"""
    :math:`v^{1/2}`, with a gradient that is zero, not NaN, where v has underflowed.

    :param variances: v.
    """
    return variances.clamp_min(1e-300).sqrt()


def capacitance_factor(prior: Covariance, precision: Tensor) -> Tensor:
    r"""
    Lower Cholesky factor of :math:`C = I + V^{1/2} P V^{1/2}`, the root of V being :math:`T v^{1/2}`.

    :param prior: V.
    :param precision: P, what the data say about the weights, `(..., M, M)`, float64.
    :return: `(..., M, M)`.
    """
    scale = root(prior.variances)
    identity = torch.eye(scale.shape[-1], dtype=scale.dtype, device=scale.device)
    return robust_cholesky(identity + scale.unsqueeze(-1) * prior.mix_gram(precision) * scale.unsqueeze(-2))


def inverse_diagonal(factor: Tensor) -> Tensor:
    r"""
    The diagonal of :math:`(L L^\top)^{-1}`: squared lengths of the columns of :math:`L^{-1}`.

    :param factor: L, lower triangular, `(..., M, M)`.
    :return: `(..., M)`.
    """
    return _inverse_triangular(factor).square_().sum(-2)


def _inverse_triangular(factor: Tensor) -> Tensor:
    r"""
    :math:`L^{-1}`, half by half, so that nearly all work is in matrix products:

    .. math:: \begin{pmatrix} A & 0 \\ B & C \end{pmatrix}^{-1}
        = \begin{pmatrix} A^{-1} & 0 \\ -C^{-1} B A^{-1} & C^{-1} \end{pmatrix}.
    """
    size = factor.shape[-1]
    if size <= _LEAF:
        identity = torch.eye(size, dtype=factor.dtype, device=factor.device).expand_as(factor)
        return torch.linalg.solve_triangular(factor, identity, upper=False)
    half = size // 2
    upper, lower = _inverse_triangular(factor[..., :half, :half]), _inverse_triangular(factor[..., half:, half:])
    result = torch.zeros_like(factor)
    result[..., :half, :half], result[..., half:, half:] = upper, lower
    result[..., half:, :half] = -(lower @ (factor[..., half:, :half] @ upper))
    return result


def _evaluate(variances: Tensor, gram: Tensor, rhs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The terms, the Cholesky factor L of C, and L^-1 V^1/2 b."""
    scale = root(variances)
    capacitance = scale.unsqueeze(-1) * gram * scale.unsqueeze(-2)
    capacitance.diagonal(dim1=-2, dim2=-1).add_(1.0)
    factor = robust_cholesky(capacitance)
    whitened = torch.linalg.solve_triangular(factor, scale.unsqueeze(-1) * rhs, upper=False)
    return 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1), whitened.square().sum(-2), factor, whitened


class _CapacitanceTerms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, variances: Tensor, gram: Tensor, rhs: Tensor) -> tuple[Tensor, Tensor]:
        logdet, quadratic, factor, whitened = _evaluate(variances, gram, rhs)
        ctx.save_for_backward(variances, gram, rhs, factor, whitened)
        return logdet, quadratic

    @staticmethod
    def backward(ctx: Any, grad_logdet: Tensor, grad_quadratic: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, factor, whitened = ctx.saved_tensors
        if torch.is_grad_enabled():  # derivatives of these derivatives are wanted: leave them to autograd
            wanted = [tensor for tensor in inputs if tensor.requires_grad]
            terms = _evaluate(*inputs)[:2]
            grads = iter(torch.autograd.grad(terms, wanted, (grad_logdet, grad_quadratic), create_graph=True))
            return tuple(next(grads) if tensor.requires_grad else None for tensor in inputs)

        variances, gram, rhs = inputs
        scale = root(variances).unsqueeze(-1)  # (..., M, 1)
        z = torch.linalg.solve_triangular(factor.mT, whitened, upper=True)  # (..., M, K)
        weighted = grad_quadratic.unsqueeze(-2) * z
        in_variances = in_gram = in_rhs = None
        if ctx.needs_input_grad[0]:
            in_log = grad_logdet.unsqueeze(-1) * (1 - inverse_diagonal(factor)) + (weighted * z).sum(-1)
            in_variances = torch.where(variances > 1e-300, in_log / variances, 0.0).sum_to_size(variances.shape)
        if ctx.needs_input_grad[1]:
            inverse = torch.cholesky_inverse(factor)
            in_capacitance = grad_logdet.unsqueeze(-1).unsqueeze(-1) * inverse - weighted @ z.mT
            in_gram = (scale * in_capacitance * scale.mT).sum_to_size(gram.shape)
        if ctx.needs_input_grad[2]:
            in_rhs = (2 * scale * weighted).sum_to_size(rhs.shape)
        return in_variances, in_gram, in_rhs
