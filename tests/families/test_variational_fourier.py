"""Variational Fourier features against the formulas of the paper, with inner products by numerical integration."""

from __future__ import annotations

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.kernels import MaternKernel, ScaleKernel
from models import GP

import gpytorch_tkrr as tkrr

LOWER, UPPER = -1.0, 2.0


def derivatives(num, x):
    """Values and three derivatives of the functions 1, cos, sin, cos, ..., `(4, num, n)`."""
    m = np.arange(num)[:, None]
    omega = 2 * np.pi * ((m + 1) // 2) / (UPPER - LOWER)
    shift = np.where((m > 0) & (m % 2 == 0), -np.pi / 2, 0.0)  # sin(t) = cos(t - pi / 2); a derivative adds pi / 2
    return np.stack([omega**k * np.cos(omega * (x - LOWER) + shift + k * np.pi / 2) for k in range(4)])


def inner_products(nu, length, variance, num):
    """
    Of the functions, in the Hilbert space of a Matern kernel on an interval, as Hensman et al. (2018) give it for
    smoothness 1/2, 3/2 and 5/2.
    """
    rate = np.sqrt(2 * nu) / length
    nodes, weights = np.polynomial.legendre.leggauss(200)
    g, g1, g2, g3 = derivatives(num, LOWER + (nodes + 1) * (UPPER - LOWER) / 2)
    a, a1, a2, _ = derivatives(num, np.array([LOWER]))
    if nu == 0.5:
        image, front, ends = rate * g + g1, 1 / (2 * rate), a @ a.T
    elif nu == 1.5:
        image, front = rate**2 * g + 2 * rate * g1 + g2, 1 / (4 * rate**3)
        ends = a @ a.T + a1 @ a1.T / rate**2
    else:
        image, front = rate**3 * g + 3 * rate**2 * g1 + 3 * rate * g2 + g3, 3 / (16 * rate**5)
        ends = 9 / 8 * a @ a.T + 9 / (8 * rate**4) * a2 @ a2.T
        ends = ends + 3 / rate**2 * (a1 @ a1.T + (a2 @ a.T + a @ a2.T) / 8)
    return (front * (image * weights) @ image.T * (UPPER - LOWER) / 2 + ends) / variance


def make(nu, length, variance, num_basis):
    base = ScaleKernel(MaternKernel(nu=nu)).double()
    base.outputscale, base.base_kernel.lengthscale = (torch.tensor(v, dtype=torch.float64) for v in (variance, length))
    domain = tkrr.Domain(torch.tensor([(LOWER + UPPER) / 2]), torch.tensor([(UPPER - LOWER) / 2]))
    return base, tkrr.HilbertKernel(base, domain, num_basis, basis=tkrr.VariationalFourier())


@pytest.mark.parametrize("length", [0.05, 0.7, 30.0])
@pytest.mark.parametrize("nu", [0.5, 1.5, 2.5])
def test_covariance_of_the_weights_is_the_inverse_of_published_inner_products(nu, length):
    _, kernel = make(nu, length, 1.7, 9)
    gram = inner_products(nu, length, 1.7, 9)
    scale = 1 / np.sqrt(np.diag(gram))  # their sizes differ by many powers of ten
    product = kernel.expansion().covariance().to_dense().detach().numpy() @ gram
    np.testing.assert_allclose(product * scale / scale[:, None], np.eye(9), atol=1e-9)


@pytest.mark.filterwarnings("ignore::gpytorch_tkrr.ApproximationWarning", "ignore::gpytorch_tkrr.OutOfDomainWarning")
@pytest.mark.parametrize("nu", [0.5, 1.5, 2.5])
def test_predictions_are_those_of_the_published_model(nu):
    """
    Mean, variance and density of new targets from dense matrices: Q = Kfu Kuu^-1 Kuf, its posterior, plus k - Q at new
    inputs. Noise at the training rows is s^2 plus the mean of k - Q, as everywhere in this package.
    """
    length, variance, noise, num_basis = 0.4, 1.7, 0.05, 31
    _, kernel = make(nu, length, variance, num_basis)
    x = torch.linspace(-0.3, 1.2, 60, dtype=torch.float64).unsqueeze(-1)
    y = torch.sin(5 * x[:, 0]) + 0.1 * torch.cos(40 * x[:, 0])
    z = torch.linspace(-0.25, 1.15, 17, dtype=torch.float64).unsqueeze(-1)
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    likelihood.noise = torch.tensor(noise, dtype=torch.float64)
    model = GP(x, y, likelihood, kernel).double().eval()
    with torch.no_grad():
        prediction = likelihood(model(z))

    kuu = inner_products(nu, length, variance, num_basis)
    features = [derivatives(num_basis, t[:, 0].numpy())[0].T for t in (x, z)]
    scale = 1 / np.sqrt(np.diag(kuu))
    left, right = (f * scale for f in features)
    inverse = np.linalg.inv(kuu * scale * scale[:, None])
    qff, qzf = left @ inverse @ left.T, right @ inverse @ left.T
    noisy = qff + (noise + np.mean(variance - np.diag(qff))) * np.eye(60)
    mean = qzf @ np.linalg.solve(noisy, y.numpy())
    var = variance - np.einsum("ij,ji->i", qzf, np.linalg.solve(noisy, qzf.T)) + noise
    np.testing.assert_allclose(prediction.mean.numpy(), mean, atol=1e-8)
    np.testing.assert_allclose(prediction.variance.numpy(), var, atol=1e-8)
    targets = np.sin(5 * z[:, 0].numpy())
    nlpd = np.mean(0.5 * np.log(2 * np.pi * var) + 0.5 * (targets - mean) ** 2 / var)
    marginals = torch.distributions.Normal(prediction.mean, prediction.variance.sqrt())
    assert abs(-float(marginals.log_prob(torch.from_numpy(targets)).mean()) - nlpd) < 1e-8


@torch.no_grad()
def test_what_is_left_out_is_positive_definite():
    base, kernel = make(1.5, 0.4, 1.0, 15)
    x = torch.linspace(-0.9, 1.9, 40, dtype=torch.float64).unsqueeze(-1)
    expansion = kernel.expansion()
    features = expansion.features(x)
    rest = base(x).to_dense() - expansion.covariance().between(features, features)
    assert float(torch.linalg.eigvalsh(rest).min()) > -1e-10


def test_a_batch_of_kernels():
    shape = torch.Size([2])
    base = ScaleKernel(MaternKernel(nu=2.5, batch_shape=shape), batch_shape=shape).double()
    base.base_kernel.lengthscale = torch.tensor([0.4, 0.9]).reshape(2, 1, 1)
    base.outputscale = torch.tensor([1.0, 3.0])
    kernel = tkrr.HilbertKernel(base, tkrr.Domain(torch.tensor([0.5]), 4.0), 81, basis=tkrr.VariationalFourier())
    x = torch.rand(10, 1, dtype=torch.float64)
    torch.testing.assert_close(kernel(x).to_dense(), base(x).to_dense(), atol=1e-3, rtol=0)
