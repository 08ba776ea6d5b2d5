"""Problems of known shape that real sets do not show: many interactions, interactions alone, one crowded column."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Parts = tuple[Tensor, Tensor, Tensor, Tensor]


def robot_arm(seed: int, num_rows: int = 40_000, num_joints: int = 8, noise: float = 0.01) -> Parts:
    """
    Distance of the tip of an arm from a point in space, given its joint angles: every input interacts with all others.

    :param seed: Seed of rows and split.
    :param num_rows: Rows, a tenth of them for testing.
    :param num_joints: Number of joints; their axes stand at right angles in turn.
    :param noise: Standard deviation of the noise, relative to that of the distance.
    """
    generator = torch.Generator().manual_seed(seed)
    angles = (torch.rand(num_rows, num_joints, generator=generator, dtype=torch.float64) - 0.5) * 1.3 * torch.pi
    tip = torch.zeros(num_rows, 3, dtype=torch.float64)
    for joint in reversed(range(num_joints)):
        tip = _turn(tip + torch.tensor([1.0 / num_joints, 0.0, 0.0], dtype=torch.float64), angles[:, joint], joint % 2)
    distance = (tip - torch.tensor([0.1, 0.1, 0.1], dtype=torch.float64)).norm(dim=-1)
    return _split(angles, distance, noise, generator)


def _turn(points: Tensor, angle: Tensor, axis: int) -> Tensor:
    """Turn points `(n, 3)` about the z axis (0) or the y axis (1)."""
    cos, sin = angle.cos(), angle.sin()
    x, y, z = points.unbind(-1)
    if axis == 0:
        return torch.stack([cos * x - sin * y, sin * x + cos * y, z], -1)
    return torch.stack([cos * x + sin * z, y, cos * z - sin * x], -1)


def interactions(seed: int, num_rows: int = 8_000, num_dims: int = 32, num_pairs: int = 1, noise: float = 0.2) -> Parts:
    """
    Products of functions of two inputs that do nothing alone, among many inputs that do nothing.

    :param seed: Seed of inputs, pairs and split.
    :param num_rows: Rows, a tenth of them for testing.
    :param num_dims: D.
    :param num_pairs: Number of products.
    :param noise: Standard deviation of the noise, relative to that of the function.
    """
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.rand(num_rows, num_dims, generator=generator, dtype=torch.float64) - 1
    chosen = torch.randperm(num_dims, generator=generator)[: 2 * num_pairs].reshape(num_pairs, 2)
    y = sum((torch.sin(2 * x[:, i]) * x[:, k] for i, k in chosen.tolist()), torch.zeros(num_rows, dtype=torch.float64))
    return _split(x, y, noise, generator)


def crowded_table(seed: int, num_rows: int = 20_000, num_dims: int = 12, noise: float = 0.02) -> Parts:
    """
    Standardised normal inputs, one of them lognormal: test rows lie outside the training range.

    :param seed: Seed of rows and split.
    :param num_rows: Rows, a tenth of them for testing.
    :param num_dims: D.
    :param noise: Standard deviation of the noise, relative to that of the function.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, num_dims, generator=generator, dtype=torch.float64)
    x[:, 0] = x[:, 0].exp()
    x = (x - x.mean(0)) / x.std(0)
    y = torch.sin(2 * x[:, 1]) + x[:, 2] * x[:, 3] / 2 + torch.tanh(x[:, 0]) + torch.cos(x[:, 4]) * x[:, 5]
    return _split(x, y, noise, generator)


def _split(x: Tensor, f: Tensor, noise: float, generator: torch.Generator) -> Parts:
    """Noise added; the last tenth is for testing, since rows are independent."""
    y = f + noise * f.std() * torch.randn(len(f), generator=generator, dtype=torch.float64)
    size = len(y) - len(y) // 10
    return x[:size], y[:size], x[size:], y[size:]


WORLDS: dict[str, Callable[[int], Parts]] = {
    "robot_arm": robot_arm,
    "interaction": interactions,
    "two_interactions": lambda seed: interactions(seed, num_pairs=2),
    "crowded_table": crowded_table,
}
