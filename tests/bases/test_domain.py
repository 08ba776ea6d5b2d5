"""The box."""

from __future__ import annotations

import copy

import pytest
import torch

from gpytorch_tkrr import Domain, DomainError, InputError


def test_from_data_widens_the_range():
    domain = Domain.from_data(torch.tensor([[0.0, -1.0], [2.0, 5.0]]), 2.0)
    assert domain.center.tolist() == [1.0, 2.0]
    assert domain.half_width.tolist() == [2.0, 6.0]
    assert domain.num_dims == 2


def test_batches_and_vectors_of_data():
    x = torch.rand(3, 4, 2)
    domain = Domain.from_data(x)
    assert torch.equal(domain.center, Domain.from_data(x.reshape(-1, 2)).center)
    assert Domain.from_data(torch.rand(5)).num_dims == 1


@pytest.mark.parametrize("x", [torch.full((5, 2), 3.0), torch.tensor([[3.0, 3.0]])])
def test_constant_columns_and_a_single_point(x):
    domain = Domain.from_data(x)
    assert (domain.half_width == 1.5).all()
    assert domain.contains(x).all()


def test_scalars_broadcast_to_any_dimension():
    domain = Domain(1.0, 2.0)
    assert domain.num_dims is None
    center, half_width = domain.sides(3)
    assert center.tolist() == [1.0] * 3
    assert half_width.tolist() == [2.0] * 3


def test_wrong_number_of_dimensions():
    with pytest.raises(DomainError, match="2 dimensions but the inputs have 3"):
        Domain(torch.zeros(2), 1.0).sides(3)


def test_data_on_the_edge_of_a_float32_box_are_inside():
    x = torch.rand(1000, 3) * 1e4
    domain = Domain.from_data(x, 1.0)
    assert domain.contains(x).all()
    assert not domain.contains(x + 1.0).all()


def test_state_travels():
    domain = Domain(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
    other = Domain(torch.zeros(2), 1.0)
    other.load_state_dict(domain.state_dict())
    assert torch.equal(other.center, domain.center) and torch.equal(other.half_width, domain.half_width)
    assert torch.equal(copy.deepcopy(domain).center, domain.center)


def test_a_domain_keeps_no_reference_to_its_arguments():
    center = torch.zeros(2, dtype=torch.float64)
    domain = Domain(center, 1.0)
    center += 5
    assert not domain.center.any()


@pytest.mark.parametrize(
    ("center", "half_width"),
    [
        (0.0, 0.0),
        (0.0, -1.0),
        (float("nan"), 1.0),
        (0.0, float("inf")),
        (torch.zeros(2), torch.tensor([1.0, 0.0])),
        (torch.zeros(2, 2), 1.0),
        (torch.zeros(2), torch.ones(3)),
    ],
)
def test_malformed_boxes(center, half_width):
    with pytest.raises(DomainError):
        Domain(center, half_width)


def test_malformed_bounds():
    with pytest.raises(DomainError, match="below lower"):
        Domain.from_bounds(1.0, 0.0)
    with pytest.raises(DomainError, match="at least 1"):
        Domain.from_bounds(0.0, 1.0, boundary_factor=0.9)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.tensor([[0.0], [float("nan")]]), "1 of 2 input rows.*row 1"),
        (torch.tensor([[float("inf"), 0.0]]), "NaN or infinite"),
        (torch.zeros(0, 2), "N >= 1"),
        (torch.zeros(3, 0), "D >= 1"),
        (torch.tensor(1.0), "shape"),
        ([1.0, 2.0], "torch.Tensor"),
    ],
)
def test_malformed_inputs(x, message):
    with pytest.raises(InputError, match=message):
        Domain.from_data(x)
