"""The baselines that stand in the paper's tables: they learn what they can learn, and nothing else runs by default."""

from __future__ import annotations

import pytest
import torch

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.comparison.contender import CONTENDERS

pytest.importorskip("sklearn")
pytest.importorskip("pandas")
NAMES = ("additive-exact", "additive-vff", "kernel-machine", "nystrom")


def data(num=260, interaction=0.0):
    generator = torch.Generator().manual_seed(0)
    x = 3 * torch.rand(num, 2, dtype=torch.float64, generator=generator)
    f = torch.sin(2 * x[:, 0]) + x[:, 1] + interaction * torch.sin(2 * x[:, 0]) * (x[:, 1] - 1.5)
    return x, 10 + 5 * (f + 0.1 * torch.randn(num, dtype=torch.float64, generator=generator))


@pytest.mark.parametrize("name", NAMES)
def test_regression(name):
    x, y = data()
    model = CONTENDERS[name](task="regression")
    model.fit(x[:200], y[:200])
    mean, sd = model.predict(x[200:])
    error = (mean - y[200:]).square().mean().sqrt()
    assert float(error) < 0.9  # 5 times the noise of 0.1, and a little
    assert 0.3 < float(sd.mean()) / float(error) < 3


@pytest.mark.filterwarnings("ignore::gpytorch_tkrr.TKRRWarning")  # lengthscales grow beyond the box
@pytest.mark.parametrize("name", ["additive-exact", "additive-vff"])
def test_additive_models_have_no_interactions(name):
    x, y = data(interaction=2.0)
    errors = {}
    for each in (name, "kernel-machine"):
        model = CONTENDERS[each](task="regression")
        model.fit(x[:200], y[:200])
        errors[each] = float((model.predict(x[200:])[0] - y[200:]).square().mean().sqrt())
    assert errors[name] > 2 * errors["kernel-machine"]


@pytest.mark.parametrize("name", ["kernel-machine", "nystrom"])
def test_classification(name):
    x, y = data(interaction=2.0)
    y = (y > y.median()).double()
    model = CONTENDERS[name](task="classification")
    model.fit(x[:200], y[:200])
    probability = model.predict(x[200:])
    assert ((probability >= 0) & (probability <= 1)).all()
    assert float(((probability > 0.5) == (y[200:] > 0.5)).double().mean()) > 0.85
    with pytest.raises(tkrr.NotApplicableError):
        model.fit(x[:9], torch.arange(9).double() % 3)


@pytest.mark.parametrize("name", ["additive-exact", "additive-vff"])
def test_additive_models_have_no_classes(name):
    with pytest.raises(tkrr.NotApplicableError):
        CONTENDERS[name](task="classification").fit(*data(30))


def test_they_run_on_request_only():
    x, y = data(40)
    assert not any(CONTENDERS[name].is_default for name in NAMES)
    result = tkrr.compare(x, y, models=["mean", "nystrom"], splits=1, isolate=False)
    assert list(result.table().index) and "Nyström" in str(result)
