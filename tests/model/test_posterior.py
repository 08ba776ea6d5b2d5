from __future__ import annotations

import unittest

import gpytorch
import pytest
import torch
from linear_operator.operators import ConstantDiagLinearOperator, DiagLinearOperator
from linear_operator.test.linear_operator_test_case import LinearOperatorTestCase

from gpytorch_tkrr.model import posterior as posterior_module
from gpytorch_tkrr.model.posterior import PosteriorCovariance

# Upstream's suite indexes through sparse matrices and exercises deliberately ill-advised paths.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
    pytest.mark.filterwarnings("ignore::linear_operator.utils.warnings.NumericalWarning"),
]


class Waves:
    """A posterior with a known root."""

    def mean(self, x):
        return x.sum(-1)

    def root(self, x):
        return torch.cat([torch.sin(x), torch.cos(2 * x), x], dim=-1).double()


def covariance(*shape, dtype=torch.float64):
    x = torch.rand(*shape, dtype=dtype)
    root = Waves().root(x)
    return PosteriorCovariance(x, posterior=Waves()), (root @ root.mT).to(dtype)


def test_operator_agrees_with_the_dense_matrix(monkeypatch):
    monkeypatch.setattr(posterior_module, "CHUNK_ROWS", 3)
    for shape in [(7, 2), (4, 5, 2), (2, 3, 6, 1)]:
        operator, dense = covariance(*shape)
        assert operator.shape == dense.shape
        torch.testing.assert_close(operator.to_dense(), dense)
        torch.testing.assert_close(operator.diagonal(dim1=-1, dim2=-2), dense.diagonal(dim1=-1, dim2=-2))
        rhs = torch.randn(*dense.shape[:-1], 3, dtype=torch.float64)
        torch.testing.assert_close(operator @ rhs, dense @ rhs)
        torch.testing.assert_close(operator.mT.to_dense(), dense)
        torch.testing.assert_close(operator[..., :3, :3].to_dense(), dense[..., :3, :3])
        torch.testing.assert_close(operator[..., :2, 1:4].to_dense(), dense[..., :2, 1:4])
        diagonal = torch.rand(dense.shape[:-1], dtype=torch.float64)
        total = operator + DiagLinearOperator(diagonal)
        torch.testing.assert_close(total.to_dense(), dense + torch.diag_embed(diagonal))
        root = operator.root_decomposition().root.to_dense()
        torch.testing.assert_close(root @ root.mT, dense)


def test_vector_products_and_elements():
    operator, dense = covariance(6, 2)
    vector = torch.randn(6, dtype=torch.float64)
    torch.testing.assert_close(operator @ vector, dense @ vector)
    torch.testing.assert_close(operator[torch.tensor([1, 4]), torch.tensor([2, 4])], dense[[1, 4], [2, 4]])
    torch.testing.assert_close(operator.expand(3, 6, 6).to_dense(), dense.expand(3, 6, 6))


def test_dtype_and_gradients():
    operator, _ = covariance(5, 2, dtype=torch.float32)
    assert operator.dtype == operator.to_dense().dtype == torch.float32
    assert operator.diagonal(dim1=-1, dim2=-2).dtype == (operator @ torch.ones(5, 1)).dtype == torch.float32
    x = torch.rand(5, 2, dtype=torch.float64, requires_grad=True)
    for value in (lambda op: op.diagonal(dim1=-1, dim2=-2).sum(), lambda op: (op @ torch.ones(5, 1).double()).sum()):
        (gradient,) = torch.autograd.grad(value(PosteriorCovariance(x, posterior=Waves())), x)
        root = Waves().root(x)
        (expected,) = torch.autograd.grad(value(root @ root.mT), x)
        torch.testing.assert_close(gradient, expected)


class _CovarianceCase(LinearOperatorTestCase):
    seed = 0
    batch_shape: tuple[int, ...] = ()

    def create_linear_op(self):
        return PosteriorCovariance(torch.randn(*self.batch_shape, 5, 7).requires_grad_(True), posterior=Waves())

    def evaluate_linear_op(self, linear_op):
        root = Waves().root(linear_op.x)
        return (root @ root.mT).to(linear_op.x.dtype)


class TestCovariance(_CovarianceCase, unittest.TestCase):
    pass


class TestCovarianceBatch(_CovarianceCase, unittest.TestCase):
    batch_shape = (3,)


class TestCovarianceMultiBatch(_CovarianceCase, unittest.TestCase):
    batch_shape = (2, 3)


class _NoisyCase(_CovarianceCase):
    should_call_cg = False  # solves are direct
    should_call_lanczos = False
    constant = False

    def create_linear_op(self):
        noise = torch.rand(*self.batch_shape, 1 if self.constant else 5) + 0.5
        diagonal = ConstantDiagLinearOperator(noise, diag_shape=5) if self.constant else DiagLinearOperator(noise)
        return super().create_linear_op() + diagonal

    def evaluate_linear_op(self, linear_op):
        return super().evaluate_linear_op(linear_op._linear_op) + linear_op._diag_tensor.to_dense()


class TestNoisyCovariance(_NoisyCase, unittest.TestCase):
    pass


class TestNoisyCovarianceBatch(_NoisyCase, unittest.TestCase):
    batch_shape = (3,)


class TestNoisyCovarianceConstant(_NoisyCase, unittest.TestCase):
    constant = True


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_log_prob_is_exact_for_many_points(dtype):
    x = torch.rand(900, 2, dtype=dtype, requires_grad=True)
    y = torch.randn(900, dtype=dtype)
    likelihood = gpytorch.likelihoods.GaussianLikelihood().to(dtype)
    likelihood.noise = 0.3
    prediction = likelihood(
        gpytorch.distributions.MultivariateNormal(x.sum(-1), PosteriorCovariance(x, posterior=Waves()))
    )
    root = Waves().root(x)
    dense = torch.distributions.MultivariateNormal(
        x.double().sum(-1), root @ root.mT + likelihood.noise.item() * torch.eye(900, dtype=torch.float64)
    )
    value, expected = prediction.log_prob(y), dense.log_prob(y.double())
    tolerance = 1e-9 if dtype is torch.float64 else 1e-4
    torch.testing.assert_close(value.double(), expected, rtol=tolerance, atol=0)
    (gradient,) = torch.autograd.grad(value, x)
    (expected,) = torch.autograd.grad(expected, x)
    torch.testing.assert_close(gradient, expected, rtol=1e3 * tolerance, atol=1e3 * tolerance)


def test_large_samples_have_the_covariance():
    operator, dense = covariance(1200, 1)
    samples = (operator + DiagLinearOperator(torch.full((1200,), 0.1, dtype=torch.float64))).zero_mean_mvn_samples(400)
    assert samples.shape == (400, 1200)
    variance = samples.square().mean(0)
    torch.testing.assert_close(variance.mean(), dense.diagonal().mean() + 0.1, rtol=0.15, atol=0)
