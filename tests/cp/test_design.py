from __future__ import annotations

import pytest
import torch

from gpytorch_tkrr.bases.basis import ConcatenatedBasis, ConstantBasis, FourierBasis, MonomialBasis, SineBasis
from gpytorch_tkrr.cp.design import Design
from gpytorch_tkrr.data.source import TensorSource
from gpytorch_tkrr.data.training import TrainingData

N, R = 700, 3
BASES = [
    SineBasis(0.0, 1.2, 8),
    ConcatenatedBasis(ConstantBasis(), MonomialBasis(1, 0.3), SineBasis(0.0, 1.3, 6)),
    FourierBasis(0.7, 4),
    SineBasis(0.0, 1.1, 5),
]


def make_data():
    x = torch.rand(N, 4, dtype=torch.float64) * 2 - 1
    x[:, 1] = torch.randint(0, 5, (N,)) / 5  # few distinct values
    x[:, 3] = 0.2  # constant
    return x, torch.randn(N, dtype=torch.float64), torch.rand(N, dtype=torch.float64) + 0.1


def dense_sums(x, y, weight, d, factors, scale):
    """Gram matrix, right-hand side and residual square by forming the design."""
    features = [basis(x[:, k]) for k, basis in enumerate(BASES)]
    projections = [f @ factor.mT for f, factor in zip(features, factors, strict=True)]
    p = torch.ones(len(x), R, dtype=torch.float64)
    for k, projection in enumerate(projections):
        p = p * projection if k != d else p
    design = torch.einsum("nr,nm->nrm", p, features[d]).flatten(1)
    residual = y - (p * projections[d]) @ scale
    return design.mT @ (weight[:, None] * design), design.mT @ (weight * residual), (weight * residual) @ residual


@pytest.mark.parametrize("memory", [1 << 30, 70_000, 0], ids=["kept", "partly kept", "streamed"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("compress", [False, True])
def test_sums_equal_dense_ones_in_any_order_of_updates(memory, weighted, compress):
    x, y, weight = make_data()
    source = TensorSource(x, y, weight if weighted else None, batch_rows=190)
    design = Design(TrainingData(source), BASES, memory=memory, compress=compress)
    weight = weight if weighted else torch.ones_like(y)
    factors = [torch.randn(R, basis.num_functions, dtype=torch.float64) for basis in BASES]
    scale = torch.rand(R, dtype=torch.float64)
    for d in [0, 1, 2, 3, 2, 1, 0, 0, 3, 1]:
        sums = design.sums(d, factors, scale)
        gram, rhs, square = dense_sums(x, y, weight, d, factors, scale)
        size = gram.shape[0]
        largest = float(gram.abs().max())
        torch.testing.assert_close(sums.gram().reshape(size, size), gram, rtol=1e-12, atol=1e-12 * largest)
        torch.testing.assert_close(sums.rhs.flatten(), rhs, rtol=1e-12, atol=1e-12 * float(rhs.abs().max()))
        torch.testing.assert_close(sums.square, square, rtol=1e-12, atol=0)
        assert int(sums.count) == N
        factors[d] = torch.randn_like(factors[d])
    for factor in factors:
        factor.normal_()
    design.reset()
    gram, _, _ = dense_sums(x, y, weight, 1, factors, scale)
    torch.testing.assert_close(design.sums(1, factors, scale).gram().flatten(), gram.flatten(), rtol=1e-11, atol=1e-11)


def test_kept_sums_over_cells_equal_streamed_ones():
    bases = [SineBasis(0.0, 1.2, 40), ConcatenatedBasis(ConstantBasis(), MonomialBasis(), SineBasis(0.0, 1.5, 30))]
    x = torch.rand(24_000, 2, dtype=torch.float64) * 2 - 1
    source = TrainingData(TensorSource(x, torch.randn(24_000, dtype=torch.float64), batch_rows=12_000))
    kept, streamed = Design(source, bases), Design(source, bases, memory=0)
    factors = [torch.randn(R, basis.num_functions, dtype=torch.float64) for basis in bases]
    scale = torch.rand(R, dtype=torch.float64)
    for d in [0, 1, 0]:
        ours, expected = kept.sums(d, factors, scale), streamed.sums(d, factors, scale)
        for name in ("moments", "rhs", "square"):
            value = getattr(expected, name)
            torch.testing.assert_close(getattr(ours, name), value, rtol=0, atol=1e-12 * float(value.abs().max()))
        factors[d] = torch.randn_like(factors[d])
    assert kept._kept is not None and all(rows.cells[0] is not None for rows in kept._kept)


def test_marginals():
    x, y, weight = make_data()
    marginals = Design(TrainingData(TensorSource(x, y, weight, batch_rows=300)), BASES).marginals()
    for d, (basis, marginal) in enumerate(zip(BASES, marginals, strict=True)):
        gram, mean = marginal.dense(), marginal.mean
        features = basis(x[:, d])
        torch.testing.assert_close(gram, features.mT @ (weight[:, None] * features) / weight.sum())
        torch.testing.assert_close(mean, weight @ features / weight.sum())


@pytest.mark.parametrize("memory", [1 << 30, 0], ids=["kept", "streamed"])
@pytest.mark.parametrize("weighted", [False, True])
def test_working_targets_and_weights_of_a_callback(memory, weighted):
    """Targets and weights that depend on f and on the row, multiplied with the weights of the data."""
    x, y, weight = make_data()
    design = Design(
        TrainingData(TensorSource(x, y, weight if weighted else None, batch_rows=190)), BASES, memory=memory
    )
    own = weight if weighted else torch.ones_like(y)
    factors = [torch.randn(R, basis.num_functions, dtype=torch.float64) for basis in BASES]
    scale = torch.rand(R, dtype=torch.float64)

    def working(batch, f, first_row):
        rows = torch.arange(first_row, first_row + batch.num_rows)
        return 2 * batch.y - f, 1 + rows / N + f.square()

    for d in (0, 1, 3):
        f = (
            torch.stack([b(x[:, k]) @ a.mT for k, (b, a) in enumerate(zip(BASES, factors, strict=True))]).prod(0)
        ) @ scale
        extra = 1 + torch.arange(N) / N + f.square()
        sums = design.sums(d, factors, scale, working)
        gram, rhs, square = dense_sums(x, 2 * y, own * extra, d, factors, scale)
        torch.testing.assert_close(
            sums.gram().reshape(gram.shape), gram, rtol=1e-9, atol=1e-9 * float(gram.abs().max())
        )
        torch.testing.assert_close(sums.rhs.flatten(), rhs, rtol=1e-9, atol=1e-9 * float(rhs.abs().max()))
        torch.testing.assert_close(sums.square, square)
        total = design.sum_rows(factors, scale, lambda b, f, row: torch.stack([f.sum(), (b.y * f).sum() + row]), 2)
        expected = torch.stack([f.sum(), (y * f).sum() + sum(range(0, N, 190))])
        torch.testing.assert_close(total, expected)
        factors[d] = torch.randn_like(factors[d])


def test_sums_of_parts_add_up():
    x, y, _ = make_data()
    factors = [torch.randn(R, basis.num_functions, dtype=torch.float64) for basis in BASES]
    scale = torch.ones(R, dtype=torch.float64)

    def sums(rows):
        return Design(TrainingData(TensorSource(x[rows], y[rows])), BASES).sums(1, factors, scale)

    parts = sums(slice(0, 100)) + sums(slice(100, N))
    torch.testing.assert_close(parts.pack(), sums(slice(0, N)).pack(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("memory", [1 << 30, 0], ids=["kept", "streamed"])
def test_other_functions_give_the_sums_of_a_new_design_and_read_kept_rows_no_more(memory):
    x, y, weight = make_data()
    source = TensorSource(x, y, weight, batch_rows=190)
    others = [BASES[2], BASES[0], BASES[1], BASES[3]]
    factors = [torch.randn(R, basis.num_functions, dtype=torch.float64) for basis in BASES]
    scale = torch.rand(R, dtype=torch.float64)
    design = Design(TrainingData(source, memory=memory), BASES, memory=memory)
    design.marginals()
    for d in range(4):
        design.sums(d, factors, scale)
    if memory:
        design.data.source = None  # not read again
    design.set_bases(others)
    fresh = Design(TrainingData(source, memory=memory), others, memory=memory)
    for ours, expected in zip(design.marginals(), fresh.marginals(), strict=True):
        assert torch.equal(ours.dense(), expected.dense()) and torch.equal(ours.mean, expected.mean)
    factors = [torch.randn(R, basis.num_functions, dtype=torch.float64) for basis in others]
    for d in (0, 2, 1):
        assert torch.equal(design.sums(d, factors, scale).pack(), fresh.sums(d, factors, scale).pack())


def test_thinned_rows_are_random_and_the_same_for_all_batches():
    x, y, weight = make_data()
    factors = [torch.randn(R, basis.num_functions, dtype=torch.float64) for basis in BASES]
    found = []
    for batch_rows, memory in ((N, 1 << 30), (190, 1 << 30), (190, 0)):
        design = Design(TrainingData(TensorSource(x, y, weight, batch_rows=batch_rows)), BASES, memory=memory)
        small = design.thinned(200, key=5)
        sums = small.sums(1, factors, torch.ones(R, dtype=torch.float64))
        assert small.data.summary.num_rows == int(sums.count) and 150 < int(sums.count) < 250
        found.append(sums.pack())
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found[0], found[2], rtol=1e-10, atol=1e-10)
    other = design.thinned(200, key=6).sums(1, factors, torch.ones(R, dtype=torch.float64)).pack()
    assert not torch.allclose(other, found[0])
