"""Rows of a fit: read once where they fit into memory, summed up, refused where a later pass brings others."""

from __future__ import annotations

import gpytorch
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.cp.design import Design
from gpytorch_tkrr.data.source import TensorSource, as_source
from gpytorch_tkrr.data.training import TrainingData
from gpytorch_tkrr.errors import InputError

X, Y = torch.randn(50, 3), torch.randn(50)
MEMORY = 1 << 24


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
    loader = TrainingData(as_source(DataLoader(TensorDataset(X, Y), batch_size=8)))
    assert torch.equal(torch.cat([batch.x for batch in loader]), X.double())
    assert torch.equal(torch.cat([batch.y for batch in loader]), Y.double())


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


class Counted:
    """Batches in one buffer that is used again, as a reader of files may do; counts its passes."""

    def __init__(self, x, y, batch_rows=20):
        self.source = TensorSource(x, y, batch_rows=batch_rows)
        self.num_passes = 0

    def __iter__(self):
        self.num_passes += 1
        buffers = [torch.empty_like(part[: self.source.batch_rows]) for part in self.source.parts]
        for parts in self.source:
            for buffer, part in zip(buffers, parts, strict=True):
                buffer[: len(part)] = part
            yield tuple(buffer[: len(part)] for buffer, part in zip(buffers, parts, strict=True))


def make_data(num_rows=120):
    x = torch.rand(num_rows, 3, dtype=torch.float64)
    x[:, 1] = (4 * x[:, 1]).round()  # few distinct values
    x[:, 2] = x[:, 2] ** 6  # crowded: is warped
    return x, torch.sin(9 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.1 * torch.randn(num_rows, dtype=torch.float64)


def test_kept_rows_are_those_of_the_source_and_are_given_away_once():
    source = Counted(*make_data())
    data, again = TrainingData(source, memory=MEMORY), TrainingData(source)
    assert data.is_kept and not again.is_kept and source.num_passes == 2
    mean = lambda x: x[:, 0]  # noqa: E731
    data.center(mean)
    again.center(mean)
    first = [(batch.x, batch.y) for batch in data]  # kept: nothing is read
    assert source.num_passes == 2
    for (x, y), batch in zip(first, again, strict=True):
        assert torch.equal(x, batch.x) and torch.equal(y, batch.y)
    assert len(list(data)) == len(first) and source.num_passes == 4


def test_rows_beyond_the_memory_are_not_kept():
    x, y = make_data()
    needed = 8 * x.numel() + 16 * len(x)
    assert TrainingData(TensorSource(x, y), memory=needed).is_kept
    assert not TrainingData(TensorSource(x, y, batch_rows=50), memory=needed - 1).is_kept


def new_model(**kwargs):
    return tkrr.TKRR(None, None, gpytorch.likelihoods.GaussianLikelihood().double(), rank=3, **kwargs)


FITS = {
    "als": lambda model, **options: tkrr.fit_als(model, max_sweeps=2, seed=0, **options),
    "gibbs": lambda model, **options: tkrr.fit_gibbs(model, num_warmup=8, num_draws=4, seed=0, **options),
}


@pytest.mark.parametrize("name", FITS)
def test_a_fit_reads_what_fits_into_memory_once(name):
    """Also where numbers of functions adapt (fit_gibbs)."""
    source, model, expected = Counted(*make_data()), new_model(), new_model()
    FITS[name](model, data=source)
    assert source.num_passes == 1
    assert name == "als" or model.num_basis != (20, 5, 20)
    FITS[name](expected, data=source.source.parts)
    x = source.source.parts[0]
    torch.testing.assert_close(model.eval()(x).mean, expected.eval()(x).mean, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", FITS)
def test_few_passes_before_the_first_sweep_and_one_for_each_update(name, monkeypatch):
    source, passes, sums = Counted(*make_data()), [], Design.sums

    def counted(*args):
        passes.append(source.num_passes)
        return sums(*args)

    monkeypatch.setattr(Design, "sums", counted)
    FITS[name](new_model(), data=source, memory=0)
    # One reads and checks, two look for the first components, one of fit_gibbs for the first lengthscales.
    first = 4 if name == "gibbs" else 3
    assert passes == list(range(first, len(passes) + first)) and source.num_passes == len(passes) + first


def test_a_file_is_read_twice(tmp_path, monkeypatch):
    """Once to find out what its columns are, and once for the fit."""
    pytest.importorskip("pandas")
    pytest.importorskip("sklearn")
    from gpytorch_tkrr.sklearn.streamed import fit_file

    x, y = make_data()
    import numpy as np

    np.savez(tmp_path / "table.npz", x=x.numpy(), y=y.numpy())
    passes, frames = [], tkrr.NpzSource.frames
    monkeypatch.setattr(tkrr.NpzSource, "frames", lambda self, *args: passes.append(args[:2]) or frames(self, *args))
    model = tkrr.sklearn.TKRRRegressor(method="als", rank=2, num_basis=4, random_state=0)
    fit_file(model, tkrr.open_table(tmp_path / "table.npz", target="y"))
    assert passes == [(0, 120), (0, 120)]


@pytest.mark.parametrize("name", FITS)
def test_other_rows_in_a_later_pass_are_refused_and_leave_the_model_as_it_was(name):
    class Drifting(Counted):
        def __iter__(self):
            for x, y in super().__iter__():
                yield x, y + self.num_passes

    model = new_model()
    with pytest.raises(InputError, match="other rows in a later pass"):
        FITS[name](model, data=Drifting(*make_data()), memory=0)
    assert model.covar_module is None and model.domain is None and not model.is_fitted


def test_marginals_of_rows_that_are_not_kept_are_those_of_the_sample():
    x, y = make_data(40_000)
    weight = 0.5 + torch.rand(len(y), dtype=torch.float64)
    source = TensorSource(x, y, weight, batch_rows=7000)
    bases = [mode.basis for mode in tkrr.TKRR(x, y, gpytorch.likelihoods.GaussianLikelihood()).separate().modes]
    whole = Design(TrainingData(source, memory=MEMORY), bases).marginals()
    sample = Design(TrainingData(source), bases, memory=0).marginals()
    for ours, other in zip(whole, sample, strict=True):
        assert (ours.dense() - other.dense()).abs().max() < 0.05 * ours.diagonal().max()
        assert (ours.mean - other.mean).abs().max() < 0.05 * ours.mean.abs().max()
