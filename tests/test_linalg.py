"""Cholesky factors of matrices that rounding has hurt."""

from __future__ import annotations

import pytest
import torch
from linear_operator.utils.errors import NotPSDError
from linear_operator.utils.warnings import NumericalWarning

from gpytorch_tkrr.linalg import robust_cholesky


def test_a_good_matrix_is_left_alone():
    root = torch.randn(2, 5, 5, dtype=torch.float64)
    matrix = root @ root.mT + torch.eye(5)
    assert torch.equal(robust_cholesky(matrix), torch.linalg.cholesky(matrix))


def test_a_slightly_indefinite_matrix_gets_a_relative_jitter():
    vector = torch.tensor([1e6, 2e6, 3e6], dtype=torch.float64)
    matrix = torch.outer(vector, vector)
    matrix[2, 2] *= 1 - 1e-13
    factor = robust_cholesky(matrix)
    assert torch.allclose(factor @ factor.mT, matrix, rtol=1e-9)


def test_a_large_jitter_is_announced():
    broken = torch.tensor([[1.0, 1.0], [1.0, 1 - 1e-7]], dtype=torch.float64)
    with pytest.warns(NumericalWarning, match="of its diagonal was added"):
        factor = robust_cholesky(broken)
    assert torch.allclose(factor @ factor.mT, broken, atol=1e-5)


def test_only_the_broken_matrix_of_a_batch_is_changed():
    good = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
    broken = torch.tensor([[1.0, 1.0], [1.0, 1 - 1e-15]], dtype=torch.float64)
    factors = robust_cholesky(torch.stack([good, broken]))
    assert torch.equal(factors[0], torch.linalg.cholesky(good))
    assert torch.isfinite(factors).all()


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (-torch.eye(2, dtype=torch.float64), "not positive definite"),
        (torch.full((2, 2), float("nan"), dtype=torch.float64), "NaN"),
    ],
)
def test_hopeless_matrices_are_refused(matrix, message):
    with pytest.raises(NotPSDError, match=message):
        robust_cholesky(matrix)
