"""One tree, two readers: what one of them represents the other one represents as well."""

from __future__ import annotations

import warnings

import pytest
import torch
from gpytorch.kernels import (
    AdditiveKernel,
    AdditiveStructureKernel,
    ConstantKernel,
    Kernel,
    LinearKernel,
    PeriodicKernel,
    PiecewisePolynomialKernel,
    PolynomialKernel,
    ProductKernel,
    ProductStructureKernel,
    RBFKernel,
    ScaleKernel,
)

from gpytorch_tkrr import (
    CenteredLinearKernel,
    Domain,
    HilbertKernel,
    InputError,
    UnsupportedKernelError,
    anova_kernel,
    register_finite_basis,
)
from gpytorch_tkrr.bases.basis import Basis, MonomialBasis
from gpytorch_tkrr.features.expansion import Term
from gpytorch_tkrr.features.separable import separate
from gpytorch_tkrr.features.tree import Node

DOMAIN = Domain(torch.full((2,), 0.5), 3.5)


def quietly(make):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return make()


def all_at_once(kernel, x, num_basis):
    expansion = HilbertKernel(kernel, DOMAIN, num_basis).expansion(x.shape[-1])
    features = expansion.features(x)
    return (features * expansion.variances()) @ features.mT


def input_by_input(kernel, x, num_basis):
    separable = separate(kernel, DOMAIN, num_basis, x.shape[-1])
    product = separable.outputscale()
    for d, mode in enumerate(separable.modes):
        features = mode.basis(x[:, d])
        product = product * ((features * mode.variances()) @ features.mT)
    return product


# Kernels of two columns that both readers take literally.
BOTH = {
    "anova": lambda: anova_kernel(2, center=0.4, half_range=0.5),
    "linear of one column": lambda: LinearKernel(active_dims=1),
    "centered": lambda: CenteredLinearKernel(0.3, active_dims=0) + ConstantKernel(),
    "polynomial of one column": lambda: PolynomialKernel(power=3, active_dims=0) * RBFKernel(active_dims=1),
    "periodic": lambda: PeriodicKernel(ard_num_dims=2),
    "two factors on one column": lambda: RBFKernel(active_dims=0) * PeriodicKernel(active_dims=0),
    "product structure with two lengthscales": lambda: ProductStructureKernel(RBFKernel(ard_num_dims=2), num_dims=2),
    "sum of a product and a constant": lambda: AdditiveKernel(
        ProductKernel(RBFKernel(active_dims=1), PeriodicKernel(active_dims=1)), ScaleKernel(ConstantKernel())
    ),
}


@pytest.mark.parametrize("name", BOTH)
def test_both_readers_represent_the_kernel(name):
    kernel = quietly(BOTH[name]).double()
    for parameter in kernel.parameters():
        parameter.data += 0.1 * torch.arange(parameter.numel()).reshape(parameter.shape)
    x = torch.rand(15, 2, dtype=torch.float64)
    exact = quietly(lambda: kernel(x, torch.cat([x, x[:1]])).to_dense()[:, :-1])
    tolerance = 1e-3 * float(exact.detach().abs().max())
    torch.testing.assert_close(all_at_once(kernel, x, 40), exact, rtol=0, atol=tolerance)
    torch.testing.assert_close(input_by_input(kernel, x, 200), exact, rtol=0, atol=tolerance)


@pytest.mark.parametrize("num_dims", [1, 2, 3])
def test_the_default_kernel_of_a_cp_model_as_a_hilbert_kernel(num_dims):
    x = torch.rand(12, num_dims, dtype=torch.float64)
    base = anova_kernel(num_dims, center=0.5, half_range=0.5).double()
    kernel = HilbertKernel(base, Domain.from_data(x, boundary_factor=3.0), 16)
    assert kernel.expansion(num_dims).num_functions == 18**num_dims
    torch.testing.assert_close(kernel(x).to_dense(), base(x).to_dense(), rtol=0, atol=1e-4)
    gradients = torch.autograd.grad(kernel(x).to_dense().sum(), list(base.parameters()))
    expected = torch.autograd.grad(base(x).to_dense().sum(), list(base.parameters()))
    for gradient, exact in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, exact, rtol=1e-2, atol=1e-2)


class StepKernel(Kernel):
    """v h(x) h(x') in each column, with h the step at 1/2, multiplied over columns."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.register_parameter("raw_variance", torch.nn.Parameter(torch.zeros(())))

    def forward(self, x1, x2, diag=False, **params):
        left, right = ((x > 0.5).to(x).prod(-1) for x in (x1, x2))
        product = left * right if diag else left.unsqueeze(-1) * right.unsqueeze(-2)
        return self.raw_variance.exp() ** x1.shape[-1] * product


class StepBasis(Basis):
    num_functions = 1

    def __call__(self, x):
        return (x > 0.5).double().unsqueeze(-1)


def test_a_kernel_with_a_finite_basis_is_registered_once():
    @register_finite_basis(StepKernel)
    class StepTerm(Term):
        basis = StepBasis()

        def __init__(self, kernel, position, num_basis):
            self.kernel = kernel

        def variances(self):
            return self.kernel.raw_variance.exp().double().reshape(1)

        def prior_variance(self, x):
            return self.variances() * (x > 0.5)

    kernel = ProductKernel(StepKernel(), AdditiveKernel(ConstantKernel(), RBFKernel(active_dims=1))).double()
    x = torch.rand(9, 2, dtype=torch.float64)
    torch.testing.assert_close(all_at_once(kernel, x, 30), kernel(x).to_dense(), rtol=0, atol=1e-4)
    alone = StepKernel().double()
    torch.testing.assert_close(input_by_input(alone, x, 3), alone(x).to_dense())


def test_only_kernel_classes_are_registered():
    with pytest.raises(TypeError, match="subclass of gpytorch"):
        register_finite_basis(MonomialBasis)


def test_active_dims_of_nested_nodes_name_columns_of_the_root():
    inner = ProductKernel(RBFKernel(active_dims=1), RBFKernel(active_dims=0))
    root = Node.root(AdditiveKernel(ScaleKernel(inner, active_dims=(3, 1)), ConstantKernel()), 4)
    scaled, constant = root.children()
    assert [child.columns for child in scaled.base().children()] == [(1,), (3,)]
    assert scaled.base().children()[0].path == "AdditiveKernel.kernels[0].base_kernel.kernels[0]"
    assert root.support() == {1, 3} and constant.support() == set()


def test_columns_that_are_not_there_are_named():
    kernel = ScaleKernel(ProductKernel(RBFKernel(active_dims=0), RBFKernel(active_dims=5)))
    for read in (lambda: separate(kernel, DOMAIN, 5, 2), lambda: HilbertKernel(kernel, DOMAIN, 5)):
        with pytest.raises(InputError, match=r"base_kernel\.kernels\[1\]: RBFKernel has active_dims=\[5\]"):
            read()


def test_bases_of_structure_kernels_that_mean_something_else_on_one_column_are_refused():
    kernel = quietly(lambda: AdditiveStructureKernel(PiecewisePolynomialKernel(), num_dims=2))
    with pytest.raises(UnsupportedKernelError, match="PiecewisePolynomialKernel on one column"):
        HilbertKernel(kernel, DOMAIN, 5)
