"""Features and variances of kernel trees against the kernels' own forward."""

from __future__ import annotations

import gpytorch
import pytest
import torch
from gpytorch.kernels import (
    AdditiveKernel,
    AdditiveStructureKernel,
    ConstantKernel,
    CosineKernel,
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    PolynomialKernel,
    ProductKernel,
    ProductStructureKernel,
    RBFKernel,
    ScaleKernel,
)

from gpytorch_tkrr import Domain, HilbertKernel, UnsupportedKernelError
from gpytorch_tkrr.features.expansion import OneInput, Product, Scaled, Sum
from gpytorch_tkrr.features.stationary import SpectralProducts

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*StructureKernel is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The last_dim_is_batch argument is deprecated:DeprecationWarning"),
]

# Kernels of three columns, all of which 30 functions per column represent well.
TREES = {
    "constant": lambda: ConstantKernel(),
    "linear": lambda: LinearKernel(),
    "linear_ard": lambda: LinearKernel(ard_num_dims=3),
    "polynomial": lambda: PolynomialKernel(power=3),
    "periodic": lambda: PeriodicKernel(active_dims=[2]),
    "periodic_ard": lambda: PeriodicKernel(ard_num_dims=2, active_dims=[0, 2]),
    "scaled": lambda: ScaleKernel(RBFKernel(active_dims=[1])),
    "scale_repeats_active_dims": lambda: ScaleKernel(ScaleKernel(RBFKernel(ard_num_dims=2, active_dims=[2, 0]))),
    "nested_active_dims": lambda: AdditiveKernel(
        ProductKernel(RBFKernel(active_dims=[1]), LinearKernel(active_dims=[0])),
        RBFKernel(active_dims=[0]),
    ),
    "sum_over_columns": lambda: AdditiveKernel(RBFKernel(active_dims=[0]), MaternKernel(active_dims=[1])),
    "sum_over_the_same": lambda: AdditiveKernel(RBFKernel(active_dims=[0]), ScaleKernel(MaternKernel(active_dims=[0]))),
    "additive_structure": lambda: AdditiveStructureKernel(ScaleKernel(RBFKernel()), num_dims=3),
    "additive_periodic": lambda: AdditiveStructureKernel(PeriodicKernel(), num_dims=3),
    "product_structure": lambda: ProductStructureKernel(RBFKernel(active_dims=[0, 1]), num_dims=2),
    "product_with_linear": lambda: ProductKernel(LinearKernel(active_dims=[0]), RBFKernel(active_dims=[0])),
    "product_with_sum": lambda: ProductKernel(
        AdditiveKernel(ConstantKernel(), RBFKernel(active_dims=[0])), RBFKernel(active_dims=[1])
    ),
    "periodic_by_rbf": lambda: ProductKernel(PeriodicKernel(active_dims=[0]), RBFKernel(active_dims=[0])),
    "anova": lambda: ProductKernel(
        *(AdditiveKernel(ConstantKernel(), LinearKernel(active_dims=[d]), RBFKernel(active_dims=[d])) for d in (0, 1))
    ),
}


def expand(kernel, num_basis=30, **kwargs):
    return HilbertKernel(kernel, Domain(torch.full((3,), 0.5), 3.5), num_basis, **kwargs).expansion()


@pytest.mark.parametrize("name", TREES)
def test_features_approximate_the_kernel(name):
    kernel = TREES[name]().double()
    expansion = expand(kernel)
    x = torch.rand(20, 3, dtype=torch.float64)
    features, variances = expansion.features(x), expansion.variances()
    assert features.shape == (20, expansion.num_functions)
    assert variances.shape == (expansion.num_functions,)
    assert (variances >= 0).all()
    exact = kernel(x, torch.cat([x, x[:1]])).to_dense()[:, :-1]
    assert torch.allclose((features * variances) @ features.mT, exact, atol=2e-3 * float(exact.detach().abs().max()))
    prior = expansion.prior_variance(x).expand(20)
    assert torch.allclose(prior, exact.diagonal(), rtol=1e-6)
    gradients = torch.autograd.grad(variances.sum() + features.sum(), list(kernel.parameters()))
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


def test_batch_of_kernels():
    shape = torch.Size([2])
    kernel = AdditiveKernel(
        ScaleKernel(RBFKernel(batch_shape=shape, active_dims=[0]), batch_shape=shape),
        PeriodicKernel(batch_shape=shape, active_dims=[1]),
        LinearKernel(batch_shape=shape),
        ConstantKernel(batch_shape=shape),
        PolynomialKernel(power=2, batch_shape=shape),
    ).double()
    kernel.kernels[0].outputscale = torch.tensor([1.0, 2.0])
    kernel.kernels[1].period_length = torch.tensor([1.0, 2.0]).reshape(2, 1, 1)
    kernel.kernels[3].constant = torch.tensor([[1.0], [2.0]])
    kernel.kernels[4].offset = torch.tensor([[1.0], [2.0]])
    expansion = expand(kernel)
    x = torch.rand(10, 3, dtype=torch.float64)
    features, variances = expansion.features(x), expansion.variances()
    approximate = (features * variances.unsqueeze(-2)) @ features.mT
    exact = kernel(x, torch.cat([x, x[:1]])).to_dense()[..., :-1]
    assert approximate.shape == (2, 10, 10)
    assert torch.allclose(approximate, exact, atol=5e-3)
    assert torch.allclose(expansion.prior_variance(x), exact.diagonal(dim1=-2, dim2=-1))


def test_structure_is_kept():
    tree = AdditiveKernel(
        RBFKernel(active_dims=[0]), ScaleKernel(MaternKernel(active_dims=[0])), PeriodicKernel(active_dims=[1])
    )
    expansion = expand(tree, 10)
    assert isinstance(expansion, Sum)
    assert [type(part) for part in expansion.parts] == [SpectralProducts, OneInput]  # the first two share one basis
    assert expansion.num_functions == 10 + 11
    product = expand(ProductKernel(RBFKernel(active_dims=[0]), LinearKernel(active_dims=[1])), 10)
    assert isinstance(product, Product)
    assert product.num_functions == 10
    assert isinstance(expand(ScaleKernel(LinearKernel())), Scaled)


def test_unsupported_kernels_are_named_where_they_stand():
    kernel = AdditiveKernel(RBFKernel(), ScaleKernel(ProductKernel(LinearKernel(), CosineKernel())))
    with pytest.raises(
        UnsupportedKernelError, match=r"kernels\[1\]\.base_kernel\.kernels\[1\].*CosineKernel"
    ) as caught:
        expand(kernel)
    assert "active_dims=(d,)" in str(caught.value)


def test_a_subclass_with_its_own_forward_inherits_nothing():
    class Shifted(LinearKernel):
        def forward(self, x1, x2, **params):
            return super().forward(x1 - 1, x2 - 1, **params)

    class Renamed(LinearKernel):
        pass

    with pytest.raises(UnsupportedKernelError, match="Shifted"):
        expand(Shifted())
    assert expand(Renamed()).num_functions == 3


def test_polynomials_of_other_powers_are_refused():
    kernel = PolynomialKernel(power=2)
    kernel.power = 1.5
    with pytest.raises(UnsupportedKernelError, match="power"):
        expand(kernel)


def test_nonstationary_gpytorch_kernels_are_refused():
    for kernel in (gpytorch.kernels.ArcKernel(RBFKernel()), gpytorch.kernels.RFFKernel(5)):
        with pytest.raises(UnsupportedKernelError):
            expand(kernel)
