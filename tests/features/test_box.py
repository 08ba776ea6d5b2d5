"""Box and number of functions from an error bound."""

from __future__ import annotations

import re
import warnings
from typing import ClassVar

import pytest
import scipy.special
import torch
from gpytorch.kernels import (
    AdditiveKernel,
    ConstantKernel,
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    PiecewisePolynomialKernel,
    PolynomialKernel,
    ProductKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
    SpectralMixtureKernel,
)

from gpytorch_tkrr import HilbertKernel, SizeError, register_spectral_density
from gpytorch_tkrr.features.box import choose_basis, needed_basis
from gpytorch_tkrr.features.spectral import node_density, num_copies
from gpytorch_tkrr.features.tree import Node

pytestmark = pytest.mark.usefixtures("functions_for_few_rows")


def with_(kernel, **values):
    kernel.initialize(**values)
    return kernel


def mixture(scale):
    kernel = SpectralMixtureKernel(num_mixtures=2)
    kernel.mixture_weights = torch.tensor([0.7, 0.3])
    kernel.mixture_means = torch.tensor([0.2, 1.0]).reshape(2, 1, 1) / scale
    kernel.mixture_scales = torch.tensor([0.05, 0.2]).reshape(2, 1, 1) / scale
    return kernel


def periodic(scale, width=1.0):
    return with_(PeriodicKernel(), lengthscale=width, period_length=scale)


# One-dimensional kernels, made for a lengthscale.
KERNELS = {
    "rbf": lambda s: with_(RBFKernel(), lengthscale=s),
    "matern12": lambda s: with_(MaternKernel(nu=0.5), lengthscale=s),
    "matern32": lambda s: with_(MaternKernel(nu=1.5), lengthscale=s),
    "matern52": lambda s: with_(MaternKernel(nu=2.5), lengthscale=s),
    "rational_quadratic": lambda s: with_(RQKernel(), lengthscale=s, alpha=1.0),
    "heavy_rational_quadratic": lambda s: with_(RQKernel(), lengthscale=s, alpha=0.5),
    "spectral_mixture": mixture,
    "piecewise_polynomial": lambda s: with_(PiecewisePolynomialKernel(q=2), lengthscale=s),
    "scale": lambda s: with_(ScaleKernel(with_(RBFKernel(), lengthscale=s)), outputscale=7.0),
    "sum": lambda s: AdditiveKernel(
        with_(RBFKernel(), lengthscale=s), ScaleKernel(with_(MaternKernel(nu=1.5), lengthscale=3 * s))
    ),
    "product_of_rbf": lambda s: ProductKernel(with_(RBFKernel(), lengthscale=s), with_(RBFKernel(), lengthscale=2 * s)),
    "periodic": periodic,
    "periodic_by_rbf": lambda s: ProductKernel(periodic(s), with_(RBFKernel(), lengthscale=5 * s)),
    # Narrow peaks far apart: a search that stops at the first valley would be wrong.
    "peaks": lambda s: ProductKernel(periodic(3 * s, 0.05), with_(RBFKernel(), lengthscale=20 * s)),
    "periodic_by_matern": lambda s: ProductKernel(periodic(s / 2), with_(MaternKernel(), lengthscale=3 * s)),
    "linear": lambda s: AdditiveKernel(LinearKernel(), with_(RBFKernel(), lengthscale=s)),
    "polynomial": lambda s: AdditiveKernel(PolynomialKernel(power=2), ConstantKernel()),
}


def check(kernel, x, tol, limit=None):
    hilbert = HilbertKernel.from_tolerance(kernel, x, tol=tol)
    assert hilbert.expansion().num_functions <= 4000
    assert hilbert.approximation_error(x, max_rows=limit or len(x)) <= tol
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # neither about the approximation nor about the domain
        hilbert(x).to_dense()
        hilbert.eval()(x).to_dense()
    return hilbert


@pytest.mark.parametrize("tol", [0.1, 1e-2, 1e-3])
@pytest.mark.parametrize("length", [0.05, 0.3, 5.0])  # relative to the range of the data
@pytest.mark.parametrize("name", KERNELS)
def test_bound_holds_in_one_dimension(name, length, tol):
    if tol == 1e-3 and (name == "heavy_rational_quadratic" or (name == "matern12" and length < 5)):
        with pytest.raises(SizeError, match=r"needs about \d{4,} functions"):
            choose_basis(KERNELS[name](length).double(), torch.linspace(0, 1, 9), tol)
        return
    check(KERNELS[name](length).double(), torch.linspace(0, 1, 150, dtype=torch.float64), tol)


@pytest.mark.parametrize(("low", "width"), [(1e4, 50.0), (0.0, 1e-3), (-500.0, 1000.0)])
@pytest.mark.parametrize("name", ["rbf", "matern32", "spectral_mixture", "peaks"])
def test_units_do_not_matter(name, low, width):
    unit = check(KERNELS[name](0.3).double(), torch.linspace(0, 1, 100, dtype=torch.float64), 1e-2)
    moved = torch.linspace(low, low + width, 100, dtype=torch.float64)
    other = check(KERNELS[name](0.3 * width).double(), moved, 1e-2)
    assert abs(other.num_basis[0] - unit.num_basis[0]) <= 1
    assert torch.allclose(other.domain.half_width, width * unit.domain.half_width, rtol=1e-2)


@pytest.mark.parametrize("name", ["rbf", "matern52", "matern32", "rational_quadratic", "product", "sum", "mixed"])
@pytest.mark.parametrize("tol", [0.05, 1e-2])
def test_bound_holds_in_two_dimensions(name, tol):
    kernel = {
        "rbf": lambda: with_(RBFKernel(ard_num_dims=2), lengthscale=torch.tensor([[0.3, 1.0]])),
        "matern52": lambda: with_(MaternKernel(nu=2.5), lengthscale=0.7),
        "matern32": lambda: with_(MaternKernel(nu=1.5), lengthscale=2.0),
        "rational_quadratic": lambda: with_(RQKernel(), lengthscale=1.0, alpha=5.0),
        "product": lambda: ProductKernel(
            with_(RBFKernel(active_dims=[0]), lengthscale=0.3), PeriodicKernel(active_dims=[1])
        ),
        "sum": lambda: AdditiveKernel(
            with_(RBFKernel(active_dims=[0]), lengthscale=0.1),
            with_(MaternKernel(nu=0.5, active_dims=[1]), lengthscale=2),
        ),
        "mixed": lambda: AdditiveKernel(RBFKernel(ard_num_dims=2), LinearKernel(), ConstantKernel()),
    }[name]().double()
    grid = torch.linspace(0, 1, 15, dtype=torch.float64)
    check(kernel, torch.cartesian_prod(grid, 2 * grid - 5), tol)


def test_batch_of_kernels():
    kernel = RBFKernel(batch_shape=torch.Size([3])).double()
    kernel.lengthscale = torch.tensor([0.05, 0.5, 5.0]).reshape(3, 1, 1)
    hilbert = HilbertKernel.from_tolerance(kernel, torch.linspace(0, 1, 50), tol=1e-2)
    assert hilbert.approximation_error(torch.linspace(0, 1, 50)) < 1e-2


def test_mauna_loa():
    """Forty-five years of monthly data: trend, decaying seasons, irregularities, correlated noise."""
    months = torch.arange(540, dtype=torch.float64) / 12 + 1958.0
    trend = ScaleKernel(with_(RBFKernel(), lengthscale=67.0))
    season = ScaleKernel(ProductKernel(periodic(1.0, 1.3), with_(RBFKernel(), lengthscale=90.0)))
    irregular = ScaleKernel(with_(RQKernel(), lengthscale=1.2, alpha=0.78))
    noise = ScaleKernel(with_(RBFKernel(), lengthscale=0.13))
    kernel = AdditiveKernel(trend, season, irregular, noise).double()
    trend.outputscale, season.outputscale, irregular.outputscale, noise.outputscale = 66.0, 2.4, 0.66, 0.03
    hilbert = check(kernel, months, 1e-2, limit=540)
    assert hilbert.expansion().num_functions < 4000


def test_float32_kernel_far_from_zero():
    x = torch.linspace(1e4, 1e4 + 50, 100)
    hilbert = HilbertKernel.from_tolerance(with_(RBFKernel(), lengthscale=10.0), x, tol=1e-3)
    assert hilbert.approximation_error(x) < 1e-3


@pytest.mark.parametrize("x", [torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 4.0], [3.0, 5.0], [3.0, 6.0]])])
def test_constant_columns_and_a_single_point(x):
    check(RBFKernel(ard_num_dims=2).double(), x.double(), 1e-2)
    check(PeriodicKernel(ard_num_dims=2).double(), x.double(), 1e-2)
    check(LinearKernel().double(), x.double(), 1e-2)


@pytest.mark.parametrize(
    ("kernel", "dims"),
    [
        (with_(MaternKernel(nu=0.5), lengthscale=0.5), 2),
        (with_(RQKernel(), lengthscale=0.3, alpha=0.6), 2),
        (with_(RBFKernel(), lengthscale=0.1), 4),
        (with_(MaternKernel(nu=2.5), lengthscale=0.3), 6),
    ],
)
def test_too_many_functions_are_refused_with_advice(kernel, dims):
    with pytest.raises(SizeError) as caught:
        choose_basis(kernel, torch.rand(100, dims), 1e-2)
    for advice in ("larger tol", "HyperbolicCross", "TKRR", "per input dimension", "4000"):
        assert advice in str(caught.value)


@pytest.mark.parametrize("tol", [0.0, 1.0, -1.0])
def test_senseless_tolerances_are_refused(tol):
    with pytest.raises(ValueError, match="between 0 and 1"):
        HilbertKernel.from_tolerance(RBFKernel(), torch.rand(5, 1), tol=tol)


def test_active_dims():
    x = torch.rand(50, 3)
    kernel = HilbertKernel.from_tolerance(RBFKernel(), x * torch.tensor([1.0, 100.0, 2.0]), active_dims=[0, 2])
    assert kernel.domain.num_dims == 2
    assert kernel.approximation_error(x * torch.tensor([1.0, 100.0, 2.0])) < 1e-2


def needed(kernel, width):
    """Number of functions that are used, or that the refusal names."""
    try:
        return choose_basis(kernel, torch.linspace(0, width, 50, dtype=torch.float64), 1e-2)[1][0]
    except SizeError as error:
        return int(re.search(r"needs about (\d+) functions", str(error)).group(1))


@pytest.mark.parametrize(
    "name",
    [
        "rbf",
        "matern12",
        "matern32",
        "rational_quadratic",
        "heavy_rational_quadratic",
        "spectral_mixture",
        "piecewise_polynomial",
        "periodic_by_rbf",
    ],
)
def test_number_grows_in_proportion_to_a_large_range(name):
    kernel = KERNELS[name](1.0).double()
    widths = [100.0, 300.0, 1e3, 2e3, 2.9e3, 3e3, 1e4, 1e5, 1e6, 1e8, 1e12]
    numbers = [needed(kernel, width) for width in widths]
    assert numbers == sorted(numbers)
    large = 1e5 if "rational" in name else 1e3  # where the box is hardly wider than the data
    per_unit = [number / width for number, width in zip(numbers, widths, strict=True) if width >= large]
    assert max(per_unit) / min(per_unit) < 1.05


def test_number_of_functions_for_a_large_range_matches_the_quantile_of_the_density():
    """The spectral distribution of the RBF kernel is Gaussian: its two tails beyond w may hold tol / 2."""
    highest = -scipy.special.ndtri(1e-2 / 4)
    for width in (1e4, 1e6, 1e8):
        kernel = with_(RBFKernel(), lengthscale=1.0).double()
        assert needed(kernel, width) == pytest.approx(highest * width / torch.pi, rel=5e-3)


@pytest.mark.parametrize("name", ["rbf", "matern12", "heavy_rational_quadratic", "peaks"])
def test_ranges_that_no_basis_covers_are_refused(name):
    with pytest.raises(SizeError, match="needs about"):
        choose_basis(KERNELS[name](1.0), torch.rand(50, 1) * 1e8, 1e-2)


def test_a_peak_beyond_all_frequencies_searched_is_refused():
    kernel = AdditiveKernel(with_(RBFKernel(), lengthscale=1.0), with_(RBFKernel(), lengthscale=1e-7))
    with pytest.raises(SizeError, match="needs about"):
        choose_basis(kernel.double(), torch.linspace(0, 10, 50), 1e-2)


class CountedKernel(RBFKernel):
    """An RBF kernel that counts at how many frequencies its density is asked for, in one call and in all."""

    counts: ClassVar[list[int]] = []


@register_spectral_density(CountedKernel)
def _counted_density(kernel, omega, dims):
    CountedKernel.counts.append(omega.shape[-2])
    scale = kernel.lengthscale.double().squeeze(-1)
    return ((2 * torch.pi) ** 0.5 * scale) ** len(dims) * torch.exp(-(scale * omega.norm(dim=-1)).square() / 2)


@pytest.mark.parametrize("lengthscale", [0.3, 1.0, 5.0])
@pytest.mark.parametrize("num_dims", [1, 2])
def test_densities_with_periodic_factors_are_looked_at_where_it_is_affordable(lengthscale, num_dims):
    factor = with_(PeriodicKernel(ard_num_dims=num_dims), lengthscale=lengthscale, period_length=0.7)
    kernel = ProductKernel(CountedKernel(), factor)
    node = Node.root(kernel, num_dims)
    CountedKernel.counts.clear()
    node_density(node, {d: torch.linspace(0, 1, 5, dtype=torch.float64) for d in range(num_dims)})
    assert sum(CountedKernel.counts) == 5 * num_copies(node, range(num_dims))
    CountedKernel.counts.clear()
    needed_basis(kernel, torch.zeros(num_dims), torch.ones(num_dims), 1e-2)
    assert sum(CountedKernel.counts) < 2**22
