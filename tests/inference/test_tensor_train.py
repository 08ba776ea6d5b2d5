"""Fits of tensor trains: what is shown for CP weights holds for them, too."""

from __future__ import annotations

import io
from itertools import pairwise

import gpytorch
import pytest
import torch
from models import gaussian, rbf
from processes import run_processes

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.data.source import TensorSource
from gpytorch_tkrr.inference import als


def make_data(num_rows=200, num_dims=3, noise=0.1):
    generator = torch.Generator().manual_seed(5)
    x = torch.rand(num_rows, num_dims, dtype=torch.float64, generator=generator)
    y = torch.sin(6 * x[:, 0]) * (1 + x[:, -1]) + x[:, num_dims // 2] ** 2
    return x, y + noise * torch.randn(num_rows, dtype=torch.float64, generator=generator)


def make_model(x, y, *, rank=3, noise=0.01, num_basis=7, **options):
    options.setdefault("kernel", rbf())
    return tkrr.TKRR(x, y, gaussian(noise), weights=tkrr.TensorTrain(rank), num_basis=num_basis, **options)


def whitened_features(model, x):
    return [mode.basis(x[:, d]) * mode.variances().detach().sqrt() for d, mode in enumerate(model.separate().modes)]


def all_products(model, x):
    total = torch.ones(len(x), 1, dtype=torch.float64)
    for z in whitened_features(model, x):
        total = (total.unsqueeze(-1) * z.unsqueeze(-2)).flatten(1)
    return total


def rises(objective):
    return max(b / a - 1 for a, b in pairwise(objective))


@pytest.mark.parametrize("num_dims", [2, 3])
def test_full_rank_equals_ridge_regression_on_all_products(num_dims):
    x, y = make_data(150, num_dims)
    model = make_model(x, y, rank=5, num_basis=5, kernel=rbf(0.3, 2.0))
    result = tkrr.fit_als(model, max_sweeps=200, rel_tol=1e-13, seed=0)
    z, test = all_products(model, x), torch.rand(40, num_dims, dtype=torch.float64)
    ridge = z.mT @ z + 0.01 / 2.0 * torch.eye(z.shape[1]).double()
    expected = y.mean() + all_products(model, test) @ torch.linalg.solve(ridge, z.mT @ (y - y.mean()))
    tolerance = 1e-6 if num_dims == 2 else 2e-2  # of three inputs rank 5 is full, too, but ALS takes its time
    torch.testing.assert_close(model.eval()(test).mean, expected, rtol=tolerance, atol=tolerance)
    assert rises(result.objective) < 1e-10


def test_every_update_solves_the_dense_normal_equations(monkeypatch):
    x, y = make_data()
    model = make_model(x, y)
    seen = []
    original = als.ALSFit.update

    def update(self, d, objective, **options):
        original(self, d, objective, **options)
        seen.append((d, self.weights.clone(), float(self.strength())))

    monkeypatch.setattr(als.ALSFit, "update", update)
    tkrr.fit_als(model, max_sweeps=2, rel_tol=0.0, seed=0)
    features = whitened_features(model, x)
    t = (y - y.mean()) / y.std(correction=0)
    for d, weights, strength in seen:
        assert weights.center == d and weights.scale == 1.0
        projections = [factor @ z.mT for factor, z in zip(weights.factors, features, strict=True)]
        p = model.weights.products_but_one(projections)[d]
        rows = (p.unsqueeze(1) * features[d].mT).flatten(0, 1)
        matrix = rows @ rows.mT + strength * torch.eye(len(rows)).double()  # the other cores are orthogonal
        expected = torch.linalg.solve(matrix, rows @ t)
        torch.testing.assert_close(weights.factors[d].flatten(), expected, rtol=1e-7, atol=1e-9)
    assert [d for d, _, _ in seen] == [0, 1, 2, 1, 0, 1, 2, 1, 0]


@pytest.mark.parametrize("kernel", ["rbf", "anova"])
def test_the_objective_never_rises_and_is_what_it_says(kernel):
    x, y = make_data()
    y = 100 + 30 * y
    model = make_model(x, y, noise=9.0, kernel=rbf(0.4, 900.0) if kernel == "rbf" else None)
    result = tkrr.fit_als(model, max_sweeps=6, rel_tol=0.0, seed=0)
    assert rises(result.objective) < 1e-10
    residual = y - model.eval()(x).mean
    strength = model.noise() / model.separate().outputscale()
    expected = residual.square().sum() + strength * model.posterior.weights.squared_norm()
    assert result.objective[-1] == pytest.approx(expected.item(), rel=1e-9)


def test_one_input_is_solved_by_one_update():
    x, y = make_data(80, 1)
    model = make_model(x, y)
    assert tkrr.fit_als(model, seed=0).converged
    z = all_products(model, x)
    expected = y.mean() + z @ torch.linalg.solve(z.mT @ z + 0.01 * torch.eye(7).double(), z.mT @ (y - y.mean()))
    torch.testing.assert_close(model.eval()(x).mean, expected, rtol=1e-8, atol=1e-8)
    assert model.eval()(x).variance.min() > 0


def test_laplace_blocks_are_those_of_the_dense_design():
    x, y = make_data()
    y = 7 + 20 * y
    model = make_model(x, y, noise=4.0, kernel=rbf(0.4, 400.0))
    tkrr.fit_als(model, max_sweeps=20, seed=0)
    test = torch.rand(9, 3, dtype=torch.float64)
    weights, strength = model.posterior.weights, 4.0 / 400.0
    train, new = whitened_features(model, x), whitened_features(model, test)
    expected = torch.zeros(9, dtype=torch.float64)
    for d in range(3):
        rows = []
        for features in (train, new):
            projections = [factor @ z.mT for factor, z in zip(weights.factors, features, strict=True)]
            p = model.weights.products_but_one(projections)[d]
            rows.append((p.unsqueeze(1) * features[d].mT).flatten(0, 1))
        form = torch.kron(weights.frobenius_form(d), torch.eye(7).double())
        precision = rows[0] @ rows[0].mT + strength * form
        expected += 4.0 * (rows[1] * torch.linalg.solve(precision, rows[1])).sum(0)
    torch.testing.assert_close(model.eval()(test).variance, expected, rtol=1e-6, atol=1e-9)
    before = model.posterior.root(test)
    model.compute_covariance()
    torch.testing.assert_close(model.posterior.root(test), before, rtol=1e-6, atol=1e-8)


def test_hyperparameters_are_learned_with_shared_ones_too():
    x, y = make_data(400)
    for kernel in (rbf(1.0), rbf(1.0, ard=3), None):
        model = make_model(x, y, noise=0.5, kernel=kernel, num_basis=10)
        tkrr.fit_als(model, learn_hyperparameters=True, max_sweeps=14, seed=0)
        assert 0.005 < model.likelihood.noise.item() < 0.02  # 0.01 is true
        truth = torch.sin(6 * x[:, 0]) * (1 + x[:, -1]) + x[:, 1] ** 2
        assert (model.eval()(x).mean - truth).square().mean().sqrt() < 0.06


def test_factors_are_cores_and_a_start():
    x, y = make_data()
    model = make_model(x, y, mean_module=gpytorch.means.ZeroMean())
    result = tkrr.fit_als(model, max_sweeps=30, seed=0)
    assert [tuple(core.shape) for core in model.factors] == [(1, 7, 3), (3, 7, 3), (3, 7, 1)]
    f = torch.ones(len(x), 1, dtype=torch.float64)
    for core, z in zip(model.factors, whitened_features(model, x), strict=True):
        f = torch.einsum("na,amb,nm->nb", f, core, z)
    torch.testing.assert_close(f.squeeze(-1), model.eval()(x).mean)
    again = make_model(x, y, mean_module=gpytorch.means.ZeroMean())
    started = tkrr.fit_als(again, initial_factors=model.factors, max_sweeps=1, rel_tol=0.0)
    assert started.objective[0] <= result.objective[-1] * (1 + 1e-9)
    continued = tkrr.fit_als(model, max_sweeps=1, rel_tol=0.0)
    assert continued.objective == pytest.approx(started.objective, rel=1e-6)
    with pytest.raises(tkrr.InputError, match=r"shapes .*\(3, 7, 3\).*TensorTrain\(3\)"):
        tkrr.fit_als(again, initial_factors=model.factors[:2])


def test_streamed_rows_give_the_same_fit():
    x, y = make_data()
    whole, streamed = make_model(x, y), make_model(x, y)
    tkrr.fit_als(whole, max_sweeps=3, rel_tol=0.0, seed=0)
    tkrr.fit_als(streamed, data=TensorSource(x, y, batch_rows=37), max_sweeps=3, rel_tol=0.0, seed=0, memory=0)
    torch.testing.assert_close(whole.eval()(x).mean, streamed.eval()(x).mean, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(whole(x).variance, streamed(x).variance, rtol=1e-5, atol=1e-8)


def _fit_shard(group, x, y):
    rank = torch.distributed.get_rank(group)
    model = make_model(None, None, domain=tkrr.Domain(torch.full((3,), 0.5), 1.5))
    tkrr.fit_als(model, data=TensorSource(x[rank::2], y[rank::2]), max_sweeps=3, rel_tol=0.0, seed=0, group=group)
    return model.eval()(x).mean.detach()


def test_two_processes_fit_what_one_does(tmp_path):
    x, y = make_data()
    model = make_model(None, None, domain=tkrr.Domain(torch.full((3,), 0.5), 1.5))
    tkrr.fit_als(model, data=(x, y), max_sweeps=3, rel_tol=0.0, seed=0)
    first, second = run_processes(_fit_shard, 2, tmp_path, x, y)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, model.eval()(x).mean, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("learns", [False, True])
def test_a_checkpoint_goes_on_bit_for_bit(tmp_path, learns):
    x, y = make_data()
    options = {"rel_tol": 0.0, "seed": 0, "learn_hyperparameters": learns}
    whole = make_model(x, y)
    expected = tkrr.fit_als(whole, max_sweeps=4, **options)
    path = tmp_path / "run.pt"
    tkrr.fit_als(make_model(x, y), max_sweeps=2, checkpoint=tkrr.Checkpoint(path, seconds=0), **options)
    model = make_model(x, y)
    result = tkrr.fit_als(model, max_sweeps=4, checkpoint=path, **options)
    assert result.objective == expected.objective
    assert torch.equal(model.eval()(x).mean, whole.eval()(x).mean)
    with pytest.raises(tkrr.CheckpointError, match="weights"):
        tkrr.fit_als(tkrr.TKRR(x, y, gaussian(), kernel=rbf(), rank=3, num_basis=7), checkpoint=path, **options)


def test_state_dict_loads_into_a_model_without_data():
    x, y = make_data()
    model = make_model(x, y)
    tkrr.fit_als(model, seed=0)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    loaded = tkrr.TKRR(None, None, gaussian(), kernel=rbf()).double()
    loaded.load_state_dict(torch.load(buffer, weights_only=True))
    assert repr(loaded.weights) == "TensorTrain(3)"
    expected, got = model.eval()(x), loaded.eval()(x)
    torch.testing.assert_close(got.mean, expected.mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got.variance, expected.variance, rtol=1e-10, atol=1e-14)


@torch.no_grad()
def test_main_effects_and_sobol_indices_are_those_of_the_function():
    x, y = make_data()
    model = make_model(x, y, kernel=None)
    tkrr.fit_als(model, seed=0)
    grid = torch.cartesian_prod(*[column[:12] for column in x.mT])  # every column has the same 12 values throughout
    f = model.eval()(grid).mean.reshape(12, 12, 12)
    measure = tkrr.EmpiricalMeasure(x[:12])
    indices = tkrr.sobol_indices(model, measure=measure)
    for d in range(3):
        others = [k for k in range(3) if k != d]
        first, total = f.mean(others).var(correction=0), f.var(d, correction=0).mean()
        torch.testing.assert_close(indices.first[0, d], first / f.var(correction=0), rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(indices.total[0, d], total / f.var(correction=0), rtol=1e-6, atol=1e-9)
    effects = tkrr.main_effects(model, measure=measure)
    torch.testing.assert_close(effects.expectation[0], f.mean(), rtol=1e-7, atol=1e-7)
    middle = effects.grids[1][50]
    rows = grid.clone()
    rows[:, 1] = middle
    torch.testing.assert_close(effects.draws[1][0, 50], model(rows).mean.mean() - f.mean(), rtol=1e-6, atol=1e-8)


def test_rows_with_heavy_tails_are_weighted():
    x, y = make_data()
    y[::20] += 8
    likelihood = gpytorch.likelihoods.StudentTLikelihood().double()
    likelihood.noise, likelihood.deg_free = 0.01, 4.0
    model = tkrr.TKRR(x, y, likelihood, kernel=rbf(), weights=tkrr.TensorTrain(3), num_basis=7)
    result = tkrr.fit_als(model, seed=0)
    assert rises(result.objective) < 1e-10


def test_what_it_does_not_take_is_refused_by_name():
    x, y = make_data()
    model = make_model(x, y)
    for penalty in (tkrr.ColumnPenalty(), tkrr.FactorPenalty()):
        with pytest.raises(tkrr.InputError, match=r"TensorTrain\(3\).*FrobeniusPenalty"):
            tkrr.fit_als(model, penalty=penalty)
    with pytest.raises(tkrr.InputError, match="give one of rank and weights"):
        tkrr.TKRR(x, y, gaussian(), rank=3, weights=tkrr.TensorTrain(3))
    with pytest.raises(tkrr.InputError, match=r"TensorTrain\(4\)"):
        tkrr.TKRR(x, y, gaussian(), weights=4)
