"""A chain whose state is the factors of a sum of products, visited one after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..bases.covariance import Covariance
from ..cp.start import near_constant
from ..sampling.plan import (
    GROWTH_SWEEPS,
    LATER_STAGE,
    MAX_DIED,
    MIN_DRAWS,
    NUM_SCORED,
    WATCHED_WINDOW,
    WINDOW,
    adaptation,
    has_settled,
)
from ..sampling.priors import GibbsState
from .chain import Chain
from .growth import branch_out
from .problem import GibbsProblem

#: Components whose squared values, summed over all rows, stay below so many noise variances are dropped during warm-up:
#: where the rank is given, and where it is found.
DEAD, IDLE = 0.01, 1.0

#: Numbers of functions are adapted once more so many sweeps after many more rows have come: these may show more.
SETTLING = 5


class ComponentChain(Chain):
    """
    A chain of :class:`~gpytorch_tkrr.sampling.sampler.GibbsSampler`.

    During the warm-up it visits few rows first, drops components that do nothing, adapts the numbers of functions,
    starts again where all components have died, and ends a stage early where its rows have nothing more to tell.

    :param problem: What it samples.
    :param number: Its number.
    :param resume: Where a chain of an earlier fit stopped.
    """

    kept: ClassVar[tuple[str, ...]] = (*Chain.kept, "rank", "log_noise", "last", "peak")

    current: GibbsState
    last: Tensor  # energy of each component after the last sweep
    peak: Tensor  # the largest since the last look

    def __init__(self, problem: GibbsProblem, number: int, resume: dict[str, Any] | None = None):
        super().__init__(problem, number, resume)
        self.ends = list(problem.plan.ends)
        self.rank = problem.plan.rank  # that the prior is made for
        self.log_noise: list[float] = []  # after each sweep of the present stage, its own or that other rows show

    def begin(self) -> None:
        self.current = self._first_state()
        self.last = self.peak = torch.zeros_like(self.current.precisions)
        self._sample_stage(0)

    def _first_state(self) -> GibbsState:
        """Where an earlier chain stopped, an earlier ALS fit, or components that the data show."""
        problem, plan = self.problem, self.problem.plan
        if self.earlier is not None:
            return self._last_state(self.earlier)
        if problem.als_factors:
            problem.hyperparameters.set(problem.all_slots, problem.start)
            return problem.state_of(problem.resized(problem.als_factors), plan.rank)
        return problem.first_state(self.rng, plan.rank, self._screened)

    def _last_state(self, resume: dict[str, Any]) -> GibbsState:
        problem, draws = self.problem, self.problem.earlier
        assert draws is not None
        problem.hyperparameters.set(problem.all_slots, resume["coordinates"])
        self.rng.bit_generator.state = resume["rng"]
        last = int((draws.chains == self.number).nonzero()[-1])
        heights = resume.get("heights", [len(resume["precisions"])] * problem.num_dims)  # earlier files: CP weights
        factors = problem.model.weights.resized([factor[last] / problem.share for factor in draws.factors], heights)
        parameters = problem.augmentation.scaled({name: each[last] for name, each in draws.parameters.items()})
        self.rank = resume.get("rank", problem.plan.rank)  # earlier files: the same for all chains
        state = problem.prior(self.rank).start(factors, parameters, resume["steps"].clone())
        state.precisions = resume["precisions"].clone()
        return state

    def _screened(self, covariances: Sequence[Covariance], rank: int, generator: torch.Generator) -> list[Tensor]:
        return self.problem.screen().start(rank, generator)

    def _near_constant(self, covariances: Sequence[Covariance], rank: int, generator: torch.Generator) -> list[Tensor]:
        return near_constant(self.problem.designs[-1], covariances, rank, generator)

    def _sample_stage(self, stage: int, position: int | None = None) -> None:
        """
        A sampler on the rows of a stage.

        :param stage: The stage.
        :param position: The mode that was visited last; None before the first visit.
        """
        problem = self.problem
        self.sampler = problem.sampler(problem.designs[stage], self.rng, self.rank, position)

    def _stage(self, sweep: int) -> int:
        """The stage of a sweep: the last one also after the warm-up."""
        return next((i for i, end in enumerate(self.ends) if sweep < end), len(self.ends) - 1)

    def _sweep(self) -> None:
        self._end_stage_early()
        self._look()
        problem, state, num_warmup, stage = self.problem, self.current, self.ends[-1], self._stage(self.sweeps)
        adapt, progress = 0.0, 1.0
        if not self.is_warm:
            adapt, progress = adaptation(self.sweeps), self.sweeps / num_warmup
        self.sampler.sweep(state, problem.modes(self.before + self.sweeps), adapt, progress)
        self.last = self.sampler.energies
        self.peak = torch.maximum(self.peak, self.last)
        if self.is_warm:
            self.factors.append(state.scaled_factors())
            self.parameters.append(state.parameters)
            self.hyperparameters.append(problem.hyperparameters.values())
            self.energies.append(self.sampler.energies)
        else:
            self.log_noise.append(self._log_noise(stage))
        if problem.held_out is not None and self.ends[0] - NUM_SCORED <= self.sweeps < self.ends[0]:
            noise = problem.augmentation.noise(state.parameters)
            self.scores.append(problem.held_out.log_densities(state.factors, noise))

    def _is_watched(self, stage: int) -> bool:
        """Whether there are rows that a stage does not see, and others later do."""
        return self.problem.watched is not None and stage < len(self.ends) - 1

    def _log_noise(self, stage: int) -> float:
        """The logarithm of the present noise variance, or of that of rows that the stage does not see."""
        problem, state = self.problem, self.current
        noise = problem.augmentation.noise(state.parameters)
        if not self._is_watched(stage):
            return math.log(max(noise, 1e-300))
        assert problem.watched is not None
        own = problem.watched.log_densities(state.factors, noise)
        return float(-2 * torch.cat(problem.training.processes.gather(own.cpu())).mean())

    def _end_stage_early(self) -> None:
        """
        End the present stage of the warm-up where the noise has stopped falling: that of rows that the stage does not
        see, which rises where components follow the noise of its few rows; the last stage takes what is left of its
        sweeps. Where there are no such rows, or all are seen, the chain's own; then the warm-up is the shorter.
        """
        problem, stage = self.problem, self._stage(self.sweeps)
        begin, end = self.ends[stage - 1] if stage else 0, self.ends[stage]
        if self.sweeps == begin:
            self.log_noise = []
        is_watched = self._is_watched(stage)
        if is_watched:
            has_died = problem.have_died(self.last, self.current.parameters)  # then it first starts again
            window, is_time = WATCHED_WINDOW, self.sweeps > begin + (end - begin) // (2 if has_died else 4)
        else:
            is_free = not problem.plan.is_fixed and "noise" in problem.augmentation.free
            is_free = is_free and self.sweeps >= problem.augmentation.warmup_part * self.ends[-1]
            window, is_time = WINDOW, is_free and self.sweeps > begin + (end - begin) // 2
        if is_time and self.sweeps < end and has_settled(self.log_noise, window):
            left = NUM_SCORED if stage == 0 and problem.held_out is not None else 0
            early = max(end - self.sweeps - left, 0)
            last = self.ends[-1] - (0 if is_watched else early)
            self.ends = [*self.ends[:stage], *(later - early for later in self.ends[stage:-1]), last]
            self.log_noise = []

    def _look(self) -> None:
        """
        At some sweeps of the warm-up: start again where all has died, adapt functions, drop what does nothing and what
        a sweep with these functions cannot afford; then try more components.
        """
        problem, now, first = self.problem, self.sweeps, self.ends[0]
        looks = (first // 4, first // 2, 3 * first // 4) if problem.model.adapts_rank else (first // 2,)
        settled = [] if problem.watched is None else [end + SETTLING for end in self.ends[:-1]]
        is_look = 0 < now in (*looks, *self.ends)
        is_adapting = problem.model.adapts_num_basis and not self.is_warm
        is_adapting = is_adapting and 0 < now in (first // 4, first // 2, *settled)
        if is_look or is_adapting:
            has_died = now == first // 2 < first and problem.have_died(self.last, self.current.parameters)
            if has_died:
                self.current = problem.first_state(self.rng, self.rank, self._near_constant)
                self.log_noise = []
            if is_adapting:
                problem.adapt_functions()
            if not has_died:
                self._drop(is_look)
            self.current.factors = problem.resized(self.current.factors)
            self.peak = torch.zeros_like(self.current.precisions)
            self._sample_stage(self._stage(now))
        self._try_more_components()

    def _drop(self, is_look: bool) -> None:
        """
        Drop components whose values at all rows together are far below the noise of one, and the smallest of those that
        a sweep cannot afford; keep at least one.

        :param is_look: Whether those that do nothing are looked for, too.
        """
        problem, peak = self.problem, self.peak
        alive = torch.ones_like(peak, dtype=torch.bool)
        if is_look:
            limit = IDLE if problem.model.adapts_rank else DEAD
            noise = problem.augmentation.noise(self.current.parameters)
            alive = peak * problem.training.summary.num_rows > limit * noise
        most = problem.affordable_rank(int(alive.sum()))
        if most < int(alive.sum()):
            alive &= peak >= peak.sort(descending=True).values[most - 1]
        self.sampler.prior.keep(self.current, alive, peak)

    def _try_more_components(self) -> None:
        """
        Once, where hardly any component has died and there are rows to judge by that the chain has not seen: half-way
        through a first stage of most rows, or at the end of the second stage of few rows.
        """
        problem, rank, few = self.problem, self.rank, self.ends[:-1][:2]
        unseen, when = problem.watched, few[-1:]
        if unseen is None:
            unseen, when = problem.held_out, [self.ends[0] // 2]
        if unseen is None or self.sweeps not in when or len(self.current.precisions) < (1 - MAX_DIED) * rank:
            return
        larger = problem.larger_rank(rank)
        if larger is None or (problem.plan.is_fixed and self.ends[-1] - self.sweeps < 2 * GROWTH_SWEEPS):
            return
        rows = problem.designs[self._stage(self.sweeps - 1)]
        best = branch_out(problem, self.current, (rank, larger), rows, unseen, self.rng, self.sweeps)
        self._shorten(problem.sweep_cost()(best.rank) / problem.sweep_cost()(rank))
        self.rank, self.current, self.last = best.rank, best.state, best.energies
        self.peak = torch.zeros_like(self.last)
        self._sample_stage(self._stage(self.sweeps))

    def _shorten(self, factor: float) -> None:
        """
        Fewer sweeps from here on: those that decided about components count. Where numbers have not been given, what a
        sweep costs more is made up for, but for the first sweeps on all rows.

        :param factor: How many times as much a sweep costs.
        """
        plan, left = self.problem.plan, self.ends[-1] - self.sweeps
        last = min(LATER_STAGE, left, self.ends[-1] - self.ends[-2])
        part = max(1 - GROWTH_SWEEPS / left, 0.5) / (1.0 if plan.is_fixed else factor)
        # Rounded up, but for errors of rounding; ends that have passed stay.
        ends = [self.sweeps + math.ceil(part * (end - self.sweeps) - 1e-9) for end in self.ends]
        self.ends = [min(pair) for pair in zip(self.ends, ends, strict=True)]
        if not plan.is_fixed:
            self.ends[-1] = max(self.ends[-1], max(self.ends[-2], self.sweeps) + last)
        if not plan.has_given_draws:
            self.num_draws = max(math.ceil(self.num_draws / factor), min(MIN_DRAWS, self.num_draws))

    @property
    def noise(self) -> float:
        return self.problem.augmentation.noise(self.current.parameters) * self.problem.training.scale**2

    def resume(self) -> dict[str, Any]:
        state = self.current
        return {
            "precisions": state.precisions,
            "rank": self.rank,
            "heights": [len(factor) for factor in state.factors],
            "steps": state.steps,
            "coordinates": self.problem.hyperparameters.get(self.problem.all_slots),
            "rng": self.rng.bit_generator.state,
            "sweeps": self.before + self.sweeps,
        }

    def state(self) -> dict[str, Any]:
        coordinates = self.problem.hyperparameters.get(self.problem.all_slots)
        return {**super().state(), "state": vars(self.current), "coordinates": coordinates}

    def load(self, saved: dict[str, Any]) -> None:
        super().load(saved)
        self.problem.hyperparameters.set(self.problem.all_slots, saved["coordinates"].cpu())
        self.current = GibbsState(**saved["state"])
        self.current.steps = self.current.steps.cpu()
        # The rows of the last sweep, and the sums over modes from where its last mode was.
        last = self.sweeps - 1
        self._sample_stage(self._stage(last), position=self.problem.modes(self.before + last)[-1])
