"""Every family of functions: convergence to the kernel's own forward, products, edges of the box, models, state."""

from __future__ import annotations

import itertools

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.kernels import (
    AdditiveKernel,
    ConstantKernel,
    MaternKernel,
    ProductStructureKernel,
    RBFKernel,
    ScaleKernel,
)
from models import GP

import gpytorch_tkrr as tkrr
from gpytorch_tkrr import Domain, HilbertKernel
from gpytorch_tkrr.bases.waves import FrequencyBasis, HarmonicBasis
from gpytorch_tkrr.cp.moments import MomentTable
from gpytorch_tkrr.families.fourier_series import OrthonormalSeries
from gpytorch_tkrr.operators.lazy_features import LazyFeatures

pytestmark = pytest.mark.usefixtures("functions_for_few_rows")

STATIONARY = {
    "sines": tkrr.Sines(),
    "Gauss-Legendre": tkrr.GaussLegendre(),
    "Gauss-Hermite": tkrr.GaussHermite(),
    "variational": tkrr.VariationalFourier(),
    "random": tkrr.RandomFourier(),
}
DETERMINISTIC = {name: family for name, family in STATIONARY.items() if name != "random"}
MAPS = {
    "Fourier series": tkrr.FourierSeries(),
    "trigonometric": tkrr.Trigonometric(),
    "polynomial": tkrr.Polynomial(3),
}
BOX = Domain(torch.tensor([0.3]), torch.tensor([5.0]))


def matern(nu=2.5, lengthscale=0.6, **kwargs):
    kernel = MaternKernel(nu=nu, **kwargs).double()
    kernel.lengthscale = torch.as_tensor(lengthscale, dtype=torch.float64)
    return kernel


def rbf(lengthscale=0.6, **kwargs):
    kernel = RBFKernel(**kwargs).double()
    kernel.lengthscale = torch.as_tensor(lengthscale, dtype=torch.float64)
    return kernel


def grid(num=41, num_dims=1):
    return (torch.rand(num, num_dims, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) - 0.5) * 2 + 0.3


@pytest.mark.parametrize("name", DETERMINISTIC)
@pytest.mark.parametrize("nu", [0.5, 1.5, 2.5])
def test_matern_kernels_are_approached_as_their_tail_falls(name, nu):
    """The error falls about as M^(-2 nu): fourfold functions make it smaller by 4^(2 nu), with a factor to spare."""
    kernel = ScaleKernel(matern(nu)).double()
    few, many = (
        HilbertKernel(kernel, BOX, m, basis=DETERMINISTIC[name]).approximation_error(grid()) for m in (41, 161)
    )
    assert many < few * 4 ** (-2 * nu) * 1.7
    assert many < {0.5: 0.1, 1.5: 2e-3, 2.5: 2e-4}[nu]


@pytest.mark.parametrize("name", ["sines", "Gauss-Legendre", "Gauss-Hermite"])
def test_smooth_kernels_are_approached_fast(name):
    family = DETERMINISTIC[name]
    errors = [HilbertKernel(rbf(), BOX, m, basis=family).approximation_error(grid()) for m in (8, 16, 32)]
    assert errors[-1] < 0.02 and all(after < before / 2 for before, after in itertools.pairwise(errors))
    assert HilbertKernel(rbf(), BOX, 100, basis=family).approximation_error(grid()) < 1e-9


@pytest.mark.parametrize("base", [rbf(), matern(1.5)], ids=["RBF", "Matern"])
def test_random_frequencies_err_by_the_root_of_their_number(base):
    errors = [
        np.mean(
            [
                HilbertKernel(base, BOX, m, basis=tkrr.RandomFourier(seed)).approximation_error(grid())
                for seed in range(12)
            ]
        )
        for m in (50, 800)
    ]
    assert 0.12 < errors[1] / errors[0] < 0.45  # 1/4


@pytest.mark.parametrize("name", ["sines", "Gauss-Legendre", "Gauss-Hermite"])
@pytest.mark.parametrize("base", [RBFKernel, MaternKernel])
def test_kernels_of_two_inputs(name, base):
    kernel = base(ard_num_dims=2).double()
    kernel.lengthscale = torch.tensor([[0.7, 1.1]])
    reduced = HilbertKernel(kernel, Domain(torch.full((2,), 0.3), 3.5), 36, basis=DETERMINISTIC[name])
    assert reduced.approximation_error(grid(60, 2)) < (1e-4 if base is RBFKernel else 5e-3)


def test_random_frequencies_of_two_inputs_are_drawn_jointly():
    kernel = matern(1.5, torch.tensor([[0.7, 1.1]]), ard_num_dims=2)
    reduced = HilbertKernel(kernel, Domain(torch.full((2,), 0.3), 3.0), [100, 80], basis=tkrr.RandomFourier())
    assert reduced.expansion().num_functions == 8000
    assert reduced.approximation_error(grid(60, 2)) < 0.06
    inputs = grid(30, 2)
    gradient = torch.autograd.grad(reduced(inputs).to_dense().sum(), kernel.raw_lengthscale)[0]
    exact = torch.autograd.grad(kernel(inputs).to_dense().sum(), kernel.raw_lengthscale)[0]
    torch.testing.assert_close(gradient, exact, rtol=0.15, atol=0)


def test_hermite_nodes_of_a_lengthscale_are_the_published_ones():
    """For an RBF kernel and L = l sqrt(M): nodes sqrt(2) z / l, weights q / sqrt(pi)."""
    num, length = 20, 0.6
    z, q = np.polynomial.hermite.hermgauss(num)
    half_width = torch.tensor([length * num**0.5], dtype=torch.float64)
    expansion = HilbertKernel(
        rbf(length), Domain(torch.zeros(1), half_width), num, basis=tkrr.GaussHermite()
    ).expansion()
    published = 2 * torch.from_numpy(q[num // 2 :]).repeat_interleave(2) / np.pi**0.5
    torch.testing.assert_close(expansion.variances(), published, rtol=1e-9, atol=1e-15)
    nodes = torch.from_numpy(2**0.5 * z[num // 2 :] / length).repeat_interleave(2)
    torch.testing.assert_close(expansion.bases[0].frequencies, nodes)


def test_hermite_weights_do_not_overflow():
    basis = tkrr.GaussHermite().functions(torch.tensor(0.0).double(), torch.tensor(1.0).double(), 3000)
    assert torch.isfinite(basis.factors).all() and (basis.factors > 0).all()
    spacing = basis.omega.diff()[:100]  # for large orders the weights are the distances of the nodes
    torch.testing.assert_close(np.pi * basis.factors[:200:2], spacing, rtol=1e-3, atol=0)


@pytest.mark.parametrize("name", MAPS)
def test_maps_are_their_own_kernel(name):
    domain = Domain(torch.tensor([0.3, 0.2]), torch.tensor([1.1, 1.3]))
    kernel = HilbertKernel(None, domain, 7, basis=MAPS[name]).double()
    assert isinstance(kernel.base_kernel.base_kernel, tkrr.MapKernel)
    assert kernel.approximation_error(grid(50, 2)) < 1e-12
    assert 0.3 < float(kernel.base_kernel.base_kernel(grid(50, 2), diag=True).mean()) < 3


def test_kernels_of_the_maps():
    s, t = torch.rand(2, 9, 1, dtype=torch.float64)  # in [0, 1]
    domain = Domain(0.5, 0.5)
    wave = tkrr.Trigonometric().kernel(domain)(s, t).to_dense()
    torch.testing.assert_close(wave, torch.cos(torch.pi / 2 * (s - t.mT)))
    dirichlet = tkrr.FourierSeries().kernel(domain, 9)(s, t).to_dense()
    lag = 2 * torch.pi * (s - t.mT)
    torch.testing.assert_close(dirichlet, torch.sin(4.5 * lag) / torch.sin(lag / 2) / 9)
    legendre = tkrr.Polynomial(4).kernel(domain)(s, t).to_dense()
    values = [
        np.polynomial.legendre.legvander(2 * z[:, 0].numpy() - 1, 4) * np.sqrt(2 * np.arange(5) + 1) for z in (s, t)
    ]
    torch.testing.assert_close(legendre, torch.from_numpy(values[0] @ values[1].T / 5))


BASES = {
    "frequencies": FrequencyBasis(*torch.tensor([0.3, 1.4]).double(), *torch.rand(2, 5).double()),
    "harmonics": HarmonicBasis(*torch.tensor([0.3, 1.4]).double(), 4),
    "constant": HarmonicBasis(*torch.tensor([0.3, 1.4]).double(), 0),
    "orthonormal": OrthonormalSeries(*torch.tensor([0.3, 1.4]).double(), 4),
    "quarter wave": tkrr.Trigonometric().functions(*torch.tensor([0.3, 1.4]).double(), 2),
    "Legendre": tkrr.Polynomial(5).functions(*torch.tensor([0.3, 1.4]).double(), 2),
}


@pytest.mark.parametrize("name", BASES)
def test_functions_and_their_products(name):
    basis = BASES[name]
    x = torch.cat([torch.linspace(-1.1, 1.7, 30), torch.tensor([-2.0, 4.0])]).double()  # the last two lie outside
    features = basis(x)
    assert features.shape == (32, basis.num_functions)
    assert (features[-2:] == 0).all() and (features[:-2].abs().amax(-1) > 0).all()
    filled = torch.empty(basis.num_functions, 32, dtype=torch.float64)
    basis.fill(x, filled)
    torch.testing.assert_close(filled.mT, features)
    if basis.num_moments is not None:
        moments = torch.empty(basis.num_moments, 32, dtype=torch.float64)
        basis.fill_with_moments(x, filled, moments)
        torch.testing.assert_close(filled.mT, features)
        torch.testing.assert_close(moments, basis.moments(x))
        (index, factor) = basis.product_formula()
        products = (factor.unsqueeze(-1) * moments[index]).sum(0)
        torch.testing.assert_close(products, torch.einsum("ni,nj->ijn", features, features))
    assert basis.band(-2.0, 1.0) is None
    frequency, degree = basis.band(-1.0, 1.0)
    assert frequency >= 0 and degree >= 0
    assert basis.structure == basis.detach().structure


@pytest.mark.parametrize("name", [*STATIONARY, "Fourier series", "polynomial"])
def test_gram_matrices_by_moments(name):
    kernel = HilbertKernel(None if name in MAPS else matern(), BOX, 15, basis={**STATIONARY, **MAPS}[name])
    expansion, x = kernel.expansion(), grid(200)
    features, weights = expansion.features(x), torch.rand(200, dtype=torch.float64)
    expected = features.mT @ (weights.unsqueeze(-1) * features)
    found = LazyFeatures(x, expansion=expansion).gram(weights)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def test_series_have_fast_products():
    assert MomentTable(HarmonicBasis(*torch.tensor([0.3, 1.4]).double(), 20)).num_moments == 81


@pytest.mark.parametrize("name", [*STATIONARY, *MAPS])
def test_outside_of_the_box(name):
    """As with the sines: training rows are refused; new rows get the prior, with one warning."""
    is_map = name in MAPS
    box = Domain(torch.tensor([0.3]), torch.tensor([3.0]))
    kernel = HilbertKernel(None if is_map else matern(), box, 31, basis={**STATIONARY, **MAPS}[name]).double()
    x = grid()
    y = torch.sin(3 * x[:, 0])
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    likelihood.noise = 0.01
    model = GP(x, y, likelihood, kernel).double()
    with pytest.warns(tkrr.OutOfDomainWarning, match="outside the box"), torch.no_grad():
        outside = model.eval()(torch.tensor([[0.5], [4.0]], dtype=torch.float64))
    edge = kernel.base_kernel(torch.tensor([[3.3]], dtype=torch.float64), diag=True)
    assert abs(float(outside.mean[1])) < 1e-10
    torch.testing.assert_close(outside.variance[1:], edge.detach(), rtol=1e-6, atol=1e-9)
    bad = GP(x + 4, y, likelihood, kernel).double().train()
    with pytest.raises(tkrr.DomainError, match="outside the domain"):
        bad(x + 4).log_prob(y)


@pytest.mark.parametrize("family", MAPS.values(), ids=MAPS)
def test_maps_refuse_kernels_that_they_cannot_represent(family):
    x = torch.rand(20, 2)
    with pytest.raises(tkrr.UnsupportedKernelError, match=r"kernel of its own.*Give no kernel"):
        HilbertKernel(ScaleKernel(RBFKernel()), Domain(torch.zeros(2), 1.0), 4, basis=family)
    with pytest.raises(tkrr.UnsupportedKernelError, match=r"RBFKernel.*kernel of its own"):
        tkrr.TKRR(x, x[:, 0], gpytorch.likelihoods.GaussianLikelihood(), kernel=RBFKernel(), basis=family)
    kernel = AdditiveKernel(ConstantKernel(), family.kernel(Domain(torch.zeros(2), 1.0), 5))  # this one they are
    assert HilbertKernel(kernel, Domain(torch.zeros(2), 1.0), 5, basis=family).approximation_error(x) < 1e-6


@torch.no_grad()
@pytest.mark.parametrize("family", [tkrr.GaussLegendre(), tkrr.GaussHermite()], ids=repr)
@pytest.mark.parametrize("rule", [tkrr.TotalDegree, tkrr.HyperbolicCross])
def test_index_sets_of_quadratures_count_nodes(family, rule):
    """The kernel stays stationary, and tends to the full product, which has more functions, with the limit."""
    x = 2 * torch.rand(40, 2, dtype=torch.float64) - 1
    base = RBFKernel(ard_num_dims=2).double()
    base.lengthscale = torch.tensor([[0.6, 0.9]])
    box = Domain(torch.zeros(2), 2.0)
    full = HilbertKernel(base, box, 24, basis=family)
    limits = (8, 14, 24) if rule is tkrr.TotalDegree else (16, 40, 144)
    distances = []
    for limit in limits:
        kernel = HilbertKernel(base, box, 24, basis=family, index_set=rule(limit))
        distances.append(float((kernel(x).to_dense() - full(x).to_dense()).abs().max()))
        torch.testing.assert_close(
            kernel(x).diagonal(dim1=-1, dim2=-2), kernel(x[:1]).to_dense().expand(40, 1)[:, 0], rtol=1e-9, atol=1e-12
        )
    assert distances[0] > distances[1] >= distances[2] and distances[2] < 1e-12 and distances[1] < 0.02
    few = HilbertKernel(base, box, 24, basis=family, index_set=rule(limits[1]))
    assert few.expansion(2).num_functions < full.expansion(2).num_functions == 24**2


def test_other_refusals():
    with pytest.raises(tkrr.UnsupportedKernelError, match=r"base_kernel: RBFKernel is no MaternKernel"):
        HilbertKernel(ScaleKernel(RBFKernel()), BOX, 5, basis=tkrr.VariationalFourier())
    with pytest.raises(tkrr.UnsupportedKernelError, match="functions of one"):
        HilbertKernel(MaternKernel(), Domain(torch.zeros(2), 1.0), 5, basis=tkrr.VariationalFourier())
    with pytest.raises(tkrr.UnsupportedKernelError, match="neither an RBFKernel nor a MaternKernel"):
        HilbertKernel(gpytorch.kernels.RQKernel(), BOX, 5, basis=tkrr.RandomFourier())
    with pytest.raises(tkrr.UnsupportedKernelError, match="all inputs at once"):
        box = Domain(torch.zeros(2), 1.0)
        HilbertKernel(RBFKernel(), box, 6, basis=tkrr.RandomFourier(), index_set=tkrr.HyperbolicCross(6))
    x = torch.rand(20, 2)
    with pytest.raises(tkrr.UnsupportedKernelError, match="requires_grad_"):
        likelihood = gpytorch.likelihoods.GaussianLikelihood()
        tkrr.TKRR(x, x[:, 0], likelihood, kernel=RBFKernel(), basis=tkrr.RandomFourier())
    with pytest.raises(TypeError, match="basis must be an object such as"):
        HilbertKernel(RBFKernel(), BOX, 5, basis="sines")
    with pytest.raises(TypeError, match="needs a base kernel"):
        HilbertKernel(None, BOX, 5)
    for degree in (0, 1.5, True):
        with pytest.raises(tkrr.SizeError, match="degree"):
            tkrr.Polynomial(degree)


@pytest.mark.filterwarnings("ignore:.*StructureKernel is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The last_dim_is_batch argument is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", DETERMINISTIC)
def test_trees_of_kernels(name):
    """Sums on one column, products over columns, scales: what a family has for leaves holds for trees."""
    tree = ScaleKernel(matern(1.5, 0.9, active_dims=[0]) * matern(2.5, 0.7, active_dims=[1])).double()
    tree = tree + ScaleKernel(matern(2.5, active_dims=[0])).double() + gpytorch.kernels.LinearKernel().double()
    structured = ProductStructureKernel(matern(2.5, 0.9), num_dims=2)
    for kernel in (tree, structured):
        reduced = HilbertKernel(kernel, Domain(torch.full((2,), 0.3), 4.5), 41, basis=DETERMINISTIC[name])
        assert reduced.approximation_error(grid(40, 2)) < 0.03
        values = torch.autograd.grad(reduced(grid(40, 2)).to_dense().sum(), list(kernel.parameters()))
        exact = torch.autograd.grad(kernel(grid(40, 2)).to_dense().sum(), list(kernel.parameters()))
        for approximate, true in zip(values, exact, strict=True):
            torch.testing.assert_close(approximate, true, rtol=0.05, atol=0.3)


def cp_model(x, y, name):
    """A CP model of rank 4 with each family."""
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    likelihood.noise = 0.01
    if name in MAPS:
        return tkrr.TKRR(x, y, likelihood, basis=MAPS[name], rank=9, num_basis=9)
    kernel = ScaleKernel(matern(2.5, 0.5, active_dims=[0]) * matern(1.5, 0.8, active_dims=[1])).double()
    if name == "random":
        for part in kernel.base_kernel.kernels:
            part.raw_lengthscale.requires_grad_(False)
    return tkrr.TKRR(x, y, likelihood, kernel=kernel, basis=STATIONARY[name], rank=4, num_basis=13)


def dense_mean(model, x, y, x_test):
    """The Gaussian process on all products of functions, by N x N matrices."""
    modes, scale = model.separate().modes, model.separate().outputscale()

    def covariance(a, b):
        parts = (m.basis(a[:, d]) @ m.covariance().to_dense() @ m.basis(b[:, d]).mT for d, m in enumerate(modes))
        return scale * torch.stack(list(parts)).prod(0)

    noisy = covariance(x, x) + model.noise() * torch.eye(len(x))
    return y.mean() + covariance(x_test, x) @ torch.linalg.solve(noisy, y - y.mean())


@pytest.mark.filterwarnings("ignore::gpytorch_tkrr.ApproximationWarning")
@pytest.mark.parametrize("name", [*STATIONARY, *MAPS])
@torch.no_grad()
def test_cp_models(name):
    """At a rank that is large enough ALS finds the Gaussian process on all products; states are restored."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(150, 2, dtype=torch.float64, generator=generator)
    y = torch.sin(4 * x[:, 0]) * x[:, 1] + 0.05 * torch.randn(150, dtype=torch.float64, generator=generator)
    model = cp_model(x, y, name)
    result = tkrr.fit_als(model, max_sweeps=300, rel_tol=1e-13, seed=0)
    objective = torch.tensor(result.objective, dtype=torch.float64)
    assert (objective.diff() <= 1e-9 * objective[:-1]).all()
    x_test = torch.rand(30, 2, dtype=torch.float64, generator=generator)
    expected = dense_mean(model, x, y, x_test)
    assert float((model.eval()(x_test).mean - expected).abs().max()) < 0.05 * float(y.std())
    if name in MAPS:
        restored = tkrr.TKRR(None, None, gpytorch.likelihoods.GaussianLikelihood(), basis=MAPS[name]).double()
    else:
        restored = cp_model(x, y, name)
    restored.load_state_dict(model.state_dict())
    torch.testing.assert_close(restored.eval()(x_test).mean, model(x_test).mean)
    torch.testing.assert_close(restored(x_test).variance, model(x_test).variance)
    other = tkrr.TKRR(None, None, gpytorch.likelihoods.GaussianLikelihood(), basis=tkrr.Polynomial(7)).double()
    with pytest.raises(tkrr.InputError, match="Make it with the same basis"):
        other.load_state_dict(model.state_dict())


@pytest.mark.filterwarnings("ignore::gpytorch_tkrr.ApproximationWarning")
@pytest.mark.filterwarnings("ignore::gpytorch_tkrr.ConvergenceWarning")
@pytest.mark.parametrize("name", ["Gauss-Legendre", "variational", "polynomial"])
def test_draws_of_cp_models(name):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(120, 2, dtype=torch.float64, generator=generator)
    y = torch.sin(4 * x[:, 0]) * x[:, 1] + 0.1 * torch.randn(120, dtype=torch.float64, generator=generator)
    model = cp_model(x, y, name)
    tkrr.fit_gibbs(model, num_draws=60, num_warmup=40, seed=0)
    x_test = torch.rand(200, 2, dtype=torch.float64, generator=generator)
    with torch.no_grad():
        error = model.eval()(x_test).mean - torch.sin(4 * x_test[:, 0]) * x_test[:, 1]
    assert float(error.square().mean().sqrt()) < 0.08


def test_state_of_kernels():
    kernel = HilbertKernel(matern(), BOX, 15, basis=tkrr.VariationalFourier())
    state = kernel.state_dict()
    again = HilbertKernel(matern(lengthscale=0.1), BOX, 9, basis=tkrr.VariationalFourier())
    again.load_state_dict(state)
    torch.testing.assert_close(again(grid()).to_dense(), kernel(grid()).to_dense())
    with pytest.raises(RuntimeError, match=r"basis=VariationalFourier\(\); this kernel has GaussLegendre\(\)"):
        HilbertKernel(matern(), BOX, 9, basis=tkrr.GaussLegendre()).load_state_dict(state)


@pytest.mark.parametrize("name", ["Gauss-Legendre", "Gauss-Hermite", "variational"])
@pytest.mark.parametrize("make", [rbf, matern], ids=["RBF", "Matern"])
def test_tolerances_hold_while_lengthscales_move(name, make):
    if name == "variational" and make is rbf:
        pytest.skip("Matern kernels only")
    x = torch.cat([torch.rand(60, 1), torch.tensor([[0.0], [1.0]])]).double()
    for tol in (1e-2, 1e-3):
        base = ScaleKernel(make(lengthscale=0.7)).double()
        kernel = HilbertKernel.from_tolerance(base, x, tol, basis=STATIONARY[name])
        for lengthscale in (0.7, 0.05, 0.3, 3.0):
            base.base_kernel.lengthscale = lengthscale
            assert kernel.approximation_error(x) < tol
        assert 1 <= kernel.num_revisions <= 3


@pytest.mark.parametrize("name", ["Gauss-Legendre", "Gauss-Hermite"])
def test_tolerance_for_two_inputs(name):
    kernel = HilbertKernel.from_tolerance(matern(2.5, 0.6), grid(60, 2), 1e-2, basis=STATIONARY[name])
    assert kernel.approximation_error(grid(60, 2)) < 1e-2


@pytest.mark.parametrize("family", [tkrr.RandomFourier(), tkrr.Polynomial(2)], ids=["random", "map"])
def test_tolerances_without_a_bound_are_refused(family):
    with pytest.raises(tkrr.UnsupportedKernelError, match="No bound of the error is known"):
        HilbertKernel.from_tolerance(rbf(), grid(), basis=family)
