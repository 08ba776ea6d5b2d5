"""The terms of a reduced-rank likelihood: dense algebra, and derivatives by finite differences."""

from __future__ import annotations

import pytest
import torch

from gpytorch_tkrr.operators.capacitance import capacitance_terms, inverse_diagonal


def make_inputs(batch_shape=()):
    generator = torch.Generator().manual_seed(0)
    variances = torch.rand(*batch_shape, 4, generator=generator, dtype=torch.float64) + 0.1
    features = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    rhs = torch.randn(4, 2, generator=generator, dtype=torch.float64)
    return variances, features.mT @ features, rhs


@pytest.mark.parametrize("batch_shape", [(), (3,)])
def test_terms_equal_dense_algebra(batch_shape):
    variances, gram, rhs = make_inputs(batch_shape)
    logdet, quadratic = capacitance_terms(variances, gram, rhs)
    matrix = torch.eye(4, dtype=torch.float64) + gram * variances.unsqueeze(-2)  # similar to the capacitance matrix
    posterior = torch.linalg.inv(torch.diag_embed(1 / variances) + gram)
    torch.testing.assert_close(logdet, torch.linalg.slogdet(matrix).logabsdet, rtol=1e-12, atol=0)
    torch.testing.assert_close(quadratic, (rhs * (posterior @ rhs)).sum(-2), rtol=1e-12, atol=0)


@pytest.mark.parametrize("batch_shape", [(), (3,)])
def test_derivatives_are_those_of_finite_differences(batch_shape):
    """First and second ones; the Gram matrix and the right-hand side are shared by the batch."""
    variances, gram, rhs = (tensor.requires_grad_(True) for tensor in make_inputs(batch_shape))

    def terms(variances, gram, rhs):
        return capacitance_terms(variances, (gram + gram.mT) / 2, rhs)

    assert torch.autograd.gradcheck(terms, (variances, gram, rhs))
    assert torch.autograd.gradgradcheck(terms, (variances, gram, rhs))


def test_variances_that_underflow_have_a_gradient_of_zero():
    _, gram, rhs = make_inputs()
    variances = torch.tensor([1.0, 1e-280, 1e-310, 0.0], dtype=torch.float64, requires_grad=True)
    logdet, quadratic = capacitance_terms(variances, gram, rhs)
    (logdet + quadratic.sum()).backward()
    assert torch.isfinite(variances.grad).all()
    assert (variances.grad[2:] == 0).all()


@pytest.mark.parametrize("shape", [(5,), (300,), (2, 300)])
def test_diagonal_of_the_inverse(shape):
    root = torch.randn(*shape, shape[-1], dtype=torch.float64)
    matrix = root @ root.mT + torch.eye(shape[-1], dtype=torch.float64)
    expected = matrix.inverse().diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(inverse_diagonal(torch.linalg.cholesky(matrix)), expected)
