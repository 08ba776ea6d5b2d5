"""The algebra of tensor trains against dense tensors."""

from __future__ import annotations

import pytest
import torch

from gpytorch_tkrr import CP, SizeError, TensorTrain
from gpytorch_tkrr.bases.basis import SineBasis
from gpytorch_tkrr.cp.design import Design
from gpytorch_tkrr.cp.train import TrainWeights, bond_sizes
from gpytorch_tkrr.data.source import TensorSource
from gpytorch_tkrr.data.training import TrainingData

SIZES = [3, 4, 2, 5]


def random_factors(rank=3, sizes=SIZES):
    heights = TensorTrain(rank).heights(sizes)
    return [torch.randn(height, size, dtype=torch.float64) for height, size in zip(heights, sizes, strict=True)]


def dense(factors, scale=1.0):
    """The whole tensor, by matrix products."""
    bonds = bond_sizes([len(factor) for factor in factors])
    total = torch.ones(1, 1, dtype=torch.float64)
    for factor, left in zip(factors, bonds, strict=False):
        core = factor.reshape(left, -1, factor.shape[-1])
        total = torch.einsum("...a,abm->...mb", total, core)
    return scale * total.squeeze(0).squeeze(-1)


def projections_of(factors, features):
    return [factor @ phi for factor, phi in zip(factors, features, strict=True)]


def test_ranks_are_no_larger_than_the_modes_allow():
    assert TensorTrain(100).heights([2, 3, 4]) == [2, 8, 4]  # ranks 1, 2, 4, 1
    assert TensorTrain(2).heights([5, 5, 5, 5]) == [2, 4, 4, 2]
    assert TensorTrain(7).heights([5]) == [1]
    with pytest.raises(SizeError, match="at least 1"):
        TensorTrain(0)


@pytest.mark.parametrize("form", [CP(3), TensorTrain(3)], ids=repr)
def test_products_of_projections_give_the_values_on_both_sides_of_every_mode(form):
    heights = form.heights(SIZES)
    factors = [torch.randn(k, m, dtype=torch.float64) for k, m in zip(heights, SIZES, strict=True)]
    features = [torch.randn(m, 6, dtype=torch.float64) for m in SIZES]
    if form.kind == "cp":
        tensor = torch.einsum("ra,rb,rc,rd->abcd", *factors)
    else:
        tensor = dense(factors)
    expected = torch.einsum("abcd,an,bn,cn,dn->n", tensor, *features)
    projections = projections_of(factors, features)
    for product, projection in zip(form.products_but_one(projections), projections, strict=True):
        torch.testing.assert_close((product * projection).sum(0), expected)
    squares = form.pairs([p.unsqueeze(0) * p.unsqueeze(1) for p in projections])
    left = None
    for square in squares:
        left = form.advance(left, square)
    torch.testing.assert_close(left.sum(0), expected.square())


def test_moving_changes_the_cores_but_not_the_tensor():
    weights = TrainWeights(random_factors())
    tensor = dense(weights.factors)
    changed, turns = weights.move_to(2)
    assert weights.center == 2
    torch.testing.assert_close(dense(weights.factors), tensor)
    for d in range(4):
        core = weights.core(d)
        left, right = torch.einsum("abm,acm->bc", core, core), torch.einsum("abm,cbm->ac", core, core)
        if d != 2:
            gram = left if d < 2 else right
            torch.testing.assert_close(gram, torch.eye(len(gram)).double())
    torch.testing.assert_close(weights.frobenius_form(2), torch.eye(len(weights.factors[2])).double())
    assert weights.move_to(2) == ([], [])
    changed, turns = weights.move_to(3)
    assert changed == [2, 3] and [bond for bond, _ in turns] == [3]
    torch.testing.assert_close(dense(weights.factors), tensor)


def test_forms_are_the_norm_in_any_gauge():
    weights = TrainWeights(random_factors(), scale=2.5)
    expected = dense(weights.factors, 2.5).square().sum()
    torch.testing.assert_close(weights.squared_norm(), expected)
    for d in range(4):
        u = weights.scaled_factor(d)
        torch.testing.assert_close(torch.einsum("ki,kl,li->", u, weights.frobenius_form(d), u), expected)


def test_the_symmetric_form_has_equal_norms_on_both_sides():
    weights = TrainWeights(random_factors(), scale=3.0)
    tensor = dense(weights.factors, 3.0)
    torch.testing.assert_close(dense(weights.balanced()), tensor)
    weights.balance()
    torch.testing.assert_close(dense(weights.factors, 3.0), tensor)
    for d in range(1, 4):
        sigma = torch.linalg.svdvals(tensor.reshape(tensor[(..., *[0] * (4 - d))].numel(), -1))[: weights.bonds[d]] / 3
        for mode, side in ((d, 0), (d - 1, 1)):  # left functions of core d, right functions of core d - 1
            form = weights.frobenius_form(mode)
            bonds = weights.bonds[mode], weights.bonds[mode + 1]
            gram = torch.einsum("abcb->ac" if side == 0 else "abad->bd", form.reshape(*bonds, *bonds))
            gram = gram / gram.diagonal().sum() * sigma.sum()
            torch.testing.assert_close(gram, sigma.diag(), atol=1e-10, rtol=1e-8)


def test_a_zero_tensor_stays_finite():
    weights = TrainWeights([torch.zeros_like(factor) for factor in random_factors()])
    assert all(torch.isfinite(factor).all() for factor in weights.balanced())
    weights.move_to(3)
    assert all(torch.isfinite(factor).all() for factor in weights.factors)


def test_a_sum_of_products_is_rounded_to_its_rank():
    factors = [torch.randn(3, size, dtype=torch.float64) for size in SIZES]
    tensor = torch.einsum("ra,rb,rc,rd->abcd", *factors)
    torch.testing.assert_close(dense(TensorTrain(3).from_components(factors)), tensor)
    # A sum over inputs has rank 2, however many terms there are.
    ones = [torch.zeros(4, size, dtype=torch.float64) for size in SIZES]
    for d, each in enumerate(ones):
        each[:, 0] = 1.0
        each[d] = torch.randn(each.shape[-1]).double()
    tensor = torch.einsum("ra,rb,rc,rd->abcd", *ones)
    torch.testing.assert_close(dense(TensorTrain(2).from_components(ones)), tensor)


@pytest.mark.parametrize("memory", [1 << 30, 20_000, 0], ids=["kept", "partly kept", "streamed"])
def test_sums_equal_dense_ones_while_the_norm_is_passed_on(memory):
    bases = [SineBasis(0.0, 1.2, size) for size in (4, 5, 3)]
    x, y = torch.rand(300, 3, dtype=torch.float64) * 2 - 1, torch.randn(300, dtype=torch.float64)
    form = TensorTrain(3)
    design = Design(TrainingData(TensorSource(x, y, batch_rows=70)), bases, memory=memory, weights=form)
    weights = TrainWeights(random_factors(3, [4, 5, 3]), scale=1.5)
    weights.normalise(lambda d, factor: factor.norm(dim=-1))
    features = [basis(x[:, d]).mT for d, basis in enumerate(bases)]
    for d in [0, 1, 2, 1, 0, 0, 2]:
        for bond, matrix in weights.move_to(d)[1]:
            design.turn(bond, matrix)
        sums = design.sums(d, weights.factors, weights.scales())
        projections = projections_of(weights.factors, features)
        p = form.products_but_one(projections)[d]
        rows = (p.unsqueeze(1) * features[d]).flatten(0, 1)  # (K M, N)
        residual = y - weights.scale * (p * projections[d]).sum(0)
        gram = sums.gram().reshape(len(rows), -1)
        torch.testing.assert_close(gram, rows @ rows.mT, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(sums.rhs.flatten(), rows @ residual, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(sums.square, residual @ residual)
        weights.replace(d, torch.randn_like(weights.factors[d]), torch.ones(1))
