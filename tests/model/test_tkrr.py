from __future__ import annotations

import copy
import io
import pickle
import warnings

import gpytorch
import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from models import GP, gaussian, rbf

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.model import laplace


def make_data(num_rows=150, num_dims=2, dtype=torch.float64):
    x = torch.rand(num_rows, num_dims, dtype=dtype)
    return x, 7 + 2 * torch.sin(6 * x[:, 0]) * x[:, -1] + 0.1 * torch.randn(num_rows, dtype=dtype)


def make_model(x=None, y=None, *, dtype=torch.float64, **kwargs):
    kwargs.setdefault("kernel", rbf(0.4, 4.0, ard=2, dtype=dtype))
    return tkrr.TKRR(x, y, gaussian(0.01, dtype), **{"rank": 4, "num_basis": 12, **kwargs})


def fitted(dtype=torch.float64, **kwargs):
    x, y = make_data(dtype=dtype)
    model = make_model(x, y, dtype=dtype, **kwargs)
    tkrr.fit_als(model, seed=0)
    return model.eval(), x, y


def test_train_mode_is_the_lazy_prior():
    x, y = make_data()
    model = make_model(x, y)
    prior = model.train()(x)
    torch.testing.assert_close(prior.lazy_covariance_matrix.to_dense(), model.covar_module(x).to_dense())
    many = torch.rand(200_000, 2, dtype=torch.float64)
    with gpytorch.settings.debug(False):
        assert model(many).mean.shape == (200_000,)  # a dense matrix would take 320 GB


def test_train_mode_wants_the_training_inputs():
    x, y = make_data()
    model = make_model(x, y).train()
    with pytest.raises(RuntimeError, match=r"You must train on the training inputs!.*model\.eval\(\)"):
        model(x + 0.01)
    with gpytorch.settings.debug(False):
        assert model(x + 0.01).mean.shape == y.shape


def test_life_before_a_fit():
    x, y = make_data()
    model = make_model(x, y).eval()
    with pytest.raises(tkrr.NotFittedError, match="fit_als"):
        model(x)
    with pytest.raises(tkrr.NotFittedError):
        _ = model.factors
    assert isinstance(model, gpytorch.models.GP) and isinstance(model.covar_module, ScaleKernel)


def test_posterior_in_the_users_units():
    model, x, y = fitted()
    assert model.mean_module.constant.item() == pytest.approx(float(y.mean()))
    prediction = model.likelihood(model(x))
    assert (prediction.mean - y).square().mean().sqrt() < 0.2
    lower, upper = prediction.confidence_region()
    assert (lower < upper).all() and ((lower < y) & (y < upper)).double().mean() > 0.85
    torch.testing.assert_close(prediction.variance, model(x).variance + 0.01)


def test_a_given_mean_is_used_as_it_is():
    x, y = make_data()
    mean = gpytorch.means.ConstantMean().double()
    mean.constant.data.fill_(3.0)
    model = make_model(x, y, mean_module=mean)
    tkrr.fit_als(model, seed=0)
    assert model.mean_module.constant.item() == 3.0
    assert (model.eval()(x).mean - y).square().mean().sqrt() < 0.3


def test_default_kernel_and_one_dimensional_inputs():
    x = torch.linspace(-1000, 3000, 200)
    y = 5e4 + 1e4 * torch.sin(x / 400)
    model = tkrr.TKRR(x, y, gpytorch.likelihoods.GaussianLikelihood(), rank=3)
    tkrr.fit_als(model, seed=0)
    prediction = model.eval()(x)
    assert prediction.mean.dtype == torch.float32
    assert (prediction.mean - y).abs().max() < 500


def test_batches_of_test_points():
    model, _, _ = fitted()
    x = torch.rand(3, 4, 5, 2, dtype=torch.float64)
    batched = model(x)
    assert batched.mean.shape == (3, 4, 5) and batched.covariance_matrix.shape == (3, 4, 5, 5)
    single = model(x[1, 2])
    torch.testing.assert_close(batched.mean[1, 2], single.mean)
    torch.testing.assert_close(batched.covariance_matrix[1, 2], single.covariance_matrix)
    samples = model(x).rsample(torch.Size([6]))
    assert samples.shape == (6, 3, 4, 5)


def test_posterior_is_differentiable_in_x():
    model, _, _ = fitted()
    x = torch.rand(4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: model(x).mean, (x,))
    assert torch.autograd.gradcheck(lambda x: model(x).variance, (x,))
    assert torch.autograd.gradcheck(lambda x: model(x).covariance_matrix, (x,))


def test_samples_have_the_covariance():
    model, _, _ = fitted()
    posterior = model(torch.rand(3, 2, dtype=torch.float64))
    draws = posterior.rsample(torch.Size([20_000])).detach()
    torch.testing.assert_close(draws.T.cov(), posterior.covariance_matrix.detach(), rtol=0.1, atol=1e-4)


def test_variances_of_many_points_need_little_memory(monkeypatch):
    model, _, _ = fitted()
    monkeypatch.setattr(laplace.LaplacePosterior, "root", _limited(laplace.LaplacePosterior.root))
    assert model(torch.rand(5000, 2, dtype=torch.float64)).variance.shape == (5000,)


def _limited(root):
    def limited(self, x):
        assert x.shape[-2] <= 1024
        return root(self, x)

    return limited


def test_float32_in_float32_out():
    model, x, y = fitted(torch.float32)
    reference, _, _ = fitted(torch.float64)
    prediction = model.likelihood(model(x))
    assert prediction.mean.dtype == prediction.variance.dtype == prediction.covariance_matrix.dtype == torch.float32
    assert (prediction.mean - y).square().mean().sqrt() < 0.2
    assert model.factors[0].dtype == reference.factors[0].dtype == torch.float64


def test_set_train_data_makes_the_posterior_stale():
    model, x, y = fitted()
    with pytest.warns(tkrr.StalePosteriorWarning):
        model.set_train_data(x, y + 1)
    assert model.is_stale
    tkrr.fit_als(model)
    assert not model.is_stale
    with pytest.raises(RuntimeError, match="strict=False"):
        model.set_train_data(x[:10], y[:10])
    with pytest.raises(tkrr.DomainError), warnings.catch_warnings():
        model.set_train_data(x + 10, y)


def test_reading_and_predicting_change_nothing_and_preparing_does():
    x, y = make_data()
    model = tkrr.TKRR(None, None, gpytorch.likelihoods.GaussianLikelihood(), rank=3)
    before = {name: value for name, value in model.state_dict().items() if name != "_extra_state"}
    training = model.training_data((x, y), memory=1 << 20)
    assert model.covar_module is None and model.domain is None
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    model.prepare(training.summary)
    kernel, domain = model.covar_module, model.domain
    assert model.num_dims == 2 and model.mean_module.constant.item() == pytest.approx(float(y.mean()))
    model.prepare((x, y + 1))  # kernel and box are chosen once
    assert model.covar_module is kernel and model.domain is domain
    with pytest.raises(tkrr.InputError, match="have 3 input dimensions; the model has 2"):
        model.prepare(make_data(num_dims=3))
    tkrr.fit_als(model, data=(x, y), max_sweeps=1, seed=0)
    model.posterior.blocks = None
    model.compute_covariance(data=(x, y + 5))
    assert model.mean_module.constant.item() == pytest.approx(float(y.mean()))


def test_resize():
    model, _, _ = fitted()
    model.resize()
    assert not model.is_stale
    model.resize(rank=2)
    assert model.is_stale and model.rank == 2 and model.num_basis == 12
    model.resize(domain=tkrr.Domain(torch.full((2,), 0.5), 2.0), num_basis=[6, 7])
    tkrr.fit_als(model, max_sweeps=1, seed=0)
    assert not model.is_stale and [factor.shape for factor in model.factors] == [(6, 2), (7, 2)]
    for bad in ({"rank": 0}, {"rank": 2.0}, {"num_basis": 0}, {"num_basis": [3, 3, 3]}):
        with pytest.raises(tkrr.SizeError):
            model.resize(**bad)
    with pytest.raises(tkrr.InputError, match="box has 3 input dimensions; the model has 2"):
        model.resize(domain=tkrr.Domain([0.0] * 3, [3.0] * 3))
    with pytest.raises(tkrr.DomainError, match="outside"):
        model.resize(domain=tkrr.Domain([9.0, 9.0], [1.0, 1.0]))
    assert not model.is_stale and model.domain.contains(model.train_inputs[0]).all()


@pytest.mark.parametrize("change", [{"num_basis": 5}, {"rank": 2}, {"domain": tkrr.Domain([0.5, 0.5], [4.0, 4.0])}])
def test_a_posterior_keeps_its_functions_until_the_next_fit(change):
    """Other sizes change neither what it says, nor copies, states and other precisions of it."""
    model, x, _ = fitted()
    before = model.eval()(x)
    model.resize(**change)
    loaded = make_model()
    loaded.load_state_dict(model.state_dict())
    assert (loaded.rank, loaded.num_basis) == (model.rank, model.num_basis)
    for each in (model, copy.deepcopy(model).float().double(), loaded):
        after = each.eval()(x)
        torch.testing.assert_close(after.mean, before.mean, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(after.variance, before.variance, rtol=1e-4, atol=1e-8)
    tkrr.fit_gibbs(model, num_warmup=2, num_draws=4, seed=0)  # starts from ALS where that has functions in common
    assert not model.is_stale and model.posterior.rank == model.rank


def test_deepcopy_and_pickle():
    model, x, _ = fitted()
    expected = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(x).mean, expected.mean)
        torch.testing.assert_close(other(x).variance, expected.variance)
        other.covar_module.outputscale = 1.0
    assert model.covar_module.outputscale.item() == pytest.approx(4.0)


@pytest.mark.parametrize("kernel", ["rbf", "default"])
def test_state_dict_of_a_fitted_model_loads_into_a_fresh_one(kernel):
    model, x, _ = fitted(**({} if kernel == "rbf" else {"kernel": None}))
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    fresh = make_model(**({} if kernel == "rbf" else {"kernel": None}))
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    prediction, expected = fresh.eval()(x), model(x)
    torch.testing.assert_close(prediction.mean, expected.mean)
    torch.testing.assert_close(prediction.variance, expected.variance)
    for a, b in zip(fresh.factors, model.factors, strict=True):
        torch.testing.assert_close(a, b)


def test_large_covariances_are_not_stored_but_recomputed(monkeypatch):
    model, x, y = fitted()
    monkeypatch.setattr(laplace, "MAX_STORED_BYTES", 10)
    fresh = make_model()
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(fresh.eval()(x).mean, model(x).mean)
    with pytest.raises(tkrr.NotFittedError, match="compute_covariance"):
        _ = fresh(x).variance
    fresh.compute_covariance(data=(x, y))
    torch.testing.assert_close(fresh(x).variance, model(x).variance, rtol=1e-6, atol=1e-10)


def test_state_dict_of_a_model_without_a_fit():
    x, y = make_data()
    state = make_model(x, y).state_dict()
    fresh = make_model()
    fresh.load_state_dict(state)
    assert not fresh.is_fitted and fresh.num_dims == 2


def test_dtype_moves_keep_the_posterior():
    model, x, _ = fitted()
    expected = model(x).mean
    moved = model.float()
    assert moved.train_inputs[0].dtype == torch.float32
    torch.testing.assert_close(moved(x.float()).mean, expected.float(), rtol=1e-4, atol=1e-4)


def test_outside_the_box_the_prior_variance_comes_back():
    model, _, _ = fitted()
    with pytest.warns(tkrr.OutOfDomainWarning, match=r"at 2 of 3 points, because of input dimensions \[1\]"):
        prediction = model(torch.tensor([[0.5, 0.5], [0.5, 20.0], [0.5, -9.0]], dtype=torch.float64))
    torch.testing.assert_close(prediction.variance[1:], torch.full((2,), 4.0).double(), rtol=1e-6, atol=0)
    assert prediction.variance[0] < 0.1
    torch.testing.assert_close(prediction.mean[1:], model.mean_module.constant.expand(2))
    assert prediction.covariance_matrix[1, 2].abs() < 1e-8


def test_training_data_outside_a_given_domain():
    x, y = make_data()
    with pytest.raises(tkrr.DomainError, match=r"dimensions \[0, 1\]"):
        make_model(x, y, domain=tkrr.Domain(0.0, 0.5))


def test_radial_kernels_are_announced_once():
    x, y = make_data()
    kernel = ScaleKernel(MaternKernel(nu=2.5, ard_num_dims=2)).double()
    kernel.base_kernel.lengthscale = 0.4
    with pytest.warns(tkrr.SeparableKernelWarning, match="MaternKernel") as record:
        model = make_model(x, y, kernel=kernel, num_basis=30)
    assert len(record) == 1
    tkrr.fit_als(model, seed=0, max_sweeps=2)
    assert (model.eval()(x).mean - y).square().mean().sqrt() < 0.3


def test_unsuitable_lengthscales_do_not_pass_silently():
    x, y = make_data()
    with pytest.warns(tkrr.ApproximationWarning, match="num_basis"):
        make_model(1000 * x, y, kernel=ScaleKernel(RBFKernel()).double())
    with pytest.warns(tkrr.ApproximationWarning, match="box"):
        kernel = ScaleKernel(RBFKernel()).double()
        kernel.base_kernel.lengthscale = 3.5
        make_model(x, y, kernel=kernel, domain=tkrr.Domain(0.5, 1.0))


def test_hyperparameters_may_come_from_an_exact_gp():
    x, y = make_data(100)
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    exact = GP(x, y, likelihood, ScaleKernel(RBFKernel(ard_num_dims=2))).double()
    exact.covar_module.base_kernel.lengthscale, likelihood.noise = 0.5, 0.02
    exact.mean_module.constant.data.fill_(float(y.mean()))
    model = tkrr.TKRR(x, y, likelihood, kernel=exact.covar_module, rank=12, num_basis=12)
    tkrr.fit_als(model, seed=0, max_sweeps=100, rel_tol=1e-10)
    x_test = torch.rand(40, 2, dtype=torch.float64)
    expected = exact.eval()(x_test)
    torch.testing.assert_close(model.eval()(x_test).mean, expected.mean, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"rank": 0}, tkrr.SizeError, "rank"),
        ({"num_basis": 0}, tkrr.SizeError, "num_basis"),
        ({"num_basis": [3, 3, 3]}, tkrr.SizeError, "3 entries"),
        ({"y": torch.zeros(7)}, tkrr.InputError, "shape"),
        ({"y": None}, tkrr.InputError, "both"),
        ({"x": [1, 2]}, tkrr.InputError, "Tensor"),
    ],
)
def test_arguments_are_checked(change, error, message):
    x, y = make_data()
    arguments = {"x": x, "y": y, **change}
    with pytest.raises(error, match=message):
        make_model(arguments.pop("x"), arguments.pop("y"), **arguments)


def test_calls_are_checked():
    model, x, _ = fitted()
    with pytest.raises(tkrr.InputError, match="2 columns"):
        model(x[:, :1])
    with pytest.raises(tkrr.InputError, match="NaN"):
        model(x * torch.nan)
    with pytest.raises(tkrr.InputError, match="Likelihood"):
        tkrr.TKRR(x, x[:, 0], gpytorch.mlls.ExactMarginalLogLikelihood)


def test_outside_the_box_is_said_once_and_small_shortfalls_of_many_dimensions_do_not_add_up():
    model, _, _ = fitted()
    far = torch.tensor([[0.5, 20.0]], dtype=torch.float64)
    with pytest.warns(tkrr.OutOfDomainWarning):
        model(far)
    assert torch.isfinite(model(far).variance).all()  # a second warning would be an error
    x = torch.rand(40, 30, dtype=torch.float64)
    kernel = ScaleKernel(RBFKernel()).double()
    kernel.base_kernel.lengthscale = 0.5
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    many = tkrr.TKRR(x, x[:, 0], likelihood, kernel=kernel, rank=2, domain=tkrr.Domain(0.5, 1.15))
    tkrr.fit_als(many, max_sweeps=1, seed=0)
    parts = [mode.represented_variance(x[:, d]) for d, mode in enumerate(many.separate().modes)]
    assert bool((torch.stack(parts) > 0.95).all()) and bool((torch.stack(parts).prod(0) < 0.95).any())
    many.eval()(x)  # no warning


def test_variance_is_differentiable_in_x_near_the_edge_of_the_box():
    model, _, _ = fitted()
    lower = (model.domain.center - model.domain.half_width).tolist()
    point = torch.tensor([[lower[0] + 0.05, 0.5]], dtype=torch.float64, requires_grad=True)
    with pytest.warns(tkrr.OutOfDomainWarning):
        assert torch.autograd.gradcheck(lambda z: model(z).variance, (point,), rtol=1e-4, atol=1e-6)


def test_number_of_functions_travels_in_the_state_dict():
    model, x, _ = fitted()
    fresh = tkrr.TKRR(None, None, gpytorch.likelihoods.GaussianLikelihood().double(), kernel=model.covar_module)
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(fresh.eval()(x).mean, model(x).mean)


def test_likelihoods_that_are_not_known_are_refused():
    x, y = make_data()
    with pytest.raises(tkrr.InputError, match="GaussianLikelihood"):
        tkrr.TKRR(x, y, gpytorch.likelihoods.LaplaceLikelihood())
    with pytest.raises(tkrr.InputError, match="batch_shape"):
        tkrr.TKRR(x, y, gpytorch.likelihoods.GaussianLikelihood(batch_shape=torch.Size([2])))
    with pytest.raises(tkrr.InputError, match="floating-point"):
        tkrr.TKRR((10 * x).long(), y, gpytorch.likelihoods.GaussianLikelihood())


def test_repr_shows_sizes_and_whether_it_is_fitted():
    x = torch.rand(20, 2)
    model = tkrr.TKRR(x, x[:, 0], gpytorch.likelihoods.GaussianLikelihood(), rank=2, num_basis=[4, 6])
    assert "CP(2), num_basis=4 to 6, not fitted" in repr(model)
    tkrr.fit_als(model, max_sweeps=1, seed=0)
    assert "num_basis=4 to 6, fitted" in repr(model)


@pytest.mark.parametrize("num_dims", [1, 9])
def test_models_are_shown_in_three_lines(num_dims):
    x = torch.rand(20, num_dims)
    model = tkrr.TKRR(x, x[:, 0], gpytorch.likelihoods.GaussianLikelihood())
    lines = repr(model).splitlines()
    assert len(lines) == 3 and all(len(line) < 160 for line in lines)
    assert lines[1] == "kernel ScaleKernel, likelihood GaussianLikelihood, mean ConstantMean"
    assert repr(tkrr.TKRR(None, None, gpytorch.likelihoods.GaussianLikelihood())).endswith("no box yet: data choose it")


def test_common_slips_are_answered_with_what_to_write():
    x, y = make_data()
    with pytest.raises(tkrr.InputError, match=r"write GaussianLikelihood\("):
        tkrr.TKRR(x, y, gpytorch.likelihoods.GaussianLikelihood)
    hilbert = tkrr.HilbertKernel.from_tolerance(gpytorch.kernels.RBFKernel(), x)
    with pytest.raises(tkrr.UnsupportedKernelError, match="base_kernel"):
        tkrr.TKRR(x, y, gpytorch.likelihoods.GaussianLikelihood(), kernel=hilbert)
    for function in (tkrr.fit_als, tkrr.fit_gibbs, tkrr.main_effects, tkrr.sobol_indices):
        with pytest.raises(tkrr.InputError, match=r"takes? .*a TKRR; got a GaussianLikelihood"):
            function(gpytorch.likelihoods.GaussianLikelihood())


def test_a_single_row_without_its_dimension_gets_a_hint():
    x = torch.rand(20, 3)
    model = tkrr.TKRR(x, x[:, 0], gpytorch.likelihoods.GaussianLikelihood(), rank=1, num_basis=3)
    tkrr.fit_als(model, max_sweeps=1, seed=0)
    with pytest.raises(tkrr.InputError, match=r"got shape \(3,\)\. A single row is x\[None\]"):
        model.predict(torch.rand(3))
