"""Densities against numerical Fourier transforms of the kernels' own `forward`, never against a second formula."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import gpytorch
import numpy as np
import pytest
import scipy.special
import torch
from gpytorch.kernels import (
    AdditiveKernel,
    ConstantKernel,
    CosineKernel,
    Kernel,
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    PiecewisePolynomialKernel,
    ProductKernel,
    ProductStructureKernel,
    RBFKernel,
    RBFKernelGrad,
    RQKernel,
    ScaleKernel,
    SpectralMixtureKernel,
)
from hypothesis import given
from hypothesis import strategies as st
from linear_operator import to_dense
from torch import Tensor

from gpytorch_tkrr.errors import InputError, UnsupportedKernelError
from gpytorch_tkrr.features.spectral import has_density, marginal_density, register_spectral_density, spectral_density

BATCH = torch.Size([2])


def shaken(kernel: Kernel) -> Kernel:
    """The kernel in float64 with parameters of order one, all different."""
    kernel = kernel.double()
    with torch.no_grad():
        for parameter in kernel.parameters():
            parameter.copy_(0.8 * torch.rand(parameter.shape, dtype=torch.float64) - 0.2)
    return kernel


def quietly(make: Callable[[], Kernel]) -> Kernel:
    """GPyTorch deprecates its structure kernels, but they work."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return make()


def covariance(kernel: Kernel, lag: Tensor) -> Tensor:
    """k at lags `(T, D)`, `(*batch, T)`, from the kernel's own forward: after its own active_dims."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        if isinstance(kernel, ProductStructureKernel):  # cannot make a rectangular matrix
            return kernel.forward(torch.zeros_like(lag), lag, diag=True)
        return to_dense(kernel.forward(torch.zeros_like(lag[:1]), lag)).squeeze(-2)


def panels(upper: float, num_panels: int) -> tuple[Tensor, Tensor]:
    """Composite Gauss-Legendre nodes and weights on [0, upper]."""
    nodes, weights = (torch.as_tensor(a) for a in np.polynomial.legendre.leggauss(16))
    width = upper / num_panels
    starts = width * torch.arange(num_panels, dtype=torch.float64).unsqueeze(-1)
    return (starts + width * (nodes + 1) / 2).flatten(), (width * weights / 2).repeat(num_panels)


def transform_1d(kernel: Kernel, omega: Tensor, upper: float, *, column: int = 0, num_dims: int = 1) -> Tensor:
    """2 int_0^upper k(t e_column) cos(omega t) dt."""
    t, weights = panels(upper, 400)
    lag = torch.zeros(t.numel(), num_dims, dtype=torch.float64)
    lag[:, column] = t
    return 2 * covariance(kernel, lag) * weights @ torch.cos(t.unsqueeze(-1) * omega)


def transform_2d(kernel: Kernel, omega: Tensor, upper: float) -> Tensor:
    """The transform in polar coordinates, in which a cusp at the origin does no harm."""
    r, weights = panels(upper, 40)
    theta = 2 * math.pi * torch.arange(360, dtype=torch.float64) / 360
    directions = torch.stack([theta.cos(), theta.sin()], dim=-1)
    lag = (r[:, None, None] * directions).flatten(0, 1)
    mass = (r * weights).repeat_interleave(360) * 2 * math.pi / 360
    return covariance(kernel, lag) * mass @ torch.cos(lag @ omega.mT)


ONE_DIMENSIONAL = {
    "rbf": lambda: RBFKernel(),
    "matern12": lambda: MaternKernel(nu=0.5),
    "matern32": lambda: MaternKernel(nu=1.5),
    "matern52": lambda: MaternKernel(nu=2.5),
    "spectral mixture": lambda: SpectralMixtureKernel(num_mixtures=3),
    "polynomial 0": lambda: PiecewisePolynomialKernel(q=0),
    "polynomial 1": lambda: PiecewisePolynomialKernel(q=1),
    "polynomial 2": lambda: PiecewisePolynomialKernel(q=2),
    "polynomial 3": lambda: PiecewisePolynomialKernel(q=3),
    "scale": lambda: ScaleKernel(RBFKernel()),
    "batch": lambda: ScaleKernel(MaternKernel(batch_shape=BATCH), batch_shape=BATCH),
    "batched mixture": lambda: SpectralMixtureKernel(num_mixtures=2, batch_shape=BATCH),
    "sum": lambda: ScaleKernel(RBFKernel()) + MaternKernel(nu=1.5),
    "rbf x rbf": lambda: ScaleKernel(RBFKernel()) * RBFKernel(),
    "constant x matern": lambda: ConstantKernel() * MaternKernel(nu=1.5),
    "periodic x rbf": lambda: PeriodicKernel() * ScaleKernel(RBFKernel()),
    "matern x periodic": lambda: ScaleKernel(MaternKernel(nu=1.5) * PeriodicKernel()),
    "periodic x periodic x rbf": lambda: PeriodicKernel() * RBFKernel() * PeriodicKernel(),
    "batched periodic x matern": lambda: PeriodicKernel(batch_shape=BATCH) * MaternKernel(batch_shape=BATCH),
    "batched periodic x polynomial": lambda: PeriodicKernel(batch_shape=BATCH) * PiecewisePolynomialKernel(),
    "(constant + periodic + rbf) x rbf": lambda: (ConstantKernel() + PeriodicKernel() + RBFKernel()) * RBFKernel(),
}

TWO_DIMENSIONAL = {
    "rbf": lambda: RBFKernel(),
    "ard rbf": lambda: RBFKernel(ard_num_dims=2),
    "matern12": lambda: MaternKernel(nu=0.5, ard_num_dims=2),
    "matern32": lambda: MaternKernel(nu=1.5, ard_num_dims=2),
    "matern52": lambda: MaternKernel(nu=2.5),
    "spectral mixture": lambda: SpectralMixtureKernel(num_mixtures=2, ard_num_dims=2),
    "polynomial 0": lambda: PiecewisePolynomialKernel(q=0),
    "polynomial 1": lambda: PiecewisePolynomialKernel(q=1),
    "polynomial 2": lambda: PiecewisePolynomialKernel(q=2),
    "polynomial 3": lambda: PiecewisePolynomialKernel(q=3),
    "batch": lambda: ScaleKernel(MaternKernel(batch_shape=BATCH, ard_num_dims=2)),
    "sum, other order": lambda: (
        ScaleKernel(RBFKernel(ard_num_dims=2)) + ScaleKernel(MaternKernel(ard_num_dims=2, active_dims=(1, 0)))
    ),
    "disjoint product": lambda: ScaleKernel(RBFKernel(active_dims=1)) * RBFKernel(active_dims=0),
    "nested product": lambda: ScaleKernel(
        ScaleKernel(RBFKernel(active_dims=(1,))) * (RBFKernel(active_dims=(0,)) * ConstantKernel())
    ),
    "shared rbf": lambda: RBFKernel(ard_num_dims=2) * RBFKernel(active_dims=1) * ScaleKernel(RBFKernel()),
    "periodic in both": lambda: PeriodicKernel(ard_num_dims=2) * RBFKernel(active_dims=0) * RBFKernel(active_dims=1),
    "periodic in one": lambda: PeriodicKernel(active_dims=1) * RBFKernel(ard_num_dims=2),
    "sum distributed": lambda: (RBFKernel(active_dims=0) + RBFKernel(active_dims=1)) * RBFKernel(ard_num_dims=2),
    "product structure": lambda: ProductStructureKernel(ScaleKernel(RBFKernel(ard_num_dims=2)), num_dims=2),
    "product structure of a sum": lambda: ProductStructureKernel(RBFKernel() + ScaleKernel(RBFKernel()), num_dims=2),
}


def support(name: str) -> float:
    """Where to stop the quadrature: the end of the support, where there is one, is met by a panel's edge."""
    return 2.0 if "polynomial" in name else 30.0


@pytest.mark.parametrize("name", ONE_DIMENSIONAL)
def test_density_is_the_fourier_transform_in_one_dimension(name):
    kernel = shaken(ONE_DIMENSIONAL[name]())
    omega = torch.tensor([0.0, 0.3, 1.1, 3.0, 8.0, 20.0], dtype=torch.float64)
    actual = spectral_density(kernel, omega.unsqueeze(-1))
    expected = transform_1d(kernel, omega, support(name))
    assert actual.shape == (*kernel.batch_shape, 6)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("name", TWO_DIMENSIONAL)
def test_density_is_the_fourier_transform_in_two_dimensions(name):
    kernel = shaken(quietly(TWO_DIMENSIONAL[name]))
    omega = torch.tensor([[0.0, 0.0], [0.5, 0.2], [0.2, 0.5], [-1.5, 2.0], [4.0, 0.3]], dtype=torch.float64)
    actual = quietly(lambda: spectral_density(kernel, omega))
    assert actual.shape == (*kernel.batch_shape, 5)
    expected = transform_2d(kernel, omega, 2.0 if "polynomial" in name else 25.0)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-6 if "polynomial" in name else 1e-8)


@pytest.mark.parametrize("column", [0, 1])
@pytest.mark.parametrize("name", TWO_DIMENSIONAL)
def test_marginal_density_is_the_transform_along_an_axis(name, column):
    kernel = shaken(quietly(TWO_DIMENSIONAL[name]))
    omega = torch.tensor([0.0, 0.4, 1.5, 6.0], dtype=torch.float64)
    expected = transform_1d(kernel, omega, support(name), column=column, num_dims=2)
    actual = quietly(lambda: marginal_density(kernel, omega.unsqueeze(-1), (column,), num_dims=2))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("alpha", [0.1, 0.5, 1.0, 1.5, 6.0, 50.0])
@pytest.mark.parametrize("num_dims", [1, 2, 3])
def test_rational_quadratic_density_transforms_back_to_the_kernel(num_dims, alpha):
    # The kernel's tail is too heavy to be transformed, but the density falls off exponentially.
    kernel = RQKernel().double()
    kernel.alpha, kernel.lengthscale = alpha, 0.7
    low, low_weights = panels(200.0, 60)
    high, high_weights = panels(45 / math.sqrt(2 * alpha) / 0.7 if alpha < 10 else 15.0, 60)
    s = torch.cat([torch.exp(-low), 1 + high])  # s = exp(-v) reaches through the singularity at zero
    weights = torch.cat([torch.exp(-low) * low_weights, high_weights])
    omega = torch.zeros(s.numel(), num_dims, dtype=torch.float64)
    omega[:, -1] = s
    with torch.no_grad():
        density = spectral_density(kernel, omega)

    lag = torch.tensor([0.0, 0.2, 1.0, 5.0], dtype=torch.float64)
    sr = s * lag.unsqueeze(-1)
    waves = {
        1: torch.cos(sr) / math.pi,
        2: s * torch.as_tensor(scipy.special.jv(0, sr.numpy())) / (2 * math.pi),
        3: s.square() * torch.sinc(sr / math.pi) / (2 * math.pi**2),
    }[num_dims]
    expected = covariance(kernel, torch.nn.functional.pad(lag.unsqueeze(-1), (0, num_dims - 1)))
    torch.testing.assert_close(waves @ (weights * density), expected, rtol=1e-7, atol=1e-8)


def test_rational_quadratic_density_at_zero():
    kernel = RQKernel(batch_shape=torch.Size([3])).double()
    kernel.alpha = torch.tensor([[0.4], [0.5], [2.0]])
    density = spectral_density(kernel, torch.zeros(1, 1)).squeeze(-1)
    assert torch.isinf(density[:2]).all()  # alpha <= D / 2: the kernel is not integrable
    torch.testing.assert_close(
        density[2:], transform_1d(kernel, torch.zeros(1, dtype=torch.float64), 300.0)[2], rtol=1e-6, atol=0
    )


@given(alpha=st.floats(0.1, 50), lengthscale=st.floats(0.05, 20), omega=st.floats(1e-6, 100))
def test_rational_quadratic_density_is_positive_finite_and_below_the_next_lower_frequency(alpha, lengthscale, omega):
    kernel = RQKernel(ard_num_dims=2).double()
    kernel.alpha, kernel.lengthscale = alpha, lengthscale
    frequencies = torch.tensor([[omega, 0.0], [omega * 1.5, 0.0]], dtype=torch.float64)
    density = spectral_density(kernel, frequencies)
    assert torch.isfinite(density).all() and (density >= 0).all() and density[1] <= density[0]
    gradients = torch.autograd.grad(density.sum(), list(kernel.parameters()))
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize("num_dims", [1, 3])
def test_rational_quadratic_tends_to_rbf(num_dims):
    omega = torch.rand(5, num_dims, dtype=torch.float64) * 3
    kernel, limit = RQKernel().double(), RBFKernel().double()
    kernel.alpha = 1e6
    torch.testing.assert_close(spectral_density(kernel, omega), spectral_density(limit, omega), rtol=1e-4, atol=0)


@pytest.mark.parametrize("q", [0, 1, 2, 3])
def test_piecewise_polynomial_in_three_dimensions_integrates_to_its_variance(q):
    kernel = PiecewisePolynomialKernel(q=q).double()
    s, weights = panels(2000.0, 300)
    with torch.no_grad():
        density = spectral_density(kernel, torch.nn.functional.pad(s.unsqueeze(-1), (0, 2)))
    assert (density >= 0).all()
    total = (s.square() * weights * density).sum() / (2 * math.pi**2)
    assert abs(total.item() - 1) < 2e-3  # the rest lies beyond the last frequency


DIFFERENTIABLE = {
    **{f"1-D {name}": (make, 1) for name, make in ONE_DIMENSIONAL.items()},
    **{f"2-D {name}": (make, 2) for name, make in TWO_DIMENSIONAL.items()},
    "1-D rational quadratic": (lambda: RQKernel(batch_shape=BATCH), 1),
    "2-D rational quadratic": (lambda: RQKernel(ard_num_dims=2), 2),
    "3-D polynomial": (lambda: PiecewisePolynomialKernel(ard_num_dims=3), 3),
    "periodic x rational quadratic": (lambda: PeriodicKernel() * RQKernel(), 1),
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_reach_every_raw_parameter(name):
    make, num_dims = DIFFERENTIABLE[name]
    kernel = shaken(quietly(make))
    omega = 0.2 + 2 * torch.rand(3, num_dims, dtype=torch.float64)
    parameters = tuple(kernel.parameters())
    assert quietly(
        lambda: torch.autograd.gradcheck(lambda *_: spectral_density(kernel, omega), parameters, fast_mode=True)
    )


def test_gradients_are_finite_at_zero_frequency():
    for kernel in (RBFKernel(), MaternKernel(nu=0.5), PiecewisePolynomialKernel(), RQKernel()):
        kernel = shaken(kernel)
        density = spectral_density(kernel, torch.zeros(1, 1))
        gradients = torch.autograd.grad(density.sum(), list(kernel.parameters()))
        assert all(torch.isfinite(gradient).all() for gradient in gradients)


def test_float32_kernels_give_float64_densities_and_float32_gradients():
    kernel = ScaleKernel(RBFKernel(ard_num_dims=2))
    density = spectral_density(kernel, torch.rand(4, 2))
    density.sum().backward()
    assert density.dtype == torch.float64
    assert all(
        parameter.grad is not None and parameter.grad.dtype == torch.float32 for parameter in kernel.parameters()
    )


def test_active_dims_of_scale_and_base_are_applied_once():
    base = RBFKernel(ard_num_dims=2, active_dims=(2, 0)).double()
    base.lengthscale = torch.tensor([[0.5, 3.0]])
    kernel = ScaleKernel(base).double()
    omega = torch.rand(4, 2, dtype=torch.float64)
    expected = kernel.outputscale * spectral_density(base, omega)
    torch.testing.assert_close(spectral_density(kernel, omega), expected)
    # inside a tree the same kernel selects its columns among three
    tree = ProductKernel(kernel, MaternKernel(active_dims=1).double())
    full = torch.rand(4, 3, dtype=torch.float64)
    expected = spectral_density(kernel, full[:, [2, 0]]) * spectral_density(tree.kernels[1], full[:, [1]])
    torch.testing.assert_close(spectral_density(tree, full), expected)


def test_marginal_density_of_several_columns_follows_the_order_of_dims():
    kernel = shaken(MaternKernel(ard_num_dims=3))
    omega = torch.rand(5, 2, dtype=torch.float64)
    forward = marginal_density(kernel, omega, (0, 2))
    torch.testing.assert_close(marginal_density(kernel, omega.flip(-1), (2, 0)), forward)
    everything = torch.rand(5, 3, dtype=torch.float64)
    torch.testing.assert_close(marginal_density(kernel, everything, (0, 1, 2)), spectral_density(kernel, everything))


def test_marginal_density_integrates_the_joint_density_over_the_other_column():
    kernel = shaken(SpectralMixtureKernel(num_mixtures=2, ard_num_dims=2))
    s, weights = panels(60.0, 100)
    joint = spectral_density(kernel, torch.stack([torch.full_like(s, 0.7), s], dim=-1))
    marginal = marginal_density(kernel, torch.tensor([[0.7]]), (0,))
    torch.testing.assert_close((joint * weights).sum() / math.pi, marginal.squeeze(), rtol=1e-8, atol=0)


def test_factors_without_kept_columns_contribute_their_variance():
    kernel = shaken(
        RBFKernel(active_dims=0)
        * (ScaleKernel(MaternKernel(active_dims=1)) + ConstantKernel())
        * PeriodicKernel(active_dims=2)
    )
    omega = torch.tensor([0.3, 2.0], dtype=torch.float64)
    expected = transform_1d(kernel, omega, 30.0, column=0, num_dims=3)
    torch.testing.assert_close(marginal_density(kernel, omega.unsqueeze(-1), (0,)), expected, rtol=1e-8, atol=0)


def test_product_of_many_sums_over_separate_columns_is_the_product_of_their_densities():
    # Multiplied out it would be 2^30 terms.
    sums = [shaken(RBFKernel(active_dims=d) + ScaleKernel(MaternKernel(active_dims=d))) for d in range(30)]
    kernel = ProductKernel(*sums)
    omega = torch.rand(2, 30, dtype=torch.float64)
    alone = [marginal_density(factor, omega[:, [d]], (d,), num_dims=30) for d, factor in enumerate(sums)]
    torch.testing.assert_close(spectral_density(kernel, omega), torch.stack(alone).prod(dim=0))
    variances = torch.stack([1 + factor.kernels[1].outputscale for factor in sums[1:]])
    torch.testing.assert_close(marginal_density(kernel, omega[:, [0]], (0,)), alone[0] * variances.prod())


class UnknownKernel(Kernel):
    """Nothing is registered for it."""


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (RBFKernel() + ScaleKernel(CosineKernel()), r"AdditiveKernel\.kernels\[1\]\.base_kernel: CosineKernel"),
        (CosineKernel(), "^CosineKernel has no .*finite sum of basis functions"),
        (UnknownKernel(), r"^UnknownKernel has no .*(.|\n)*register_spectral_density\(UnknownKernel\)"),
        (ScaleKernel(RBFKernelGrad()), r"ScaleKernel\.base_kernel: RBFKernelGrad"),
        (LinearKernel(), "finite sum of basis functions"),
        (ConstantKernel() * ConstantKernel(), r"constant along input columns \[0, 1\]"),
        (RBFKernel() + ConstantKernel(), r"kernels\[1\]: ConstantKernel"),
        (RBFKernel(active_dims=0) + RBFKernel(active_dims=1), r"kernels\[0\]: RBFKernel .*constant along.* \[1\]"),
        (RBFKernel(active_dims=0) * PeriodicKernel(active_dims=1), r"kernels\[1\]: PeriodicKernel"),
        (RBFKernel() * MaternKernel(), "RBFKernel x MaternKernel share input columns"),
        (RBFKernel(active_dims=(1, 1)) * RBFKernel(active_dims=0), "repeat a column"),
    ],
)
def test_kernels_without_density_are_refused_by_name(kernel, message):
    with pytest.raises(UnsupportedKernelError, match=r"(?s)" + message):
        spectral_density(kernel, torch.ones(1, 2))
    assert not has_density(kernel, 2)


def test_piecewise_polynomial_is_refused_above_three_dimensions():
    assert not has_density(PiecewisePolynomialKernel(), 4)
    assert marginal_density(PiecewisePolynomialKernel(ard_num_dims=4), torch.ones(1, 2), (0, 3)) > 0


def test_nonstationary_factors_are_refused_even_where_their_columns_are_not_kept():
    kernel = RBFKernel(active_dims=0) * LinearKernel(active_dims=1)
    with pytest.raises(UnsupportedKernelError, match=r"kernels\[1\]: LinearKernel .*stationary"):
        marginal_density(kernel, torch.ones(1, 1), (0,))


def test_product_structure_of_kernels_that_change_meaning_column_by_column_is_refused():
    mixture = quietly(lambda: ProductStructureKernel(SpectralMixtureKernel(2, ard_num_dims=2), num_dims=2))
    nested = quietly(lambda: ProductStructureKernel(RBFKernel() * RBFKernel(active_dims=0), num_dims=2))
    assert not has_density(mixture, 2)
    assert not has_density(nested, 2)


@pytest.mark.parametrize(
    ("kernel", "omega", "message"),
    [
        (RBFKernel(), torch.ones(3), r"shape \(M, D\); got \(3,\)"),
        (RBFKernel(), [[1.0]], "got list"),
        (RBFKernel(), torch.tensor([[math.nan]]), "finite"),
        (RBFKernel(ard_num_dims=3), torch.ones(1, 2), "ard_num_dims=3 but sees 2"),
        (RBFKernel(active_dims=(0, 1)), torch.ones(1, 3), "sees 2 columns, not 3"),
        (
            AdditiveKernel(RBFKernel(active_dims=(4,))),
            torch.ones(1, 3),
            r"kernels\[0\]: RBFKernel has active_dims=\[4\]",
        ),
    ],
)
def test_bad_frequencies_are_refused(kernel, omega, message):
    with pytest.raises(InputError, match=message):
        spectral_density(kernel, omega)


@pytest.mark.parametrize("dims", [(), (0, 0), (2,), (-1,)])
def test_bad_dims_are_refused(dims):
    with pytest.raises(InputError, match="distinct columns"):
        marginal_density(RBFKernel(ard_num_dims=2), torch.ones(1, max(len(dims), 1)), dims)


def test_marginal_density_asks_for_the_number_of_columns_where_it_matters():
    with pytest.raises(InputError, match="Pass num_dims"):
        marginal_density(PiecewisePolynomialKernel(), torch.ones(1, 1), (0,))
    with pytest.raises(InputError, match="one column for each"):
        marginal_density(RBFKernel(), torch.ones(1, 2), (0,))


# Every class of gpytorch.kernels: how to make one that sees two columns, and whether it has a density over them.
SUPPORTED = {
    "AdditiveKernel": lambda: AdditiveKernel(RBFKernel(), MaternKernel()),
    "MaternKernel": MaternKernel,
    "PiecewisePolynomialKernel": PiecewisePolynomialKernel,
    "ProductKernel": lambda: ProductKernel(RBFKernel(active_dims=0), MaternKernel(active_dims=1)),
    "ProductStructureKernel": lambda: ProductStructureKernel(RBFKernel(), num_dims=2),
    "RBFKernel": RBFKernel,
    "RQKernel": RQKernel,
    "ScaleKernel": lambda: ScaleKernel(RBFKernel()),
    "SpectralMixtureKernel": lambda: SpectralMixtureKernel(num_mixtures=2, ard_num_dims=2),
}
UNSUPPORTED = {
    "AdditiveStructureKernel": lambda: gpytorch.kernels.AdditiveStructureKernel(RBFKernel(), num_dims=2),
    "ArcKernel": lambda: gpytorch.kernels.ArcKernel(RBFKernel(), ard_num_dims=2),
    "ConstantKernel": ConstantKernel,
    "CosineKernel": CosineKernel,
    "CylindricalKernel": lambda: gpytorch.kernels.CylindricalKernel(3, RBFKernel()),
    "DistributionalInputKernel": lambda: gpytorch.kernels.DistributionalInputKernel(lambda a, b: a),
    "GaussianSymmetrizedKLKernel": lambda: gpytorch.kernels.GaussianSymmetrizedKLKernel(),
    "GridInterpolationKernel": lambda: gpytorch.kernels.GridInterpolationKernel(
        RBFKernel(), grid_size=4, grid_bounds=[(0.0, 1.0)] * 2
    ),
    "GridKernel": lambda: gpytorch.kernels.GridKernel(RBFKernel(), [torch.linspace(0, 1, 3)] * 2),
    "HammingIMQKernel": lambda: gpytorch.kernels.HammingIMQKernel(vocab_size=2),
    "IndexKernel": lambda: gpytorch.kernels.IndexKernel(num_tasks=2),
    "InducingPointKernel": lambda: gpytorch.kernels.InducingPointKernel(
        RBFKernel(), torch.rand(3, 2), gpytorch.likelihoods.GaussianLikelihood()
    ),
    "LCMKernel": lambda: gpytorch.kernels.LCMKernel([RBFKernel()], num_tasks=2),
    "LinearKernel": LinearKernel,
    "Matern52KernelGrad": lambda: gpytorch.kernels.Matern52KernelGrad(),
    "MultiDeviceKernel": lambda: gpytorch.kernels.MultiDeviceKernel(
        RBFKernel(), device_ids=[], output_device=torch.device("cpu")
    ),
    "MultitaskKernel": lambda: gpytorch.kernels.MultitaskKernel(RBFKernel(), num_tasks=2),
    "NewtonGirardAdditiveKernel": lambda: gpytorch.kernels.NewtonGirardAdditiveKernel(RBFKernel(), num_dims=2),
    "PeriodicKernel": PeriodicKernel,
    "PolynomialKernel": lambda: gpytorch.kernels.PolynomialKernel(power=2),
    "PolynomialKernelGrad": lambda: gpytorch.kernels.PolynomialKernelGrad(power=2),
    "RBFKernelGrad": RBFKernelGrad,
    "RBFKernelGradGrad": lambda: gpytorch.kernels.RBFKernelGradGrad(),
    "RFFKernel": lambda: gpytorch.kernels.RFFKernel(num_samples=3, num_dims=2),
    "SpectralDeltaKernel": lambda: gpytorch.kernels.SpectralDeltaKernel(num_dims=2),
    "WhiteNoiseKernel": lambda: gpytorch.kernels.WhiteNoiseKernel(torch.ones(3)),
}


@pytest.mark.parametrize("name", sorted(set(gpytorch.kernels.__all__) - {"Kernel", "keops"}))
def test_every_gpytorch_kernel_has_the_density_it_should_or_none(name):
    assert name in SUPPORTED or name in UNSUPPORTED, f"decide whether {name} has a density"
    kernel = quietly({**SUPPORTED, **UNSUPPORTED}[name])
    assert type(kernel).__name__ == name
    if name in SUPPORTED:
        assert has_density(kernel, 2)
    else:
        with pytest.raises(UnsupportedKernelError, match=name):
            spectral_density(kernel, torch.ones(1, 2))


def test_subclasses_inherit_a_density_unless_they_override_forward():
    class SameRBF(RBFKernel):
        pass

    class SquaredRBF(RBFKernel):
        def forward(self, x1, x2, diag=False, **params):
            return super().forward(x1, x2, diag=diag, **params) ** 2

    assert has_density(SameRBF(), 1)
    assert not has_density(SquaredRBF(), 1)
    assert not has_density(SquaredRBF() * RBFKernel(), 1)


def test_users_can_register_a_density_that_then_works_in_trees():
    class CauchyKernel(Kernel):
        """1 / (1 + t^2 / l^2) in one dimension."""

        has_lengthscale = True

        def forward(self, x1, x2, diag=False, **params):
            scaled = self.covar_dist(x1 / self.lengthscale, x2 / self.lengthscale, diag=diag, **params)
            return 1 / (1 + scaled**2)

    tree = shaken(PeriodicKernel() * ScaleKernel(CauchyKernel()) + RBFKernel())
    with pytest.raises(UnsupportedKernelError, match=r"kernels\[0\]\.kernels\[1\]\.base_kernel: CauchyKernel"):
        spectral_density(tree, torch.ones(1, 1))

    @register_spectral_density(CauchyKernel)
    def density(kernel, omega, dims):
        lengthscale = kernel.lengthscale.squeeze(-1)
        return math.pi * lengthscale * torch.exp(-lengthscale * omega.abs().squeeze(-1))

    # transform back, since the kernel falls off slowly
    s, weights = panels(80.0, 400)
    t = torch.tensor([0.0, 0.3, 1.0, 4.0], dtype=torch.float64)
    with torch.no_grad():
        values = spectral_density(tree, s.unsqueeze(-1))
    back = torch.cos(t.unsqueeze(-1) * s) @ (weights * values) / math.pi
    torch.testing.assert_close(back, covariance(tree, t.unsqueeze(-1)), rtol=1e-4, atol=1e-4)


def test_registered_density_of_the_wrong_shape_is_refused():
    class ShapelessKernel(RBFKernel):
        def forward(self, x1, x2, **params):
            return super().forward(x1, x2, **params)

    register_spectral_density(ShapelessKernel)(lambda kernel, omega, dims: omega.new_ones(5))
    with pytest.raises(InputError, match=r"shape \(5,\); a registered density must broadcast to \(3,\)"):
        spectral_density(ShapelessKernel(), torch.ones(3, 1))


@pytest.mark.parametrize("other", [3, RBFKernel(), dict])
def test_densities_are_registered_for_kernel_classes_only(other):
    with pytest.raises(TypeError, match=r"subclass of gpytorch.kernels.Kernel; got"):
        register_spectral_density(other)
