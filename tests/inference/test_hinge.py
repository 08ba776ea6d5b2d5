"""Support vector machines by ALS against scikit-learn's, against dense algebra, and refusals."""

from __future__ import annotations

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.kernels import RBFKernel

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.inference.hinge import MarginLoss

LOSSES = {"hinge": tkrr.Hinge(1e-3), "squared": tkrr.SquaredHinge()}
STRENGTH = 0.5


def data(num=200, num_dims=2):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(num, num_dims, dtype=torch.float64, generator=generator)
    noise = 0.3 * torch.randn(num, dtype=torch.float64, generator=generator)
    return x, (torch.sin(6 * x).prod(-1) + noise > 0).double()


def make_model(x, y, rank, num_basis=6, **settings):
    kernel = RBFKernel().double()
    kernel.lengthscale = 0.5
    likelihood = gpytorch.likelihoods.BernoulliLikelihood()
    box = tkrr.Domain(torch.full((x.shape[1],), 0.5), 1.5)
    return tkrr.TKRR(x, y, likelihood, kernel=kernel, rank=rank, num_basis=num_basis, domain=box, **settings)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_parabolas_lie_above_the_loss_and_touch_it(loss: MarginLoss):
    at = torch.tensor([-30.0, -1.0, -1e-4, 0.0, 1e-4, 0.7, 40.0], dtype=torch.float64).unsqueeze(-1)
    parabola = loss.majorise(at)
    u = torch.linspace(-50, 50, 4001, dtype=torch.float64)

    def surrogate(u):
        return parabola.weight * ((u - at + parabola.step).square() - parabola.step.square()) + parabola.loss

    exact = loss.majorise(u).loss
    assert (surrogate(u) >= exact - 1e-9 * (1 + exact)).all()
    torch.testing.assert_close(surrogate(at), parabola.loss)
    power = 2 if loss == tkrr.SquaredHinge() else 1
    torch.testing.assert_close(exact, u.clamp(min=0) ** power, rtol=0, atol=1e-3)
    gradient = (loss.majorise(at + 1e-6).loss - loss.majorise(at - 1e-6).loss) / 2e-6
    torch.testing.assert_close(2 * parabola.weight * parabola.step, gradient, rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore::gpytorch_tkrr.ApproximationWarning")
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("num_dims", [1, 2])
@torch.no_grad()
def test_full_rank_is_the_support_vector_machine(name, num_dims):
    """LinearSVC on all products of features, which minimises |w|^2 / 2 + C sum of losses, with C = 1 / (2 lambda)."""
    svm = pytest.importorskip("sklearn.svm")
    x, y = data(num_dims=num_dims)
    model = make_model(x, y, rank=6 if num_dims > 1 else 1, mean_module=gpytorch.means.ZeroMean())
    penalty = tkrr.FrobeniusPenalty(STRENGTH)
    result = tkrr.fit_als(model, loss=LOSSES[name], penalty=penalty, max_sweeps=300, rel_tol=1e-9, seed=0)
    objective = torch.tensor(result.objective, dtype=torch.float64)
    assert (objective.diff() <= 1e-9 * objective[:-1]).all()

    parts = [m.basis(x[:, d]) * m.variances().sqrt() for d, m in enumerate(model.separate().modes)]
    features = parts[0] if num_dims == 1 else torch.einsum("ni,nj->nij", *parts).flatten(1)
    machine = svm.LinearSVC(
        C=1 / (2 * STRENGTH),
        loss="hinge" if name == "hinge" else "squared_hinge",
        fit_intercept=False,
        dual=True,
        tol=1e-8,
        max_iter=1_000_000,
    ).fit(features.numpy(), y.numpy())
    margin = 1 - (2 * y.numpy() - 1) * machine.decision_function(features.numpy())
    losses = np.maximum(margin, 0) ** (1 if name == "hinge" else 2)
    best = losses.sum() + STRENGTH * np.square(machine.coef_).sum()
    assert best * (1 - 1e-6) <= result.objective[-1] <= best * 1.003 + len(y) * 5e-4  # the rounded corner
    response = model.eval()(x).mean.numpy()
    np.testing.assert_allclose(response, machine.decision_function(features.numpy()), atol=0.06)


@pytest.mark.parametrize("name", LOSSES)
@torch.no_grad()
def test_low_rank_classifies_whatever_the_batches(name):
    x, y = data(600)
    model = make_model(x[:400], 2 * y[:400] - 1, rank=3, num_basis=10)  # classes -1 and +1
    settings = {"penalty": tkrr.FrobeniusPenalty(0.1), "loss": LOSSES[name], "max_sweeps": 20, "seed": 0}
    result = tkrr.fit_als(model, **settings)
    objective = torch.tensor(result.objective, dtype=torch.float64)
    assert (objective.diff() <= 1e-9 * objective[:-1]).all()
    wrong = ((model.eval()(x[400:]).mean > 0) != (y[400:] > 0)).double().mean()
    least_squares = make_model(x[:400], y[:400], rank=3, num_basis=10)
    tkrr.fit_als(least_squares, penalty=tkrr.FrobeniusPenalty(0.1), max_sweeps=20, seed=0)
    other = ((least_squares.eval()(x[400:]).mean > 0) != (y[400:] > 0)).double().mean()
    assert wrong < other + 0.05
    streamed = make_model(x[:400], y[:400], rank=3, num_basis=10)
    tkrr.fit_als(streamed, data=[(x[:150], y[:150]), (x[150:400], y[150:400])], **settings)
    torch.testing.assert_close(streamed.eval()(x).mean, model(x).mean, rtol=1e-5, atol=1e-5)
    probability = model.likelihood(model(x)).mean
    assert ((probability > 0.5) == (model(x).mean > 0)).all()


@torch.no_grad()
def test_weights_of_rows_count_as_copies():
    x, y = data(120)
    copies = torch.randint(1, 4, (120,), generator=torch.Generator().manual_seed(1))
    many = (x.repeat_interleave(copies, 0), y.repeat_interleave(copies))
    responses = []
    for rows in ((x, y, copies.double()), many):
        model = make_model(x, y, rank=2, mean_module=gpytorch.means.ZeroMean())
        settings = {"penalty": tkrr.FrobeniusPenalty(0.1), "max_sweeps": 300, "rel_tol": 1e-13, "seed": 0}
        tkrr.fit_als(model, data=rows, loss=tkrr.SquaredHinge(), **settings)
        responses.append(model.posterior.mean(x))
    torch.testing.assert_close(*responses, rtol=1e-3, atol=1e-4)


def test_refusals():
    x, y = data()
    model = make_model(x, y, rank=2)
    with pytest.raises(TypeError, match="loss must be"):
        tkrr.fit_als(model, loss="hinge")
    with pytest.raises(ValueError, match="no evidence"):
        tkrr.fit_als(model, loss=tkrr.Hinge(), learn_hyperparameters=True)
    with pytest.raises(ValueError, match="smoothing must be positive"):
        tkrr.Hinge(0.0)
    regression = tkrr.TKRR(x, y, gpytorch.likelihoods.GaussianLikelihood())
    with pytest.raises(tkrr.InputError, match="two classes; the model has a GaussianLikelihood"):
        tkrr.fit_als(regression, loss=tkrr.Hinge())
    outside = gpytorch.means.ConstantMean()
    outside.constant = 3.0
    for mean in (outside, gpytorch.means.LinearMean(2)):
        with pytest.raises(tkrr.InputError, match="between the classes"):
            tkrr.fit_als(make_model(x, y, rank=2, mean_module=mean.double()), loss=tkrr.Hinge())
