from __future__ import annotations

import gpytorch
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.data.source import Shard, TensorSource, as_source
from gpytorch_tkrr.data.training import TrainingData
from gpytorch_tkrr.errors import InputError

X, Y = torch.randn(50, 3), torch.randn(50)


def fit(data, memory=0):
    """The objective after a sweep; without memory every update reads the data again."""
    model = tkrr.TKRR(None, None, gpytorch.likelihoods.GaussianLikelihood(), rank=2, num_basis=4)
    return tkrr.fit_als(model, data=data, max_sweeps=1, seed=0, memory=memory).objective[-1]


@pytest.mark.parametrize(
    "data",
    [
        DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True),
        DataLoader(TensorDataset(X, Y), batch_size=20, num_workers=1),
        [(X[:20].numpy(), Y[:20].numpy()), (X[20:].numpy(), Y[20:].numpy())],
        [(X[:20], Y[:20, None]), (X[20:20], Y[20:20]), (X[20:].numpy(), Y[20:])],
        (X.numpy(), Y),
    ],
    ids=["shuffled", "with a worker", "arrays", "shapes and kinds", "array and tensor"],
)
@pytest.mark.parametrize("memory", [0, 1 << 20])
def test_whatever_gives_the_same_rows_gives_the_same_fit(data, memory):
    assert fit(data, memory) == pytest.approx(fit((X, Y)), rel=1e-9)


class Records(Dataset):
    def __len__(self):
        return len(Y)

    def __getitem__(self, i):
        return {"x": X[i], "y": Y[i]}


@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: Shard(data, 0, 2)], ids=["plain", "shard"])
@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (DataLoader(Records(), batch_size=8), "dict"),
        ([X, Y, X, Y], "Tensor"),
        ([(X,)], r"tuple \(Tensor\)"),
        ({"x": X, "y": Y}, "dict"),
        (X, "Tensor"),
    ],
)
def test_batches_of_another_kind_are_refused(data, kind, wrap):
    with pytest.raises(InputError, match=f"got:? (a )?{kind}"):
        TrainingData(as_source(wrap(data)))


def test_arrays_must_hold_numbers():
    for x in (X.numpy().astype(object), np.full((50, 1), "a"), np.zeros((50, 1), dtype="M8[D]")):
        with pytest.raises(InputError, match="must hold numbers"):
            TrainingData(as_source((x, Y.numpy())))


def test_other_rows_in_a_later_pass_are_an_error():
    """As many rows each time, but not the same."""
    with pytest.raises(InputError, match="other rows in a later pass"):
        fit(DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True, drop_last=True))
    assert fit(DataLoader(TensorDataset(X, Y), batch_size=8, drop_last=True)) == pytest.approx(fit((X[:48], Y[:48])))


def test_a_shard_of_shuffled_rows_is_refused():
    with pytest.raises(InputError, match="shuffle=False"):
        Shard(DataLoader(TensorDataset(X, Y), shuffle=True), 0, 2)


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
    y[31] = bad  # in the batch of row 33
    with pytest.raises(InputError, match=r"targets.*row 31"):
        TrainingData(TensorSource(x, y, batch_rows=10))


def test_shapes_and_weights_are_checked():
    for parts in ((X, Y[:10]), (X[:10], Y), (X, Y, torch.ones(10))):
        with pytest.raises(InputError, match="same number of rows"):
            TensorSource(*parts)
    with pytest.raises(InputError, match=r"\(50, 3\), \(50, 2\)"):
        TrainingData(TensorSource(X, X[:, :2]))
    with pytest.raises(InputError, match="no rows"):
        TrainingData(TensorSource(X[:0], Y[:0]))
    weight = torch.ones(50)
    weight[13] = 0.0
    with pytest.raises(InputError, match=r"weights.*row 13"):
        TrainingData(TensorSource(X, Y, weight, batch_rows=10))
    column = TrainingData(TensorSource(X, Y, torch.ones(50, 1)))
    assert all(batch.weight.shape == batch.y.shape for batch in column)


def test_a_path_is_no_source():
    with pytest.raises(InputError, match="open_table"):
        as_source("flights.parquet")


def test_rank_of_a_shard_is_checked():
    with pytest.raises(InputError, match="rank"):
        Shard((X, Y), 2, 2)
