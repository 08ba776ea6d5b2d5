"""Kernels with few functions of their own (cosine, additive, tables of tasks), and advice for the rest."""

from __future__ import annotations

import gpytorch
import pytest
import torch
from gpytorch import kernels
from gpytorch.kernels import (
    CosineKernel,
    IndexKernel,
    Kernel,
    MaternKernel,
    NewtonGirardAdditiveKernel,
    RBFKernel,
    ScaleKernel,
)

from gpytorch_tkrr import Domain, HilbertKernel, SizeError, UnsupportedKernelError
from gpytorch_tkrr.features.advice import advise

pytestmark = [
    pytest.mark.usefixtures("functions_for_few_rows"),
    pytest.mark.filterwarnings("ignore:.*deprecated.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
]


def test_cosine_kernel_has_two_functions():
    x = 4 * torch.rand(30, 1, dtype=torch.float64)
    kernel = CosineKernel().double()
    kernel.period_length = 0.7
    reduced = HilbertKernel(kernel, Domain(2.0, 3.0), 5)
    assert reduced.expansion(1).num_functions == 2
    assert reduced.approximation_error(x) < 1e-12
    tree = ScaleKernel(RBFKernel() * kernel) + CosineKernel()
    assert HilbertKernel.from_tolerance(tree.double(), x, tol=1e-3).approximation_error(x) < 1e-3


def test_cosine_kernel_learns_its_period():
    x = torch.rand(20, 1, dtype=torch.float64)
    kernel = CosineKernel().double()
    weights = torch.randn(20, 20, dtype=torch.float64)
    for each in (kernel, HilbertKernel(kernel, Domain(0.5, 1.0), 1)):
        (each(x).to_dense() * weights).sum().backward()
    first, second = (
        kernel.raw_period_length.grad,
        torch.autograd.grad((kernel(x).to_dense() * weights).sum(), kernel.raw_period_length)[0],
    )
    torch.testing.assert_close(first, 2 * second)


def test_cosine_kernels_of_a_batch():
    kernel = CosineKernel(batch_shape=torch.Size([2])).double()
    kernel.period_length = torch.tensor([0.5, 1.5], dtype=torch.float64).view(2, 1, 1)
    x = torch.rand(2, 9, 1, dtype=torch.float64)
    torch.testing.assert_close(HilbertKernel(kernel, Domain(0.5, 1.0), 1)(x).to_dense(), kernel(x).to_dense())


@pytest.mark.parametrize(
    "base", [RBFKernel(ard_num_dims=3), RBFKernel(), MaternKernel(nu=2.5)], ids=["ard", "rbf", "m52"]
)
@pytest.mark.parametrize("degree", [1, 2, 3])
def test_additive_kernel_of_some_degree(base: Kernel, degree: int):
    if base.ard_num_dims:
        base.lengthscale = torch.tensor([[0.5, 1.0, 2.0]])
    x = torch.rand(40, 3)
    kernel = NewtonGirardAdditiveKernel(base, num_dims=3, max_degree=degree)
    kernel.outputscale = [0.3 * (n + 1) for n in range(degree)]
    assert HilbertKernel.from_tolerance(kernel, x, tol=1e-2).approximation_error(x) < 1e-2


def test_additive_kernel_of_many_inputs_is_refused():
    kernel = NewtonGirardAdditiveKernel(RBFKernel(), num_dims=20, max_degree=5)
    with pytest.raises(
        SizeError, match=r"ScaleKernel\.base_kernel: NewtonGirardAdditiveKernel.*21699 subsets.*max_degree"
    ):
        HilbertKernel(ScaleKernel(kernel), Domain(torch.zeros(20), torch.ones(20)), 3)


def test_index_kernel_in_a_tree():
    """Values and gradients are those of the kernel itself."""
    x = torch.cat([torch.rand(30, 1), torch.randint(0, 3, (30, 1))], dim=-1).double()
    data = ScaleKernel(RBFKernel(active_dims=0)).double()
    tasks = IndexKernel(num_tasks=3, rank=2, active_dims=1).double()
    kernel = data * tasks
    reduced = HilbertKernel.from_tolerance(kernel, x, tol=1e-6)
    assert reduced.approximation_error(x) < 1e-6
    weights = torch.randn(30, 30, dtype=torch.float64)
    weights = weights + weights.mT
    gradients = []
    for each in (kernel, reduced):
        value = (each(x).to_dense() * weights).sum()
        gradients.append(torch.autograd.grad(value, list(kernel.parameters())))
    for exact, ours in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("kernel", "advice"),
    [
        (kernels.RBFKernelGrad(), "derivatives"),
        (kernels.RBFKernelGradGrad(), "derivatives"),
        (kernels.Matern52KernelGrad(), "derivatives"),
        (kernels.PolynomialKernelGrad(2), "derivatives"),
        (kernels.MultitaskKernel(RBFKernel(), num_tasks=2), "Put HilbertKernel inside"),
        (kernels.LCMKernel([RBFKernel()], num_tasks=2), "Put HilbertKernel inside"),
        (kernels.RFFKernel(num_samples=5, num_dims=2), "Use RBFKernel with the same lengthscale"),
        (
            kernels.InducingPointKernel(RBFKernel(), torch.rand(3, 2), gpytorch.likelihoods.GaussianLikelihood()),
            "Give the base kernel to HilbertKernel",
        ),
        (kernels.GridInterpolationKernel(RBFKernel(), grid_size=8, num_dims=2), "Give the base kernel"),
        (kernels.ArcKernel(RBFKernel(), ard_num_dims=2), "Transform the inputs first"),
        (kernels.CylindricalKernel(4, RBFKernel()), "Transform the inputs first"),
        (kernels.GaussianSymmetrizedKLKernel(), "Keep the exact kernel"),
        (kernels.HammingIMQKernel(vocab_size=2), "Keep the exact kernel"),
        (kernels.SpectralDeltaKernel(num_dims=2), "Use SpectralMixtureKernel"),
        (CosineKernel(), r"active_dims=\(d,\)"),
        (IndexKernel(num_tasks=2), r"active_dims=\(d,\)"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Kernel) else "",
)
def test_advice_fits_the_kernel(kernel: Kernel, advice: str):
    """It names the node, says what to do, and does not ask for a density that would be wrong."""
    name = type(kernel).__name__
    with pytest.raises(UnsupportedKernelError, match=rf"(?s)kernels\[1\].*{name}.*{advice}") as caught:
        HilbertKernel(RBFKernel() + kernel, Domain(torch.zeros(2), torch.ones(2)), 3)
    assert "register" not in str(caught.value)


def test_advice_for_kernels_of_users():
    class Mine(Kernel):
        """Unknown to this package."""

    class MyGradient(Mine):
        def num_outputs_per_input(self, x1, x2):
            return 3

    assert "register_spectral_density(Mine)" in advise(Mine())
    assert "several outputs for each input" in advise(MyGradient())
