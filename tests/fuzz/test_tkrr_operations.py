"""Random sequences of operations on a CP-weight model: after each it is as a fresh one with its data and state.

The default profile runs a few hundred operations; ``pytest tests/fuzz --hypothesis-profile=long`` runs 100 000
sequences.
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import hypothesis.strategies as st
import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    FixedNoiseGaussianLikelihood,
    GaussianLikelihood,
    StudentTLikelihood,
)
from hypothesis import given

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.chains.chain import Chain
from gpytorch_tkrr.inference import als

#: What an operation may be refused by; anything else is a fault.
REFUSALS = (tkrr.TKRRError, ValueError)

NUM_DIMS = 2


def scaled_rbf():
    return ScaleKernel(RBFKernel(ard_num_dims=NUM_DIMS)).double()


#: Likelihoods, and targets of them made of numbers between -1 and 1.
LIKELIHOODS = {
    "gaussian": (lambda n: GaussianLikelihood().double(), lambda y: y),
    "fixed": (lambda n: FixedNoiseGaussianLikelihood(torch.linspace(0.01, 0.1, n).double()), lambda y: y),
    "student": (lambda n: StudentTLikelihood().double(), lambda y: y),
    "censored": (lambda n: tkrr.CensoredLikelihood(high=0.5).double(), lambda y: y.clamp(max=0.5)),
    "by_inputs": (lambda n: tkrr.HeteroskedasticLikelihood(rank=2, num_basis=3).double(), lambda y: y),
    "probit": (lambda n: BernoulliLikelihood(), lambda y: (y > 0).double()),
    "counts": (lambda n: tkrr.NegativeBinomialLikelihood().double(), lambda y: (3 + 3 * y).round()),
    "ordinal": (lambda n: tkrr.OrdinalLikelihood(3).double(), lambda y: (1 + y).round().clamp(0, 2)),
}

#: What models are made with, beside data and likelihood.
SETUPS = {
    "default": lambda: {},
    "few": lambda: {"num_basis": 4, "rank": 2},
    "warped": lambda: {"num_basis": [3, 5], "rank": 2, "warp": True},
    "given": lambda: {"kernel": scaled_rbf(), "domain": tkrr.Domain([0.5, 0.5], [3.0, 3.0]), "num_basis": 5, "rank": 2},
}


def rows(num_rows, seed):
    """Inputs, one column of few values, and targets between -1 and 1."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(num_rows, NUM_DIMS, generator=generator, dtype=torch.float64)
    x[:, 1] = (x[:, 1] * 4).round() / 4
    noise = torch.randn(num_rows, generator=generator, dtype=torch.float64)
    return x, (torch.sin(5 * x[:, 0]) * x[:, 1] + 0.1 * noise).clamp(-1, 1)


class Session:
    """A model on which operations are made, and what a fresh one is made of."""

    def __init__(self, setup, likelihood):
        self.setup, (self.make_likelihood, self.targets) = SETUPS[setup], LIKELIHOODS[likelihood]
        x, y = self.rows(15, 0)
        self.model = self.fresh(x, y)
        self.states = [self.state()]

    def rows(self, num_rows, seed):
        x, y = rows(num_rows, seed)
        return x, self.targets(y)

    def fresh(self, x, y):
        return tkrr.TKRR(x, y, self.make_likelihood(len(x)), **self.setup())

    def state(self):
        return copy.deepcopy(self.model.state_dict())

    # Operations: each takes a number that decides about the rest.

    def fit_als(self, number):
        tkrr.fit_als(self.model, max_sweeps=number % 3, seed=number, learn_hyperparameters=number % 2 == 1)

    def fit_als_to_other_rows(self, number):
        tkrr.fit_als(self.model, data=self.rows(9 + number, number), max_sweeps=1, seed=number)

    def fit_als_with_new_rows(self, number):
        tkrr.fit_als(self.model, new_rows=self.rows(1 + number, number), max_sweeps=1, seed=number)

    def fit_gibbs(self, number):
        tkrr.fit_gibbs(self.model, num_warmup=1 + number % 5, num_draws=4, num_chains=1 + number % 2, seed=number)

    def go_on(self, number):
        tkrr.fit_gibbs(self.model, num_warmup=0, num_draws=4, seed=number)

    def append(self, number):
        self.model.append_train_data(*self.rows(1 + number, number))
        if isinstance(self.model.likelihood, FixedNoiseGaussianLikelihood):
            self.model.likelihood = self.make_likelihood(len(self.model.train_targets))

    def replace_data(self, number):
        x, y = self.rows(len(self.model.train_targets), number)
        self.model.set_train_data(x, y)

    def replace_targets(self, number):
        self.model.set_train_data(targets=self.rows(len(self.model.train_targets), number)[1])

    def move_data_outside(self, number):
        self.model.set_train_data(self.model.train_inputs[0] + 100.0)

    def save(self, number):
        self.states.append(self.state())

    def load(self, number):
        self.model.load_state_dict(self.states[number % len(self.states)])

    def load_other_inputs(self, number):
        x = torch.rand(12, 1 + 2 * (number % 2), dtype=torch.float64)
        other = tkrr.TKRR(x, self.targets(x[:, 0]), self.make_likelihood(12), rank=2)
        self.model.load_state_dict(other.state_dict())

    def load_damaged(self, number):
        state = self.state()
        del state[list(state)[number % len(state)]]
        self.model.load_state_dict(state)

    def resize(self, number):
        self.model.resize(num_basis=[None, 3, 6, [4, 7], [2, 2]][number % 5], rank=[None, 1, 3][number % 3])

    def resize_badly(self, number):
        wrong = [{"num_basis": [3, 3, 3]}, {"num_basis": 0}, {"rank": 0}, {"rank": 2.5}, {"num_basis": [3, -1]}]
        boxes = [tkrr.Domain([0.5], [3.0]), tkrr.Domain([50.0, 50.0], [1.0, 1.0]), tkrr.Domain([0.0] * 3, [3.0] * 3)]
        wrong.extend({"domain": box} for box in boxes)
        self.model.resize(**wrong[number % len(wrong)])

    def widen(self, number):
        self.model.resize(domain=tkrr.Domain([0.5, 0.5], [2.0 + number, 3.0]))

    def deep_copy(self, number):
        left, self.model = self.model, copy.deepcopy(self.model)
        before = answers(self.model)
        if number % 2:  # what is done to the one does not change the other
            disturb(left)
            assert_same(answers(self.model), before)

    def round_trip(self, number):
        self.model = pickle.loads(pickle.dumps(self.model))

    def state_round_trip(self, number):
        file = io.BytesIO()
        torch.save(self.model.state_dict(), file)
        file.seek(0)
        self.model.load_state_dict(torch.load(file, weights_only=True))

    def interrupt_gibbs(self, number):
        with interrupted(Chain, "sweep", number % 6):
            with pytest.raises(KeyboardInterrupt):
                tkrr.fit_gibbs(self.model, num_warmup=3, num_draws=4, seed=number)
                raise KeyboardInterrupt  # it was over before

    def interrupt_als(self, number):
        with interrupted(als.ALSFit, "update", number % 4):
            tkrr.fit_als(self.model, max_sweeps=2, seed=number, learn_hyperparameters=number % 2 == 1)

    def fail_in_als(self, number):
        with interrupted(als.ALSFit, "update", number % 4, error=ValueError):
            tkrr.fit_als(self.model, new_rows=self.rows(3, number), max_sweeps=2, seed=number)

    def change_kernel(self, number):
        with torch.no_grad():
            for parameter in self.model.covar_module.parameters():
                parameter.add_(0.1 * (number - 3))

    def thin(self, number):
        self.model.thin(1 + number)

    def predict(self, number):
        answers(self.model)

    def switch_modes(self, number):
        self.model.train(number % 2 == 0)

    def to_single_and_back(self, number):
        self.model.float().double()


OPERATIONS = [name for name in vars(Session) if not name.startswith("_") and name not in ("rows", "fresh", "state")]


class interrupted:
    """Within, a method raises an error after some calls."""

    def __init__(self, owner, name, calls, error=KeyboardInterrupt):
        self.owner, self.name, self.calls, self.error = owner, name, calls, error

    def __enter__(self):
        self.original, left = getattr(self.owner, self.name), self.calls

        def stopped(*args, **kwargs):
            nonlocal left
            if left == 0:
                raise self.error("stopped")
            left -= 1
            return self.original(*args, **kwargs)

        setattr(self.owner, self.name, stopped)

    def __exit__(self, *error):
        setattr(self.owner, self.name, self.original)


#: Points inside of the training range, near its edge and far outside.
POINTS = torch.cat([rows(6, 99)[0], torch.tensor([[1.05, 0.5], [3.0, -2.0]], dtype=torch.float64)])


@torch.no_grad()
def answers(model):
    """What a model says, by name; the text of the error where it refuses."""
    model, found = copy.copy(model), {}
    given = {"noise": 0.1} if isinstance(model.likelihood, FixedNoiseGaussianLikelihood) else {}
    model.eval()
    try:
        f = model(POINTS)
        found.update(mean=f.mean, covariance=f.covariance_matrix)
        prediction = model.predict(POINTS, **given)
        found.update(y_mean=prediction.mean, y_variance=prediction.variance, median=prediction.quantile(0.5))
        found.update(sample=prediction.sample(2, seed=0), outside=prediction.extrapolates)
        found.update(own=model(model.train_inputs[0]).mean)
    except REFUSALS as error:
        found["error"] = str(error)
    found.update(prior=model.covar_module(POINTS).to_dense(), noise=model.noise(), rank=model.rank)
    found.update(num_basis=str(model.num_basis), stale=model.is_stale, box=str(model.domain))
    return found


def disturb(model):
    """Change whatever can be changed."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(1)
        model.train_targets.add_(1)
        model.train_inputs[0].mul_(0.5)
        if model.is_fitted:
            for factor in model.posterior.factors:
                factor.mul_(2)


def assert_same(one, two):
    assert one.keys() == two.keys(), (one.get("error"), two.get("error"))
    for name, value in one.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(value, two[name], rtol=1e-9, atol=1e-9, equal_nan=True, msg=name)
        else:
            assert value == two[name], name


def assert_as_fresh(session):
    """The same answers as those of a model that is made now; returns that one."""
    model = session.model
    fresh = session.fresh(model.train_inputs[0], model.train_targets)
    fresh.load_state_dict(session.state())
    assert_same(answers(model), answers(fresh))
    return fresh


def assert_same_fits(model, fresh):
    """What is not seen in the answers of a model is seen in its next fit."""
    fits = [lambda each: tkrr.fit_gibbs(each, num_warmup=2, num_draws=4, seed=5)]
    if model.observation.has_least_squares:
        fits.append(lambda each: tkrr.fit_als(each, max_sweeps=1, seed=5))
    for fit in fits:
        fitted = [copy.deepcopy(each) for each in (model, fresh)]
        for each in fitted:
            fit(each)
        assert_same(*map(answers, fitted))


def record(model):
    """All that an operation must leave alone where it fails."""
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    data = {"x": model.train_inputs[0], "y": model.train_targets}
    return {**answers(model), **{name: value.clone() for name, value in {**state, **data}.items()}}


def step(session, name, number):
    """One operation, which works or changes nothing; returns a fresh model that is the same then."""
    before = record(session.model)
    try:
        getattr(session, name)(number)
    except (*REFUSALS, RuntimeError) as error:
        assert len(str(error)) > 30 or str(error) == "stopped"
        assert_same(record(session.model), before)
    return assert_as_fresh(session)


@given(
    likelihood=st.sampled_from(list(LIKELIHOODS)),
    setup=st.sampled_from(list(SETUPS)),
    operations=st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 7)), min_size=1, max_size=6),
)
def test_a_model_is_as_a_fresh_one(likelihood, setup, operations):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        session = Session(setup, likelihood)
        for name, number in operations:
            fresh = step(session, name, number)
        assert_same_fits(session.model, fresh)
