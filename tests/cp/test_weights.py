from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from gpytorch_tkrr.cp.weights import CP, CPWeights, gram_but


def full_tensor(factors):
    tensor = factors[0]
    for factor in factors[1:]:
        tensor = torch.einsum("r...,rm->r...m", tensor, factor)
    return tensor.sum(0)


def random_factors(rank, sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rank, size, dtype=torch.float64, generator=generator) for size in sizes]


@given(st.integers(1, 4), st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 100))
def test_norm_and_balance_against_the_full_tensor(rank, sizes, seed):
    factors = random_factors(rank, sizes, seed)
    weights = CPWeights(factors)
    for d, factor in enumerate(factors):
        weights.rescale(d, 3.0 * factor.norm(dim=-1))
    tensor = full_tensor(factors)
    torch.testing.assert_close(weights.squared_norm(), tensor.square().sum())
    torch.testing.assert_close(full_tensor(weights.balanced()), tensor)
    norms = torch.stack([factor.norm(dim=-1) for factor in weights.balanced()])
    torch.testing.assert_close(norms, norms[:1].expand_as(norms))


def test_gram_but_one():
    factors = random_factors(3, [4, 5, 6])
    correlation, log_norm = gram_but(CPWeights(factors), 1)
    expected = (factors[0] @ factors[0].mT) * (factors[2] @ factors[2].mT)
    torch.testing.assert_close(correlation * log_norm.exp().unsqueeze(-1) * log_norm.exp(), expected)


def test_replace_keeps_the_represented_tensor():
    factors = random_factors(3, [4, 5, 6])
    weights = CPWeights(factors)
    weights.rescale(0, torch.tensor([2.0, 5.0, 0.1], dtype=torch.float64))
    new = random_factors(3, [5], seed=1)[0]
    scaled = new * weights.log_scale_but(1).exp().unsqueeze(-1)
    weights.replace(1, scaled, scaled.norm(dim=-1))
    torch.testing.assert_close(full_tensor(weights.balanced()), full_tensor([factors[0], new, factors[2]]))
    torch.testing.assert_close(weights.scaled_factor(1), scaled)


def test_a_zero_column_keeps_its_direction_and_can_be_revived():
    weights = CPWeights(random_factors(2, [3, 4]))
    zero = torch.tensor([[0.0, 0.0, 0.0], [1.0, 2.0, 3.0]], dtype=torch.float64)
    weights.replace(0, zero, zero.norm(dim=-1))
    assert all(torch.isfinite(factor).all() for factor in weights.balanced())
    torch.testing.assert_close(weights.balanced()[0][0], torch.zeros(3, dtype=torch.float64))
    alive = torch.ones(2, 4, dtype=torch.float64)
    weights.replace(1, alive, alive.norm(dim=-1))
    assert torch.isfinite(weights.log_scales).all() and (weights.balanced()[1].norm(dim=-1) > 0).all()


def test_no_underflow_over_a_hundred_modes():
    factors = [1e-10 * factor for factor in random_factors(2, [3] * 100)]
    weights = CPWeights(factors)
    for d, factor in enumerate(factors):
        weights.rescale(d, factor.norm(dim=-1))
    correlation, log_norm = gram_but(weights, 0)
    assert torch.isfinite(correlation).all() and torch.isfinite(log_norm).all()
    for balanced, factor in zip(weights.balanced(), factors, strict=True):
        assert torch.isfinite(balanced).all()
        torch.testing.assert_close(balanced, factor * (balanced.norm(dim=-1) / factor.norm(dim=-1)).unsqueeze(-1))


def test_products_but_one_with_zeros():
    projections = random_factors(2, [5] * 4)
    projections[1][0, 2] = projections[3][0, 2] = 0.0
    for d, product in enumerate(CP().products_but_one(projections)):
        expected = torch.ones_like(product)
        for k, projection in enumerate(projections):
            expected = expected * projection if k != d else expected
        torch.testing.assert_close(product, expected)
