"""The order of the inputs of a tensor train: what it changes is the rank that a function needs, and nothing else."""

from __future__ import annotations

import copy
import io
from itertools import permutations

import pytest
import torch
from models import gaussian, rbf
from processes import run_processes

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.cp.order import arrangement_cost
from gpytorch_tkrr.data.source import TensorSource

ORDER = [2, 0, 3, 1]
NUM_BASIS = [5, 6, 7, 4]


def crossed(num_rows=400):
    """Inputs 0 and 2 act together, and inputs 1 and 3, each pair by two products."""
    generator = torch.Generator().manual_seed(3)
    x = 2 * torch.rand(num_rows, 4, dtype=torch.float64, generator=generator) - 1
    f = torch.sin(3 * (x[:, 0] + x[:, 2])) + torch.sin(3 * (x[:, 1] + x[:, 3]))
    return x, f + 0.05 * torch.randn(num_rows, dtype=torch.float64, generator=generator), f


def make_model(x, y, order=None, rank=3, **options):
    options = {"kernel": rbf(0.8), "num_basis": 7, **options}
    return tkrr.TKRR(x, y, gaussian(0.01), weights=tkrr.TensorTrain(rank, order), **options)


@pytest.mark.parametrize("seed", range(5))
def test_the_cost_is_that_of_all_pairs_and_near_the_smallest(seed):
    weights = torch.rand(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) ** 4
    weights = (weights + weights.mT).fill_diagonal_(0)

    def cost(order):
        return sum(weights[a, b].item() * abs(order.index(a) - order.index(b)) for a in range(6) for b in range(a))

    order = tkrr.ByInteraction().choose(weights)
    assert arrangement_cost(order, weights) == pytest.approx(cost(order))
    assert cost(order) <= 1.1 * min(cost(list(each)) for each in permutations(range(6)))
    assert tkrr.ByInteraction().choose(1e-9 * weights) == order


def test_inputs_that_do_not_interact_keep_their_order():
    assert tkrr.ByInteraction().choose(torch.zeros(5, 5)) == [0, 1, 2, 3, 4]
    chain = torch.diag_embed(torch.ones(4), 1)
    assert tkrr.ByInteraction().choose(chain + chain.mT) == [0, 1, 2, 3, 4]


@torch.no_grad()
@pytest.mark.parametrize("learns", [False, True])
def test_an_order_is_what_permuted_columns_are(learns):
    """ALS, Laplace blocks, main effects and Sobol indices, from the same start."""
    x, y, _ = crossed(200)
    given = make_model(x, y, ORDER, num_basis=NUM_BASIS, kernel=rbf(0.8, ard=4))
    permuted = make_model(x[:, ORDER], y, num_basis=[NUM_BASIS[d] for d in ORDER], kernel=rbf(0.8, ard=4))
    start = [torch.randn(shape, dtype=torch.float64) for shape in given.weights.shapes(NUM_BASIS)]
    options = {"max_sweeps": 3, "rel_tol": 0.0, "learn_hyperparameters": learns}
    one = tkrr.fit_als(given, initial_factors=start, **options)
    two = tkrr.fit_als(permuted, initial_factors=[start[d] for d in ORDER], **options)
    assert one.objective == pytest.approx(two.objective, rel=1e-8)
    new = torch.rand(20, 4, dtype=torch.float64)
    got, expected = given.eval()(new), permuted.eval()(new[:, ORDER])
    torch.testing.assert_close(got.mean, expected.mean, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(got.covariance_matrix, expected.covariance_matrix, rtol=1e-5, atol=1e-8)
    indices, others = tkrr.sobol_indices(given), tkrr.sobol_indices(permuted)
    torch.testing.assert_close(indices.total[:, ORDER], others.total, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(indices.first[:, ORDER], others.first, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(indices.variance, others.variance, rtol=1e-6, atol=1e-8)
    effects, same = tkrr.main_effects(given), tkrr.main_effects(permuted)
    for place, d in enumerate(ORDER):
        torch.testing.assert_close(effects.draws[d], same.draws[place], rtol=1e-5, atol=1e-8)
    assert [core.shape for core in given.factors] == [core.shape for core in start]
    kept = {"num_basis": NUM_BASIS, "kernel": copy.deepcopy(given.covar_module), "domain": given.domain}
    again = make_model(x, y, ORDER, **kept)
    again.likelihood.noise = given.likelihood.noise
    result = tkrr.fit_als(again, initial_factors=given.factors, max_sweeps=1, rel_tol=0.0)
    assert result.objective[0] <= one.objective[-1] * (1 + 1e-8)


@torch.no_grad()
def test_neighbours_that_interact_need_a_small_rank():
    x, y, f = crossed()
    errors = {}
    for name, order in {"as given": None, "found": tkrr.ByInteraction(), "listed": [0, 2, 1, 3]}.items():
        model = make_model(x, y, order)
        tkrr.fit_als(model, max_sweeps=20, seed=0)
        errors[name] = float((model.eval()(x).mean - f).square().mean() / f.var())
        if name == "found":
            assert {frozenset(model.weights.order[:2]), frozenset(model.weights.order[2:])} == {
                frozenset([0, 2]),
                frozenset([1, 3]),
            }
    assert max(errors["found"], errors["listed"]) < 0.02 < 0.1 < errors["as given"]
    drawn = make_model(x, y, tkrr.ByInteraction())
    tkrr.fit_gibbs(drawn, num_warmup=4, num_draws=4, seed=0)
    assert {drawn.weights.order[0], drawn.weights.order[1]} in ({0, 2}, {1, 3})


def test_units_do_not_change_the_order():
    x, y, _ = crossed()
    orders = []
    for scale, shift in ((1.0, 0.0), (1e6, -1e7)):
        model = make_model(scale * x + shift, 3 * y, tkrr.ByInteraction(), kernel=None)
        tkrr.fit_als(model, max_sweeps=1, seed=0)
        orders.append(model.weights.order)
    assert orders[0] == orders[1]


@pytest.mark.filterwarnings("ignore::gpytorch_tkrr.ConvergenceWarning")
@pytest.mark.parametrize("method", ["als", "gibbs"])
def test_states_checkpoints_streams_and_copies_keep_the_order(method, tmp_path):
    x, y, _ = crossed(200)

    def fit(model, **options):
        if method == "als":
            return tkrr.fit_als(model, max_sweeps=options.pop("sweeps", 3), rel_tol=0.0, seed=0, **options)
        options.pop("sweeps", None)
        return tkrr.fit_gibbs(model, num_warmup=8, num_draws=4, num_chains=1, seed=0, **options)

    def values(model):
        return model.eval()(x).mean if method == "als" else model.draws(x)

    whole = make_model(x, y, tkrr.ByInteraction())
    fit(whole)
    expected, order = values(whole), whole.weights.order
    assert order != (0, 1, 2, 3)
    streamed = make_model(x, y, tkrr.ByInteraction())
    fit(streamed, data=TensorSource(x, y, batch_rows=37), memory=0)
    assert streamed.weights.order == order
    torch.testing.assert_close(values(streamed), expected, rtol=1e-5, atol=1e-5)

    path = tmp_path / "run.pt"
    with pytest.raises(_StoppedError):
        fit(make_model(x, y, tkrr.ByInteraction()), checkpoint=_Stopping(path))
    resumed = make_model(x, y, tkrr.ByInteraction())
    fit(resumed, checkpoint=path)
    assert resumed.weights.order == order
    torch.testing.assert_close(values(resumed), expected, rtol=1e-10, atol=1e-10)

    buffer = io.BytesIO()
    torch.save(whole.state_dict(), buffer)
    buffer.seek(0)
    loaded = tkrr.TKRR(None, None, gaussian(), kernel=rbf()).double()
    loaded.load_state_dict(torch.load(buffer, weights_only=True))
    for model in (loaded, copy.deepcopy(whole)):
        assert repr(model.weights) == f"TensorTrain(3, order={order})"
        assert torch.equal(values(model), expected)
    whole.resize(rank=2)
    assert whole.weights.order == order
    fit(whole)
    assert whole.weights.order == order


class _StoppedError(Exception):
    """A fit that dies."""


class _Stopping(tkrr.Checkpoint):
    def __init__(self, path):
        super().__init__(path, seconds=0)
        self.left = 2

    def save(self, state, *, last=False):
        super().save(state, last=last)
        self.left -= 1
        if self.left == 0:
            raise _StoppedError


def _fit_shard(group, x, y):
    rank = torch.distributed.get_rank(group)
    model = make_model(None, None, tkrr.ByInteraction(), domain=tkrr.Domain(torch.zeros(4), 3.0))
    data = TensorSource(x[rank::2], y[rank::2])
    tkrr.fit_als(model, data=data, max_sweeps=2, rel_tol=0.0, seed=0, group=group)
    return torch.tensor(model.weights.order), model.eval()(x).mean.detach()


def test_two_processes_find_the_order_of_one(tmp_path):
    x, y, _ = crossed(200)
    model = make_model(None, None, tkrr.ByInteraction(), domain=tkrr.Domain(torch.zeros(4), 3.0))
    tkrr.fit_als(model, data=(x, y), max_sweeps=2, rel_tol=0.0, seed=0)
    for order, mean in run_processes(_fit_shard, 2, tmp_path, x, y):
        assert order.tolist() == list(model.weights.order)
        torch.testing.assert_close(mean, model.eval()(x).mean, rtol=1e-6, atol=1e-6)


def test_orders_that_are_none_are_refused_by_name():
    x, y, _ = crossed(50)
    with pytest.raises(tkrr.InputError, match=r"each of the inputs 0 to 2 once; got \[0, 2, 2\]"):
        tkrr.TensorTrain(3, [0, 2, 2])
    for wrong in ("interaction", [0.5, 1.0], 3):
        with pytest.raises(tkrr.InputError, match="ByInteraction"):
            tkrr.TensorTrain(3, wrong)
    with pytest.raises(tkrr.InputError, match="has 3 inputs; the model has 4"):
        make_model(x, y, [0, 2, 1])
    model = make_model(x, y, tkrr.ByInteraction())
    start = [torch.randn(shape, dtype=torch.float64) for shape in model.weights.shapes([7] * 4)]
    with pytest.raises(tkrr.InputError, match="order as a list"):
        tkrr.fit_als(model, initial_factors=start)
    assert model.weights.is_undecided


def test_draws_of_another_order_are_not_continued():
    x, y, _ = crossed(100)
    model = make_model(x, y, [0, 2, 1, 3])
    tkrr.fit_gibbs(model, num_warmup=4, num_draws=4, num_chains=1, seed=0)
    model.weights = tkrr.TensorTrain(3)
    with pytest.raises(tkrr.InputError, match="order of the inputs"):
        tkrr.fit_gibbs(model, num_warmup=0, num_draws=4)
