r"""A kernel's free hyperparameters as one vector of unconstrained coordinates, with their prior density.

Positive parameters are seen through their logarithm, others as they are. Priors registered on the kernel object are
honoured; a parameter without one gets a weak default on its coordinate u:

- a lengthscale: :math:`u \sim N(\log h, 0.6^2)` with h half the range of its input dimension;
- the variance of a constant: :math:`u \sim N(u_0, \min(1.5^2, 4^2 / D))`, since D of them are multiplied;
- any other: :math:`u \sim N(u_0, 1.5^2)` with :math:`u_0` the value that the first fit starts from.

Bounds of registered constraints cut all of them off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gpytorch.kernels import Kernel, PeriodicKernel
from torch import Tensor, nn

from ..features.separable import SeparableKernel

LENGTHSCALE_SPREAD = 0.6
DEFAULT_SPREAD = 1.5

#: Bound on the standard deviation of the logarithm of a product over all modes: of their constants together, and of a
#: component's precisions together. A weaker prior leaves components free to grow huge and to cancel each other.
TOTAL_SPREAD = 4.0


@dataclass(frozen=True)
class _Slot:
    """One element of a raw parameter."""

    name: str
    parameter: nn.Parameter
    constraint: Any
    position: int
    is_log: bool

    @property
    def is_constant(self) -> bool:
        """Whether it is the variance of a constant, going by its name."""
        return self.name.split("[")[0].endswith("constant")

    @property
    def is_lengthscale(self) -> bool:
        """Whether it is a lengthscale, going by its name."""
        return self.name.split("[")[0].endswith("lengthscale")


class Hyperparameters:
    """
    The free hyperparameters of a separable kernel.

    :param kernel: The kernel object that holds the raw parameters.
    :param separable: The same kernel, read mode by mode.
    :param half_range: Half the range of each input dimension, `(D,)`.
    :param centers: Centres of the default priors by name, from an earlier fit; by default they are set from the data
        and the current values.
    """

    def __init__(
        self, kernel: Kernel, separable: SeparableKernel, half_range: Tensor, centers: dict[str, float] | None = None
    ):
        self.kernel = kernel
        self.separable = separable
        self.slots: list[_Slot] = []
        for name, parameter, constraint in kernel.named_parameters_and_constraints():
            if parameter.requires_grad:
                is_log = constraint is not None and bool((constraint.lower_bound >= 0).all())
                short = name.replace("raw_", "")
                for i in range(parameter.numel()):
                    label = short if parameter.numel() == 1 else f"{short}[{i}]"
                    self.slots.append(_Slot(label, parameter, constraint, i, is_log))
        self.variance_users = [self._slots_of(mode.covariance().numbers()) for mode in separable.modes]
        self.scale_users = self._slots_of(separable.outputscale())
        self.users = [users | self.scale_users for users in self.variance_users]  # slots that each mode depends on
        self.own: list[list[int]] = []  # slots that only this mode depends on
        self.shared: list[list[int]] = []  # slots that it has in common with others
        for d, users in enumerate(self.users):
            others = set().union(*(other for k, other in enumerate(self.users) if k != d))
            self.own.append(sorted(users - others))
            self.shared.append(sorted(users & others))
        self._coordinates = self._read()  # the kernel object is changed through `set` alone
        self._registered = self._find_registered()
        self.centers = self._default_centers(half_range) if centers is None else centers
        self.spreads = [self._default_spread(slot) for slot in self.slots]

    @property
    def names(self) -> list[str]:
        """Name of each coordinate, that of the constrained parameter."""
        return [slot.name for slot in self.slots]

    def _slots_of(self, value: Tensor) -> set[int]:
        """Slots that a tensor depends on."""
        if not value.requires_grad or not self.slots:
            return set()
        parameters = list(dict.fromkeys(slot.parameter for slot in self.slots))
        weight = torch.linspace(1.0, 2.0, value.numel(), dtype=value.dtype, device=value.device).reshape(value.shape)
        grads = torch.autograd.grad((value * weight).sum(), parameters, allow_unused=True)
        touched = {p: g for p, g in zip(parameters, grads, strict=True) if g is not None}
        return {
            i
            for i, slot in enumerate(self.slots)
            if slot.parameter in touched and bool(touched[slot.parameter].reshape(-1)[slot.position] != 0)
        }

    def _find_registered(self) -> list[tuple[set[int], Any, Any, Any]]:
        """Registered priors with the slots they speak about."""
        found = []
        for _, module, prior, closure, _ in self.kernel.named_priors():
            with torch.enable_grad():
                slots = self._slots_of(closure(module))
            if slots:
                found.append((slots, module, prior, closure))
        return found

    def _default_centers(self, half_range: Tensor) -> dict[str, float]:
        owners = {
            parameter: module for module in self.kernel.modules() for parameter in module.parameters(recurse=False)
        }
        centers = {}
        for i, slot in enumerate(self.slots):
            centers[slot.name] = self._coordinates[i]
            if slot.is_lengthscale and not isinstance(owners[slot.parameter], PeriodicKernel):
                seen = [
                    float(half_range[d].log()) for d, users in enumerate(self.users) if i in users and half_range[d] > 0
                ]
                if seen:
                    centers[slot.name] = sum(seen) / len(seen)
        return centers

    def _default_spread(self, slot: _Slot) -> float:
        if slot.is_lengthscale:
            return LENGTHSCALE_SPREAD
        if slot.is_constant:
            return min(DEFAULT_SPREAD, TOTAL_SPREAD / math.sqrt(len(self.separable.modes)))
        return DEFAULT_SPREAD

    def get(self, index: Sequence[int]) -> Tensor:
        """
        Current coordinates.

        :param index: Which ones.
        """
        return torch.tensor([self._coordinates[i] for i in index], dtype=torch.float64)

    def _read(self) -> list[float]:
        """All coordinates, from the kernel object."""
        values = []
        for slot in self.slots:
            raw = slot.parameter.detach().reshape(-1)[slot.position].double()
            if slot.constraint is not None:
                raw = slot.constraint.transform(raw).reshape(())
            values.append(float(raw.log() if slot.is_log else raw))
        return values

    def set(self, index: Sequence[int], coordinates: Tensor) -> bool:
        """
        Set coordinates on the kernel object.

        :param index: Which ones.
        :param coordinates: Their new values.
        :return: False, and nothing is changed, where one lies outside of its constraint's bounds.
        """
        raws = []
        for i, coordinate in zip(index, coordinates.tolist(), strict=True):
            slot = self.slots[i]
            value = math.exp(min(coordinate, 700.0)) if slot.is_log else coordinate
            constraint = slot.constraint
            if constraint is not None:
                if not float(constraint.lower_bound.min()) < value < float(constraint.upper_bound.max()):
                    return False
                value = float(constraint.inverse_transform(torch.tensor(value, dtype=torch.float64)))
                if not math.isfinite(value):
                    return False
            raws.append(value)
        for i, raw, coordinate in zip(index, raws, coordinates.tolist(), strict=True):
            self.slots[i].parameter.data.view(-1)[self.slots[i].position] = raw
            self._coordinates[i] = coordinate
        return True

    def log_prior(self, index: Sequence[int]) -> float:
        """
        Log density, up to a constant, of everything that depends on some coordinates.

        :param index: Which ones.
        """
        total, chosen = 0.0, set(index)
        covered: set[int] = set()
        for slots, module, prior, closure in self._registered:
            covered |= slots
            if slots & chosen:
                total += float(prior.log_prob(closure(module)).sum())
        for i in index:
            slot = self.slots[i]
            u = self._coordinates[i]
            if i in covered:
                total += u if slot.is_log else 0.0  # density of the logarithm
            else:
                total -= 0.5 * ((u - self.centers[slot.name]) / self.spreads[i]) ** 2
        return total

    def prior_draw(self, rng: np.random.Generator) -> Tensor:
        """
        All coordinates drawn from the default priors; bounds of constraints and registered priors are not looked at.

        :param rng: Source of random numbers.
        """
        centers = torch.tensor([self.centers[slot.name] for slot in self.slots], dtype=torch.float64)
        return centers + torch.tensor(self.spreads, dtype=torch.float64) * torch.from_numpy(
            rng.standard_normal(len(self.slots))
        )

    def values(self) -> Tensor:
        """All constrained values, `(P,)`."""
        coordinates = self.get(range(len(self.slots)))
        is_log = torch.tensor([slot.is_log for slot in self.slots], dtype=torch.bool)
        return torch.where(is_log, coordinates.exp(), coordinates) if self.slots else coordinates

    def set_values(self, values: Tensor) -> None:
        """
        Set all constrained values on the kernel object.

        :param values: `(P,)`.
        """
        index = range(len(self.slots))
        is_log = torch.tensor([slot.is_log for slot in self.slots], dtype=torch.bool)
        values = values.cpu()
        self.set(index, torch.where(is_log, values.clamp(min=1e-300).log(), values))
