"""A posterior held as draws."""

import pytest
import torch

from gpytorch_tkrr.bases.basis import SineBasis
from gpytorch_tkrr.model import posterior as posterior_module
from gpytorch_tkrr.model.draws import DrawsPosterior


@pytest.fixture
def posterior():
    generator = torch.Generator().manual_seed(0)
    factors = [torch.randn(6, 3, 4, generator=generator, dtype=torch.float64) for _ in range(2)]
    bases = [SineBasis(0.5, 1.0, 4), SineBasis(0.5, 2.0, 4)]
    return DrawsPosterior(bases, factors, {"noise": torch.ones(6).double()}, {}, torch.zeros(6).long(), {})


def test_draws_are_sums_of_products(posterior):
    x = torch.rand(2, 5, 2, dtype=torch.float64)
    values = [basis(x[..., d]) for d, basis in enumerate(posterior.bases)]
    expected = torch.einsum("bnm,srm,bnk,srk->sbn", values[0], posterior.factors[0], values[1], posterior.factors[1])
    assert torch.allclose(posterior.functions(x), expected)


@pytest.mark.parametrize("max_entries", [1, 100, 400])
def test_piece_by_piece(posterior, monkeypatch, max_entries):
    x = torch.rand(3, 7, 2, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(6, 3, 7, dtype=torch.float64)
    whole = posterior.functions(x)
    (gradient,) = torch.autograd.grad((whole * weights).sum(), x)
    monkeypatch.setattr(posterior_module, "MAX_ENTRIES", max_entries)
    pieces = posterior.functions(x)
    assert torch.allclose(pieces, whole) and torch.allclose(posterior.functions(x.detach()), whole)
    assert torch.allclose(torch.autograd.grad((pieces * weights).sum(), x)[0], gradient)
