"""Chains side by side: the prior is the kernel, and the conditionals leave the joint distribution of prior and data."""

import math

import pytest
import torch

from gpytorch_tkrr.inference.few_rows import SparseComponents
from gpytorch_tkrr.inference.priors import SparsePrior

NUM_CHAINS = 20_000


def make(num_chains=NUM_CHAINS, shares=(0.3, 0.6), seed=0):
    generator = torch.Generator().manual_seed(0)
    features = [torch.randn(5, 3, generator=generator, dtype=torch.float64) for _ in range(2)]
    generator.manual_seed(seed)
    variances = [torch.tensor([0.8, 0.3, 0.1]).double(), torch.tensor([0.5, 0.4, 0.2]).double()]
    chains = SparseComponents(features, SparsePrior(variances, shares, 2.0, 3), num_chains, generator)
    kernel = 2.0 * math.prod((phi * v) @ phi.mT for phi, v in zip(features, variances, strict=True))
    return chains, kernel


@pytest.mark.parametrize("shares", [(0.3, 0.6), (0.9, 0.05)])
def test_prior_covariance_is_the_kernel(shares):
    chains, kernel = make(shares=shares)
    values = chains.function_values()
    products = values.unsqueeze(-1) * values.unsqueeze(-2)
    error = products.mean(0) - kernel
    assert (error.abs() < 5 * products.std(0) / NUM_CHAINS**0.5).all()


def test_factors_are_the_function():
    chains, _ = make(num_chains=4)
    product = 1.0
    for phi, factor in zip(chains.features, chains.factors(), strict=True):
        product = product * (factor @ phi.mT)
    assert torch.allclose(product.sum(-2), chains.function_values())


def statistics(chains):
    """Quantities whose prior means are compared before and after the sweeps, each `(C,)`."""
    f = chains.function_values()
    found = {"amplitude": chains.amplitudes.square().mean(-1), "f": f[:, 0], "f f": f[:, 0] * f[:, 1]}
    found["bounded f"] = torch.tanh(f[:, 2]).square()
    for d in range(2):
        active = chains.is_active[d].double()
        found[f"active {d}"] = active.mean(-1)
        found[f"weight {d}"] = chains.weights[d].square()[..., 1].mean(-1)
        found[f"joint {d}"] = (active * chains.amplitudes.abs()).mean(-1)
    return found


@pytest.mark.parametrize("num_sweeps", [1, 4])
def test_sweeps_leave_the_joint_distribution(num_sweeps):
    """Parameters from the prior, targets given them: after sweeps at these targets the parameters are still so."""
    chains, _ = make(seed=num_sweeps)
    noise = torch.linspace(0.05, 0.5, 5).double()
    generator = torch.Generator().manual_seed(7)
    values = chains.function_values()
    targets = values + noise.sqrt() * torch.randn(values.shape, generator=generator, dtype=torch.float64)
    fresh, _ = make(seed=100 + num_sweeps)
    expected = statistics(fresh)
    moved = [active.clone() for active in chains.is_active]
    for _ in range(num_sweeps):
        chains.sweep(targets, noise)
    assert all((before != after).any() for before, after in zip(moved, chains.is_active, strict=True))
    for name, values in statistics(chains).items():
        error = values.mean() - expected[name].mean()
        spread = (values.var() + expected[name].var()).sqrt() / NUM_CHAINS**0.5
        assert abs(error) < 4.5 * spread, name


def test_gaussian_case_is_exact():
    """With one function per mode only the amplitudes are free: f is Gaussian and its posterior known."""
    generator = torch.Generator().manual_seed(0)
    features = [torch.rand(4, 1, generator=generator, dtype=torch.float64) + 0.5 for _ in range(3)]
    variances = [torch.tensor([v]).double() for v in (1.0, 0.5, 2.0)]
    chains = SparseComponents(features, SparsePrior(variances, [0.0] * 3, 1.5, 6), NUM_CHAINS, generator)
    y, noise = torch.tensor([1.0, -0.5, 0.3, 0.8]).double(), torch.full((4,), 0.2).double()
    chains.sweep(y, noise)
    kernel = 1.5 * math.prod((phi * v) @ phi.mT for phi, v in zip(features, variances, strict=True))
    gain = kernel @ torch.linalg.inv(kernel + torch.diag(noise))
    draws = chains.function_values()
    assert torch.allclose(draws.mean(0), gain @ y, atol=0.02)
    assert torch.allclose(draws.mT.cov(), kernel - gain @ kernel, atol=0.02)
