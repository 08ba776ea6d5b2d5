"""Columns that are categories, in a CP-weight model."""

from __future__ import annotations

import pytest
import torch
from gpytorch.kernels import IndexKernel, RBFKernel, ScaleKernel
from support.models import GP, gaussian

import gpytorch_tkrr as tkrr


def _table(num_rows: int = 400, num_levels: int = 6):
    generator = torch.Generator().manual_seed(1)
    number = torch.rand(num_rows, 1, generator=generator, dtype=torch.float64)
    level = torch.randint(0, num_levels, (num_rows, 1), generator=generator)
    value, slope = torch.randn(2, num_levels, generator=generator, dtype=torch.float64)
    f = value[level[:, 0]] + slope[level[:, 0]] * number[:, 0]
    y = f + 0.1 * torch.randn(num_rows, generator=generator, dtype=torch.float64)
    level = level + (level >= 3).long()  # nobody has level 3
    return torch.cat([number, level.double()], -1), y, f


def test_one_category_is_the_exact_gp():
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 5, (60,), generator=generator).double()
    x[x == 2] = 3.0
    y = x.sin() + 0.1 * torch.randn(60, generator=generator, dtype=torch.float64)
    new = torch.tensor([0.0, 2.0, 4.0, 9.0, 0.5], dtype=torch.float64)
    kernel = ScaleKernel(tkrr.CategoricalKernel()).double()
    kernel.base_kernel.lengthscale = 0.8
    model = tkrr.TKRR(x, y, gaussian(0.02), kernel=kernel, rank=1)
    tkrr.fit_als(model, seed=0)
    exact = GP(x, y, gaussian(0.02), kernel).double()
    exact.mean_module.constant = float(y.mean())
    with torch.no_grad(), pytest.warns(tkrr.ExtrapolationWarning, match="levels never seen"):
        ours, theirs = model.predict(new.unsqueeze(-1)), exact.eval()(new)
        torch.testing.assert_close(ours.mean, theirs.mean, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(ours.variance, theirs.variance + 0.02, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(model.eval()(new).variance, theirs.variance, rtol=1e-6, atol=1e-8)
    assert ours.extrapolates.tolist() == [False, True, False, True, True]


@pytest.mark.parametrize("fit", ["als", "gibbs"])
def test_default_kernel_with_categories(fit):
    x, y, f = _table()
    model = tkrr.TKRR(x, y, gaussian(), rank=6, categorical=[1])
    if fit == "als":
        tkrr.fit_als(model, seed=0, learn_hyperparameters=True, max_sweeps=10)
    else:
        tkrr.fit_gibbs(model, num_warmup=40, num_draws=40, seed=0)
    with torch.no_grad():
        prediction = model.predict(x)
        assert (prediction.mean - f).square().mean().sqrt() < 0.06
        assert not prediction.extrapolates.any()
        seen, gap, other = torch.tensor([[0.5, 2.0], [0.5, 3.0], [0.5, 40.0]], dtype=torch.float64).split(1)
        for new in (gap, other):
            with pytest.warns(tkrr.ExtrapolationWarning, match=r"levels never seen, in columns \[1\]"):
                unseen = model.predict(new)
            assert unseen.extrapolates.all()
            assert unseen.variance > 5 * model.predict(seen).variance  # the levels differ by about 1
            assert unseen.variance < 50 * y.var()

    loaded = tkrr.TKRR(None, None, gaussian())
    loaded.load_state_dict(model.state_dict())
    assert loaded.categorical == (1,)
    with torch.no_grad():
        torch.testing.assert_close(loaded.predict(x).mean, prediction.mean)
    assert loaded.extrapolates(torch.cat([seen, gap, other])).tolist() == [False, True, True]


@pytest.mark.filterwarnings("ignore::gpytorch_tkrr.OutOfDomainWarning")
def test_a_task_that_nobody_has_seen():
    """An IndexKernel has a table of its tasks: others have the mean variance of these, independent of them."""
    x, y, _ = _table()
    table = IndexKernel(num_tasks=8, rank=2, active_dims=[1])
    kernel = RBFKernel(active_dims=[0]) * table
    model = tkrr.TKRR(x, y, gaussian(), kernel=kernel.double(), rank=4, num_basis=10)
    tkrr.fit_gibbs(model, num_warmup=20, num_draws=10, num_chains=1, seed=0)
    with torch.no_grad(), pytest.warns(tkrr.ExtrapolationWarning, match="levels never seen"):
        known, no_rows, no_task = model.predict(torch.tensor([[0.5, 2.0], [0.5, 3.0], [0.5, 9.0]]).double()).stddev
        least = table._eval_covar_matrix().diagonal().min().sqrt()
    assert known < 0.2 and no_rows > 3 * known and no_task > least
    assert model.extrapolates(torch.tensor([[0.5, 2.0], [0.5, 3.0], [0.5, 9.0]])).tolist() == [False, True, True]


def test_levels_must_be_numbered():
    x, y, _ = _table()
    with pytest.raises(tkrr.InputError, match=r"0, 1, 2, \.\.\., for instance by numpy.unique"):
        tkrr.TKRR(x * torch.tensor([1.0, 1e9]), y, gaussian(), categorical=[1])


def test_order_of_level_numbers_does_not_matter():
    x, y, _ = _table(200)
    renamed = x.clone()
    renamed[:, 1] = 6 - x[:, 1]
    predictions = []
    for inputs in (x, renamed):
        model = tkrr.TKRR(inputs, y, gaussian(), rank=4, categorical=[1])
        tkrr.fit_als(model, seed=0, max_sweeps=200, rel_tol=1e-12)
        predictions.append(model.predict(inputs).mean.detach())
    torch.testing.assert_close(*predictions, rtol=0, atol=1e-3)


def test_box_and_warp_know_categories():
    x, y, _ = _table(200)
    x[:, 1] = torch.where(x[:, 1] < 5, x[:, 1], 500.0)  # a number would be warped
    x[:, 0] = torch.exp(5 * x[:, 0])
    model = tkrr.TKRR(x, y, gaussian(), categorical=[1], warp=True)
    assert model.warp is not None and model.warp.columns.tolist() == [0]
    center, half_width = model.domain.sides(2)
    assert (float(center[1] - half_width[1]), float(center[1] + half_width[1])) == (-0.5, 500.5)
    assert model.warped(torch.tensor([[1.0, 1e6]], dtype=torch.float64))[0, 1] == 1e6
    with pytest.raises(tkrr.InputError, match="kernel of your own"):
        tkrr.TKRR(x, y, gaussian(), kernel=tkrr.anova_kernel(2), categorical=[1])


def test_levels_of_a_summary():
    x, y, _ = _table(300)
    whole = tkrr.summarise((x, y))
    assert whole.levels[0] is None and whole.levels[1].tolist() == [0, 1, 2, 4, 5, 6]
    parts = tkrr.summarise((x[:7], y[:7])) + tkrr.summarise((x[7:], y[7:]))
    assert parts.levels[1].tolist() == whole.levels[1].tolist()
    far = torch.tensor([[0.0], [3e9], [-7.0]], dtype=torch.float64)
    assert tkrr.summarise((far, y[:3])).levels[0].tolist() == [-7, 0, 3e9]


@pytest.mark.parametrize("fit", ["als", "gibbs"])
def test_effects_of_levels(fit):
    x, y, _ = _table(300)
    model = tkrr.TKRR(x, y, gaussian(), rank=4, categorical=[1])
    if fit == "als":
        tkrr.fit_als(model, seed=0)
    else:
        tkrr.fit_gibbs(model, num_warmup=10, num_draws=10, seed=0)
    effects, levels = tkrr.main_effects(model), torch.tensor([0, 1, 2, 4, 5, 6]).double()
    assert effects.grids[1].tolist() == levels.tolist() and effects.categorical == (1,)
    # Averaged over the rows by brute force: every row with every level.
    grid = torch.cartesian_prod(x[:, 0], levels)
    with torch.no_grad():
        values = model.eval()(grid).mean.reshape(len(x), len(levels)).mean(0)
        share = torch.stack([(x[:, 1] == level).double().mean() for level in levels])
        torch.testing.assert_close(effects.mean(1), values - share @ values)
        everything = torch.cartesian_prod(x[:, 0], x[:, 1])
        total = model(everything).mean.var(correction=0) if fit == "als" else None
    indices = tkrr.sobol_indices(model)
    if total is not None:
        torch.testing.assert_close(indices.variance[0], total)
        main = (share * effects.mean(1) ** 2).sum()
        torch.testing.assert_close(indices.first[0, 1], main / total)
    uniform = tkrr.main_effects(model, measure=tkrr.UniformMeasure(x.amin(0), x.amax(0)))
    assert uniform.mean(1).mean().abs() < 1e-9  # every level counts the same
    pytest.importorskip("matplotlib").use("Agg")
    assert len(effects.plot(["number", "level"])) == 2
