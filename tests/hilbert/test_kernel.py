"""HilbertKernel: construction, warnings, errors, caching, batches."""

from __future__ import annotations

import copy
import pickle
import warnings

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.kernels import AdditiveStructureKernel, LinearKernel, MaternKernel, RBFKernel, ScaleKernel

from gpytorch_tkrr import (
    ApproximationWarning,
    Domain,
    DomainError,
    HilbertKernel,
    HyperbolicCross,
    InputError,
    OutOfDomainWarning,
    SizeError,
    TotalDegree,
    UnsupportedKernelError,
)
from gpytorch_tkrr.hilbert.prediction import split_covariance
from gpytorch_tkrr.operators.lazy_operators import HilbertCrossLinearOperator
from gpytorch_tkrr.operators.operator import HilbertLinearOperator

pytestmark = pytest.mark.usefixtures("functions_for_few_rows")


def rbf(lengthscale, **kwargs):
    kernel = RBFKernel(**kwargs)
    kernel.lengthscale = lengthscale
    return kernel


def evaluate(kernel, x):
    """The low-rank part of the covariance of training rows."""
    return split_covariance(kernel(x).evaluate_kernel())[0]


def predict(kernel, x):
    """As after a training: GPyTorch's exact prediction evaluates the kernel at its training rows."""
    model = gpytorch.models.ExactGP(x, x[:, 0], gpytorch.likelihoods.GaussianLikelihood())
    model.covar_module, model.mean_module = kernel, gpytorch.means.ZeroMean()
    model.forward = lambda x: gpytorch.distributions.MultivariateNormal(model.mean_module(x), kernel(x))
    return model.eval()(x[:1] + 1e-3).mean


# Construction


@pytest.mark.parametrize("num_basis", [0, -3, [4, 0], []])
def test_fewer_than_one_function(num_basis):
    with pytest.raises(SizeError, match="at least 1"):
        HilbertKernel(RBFKernel(), Domain(torch.zeros(2), 1.0), num_basis)


@pytest.mark.parametrize(
    ("num_basis", "expected"),
    [
        (np.int64(4), 4),
        (torch.tensor(4), 4),
        ([np.int64(4), torch.tensor(3)], (4, 3)),
        (np.array([4, 3]), (4, 3)),
        (torch.tensor([4, 3]), (4, 3)),
    ],
)
def test_integers_of_numpy_and_torch(num_basis, expected):
    kernel = HilbertKernel(RBFKernel(), Domain(torch.zeros(2), 1.0), num_basis)
    assert kernel.num_basis == expected
    assert kernel.expansion().num_functions == (16 if expected == 4 else 12)


@pytest.mark.parametrize("num_basis", [10.0, [10.5, 4], None, "10", torch.tensor(10.0), np.float64(10)])
def test_sizes_that_are_not_integers(num_basis):
    with pytest.raises(TypeError, match="num_basis must be a whole number"):
        HilbertKernel(RBFKernel(), Domain(torch.zeros(2), 1.0), num_basis)


def test_wrong_number_of_sizes():
    with pytest.raises(SizeError, match="3 entries but the inputs have 2"):
        HilbertKernel(RBFKernel(), Domain(torch.zeros(2), 1.0), [4, 4, 4])


def test_too_many_functions():
    with pytest.raises(SizeError, match="HyperbolicCross"):
        HilbertKernel(RBFKernel(), Domain(torch.zeros(4), 1.0), 20)
    HilbertKernel(RBFKernel(), Domain(torch.zeros(4), 1.0), 20, index_set=HyperbolicCross(20))


def test_unsupported_kernel():
    with pytest.raises(UnsupportedKernelError, match="CosineKernel"):
        HilbertKernel(gpytorch.kernels.CosineKernel(), Domain(torch.zeros(2), 1.0), 5)


def test_domain_must_be_a_domain():
    with pytest.raises(TypeError, match="Domain"):
        HilbertKernel(RBFKernel(), (0.0, 1.0), 5)


def test_wrong_number_of_columns():
    kernel = HilbertKernel(RBFKernel(), Domain(torch.zeros(2), 1.0), 5)
    with pytest.raises(DomainError, match="2 dimensions but the inputs have 3"):
        kernel(torch.rand(4, 3)).to_dense()
    with pytest.raises(DomainError, match="say how many"):
        HilbertKernel(RBFKernel(), Domain(0.0, 1.0), 5).expansion()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("training", [True, False])
def test_inputs_that_are_not_finite(bad, training):
    kernel = HilbertKernel(RBFKernel(), Domain(0.0, 1.0), 5).train(training)
    with pytest.raises(InputError, match="NaN or infinite"):
        kernel(torch.tensor([[0.0], [bad]])).to_dense()
    with pytest.raises(InputError, match="NaN or infinite"):
        kernel(torch.tensor([[0.0], [bad]]), diag=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_structure_kernels_belong_inside():
    kernel = AdditiveStructureKernel(HilbertKernel(RBFKernel(), Domain(0.0, 1.0), 5), num_dims=2)
    with pytest.raises(UnsupportedKernelError, match="inside"):
        kernel(torch.rand(4, 2)).to_dense()


# Values


@pytest.mark.filterwarnings("ignore::gpytorch_tkrr.ApproximationWarning")
def test_evaluations_agree_with_each_other():
    kernel = HilbertKernel(ScaleKernel(MaternKernel()), Domain(0.5, 2.0), [6, 7]).double()
    x, z = torch.rand(8, 2, dtype=torch.float64), torch.rand(5, 2, dtype=torch.float64)
    kernel.eval()  # each input counts what is missing there by itself
    both = kernel(torch.cat([x, z])).to_dense()
    assert torch.allclose(kernel(x).to_dense(), both[:8, :8])
    assert torch.allclose(kernel(x, z).to_dense(), both[:8, 8:])
    assert torch.allclose(kernel(x, diag=True), both.diagonal()[:8])
    assert torch.allclose(kernel(x[:5], z, diag=True), both[:5, 8:].diagonal())
    assert isinstance(evaluate(kernel, x), HilbertLinearOperator)
    assert isinstance(kernel(x, z).evaluate_kernel(), HilbertCrossLinearOperator)


def test_approximation_error_where_the_kernel_is_zero():
    kernel = HilbertKernel(LinearKernel(), Domain(torch.zeros(1), 1.0), 5)
    assert kernel.approximation_error(torch.zeros(4, 1)) == 0.0


def test_approximation_error_is_the_largest_difference():
    kernel = HilbertKernel(rbf(0.3), Domain(0.5, 0.8), 8).double()
    x = torch.linspace(0, 1, 40, dtype=torch.float64)
    expansion = kernel.expansion(1)
    features = expansion.features(x.unsqueeze(-1))
    exact = torch.exp(-((x.unsqueeze(-1) - x) ** 2) / (2 * 0.3**2))
    expected = ((features * expansion.variances()) @ features.mT - exact).abs().max()
    assert kernel.approximation_error(x) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert kernel.approximation_error(x, max_rows=10) <= float(expected.detach()) + 1e-12


# Approximation warnings


@pytest.mark.parametrize(
    ("base", "x", "num_basis", "cause"),
    [
        (RBFKernel(), torch.rand(50, 1), 20, "box is too small"),
        (RBFKernel(), torch.rand(50, 2), 12, "box is too small"),
        (RBFKernel(), 1000 * torch.rand(50, 1), 40, "too few functions"),
        (MaternKernel(nu=1.5), 1000 * torch.rand(50, 2), 20, "too few functions"),
        (ScaleKernel(RBFKernel()), torch.rand(50, 1), 20, "box is too small"),
    ],
)
def test_a_basis_that_does_not_suit_is_named_once_per_fit(base, x, num_basis, cause):
    kernel = HilbertKernel(base, Domain.from_data(x), num_basis)
    for _ in range(2):
        kernel.train()
        evaluate(kernel, x)  # a step of training says nothing
        with pytest.warns(ApproximationWarning, match=cause), warnings.catch_warnings():
            warnings.simplefilter("ignore", OutOfDomainWarning)
            predict(kernel, x)
        predict(kernel, x)  # a second warning would fail the test


def test_warns_inside_a_scale_kernel_and_for_any_of_a_batch():
    x = torch.rand(50, 1)
    kernel = ScaleKernel(HilbertKernel(RBFKernel(), Domain.from_data(x), 20))
    with pytest.warns(ApproximationWarning), pytest.warns(OutOfDomainWarning):
        predict(kernel, x)
    batch = rbf(torch.tensor([0.1, 0.1, 4.0]).reshape(3, 1, 1), batch_shape=torch.Size([3]))
    with pytest.warns(ApproximationWarning), pytest.warns(OutOfDomainWarning):
        predict(HilbertKernel(batch, Domain.from_data(x), 30), x)


def test_no_warning_where_the_error_is_small():
    x = torch.rand(50, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        predict(HilbertKernel(rbf(0.15), Domain.from_data(x), 24), x)
        predict(HilbertKernel.from_tolerance(RBFKernel(), x), x)
        predict(HilbertKernel.from_tolerance(RBFKernel(), x, tol=0.2), x)


# Caching


@pytest.mark.filterwarnings("ignore::gpytorch_tkrr.ApproximationWarning")
class TestCache:
    def make(self, **kwargs):
        kernel = HilbertKernel(RBFKernel(), Domain(0.5, 1.5), 6, **kwargs).double()
        return kernel, torch.rand(10, 3, dtype=torch.float64)

    def test_equal_content_is_served_from_memory(self):
        kernel, x = self.make(active_dims=[0, 2])
        first, second = evaluate(kernel, x), evaluate(kernel, x.clone())
        assert first.features is second.features
        assert first.gram() is second.gram()

    def test_inputs_changed_in_place_are_noticed(self):
        kernel, x = self.make()
        first = evaluate(kernel, x)
        x[0] = 0.9
        assert not torch.equal(evaluate(kernel, x).features, first.features)

    def test_another_domain_is_noticed(self):
        kernel, x = self.make()
        first = evaluate(kernel, x)
        kernel.domain.load_state_dict(Domain(0.0, 3.0).state_dict())
        assert not torch.equal(evaluate(kernel, x).features, first.features)
        kernel.domain.load_state_dict(Domain(0.0, 0.1).state_dict())
        with pytest.raises(DomainError):
            kernel(x).to_dense()

    def test_evaluations_that_are_not_training_do_not_displace_the_training_rows(self):
        kernel, x = self.make()
        first = evaluate(kernel, x)
        kernel.eval()
        evaluate(kernel, torch.rand(4, 3, dtype=torch.float64) * 0.1 + 0.5)
        kernel.train()
        assert evaluate(kernel, x).features is first.features

    def test_inputs_with_a_gradient_are_not_cached(self):
        kernel, x = self.make()
        x.requires_grad_(True)
        for _ in range(2):
            (gradient,) = torch.autograd.grad(evaluate(kernel, x).to_dense().sum(), x)
            assert gradient.any()
        assert kernel._cache.content is None

    def test_pickles_carry_no_cache(self):
        kernel, x = self.make()
        expected = kernel(x).to_dense()
        twin = pickle.loads(pickle.dumps(kernel))
        assert twin._cache.content is None
        assert torch.equal(twin(x).to_dense(), expected)
        assert kernel._cache.content is not None

    def test_copies_share_the_cache_and_nothing_else(self):
        kernel, x = self.make()
        twin = copy.deepcopy(kernel)
        first = evaluate(twin, x)
        assert evaluate(kernel, x).features is first.features
        twin.num_basis = 4
        assert evaluate(twin, x).num_features == 64
        assert torch.equal(evaluate(kernel, x).features, first.features)

    @pytest.mark.parametrize(
        "change",
        [
            lambda kernel: setattr(kernel, "num_basis", (3, 4, 9)),
            lambda kernel: setattr(kernel, "index_set", TotalDegree(6)),
            lambda kernel: setattr(kernel, "base_kernel", RBFKernel(active_dims=[0, 2, 1]).double()),
            lambda kernel: setattr(kernel, "base_kernel", RBFKernel(active_dims=[1]).double()),
            lambda kernel: setattr(kernel, "base_kernel", LinearKernel().double()),
        ],
    )
    def test_whatever_changes_the_functions_is_noticed(self, change):
        kernel = HilbertKernel(RBFKernel(), Domain(torch.full((3,), 0.5), 1.5), (9, 4, 3)).double()
        x = torch.rand(10, 3, dtype=torch.float64)
        evaluate(kernel, x)
        change(kernel)
        fresh = HilbertKernel(kernel.base_kernel, kernel.domain, kernel.num_basis, index_set=kernel.index_set)
        torch.testing.assert_close(kernel(x).to_dense(), fresh(x).to_dense(), rtol=0, atol=0)

    def test_repeated_inputs_share_their_features(self):
        kernel, x = self.make()
        single = evaluate(kernel, x)
        batch = evaluate(kernel, x.expand(3, 2, *x.shape).clone())
        assert batch.features is single.features and batch.shape == (3, 2, *single.shape)
        torch.testing.assert_close(batch.to_dense(), single.to_dense().expand(batch.shape))
        other = torch.stack([x, x.flip(0)])
        torch.testing.assert_close(evaluate(kernel, other).to_dense()[1], single.to_dense().flip(0, 1))


# Batches


@pytest.mark.filterwarnings("ignore::gpytorch_tkrr.ApproximationWarning")
def test_indexing_and_expanding_batches():
    base = ScaleKernel(RBFKernel(batch_shape=torch.Size([3])), batch_shape=torch.Size([3]))
    base.outputscale = torch.tensor([1.0, 2.0, 3.0])
    kernel = HilbertKernel(base, Domain(torch.tensor([0.5, 0.5]), 2.0), 5, active_dims=[0, 2])
    x = torch.rand(4, 3)
    whole = kernel(x).to_dense()
    assert kernel.batch_shape == (3,)
    assert whole.shape == (3, 4, 4)
    assert torch.allclose(kernel[1](x).to_dense(), whole[1])
    assert torch.allclose(kernel.expand_batch(torch.Size([2, 3]))(x).to_dense(), whole.expand(2, 3, 4, 4))
    assert torch.allclose(kernel(x)[2].to_dense(), whole[2])
    assert kernel.active_dims.tolist() == [0, 2]


def test_float32_inputs_give_float32():
    kernel = HilbertKernel(rbf(0.3), Domain(0.5, 1.5), 12)
    x = torch.rand(5, 1)
    assert (
        kernel(x).to_dense().dtype == kernel(x, diag=True).dtype == kernel(x, x[:2]).to_dense().dtype == torch.float32
    )
    assert kernel.double()(x.double()).to_dense().dtype == torch.float64


def test_states_of_other_kernels_are_refused():
    kernel = HilbertKernel(RBFKernel(), Domain(torch.zeros(2), 1.0), 4)
    with pytest.raises(RuntimeError, match="3 dimensions in the state, and 2 here"):
        kernel.load_state_dict(HilbertKernel(RBFKernel(), Domain(torch.zeros(3), 1.0), 4).state_dict())
    crossed = HilbertKernel(RBFKernel(), Domain(torch.zeros(2), 1.0), 4, index_set=HyperbolicCross(4))
    with pytest.raises(RuntimeError, match="index_set=HyperbolicCross"):
        kernel.load_state_dict(crossed.state_dict())
