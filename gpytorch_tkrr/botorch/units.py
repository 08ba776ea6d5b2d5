"""Hyperparameters optimised in units of their own size.

BoTorch's default modules have positive parameters without a transform: a noise variance of 0.01 and a lengthscale of 1
are optimised as they are. Along the noise the log likelihood then bends ten thousand times as much as along the
lengthscales, and L-BFGS-B spends its first steps to find that out. In units of the values where it starts, each bends
about as much: a fit takes a quarter of the evaluations.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from botorch.optim.closures import get_loss_closure_with_grads
from botorch.optim.closures.core import NdarrayOptimizationClosure
from botorch.optim.core import OptimizationResult
from botorch.optim.fit import fit_gpytorch_mll_scipy
from botorch.optim.utils import get_parameters_and_bounds
from gpytorch.mlls import MarginalLogLikelihood
from torch import Tensor

#: Bounds of raw parameters by name.
Bounds = dict[str, tuple[Any, Any]]


def fit_in_units(
    mll: MarginalLogLikelihood, *, bounds: Bounds | None = None, closure: Any = None, **kwargs: Any
) -> OptimizationResult:
    """
    `fit_gpytorch_mll_scipy` with each positive parameter in units of the value that it has at the start.

    :param mll: What is maximised.
    :param bounds: Bounds of raw parameters, beside those of their constraints.
    :param closure: None; `fit_gpytorch_mll` passes it.
    :param kwargs: As for `fit_gpytorch_mll_scipy`.
    """
    assert closure is None
    parameters, known = get_parameters_and_bounds(mll, requires_grad=True)
    units = _units(mll)
    scaled: Any = {
        name: tuple(_in_unit(bound, units[name]) for bound in pair)
        for name, pair in {**known, **(bounds or {})}.items()
        if name in parameters
    }
    in_units: Any = _ClosureInUnits(
        get_loss_closure_with_grads(mll, parameters), parameters, torch.cat([units[name] for name in parameters])
    )
    return fit_gpytorch_mll_scipy(mll, parameters=parameters, bounds=scaled, closure=in_units, **kwargs)


def _units(mll: MarginalLogLikelihood) -> dict[str, Tensor]:
    """For each parameter by name its size, `(n,)`, where it is positive without a transform, else one."""
    units = {}
    for name, parameter, constraint in mll.named_parameters_and_constraints():
        size = parameter.detach().double().flatten()
        is_positive = constraint is not None and not constraint.enforced and bool((constraint.lower_bound >= 0).all())
        units[name] = torch.where(size > 0, size, 1.0) if is_positive else torch.ones_like(size)
    return units


def _in_unit(bound: Any, unit: Tensor) -> Tensor | None:
    return None if bound is None else torch.as_tensor(bound).to(unit).flatten() / unit


class _ClosureInUnits(NdarrayOptimizationClosure):
    """
    What SciPy evaluates.

    :param closure: Value and gradient at the present parameters.
    :param parameters: By name.
    :param units: Of all of them, `(n,)`.
    """

    def __init__(self, closure: Any, parameters: dict[str, Tensor], units: Tensor):
        super().__init__(closure, parameters)
        self.units = units.cpu().numpy()

    def __call__(self, state: npt.NDArray | None = None, **kwargs: Any) -> tuple[npt.NDArray, npt.NDArray]:
        value, gradient = super().__call__(state, **kwargs)
        return value, gradient * self.units

    @property
    def state(self) -> npt.NDArray:
        """The parameters in their units."""
        return np.asarray(super().state) / self.units

    @state.setter
    def state(self, state: npt.NDArray) -> None:
        NdarrayOptimizationClosure.state.fset(self, state * self.units)  # type: ignore[attr-defined]
