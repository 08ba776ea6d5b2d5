"""Kernels, means and likelihoods of several outcomes, and those of some of them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TypeVar

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods.noise_models import FixedGaussianNoise, HomoskedasticNoise
from gpytorch.means import Mean
from torch import nn

Module = TypeVar("Module", bound=nn.Module)


def module_of_outcomes(module: Module, chosen: int | list[int], batch_shape: torch.Size) -> Module:
    """
    A copy of a kernel, a mean or a likelihood for some of the outcomes.

    :param module: For all outcomes; those of its parts that have no batch shape serve each of them.
    :param chosen: Which outcome, or which outcomes.
    :param batch_shape: The batch shape of a part that has one, the number of outcomes last; empty for one outcome.
    """
    copied = copy.deepcopy(module)
    if not batch_shape:
        return copied
    dim = len(batch_shape) - 1
    index = (slice(None),) * dim + (chosen,)
    for part in copied.modules():
        if isinstance(part, FixedGaussianNoise):
            part.noise = part.noise[index]
        elif _batch_shape(part) == batch_shape:
            for name, value in part._parameters.items():
                if value is not None:
                    picked = value.detach()[index].clone()
                    part._parameters[name] = nn.Parameter(picked, requires_grad=value.requires_grad)
            if isinstance(part, Kernel | Mean):
                part.batch_shape = batch_shape[:dim] + torch.Size([] if isinstance(chosen, int) else [len(chosen)])
    return copied


@torch.no_grad()
def read_outcome(single: nn.Module, module: nn.Module, i: int) -> None:
    """
    Give the module of one outcome the present values of the module of all.

    :param single: Made by :func:`module_of_outcomes`; changed in place.
    :param module: For all outcomes.
    :param i: Which outcome.
    """
    for mine, all_values in zip(single.parameters(), module.parameters(), strict=True):
        mine.copy_(all_values[i] if mine.shape != all_values.shape else all_values)


@torch.no_grad()
def write_outcomes(module: nn.Module, singles: Sequence[nn.Module]) -> None:
    """
    Give a module of all outcomes the values of the modules of each; what they share gets the mean.

    :param module: For all outcomes; changed in place.
    :param singles: Those of each outcome.
    """
    for all_values, *each in zip(module.parameters(), *(single.parameters() for single in singles), strict=True):
        values = torch.stack([value.to(all_values) for value in each])
        all_values.copy_(values.mean(0) if values[0].shape == all_values.shape else values)


def _batch_shape(part: nn.Module) -> torch.Size | None:
    """That of the parameters of a module, without those of its parts."""
    if isinstance(part, HomoskedasticNoise):
        return part.raw_noise.shape[:-1]
    return getattr(part, "batch_shape", None) if isinstance(part, Kernel | Mean) else None
