"""Fits by Gibbs sampling."""

from __future__ import annotations

import copy
import io
import warnings
from types import SimpleNamespace

import gpytorch
import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood, StudentTLikelihood
from gpytorch.priors import LogNormalPrior

from gpytorch_tkrr import (
    TKRR,
    ConstraintWarning,
    ConvergenceWarning,
    Domain,
    InputError,
    NotFittedError,
    SizeError,
    StalePosteriorWarning,
    fit_als,
    fit_gibbs,
)
from gpytorch_tkrr.features.represented import MAX_MISSING, ModeGrid
from gpytorch_tkrr.features.separable import separate
from gpytorch_tkrr.inference.gibbs import _set_centre
from gpytorch_tkrr.model.likelihoods.registry import observe
from gpytorch_tkrr.sampling.hyperparameters import Hyperparameters

SHORT = {"num_draws": 20, "num_warmup": 20, "seed": 0}


def _data(num: int = 150, noise: float = 0.05) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.rand(num, 2, dtype=torch.float64)
    return x, 10 + 3 * torch.sin(6 * x[:, 0]) * x[:, 1] + 3 * noise * torch.randn(num, dtype=torch.float64)


def _model(x, y, **kwargs) -> TKRR:
    return TKRR(x, y, GaussianLikelihood().to(x), **{"rank": 4, "num_basis": 8, **kwargs})


def test_fit_predicts_and_is_calibrated():
    x, y = _data(300)
    model = _model(x[:200], y[:200])
    result = fit_gibbs(model, num_draws=60, num_warmup=60, seed=0)
    with torch.no_grad():
        prediction = model.likelihood(model.eval()(x[200:]))
    error = prediction.mean - y[200:]
    assert float(error.square().mean().sqrt()) < 0.25  # the noise is 0.15
    inside = (error.abs() < 1.96 * prediction.stddev).double().mean()
    assert 0.85 <= float(inside) <= 1.0
    density = result.log_predictive_density(x[200:], y[200:])
    assert density.shape == (100,)
    torch.testing.assert_close(
        density.mean(), prediction.to_data_independent_dist().log_prob(y[200:]).mean(), atol=0.1, rtol=0
    )
    torch.testing.assert_close(model.likelihood.noise.squeeze(), result.posterior.noise.mean())
    assert 0.1**2 < float(result.posterior.noise.mean()) < 0.2**2
    table = result.summary()
    assert "noise" in table and "lengthscale" in table and "effective rank" in table


def test_one_dimension_equals_the_conjugate_posterior():
    """With one mode, rank 1 and all hyperparameters fixed the draws come from an exact Gaussian posterior."""
    x = torch.linspace(0, 1, 40, dtype=torch.float64).unsqueeze(-1)
    y = torch.sin(7 * x[:, 0])
    kernel = ScaleKernel(RBFKernel()).double()
    kernel.base_kernel.lengthscale = 0.3
    kernel.outputscale = 1.0
    likelihood = GaussianLikelihood().double()
    likelihood.noise = 0.04
    mean = gpytorch.means.ZeroMean()
    model = TKRR(x, y, likelihood, kernel=kernel, rank=1, num_basis=10, domain=Domain(0.5, 1.2), mean_module=mean)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    fit_gibbs(model, num_draws=4000, num_warmup=5, seed=0)
    # The precision tau is drawn too; with this many data it hardly matters.
    features = model.separate().modes[0].basis(x[:, 0])
    variances = model.separate().modes[0].variances()
    precision = features.mT @ features / 0.04 + torch.diag(1 / variances)
    posterior_mean = features @ torch.linalg.solve(precision, features.mT @ y / 0.04)
    torch.testing.assert_close(model.eval()(x).mean, posterior_mean, atol=0.03, rtol=0)


@pytest.mark.filterwarnings("ignore::gpytorch_tkrr.ConvergenceWarning")
def test_same_seed_same_draws_and_more_draws_continue_the_chain():
    x, y = _data()
    first, second = _model(x, y), _model(x, y)
    fit_gibbs(first, num_draws=31, num_warmup=10, num_chains=2, seed=3)
    fit_gibbs(second, num_draws=21, num_warmup=10, num_chains=2, seed=3)
    fit_gibbs(second, num_draws=10, num_warmup=0)
    assert second.posterior.num_draws == 62
    for number in (0, 1):
        mine, other = (m.posterior.factors[0][m.posterior.chains == number] for m in (first, second))
        torch.testing.assert_close(mine[:21], other[:21], rtol=0, atol=0)
        torch.testing.assert_close(mine[21:], other[21:], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("fit", [fit_gibbs, fit_als])
def test_new_rows_do_not_replace_those_of_a_source(fit):
    x, y = _data(60)
    model = TKRR(None, None, GaussianLikelihood().double(), rank=2, num_basis=5)
    settings = {"num_draws": 4, "num_warmup": 4} if fit is fit_gibbs else {"max_sweeps": 2}
    fit(model, data=[(x, y)], seed=0, **settings)
    before = model.posterior
    with pytest.raises(InputError, match=r"no training rows to add to.*old rows and the new ones"):
        fit(model, new_rows=(x[:5], y[:5]), seed=0, **settings)
    assert model.posterior is before and not model.is_stale and model.train_inputs is None


@pytest.mark.parametrize("low", [1e-4, 1e-3])
def test_a_noise_at_its_bound_is_set_whatever_rounding_does(low):
    likelihood = GaussianLikelihood(noise_constraint=gpytorch.constraints.GreaterThan(low))
    observation = observe(likelihood)
    for noise in (low * (1 - 1e-9), low, low * (1 + 1e-12)):
        observation.set_parameters({"noise": torch.full((5,), noise, dtype=torch.float64)})
        assert float(likelihood.noise.detach()) == pytest.approx(low, rel=1e-4)
        assert torch.isfinite(likelihood.noise_covar.raw_noise).all()


def test_draws_of_other_data_means_or_sizes_are_not_continued():
    x, y = _data(60)
    model = _model(x, y)
    fit_gibbs(model, num_draws=4, num_warmup=4, seed=0)
    before = model.posterior
    more = {"num_draws": 4, "num_warmup": 0, "seed": 0}
    for data in [(x, -y), (x, y.flip(0)), (x[:-1], y[:-1]), (x, y, torch.linspace(0.5, 1.5, 60).double())]:
        with pytest.raises(InputError, match=r"of the data was .* do not mix"):
            fit_gibbs(model, data=data, **more)
        assert model.posterior is before and model.mean_module.constant.item() == pytest.approx(float(y.mean()))
    with pytest.warns(StalePosteriorWarning, match="changed"):
        model.append_train_data(x[:5], y[:5])
    assert model.is_stale
    with pytest.raises(InputError, match="num_rows of the data was 60 and is now 65"):
        fit_gibbs(model, **more)
    order = torch.randperm(60)
    fit_gibbs(model, data=[(x[order[:20]], y[order[:20]]), (x[order[20:]], y[order[20:]])], **more)
    assert model.posterior.num_draws == 8  # the same rows, in another order
    model.resize(num_basis=5)
    with pytest.raises(InputError, match="num_basis was"):
        fit_gibbs(model, data=(x, y), **more)
    fit_gibbs(model, num_draws=4, num_warmup=2, seed=0)
    assert model.posterior.num_draws == 4 and not model.is_stale


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (
            lambda model: setattr(model.covar_module.base_kernel, "nu", 0.5),
            "kernel.base_kernel.nu was 2.5 and is now 0.5",
        ),
        (lambda model: model.covar_module.base_kernel.requires_grad_(False), "raw_lengthscale.requires_grad"),
        (lambda model: setattr(model, "likelihood", StudentTLikelihood().double()), "likelihood was"),
        (
            lambda model: model.covar_module.register_prior("outputscale_prior", LogNormalPrior(0, 1), "outputscale"),
            "kernel.outputscale_prior",
        ),
    ],
)
def test_draws_of_another_model_are_not_continued(change, name):
    x, y = _data(40)
    model = _model(x[:, :1], y, kernel=ScaleKernel(MaternKernel(nu=2.5)).double())
    fit_gibbs(model, num_draws=4, num_warmup=4, seed=0)
    model.covar_module.outputscale = 3.0  # a free value is that of a draw, and says nothing about the model
    fit_gibbs(model, num_draws=4, num_warmup=0, seed=0)
    before = model.posterior
    change(model)
    with pytest.raises(InputError, match=name):
        fit_gibbs(model, num_draws=4, num_warmup=0, seed=0)
    assert model.posterior is before and before.num_draws % 8 == 0


def test_draws_with_another_mean_are_not_continued():
    x, y = _data(60)
    mean = gpytorch.means.LinearMean(2).double()
    model = _model(x, y, mean_module=mean)
    fit_gibbs(model, num_draws=4, num_warmup=4, seed=0)
    mean.weights.data[0] += 1.0
    with pytest.raises(InputError, match="the mean function was"):
        fit_gibbs(model, num_draws=4, num_warmup=0, seed=0)
    mean.weights.data[0] -= 1.0
    fit_gibbs(model, num_draws=4, num_warmup=0, seed=0)
    assert model.posterior.num_draws == 8


def test_draws_are_continued_after_a_round_trip_through_a_file():
    x, y = _data(60)
    model, fresh = _model(x, y), _model(x, y)
    fit_gibbs(model, num_draws=4, num_warmup=4, seed=0)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    for each in (model, fresh):
        fit_gibbs(each, num_draws=4, num_warmup=0)
    torch.testing.assert_close(fresh.draws(x), model.draws(x), rtol=1e-9, atol=1e-9)
    with pytest.raises(InputError, match="do not mix"):
        fit_gibbs(fresh, data=(x, y + 1), num_draws=4, num_warmup=0)


def test_starts_from_als():
    x, y = _data()
    model = _model(x, y)
    fit_als(model, seed=0)
    fit_gibbs(model, num_draws=4, num_warmup=0, seed=0)
    assert float((model.eval()(x).mean.detach() - y).square().mean().sqrt()) < 0.3


def test_several_chains_start_from_als_although_the_first_changes_the_number_of_functions():
    x, y = _data()
    model = TKRR(x, y, GaussianLikelihood().to(x), rank=4)
    fit_als(model, seed=0)
    before = model.num_basis
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # short chains
        result = fit_gibbs(model, num_draws=8, num_warmup=12, num_chains=2, seed=0)
    assert model.num_basis != before and result.posterior.num_draws == 16
    assert torch.isfinite(model.draws(x)).all()


def test_fixed_hyperparameters_stay_and_registered_priors_are_honoured():
    x, y = _data()
    kernel = ScaleKernel(RBFKernel(ard_num_dims=2, lengthscale_prior=LogNormalPrior(-1.0, 1e-3))).double()
    kernel.base_kernel.lengthscale = 0.37
    kernel.outputscale = 4.0
    kernel.raw_outputscale.requires_grad_(False)
    model = _model(x, y, kernel=kernel, num_basis=14)
    result = fit_gibbs(model, **SHORT)
    assert float(kernel.outputscale) == pytest.approx(4.0)
    assert not any("outputscale" in name for name in result.posterior.hyperparameters)
    for name, draws in result.posterior.hyperparameters.items():
        torch.testing.assert_close(draws.log(), torch.full_like(draws, -1.0), atol=6e-3, rtol=0, msg=name)


def test_noise_bounds_and_fixed_noise():
    x, y = _data()
    likelihood = GaussianLikelihood(noise_constraint=gpytorch.constraints.Interval(0.5, 0.6)).double()
    model = TKRR(x, y, likelihood, rank=3, num_basis=6)
    result = fit_gibbs(model, **SHORT)
    assert 0.5 <= float(result.posterior.noise.min()) and float(result.posterior.noise.max()) <= 0.6
    fixed = _model(x, y)
    fixed.likelihood.noise = 0.3
    fixed.likelihood.raw_noise.requires_grad_(False)
    torch.testing.assert_close(fit_gibbs(fixed, **SHORT).posterior.noise, torch.full((20,), 0.3, dtype=torch.float64))


def test_draws_are_functions():
    x, y = _data()
    model = _model(x.float(), y.float())
    fit_gibbs(model, **SHORT)
    model.eval()
    draws = model.draws(x[:5].float())
    assert draws.shape == (20, 5) and draws.dtype == torch.float32
    torch.testing.assert_close(model.draws(x[:10].float())[:, :5], draws)
    output = model(x[:5].float())
    torch.testing.assert_close(output.mean, draws.mean(0))
    torch.testing.assert_close(output.covariance_matrix, draws.mT.cov(), atol=1e-4, rtol=1e-3)
    assert model(x[:6].float().reshape(3, 2, 2)).mean.shape == (3, 2)
    point = x[:3].clone().float().requires_grad_(True)
    model(point).mean.sum().backward()
    assert torch.isfinite(point.grad).all() and bool((point.grad != 0).any())


def test_state_dict_pickle_and_thinning():
    x, y = _data()
    model = _model(x, y)
    fit_gibbs(model, **SHORT)
    expected = model.eval()(x).mean
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    fresh = TKRR(None, None, GaussianLikelihood().double(), rank=4, num_basis=8)
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    torch.testing.assert_close(fresh.eval()(x).mean, expected)
    torch.testing.assert_close(copy.deepcopy(model)(x).mean, expected)
    model.thin(5)
    assert model.draws(x).shape == (5, 150)
    with pytest.raises(SizeError, match="between 1 and 5"):
        model.thin(6)


@pytest.mark.parametrize(
    "case", ["noise-free", "duplicates", "constant column", "few rows", "many dimensions", "one row"]
)
def test_robustness(case):
    x, y = _data(60, noise=0.0)
    rank = 4
    if case == "duplicates":
        x, y = x.repeat(5, 1), y.repeat(5)
    elif case == "constant column":
        x = torch.cat([x, torch.ones(60, 1, dtype=torch.float64)], dim=-1)
    elif case == "few rows":
        x, y, rank = x[:5], y[:5], 8
    elif case == "many dimensions":
        x = torch.cat([x, torch.rand(60, 55, dtype=torch.float64)], dim=-1)
    elif case == "one row":
        x, y = x[:1], y[:1]
    model = _model(x, y, rank=rank, num_basis=4)
    with warnings.catch_warnings():
        if case == "many dimensions":
            warnings.simplefilter("ignore", ConvergenceWarning)  # so few sweeps may find none of them
        fit_gibbs(model, num_draws=4, num_warmup=4, seed=0)
    prediction = model.likelihood(model.eval()(x))
    assert torch.isfinite(prediction.mean).all() and torch.isfinite(prediction.variance).all()


def test_disagreeing_chains_are_announced():
    x, y = _data()
    with pytest.warns(ConvergenceWarning, match="chains disagree"):
        fit_gibbs(_model(x, y), num_draws=4, num_warmup=0, num_chains=3, seed=0)


@pytest.mark.filterwarnings("ignore::gpytorch_tkrr.ConvergenceWarning")
def test_bad_requests():
    x, y = _data(20)
    for name, value in (("num_draws", 1), ("num_draws", 4.5), ("num_warmup", "3"), ("num_chains", 0), ("seed", -1)):
        with pytest.raises(ValueError, match=f"{name} must be an integer, at least .*; got {value!r}"):
            fit_gibbs(_model(x, y), **{name: value})
    for new_rows, found in ((x, "Tensor of length 20"), ((x,), "tuple of length 1"), ([], "list"), (True, "bool")):
        for fit in (fit_gibbs, fit_als):
            with pytest.raises(InputError, match=rf"new_rows must be a pair \(x, y\).*; got a {found}"):
                fit(_model(x, y), new_rows=new_rows)
    for options in ({"rank": 10**9}, {"rank": 40, "num_basis": 5000}):
        for fit in (fit_gibbs, fit_als):
            with pytest.raises(SizeError, match=r"Input \d has .* weights.*Lower rank or num_basis"):
                fit(_model(x, y, **options), seed=0)
    with pytest.raises(InputError, match=r"Targets must be real numbers; got torch\.complex"):
        _model(x, y + 1j)
    with pytest.raises(SizeError, match="rank must be an integer, at least 1; got 'a'"):
        _model(x, y, rank="a")
    model = _model(x, y)
    fit_gibbs(model, num_warmup=4, num_draws=4, num_chains=2, seed=0)
    with pytest.raises(InputError, match="there are 2; got num_chains=3"):
        fit_gibbs(model, num_warmup=0, num_draws=4, num_chains=3, seed=0)
    with pytest.raises(NotFittedError, match="fit_gibbs"):
        model = _model(x, y)
        fit_als(model, seed=0)
        model.draws(x)


def test_number_of_functions_follows_lengthscales_and_distinct_values():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(400, 3, dtype=torch.float64, generator=generator)
    x[:, 2] = (x[:, 2] > 0.5).double()
    y = torch.sin(25 * x[:, 0]) + x[:, 1] + x[:, 2]
    model = TKRR(x, y, GaussianLikelihood(), rank=3)
    assert model.num_basis == (20, 20, 2)
    fit_gibbs(model, num_draws=10, num_warmup=80, seed=0)
    rough, smooth, binary = model.num_basis
    assert rough > 15 > smooth and binary == 2
    assert [factor.shape[-1] - 2 for factor in model.posterior.factors] == [rough, smooth, binary]
    fixed = TKRR(x, y, GaussianLikelihood(), rank=3, num_basis=9)
    fit_gibbs(fixed, num_draws=4, num_warmup=20, seed=0)
    assert fixed.num_basis == 9


def test_a_bound_of_the_noise_that_decides_is_reported():
    """GPyTorch's smallest noise variance, 1e-4, is a tenth of the variance of these targets."""
    x, y = _data()
    y = (y - y.mean()) / y.std() * 1e-3**0.5
    with pytest.warns(ConstraintWarning, match="default lower bound, which is 10.1% of the variance"):
        fit_gibbs(_model(x, y), **SHORT)
    fit_gibbs(_model(x, 1e3 * y), **SHORT)  # no warning


def test_targets_too_large_for_the_hyperparameters_are_refused():
    x = torch.rand(20, 2)
    model = TKRR(x, 1e20 * x[:, 0], GaussianLikelihood(), rank=2, num_basis=5)
    with pytest.raises(InputError, match=r"variance of the targets, .* too large for .*float32"):
        fit_gibbs(model, num_draws=4, num_warmup=1)


def test_the_progress_bar_ends_where_the_warm_up_has_ended_early(capsys):
    pytest.importorskip("tqdm")
    x = torch.rand(60, 2, dtype=torch.float64)
    model = TKRR(x, torch.sin(5 * x[:, 0]), GaussianLikelihood(), rank=1, num_basis=4, warp=False)
    fit_gibbs(model, num_chains=1, seed=0, progress=True)
    assert "100%" in capsys.readouterr().err


@torch.no_grad()
def test_the_kernel_is_left_where_the_box_represents_it():
    """Two draws, each well represented; the means of their values, taken one by one, are not."""
    kernel = ScaleKernel(RBFKernel()).double() + gpytorch.kernels.ConstantKernel().double()
    separable = separate(kernel, Domain(0.0, 2.0), 12, 1)
    hyperparameters = Hyperparameters(kernel, separable, torch.ones(1, dtype=torch.float64))
    values = {"outputscale": [1e-4, 1.0], "lengthscale": [4.0, 0.3], "constant": [1.0, 1e-4]}
    drawn = torch.tensor([values[name.rpartition(".")[-1]] for name in hyperparameters.names]).double().T  # (S, P)
    grids = [torch.linspace(-1, 1, 33, dtype=torch.float64)]
    problem = SimpleNamespace(hyperparameters=hyperparameters, separable=separable, grids=grids)
    missing = []
    for value in (*drawn, drawn.mean(0)):
        hyperparameters.set_values(value)
        missing.append(float(ModeGrid(separable.modes[0], grids[0]).missing().max()))
    assert max(missing[:2]) < MAX_MISSING < missing[2]
    _set_centre(problem, drawn)
    assert float(ModeGrid(separable.modes[0], grids[0]).missing().max()) < MAX_MISSING
