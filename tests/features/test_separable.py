from __future__ import annotations

import warnings

import pytest
import torch
from gpytorch.kernels import (
    AdditiveKernel,
    AdditiveStructureKernel,
    ConstantKernel,
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    ProductKernel,
    ProductStructureKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
    SpectralMixtureKernel,
)

from gpytorch_tkrr.bases.domain import Domain
from gpytorch_tkrr.errors import SizeError, UnsupportedKernelError
from gpytorch_tkrr.features.separable import separate
from gpytorch_tkrr.model.anova import anova_kernel

DOMAIN = Domain(0.0, 6.0)


def represented(kernel, x, num_basis=60):
    """The kernel matrix that the modes stand for."""
    separable = separate(kernel, DOMAIN, num_basis, x.shape[-1])
    product = separable.outputscale()
    for d, mode in enumerate(separable.modes):
        features = mode.basis(x[:, d])
        product = product * ((features * mode.variances()) @ features.mT)
    return product


def rbf(*dims, ard=False, lengthscale=0.8):
    kernel = RBFKernel(active_dims=dims or None, ard_num_dims=len(dims) if ard else None)
    kernel.lengthscale = torch.linspace(lengthscale, 1.2, len(dims)) if ard else lengthscale
    return kernel


def constant(value, *dims):
    kernel = ConstantKernel(active_dims=dims or None)
    kernel.constant = torch.tensor(value)
    return kernel


def scaled(kernel, value):
    kernel = ScaleKernel(kernel)
    kernel.outputscale = value
    return kernel


def periodic(*dims):
    kernel = PeriodicKernel(active_dims=dims)
    kernel.period_length, kernel.lengthscale = 1.7, 0.9
    return kernel


def mixture():
    kernel = SpectralMixtureKernel(num_mixtures=2, ard_num_dims=3)
    kernel.mixture_means = torch.rand(2, 1, 3) * 0.3
    kernel.mixture_scales = torch.rand(2, 1, 3) * 0.1 + 0.1
    kernel.mixture_weights = torch.tensor([0.7, 1.1])
    return kernel


SEPARABLE = {
    "shared": lambda: scaled(RBFKernel(), 2.0),
    "ard": lambda: scaled(scaled(rbf(0, 1, 2, ard=True), 0.5), 3.0),
    "product": lambda: rbf(0) * rbf(2, 1, ard=True),
    "inner scales": lambda: scaled(ProductKernel(scaled(rbf(0, 1, ard=True), 2.0), scaled(rbf(2), 0.3)), 1.5),
    "constant factor": lambda: ProductKernel(constant(2.5), rbf(0, 1, 2)),
    "per-dimension sums": lambda: (
        (constant(0.5, 0) + LinearKernel(active_dims=(0,)) + rbf(0))
        * (rbf(1) + scaled(rbf(1, lengthscale=1.5), 2.0))
        * rbf(2)
    ),
    "constant in a sum": lambda: ProductKernel(AdditiveKernel(ConstantKernel(), rbf(0)), rbf(1, 2)),
    "periodic": lambda: periodic(0, 1) * rbf(2),
    "mixture": mixture,
    "nested columns": lambda: ScaleKernel(ProductKernel(rbf(1), rbf(0)), active_dims=(2, 0)) * rbf(1),
    "unseen column": lambda: rbf(0, 2),
    "anova": lambda: anova_kernel(3, center=0.3, half_range=2.0),
}


@pytest.mark.parametrize("name", SEPARABLE)
def test_product_of_modes_is_the_kernel(name):
    kernel = SEPARABLE[name]().double()
    x = torch.rand(15, 3, dtype=torch.float64) * 2 - 1
    separable = separate(kernel, DOMAIN, 60, 3)
    assert not separable.radial
    # Evaluated between two halves: on the diagonal GPyTorch multiplies low-rank kernels approximately.
    torch.testing.assert_close(represented(kernel, x)[:7, 7:], kernel(x[:7], x[7:]).to_dense(), rtol=1e-4, atol=1e-4)
    exact = separable.outputscale()
    for d, mode in enumerate(separable.modes):
        exact = exact * mode.prior_variance(x[:, d])
    torch.testing.assert_close(exact, kernel(x, diag=True), rtol=1e-6, atol=1e-6)


def test_product_structure_kernel():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        kernel = ProductStructureKernel(scaled(rbf(), 1.3), num_dims=2).double()
        x = torch.rand(9, 2, dtype=torch.float64)
        torch.testing.assert_close(represented(kernel, x), kernel(x).to_dense(), rtol=1e-5, atol=1e-5)


def rational_quadratic(num_dims):
    kernel = RQKernel(ard_num_dims=num_dims)
    kernel.alpha = 5.0  # light tails: the box is not infinite
    return kernel


@pytest.mark.parametrize("leaf", [lambda n: MaternKernel(nu=2.5, ard_num_dims=n), rational_quadratic])
def test_radial_kernels_become_products_and_are_named(leaf):
    kernel = scaled(leaf(2), 2.0).double()
    kernel.base_kernel.lengthscale = torch.tensor([[0.7, 1.3]])
    x = torch.rand(9, 2, dtype=torch.float64)
    separable = separate(kernel, DOMAIN, 300, 2)
    assert len(separable.radial) == 1 and type(kernel.base_kernel).__name__ in separable.radial[0]
    expected = torch.full((9, 9), 2.0, dtype=torch.float64)
    for d in range(2):
        one = leaf(1).double()
        one.lengthscale = kernel.base_kernel.lengthscale[..., d : d + 1].detach()
        expected = expected * one(x[:, d : d + 1]).to_dense()
    torch.testing.assert_close(represented(kernel, x, 300), expected, rtol=1e-2, atol=1e-2)


def test_one_dimensional_matern_is_not_radial():
    assert not separate(MaternKernel(), DOMAIN, 10, 1).radial
    assert not separate(MaternKernel(active_dims=(1,)) * RBFKernel(active_dims=(0,)), DOMAIN, 10, 2).radial


@pytest.mark.parametrize(
    "kernel, message",
    [
        (lambda: rbf(0) + rbf(1), "sum over input dimensions"),
        (lambda: scaled(rbf(0, 1) + rbf(0, 1), 1.0), r"ScaleKernel.base_kernel: AdditiveKernel is a sum"),
        (lambda: ProductKernel(rbf(0), AdditiveKernel(rbf(1), rbf(2))), r"kernels\[1\]: AdditiveKernel is a sum"),
        (lambda: LinearKernel(), "LinearKernel over 3"),
        (lambda: rbf(0, 1) * rbf(1), "two factors"),
        (lambda: RBFKernel(batch_shape=torch.Size([2])), "batch_shape"),
    ],
)
def test_what_is_not_separable_raises_and_names_the_node(kernel, message):
    with pytest.raises(UnsupportedKernelError, match=message):
        separate(kernel(), DOMAIN, 5, 3)


def test_additive_structure_kernel_raises():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        kernel = AdditiveStructureKernel(rbf(), num_dims=2)
    with pytest.raises(UnsupportedKernelError, match="AdditiveStructureKernel"):
        separate(kernel, DOMAIN, 5, 2)


@pytest.mark.parametrize("num_basis", [0, [3], [3, -1]])
def test_number_of_functions_is_checked(num_basis):
    with pytest.raises(SizeError):
        separate(RBFKernel(), DOMAIN, num_basis, 2)


def test_variances_carry_gradients_to_the_raw_parameters():
    kernel = anova_kernel(2).double()
    separable = separate(kernel, DOMAIN, 8, 2)
    (sum(mode.variances().sum() for mode in separable.modes) + separable.outputscale()).backward()
    assert all(parameter.grad is not None and parameter.grad.abs() > 0 for parameter in kernel.parameters())
