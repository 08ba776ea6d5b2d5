from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpytorch_tkrr.bases.basis import Basis, ConcatenatedBasis, ConstantBasis, FourierBasis, MonomialBasis, SineBasis
from gpytorch_tkrr.cp.cells import Cells, DistinctValues
from gpytorch_tkrr.cp.moments import MomentTable

BASES = {
    "sines": SineBasis(0.0, 1.5, 40),
    "fourier": FourierBasis(1.7, 12),
    "anova": ConcatenatedBasis(ConstantBasis(), MonomialBasis(1, 0.3), SineBasis(0.0, 1.1, 30)),
}


def direct_sums(p, t, weight, functions):
    """Sums over rows of weighted products times functions `(U, n)`, as `sum_products` orders them."""
    upper = torch.triu_indices(len(p), len(p))
    return functions @ torch.cat([p[upper[0]] * p[upper[1]] * weight, p * t * weight]).mT


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("weighted", [False, True])
def test_cells_give_the_sums_and_values_of_all_rows(name, weighted):
    table = MomentTable(BASES[name])
    x = torch.rand(20_000, dtype=torch.float64) ** 3 * 2 - 1  # unevenly filled
    p, t, weight = torch.randn(3, 20_000).double(), torch.randn(20_000).double(), torch.rand(20_000).double()
    cells = Cells.find(x, table)
    assert cells is not None
    per_node = cells.sum_products(p, t, weight if weighted else None)
    _, psi = table(x)
    expected = direct_sums(p, t, weight if weighted else torch.ones_like(t), psi)
    torch.testing.assert_close(table(cells.nodes)[1] @ per_node, expected, rtol=0, atol=1e-12 * expected.abs().max())
    values = cells.interpolate(table.features(cells.nodes))
    torch.testing.assert_close(values, table.features(x), rtol=0, atol=1e-13)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 40), st.integers(1, 200), st.integers(1, 20), st.floats(-1e3, 1e3), st.floats(1e-3, 1e3))
def test_polynomials_are_summed_exactly_in_any_units(num_nodes, num_rows, num_cells, shift, scale):
    u = torch.linspace(-1, 1, num_rows + 1, dtype=torch.float64)
    cells = Cells(u * scale + shift, num_cells, num_nodes)
    ones = torch.ones(1, num_rows + 1, dtype=torch.float64)
    for degree in range(min(num_nodes, 4)):
        moment = ((cells.nodes - shift) / scale) ** degree @ cells.sum_products(ones, u)
        expected = torch.stack([(u**degree).sum(), (u ** (degree + 1)).sum()])
        torch.testing.assert_close(moment, expected, rtol=1e-9, atol=1e-9 * num_rows)


def test_no_cells_where_they_do_not_pay_or_functions_are_not_smooth():
    x = torch.rand(5000, dtype=torch.float64)
    assert Cells.find(x, MomentTable(SineBasis(0.5, 1.0, 3))) is None  # few functions
    assert Cells.find(x[:50], MomentTable(SineBasis(0.5, 1.0, 40))) is None  # few rows
    assert Cells.find(x, MomentTable(SineBasis(0.5, 0.4, 40))) is None  # rows outside of the box
    assert Cells.find(torch.ones(5000).double(), MomentTable(SineBasis(0.5, 1.0, 40))) is None

    class Steps(Basis):
        num_functions = 40

        def __call__(self, x):
            return (x.unsqueeze(-1) > torch.linspace(0, 1, 40)).double()

    assert Cells.find(x, MomentTable(Steps())) is None


def test_distinct_values():
    x = torch.randint(0, 7, (500,)).double()
    distinct = DistinctValues.find(x)
    assert distinct is not None and distinct.nodes.tolist() == sorted(set(x.tolist()))
    p, t, weight = torch.randn(2, 500).double(), torch.randn(500).double(), torch.rand(500).double()
    members = (distinct.nodes.unsqueeze(-1) == x).double()
    for w in (None, weight):
        expected = direct_sums(p, t, torch.ones_like(t) if w is None else w, members)
        torch.testing.assert_close(distinct.sum_products(p, t, w), expected)
    torch.testing.assert_close(distinct.interpolate(distinct.nodes.unsqueeze(0)), x.unsqueeze(0))
    assert DistinctValues.find(torch.randn(500)) is None
    assert DistinctValues.find(torch.randn(40_000)) is None
    many = torch.randint(0, 4000, (40_000,)).double()
    assert DistinctValues.find(many) is not None
