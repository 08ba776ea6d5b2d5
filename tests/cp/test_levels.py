"""The factor of a category, level by level, against the dense algebra of all its functions."""

from __future__ import annotations

import pytest
import torch
from support.models import gaussian

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.bases.basis import ConcatenatedBasis, ConstantBasis, MonomialBasis, SineBasis
from gpytorch_tkrr.bases.covariance import Covariance
from gpytorch_tkrr.bases.levels import LevelBasis
from gpytorch_tkrr.cp.conditional import Conditional, DenseGram, whitened_precision
from gpytorch_tkrr.cp.design import Design
from gpytorch_tkrr.cp.levels import LevelConditional, LevelGram, LevelTable, moment_table
from gpytorch_tkrr.cp.moments import MomentTable
from gpytorch_tkrr.cp.start import Category, Screening
from gpytorch_tkrr.cp.sums import MAX_DENSE
from gpytorch_tkrr.data.source import TensorSource
from gpytorch_tkrr.data.training import TrainingData

BASES = {
    "levels": LevelBasis(2, 4),
    "constant": ConcatenatedBasis(ConstantBasis(), LevelBasis(2, 4)),
    "several": ConcatenatedBasis(LevelBasis(2, 4), ConstantBasis(), MonomialBasis(1), SineBasis(4.0, 5.0, 3)),
}


def _problem(basis, rank=3, num_rows=50, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(2, 6, (num_rows,), generator=generator).double()
    p = torch.randn(rank, num_rows, generator=generator, dtype=torch.float64)
    blocks = torch.stack([(p * code) @ p.mT for code in LevelBasis(2, 4)(x).mT])
    gram = LevelGram(LevelTable(ConcatenatedBasis(basis)), blocks)
    rows = (p.mT.unsqueeze(-1) * basis(x).unsqueeze(-2)).flatten(-2)
    variances = torch.rand(basis.num_functions, generator=generator, dtype=torch.float64) + 0.1
    return x, p, rows, gram, Covariance(variances)


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("full", [False, True])
def test_conditional_is_that_of_the_dense_matrix(name, full):
    x, p, rows, gram, covariance = _problem(BASES[name])
    rank, size, noise = 3, len(covariance.variances), 0.3
    torch.testing.assert_close(gram.dense().reshape(rank * size, -1), rows.mT @ rows)
    factor = torch.randn(rank, size, dtype=torch.float64)
    dense = DenseGram(gram.dense())
    torch.testing.assert_close(gram.apply(factor), dense.apply(factor))
    torch.testing.assert_close(gram.squares(factor), dense.squares(factor))
    root = torch.randn(rank, rank, dtype=torch.float64)
    prior = root @ root.mT + torch.eye(rank) if full else torch.rand(rank, dtype=torch.float64) + 0.5
    matrix = prior if full else prior.diag()
    precision = whitened_precision(gram.dense() / noise, covariance, matrix)
    ours = gram.conditional(covariance, prior, noise)
    assert isinstance(ours, LevelConditional) and ours.size == rank * size
    torch.testing.assert_close(ours.logdet(), torch.logdet(precision))
    rhs = torch.randn(rank * size, dtype=torch.float64)
    torch.testing.assert_close(ours.solve(rhs), torch.linalg.solve(precision, rhs))
    half = ours.half_solve(torch.eye(rank * size, dtype=torch.float64))
    torch.testing.assert_close(half.mT @ half, precision.inverse())
    draws = torch.stack([ours.half_covariance(e) for e in torch.eye(rank * size, dtype=torch.float64)], -1)
    torch.testing.assert_close(draws @ draws.mT, precision.inverse())
    z = BASES[name](x) * covariance.root
    expected = Conditional(precision).row_variances(p.mT, z)
    torch.testing.assert_close(ours.row_variances(p.mT, z), expected)
    torch.testing.assert_close(ours.to(torch.device("cpu")).logdet(), ours.logdet())


def test_correlated_weights_go_the_dense_way():
    _, _, _, gram, covariance = _problem(BASES["constant"])
    mixed = Covariance(covariance.variances, torch.randn(6, 6, dtype=torch.float64))
    prior = torch.ones(3, dtype=torch.float64)
    expected = torch.logdet(whitened_precision(gram.dense() / 0.2, mixed, prior.diag()))
    torch.testing.assert_close(gram.conditional(mixed, prior, 0.2).logdet(), expected)


@pytest.mark.parametrize("memory", [0, 1 << 30])
@pytest.mark.parametrize("weighted", [False, True])
def test_sums_over_rows(memory, weighted):
    generator = torch.Generator().manual_seed(0)
    x = torch.stack(
        [torch.rand(500, generator=generator), torch.randint(2, 6, (500,), generator=generator)], -1
    ).double()
    y = torch.randn(500, generator=generator, dtype=torch.float64)
    weight = torch.rand(500, generator=generator, dtype=torch.float64) + 0.5 if weighted else None
    bases = [ConcatenatedBasis(ConstantBasis(), SineBasis(0.5, 1.0, 4)), BASES["several"]]
    design = Design(TrainingData(TensorSource(x, y, weight, batch_rows=130), memory=memory), bases, memory=memory)
    assert isinstance(design.tables[1], LevelTable) and type(design.tables[0]) is MomentTable
    factors = [torch.randn(2, basis.num_functions, generator=generator, dtype=torch.float64) for basis in bases]
    scale, w = torch.ones(2, dtype=torch.float64), torch.ones_like(y) if weight is None else weight
    projections = [basis(x[:, d]) @ factor.mT for d, (basis, factor) in enumerate(zip(bases, factors, strict=True))]
    residual = y - (projections[0] * projections[1]).sum(-1)
    for d in (0, 1, 0):
        sums = design.sums(d, factors, scale)
        rows = (projections[1 - d].unsqueeze(-1) * bases[d](x[:, d]).unsqueeze(-2)).flatten(-2)
        size = rows.shape[1]
        torch.testing.assert_close(sums.gram().reshape(size, size), rows.mT @ (w.unsqueeze(-1) * rows))
        torch.testing.assert_close(sums.rhs.reshape(-1), rows.mT @ (w * residual))
    marginal = design.marginals()[1]
    features = bases[1](x[:, 1])
    torch.testing.assert_close(marginal.dense(), features.mT @ (w.unsqueeze(-1) * features) / w.sum())
    torch.testing.assert_close(marginal.diagonal(), marginal.dense().diagonal())
    raw = factors[1]
    torch.testing.assert_close(marginal.squares(raw), ((raw @ marginal.dense()) * raw).sum(-1))


def test_tables_of_other_bases():
    assert type(moment_table(SineBasis(0.0, 1.0, 4))) is MomentTable
    two = ConcatenatedBasis(LevelBasis(0, 3), LevelBasis(0, 3))
    assert type(moment_table(two)) is MomentTable  # rare, and then the dense way
    x, p = torch.tensor([0.0, 2.0, 9.0]), torch.randn(2, 3, dtype=torch.float64)
    features, moments = moment_table(LevelBasis(0, 3))(x)
    torch.testing.assert_close(features, LevelBasis(0, 3)(x).mT)
    torch.testing.assert_close(moments, features)
    torch.testing.assert_close(
        moment_table(LevelBasis(0, 3)).project(torch.randn(2, 4).double() * 0 + 1, x, rows=9), torch.ones_like(p)
    )


def _grouped_data(num_rows, num_levels, seed=0):
    generator = torch.Generator().manual_seed(seed)
    number = torch.rand(num_rows, generator=generator, dtype=torch.float64)
    level = torch.randint(0, num_levels, (num_rows,), generator=generator)
    slope = torch.randn(num_levels, generator=generator, dtype=torch.float64)
    f = slope[level] * (number - 0.5) * 3.0
    y = f + 0.2 * torch.randn(num_rows, generator=generator, dtype=torch.float64)
    return torch.stack([number, level.double()], -1), y, f, slope


def test_start_finds_what_the_levels_do():
    x, y, _, slope = _grouped_data(3000, 60)
    value = torch.randn(60, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    level = x[:, 1].long()
    y = y + value[level]
    model = tkrr.TKRR(x, y, gaussian(), categorical=[1])
    training = model.training_data(memory=1 << 30)
    model.prepare(training)
    modes = model.separate().modes
    design = Design(training, [mode.basis for mode in modes])
    with torch.no_grad():
        covariances = [mode.covariance() for mode in modes]
        screening = Screening.of(design, covariances)
    assert isinstance(screening.modes[1], Category)
    raw = covariances[1].unwhiten(screening.directions[1])
    functions = design.tables[1].at_levels(raw)[:, level]  # (Q, N)
    torch.testing.assert_close(screening.modes[1].squares(screening.directions[1]), torch.ones(3).double())
    restored = Screening.from_state(screening.state())
    generators = [torch.Generator().manual_seed(0) for _ in range(2)]
    for ours, again in zip(screening.start(5, generators[0]), restored.start(5, generators[1]), strict=True):
        assert torch.equal(ours, again)
    torch.testing.assert_close(functions @ functions.mT / len(y), torch.eye(3).double(), rtol=1e-6, atol=1e-6)
    assert functions.mean(-1).abs().max() < 1e-9
    for direction, truth in ((0, value), (1, slope)):
        assert torch.corrcoef(torch.stack([functions[direction], truth[level]]))[0, 1].abs() > 0.9


def test_thousands_of_levels():
    num_levels = 3000
    x, y, f, _ = _grouped_data(30_000, num_levels)
    model = tkrr.TKRR(x, y, gaussian(), rank=4, num_basis=6, categorical=[1])
    assert 4 * model.separate().modes[1].num_functions > MAX_DENSE
    tkrr.fit_gibbs(model, num_warmup=15, num_draws=10, seed=0)
    new = x[:500]
    with torch.no_grad():
        assert (model.predict(new).mean - f[:500]).square().mean().sqrt() < 0.15
    tkrr.fit_als(model, seed=0, max_sweeps=3)
    with torch.no_grad():
        prediction = model.predict(new)
        assert (prediction.mean - f[:500]).square().mean().sqrt() < 0.2
        expected = model.eval()(new[:50]).variance + model.likelihood.noise  # by the root of the whole covariance
        torch.testing.assert_close(prediction.variance[:50], expected, rtol=1e-6, atol=1e-9)
