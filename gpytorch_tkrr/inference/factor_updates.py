"""A fit by alternating least squares between two updates: its factors, its sums over the data, and one update."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..bases.covariance import covariance_state, covariances_from_state
from ..cp.conditional import Conditional, DenseGram
from ..cp.design import Design
from ..cp.evidence import FactorData
from ..cp.format import WeightFormat, Weights
from ..cp.levels import LevelConditional
from ..cp.penalty import Penalty
from ..cp.start import Screening, near_constant
from ..cp.sums import FactorSums
from ..data.checkpoint import move_tensors
from ..data.source import Batch
from ..data.training import TrainingData
from ..errors import InputError
from ..features.represented import range_grids
from ..features.separable import SeparableKernel
from ..model.laplace import LaplacePosterior, laplace_blocks
from ..model.likelihoods.base import Observation
from ..sampling.hyperparameters import Hyperparameters
from .hinge import MarginLoss, WorkingMargins
from .results import ALSResult
from .scoring import FactorTerm, HyperparameterStep

if TYPE_CHECKING:
    from ..model.tkrr import TKRR


@dataclass
class _Memory:
    """What the evidence of one factor needs: sums over the residuals, its raw factor, and the form of the penalty."""

    sums: FactorSums
    raw: Tensor
    form: Tensor


class _Reweighted:
    """
    Working targets of iteratively reweighted least squares.

    :param observation: Gives the weights.
    :param noise: Noise variance in the units of the scaled targets.

    :ivar excess: The sum of the losses minus the weighted sum of squares, of all rows seen.
    """

    def __init__(self, observation: Observation, noise: float):
        self.observation, self.noise = observation, noise
        self.excess = 0.0

    def __call__(self, batch: Batch, f: Tensor, first_row: int) -> tuple[Tensor, Tensor]:
        residual = batch.y - f
        weight, loss, square = self._losses(batch, residual)
        self.excess += float((loss - weight * square).sum())
        return residual, weight

    def loss(self, batch: Batch, f: Tensor, first_row: int) -> Tensor:
        """
        The sum of the losses, `(1,)`.

        :param batch: The rows.
        :param f: The model's values `(n,)`.
        :param first_row: Not used.
        """
        return self._losses(batch, batch.y - f)[1].sum().reshape(1)

    def _losses(self, batch: Batch, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        square = residual.square() if batch.weight is None else residual.square() * batch.weight
        seen = self.observation.reweight(square, self.noise)
        assert seen is not None
        return *seen, square


class ALSFit:
    """The state of a fit: whitened weights, for CP with columns of unit root-mean-square on the data."""

    def __init__(
        self,
        model: TKRR,
        training: TrainingData,
        penalty: Penalty,
        learn_hyperparameters: bool,
        memory: int,
        loss: MarginLoss | None = None,
    ):
        self.model, self.training, self.penalty, self.loss = model, training, penalty, loss
        self.separable: SeparableKernel = model.separate()
        self.num_dims = len(self.separable.modes)
        self.covariances = [mode.covariance().detach() for mode in self.separable.modes]
        bases = [mode.basis for mode in self.separable.modes]
        self.design = Design(training, bases, memory=memory, weights=model.weights)
        self.design.require_affordable()
        self.marginals = self.design.marginals()
        self.reweights = self._working() is not None
        self.total = math.inf  # the objective of zero weights
        self.step = self._hyperparameter_step() if learn_hyperparameters else None
        self.memories: dict[int, _Memory] = {}
        self.restarts = 3
        self.fallback: tuple[Weights, list[Tensor], float] | None = None
        self.weights: Weights
        self.raw: list[Tensor]  # the factors' functions in the raw basis

    def _working(self) -> _Reweighted | WorkingMargins | None:
        """Working targets at the present hyperparameters; None for squared errors."""
        if self.loss is not None:
            return WorkingMargins(self.loss, self.training.scale)
        observation = self.model.observation
        if observation.reweight(torch.zeros(1, dtype=torch.float64), 1.0) is None:
            return None
        return _Reweighted(observation, float(self.noise()))

    def noise(self) -> Tensor:
        """Noise variance in the units of the scaled targets."""
        return self.model.noise() / self.training.scale**2

    def outputscale(self) -> Tensor:
        """Output scale in the units of the scaled targets."""
        return self.separable.outputscale() / self.training.scale**2

    def strength(self) -> Tensor:
        """The multiplier of the penalty."""
        return self.penalty.strength_for(self.noise(), self.outputscale(), self.weights)

    def _hyperparameter_step(self) -> HyperparameterStep:
        summary = self.training.summary
        grids = range_grids(summary.lower, summary.upper)
        with torch.enable_grad():
            hyperparameters = Hyperparameters(
                self.model.covar_module,
                self.separable,
                (summary.upper - summary.lower) / 2,
                likelihood=self.model.likelihood,
                unit=self.training.scale**2,
            )
        return HyperparameterStep(self.separable, hyperparameters, self.noise, self.outputscale, grids)

    def start(self, initial_factors: Sequence[Tensor] | None, generator: torch.Generator) -> None:
        """Given factors, those of an earlier fit, or components that the data show."""
        form = self.model.weights
        expected = form.shapes([mode.num_functions for mode in self.separable.modes])
        if initial_factors is not None and form.is_undecided:
            raise InputError(
                f"initial_factors belong to an order of the inputs, which {form!r} has not decided yet. Give the order "
                "as a list."
            )
        if initial_factors is not None:
            shapes = [tuple(factor.shape) for factor in initial_factors]
            if shapes != expected:
                raise InputError(f"initial_factors must have the shapes {expected} ({form!r}); got {shapes}.")
            device = self.marginals[0].mean.device
            self._set(form.read([factor.detach().double().to(device) for factor in initial_factors]), True)
            return
        fitted = self.model.factors_to_start_from()
        if fitted is not None and [tuple(factor.shape) for factor in self.model.factors] == expected:
            parts = zip(fitted.weights.balanced(), self.covariances, fitted.covariances, strict=True)
            self._set([w if new.equals(old) else new.rewhiten(w, old) for w, new, old in parts], True)
        else:
            screening = Screening.of(self.design, self.covariances)
            self._decide(form.arranged(screening.interactions()))
            self._set(self._factors(screening.start, generator), False)

    def _decide(self, form: WeightFormat) -> None:
        """Go on with a format that leaves nothing to the data."""
        self.model.weights = form
        self.design.set_format(form)

    def _factors(
        self, start: Callable[[int, torch.Generator], list[Tensor]], generator: torch.Generator
    ) -> list[Tensor]:
        """Factors from components of a kind of start."""
        form = self.model.weights
        return form.from_components(start(form.num_components(self.num_dims), generator))

    def restart(self, generator: torch.Generator, reached: float) -> None:
        """A random start near the constant function; present weights come back if its first update is no better."""
        self.fallback = self.weights, self.raw, reached
        self.restarts -= 1
        self._set(self._factors(partial(near_constant, self.design, self.covariances), generator), False)

    def has_died(self, objective: float) -> bool:
        """Whether the weights are no better than zero."""
        return objective > (1 - 1e-9) * self.total

    def _set(self, factors: list[Tensor], user_units: bool) -> None:
        self.weights = self.model.weights.weights(factors)
        if user_units:
            self.weights.multiply(1 / self.training.scale)
        self.weights.normalise(self._norms)
        self.raw = [self.covariances[d].unwhiten(factor) for d, factor in enumerate(self.weights.factors)]
        self.design.reset()

    def _norms(self, d: int, factor: Tensor) -> Tensor:
        """Root-mean-square over the data of each column's function; never zero for a column that is not."""
        raw, marginal = self.covariances[d].unwhiten(factor), self.marginals[d]
        squares = marginal.squares(raw)
        # Functions may have units of their own.
        squares = squares + 1e-16 * (marginal.diagonal() * raw.square()).sum(-1)
        tiny = squares <= torch.finfo(torch.float64).tiny
        return torch.where(tiny, factor.norm(dim=-1), squares.clamp(min=0).sqrt())

    def _sums(self, d: int, scale: Tensor) -> tuple[FactorSums, float]:
        """Sums of one factor, and what the objective has beyond the sum of (weighted) squares and the penalty."""
        working = self._working()
        if working is None:
            return self.design.sums(d, self.raw, scale), 0.0
        sums = self.design.sums(d, self.raw, scale, working)
        return sums, float(self.training.processes.sum(torch.full_like(sums.square, working.excess)))

    def update(self, d: int, objective: list[float], *, learn: bool = False) -> None:
        """Solve for one factor, after a step on its hyperparameters where these are to be learned."""
        weights = self.weights
        changed, turns = weights.move_to(d)
        for k in changed:
            self.raw[k] = self.covariances[k].unwhiten(weights.factors[k])
        for bond, matrix in turns:
            self.design.turn(bond, matrix)
        sums, excess = self._sums(d, weights.scales())
        gram, current = sums.gram_for_solving(), weights.scaled_factor(d)
        self._refresh(float(sums.square) + excess, objective)
        raw = self.covariances[d].unwhiten(current)
        data = FactorData.from_residuals(sums, gram, raw)
        self.total = float(data.square) + excess
        learn = learn and isinstance(gram, DenseGram)  # not for thousands of levels: see fit_als
        if self.step is not None and isinstance(gram, DenseGram):
            self.memories[d] = _Memory(sums, raw, self.penalty.form(weights, d))
        if learn:
            self._learn(d, data)
        strength, form = self.strength(), self.penalty.form(weights, d)
        rhs, square, penalty = sums.rhs, float(sums.square) + excess, float(self.penalty.value(weights))
        if learn or not square + float(strength) * penalty <= self.total:
            # Worse than nothing, or whitened by variances that have changed: start from zero, not from huge weights.
            current, rhs, square, penalty = torch.zeros_like(current), data.rhs, self.total, 0.0
        before = square + float(strength) * penalty
        covariance = self.covariances[d]
        gradient = covariance.mix(rhs) * covariance.root - strength * form @ current  # (R, M)
        conditional = gram.conditional(covariance, strength * form, 1.0)
        # The step is taken from the current factor: where a jitter was needed, this is a proximal step, still downhill.
        change = conditional.solve(gradient.reshape(-1)).reshape_as(current)
        explained = covariance.mix(gram.apply(covariance.unwhiten(change))) * covariance.root
        gain = float((change * (2 * gradient - explained - strength * form @ change)).sum())
        if gain < 0:
            change, gain = torch.zeros_like(change), 0.0
        factor = current + change
        updated = weights.clone()
        updated.replace(d, factor, self._norms(d, factor))
        if not float(strength * self.penalty.value(updated)) <= before:
            # Rounding has spoilt the solution: components so large that they do not cancel. Keep what was there.
            updated, gain = weights.clone(), 0.0
            if not current.any():
                updated.vanish(d)
        self.weights = updated
        self.raw[d] = self.covariances[d].unwhiten(updated.factors[d])
        objective.append(before - gain)
        if self.fallback is not None:
            if objective[-1] >= self.fallback[2]:
                self.weights, self.raw, objective[-1] = self.fallback
                self.design.reset()
            self.fallback = None

    def _refresh(self, square: float, objective: list[float]) -> None:
        """Replace the predicted last objective by the one computed from the residuals."""
        if objective and self.fallback is None:
            objective[-1] = square + float(self.strength() * self.penalty.value(self.weights))

    def _term(self, memory: _Memory) -> FactorTerm:
        """Sums stay small until the Gram matrix is made of them."""
        weights = self.weights
        return FactorTerm(
            lambda: FactorData.from_residuals(memory.sums, memory.sums.gram_for_solving(), memory.raw).mixed(
                memory.form
            ),
            lambda noise, outputscale: self.penalty.strength_for(noise, outputscale, weights),
        )

    def _learn(self, d: int, data: FactorData) -> None:
        """Improve the hyperparameters by this factor's evidence; all functions stay as they are."""
        assert self.step is not None
        sharers = self.step.sharers(d)
        if len(sharers) > 2 and d not in (sharers[0], sharers[-1]):
            return  # the sum over many modes is costly: twice per sweep is enough
        terms = {k: self._term(self.memories[k]) for k in sharers if k in self.memories}
        mixed = data.mixed(self.memories[d].form)
        terms[d].data = lambda: mixed
        try:
            self.step(d, terms)
        except BaseException:  # Ctrl-C keeps the fit: not with hyperparameters that were only tried
            self.step.undo()
            raise
        for k in sharers:
            old, new = self.covariances[k], self.separable.modes[k].covariance()
            if not new.equals(old):
                self.weights.set_factor(k, new.rewhiten(self.weights.factors[k], old))
            self.covariances[k] = new

    def state(self, result: ALSResult, generator: torch.Generator) -> dict[str, Any]:
        """What is needed to go on after a sweep."""
        fallback = None if self.fallback is None else (self.fallback[0].state(), *self.fallback[1:])
        return {
            "objective": list(result.objective),
            "sweeps": result.sweeps,
            "converged": result.converged,
            "generator": generator.get_state(),
            "restarts": self.restarts,
            **self.model.weights.state(),
            "weights": self.weights.state(),
            "raw": self.raw,
            **covariance_state(self.covariances),
            "fallback": fallback,
            "memories": {d: (m.sums.pack(), m.raw, m.form) for d, m in self.memories.items()},
            "parameters": [parameter.detach() for parameter in self.model.parameters()],
            "step": None if self.step is None else self.step.state(),
        }

    def restore(self, state: dict[str, Any], result: ALSResult, generator: torch.Generator) -> None:
        """Go on from where :meth:`state` was asked for."""
        result.objective, result.sweeps = list(state["objective"]), state["sweeps"]
        result.converged = state["converged"]
        generator.set_state(state["generator"])
        device = self.marginals[0].mean.device
        state = move_tensors(state, device)
        self.restarts, self.raw = state["restarts"], state["raw"]
        self.covariances = covariances_from_state(state)
        self._decide(WeightFormat.from_state(state).with_rank(self.model.rank))
        self.weights = self.model.weights.restore(state["weights"])
        if state["fallback"] is not None:
            weights, raw, reached = state["fallback"]
            self.fallback = self.model.weights.restore(weights), raw, reached
        for d, (packed, raw, form) in state["memories"].items():
            sums = FactorSums.zeros(self.design.tables[d], len(raw), device).unpack(packed)
            self.memories[d] = _Memory(sums, raw, form)
        if self.step is not None:
            self.step.restore(state["step"])
        for parameter, value in zip(self.model.parameters(), state["parameters"], strict=True):
            parameter.data.copy_(value)
        self.design.reset()
        self.design.fill(self.raw, self.weights.scales())

    def finish(self, result: ALSResult) -> None:
        """The block Laplace approximation; its residuals give the final objective."""
        self.weights.balance()
        self.raw = [v.unwhiten(w) for v, w in zip(self.covariances, self.weights.factors, strict=True)]
        self.design.reset()
        strength = self.strength()
        observation = self.model.observation
        blocks, square = laplace_blocks(
            self.design, self.weights, self.covariances, self.penalty, strength, observation.information
        )
        working, losses = self._working(), square
        if working is not None:
            losses = self.design.sum_rows(self.raw, self.weights.scales(), working.loss, 1)
        self._refresh(float(losses), result.objective)
        self.store(blocks, float(square))

    def store(self, blocks: Sequence[Conditional | LevelConditional] | None, square: float | None = None) -> None:
        """Hand the weights to the model."""
        if self.fallback is not None:  # interrupted between a new start and its first update
            self.weights = self.fallback[0]
        scale = self.training.scale
        weights = self.weights.clone()
        weights.multiply(scale)
        if blocks is None:
            weights.balance()
        noise = self.model.noise()
        if self.model.observation.noise() is None and square is not None:  # that of the residuals
            noise = torch.as_tensor(square * scale**2 / self.training.summary.num_rows).to(weights.factors[0])
        bases = [mode.basis for mode in self.separable.modes]
        noise = noise.detach().double()
        form = self.model.weights
        posterior = LaplacePosterior(bases, weights, self.covariances, noise, blocks, weight_format=form)
        self.model.set_posterior(posterior, self.penalty)
