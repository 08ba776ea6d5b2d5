"""Random small CP problems: fits are finite, or refused by a sentence, and do not depend on the units of the data.

The default profile runs a few hundred cheap cases; ``pytest tests/fuzz --hypothesis-profile=long`` runs 100 000.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import gpytorch
import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given

import gpytorch_tkrr as tkrr

FITS = {
    "als": lambda model: tkrr.fit_als(model, max_sweeps=1, seed=0),
    "learned": lambda model: tkrr.fit_als(model, max_sweeps=2, seed=0, learn_hyperparameters=True),
    "gibbs": lambda model: tkrr.fit_gibbs(model, num_draws=4, num_warmup=1, seed=0),
}


@dataclass
class Problem:
    """Rows in units of their own, and what a model of them is made of."""

    x: torch.Tensor
    y: torch.Tensor
    rank: int

    def fit(self, fit, likelihood, shift=0.0, scale=1.0, offset=0.0, size=1.0, dtype=torch.float64):
        """Predictive mean and standard deviation of f at the rows, in the units of the problem."""
        x, y = (scale * self.x + shift).to(dtype), (size * self.y + offset).to(dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # poor fits are to be expected
            model = tkrr.TKRR(x, y, likelihood, rank=self.rank, num_basis=5)
            FITS[fit](model)
            with torch.no_grad():
                prediction = model.eval()(x)
                variance = prediction.lazy_covariance_matrix.diagonal(dim1=-1, dim2=-2)
                return (prediction.mean.double() - offset) / size, variance.double().sqrt() / size


def gaussian(size=1.0):
    """A likelihood whose noise and bound have the units of the targets."""
    bound, noise = torch.tensor([1e-6, 0.1], dtype=torch.float64) * size**2
    likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=gpytorch.constraints.GreaterThan(bound))
    likelihood.double().noise = noise
    return likelihood


@st.composite
def problems(draw, max_dims=60):
    """Continuous, binary, constant and repeated columns, one row to many, few columns to many."""
    is_wide = max_dims > 6 and draw(st.integers(0, 19)) == 19  # many inputs take long
    num_dims = draw(st.integers(7, max_dims) if is_wide else st.integers(1, min(max_dims, 6)))
    num_rows = draw(st.one_of(st.integers(1, 5), st.integers(1, 40)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    x = torch.rand(num_rows, num_dims, generator=generator, dtype=torch.float64)
    for d, kind in enumerate(draw(st.lists(st.sampled_from("cbkr"), max_size=num_dims))):
        if kind == "b":
            x[:, d] = x[:, d].round()
        elif kind == "k":
            x[:, d] = x[0, d]
        elif kind == "r":
            x[:, d] = x[:, 0]
    y = torch.sin(4 * x[:, 0]) * x[:, -1] + 0.1 * torch.randn(num_rows, generator=generator, dtype=torch.float64)
    if draw(st.integers(0, 9)) == 0:
        y = torch.full_like(y, 0.5)
    return Problem(x, y, draw(st.integers(1, 4)))


#: Powers of ten that a unit may be.
exponents = st.integers(-12, 12)


@pytest.mark.parametrize("fit", FITS)
@given(problem=problems(), dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]))
def test_fits_are_finite(fit, problem, dtype):
    mean, deviation = problem.fit(fit, gpytorch.likelihoods.GaussianLikelihood(), dtype=dtype)
    assert torch.isfinite(mean).all() and torch.isfinite(deviation).all() and (deviation >= 0).all()


@pytest.mark.parametrize("fit", FITS)
@given(problem=problems(max_dims=8), x_power=exponents, y_power=exponents, shift=st.integers(-100, 100))
def test_fits_do_not_depend_on_units(fit, problem, x_power, y_power, shift):
    assume(problem.y.std(correction=0) > 1e-3 if len(problem.y) > 1 else False)  # constant targets are no scale
    scale, size = 10.0**x_power, 10.0**y_power
    mean, deviation = problem.fit(fit, gaussian())
    moved_mean, moved_deviation = problem.fit(fit, gaussian(size), shift * scale, scale, shift * size, size)
    spread = float(problem.y.std(correction=0))
    torch.testing.assert_close(moved_mean, mean, rtol=0.0, atol=1e-2 * spread)
    if len(mean) > 2 * problem.rank:  # with fewer rows components are alike, and rounding decides their covariance
        torch.testing.assert_close(moved_deviation, deviation, rtol=0.1, atol=0.1 * spread)


@pytest.mark.parametrize("fit", FITS)
@given(problem=problems(max_dims=3), x_power=st.integers(-320, 300), y_power=st.integers(-320, 300))
def test_extreme_units_are_finite_or_refused(fit, problem, x_power, y_power):
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    try:
        mean, deviation = problem.fit(fit, likelihood, scale=10.0**x_power, size=10.0**y_power)
    except tkrr.InputError:
        assert abs(x_power) > 90 or abs(y_power) > 90
    else:
        assert torch.isfinite(mean * 10.0**y_power).all() and not deviation.isnan().any()
