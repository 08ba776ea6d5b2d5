"""The BoTorch models, run with BoTorch itself."""

from __future__ import annotations

import warnings
from functools import lru_cache

import gpytorch
import pytest
import torch
from repository import run_python

pytest.importorskip("botorch.models")  # not the folder of this name
from botorch.acquisition import (
    LogExpectedImprovement,
    PosteriorMean,
    qKnowledgeGradient,
    qLogExpectedImprovement,
    qLogNoisyExpectedImprovement,
    qMaxValueEntropy,
    qUpperConfidenceBound,
)
from botorch.acquisition.objective import ScalarizedPosteriorTransform
from botorch.acquisition.thompson_sampling import PathwiseThompsonSampling
from botorch.exceptions import UnsupportedError
from botorch.fit import fit_gpytorch_mll
from botorch.models import ModelListGP, SingleTaskGP
from botorch.models.transforms import Log, Normalize
from botorch.models.utils.gpytorch_modules import get_covar_module_with_dim_scaled_prior
from botorch.optim import optimize_acqf, optimize_acqf_mixed
from botorch.optim.closures import get_loss_closure_with_grads
from botorch.optim.fit import fit_gpytorch_mll_torch
from botorch.sampling import SobolQMCNormalSampler
from botorch.sampling.index_sampler import IndexSampler
from botorch.sampling.pathwise import draw_matheron_paths, get_matheron_path_model
from botorch.test_functions import Ackley, Hartmann
from botorch.utils.datasets import SupervisedDataset
from gpytorch.constraints import Interval
from gpytorch.mlls import ExactMarginalLogLikelihood, SumMarginalLogLikelihood

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.botorch import HilbertGPModel, TKRREnsemble, TKRRModel, hilbert_model, tkrr_model
from gpytorch_tkrr.model.draws import DrawsPosterior
from gpytorch_tkrr.model.laplace import LaplacePosterior

QUICK = {"num_warmup": 10, "num_draws": 12, "seed": 0}

#: BoTorch's advice on units and precision, which some tests go against on purpose.
UNSCALED = pytest.mark.filterwarnings("ignore::botorch.exceptions.warnings.InputDataWarning")


def surface(x):
    """Two smooth outcomes `(n, 2)`."""
    return torch.stack([torch.sin(5 * x[..., 0]) + x[..., 1], torch.cos(4 * x[..., 1]) * x[..., 0] + 3], dim=-1)


def unit_data(num_rows=25, num_outputs=1, num_dims=2, dtype=torch.float64):
    x = torch.rand(num_rows, num_dims, dtype=dtype, generator=torch.Generator().manual_seed(7))
    return x, surface(x)[:, :num_outputs]


def fit(model, **kwargs):
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model), **kwargs)
    return model


def hilbert(x, y, *args, **kwargs):
    """A reduced-rank model of any number of observations."""
    num_functions = hilbert_model.NUM_FUNCTIONS.get(x.shape[-1], hilbert_model.CROSS_NUM_FUNCTIONS)
    return HilbertGPModel(x, y, *args, **{"num_functions": num_functions, **kwargs})


def cp(x, y, *args, **kwargs):
    """A sampled model of any number of observations."""
    return TKRRModel(x, y, *args, **{"rank": tkrr_model.RANK, **kwargs})


def box(model):
    return model.outcome(0).model.domain if isinstance(model, TKRRModel) else model.covar_module.domain


def fit_cp(x, y, **kwargs):
    return fit(TKRRModel(x, y, rank=3, num_basis=6, **kwargs), optimizer_kwargs=QUICK)


@lru_cache
def fitted(kind, num_outputs=1):
    """Models are not changed by the tests that share them."""
    torch.manual_seed(0)
    x, y = unit_data(num_outputs=num_outputs)
    return fit_cp(x, y) if kind == "cp" else fit(HilbertGPModel(x, y, num_functions=100))


KINDS = pytest.mark.parametrize("kind", ["hilbert", "cp"])


# Loading


def test_loaded_when_first_used():
    code = (
        "import sys, gpytorch_tkrr as tkrr\n"
        "assert not any(name.partition('.')[0] == 'botorch' for name in sys.modules)\n"
        "tkrr.botorch.TKRRModel\n"
        "assert 'botorch' in sys.modules"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_missing_botorch_names_the_extra():
    done = run_python("import sys; sys.modules['botorch'] = None\nimport gpytorch_tkrr as tkrr; tkrr.botorch")
    assert done.returncode != 0
    assert "pip install 'gpytorch_tkrr[botorch]'" in done.stderr


# HilbertGPModel


@pytest.mark.parametrize("num_dims", [1, 2, 3])
def test_hilbert_model_tends_to_the_exact_one(num_dims):
    x = torch.rand(30, num_dims, dtype=torch.float64)
    y = torch.sin(4 * x).sum(-1, keepdim=True)
    for lengthscale in (0.35, 0.7, 3.0):
        model, exact = hilbert(x, y), SingleTaskGP(x, y)
        model.covar_module.base_kernel.lengthscale = lengthscale
        model.update_box()
        exact.covar_module.lengthscale = lengthscale
        test_x = torch.rand(40, num_dims, dtype=torch.float64)
        ours, theirs = model.posterior(test_x), exact.posterior(test_x)
        assert torch.allclose(ours.mean, theirs.mean, atol=0.03)
        assert torch.allclose(ours.variance, theirs.variance, atol=0.03)


@pytest.mark.parametrize("num_dims", [1, 2, 3])
@pytest.mark.parametrize("frequency", [0.3, 3.0, 9.0])  # long, medium and short lengthscales
def test_fit_makes_a_box_for_the_lengthscales(num_dims, frequency):
    x = torch.rand(60, num_dims, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = torch.sin(frequency * x[:, :1])
    model, exact = fit(hilbert(x, y)), fit(SingleTaskGP(x, y))
    corners = torch.cartesian_prod(*[torch.linspace(0, 1, 4, dtype=torch.float64)] * num_dims).reshape(-1, num_dims)
    assert model.covar_module.approximation_error(corners) < 0.02
    lengthscale, expected = model.covar_module.base_kernel.lengthscale, exact.covar_module.lengthscale
    assert torch.allclose(lengthscale[..., 0], expected[..., 0], rtol=0.1)
    ours, theirs = model.posterior(corners), exact.posterior(corners)
    assert torch.allclose(ours.mean, theirs.mean, atol=0.02)
    assert torch.allclose(ours.variance, theirs.variance, atol=0.02)


@pytest.mark.filterwarnings("ignore::gpytorch_tkrr.errors.ApproximationWarning")  # of the given kernel's own box
def test_box_is_updated_by_hand():
    x, y = unit_data()
    model = hilbert(x, y)
    wide = model.covar_module.domain.half_width
    model.covar_module.base_kernel.lengthscale = 0.1
    model.update_box()
    assert (model.covar_module.domain.half_width < wide).all()
    assert model.covar_module.approximation_error(x) < 0.01
    own = tkrr.HilbertKernel(gpytorch.kernels.RBFKernel(), tkrr.Domain(0.5, 2.0), 9)
    given = fit(hilbert(x, y, covar_module=own))
    given.update_box()
    assert given.covar_module.domain.half_width == 2.0


def test_large_fits_use_some_rows_for_the_box():
    x = torch.rand(800, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    y = surface(x)[:, :1]
    noise = torch.full_like(y, 1e-3)
    model = fit(HilbertGPModel(x, y, noise, num_functions=144))
    assert (model.posterior(x).mean - y).abs().max() < 0.05


def test_more_than_six_inputs_are_refused():
    x = torch.rand(10, 7, dtype=torch.float64)
    with pytest.raises(tkrr.SizeError, match="TKRRModel"):
        hilbert(x, x.sum(-1, keepdim=True))


@pytest.mark.parametrize("num_dims", [4, 6])
def test_hyperbolic_cross(num_dims):
    x = torch.rand(40, num_dims, dtype=torch.float64)
    y = torch.sin(3 * x[:, :1]) * x[:, 1:2]
    model = hilbert(x, y)
    assert isinstance(model.covar_module.index_set, tkrr.HyperbolicCross)
    assert 1000 < model.covar_module.expansion().num_functions <= 1250
    fit(model)
    test_x = torch.rand(100, num_dims, dtype=torch.float64)
    error = model.posterior(test_x).mean - torch.sin(3 * test_x[:, :1]) * test_x[:, 1:2]
    assert error.square().mean().sqrt() < 0.3 * y.std()


@pytest.mark.parametrize("num_rows", [40, 400])  # fewer and more rows than functions
def test_likelihood_is_that_of_the_dense_covariance(num_rows):
    x, y = unit_data(num_rows)
    model = HilbertGPModel(x, y, num_functions=100)
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    model.train()
    value = mll(model(x), model.train_targets)
    covariance = model.covar_module(x).to_dense() + model.likelihood.noise * torch.eye(num_rows, dtype=torch.float64)
    dense = torch.distributions.MultivariateNormal(model.mean_module(x), covariance).log_prob(model.train_targets)
    prior = sum(prior.log_prob(closure(module)).sum() for _, module, prior, closure, _ in model.named_priors())
    assert torch.allclose(value * num_rows, dense + prior, rtol=1e-8)


def test_given_kernels():
    x, y = unit_data()
    matern = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=2.5, ard_num_dims=2))
    model = hilbert(x, y, covar_module=matern)
    assert model.covar_module.base_kernel is matern
    own = tkrr.HilbertKernel(gpytorch.kernels.RBFKernel(), tkrr.Domain(0.5, 2.0), 9)
    assert hilbert(x, y, covar_module=own).covar_module is own


def test_lengthscales_of_a_given_kernel_do_not_outgrow_the_box():
    """Without priors the likelihood of a smooth function asks for ever longer lengthscales and larger variances."""
    x, _ = unit_data()
    y = torch.sin(3 * x[:, :1])
    matern = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=2.5, ard_num_dims=2))
    model = fit(hilbert(x, y, covar_module=matern))
    assert model.covar_module.approximation_error(x) < 0.05
    test_x = torch.rand(50, 2, dtype=torch.float64)
    assert (model.posterior(test_x).mean - torch.sin(3 * test_x[:, :1])).abs().max() < 0.02
    assert model.posterior(test_x).variance.max() < 0.01


def test_lengthscale_too_short_for_the_functions():
    x = torch.linspace(0, 1, 40, dtype=torch.float64).unsqueeze(-1)
    y = torch.sin(15 * x)
    with pytest.warns(tkrr.ApproximationWarning, match="Raise num_functions"):
        fit(HilbertGPModel(x, y, num_functions=5))


@pytest.mark.parametrize(("num_dims", "num_functions", "frequency"), [(1, 20, 25), (4, 150, 15)])
def test_outcomes_that_need_different_boxes_are_warned_of(num_dims, num_functions, frequency):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(200, num_dims, dtype=torch.float64, generator=generator)
    slow = (x - 0.3).square().sum(-1, keepdim=True) + 0.02 * torch.randn(
        200, 1, dtype=torch.float64, generator=generator
    )
    with pytest.warns(tkrr.ApproximationWarning, match="2 outcomes share one box .* Make a model of each"):
        fit(HilbertGPModel(x, torch.cat([torch.sin(frequency * x[:, :1]), slow], -1), num_functions=num_functions))
    fit(HilbertGPModel(x, torch.cat([slow.sin(), slow], -1), num_functions=num_functions))  # without a warning


def test_batch_of_models():
    x = torch.rand(3, 20, 2, dtype=torch.float64)
    y = surface(x)
    model = HilbertGPModel(x, y, num_functions=64)
    assert model.batch_shape == (3,) and model.num_outputs == 2
    test_x = torch.rand(3, 5, 2, dtype=torch.float64)
    posterior = model.posterior(test_x)
    assert posterior.mean.shape == (3, 5, 2)
    single = HilbertGPModel(x[1], y[1, :, 1:], num_functions=64)
    assert torch.allclose(single.posterior(test_x[1]).mean, posterior.mean[1, :, 1:], atol=1e-6)
    assert torch.allclose(single.posterior(test_x[1]).variance, posterior.variance[1, :, 1:], atol=1e-6)


# Both models


@KINDS
@UNSCALED
def test_box_holds_bounds_and_data(kind):
    x, y = unit_data()
    cls = {"hilbert": hilbert, "cp": cp}[kind]

    def contains(model, *points):
        return bool(box(model).contains(torch.tensor(points, dtype=torch.float64)).all())

    inside = 0.4 + 0.2 * x
    assert contains(cls(inside, y), [0.0, 0.0], [1.0, 1.0])
    wide = torch.tensor([[-5.0, 0.0], [5.0, 20.0]], dtype=torch.float64)
    assert contains(cls(inside, y, bounds=wide), *wide.tolist())
    normalize = Normalize(d=2, bounds=wide)
    assert contains(cls(inside, y, bounds=wide, input_transform=normalize), [0.0, 0.0], [1.0, 1.0])
    assert contains(cls(inside + 1, y), [1.6, 1.6], [0.0, 0.0])
    with pytest.raises(tkrr.DomainError, match=r"shape \(2, 2\)"):
        cls(x, y, bounds=torch.zeros(2, 3))


@KINDS
def test_posterior_shapes_and_noise(kind):
    model = fitted(kind, 2)
    x = torch.rand(4, 3, 2, dtype=torch.float64)
    posterior = model.posterior(x)
    assert posterior.mean.shape == posterior.variance.shape == (4, 3, 2)
    assert posterior.rsample(torch.Size([5])).shape == (5, 4, 3, 2)
    scale = model.outcome_transform.stdvs.squeeze() ** 2
    added = model.posterior(x, observation_noise=True).variance - posterior.variance
    assert torch.allclose(added, (model.likelihood.noise.squeeze() * scale).expand_as(added))
    given = torch.rand(4, 3, 2, dtype=torch.float64)
    added = model.posterior(x, observation_noise=given).variance - posterior.variance
    assert torch.allclose(added, given * scale)
    weights = torch.tensor([0.3, -2.0], dtype=torch.float64)
    scalar = model.posterior(x, posterior_transform=ScalarizedPosteriorTransform(weights))
    assert torch.allclose(scalar.mean, posterior.mean @ weights[:, None])


@KINDS
def test_subset_output(kind):
    model = fitted(kind, 2)
    x = torch.rand(3, 2, dtype=torch.float64)
    whole = model.posterior(x)
    for i in (0, 1):
        subset = model.subset_output([i])
        assert subset.num_outputs == 1
        assert torch.allclose(subset.posterior(x).mean, whole.mean[:, i : i + 1])
        assert torch.allclose(subset.posterior(x).variance, whole.variance[:, i : i + 1])
    assert torch.allclose(model.subset_output([1, 0]).posterior(x).mean, whole.mean.flip(-1))


@pytest.mark.parametrize("chosen", [[1], [1, 0], [-1]])
@KINDS
def test_output_indices(kind, chosen):
    """One index, another order, and the transform of each outcome, where SingleTaskGP of BoTorch 0.18 fails."""
    model = fitted(kind, 2)
    x = torch.rand(4, 3, 2, dtype=torch.float64)
    everything = model.posterior(x, observation_noise=True)
    some = model.posterior(x, output_indices=chosen, observation_noise=True)
    torch.testing.assert_close(some.mean, everything.mean[..., chosen])
    torch.testing.assert_close(some.variance, everything.variance[..., chosen])
    first = ScalarizedPosteriorTransform(torch.eye(len(chosen), dtype=torch.float64)[0])
    transformed = model.posterior(x, output_indices=chosen, posterior_transform=first)
    torch.testing.assert_close(transformed.mean, everything.mean[..., chosen[:1]])


@KINDS
def test_gradient_in_the_inputs(kind):
    model = fitted(kind)
    x = torch.rand(2, 2, dtype=torch.float64, requires_grad=True)

    def moments(x):
        posterior = model.posterior(x)
        return posterior.mean, posterior.variance

    assert torch.autograd.gradcheck(moments, (x,), eps=1e-6, atol=1e-5)


@KINDS
def test_input_transform(kind):
    """Raw units with Normalize are the same model as the unit cube without."""
    x, y = unit_data()
    bounds = torch.tensor([[-3.0, 10.0], [5.0, 30.0]], dtype=torch.float64)
    raw = bounds[0] + x * (bounds[1] - bounds[0])
    test_x = torch.rand(6, 2, dtype=torch.float64)
    posteriors = []
    for inputs, tests, kwargs in (
        (x, test_x, {}),
        (raw, bounds[0] + test_x * (bounds[1] - bounds[0]), {"input_transform": Normalize(d=2, bounds=bounds)}),
    ):
        model = (
            fit_cp(inputs, y, **kwargs) if kind == "cp" else fit(HilbertGPModel(inputs, y, num_functions=64, **kwargs))
        )
        before = model.posterior(tests)
        conditioned = model.condition_on_observations(tests[:1], torch.full((1, 1), 2.0, dtype=torch.float64))
        posteriors.append([before, conditioned.posterior(tests)])
    for left, right in zip(*posteriors, strict=True):
        assert torch.allclose(left.mean, right.mean, atol=1e-3)
        assert torch.allclose(left.variance, right.variance, atol=1e-3)


@KINDS
@UNSCALED
def test_outcome_transform_can_be_left_out(kind):
    x, y = unit_data()
    y = 100 + 10 * y
    kwargs = {"outcome_transform": None}
    plain = fit_cp(x, y, **kwargs) if kind == "cp" else hilbert(x, y, **kwargs)
    assert not hasattr(plain, "outcome_transform")
    if kind == "cp":
        assert (plain.posterior(x).mean - y).abs().max() < y.std()


@KINDS
def test_known_noise(kind):
    x, y = unit_data(40)
    yvar = torch.full_like(y, 1e-2)
    yvar[::2] = 25.0
    noisy = y + yvar.sqrt() * torch.randn(y.shape, dtype=y.dtype)
    model = (
        fit_cp(x, noisy, train_Yvar=yvar) if kind == "cp" else fit(HilbertGPModel(x, noisy, yvar, num_functions=100))
    )
    errors = (model.posterior(x).mean - noisy).abs().squeeze(-1)
    assert errors[1::2].mean() < 0.3 < errors[::2].mean()


@KINDS
@UNSCALED
def test_float32(kind):
    x, y = unit_data(dtype=torch.float32)
    model = fit_cp(x, y) if kind == "cp" else hilbert(x, y)
    posterior = model.posterior(x)
    assert posterior.mean.dtype == posterior.variance.dtype == torch.float32


@KINDS
def test_state_dict(kind):
    model = fitted(kind)
    x, y = unit_data()
    fresh = TKRRModel(x, y, rank=3, num_basis=6) if kind == "cp" else HilbertGPModel(x, y, num_functions=100)
    fresh.load_state_dict(model.state_dict())
    assert torch.allclose(fresh.posterior(x).mean, model.posterior(x).mean)
    assert torch.allclose(fresh.posterior(x).variance, model.posterior(x).variance)


@KINDS
def test_model_list(kind):
    x, y = unit_data(num_outputs=2)
    parts = [
        TKRRModel(x, y[:, i : i + 1], rank=3, num_basis=6) if kind == "cp" else hilbert(x, y[:, i : i + 1])
        for i in range(2)
    ]
    model = ModelListGP(*parts)
    fit_gpytorch_mll(
        SumMarginalLogLikelihood(model.likelihood, model), optimizer_kwargs=QUICK if kind == "cp" else None
    )
    test_x = torch.rand(3, 4, 2, dtype=torch.float64)
    posterior = model.posterior(test_x)
    assert posterior.mean.shape == (3, 4, 2)
    assert torch.allclose(posterior.mean[..., 1:], parts[1].posterior(test_x).mean)
    fantasy = model.fantasize(test_x, SobolQMCNormalSampler(torch.Size([2]), seed=0))
    assert fantasy.posterior(test_x).mean.shape == (2, 3, 4, 2)


# Conditioning


@UNSCALED
def test_hilbert_conditioning_is_a_model_of_all_data():
    x, y = unit_data(num_outputs=2)
    model = HilbertGPModel(x[:20], y[:20], outcome_transform=None, num_functions=64)
    model.posterior(x[:1])
    both = HilbertGPModel(x, y, outcome_transform=None, num_functions=64)
    both.load_state_dict(model.state_dict())
    conditioned = model.condition_on_observations(x[20:], y[20:])
    test_x = torch.rand(4, 2, dtype=torch.float64)
    assert torch.allclose(conditioned.posterior(test_x).mean, both.posterior(test_x).mean)
    assert torch.allclose(conditioned.posterior(test_x).variance, both.posterior(test_x).variance, atol=1e-8)


def condition_densely(mean, covariance, n, y, noise):
    """Moments of the rows after the first n, given noisy values of these."""
    gain = torch.linalg.solve(covariance[:n, :n] + noise * torch.eye(n, dtype=mean.dtype), covariance[:n, n:]).mT
    return mean[n:] + gain @ (y - mean[:n]), covariance[n:, n:] - gain @ covariance[:n, n:]


@pytest.mark.parametrize("optimizer", [tkrr.fit_gibbs, tkrr.fit_als])
def test_cp_conditioning_is_the_gaussian_update_of_its_covariance(optimizer):
    x, y = unit_data()
    model = TKRRModel(x, y, rank=2, num_basis=5, outcome_transform=None)
    settings = QUICK if optimizer is tkrr.fit_gibbs else {"seed": 0}
    fit(model, optimizer=optimizer, optimizer_kwargs=settings)
    new_x, new_y = torch.rand(6, 2, dtype=torch.float64), torch.randn(6, 1, dtype=torch.float64)
    test_x = torch.rand(5, 2, dtype=torch.float64)
    model.outcome(
        0
    ).model.training_range = None  # the covariance of the weights, without what is added outside the range
    normal = model.outcome(0).model(torch.cat([new_x, test_x]))
    noise = model.likelihood.noise.item()
    mean, covariance = condition_densely(normal.mean, normal.covariance_matrix, 6, new_y.squeeze(-1), noise)

    once = model.condition_on_observations(new_x, new_y).posterior(test_x)
    assert torch.allclose(once.mean.squeeze(-1), mean, atol=1e-8)
    assert torch.allclose(once.distribution.covariance_matrix, covariance, atol=1e-5)
    twice = model.condition_on_observations(new_x[:2], new_y[:2]).condition_on_observations(new_x[2:], new_y[2:])
    assert torch.allclose(twice.posterior(test_x).mean, once.mean, atol=1e-8)
    assert torch.allclose(twice.posterior(test_x).variance, once.variance, atol=1e-8)


@KINDS
def test_fantasies_in_batches(kind):
    """Each fantasy of a deep batch is the model conditioned on that fantasy alone."""
    model = fitted(kind, 2)
    new_x = torch.rand(3, 2, 2, dtype=torch.float64)  # b x n' x d
    test_x = torch.rand(4, 1, 5, 2, dtype=torch.float64)  # fantasies x 1 x q x d
    model.posterior(new_x)
    new_y = torch.randn(4, 3, 2, 2, dtype=torch.float64)  # fantasies x b x n' x m
    conditioned = model.condition_on_observations(new_x.expand(4, 3, 2, 2), new_y)
    assert conditioned.batch_shape == (4, 3)
    posterior = conditioned.posterior(test_x)
    assert posterior.mean.shape == (4, 3, 5, 2)
    for f, b in ((0, 0), (3, 1)):
        alone = model.condition_on_observations(new_x[b], new_y[f, b]).posterior(test_x[f, 0])
        assert torch.allclose(alone.mean, posterior.mean[f, b], atol=1e-6)
        assert torch.allclose(alone.variance, posterior.variance[f, b], atol=1e-6)


@KINDS
def test_fantasize(kind):
    model = fitted(kind)
    x = torch.rand(3, 2, 2, dtype=torch.float64)
    fantasy = model.fantasize(x, SobolQMCNormalSampler(torch.Size([8]), seed=0))
    before, after = model.posterior(x), fantasy.posterior(x)
    assert after.mean.shape == (8, 3, 2, 1)
    assert (after.variance < before.variance).all()
    assert torch.allclose(after.mean.mean(0), before.mean, atol=0.5 * float(before.variance.max().sqrt()))
    deeper = fantasy.fantasize(torch.rand(8, 3, 1, 2, dtype=torch.float64), SobolQMCNormalSampler(torch.Size([2])))
    assert deeper.posterior(x).mean.shape == (2, 8, 3, 2, 1)


# Acquisition


def make_acquisition(name, model):
    x, y = unit_data()
    return {
        "LogEI": lambda: LogExpectedImprovement(model, best_f=y.max()),
        "qLogEI": lambda: qLogExpectedImprovement(model, best_f=y.max()),
        "qLogNEI": lambda: qLogNoisyExpectedImprovement(model, X_baseline=x, prune_baseline=True),
        "qUCB": lambda: qUpperConfidenceBound(model, beta=2.0),
        "MES": lambda: qMaxValueEntropy(model, candidate_set=torch.rand(100, 2, dtype=torch.float64)),
        "qKG": lambda: qKnowledgeGradient(model, num_fantasies=4),
        "Thompson": lambda: PathwiseThompsonSampling(model),
    }[name]()


@KINDS
@pytest.mark.parametrize("name", ["LogEI", "qLogEI", "qLogNEI", "qUCB", "MES", "qKG", "Thompson"])
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # torch, from within botorch
def test_acquisition(name, kind):
    torch.manual_seed(0)
    acquisition = make_acquisition(name, fitted(kind))
    bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    q = 1 if name in ("LogEI", "MES", "Thompson") else 2
    candidate, value = optimize_acqf(acquisition, bounds, q=q, num_restarts=2, raw_samples=16, options={"maxiter": 10})
    assert candidate.shape == (q, 2) and ((candidate >= 0) & (candidate <= 1)).all()
    if name != "qKG":  # its own start is a better one than random points
        with torch.no_grad():
            assert value >= acquisition(torch.rand(32, q, 2, dtype=torch.float64)).median()


def test_conditioned_mean_is_what_knowledge_gradient_sees():
    model = fitted("cp")
    x = torch.rand(1, 2, dtype=torch.float64)
    y = model.posterior(x).mean.detach() + 1.0
    fantasy = model.condition_on_observations(x, y)
    assert PosteriorMean(fantasy)(x) > PosteriorMean(model)(x)


# Pathwise sampling


@pytest.mark.parametrize("num_outputs", [1, 2])
def test_hilbert_paths_have_the_moments_of_the_posterior(num_outputs):
    model = fitted("hilbert", num_outputs)
    x = torch.rand(6, 2, dtype=torch.float64)
    inputs = x if num_outputs == 1 else x.unsqueeze(-3)
    with torch.no_grad():
        draws = draw_matheron_paths(model, torch.Size([4000]))(inputs)
    draws = draws.unsqueeze(-1) if num_outputs == 1 else draws.mT
    posterior = model.posterior(x)
    scale = posterior.variance.sqrt()
    assert ((draws.mean(0) - posterior.mean) / scale).abs().max() < 0.2
    assert torch.allclose(draws.std(0) / scale, torch.ones_like(scale), atol=0.1)


def test_paths_of_a_kernel_on_some_columns():
    x, y = unit_data()
    kernel = tkrr.HilbertKernel(gpytorch.kernels.RBFKernel(), tkrr.Domain(0.5, 2.0), 20, active_dims=[1])
    model = SingleTaskGP(x, y, covar_module=gpytorch.kernels.ScaleKernel(kernel)).eval()
    with torch.no_grad():
        draws = draw_matheron_paths(model, torch.Size([2000]))(x)
    posterior = model.posterior(x)
    assert ((draws.mean(0) - posterior.mean.squeeze(-1)) / posterior.variance.squeeze(-1).sqrt()).abs().max() < 0.15


@pytest.mark.parametrize("num_outputs", [1, 2])
def test_cp_paths_are_draws_of_the_model(num_outputs):
    model = fitted("cp", num_outputs)
    x = torch.rand(6, 2, dtype=torch.float64)
    path = get_matheron_path_model(model)
    values = path(x)
    assert values.shape == (6, num_outputs)
    means, stdvs = model.outcome_transform.means, model.outcome_transform.stdvs
    for i in range(num_outputs):
        draws = means[0, i] + stdvs[0, i] * model.outcome(i).model.draws(x)  # (S, n)
        assert (draws - values[:, i]).abs().amax(-1).min() < 1e-8
    assert torch.allclose(path(x.flip(0)), values.flip(0))


def test_cp_paths_after_conditioning():
    model = fitted("cp")
    x = torch.rand(4, 2, dtype=torch.float64)
    conditioned = model.condition_on_observations(x[:1], torch.ones(1, 1, dtype=torch.float64))
    with torch.no_grad():
        draws = draw_matheron_paths(conditioned, torch.Size([4000]))(x)
    posterior = conditioned.posterior(x)
    scale = posterior.variance.squeeze(-1).sqrt()
    assert ((draws.mean(0) - posterior.mean.squeeze(-1)) / scale).abs().max() < 0.1


# Fit


@pytest.mark.parametrize("number", [1, 2])
def test_an_interrupted_fit_leaves_the_model_as_it_was(number, monkeypatch):
    """In the first or the second outcome; pilot, box and rank have changed by then."""
    x = torch.rand(20, 2, dtype=torch.float64)
    model = fit(TKRRModel(x, torch.cat([x, 3 * x[:, :1]], -1)[:, 1:], rank=3))
    test_x = torch.rand(6, 2, dtype=torch.float64)
    with torch.no_grad():
        before = model.posterior(test_x)
    new_x = torch.rand(30, 2, dtype=torch.float64).expand(2, 30, 2)
    model.set_train_data(new_x, torch.randn(2, 30, dtype=torch.float64), strict=False)
    sample, count = tkrr_model.fit_gibbs, 0

    def stopped(*args, **kwargs):
        nonlocal count
        count += 1
        sample(*args, **kwargs)
        if count == number:
            raise KeyboardInterrupt

    monkeypatch.setattr(tkrr_model, "fit_gibbs", stopped)
    with pytest.raises(KeyboardInterrupt):
        fit(model)
    with torch.no_grad():
        after = model.posterior(test_x)
    assert torch.equal(before.mean, after.mean)
    assert not any(model.outcome(i).model.is_stale for i in range(2))


def test_fit_chooses_gibbs_or_als():
    x, y = unit_data()
    assert isinstance(fitted("cp").outcome(0).model.posterior, DrawsPosterior)
    model = fit(TKRRModel(x, y, rank=2, num_basis=5), optimizer=tkrr.fit_als, optimizer_kwargs={"max_sweeps": 3})
    assert isinstance(model.outcome(0).model.posterior, LaplacePosterior)
    with pytest.raises(UnsupportedError, match="no closure"):
        fit(cp(x, y), closure=lambda: None)


def test_fit_follows_the_seed_of_torch():
    x, y = unit_data()
    means = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        model = TKRRModel(x, y, rank=2, num_basis=5)
        fit(model, optimizer_kwargs={"num_warmup": 4, "num_draws": 4})
        means.append(model.posterior(x).mean)
    assert torch.equal(means[0], means[1]) and not torch.equal(means[0], means[2])


def test_cp_errors():
    x, y = unit_data()
    with pytest.raises(tkrr.NotFittedError, match="fit_gpytorch_mll"):
        cp(x, y).posterior(x)
    with pytest.raises(tkrr.InputError, match="one model per batch"):
        cp(x.expand(2, 25, 2), y.expand(2, 25, 1))
    with pytest.raises(RuntimeError, match="Cannot modify shape"):
        cp(x, y).set_train_data(x[:3])


# What a review found


@KINDS
@pytest.mark.filterwarnings("ignore::botorch.exceptions.warnings.InputDataWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fitted_state_goes_into_a_fresh_model(kind, dtype):
    x, y = unit_data(dtype=dtype)
    cls = {"hilbert": hilbert, "cp": cp}[kind]
    model, fresh = fit(cls(x, y)), cls(x, y)
    fresh.load_state_dict(model.state_dict())
    assert torch.allclose(fresh.posterior(x).mean, model.posterior(x).mean, atol=1e-5)
    assert torch.allclose(fresh.posterior(x).variance, model.posterior(x).variance, atol=1e-5)


def test_state_of_a_periodic_kernel():
    x, y = unit_data()
    periodic = gpytorch.kernels.PeriodicKernel(active_dims=(0,))
    make = lambda: gpytorch.kernels.ProductKernel(  # noqa: E731
        gpytorch.kernels.PeriodicKernel(active_dims=(0,)), gpytorch.kernels.RBFKernel(active_dims=(1,))
    )
    model, fresh = cp(x, y, covar_module=make()), cp(x, y, covar_module=make())
    model.covar_module.kernels[0].period_length = 1.7
    fit(model, optimizer=tkrr.fit_als, optimizer_kwargs={"max_sweeps": 2, "seed": 0})
    fresh.load_state_dict(model.state_dict())
    assert periodic.period_length != model.outcome(0).model.covar_module.kernels[0].period_length
    assert torch.allclose(fresh.posterior(x).mean, model.posterior(x).mean)


@KINDS
@UNSCALED
def test_bounds_with_a_transform_that_learns_its_range(kind):
    x, y = unit_data()
    bounds = torch.tensor([[-5.0, 0.0], [10.0, 15.0]], dtype=torch.float64)
    cls = {"hilbert": hilbert, "cp": cp}[kind]
    transform = Normalize(d=2)
    model = cls(3 * x + 1, y, input_transform=transform, bounds=bounds)
    assert transform.training
    ends = transform.eval()(bounds)
    assert box(model).contains(ends).all()


@pytest.mark.parametrize("use_rbf", [True, False])
def test_lengthscales_respect_their_constraints(use_rbf):
    x = torch.rand(30, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    y = torch.randn(30, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    given = None if use_rbf else get_covar_module_with_dim_scaled_prior(ard_num_dims=1, use_rbf_kernel=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the functions may be too few
        model = fit(hilbert(x, y, torch.full_like(y, 1e-6), covar_module=given))
        assert model.covar_module.base_kernel.lengthscale.item() >= 0.025 - 1e-9
        interval = gpytorch.kernels.RBFKernel(lengthscale_constraint=Interval(0.05, 0.5))
        model = hilbert(x, 4 * x, covar_module=interval)
        (ends,) = model._bounds(ExactMarginalLogLikelihood(model.likelihood, model), False).values()
        assert not torch.cat(ends).isnan().any()
        fit(model)
    assert 0.05 <= model.covar_module.base_kernel.lengthscale.item() <= 0.5


@pytest.mark.parametrize("num_functions", [None, 100])
def test_several_outcomes_with_a_closure(num_functions):
    x, y = unit_data(num_outputs=2)
    model = HilbertGPModel(x, y, num_functions=num_functions)
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    closure = get_loss_closure_with_grads(mll, parameters=dict(mll.named_parameters()))
    fit_gpytorch_mll(mll, closure=closure)
    assert (model.posterior(x).mean - y).abs().max() < 0.1


@KINDS
@UNSCALED
def test_new_data_in_a_wider_range(kind):
    x, y = unit_data()
    model = {"hilbert": hilbert, "cp": cp}[kind](x, y)
    wide = 3 * x - 1
    model.set_train_data(wide, torch.sin(2 * wide[:, 0]), strict=False)
    fit(model)
    assert box(model).contains(wide).all()
    mean = model.outcome_transform.untransform(torch.sin(2 * wide[:, :1]))[0]
    assert (model.posterior(wide).mean - mean).abs().max() < 0.1


def test_cp_fits_say_what_they_do_not_take():
    x, y = unit_data()
    model = cp(x, y, torch.full_like(y, 1e-3))
    with pytest.raises(UnsupportedError, match="not by gradients"):
        fit(model, optimizer=fit_gpytorch_mll_torch)
    with pytest.raises(UnsupportedError, match="fit_gibbs takes no maxiter"):
        fit(model, optimizer_kwargs={"maxiter": 3})
    fit(model, optimizer_kwargs={"seed": 3, "options": {"maxiter": 3}})
    # a seed alone does not change the way it is fitted
    assert model.outcome(0).model.posterior.num_draws == tkrr_model.SETTINGS["num_draws"]


# Few and many observations


def branch(x):
    return torch.sin(4 * x[..., :1]) * x[..., 1:2] + x[..., 2:3].square()


def test_default_kernel_is_that_of_botorch():
    x, y = torch.rand(9, 4, dtype=torch.float64), torch.rand(9, 1, dtype=torch.float64)
    theirs = SingleTaskGP(x, y).covar_module
    ours = TKRRModel(x, y).covar_module
    assert torch.allclose(ours.lengthscale, theirs.lengthscale)
    assert torch.allclose(
        ours.lengthscale_prior.log_prob(theirs.lengthscale), theirs.lengthscale_prior.log_prob(theirs.lengthscale)
    )
    bounds = torch.tensor([[0.0, -50.0, 0.0, 0.0], [1.0, 50.0, 1.0, 0.1]], dtype=torch.float64)
    x = bounds[0] + (bounds[1] - bounds[0]) * x
    scaled = TKRRModel(x, y, bounds=bounds, outcome_transform=None).covar_module
    unit = torch.tensor([1.0, 100.0, 1.0, 0.1], dtype=torch.float64)
    assert torch.allclose(scaled.lengthscale, unit * theirs.lengthscale)


@KINDS
def test_few_observations_give_the_same_candidate_bit_by_bit(kind):
    x, y = unit_data(12)
    bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    candidates = []
    for cls in (SingleTaskGP, {"hilbert": HilbertGPModel, "cp": TKRRModel}[kind]):
        torch.manual_seed(0)
        acquisition = LogExpectedImprovement(fit(cls(x, y)), best_f=y.max())
        candidates.append(optimize_acqf(acquisition, bounds, q=1, num_restarts=2, raw_samples=16)[0])
    assert torch.equal(*candidates)


@KINDS
@pytest.mark.parametrize("num_outputs", [1, 2])
def test_few_observations_are_those_of_a_single_task_gp(kind, num_outputs):
    """Fit, posterior, fantasies, draws: the numbers of BoTorch's own model."""
    x, y = unit_data(num_outputs=num_outputs)
    ours, theirs = fit({"hilbert": HilbertGPModel, "cp": TKRRModel}[kind](x, y)), fit(SingleTaskGP(x, y))
    test_x = torch.rand(7, 2, dtype=torch.float64)
    new_x, new_y = torch.rand(2, 2, dtype=torch.float64), torch.rand(2, num_outputs, dtype=torch.float64)
    for number in range(2):
        model, exact = (
            each if number == 0 else each.condition_on_observations(new_x, new_y) for each in (ours, theirs)
        )
        torch.testing.assert_close(model.posterior(test_x).mean, exact.posterior(test_x).mean, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            model.posterior(test_x).variance, exact.posterior(test_x).variance, rtol=1e-2, atol=1e-6
        )
    torch.manual_seed(0)
    path = get_matheron_path_model(ours)(test_x)
    torch.manual_seed(0)
    torch.testing.assert_close(path, get_matheron_path_model(theirs)(test_x), rtol=1e-2, atol=1e-2)


@KINDS
@pytest.mark.parametrize("num_outputs", [1, 2])
def test_a_model_grows_out_of_the_exact_one(kind, num_outputs):
    """Warm starts over a growing number of observations, in both directions, also inside a ModelListGP."""
    cls, num_rows = {"hilbert": (HilbertGPModel, 1010), "cp": (TKRRModel, 510)}[kind]
    x, y = unit_data(num_rows, num_outputs=num_outputs)
    few = fit(cls(x[:60], y[:60]))
    many = cls(x, y)
    lengthscale = many.covar_module.lengthscale.clone()
    many.load_state_dict(few.state_dict())
    torch.testing.assert_close(many.covar_module.lengthscale, few.covar_module.lengthscale)
    assert not torch.equal(many.covar_module.lengthscale, lengthscale)
    fit(many)
    assert (many.posterior(x).mean - y).abs().max() < 0.1
    again = cls(x[:60], y[:60])
    again.load_state_dict(many.state_dict())
    torch.testing.assert_close(again.covar_module.lengthscale, many.covar_module.lengthscale)
    fresh = ModelListGP(cls(x, y))
    fresh.load_state_dict(ModelListGP(many).state_dict())
    torch.testing.assert_close(fresh.posterior(x[:9]).mean, many.posterior(x[:9]).mean, rtol=1e-2, atol=1e-3)
    few.set_train_data(many.train_inputs[0], many.train_targets, strict=False)  # becomes the larger model
    fit(few)
    assert type(few.covar_module) is type(many.covar_module) and (few.posterior(x).mean - y).abs().max() < 0.1


def test_many_observations_are_sampled_with_their_hyperparameters():
    x, y = unit_data(501)
    model = fit(TKRRModel(x, y))
    posterior = model.outcome(0).model.posterior
    assert posterior.rank == tkrr_model.RANK and posterior.hyperparameters
    few = TKRRModel(x[:500], y[:500])
    assert few.is_exact
    fit(few, optimizer=tkrr.fit_gibbs)  # asked for
    assert not few.is_exact and few.outcome(0).model.posterior.hyperparameters


def test_sampled_outcomes_follow_the_seed():
    x, y = unit_data(num_outputs=2)
    means = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        means.append(fit(cp(x, y)).posterior(x).mean)
    assert torch.equal(means[0], means[1]) and not torch.equal(means[0], means[2])
    assert (means[0] - y).abs().max() < 0.3


@KINDS
@UNSCALED
def test_logarithm_of_the_outcome(kind):
    x, y = unit_data()
    y = y.exp()
    model = fit({"hilbert": hilbert, "cp": cp}[kind](x, y, outcome_transform=Log()))
    posterior = model.posterior(x)
    assert torch.allclose(posterior.mean, y, rtol=0.1)
    samples = posterior.rsample(torch.Size([16]))
    assert samples.shape == (16, 25, 1) and (samples > 0).all()


# Categories, outliers, ensembles


def mixed_data(num_rows, noise=0.0):
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.rand(num_rows, 3, dtype=torch.float64, generator=generator)
    x[:, 1] = torch.randint(4, (num_rows,), generator=generator)
    y = torch.sin(5 * x[:, :1]) * (x[:, 1:2] - 1.5) + x[:, 2:] + (x[:, 1:2] == 2)
    return x, y + noise * torch.randn(y.shape, dtype=y.dtype, generator=generator)


@pytest.mark.parametrize("num_rows", [60, 300])
@KINDS
def test_categories(kind, num_rows):
    """Learned, optimised over, with noise variances of their own; a level never seen has the prior's variance."""
    x, y = mixed_data(num_rows, 0.05)
    exact, own = {"hilbert": (HilbertGPModel, hilbert), "cp": (TKRRModel, cp)}[kind]
    cls = exact if num_rows == 60 else own
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tkrr.ApproximationWarning)
        model = fit(cls(x, y, torch.full_like(y, 0.05**2), cat_dims=[1]))
    test_x, test_y = mixed_data(100)
    error = model.posterior(test_x).mean - test_y
    assert error.square().mean().sqrt() < (0.15 if num_rows == 60 else 0.06)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tkrr.TKRRWarning)
        unseen = model.posterior(torch.tensor([[0.5, 7.0, 0.5]], dtype=torch.float64))
    assert unseen.variance.item() > 20 * model.posterior(test_x).variance.mean()
    acquisition = LogExpectedImprovement(model, best_f=y.max())
    bounds = torch.tensor([[0.0, 0.0, 0.0], [1.0, 3.0, 1.0]], dtype=torch.float64)
    levels = [{1: float(level)} for level in range(4)]
    candidate, _ = optimize_acqf_mixed(
        acquisition, bounds, q=1, fixed_features_list=levels, num_restarts=2, raw_samples=16, options={"maxiter": 10}
    )
    assert candidate[0, 1] in (0.0, 1.0, 2.0, 3.0)


def test_columns_of_categories_count_from_the_end():
    x, y = mixed_data(30)
    for cat_dims in ([1], [-2]):
        kernel = TKRRModel(x, y, cat_dims=cat_dims).covar_module
        assert [list(part.active_dims) for part in kernel.kernels] == [[0, 2], [1]]


@KINDS
def test_construct_inputs(kind):
    """What Ax's generators call."""
    x, y = mixed_data(30)
    dataset = SupervisedDataset(x, y, Yvar=torch.full_like(y, 0.1), feature_names=list("abc"), outcome_names=["y"])
    cls = {"hilbert": HilbertGPModel, "cp": TKRRModel}[kind]
    inputs = cls.construct_inputs(dataset, categorical_features=[1])
    assert inputs.pop("cat_dims") == [1]
    model = cls(**inputs, cat_dims=[1])
    assert torch.equal(model.train_inputs[0], x) and isinstance(
        model.likelihood, gpytorch.likelihoods.FixedNoiseGaussianLikelihood
    )
    assert "cat_dims" not in cls.construct_inputs(dataset)


def test_outliers():
    """Student noise: wild outcomes hardly move the mean."""
    torch.manual_seed(0)
    x = torch.rand(120, 2, dtype=torch.float64)
    clean = surface(x)[:, :1]
    y = clean + 0.05 * torch.randn_like(clean)
    y[::10] += 5.0
    errors = {}
    for name, likelihood in (("Gaussian", None), ("Student", gpytorch.likelihoods.StudentTLikelihood())):
        model = fit(TKRRModel(x, y, likelihood=likelihood))
        errors[name] = (model.posterior(x).mean - clean).square().mean().sqrt()
    assert errors["Student"] < 0.05 < 0.2 < errors["Gaussian"]
    assert (model.posterior(x, observation_noise=True).variance > model.posterior(x).variance).all()
    conditioned = model.condition_on_observations(x[:1], clean[:1])
    assert conditioned.posterior(x).mean.shape == (120, 1)


@pytest.mark.parametrize("num_rows", [100, 520])  # fewer and more than the first look takes
def test_first_look_is_not_misled_by_outliers(num_rows):
    """Outliers must not shorten lengthscales, as in a plain process, nor be explained by noise in all rows."""
    generator = torch.Generator().manual_seed(50)
    x = torch.rand(num_rows, 5, dtype=torch.float64, generator=generator)
    clean = torch.sin(6 * x[:, :1]) * x[:, 1:2] + torch.sin(4 * x[:, 2:3]) + x[:, 3:4] * x[:, 4:]
    clean = clean + 0.05 * torch.randn(clean.shape, dtype=torch.float64, generator=generator)
    y = clean.clone()
    y[::10] = y.mean() + 5 * y.std()
    model = TKRRModel(x, y, likelihood=gpytorch.likelihoods.StudentTLikelihood())
    model._fit_pilots({"maxiter": 60})
    expected = fit(SingleTaskGP(x[:100], clean[:100])).covar_module.lengthscale
    ratio = (model.outcome(0).model.covar_module.lengthscale / expected).flatten()
    assert (ratio > 0.5).all() and (ratio[:3] < 2).all()  # the last two are nearly linear: any long one will do
    assert model.outcome(0).model.likelihood.noise < 0.15


@pytest.mark.parametrize("num_outputs", [1, 2])
def test_ensemble_has_the_moments_of_the_model(num_outputs):
    model = fitted("cp", num_outputs)
    ensemble = TKRREnsemble(model)
    x = 0.2 + 0.6 * torch.rand(4, 3, 2, dtype=torch.float64)  # within the range of the training rows
    posterior = ensemble.posterior(x)
    assert posterior.values.shape == (4, 12, 3, num_outputs)
    torch.testing.assert_close(posterior.values.mean(-3), model.posterior(x).mean)
    torch.testing.assert_close(posterior.values.var(-3), model.posterior(x).variance, rtol=1e-4, atol=1e-4)
    if num_outputs == 1:
        acquisition = qUpperConfidenceBound(ensemble, beta=2.0, sampler=IndexSampler(torch.Size([8]), seed=0))
        assert acquisition(x).shape == (4,)
    with pytest.raises(UnsupportedError, match="holds no draws"):
        TKRREnsemble(TKRRModel(*unit_data()))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # torch, from within botorch
def test_ensemble_of_tasks():
    x = torch.rand(40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[:, 2] = x[:, 2].round()
    y = torch.sin(5 * x[:, :1]) + x[:, 1:2] * (1 + x[:, 2:])
    model = fit(TKRRModel(x, y, task_feature=2, rank=3, num_basis=6), optimizer_kwargs=QUICK)
    ensemble = TKRREnsemble(model)
    new = 0.2 + 0.6 * torch.rand(4, 3, 2, dtype=torch.float64)
    posterior = ensemble.posterior(new)
    assert posterior.values.shape == (4, 12, 3, 2)
    torch.testing.assert_close(posterior.mean, model.posterior(new).mean)
    torch.testing.assert_close(posterior.variance, model.posterior(new).variance, rtol=1e-4, atol=1e-4)
    with_column = torch.cat([new, torch.ones_like(new[..., :1])], -1)
    torch.testing.assert_close(ensemble.posterior(with_column).values, posterior.values[..., 1:])
    torch.testing.assert_close(ensemble.posterior(new, output_indices=[1]).values, posterior.values[..., 1:])


@pytest.mark.filterwarnings("ignore::gpytorch_tkrr.errors.ConvergenceWarning")  # short chains
def test_ensemble_weighs_chains_as_their_draws_do():
    x, y = unit_data(num_outputs=2)
    model = fit(TKRRModel(x, y, rank=3, num_basis=6), optimizer_kwargs={**QUICK, "num_chains": 2})
    first = model.outcome(0).model
    functions = first.posterior.functions(x)  # (24, n), 12 of each chain
    first.set_posterior(first.posterior.subset(torch.tensor([*range(12), 14, 17, 20, 23])))  # weights 3 to 1
    expected = 0.75 * functions[:12].mean(0) + 0.25 * functions[[14, 17, 20, 23]].mean(0)
    ensemble = TKRREnsemble(model)
    del ensemble.outcome_transform
    posterior = ensemble.posterior(x)
    assert posterior.values.shape == (16, 25, 2)  # the second outcome has 24 draws
    torch.testing.assert_close(posterior.mixture_mean[:, 0], first.mean_module(x) + expected)
    torch.testing.assert_close(posterior.mixture_variance[:, 0], first.posterior.functions(x).var(0))


# Closed loops


@pytest.mark.parametrize(
    ("problem", "kind"), [(Hartmann(6), "hilbert"), (Hartmann(6), "cp"), (Ackley(10), "cp")], ids=str
)
def test_closed_loop(problem, kind):
    problem = problem.to(torch.float64)
    lower, upper = problem.bounds

    def evaluate(x):
        return -problem(lower + x * (upper - lower)).unsqueeze(-1)

    x = torch.rand(12, problem.dim, dtype=torch.float64)
    y = evaluate(x)
    unit = torch.tensor([[0.0], [1.0]], dtype=torch.float64).expand(2, problem.dim)
    for _ in range(3):
        model = fit(TKRRModel(x, y) if kind == "cp" else hilbert(x, y))
        acquisition = LogExpectedImprovement(model, best_f=y.max())
        candidate, value = optimize_acqf(
            acquisition, unit, q=1, num_restarts=2, raw_samples=32, options={"maxiter": 15}
        )
        assert value > acquisition(x.unsqueeze(-2)).max()  # better to look elsewhere than where we looked before
        x, y = torch.cat([x, candidate]), torch.cat([y, evaluate(candidate)])
    assert torch.cdist(x[12:], x).sort(dim=-1).values[:, 1].min() > 1e-3  # never the same point again
