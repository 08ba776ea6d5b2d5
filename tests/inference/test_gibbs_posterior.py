"""`fit_gibbs` as a whole against posteriors written down anew: by quadrature, and by the No-U-Turn sampler."""

from __future__ import annotations

import math

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.kernels import AdditiveKernel, ConstantKernel, ProductKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.priors import LogNormalPrior

from gpytorch_tkrr import TKRR, Domain, fit_gibbs
from gpytorch_tkrr.sampling.diagnostics import effective_sample_size
from gpytorch_tkrr.sampling.priors import TAU_SHAPE

RANK, NUM_SINES, HALF_WIDTH, CONSTANT = 2, 8, 1.3, 0.5
LENGTHSCALE, OUTPUTSCALE, NOISE = (math.log(0.4), 0.15), (math.log(2.0), 0.4), (math.log(0.1), 0.6)  # log-normal


def _data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.rand(25, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[:2] = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    noise = torch.randn(25, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return x, 2 * torch.sin(4 * x[:, 0]) * (0.3 + x[:, 1]) + 0.4 * noise


def _features(x: torch.Tensor) -> torch.Tensor:
    """1 and the sines of the box around [0, 1]: `(D, n, M)`."""
    j = torch.arange(1, NUM_SINES + 1, dtype=torch.float64)
    angle = math.pi * (x.mT.unsqueeze(-1) - 0.5 + HALF_WIDTH) / (2 * HALF_WIDTH)
    return torch.cat([torch.ones(*angle.shape, dtype=torch.float64), (j * angle).sin() / HALF_WIDTH**0.5], dim=-1)


def _run_nuts(x: torch.Tensor, y: torch.Tensor, watched: torch.Tensor, num_draws: int) -> torch.Tensor:
    """
    Draws of f at watched points and of the logarithms of noise, lengthscales and output scale, `(S, Q)`.

    The first factor is integrated out: given the second, y is jointly normal. Gibbs sampling never does that.
    """
    pyro = pytest.importorskip("pyro")
    num_rows, points = len(y), torch.cat([x, watched])
    first, second = _features(points)  # (n, M) of each input
    omega = math.pi * torch.arange(1, NUM_SINES + 1, dtype=torch.float64) / (2 * HALF_WIDTH)
    identity = torch.eye(num_rows, dtype=torch.float64)
    # Normal priors of the logarithms of noise, lengthscales and output scale.
    means, spreads = torch.tensor([NOISE, LENGTHSCALE, LENGTHSCALE, OUTPUTSCALE], dtype=torch.float64).unbind(-1)

    def covariance(logs, log_tau, standard):
        """Of f at all points, given the second factor, `(n, n)`."""
        _, lengthscale, outputscale = logs.exp().split([1, 2, 1])
        scaled = lengthscale.unsqueeze(-1) * omega
        spectral = math.sqrt(2 * math.pi) * lengthscale.unsqueeze(-1) * (-scaled.square() / 2).exp()
        constant = torch.full((2, 1), CONSTANT, dtype=torch.float64)
        variances = torch.cat([constant, spectral], dim=-1) * outputscale.sqrt()  # (D, M)
        tau = log_tau.exp()
        p = second @ (standard * variances[1].sqrt()).mT / tau.sqrt()  # (n, R)
        return ((p / tau) @ p.mT) * ((first * variances[0]) @ first.mT)

    def potential(state):
        logs, log_tau, standard = state["logs"], state["log_tau"], state["standard"]
        train = covariance(logs, log_tau, standard)[:num_rows, :num_rows] + logs[0].exp() * identity
        root = torch.linalg.cholesky(train)
        half = torch.linalg.solve_triangular(root, y.unsqueeze(-1), upper=False)
        rate = TAU_SHAPE * RANK**-0.5  # of a Gamma density with mean R^(1 / D)
        log_density = -half.square().sum() / 2 - root.diagonal().log().sum()
        log_density = log_density - (((logs - means) / spreads) ** 2).sum() / 2 - standard.square().sum() / 2
        return -(log_density + (TAU_SHAPE * log_tau - rate * log_tau.exp()).sum())

    pyro.set_rng_seed(0)
    start = {
        "logs": means.clone(),
        "log_tau": torch.zeros(RANK, dtype=torch.float64),
        "standard": torch.randn(RANK, NUM_SINES + 1, dtype=torch.float64),
    }
    kernel = pyro.infer.NUTS(potential_fn=potential)
    sampler = pyro.infer.MCMC(kernel, num_draws, 300, initial_params=start, disable_progbar=True)
    sampler.run()
    found, draws = sampler.get_samples(), []
    for logs, *rest in zip(found["logs"], found["log_tau"], found["standard"], strict=True):
        joint = covariance(logs, *rest)
        cross = joint[:num_rows, num_rows:]
        solved = torch.linalg.solve(joint[:num_rows, :num_rows] + logs[0].exp() * identity, cross).mT  # (q, n)
        jitter = 1e-9 * torch.eye(len(watched), dtype=torch.float64)
        root = torch.linalg.cholesky(joint[num_rows:, num_rows:] - solved @ cross + jitter)
        draws.append(solved @ y + root @ torch.randn(len(watched), dtype=torch.float64))
    return torch.cat([torch.stack(draws), found["logs"]], dim=-1)


def _run_gibbs(x: torch.Tensor, y: torch.Tensor, watched: torch.Tensor, num_draws: int) -> torch.Tensor:
    """The same, by `fit_gibbs`."""
    factors = []
    for d in range(2):
        constant = ConstantKernel(active_dims=(d,))
        constant.constant = torch.tensor(CONSTANT)
        constant.raw_constant.requires_grad_(False)
        smooth = RBFKernel(active_dims=(d,), lengthscale_prior=LogNormalPrior(*LENGTHSCALE))
        smooth.lengthscale = 0.4
        factors.append(AdditiveKernel(constant, smooth))
    kernel = ScaleKernel(ProductKernel(*factors), outputscale_prior=LogNormalPrior(*OUTPUTSCALE)).double()
    kernel.outputscale = 2.0
    likelihood = GaussianLikelihood(noise_prior=LogNormalPrior(*NOISE)).double()
    model = TKRR(
        x,
        y,
        likelihood,
        kernel=kernel,
        rank=RANK,
        num_basis=NUM_SINES,
        domain=Domain(torch.full((2,), 0.5), HALF_WIDTH),
        mean_module=gpytorch.means.ZeroMean(),
    )
    posterior = fit_gibbs(model, num_draws=num_draws, num_warmup=200, seed=0).posterior
    hyper = posterior.hyperparameters
    lengthscales = [draws for name, draws in hyper.items() if name.endswith("lengthscale")]
    scalars = torch.stack([posterior.noise, *lengthscales, hyper["outputscale"]], dim=-1).log()
    return torch.cat([model.draws(watched), scalars], dim=-1)


def test_noise_of_a_linear_model_by_quadrature():
    """One input, one component, fixed kernel: y is normal given noise and precision, a grid over both is exact."""
    x = torch.linspace(0, 1, 12, dtype=torch.float64).unsqueeze(-1)
    noise = torch.randn(12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = 20 * torch.sin(5 * x[:, 0]) + 4 * noise
    kernel = ScaleKernel(RBFKernel()).double()
    kernel.outputscale, kernel.base_kernel.lengthscale = 300.0, 0.4
    kernel.requires_grad_(False)
    likelihood = GaussianLikelihood(noise_prior=LogNormalPrior(math.log(10.0), 0.7)).double()
    mean, domain = gpytorch.means.ZeroMean(), Domain(torch.tensor([0.5]), 1.3)
    model = TKRR(x, y, likelihood, kernel=kernel, rank=1, num_basis=6, domain=domain, mean_module=mean)
    draws = fit_gibbs(model, num_draws=1000, num_warmup=50, seed=0).posterior.noise.log().numpy()

    mode = model.separate().modes[0]
    phi = mode.basis(x[:, 0])
    values, vectors = torch.linalg.eigh(300.0 * (phi * mode.variances()) @ phi.mT)
    squares = (vectors.mT @ y).square()
    log_noise = torch.linspace(math.log(0.3), math.log(300.0), 400, dtype=torch.float64)
    log_tau = torch.linspace(-6, 4, 300, dtype=torch.float64).unsqueeze(-1)
    variances = values.clamp(min=0) / log_tau.unsqueeze(-1).exp() + log_noise.unsqueeze(-1).exp()  # (T, S, N)
    log_density = -(variances.log() + squares / variances).sum(-1) / 2
    log_density += TAU_SHAPE * (log_tau - log_tau.exp()) - ((log_noise - math.log(10.0)) / 0.7) ** 2 / 2
    density = (log_density - log_density.max()).exp().sum(0)
    distribution = (density.cumsum(0) / density.sum()).numpy()
    size = float(effective_sample_size(draws[None]))
    for level in (0.05, 0.25, 0.5, 0.75, 0.95):
        share = (draws < float(log_noise[np.searchsorted(distribution, level)])).mean()
        assert abs(share - level) < 4 * math.sqrt(level * (1 - level) / size), (level, share, size)


@pytest.mark.slow
def test_gibbs_agrees_with_nuts():
    x, y = _data()
    watched = torch.tensor([[0.1, 0.9], [0.5, 0.4], [1.0, 0.0]], dtype=torch.float64)
    nuts, gibbs = _run_nuts(x, y, watched, 1000).numpy(), _run_gibbs(x, y, watched, 2000).detach().numpy()
    names = [*(f"f at {point}" for point in watched.tolist()), "noise", "lengthscale 0", "lengthscale 1", "outputscale"]
    for name, a, b in zip(names, nuts.T, gibbs.T, strict=True):
        sizes = [float(effective_sample_size(draws[None])) for draws in (a, b)]
        error = a.std() * np.sqrt(sum(1 / size for size in sizes))  # of the difference of two means
        assert abs(a.mean() - b.mean()) < 4 * error, (name, a.mean(), b.mean(), error, sizes)
        for quantile in (0.05, 0.25, 0.75, 0.95):
            # Share of one sample below the other's quantile: binomial with the smaller effective size.
            share, spread = (b < np.quantile(a, quantile)).mean(), math.sqrt(quantile * (1 - quantile) / min(sizes))
            assert abs(share - quantile) < 6 * spread, (name, quantile, share, sizes)
