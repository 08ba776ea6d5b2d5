"""What a module is known by: every value in its tree that a computation may depend on, as plain numbers and texts."""

from __future__ import annotations

import functools
import hashlib
import pickle
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

#: Attributes of every module that say nothing about what it computes.
INTERNAL = frozenset(vars(nn.Module())) | {"_priors", "_constraints", "_added_loss_terms"}


class Incomparable(str):
    """In place of a value that cannot be compared with that of another module; the text is the name of its class."""


def module_identity(module: nn.Module, name: str) -> dict[str, Any]:
    """
    Classes, parameters and whether they are free, buffers, and plain attributes of all modules in a tree.

    Bounds of constraints and parameters of priors are modules in this tree. A function is known by its name, its code
    and the values that it closes over. Caches are left out, going by their name.

    :param module: The root of the tree.
    :param name: What the root is called.
    """
    found: dict[str, Any] = {}
    for path, part in module.named_modules(remove_duplicate=False):  # what copies share or not is no difference
        prefix = f"{name}.{path}" if path else name
        found[prefix] = _class_name(type(part))
        for key, parameter in part._parameters.items():
            if parameter is not None:
                found[f"{prefix}.{key}"] = _plain_tensor(parameter)
                found[f"{prefix}.{key}.requires_grad"] = parameter.requires_grad
        found.update({f"{prefix}.{key}": _plain_tensor(b) for key, b in part._buffers.items() if b is not None})
        for key, value in vars(part).items():
            if key not in INTERNAL and "cache" not in key:
                found.update(_describe(value, f"{prefix}.{key}", ()))
    return found


def _describe(value: Any, name: str, inside: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    """Named plain values that a value is made of."""
    if value is None or isinstance(value, (bool, int, float, str)):
        yield name, value
    elif isinstance(value, Tensor):
        yield name, _plain_tensor(value)
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        yield name, torch.from_numpy(np.array(value))
    elif id(value) in inside:
        yield name, "itself"
    elif isinstance(value, nn.Module):
        yield from module_identity(value, name).items()  # held in a list or the like, not registered
    elif isinstance(value, (list, tuple, set, frozenset)):
        items = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        yield name, len(items)
        for i, item in enumerate(items):
            yield from _describe(item, f"{name}[{i}]", (*inside, id(value)))
    elif isinstance(value, Mapping):
        yield name, len(value)
        for key, item in value.items():
            yield from _describe(item, f"{name}[{key!r}]", (*inside, id(value)))
    elif isinstance(value, (type, torch.dtype, np.dtype)):
        yield name, _class_name(value) if isinstance(value, type) else str(value)
    elif isinstance(value, torch.device):
        return  # a fit may go on elsewhere
    elif callable(value):
        yield from _describe_function(value, name, (*inside, id(value)))
    elif hasattr(value, "__dict__"):
        yield name, _class_name(type(value))
        for key, item in vars(value).items():
            yield from _describe(item, f"{name}.{key}", (*inside, id(value)))
    else:
        yield name, _digest(value)


def _describe_function(value: Any, name: str, inside: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, functools.partial):
        yield from _describe((value.func, value.args, value.keywords), name, inside)
    elif isinstance(value, types.MethodType):
        yield from _describe(value.__func__, name, inside)  # of an object that is somewhere in the tree itself
    elif isinstance(value, types.FunctionType):
        yield name, f"{value.__module__}.{value.__qualname__} {_code_digest(value.__code__)}"
        cells = (
            {} if value.__closure__ is None else dict(zip(value.__code__.co_freevars, value.__closure__, strict=True))
        )
        held = {key: cell.cell_contents for key, cell in cells.items() if key not in ("self", "__class__")}
        yield from _describe((value.__defaults__, held), f"{name}()", inside)
    elif hasattr(value, "__qualname__"):
        yield name, f"{value.__module__}.{value.__qualname__}"  # a function of the interpreter or of a library
    else:
        yield name, _class_name(type(value))
        yield from _describe(dict(getattr(value, "__dict__", {})), f"{name}.__dict__", inside)


def _class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _plain_tensor(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().cpu()


def _code_digest(code: types.CodeType) -> str:
    constants = [_code_digest(item) if isinstance(item, types.CodeType) else repr(item) for item in code.co_consts]
    return hashlib.sha256(code.co_code + repr((constants, code.co_names)).encode()).hexdigest()[:16]


def _digest(value: Any) -> str:
    try:
        return f"{_class_name(type(value))} {hashlib.sha256(pickle.dumps(value)).hexdigest()[:16]}"
    except Exception:  # whatever pickle raises
        return Incomparable(type(value).__name__)
