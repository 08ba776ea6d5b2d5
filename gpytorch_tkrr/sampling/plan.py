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

from .process import NUM_PRIOR_COMPONENTS

#: Components that a chain starts with where no rank is given, at least and at most.
MIN_RANK, MAX_RANK = 32, 96

#: Multiplications that a sweep over all rows may take: where most of the warm-up is on few, and where no sweep is.
SWEEP_COST, EVERY_SWEEP_COST = 3e10, 1e10

#: Rows of the first stage; each later one has so many times more. All rows are taken where they are not twice as many.
FEW_ROWS, GROWTH = 4000, 4

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
    :param num_held_out: Rows that are not among those of the first stage, by which chains are weighed.
    :param num_processes: Chains that take the limit of many components; they come first.
    """

    num_chains: int
    rank: int
    rows: tuple[int, ...]
    ends: tuple[int, ...]
    num_draws: int
    is_fixed: bool
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
            most = max(min(num_rows // num_functions, MAX_RANK), MIN_RANK)
            limit = SWEEP_COST if len(_stage_rows(num_rows)) > 1 else EVERY_SWEEP_COST
            sizes = num_rows * num_moments / 2, num_dims * num_functions**3  # sums over rows, then factorisations
            affordable = (r for r in range(most, MIN_RANK, -1) if sizes[0] * r**2 + sizes[1] * r**3 <= limit)
            rank = next(affordable, MIN_RANK)
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
        if num_draws is None:
            num_draws = round(factor * (MANY_DRAWS if num_chains <= 2 else FEW_DRAWS))
        ends = tuple(sum(sweeps[: i + 1]) for i in range(len(sweeps)))
        num_processes = 0
        size = 8 * num_chains * num_draws * (num_rows + NUM_PRIOR_COMPONENTS) * num_dims * num_functions
        if can_integrate and num_dims > 1 and num_held_out and num_rows <= ONE_PROCESS and size <= PROCESS_BYTES:
            num_processes = num_chains // 2 if num_rows <= HALF_PROCESSES else 1
        return cls(num_chains, rank, rows, ends, num_draws, num_warmup is not None, num_held_out, num_processes)


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


def _stage_rows(num_rows: int) -> tuple[int, ...]:
    rows, few = [], FEW_ROWS
    while 2 * few < num_rows:
        rows.append(few)
        few *= GROWTH
    return (*rows, num_rows)


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
