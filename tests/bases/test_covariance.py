"""Covariances of weights against dense algebra."""

from __future__ import annotations

import pytest
import torch

from gpytorch_tkrr.bases.covariance import Covariance, block_diagonal, kronecker


def diagonal():
    return Covariance(torch.rand(5, dtype=torch.float64) + 0.1)


def dense():
    return Covariance(torch.rand(5, dtype=torch.float64) + 0.1, torch.randn(5, 5, dtype=torch.float64))


def batch():
    root = torch.randn(2, 5, 5, dtype=torch.float64)
    return Covariance.from_matrix(root @ root.mT + torch.eye(5, dtype=torch.float64))


@pytest.mark.parametrize("make", [diagonal, dense, batch])
def test_algebra_of_the_root(make):
    covariance = make()
    matrix = covariance.to_dense()
    features = torch.randn(7, 5, dtype=torch.float64)
    whitened = covariance.mix(features) * covariance.root.unsqueeze(-2)
    torch.testing.assert_close(whitened @ whitened.mT, features @ matrix @ features.mT)
    torch.testing.assert_close(covariance.between(features, features[:3]), features @ matrix @ features[:3].mT)
    torch.testing.assert_close(
        covariance.quadratic(features), (features @ matrix @ features.mT).diagonal(dim1=-2, dim2=-1)
    )
    logdet = covariance.variances.log().sum(-1) + covariance.logdet_mixing()
    torch.testing.assert_close(logdet, torch.logdet(matrix))


@pytest.mark.parametrize("make", [diagonal, dense])
def test_whitening(make):
    covariance, other = make(), make()
    weights = torch.randn(3, 5, dtype=torch.float64)
    torch.testing.assert_close(covariance.unwhiten(covariance.whiten(weights)), weights)
    energies = covariance.whiten(weights).square().sum(-1)
    torch.testing.assert_close(energies, ((weights @ covariance.to_dense().inverse()) * weights).sum(-1))
    moved = covariance.rewhiten(weights, other)
    torch.testing.assert_close(covariance.unwhiten(moved), other.unwhiten(weights))


def test_blocks_of_several_components():
    covariance = dense()
    gram = torch.randn(2, 5, 2, 5, dtype=torch.float64)
    expected = torch.einsum("ik,risj,jl->rksl", covariance.mixing, gram, covariance.mixing)
    torch.testing.assert_close(covariance.mix_blocks(gram), expected)


def test_weights_side_by_side_and_in_pairs():
    left, right = torch.randn(2, 2, dtype=torch.float64), torch.randn(4, 3, 3, dtype=torch.float64)
    eye = torch.eye(2, dtype=torch.float64)
    side_by_side = block_diagonal([left, None, right], [2, 2, 3])
    pairs = kronecker([left, None, right], [2, 2, 3])
    for i in range(4):
        torch.testing.assert_close(side_by_side[i], torch.block_diag(left, eye, right[i]))
        torch.testing.assert_close(pairs[i], torch.kron(torch.kron(left, eye), right[i]))
    assert block_diagonal([None, None], [2, 3]) is None and kronecker([None], [2]) is None
