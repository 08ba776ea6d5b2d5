r"""Box and counts that follow a kernel's hyperparameters, so that an error bound holds while they are trained."""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from gpytorch.kernels import Kernel
from torch import Tensor
from torch.quasirandom import SobolEngine

from ..bases.covariance import Covariance
from ..bases.domain import Domain
from ..errors import UnsupportedKernelError
from ..features.box import MAX_CHOSEN_FUNCTIONS, basis_size, needed_basis
from ..features.expansion import Expansion
from ..features.stationary import Sines, SpectralProducts
from ..operators.exact import MAX_EXACT_ROWS
from ..operators.observer import DataFacts

#: By which factor lengthscales may grow or shrink before box and counts are chosen again: this for one input, its D-th
#: root for D inputs, so that headroom costs as much for any number of them. The first one is taken that gives a basis
#: at most the number of functions beside it, or `GROWTH_OF_LARGE` times as many as without headroom.
HEADROOMS = ((4.0, 300), (2.5, 400), (1.6, 600), (1.6**0.5, 600), (1.6**0.25, 600))
GROWTH_OF_LARGE = 1.4

#: A basis is chosen anew when its error has grown to this part of the tolerance. A new basis has a smaller one, mostly
#: much smaller; acting early keeps small what changes in the objective at that moment. Bases of at most `SMALL_ENOUGH`
#: functions are given up earlier: another one costs little.
TRIGGER = 0.3
EARLY_TRIGGER, SMALL_ENOUGH = 0.1, 512

#: Where the error of a new basis is not that much smaller: by which factor it may grow, up to the tolerance itself.
GROWTH = 2.0

#: Where a basis for this part of the tolerance has at most `CHEAP` functions it is taken: for smooth kernels, and for
#: one input, a smaller error costs next to nothing.
FINER = 1 / 30
CHEAP = 256

#: The first basis is for the first of these parts of the tolerance that takes at most `START_FUNCTIONS`: the first
#: steps of Adam follow the signs of the gradient, also where it is small.
START = (1 / 30, 1 / 10, 1 / 3)
START_FUNCTIONS = 1_200

#: The parts of the error, in the order of preference, that images of the ends of the box are allowed. They change the
#: likelihood's gradient more than functions left out do: they are smooth, and their derivative in a lengthscale is some
#: ten times as large as they are. For kernels that decay slowly the first ones take too many functions, more than
#: `AFFORDABLE` times those of the last.
IMAGES = (1 / 30, 1 / 6, 1.0)
AFFORDABLE = 2.0

#: A basis with less than this part of the present functions takes the place of the present one.
SHRINKAGE = 0.5

#: Smaller bases do not shrink: there is nothing to be gained.
SMALL = 64

#: How far a raw parameter moves (about its relative change) before it is asked again whether the basis could be
#: smaller, or, where the largest size is reached, whether another one is better.
MARGIN = 0.5

#: How many standard deviations of the noise the error is relative to: by default an error of 0.01 s sigma, see below.
#: Measured on 48 problems, that moves means by up to 0.01 s; a third of it takes twice as many functions.
NOISE = 3.0

#: Where more functions than this many times the rows are needed, the kernel is evaluated as it is: by then that takes
#: less time. It returns to functions when fewer than half as many are needed. Up to `FEW_ROWS` a step of either takes
#: some milliseconds, so there is nothing to be gained by functions.
EXACT = 1.5
FEW_ROWS = 500

#: While hyperparameters move by more than `FAST` a step (raw parameters; Adam with a rate of 0.1 begins with 0.1), a
#: basis of more than `PROVISIONAL` functions gives way to one for an error up to `SLACK` times as large: the next steps
#: leave it behind. When they move by less than `SLOW`, and for every prediction, the tolerance itself is asked for
#: again. What is left out stays below the part `HIDDEN` of the noise's variance: more of it would steer lengthscales.
FAST, SLOW = 0.06, 0.03
PROVISIONAL = 1_000
SLACK = 10.0
HIDDEN = 0.05

#: The largest relative error that a basis is chosen for where the wanted one takes too many functions.
LARGEST_TOLERANCE = 0.5

_NUM_PROBES = 24


@dataclass(frozen=True)
class Choice:
    """
    What the present basis was chosen for, and up to where it is kept.

    :param parameters: Raw parameters of the kernel at that time; other ones, where they are looked at again.
    :param scale: What the error was relative to.
    :param num_needed: Functions that the tolerance asked for, whether they are allowed or not.
    :param limit: The relative error beyond which the basis is given up.
    :param image_limit: The same for images of the ends of the box.
    :param is_settled: Whether a larger error is no reason to choose again: there is no better basis.
    :param slack: By which factor the error may be larger than asked for, while hyperparameters move fast.
    :param is_least: Whether more slack has been found to save little.
    """

    parameters: tuple[Tensor, ...]
    scale: float
    num_needed: int
    limit: float = math.inf
    image_limit: float = math.inf
    is_settled: bool = False
    slack: float = 1.0
    is_least: bool = False

    @property
    def is_limited(self) -> bool:
        """Whether more functions were asked for than are allowed."""
        return self.num_needed > MAX_CHOSEN_FUNCTIONS

    def is_far(self, kernel: Kernel) -> bool:
        """
        Whether a raw parameter has moved far since.

        :param kernel: The kernel that is expanded.
        """
        return _distance(kernel, self.parameters) > MARGIN


class Tolerance:
    r"""
    An error bound over a range of inputs, and when it asks for another basis,

    .. math:: \max |K_\text{approx} - K| \le \text{tol} \cdot \min(\max k(x, x), 3 s\, \sigma).

    Here :math:`\sigma` is the standard deviation of the noise and s that of the targets, as soon as a likelihood has
    told them. An error :math:`\delta` of the covariance moves the posterior mean by about :math:`\delta / \sigma` times
    the residuals in units of :math:`\sigma`: with the default tol, 0.003, by at most about 0.01 s. A bound relative to
    the prior variance alone is not enough: where a smooth function is seen with little noise, outputscales are large,
    and the likelihood depends on much smaller parts of the covariance.

    Whether the bound holds is measured on the diagonal, at the corners of the range and at points within it, which
    costs next to nothing: what truncation leaves out is a positive definite kernel, largest there, and so are the
    images of the ends of the box. Only where it does not hold, or hyperparameters have moved far, a basis is chosen
    anew. Where a basis would need many more functions than there are rows, the kernel is evaluated exactly instead.

    The next basis depends on the hyperparameters, on what likelihoods have told, and on the present basis with the
    reasons that it was chosen for. All of that is in :meth:`state`.

    :param lower: Lower ends of the range `(D,)`.
    :param upper: Upper ends of the range `(D,)`.
    :param tol: The relative error.
    """

    def __init__(self, lower: Tensor, upper: Tensor, tol: float):
        if not 0 < tol < 1:
            raise ValueError(f"tol is a relative error between 0 and 1; got {tol}.")
        self.tol = tol
        self.lower, self.upper = lower.detach().double().cpu(), upper.detach().double().cpu()
        self.facts = DataFacts()
        self.choice: Choice | None = None  # None: the present basis, whatever it was chosen for
        self.num_revisions = 0
        self.allows_exact = True
        self._is_exact = False
        self._num_seen: int | None = None  # rows at the last step of training
        self._last: tuple[Tensor, ...] = ()  # raw parameters at the last step of training
        self._probes = self._make_probes()

    def _make_probes(self) -> Tensor:
        num_dims = len(self.lower)
        corners = torch.tensor(list(itertools.islice(itertools.product((0.0, 1.0), repeat=num_dims), _NUM_PROBES)))
        inside = SobolEngine(num_dims).draw(_NUM_PROBES)
        return self.lower + (self.upper - self.lower) * torch.cat([corners, inside]).double()

    @property
    def half_range(self) -> Tensor:
        """Half the range of the inputs, `(D,)`."""
        return (self.upper - self.lower) / 2

    @property
    def is_exact(self) -> bool:
        """Whether the kernel is to be evaluated as it is, without functions."""
        return self._is_exact and self.allows_exact

    @property
    def num_needed(self) -> int:
        """How many functions the bound took at the last choice."""
        return 0 if self.choice is None else self.choice.num_needed

    @property
    def is_limited(self) -> bool:
        """Whether the bound takes more functions than are allowed."""
        return self.choice is not None and self.choice.is_limited

    def see(self, x: Tensor) -> None:
        """
        Widen the range to training inputs, and count them.

        :param x: `(..., N, D)`.
        """
        if self.facts.num_rows is not None:  # they make up the covariance of a likelihood
            self.facts.num_rows = x.shape[-2]
        self._num_seen = x.shape[-2]
        x = x.detach().reshape(-1, x.shape[-1])
        self._include(x.amin(0).double().cpu(), x.amax(0).double().cpu())

    def _include(self, lower: Tensor, upper: Tensor) -> None:
        if bool((lower < self.lower).any() or (upper > self.upper).any()):
            self.lower, self.upper = lower.minimum(self.lower), upper.maximum(self.upper)
            self._probes = self._make_probes()
            if self.choice is not None:
                self.choice = replace(self.choice, is_settled=False)

    @torch.no_grad()
    def scale(self, expansion: Expansion) -> Tensor:
        """
        What the error is relative to, `(*batch,)`.

        :param expansion: The features.
        """
        exact = expansion.prior_variance(self._probes)
        largest = exact.amax(-1)
        if self.facts.precision is None:
            return largest
        part = NOISE * self.facts.precision * exact.mean(-1) / largest.clamp_min(1e-300)
        return largest * part.min().clamp_max(1.0)

    @torch.no_grad()
    def error(self, expansion: Expansion, prior: Covariance) -> float:
        """
        The relative error of the prior variance at the probes, the largest of a batch.

        :param expansion: The features.
        :param prior: The covariance of their weights.
        """
        probes = self._probes.to(prior.variances.device)
        error = (expansion.prior_variance(probes) - prior.quadratic(expansion.features(probes))).abs().amax(-1)
        return float(torch.where(error == 0, error, error / self.scale(expansion)).max())

    @torch.no_grad()
    def image(self, expansion: Expansion) -> float:
        """
        The relative error by the nearest images, the largest of all inputs and of a batch.

        :param expansion: The features.
        """
        largest = 0.0
        for leaf in expansion.leaves(self._probes):
            if isinstance(leaf.expansion, SpectralProducts) and isinstance(leaf.expansion.box.family, Sines):
                box = leaf.expansion.box
                half_range = self.half_range[list(box.columns)].to(box.half_width)
                lags = torch.diag(2 * (box.half_width - half_range))
                value = float(leaf.expansion.at_lag(lags).abs().max())
                largest = max(largest, leaf.scale / leaf.share * value)
        return largest / float(self.scale(expansion).max()) if largest else 0.0

    @torch.no_grad()
    def revise(
        self, kernel: Kernel, expansion: Expansion, prior: Covariance, *, is_step: bool = False
    ) -> tuple[Domain, list[int]] | None:
        """
        Another box and other counts, where the present hyperparameters ask for them; :meth:`accept` is to be called
        with them then.

        :param kernel: The kernel that is expanded.
        :param expansion: Its present expansion.
        :param prior: The present covariance of its weights.
        :param is_step: Whether the kernel is evaluated for a step of training, after which its hyperparameters will be
            other ones.
        """
        speed = 0.0
        if is_step:
            speed, self._last = (_distance(kernel, self._last) if self._last else 0.0), _copy(kernel)
        basis = self._revise(kernel, expansion, prior, speed)
        self._is_exact = self._prefers_exact()
        return basis

    def _revise(
        self, kernel: Kernel, expansion: Expansion, prior: Covariance, speed: float
    ) -> tuple[Domain, list[int]] | None:
        if not all(bool(torch.isfinite(parameter).all()) for parameter in kernel.parameters()):
            return None
        if self.choice is None:
            self.choice = Choice(_copy(kernel), math.nan, expansion.num_functions)
            self.accept(expansion, prior)
            self.choice = replace(self.choice, is_settled=False)
        scale, choice = float(self.scale(expansion).max()), self.choice
        too_large = self.error(expansion, prior) > choice.limit or self.image(expansion) > choice.image_limit
        is_other_scale = not math.exp(-MARGIN) * choice.scale < scale < math.exp(MARGIN) * choice.scale
        has_moved = is_other_scale or choice.is_far(kernel)
        is_slack = choice.slack > 1
        most = self._most_slack(expansion) if speed > (SLOW if is_slack else FAST) else 1.0
        ends_slack = is_slack and (most == 1 or most < choice.slack / 2)
        too_many = most > 1 and not (is_slack or choice.is_least) and expansion.num_functions > PROVISIONAL
        if not (has_moved or too_many or ends_slack or (too_large and not choice.is_settled)):
            return None
        too_large = too_large or ends_slack
        if not too_large and expansion.num_functions <= SMALL:
            return None
        looked_at = replace(choice, parameters=_copy(kernel), scale=scale)
        try:
            domain, num_basis, num_needed = self.choose(kernel, self.tol * scale)
            size, slack = basis_size(kernel, domain, num_basis), 1.0
            if most > 1 and size > PROVISIONAL:
                slack = most
                domain, num_basis, _ = self.choose(kernel, self.tol * scale, slack)
                size = basis_size(kernel, domain, num_basis)
        except UnsupportedKernelError:  # no box is large enough at these hyperparameters: what is missing is counted
            self.choice = replace(looked_at, num_needed=4 * MAX_CHOSEN_FUNCTIONS, is_settled=True)
            return None
        self.choice = replace(looked_at, num_needed=num_needed, is_least=too_many)
        if not too_large and size > SHRINKAGE * expansion.num_functions:
            return None
        self.choice = replace(self.choice, slack=slack, is_least=False)
        self.num_revisions += 1
        return domain, num_basis

    def _most_slack(self, expansion: Expansion) -> float:
        """By which factor the error may be larger than asked for while hyperparameters move fast; 1 for little gain."""
        if self.facts.noise is None:
            return 1.0
        exact = expansion.prior_variance(self._probes)
        hidden = HIDDEN * self.facts.noise * float((exact.mean(-1) / self.scale(expansion)).min())
        return min(hidden / self.tol, SLACK) if hidden > 2 * self.tol else 1.0

    @torch.no_grad()
    def accept(self, expansion: Expansion, prior: Covariance) -> None:
        """
        Measure a basis that has just been chosen: up to which error it is kept.

        :param expansion: The expansion on it.
        :param prior: The covariance of its weights.
        """
        assert self.choice is not None
        error, image = self.error(expansion, prior), self.image(expansion)
        tol = self.choice.slack * self.tol
        trigger = EARLY_TRIGGER if expansion.num_functions <= SMALL_ENOUGH else TRIGGER
        limit = min(max(GROWTH * error, trigger * tol), tol)
        self.choice = replace(
            self.choice,
            scale=float(self.scale(expansion).max()),
            limit=limit,
            image_limit=max(GROWTH * image, trigger * tol / 2),
            is_settled=(self.is_limited and self.choice.slack == 1) or error > limit,
        )

    def stays_exact(self, kernel: Kernel) -> bool:
        """
        Whether nothing has happened since the kernel was last evaluated as it is, so that functions are not looked at.

        :param kernel: The kernel that is expanded.
        """
        if not (self.is_exact and self._prefers_exact()):
            return False
        return self._has_few_rows() or (self.choice is not None and not self.choice.is_far(kernel))

    def _prefers_exact(self) -> bool:
        """Whether the last choice takes so many functions, for so few rows, that the kernel is better used as it is."""
        if self._has_few_rows():
            return True
        num_rows = self.facts.num_rows
        if num_rows is None or num_rows > MAX_EXACT_ROWS:
            return False
        return self.num_needed > (0.5 if self._is_exact else 1.0) * EXACT * num_rows

    def _has_few_rows(self) -> bool:
        """Whether there are so few rows, as far as is known, that the kernel is used as it is in any case."""
        num_rows = self._num_seen if self.facts.num_rows is None else self.facts.num_rows
        return num_rows is not None and num_rows <= FEW_ROWS

    def choose(self, kernel: Kernel, allowed: float = math.inf, slack: float = 1.0) -> tuple[Domain, list[int], int]:
        """
        A basis for the present hyperparameters, with headroom, and the number of functions that the bound takes.

        Where that is too many: a basis for the smallest error that the largest number of them permits.

        :param kernel: The kernel that is expanded.
        :param allowed: The error of the prior variance that is allowed.
        :param slack: By which factor all errors may be larger.
        """
        tol, allowed, ends = slack * self.tol, slack * allowed, (self.lower, self.upper)
        least = basis_size(kernel, *needed_basis(kernel, *ends, tol, allowed))
        for image in IMAGES:
            domain, num_basis = needed_basis(kernel, *ends, tol, allowed, image=image)
            size = num_needed = basis_size(kernel, domain, num_basis)
            if size <= min(max(AFFORDABLE * least, CHEAP), MAX_CHOSEN_FUNCTIONS):
                break
        if size <= CHEAP:
            finer = needed_basis(kernel, *ends, FINER * tol, FINER * allowed)
            if basis_size(kernel, *finer) <= CHEAP:
                domain, num_basis = finer
        while size > MAX_CHOSEN_FUNCTIONS and tol < LARGEST_TOLERANCE:
            tol, allowed = min(2 * tol, LARGEST_TOLERANCE), 2 * allowed
            domain, num_basis = needed_basis(kernel, *ends, tol, allowed)
            size = basis_size(kernel, domain, num_basis)
        while size > MAX_CHOSEN_FUNCTIONS and max(num_basis) > 1:
            num_basis = [max(int(0.9 * m), 1) for m in num_basis]
            size = basis_size(kernel, domain, num_basis)
        for headroom, affordable in HEADROOMS:
            roomy = self._with_headroom(domain, num_basis, headroom ** (1 / len(num_basis)))
            if basis_size(kernel, *roomy) <= min(max(affordable, GROWTH_OF_LARGE * size), MAX_CHOSEN_FUNCTIONS):
                return *roomy, num_needed
        return domain, num_basis, num_needed

    def _with_headroom(self, domain: Domain, num_basis: list[int], factor: float) -> tuple[Domain, list[int]]:
        """The basis for lengthscales up to `factor` times longer or shorter."""
        center, half_width = domain.sides(len(num_basis))
        half_range = (self.upper - self.lower) / 2
        wider = half_range + factor * (half_width - half_range)
        counts = [math.ceil(m * factor * float(r)) for m, r in zip(num_basis, wider / half_width, strict=True)]
        return Domain(center, wider), counts

    def start(self, kernel: Kernel) -> tuple[Domain, list[int]]:
        """
        The first basis; :meth:`accept` is to be called with it.

        :param kernel: The kernel that is expanded.
        """
        domain, num_basis, num_needed = self.choose(kernel)
        self.choice = Choice(_copy(kernel), math.nan, num_needed)
        for part in () if self.is_limited else START:
            finer = needed_basis(kernel, self.lower, self.upper, part * self.tol)
            if CHEAP < basis_size(kernel, *finer) <= START_FUNCTIONS:
                if basis_size(kernel, *finer) > basis_size(kernel, domain, num_basis):
                    return finer
                break
        return domain, num_basis

    def state(self) -> dict[str, Any]:
        """All that the next basis depends on beside the present one and the hyperparameters, in plain numbers."""
        choice = self.choice
        return {
            "tol": self.tol,
            "range": [self.lower.tolist(), self.upper.tolist()],
            "facts": asdict(self.facts),
            "num_seen": self._num_seen,
            "is_exact": self._is_exact,
            "last": [parameter.tolist() for parameter in self._last],
            "choice": None
            if choice is None
            else {
                **{field.name: getattr(choice, field.name) for field in fields(choice)},
                "parameters": [parameter.tolist() for parameter in choice.parameters],
            },
        }

    def load_state(self, state: dict[str, Any] | None) -> None:
        """
        Take the state that belongs to a basis; without one, or with that of another tolerance, the basis is taken for
        one that was chosen at the hyperparameters at which it is looked at next.

        :param state: As :meth:`state` returns it.
        """
        if state is None or state["tol"] != self.tol:
            self.choice, self._is_exact, self._last = None, False, ()
            return
        own = self.lower, self.upper
        self.lower, self.upper = (torch.tensor(end, dtype=torch.float64) for end in state["range"])
        self._probes = self._make_probes()
        self.facts = DataFacts(**state["facts"])
        self._num_seen = state.get("num_seen")
        self._is_exact = state["is_exact"]
        self._last = _tensors(state.get("last", []))
        choice = state["choice"]
        if choice is not None:
            choice = Choice(**{**choice, "parameters": _tensors(choice["parameters"])})
        self.choice = choice
        self._include(*own)

    def forget(self) -> None:
        """Have the next revision look for a smaller basis, too."""
        if self.choice is not None:
            self.choice = replace(self.choice, parameters=(), is_settled=False)


def _tensors(numbers: list[Any]) -> tuple[Tensor, ...]:
    return tuple(torch.tensor(values, dtype=torch.float64) for values in numbers)


def _distance(kernel: Kernel, parameters: tuple[Tensor, ...]) -> float:
    """The largest difference of a raw parameter of the kernel from another value; infinite for another kernel's."""
    present = list(kernel.parameters())
    if [p.shape for p in present] != [p.shape for p in parameters]:
        return math.inf
    differences = ((new.detach() - old.to(new)).abs() for new, old in zip(present, parameters, strict=True))
    return max((float(each.max()) for each in differences if each.numel()), default=0.0)


def _copy(kernel: Kernel) -> tuple[Tensor, ...]:
    return tuple(parameter.detach().clone() for parameter in kernel.parameters())
