"""What a kernel with a tolerance has been told is a part of its state, and nothing else decides about its basis."""

from __future__ import annotations

import copy
import io

import gpytorch
import pytest
import torch
from gpytorch.kernels import LCMKernel, MaternKernel, RBFKernel, ScaleKernel, SpectralMixtureKernel
from gpytorch.likelihoods import GaussianLikelihood, MultitaskGaussianLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood

from gpytorch_tkrr import HilbertKernel
from gpytorch_tkrr.hilbert import tolerance

pytestmark = [
    pytest.mark.filterwarnings("ignore:The input matches the stored training data"),
    pytest.mark.usefixtures("functions_for_few_rows"),
]

TEST_X = torch.linspace(0, 1, 30, dtype=torch.float64).unsqueeze(-1)


class GP(gpytorch.models.ExactGP):
    def __init__(self, x, y, kernel):
        super().__init__(x, y, GaussianLikelihood())
        self.mean_module, self.covar_module = gpytorch.means.ConstantMean(), kernel
        self.double()

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


class LCM(gpytorch.models.ExactGP):
    def __init__(self, x, y, kernels):
        super().__init__(x, y, MultitaskGaussianLikelihood(num_tasks=2))
        self.mean_module = gpytorch.means.MultitaskMean(gpytorch.means.ZeroMean(), num_tasks=2)
        self.covar_module = LCMKernel(kernels, num_tasks=2)
        self.double()

    def forward(self, x):
        return gpytorch.distributions.MultitaskMultivariateNormal(self.mean_module(x), self.covar_module(x))


def make_data(num, dims=1, noise=0.02):
    x = torch.rand(num, dims, dtype=torch.float64)
    return x, torch.sin(6 * x).sum(-1) + noise * torch.randn(num, dtype=torch.float64)


def swapped(x, y, noise, **kwargs):
    model = GP(x, y, HilbertKernel.from_tolerance(ScaleKernel(MaternKernel(nu=1.5)).double(), x, **kwargs))
    model.likelihood.noise = noise
    return model


@torch.no_grad()
def answer(model):
    prediction = model.eval()(TEST_X)
    return torch.stack([prediction.mean, prediction.variance])


def reload(model, state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    model.load_state_dict(torch.load(file, weights_only=True))
    return model


def told(model):
    facts = model.covar_module.state_dict()._metadata[""]
    return facts["num_basis"], facts["tolerance"]


def test_the_noise_that_it_was_told_of_travels_with_the_state():
    x, y = make_data(300)
    precise, vague = swapped(x, y, 2e-4, tol=0.05), swapped(x, y, 0.5, tol=0.05)
    first, other = answer(precise), answer(vague)
    assert told(precise)[1]["facts"]["precision"] < 0.1 * told(vague)[1]["facts"]["precision"]
    for each in (vague, swapped(x, y, 0.1, tol=0.05)):  # one that was told of more noise before, one of none
        assert torch.equal(answer(reload(each, precise.state_dict())), first)
        assert told(each) == told(precise)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("past", ["more noise", "another lengthscale", "wider rows"])
def test_answers_do_not_depend_on_who_asked_before(past):
    x, y = make_data(300)
    model = swapped(x, y, 2e-3, tol=0.05)
    answer(model)
    if past == "more noise":
        model.train().likelihood.noise = 1.0
    elif past == "another lengthscale":
        model.train().covar_module.lengthscale = 0.05
    else:
        model.train().set_train_data(3 * x)
    answer(model)
    state, before = model.state_dict(), answer(model)
    fresh = swapped(*make_data(300), 2e-3, tol=0.05)
    fresh.set_train_data(model.train_inputs[0], y)
    assert torch.equal(answer(reload(fresh, state)), before)
    assert torch.equal(answer(copy.deepcopy(model)), before)


def test_a_state_that_is_refused_leaves_its_basis():
    x, y = make_data(300)
    model = swapped(x, y, 2e-4, tol=0.05)
    before = answer(model)
    state = model.state_dict()
    del state["mean_module.raw_constant"]
    with pytest.raises(RuntimeError, match="raw_constant"):
        model.load_state_dict(state)
    assert torch.equal(answer(model), before)


def test_asked_twice_it_answers_the_same():
    x, y = make_data(400)
    model = swapped(x, y, 1e-3)
    objective = ExactMarginalLogLikelihood(model.likelihood, model)
    first = answer(model)
    bases = model.covar_module.num_revisions
    values = [objective(model.train()(x), y).item() for _ in range(2)]
    assert values[0] == values[1]
    assert torch.equal(answer(model), first) and model.covar_module.num_revisions == bases


def test_how_many_rows_there_are_is_asked_each_time():
    x, y = make_data(2_100, 2)
    model = swapped(x[:60], y[:60], 0.3)
    model.eval()(x[:3])
    assert model.covar_module.is_exact
    model.set_train_data(x, y, strict=False)
    model(x[:3])
    assert not model.covar_module.is_exact
    model.set_train_data(x[:60], y[:60], strict=False)
    model(x[:3])
    assert model.covar_module.is_exact


def test_proposals_of_a_sampler_tell_nothing():
    x, y = make_data(50)
    kernel = swapped(x, y, 0.01).covar_module
    before = kernel.state_dict()._metadata[""]
    twin = kernel.to_random_module()
    twin.base_kernel.outputscale = torch.tensor(30.0, dtype=torch.float64)
    twin(x).evaluate_kernel().add_jitter(1e-4).inv_quad_logdet(y, logdet=True)
    assert kernel.state_dict()._metadata[""] == before


def test_terms_of_a_sum_hear_of_the_noise():
    """An LCM with little noise, beside the exact one; each term is told its own part of the prior variance."""
    x, _ = make_data(60)
    y = torch.cat([torch.sin(6 * x), torch.cos(9 * x)], dim=-1)
    bases = [ScaleKernel(MaternKernel(nu=1.5)), ScaleKernel(RBFKernel())]
    bases[1].outputscale = 20.0
    kernels = [HilbertKernel.from_tolerance(copy.deepcopy(base).double(), x, tol=0.05) for base in bases]
    model, exact = LCM(x, y, kernels), LCM(x, y, bases)
    exact.covar_module.load_state_dict(model.covar_module.state_dict())
    for each in (model, exact):
        each.likelihood.noise, each.likelihood.task_noises = 1e-3, torch.full((2,), 1e-3)
        each.eval()
    with torch.no_grad():
        assert (model(TEST_X).mean - exact(TEST_X).mean).abs().max() < 0.02
    facts = [kernel.state_dict()._metadata[""]["tolerance"]["facts"] for kernel in kernels]
    assert facts[0]["precision"] > 5 * facts[1]["precision"]
    assert [each["num_rows"] for each in facts] == [None, None]


def test_a_bound_out_of_reach_of_functions():
    """A component of a spectral mixture that hardly decays: no box of 4 000 functions holds it and fast waves."""
    x = torch.linspace(0, 1, 850, dtype=torch.float64).unsqueeze(-1)
    y = torch.sin(20 * x[:, 0]) + 0.1 * torch.randn(850, dtype=torch.float64)
    base = SpectralMixtureKernel(num_mixtures=2)
    base.initialize(mixture_means=torch.tensor([1e-3, 3.0]).reshape(2, 1, 1))
    base.initialize(mixture_scales=torch.tensor([1e-6, 2.0]).reshape(2, 1, 1))
    kernel = HilbertKernel.from_tolerance(copy.deepcopy(base).double(), x)
    model, exact = GP(x, y, kernel), GP(x, y, base)
    with gpytorch.settings.max_cholesky_size(1000):
        assert (answer(model) - answer(exact)).abs().max() < 1e-6
        expected = ExactMarginalLogLikelihood(exact.likelihood, exact)(exact.train()(x), y)
    assert kernel.is_exact
    values = [ExactMarginalLogLikelihood(model.likelihood, model)(model.train()(x), y) for _ in range(2)]
    assert values[0].item() == values[1].item() == pytest.approx(expected.item(), abs=1e-8)
    model.likelihood.noise = 0.3
    ExactMarginalLogLikelihood(model.likelihood, model)(model(x), y)
    assert told(model)[1]["facts"]["precision"] == pytest.approx(
        float(y.std(correction=0) * 0.3**0.5 / base.mixture_weights.sum().detach()), rel=1e-5
    )


def fast_model(monkeypatch):
    """A model whose basis counts as large."""
    monkeypatch.setattr(tolerance, "PROVISIONAL", 100)
    torch.manual_seed(0)
    x, y = make_data(1000, 2, noise=0.5)
    kernel = ScaleKernel(MaternKernel(nu=2.5, ard_num_dims=2)).double()
    return GP(3 * x, y, HilbertKernel.from_tolerance(kernel, 3 * x))


def step(model, change):
    """What an optimiser does: evaluate the objective, then move every raw parameter of the kernel."""
    mll = ExactMarginalLogLikelihood(model.likelihood, model.train())
    mll(model(*model.train_inputs), model.train_targets)
    with torch.no_grad():
        for parameter in model.covar_module.parameters():
            parameter += change


def num_functions(model):
    return model.covar_module.expansion().num_functions


def test_while_parameters_move_fast_a_smaller_basis_will_do(monkeypatch):
    model = fast_model(monkeypatch)
    at_first = num_functions(model)
    for _ in range(3):
        step(model, 0.1)
    assert not model.covar_module.is_exact and num_functions(model) < 0.6 * at_first
    assert model.covar_module.approximation_error(model.train_inputs[0]) < 3e-3  # asked for, the bound holds


def test_the_bound_holds_again_when_they_move_slowly(monkeypatch):
    model = fast_model(monkeypatch)
    for _ in range(3):
        step(model, 0.1)
    fast = num_functions(model)
    step(model, 0.001)
    step(model, 0.001)
    assert num_functions(model) > fast
    assert model.covar_module._tolerance.choice.slack == 1


def test_with_little_noise_nothing_is_left_out(monkeypatch):
    model = fast_model(monkeypatch)
    model.likelihood.noise = 1e-3
    for _ in range(3):
        step(model, 0.1)
    assert model.covar_module._tolerance.choice.slack == 1


def test_the_speed_of_training_is_a_part_of_the_state(monkeypatch):
    model = fast_model(monkeypatch)
    for _ in range(3):
        step(model, 0.1)
    other = reload(fast_model(monkeypatch), model.state_dict())
    for each in (model, other):
        step(each, 0.1)
    assert told(other) == told(model)
    assert model.covar_module._tolerance.choice.slack > 1
