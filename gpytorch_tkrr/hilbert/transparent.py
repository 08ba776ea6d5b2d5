"""Kernels that wrap another kernel and answer for its parameters, so that paths written for that kernel stay valid."""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.constraints import Interval
from gpytorch.kernels import Kernel, ScaleKernel
from torch import Tensor


class TransparentKernel(Kernel):
    """
    A kernel whose attributes, where it has none of that name, are those of `base_kernel`, and of that one's base
    kernel.

    ``kernel.lengthscale``, ``kernel.raw_outputscale`` and the like are read and set where they live; priors and
    constraints can be registered for them.
    """

    def _owner(self, name: str) -> Kernel | None:
        """The kernel inside this one that an attribute belongs to."""
        node = self.__dict__.get("_modules", {}).get("base_kernel")
        while node is not None:
            held = (node._parameters, node._buffers, node._modules, node.__dict__)
            if any(name in names for names in held):
                return node
            if isinstance(getattr(type(node), name, None), property) and (
                name != "lengthscale" or node.has_lengthscale
            ):
                return node
            node = node._modules.get("base_kernel")
        return None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            owner = None if name.startswith("_") else self._owner(name)
            if owner is None:
                raise
            return getattr(owner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and not hasattr(type(self), name) and name not in self.__dict__:
            is_own = any(name in names for names in (self._parameters, self._buffers, self._modules))
            owner = None if is_own else self._owner(name)
            if owner is not None and name in owner._parameters and not isinstance(value, torch.nn.Parameter):
                owner.initialize(**{name: value})
                return
            if owner is not None:
                setattr(owner, name, value)
                return
        super().__setattr__(name, value)

    @property
    def lengthscale(self) -> Tensor | None:
        """The lengthscale of the first kernel inside that has one."""
        owner = self._owner("lengthscale")
        return None if owner is None else owner.lengthscale

    @lengthscale.setter
    def lengthscale(self, value: Tensor | float) -> None:
        owner = self._owner("lengthscale")
        if owner is None:
            raise RuntimeError("Kernel has no lengthscale.")
        owner.lengthscale = value

    def register_constraint(self, param_name: str, constraint: Interval, replace: bool = True) -> None:
        """
        :param param_name: A raw parameter of this kernel or of one inside.
        :param constraint: Its constraint.
        :param replace: See GPyTorch.
        """
        owner = None if param_name in self._parameters else self._owner(param_name)
        if owner is None:
            super().register_constraint(param_name, constraint, replace)
        else:
            owner.register_constraint(param_name, constraint, replace)


class TransparentScaleKernel(TransparentKernel, ScaleKernel):
    """
    A :class:`~gpytorch.kernels.ScaleKernel` that also answers for the lengthscale of its base kernel.

    The path ``covar_module.base_kernel.lengthscale``, written for a scaled kernel, then holds when that is wrapped.
    """

    def _get_name(self) -> str:
        return "ScaleKernel"  # the user's own kernel is printed by the name that it had


def make_transparent(kernel: Kernel) -> None:
    """
    Have a ScaleKernel, and those that it scales, answer for the parameters inside.

    :param kernel: Any kernel; only ScaleKernels change their class.
    """
    while type(kernel) is ScaleKernel:
        kernel.__class__ = TransparentScaleKernel
        kernel = kernel.base_kernel
