r"""What a Gibbs fit does where it is told nothing: how many chains and components, which rows first, how many sweeps.

Chains start on few rows. A sweep is cheap there, and the data leave room: components that are wrong move, where all
rows would hold them. Then come more rows, then all. A stage of the warm-up ends when the noise has stopped falling; a
stage of few rows when that of others has, since with more sweeps components would only follow the noise of these few.

A posterior of CP weights has many modes. Where rows are few, chains are cheap and each explains the rows in its own
way, so there are several; where rows are many one chain takes all the time there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .process import NUM_PRIOR_COMPONENTS

#: Components that a chain starts with where no rank is given, at least and at most.
MIN_RANK, MAX_RANK = 32, 96

#: Multiplications that a sweep over all rows may take: where most of the warm-up is on few, and where no sweep is.
SWEEP_COST, EVERY_SWEEP_COST = 3e10, 1e10

#: A chain of which no more than this part of the components has died may take more: such that a sweep costs at most so
#: many times as much, and at least this part more. A few die by chance, of a start that does not fit.
MAX_DIED, MAX_GROWTH, MIN_GROWTH = 0.1, 2.0, 0.1

#: Whether more components pay is tried with so many sweeps, of which the last ones are scored.
GROWTH_SWEEPS, GROWTH_SCORED = 15, 5

#: Draws of a chain that has grown, at least: it makes fewer of them, since each costs more.
MIN_DRAWS = 20

#: Rows of the first stage; each later one has so many times more. All rows are taken where they are not twice as many.
FEW_ROWS, STAGE_FACTOR = 4000, 4

#: Chains where there are at most so many rows, and inputs that all of them together may visit: a visit has a price that
#: does not depend on the rows. At least so many whatever that is: a single chain on few rows is too sure.
CHAINS = {1000: (6, 100, 2), 3000: (4, 40, 2), 8000: (2, 40, 1)}

#: Chains that take the limit of many components, a Gaussian process: half of them up to so many rows, then one.
HALF_PROCESSES, ONE_PROCESS = 600, 1000

#: Bytes that the draws of such chains may take.
PROCESS_BYTES = 1 << 29

#: Sweeps of the warm-up: on the first rows, and on each larger number.
FIRST_STAGE, LATER_STAGE = 50, 10

#: With more inputs than this a sweep has so many visits that there are fewer sweeps, at least half of them, and no
#: short chains that decide about warps and components: these would cost more than the chain itself.
MANY_INPUTS = 40

#: The share of the rows that several chains leave out at first, to be weighed by them, and rows that are enough for it.
HELD_OUT, MAX_HELD_OUT = 0.15, 1000

#: Sweeps at the end of the first stage whose predictions are scored.
NUM_SCORED = 10

#: Rows of the last stage alone, by which a single chain sees that it has learnt what the rows of a stage can tell.
NUM_WATCHED = 2000

#: Draws of each chain where there are one or two, and where there are more.
MANY_DRAWS, FEW_DRAWS = 40, 30

#: Whether columns are warped, and whether many components overfit, is decided by short chains: rows that they see, rows
#: held out, components, sweeps.
RACE_ROWS, RACE_HELD_OUT, RACE_RANK, RACE_SWEEPS = 2000, 1000, 12, 25

#: Up to so many rows several chains take care of the number of components.
MANY_ROWS = 1000

#: Fewer rows held out than this decide nothing.
MIN_RACE_HELD_OUT = 30

#: A stage is over when the logarithm of the noise variance, averaged over so many sweeps, has fallen by less than this
#: since the average before. The noise that rows show which the stage does not see is averaged over fewer: where it no
#: longer falls, more sweeps do harm.
WINDOW, WATCHED_WINDOW, MIN_FALL = 10, 5, 0.02


class SweepCost(NamedTuple):
    """
    Multiplications of a sweep over all rows.

    :param by_pairs: Sums over the rows, for each pair of components.
    :param by_cubes: Factorisations, for the cube of the number of components.

    Example:
        >>> from gpytorch_tkrr.sampling.plan import SweepCost
        >>> cost = SweepCost.of(num_rows=5000, num_moments=300, num_functions=11, num_dims=8)
        >>> f"{cost(43):.1e}", cost.affordable(2 * cost(43), most=96, least=43)
        ('2.2e+09', 57)
    """

    by_pairs: float
    by_cubes: float

    @classmethod
    def of(cls, num_rows: int, num_moments: int, num_functions: int, num_dims: int) -> SweepCost:
        """
        From sizes.

        :param num_rows: N.
        :param num_moments: Moment functions of all modes together: a sweep multiplies N times as many numbers for each
            pair of components.
        :param num_functions: Functions of a mode.
        :param num_dims: D.
        """
        return cls(num_rows * num_moments / 2, num_dims * num_functions**3)

    def __call__(self, rank: int) -> float:
        return self.by_pairs * rank**2 + self.by_cubes * rank**3

    def affordable(self, limit: float, most: int, least: int) -> int:
        """
        The largest number of components whose sweep costs no more than a limit.

        :param limit: The limit.
        :param most: No more than so many.
        :param least: No fewer than so many, whatever they cost.
        """
        return next((rank for rank in range(most, least, -1) if self(rank) <= limit), least)


@dataclass(frozen=True)
class Plan:
    """
    Chosen before the first sweep, from sizes alone.

    :param num_chains: C.
    :param rank: R that the prior is made for, and that a chain starts with.
    :param rows: Rows of each stage of the warm-up; the last has all.
    :param ends: The sweep before which each stage ends, at the latest.
    :param num_draws: Draws of each chain.
    :param is_fixed: Whether the number of warm-up sweeps was given.
    :param has_given_draws: Whether the number of draws was given.
    :param num_held_out: Rows that are not among those of the first stage, by which chains are weighed.
    :param num_processes: Chains that take the limit of many components; they come first.
    """

    num_chains: int
    rank: int
    rows: tuple[int, ...]
    ends: tuple[int, ...]
    num_draws: int
    is_fixed: bool
    has_given_draws: bool
    num_held_out: int = 0
    num_processes: int = 0

    @classmethod
    def choose(
        cls,
        num_rows: int,
        num_moments: int,
        num_functions: int,
        num_dims: int,
        *,
        rank: int | None,
        num_warmup: int | None,
        num_draws: int | None,
        num_chains: int | None,
        can_score: bool = True,
        can_integrate: bool = False,
        sweep_factor: float = 1.0,
    ) -> Plan:
        """
        What is None is chosen; what is given is taken as it is. There is one chain where only sweeps are given.

        :param num_rows: N.
        :param num_moments: Moment functions of all modes together: a sweep multiplies N times as many numbers for each
            pair of components.
        :param num_functions: Functions of a mode: a factor that is chosen here has no more weights than there are rows.
        :param num_dims: D.
        :param rank: R.
        :param num_warmup: Sweeps before the first draw.
        :param num_draws: Draws of each chain.
        :param num_chains: C.
        :param can_score: Whether chains can be weighed by rows that are held out.
        :param can_integrate: Whether a chain can take the limit of many components.
        :param sweep_factor: How many times as many sweeps the observation model needs.
        """
        if num_chains is None and (num_warmup is not None or num_draws is not None):
            num_chains = 1
        if num_chains is None:
            most, visits, least = next((sizes for limit, sizes in CHAINS.items() if num_rows <= limit), (1, 1, 1))
            num_chains = max(min(most, visits // num_dims), least)
        if rank is None and num_dims == 1:
            rank = 1  # a sum of functions of one input is one such function
        if rank is None:
            cost = SweepCost.of(num_rows, num_moments, num_functions, num_dims)
            rank = cost.affordable(_sweep_limit(num_rows), _most_components(num_rows, num_functions), MIN_RANK)
        rows, num_held_out = _stage_rows(num_rows), 0
        if can_score and num_warmup is None and num_chains > 1:
            num_held_out = min(int(HELD_OUT * num_rows), MAX_HELD_OUT)
            rows = (num_rows - num_held_out, num_rows) if len(rows) == 1 else rows
        factor = sweep_factor * max(min(MANY_INPUTS / num_dims, 1.0), 0.5)
        if num_warmup is None:
            sweeps = [round(factor * FIRST_STAGE)] + [round(sweep_factor * LATER_STAGE)] * (len(rows) - 1)
        else:
            later = num_warmup // 10 if num_warmup else 0
            sweeps = [num_warmup - later * (len(rows) - 1)] + [later] * (len(rows) - 1)
        has_given_draws = num_draws is not None
        if num_draws is None:
            num_draws = round(factor * (MANY_DRAWS if num_chains <= 2 else FEW_DRAWS))
        ends = tuple(sum(sweeps[: i + 1]) for i in range(len(sweeps)))
        num_processes = 0
        size = 8 * num_chains * num_draws * (num_rows + NUM_PRIOR_COMPONENTS) * num_dims * num_functions
        if can_integrate and num_dims > 1 and num_held_out and num_rows <= ONE_PROCESS and size <= PROCESS_BYTES:
            num_processes = num_chains // 2 if num_rows <= HALF_PROCESSES else 1
        is_fixed = num_warmup is not None
        return cls(num_chains, rank, rows, ends, num_draws, is_fixed, has_given_draws, num_held_out, num_processes)


def affordable_functions(num_dims: int) -> int:
    """
    Functions of each mode to start with, at most: such that the factorisations of a sweep are within the bound on its
    multiplications, with as many components as a chain starts with at least.

    :param num_dims: D.

    Example:
        >>> from gpytorch_tkrr.sampling.plan import affordable_functions
        >>> affordable_functions(8), affordable_functions(128)
        (33, 13)
    """
    return int((EVERY_SWEEP_COST / num_dims) ** (1 / 3) / MIN_RANK)


def affordable_rank(rank: int, cost: SweepCost, num_rows: int) -> int:
    """
    The number of components that a chain may keep: a sweep costs more when it gets more functions.

    :param rank: Those that it has.
    :param cost: Of a sweep with the functions that the chain has by now.
    :param num_rows: N.
    """
    return min(rank, cost.affordable(_sweep_limit(num_rows), rank, MIN_RANK))


def larger_rank(rank: int, cost: SweepCost, num_rows: int, num_functions: int) -> int | None:
    """
    The number of components that a chain whose own are all alive may take instead; None where so many more are not to
    be had. Few rows have several chains for that.

    :param rank: R.
    :param cost: Of a sweep with the functions that the chain has by now.
    :param num_rows: N.
    :param num_functions: Functions of a mode.

    Example:
        >>> from gpytorch_tkrr.sampling.plan import SweepCost, larger_rank
        >>> cost = SweepCost.of(num_rows=5000, num_moments=300, num_functions=11, num_dims=8)
        >>> larger_rank(43, cost, 5000, 11), larger_rank(96, cost, 5000, 11)
        (57, None)
    """
    limit = min(MAX_GROWTH * cost(rank), _sweep_limit(num_rows))
    larger = cost.affordable(limit, _most_components(num_rows, num_functions), rank)
    return larger if num_rows > MANY_ROWS and larger >= (1 + MIN_GROWTH) * rank else None


def _most_components(num_rows: int, num_functions: int) -> int:
    """Such that a factor has no more weights than there are rows."""
    return max(min(num_rows // num_functions, MAX_RANK), MIN_RANK)


def _sweep_limit(num_rows: int) -> float:
    """Multiplications that a sweep over all rows may take."""
    return SWEEP_COST if begins_on_few(num_rows) else EVERY_SWEEP_COST


def begins_on_few(num_rows: int) -> bool:
    """
    Whether the warm-up begins on few of the rows.

    :param num_rows: N.
    """
    return len(_stage_rows(num_rows)) > 1


def _stage_rows(num_rows: int) -> tuple[int, ...]:
    rows, few = [], FEW_ROWS
    while 2 * few < num_rows:
        rows.append(few)
        few *= STAGE_FACTOR
    return (*rows, num_rows)


def adaptation(sweep: int) -> float:
    """
    How far proposals of hyperparameters are tuned after a sweep of the warm-up.

    :param sweep: Its number.
    """
    return min(0.5, 5 / (sweep + 5))


def has_settled(log_noise: Sequence[float], window: int = WINDOW) -> bool:
    """
    Whether the noise has stopped falling.

    :param log_noise: Logarithm of the noise variance after each sweep of a stage, up to a constant.
    :param window: Sweeps that are averaged.
    """
    if len(log_noise) < 2 * window:
        return False
    before, last = sum(log_noise[-2 * window : -window]) / window, sum(log_noise[-window:]) / window
    return before - last < MIN_FALL
