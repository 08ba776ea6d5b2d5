"""The low-rank operators: linear_operator's own conformance suites, and dense algebra."""

from __future__ import annotations

import unittest

import gpytorch
import pytest
import torch
from linear_operator.operators import AddedDiagLinearOperator, ConstantDiagLinearOperator, DiagLinearOperator
from linear_operator.test.linear_operator_test_case import (
    LinearOperatorTestCase,
    RectangularLinearOperatorTestCase,
)

from gpytorch_tkrr import DenseFallbackWarning, ReducedRankNormal
from gpytorch_tkrr.operators.lazy_operators import HilbertCrossLinearOperator
from gpytorch_tkrr.operators.operator import HilbertAddedDiagLinearOperator, HilbertLinearOperator

# Upstream's suites index through sparse matrices and exercise deliberately ill-advised paths.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
    pytest.mark.filterwarnings("ignore::linear_operator.utils.warnings.NumericalWarning"),
]


def _dense(features, variances):
    return (features * variances.unsqueeze(-2)) @ features.mT


class _HilbertCase(LinearOperatorTestCase):
    seed = 0
    batch_shape: tuple[int, ...] = ()

    def create_linear_op(self):
        features = torch.randn(*self.batch_shape, 5, 7)
        variances = torch.rand(*self.batch_shape, 7) + 0.5
        return HilbertLinearOperator(features.requires_grad_(True), variances.requires_grad_(True))

    def evaluate_linear_op(self, linear_op):
        return _dense(linear_op.features, linear_op.variances)


class TestHilbertLinearOperator(_HilbertCase, unittest.TestCase):
    pass


class TestHilbertLinearOperatorBatch(_HilbertCase, unittest.TestCase):
    batch_shape = (3,)


class TestHilbertLinearOperatorMultiBatch(_HilbertCase, unittest.TestCase):
    batch_shape = (2, 3)


class TestHilbertLinearOperatorSharedFeatures(_HilbertCase, unittest.TestCase):
    """One feature matrix, a batch of variances."""

    batch_shape = (3,)

    def create_linear_op(self):
        features = torch.randn(5, 7)
        variances = torch.rand(3, 7) + 0.5
        return HilbertLinearOperator(features.requires_grad_(True), variances.requires_grad_(True))


class _AddedDiagCase(LinearOperatorTestCase):
    seed = 0
    should_call_cg = False  # solves are direct
    should_call_lanczos = False
    batch_shape: tuple[int, ...] = ()
    num_features = 3
    constant = False

    def create_linear_op(self):
        features = torch.randn(*self.batch_shape, 6, self.num_features)
        variances = torch.rand(*self.batch_shape, self.num_features) + 0.5
        low_rank = HilbertLinearOperator(features.requires_grad_(True), variances.requires_grad_(True))
        if self.constant:
            noise = (torch.rand(*self.batch_shape, 1) + 0.5).requires_grad_(True)
            return low_rank + ConstantDiagLinearOperator(noise, diag_shape=6)
        return low_rank + DiagLinearOperator((torch.rand(*self.batch_shape, 6) + 0.5).requires_grad_(True))

    def evaluate_linear_op(self, linear_op):
        low_rank, diagonal = linear_op._linear_op, linear_op._diag_tensor
        return _dense(low_rank.features, low_rank.variances) + diagonal.to_dense()


class TestAddedDiag(_AddedDiagCase, unittest.TestCase):
    pass


class TestAddedDiagBatch(_AddedDiagCase, unittest.TestCase):
    batch_shape = (3,)


class TestAddedDiagMultiBatch(_AddedDiagCase, unittest.TestCase):
    batch_shape = (2, 3)


class TestAddedDiagConstant(_AddedDiagCase, unittest.TestCase):
    constant = True
    num_features = 7  # with fewer than rows, the noise is a repeated eigenvalue and its eigenvectors are arbitrary


class TestAddedDiagConstantBatch(_AddedDiagCase, unittest.TestCase):
    constant = True
    num_features = 7
    batch_shape = (3,)


class TestAddedDiagMoreFeaturesThanRows(_AddedDiagCase, unittest.TestCase):
    num_features = 9


@pytest.mark.parametrize("num_features", [3, 40])
@pytest.mark.parametrize("constant", [True, False])
def test_likelihood_terms_equal_dense_algebra(num_features, constant):
    """Also for more functions than rows, with gradients in features, variances and noise."""
    features = torch.randn(20, num_features, dtype=torch.float64, requires_grad=True)
    variances = (torch.rand(num_features, dtype=torch.float64) + 0.1).requires_grad_(True)
    noise = (torch.rand(1 if constant else 20, dtype=torch.float64) + 0.1).requires_grad_(True)
    rhs = torch.randn(20, 2, dtype=torch.float64, requires_grad=True)
    operator = HilbertLinearOperator(features, variances).add_diagonal(noise)
    assert isinstance(operator, HilbertAddedDiagLinearOperator)
    quadratic, logdet = operator.inv_quad_logdet(rhs, logdet=True)
    inputs = (features, variances, noise, rhs)
    actual = torch.autograd.grad(quadratic + 0.3 * logdet, inputs)

    dense = _dense(features, variances) + torch.diag(noise.expand(20))
    expected_quadratic = (rhs * torch.linalg.solve(dense, rhs)).sum()
    expected = torch.autograd.grad(expected_quadratic + 0.3 * torch.logdet(dense), inputs)
    torch.testing.assert_close(quadratic, expected_quadratic, rtol=1e-10, atol=0)
    torch.testing.assert_close(logdet, torch.logdet(dense), rtol=1e-10, atol=0)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


def test_gradient_survives_variances_that_underflow():
    features = torch.randn(10, 2, dtype=torch.float64)
    log_variance = torch.tensor([0.0, -2000.0], dtype=torch.float64, requires_grad=True)
    operator = HilbertLinearOperator(features, log_variance.exp()).add_jitter(0.1)
    operator.logdet().backward()
    assert torch.isfinite(log_variance.grad).all()


def test_samples_have_the_right_covariance():
    operator = HilbertLinearOperator(torch.randn(4, 3), torch.rand(3) + 0.5).add_jitter(0.2)
    samples = operator.zero_mean_mvn_samples(200_000)
    torch.testing.assert_close(samples.T.cov(), operator.to_dense(), rtol=0.05, atol=0.05)


def test_scaling_by_a_batch_keeps_the_structure():
    operator = HilbertLinearOperator(torch.randn(4, 3), torch.rand(3))
    scaled = operator.mul(torch.tensor([1.0, 2.0]).view(2, 1, 1))
    assert isinstance(scaled, HilbertLinearOperator)
    torch.testing.assert_close(scaled.to_dense(), torch.stack([operator.to_dense(), 2 * operator.to_dense()]))
    assert not isinstance(operator.mul(torch.tensor(-1.0)), HilbertLinearOperator)


def test_wrong_shapes_are_named():
    with pytest.raises(ValueError, match=r"features \(..., N, M\) and variances \(..., M\)"):
        HilbertLinearOperator(torch.randn(4, 3), torch.rand(2))


def test_a_diagonal_can_only_be_added_to_a_low_rank_operator():
    dense = AddedDiagLinearOperator(torch.eye(3), DiagLinearOperator(torch.ones(3)))
    with pytest.raises(TypeError, match="HilbertLinearOperator"):
        HilbertAddedDiagLinearOperator(dense, DiagLinearOperator(torch.ones(3)))


def test_dense_fallback_warns_and_reduced_rank_normal_avoids_it():
    variances = torch.rand(3, requires_grad=True)
    operator = HilbertLinearOperator(torch.randn(10, 3), variances).add_jitter(0.1)
    value = torch.randn(10)
    expected = gpytorch.distributions.MultivariateNormal(torch.zeros(10), operator).log_prob(value)
    with gpytorch.settings.fast_computations.log_prob(False):
        quiet = ReducedRankNormal(torch.zeros(10), operator).log_prob(value)
        with pytest.warns(DenseFallbackWarning, match="fast_computations.log_prob"):
            slow = gpytorch.distributions.MultivariateNormal(torch.zeros(10), operator).log_prob(value)
    torch.testing.assert_close(quiet, expected)
    torch.testing.assert_close(slow, expected, rtol=1e-3, atol=1e-3)


class _Angles:
    """Features of one input: what an expansion is to the operator."""

    @staticmethod
    def features(x):
        return torch.cat([torch.sin(j * x.double()) for j in (1, 2, 3)], dim=-1)


class _CrossCase(RectangularLinearOperatorTestCase):
    seed = 0
    batch_shape: tuple[int, ...] = ()

    def create_linear_op(self):
        x1, x2 = torch.randn(*self.batch_shape, 4, 1), torch.randn(*self.batch_shape, 6, 1)
        variances = (torch.rand(*self.batch_shape, 3) + 0.5).requires_grad_(True)
        return HilbertCrossLinearOperator(
            x1.requires_grad_(True), x2.requires_grad_(True), variances, expansion=_Angles()
        )

    def evaluate_linear_op(self, linear_op):
        left = _Angles.features(linear_op.x1) * linear_op.variances.double().unsqueeze(-2)
        return (left @ _Angles.features(linear_op.x2).mT).to(linear_op.dtype)


class TestCross(_CrossCase, unittest.TestCase):
    pass


class TestCrossBatch(_CrossCase, unittest.TestCase):
    batch_shape = (3,)


class TestCrossMultiBatch(_CrossCase, unittest.TestCase):
    batch_shape = (2, 3)
