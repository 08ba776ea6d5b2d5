"""Where a fit starts: screening against dense algebra, and functions without main effects."""

from __future__ import annotations

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood, GaussianLikelihood
from support.models import gaussian
from torch import Tensor

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.chains import component_chain
from gpytorch_tkrr.cp.design import Design
from gpytorch_tkrr.cp.start import MIN_RIDGE, Effects, Mode, Screening, near_constant


def _setup(x: Tensor, y: Tensor, *, weight: Tensor | None = None, memory: int = 2 << 30, **kwargs):
    model = tkrr.TKRR(x, y, gaussian(), warp=False, **kwargs)
    training = model.training_data((x, y) if weight is None else (x, y, weight), memory=memory)
    model.prepare(training)
    modes = model.separate().modes
    return Design(training, [mode.basis for mode in modes], memory=memory), [m.covariance().detach() for m in modes]


def screened(design: Design, covariances, rank: int, generator: torch.Generator) -> list[Tensor]:
    return Screening.of(design, covariances).start(rank, generator)


def _values(design: Design, covariances, factors: list[Tensor], x: Tensor) -> Tensor:
    """Components at inputs, `(R, n)`."""
    result = torch.ones(len(factors[0]), len(x), dtype=torch.float64)
    for d, (covariance, factor) in enumerate(zip(covariances, factors, strict=True)):
        result = result * (covariance.unwhiten(factor) @ design.tables[d].features(x[:, d].contiguous()))
    return result


def _interactions(num_rows: int, num_dims: int, num_pairs: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, noisy targets and f: products of two inputs that do nothing alone."""
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.rand(num_rows, num_dims, dtype=torch.float64, generator=generator) - 1
    f = sum(torch.sin(3 * x[:, 2 * p]) * torch.sin(3 * x[:, 2 * p + 1]) for p in range(num_pairs))
    f = f / f.std()
    return x, f + 0.2 * torch.randn(num_rows, dtype=torch.float64, generator=generator), f


@torch.no_grad()
@pytest.mark.parametrize("weighted", [False, True])
def test_effects_are_those_of_dense_algebra(weighted):
    torch.manual_seed(0)
    x = torch.rand(400, 3, dtype=torch.float64)
    y = torch.sin(4 * x[:, 0]) + 3 * (x[:, 1] - 0.5) * (x[:, 2] - 0.5) + 0.1 * torch.randn(400, dtype=torch.float64)
    weight = 0.5 + torch.rand(400, dtype=torch.float64) if weighted else None
    design, covariances = _setup(x, y, weight=weight)
    modes = [Mode.from_marginal(*pair) for pair in zip(design.marginals(), covariances, strict=True)]
    directions = [mode.directions() for mode in modes]
    means = torch.stack([each @ mode.mean for each, mode in zip(directions, modes, strict=True)])
    raw = [v.unwhiten(each) for v, each in zip(covariances, directions, strict=True)]
    effects = Effects.find(design, raw, means)

    w = torch.ones_like(y) if weight is None else weight
    mean = (w @ y) / w.sum()
    y = (y - mean) / ((w @ (y - mean) ** 2) / w.sum()).sqrt()
    z = torch.cat([table.features(x[:, d].contiguous()).mT @ raw[d].mT for d, table in enumerate(design.tables)], -1)
    z = z - (w @ z) / w.sum()
    variance = (w @ z.square()) / w.sum()
    torch.testing.assert_close(variance, torch.ones(9, dtype=torch.float64))  # directions have unit variance
    gram = (z.mT * w) @ z / w.sum() + max(MIN_RIDGE, 10 / 400) * torch.eye(9, dtype=torch.float64)
    main = torch.linalg.solve(gram, (z.mT * w) @ y / w.sum())
    residual = w * (y - z @ main) / w.sum()
    strengths = {(d, d): float(main[3 * d : 3 * d + 3].norm()) for d in range(3)}
    for d, k in ((0, 1), (0, 2), (1, 2)):
        block = z[:, 3 * d : 3 * d + 3].mT @ (residual.unsqueeze(-1) * z[:, 3 * k : 3 * k + 3])
        strengths[d, k] = float(torch.linalg.svdvals(block)[0])
    assert len(effects.sizes) == 3 + 3 * 3
    for pair, strength in strengths.items():
        found = [float(s) for s, m in zip(effects.sizes, effects.modes.tolist(), strict=True) if tuple(m) == pair]
        assert found[0] == pytest.approx(strength, rel=1e-8)
    assert [tuple(m) for m in effects.modes[:2].tolist()] == [(0, 0), (1, 2)]


def test_first_components_are_the_terms_of_the_function():
    x, _, f = _interactions(1000, 6, 1, seed=0)
    f = f + 2 * x[:, 4]
    design, covariances = _setup(x, f, rank=2)
    values = _values(design, covariances, screened(design, covariances, 2, torch.Generator().manual_seed(0)), x)
    main, pair = x[:, 4], torch.sin(3 * x[:, 0]) * torch.sin(3 * x[:, 1])
    for component, term in zip(values, (main, pair), strict=True):
        assert torch.corrcoef(torch.stack([component, term]))[0, 1].abs() > 0.7
    assert values.sum(0).std() < 2


def test_streamed_rows_and_rows_in_memory_start_alike():
    x, y, _ = _interactions(500, 4, 1, seed=1)
    starts = []
    for memory in (2 << 30, 0):
        design, covariances = _setup(x, y, memory=memory)
        starts.append(screened(design, covariances, 5, torch.Generator().manual_seed(0)))
    for one, two in zip(*starts, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    "case", ["one input", "constant columns", "binary", "no constant function", "128 inputs", "few"]
)
def test_every_start_is_finite_and_of_the_size_of_the_targets(case):
    torch.manual_seed(0)
    num_rows, num_dims = {"128 inputs": (300, 128), "one input": (50, 1), "few": (4, 3)}.get(case, (200, 3))
    x = torch.rand(num_rows, num_dims, dtype=torch.float64)
    if case == "constant columns":
        x[:, 1:] = 3.0
    if case == "binary":
        x = x.round()
    y = torch.sin(5 * x[:, 0]) + 0.1 * torch.randn(num_rows, dtype=torch.float64)
    kernel = ScaleKernel(RBFKernel(ard_num_dims=num_dims)) if case == "no constant function" else None
    design, covariances = _setup(x, y, kernel=kernel)
    for start in (screened, near_constant):
        factors = start(design, covariances, 20, torch.Generator().manual_seed(0))
        values = _values(design, covariances, factors, x)
        assert [len(factor) for factor in factors] == [20] * num_dims
        assert torch.isfinite(values).all() and values.square().mean(-1).max() < (1e3 if num_dims == 128 else 20)
    values = _values(design, covariances, screened(design, covariances, 20, torch.Generator().manual_seed(0)), x)
    assert values.square().mean(-1).max() < 20
    if case != "few":
        assert torch.corrcoef(torch.stack([values[0], y]))[0, 1].abs() > 0.5


@pytest.mark.parametrize("num_pairs", [1, 2])
def test_pure_interactions_are_found(num_pairs):
    x, y, f = _interactions(1300, 16, num_pairs, seed=num_pairs)
    model = tkrr.TKRR(x[:1000], y[:1000], GaussianLikelihood().double(), rank=6, num_basis=8, warp=False)
    tkrr.fit_gibbs(model, num_warmup=10, num_draws=6, seed=0)
    assert (model.predict(x[1000:]).mean - f[1000:]).square().mean().sqrt() < 0.2
    model = tkrr.TKRR(x[:1000], y[:1000], gaussian(1e-3), rank=num_pairs, num_basis=8, warp=False)
    tkrr.fit_als(model, max_sweeps=3, seed=0)
    # Least squares at fixed hyperparameters shrink it; without the screening nothing is found at all.
    assert torch.corrcoef(torch.stack([model.predict(x[1000:]).mean, f[1000:]]))[0, 1] > 0.7


@pytest.mark.slow
@pytest.mark.parametrize("num_pairs", [1, 2])
def test_pure_interactions_of_32_inputs_are_found_with_every_seed(num_pairs):
    for seed in range(10):
        x, y, f = _interactions(7900, 32, num_pairs, seed)
        model = tkrr.TKRR(x[:7400], y[:7400], GaussianLikelihood().double())
        tkrr.fit_gibbs(model, num_warmup=10, num_draws=10, seed=seed)
        assert (model.predict(x[7400:]).mean - f[7400:]).square().mean().sqrt() < 0.1


def test_classes_that_only_interact_are_found():
    x, _, f = _interactions(1500, 8, 1, seed=3)
    model = tkrr.TKRR(x[:1000], (f[:1000] > 0).double(), BernoulliLikelihood(), rank=4, num_basis=8, warp=False)
    tkrr.fit_gibbs(model, num_warmup=20, num_draws=10, seed=0)
    assert ((model.class_probabilities(x[1000:]) > 0.5) == (f[1000:] > 0)).double().mean() > 0.9


def test_targets_that_no_input_explains_are_announced_after_another_start(monkeypatch):
    torch.manual_seed(0)
    x, y = torch.rand(2000, 8, dtype=torch.float64), torch.randn(2000, dtype=torch.float64)
    starts = []

    def recorded(*args):
        starts.append(args[2])
        return near_constant(*args)

    monkeypatch.setattr(component_chain, "near_constant", recorded)
    model = tkrr.TKRR(x, y, GaussianLikelihood().double(), rank=3, num_basis=6, warp=False)
    with pytest.warns(tkrr.ConvergenceWarning, match="All components have died"):
        result = tkrr.fit_gibbs(model, num_warmup=20, num_draws=10, seed=0)
    assert starts == [3] and "All components have died" in result.message


def test_a_penalty_that_kills_all_components_is_announced():
    x, y, _ = _interactions(100, 3, 1, seed=0)
    model = tkrr.TKRR(x, y, gaussian(), rank=2, num_basis=6, warp=False)
    with pytest.warns(tkrr.ConvergenceWarning, match="All components have died"):
        result = tkrr.fit_als(model, penalty=tkrr.ColumnPenalty(1e9), seed=0)
    assert "All components have died" in result.message
