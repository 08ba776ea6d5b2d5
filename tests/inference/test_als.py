from __future__ import annotations

import sys

import gpytorch
import numpy as np
import pytest
import torch
from models import gaussian, rbf

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.errors import ConstraintWarning, InputError
from gpytorch_tkrr.inference import als

PENALTIES = [tkrr.FrobeniusPenalty(), tkrr.ColumnPenalty(), tkrr.FactorPenalty()]


def make_data(num_rows=200, num_dims=3, noise=0.1):
    x = torch.rand(num_rows, num_dims, dtype=torch.float64)
    y = torch.sin(6 * x[:, 0]) * (1 + x[:, -1]) + x[:, num_dims // 2] ** 2
    return x, y + noise * torch.randn(num_rows, dtype=torch.float64)


def make_model(x, y, *, noise=0.01, rank=4, num_basis=10, **kwargs):
    kwargs.setdefault("kernel", rbf())
    return tkrr.TKRR(x, y, gaussian(noise), rank=rank, num_basis=num_basis, **kwargs)


def rises(objective):
    values = torch.tensor(objective, dtype=torch.float64)
    scale = values[:-1].abs().clamp(min=1e-15 * float(values[0].abs()))
    return float(((values[1:] - values[:-1]) / scale.clamp(min=1e-300)).max()) if len(values) > 1 else -1.0


def whitened_features(model, x):
    return [mode.basis(x[:, d]) * mode.variances().detach().sqrt() for d, mode in enumerate(model.separate().modes)]


def dense_ridge(model, x, y, strength, x_test):
    """Ridge regression on the full tensor product of features."""

    def full(x):
        product = None
        for z in whitened_features(model, x):
            product = z if product is None else (product.unsqueeze(-1) * z.unsqueeze(-2)).flatten(1)
        return product

    z, mean = full(x), y.mean()
    weights = torch.linalg.solve(z.mT @ z + strength * torch.eye(z.shape[1]).double(), z.mT @ (y - mean))
    return mean + full(x_test) @ weights


def test_full_rank_equals_dense_ridge_regression():
    x, y = make_data(150, 2)
    model = make_model(x, y, rank=6, num_basis=6, kernel=rbf(0.3, 2.0))
    result = tkrr.fit_als(model, max_sweeps=300, rel_tol=1e-14, seed=0)
    x_test = torch.rand(50, 2, dtype=torch.float64)
    expected = dense_ridge(model, x, y, 0.01 / 2.0, x_test)
    torch.testing.assert_close(model.eval().posterior.mean(x_test) + y.mean(), expected, rtol=1e-4, atol=1e-4)
    assert rises(result.objective) < 1e-10


def test_one_dimension_is_solved_exactly_by_one_update():
    x, y = make_data(80, 1)
    model = make_model(x[:, 0], y, rank=1)
    result = tkrr.fit_als(model, seed=0)
    assert result.converged and len(result.objective) == 1
    expected = dense_ridge(model, x, y, 0.01, x)
    torch.testing.assert_close(model.eval()(x).mean, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("penalty", PENALTIES, ids=repr)
def test_every_update_solves_the_dense_normal_equations(penalty, monkeypatch):
    """After the update of a factor no change of that factor alone lowers the objective."""
    x, y = make_data()
    model = make_model(x, y)
    seen = []
    original = als.ALSFit.update

    def update(self, d, objective, **options):
        original(self, d, objective, **options)
        seen.append((d, self.weights.clone(), self.strength()))

    monkeypatch.setattr(als.ALSFit, "update", update)
    tkrr.fit_als(model, max_sweeps=2, rel_tol=0.0, penalty=penalty, seed=0)
    features = whitened_features(model, x)
    t = (y - y.mean()) / y.std(correction=0)
    for d, weights, strength in seen:
        factor = weights.scaled_factor(d).requires_grad_()
        p = torch.ones(len(x), 4, dtype=torch.float64)
        for k, z in enumerate(features):
            p = p * (z @ weights.factors[k].mT) if k != d else p
        values = (p * (features[d] @ factor.mT)).sum(-1)
        quadratic = torch.einsum("ri,rs,si->", factor, penalty.form(weights, d), factor)
        objective = (t - values).square().sum() + strength * quadratic
        (gradient,) = torch.autograd.grad(objective, factor)
        assert gradient.abs().max() < 1e-7 * (p.square().sum() + 1)
    assert [d for d, _, _ in seen] == [0, 1, 2, 1, 0, 1, 2, 1, 0]


@pytest.mark.parametrize("penalty", PENALTIES, ids=repr)
@pytest.mark.parametrize("kernel", ["rbf", "anova"])
def test_the_objective_never_rises_and_is_what_it_says(penalty, kernel):
    x, y = make_data()
    y = 100 + 30 * y
    model = make_model(x, y, noise=9.0, kernel=rbf(0.4, 900.0) if kernel == "rbf" else None)
    result = tkrr.fit_als(model, max_sweeps=6, rel_tol=0.0, penalty=penalty, seed=0)
    assert len(result.objective) == 6 * 2 * 2 + 1 and result.sweeps == 6 and not result.converged
    assert rises(result.objective) < 1e-10
    weights = model.posterior.weights
    residual = y - model.eval()(x).mean
    strength = penalty.strength_for(model.noise(), model.separate().outputscale(), weights)
    expected = residual.square().sum() + strength * penalty.value(weights)
    assert result.objective[-1] == pytest.approx(expected.item(), rel=1e-9)


def test_factors_follow_the_convention_of_the_paper():
    x, y = make_data()
    model = make_model(x, y, mean_module=gpytorch.means.ZeroMean())
    tkrr.fit_als(model, seed=0)
    product = 1
    for z, factor in zip(whitened_features(model, x), model.factors, strict=True):
        assert factor.shape == (10, 4)
        product = product * (z @ factor)
    torch.testing.assert_close(model.eval()(x).mean, product.sum(-1))


def test_initial_factors_determine_the_fit():
    x, y = make_data()
    factors = [torch.randn(10, 4, dtype=torch.float64) for _ in range(3)]
    factors = [factor / torch.linalg.matrix_norm(factor, 2) for factor in factors]
    means = []
    for seed in (0, 1):
        model = make_model(x, y)
        tkrr.fit_als(model, initial_factors=factors, max_sweeps=2, seed=seed)
        means.append(model.eval()(x).mean)
    assert torch.equal(means[0], means[1])
    with pytest.raises(tkrr.InputError, match="initial_factors"):
        tkrr.fit_als(model, initial_factors=factors[:2])


def test_same_seed_same_fit_and_a_refit_goes_on():
    x, y = make_data()
    models = [make_model(x, y) for _ in range(2)]
    results = [tkrr.fit_als(model, max_sweeps=3, rel_tol=0.0, seed=7) for model in models]
    assert results[0].objective == results[1].objective
    again = tkrr.fit_als(models[0], max_sweeps=3, rel_tol=0.0)
    assert again.objective[0] <= results[0].objective[-1] * (1 + 1e-10)
    longer = make_model(x, y)
    whole = tkrr.fit_als(longer, max_sweeps=6, rel_tol=0.0, seed=7)
    assert again.objective[-1] == pytest.approx(whole.objective[-1], rel=1e-3)


def test_appended_rows_are_fitted_from_where_the_model_stands():
    x, y = make_data()
    model = make_model(x[:150], y[:150], domain=tkrr.Domain(0.5, 1.5))
    first = tkrr.fit_als(model, seed=0)
    second = tkrr.fit_als(model, new_rows=(x[150:], y[150:]), max_sweeps=1)
    assert model.train_inputs[0].shape == (200, 3) and not model.is_stale
    assert second.objective[0] < 3 * first.objective[-1]  # a warm start
    with pytest.raises(tkrr.DomainError, match="outside"):
        tkrr.fit_als(model, new_rows=(x[:1] + 5, y[:1]))


def test_streamed_data_give_the_same_model():
    x, y = make_data()
    in_memory = make_model(x, y)
    expected = tkrr.fit_als(in_memory, seed=0)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=33)
    for memory in (1 << 30, 0):
        streamed = tkrr.TKRR(None, None, gaussian(), kernel=rbf(), rank=4, num_basis=10)
        result = tkrr.fit_als(streamed, data=loader, seed=0, memory=memory)
        np.testing.assert_allclose(result.objective, expected.objective, rtol=1e-7)
        torch.testing.assert_close(streamed.eval()(x).mean, in_memory.eval()(x).mean, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(streamed(x).variance, in_memory(x).variance, rtol=1e-4, atol=1e-8)


def test_row_noise_becomes_row_weights():
    x, y = make_data(150, 1)
    noise = 0.01 + torch.rand(150, dtype=torch.float64)
    likelihood = gpytorch.likelihoods.FixedNoiseGaussianLikelihood(noise)
    model = tkrr.TKRR(x, y, likelihood, kernel=rbf(), rank=1, num_basis=15, mean_module=gpytorch.means.ZeroMean())
    tkrr.fit_als(model)
    (z,) = whitened_features(model, x)
    weights = torch.linalg.solve(z.mT @ (z / noise[:, None]) + torch.eye(15).double(), z.mT @ (y / noise))
    torch.testing.assert_close(model.eval()(x).mean, z @ weights, rtol=1e-7, atol=1e-7)


def test_an_interrupted_fit_leaves_a_usable_model(monkeypatch):
    x, y = make_data()
    model = make_model(x, y)
    original, calls = als.ALSFit.update, []

    def update(self, d, objective, **options):
        calls.append(d)
        if len(calls) == 6:
            raise KeyboardInterrupt
        original(self, d, objective, **options)

    monkeypatch.setattr(als.ALSFit, "update", update)
    result = tkrr.fit_als(model, seed=0)
    assert "Interrupted after 5" in result.message and not result.converged
    prediction = model.eval()(x)
    assert (prediction.mean - y).square().mean() < y.var()
    assert (prediction.variance > 0).all()  # computed when asked for


def test_callback_sees_the_model_after_every_update():
    x, y = make_data(num_dims=2)
    model = make_model(x, y, mean_module=gpytorch.means.ZeroMean())
    numbers, objective = [], []

    def record(model, number):
        numbers.append(number)
        square = (y - model.posterior.mean(x)).square().sum()
        objective.append(float(square + 1e-6 * model.posterior.weights.squared_norm()))

    options = {"max_sweeps": 2, "rel_tol": 0.0, "seed": 0, "penalty": tkrr.FrobeniusPenalty(1e-6)}
    result = tkrr.fit_als(model, callback=record, **options)
    assert numbers == [1, 2, 3, 4, 5]
    np.testing.assert_allclose(objective, result.objective, rtol=1e-9)
    other = make_model(x, y, mean_module=gpytorch.means.ZeroMean())
    tkrr.fit_als(other, **options)
    torch.testing.assert_close(other.eval()(x).mean, model.eval()(x).mean)


def test_progress_bar(monkeypatch, capsys):
    pytest.importorskip("tqdm")
    x, y = make_data(50)
    tkrr.fit_als(make_model(x, y), max_sweeps=1, progress=True)
    assert "objective" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ImportError, match="progress=True needs tqdm"):
        tkrr.fit_als(make_model(x, y), progress=True)


# Robustness


def check_fit(model, x, y, **kwargs):
    result = tkrr.fit_als(model, seed=0, **kwargs)
    prediction = model.likelihood(model.eval()(x))
    assert np.isfinite(result.objective).all() and rises(result.objective) < 1e-10
    assert torch.isfinite(prediction.mean).all() and (prediction.variance > 0).all()
    return ((prediction.mean - y).square().mean() / y.square().mean().clamp(min=1e-300)).item()


@pytest.mark.parametrize("kernel", ["rbf", "anova"])
def test_many_dimensions(kernel):
    x = torch.rand(300, 96, dtype=torch.float64)
    y = torch.sin(6 * x[:, 0]) + x[:, 50]
    model = make_model(x, y, kernel=rbf(1.0) if kernel == "rbf" else None, rank=3, num_basis=6)
    assert check_fit(model, x, y, max_sweeps=2) < 0.5


def test_constant_targets_with_learned_hyperparameters():
    x, _ = make_data(50)
    model = make_model(x, torch.full((50,), 3.0, dtype=torch.float64))
    tkrr.fit_als(model, learn_hyperparameters=True, seed=0)
    torch.testing.assert_close(model.eval()(x).mean, model.train_targets)


@pytest.mark.parametrize("kernel", ["rbf", "anova"])
def test_constant_and_binary_columns(kernel):
    x, y = make_data()
    x = torch.cat([x, torch.full((200, 1), 3.0), torch.randint(0, 2, (200, 1)).double()], dim=1)
    model = make_model(x, y + x[:, 4], kernel=rbf(0.5) if kernel == "rbf" else None)
    assert check_fit(model, x, y + x[:, 4]) < 0.05


@pytest.mark.filterwarnings("ignore::gpytorch_tkrr.ApproximationWarning")
@pytest.mark.filterwarnings("ignore::gpytorch_tkrr.OutOfDomainWarning")
@pytest.mark.filterwarnings("ignore::gpytorch_tkrr.ConvergenceWarning")  # all components may die
@pytest.mark.parametrize("strength", [1e-9, 1e-20, 1e-25])
def test_long_lengthscales_do_not_collapse(strength):
    """In a box that is far too small all variances nearly vanish; ALS still finds what ridge regression finds."""
    x, y = make_data(noise=0.0)
    model = make_model(x, y, kernel=rbf(3.5), domain=tkrr.Domain(0.5, 1.0))
    error = check_fit(model, x, y, penalty=tkrr.FrobeniusPenalty(strength), max_sweeps=50)
    gram = torch.ones(200, 200, dtype=torch.float64)
    for z in whitened_features(model, x):
        gram = gram * (z @ z.mT)
    residual = torch.linalg.solve(gram / strength + torch.eye(200).double(), y - y.mean())
    assert error <= 1.01 * float(residual.square().mean() / y.square().mean())


def test_a_strong_ridge_and_a_long_lengthscale_in_a_box_of_their_own():
    x, y = make_data(noise=0.0)
    assert check_fit(make_model(x, y, kernel=rbf(3.5)), x, y, penalty=tkrr.FrobeniusPenalty(1e-6)) < 0.1
    assert check_fit(make_model(x, y, kernel=None, noise=100.0), x, y) < 1.0


def test_noise_free_targets():
    x, y = make_data(noise=0.0)
    for strength in (1e-12, 0.0):
        assert check_fit(make_model(x, y), x, y, penalty=tkrr.FrobeniusPenalty(strength)) < 1e-4
    assert check_fit(make_model(x, torch.full_like(y, 3.0)), x, torch.full_like(y, 3.0)) < 1e-10  # constant targets
    assert check_fit(make_model(x, torch.zeros_like(y)), x, torch.zeros_like(y)) == 0.0


def test_duplicate_rows():
    x, y = make_data(20)
    assert check_fit(make_model(x.repeat(10, 1), y.repeat(10)), x, y) < 0.05


@pytest.mark.parametrize("num_rows, rank, num_basis", [(1, 1, 3), (1, 5, 3), (3, 4, 10), (30, 20, 3), (30, 1, 1)])
@pytest.mark.parametrize("kernel", ["rbf", "anova"])
@pytest.mark.filterwarnings("ignore::gpytorch_tkrr.ApproximationWarning")
@pytest.mark.filterwarnings("ignore::gpytorch_tkrr.OutOfDomainWarning")
def test_small_and_lopsided_sizes(num_rows, rank, num_basis, kernel):
    x, y = make_data(max(num_rows, 2))
    x, y = x[:num_rows], y[:num_rows]
    model = make_model(x, y, rank=rank, num_basis=num_basis, kernel=rbf() if kernel == "rbf" else None)
    check_fit(model, x, y)


def test_extreme_units():
    x, y = make_data()
    expected = make_model(x, y)
    tkrr.fit_als(expected, seed=0)
    model = make_model(1e9 * x, 1e-7 * y, noise=1e-4, kernel=rbf(0.4e9, 1e-14))
    tkrr.fit_als(model, seed=0, penalty=tkrr.FrobeniusPenalty(0.01))
    torch.testing.assert_close(1e7 * model.eval()(1e9 * x).mean, expected.eval()(x).mean, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_bad_data_are_refused_before_any_work(bad):
    x, y = make_data(30)
    for tensor in (x, y):
        broken = tensor.clone()
        broken.view(-1)[4] = bad
        pair = (broken, y) if tensor is x else (x, broken)
        with pytest.raises(tkrr.InputError, match="NaN or infinite"):
            make_model(*pair)
        with pytest.raises(tkrr.InputError, match="NaN or infinite"):
            tkrr.fit_als(make_model(x, y), data=pair)


def test_arguments_are_checked():
    x, y = make_data(30)
    with pytest.raises(ValueError, match="max_sweeps"):
        tkrr.fit_als(make_model(x, y), max_sweeps=-1)
    with pytest.raises(tkrr.InputError, match="no training data"):
        tkrr.fit_als(tkrr.TKRR(None, None, gaussian(), kernel=rbf()))
    with pytest.raises(tkrr.InputError, match="input dimensions"):
        tkrr.fit_als(make_model(x, y), data=(x[:, :2], y))


# Classification


@pytest.mark.parametrize("labels", ["signs", "zero-one"])
@pytest.mark.parametrize("bernoulli", [False, True])
def test_classification(labels, bernoulli):
    x = torch.rand(300, 2, dtype=torch.float64)
    positive = (x[:, 0] - 0.5) * (x[:, 1] - 0.5) > 0
    y = torch.where(positive, 1.0, -1.0 if labels == "signs" else 0.0).double()
    likelihood = gpytorch.likelihoods.BernoulliLikelihood() if bernoulli else gaussian()
    model = tkrr.TKRR(x, y, likelihood, kernel=rbf(0.3), rank=4, num_basis=12)
    result = tkrr.fit_als(model, seed=0, penalty=tkrr.ColumnPenalty(1e-3))
    assert rises(result.objective) < 1e-10
    prediction = likelihood(model.eval()(x))
    if bernoulli:
        decision = prediction.probs > 0.5
        assert prediction.probs.min() >= 0 and prediction.probs.max() <= 1
    else:
        decision = prediction.mean > (0.0 if labels == "signs" else 0.5)
    assert (decision == positive).double().mean() > 0.97


def test_labels_are_checked():
    with pytest.raises(tkrr.InputError, match="BernoulliLikelihood"):
        tkrr.TKRR(torch.rand(5, 1), torch.arange(5.0), gpytorch.likelihoods.BernoulliLikelihood(), kernel=rbf())


@pytest.mark.parametrize("name", ["banana", "yacht", "energy", "airfoil", "spambase", "adult"])
def test_the_objective_never_rises_on_real_data(name, data_dir):
    table = np.loadtxt(data_dir / f"{name}.csv.gz", delimiter=",", skiprows=1)[:3000]
    x, y = torch.from_numpy(table[:, :-1]), torch.from_numpy(table[:, -1])
    span = x.amax(0) - x.amin(0)
    x = (x - x.amin(0)) / torch.where(span > 0, span, torch.ones_like(span))
    y = (y - y.mean()) / y.std()
    for penalty in (tkrr.FrobeniusPenalty(1e-5), tkrr.ColumnPenalty(1e-5)):
        model = make_model(x, y, kernel=rbf(0.4), domain=tkrr.Domain(0.5, 1.0), num_basis=10)
        result = tkrr.fit_als(model, max_sweeps=2, rel_tol=0.0, penalty=penalty, seed=0)
        assert rises(result.objective) < 1e-10 and result.objective[-1] < 0.9 * float(y.square().sum())


@pytest.mark.filterwarnings("ignore::gpytorch_tkrr.ConvergenceWarning")  # all components may die
@pytest.mark.parametrize("max_sweeps", [1, 2, 3])
def test_reported_objective_is_that_of_the_stored_weights_where_restarts_do_not_help(max_sweeps):
    x, y = torch.rand(60, 4, dtype=torch.float64), torch.randn(60, dtype=torch.float64)
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    likelihood.noise = 3.0
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=4)).double()
    model = tkrr.TKRR(x, y, likelihood, kernel=kernel, rank=3, num_basis=8)
    result = tkrr.fit_als(model, seed=0, max_sweeps=max_sweeps, penalty=tkrr.FactorPenalty())
    square = (model.eval()(x).mean - y).square().sum().detach()
    assert square <= result.objective[-1] * (1 + 1e-9)


@pytest.mark.parametrize("unit", [1.0, 1e2, 1e5])
def test_learned_noise_does_not_depend_on_the_units_of_the_targets(unit):
    x = torch.rand(300, 2, dtype=torch.float64)
    y = unit * (torch.sin(6 * x[:, 0]) * x[:, 1] + 0.1 * torch.randn(300, dtype=torch.float64))
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    model = tkrr.TKRR(x, y, likelihood, rank=4, num_basis=8)
    tkrr.fit_als(model, seed=0, learn_hyperparameters=True)
    assert 0.08 < likelihood.noise.item() ** 0.5 / unit < 0.12


def test_noise_at_its_lower_bound_is_mentioned():
    x = torch.rand(100, 2, dtype=torch.float64)
    y = 1e-3 * torch.sin(6 * x[:, 0])
    model = tkrr.TKRR(x, y, gpytorch.likelihoods.GaussianLikelihood().double(), rank=2, num_basis=6)
    with pytest.warns(ConstraintWarning, match="default lower bound, which is .* times the variance of the targets"):
        assert "lower bound" in tkrr.fit_als(model, seed=0, max_sweeps=2, learn_hyperparameters=True).message


def test_hyperparameters_of_one_dimension_are_learned():
    x = torch.rand(200, dtype=torch.float64)
    y = torch.sin(9 * x) + 0.1 * torch.randn(200, dtype=torch.float64)
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()).double()
    model = tkrr.TKRR(x, y, likelihood, kernel=kernel, rank=2, num_basis=30)
    tkrr.fit_als(model, seed=0, learn_hyperparameters=True)
    assert 0.005 < likelihood.noise.item() < 0.02
    assert kernel.base_kernel.lengthscale.item() < 0.5


def test_a_fit_without_seed_follows_the_global_generator_and_leaves_its_seed_alone():
    x, y = torch.rand(50, 2, dtype=torch.float64), torch.rand(50, dtype=torch.float64)
    objectives = []
    for _ in range(2):
        torch.manual_seed(7)
        model = tkrr.TKRR(x, y, gpytorch.likelihoods.GaussianLikelihood().double(), rank=2, num_basis=5)
        objectives.append(tkrr.fit_als(model, max_sweeps=1).objective)
        assert torch.initial_seed() == 7
    assert objectives[0] == objectives[1]


def test_noise_of_each_row_must_match_the_rows():
    x, y = torch.rand(40, 2, dtype=torch.float64), torch.rand(40, dtype=torch.float64)
    noise = torch.rand(40, dtype=torch.float64) + 0.1
    likelihood = gpytorch.likelihoods.FixedNoiseGaussianLikelihood(noise)
    model = tkrr.TKRR(x, y, likelihood, rank=2, num_basis=5)
    tkrr.fit_als(model, seed=0)
    expected = model.eval()(x).mean
    with pytest.raises(tkrr.InputError, match="row weights"):
        tkrr.fit_als(model, data=(x, y))
    with pytest.raises(tkrr.InputError, match="40 noise variances for 41 training rows"):
        tkrr.fit_als(model, new_rows=(x[:1], y[:1]))
    weighted = tkrr.TKRR(x, y, likelihood, rank=2, num_basis=5)
    tkrr.fit_als(weighted, data=(x, y, noise.mean() / noise), seed=0)
    torch.testing.assert_close(weighted.eval()(x).mean, expected)


def test_requests_that_make_no_sense():
    x, y = torch.rand(20, 2, dtype=torch.float64), torch.rand(20, dtype=torch.float64)
    model = tkrr.TKRR(x, y, gpytorch.likelihoods.GaussianLikelihood().double(), rank=2, num_basis=5)
    with pytest.raises(TypeError, match="Penalty"):
        tkrr.fit_als(model, penalty="ridge")
    with pytest.raises(ValueError, match="Pass one of them"):
        tkrr.fit_als(model, data=(x, y), new_rows=(x, y))
    with pytest.raises(tkrr.InputError, match="columns"):
        tkrr.fit_als(model, new_rows=(x[:, :1], y))
    with pytest.raises(tkrr.InputError, match="tensors"):
        tkrr.fit_als(model, data=[("x", "y")])


def test_targets_too_large_for_the_hyperparameters_to_be_learned_are_refused():
    x, y = make_data(num_dims=2)
    model = tkrr.TKRR(x.float(), 1e20 * y.float(), gpytorch.likelihoods.GaussianLikelihood(), rank=2, num_basis=5)
    with pytest.raises(InputError, match=r"variance of the targets, .* too large for .*float32"):
        tkrr.fit_als(model, learn_hyperparameters=True, max_sweeps=2, seed=0)
    tkrr.fit_als(model, max_sweeps=2, seed=0)
    assert torch.isfinite(model.eval()(x.float()).mean).all()
