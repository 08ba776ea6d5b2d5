"""Change one line, train, and it is still the exact GP."""

from __future__ import annotations

import copy
import io
import warnings

import gpytorch
import pytest
import torch
from gpytorch.kernels import (
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    ProductStructureKernel,
    RBFKernel,
    ScaleKernel,
)
from gpytorch.mlls import ExactMarginalLogLikelihood, LeaveOneOutPseudoLikelihood

from gpytorch_tkrr import (
    ApproximationWarning,
    Domain,
    HilbertGP,
    HilbertKernel,
    HyperbolicCross,
    InputError,
    OutOfDomainWarning,
    SizeError,
    draw_posterior_functions,
)
from gpytorch_tkrr.hilbert import tolerance

pytestmark = [
    pytest.mark.filterwarnings("ignore:The input matches the stored training data"),
    pytest.mark.usefixtures("functions_for_few_rows"),
]


class GP(gpytorch.models.ExactGP):
    def __init__(self, x, y, kernel):
        super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood(batch_shape=kernel.batch_shape))
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=kernel.batch_shape)
        self.covar_module = kernel

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def make_data(num=80, dims=1, frequency=6.0):
    x = torch.rand(num, dims, dtype=torch.float64)
    return x, torch.sin(frequency * x).sum(-1) + 0.1 * torch.randn(num, dtype=torch.float64)


def train(model, optimizer="adam", steps=50, objective=ExactMarginalLogLikelihood):
    model.double().train()
    mll = objective(model.likelihood, model)

    def closure():
        stepper.zero_grad()
        loss = -mll(model(*model.train_inputs), model.train_targets).sum()
        loss.backward()
        return loss

    if optimizer == "adam":
        stepper = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(steps):
            stepper.step(closure)
    else:
        stepper = torch.optim.LBFGS(model.parameters(), max_iter=steps, line_search_fn="strong_wolfe")
        stepper.step(closure)
    return model.eval()


def differences(left, right, x, scale):
    left, right = (model.likelihood(model(x)) for model in (left, right))
    with torch.no_grad():
        return float((left.mean - right.mean).abs().max() / scale), float(
            (left.stddev - right.stddev).abs().max() / scale
        )


def swap_and_train(kernel, x, y, **kwargs):
    exact = train(GP(x, y, copy.deepcopy(kernel)), **kwargs)
    swapped = train(GP(x, y, HilbertKernel.from_tolerance(kernel.double(), x)), **kwargs)
    return exact, swapped


KERNELS = {
    "rbf": lambda: ScaleKernel(RBFKernel()),
    "matern": lambda: ScaleKernel(MaternKernel(nu=2.5)),
    "periodic times rbf": lambda: ScaleKernel(PeriodicKernel() * RBFKernel()),
    "sum": lambda: ScaleKernel(MaternKernel(nu=1.5)) + LinearKernel(),
}


@pytest.mark.parametrize("width", [1.0, 20.0])
@pytest.mark.parametrize("name", KERNELS)
def test_trained_as_in_the_tutorials_it_is_the_exact_gp(name, width):
    x, y = make_data(frequency=20.0)
    exact, swapped = swap_and_train(KERNELS[name](), width * x, y)
    mean, sd = differences(exact, swapped, torch.linspace(0, width, 101, dtype=torch.float64).unsqueeze(-1), y.std())
    assert mean < 0.02 and sd < 0.02
    kernel = swapped.covar_module
    assert kernel.approximation_error(width * x) < 3e-3
    assert kernel.num_revisions <= 12


@pytest.mark.parametrize("objective", [ExactMarginalLogLikelihood, LeaveOneOutPseudoLikelihood])
def test_a_new_basis_inside_a_line_search(objective):
    x, y = make_data(100, frequency=8.0)
    exact, swapped = swap_and_train(ScaleKernel(RBFKernel()), x, y, optimizer="lbfgs", objective=objective)
    assert swapped.covar_module.num_revisions > 0
    assert max(differences(exact, swapped, torch.linspace(0, 1, 50).double().unsqueeze(-1), y.std())) < 0.02


def test_one_basis_serves_a_batch_of_models():
    x = torch.linspace(0, 1, 60, dtype=torch.float64).unsqueeze(-1)
    y = torch.stack([torch.sin(4 * x[:, 0]), torch.sin(25 * x[:, 0])]) + 0.1 * torch.randn(2, 60, dtype=torch.float64)
    shape = torch.Size([2])
    kernel = ScaleKernel(RBFKernel(batch_shape=shape), batch_shape=shape)
    exact, swapped = swap_and_train(kernel, x, y)
    assert max(differences(exact, swapped, x[::2] + 0.01, y.std())) < 0.02
    lengths = swapped.covar_module.lengthscale.detach().flatten()
    assert lengths.max() > 3 * lengths.min()


def test_the_basis_shrinks_when_much_less_is_needed():
    x, _ = make_data(200)
    kernel = HilbertKernel.from_tolerance(ScaleKernel(MaternKernel(nu=2.5)).double(), x)
    kernel.lengthscale = 0.003
    kernel(x).to_dense()
    many = kernel.expansion().num_functions
    kernel.lengthscale = 0.3
    kernel(x).to_dense()
    assert kernel.expansion().num_functions < many / 3
    assert kernel.approximation_error(x) < 3e-3


def test_small_moves_keep_the_basis():
    x, _ = make_data()
    kernel = HilbertKernel.from_tolerance(ScaleKernel(MaternKernel()).double(), x)
    for factor in (0.9, 1.1, 0.95, 1.05):
        kernel.lengthscale = 0.6931 * factor
        kernel(x).to_dense()
    assert kernel.num_revisions == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_product_over_columns_has_a_tolerance():
    x, _ = make_data(30, 2)
    kernel = HilbertKernel.from_tolerance(ScaleKernel(ProductStructureKernel(RBFKernel(), 2)).double(), x)
    assert (kernel(x).to_dense() - kernel.base_kernel(x).to_dense()).abs().max() < 3e-3


def test_parameters_set_by_hand_in_eval_mode():
    x, y = make_data(frequency=30.0)
    model = GP(x, y, HilbertKernel.from_tolerance(ScaleKernel(RBFKernel()), x)).double().eval()
    exact = GP(x, y, ScaleKernel(RBFKernel())).double().eval()
    model(x[:2])  # a posterior in another basis is known already
    for gp in (model, exact):
        gp.initialize(**{"covar_module.base_kernel.lengthscale": 0.05, "covar_module.outputscale": 2.0})
    assert max(differences(exact, model, torch.linspace(0, 1, 40).double().unsqueeze(-1), 1.0)) < 1e-3
    assert torch.allclose(model.covar_module(x).to_dense(), exact.covar_module(x).to_dense(), atol=1e-3)


def test_announced_inputs_belong_to_the_box():
    x, _ = make_data(dims=2)
    bounds = torch.tensor([[-1.0, 0.0], [1.0, 4.0]])
    kernel = HilbertKernel.from_tolerance(ScaleKernel(RBFKernel()), x, bounds=bounds)
    everywhere = torch.cat([x, bounds.double()])
    assert kernel.approximation_error(everywhere) < 3e-3
    with pytest.raises(InputError, match=r"shape \(2, 2\); got \(3, 2\)"):
        HilbertKernel.from_tolerance(RBFKernel(), x, bounds=torch.rand(3, 2))


def test_training_rows_outside_the_range_widen_it():
    x, y = make_data()
    model = GP(x, y, HilbertKernel.from_tolerance(ScaleKernel(RBFKernel()), x)).double()
    model.set_train_data(5 * x, y, strict=False)
    model.covar_module(*model.train_inputs).to_dense()
    assert model.covar_module.approximation_error(5 * x) < 3e-3


def test_samplers_keep_the_basis():
    x, _ = make_data()
    twin = HilbertKernel.from_tolerance(RBFKernel(), x).to_random_module()
    before = twin.num_basis
    twin.lengthscale = torch.tensor([[0.01]])
    twin(x).to_dense()
    assert twin.num_basis == before


@pytest.mark.filterwarnings("ignore::gpytorch_tkrr.OutOfDomainWarning")
def test_where_too_many_functions_are_needed_it_is_said_once_per_fit(monkeypatch):
    monkeypatch.setattr(tolerance, "MAX_EXACT_ROWS", 0)
    x, y = make_data(60, 2)
    kernel = ScaleKernel(MaternKernel(nu=0.5))
    kernel.base_kernel.lengthscale = 0.01
    model = GP(x, y, HilbertKernel.from_tolerance(kernel, x)).double()
    assert model.covar_module.expansion().num_functions <= 4000
    with pytest.warns(ApproximationWarning, match=r"needs about [\d,]+ functions, more than 4000"):
        model.eval()(x[:3] + 1e-3)
    model(x[:3])  # a second warning would fail the test


# A basis given by hand


@pytest.mark.filterwarnings("ignore::gpytorch_tkrr.OutOfDomainWarning")
@pytest.mark.parametrize("index_set", [None, HyperbolicCross(8)])
def test_nothing_is_earned_by_leaving_variance_out(index_set):
    """The loss of a poor basis is never better than the exact one's by more than rounding, and rises smoothly."""
    x, y = make_data(100, 2)
    exact = GP(x, y, ScaleKernel(RBFKernel())).double()
    swapped = GP(x, y, HilbertKernel(ScaleKernel(RBFKernel()), Domain(0.5, 1.5), 8, index_set=index_set)).double()
    losses = []
    for model in (exact, swapped):
        mll, values = ExactMarginalLogLikelihood(model.likelihood, model), []
        for lengthscale in (0.5, 0.2, 0.1, 0.05, 0.02):
            model.covar_module.base_kernel.lengthscale = lengthscale
            values.append(-float(mll(model(x), y).detach()))
        losses.append(torch.tensor(values))
    assert (losses[1][2:] > losses[0][2:] - 0.02).all()


@pytest.mark.filterwarnings("ignore::gpytorch_tkrr.OutOfDomainWarning")
def test_a_fit_that_left_its_basis_behind_says_so_each_time():
    x, y = make_data(100, frequency=40.0)
    model = GP(x, y, HilbertKernel(ScaleKernel(RBFKernel()), Domain(0.5, 1.0), 5)).double()
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error", ApproximationWarning)  # not while it trains
            model.train()
            ExactMarginalLogLikelihood(model.likelihood, model)(model(x), y)
        model.covar_module.lengthscale = 0.03
        with pytest.warns(ApproximationWarning, match="relative error of .* too few functions"):
            model.eval()(x[:2])


def test_num_basis_is_validated():
    kernel = HilbertKernel(RBFKernel(), Domain(torch.zeros(2), 1.0), [4, 5])
    with pytest.raises(SizeError):
        kernel.num_basis = [4, 5, 6]
    with pytest.raises(SizeError, match="at least 1"):
        kernel.num_basis = 0
    assert kernel.num_basis == (4, 5)
    kernel.num_basis = torch.tensor([5, 4])
    assert kernel.num_basis == (5, 4)


# State and paths


def make_pair(lengthscale, x, y):
    exact, swapped = ScaleKernel(MaternKernel()), ScaleKernel(MaternKernel())
    swapped.base_kernel.lengthscale = lengthscale
    return GP(x, y, exact).double(), GP(x, y, HilbertKernel.from_tolerance(swapped, x)).double()


def test_states_load_into_the_exact_gp_and_back():
    x, y = make_data()
    exact, swapped = make_pair(0.05, x, y)
    assert list(exact.state_dict()) and set(exact.state_dict()) == set(swapped.state_dict())
    exact.load_state_dict(swapped.state_dict())
    assert exact.covar_module.base_kernel.lengthscale.item() == pytest.approx(0.05)
    _, other = make_pair(4.0, x, y)
    other.load_state_dict(exact.state_dict())
    test_x = torch.linspace(0, 1, 20, dtype=torch.float64).unsqueeze(-1)
    assert max(differences(exact.eval(), other.eval(), test_x, 1.0)) < 1e-2
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict({key: value for key, value in exact.state_dict().items() if "outputscale" not in key})


def test_box_and_counts_come_back():
    x, y = make_data()
    _, model = make_pair(0.05, x, y)
    _, other = make_pair(4.0, x, y)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert other.covar_module.num_basis == model.covar_module.num_basis
    test_x = torch.linspace(0, 1, 20, dtype=torch.float64).unsqueeze(-1)
    assert torch.equal(other.eval()(test_x).mean, model.eval()(test_x).mean)


def test_a_state_with_another_index_set_is_refused():
    domain = Domain(torch.zeros(2), 1.0)
    cross, full = (HilbertKernel(RBFKernel(), domain, 6, index_set=rule) for rule in (HyperbolicCross(6), None))
    with pytest.raises(RuntimeError, match=r"HyperbolicCross\(limit=6\); this kernel has FullTensor\(\)"):
        full.load_state_dict(cross.state_dict())
    assert full.num_basis == 6
    HilbertKernel(RBFKernel(), domain, 9, index_set=HyperbolicCross(6)).load_state_dict(cross.state_dict())
    line = HilbertKernel.from_tolerance(RBFKernel(), torch.linspace(0, 1, 9))  # an Ellipsoid: here all functions
    HilbertKernel(RBFKernel(), Domain(torch.zeros(1), 1.0), 4).load_state_dict(line.state_dict())


def test_columns_of_both_kernels_come_back():
    base = RBFKernel(active_dims=[1])
    kernel = HilbertKernel(base, Domain(torch.zeros(2), 1.0), 4, active_dims=[0, 2])
    other = HilbertKernel(RBFKernel(active_dims=[1]), Domain(torch.ones(2), 3.0), 9, active_dims=[0, 2])
    other.load_state_dict(kernel.state_dict())
    assert other.num_basis == 4 and other.domain.half_width.tolist() == [1.0, 1.0]
    assert other.active_dims.tolist() == [0, 2] and other.base_kernel.active_dims.tolist() == [1]


def test_paths_reach_the_wrapped_kernel():
    x, y = make_data()
    _, model = make_pair(0.5, x, y)
    kernel, scale, matern = (
        model.covar_module,
        model.covar_module.base_kernel,
        model.covar_module.base_kernel.base_kernel,
    )
    assert kernel.raw_outputscale is scale.raw_outputscale and kernel.raw_lengthscale is matern.raw_lengthscale
    kernel.outputscale, kernel.base_kernel.lengthscale = 3.0, 0.3
    assert scale.outputscale.item() == pytest.approx(3.0) and matern.lengthscale.item() == pytest.approx(0.3)
    model.initialize(**{"covar_module.base_kernel.lengthscale": 0.7, "covar_module.raw_outputscale": torch.zeros(())})
    assert kernel.lengthscale.item() == pytest.approx(0.7) and scale.raw_outputscale.item() == 0.0
    kernel.base_kernel.register_prior("lengthscale_prior", gpytorch.priors.GammaPrior(3.0, 6.0), "lengthscale")
    kernel.register_constraint("raw_outputscale", gpytorch.constraints.GreaterThan(0.1))
    expected = gpytorch.priors.GammaPrior(3.0, 6.0).log_prob(matern.lengthscale).sum()
    assert [float((p.log_prob(c(m)).sum() - expected).detach()) for _, m, p, c, _ in model.named_priors()] == [0.0]
    assert scale.raw_outputscale_constraint.lower_bound == pytest.approx(0.1)
    kernel.raw_outputscale = torch.tensor(0.0)
    assert isinstance(scale.raw_outputscale, torch.nn.Parameter)
    with pytest.raises(AttributeError):
        kernel.period_length  # noqa: B018


# Sums over data


@pytest.mark.filterwarnings("ignore::gpytorch_tkrr.OutOfDomainWarning")
def test_a_gp_on_sums_reads_its_data_again():
    x, y = make_data(400, frequency=25.0)
    kernel = HilbertKernel.from_tolerance(ScaleKernel(RBFKernel()).double(), x)
    model = HilbertGP((x, y), gpytorch.likelihoods.GaussianLikelihood(), kernel)
    exact = GP(x, y, ScaleKernel(RBFKernel())).double()
    exact.mean_module.initialize(constant=y.mean())
    train(exact), train(model)
    assert kernel.num_revisions > 0
    test_x = torch.linspace(0, 1, 30, dtype=torch.float64).unsqueeze(-1)
    assert max(differences(exact, model, test_x, y.std())) < 0.02
    twin = copy.deepcopy(model)  # has no data: it keeps the basis
    twin.covar_module.lengthscale = 0.01
    twin.eval()(test_x)
    assert twin.covar_module.num_basis == kernel.num_basis


def test_rows_that_ask_for_another_basis_before_a_prediction():
    """New training rows widen the basis; inputs that are predicted at must see the same one."""
    x = torch.rand(20, 1, dtype=torch.float64)
    y = torch.sin(6 * x[:, 0])
    models = [GP(x, y, HilbertKernel.from_tolerance(RBFKernel(), x)).double().eval() for _ in range(2)]
    test_x = torch.linspace(0, 9, 7, dtype=torch.float64).unsqueeze(-1)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", OutOfDomainWarning)
        models[0](test_x)
        for model in models:
            model.set_train_data(8 * x, y)
        exact = GP(8 * x, y, RBFKernel()).double().eval()(test_x)
        for model in models:
            prediction = model(test_x)
            assert (prediction.mean - exact.mean).abs().max() < 0.01
            assert (prediction.stddev - exact.stddev).abs().max() < 0.01


# The noise decides


def test_the_tolerance_is_relative_to_the_noise():
    """At small noise the functions of the prior's tolerance alone would move the mean."""
    x, _ = make_data(600)
    errors = []
    for noise in (0.1, 2e-4):
        y = torch.sin(10 * x[:, 0]) + noise**0.5 * torch.randn(600, dtype=torch.float64)
        kernel = HilbertKernel.from_tolerance(ScaleKernel(MaternKernel(nu=1.5)).double(), x, tol=0.05)
        kernel.lengthscale = 0.3
        swapped, exact = GP(x, y, kernel).double().eval(), GP(x, y, copy.deepcopy(kernel.base_kernel)).double().eval()
        for model in (swapped, exact):
            model.likelihood.noise = noise
        test_x = torch.linspace(0, 1, 60, dtype=torch.float64).unsqueeze(-1)
        assert max(differences(exact, swapped, test_x, y.std())) < 0.05
        assert not kernel.is_exact
        errors.append(kernel.approximation_error(x))
    assert errors[0] < 0.05 and errors[1] < min(1.5e-3, errors[0] / 2)


def test_few_rows_are_evaluated_exactly_and_many_by_functions():
    x, y = make_data(2_100, 2)
    for rows in (60, 2_100):
        kernel = HilbertKernel.from_tolerance(ScaleKernel(MaternKernel(nu=1.5)).double(), x[:rows])
        model = GP(x[:rows], y[:rows], kernel).double()
        exact = GP(x[:rows], y[:rows], copy.deepcopy(kernel.base_kernel)).double()
        for gp in (model, exact):
            gp.likelihood.noise = 0.01
            gp.covar_module.base_kernel.lengthscale = 0.5
        mll = ExactMarginalLogLikelihood(model.likelihood, model)
        for _ in range(2):
            value = mll(model(x[:rows]), y[:rows])
        assert kernel.is_exact is (rows == 60)
        with gpytorch.settings.max_cholesky_size(3000):
            expected = ExactMarginalLogLikelihood(exact.likelihood, exact)(exact(x[:rows]), y[:rows])
            assert value.item() == pytest.approx(expected.item(), abs=1e-8 if rows == 60 else 2e-2)
            for gp in (model, exact):
                gp.eval()
            test_x = torch.rand(20, 2, dtype=torch.float64)
            assert max(differences(exact, model, test_x, y.std())) < (1e-6 if rows == 60 else 0.02)
        fantasy = model.get_fantasy_model(test_x[:2], y[:2])
        assert fantasy(test_x).mean.shape == (20,)
        draws = draw_posterior_functions(model, 3, generator=torch.Generator().manual_seed(0))
        f = draws(test_x)  # by functions in either case
        assert f.shape == (3, 20) and torch.isfinite(f).all()
