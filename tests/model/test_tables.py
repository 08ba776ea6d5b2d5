"""Arrays and DataFrames instead of tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.models import gaussian

import gpytorch_tkrr as tkrr

pandas = pytest.importorskip("pandas")


def _frame(num_rows: int = 60):
    rng = np.random.default_rng(0)
    frame = pandas.DataFrame(
        {
            "a": rng.random(num_rows).astype(np.float32),
            "b": pandas.array(rng.integers(0, 3, num_rows), dtype="Int64"),
            "c": rng.random(num_rows) > 0.5,
        }
    )
    return frame, pandas.Series(2.0 * frame["a"] + frame["b"].astype(float))


def test_frames_arrays_and_tensors_are_the_same():
    frame, y = _frame()
    array = frame.astype(float).to_numpy()
    forms = [
        (frame, y),
        (array, y.to_numpy()),
        (torch.from_numpy(array), torch.tensor(y.tolist(), dtype=torch.float64)),
    ]
    means = []
    for inputs, targets in forms:
        names = {"categorical": ["b"] if inputs is frame else [1]}
        model = tkrr.TKRR(inputs, targets, gaussian(), rank=2, **names)
        tkrr.fit_gibbs(model, num_warmup=5, num_draws=5, seed=0)
        with torch.no_grad():
            assert model.train_inputs[0].dtype == torch.float64
            assert model.eval()(inputs).mean.shape == model.draws(inputs).shape[1:] == model.extrapolates(inputs).shape
            means.append(model.predict(inputs).mean)
        tkrr.fit_als(model, data=(inputs, targets), seed=0, max_sweeps=1)
    assert all(torch.equal(means[0], other) for other in means[1:])


def test_columns_of_a_frame_are_found_by_name():
    frame, y = _frame()
    model = tkrr.TKRR(frame, y, gaussian(), rank=2)
    tkrr.fit_als(model, seed=0, max_sweeps=1)
    with torch.no_grad():
        assert torch.equal(model.predict(frame[["c", "b", "a"]]).mean, model.predict(frame).mean)
    with pytest.raises(tkrr.InputError, match="no column 'c'"):
        model.predict(frame[["a", "b"]])
    with pytest.warns(tkrr.StalePosteriorWarning):
        model.append_train_data(frame[["b", "a", "c"]][:2], y[:2])
    assert torch.equal(model.train_inputs[0][-2:], model.train_inputs[0][:2])
    model.set_train_data(frame, y, strict=False)
    assert len(model.train_targets) == len(frame)


def test_what_is_no_number_is_named():
    frame, y = _frame()
    for wrong in (frame.assign(b="x"), frame.assign(b=pandas.Categorical(frame["b"]))):
        with pytest.raises(tkrr.InputError, match="Column 'b' has the type"):
            tkrr.TKRR(wrong, y, gaussian())
    for column in (pandas.date_range("2024", periods=60), pandas.array(["x"] * 60, dtype="string")):
        with pytest.raises(tkrr.InputError, match=r"gpytorch_tkrr\.sklearn take text, categories and dates"):
            tkrr.TKRR(frame.assign(b=column), y, gaussian())
    with pytest.raises(tkrr.InputError, match="more than one column 'a'"):
        tkrr.TKRR(frame.set_axis(["a", "b", "a"], axis=1), y, gaussian())
    with pytest.raises(tkrr.InputError, match="got a list"):
        tkrr.TKRR(frame, y.tolist(), gaussian())
    with pytest.raises(tkrr.InputError, match="no column 'd'"):
        tkrr.TKRR(frame, y, gaussian(), categorical=["d"])
    with pytest.raises(tkrr.InputError, match="The column has the type"):
        tkrr.TKRR(frame, y.astype(str), gaussian())
    missing = frame.astype({"b": "Int64"})
    missing.loc[4, "b"] = pandas.NA
    with pytest.raises(tkrr.InputError, match="row 4"):
        tkrr.TKRR(missing, y, gaussian())
    with pytest.raises(tkrr.InputError, match="row 4"):
        tkrr.fit_als(tkrr.TKRR(None, None, gaussian()), data=(missing, y))
