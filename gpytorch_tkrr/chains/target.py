"""What draws belong to: draws of another target must not be added to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..data.checkpoint import difference, show
from ..data.identity import Incomparable, module_identity
from ..data.training import Summary
from ..errors import InputError
from ..model.draws import DrawsPosterior

if TYPE_CHECKING:
    from ..model.tkrr import TKRR


def target_identity(model: TKRR, summary: Summary) -> dict[str, Any]:
    """
    Rows, mean, box, sizes, and all of kernel and likelihood but the values of free parameters.

    :param model: The model.
    :param summary: Of its rows.
    """
    assert model.domain is not None
    names = ("num_rows", "mass", "mean", "variance", "lower", "upper", "fingerprint")
    rows = {name: getattr(summary, name) for name in names}
    fraction = torch.linspace(0, 1, 33, dtype=torch.float64, device=summary.lower.device).unsqueeze(-1)
    grid = summary.lower + fraction * (summary.upper - summary.lower)
    sizes = [mode.num_functions for mode in model.separate().modes]
    order = list(model.weights.chain(len(sizes)))
    identity = {
        **{f"{name} of the data": value for name, value in rows.items()},
        "the mean function": model.mean_module(grid.to(next(model.mean_module.parameters(), grid).dtype)).double(),
        "the box": torch.stack(model.domain.sides(summary.num_dims)),
        "num_basis": sizes,
        "rank": model.rank,
        "the format of the weights": model.weights.kind,
        **({} if order == sorted(order) else {"the order of the inputs": order}),
        **_rules(model.covar_module, "kernel"),
        **_rules(model.likelihood, "likelihood"),
    }
    return {name: value.detach().cpu() if isinstance(value, Tensor) else value for name, value in identity.items()}


def _rules(module: torch.nn.Module | None, name: str) -> dict[str, Any]:
    """A module without the values of its free parameters; numbers as in single precision, which a model may be in."""
    assert module is not None
    known = module_identity(module, name)
    kept = {key: value for key, value in known.items() if not known.get(f"{key}.requires_grad", False)}
    floats = {k: v.float() for k, v in kept.items() if isinstance(v, Tensor) and v.is_floating_point()}
    return {k: str(v) if isinstance(v, Incomparable) else v for k, v in {**kept, **floats}.items()}


def require_same_target(earlier: DrawsPosterior, identity: dict[str, Any]) -> None:
    """
    :param earlier: Draws to be continued.
    :param identity: What new draws would belong to.
    :raises InputError: Where the draws are those of something else.
    """
    saved = earlier.resume.get("target", {})
    name = difference(saved, identity)
    if name is not None:
        raise InputError(
            f"The model's draws cannot be continued (num_warmup=0): {name} was {show(saved.get(name))} and is now "
            f"{show(identity.get(name))}. Draws of different data, models or sizes do not mix. Start anew, with "
            "num_warmup > 0."
        )
