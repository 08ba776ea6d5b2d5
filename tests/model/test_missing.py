"""Inputs that are missing: integrated over the distribution of their column, against sums over all its values."""

from __future__ import annotations

import pytest
import torch
from support.models import gaussian

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.bases.basis import ConcatenatedBasis, ConstantBasis, SineBasis
from gpytorch_tkrr.bases.integrated import IntegratedBasis
from gpytorch_tkrr.bases.levels import LevelBasis
from gpytorch_tkrr.cp.missing import MissingTable, moment_table
from gpytorch_tkrr.cp.moments import MomentTable

NAN = float("nan")


def _data(num_rows: int = 150, share: float = 0.2):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(num_rows, 3, generator=generator, dtype=torch.float64)
    x[:, 0] = torch.exp(3 * x[:, 0])
    x[:, 2] = torch.randint(0, 4, (num_rows,), generator=generator).double()
    y = torch.log(x[:, 0]) * x[:, 1] + (x[:, 2] == 2).double()
    y = y + 0.1 * torch.randn(num_rows, generator=generator, dtype=torch.float64)
    x[torch.rand(x.shape, generator=generator) < share] = NAN
    return x, y


def _fitted(method: str, **kwargs):
    x, y = _data()
    model = tkrr.TKRR(x, y, gaussian(0.05), categorical=[2], missing="integrate", **({"rank": 4} | kwargs))
    if method == "als":
        tkrr.fit_als(model, seed=0, max_sweeps=5)
    else:
        tkrr.fit_gibbs(model, num_warmup=15, num_draws=8, seed=0)
    return model.eval(), x


@pytest.mark.parametrize(
    "settings",
    [{}, {"warp": True}, {"rank": None, "weights": tkrr.TensorTrain(2, order=[1, 0, 2])}],
    ids=["plain", "warp", "train"],
)
@pytest.mark.parametrize("method", ["als", "gibbs"])
def test_predictions_are_means_over_the_missing_values(method, settings):
    model, x = _fitted(method, **settings)
    row = torch.tensor([[NAN, 0.4, 2.0], [3.0, NAN, 1.0], [3.0, 0.4, NAN], [NAN, NAN, 1.0], [3.0, 0.4, 1.0]]).double()
    columns = [column[~column.isnan()] for column in x.mT]
    with torch.no_grad():
        prediction, call = model.predict(row), model(row)
        for n, each in enumerate(row):  # all combinations of values that the missing inputs have among the rows
            values = [columns[d] if each[d].isnan() else each[d : d + 1] for d in range(3)]
            many = torch.cartesian_prod(*values).reshape(-1, 3)
            functions = model.posterior.functions(model.warped(many))  # (S, n)
            means, spread = functions.mean(-1), functions.var(-1, correction=0).mean()
            torch.testing.assert_close(prediction.mean[n], means.mean() + model.mean_module.constant.double())
            if method == "gibbs":
                noise = model.posterior.noise.mean()
                torch.testing.assert_close(prediction.variance[n], means.var(correction=0) + spread + noise)
                torch.testing.assert_close(call.variance[n], means.var() + spread)
            else:
                assert call.variance[n] > spread
                torch.testing.assert_close(prediction.variance[n], call.variance[n] + model.noise().detach())
    assert not prediction.extrapolates.any()


def test_sums_over_rows_with_missing_values():
    x = torch.tensor([0.2, NAN, 2.0, NAN, 1.0, 1.0], dtype=torch.float64)
    p = torch.randn(2, 6, dtype=torch.float64)
    for inner in (ConcatenatedBasis(ConstantBasis(), SineBasis(1.0, 3.0, 12)), ConcatenatedBasis(LevelBasis(0, 3))):
        mean = torch.rand(inner.num_functions, dtype=torch.float64)
        basis = IntegratedBasis(inner, lambda mean=mean: (mean, torch.diag(mean)))
        features = inner(x.nan_to_num(0.0))
        features[x.isnan()] = mean
        torch.testing.assert_close(basis(x), features)
        factor = torch.randn(2, inner.num_functions, dtype=torch.float64)
        torch.testing.assert_close(basis.combine(x, factor), features @ factor.mT)
        table = moment_table(basis, has_missing=True)
        assert isinstance(table, MissingTable)
        assert type(moment_table(basis, has_missing=False)) is not MissingTable
        torch.testing.assert_close(table.project(factor, x, rows=2), factor @ features.mT)
        torch.testing.assert_close(table.features(x), features.mT)
        values, moments = table(x)
        torch.testing.assert_close(values, features.mT)
        sums = torch.einsum("kn,rn,sn->krs", moments, p, p)
        expected = torch.einsum("ni,nj,rn,sn->rsij", features, features, p, p)
        torch.testing.assert_close(table.gram(sums), expected)
        torch.testing.assert_close(table.structured(sums).dense(), expected.permute(0, 2, 1, 3))
        variances, errors = torch.rand(inner.num_functions).double(), torch.randn(table.num_moments, 50).double()
        norms = (table.gram(errors) * (variances.unsqueeze(-1) * variances).sqrt()).square().sum((-2, -1))
        assert (norms <= table.gram_weights(variances) @ errors.square()).all()
    assert isinstance(moment_table(SineBasis(0.0, 1.0, 3), has_missing=True), MomentTable)


def test_single_precision_is_asked_for_many_rows(monkeypatch):
    """Whether sums may be made in single precision depends on the table of a column, also where values are missing."""
    monkeypatch.setattr("gpytorch_tkrr.cp.rounding.MIN_ROWS", 50)
    monkeypatch.setattr("gpytorch_tkrr.cp.rounding.MIN_RANK", 2)
    x, y = _data()
    model = tkrr.TKRR(x, y, gaussian(0.05), rank=3, categorical=[2], missing="integrate")
    tkrr.fit_gibbs(model, num_warmup=4, num_draws=4, seed=0)
    assert torch.isfinite(model.predict(x).mean).all()


def test_streams_weights_and_state():
    x, y = _data()
    model = tkrr.TKRR(x, y, gaussian(0.05), rank=2, categorical=[2], missing="integrate")
    stream = tkrr.TKRR(None, None, gaussian(0.05), rank=2, categorical=[2], missing="integrate")
    tkrr.fit_gibbs(model, num_warmup=4, num_draws=4, seed=0)
    tkrr.fit_gibbs(stream, data=[(x[:90], y[:90]), (x[90:], y[90:])], num_warmup=4, num_draws=4, seed=0, memory=0)
    loaded = tkrr.TKRR(None, None, gaussian(0.05))
    loaded.load_state_dict(model.state_dict())
    with torch.no_grad():
        expected = model.predict(x)
        for other in (stream, loaded):
            torch.testing.assert_close(other.predict(x).mean, expected.mean, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(other.predict(x).variance, expected.variance, rtol=1e-6, atol=1e-6)


def test_another_distribution():
    x, y = _data()
    lower, upper = torch.tensor([1.0, 0.0, -0.5]).double(), torch.tensor([20.0, 0.5, 3.5]).double()
    model = tkrr.TKRR(x, y, gaussian(0.05), rank=3, missing=tkrr.UniformMeasure(lower, upper))
    tkrr.fit_als(model, seed=0, max_sweeps=3)
    grid = torch.linspace(0, 0.5, 20_001, dtype=torch.float64)
    rows = torch.stack([torch.full_like(grid, 3.0), grid, torch.ones_like(grid)], -1)
    with torch.no_grad():
        expected = torch.trapezoid(model.posterior.mean(model.warped(rows)), grid) / 0.5
        missing = torch.tensor([[3.0, NAN, 1.0]]).double()
        torch.testing.assert_close(model.posterior.mean(model.warped(missing))[0], expected, rtol=1e-6, atol=1e-6)


def test_missing_values_are_an_error_by_default():
    x, y = _data()
    with pytest.raises(tkrr.InputError, match="NaN"):
        tkrr.TKRR(x, y, gaussian())
    with pytest.raises(tkrr.InputError, match="'integrate'"):
        tkrr.TKRR(x, y, gaussian(), missing="drop")
    complete = x.nan_to_num(1.0)
    model = tkrr.TKRR(complete, y, gaussian(), rank=2)
    tkrr.fit_als(model, seed=0, max_sweeps=1)
    with pytest.raises(tkrr.InputError, match="missing='integrate'"):
        model.predict(x)
    with pytest.raises(tkrr.InputError, match=r"Column 1 .* no value"):
        tkrr.TKRR(x.index_fill(1, torch.tensor([1]), NAN), y, gaussian(), missing="integrate")
    model, x = _fitted("als")
    with pytest.raises(tkrr.InputError, match="infinite"):
        model.predict(x.nan_to_num(torch.inf))
    with pytest.warns(tkrr.StalePosteriorWarning):
        model.append_train_data(x[:3], torch.zeros(3).double())
    assert tkrr.main_effects(_fitted("als")[0]).grids[2].tolist() == [0.0, 1.0, 2.0, 3.0]
