"""`fit_gibbs` as a whole against a long run of the No-U-Turn sampler on the same posterior, written down anew."""

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
from gpytorch_tkrr.diagnostics import effective_sample_size
from gpytorch_tkrr.sampler import TAU_SHAPE

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
    """Draws of f at watched points and of the logarithms of noise, lengthscales and output scale, `(S, Q)`."""
    pyro = pytest.importorskip("pyro")
    from pyro.distributions import Gamma, LogNormal, Normal
    from pyro.infer import MCMC, NUTS

    phi, phi_watched = _features(x), _features(watched)
    omega = math.pi * torch.arange(1, NUM_SINES + 1, dtype=torch.float64) / (2 * HALF_WIDTH)

    def number(value: float) -> torch.Tensor:
        return torch.tensor(value, dtype=torch.float64)

    def function(lengthscale, outputscale, tau, standard, features):
        scaled = lengthscale.unsqueeze(-1) * omega
        spectral = math.sqrt(2 * math.pi) * lengthscale.unsqueeze(-1) * (-scaled.square() / 2).exp()
        variances = torch.cat([number(CONSTANT).expand(2, 1), spectral], dim=-1) * outputscale.sqrt()  # (D, M)
        factors = standard * (variances.unsqueeze(1) / tau.unsqueeze(-1)).sqrt()  # (D, R, M)
        return (features @ factors.mT).prod(0).sum(-1)

    def model():
        with pyro.plate("inputs", 2):
            lengthscale = pyro.sample("lengthscale", LogNormal(number(LENGTHSCALE[0]), number(LENGTHSCALE[1])))
        outputscale = pyro.sample("outputscale", LogNormal(number(OUTPUTSCALE[0]), number(OUTPUTSCALE[1])))
        noise = pyro.sample("noise", LogNormal(number(NOISE[0]), number(NOISE[1])))
        rate = number(TAU_SHAPE * RANK ** (-1 / 2))  # mean R^(1 / D)
        with pyro.plate("components", RANK):
            tau = pyro.sample("tau", Gamma(number(TAU_SHAPE), rate))
        shape = (2, RANK, NUM_SINES + 1)
        standard = pyro.sample("standard", Normal(number(0.0), number(1.0)).expand(shape).to_event(3))
        f = function(lengthscale, outputscale, tau, standard, phi)
        pyro.sample("y", Normal(f, noise.sqrt()).to_event(1), obs=y)

    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    sampler = MCMC(NUTS(model, jit_compile=True, ignore_jit_warnings=True), num_draws, 300, disable_progbar=True)
    sampler.run()
    found = sampler.get_samples()
    parts = zip(*(found[name] for name in ("lengthscale", "outputscale", "tau", "standard")), strict=True)
    f = torch.stack([function(*part, phi_watched) for part in parts])
    return torch.cat(
        [f, found["noise"].log().unsqueeze(-1), found["lengthscale"].log(), found["outputscale"].log().unsqueeze(-1)],
        dim=-1,
    )


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


@pytest.mark.slow
def test_gibbs_agrees_with_nuts():
    x, y = _data()
    watched = torch.tensor([[0.1, 0.9], [0.5, 0.4], [1.0, 0.0]], dtype=torch.float64)
    nuts, gibbs = (run(x, y, watched, 2000).detach().numpy() for run in (_run_nuts, _run_gibbs))
    names = [*(f"f at {point}" for point in watched.tolist()), "noise", "lengthscale 0", "lengthscale 1", "outputscale"]
    for name, a, b in zip(names, nuts.T, gibbs.T, strict=True):
        sizes = [float(effective_sample_size(draws[None])) for draws in (a, b)]
        error = a.std() * np.sqrt(sum(1 / size for size in sizes))  # of the difference of two means
        assert abs(a.mean() - b.mean()) < 4 * error, (name, a.mean(), b.mean(), error, sizes)
        for quantile in (0.05, 0.25, 0.75, 0.95):
            # Share of one sample below the other's quantile: binomial with the smaller effective size.
            share, spread = (b < np.quantile(a, quantile)).mean(), math.sqrt(quantile * (1 - quantile) / min(sizes))
            assert abs(share - quantile) < 6 * spread, (name, quantile, share, sizes)
