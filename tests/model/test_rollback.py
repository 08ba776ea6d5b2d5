"""An operation that fails changes nothing; whoever is asked afterwards gives the same answers to the last bit."""

from __future__ import annotations

import copy
import warnings

import gpytorch
import pytest
import torch

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.chains.chain import Chain
from gpytorch_tkrr.inference.scoring import HyperparameterStep
from gpytorch_tkrr.model.rollback import rollback_on_error


def make_data(num_rows=60, num_dims=2):
    x = torch.rand(num_rows, num_dims, dtype=torch.float64)
    return x, 3 + torch.sin(6 * x[:, 0]) * x[:, -1] + 0.1 * torch.randn(num_rows, dtype=torch.float64)


def fitted(method="gibbs", **kwargs):
    x, y = make_data()
    model = tkrr.TKRR(x, y, gpytorch.likelihoods.GaussianLikelihood().double(), rank=3, **kwargs)
    if method == "als":
        tkrr.fit_als(model, max_sweeps=2, seed=0)
    else:
        tkrr.fit_gibbs(model, num_warmup=4, num_draws=4, seed=0)
    return model.eval()


class Record:
    """All that can be asked of a model."""

    def __init__(self, model):
        self.model = model
        self.posterior = model.posterior
        self.state = copy.deepcopy(model.state_dict())
        self.sizes = model.num_basis, model.rank, model.is_stale
        self.data = model.train_inputs, model.train_targets
        self.x = torch.rand(20, model.num_dims, dtype=torch.float64) * 1.4 - 0.2
        self.before = self.predict()

    def predict(self):
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", tkrr.OutOfDomainWarning)
            prediction = self.model.eval().likelihood(self.model(self.x))
        return prediction.mean, prediction.variance

    def assert_same(self):
        assert self.model.posterior is self.posterior
        assert (self.model.num_basis, self.model.rank, self.model.is_stale) == self.sizes
        assert self.model.train_inputs is self.data[0] and self.model.train_targets is self.data[1]
        state = self.model.state_dict()
        assert state.keys() == self.state.keys()
        for name, value in self.state.items():
            assert not isinstance(value, torch.Tensor) or torch.equal(value, state[name]), name
        for one, two in zip(self.predict(), self.before, strict=True):
            assert torch.equal(one, two)


def test_values_attributes_and_modules_come_back():
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
    module, raw = kernel.base_kernel, kernel.base_kernel.raw_lengthscale
    kernel.register_buffer("box", torch.zeros(2))
    with pytest.raises(ZeroDivisionError), rollback_on_error(kernel):
        kernel.base_kernel.lengthscale = 9.0
        kernel.base_kernel.raw_lengthscale = torch.nn.Parameter(torch.ones(1, 1))
        kernel.base_kernel = gpytorch.kernels.MaternKernel()
        kernel.box.fill_(3.0)
        kernel.extra = 1
        _ = 1 / 0
    assert kernel.base_kernel is module and module.raw_lengthscale is raw and not raw.any()
    assert not hasattr(kernel, "extra") and torch.equal(kernel.box, torch.zeros(2))
    with rollback_on_error(kernel):
        kernel.base_kernel.lengthscale = 9.0
    assert module.lengthscale.item() == pytest.approx(9.0)  # no error, no rollback


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("method", ["als", "gibbs"])
@pytest.mark.parametrize("sweep", [1, 7])
def test_a_sampler_that_stops_leaves_a_fitted_model_as_it_was(method, sweep, error, monkeypatch):
    """Kernel, likelihood, mean and numbers of functions have all moved by then."""
    model = fitted(method)
    record, original, count = Record(model), Chain.sweep, 0

    def stopped(self, *args):
        nonlocal count
        original(self, *args)
        count += 1
        if count == sweep:
            raise error

    monkeypatch.setattr(Chain, "sweep", stopped)
    with pytest.raises(error):
        tkrr.fit_gibbs(model, data=make_data(90), num_warmup=8, num_draws=4, seed=1)
    record.assert_same()


def test_rows_that_are_refused_are_not_kept():
    x, y = make_data()
    likelihood = gpytorch.likelihoods.FixedNoiseGaussianLikelihood(torch.full_like(y, 0.01))
    model = tkrr.TKRR(x, y, likelihood, rank=2)
    tkrr.fit_als(model, max_sweeps=1, seed=0)
    rows = model.train_inputs, model.train_targets, model.posterior
    with pytest.raises(tkrr.InputError, match="60 noise variances for 65 training rows"):
        tkrr.fit_als(model, new_rows=make_data(5))
    assert (model.train_inputs, model.train_targets, model.posterior) == rows and not model.is_stale
    model = fitted("als")
    record = Record(model)
    with pytest.raises(tkrr.InputError, match="initial_factors"):
        tkrr.fit_als(model, new_rows=(x[:5], y[:5]), initial_factors=[torch.ones(2, 2)])
    record.assert_same()


@pytest.mark.parametrize("method", ["als", "gibbs"])
def test_a_state_of_other_inputs_is_refused(method):
    model = fitted(method)
    x, y = make_data(num_dims=3)
    other = tkrr.TKRR(x, y, gpytorch.likelihoods.GaussianLikelihood().double(), rank=3)
    tkrr.fit_als(other, max_sweeps=1, seed=0)
    record = Record(model)
    with pytest.raises(tkrr.InputError, match="of 3 input dimensions; this model has 2"):
        model.load_state_dict(other.state_dict())
    record.assert_same()
    state = {**model.state_dict(), "domain.center": model.domain.center + 1}
    del state["_extra_state"], state["likelihood.noise_covar.raw_noise"]
    with pytest.raises(RuntimeError, match="raw_noise"):
        model.load_state_dict(state)
    record.assert_same()


def test_several_classes_load_all_or_nothing():
    x, _ = make_data()
    model = tkrr.OneVsRest(x, (3 * x[:, 0]).long(), rank=2, num_basis=4)
    model.fit(num_draws=4, num_warmup=2, seed=0)
    records = [Record(each) for each in model.models]
    state = {name: value for name, value in model.state_dict().items() if not name.startswith("models.2.likelihood")}
    state = {name: value + 1 if name.endswith("raw_outputscale") else value for name, value in state.items()}
    del state["models.2.mean_module.raw_constant"]
    with pytest.raises(RuntimeError, match="raw_constant"):
        model.load_state_dict(state)
    for record in records:
        record.assert_same()


def test_several_classes_are_fitted_all_or_none(monkeypatch):
    x, _ = make_data()
    model = tkrr.OneVsRest(x, (3 * x[:, 0]).long(), rank=2, num_basis=4)
    model.fit(num_draws=4, num_warmup=2, seed=0)
    records, original, count = [Record(each) for each in model.models], Chain.sweep, 0

    def stopped(self, *args):
        nonlocal count
        count += 1
        if count == 8:  # in the second model
            raise KeyboardInterrupt
        original(self, *args)

    monkeypatch.setattr(Chain, "sweep", stopped)
    with pytest.raises(KeyboardInterrupt):
        model.fit(num_draws=4, num_warmup=2, seed=1)
    for record in records:
        record.assert_same()


def test_interrupted_least_squares_do_not_keep_hyperparameters_that_were_only_tried(monkeypatch):
    x, y = make_data()
    model = tkrr.TKRR(x, y, gpytorch.likelihoods.GaussianLikelihood().double(), rank=3, num_basis=8)
    original, count = HyperparameterStep.__call__, 0

    def stopped(self, *args):
        nonlocal count
        original(self, *args)
        count += 1
        if count == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(HyperparameterStep, "__call__", stopped)
    result = tkrr.fit_als(model, learn_hyperparameters=True, seed=0)
    assert "Interrupted" in result.message
    covariances = [mode.covariance() for mode in model.separate().modes]
    assert all(a.equals(b) for a, b in zip(covariances, model.posterior.covariances, strict=True))
    assert (model.eval()(x).mean - y).square().mean() < y.var()


def test_data_outside_of_the_box_are_refused():
    model = fitted("als")
    record = Record(model)
    x, y = make_data()
    for attempt in (
        lambda: model.set_train_data(x + 9, y),
        lambda: model.append_train_data(x + 9, y),
        lambda: model.prepare((x + 9, y)),
        lambda: tkrr.fit_gibbs(model, data=(x + 9, y)),
    ):
        with pytest.raises(tkrr.DomainError, match="outside"):
            attempt()
        record.assert_same()
