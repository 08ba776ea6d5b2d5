"""Bessel functions against scipy and series, and their gradients against finite differences."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.special
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpytorch_tkrr.features.bessel import bessel_j0, count_harmonics, log_bessel_k, periodic_variances, scaled_bessel


def test_scaled_bessel_equals_scipy_and_broadcasts():
    order, a = torch.arange(6), torch.rand(3, 1, dtype=torch.float64) * 20
    expected = scipy.special.ive(order.numpy(), a.numpy())
    assert scaled_bessel(order, a).shape == (3, 6)
    np.testing.assert_allclose(scaled_bessel(order, a).numpy(), expected, rtol=1e-14)


def test_scaled_bessel_is_twice_differentiable():
    order = torch.arange(4)
    a = torch.tensor([[0.3], [2.0], [40.0]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a: scaled_bessel(order, a), (a,))
    assert torch.autograd.gradgradcheck(lambda a: scaled_bessel(order, a), (a,))


def test_float32_arguments_are_computed_in_float64_and_keep_their_gradient():
    a = torch.tensor(1.5, requires_grad=True)
    value = scaled_bessel(torch.tensor(2), a)
    value.backward()
    assert value.dtype == torch.float64
    assert a.grad is not None and a.grad.dtype == torch.float32


@pytest.mark.parametrize("lengthscale", [0.05, 0.7, 10.0])
def test_periodic_variances_are_the_cosine_series_of_the_periodic_function(lengthscale):
    a = torch.tensor(1 / lengthscale, dtype=torch.float64)
    t = torch.linspace(0, 1, 41, dtype=torch.float64)
    num_harmonics = count_harmonics(a)
    series = torch.cos(2 * torch.pi * t[:, None] * torch.arange(num_harmonics + 1)) @ periodic_variances(
        a, num_harmonics
    )
    torch.testing.assert_close(series, torch.exp(-2 * torch.sin(torch.pi * t) ** 2 / lengthscale), rtol=0, atol=2e-12)


@given(log_a=st.floats(-6, 9), log_tol=st.floats(-12, -2))
def test_count_harmonics_is_the_smallest_that_leaves_out_at_most_the_tolerance(log_a, log_tol):
    a, tol = torch.tensor(log_a, dtype=torch.float64).exp(), 10**log_tol
    count = count_harmonics(a, tol)
    variances = periodic_variances(a, count + 200)
    assert variances[count + 1 :].sum() <= tol * (1 + 1e-9)
    assert count == 0 or variances[count:].sum() > tol


def test_count_harmonics_serves_the_largest_of_a_batch():
    batch = torch.tensor([[0.1, 30.0], [2.0, 1.0]])
    assert count_harmonics(batch) == count_harmonics(torch.tensor(30.0))


def test_bessel_j0_equals_scipy_and_has_a_gradient():
    x = torch.linspace(0, 30, 50, dtype=torch.float64, requires_grad=True)
    np.testing.assert_allclose(bessel_j0(x).detach().numpy(), scipy.special.jv(0, x.detach().numpy()), atol=1e-14)
    assert torch.autograd.gradcheck(bessel_j0, (x,))


@pytest.mark.parametrize("order", [-1.4, -1.0, -0.5, 0.0, 0.01, 0.3, 1.0, 4.5, 48.5])
def test_log_bessel_k_equals_scipy(order):
    x = np.logspace(-12 if abs(order) < 5 else -3, 3, 80)
    expected = np.log(scipy.special.kve(order, x)) - x + order * np.log(x)
    actual = log_bessel_k(torch.tensor(order, dtype=torch.float64), torch.as_tensor(x))
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-13, atol=1e-12)


def test_log_bessel_k_has_gradients_in_order_and_argument():
    order = torch.tensor([-1.3, -0.5, 0.0, 0.2, 3.0, 40.0], dtype=torch.float64, requires_grad=True)
    x = torch.tensor([0.01, 0.5, 1.0, 7.0, 0.3, 20.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(log_bessel_k, (order, x))


def test_log_bessel_k_at_zero_is_its_limit_or_infinite():
    order = torch.tensor([-0.5, 0.0, 0.5, 3.0], dtype=torch.float64, requires_grad=True)
    at_zero = log_bessel_k(order, torch.zeros(4))
    assert torch.isinf(at_zero[:2]).all()
    torch.testing.assert_close(at_zero[2:], log_bessel_k(order, torch.full((4,), 1e-14))[2:], rtol=0, atol=1e-12)
    (gradient,) = torch.autograd.grad(at_zero[2:].sum(), order)
    assert torch.isfinite(gradient).all()
