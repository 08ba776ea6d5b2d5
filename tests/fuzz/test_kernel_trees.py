"""Random kernel trees inside HilbertKernel against dense algebra and against the kernels' own `forward`."""

from __future__ import annotations

import warnings

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import (
    AdditiveKernel,
    ConstantKernel,
    Kernel,
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    PolynomialKernel,
    ProductKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

import gpytorch_tkrr as tkrr

pytestmark = pytest.mark.usefixtures("functions_for_few_rows")

#: What a tree may be refused for, in a sentence; anything else that is raised is a defect.
REFUSALS = (tkrr.UnsupportedKernelError, tkrr.SizeError)


class GP(gpytorch.models.ExactGP):
    def __init__(self, x: Tensor, y: Tensor, kernel: Kernel, noise: float):
        likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
        likelihood.noise = noise
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean().double()
        self.covar_module = kernel

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


scales = st.floats(0.2, 5.0)


@st.composite
def leaves(draw: st.DrawFn, num_dims: int) -> Kernel:
    """A kernel without children over some of the columns."""
    dims = draw(st.lists(st.integers(0, num_dims - 1), min_size=1, max_size=min(num_dims, 2), unique=True))
    ard = {"ard_num_dims": len(dims)} if draw(st.booleans()) else {}
    kind = draw(
        st.sampled_from([RBFKernel, MaternKernel, RQKernel, PeriodicKernel, LinearKernel, ConstantKernel, None])
    )
    if kind is None:
        kernel: Kernel = PolynomialKernel(power=draw(st.integers(1, 2)), active_dims=dims)
    elif kind is ConstantKernel:
        kernel = ConstantKernel()
        kernel.constant = torch.tensor([draw(scales)])
    elif kind is LinearKernel:
        kernel = LinearKernel(active_dims=dims)
    elif kind is MaternKernel:
        kernel = MaternKernel(nu=draw(st.sampled_from([1.5, 2.5])), **ard, active_dims=dims)
    else:
        kernel = kind(**ard, active_dims=dims)
    if kernel.has_lengthscale:
        kernel.lengthscale = torch.tensor([draw(scales) for _ in range(kernel.lengthscale.numel())])
    if isinstance(kernel, PeriodicKernel):
        kernel.period_length = torch.tensor([draw(scales) for _ in range(kernel.period_length.numel())])
    return kernel


def trees(num_dims: int) -> st.SearchStrategy[Kernel]:
    """Sums, products and scales of leaves."""

    def scaled(kernel: Kernel, value: float) -> Kernel:
        scale = ScaleKernel(kernel)
        scale.outputscale = value
        return scale

    return st.recursive(
        leaves(num_dims),
        lambda children: st.one_of(
            st.builds(scaled, children, scales),
            st.lists(children, min_size=2, max_size=3).map(lambda parts: AdditiveKernel(*parts)),
            st.lists(children, min_size=2, max_size=2).map(lambda parts: ProductKernel(*parts)),
        ),
        max_leaves=4,
    )


@st.composite
def problems(draw: st.DrawFn) -> tuple[Kernel, Tensor, Tensor, float]:
    """A kernel tree, inputs in some unit, targets, and a noise variance."""
    num_dims = draw(st.integers(1, 3))
    kernel = draw(trees(num_dims)).double()
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = draw(st.floats(-3.0, 3.0)) + torch.rand(draw(st.integers(2, 25)), num_dims, generator=generator).double()
    y = torch.randn(len(x), generator=generator).double()
    return kernel, x, y, draw(st.floats(1e-3, 1.0))


def swapped(kernel: Kernel, x: Tensor, tol: float = 1e-3) -> tkrr.HilbertKernel:
    """The kernel on a basis of its own, or no example at all where it is refused in a sentence."""
    try:
        swapped = tkrr.HilbertKernel.from_tolerance(kernel, x, tol=tol)
    except REFUSALS as error:
        assert len(str(error)) > 40  # says what is in the way
        assume(False)
        raise
    assert swapped._tolerance is not None
    assume(not swapped._tolerance.is_limited)  # more functions would be needed than are allowed
    assume(swapped.expansion().num_functions <= 600)  # for the time that it takes
    return swapped


def exact_matrix(kernel: Kernel, x: Tensor) -> Tensor:
    """The kernel's own matrix; one column more than rows keeps sums of kernels from an inexact root."""
    return kernel(x, torch.cat([x, x[:1]])).to_dense()[:, :-1]


@given(problem=problems())
def test_matrix_within_the_tolerance(problem):
    kernel, x, _, _ = problem
    approximate = swapped(kernel, x)
    with torch.no_grad():
        exact = exact_matrix(kernel, x)
        # Variances of features outside their own range (polynomials, linear) grow with the inputs, not with k(0).
        assert (approximate(x).to_dense() - exact).abs().max() <= 1e-3 * exact.diagonal().max() + 1e-9


@given(problem=problems())
def test_likelihood_and_gradients(problem):
    kernel, x, y, noise = problem
    model = GP(x, y, swapped(kernel, x), noise).train()
    model.covar_module.keep_basis()  # the same for both
    parameters = [p for p in model.parameters() if p.requires_grad]
    structured = model.likelihood(model(x)).log_prob(y)
    covariance = model.covar_module(x).to_dense() + model.likelihood.noise * torch.eye(len(x)).double()
    dense = torch.distributions.MultivariateNormal(model.mean_module(x), covariance).log_prob(y)
    assert torch.allclose(structured, dense, rtol=1e-6, atol=1e-6 * len(x))
    ours, theirs = (torch.autograd.grad(value, parameters, allow_unused=True) for value in (structured, dense))
    size = max(float(g.abs().max()) for g in theirs if g is not None)
    for a, b in zip(ours, theirs, strict=True):
        a, b = (torch.zeros(()) if g is None else g for g in (a, b))
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5 * size)


@given(problem=problems(), num_new=st.integers(1, 4))
def test_predictions_and_fantasies(problem, num_new):
    kernel, x, y, noise = problem
    model = GP(x, y, swapped(kernel, x), noise).eval()
    test_x = x.amin(0) + (x.amax(0) - x.amin(0)) * torch.rand(7, x.shape[1], dtype=torch.float64)
    new_x, new_y = test_x[:num_new] + 1e-3, torch.randn(num_new, dtype=torch.float64)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", gpytorch.utils.warnings.GPInputWarning)
        warnings.simplefilter("ignore", NumericalWarning)  # few rows: GPyTorch adds roots to dense matrices with jitter
        before = model(test_x)
        after = model.get_fantasy_model(new_x, new_y)(test_x)
        for prediction, rows, targets in [
            (before, x, y),
            (after, torch.cat([x, new_x]), torch.cat([y, new_y])),
        ]:
            covariance = exact_matrix(kernel, rows) + noise * torch.eye(len(rows)).double()
            cross = kernel(test_x, rows).to_dense()
            mean = cross @ torch.linalg.solve(covariance, targets)
            variance = (
                exact_matrix(kernel, test_x).diagonal() - (cross @ torch.linalg.solve(covariance, cross.mT)).diagonal()
            )
            # An error of the matrix of tol k(0) moves a prediction by about that over the noise.
            size = 1e-3 * float(covariance.diagonal().max()) * (1 + len(rows) / noise) ** 0.5
            assert (prediction.mean - mean).abs().max() < 5 * size * (1 + float(targets.abs().max()))
            assert (prediction.variance - variance).abs().max() < 5 * size


@settings(max_examples=2 * settings.default.max_examples // 5)
@given(problem=problems(), other=st.integers(5, 30))
def test_changed_counts_and_structure_are_seen(problem, other):
    """After any change the kernel is that of a fresh one: nothing that it depends on is forgotten by a cache."""
    kernel, x, _, _ = problem
    approximate = swapped(kernel, x)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", tkrr.TKRRWarning)
        approximate.train()(x).to_dense()
        by_hand = tkrr.HilbertKernel(kernel, approximate.domain, other).train()
        try:
            by_hand(x).to_dense()
        except tkrr.SizeError:
            assume(False)
        by_hand.num_basis = max(other // 2, 1)
        fresh = tkrr.HilbertKernel(kernel, approximate.domain, max(other // 2, 1)).train()
        assert torch.allclose(by_hand(x).to_dense(), fresh(x).to_dense())
        by_hand.base_kernel = RBFKernel().double()
        fresh = tkrr.HilbertKernel(RBFKernel().double(), approximate.domain, max(other // 2, 1)).train()
        assert torch.allclose(by_hand(x).to_dense(), fresh(x).to_dense())
