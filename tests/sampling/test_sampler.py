"""The Gibbs sampler: its conditionals against dense formulas, the whole against the prior that it leaves invariant."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
import torch
from gpytorch.kernels import AdditiveKernel, ConstantKernel, ProductKernel, RBFKernel, ScaleKernel

from gpytorch_tkrr import Domain
from gpytorch_tkrr.bases.covariance import Covariance
from gpytorch_tkrr.cp.conditional import DenseGram
from gpytorch_tkrr.cp.design import Design
from gpytorch_tkrr.data.source import TensorSource
from gpytorch_tkrr.data.training import TrainingData
from gpytorch_tkrr.features.separable import separate
from gpytorch_tkrr.model.likelihoods.gaussian import GaussianAugmentation
from gpytorch_tkrr.model.likelihoods.noise import NoiseModel, truncated_inverse_gamma
from gpytorch_tkrr.model.likelihoods.probit import ProbitAugmentation
from gpytorch_tkrr.sampling.hyperparameters import Hyperparameters
from gpytorch_tkrr.sampling.priors import move_scales
from gpytorch_tkrr.sampling.sampler import FactorConditional, GibbsSampler, GibbsState


def random_covariance(size, dense):
    mixing = torch.randn(size, size, dtype=torch.float64) if dense else None
    return Covariance(torch.rand(size, dtype=torch.float64) + 0.1, mixing)


@pytest.mark.parametrize("dense", [False, True])
def test_conditional_of_a_factor_equals_the_dense_gaussian(dense):
    rank, size, num = 3, 4, 30
    design = torch.randn(num, rank, size, dtype=torch.float64)
    y = torch.randn(num, dtype=torch.float64)
    covariance = random_covariance(size, dense)
    prior = torch.rand(rank, dtype=torch.float64) + 0.5
    noise = 0.3
    rows = design.reshape(num, -1)
    conditional = FactorConditional(
        DenseGram((rows.mT @ rows).reshape(rank, size, rank, size)),
        (y @ rows).reshape(rank, size),
        covariance,
        prior,
        noise,
    )
    precision = rows.mT @ rows / noise + torch.kron(prior.diag(), covariance.to_dense().inverse().contiguous())
    mean = torch.linalg.solve(precision, rows.mT @ y / noise)
    torch.testing.assert_close(conditional.draw(torch.zeros(rank, size, dtype=torch.float64)).flatten(), mean)
    unit = torch.eye(rank * size, dtype=torch.float64).reshape(-1, rank, size)
    root = torch.stack([(conditional.draw(e)).flatten() - mean for e in unit], dim=-1)
    torch.testing.assert_close(root @ root.mT, torch.linalg.inv(precision))


@pytest.mark.parametrize("dense", [False, True])
def test_evidence_differs_from_the_dense_log_density_by_a_constant(dense):
    rank, size, num = 2, 3, 20
    rows = torch.randn(num, rank * size, dtype=torch.float64)
    y = torch.randn(num, dtype=torch.float64)
    gram, rhs = DenseGram((rows.mT @ rows).reshape(rank, size, rank, size)), (y @ rows).reshape(rank, size)
    differences = []
    for _ in range(3):
        weights, prior = random_covariance(size, dense), torch.rand(rank, dtype=torch.float64) + 0.5
        covariance = rows @ torch.kron((1 / prior).diag(), weights.to_dense()) @ rows.mT + 0.4 * torch.eye(num)
        exact = torch.distributions.MultivariateNormal(torch.zeros(num).double(), covariance).log_prob(y)
        differences.append(FactorConditional(gram, rhs, weights, prior, 0.4).log_evidence - float(exact))
    np.testing.assert_allclose(differences, differences[0], rtol=1e-9)


@pytest.mark.parametrize("variances, num_seen", [([1.0, 1e-3, 1e-14, 1e-3, 0.0], 3), ([1e-14, 0.0, 0.0, 0.0, 0.0], 0)])
def test_weights_that_the_data_do_not_see_keep_their_prior(variances, num_seen):
    rank, size, num, noise = 2, 5, 20, 0.4
    rows, y = torch.randn(num, rank * size, dtype=torch.float64), torch.randn(num, dtype=torch.float64)
    gram, rhs = DenseGram((rows.mT @ rows).reshape(rank, size, rank, size)), (y @ rows).reshape(rank, size)
    covariance = Covariance(torch.tensor(variances, dtype=torch.float64))
    prior = torch.tensor([0.5, 2.0], dtype=torch.float64)
    conditional = FactorConditional(gram, rhs, covariance, prior, noise)
    assert conditional.seen is not None and len(conditional.seen) == num_seen

    root = (covariance.variances / prior.unsqueeze(-1)).sqrt().flatten()
    whitened = rows * root  # the design of weights of variance one
    precision = whitened.mT @ whitened / noise + torch.eye(rank * size, dtype=torch.float64)
    half = torch.linalg.solve(precision, whitened.mT @ y / noise)
    evidence = (whitened.mT @ y / noise) @ half / 2 - torch.linalg.slogdet(precision).logabsdet / 2
    assert conditional.log_evidence == pytest.approx(float(evidence), rel=1e-7, abs=1e-7)

    mean = conditional.draw(torch.zeros(rank, size, dtype=torch.float64)).flatten()
    torch.testing.assert_close(mean, root * half, rtol=1e-6, atol=1e-8)
    unit = torch.eye(rank * size, dtype=torch.float64).reshape(-1, rank, size)
    drawn = torch.stack([conditional.draw(e).flatten() - mean for e in unit], dim=-1)
    drawn = drawn[root > 0] / root[root > 0].unsqueeze(-1)
    expected = torch.linalg.inv(precision)[root > 0][:, root > 0]
    torch.testing.assert_close(drawn @ drawn.mT, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("lower, upper", [(0.0, math.inf), (0.4, math.inf), (0.2, 0.5)])
def test_truncated_inverse_gamma(lower, upper):
    rng = np.random.default_rng(0)
    draws = [truncated_inverse_gamma(3.0, 1.0, lower, upper, rng) for _ in range(2000)]
    reference = scipy.stats.invgamma(3.0, scale=1.0)
    bottom, top = reference.cdf(lower), reference.cdf(upper)
    assert lower <= min(draws) and max(draws) <= upper
    assert scipy.stats.kstest(draws, lambda v: (reference.cdf(v) - bottom) / (top - bottom)).pvalue > 1e-3


class _Problem:
    """A tiny model whose prior can be drawn from."""

    rank, num_dims, num_rows = 2, 2, 12

    def __init__(self, share_lengthscale: bool, offset: float | None = None):
        self.offset = offset
        smooth = [RBFKernel(active_dims=(d,)) for d in range(self.num_dims)]
        if share_lengthscale:
            smooth[1].raw_lengthscale = smooth[0].raw_lengthscale
        for kernel in smooth:
            kernel.lengthscale = 0.6
        factors = []
        for d in range(self.num_dims):
            constant = ConstantKernel(active_dims=(d,))
            constant.constant = torch.tensor(0.5)
            constant.raw_constant.requires_grad_(False)
            factors.append(AdditiveKernel(constant, smooth[d]))
        self.kernel = ScaleKernel(ProductKernel(*factors))
        self.kernel.outputscale = 1.0
        self.kernel.double()
        domain = Domain(torch.tensor([0.5, 0.5]), 1.5)
        self.separable = separate(self.kernel, domain, 4, self.num_dims)
        half_range = torch.full((self.num_dims,), 0.5, dtype=torch.float64)
        self.hyper = Hyperparameters(self.kernel, self.separable, half_range)
        self.x = torch.rand(self.num_rows, self.num_dims, dtype=torch.float64)
        noise_model = NoiseModel(True, 1e-6, math.inf, self.log_noise_prior)
        self.augmentation = (
            GaussianAugmentation(noise_model, 1.0, 1.0) if offset is None else ProbitAugmentation(offset)
        )
        self.grids = [torch.linspace(0, 1, 9, dtype=torch.float64)] * self.num_dims

    @staticmethod
    def log_noise_prior(noise: float) -> float:
        return float(scipy.stats.lognorm(0.5, scale=0.2).logpdf(noise))

    def sampler(self, y: torch.Tensor, rng: np.random.Generator) -> GibbsSampler:
        design = Design(TrainingData(TensorSource(self.x, y)), [mode.basis for mode in self.separable.modes])
        return GibbsSampler(
            design,
            self.separable,
            self.hyper,
            1.0,
            self.augmentation,
            self.grids,
            rng,
            rank=self.rank,
        )

    def draw_prior(self, rng: np.random.Generator) -> GibbsState:
        """Hyperparameters (set on the kernel) and state from the prior, without what the box cannot represent."""
        index = list(range(len(self.hyper.slots)))
        sampler = self.sampler(torch.zeros(self.num_rows, dtype=torch.float64), rng)
        while True:
            self.hyper.set(index, self.hyper.prior_draw(rng))
            sampler.refresh()
            if sampler.is_represented(index):
                break
        precisions = torch.from_numpy(rng.gamma(2.0, 1 / sampler.prior.rate, self.rank))
        factors = [
            torch.from_numpy(rng.standard_normal((self.rank, len(v))))
            * (v * sampler.prior_factor).sqrt()
            / precisions.unsqueeze(-1).sqrt()
            for v in (covariance.variances for covariance in sampler.covariances)
        ]
        noise = float(scipy.stats.lognorm(0.5, scale=0.2).rvs(random_state=rng)) if self.offset is None else 1.0
        parameters = {"noise": torch.tensor(noise, dtype=torch.float64)}
        return GibbsState(factors, parameters, precisions, torch.full((len(index),), -0.7, dtype=torch.float64))

    def values(self, factors: list[torch.Tensor]) -> torch.Tensor:
        product = torch.ones(self.num_rows, self.rank, dtype=torch.float64)
        for d, mode in enumerate(self.separable.modes):
            product = product * (mode.basis(self.x[:, d]) @ factors[d].mT)
        return product.sum(-1)

    def statistics(self, state: GibbsState) -> list[float]:
        f = self.values(state.factors)
        hyper = self.hyper.get(range(len(self.hyper.slots))).tolist()
        return [
            *hyper,
            math.log(state.parameters["noise"]),
            float(state.precisions.log().sum()),
            float(f[0]),
            float(f.abs().log().mean()),
        ]


@pytest.mark.parametrize("share_lengthscale, offset", [(False, None), (True, None), (False, 0.3)])
@torch.no_grad()
def test_sampler_leaves_the_joint_distribution_invariant(share_lengthscale, offset):
    """
    Draw parameters from the prior and data from the model, then sweep: the parameters must still have the prior's
    distribution (simulation-based calibration with one step; Geweke, 2004). With an offset the data are labels.
    """
    with torch.enable_grad():
        problem = _Problem(share_lengthscale, offset)
    rng = np.random.default_rng(1)
    before, after = [], []
    for _ in range(250):
        before.append(problem.statistics(problem.draw_prior(rng)))
        state = problem.draw_prior(rng)
        noise = torch.from_numpy(rng.standard_normal(problem.num_rows)) * math.sqrt(state.parameters["noise"])
        y = problem.values(state.factors) + noise
        sampler = problem.sampler(y if offset is None else torch.sign(y + offset), rng)
        for sweep in range(3):
            sampler.sweep(state, range(problem.num_dims) if sweep % 2 else range(problem.num_dims - 1, -1, -1))
        after.append(problem.statistics(state))
    for a, b in zip(np.transpose(before), np.transpose(after), strict=True):
        assert scipy.stats.ks_2samp(a, b).pvalue > 1e-3


@pytest.mark.parametrize("sign", [1, -1])
def test_scale_moves_where_one_group_is_nearly_zero(sign):
    """All is left to the other group then, whose squared weights have a chi-squared distribution."""
    rng = np.random.default_rng(0)
    groups = [np.full(2000, 11.0), np.full(2000, 1e-20)][::sign]
    for _ in range(12):
        t = move_scales(*groups, np.full(2000, sign * 11.0), rng)
        groups = [groups[0] * np.exp(2 * t), groups[1] * np.exp(-2 * t)]
    assert scipy.stats.kstest(groups[0 if sign > 0 else 1], scipy.stats.chi2(11).cdf).pvalue > 1e-3
