from __future__ import annotations

import torch
from linear_operator.operators import DiagLinearOperator

from gpytorch_tkrr import posterior as posterior_module
from gpytorch_tkrr.posterior import PosteriorCovariance


class Waves:
    """A posterior with a known root."""

    def mean(self, x):
        return x.sum(-1)

    def root(self, x):
        return torch.cat([torch.sin(x), torch.cos(2 * x), x], dim=-1).double()


def covariance(*shape, dtype=torch.float64):
    x = torch.rand(*shape, dtype=dtype)
    root = Waves().root(x)
    return PosteriorCovariance(x, posterior=Waves(), out_dtype=dtype), (root @ root.mT).to(dtype)


def test_operator_agrees_with_the_dense_matrix(monkeypatch):
    monkeypatch.setattr(posterior_module, "CHUNK_ROWS", 3)
    for shape in [(7, 2), (4, 5, 2), (2, 3, 6, 1)]:
        operator, dense = covariance(*shape)
        assert operator.shape == dense.shape
        torch.testing.assert_close(operator.to_dense(), dense)
        torch.testing.assert_close(operator.diagonal(dim1=-1, dim2=-2), dense.diagonal(dim1=-1, dim2=-2))
        rhs = torch.randn(*dense.shape[:-1], 3, dtype=torch.float64)
        torch.testing.assert_close(operator @ rhs, dense @ rhs)
        torch.testing.assert_close(operator.mT.to_dense(), dense)
        torch.testing.assert_close(operator[..., :3, :3].to_dense(), dense[..., :3, :3])
        torch.testing.assert_close(operator[..., :2, 1:4].to_dense(), dense[..., :2, 1:4])
        diagonal = torch.rand(dense.shape[:-1], dtype=torch.float64)
        total = operator + DiagLinearOperator(diagonal)
        torch.testing.assert_close(total.to_dense(), dense + torch.diag_embed(diagonal))
        root = operator.root_decomposition().root.to_dense()
        torch.testing.assert_close(root @ root.mT, dense)


def test_vector_products_and_elements():
    operator, dense = covariance(6, 2)
    vector = torch.randn(6, dtype=torch.float64)
    torch.testing.assert_close(operator @ vector, dense @ vector)
    torch.testing.assert_close(operator[torch.tensor([1, 4]), torch.tensor([2, 4])], dense[[1, 4], [2, 4]])
    torch.testing.assert_close(operator.expand(3, 6, 6).to_dense(), dense.expand(3, 6, 6))


def test_dtype_and_gradients():
    operator, _ = covariance(5, 2, dtype=torch.float32)
    assert operator.dtype == operator.to_dense().dtype == torch.float32
    assert operator.diagonal(dim1=-1, dim2=-2).dtype == (operator @ torch.ones(5, 1)).dtype == torch.float32
    x = torch.rand(5, 2, dtype=torch.float64, requires_grad=True)
    for value in (lambda op: op.diagonal(dim1=-1, dim2=-2).sum(), lambda op: (op @ torch.ones(5, 1).double()).sum()):
        (gradient,) = torch.autograd.grad(value(PosteriorCovariance(x, posterior=Waves())), x)
        root = Waves().root(x)
        (expected,) = torch.autograd.grad(value(root @ root.mT), x)
        torch.testing.assert_close(gradient, expected)
