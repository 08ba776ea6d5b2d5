from __future__ import annotations

import pytest
import torch

from gpytorch_tkrr.errors import InputError
from gpytorch_tkrr.source import Shard, TensorSource, TrainingData, as_source

X, Y = torch.randn(50, 3), torch.randn(50)


def test_summary_does_not_depend_on_batches():
    weight = torch.rand(50) + 0.5
    for batch_rows in (1, 7, 50):
        summary = TrainingData(TensorSource(X, Y, weight, batch_rows=batch_rows)).summary
        mean = float((weight.double() * Y.double()).sum() / weight.double().sum())
        variance = float((weight.double() * (Y.double() - mean) ** 2).sum() / weight.double().sum())
        assert summary.mean == pytest.approx(mean) and summary.variance == pytest.approx(variance)
        assert (summary.num_rows, summary.num_dims) == (50, 3)
        assert torch.equal(summary.lower, X.double().amin(0)) and torch.equal(summary.upper, X.double().amax(0))


def test_a_variance_far_from_zero_mean_is_accurate():
    y = 1e8 + torch.randn(1000, dtype=torch.float64)
    summary = TrainingData(TensorSource(torch.zeros(1000, 1), y, batch_rows=100)).summary
    assert summary.variance == pytest.approx(float(y.var(correction=0)), rel=1e-6)


def test_batches_of_a_loader_equal_tensors():
    dataset = torch.utils.data.TensorDataset(X, Y)
    loader = TrainingData(as_source(torch.utils.data.DataLoader(dataset, batch_size=8)))
    assert torch.equal(torch.cat([batch.x for batch in loader]), X.double())
    assert torch.equal(torch.cat([batch.y for batch in loader]), Y.double())


def test_one_shot_iterators_are_refused():
    with pytest.raises(InputError, match="one-shot"):
        as_source(iter([(X, Y)]))
    with pytest.raises(InputError, match="int"):
        as_source(3)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_rows_that_are_not_finite_are_named(bad):
    x, y = X.clone(), Y.clone()
    x[33, 1] = bad
    with pytest.raises(InputError, match=r"inputs.*row 33"):
        TrainingData(TensorSource(x, Y, batch_rows=10))
    y[41] = bad
    with pytest.raises(InputError, match=r"targets.*row 41"):
        TrainingData(TensorSource(X, y, batch_rows=10))


def test_shapes_and_weights_are_checked():
    with pytest.raises(InputError, match="shape"):
        TrainingData(TensorSource(X, Y[:10]))
    with pytest.raises(InputError, match="no rows"):
        TrainingData(TensorSource(X[:0], Y[:0]))
    with pytest.raises(InputError, match="weights"):
        TrainingData(TensorSource(X, Y, torch.zeros(50)))


class Growing:
    """A source that has one more row in every pass."""

    def __init__(self):
        self.num_passes = 0

    def __iter__(self):
        self.num_passes += 1
        yield X[: 10 + self.num_passes], Y[: 10 + self.num_passes]


def test_a_source_whose_length_changes_is_refused():
    data = TrainingData(Growing())
    with pytest.raises(InputError, match="had 11 rows in the first pass and 12 in a later one"):
        list(data)


def test_a_path_is_no_source():
    with pytest.raises(InputError, match="open_table"):
        as_source("flights.parquet")


def test_rank_of_a_shard_is_checked():
    with pytest.raises(InputError, match="rank"):
        Shard((X, Y), 2, 2)
