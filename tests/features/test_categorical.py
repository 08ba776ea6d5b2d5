"""Kernels of categories, as expansions and as modes, against their own forward and BoTorch's."""

from __future__ import annotations

import pytest
import torch
from gpytorch.kernels import (
    AdditiveKernel,
    ConstantKernel,
    IndexKernel,
    MaternKernel,
    ProductKernel,
    RBFKernel,
    ScaleKernel,
)
from support.models import GP, gaussian

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.bases.basis import ConcatenatedBasis, ConstantBasis, MonomialBasis
from gpytorch_tkrr.bases.levels import LevelBasis
from gpytorch_tkrr.features.separable import separate


def _table(num_rows: int = 40) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.rand(num_rows, 1, generator=generator, dtype=torch.float64)
    levels = torch.randint(-1, 4, (num_rows, 2), generator=generator).double()
    tasks = torch.randint(0, 3, (num_rows, 1), generator=generator).double()
    return torch.cat([numbers, levels, tasks], -1)


def _hamming(kernel_class=tkrr.CategoricalKernel, **kwargs):
    kernel = kernel_class(**kwargs).double()
    kernel.lengthscale = torch.tensor([0.4, 1.7], dtype=torch.float64)[: kernel.lengthscale.shape[-1]]
    return kernel


def _index_kernel():
    kernel = IndexKernel(num_tasks=3, rank=2, active_dims=(3,)).double()
    kernel.covar_factor.data = torch.tensor([[1.0, 0.2], [0.5, -0.7], [0.0, 0.3]], dtype=torch.float64)
    return kernel


pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),  # IndexKernel in a product
    pytest.mark.usefixtures("functions_for_few_rows"),
]

TREES = {
    "hamming": lambda: _hamming(active_dims=(1, 2)),
    "hamming, two lengthscales": lambda: _hamming(ard_num_dims=2, active_dims=(2, 1)),
    "indicator": lambda: tkrr.IndicatorKernel(active_dims=(1, 2)),
    "product": lambda: ScaleKernel(
        ProductKernel(RBFKernel(active_dims=(0,)), _hamming(active_dims=(1,)), _index_kernel())
    ),
    "sum in one column": lambda: ProductKernel(
        AdditiveKernel(ConstantKernel(active_dims=(1,)), ScaleKernel(tkrr.IndicatorKernel(active_dims=(1,)))),
        RBFKernel(active_dims=(0,)),
    ),
    "ordered beside names": lambda: AdditiveKernel(
        ScaleKernel(MaternKernel(nu=2.5, active_dims=(2,))), tkrr.IndicatorKernel(active_dims=(2,))
    ),
    "anova": lambda: tkrr.anova_kernel(4, categorical=[1, 2, 3], half_range=2.0, dtype=torch.float64),
}


@pytest.mark.parametrize("name", TREES)
def test_features_and_variances_are_the_kernel(name):
    x, kernel = _table(), TREES[name]().double()
    hilbert = tkrr.HilbertKernel.from_tolerance(kernel, x, tol=1e-3)
    torch.testing.assert_close(hilbert(x).to_dense(), kernel(x).to_dense(), rtol=0, atol=2e-3)


@pytest.mark.parametrize("name", [name for name in TREES if name != "hamming"])
def test_modes_multiply_to_the_kernel(name):
    x, kernel = _table(), TREES[name]().double()
    domain = tkrr.Domain(torch.tensor([0.5, 1.0, 1.0, 1.0]), torch.tensor([5.0, 2.5, 9.0, 2.5]))
    separable = separate(kernel, domain, 40, 4)
    product = separable.outputscale()
    for d, mode in enumerate(separable.modes):
        phi = mode.basis(x[:, d])
        product = product * mode.covariance().between(phi, phi)
        torch.testing.assert_close(mode.represented_variance(x[:, d]), mode.prior_variance(x[:, d]), rtol=5e-3, atol=0)
    torch.testing.assert_close(product.expand(len(x), len(x)), kernel(x).to_dense(), rtol=0, atol=5e-3)
    assert (3 in separable.categorical) == (name in ("anova", "product"))  # also a table of tasks


def test_botorchs_kernel_is_the_same():
    botorchs = pytest.importorskip("botorch.models.kernels.categorical").CategoricalKernel
    x = _table()
    for kwargs in ({"active_dims": (1, 2)}, {"active_dims": (1, 2), "ard_num_dims": 2}):
        ours, theirs = _hamming(**kwargs), _hamming(botorchs, **kwargs)
        torch.testing.assert_close(ours(x).to_dense(), theirs(x).to_dense())
        torch.testing.assert_close(ours(x, diag=True), theirs(x, diag=True))
        hilbert = tkrr.HilbertKernel.from_tolerance(theirs, x)
        torch.testing.assert_close(hilbert(x).to_dense(), theirs(x).to_dense())
    model = tkrr.TKRR(x, x[:, 0], gaussian(), kernel=RBFKernel(active_dims=(0,)).double() * theirs, rank=2)
    assert model.separate().categorical == [1, 2]

    class Changed(botorchs):
        def forward(self, *args, **kwargs):
            return 2 * super().forward(*args, **kwargs)

    with pytest.raises(tkrr.UnsupportedKernelError, match="Changed"):
        tkrr.HilbertKernel.from_tolerance(Changed(active_dims=(1, 2)), x)


def test_exact_gp_with_levels_never_seen():
    torch.manual_seed(0)
    x = _table(60)[:, :2]
    y = torch.sin(3 * x[:, 0]) + 0.3 * x[:, 1] ** 2
    new = torch.tensor([[0.3, 2.0], [0.7, -1.0], [0.3, 17.0], [0.3, -8.0]], dtype=torch.float64)
    predictions = []
    for wrap in (lambda kernel: kernel, lambda kernel: tkrr.HilbertKernel.from_tolerance(kernel, x, tol=1e-4)):
        kernel = ScaleKernel(RBFKernel(active_dims=(0,)) * _hamming(active_dims=(1,))).double()
        model = GP(x, y, gaussian(), wrap(kernel)).double().eval()
        with torch.no_grad():
            predictions.append((model(new).mean, model(new).variance))
    for exact, ours in zip(*predictions, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-3, atol=1e-3)


def test_lengthscale_is_trained():
    x, kernel = _table(), _hamming(active_dims=(1, 2))
    hilbert = tkrr.HilbertKernel.from_tolerance(kernel, x)
    for each in (hilbert(x).to_dense(), kernel(x).to_dense()):
        kernel.zero_grad()
        each.square().sum().backward()
        gradient = kernel.raw_lengthscale.grad.clone()
    kernel.zero_grad()
    hilbert(x).to_dense().square().sum().backward()
    torch.testing.assert_close(kernel.raw_lengthscale.grad, gradient)


def test_values_that_are_no_levels_are_refused():
    x = _table()
    x[3, 1] = 0.5
    with pytest.raises(tkrr.InputError, match="column 1 is a category"):
        tkrr.HilbertKernel.from_tolerance(_hamming(active_dims=(1, 2)), x)
    with pytest.raises(tkrr.InputError, match="column 1 is a category"):
        tkrr.TKRR(x, x[:, 0], gaussian(), categorical=[1])
    for wrong in ([4], [-1], [1, 1]):
        with pytest.raises(tkrr.SizeError, match="different input dimensions"):
            tkrr.anova_kernel(4, categorical=wrong)


def test_level_basis():
    basis = ConcatenatedBasis(ConstantBasis(), ConcatenatedBasis(MonomialBasis(1), LevelBasis(2, 3)))
    assert len(basis.bases) == 3 and basis.num_functions == 6
    x = torch.tensor([2.0, 4.0, 5.0, 3.5, float("inf"), -1e300])
    expected = torch.zeros(6, 4, dtype=torch.float64)
    expected[torch.arange(6), [0, 2, 3, 3, 3, 3]] = 1.0
    torch.testing.assert_close(LevelBasis(2, 3)(x), expected)
    coefficients = torch.randn(5, 6, dtype=torch.float64)
    torch.testing.assert_close(basis.combine(x[:4], coefficients), basis(x[:4]) @ coefficients.mT)
    levels, out = LevelBasis(2, 3), torch.empty(4, 4, dtype=torch.float64)
    levels.fill(x[:4], out)
    torch.testing.assert_close(out, levels(x[:4]).mT)
    sums = torch.empty(5, 4, dtype=torch.float64)
    levels.series(x[:4], coefficients[:, :4].contiguous(), sums, torch.empty(6, 4, dtype=torch.float64))
    torch.testing.assert_close(sums, coefficients[:, :4] @ levels(x[:4]).mT)
    whole = LevelBasis.inside(torch.tensor(4.5), torch.tensor(5.0))
    assert (whole.first, whole.num_levels) == (0, 10)
