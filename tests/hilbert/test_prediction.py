"""Prediction in weight space: fantasies, settings, missing targets, samples, and inputs outside the box."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from gpytorch import settings
from gpytorch.kernels import AdditiveKernel, ConstantKernel, LinearKernel, PeriodicKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood
from models import GP, wavy_data

from gpytorch_tkrr import (
    DenseFallbackWarning,
    Domain,
    DomainError,
    HilbertKernel,
    InputError,
    OutOfDomainWarning,
    TKRRWarning,
)
from gpytorch_tkrr.hilbert.prediction import HilbertPredictionStrategy
from gpytorch_tkrr.hilbert.weights import WeightPosterior

pytestmark = pytest.mark.filterwarnings("ignore:The input matches the stored training data")


def make_kernel(batch=()):
    base = ScaleKernel(RBFKernel(batch_shape=torch.Size(batch)), batch_shape=torch.Size(batch))
    base.base_kernel.lengthscale = 0.4
    return HilbertKernel(base, Domain(0.5, 2.0), 14)


def make_model(num=30, kernel=None, likelihood=None, batch=(), dims=2):
    x, y = wavy_data(num, dims, batch)
    likelihood = GaussianLikelihood(batch_shape=torch.Size(batch)) if likelihood is None else likelihood
    model = GP(x, y, likelihood, make_kernel(batch) if kernel is None else kernel).double()
    model.mean_module.initialize(constant=0.2)
    return model.eval()


def retrained(model, x, y, likelihood=None):
    """The same model with other data and nothing remembered."""
    twin = copy.deepcopy(model)
    twin.set_train_data(x, y, strict=False)
    twin.likelihood = twin.likelihood if likelihood is None else likelihood
    return twin.eval()


def assert_same(left, right):
    assert left.mean.shape == right.mean.shape
    assert torch.allclose(left.mean, right.mean, rtol=1e-8, atol=1e-9)
    assert torch.allclose(left.covariance_matrix, right.covariance_matrix, rtol=1e-8, atol=1e-9)


@pytest.fixture
def test_x():
    return torch.rand(7, 2, dtype=torch.float64)


# Fantasies: (shape of inputs without d, shape of targets, batch of the model)
FANTASIES = {
    "single": ((3,), (3,), ()),
    "fantasies_at_the_same_inputs": ((3,), (5, 3), ()),
    "batch_of_inputs": ((4, 3), (4, 3), ()),
    "fantasies_at_a_batch_of_inputs": ((4, 3), (5, 4, 3), ()),
    "batch_of_models": ((2, 3), (2, 3), (2,)),
    "fantasies_of_a_batch_of_models": ((2, 3), (5, 2, 3), (2,)),
}


@pytest.mark.parametrize("case", FANTASIES)
def test_fantasies_equal_training_from_scratch(case, test_x):
    input_shape, target_shape, batch = FANTASIES[case]
    model = make_model(batch=batch)
    model(test_x.expand(*batch, 7, 2))
    new_x = torch.rand(*input_shape, 2, dtype=torch.float64)
    new_y = torch.randn(*target_shape, dtype=torch.float64)
    fantasy = model.get_fantasy_model(new_x, new_y)
    assert isinstance(fantasy.prediction_strategy, HilbertPredictionStrategy)
    shape = target_shape[:-1]
    x = torch.cat([model.train_inputs[0].expand(*shape, -1, -1), new_x.expand(*target_shape, 2)], dim=-2)
    y = torch.cat([model.train_targets.expand(*shape, -1), new_y], dim=-1)
    reference = retrained(model, x, y)
    points = test_x.expand(*shape, 7, 2)
    assert_same(fantasy(points), reference(points))
    assert_same(fantasy.likelihood(fantasy(points)), reference.likelihood(reference(points)))

    # Again, on top of the fantasies.
    more_x, more_y = torch.rand(*shape, 2, 2, dtype=torch.float64), torch.randn(*shape, 2, dtype=torch.float64)
    again = fantasy.get_fantasy_model(more_x, more_y)
    twice = retrained(model, torch.cat([x, more_x], -2), torch.cat([y, more_y], -1))
    assert_same(again(points), twice(points))


@pytest.mark.parametrize("learned", [False, True])
def test_fantasies_with_their_own_noise(learned, test_x):
    noise = 0.1 + torch.rand(30, dtype=torch.float64)
    model = make_model(likelihood=FixedNoiseGaussianLikelihood(noise, learn_additional_noise=learned))
    model(test_x)
    new_x, new_y = torch.rand(3, 2, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    new_noise = torch.tensor([0.01, 0.2, 3.0], dtype=torch.float64)
    fantasy = model.get_fantasy_model(new_x, new_y, noise=new_noise)
    likelihood = copy.deepcopy(model.likelihood)
    likelihood.noise_covar.noise = torch.cat([noise, new_noise])
    x, y = torch.cat([model.train_inputs[0], new_x]), torch.cat([model.train_targets, new_y])
    assert_same(fantasy(test_x), retrained(model, x, y, likelihood)(test_x))


def test_fantasies_visit_no_training_row(count_features, test_x):
    model = make_model()
    model(test_x)
    count_features.clear()
    fantasy = model.get_fantasy_model(test_x[:2], torch.zeros(2, dtype=torch.float64))
    fantasy(test_x)
    assert sorted(count_features) == [2, 7]


def test_posterior_update_equals_batch_formula():
    features, new = torch.randn(9, 5, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    targets, noise = torch.randn(13, dtype=torch.float64), 0.1 + torch.rand(13, dtype=torch.float64)
    prior = WeightPosterior(torch.zeros(5, dtype=torch.float64), torch.eye(5, dtype=torch.float64))
    stepwise = prior.condition(features, targets[:9], noise[:9]).condition(new, targets[9:], noise[9:])
    design = torch.cat([features, new]) / noise.sqrt().unsqueeze(-1)
    covariance = torch.linalg.inv(torch.eye(5) + design.mT @ design)
    assert torch.allclose(stepwise.root @ stepwise.root.mT, covariance, atol=1e-12)
    assert torch.allclose(stepwise.mean, covariance @ design.mT @ (targets / noise.sqrt()), atol=1e-12)


def make_precise_kernel():
    """With next to nothing missing: the mean of that over all rows is that over some."""
    kernel = RBFKernel()
    kernel.lengthscale = 0.5
    return HilbertKernel(ScaleKernel(kernel), Domain(0.5, 3.0), 30)


@pytest.mark.parametrize("policy", ["mask", "fill"])
def test_missing_targets_count_as_dropped_rows(policy, test_x):
    model = make_model(kernel=make_precise_kernel())
    keep = torch.rand(30) > 0.3
    expected = retrained(model, model.train_inputs[0][keep], model.train_targets[keep])(test_x)
    targets = torch.where(keep, model.train_targets, torch.nan)
    model.set_train_data(targets=targets)
    with settings.observation_nan_policy(policy):
        assert_same(model(test_x), expected)


def test_missing_targets_may_differ_between_the_models_of_a_batch(test_x):
    model = make_model(batch=(2,))
    keep = torch.rand(2, 30) > 0.3
    x, y = model.train_inputs[0], model.train_targets.clone()
    model.set_train_data(targets=torch.where(keep, y, torch.nan))
    with settings.observation_nan_policy("fill"):
        posterior = model(test_x.expand(2, 7, 2))
    for i in range(2):
        single = make_model(kernel=copy.deepcopy(make_kernel()))
        single.set_train_data(x[i][keep[i]], y[i][keep[i]], strict=False)
        assert torch.allclose(single(test_x).mean, posterior.mean[i])
        assert torch.allclose(single(test_x).covariance_matrix, posterior.covariance_matrix[i])


def test_likelihood_with_missing_targets_equals_that_of_the_rest():
    model = make_model(60, make_precise_kernel()).train()
    keep = torch.rand(60) > 0.3
    rest = retrained(model, model.train_inputs[0][keep], model.train_targets[keep]).train()
    expected = ExactMarginalLogLikelihood(rest.likelihood, rest)(rest(*rest.train_inputs), rest.train_targets)
    targets = torch.where(keep, model.train_targets, torch.nan)
    with settings.observation_nan_policy("mask"):
        value = ExactMarginalLogLikelihood(model.likelihood, model)(model(*model.train_inputs), targets)
    assert torch.allclose(value * 60, expected * int(keep.sum()), rtol=1e-10)  # GPyTorch divides by all rows
    gradients = [
        torch.autograd.grad(v * n, list(m.parameters()))
        for v, n, m in ((value, 60, model), (expected, int(keep.sum()), rest))
    ]
    for left, right in zip(*gradients, strict=True):
        assert torch.allclose(left, right, rtol=1e-8)


@pytest.mark.filterwarnings("ignore::linear_operator.utils.warnings.NumericalWarning")
def test_random_estimates_of_a_masked_likelihood_are_announced(test_x):
    model = make_model(1300).train()
    keep = torch.rand(1300) > 0.3
    targets = torch.where(keep, model.train_targets, torch.nan)
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    with settings.observation_nan_policy("mask"), pytest.warns(DenseFallbackWarning, match="random iteration"):
        mll(model(*model.train_inputs), targets)
    expected = retrained(model, model.train_inputs[0][keep], model.train_targets[keep])(test_x)
    model.set_train_data(targets=targets)
    with settings.observation_nan_policy("mask"):
        assert_same(model.eval()(test_x), expected)  # predictions are exact, and silent


def test_caches_with_a_graph_serve_two_backward_passes(test_x):
    model = make_model()
    with settings.detach_test_caches(False):
        gradients = []
        for _ in range(2):
            model.zero_grad()
            posterior = model(test_x)
            (posterior.mean.sum() + posterior.variance.sum()).backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))
    # Against a posterior written out in torch.
    kernel, x = model.covar_module, model.train_inputs[0]
    expansion = kernel.expansion(2)
    train, test = ((expansion.features(t) * expansion.variances().sqrt()) for t in (x, test_x))
    shared = (kernel.outputscale - train.square().sum(-1)).mean()
    covariance = train @ train.mT + (model.likelihood.noise + shared) * torch.eye(30)
    residual = (model.train_targets - model.mean_module(x)).unsqueeze(-1)
    mean = model.mean_module(test_x) + (test @ train.mT @ torch.linalg.solve(covariance, residual)).squeeze(-1)
    variance = kernel.outputscale - (test @ train.mT @ torch.linalg.solve(covariance, train @ test.mT)).diagonal()
    expected = torch.autograd.grad(mean.sum() + variance.sum(), list(model.parameters()))
    for actual, reference in zip(gradients[0], expected, strict=True):
        assert torch.allclose(actual, reference, rtol=1e-7)


def test_caches_are_detached_by_default(test_x):
    model = make_model()
    inputs = test_x.clone().requires_grad_(True)
    for _ in range(2):
        model(inputs).mean.sum().backward()
    assert inputs.grad is not None
    assert all(p.grad is None or not p.grad.any() for n, p in model.named_parameters() if "mean" not in n)


def test_gradients_in_the_inputs(test_x):
    model = make_model()

    def evaluate(inputs):
        posterior = model(inputs)
        return posterior.mean, posterior.variance

    assert torch.autograd.gradcheck(evaluate, (test_x[:2].clone().requires_grad_(True),))


def test_skipped_variances(test_x):
    model = make_model()
    expected = model(test_x).mean
    with settings.skip_posterior_variances():
        posterior = model(test_x)
    assert torch.equal(posterior.mean, expected)
    assert not posterior.lazy_covariance_matrix.to_dense().any()


@pytest.mark.parametrize("setting", [settings.fast_pred_var, settings.fast_pred_samples])
def test_settings_for_approximate_predictions_change_nothing(setting, test_x):
    model = make_model()
    expected = model(test_x)
    with setting():
        assert_same(copy.deepcopy(model)(test_x), expected)


@pytest.mark.parametrize("shape", [(5, 1, 2), (3, 4, 2), (2, 3, 4, 2)])
def test_batches_of_inputs(shape):
    model = make_model()
    x = torch.rand(shape, dtype=torch.float64)
    posterior = model(x)
    assert posterior.mean.shape == shape[:-1]
    flat = model(x.reshape(-1, 2))
    assert torch.allclose(posterior.mean.flatten(), flat.mean)
    assert torch.allclose(posterior.variance.flatten(), flat.variance)
    first = model(x[(0,) * (len(shape) - 2)])
    assert torch.allclose(posterior.covariance_matrix[(0,) * (len(shape) - 2)], first.covariance_matrix)


@pytest.mark.parametrize("num", [5, 300])  # fewer and more points than the 196 functions
@pytest.mark.parametrize("batch", [(), (2,)])
def test_samples_have_the_posterior_covariance(num, batch):
    model = make_model()
    posterior = model(torch.rand(*batch, num, 2, dtype=torch.float64))
    base = posterior.get_base_samples(torch.Size([4000]))
    for samples in (posterior.rsample(torch.Size([4000])), posterior.rsample(base_samples=base)):
        assert samples.shape == (4000, *batch, num)
        picked = samples[..., :5].reshape(4000, -1, 5)[:, 0]
        covariance = posterior.covariance_matrix.reshape(-1, num, num)[0, :5, :5]
        mean = posterior.mean.reshape(-1, num)[0, :5]
        scale = covariance.diagonal().max()
        assert (picked.mean(0) - mean).abs().max() < 0.06 * scale.sqrt()
        assert (torch.cov(picked.mT) - covariance).abs().max() < 0.1 * scale
    again = posterior.rsample(base_samples=base)
    assert torch.equal(again, posterior.rsample(base_samples=base))


def test_one_training_row_and_one_test_row():
    model = make_model(1)
    reference = GP(*model.train_inputs, model.train_targets, model.likelihood, model.covar_module.base_kernel)
    reference.mean_module = model.mean_module
    x = torch.rand(1, 2, dtype=torch.float64)
    left, right = model(x), reference.double().eval()(x)
    assert torch.allclose(left.mean, right.mean, atol=1e-3)
    assert torch.allclose(left.variance, right.variance, atol=1e-3)


# Near and outside the box


def test_outside_the_box_the_prior_comes_back():
    model = make_model(dims=1)
    x = torch.tensor([[0.5], [2.4], [2.6], [-10.0], [1e6]], dtype=torch.float64)
    with pytest.warns(OutOfDomainWarning, match=r"At 4 of 5 inputs, near or outside .* dimensions \[0\]"):
        posterior = model(x)
    prior = model.covar_module.base_kernel.outputscale
    assert torch.allclose(posterior.mean[2:], model.mean_module.constant.expand(3))
    assert torch.allclose(posterior.variance[2:], prior.expand(3))
    assert posterior.variance[0] < 0.5 * prior
    model(x)  # said once: a second warning would fail the test


def test_near_the_edge_the_missing_variance_is_added():
    model = make_model(dims=1)
    x = torch.linspace(1.0, 2.5, 30, dtype=torch.float64).unsqueeze(-1)
    with pytest.warns(OutOfDomainWarning):
        posterior = model(x)
    expansion = model.covar_module.expansion(1)
    represented = (expansion.features(x).square() * expansion.variances()).sum(-1)
    prior = model.covar_module.base_kernel.outputscale
    missing = (prior - represented).clamp_min(0)
    train = expansion.features(model.train_inputs[0]) * expansion.variances().sqrt()
    test = expansion.features(x) * expansion.variances().sqrt()
    noise = model.likelihood.noise + (prior - train.square().sum(-1)).mean()
    precision = torch.eye(14) + train.mT @ train / noise
    expected = (test @ torch.linalg.solve(precision, test.mT)).diagonal() + missing
    assert torch.allclose(posterior.variance, expected, rtol=1e-8)
    assert torch.allclose(posterior.covariance_matrix.diagonal(), expected, rtol=1e-8)
    scaled = model.likelihood(posterior)
    assert torch.allclose(scaled.variance, expected + model.likelihood.noise, rtol=1e-8)


@pytest.mark.filterwarnings("ignore:A not p.d.")  # the exact process
def test_other_parts_go_on_outside_the_box():
    base = AdditiveKernel(ScaleKernel(RBFKernel()), LinearKernel(), PeriodicKernel(), ConstantKernel())
    base.kernels[1].variance = 0.01
    model = make_model(60, HilbertKernel(base, Domain(0.5, 4.0), 30), dims=1)
    x = torch.tensor([[20.0], [21.3]], dtype=torch.float64)
    with pytest.warns(OutOfDomainWarning):
        posterior = model(x)
    # The exact process: there its own stationary part has forgotten the data.
    exact = GP(*model.train_inputs, model.train_targets, model.likelihood, base)
    exact.mean_module = model.mean_module
    expected = exact.double().eval()(x)
    assert torch.allclose(posterior.mean, expected.mean, rtol=1e-2)
    assert torch.allclose(posterior.variance, expected.variance, rtol=2e-2)


def test_outside_in_one_dimension_of_a_batch_of_models():
    model = make_model(batch=(2,))
    x = torch.rand(2, 4, 2, dtype=torch.float64)
    x[1, 3, 1] = 7.0
    with pytest.warns(OutOfDomainWarning, match=r"At 1 of 8 inputs.*dimensions \[1\]"):
        posterior = model(x)
    assert torch.allclose(posterior.variance[1, 3], model.covar_module.base_kernel.outputscale[1])


def test_fantasies_outside_the_box_carry_no_information(test_x):
    model = make_model()
    expected = model(test_x)
    with pytest.warns(OutOfDomainWarning):
        far = torch.full((1, 2), 30.0, dtype=torch.float64)
        fantasy = model.get_fantasy_model(far, torch.tensor([9.0], dtype=torch.float64))
        posterior = fantasy(test_x)
    assert_same(posterior, expected)


@pytest.mark.parametrize("accepted", [0.0, 0.05])
def test_fantasies_equal_conditioning_where_much_is_missing(accepted, test_x):
    """A quarter of the prior variance is missing: one rule for rows that were there and rows that come later."""
    base = RBFKernel()
    base.lengthscale = 0.1
    kernel = HilbertKernel(ScaleKernel(base), Domain(0.5, 0.8), [6, 9], accepted_missing=accepted)
    model = make_model(40, kernel)
    new_x, new_y = torch.rand(3, 2, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    last_x, last_y = torch.rand(2, 2, dtype=torch.float64), torch.randn(2, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TKRRWarning)
        model(test_x)
        fantasy = model.get_fantasy_model(new_x, new_y)
        fantasy(test_x)
        fantasy = fantasy.get_fantasy_model(last_x, last_y)
        x, y = torch.cat([*model.train_inputs, new_x, last_x]), torch.cat([model.train_targets, new_y, last_y])
        assert_same(fantasy(test_x), retrained(model, x, y)(test_x))
        # Dense algebra.
        expansion, kernel = model.covar_module.expansion(2), model.covar_module
        train, test = (expansion.features(t) * expansion.variances().sqrt() for t in (x, test_x))
        missing = kernel.outputscale - train.square().sum(-1)
        assert float((missing / kernel.outputscale).mean().detach()) > 0.2
        shared = missing.mean() if accepted == 0 else 0.0
        covariance = train @ train.mT + (model.likelihood.noise + shared) * torch.eye(len(x))
        residual = (y - model.mean_module(x)).unsqueeze(-1)
        mean = model.mean_module(test_x) + (test @ train.mT @ torch.linalg.solve(covariance, residual)).squeeze(-1)
        assert torch.allclose(fantasy(test_x).mean, mean, atol=1e-9)


# Refusals


def _wrap(kernel, scaled):
    return ScaleKernel(kernel) if scaled else kernel


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("active_dims", [None, [1]])
@pytest.mark.parametrize("bad", [9.0, float("nan"), float("inf")])
def test_bad_training_inputs_are_refused_and_leave_the_kernel_intact(scaled, active_dims, bad):
    hilbert = HilbertKernel(RBFKernel(), Domain(0.5, 2.0), 6, active_dims=active_dims)
    kernel = _wrap(hilbert, scaled)
    model = make_model(kernel=kernel)
    good = model.train_inputs[0].clone()
    model.train_inputs[0][3, 1] = bad
    error, message = (DomainError, "1 of 30 training inputs lie outside") if bad == 9.0 else (InputError, "NaN or inf")
    with pytest.raises(error, match=message):  # never trained, in eval mode
        model(torch.rand(4, 2, dtype=torch.float64))
    model.train()
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    with pytest.raises(error, match=message), settings.debug(False):  # GPyTorch itself stumbles over NaN != NaN
        mll(model(*model.train_inputs), model.train_targets)
    with pytest.raises(error, match=message):
        model.covar_module(model.train_inputs[0]).to_dense()
    for module in (kernel, hilbert):
        assert (module.active_dims is None) == (active_dims is None)
    model.set_train_data(good)
    assert torch.isfinite(mll(model(good), model.train_targets))
    model.eval()
    with pytest.raises(InputError, match="NaN or inf"):
        model(torch.full((2, 2), float("nan"), dtype=torch.float64))
    for module in (kernel, hilbert):
        assert (module.active_dims is None) == (active_dims is None)
    assert torch.isfinite(model(torch.rand(4, 2, dtype=torch.float64)).mean).all()
