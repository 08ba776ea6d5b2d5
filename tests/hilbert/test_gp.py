"""The streamed Gaussian process equals the exact one with the same kernel."""

from __future__ import annotations

import copy
import pickle
import warnings

import gpytorch
import pytest
import torch
from gpytorch.kernels import LinearKernel, MaternKernel, PeriodicKernel, RBFKernel, ScaleKernel
from gpytorch.mlls import ExactMarginalLogLikelihood
from models import ReducedRankGP

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.data.source import TensorSource
from gpytorch_tkrr.hilbert.prediction import split_covariance

N = 300


def make_data(dtype=torch.float64):
    x = torch.rand(N, 2, dtype=dtype)
    return x, 100 + torch.sin(6 * x[:, 0]) * x[:, 1] + 0.1 * torch.randn(N, dtype=dtype)


def plain():
    kernel = ScaleKernel(RBFKernel(ard_num_dims=2))
    kernel.base_kernel.lengthscale = torch.tensor([[0.3, 0.5]])
    return kernel


DOMAIN = tkrr.Domain(torch.full((2,), 0.5), 1.5)
KERNELS = {
    "one kernel inside": lambda: tkrr.HilbertKernel(plain(), DOMAIN, [8, 6]),
    "scaled": lambda: ScaleKernel(tkrr.HilbertKernel(plain().base_kernel, DOMAIN, [8, 6])),
    "a sum": lambda: tkrr.HilbertKernel(plain() + LinearKernel(), DOMAIN, 6),
    "one column": lambda: tkrr.HilbertKernel(
        ScaleKernel(MaternKernel(nu=2.5)), tkrr.Domain(torch.full((1,), 0.5), 2.5), 12, active_dims=[0]
    ),
}


def make_models(name, dtype=torch.float64, mean=gpytorch.means.ConstantMean, batch_rows=70):
    x, y = make_data(dtype)
    exact = ReducedRankGP(x, y, gpytorch.likelihoods.GaussianLikelihood(), KERNELS[name](), mean()).to(dtype)
    if mean is gpytorch.means.ConstantMean:
        exact.mean_module.initialize(constant=99.0)
    likelihood, kernel, mean_module = copy.deepcopy((exact.likelihood, exact.covar_module, exact.mean_module))
    streamed = tkrr.HilbertGP(TensorSource(x, y, batch_rows=batch_rows), likelihood, kernel, mean_module=mean_module)
    return exact, streamed


def objective(model):
    value = ExactMarginalLogLikelihood(model.likelihood, model)(model(*model.train_inputs), model.train_targets)
    value.backward()
    return value.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.fixture(autouse=True)
def quiet():
    """The boxes are small on purpose: equality does not need a good approximation."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tkrr.ApproximationWarning)
        warnings.simplefilter("ignore", tkrr.OutOfDomainWarning)
        yield


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("mean", [gpytorch.means.ConstantMean, gpytorch.means.ZeroMean])
def test_equals_the_exact_gp(name, mean):
    exact, streamed = make_models(name, mean=mean)
    for lengthscale_change in (0.0, 0.3):
        for model in (exact, streamed):
            model.zero_grad()
            with torch.no_grad():
                for parameter in model.covar_module.parameters():
                    parameter += lengthscale_change
        (value, gradients), (expected, expected_gradients) = objective(streamed), objective(exact)
        torch.testing.assert_close(value, expected, rtol=1e-8, atol=1e-8)
        assert gradients.keys() == expected_gradients.keys()
        for key, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected_gradients[key], rtol=1e-8, atol=1e-8)
    x = torch.rand(3, 7, 2, dtype=torch.float64)
    for model in (exact, streamed):
        model.eval()
    prediction, expected = streamed.likelihood(streamed(x)), exact.likelihood(exact(x))
    torch.testing.assert_close(prediction.mean, expected.mean, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(prediction.covariance_matrix, expected.covariance_matrix, rtol=1e-8, atol=1e-8)


def test_training_step_by_step_is_the_same():
    exact, streamed = make_models("scaled")
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.1) for model in (exact, streamed)]
    for _ in range(20):
        for model, optimizer in zip((exact, streamed), optimizers, strict=True):
            optimizer.zero_grad()
            loss = -ExactMarginalLogLikelihood(model.likelihood, model)(model(*model.train_inputs), model.train_targets)
            loss.backward()
            optimizer.step()
    theirs = dict(streamed.named_parameters())
    for name, parameter in exact.named_parameters():
        torch.testing.assert_close(theirs[name], parameter, rtol=1e-7, atol=1e-7)
    x = torch.rand(5, 2, dtype=torch.float64)
    first = streamed.eval()(x).mean
    streamed.train()
    streamed.covar_module.outputscale = 1e-3
    assert not torch.equal(first, streamed.eval()(x).mean)  # a new posterior after training


def test_float32_in_float32_out():
    exact, streamed = make_models("one kernel inside", dtype=torch.float32)
    value, _ = objective(streamed)
    expected, _ = objective(exact)
    assert value.dtype == torch.float32 and streamed.sums.gram.dtype == torch.float64
    torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-4)
    prediction = streamed.eval()(torch.rand(4, 2))
    assert prediction.mean.dtype == prediction.variance.dtype == torch.float32


def test_default_mean_and_prior_terms():
    x, y = make_data()
    kernel = KERNELS["one kernel inside"]().double()
    likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_prior=gpytorch.priors.GammaPrior(1.1, 0.05)).double()
    model = tkrr.HilbertGP((x, y), likelihood, kernel)
    assert float(model.mean_module.constant.detach()) == pytest.approx(float(y.mean()), rel=1e-12)
    value, _ = objective(model)
    prior = float(likelihood.noise_covar.noise_prior.log_prob(likelihood.noise.detach()))
    plain = tkrr.HilbertGP((x, y), gpytorch.likelihoods.GaussianLikelihood().double(), kernel)
    plain.likelihood.noise = likelihood.noise.detach()
    assert float(value - objective(plain)[0]) == pytest.approx(prior / N, abs=1e-10)


def test_copies_pickles_and_state_dicts():
    _, model = make_models("scaled")
    x = torch.rand(5, 2, dtype=torch.float64)
    expected = model.eval()(x)
    fresh = tkrr.HilbertGP(None, gpytorch.likelihoods.GaussianLikelihood(), KERNELS["scaled"]()).double()
    with pytest.raises(tkrr.NotFittedError):
        fresh.eval()(x)
    fresh.load_state_dict(model.state_dict())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), fresh):
        prediction = other.eval()(x)
        assert torch.equal(prediction.mean, expected.mean)
        assert torch.equal(prediction.variance, expected.variance)
        assert torch.equal(objective(other.train())[0], objective(model.train())[0])
        model.eval()


@torch.no_grad()
def test_functions_are_drawn():
    _, model = make_models("one kernel inside")
    x = torch.rand(4, 2, dtype=torch.float64)
    draws = tkrr.draw_posterior_functions(model.eval(), 20_000)(x)
    prediction = model(x)
    error = (draws.mean(0) - prediction.mean).abs() / (prediction.stddev / 20_000**0.5)
    assert float(error.max()) < 5
    prior = model.forward(x)  # draws are made of the functions: what these do not represent is not in them
    missing = prior.variance - split_covariance(prior.lazy_covariance_matrix.evaluate_kernel())[0].diagonal()
    torch.testing.assert_close(draws.var(0), prediction.variance - missing, rtol=0.1, atol=0.0)
    assert tkrr.draw_prior_functions(model, 3)(x).shape == (3, 4)


def test_a_weight_divides_the_noise_of_its_row():
    """Against GPyTorch's exact GP with a noise variance for each row."""
    (x, y), test_x = make_data(), torch.rand(7, 2, dtype=torch.float64)
    weight = torch.rand(N, dtype=torch.float64) + 0.1
    kernel = RBFKernel(ard_num_dims=2).double()
    kernel.lengthscale = torch.tensor([[0.5, 0.7]])
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    likelihood.noise = 0.04
    rows = gpytorch.likelihoods.FixedNoiseGaussianLikelihood(0.04 / weight)
    exact = ReducedRankGP(x, y, rows, kernel, gpytorch.means.ConstantMean()).double()
    hilbert = tkrr.HilbertKernel(copy.deepcopy(kernel), tkrr.Domain(torch.full((2,), 0.5), 3.0), 30)
    streamed = tkrr.HilbertGP([(x[:90], y[:90], weight[:90]), (x[90:], y[90:], weight[90:])], likelihood, hilbert)
    mean = (weight @ y / weight.sum()).item()
    assert abs(streamed.mean_module.constant.item() - mean) < 1e-9
    exact.mean_module.initialize(constant=mean)
    (value, ours), (expected, theirs) = objective(streamed), objective(exact)
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        ours["mean_module.raw_constant"], theirs["mean_module.raw_constant"], rtol=1e-5, atol=1e-6
    )
    for part in ("mean", "variance"):
        left, right = (getattr(model.eval()(test_x), part) for model in (streamed, exact))
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)
    state = {name: value for name, value in streamed.state_dict().items() if "mass" not in name and "log_w" not in name}
    older = tkrr.HilbertGP(None, likelihood, hilbert)
    older.load_state_dict(state)  # as a file of an older version, without weights
    assert older.sums.mass == N and older.sums.log_weights == 0


def test_what_cannot_be_done_is_said():
    x, y = make_data()
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    kernel = KERNELS["one kernel inside"]()
    _, model = make_models("one kernel inside")
    with pytest.raises(tkrr.InputError, match="ConstantMean"):
        tkrr.HilbertGP((x, y), likelihood, kernel, mean_module=gpytorch.means.LinearMean(2))
    with pytest.raises(tkrr.InputError, match="one noise variance"):
        tkrr.HilbertGP((x, y), gpytorch.likelihoods.FixedNoiseGaussianLikelihood(torch.ones(N)), kernel)
    with pytest.raises(tkrr.UnsupportedKernelError, match="inside one HilbertKernel"):
        tkrr.HilbertGP((x, y), likelihood, plain())
    with pytest.raises(tkrr.InputError, match="weights must be positive"):
        tkrr.HilbertGP((x, y, torch.zeros(N)), likelihood, kernel)
    with pytest.raises(tkrr.InputError, match="no rows"):
        tkrr.HilbertGP([], likelihood, kernel)
    with pytest.raises(tkrr.DomainError, match="outside the domain"):
        tkrr.HilbertGP((10 * x, y), likelihood, kernel)
    with pytest.raises(RuntimeError, match="train_inputs"):
        model(x)
    with pytest.raises(tkrr.InputError, match="train_targets"):
        ExactMarginalLogLikelihood(model.likelihood, model)(model(*model.train_inputs), y)
    with pytest.raises(RuntimeError, match="keeps sums"):
        _ = model(*model.train_inputs).variance
    y = y.clone()
    y[77] = torch.nan
    with pytest.raises(tkrr.InputError, match="row 77"):
        tkrr.HilbertGP(TensorSource(x, y, batch_rows=50), likelihood, kernel)


def test_a_trained_period_is_refused_and_a_fixed_one_works():
    x, y = make_data()
    base = PeriodicKernel()
    base.period_length = 0.7
    kernel = tkrr.HilbertKernel(base, tkrr.Domain(torch.full((1,), 0.5), 2.0), 8, active_dims=[0])
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    with pytest.raises(tkrr.UnsupportedKernelError, match="period"):
        tkrr.HilbertGP((x, y), likelihood, kernel)
    anywhere = tkrr.HilbertKernel(base, tkrr.Domain(0.5, 2.0), 8, active_dims=[0])  # any number of dimensions
    with pytest.raises(tkrr.UnsupportedKernelError, match="period"):
        objective(tkrr.HilbertGP((x, y), likelihood, anywhere))
    base.raw_period_length.requires_grad_(False)
    model = tkrr.HilbertGP((x, y), likelihood, kernel)
    assert model.sums.num_rows == N and objective(model)[0].isfinite()


def test_prior_mode_and_derivatives_are_those_of_the_exact_gp():
    exact, streamed = make_models("one kernel inside")
    x = torch.rand(5, 2, dtype=torch.float64, requires_grad=True)
    exact.eval(), streamed.eval()
    with gpytorch.settings.prior_mode(True):
        assert torch.equal(streamed(x).mean, exact(x).mean)
        torch.testing.assert_close(streamed(x).variance, exact(x).variance)
    for part in ("mean", "variance"):
        left, right = (torch.autograd.grad(getattr(model(x), part).sum(), x)[0] for model in (streamed, exact))
        torch.testing.assert_close(left, right, rtol=1e-8, atol=1e-8)
    with gpytorch.settings.detach_test_caches(False):
        streamed(x).mean.square().sum().backward()
        exact.train().eval()(x).mean.square().sum().backward()
    theirs = dict(streamed.named_parameters())
    for name, parameter in exact.named_parameters():
        torch.testing.assert_close(theirs[name].grad, parameter.grad, rtol=1e-7, atol=1e-7)
    with pytest.raises(tkrr.InputError, match="2 columns"):
        streamed(torch.rand(5, 3, dtype=torch.float64))


def test_a_state_brings_its_basis():
    _, model = make_models("one kernel inside")
    kernel = tkrr.HilbertKernel(plain(), DOMAIN, [8, 5])
    other = tkrr.HilbertGP(None, gpytorch.likelihoods.GaussianLikelihood(), kernel).double()
    other.load_state_dict(dict(model.state_dict()))  # without metadata
    x = torch.rand(2, 2, dtype=torch.float64)
    assert torch.equal(other.eval()(x).mean, model.eval()(x).mean)
    assert kernel.num_basis == (8, 6)


def test_sums_are_those_of_the_kernel_that_is_asked():
    """Another column, or another period that is not trained: as many functions, but others."""
    x = torch.rand(60, 2, dtype=torch.float64)
    y, test_x = torch.sin(6 * x[:, 0]), torch.rand(5, 2, dtype=torch.float64)

    def make(column):
        kernel = gpytorch.kernels.RBFKernel(active_dims=[column]).double()
        domain = tkrr.Domain([0.5, 0.5], [3.0, 3.0])
        return tkrr.HilbertGP(
            (x, y), gpytorch.likelihoods.GaussianLikelihood().double(), tkrr.HilbertKernel(kernel, domain, 12)
        ).eval()

    with torch.no_grad():
        model, fresh = make(1), make(0)
        model(test_x)
        copied = copy.deepcopy(model)
        for each in (model, copied):
            each.train().covar_module.base_kernel = gpytorch.kernels.RBFKernel(active_dims=[0]).double()
        torch.testing.assert_close(model.eval()(test_x).mean, fresh(test_x).mean)
        with pytest.raises(tkrr.InputError, match="Make the model anew"):
            copied.eval()(test_x)
