"""Gram matrices by cosine moments against dense products."""

from __future__ import annotations

import pytest
import torch
from chebyshev import ChebyshevBasis
from gpytorch.kernels import AdditiveKernel, LinearKernel, MaternKernel, PeriodicKernel, RBFKernel, ScaleKernel
from hypothesis import given
from hypothesis import strategies as st

from gpytorch_tkrr import Domain, FullTensor, HilbertKernel, HyperbolicCross, TotalDegree
from gpytorch_tkrr.features.expansion import OneInput, Term
from gpytorch_tkrr.operators.gram import BATCH_ROWS
from gpytorch_tkrr.operators.lazy_features import LazyFeatures


def make_expansion(dims, num_basis, index_set=None, base=None):
    base = RBFKernel() if base is None else base
    domain = Domain(torch.linspace(0.2, 0.4, dims), torch.linspace(1.5, 2.5, dims))
    return HilbertKernel(base, domain, num_basis, index_set=index_set).expansion(dims)


def gram(expansion, x, weights=None):
    return LazyFeatures(x, expansion=expansion).gram(weights)


def dense(features, weights=None):
    weights = torch.ones(features.shape[:-1], dtype=torch.float64) if weights is None else weights
    return features.mT @ (weights.unsqueeze(-1) * features)


def assert_equal(actual, expected):
    assert actual.dtype == torch.float64
    assert (actual - expected).abs().max() <= 1e-12 * expected.abs().max()


@given(
    num_basis=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    index_set=st.sampled_from([FullTensor(), TotalDegree(7), HyperbolicCross(6)]),
    num_rows=st.integers(1, 60),
    weighted=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_moments_equal_dense_products(num_basis, index_set, num_rows, weighted, seed):
    generator = torch.Generator().manual_seed(seed)
    dims = len(num_basis)
    expansion = make_expansion(dims, num_basis, index_set)
    x = 6 * torch.rand(num_rows, dims, dtype=torch.float64, generator=generator) - 3  # also outside the box
    weights = torch.randn(num_rows, dtype=torch.float64, generator=generator) if weighted else None
    features = expansion.features(x)
    expected = dense(features, weights)
    assert (gram(expansion, x, weights) - expected).abs().max() <= 1e-12 * (1 + num_rows)


@pytest.mark.parametrize(("dims", "num_basis"), [(1, 40), (2, 12), (3, [5, 6, 4])])
@pytest.mark.parametrize("weighted", [False, True])
def test_more_rows_than_a_batch(dims, num_basis, weighted):
    expansion = make_expansion(dims, num_basis)
    x = 2 * torch.rand(2 * BATCH_ROWS + 17, dims, dtype=torch.float64) - 1
    weights = torch.rand(len(x), dtype=torch.float64) if weighted else None
    features = expansion.features(x)
    assert_equal(gram(expansion, x, weights), dense(features, weights))


@pytest.mark.parametrize("weight_shape", [None, (3,), (1,), (2, 3), ()])
def test_batches(weight_shape):
    expansion = make_expansion(2, 6)
    x = torch.rand(3, 20, 2, dtype=torch.float64)
    weights = None if weight_shape is None else torch.rand(*weight_shape, 20, dtype=torch.float64)
    features = expansion.features(x)
    assert_equal(gram(expansion, x, weights), dense(features, weights))


def test_sums_of_parts_with_and_without_moments():
    base = AdditiveKernel(
        ScaleKernel(RBFKernel(active_dims=[0])), MaternKernel(active_dims=[1]), LinearKernel(), PeriodicKernel()
    )
    expansion = make_expansion(2, 9, base=base)
    x = torch.rand(50, 2, dtype=torch.float64)
    features = expansion.features(x)
    weights = torch.rand(50, dtype=torch.float64)
    assert_equal(gram(expansion, x, weights), dense(features, weights))


def test_batch_of_periods():
    base = PeriodicKernel(batch_shape=torch.Size([2]))
    base.period_length = torch.tensor([0.5, 2.0]).reshape(2, 1, 1)
    expansion = make_expansion(1, 5, base=AdditiveKernel(base, RBFKernel(batch_shape=torch.Size([2]))))
    x = torch.rand(30, 1, dtype=torch.float64)
    features = expansion.features(x).detach()
    assert features.shape == (2, 30, 12)
    assert_equal(gram(expansion, x), dense(features))


def test_cache_follows_the_content_of_the_weights():
    expansion = make_expansion(1, 8)
    x = torch.rand(30, 1, dtype=torch.float64)
    features = expansion.features(x)
    cache = LazyFeatures(x, expansion=expansion)
    weights = torch.rand(30, dtype=torch.float64)
    first = cache.gram(weights)
    assert cache.gram(weights.clone()) is first
    assert cache.gram() is cache.gram()
    weights[3] = 9.0  # in place
    assert_equal(cache.gram(weights), dense(features, weights))
    assert_equal(cache.gram(), dense(features))


@pytest.mark.parametrize("shape", [(20,), (2, 20)])
def test_gradient_in_the_weights(shape):
    expansion = make_expansion(1, 4)
    x = torch.rand(20, 1, dtype=torch.float64)
    cache = LazyFeatures(x, expansion=expansion)
    weights = torch.rand(*shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(cache.gram, (weights,))


class ChebyshevTerm(Term):
    basis = ChebyshevBasis(12)

    def variances(self):
        return torch.ones(12, dtype=torch.float64)

    def prior_variance(self, x):
        return torch.ones(1, dtype=torch.float64)


def test_a_basis_of_ones_own_brings_its_identity(monkeypatch):
    expansion = OneInput(1, ChebyshevTerm())
    x = 2 * torch.rand(50, 2, dtype=torch.float64) - 1
    features, weights = expansion.features(x), torch.rand(50, dtype=torch.float64)
    calls = []
    original = ChebyshevBasis.moments
    monkeypatch.setattr(ChebyshevBasis, "moments", lambda self, x: (calls.append(1), original(self, x))[1])
    assert_equal(gram(expansion, x, weights), dense(features, weights))
    assert calls


@pytest.mark.parametrize("batch_shape", [(), (2,)])
def test_functions_of_a_period(batch_shape):
    base = PeriodicKernel(batch_shape=torch.Size(batch_shape)).double()
    base.period_length = torch.tensor([0.7, 1.3])[: len(batch_shape) + 1].reshape(*batch_shape, 1, 1)
    expansion = make_expansion(1, 12, base=base)
    x = torch.rand(40, 1, dtype=torch.float64)
    features = expansion.features(x).detach()
    assert_equal(gram(expansion, x), dense(features))
