"""Sums over rows and combinations of functions without features, against dense algebra."""

from __future__ import annotations

import pytest
import torch
from gpytorch.kernels import AdditiveKernel, LinearKernel, MaternKernel, PeriodicKernel, RBFKernel, ScaleKernel
from hypothesis import given
from hypothesis import strategies as st

from gpytorch_tkrr import Domain, Ellipsoid, FullTensor, GaussLegendre, HilbertKernel, HyperbolicCross, TotalDegree
from gpytorch_tkrr.operators.blocks import ProductBlock
from gpytorch_tkrr.operators.gram import BATCH_ROWS
from gpytorch_tkrr.operators.lazy_features import LazyFeatures


def make_expansion(dims, num_basis, index_set=None, base=None, basis=None):
    base = RBFKernel() if base is None else base
    domain = Domain(torch.linspace(0.2, 0.4, dims), torch.linspace(1.5, 2.5, dims))
    return HilbertKernel(base, domain, num_basis, index_set=index_set, basis=basis).expansion(dims)


def is_lazy(features):
    return any(isinstance(block, ProductBlock) for block in features._blocks)


def assert_all_equal(expansion, x, num_columns):
    features, dense = LazyFeatures(x, expansion=expansion), expansion.features(x).detach()
    rhs = torch.randn(x.shape[-2], num_columns, dtype=torch.float64)
    u = torch.randn(dense.shape[-1], num_columns, dtype=torch.float64)
    assert features.shape == dense.shape
    torch.testing.assert_close(features.project(rhs), dense.mT @ rhs)
    torch.testing.assert_close(features.evaluate(u), dense @ u)
    torch.testing.assert_close(features.gram(), dense.mT @ dense)
    torch.testing.assert_close(features.mean_square(), dense.square().mean(-2))
    torch.testing.assert_close(features.to_dense(), dense)
    return features


@given(
    num_basis=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    index_set=st.sampled_from([FullTensor(), TotalDegree(7), HyperbolicCross(6), Ellipsoid()]),
    num_rows=st.integers(1, 60),
    num_columns=st.sampled_from([1, 3, 12]),
)
def test_products_of_functions(num_basis, index_set, num_rows, num_columns):
    dims = len(num_basis)
    x = 6 * torch.rand(num_rows, dims, dtype=torch.float64) - 3  # also outside the box
    assert_all_equal(make_expansion(dims, num_basis, index_set), x, num_columns)


@pytest.mark.parametrize("num_columns", [1, 9])
def test_more_rows_than_a_batch(num_columns):
    x = 2 * torch.rand(2 * BATCH_ROWS + 17, 3, dtype=torch.float64) - 1
    assert is_lazy(assert_all_equal(make_expansion(3, [5, 6, 4], Ellipsoid()), x, num_columns))


def test_functions_without_moments():
    expansion = make_expansion(2, 6, basis=GaussLegendre())
    assert is_lazy(assert_all_equal(expansion, torch.rand(40, 2, dtype=torch.float64), 2))


def test_sums_of_products_and_others():
    base = AdditiveKernel(
        ScaleKernel(RBFKernel(active_dims=[0, 1])), MaternKernel(active_dims=[2, 1]), LinearKernel(), PeriodicKernel()
    )
    assert is_lazy(assert_all_equal(make_expansion(3, 7, base=base), torch.rand(50, 3, dtype=torch.float64), 2))


@pytest.mark.parametrize("shape", [(), (2,)])
@pytest.mark.parametrize("is_batch_of_inputs", [False, True])
def test_gradients(shape, is_batch_of_inputs):
    expansion = make_expansion(2, 3)
    x = torch.rand(*([2] if is_batch_of_inputs else []), 8, 2, dtype=torch.float64)
    features = LazyFeatures(x, expansion=expansion)
    rhs = torch.randn(*shape, 8, 2, dtype=torch.float64, requires_grad=True)
    u = torch.randn(*shape, 9, 2, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(*shape, 8, dtype=torch.float64, requires_grad=True)
    for function, argument in ((features.project, rhs), (features.evaluate, u), (features.gram, weights)):
        assert torch.autograd.gradcheck(function, argument)
    for function, argument in ((features.project, rhs), (features.evaluate, u)):
        assert torch.autograd.gradgradcheck(function, argument)


def test_sums_are_remembered_by_content():
    expansion = make_expansion(2, 4)
    features = LazyFeatures(torch.rand(30, 2, dtype=torch.float64), expansion=expansion)
    rhs = torch.randn(30, 1, dtype=torch.float64)
    first = features.project(rhs)
    assert features.project(rhs.clone()) is first
    rhs[3] = 9.0  # in place
    torch.testing.assert_close(features.project(rhs), features.to_dense().mT @ rhs)


def test_training_needs_no_features(monkeypatch):
    """A step of training asks for sums over the rows, never for all features."""
    expansion = make_expansion(2, 5)
    original = type(expansion).features
    rows = []
    monkeypatch.setattr(type(expansion), "features", lambda self, x: (rows.append(len(x)), original(self, x))[1])
    features = LazyFeatures(torch.rand(30, 2, dtype=torch.float64), expansion=expansion)
    features.gram(), features.mean_square(), features.project(torch.ones(30, 1, dtype=torch.float64))
    assert not any(rows)
