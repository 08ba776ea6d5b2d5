from __future__ import annotations

import pytest
import torch
from chebyshev import ChebyshevBasis

from gpytorch_tkrr.bases.basis import ConcatenatedBasis, ConstantBasis, FourierBasis, MonomialBasis, SineBasis
from gpytorch_tkrr.cp.moments import MomentTable

BASES = {
    "sines": SineBasis(0.1, 1.2, 12),
    "two sines": SineBasis(0.1, 1.2, 2),
    "fourier": FourierBasis(0.7, 5),
    "one harmonic": FourierBasis(0.7, 1),
    "constant": ConstantBasis(),
    "cubic": MonomialBasis(3, 0.2),
    "powers": MonomialBasis(range(4), 0.2),
    "a basis of one's own": ChebyshevBasis(9),
    "with a constant": ConcatenatedBasis(ConstantBasis(), ChebyshevBasis(6)),
    "anova": ConcatenatedBasis(ConstantBasis(), MonomialBasis(1, 0.3), SineBasis(0.1, 1.5, 9)),
    "everything": ConcatenatedBasis(ConstantBasis(), FourierBasis(0.5, 4), MonomialBasis(1), SineBasis(0.0, 1.3, 7)),
}


@pytest.mark.parametrize("name", BASES)
def test_grams_from_moments_equal_dense_ones(name):
    basis = BASES[name]
    table = MomentTable(basis)
    x = torch.rand(300, dtype=torch.float64) * 2 - 1
    weights = torch.randn(300, 2, 3, dtype=torch.float64)
    dense = basis(x).mT  # (M, N)
    features, moments = table(x)
    torch.testing.assert_close(features, dense, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(table.features(x), dense, rtol=1e-12, atol=1e-12)
    sums = torch.einsum("kn,nab->kab", moments, weights)
    direct = torch.einsum("in,jn,nab->abij", dense, dense, weights)
    torch.testing.assert_close(table.gram(sums), direct, rtol=1e-12, atol=1e-12 * float(direct.abs().max()))


def test_number_of_moments_is_linear_in_the_number_of_functions():
    assert MomentTable(SineBasis(0.0, 1.0, 40)).num_moments == 81
    assert MomentTable(FourierBasis(1.0, 20)).num_moments == 81
    anova = ConcatenatedBasis(ConstantBasis(), MonomialBasis(), SineBasis(0.0, 1.0, 40))
    assert MomentTable(anova).num_moments == 81 + 2 * 40 + 3
    assert MomentTable(ChebyshevBasis(40)).num_moments == 79
