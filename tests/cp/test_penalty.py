from __future__ import annotations

import pytest
import torch

from gpytorch_tkrr.cp.penalty import ColumnPenalty, FactorPenalty, FrobeniusPenalty
from gpytorch_tkrr.cp.weights import CPWeights

PENALTIES = [FrobeniusPenalty(), ColumnPenalty(), FactorPenalty()]


def make_weights():
    weights = CPWeights([torch.randn(3, m, dtype=torch.float64) for m in (4, 5, 2)])
    for d in range(3):
        weights.rescale(d, 0.3 + torch.rand(3, dtype=torch.float64))
    return weights


@pytest.mark.parametrize("penalty", PENALTIES, ids=repr)
def test_value_is_the_quadratic_form_in_every_factor(penalty):
    weights = make_weights()
    for d in range(3):
        differences = []
        for size in (1.0, 2.5):
            scaled = weights.clone()
            factor = size * weights.scaled_factor(d)
            scaled.replace(d, factor, factor.norm(dim=-1))
            quadratic = torch.einsum("ri,rs,si->", factor, penalty.form(weights, d), factor)
            differences.append(penalty.value(scaled) - quadratic)
        torch.testing.assert_close(differences[0], differences[1])


def test_frobenius_is_the_norm_of_the_tensor_and_columns_its_diagonal():
    weights = make_weights()
    a, b, c = weights.balanced()
    components = torch.einsum("ri,rj,rk->rijk", a, b, c)
    torch.testing.assert_close(FrobeniusPenalty().value(weights), components.sum(0).square().sum())
    torch.testing.assert_close(ColumnPenalty().value(weights), components.square().sum())


def test_factor_penalty_is_the_sum_of_squared_factors():
    weights = make_weights()
    factors = [f * s.exp().unsqueeze(-1) for f, s in zip(weights.factors, weights.log_scales, strict=True)]
    expected = sum(factor.square().sum() for factor in factors)
    torch.testing.assert_close(FactorPenalty().value(weights), expected)


def test_strength():
    noise, outputscale = torch.tensor(0.2), torch.tensor(4.0)
    weights = make_weights()
    assert float(FrobeniusPenalty().strength_for(noise, outputscale, weights)) == pytest.approx(0.05)
    assert float(ColumnPenalty(1e-5).strength_for(noise, outputscale, weights)) == pytest.approx(1e-5)
    assert float(FactorPenalty().strength_for(noise, outputscale, weights)) == pytest.approx(0.2 * (3 / 4) ** (1 / 3))
    with pytest.raises(ValueError, match="strength"):
        FrobeniusPenalty(-1.0)
