"""GPyTorch's own conformance suites for kernels and models, unedited."""

from __future__ import annotations

import unittest

import gpytorch
import pytest
import torch
from gpytorch.kernels import (
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    PolynomialKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
)
from gpytorch.test.base_kernel_test_case import BaseKernelTestCase
from gpytorch.test.model_test_case import BaseModelTestCase, VariationalModelTestCase
from models import GP, ReducedRankGP

import gpytorch_tkrr as tkrr
from gpytorch_tkrr import Domain, HilbertKernel, HyperbolicCross, TotalDegree
from gpytorch_tkrr.families.map_kernel import FeatureMap
from gpytorch_tkrr.features.expansion import BasisFamily

# The suites draw up to ten-dimensional standard normal inputs: what they test is shapes and indexing, not accuracy.
pytestmark = [
    pytest.mark.filterwarnings("ignore::gpytorch_tkrr.ApproximationWarning"),
    pytest.mark.filterwarnings("ignore:The input matches the stored training data"),
]
_DOMAIN = {"center": 0.0, "half_width": 6.0}  # broadcasts to any number of dimensions
_NO_BATCH = torch.Size([])
_BATCH = torch.Size([3])


class _KernelCase(BaseKernelTestCase):
    base: type = RBFKernel
    index_set: tkrr.IndexSet | None = HyperbolicCross(6)
    num_basis = 6
    family: BasisFamily = tkrr.Sines()

    def create_base(self, **kwargs):
        return self.base(**kwargs)

    def create_kernel_no_ard(self, active_dims=None, **kwargs):
        return HilbertKernel(
            self.create_base(**kwargs),
            Domain(**_DOMAIN),
            self.num_basis,
            basis=self.family,
            index_set=self.index_set,
            active_dims=active_dims,
        )

    def create_kernel_ard(self, num_dims, **kwargs):
        return self.create_kernel_no_ard(ard_num_dims=num_dims, **kwargs)


class TestRBF(_KernelCase, unittest.TestCase):
    pass


class TestGaussLegendre(_KernelCase, unittest.TestCase):
    family, index_set, num_basis = tkrr.GaussLegendre(), None, 2


class TestGaussHermite(TestGaussLegendre):
    family, base = tkrr.GaussHermite(), MaternKernel


class TestRandomFourier(TestGaussLegendre):
    family = tkrr.RandomFourier()


class TestVariationalFourier(TestGaussLegendre):
    family, num_basis = tkrr.VariationalFourier(), 5

    base = MaternKernel

    def create_kernel_no_ard(self, active_dims=None, **kwargs):
        first = [0] if active_dims is None else list(active_dims[:1])  # functions of one input
        return super().create_kernel_no_ard(active_dims=first, **kwargs)

    def create_kernel_ard(self, num_dims, **kwargs):
        raise NotImplementedError


class TestFourierSeries(TestGaussLegendre):
    family: FeatureMap = tkrr.FourierSeries()
    num_basis = 1

    def create_base(self, batch_shape=_NO_BATCH, **kwargs):
        return ScaleKernel(self.family.kernel(Domain(**_DOMAIN), self.num_basis), batch_shape=batch_shape)

    def create_kernel_ard(self, num_dims, **kwargs):
        raise NotImplementedError  # maps have no lengthscales


class TestTrigonometric(TestFourierSeries):
    family = tkrr.Trigonometric()


class TestLegendre(TestFourierSeries):
    family = tkrr.Polynomial(1)


class TestMatern(_KernelCase, unittest.TestCase):
    base = MaternKernel
    index_set = TotalDegree(12)


class TestRationalQuadratic(_KernelCase, unittest.TestCase):
    def create_base(self, **kwargs):
        kernel = RQKernel(**kwargs)
        kernel.alpha = 6.0  # above half of the ten dimensions
        return kernel


class TestPolynomial(_KernelCase, unittest.TestCase):
    def create_base(self, **kwargs):
        return PolynomialKernel(power=2, **kwargs)

    def create_kernel_ard(self, num_dims, **kwargs):
        raise NotImplementedError  # the polynomial kernel has no lengthscales


class TestPeriodic(_KernelCase, unittest.TestCase):
    base = PeriodicKernel
    num_basis = 2


class TestLinear(_KernelCase, unittest.TestCase):
    base = LinearKernel


class TestScaleInside(_KernelCase, unittest.TestCase):
    def create_base(self, batch_shape=_NO_BATCH, **kwargs):
        return ScaleKernel(RBFKernel(batch_shape=batch_shape, **kwargs), batch_shape=batch_shape)


class TestScaleOutside(_KernelCase, unittest.TestCase):
    def create_kernel_no_ard(self, batch_shape=_NO_BATCH, **kwargs):
        kernel = super().create_kernel_no_ard(batch_shape=batch_shape, **kwargs)
        return ScaleKernel(kernel, batch_shape=batch_shape)


def _hilbert(batch_shape, num_basis):
    base = ScaleKernel(RBFKernel(batch_shape=batch_shape), batch_shape=batch_shape)
    return HilbertKernel(base, Domain(**_DOMAIN), num_basis)


class _ModelCase(BaseModelTestCase):
    model: type = GP

    def create_model(self, train_x, train_y, likelihood):
        return self.model(train_x, train_y, likelihood, _hilbert(train_x.shape[:-2], 12))

    def create_test_data(self):
        return torch.randn(50, 1)

    def create_likelihood_and_labels(self):
        return gpytorch.likelihoods.GaussianLikelihood(), torch.randn(50)

    def create_batch_test_data(self, batch_shape=_BATCH):
        return torch.randn(*batch_shape, 50, 1)

    def create_batch_likelihood_and_labels(self, batch_shape=_BATCH):
        return gpytorch.likelihoods.GaussianLikelihood(batch_shape=batch_shape), torch.randn(*batch_shape, 50)


class TestExactModel(_ModelCase, unittest.TestCase):
    pass


class TestExactModelReducedRankNormal(_ModelCase, unittest.TestCase):
    model = ReducedRankGP


class TestExactModelFixedNoise(_ModelCase, unittest.TestCase):
    def create_likelihood_and_labels(self):
        noise = torch.rand(50) + 0.1
        return gpytorch.likelihoods.FixedNoiseGaussianLikelihood(noise, learn_additional_noise=True), torch.randn(50)


class _Variational(gpytorch.models.ApproximateGP):
    def __init__(self, inducing_points):
        batch_shape = inducing_points.shape[:-2]
        distribution = gpytorch.variational.CholeskyVariationalDistribution(
            inducing_points.shape[-2], batch_shape=batch_shape
        )
        strategy = gpytorch.variational.VariationalStrategy(
            self, inducing_points, distribution, learn_inducing_locations=True
        )
        super().__init__(strategy)
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=batch_shape)
        self.covar_module = _hilbert(batch_shape, 30)

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


class TestVariationalModel(VariationalModelTestCase, _ModelCase, unittest.TestCase):
    def create_model(self, train_x, train_y, likelihood):
        return _Variational(train_x[..., :10, :].clone())
