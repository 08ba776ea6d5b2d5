"""Main effects and Sobol indices against sampling, and against a function whose indices are known."""

from __future__ import annotations

import math

import gpytorch
import pytest
import torch
from gpytorch.likelihoods import GaussianLikelihood

from gpytorch_tkrr import (
    TKRR,
    EmpiricalMeasure,
    InputError,
    UniformMeasure,
    fit_als,
    fit_gibbs,
    main_effects,
    sobol_indices,
)
from gpytorch_tkrr.bases.basis import ConcatenatedBasis, ConstantBasis, MonomialBasis, SineBasis


def _model(dtype: torch.dtype = torch.float64) -> TKRR:
    """Four draws of functions with strong interactions, in inputs of different units."""
    x = torch.rand(40, 3, dtype=dtype) * torch.tensor([1.0, 100.0, 0.01], dtype=dtype)
    y = 50 + 9 * torch.sin(6 * x[:, 0]) * x[:, 1] / 100 + 400 * x[:, 2]
    model = TKRR(x, y, GaussianLikelihood().to(x), rank=3, num_basis=6)
    fit_gibbs(model, num_draws=4, num_warmup=20, seed=0)
    return model.eval()


def _columns_at_random(model: TKRR, num: int) -> torch.Tensor:
    """Inputs drawn independently from the columns of the training data."""
    x = model.train_inputs[0]
    return torch.stack([column[torch.randint(len(x), (num,))] for column in x.unbind(-1)], dim=-1)


@torch.no_grad()
def test_main_effects_are_conditional_means():
    model = _model()
    effects = main_effects(model, num_points=5)
    points = _columns_at_random(model, 100_000)
    values = model.draws(points)
    error = values.std(-1) / math.sqrt(100_000)  # (S,)
    torch.testing.assert_close(effects.expectation, values.mean(-1), atol=6 * float(error.max()), rtol=0)
    for d in range(3):
        assert effects.grids[d][0] == model.train_inputs[0][:, d].min()
        for i in (0, 3):
            conditioned = points.clone()
            conditioned[:, d] = effects.grids[d][i]
            expected = model.draws(conditioned).mean(-1) - effects.expectation
            torch.testing.assert_close(effects.draws[d][:, i], expected, atol=10 * float(error.max()), rtol=0)
    low, high = effects.band(0, level=0.5)
    assert (low <= effects.mean(0)).all() and (effects.mean(0) <= high).all()


@pytest.mark.parametrize("uniform", [False, True])
@torch.no_grad()
def test_sobol_indices_agree_with_sampling(uniform):
    """First-order and total indices by the pick-freeze estimators of Jansen (1999)."""
    model, num = _model(), 60_000
    x = model.train_inputs[0]
    measure = UniformMeasure(x.amin(0), x.amax(0)) if uniform else EmpiricalMeasure(x)
    indices = sobol_indices(model, measure=measure)
    if uniform:
        a, b = (measure.lower + (measure.upper - measure.lower) * torch.rand(num, 3).double() for _ in range(2))
    else:
        a, b = _columns_at_random(model, num), _columns_at_random(model, num)
    f_a, f_b = model.draws(a), model.draws(b)  # (S, num)
    torch.testing.assert_close(indices.variance, f_a.var(-1), rtol=0.05, atol=0)
    for d in range(3):
        mixed = a.clone()
        mixed[:, d] = b[:, d]
        f_mixed = model.draws(mixed)
        first = 1 - (f_b - f_mixed).square().mean(-1) / (2 * f_a.var(-1))
        total = (f_a - f_mixed).square().mean(-1) / (2 * f_a.var(-1))
        torch.testing.assert_close(indices.first[:, d], first, rtol=0, atol=0.05)
        torch.testing.assert_close(indices.total[:, d], total, rtol=0, atol=0.05)
    assert (indices.first <= indices.total + 1e-9).all() and (indices.first.sum(-1) <= 1 + 1e-9).all()


@pytest.mark.parametrize("fit", ["gibbs", "als"])
def test_ishigami(fit):
    """sin x1 + 7 sin^2 x2 + 0.1 x3^4 sin x1 on [-pi, pi]^3 has known indices (Ishigami & Homma, 1990)."""
    a, b = 7.0, 0.1
    x = math.pi * (2 * torch.rand(600, 3, dtype=torch.float64) - 1)
    y = x[:, 0].sin() + a * x[:, 1].sin().square() + b * x[:, 2] ** 4 * x[:, 0].sin()
    model = TKRR(x, y, GaussianLikelihood().double(), rank=4)
    if fit == "als":
        model.likelihood.noise = 1e-3
        fit_als(model, seed=0)
    else:
        fit_gibbs(model, num_draws=20, num_warmup=40, seed=0)
    bound = torch.full((3,), math.pi, dtype=torch.float64)
    indices = sobol_indices(model, measure=UniformMeasure(-bound, bound))
    variance = a**2 / 8 + b * math.pi**4 / 5 + b**2 * math.pi**8 / 18 + 0.5
    only_1, only_2 = (1 + b * math.pi**4 / 5) ** 2 / 2, a**2 / 8
    together = b**2 * math.pi**8 * (1 / 18 - 1 / 50)  # of x1 and x3
    first = torch.tensor([only_1, only_2, 0.0], dtype=torch.float64) / variance
    total = torch.tensor([only_1 + together, only_2, together], dtype=torch.float64) / variance
    torch.testing.assert_close(indices.first.mean(0), first, rtol=0, atol=0.02)
    torch.testing.assert_close(indices.total.mean(0), total, rtol=0, atol=0.02)
    assert indices.variance.mean().item() == pytest.approx(variance, rel=0.05)
    effect = main_effects(model, measure=UniformMeasure(-bound, bound), num_points=41)
    torch.testing.assert_close(
        effect.mean(1), a * effect.grids[1].sin().square() - a / 2, rtol=0, atol=0.3
    )  # away from the mean of y by what ALS or the draws leave
    assert effect.draws[0].shape == ((1, 41) if fit == "als" else (20, 41))


def test_uniform_moments_are_integrals():
    basis = ConcatenatedBasis(ConstantBasis(), MonomialBasis(1, 0.3), SineBasis(0.0, 2.0, 30))
    measure = UniformMeasure(*torch.tensor([[-1.5], [1.2]], dtype=torch.float64))
    mean, covariance = measure.moments(0, basis)
    grid = torch.linspace(-1.5, 1.2, 400_001, dtype=torch.float64)
    phi = basis((grid[1:] + grid[:-1]) / 2)  # midpoints
    torch.testing.assert_close(mean, phi.mean(0), rtol=0, atol=1e-8)
    torch.testing.assert_close(covariance, (phi - phi.mean(0)).mT @ (phi - phi.mean(0)) / len(phi), rtol=0, atol=1e-8)


def test_table_and_pictures():
    pytest.importorskip("matplotlib").use("Agg")
    from matplotlib import pyplot

    model = _model(torch.float32)
    indices, effects = sobol_indices(model), main_effects(model)
    assert indices.first.dtype == effects.draws[0].dtype == effects.grids[0].dtype == torch.float32
    lines = indices.summary(["speed", "weight", "width"]).splitlines()
    assert len(lines) == 4
    order = [int(indices.total.mean(0).argsort(descending=True)[0])]
    assert lines[1].startswith(["speed", "weight", "width"][order[0]])
    axes = effects.plot(["speed", "weight", "width"])
    assert [axis.get_xlabel() for axis in axes] == ["speed", "weight", "width"]
    assert all(axis.lines and axis.collections for axis in axes)
    _, given = pyplot.subplots(1, 3)
    assert effects.plot(axes=given)[2] is given[2]
    pyplot.close("all")


@torch.no_grad()
def test_inputs_are_warped_as_the_model_warps_them():
    """A skewed input: averages over the inputs in their own units, through the warp."""
    x = torch.rand(60, 2, dtype=torch.float64)
    x[:, 0] = (4 * x[:, 0]).exp()
    y = x[:, 0].log() + x[:, 1]
    model = TKRR(x, y, GaussianLikelihood().double(), rank=2, num_basis=6, warp=True)
    assert model.warp is not None
    fit_gibbs(model, num_draws=4, num_warmup=10, seed=0)
    effects = main_effects(model, num_points=4)
    rows = torch.cartesian_prod(x[:, 0], x[:, 1])
    torch.testing.assert_close(effects.expectation, model.draws(rows).mean(-1))
    rows = torch.stack([effects.grids[0][2].expand(60), x[:, 1]], dim=-1)
    torch.testing.assert_close(effects.draws[0][:, 2], model.draws(rows).mean(-1) - effects.expectation)
    box = UniformMeasure(x.amin(0), x.amax(0))
    side = torch.linspace(0, 1, 2001, dtype=torch.float64)
    rows = torch.stack([box.lower[0] + (box.upper - box.lower)[0] * side, x[:1, 1].expand(2001)], dim=-1)
    along = model.draws(rows)  # (S, n)
    expected = ((along[:, 1:] + along[:, :-1]) / 2).mean(-1)
    only_first = main_effects(model, measure=_Second(box, x[0, 1])).expectation
    torch.testing.assert_close(only_first, expected, rtol=1e-3, atol=0)


class _Second(UniformMeasure):
    """A uniform first input, the second one fixed."""

    def __init__(self, box: UniformMeasure, value: torch.Tensor):
        super().__init__(box.lower, box.upper)
        self.value = value

    def moments(self, d, functions):
        if d == 0:
            return super().moments(d, functions)
        phi = functions(self.value.reshape(1))[0]
        return phi, torch.zeros(len(phi), len(phi), dtype=phi.dtype)


def test_constant_function_has_no_shares():
    x = torch.rand(20, 2, dtype=torch.float64)
    model = TKRR(x, torch.ones(20, dtype=torch.float64), GaussianLikelihood().double(), rank=2, num_basis=4)
    fit_als(model, seed=0)
    indices = sobol_indices(model)
    assert torch.isfinite(indices.first).all() and torch.isfinite(indices.total).all()
    assert main_effects(model).expectation.item() == pytest.approx(1.0)


def test_bad_requests():
    model = _model()
    with pytest.raises(InputError, match="2 inputs; the model has 3"):
        sobol_indices(model, measure=EmpiricalMeasure(torch.rand(5, 2)))
    with pytest.raises(InputError, match="below upper"):
        UniformMeasure(torch.zeros(2), torch.tensor([1.0, 0.0]))
    with pytest.raises(InputError, match="table"):
        EmpiricalMeasure(torch.rand(5))
    with pytest.raises(InputError, match="3 inputs; got 1 names"):
        sobol_indices(model).summary(["a"])
    with pytest.raises(InputError, match="3 inputs; got 1 names"):
        main_effects(model).plot(["a"])
    model.train_inputs = None
    with pytest.raises(InputError, match="measure"):
        main_effects(model)
    model.mean_module = gpytorch.means.LinearMean(3)
    with pytest.raises(InputError, match="constant mean"):
        main_effects(model)


def test_results_are_shown_in_three_lines():
    x = torch.rand(60, 10)
    model = TKRR(x, x[:, 0] + x[:, 1], GaussianLikelihood(), rank=2, num_basis=4)
    fit_als(model, max_sweeps=2, seed=0)
    effects, indices = main_effects(model), sobol_indices(model)
    for result in (effects, indices):
        lines = repr(result).splitlines()
        assert len(lines) == 3 and all(len(line) < 120 for line in lines) and "10 inputs" in lines[0]
    assert f"{float(indices.total.mean(0)[1]):.3g}, " in repr(indices).splitlines()[2]
    assert repr(model.predict(x[:1] + 5)) == "Prediction of shape (1,), 1 row outside the training range"
    assert repr(model.predict(x[:4]).noise) == "NoiseLevel of shape (4,), 1 draws; see mean and quantile(q)"
    assert repr(UniformMeasure(torch.zeros(2), torch.ones(2))) == "UniformMeasure of 2 inputs"
    assert repr(model.predict(x[:7] + 5)) == "Prediction of shape (7,), 7 rows outside the training range"
