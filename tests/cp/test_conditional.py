from __future__ import annotations

import pytest
import torch

from gpytorch_tkrr.bases.covariance import Covariance
from gpytorch_tkrr.cp.conditional import Conditional, whitened_precision
from gpytorch_tkrr.errors import InputError


@pytest.mark.parametrize("mixing", [None, torch.randn(3, 3, dtype=torch.float64)], ids=["diagonal", "dense"])
def test_whitened_precision(mixing):
    gram = torch.randn(6, 6, dtype=torch.float64)
    gram = gram @ gram.mT
    covariance = Covariance(torch.rand(3, dtype=torch.float64), mixing)
    prior, eye = torch.eye(2, dtype=torch.float64) + 0.3, torch.eye(3, dtype=torch.float64)
    root = torch.kron(torch.eye(2, dtype=torch.float64), covariance.unwhiten(eye).mT.contiguous())
    expected = root.mT @ gram @ root + torch.kron(prior, eye)
    torch.testing.assert_close(whitened_precision(gram.reshape(2, 3, 2, 3), covariance, prior), expected)


def test_solve_logdet_draw_and_covariance():
    root = torch.randn(5, 9, dtype=torch.float64)
    precision = root @ root.mT
    conditional = Conditional(precision)
    rhs = torch.randn(5, dtype=torch.float64)
    torch.testing.assert_close(conditional.solve(rhs), torch.linalg.solve(precision, rhs))
    torch.testing.assert_close(conditional.logdet(), torch.logdet(precision))
    torch.testing.assert_close(conditional.covariance(), torch.linalg.inv(precision))
    half = conditional.half_solve(rhs.unsqueeze(-1))
    torch.testing.assert_close(half.square().sum(), rhs @ torch.linalg.solve(precision, rhs))
    draws = torch.stack([conditional.half_covariance(unit) for unit in torch.eye(5, dtype=torch.float64)], dim=1)
    torch.testing.assert_close(draws @ draws.mT, torch.linalg.inv(precision))


def test_scales_far_apart_and_singular_matrices_are_factorised():
    scale = torch.logspace(-150, 150, 7, dtype=torch.float64)
    root = torch.randn(7, 7, dtype=torch.float64)
    conditional = Conditional((root @ root.mT) * scale.unsqueeze(-1) * scale)
    assert conditional.jitter == 0.0
    solution = conditional.solve(scale) * scale
    expected = torch.linalg.solve(root @ root.mT, torch.ones(7).double())
    torch.testing.assert_close(solution, expected, rtol=1e-6, atol=1e-6)
    singular = Conditional(torch.ones(4, 4, dtype=torch.float64))
    assert 0 < singular.jitter < 1e-10


def test_overflow_is_named():
    with pytest.raises(InputError, match="overflow"):
        Conditional(torch.full((2, 2), torch.inf, dtype=torch.float64))


def test_a_function_that_rounding_has_lost_is_no_obstacle():
    """Its diagonal element is rounding, smaller than its products with others may be."""
    precision = torch.tensor([[1.0, 1e-9], [1e-9, 1e-20]], dtype=torch.float64)
    solution = Conditional(precision).solve(torch.tensor([1.0, 0.0], dtype=torch.float64))
    assert solution[0].item() == pytest.approx(1.0, rel=1e-2)
    assert torch.isfinite(solution).all()
