"""What a Gibbs fit chooses where nothing is given."""

import warnings

import gpytorch
import numpy as np
import pytest
import torch

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.chains import pool
from gpytorch_tkrr.chains.chain import Chain
from gpytorch_tkrr.chains.component_chain import ComponentChain
from gpytorch_tkrr.chains.problem import GibbsProblem
from gpytorch_tkrr.data.source import TensorSource
from gpytorch_tkrr.inference import gibbs
from gpytorch_tkrr.sampling import workers
from gpytorch_tkrr.sampling.plan import MAX_RANK, MIN_RANK, WINDOW, Plan, affordable_functions, has_settled
from gpytorch_tkrr.sampling.pooling import PRIOR_ROWS, keep_up, kept_draws, stacking_weights

NOTHING = {"rank": None, "num_warmup": None, "num_draws": None, "num_chains": None}


def make_model(num_rows=60, rank=None, noise=0.05, **options):
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.rand(num_rows, 3, generator=generator, dtype=torch.float64)
    y = torch.sin(5 * x[:, 0]) * x[:, 1] + noise * torch.randn(num_rows, generator=generator, dtype=torch.float64)
    options = {"num_basis": 6, **options}
    return tkrr.TKRR(x, y, gpytorch.likelihoods.GaussianLikelihood(), rank=rank, **options)


def test_chains_get_fewer_and_stages_more_with_the_rows():
    plans = [Plan.choose(n, 100, 10, 5, **NOTHING) for n in (100, 2_000, 7_000, 20_000, 10**7)]
    assert [plan.num_chains for plan in plans] == [6, 4, 2, 1, 1]
    assert [len(plan.rows) for plan in plans] == [2, 2, 2, 2, 7]
    assert [plan.num_held_out for plan in plans] == [15, 300, 1000, 0, 0]
    for plan, n in zip(plans, (100, 2_000, 7_000, 20_000, 10**7), strict=True):
        assert plan.rows[-1] == n and list(plan.rows) == sorted(set(plan.rows))
        assert plan.rows[0] + plan.num_held_out <= n and MIN_RANK <= plan.rank <= MAX_RANK
    assert len(Plan.choose(100, 100, 10, 5, **NOTHING, can_score=False).rows) == 1
    assert [Plan.choose(2_000, 100, 10, d, **NOTHING).num_chains for d in (5, 13, 20, 128)] == [4, 3, 2, 2]
    assert [Plan.choose(500, 100, 10, d, **NOTHING).num_chains for d in (5, 33, 128)] == [6, 3, 2]  # never one alone
    assert plans[0].rank == MIN_RANK and plans[-1].rank == MIN_RANK


def test_with_many_inputs_there_are_fewer_visits_and_smaller_factorisations(monkeypatch):
    plans = {d: Plan.choose(2_000, 100, 10, d, **NOTHING) for d in (20, 40, 50, 128, 1000)}
    sweeps = {d: plan.ends[0] for d, plan in plans.items()}
    assert sweeps == {20: 50, 40: 50, 50: 40, 128: 25, 1000: 25}
    assert [plans[d].num_draws for d in (40, 50, 128)] == [40, 32, 20]
    assert Plan.choose(2_000, 100, 10, 128, **{**NOTHING, "num_draws": 40}).num_draws == 40

    seen = []

    class Stop(Exception):
        pass

    def stop(problem, *args):
        seen.append([mode.num_functions for mode in problem.separable.modes])
        raise Stop

    monkeypatch.setattr(gibbs.GibbsProblem, "choose_plan", stop)
    for num_dims in (8, 80):
        x = torch.rand(120, num_dims, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        with pytest.raises(Stop):
            tkrr.fit_gibbs(tkrr.TKRR(x, x[:, 0], gpytorch.likelihoods.GaussianLikelihood()), seed=0)
    assert set(seen[0]) == {22} and set(seen[1]) == {affordable_functions(80)}


def test_skewed_noise_has_twice_as_many_sweeps(monkeypatch):
    plans = [Plan.choose(20_000, 100, 10, 5, **NOTHING, sweep_factor=factor) for factor in (1.0, 2.0)]
    assert [(plan.ends, plan.num_draws) for plan in plans] == [((50, 60), 40), ((100, 120), 80)]
    seen = []

    class Stop(Exception):
        pass

    def stop(*args, sweep_factor, **kwargs):
        seen.append(sweep_factor)
        raise Stop

    monkeypatch.setattr(Plan, "choose", stop)
    x = torch.rand(60, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for options in ({}, {"student": True}, {"skewed": True}):
        likelihood = tkrr.HeteroskedasticLikelihood(**options)
        with pytest.raises(Stop):
            tkrr.fit_gibbs(tkrr.TKRR(x, x[:, 0], likelihood, rank=2, num_basis=4), seed=0)
    assert seen == [1.0, 1.0, 2.0]


def test_what_is_given_is_taken():
    plan = Plan.choose(50_000, 100, 10, 5, rank=7, num_warmup=100, num_draws=13, num_chains=3)
    assert (plan.rank, plan.num_chains, plan.num_draws, plan.ends[-1], plan.is_fixed) == (7, 3, 13, 100, True)
    assert Plan.choose(50, 100, 10, 5, **{**NOTHING, "num_draws": 9}).num_chains == 1
    assert set(Plan.choose(50_000, 100, 10, 5, **{**NOTHING, "num_warmup": 0}).ends) == {0}


def test_a_stage_is_over_when_the_noise_has_stopped_falling():
    assert not has_settled([0.0] * (2 * WINDOW - 1)) and has_settled([0.0] * (2 * WINDOW))
    assert not has_settled([-0.1 * i for i in range(2 * WINDOW)])
    assert has_settled([0.01 * (-1) ** i for i in range(2 * WINDOW)])


def test_nothing_given_gives_several_chains_and_a_rank_of_its_own():
    model = make_model()
    result = tkrr.fit_gibbs(model, seed=0)
    assert len(result.posterior.chains.unique()) == 6 and "6 chains" in result.message
    assert model.rank == result.posterior.rank == 60 + 64  # of draws in the limit of many components
    assert result.effective_rank < MIN_RANK  # of the others: components that do nothing were dropped
    x, y = model.train_inputs[0], model.train_targets
    assert (model.predict(x).mean - y).square().mean().sqrt() < 0.1
    assert set(result.rhat) >= {"f", "noise"}


@pytest.mark.skipif(workers.sys.platform != "linux", reason="processes are forked on Linux only")
def test_processes_change_no_draw(monkeypatch):
    fits = []
    for num_workers in (1, 2):
        monkeypatch.setattr(gibbs, "num_parallel", lambda num=num_workers: num)
        model = make_model(40, rank=3, num_basis=None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", tkrr.ConvergenceWarning)
            tkrr.fit_gibbs(model, seed=1, num_warmup=9, num_draws=5, num_chains=3)
        fits.append(model)
    assert fits[0].num_basis == fits[1].num_basis
    for left, right in zip(fits[0].posterior.factors, fits[1].posterior.factors, strict=True):
        assert torch.equal(left, right)


@pytest.mark.skipif(workers.sys.platform != "linux", reason="processes are forked on Linux only")
def test_failures_in_processes_are_errors():
    def fail(number, tell):
        if number == 1:
            raise ValueError("no such chain")
        return number

    with pytest.raises(tkrr.ProcessError, match="no such chain"):
        workers.run_forked(fail, 3, 2)
    with pytest.raises(tkrr.ProcessError, match="without a result"):
        workers.run_forked(lambda number, tell: workers.os._exit(3), 2, 2)


@pytest.mark.skipif(workers.sys.platform != "linux", reason="processes are forked on Linux only")
def test_processes_say_how_far_they_are(monkeypatch, capsys):
    told = []
    assert workers.run_forked(lambda number, tell: tell(f"step {number}") or number, 3, 2, told.append) == [0, 1, 2]
    assert sorted(told) == ["step 0", "step 1", "step 2"]
    pytest.importorskip("tqdm")
    monkeypatch.setattr(gibbs, "num_parallel", lambda: 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tkrr.ConvergenceWarning)
        tkrr.fit_gibbs(make_model(40, rank=3), seed=1, num_warmup=3, num_draws=4, num_chains=3, progress=True)
    assert "21/21" in capsys.readouterr().err


def test_warm_up_on_few_rows_goes_on_with_all(monkeypatch):
    monkeypatch.setattr("gpytorch_tkrr.sampling.plan.FEW_ROWS", 50)
    monkeypatch.setattr("gpytorch_tkrr.sampling.plan.STAGE_FACTOR", 3)
    counts = []
    sweep = Chain.sweep

    def recorded(self):
        sweep(self)
        counts.append(self.sampler.design.data.summary.num_rows)

    monkeypatch.setattr(Chain, "sweep", recorded)
    model = make_model(400, rank=4)
    tkrr.fit_gibbs(model, seed=0, num_warmup=20, num_draws=4)
    assert counts == sorted(counts) and len(set(counts)) == 3
    assert 30 < counts[0] < 70 and counts[-6:] == [400] * 6
    sd = model.train_targets.std()
    assert (model.predict(model.train_inputs[0]).mean - model.train_targets).square().mean().sqrt() < 0.3 * sd


def test_a_stage_ends_where_other_rows_are_no_longer_predicted_better(monkeypatch, tmp_path):
    """Components follow the noise of few rows: more sweeps on these do harm. The number of sweeps is the one given."""
    monkeypatch.setattr("gpytorch_tkrr.sampling.plan.FEW_ROWS", 60)
    num_warmup, num_draws, rows, adapted, factors = 60, 4, [], [], []
    sweep, adapt_functions = Chain.sweep, GibbsProblem.adapt_functions

    def recorded(self):
        sweep(self)
        rows.append(self.sampler.design.data.summary.num_rows)

    def recorded_functions(self):
        adapt_functions(self)
        adapted.append(len(rows))

    monkeypatch.setattr(GibbsProblem, "adapt_functions", recorded_functions)
    for stop in (None, 20, 45):
        rows.clear()
        adapted.clear()

        def stopped(self, stop=stop):
            if len(rows) == stop:
                raise KeyboardInterrupt
            recorded(self)

        model = make_model(600, rank=6, noise=1.0, num_basis=None)
        fit = {"num_warmup": num_warmup, "num_draws": num_draws, "seed": 0}
        fit["checkpoint"] = tkrr.Checkpoint(tmp_path / f"{stop}.pt", seconds=0)
        monkeypatch.setattr(Chain, "sweep", stopped)
        if stop is not None:
            with pytest.raises(KeyboardInterrupt):
                tkrr.fit_gibbs(model, **fit)
            monkeypatch.setattr(Chain, "sweep", recorded)
            model = make_model(600, rank=6, noise=1.0, num_basis=None)
        tkrr.fit_gibbs(model, **fit)
        factors.append(model.posterior.factors)
        assert len(rows) == num_warmup + num_draws
        first, later = rows.count(rows[0]), rows.count(600)
        assert num_warmup // 8 < first < 48 and later > 6 + num_draws  # of 48, 6 and 6 sweeps at most, in each stage
        assert adapted[-1] > rows.index(600)  # all rows may show more
    for other in factors[1:]:
        assert all(torch.equal(left, right) for left, right in zip(factors[0], other, strict=True))


@pytest.mark.parametrize("num_warmup", [1, 2, 10, 25])
def test_functions_stay_the_same_once_draws_are_made(monkeypatch, num_warmup):
    monkeypatch.setattr("gpytorch_tkrr.sampling.plan.FEW_ROWS", 60)
    counts, adapt_functions = [], GibbsProblem.adapt_functions

    def recorded(self):
        adapt_functions(self)
        self.resize([num + len(counts) + 1 for num in self.model.num_basis])  # others at each look
        counts.append(self.model.num_basis)

    monkeypatch.setattr(GibbsProblem, "adapt_functions", recorded)
    model = make_model(600, rank=3, num_basis=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tkrr.ConvergenceWarning)
        tkrr.fit_gibbs(model, num_warmup=num_warmup, num_draws=12, seed=0)
    assert counts in ([], [*counts[:-1], model.num_basis]) and model.posterior.num_draws == 12


def test_few_rows_are_the_same_for_all_batches_and_a_resumed_fit_is_the_same(monkeypatch, tmp_path):
    monkeypatch.setattr("gpytorch_tkrr.sampling.plan.FEW_ROWS", 50)
    sweep, factors = Chain.sweep, []
    for stop, batch_rows in ((None, 1000), (None, 17), (5, 1000), (11, 1000)):
        model = make_model(200, rank=3)
        data = TensorSource(*model.train_inputs, model.train_targets, batch_rows=batch_rows)
        path = tkrr.Checkpoint(tmp_path / f"{stop} {batch_rows}.pt", seconds=0)
        count = 0

        def stopped(self, stop=stop):
            nonlocal count
            count += 1
            if stop is not None and count == stop:
                raise KeyboardInterrupt
            sweep(self)

        monkeypatch.setattr(Chain, "sweep", stopped)
        fit = {"data": data, "num_warmup": 10, "num_draws": 4, "seed": 0, "checkpoint": path}
        if stop is not None:
            with pytest.raises(KeyboardInterrupt):
                tkrr.fit_gibbs(model, **fit)
            stop = None
        monkeypatch.setattr(Chain, "sweep", sweep)
        tkrr.fit_gibbs(model, **fit)
        factors.append(model.posterior.factors)
    for other, is_exact in zip(factors[1:], (False, True, True), strict=True):
        for left, right in zip(factors[0], other, strict=True):
            assert torch.equal(left, right) if is_exact else np.allclose(left, right, rtol=1e-6, atol=1e-9)


def test_weights_maximise_the_density_of_rows_held_out():
    generator = torch.Generator().manual_seed(0)
    log_densities = torch.randn(40, 3, generator=generator, dtype=torch.float64) + torch.tensor([0.0, 1.0, -2.0])

    def objective(weights):
        mixed = torch.logsumexp(log_densities + weights.log(), -1).sum()
        return float(mixed + PRIOR_ROWS * weights.log().sum())

    weights = stacking_weights(log_densities)
    assert weights.sum() == pytest.approx(1.0)
    for _ in range(200):
        other = weights * (0.1 * torch.randn(3, generator=generator, dtype=torch.float64)).exp()
        assert objective(other / other.sum()) <= objective(weights) + 1e-6


def test_draws_are_kept_in_proportion_and_the_last_always():
    kept = kept_draws(torch.tensor([0.6, 0.3, 0.1, 1e-9]), [30] * 4)
    assert [len(index) for index in kept] == [30, 15, 5, 1]
    assert all(int(index[-1]) == 29 and len(index.unique()) == len(index) for index in kept)
    kept = kept_draws(torch.tensor([0.5, 0.25, 0.25]), [40, 40, 15])  # a chain that has made fewer sets the measure
    assert [(len(index), int(index[-1])) for index in kept] == [(30, 39), (15, 39), (15, 14)]


def test_whoever_uses_draws_honours_the_weights(monkeypatch):
    seen = []

    def weights(log_densities):
        seen.append(log_densities)
        return torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)

    monkeypatch.setattr(pool, "stacking_weights", weights)
    monkeypatch.setattr("gpytorch_tkrr.sampling.plan.CHAINS", {1000: (3, 100, 1)})
    monkeypatch.setattr("gpytorch_tkrr.sampling.plan.FIRST_STAGE", 12)
    model = make_model(200, rank=4)
    result = tkrr.fit_gibbs(model, seed=0)
    assert seen[0].shape[1] == 3 and 15 < len(seen[0]) < 45 and torch.isfinite(seen[0]).all()
    assert result.posterior.chains.bincount().tolist() == [30, 15, 5]
    x, y = model.train_inputs[0], model.train_targets
    functions = result.posterior.functions(model.warped(x))
    torch.testing.assert_close(model.eval()(x).mean, model.mean_module.constant + functions.mean(0))
    densities = torch.distributions.Normal(model.draws(x), result.posterior.noise.sqrt()[:, None]).log_prob(y)
    mixed = torch.logsumexp(densities, 0) - np.log(50)
    torch.testing.assert_close(result.log_predictive_density(x, y), mixed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tkrr.ConvergenceWarning)
        result = tkrr.fit_gibbs(model, seed=0, num_warmup=0, num_draws=10)  # goes on with the same weights
    assert result.posterior.chains.bincount().tolist() == [40, 20, 7] and len(seen) == 1


def test_a_chain_that_fails_beside_the_best_is_told_apart():
    rows = torch.randn(60, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shifts = torch.tensor([0.0, -0.3, -0.9, -50.0], dtype=torch.float64)
    assert keep_up(rows + shifts) == [True, True, False, False]
    assert keep_up(rows) == [True]  # a chain alone
    assert keep_up((rows + shifts)[:1]) == [True] * 4  # a single row decides nothing
    # One row of sixty, however wrong, is no failure, nor is a tie.
    single = rows.repeat(1, 2)
    single[3, 1] = -1e6
    assert keep_up(single) == [True, True] and keep_up(rows.repeat(1, 3)) == [True] * 3


def test_chains_that_fail_do_not_count(monkeypatch):
    draws = ComponentChain.draws

    def spoiled(chain):
        found = draws(chain)
        found.scores -= 100.0 * (chain.number == 1)
        return found

    monkeypatch.setattr(ComponentChain, "draws", spoiled)
    monkeypatch.setattr("gpytorch_tkrr.sampling.plan.CHAINS", {1000: (3, 100, 1)})
    monkeypatch.setattr("gpytorch_tkrr.sampling.plan.FIRST_STAGE", 12)
    model = make_model(200, rank=4)
    result = tkrr.fit_gibbs(model, seed=0)
    assert "2 chains" in result.message and "1 more did not count" in result.message
    assert len(result.posterior.chains.unique()) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tkrr.ConvergenceWarning)
        result = tkrr.fit_gibbs(model, seed=0, num_warmup=0, num_draws=5)  # goes on with those that count
    assert len(result.posterior.chains.unique()) == 2 and "did not count" not in result.message


def test_a_chain_whose_components_have_died_starts_again(monkeypatch):
    """Some components had been dropped before: the chain has all of them again, and goes on to find the function."""
    model = make_model(300)
    monkeypatch.setattr(GibbsProblem, "have_died", lambda self, energies, parameters: True)

    def keep_some(self, is_look):
        self.sampler.prior.keep(self.current, torch.arange(len(self.peak)) < 5, self.peak)

    monkeypatch.setattr("gpytorch_tkrr.chains.component_chain.ComponentChain._drop", keep_some)
    counts, sweep = [], Chain.sweep

    def recorded(self):
        sweep(self)
        counts.append(len(self.current.precisions))

    monkeypatch.setattr(Chain, "sweep", recorded)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tkrr.ConvergenceWarning)
        tkrr.fit_gibbs(model, num_warmup=40, num_draws=4, seed=0)
    assert counts[0] > counts[15] and counts[25] == counts[0]
    residual = model.predict(model.train_inputs[0]).mean - model.train_targets
    assert residual.square().mean() < 0.5 * model.train_targets.var()
