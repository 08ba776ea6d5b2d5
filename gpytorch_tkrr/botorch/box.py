"""The box of a model that optimises: it holds all inputs that may ever be tried, not only those tried so far."""

from __future__ import annotations

import torch
from botorch.models.transforms.input import InputTransform
from torch import Tensor

from ..errors import DomainError


@torch.no_grad()
def input_range(
    x: Tensor, bounds: Tensor | None = None, input_transform: InputTransform | None = None
) -> tuple[Tensor, Tensor]:
    """
    The range that a model must represent: that of the data joined with the bounds.

    :param x: Training inputs `(..., N, D)` as the model sees them, after the input transform.
    :param bounds: Lower and upper ends of the search space, `(2, d)`, before the input transform; by default the unit
        cube after it, which is where BoTorch expects inputs.
    :param input_transform: The model's input transform.
    :return: Lower and upper ends `(D,)`, float64.
    """
    rows = x.double().reshape(-1, x.shape[-1])
    if bounds is None:
        ends = torch.stack([torch.zeros_like(rows[0]), torch.ones_like(rows[0])])
    else:
        ends = torch.as_tensor(bounds).to(x)
        if input_transform is not None:
            mode = input_transform.training
            ends = input_transform.eval()(ends)  # while it is trained, a transform may learn from what it sees
            input_transform.train(mode)
        if ends.shape != (2, x.shape[-1]):
            raise DomainError(
                f"bounds must have shape (2, {x.shape[-1]}), lower ends over upper ends, as in optimize_acqf; got "
                f"{tuple(ends.shape)}."
            )
        ends = ends.double()
    return join_range((ends.amin(0), ends.amax(0)), rows)


@torch.no_grad()
def join_range(ends: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """
    A range that holds inputs, too.

    :param ends: Lower and upper ends `(D,)`.
    :param x: Inputs `(..., N, D)`.
    """
    rows = x.double().reshape(-1, x.shape[-1])
    return ends[0].minimum(rows.amin(0)), ends[1].maximum(rows.amax(0))
