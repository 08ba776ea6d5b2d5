from __future__ import annotations

import gpytorch
import pytest
import torch

from gpytorch_tkrr import SizeError
from gpytorch_tkrr.model.anova import CenteredLinearKernel, anova_kernel


def test_kernel_is_the_product_of_its_parts():
    kernel = anova_kernel(3, center=torch.tensor([0.0, 1.0, 2.0]), half_range=2.0, outputscale=3.0).double()
    x1, x2 = torch.randn(5, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    expected = kernel.outputscale
    for d, part in enumerate(kernel.base_kernel.kernels):
        constant, linear, smooth = part.kernels
        a, b = x1[:, d : d + 1], x2[:, d : d + 1].mT
        gauss = torch.exp(-0.5 * ((a - b) / smooth.base_kernel.lengthscale) ** 2)
        expected = expected * (constant.constant + linear.variance * (a - d) * (b - d) + smooth.outputscale * gauss)
    torch.testing.assert_close(kernel(x1, x2).to_dense(), expected)
    torch.testing.assert_close(kernel(x1).to_dense()[:2, 2:], kernel(x1[:2], x1[2:]).to_dense())


def test_one_dimension_and_many():
    for num_dims in (1, 96):
        kernel = anova_kernel(num_dims, outputscale=2.0)
        value = kernel(torch.zeros(1, num_dims)).to_dense()
        torch.testing.assert_close(value, torch.full((1, 1), 2.0), rtol=1e-4, atol=0)


def test_centered_linear_kernel_travels_in_the_state_dict():
    kernel = CenteredLinearKernel(center=2.5, variance_prior=gpytorch.priors.GammaPrior(2.0, 1.0))
    other = CenteredLinearKernel()
    other.load_state_dict(kernel.state_dict(), strict=False)
    assert float(other.center) == 2.5
    x = torch.rand(4, 1)
    torch.testing.assert_close(kernel(x)[:2, 1:].to_dense(), (kernel.variance * (x[:2] - 2.5) * (x[1:] - 2.5).mT))


@pytest.mark.parametrize("name", ["center", "half_range"])
def test_sizes_are_checked(name):
    with pytest.raises(SizeError, match=rf"{name} must be a number or have 3 entries; got shape \(2,\)"):
        anova_kernel(3, **{name: torch.ones(2)})
