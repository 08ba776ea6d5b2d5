"""The pull towards the mean where no rows are: against all combinations of the columns' values, one by one."""

from __future__ import annotations

import itertools

import gpytorch
import numpy as np
import pytest
import torch
from support.models import gaussian

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.bases.basis import ConcatenatedBasis, ConstantBasis, MonomialBasis, SineBasis
from gpytorch_tkrr.bases.levels import LevelBasis
from gpytorch_tkrr.chains.problem import GibbsProblem
from gpytorch_tkrr.cp.design import Design
from gpytorch_tkrr.data.source import TensorSource
from gpytorch_tkrr.data.training import TrainingData
from gpytorch_tkrr.sampling.product_measure import ProductMeasure, pull

R, NOISE = 3, 0.3
BASES = [
    ConcatenatedBasis(ConstantBasis(), MonomialBasis(1, 0.3), SineBasis(0.0, 1.3, 3)),
    ConcatenatedBasis(ConstantBasis(), LevelBasis(2, 3)),
    SineBasis(0.0, 1.2, 4),
]


def make_rows(num_rows=7, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.rand(num_rows, len(BASES), generator=generator, dtype=torch.float64) - 1
    x[:, 1] = torch.randint(2, 5, (num_rows,), generator=generator).double()
    return x, torch.randn(num_rows, generator=generator, dtype=torch.float64)


def make_factors(bases, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(R, basis.num_functions, generator=generator, dtype=torch.float64) for basis in bases]


def values(bases, factors, x):
    """f at rows, `(n,)`."""
    columns = zip(bases, factors, x.mT, strict=True)
    return torch.stack([basis(column) @ factor.mT for basis, factor, column in columns]).prod(0).sum(-1)


@pytest.mark.parametrize("num_dims", [1, 2, 3])
def test_it_is_the_mean_square_over_all_combinations_of_the_columns(num_dims):
    x, y = make_rows()
    x, bases = x[:, :num_dims].contiguous(), BASES[:num_dims]
    design = Design(TrainingData(TensorSource(x, y)), bases)
    measure, factors = ProductMeasure(design), make_factors(bases)
    everywhere = torch.tensor(list(itertools.product(*x.mT.tolist())), dtype=torch.float64)  # (N^D, D)
    expected = values(bases, factors, everywhere).square().mean()
    one = torch.ones(1, dtype=torch.float64)
    for d in [*range(num_dims), *reversed(range(num_dims))]:
        gram = design.sums(d, factors, one).structured_gram()
        added = measure.added_to(gram, d, factors, NOISE).apply(factors[d]) - gram.apply(factors[d])
        found = float((factors[d] * added).sum()) / (NOISE * pull(len(y)))
        assert found == pytest.approx(float(expected), rel=1e-10)


def test_it_equals_rows_at_the_mean_that_nobody_has_seen():
    """The same matrix as with all combinations among the rows, each with its small weight; a changed factor is seen."""
    x, y = make_rows()
    everywhere = torch.tensor(list(itertools.product(*x.mT.tolist())), dtype=torch.float64)
    weight = torch.full((len(everywhere),), NOISE * pull(len(y)) / len(everywhere), dtype=torch.float64)
    more = TensorSource(
        torch.cat([x, everywhere]), torch.cat([y, torch.zeros_like(weight)]), torch.cat([torch.ones_like(y), weight])
    )
    design, larger = Design(TrainingData(TensorSource(x, y)), BASES), Design(TrainingData(more), BASES)
    measure, factors, one = ProductMeasure(design), make_factors(BASES), torch.ones(1, dtype=torch.float64)
    for d in (0, 1, 2, 1, 0):
        ours = measure.added_to(design.sums(d, factors, one).structured_gram(), d, factors, NOISE)
        torch.testing.assert_close(ours.dense(), larger.sums(d, factors, one).gram(), rtol=1e-9, atol=1e-9)
        factors[d] = torch.randn_like(factors[d])


@torch.no_grad()
def test_it_belongs_to_models_that_choose_their_kernel():
    x, y = torch.rand(60, 3, dtype=torch.float64), torch.randn(60, dtype=torch.float64)

    def pulled(likelihood=None, **options):
        model = tkrr.TKRR(x, y.gt(0).double() if likelihood else y, likelihood or gaussian(), **options)
        training = model.training_data(None)
        model.prepare(training)
        problem = GibbsProblem(model, training, None, 1 << 28, 0)
        problem.choose_plan(10, 10, 1)
        return problem.sampler(problem.designs[0], np.random.default_rng(0), 4).empty

    assert isinstance(pulled(rank=4), ProductMeasure)
    kernel = tkrr.anova_kernel(3, center=0.5, half_range=0.5)
    assert pulled(rank=4, kernel=kernel) is None
    assert pulled(weights=tkrr.TensorTrain(2)) is None
    assert pulled(gpytorch.likelihoods.BernoulliLikelihood(), rank=4) is None  # f is large where classes are certain
    assert pulled(tkrr.CensoredLikelihood(high=2.0), rank=4) is None  # targets end, f does not
