"""Components that a chain adds while it runs: where they pay, in the time that is left."""

from __future__ import annotations

import copy
import warnings

import gpytorch
import numpy as np
import pytest
import torch

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.chains import component_chain, growth
from gpytorch_tkrr.chains.chain import Chain
from gpytorch_tkrr.chains.problem import GibbsProblem
from gpytorch_tkrr.data.source import TensorSource
from gpytorch_tkrr.sampling.plan import GROWTH_SWEEPS, MIN_DRAWS, SweepCost, affordable_rank, larger_rank

LEAST, NUM_ROWS, NOISE = 3, 2400, 0.05


@pytest.fixture(autouse=True)
def small_bounds(monkeypatch):
    """Small problems show what large ones do: chains start with few components on few rows, and may get more."""
    bounds = {"MIN_RANK": LEAST, "MAX_RANK": 16, "SWEEP_COST": 4e6, "MAX_GROWTH": 8.0, "FEW_ROWS": 800, "CHAINS": {}}
    for name, value in bounds.items():
        monkeypatch.setattr(f"gpytorch_tkrr.sampling.plan.{name}", value)


@pytest.fixture
def tried(monkeypatch):
    """Of each decision: the rank before, the larger one, the one that was kept, and the number of the next sweep."""
    found = []

    def recorded(problem, state, ranks, *rest):
        best = growth.branch_out(problem, state, ranks, *rest)
        found.append((*ranks, best.rank, rest[-1]))
        return best

    monkeypatch.setattr(component_chain, "branch_out", recorded)
    return found


def make_model(num_products=12, num_rows=NUM_ROWS, noise=NOISE, likelihood=None, **options):
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(num_rows, 3, generator=generator, dtype=torch.float64)
    phase, size = torch.rand(2, num_products, 3, generator=generator, dtype=torch.float64)
    f = (1 + size * torch.sin(4 * x.unsqueeze(1) + 6 * phase)).prod(-1)  # (N, products)
    signs = torch.randn(num_products, generator=generator, dtype=torch.float64)
    y = f @ signs
    y = (y - y.mean()) / y.std() + noise * torch.randn(num_rows, generator=generator, dtype=torch.float64)
    return tkrr.TKRR(x, y, likelihood or gpytorch.likelihoods.GaussianLikelihood(), **options)


def fit(model, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tkrr.ConvergenceWarning)
        return tkrr.fit_gibbs(model, seed=0, **options)


@pytest.mark.parametrize("num_chains", [1, 2])
def test_a_function_of_many_products_gets_more_components(tried, monkeypatch, num_chains):
    monkeypatch.setattr("gpytorch_tkrr.sampling.plan.CHAINS", {10_000: (num_chains, 100, num_chains)})
    monkeypatch.setattr("gpytorch_tkrr.inference.gibbs.num_parallel", lambda: 1)
    model = make_model()
    result = fit(model)
    assert len(tried) == num_chains
    assert all(before == LEAST < larger == after for before, larger, after, _ in tried)
    assert model.rank == max(after for _, _, after, _ in tried)
    assert result.posterior.chains.bincount().max() == MIN_DRAWS  # a sweep costs more, so there are fewer
    monkeypatch.setattr(GibbsProblem, "larger_rank", lambda problem, rank: None)
    fewer = make_model()
    fit(fewer)
    assert fewer.rank == LEAST and model.likelihood.noise.item() < 0.7 * fewer.likelihood.noise.item()


def test_what_the_rows_do_not_ask_for_is_not_added(tried):
    model = make_model(num_products=1, noise=0.5)
    fit(model)
    assert all(after == before for before, _, after, _ in tried) and model.rank <= LEAST


@pytest.mark.parametrize(
    "options",
    [
        {"rank": LEAST},  # given
        {"weights": tkrr.TensorTrain(LEAST)},  # no components of their own
    ],
)
def test_what_is_given_stays(tried, options):
    fit(make_model(**options), num_warmup=60, num_draws=4)
    assert not tried


def test_other_rows_must_say_so(tried):
    """With Student noise there is no density of rows held out that a chain could be judged by."""
    fit(make_model(likelihood=gpytorch.likelihoods.StudentTLikelihood()), num_warmup=60, num_draws=4)
    assert not tried
    fit(make_model(), num_warmup=60, num_draws=4)  # the same with Gaussian noise
    assert tried


def test_numbers_of_sweeps_that_are_given_are_made(tried):
    model = make_model()
    result = fit(model, num_warmup=60, num_draws=25)
    assert tried[0][2] > LEAST and result.posterior.num_draws == 25
    assert result.posterior.resume["chains"][0]["sweeps"] == 60 - GROWTH_SWEEPS + 25  # those that decided count
    more = fit(model, num_warmup=0, num_draws=5)  # the chain goes on with the components that it has
    assert more.posterior.num_draws == 30 and len(tried) == 1 and model.rank == tried[0][2]
    fit(make_model(), num_warmup=20, num_draws=4)  # too few to decide with
    assert len(tried) == 1


def test_an_interrupted_fit_is_the_same(tried, monkeypatch, tmp_path):
    sweep, factors = Chain.sweep, []
    fit(make_model())
    decision = tried[0][-1]  # before this sweep
    for stop in (None, decision - 1, decision, decision + 1, decision + 20):
        count = 0

        def stopped(self, stop=stop):
            nonlocal count
            count += 1
            if count - 1 == stop:
                raise KeyboardInterrupt
            sweep(self)

        options = {"checkpoint": tkrr.Checkpoint(tmp_path / f"{stop}.pt", seconds=0)}
        monkeypatch.setattr(Chain, "sweep", stopped)
        if stop is not None:
            with pytest.raises(KeyboardInterrupt):
                fit(make_model(), **options)
        monkeypatch.setattr(Chain, "sweep", sweep)
        model = make_model()
        fit(model, **options)
        factors.append(model.posterior.factors)
    for other in factors[1:]:
        assert all(torch.equal(left, right) for left, right in zip(factors[0], other, strict=True))


def test_rows_that_come_in_batches_decide_the_same(tried):
    for batch_rows in (10_000, 333):
        model = make_model()
        fit(model, data=TensorSource(*model.train_inputs, model.train_targets, batch_rows=batch_rows))
    assert tried[0] == tried[1] and tried[0][2] > LEAST


def test_both_ways_start_where_the_chain_is(monkeypatch):
    """The state that is given stays as it is, and what is new is together as large as the noise."""
    seen = {}

    def recorded(problem, state, ranks, rows, unseen, rng, sweep):
        before = copy.deepcopy(vars(state))
        features = problem.designs[-1].dense().features
        larger = growth._with_more(problem, state, ranks, np.random.default_rng(0))

        def function(each):
            parts = [f @ factor.mT for f, factor in zip(features, each.scaled_factors(), strict=True)]
            return torch.stack(parts).prod(0).sum(-1)

        seen["change"] = (function(larger) - function(state)).std().item()
        seen["noise"] = problem.augmentation.noise(state.parameters) ** 0.5
        best = growth.branch_out(problem, state, ranks, rows, unseen, rng, sweep)
        torch.testing.assert_close(vars(state), before, rtol=0, atol=0)
        assert best.state.precisions.shape == best.energies.shape == (ranks[1],)
        return best

    monkeypatch.setattr(component_chain, "branch_out", recorded)
    fit(make_model())
    assert 0 < seen["change"] < 2 * seen["noise"]


def test_the_cost_of_a_sweep_bounds_the_number():
    cost = SweepCost.of(num_rows=100_000, num_moments=200, num_functions=10, num_dims=8)
    assert cost(20) == 100_000 * 200 / 2 * 20**2 + 8 * (10 * 20) ** 3
    larger = cost.affordable(3e9, most=96, least=3)
    assert cost(larger) <= 3e9 < cost(larger + 1)
    assert cost.affordable(0.0, most=96, least=3) == 3
    assert larger_rank(3, cost, num_rows=1000, num_functions=10) is None  # few rows have several chains
    assert [affordable_rank(rank, cost, num_rows=100_000) for rank in (2, 3, 50)] == [2, 3, 3]


def test_functions_that_cost_more_leave_room_for_fewer_components(monkeypatch):
    """A fast function asks for more functions while the chain runs: the smallest components go, the bound holds."""
    monkeypatch.setattr("gpytorch_tkrr.sampling.plan.MIN_RANK", 2)
    monkeypatch.setattr("gpytorch_tkrr.sampling.plan.SWEEP_COST", 8e7)
    monkeypatch.setattr(GibbsProblem, "larger_rank", lambda problem, rank: None)
    start, end = [], []
    sweep = Chain.sweep

    def recorded(self):
        sweep(self)
        cost = self.problem.sweep_cost()(len(self.current.precisions))
        (start if self.sweeps == 1 else end).append((len(self.current.precisions), cost))

    monkeypatch.setattr(Chain, "sweep", recorded)
    x = torch.rand(NUM_ROWS, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.sin(torch.tensor([25.0, 28.0, 31.0]) * x) @ torch.ones(3, dtype=torch.float64) * (1 + x[:, 0] * x[:, 1])
    y = y + 0.1 * torch.randn(NUM_ROWS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model = tkrr.TKRR(x, y, gpytorch.likelihoods.GaussianLikelihood())
    fit(model)
    assert max(model.num_basis) > 25 and start[0][0] > end[-1][0] >= 2
    assert start[0][1] <= 8e7 and end[-1][1] <= 8e7
