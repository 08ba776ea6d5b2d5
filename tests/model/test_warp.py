"""The input warp: smooth ranks inside the range, a bounded slope outside, only where values crowd and on demand."""

from __future__ import annotations

import gpytorch
import pytest
import scipy.interpolate
import scipy.stats
import torch

import gpytorch_tkrr as tkrr


def skewed(num_rows: int = 500) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(num_rows, 3, dtype=torch.float64, generator=generator)
    return torch.stack([uniform[:, 0], torch.exp(5 * uniform[:, 1]), (10 * uniform[:, 2] ** 8).floor()], dim=-1)


def test_crowded_columns_become_uniform_and_others_stay():
    x = skewed()
    warp = tkrr.InputWarp.from_data(x)
    assert warp.columns.tolist() == [1, 2]
    mapped = warp(x)
    torch.testing.assert_close(mapped[:, 0], x[:, 0], rtol=0, atol=0)
    unit = (mapped[:, 1] - x[:, 1].min()) / (x[:, 1].max() - x[:, 1].min())
    assert scipy.stats.kstest(unit.numpy(), "uniform").statistic < 0.05


def test_map_is_increasing_keeps_the_range_and_has_a_bounded_slope_outside():
    x = skewed()
    warp = tkrr.InputWarp.from_data(x)
    lower, upper = x.amin(0), x.amax(0)
    torch.testing.assert_close(warp(torch.stack([lower, upper])), torch.stack([lower, upper]))
    grid = lower + (upper - lower) * torch.linspace(-2, 3, 400, dtype=torch.float64).unsqueeze(-1)
    mapped = warp(grid)
    assert (mapped.diff(dim=0) > 0).all()
    assert (mapped[-1] - upper <= grid[-1] - upper + 1e-9).all()
    assert (lower - mapped[0] <= 1.001 * (lower - grid[0])).all()
    assert mapped[-1, 1] - upper[1] < 0.5 * (grid[-1, 1] - upper[1])  # far values are rare


def test_slope_has_no_jumps():
    x = skewed()
    warp = tkrr.InputWarp.from_data(x)
    for d in (1, 2):
        column = warp.columns.tolist().index(d)
        for knot in warp.knots[column].unique():
            sides = (x[:1].repeat(2, 1)).index_fill(1, torch.tensor([d]), float(knot))
            sides[:, d] += torch.tensor([-1e-9, 1e-9], dtype=torch.float64) * (x[:, d].max() - x[:, d].min())
            sides.requires_grad_()
            slopes = torch.autograd.grad(warp(sides)[:, d].sum(), sides)[0][:, d]
            torch.testing.assert_close(slopes[0], slopes[1], rtol=1e-4, atol=1e-6)


def test_between_knots_it_is_scipys_monotone_interpolation():
    x = skewed()
    warp = tkrr.InputWarp.from_data(x[:, 1:2])
    knots, levels = warp.knots[0].numpy(), warp.levels[0].numpy()
    grid = torch.linspace(float(x[:, 1].min()), float(x[:, 1].max()), 300, dtype=torch.float64)
    expected = scipy.interpolate.PchipInterpolator(knots, levels)(grid.numpy())
    torch.testing.assert_close(warp(grid.unsqueeze(-1))[:, 0], torch.from_numpy(expected), rtol=1e-9, atol=1e-9)


def test_gradient_is_the_slope():
    x = skewed(50)
    warp = tkrr.InputWarp.from_data(x)
    points = x[:5].mul(1.001).add(1e-4).requires_grad_()
    assert torch.autograd.gradcheck(warp, (points,), eps=1e-9, atol=1e-4)


@pytest.mark.parametrize("values", [[1.0, 1.0, 1.0], [0.0, 0.0, 1.0], [0.0, 1.0, 2.0]])
def test_constant_binary_and_even_columns_stay(values):
    assert tkrr.InputWarp.from_data(torch.tensor(values).unsqueeze(-1)).columns.numel() == 0


def test_model_warps_only_where_asked():
    x, y = skewed(60), torch.randn(60, dtype=torch.float64)

    def model(**kwargs) -> tkrr.TKRR:
        return tkrr.TKRR(x, y, gpytorch.likelihoods.GaussianLikelihood(), **kwargs)

    assert model().warp is None and model(warp=False).warp is None
    assert model(warp=True).warp.columns.tolist() == [1, 2]
    kernel = tkrr.anova_kernel(3, center=x.mean(0), half_range=x.amax(0) - x.amin(0))
    assert model(kernel=kernel).warp is None
    assert model(kernel=kernel, warp=True).warp.columns.tolist() == [1, 2]


def test_warped_model_equals_the_model_of_warped_inputs_and_survives_its_state():
    x = skewed(200)
    y = x[:, 0] + torch.log(x[:, 1]) + 0.1 * torch.randn(200, dtype=torch.float64)
    warp = tkrr.InputWarp.from_data(x)
    predictions = []
    for inputs, option in ((x, True), (warp(x), False)):
        kernel = tkrr.anova_kernel(3, center=(x.amax(0) + x.amin(0)) / 2, half_range=(x.amax(0) - x.amin(0)) / 2)
        model = tkrr.TKRR(
            inputs, y, gpytorch.likelihoods.GaussianLikelihood(), kernel=kernel, warp=option, rank=3, num_basis=6
        )
        tkrr.fit_als(model, seed=0)
        predictions.append(model.eval()(inputs))
        if option:
            fresh = tkrr.TKRR(None, None, gpytorch.likelihoods.GaussianLikelihood(), kernel=kernel)
            fresh.load_state_dict(model.state_dict())
            torch.testing.assert_close(fresh.eval()(inputs).mean, predictions[0].mean)
    torch.testing.assert_close(predictions[0].mean, predictions[1].mean)
    torch.testing.assert_close(predictions[0].variance, predictions[1].variance)


def test_levels_are_as_precise_as_the_inputs():
    x = torch.cat([torch.arange(20.0), torch.tensor([100.0])]).double().unsqueeze(-1)
    moved = 1e6 * x + 1e9
    expected = tkrr.InputWarp.from_data(x)(x)
    torch.testing.assert_close((tkrr.InputWarp.from_data(moved)(moved) - 1e9) / 1e6, expected, rtol=0.0, atol=1e-8)
