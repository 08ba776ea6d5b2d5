"""Simulation-based calibration of an observation model (Talts, Betancourt, Simpson, Vehtari & Gelman, 2018)."""

from __future__ import annotations

from collections.abc import Callable

import gpytorch
import numpy as np
import scipy.stats
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import Likelihood
from torch import Tensor

from gpytorch_tkrr import TKRR, Domain, fit_gibbs
from gpytorch_tkrr.model.posterior import Posterior
from gpytorch_tkrr.sampling.priors import TAU_SHAPE

RANK, NUM_DIMS, NUM_BASIS = 2, 2, 5


def _model(x: Tensor, y: Tensor, likelihood: Likelihood, outputscale: float) -> TKRR:
    """A tiny model whose kernel is known."""
    kernel = ScaleKernel(RBFKernel(ard_num_dims=NUM_DIMS)).double()
    kernel.outputscale, kernel.base_kernel.lengthscale = outputscale, 0.5
    for parameter in kernel.parameters():
        parameter.requires_grad_(False)
    return TKRR(
        x,
        y,
        likelihood.double(),
        kernel=kernel,
        rank=RANK,
        num_basis=NUM_BASIS,
        domain=Domain(torch.full((NUM_DIMS,), 0.5), 1.1),
        mean_module=gpytorch.means.ZeroMean(),
    )


def check_ranks_are_uniform(
    simulate: Callable[[Tensor, np.random.Generator], tuple[list[float], Tensor, Likelihood]],
    watch: Callable[[Posterior], Tensor],
    *,
    num_rows: int = 20,
    outputscale: float = 4.0,
    num_fits: int = 30,
    num_warmup: int = 30,
    num_draws: int = 60,
    thin: int = 5,
) -> None:
    """
    Draw f and parameters from their prior, targets from the model, and compare what was drawn with posterior draws.

    :param simulate: `simulate(f, rng)` draws true parameters, and targets given f `(N,)`; with the likelihood to fit.
    :param watch: The same parameters of a posterior, `(S, Q)`.
    :param num_rows: N.
    :param outputscale: Prior variance of f.
    :param num_fits: How many simulations.
    :param num_warmup: Sweeps before the draws.
    :param num_draws: Draws of each fit.
    :param thin: One draw in so many is compared.
    """
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.random((num_rows, NUM_DIMS)))
    watched = torch.tensor([[0.1, 0.9], [0.5, 0.4]], dtype=torch.float64)
    modes = _model(x, torch.zeros(num_rows).double(), gpytorch.likelihoods.GaussianLikelihood(), 1.0).separate().modes
    points, ranks = torch.cat([watched, x]), []
    for seed in range(num_fits):
        tau = torch.from_numpy(rng.gamma(TAU_SHAPE, RANK ** (1 / NUM_DIMS) / TAU_SHAPE, (RANK, 1)))
        product = torch.ones(len(points), RANK, dtype=torch.float64)
        for d, mode in enumerate(modes):
            sd = (mode.covariance().variances.detach() * outputscale ** (1 / NUM_DIMS) / tau).sqrt()  # (R, M)
            product = product * (mode.basis(points[:, d]) @ (sd * torch.from_numpy(rng.standard_normal(sd.shape))).mT)
        f = product.sum(-1)
        true, y, likelihood = simulate(f[len(watched) :], rng)
        model = _model(x, y, likelihood, outputscale)
        posterior = fit_gibbs(model, num_draws=num_draws, num_warmup=num_warmup, seed=seed).posterior
        draws = torch.cat([model.draws(watched), watch(posterior)], dim=-1)[thin - 1 :: thin]  # (S / thin, 2 + Q)
        below = (draws < torch.tensor([*f[: len(watched)].tolist(), *true], dtype=torch.float64)).sum(0).numpy()
        ranks.append((below + rng.random(len(below))) / (len(draws) + 1))
    for number, values in enumerate(np.transpose(ranks)):
        assert scipy.stats.kstest(values, "uniform").pvalue > 1e-3, (number, np.sort(values).round(2))
        counts = np.histogram(values, bins=5, range=(0, 1))[0]
        assert scipy.stats.chisquare(counts).pvalue > 1e-3, (number, counts)
