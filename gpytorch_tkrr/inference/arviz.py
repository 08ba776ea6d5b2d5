"""Draws as ArviZ's InferenceData (a DataTree from ArviZ 1.0 on); needs the extra `arviz`.

Every sampler fills the same groups: `posterior`, `sample_stats`, `log_likelihood` (one value per row), and
`posterior_predictive`, with `observed_data` and `constant_data` beside them. Rows are the dimension `row`, inputs the
dimension `input`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError, NotFittedError
from ..model.draws import DrawsPosterior
from ..model.likelihoods.augmented import Parameters, is_reported
from ..model.likelihoods.base import Observation, Rows
from ..model.tkrr import TKRR

#: Function values that are kept in the posterior group, at rows spread evenly over the data.
NUM_WATCHED = 50

#: Values of f that are computed at once.
CHUNK = 1 << 20


def draws_to_arviz(model: TKRR, data: Any = None, *, seed: int | None = None, **rows: Tensor | float) -> Any:
    """
    The draws that a CP-weight model holds; what :meth:`gpytorch_tkrr.GibbsResult.to_arviz` returns.

    :param model: A :class:`~gpytorch_tkrr.TKRR` model after :func:`~gpytorch_tkrr.fit_gibbs`.
    :param data: Rows `(x, y)` to report on; by default the training data.
    :param seed: Seed of the replicated targets.
    :param rows: See :meth:`TKRR.predict`.
    """
    if data is None:
        if model.train_inputs is None:
            raise InputError("The model holds no training data. Pass the rows to report on: to_arviz(data=(x, y)).")
        data = model.train_inputs[0], model.train_targets
    x, y = data
    x = x.unsqueeze(-1) if x.dim() == 1 else x
    posterior = model.posterior
    if not isinstance(posterior, DrawsPosterior):
        raise NotFittedError("The model holds no draws any more: it has been fitted by fit_als since.")
    parameters = {name: by_chain(values, posterior.chains) for name, values in posterior.parameters.items()}
    reported = {name: values for name, values in posterior.parameters.items() if is_reported(name)}
    named = gathered({**reported, **posterior.hyperparameters})
    return regression_to_arviz(
        lambda x: by_chain(model.draws(x.double()), posterior.chains),
        model.observation,
        parameters,
        model.observed_rows(x, **rows),
        {name: by_chain(values, posterior.chains) for name, values in named.items() if values.std() > 0},
        x,
        y,
        functions=lambda x: model.observation.function_rows(model.held(x.double()), parameters),
        seed=seed,
    )


@torch.no_grad()
def regression_to_arviz(
    draw: Callable[[Tensor], Tensor],
    observation: Observation,
    parameters: Parameters,
    rows: Rows,
    reported: Mapping[str, Tensor],
    x: Tensor,
    y: Tensor,
    *,
    functions: Callable[[Tensor], Rows] | None = None,
    sample_stats: Mapping[str, Tensor] | None = None,
    seed: int | None = None,
) -> Any:
    """
    A model of independent observations given f, which is known by draws of whole functions.

    :param draw: Values `(chains, draws, n)`, float64, of the drawn functions at inputs `(n, D)`.
    :param observation: The distribution of y given f.
    :param parameters: Its parameters in each draw, `(chains, draws, ...)` by name.
    :param rows: What it knows of each row, `(N,)` by name.
    :param reported: What the posterior group holds beside f, `(chains, draws, ...)` by name.
    :param x: Inputs `(N, D)`.
    :param y: Targets `(N,)`.
    :param functions: What functions of the inputs say of rows `(n, D)`, `(chains, draws, n)` by name; None for nothing.
    :param sample_stats: What the sampler says of each draw, `(chains, draws)`, beside the deviance.
    :param seed: Seed of the replicated targets.
    """
    y = observation.decode(observation.encode(y))
    generator = torch.Generator(y.device)
    generator.manual_seed(int(torch.randint(2**31, ())) if seed is None else seed)
    log_densities, replicates = [], []
    watched = torch.linspace(0, len(y) - 1, min(NUM_WATCHED, len(y)), device=y.device).long()
    f_watched = draw(x[watched])
    for index in torch.arange(len(y), device=y.device).split(max(CHUNK // f_watched[..., 0].numel(), 1)):
        f, own = draw(x[index]), {name: values[index] for name, values in rows.items()}
        own |= {} if functions is None else functions(x[index])
        log_densities.append(observation.log_density(y[index], f, parameters, own))
        replicates.append(observation.sample(f, parameters, own, generator))
    log_likelihood = torch.cat(log_densities, -1)  # (chains, draws, N)
    groups = {
        "posterior": {**reported, "f": f_watched},
        "sample_stats": {**(sample_stats or {}), "deviance": -2 * log_likelihood.sum(-1)},
        "log_likelihood": {"y": log_likelihood},
        "posterior_predictive": {"y": torch.cat(replicates, -1)},
        "observed_data": {"y": y},
        "constant_data": {"x": x},
    }
    dims = {"y": ["row"], "x": ["row", "input"], "f": ["watched_row"]}
    return inference_data(groups, dims, {"watched_row": watched})


def inference_data(
    groups: Mapping[str, Mapping[str, Any]], dims: Mapping[str, Sequence[str]], coords: Mapping[str, Any]
) -> Any:
    """
    The object that ArviZ's functions take.

    :param groups: Arrays by group and name; those of draws are `(chains, draws, ...)`.
    :param dims: Names of the further dimensions of each variable.
    :param coords: Labels of dimensions.
    :return: An InferenceData, or a DataTree from ArviZ 1.0 on.
    """
    try:
        import arviz as az
    except ImportError as error:
        raise ImportError("to_arviz needs ArviZ: pip install arviz, or gpytorch_tkrr[arviz] with its extra.") from error
    arrays = {group: {name: _as_array(value) for name, value in values.items()} for group, values in groups.items()}
    options: dict[str, Any] = {
        "dims": {name: list(names) for name, names in dims.items()},
        "coords": {name: _as_array(value) for name, value in coords.items()},
    }
    is_tree = int(az.__version__.partition(".")[0]) >= 1
    from_dict: Callable[..., Any] = az.from_dict
    return from_dict(arrays, **options) if is_tree else from_dict(**arrays, **options)


def _as_array(value: Any) -> np.ndarray:
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)


def by_chain(values: Tensor, chains: Tensor) -> Tensor:
    """
    Draws `(S, ...)` as `(chains, draws, ...)`. Where chains count differently, which is to say that more draws of some
    are kept than of others, all draws stand in one chain.

    :param values: The draws.
    :param chains: Which chain each belongs to, `(S,)`.
    """
    parts = [values[chains == number] for number in chains.unique()]
    if len({len(part) for part in parts}) > 1:
        return values.unsqueeze(0)
    return torch.stack(parts)


def gathered(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """
    Elements `name[0]`, `name[1]`, ... as one variable.

    :param parameters: Scalars by name, each `(...)`.
    :return: `(...)` or `(..., K)` by name.

    Example:
        >>> import torch
        >>> from gpytorch_tkrr.inference.arviz import gathered
        >>> {name: value.shape for name, value in gathered({"a[0]": torch.ones(5), "a[1]": torch.ones(5)}).items()}
        {'a': torch.Size([5, 2])}
    """
    parts: dict[str, list[Tensor]] = {}
    for name, values in parameters.items():
        parts.setdefault(re.sub(r"\[\d+\]$", "", name), []).append(values)
    return {name: values[0] if name in parameters else torch.stack(values, -1) for name, values in parts.items()}
