"""What the columns of the inputs mean: numbers, categories, fidelities, a task."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from botorch.utils.transforms import normalize_indices
from torch import Tensor

from ..errors import InputError


@dataclass(frozen=True)
class Columns:
    """
    Columns by their meaning; see :func:`read_columns`.

    :param num_dims: d.
    :param categories: Those whose values are names, 0, 1, ...
    :param fidelities: Those that say how close an observation is to what is wanted, 1 for the thing itself.
    :param task: That of the tasks; None for none.
    :param num_tasks: T.
    """

    num_dims: int
    categories: tuple[int, ...]
    fidelities: tuple[int, ...]
    task: int | None
    num_tasks: int

    @property
    def special(self) -> tuple[int, ...]:
        """All columns that are no numbers."""
        return (*self.categories, *self.fidelities, *(() if self.task is None else (self.task,)))

    @property
    def numbers(self) -> list[int]:
        """All others."""
        return [column for column in range(self.num_dims) if column not in self.special]

    def num_copies(self, lower: Tensor, upper: Tensor) -> int:
        """
        How many times the functions of the numbers are needed: once for each level of each category, for both
        functions of a fidelity, for each task.

        :param lower: Lower ends of all columns `(d,)`.
        :param upper: Upper ends.
        """
        levels = math.prod(int(upper[column] - lower[column]) + 2 for column in self.categories)
        return levels * 2 ** len(self.fidelities) * (1 if self.task is None else self.num_tasks)

    def with_tasks(self, x: Tensor, tasks: Sequence[int]) -> Tensor:
        """
        Inputs of all tasks, one after the other.

        :param x: Inputs without the column of tasks, `(..., n, d - 1)`.
        :param tasks: T' of them.
        :return: `(..., T' n, d)`.
        """
        assert self.task is not None
        before, after = x[..., : self.task], x[..., self.task :]
        index = x.new_ones(*x.shape[:-1], 1)
        return torch.cat([torch.cat([before, task * index, after], -1) for task in tasks], -2)


def read_columns(
    x: Tensor,
    cat_dims: Sequence[int] | None,
    data_fidelities: Sequence[int] | None,
    task_feature: int | None,
    output_tasks: Sequence[int] | None,
) -> Columns:
    """
    The meaning of the columns of training inputs.

    :param x: Inputs `(..., n, d)`.
    :param cat_dims: Columns of categories, which may count from the end.
    :param data_fidelities: Columns of fidelities.
    :param task_feature: The column of tasks.
    :param output_tasks: Tasks that will be asked for, beside those of the inputs.
    """
    num_dims = x.shape[-1]
    groups = [cat_dims or [], data_fidelities or [], [] if task_feature is None else [task_feature]]
    categories, fidelities, task = (tuple(sorted(normalize_indices(list(group), d=num_dims) or [])) for group in groups)
    if len({*categories, *fidelities, *task}) < len(categories) + len(fidelities) + len(task):
        raise InputError(
            "A column has one meaning: cat_dims, data_fidelities and task_feature must be different columns; got "
            f"{list(categories)}, {list(fidelities)} and {list(task)}."
        )
    if not task:
        if output_tasks is not None:
            raise InputError("output_tasks were given without task_feature, the column that holds the tasks.")
        return Columns(num_dims, categories, fidelities, None, 0)
    if x.dim() != 2:
        raise InputError(
            f"With task_feature the inputs are (n, d); got {tuple(x.shape)}. Make one model per batch and join them in "
            "a ModelListGP."
        )
    values = torch.cat([x[:, task[0]].detach().cpu().double(), torch.tensor(output_tasks or [], dtype=torch.float64)])
    if not bool(((values == values.round()) & (values >= 0)).all()):
        raise InputError(f"Column {task[0]} holds tasks, which are numbered 0, 1, ...; it has other values.")
    return Columns(num_dims, categories, fidelities, task[0], int(values.max()) + 1)
