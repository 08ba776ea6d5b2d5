"""What all chains of a Gibbs fit have in common: rows, functions, hyperparameters, and where a chain starts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gpytorch.means import ConstantMean, ZeroMean
from torch import Tensor

from ..bases.covariance import Covariance
from ..cp.design import Design
from ..cp.format import WeightFormat
from ..cp.start import Screening
from ..data.training import TrainingData
from ..errors import InputError
from ..features.represented import range_grids
from ..features.separable import count_per_dimension, num_basis_needed
from ..model.draws import DrawsPosterior
from ..model.likelihoods.augmented import Parameters
from ..model.warp import InputWarp
from ..sampling.hyperparameters import Hyperparameters
from ..sampling.plan import (
    MANY_INPUTS,
    NUM_WATCHED,
    Plan,
    SweepCost,
    affordable_functions,
    affordable_rank,
    larger_rank,
)
from ..sampling.priors import GibbsState, WeightPrior
from ..sampling.product_measure import ProductMeasure
from ..sampling.sampler import FIRST_STEP, GibbsSampler
from ..sampling.second_function import JointSampler, SecondFit
from .target import require_same_target, target_identity

if TYPE_CHECKING:
    from ..model.tkrr import TKRR

#: Where the user has given no number of sines, as many are taken as leave out this fraction of the prior variance, a
#: quarter more, between these two numbers.
TAIL, MIN_NUM_BASIS, MAX_NUM_BASIS = 1e-3, 4, 32

#: The largest number for a single input, whose weights are those of one component.
MAX_NUM_BASIS_ALONE = 256

#: All components have died where none has a mean square above this fraction of the targets' variance, nor above what
#: its weights would find in pure noise.
MIN_ENERGY = 0.01

#: The noise variance that chains in the limit of many components start from, in units of the targets' variance: that of
#: a GaussianLikelihood for targets of variance one. In other units its own start may be next to nothing.
START_NOISE = math.log(2)

#: Makes whitened weights of components: from the covariances of the modes' weights, a number and random numbers.
Start = Callable[[Sequence[Covariance], int, torch.Generator], list[Tensor]]


def is_limit(resume: dict[str, Any]) -> bool:
    """
    Whether a chain takes the limit of many components.

    :param resume: What it needs to go on.
    """
    return resume.get("kind") == "process"


class GibbsProblem:
    """
    What is sampled. Chains know nothing of each other: each has its own numbers of functions and its own rank, so that
    it does not matter in which order or in which process they are run.

    :param model: The model.
    :param training: Its data.
    :param earlier: Draws whose last ones the chains start from; None to start anew.
    :param memory: See :func:`~gpytorch_tkrr.fit_gibbs`.
    :param entropy: Where all random numbers come from.
    :param extends: Whether the draws are added to the earlier ones, which must be those of the same data.
    """

    plan: Plan
    held_out: Design | None = None  # rows by which chains are weighed
    watched: Design | None = None  # rows of the last stage alone, by which a single chain ends the stages before it
    most_components: int | None = None  # that a chain starts with, where many overfit
    screening: Screening | None = None  # what the rows show, found once for all chains
    joint: Hyperparameters | None = None  # of kernel and likelihood, for chains in the limit of many components
    joint_start: Tensor | None = None  # where they stood

    def __init__(
        self,
        model: TKRR,
        training: TrainingData,
        earlier: DrawsPosterior | None,
        memory: int,
        entropy: Any,
        *,
        extends: bool = True,
    ):
        self.model, self.training, self.earlier, self.entropy = model, training, earlier, entropy
        self.extends = extends
        offset = 0.0
        if model.observation.has_link:
            offset = _link_offset(model, training)
        elif model.observation.has_limits:
            offset = _constant_mean(model, training) / training.scale
        self.augmentation = model.observation.augmentation(training.scale, offset)
        self.separable = model.separate()
        if earlier is not None and extends:
            require_same_target(earlier, target_identity(model, training.summary))
        design = Design(training, self._bases(), memory=memory, weights=model.weights)
        design.require_affordable()
        design.marginals()  # before the first update also where a chain is resumed: rows are kept from here on
        self.designs = [design]  # of each stage of the warm-up; the last has all rows
        self.num_dims = len(self.separable.modes)
        summary = training.summary
        self.hyperparameters = self._free_hyperparameters()
        self.all_slots = range(len(self.hyperparameters.slots))
        self.too_fast: dict[int, int] = {}  # inputs that need more functions than there can be, and how many
        self.start = self.hyperparameters.get(self.all_slots)
        self.second = SecondFit.of(self.augmentation, summary, None if earlier is None else earlier.parameters)
        self.grids = range_grids(summary.lower, summary.upper)
        self.share = training.scale ** (1 / self.num_dims)  # of the targets' scale in each factor
        self.als_factors: list[Tensor] = []  # raw, where the model was fitted by ALS: the start of all chains
        fitted = model.factors_to_start_from()
        if fitted is not None:
            self.als_factors = self.resized([factor.squeeze(0) / self.share for factor in fitted.factors])
        if earlier is None and not self.als_factors:
            self._afford_functions()
        self.start_counts = model.num_basis

    def _bases(self) -> list[Any]:
        return [mode.basis for mode in self.separable.modes]

    def _free_hyperparameters(self, **likelihood: Any) -> Hyperparameters:
        summary = self.training.summary
        centers = None if self.earlier is None else self.earlier.resume["centers"]
        half_range = (summary.upper - summary.lower) / 2
        with torch.enable_grad():
            return Hyperparameters(self.model.covar_module, self.separable, half_range, centers, **likelihood)

    # What is decided before the first sweep

    @property
    def can_score(self) -> bool:
        """Whether rows that are held out have a density that is known: Gaussian noise of one variance."""
        return self.augmentation.free == ("noise",) and self.second is None

    @property
    def _chooses_components(self) -> bool:
        """Whether the number of components is this fit's to choose."""
        return self.earlier is None and self.model.adapts_rank and self.model.weights.kind == "cp"

    def _can_integrate(self) -> bool:
        """Whether the limit of many components can be taken: f is integrated out, and a draw is a sum of products."""
        is_known = not any(self.training.summary.num_missing())
        is_new = self._chooses_components and not self.als_factors
        return is_new and is_known and self.augmentation.is_gaussian and self.augmentation.free == ("noise",)

    def choose_plan(self, num_warmup: int | None, num_draws: int | None, num_chains: int | None) -> Plan:
        """
        Chains, rank, stages and sweeps.

        :param num_warmup: See :func:`~gpytorch_tkrr.fit_gibbs`.
        :param num_draws: See :func:`~gpytorch_tkrr.fit_gibbs`.
        :param num_chains: See :func:`~gpytorch_tkrr.fit_gibbs`.
        """
        earlier, model = self.earlier, self.model
        rank: int | None = self.most_components if model.adapts_rank else model.rank
        if earlier is not None:
            num_earlier, rank = len(earlier.resume["chains"]), earlier.resume.get("rank", model.rank)
            if num_chains not in (None, num_earlier):
                raise InputError(
                    f"The chains of the earlier fit go on, and there are {num_earlier}; got num_chains={num_chains}. "
                    "Leave num_chains out, or fit a new model."
                )
            num_chains = num_earlier
        elif self.als_factors:
            rank = model.weights.rank_of([len(factor) for factor in self.als_factors])
        self.plan = Plan.choose(
            *self._sizes(),
            rank=rank,
            num_warmup=num_warmup,
            num_draws=num_draws,
            num_chains=num_chains,
            can_score=self.can_score,
            can_integrate=self._can_integrate(),
            sweep_factor=self.augmentation.sweep_factor,
        )
        if self.plan.num_processes or (earlier is not None and any(map(is_limit, earlier.resume["chains"]))):
            self.joint = self._free_hyperparameters(likelihood=model.likelihood, unit=self.training.scale**2)
            self.joint_start = self.joint.get(range(len(self.joint.slots)))
            for i in self.joint.noise_users:
                noise = START_NOISE * self.training.scale**2
                self.joint_start[i] = math.log(noise) if self.joint.slots[i].is_log else noise
        if self.plan.ends[-1] > 0:
            all_rows, rows = self.designs[-1], self.plan.rows
            self.designs = [*(all_rows.thinned(num, self.row_key) for num in rows[:-1]), all_rows]
            if self.plan.num_held_out:
                self.held_out = all_rows.thinned(self.plan.num_held_out, self.row_key, skip=rows[0])
            elif self.can_score and len(rows) > 1:
                self.watched = all_rows.thinned(NUM_WATCHED, self.row_key, skip=rows[-2])
        return self.plan

    def _sizes(self) -> tuple[int, int, int, int]:
        """N, moment functions of all modes together, functions of a mode at most, D."""
        tables = self.designs[-1].tables
        num_moments, most = sum(table.num_moments for table in tables), max(table.num_functions for table in tables)
        return self.training.summary.num_rows, num_moments, most, self.num_dims

    def sweep_cost(self) -> SweepCost:
        """Of a sweep over all rows, with the present numbers of functions."""
        return SweepCost.of(*self._sizes())

    def affordable_rank(self, rank: int) -> int:
        """
        The number of components that a chain may keep with the present numbers of functions.

        :param rank: Those that it has.
        """
        if not self._chooses_components:
            return rank
        return affordable_rank(rank, self.sweep_cost(), self.training.summary.num_rows)

    def larger_rank(self, rank: int) -> int | None:
        """
        The number of components that a chain may take instead of its own; None where that is given, or bounded.

        :param rank: Its own.
        """
        if not self._chooses_components:
            return None
        num_rows, _, num_functions, _ = self._sizes()
        return larger_rank(rank, self.sweep_cost(), num_rows, num_functions)

    @property
    def row_key(self) -> int:
        """By which rows are chosen: the same ones in every process."""
        return int(np.random.default_rng(self.entropy).integers(2**62))

    def arrange(self, saved: dict[str, Any] | None = None) -> None:
        """
        Decide about the order of the inputs, where the format of the weights leaves it to the data.

        :param saved: The state of a fit where this has been decided before.
        """
        form = self.model.weights
        if form.is_undecided:
            if saved is None:
                form = form.arranged(self.screen().interactions())
            else:
                form = WeightFormat.from_state(saved).with_rank(form.rank)
            self.model.weights = form
            self.designs[-1].set_format(form)

    def warp_inputs(self, warp: InputWarp) -> None:
        """
        Take warped inputs from now on; those of a stream are read again.

        :param warp: The map.
        """
        plain = self.designs[-1]
        self.model.warp = self.training.inputs = warp
        if self.training.is_kept:
            design = plain.mapped(warp)
        else:
            design = Design(self.training, self._bases(), memory=plain.memory, weights=self.model.weights)
        design.marginals()
        self.designs, self.screening = [design], None

    # Numbers of functions

    def resize(self, num_basis: int | Sequence[int]) -> None:
        """
        Other numbers of functions; rows that have been kept stay.

        :param num_basis: M, one number or one for each input.
        """
        self.model.resize(num_basis=num_basis)
        self.separable = self.model.separate()
        for design in (*self.designs, self.held_out, self.watched):
            if design is not None:
                design.set_bases(self._bases())
        self.designs[-1].marginals()

    def adapt_functions(self) -> None:
        """As many sines in each mode as its present lengthscale needs, and no more than it has distinct values."""
        self.resize(self._num_needed())

    def most_functions(self) -> list[int]:
        """How many sines each mode may get, at most."""
        model = self.model
        if not model.adapts_num_basis:
            return count_per_dimension(model.num_basis, self.num_dims)
        limit = MAX_NUM_BASIS if self.num_dims > 1 else MAX_NUM_BASIS_ALONE
        return [min(most, limit) for most in model.max_num_basis or [limit] * self.num_dims]

    def set_start(self, coordinates: Tensor) -> None:
        """
        Let all chains start with these hyperparameters, and with as many sines as they need.

        :param coordinates: All of them.
        """
        self.hyperparameters.set(self.all_slots, coordinates)
        is_new, self.start = not torch.equal(self.start, coordinates), coordinates
        if is_new and self.model.adapts_num_basis:
            sines = count_per_dimension(self.model.num_basis, self.num_dims)
            self.resize([max(pair) for pair in zip(sines, self._num_needed(), strict=True)])
            self.start_counts, self.screening = self.model.num_basis, None

    def _num_needed(self) -> list[int]:
        model, most = self.model, self.most_functions()
        assert model.covar_module is not None and model.domain is not None
        needed = num_basis_needed(model.covar_module, model.domain, most, TAIL)
        wanted = [max(math.ceil(1.25 * num), MIN_NUM_BASIS) for num in needed]
        return [min(pair) for pair in zip(wanted, most, strict=True)]

    def _afford_functions(self) -> None:
        """With many inputs, no more functions to start with than a sweep can afford or the default kernel needs."""
        if self.num_dims <= MANY_INPUTS or not self.model.limits_num_basis:
            return
        sines = count_per_dimension(self.model.num_basis, self.num_dims)
        most = affordable_functions(self.num_dims) - 2  # beside the constant and the linear function
        self.resize([min(num, max(most, needed)) for num, needed in zip(sines, self._num_needed(), strict=True)])

    def resized(self, factors: Sequence[Tensor]) -> list[Tensor]:
        """
        Raw factors with the present numbers of functions: the last sines are zero, or left out.

        :param factors: D tensors `(..., M_d)`.
        """
        return [
            torch.nn.functional.pad(factor, (0, mode.num_functions - factor.shape[-1]))
            for factor, mode in zip(factors, self.separable.modes, strict=True)
        ]

    # Starts and samplers

    def prior(self, rank: int) -> WeightPrior:
        """
        The prior of the weights.

        :param rank: R that it is made for.
        """
        form = self.model.weights.with_rank(rank)
        return WeightPrior.of_kind[form.kind].of(form, [mode.num_functions for mode in self.separable.modes])

    def screen(self) -> Screening:
        """What the rows show of main effects and interactions."""
        if self.screening is None:
            self.hyperparameters.set(self.all_slots, self.start)
            covariances = [mode.covariance() for mode in self.separable.modes]
            self.screening = Screening.of(self.designs[-1], covariances)
        return self.screening

    def first_state(self, rng: np.random.Generator, rank: int, start: Start) -> GibbsState:
        """
        All hyperparameters where the fit began, and components.

        :param rng: Source of random numbers.
        :param rank: R.
        :param start: Makes the components.
        """
        self.hyperparameters.set(self.all_slots, self.start)
        form = self.model.weights.with_rank(rank)
        covariances = [mode.covariance() for mode in self.separable.modes]
        generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
        whitened = start(covariances, form.num_components(self.num_dims), generator)
        factors = [v.unwhiten(w) for v, w in zip(covariances, form.from_components(whitened), strict=True)]
        return self.state_of(factors, rank)

    def state_of(self, factors: list[Tensor], rank: int) -> GibbsState:
        """
        A chain's state before its first sweep.

        :param factors: Raw, D tensors `(R, M_d)`.
        :param rank: R that the prior is made for.
        """
        steps = torch.full((len(self.hyperparameters.slots),), FIRST_STEP, dtype=torch.float64)
        return self.prior(rank).start(factors, self.augmentation.start(), steps)

    def sampler(self, design: Design, rng: np.random.Generator, rank: int, position: int | None = None) -> GibbsSampler:
        """
        A sampler on some rows.

        :param design: The rows.
        :param rng: Source of random numbers.
        :param rank: R that the prior is made for.
        :param position: The mode that was visited last; None before the first visit.
        """
        design.reset(position)
        model = self.model
        is_pulled = model.chooses_kernel and model.weights.kind == "cp" and model.observation.shows_range
        make = GibbsSampler if self.second is None else partial(JointSampler, self.second)
        return make(
            design,
            self.separable,
            self.hyperparameters,
            self.training.scale**2,
            self.augmentation,
            self.grids,
            rng,
            rank=rank,
            weights=self.model.weights,
            empty=ProductMeasure(design) if is_pulled else None,
        )

    def modes(self, sweep: int) -> Sequence[int]:
        """
        The order in which a sweep visits the modes: along the chain of inputs, every other time back.

        :param sweep: Its number.
        """
        chain = self.model.weights.chain(self.num_dims)
        return chain if sweep % 2 == 0 else chain[::-1]

    def have_died(self, energies: Tensor, parameters: Parameters) -> bool:
        """
        Whether no component says anything that the noise does not.

        :param energies: Mean squares of the components, in units of the targets' variance.
        :param parameters: Of the observation model.
        """
        is_constant = self.training.summary.variance == 0  # constant targets: nothing to be said
        num_weights = sum(mode.num_functions for mode in self.separable.modes)
        in_noise = num_weights * self.augmentation.noise(parameters) / self.designs[0].data.summary.num_rows
        return not is_constant and float(energies.max()) <= min(in_noise, MIN_ENERGY)


def _link_offset(model: TKRR, training: TrainingData) -> float:
    """The mean of f, whose scale is not that of the targets; training data become the encoded targets themselves."""
    mean = _constant_mean(model, training)
    if model.fits_mean:
        model.mean_module.initialize(constant=model.observation.start_mean(training.summary))
        mean = _constant_mean(model, training)
    training.mean, training.scale = None, 1.0
    return mean


def _constant_mean(model: TKRR, training: TrainingData) -> float:
    if not isinstance(model.mean_module, (ConstantMean, ZeroMean)):
        raise InputError(
            f"With a {type(model.likelihood).__name__} fit_gibbs takes a model with a ConstantMean or a ZeroMean; got "
            f"a {type(model.mean_module).__name__}."
        )
    return float(model.mean_module(training.summary.sample[:1]).sum())
