"""What a basis represents, against the definition."""

from __future__ import annotations

import torch
from gpytorch.kernels import ConstantKernel, LinearKernel, RBFKernel

from gpytorch_tkrr import Domain
from gpytorch_tkrr.features.represented import (
    ModeGrid,
    missing_fraction,
    missing_of_modes,
    missing_variance,
    range_grids,
)
from gpytorch_tkrr.features.separable import separate


def make_modes(num_basis=30):
    kernel = (ConstantKernel(active_dims=0) + RBFKernel(active_dims=0)) * RBFKernel(active_dims=1)
    return separate(kernel.double(), Domain(torch.zeros(2), torch.full((2,), 3.0)), num_basis, 2).modes


def test_nothing_is_missing_where_there_is_nothing_to_represent():
    exact = torch.tensor([0.0, 2.0, 2.0], dtype=torch.float64)
    represented = torch.tensor([0.0, 1.0, 1.99], dtype=torch.float64)
    assert missing_fraction(represented, exact).tolist() == [0.0, 0.5, 1 - 1.99 / 2]
    assert missing_variance(represented, exact).tolist() == [0.0, 1.0, 0.0]
    linear = separate(LinearKernel().double(), Domain(0.0, 1.0), 1, 1).modes[0]
    assert ModeGrid(linear, torch.tensor([0.0, 1.0])).missing().abs().max() < 1e-15


def test_a_mode_on_a_grid():
    mode = make_modes()[1]
    (inside,) = range_grids(torch.tensor([-1.0]), torch.tensor([1.0]))
    assert len(inside) == 33 and float(inside[0]) == -1.0 and float(inside[-1]) == 1.0
    assert ModeGrid(mode, inside).missing().abs().max() < 1e-3
    outside = torch.tensor([2.9, 3.0, 10.0])
    features = mode.basis(outside)
    expected = 1 - (features**2) @ mode.variances()
    torch.testing.assert_close(ModeGrid(mode, outside).missing(), expected)
    assert ModeGrid(mode, outside).missing()[1] > 1 - 1e-9


def test_missing_variance_of_a_product_of_modes():
    modes = make_modes()
    x = torch.tensor([[0.0, 0.0], [0.5, 10.0], [10.0, 10.0]], dtype=torch.float64)
    missing = missing_of_modes(modes, x)
    total = modes[0].prior_variance(x[:, 0]) * modes[1].prior_variance(x[:, 1])
    assert [flags.tolist() for flags in missing.is_short] == [[False, False, True], [False, True, True]]
    # Far away in the second input nothing is represented, whatever the first one does.
    torch.testing.assert_close(missing.total, total)
    torch.testing.assert_close(missing.fraction, torch.tensor([0.0, 1.0, 1.0]).double())
