r"""Two functions drawn in turn: f, and a second one g that the observation model has, such as a log variance.

Before each sweep of f a sampler of the same kind visits the modes of g, whose working targets follow from f and y
(:class:`~gpytorch_tkrr.model.likelihoods.augmented.SecondFunction`); then g weighs the rows for f. The state of g is
kept among the parameters of the observation model, so that draws, checkpoints and saved models hold it as they hold
these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..bases.basis import sum_products
from ..cp.design import Design
from ..cp.start import near_constant
from ..data.source import Working
from ..data.training import Summary
from ..features.represented import range_grids
from ..model.augmentation.row_values import RowValues
from ..model.likelihoods.augmented import Augmentation, Parameters, SecondFunction
from .hyperparameters import Hyperparameters
from .sampler import FIRST_STEP, GibbsSampler, GibbsState

#: Size of g where it is freed, relative to a unit variance.
START = 0.1

#: The share of the memory of f that products over the modes of g may take in addition.
MEMORY_SHARE = 4


class SecondFit:
    """
    What all chains of a fit have in common about g.

    :param second: g as the observation model describes it.
    :param summary: The data.
    :param earlier: Parameters of the draws that are continued; None for a new fit.
    """

    def __init__(self, second: SecondFunction, summary: Summary, earlier: Mapping[str, Tensor] | None):
        self.second, self.prefix = second, second.prefix
        self.bases = [mode.basis for mode in second.separable.modes]
        self.grids = range_grids(summary.lower, summary.upper)
        half_range = (summary.upper - summary.lower) / 2
        with torch.enable_grad():
            self.hyperparameters = Hyperparameters(second.kernel, second.separable, half_range)
        self.slots = range(len(self.hyperparameters.slots))
        if earlier is not None:  # the kernel object stands at a posterior mean: its priors keep their centres
            centers = earlier[f"{self.prefix}centers"][-1].tolist()
            self.hyperparameters.centers = dict(zip(self.hyperparameters.names, centers, strict=True))
        self.start = self.hyperparameters.get(self.slots)

    @classmethod
    def of(cls, augmentation: Augmentation, summary: Summary, earlier: Mapping[str, Tensor] | None) -> SecondFit | None:
        """
        That of an observation model; None where it has no second function.

        :param augmentation: The observation model.
        :param summary: The data.
        :param earlier: See above.
        """
        return None if augmentation.second is None else cls(augmentation.second, summary, earlier)

    def factors(self, parameters: Mapping[str, Tensor]) -> list[Tensor]:
        """
        Raw factors of g, D tensors `(..., R, M_d)`.

        :param parameters: Parameters, or draws of them.
        """
        return [parameters[f"{self.prefix}factors.{d}"] for d in range(len(self.bases))]

    def is_free(self, parameters: Parameters) -> bool:
        """
        Whether g has been drawn at all.

        :param parameters: The present ones.
        """
        return f"{self.prefix}precisions" in parameters

    def first_state(self, design: Design, rng: np.random.Generator) -> GibbsState:
        """
        g where it is freed: nearly a constant, and small.

        :param design: The rows.
        :param rng: Source of random numbers.
        """
        self.hyperparameters.set(self.slots, self.start)
        covariances = [mode.covariance() for mode in self.second.separable.modes]
        generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
        whitened = near_constant(design, covariances, self.second.rank, generator)
        whitened[0] = START * whitened[0]
        factors = [v.unwhiten(w) for v, w in zip(covariances, whitened, strict=True)]
        rank, num_dims = self.second.rank, len(self.bases)
        precisions = torch.full((rank,), rank ** (1 / num_dims), dtype=torch.float64, device=factors[0].device)
        steps = torch.full((len(self.slots),), FIRST_STEP, dtype=torch.float64)
        return GibbsState(factors, {}, precisions, steps)

    def state(self, parameters: Parameters) -> GibbsState:
        """
        g as it is kept among the parameters; the kernel object is set to its hyperparameters.

        :param parameters: The present ones.
        """
        own = {name.removeprefix(self.prefix): v for name, v in parameters.items() if name.startswith(self.prefix)}
        self.hyperparameters.set(self.slots, own["coordinates"].cpu())
        return GibbsState(self.factors(parameters), {}, own["precisions"], own["steps"].cpu().clone())

    def kept(self, state: GibbsState) -> Parameters:
        """
        What is kept of g among the parameters.

        :param state: Its state.
        """
        centers = [self.hyperparameters.centers[name] for name in self.hyperparameters.names]
        parts = {f"factors.{d}": factor for d, factor in enumerate(state.scaled_factors())}
        parts |= {"precisions": state.precisions, "steps": state.steps.clone()}
        parts["coordinates"] = self.hyperparameters.get(self.slots)
        parts["centers"] = torch.tensor(centers, dtype=torch.float64)
        return {f"{self.prefix}{name}": value for name, value in parts.items()}

    def values(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """
        What the data see of g in each draw, `(S, n)`.

        :param parameters: Draws.
        :param x: Inputs as kernel and box see them, `(n, D)`.
        """
        return self.second.total(sum_products(self.bases, self.factors(parameters), x), dict(parameters))

    def finish(self, parameters: Mapping[str, Tensor]) -> None:
        """
        Leave the kernel object at the posterior mean.

        :param parameters: Draws.
        """
        if len(self.slots):
            coordinates = parameters[f"{self.prefix}coordinates"]
            is_log = torch.tensor([slot.is_log for slot in self.hyperparameters.slots], device=coordinates.device)
            self.hyperparameters.set_values(torch.where(is_log, coordinates.exp(), coordinates).mean(0))


class _SecondAugmentation(Augmentation):
    """
    The regression of g, given f.

    :param second: g as the observation model describes it.
    :param parameters: Those of the observation model.
    :param f: Values of f at the rows.
    """

    def __init__(self, second: SecondFunction, parameters: Parameters, f: RowValues):
        self.regression, self.parameters, self.f = second, parameters, f

    def start(self) -> Parameters:
        return {}

    def working(self, parameters: Parameters, rng: np.random.Generator) -> Working:
        return self.regression.working(self.parameters, self.f, rng)


class JointSampler(GibbsSampler):
    """
    One chain of f and g.

    :param fit: What is known of g.
    :param design: The data, as f sees them.
    :param args: As for :class:`~gpytorch_tkrr.sampling.sampler.GibbsSampler`.
    :param kwargs: As for :class:`~gpytorch_tkrr.sampling.sampler.GibbsSampler`.
    """

    def __init__(self, fit: SecondFit, design: Design, *args: Any, **kwargs: Any):
        super().__init__(design, *args, **kwargs)
        self.fit = fit
        self.second_design = Design(design.data, fit.bases, memory=design.memory // MEMORY_SHARE, rows_of=design)

    def sweep(self, state: GibbsState, modes: Sequence[int], adapt: float = 0.0, progress: float = 1.0) -> None:
        """
        Visit the modes of g, then those of f; `state` is changed in place.

        :param state: The chain's state.
        :param modes: The order of the visits.
        :param adapt: How far proposals are tuned; 0 once the warm-up is over.
        :param progress: The part of the warm-up that is over.
        """
        self.design.row_weight = None
        if progress >= self.fit.second.free_from:
            self._sweep_second(state, modes, adapt)
            self.design.row_weight = self.fit.second.row_weight(state.parameters)
        super().sweep(state, modes, adapt, progress)

    def _sweep_second(self, state: GibbsState, modes: Sequence[int], adapt: float) -> None:
        fit, design = self.fit, self.second_design
        is_free = fit.is_free(state.parameters)
        own = fit.state(state.parameters) if is_free else fit.first_state(design, self.rng)
        bases, factors = [mode.basis for mode in self.separable.modes], [each.unsqueeze(0) for each in state.factors]
        f = RowValues(lambda x: self.design.format.functions(bases, factors, x)[0])
        sampler = GibbsSampler(
            design,
            fit.second.separable,
            fit.hyperparameters,
            1.0,
            _SecondAugmentation(fit.second, state.parameters, f),
            fit.grids,
            self.rng,
            rank=fit.second.rank,
        )
        design.reset(modes[0])  # products over modes are made anew: a resumed chain goes on in the same way
        sampler.sweep(own, modes, adapt)
        state.parameters = {**state.parameters, **fit.kept(own)}
