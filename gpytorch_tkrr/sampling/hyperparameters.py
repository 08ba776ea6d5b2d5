r"""The free hyperparameters of a kernel, and of a likelihood, as one vector of coordinates, with their prior density.

Positive parameters are seen through their logarithm, others as they are. Priors registered on the kernel object are
honoured; a parameter without one gets a weak default on its coordinate u:

- a lengthscale: :math:`u \sim N(\log h, 0.6^2)` with h half the range of its input dimension;
- the variance of a constant: :math:`u \sim N(u_0, \min(1.5^2, 4^2 / D))`, since D of them are multiplied;
- a noise variance: an inverse Gamma distribution of shape 1 and scale 0.005 times the variance of the targets;
- any other: :math:`u \sim N(u_0, 1.5^2)` with :math:`u_0` the value that the first fit starts from.

Bounds of registered constraints cut all of them off.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gpytorch.kernels import Kernel, PeriodicKernel
from gpytorch.likelihoods import Likelihood
from torch import Tensor, nn

from ..errors import InputError
from ..features.separable import SeparableKernel
from ..model.likelihoods.noise import NOISE_SCALE, NOISE_SHAPE

if TYPE_CHECKING:
    from ..model.tkrr import TKRR

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

    @property
    def is_noise(self) -> bool:
        """Whether it is a noise variance, going by its name."""
        return self.name.startswith("likelihood.") and self.name.split("[")[0].endswith("noise")

    def coordinate(self, raw: Tensor) -> Tensor:
        """
        Coordinates of raw values, number by number.

        :param raw: Raw values of its parameter.
        """
        value = raw if self.constraint is None else self.constraint.transform(raw)
        return value.log() if self.is_log else value

    @cached_property
    def bounds(self) -> tuple[float, float]:
        """The coordinates that its constraint allows, a little inside of the bounds themselves."""
        if self.constraint is None:
            return -math.inf, math.inf
        low, high = float(self.constraint.lower_bound.min()), float(self.constraint.upper_bound.max())
        low, high = (b if math.isinf(b) else b + sign * BOUND_MARGIN * abs(b) for b, sign in ((low, 1), (high, -1)))
        if not self.is_log:
            return low, high
        return math.log(low) if low > 0 else -math.inf, math.log(high)

    def step(self, order: int) -> float:
        """
        A change of the coordinate, for differences of an order, that its dtype resolves.

        :param order: 1 or 2.
        """
        size = 1.0 if self.is_log else max(1.0, abs(float(self.parameter.detach().reshape(-1)[self.position])))
        return size * torch.finfo(self.parameter.dtype).eps ** (0.4 if order == 1 else 0.25)


#: How close to a bound a coordinate that is learned may come, as a fraction of the width or of the bound.
BOUND_MARGIN = 1e-4


class Hyperparameters:
    """
    The free hyperparameters of a separable kernel, and those of a likelihood where one is given.

    :param kernel: The kernel object that holds the raw parameters.
    :param separable: The same kernel, read mode by mode.
    :param half_range: Half the range of each input dimension, `(D,)`.
    :param centers: Centres of the default priors by name, from an earlier fit; by default they are set from the data
        and the current values.
    :param likelihood: A likelihood whose parameters are learned too.
    :param unit: The variance of the targets.
    """

    def __init__(
        self,
        kernel: Kernel,
        separable: SeparableKernel,
        half_range: Tensor,
        centers: dict[str, float] | None = None,
        *,
        likelihood: Likelihood | None = None,
        unit: float = 1.0,
    ):
        self.kernel, self.likelihood, self.unit = kernel, likelihood, unit
        self.separable = separable
        self.slots: list[_Slot] = []
        found = [("", *item) for item in kernel.named_parameters_and_constraints()]
        if likelihood is not None:
            found += [("likelihood.", *item) for item in likelihood.named_parameters_and_constraints()]
        for prefix, name, parameter, constraint in found:
            if parameter.requires_grad:
                is_log = constraint is not None and bool((constraint.lower_bound >= 0).all())
                short = prefix + name.replace("raw_", "")
                for i in range(parameter.numel()):
                    label = short if parameter.numel() == 1 else f"{short}[{i}]"
                    self.slots.append(_Slot(label, parameter, constraint, i, is_log))
        self.variance_users = [self._slots_of(mode.covariance().numbers()) for mode in separable.modes]
        self.scale_users = self._slots_of(separable.outputscale())
        noise = getattr(likelihood, "noise", None)
        self.noise_users = self._slots_of(noise) if isinstance(noise, Tensor) else set()
        self.users = [users | self.scale_users for users in self.variance_users]  # slots that each mode depends on
        self.own: list[list[int]] = []  # slots that only this mode depends on
        self.shared: list[list[int]] = []  # slots that it has in common with others
        for d, users in enumerate(self.users):
            others = set().union(*(other for k, other in enumerate(self.users) if k != d))
            self.own.append(sorted(users - others))
            self.shared.append(sorted(users & others))
        self._coordinates = self._read()  # the kernel object is changed through `set` alone
        self._registered = self._find_registered()
        self._covered = set().union(*(slots for slots, *_ in self._registered))  # slots with a registered prior
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
        modules = [self.kernel] if self.likelihood is None else [self.kernel, self.likelihood]
        for _, owner, prior, closure, _ in (item for module in modules for item in module.named_priors()):
            with torch.enable_grad():
                slots = self._slots_of(closure(owner))
            if slots:
                found.append((slots, owner, prior, closure))
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

        :param index: Numbers of the coordinates, in the order of all free hyperparameters.
        """
        return torch.tensor([self._coordinates[i] for i in index], dtype=torch.float64)

    def _read(self) -> list[float]:
        """All coordinates, from the kernel object."""
        return [self._read_one(slot) for slot in self.slots]

    @staticmethod
    def _read_one(slot: _Slot) -> float:
        return float(slot.coordinate(slot.parameter.detach().reshape(-1)[slot.position].double()))

    def set(self, index: Sequence[int], coordinates: Tensor) -> bool:
        """
        Set coordinates on the kernel object.

        :param index: Numbers of the coordinates, in the order of all free hyperparameters.
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

        :param index: Numbers of the coordinates, in the order of all free hyperparameters.
        """
        jacobian = sum(self._coordinates[i] for i in index if i in self._covered and self.slots[i].is_log)
        return self.log_penalty(index) + jacobian

    def gradient(self, value: Tensor) -> Tensor:
        """
        The gradient of a number with respect to all coordinates, `(P,)`.

        :param value: The number, made from the parameters of kernel and likelihood with gradients enabled.
        """
        by_parameter = {slot.parameter: slot for slot in self.slots}  # elements of a parameter have one constraint
        parameters = list(by_parameter)
        found = torch.autograd.grad(value, parameters, allow_unused=True)
        raws = [parameter.detach().double().requires_grad_() for parameter in parameters]
        with torch.enable_grad():
            coordinates = [slot.coordinate(raw) for slot, raw in zip(by_parameter.values(), raws, strict=True)]
            total = torch.stack([each.sum() for each in coordinates]).sum()
        # Each coordinate is a function of its own raw number: the gradient of their sum holds all slopes.
        slopes = torch.autograd.grad(total, raws)
        gradients = {
            parameter: torch.zeros_like(slope) if gradient is None else gradient / slope
            for parameter, gradient, slope in zip(parameters, found, slopes, strict=True)
        }
        each = [gradients[slot.parameter].reshape(-1)[slot.position] for slot in self.slots]
        return torch.stack(each).double().cpu()

    def log_prior_slopes(self, index: Sequence[int]) -> Tensor:
        """
        The gradient of :meth:`log_prior`, `(P,)`.

        :param index: Numbers of the coordinates, in the order of all free hyperparameters.
        """
        jacobian = [float(i in self._covered and self.slots[i].is_log) for i in index]
        return self.expand_log_penalty(index)[1] + torch.tensor(jacobian, dtype=torch.float64)

    def log_penalty(self, index: Sequence[int]) -> float:
        """
        What point estimates add to the evidence: as :meth:`log_prior`, but registered priors are densities of the
        values themselves, as in GPyTorch's marginal likelihoods.

        :param index: Numbers of the coordinates, in the order of all free hyperparameters.
        """
        total = sum(self._default(i)[0] for i in index if i not in self._covered)
        return total + self._log_registered(set(index))

    def expand_log_penalty(self, index: Sequence[int]) -> tuple[float, Tensor, Tensor]:
        """
        :meth:`log_penalty`, its gradient `(P,)` and the negative of its second derivatives, none below zero, `(P, P)`.

        :param index: Numbers of the coordinates, in the order of all free hyperparameters.
        """
        value = self.log_penalty(index)
        gradient, curvature = torch.zeros(2, len(index), dtype=torch.float64)
        for n, i in enumerate(index):
            if i not in self._covered:
                _, gradient[n], curvature[n] = self._default(i)
                continue
            here = self._log_registered({i})
            step, u = self.slots[i].step(2), self._coordinates[i]
            sides = []
            for sign in (1, -1):
                if self.set([i], torch.tensor([u + sign * step], dtype=torch.float64)):
                    sides.append(self._log_registered({i}))
            self.set([i], torch.tensor([u], dtype=torch.float64))
            if len(sides) == 2:
                gradient[n] = (sides[0] - sides[1]) / (2 * step)
                curvature[n] = max((2 * here - sides[0] - sides[1]) / step**2, 0.0)
        return value, gradient, curvature.diag()

    def _log_registered(self, chosen: Collection[int]) -> float:
        found = (
            (prior, closure, module)
            for slots, module, prior, closure in self._registered
            if not slots.isdisjoint(chosen)
        )
        return sum(float(prior.log_prob(closure(module)).sum()) for prior, closure, module in found)

    def _default(self, i: int) -> tuple[float, float, float]:
        """Log density of a coordinate's default prior, its slope, and its curvature downwards."""
        u, slot = self._coordinates[i], self.slots[i]
        if slot.is_noise:
            pull = NOISE_SCALE * self.unit * math.exp(-u)
            return -NOISE_SHAPE * u - pull, pull - NOISE_SHAPE, pull
        away = (u - self.centers[slot.name]) / self.spreads[i]
        return -0.5 * away**2, -away / self.spreads[i], 1 / self.spreads[i] ** 2

    def inside(self, index: Sequence[int], coordinates: Tensor) -> Tensor:
        """
        Coordinates moved to the nearest ones that the constraints allow.

        :param index: Numbers of the coordinates, in the order of all free hyperparameters.
        :param coordinates: Their values.
        """
        bounds = torch.tensor([self.slots[i].bounds for i in index], dtype=torch.float64)
        return torch.minimum(torch.maximum(coordinates, bounds[:, 0]), bounds[:, 1])

    def held(self, index: Sequence[int], direction: Tensor) -> Tensor:
        """
        Which coordinates are at a bound that a direction points beyond.

        :param index: Numbers of the coordinates, in the order of all free hyperparameters.
        :param direction: The direction.
        """
        coordinates = self.get(index)
        bounds = torch.tensor([self.slots[i].bounds for i in index], dtype=torch.float64)
        margin = BOUND_MARGIN * (1 + coordinates.abs())
        low, high = coordinates <= bounds[:, 0] + margin, coordinates >= bounds[:, 1] - margin
        return (low & (direction < 0)) | (high & (direction > 0))

    @contextmanager
    def nudged(self, i: int) -> Iterator[float]:
        """
        Change one coordinate a little, and back; the value is by how much it has changed.

        :param i: The number of the coordinate.
        """
        slot, u = self.slots[i], self._coordinates[i]
        step, values = slot.step(1), slot.parameter.data.view(-1)
        before, raw = self._read_one(slot), values[slot.position].clone()
        if not self.set([i], torch.tensor([u + step], dtype=torch.float64)):
            self.set([i], torch.tensor([u - step], dtype=torch.float64))
        try:
            yield self._read_one(slot) - before
        finally:
            values[slot.position], self._coordinates[i] = raw, u

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


def require_representable(model: TKRR, variance: float) -> None:
    """
    An error where free parameters of a dtype are to take values that it cannot hold.

    :param model: The model.
    :param variance: The variance of the targets.
    """
    assert model.covar_module is not None
    for parameter in (*model.likelihood.parameters(), *model.covar_module.parameters()):
        limits = torch.finfo(parameter.dtype)
        if parameter.requires_grad and not 1e3 * variance < limits.max:
            raise InputError(
                f"The variance of the targets, {variance:.2g}, is too large for hyperparameters of dtype "
                f"{parameter.dtype}. Scale the targets down, or make kernel and likelihood float64 by .double()."
            )
