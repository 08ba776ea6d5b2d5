"""Rows outside the training range: flagged, announced, and no surer than the prior."""

from __future__ import annotations

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from support.models import gaussian, rbf

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.model.extrapolation import EXCESS, MARGIN, TrainingRange


def _fitted(method: str, **kwargs) -> tkrr.TKRR:
    torch.manual_seed(0)
    x = torch.rand(80, 2, dtype=torch.float64)
    y = torch.sin(4 * x[:, 0]) + x[:, 1]
    model = tkrr.TKRR(x, y, gaussian(), rank=3, **{"num_basis": 12, **kwargs})
    if method == "als":
        tkrr.fit_als(model, seed=0)
    else:
        tkrr.fit_gibbs(model, num_warmup=10, num_draws=10, seed=0)
    return model.eval()


ROWS = torch.tensor([[0.5, 0.5], [0.5, 1.3], [-0.2, 0.5], [0.4, 0.6]], dtype=torch.float64)


@pytest.mark.parametrize("method", ["als", "gibbs"])
def test_rows_outside_are_flagged_and_announced_once_per_call(method, recwarn):
    model = _fitted(method)
    for _ in range(2):
        with pytest.warns(tkrr.ExtrapolationWarning, match=r"2 of 4 rows .* in columns \[0, 1\]") as caught:
            prediction = model.predict(ROWS)
        assert sum(each.category is tkrr.ExtrapolationWarning for each in caught) == 1
        assert caught[0].filename == __file__
        assert prediction.extrapolates.tolist() == [False, True, True, False]
    recwarn.clear()
    inside = model.predict(ROWS[[0, 3]].reshape(1, 2, 2))
    assert inside.extrapolates.shape == (1, 2) and not inside.extrapolates.any() and not recwarn
    model.predict(model.train_inputs[0].float())  # rounded to another dtype: still the training rows
    assert not recwarn


@pytest.mark.parametrize(
    ("fit", "sizes"), [(tkrr.fit_als, {"max_sweeps": 2}), (tkrr.fit_gibbs, {"num_warmup": 4, "num_draws": 4})]
)
def test_fits_announce_rows_that_the_box_was_not_chosen_for(fit, sizes):
    model = _fitted("als")
    x = 1.2 * model.train_inputs[0]
    number = int((x > model.training_range.upper).any(-1).sum())
    with pytest.warns(tkrr.ExtrapolationWarning, match=f"{number} of 80 rows") as caught:
        fit(model, data=(x, model.train_targets), seed=0, **sizes)
    assert sum(each.category is tkrr.ExtrapolationWarning for each in caught) == 1
    assert not model.extrapolates(x).any()  # they are training rows now


def test_unknown_variance_is_that_of_an_exact_gp_with_one_observation_at_the_nearest_point():
    kernel = ScaleKernel(RBFKernel(ard_num_dims=2)).double()
    kernel.base_kernel.lengthscale, kernel.outputscale = torch.tensor([0.5, 0.8]), 2.0
    box = tkrr.Domain(torch.zeros(2), torch.full((2,), 6.0))
    model = tkrr.TKRR(None, None, gaussian(), kernel=kernel, domain=box, num_basis=40)
    x = torch.tensor([[0.3, 0.2], [1.3, 0.5], [-1.2, 1.8], [1.05, 0.0]], dtype=torch.float64)
    known = TrainingRange(torch.tensor([-1.0, -1.0]), torch.tensor([1.0, 1.0]))
    found = known.unknown_variance(model.separate(), x, model.warped)
    nearest = x.clamp(-1, 1)
    cross = kernel(x, nearest).to_dense().diagonal()
    torch.testing.assert_close(found, 2.0 - cross.square() / 2.0, rtol=1e-4, atol=1e-6)
    assert known.unknown_variance(model.separate(), x[:1], model.warped) is None


def test_rounding_is_small_beside_the_range():
    """Seconds since 1970 on a day; a column that has one value in single and in double precision."""
    known = TrainingRange(*torch.tensor([[1.7e9, 0.1], [1.7e9 + 100, 0.1]], dtype=torch.float64))
    x = torch.tensor([[1.7e9 + 100, 0.1], [1.7e9 + 102, 0.1], [1.7e9 + 50, 0.2]], dtype=torch.float64)
    assert known.outside(x).tolist() == [[False, False], [True, False], [False, True]]
    x[:, 1] = x[:, 1].float().double()
    assert not known.outside(x)[:2, 1].any()


@pytest.mark.filterwarnings("ignore::gpytorch_tkrr.OutOfDomainWarning")
@pytest.mark.parametrize("method", ["als", "gibbs"])
def test_predictions_outside_have_at_least_the_variance_of_the_prior(method):
    model = _fitted(method, kernel=rbf(0.4, ard=2), domain=tkrr.Domain(0.5, 2.0), num_basis=25)
    with torch.no_grad(), pytest.warns(tkrr.ExtrapolationWarning):
        unknown = model.training_range.unknown_variance(model.separate(), ROWS, model.warped)
        predicted = model.predict(ROWS).variance
        of_f = model(ROWS).variance
    assert unknown[[0, 3]].abs().max() == 0 and unknown[[1, 2]].min() > 0.01
    assert (of_f >= unknown - 1e-9).all()
    assert (predicted >= unknown).all()


def test_the_range_is_part_of_the_state():
    model = _fitted("als")
    other = tkrr.TKRR(None, None, gaussian())
    other.load_state_dict(model.state_dict())
    assert other.extrapolates(ROWS).tolist() == model.extrapolates(ROWS).tolist()


@torch.no_grad()
def test_with_everything_chosen_by_the_model_nothing_runs_away():
    torch.manual_seed(1)
    x = torch.randn(400, 6, dtype=torch.float64)
    x[:, 3] = x[:, 3].exp()
    y = x[:, 0] * x[:, 1] + torch.tanh(x[:, 3]) + 0.1 * torch.randn(400, dtype=torch.float64)
    model = tkrr.TKRR(x, y, gaussian(), rank=4)
    tkrr.fit_gibbs(model, num_warmup=20, num_draws=10, seed=0)
    far = x[:50].clone()
    far[:, 3] *= 100
    far[:, 0] *= 30
    with pytest.warns(tkrr.ExtrapolationWarning):
        prediction = model.predict(far)
    assert (prediction.mean - y.mean()).abs().max() < 5 * (y.max() - y.min())
    assert (prediction.stddev[prediction.extrapolates] > 0.3 * y.std()).all()
    inner = model.predict(model.training_range.nearest(far, MARGIN))
    torch.testing.assert_close(prediction.mean, inner.mean)
    torch.testing.assert_close(model.draws(far).mean(0), inner.mean)
    loaded = tkrr.TKRR(None, None, gaussian())
    loaded.load_state_dict(model.state_dict())
    torch.testing.assert_close(loaded.eval()(far).mean, inner.mean)
    torch.testing.assert_close(loaded(far).variance, model.eval()(far).variance)
    corner = 40 * torch.sign(x[:50])  # all columns at once
    with pytest.warns(tkrr.ExtrapolationWarning):
        prediction = model.predict(corner)
    width = (1 + 1e-9) * EXCESS * (y.max() - y.min())
    for mean in (prediction.mean, model(corner).mean, model.draws(corner)):
        assert mean.min() >= y.min() - width and mean.max() <= y.max() + width
    assert (prediction.stddev > 0.3 * y.std()).all()


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::gpytorch_tkrr.ExtrapolationWarning")
def test_values_too_large_to_be_believed_are_cut_off_and_count_as_uncertainty():
    x = torch.rand(300, 6, dtype=torch.float64)
    y = 5 * (0.2 + x).prod(-1)  # steepest in a corner where no data are
    model = tkrr.TKRR(x, y, gaussian(), rank=2)
    tkrr.fit_gibbs(model, num_warmup=30, num_draws=10, num_chains=1, seed=0)
    corner = torch.full((1, 6), 1.3, dtype=torch.float64)
    width = float(y.max() - y.min())
    free = model.posterior.functions(model.warped(corner)) + model.mean_module(corner)
    assert float(free.mean()) > float(y.max()) + width  # else there is nothing to see
    prediction = model.eval().predict(corner)
    assert float(prediction.mean) == pytest.approx(float(y.max()) + EXCESS * width)
    assert float(prediction.stddev) >= 0.99 * float(y.std())
    assert float(model(corner).mean) == pytest.approx(float(prediction.mean))


@torch.no_grad()
def test_values_within_the_range_of_every_column_are_bounded_too():
    """An empty corner of a box whose columns depend on each other: f may be anything there, predictions may not."""
    u = torch.rand(200, 1, dtype=torch.float64)
    x = (u + 0.02 * torch.rand(200, 4, dtype=torch.float64)).clamp(0, 1)
    y = torch.sin(6 * u[:, 0]) + 0.1 * torch.randn(200, dtype=torch.float64)
    model = tkrr.TKRR(x, y, gaussian(), rank=2)
    tkrr.fit_gibbs(model, num_warmup=10, num_draws=10, num_chains=1, seed=0)
    before = model.eval().predict(x).stddev
    model.posterior.factors[0].mul_(100.0)  # as if components had run away
    prediction = model.predict(x)
    width = (1 + 1e-9) * EXCESS * (y.max() - y.min())
    for mean in (prediction.mean, model(x).mean, model.draws(x)):
        assert mean.min() >= y.min() - width and mean.max() <= y.max() + width
    is_cut = model.posterior.functions(model.warped(x)).abs().amin(0) > 10 * y.abs().max()
    assert is_cut.any() and not prediction.extrapolates.any()
    for variance in (prediction.variance, model(x).variance):
        assert (variance[is_cut] > 0.9 * y.var(correction=0)).all()
    assert (before < 0.5 * y.std()).all()


def test_a_warp_that_is_flat_at_the_edge_does_not_make_predictions_outside_sure():
    torch.manual_seed(0)
    x = torch.rand(300, 2, dtype=torch.float64)
    x[:, 0] = (3 * torch.randn(300, dtype=torch.float64)).exp()
    y = torch.sin(x[:, 0].log()) + x[:, 1]
    model = tkrr.TKRR(x, y, gaussian(), rank=3, num_basis=12, warp=True)
    tkrr.fit_gibbs(model, num_warmup=20, num_draws=20, seed=0)
    width = x[:, 0].max() - x[:, 0].min()
    far = torch.tensor([[float(x[:, 0].max() + 2 * width), 0.5]], dtype=torch.float64)
    with torch.no_grad():
        assert float(model.warp(far)[0, 0] - x[:, 0].max()) < 0.1 * float(width)
        with pytest.warns(tkrr.ExtrapolationWarning):
            spread = float(model.predict(far).stddev)
    assert spread > 0.6 * float(y.std())


def test_variance_that_the_basis_misses_is_at_most_that_of_the_targets_in_kernels_that_the_model_chose():
    """Constants of several inputs may be large and their product enormous, although f is not."""
    model = _fitted("als")
    model.covar_module.outputscale = 1e8
    far = torch.tensor([[0.5, 50.0]], dtype=torch.float64)
    with pytest.warns(tkrr.TKRRWarning):
        variance = model.predict(far).variance
    targets = float(model.train_targets.var())
    assert targets / 2 < float(variance) < 4 * targets
