"""Index sets against brute force."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpytorch_tkrr import Ellipsoid, FullTensor, HyperbolicCross, SizeError, TotalDegree
from gpytorch_tkrr.bases.index_set import MAX_FUNCTIONS

RULES = {
    "full": (FullTensor(), lambda j: True),
    "total": (TotalDegree(7), lambda j: sum(j) <= 7),
    "cross": (HyperbolicCross(6), lambda j: math.prod(j) <= 6),
}


@given(num_basis=st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_ellipsoid_equals_brute_force(num_basis):
    expected = [
        list(j)
        for j in itertools.product(*(range(1, m + 1) for m in num_basis))
        if sum(((i - 1) / m) ** 2 for i, m in zip(j, num_basis, strict=True)) < 1 - 1e-9
    ]
    assert Ellipsoid().indices(num_basis).tolist() == expected
    assert Ellipsoid().size(num_basis) == len(expected)


def test_size_of_a_large_ellipsoid_is_about_its_volume():
    exact, about = Ellipsoid().size([99, 99, 99]), Ellipsoid().size([101, 101, 101])
    assert exact < about * 1.03 and about < exact * 1.1


@given(name=st.sampled_from(sorted(RULES)), num_basis=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_indices_equal_brute_force(name, num_basis):
    index_set, keep = RULES[name]
    expected = [list(j) for j in itertools.product(*(range(1, m + 1) for m in num_basis)) if keep(j)]
    assert index_set.indices(num_basis).tolist() == expected
    assert index_set.size(num_basis) == len(expected)


@given(name=st.sampled_from(sorted(RULES)), num_basis=st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_products_follow_the_indices(name, num_basis):
    index_set, _ = RULES[name]
    factors = [torch.randn(4, m) for m in num_basis]
    products = index_set.products(factors)
    for column, j in enumerate(index_set.indices(num_basis).tolist()):
        expected = math.prod(factor[:, i - 1] for factor, i in zip(factors, j, strict=True))
        assert torch.allclose(products[:, column], expected)


def test_six_dimensions_are_usable():
    assert TotalDegree(10).size([20] * 6) == math.comb(10, 6)
    assert HyperbolicCross(12).size([20] * 6) < 1000


@pytest.mark.parametrize("index_set", [FullTensor(), TotalDegree(40), HyperbolicCross(1000)])
def test_large_sets_are_refused_with_advice(index_set):
    with pytest.raises(SizeError, match=rf"more than {MAX_FUNCTIONS} functions.*TKRR"):
        index_set.indices([40] * 6)


def test_empty_set_is_refused():
    with pytest.raises(SizeError, match="keeps no function at all in 4 dimensions"):
        TotalDegree(3).indices([5] * 4)


def test_equal_rules_are_equal():
    assert HyperbolicCross(5) == HyperbolicCross(5) != HyperbolicCross(6)


@pytest.mark.parametrize("index_set", [FullTensor(), Ellipsoid(), HyperbolicCross(20), TotalDegree(11)], ids=str)
def test_large_matrices_of_products_are_the_same(index_set):
    """They are written block by block; small ones are gathered."""
    factors = [torch.rand(20_000, size, dtype=torch.float64) for size in (9, 8, 7)]
    large = index_set.products(factors)
    small = torch.cat([index_set.products([factor[i : i + 100] for factor in factors]) for i in range(0, 20_000, 100)])
    assert large.numel() > 2**20 > 100 * large.shape[-1]
    assert torch.equal(large, small)
