"""Sums in single precision: the bound on their error holds, and little noise keeps them in double precision."""

from __future__ import annotations

import math

import gpytorch
import pytest
import torch

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.bases.basis import ConcatenatedBasis, ConstantBasis, MonomialBasis, SineBasis
from gpytorch_tkrr.bases.covariance import Covariance
from gpytorch_tkrr.cp import design as design_module
from gpytorch_tkrr.cp.cells import Cells
from gpytorch_tkrr.cp.moments import MomentTable
from gpytorch_tkrr.cp.rounding import TOLERANCE, Resolution
from gpytorch_tkrr.cp.sums import FactorSums, add_direct, add_single

RANK, SIZE = 26, 10


def _problem(num_rows, seed=0, scale=1.0, tails=False):
    """A mode whose other modes' products are smooth, or have heavy tails, with components of very different size."""
    torch.manual_seed(seed)
    basis = ConcatenatedBasis(ConstantBasis(), MonomialBasis(1), SineBasis(0.0, 1.2 * scale, SIZE - 2))
    table = MomentTable(basis)
    x = scale * (2 * torch.rand(num_rows, dtype=torch.float64) - 1)
    p = torch.randn(RANK, num_rows, dtype=torch.float64)
    p = p**3 if tails else p
    p *= torch.logspace(-30, 30, RANK, dtype=torch.float64).unsqueeze(-1)
    prior = p.square().mean(1) * RANK  # so that f has prior variance about 1 given the other factors
    decay = torch.exp(-0.3 * torch.arange(SIZE, dtype=torch.float64))
    sizes = table.features(x).square().mean(1)
    return table, x, p, prior, Covariance(decay / sizes / SIZE)


def _error(table, sums, exact, covariance, prior, noise):
    """The Frobenius norm of the error of P, by dense algebra."""
    difference = (sums.gram() - exact.gram()).reshape(RANK * SIZE, RANK * SIZE)
    scale = covariance.root.repeat(RANK) * (prior * noise).rsqrt().repeat_interleave(SIZE)
    return float(torch.linalg.matrix_norm(difference * scale * scale.unsqueeze(-1)))


@pytest.mark.parametrize("by_cells", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("scale, tails", [(1.0, False), (1.0, True), (1e25, False)])
def test_error_is_below_its_bound(by_cells, weighted, scale, tails):
    num_rows = 20_000
    table, x, p, prior, covariance = _problem(num_rows, scale=scale, tails=tails)
    t = torch.randn(num_rows, dtype=torch.float64)
    weight = torch.rand(num_rows, dtype=torch.float64) * 1e-50 if weighted else None
    noise = 0.1 * (1e-50 if weighted else 1.0)
    groups = Cells(x, 32, 16) if by_cells else None
    exact, single = (FactorSums.zeros(table, RANK, x.device) for _ in range(2))
    add_direct(exact, x, p, t, weight)
    add_single(single, x, groups, p, t, weight)
    error = _error(table, single, exact, covariance, prior, noise)
    bound = Resolution(covariance, prior, noise).error(table, x, p, weight, num_rows)
    assert 1e-7 < error < bound < 3e3 * error
    torch.testing.assert_close(single.rhs, exact.rhs, rtol=1e-9, atol=1e-11 * float(exact.rhs[-1].abs().max()))


def test_bound_holds_for_many_rows():
    """Errors of chunks may add up: the bound grows with N."""
    for num_rows in (8_192, 131_072):
        table, x, p, prior, covariance = _problem(num_rows)
        t = torch.zeros(num_rows, dtype=torch.float64)
        exact, single = (FactorSums.zeros(table, RANK, x.device) for _ in range(2))
        add_direct(exact, x, p, t, None)
        add_single(single, x, None, p, t, None)
        bound = Resolution(covariance, prior, 1.0).error(table, x, p, None, num_rows)
        assert _error(table, single, exact, covariance, prior, 1.0) < bound


def test_noise_rows_and_rank_decide():
    table, x, p, prior, covariance = _problem(10_000)
    noisy = Resolution(covariance, prior, 1.0)
    assert noisy.allows_single(table, x, p, None, 10_000)
    assert not noisy.allows_single(table, x, p, None, 100_000_000)
    assert not noisy.allows_single(table, x[:2000], p[:, :2000], None, 2000)
    assert not Resolution(covariance, prior[:20], 1.0).allows_single(table, x, p[:20], None, 10_000)
    least = noisy.error(table, x, p, None, 10_000) / TOLERANCE
    for noise, allowed in ((1.01 * least, True), (0.99 * least, False)):
        assert Resolution(covariance, prior, noise).allows_single(table, x, p, None, 10_000) is allowed


def test_posterior_is_the_same(monkeypatch):
    """A chain with sums in single precision finds what one in double precision finds, up to Monte Carlo error."""
    torch.manual_seed(0)
    x = torch.rand(8_500, 3)
    f = torch.sin(6 * x[:, 0]) * x[:, 1] + x[:, 2]
    y = f + 0.5 * torch.randn(len(x))
    used = []

    def counted(*args):
        used.append(1)
        return add_single(*args)

    monkeypatch.setattr(design_module, "add_single", counted)
    means = []
    for is_single in (True, False):
        if not is_single:
            monkeypatch.setattr(Resolution, "allows_single", lambda *args: False)
        likelihood = gpytorch.likelihoods.GaussianLikelihood()
        model = tkrr.TKRR(x, y, likelihood, rank=26, num_basis=8)
        tkrr.fit_gibbs(model, num_draws=6, num_warmup=6, num_chains=1, seed=0)
        with torch.no_grad():
            means.append(model.predict(x[:500]).mean)
    assert used
    # The two chains see the same random numbers; rounding moves them apart slowly.
    assert (means[0] - means[1]).square().mean().sqrt() < 0.1 * (means[0] - f[:500]).square().mean().sqrt()
    assert math.isclose(float(means[0].std()), float(means[1].std()), rel_tol=0.02)
