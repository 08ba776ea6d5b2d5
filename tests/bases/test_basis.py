"""One-dimensional bases."""

from __future__ import annotations

import math

import pytest
import torch

from gpytorch_tkrr.bases.basis import ConcatenatedBasis, ConstantBasis, FourierBasis, MonomialBasis, SineBasis

BASES = [
    SineBasis(0.3, 1.7, 6),
    ConstantBasis(),
    MonomialBasis(3, 0.5),
    FourierBasis(0.8, 3),
    ConcatenatedBasis(ConstantBasis(), MonomialBasis(), SineBasis(0.0, 2.0, 3)),
]


@pytest.mark.parametrize("basis", BASES, ids=lambda b: type(b).__name__)
def test_shapes_types_and_gradients(basis):
    x = torch.rand(2, 5)
    features = basis(x)
    assert features.shape == (2, 5, basis.num_functions)
    assert features.dtype == torch.float64
    inputs = torch.rand(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(basis, (inputs,))


def test_sines_are_orthonormal_eigenfunctions():
    basis = SineBasis(0.3, 1.7, 6)
    x = torch.linspace(0.3 - 1.7, 0.3 + 1.7, 20_001, dtype=torch.float64)
    features = basis(x)
    inner = torch.trapezoid(features.unsqueeze(-1) * features.unsqueeze(-2), x, dim=0)
    assert torch.allclose(inner, torch.eye(6, dtype=torch.float64), atol=1e-6)
    step = x[1] - x[0]
    second = (features[2:] - 2 * features[1:-1] + features[:-2]) / step**2  # - phi'' = w^2 phi
    assert torch.allclose(-second, basis.frequencies.square() * features[1:-1], atol=1e-4)


def test_sines_vanish_on_and_outside_the_edge():
    basis = SineBasis(0.3, 1.7, 6)
    x = torch.tensor([-1e9, -1.4, 2.0, 2.1, 1e9], dtype=torch.float64)
    assert basis(x).abs().max() < 1e-14


def test_fourier_functions_have_the_period():
    basis = FourierBasis(0.8, 3)
    x = torch.rand(9, dtype=torch.float64)
    assert torch.allclose(basis(x), basis(x + 0.8))
    assert torch.allclose(basis(x)[:, 1], torch.cos(2 * math.pi * x / 0.8))


def test_fourier_basis_takes_a_batch_of_periods_and_their_gradient():
    period = torch.tensor([0.5, 1.5], dtype=torch.float64, requires_grad=True)
    x = torch.rand(4, dtype=torch.float64)
    assert FourierBasis(period, 2)(x).shape == (2, 4, 5)
    assert torch.autograd.gradcheck(lambda p: FourierBasis(p, 2)(x), (period,))
