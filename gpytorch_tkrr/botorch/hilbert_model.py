"""A Gaussian process with few inputs and any number of observations."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from botorch.exceptions.errors import ModelFittingError
from botorch.exceptions.warnings import OptimizationWarning
from botorch.models.kernels.categorical import CategoricalKernel
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.optim.fit import fit_gpytorch_mll_scipy, fit_gpytorch_mll_torch
from botorch.optim.utils import get_parameters_and_bounds
from botorch.utils.types import DEFAULT, _DefaultType
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel, RBFKernel
from gpytorch.likelihoods import Likelihood
from gpytorch.means import Mean
from gpytorch.mlls import MarginalLogLikelihood
from torch import Tensor

from ..bases.domain import Domain
from ..bases.index_set import FullTensor, HyperbolicCross, IndexSet
from ..errors import ApproximationWarning, SizeError
from ..features.box import choose_domain, represented_lengthscales, suit_short_lengthscales
from ..features.represented import MAX_MISSING
from ..hilbert.distribution import ReducedRankNormal
from ..hilbert.kernel import HilbertKernel
from .box import join_range
from .columns import Columns
from .dispatch import DISPATCHER, register_custom_fit
from .drop_in import DropInGP
from .pilot import FIRST_GAIN, NUM_ROWS, fit_pilot
from .units import fit_in_units

#: More inputs than this are for :class:`TKRRModel`.
MAX_DIMS = 6

#: Up to so many inputs all products of functions are kept, above it a hyperbolic cross.
MAX_FULL_DIMS = 3

#: How many functions are used at most where nothing else is said.
NUM_FUNCTIONS = {1: 100, 2: 1000, 3: 1000}
CROSS_NUM_FUNCTIONS = 1250

#: Change of the prior covariance by the ends of the box, relative to its variance. With a hyperbolic cross functions
#: are too expensive to be spent on a wide margin.
BOX_TOLERANCE = 1e-3
CROSS_BOX_TOLERANCE = 0.05  # for each input

#: Prior variance that the basis may leave out at either end of the lengthscales' interval, all inputs together.
MISSING = 0.025

#: Optimisers that take bounds of the parameters.
BOUNDED_OPTIMIZERS = fit_in_units, fit_gpytorch_mll_scipy, fit_gpytorch_mll_torch

#: The number of functions is given here, and the reduced-rank prior is the model. To count what it leaves out as
#: independent variance is worse: it takes the place of the noise. Measured on 500 new rows of three smooth functions
#: (60 functions of two inputs, crosses of 400 of four and 500 of six), negative log densities are then 0.02 to 0.18
#: larger, and errors up to 15 % larger. In a full product bounds of the lengthscales keep what is missing below
#: `MAX_MISSING`; with a hyperbolic cross it is made up for outside the box only.
CROSS_ACCEPTED = 1 - 1e-6

#: A fit has at most so many rounds, while the lengthscales ask for a box that differs by more than this ratio; all but
#: the last with so many steps of L-BFGS-B.
MAX_ROUNDS = 3
BOX_RATIO = 1.1
FEW_STEPS = 15

#: With more rows than functions the last round ends where a step of L-BFGS-B raises the log posterior density of the
#: hyperparameters by less than this. They are known no better: among draws from their posterior it varies by about the
#: square root of half their number.
LAST_GAIN = 0.05

#: Steps of L-BFGS-B with a covariance of tasks, whose parameters are redundant: to the end it takes thousands.
STEPS_WITH_TASKS = 100

#: Of outcomes in one box, long lengthscales may be cut off here, in units of the range: data hardly tell longer ones.
CUT = 0.5

#: By how much lengthscales may change, in one direction at least, before there is a new box.
MAX_GROWTH = 1.3


class HilbertGPModel(DropInGP):
    r"""
    A :class:`~botorch.models.SingleTaskGP` whose kernel, with many observations, is a
    :class:`~gpytorch_tkrr.HilbertKernel`: the same arguments, transforms and priors, but a fit whose cost hardly
    depends on the number of observations, and function draws that are exact. Up to 500 observations, or as many as it
    would have functions, the exact process is the faster one, and the model is a SingleTaskGP in all it does, unless
    you give `num_functions` or a HilbertKernel.

    In one to three dimensions the box carries all products of the functions, in four to six a hyperbolic cross of them.
    The default kernel is BoTorch's: RBF with its dimension-scaled prior on the lengthscales, in units of the search
    space.

    The box holds `bounds` and the training inputs, with a margin that suits the lengthscales: long ones need a wide
    margin, short ones many functions in little space. So `fit_gpytorch_mll` first fits an exact Gaussian process with
    the same modules to at most 500 rows, makes the box for its lengthscales, then fits the expanded model to all rows,
    again in a new box if need be. With a training loop of your own call :meth:`update_box`. A
    :class:`~gpytorch_tkrr.HilbertKernel` that was given keeps its box.

    :param train_X: Inputs `(*batch, n, d)`.
    :param train_Y: Outcomes `(*batch, n, m)`.
    :param train_Yvar: Their noise variances, where known.
    :param likelihood: As for SingleTaskGP.
    :param covar_module: The kernel to expand, or a HilbertKernel to use as it is.
    :param mean_module: As for SingleTaskGP.
    :param outcome_transform: As for SingleTaskGP.
    :param input_transform: As for SingleTaskGP.
    :param cat_dims: Columns that are categories, numbered 0, 1, ...; for the default kernel, as the next two.
    :param data_fidelities: Columns that are fidelities, 1 for the thing itself.
    :param task_feature: The column that holds the tasks, numbered 0, 1, ...; then the model stands in the place of a
        :class:`~botorch.models.MultiTaskGP`.
    :param output_tasks: Tasks of a posterior at inputs without that column; all by default.
    :param bounds: The search space, `(2, d)`, as for `optimize_acqf`; by default the unit cube.
    :param num_functions: At most so many functions, from the first observation on; by default 100 for one input, 1 000
        for two or three, 1 250 beyond.

    Example:
        >>> import torch
        >>> from botorch.fit import fit_gpytorch_mll
        >>> from gpytorch.mlls import ExactMarginalLogLikelihood
        >>> from gpytorch_tkrr.botorch import HilbertGPModel
        >>> train_X = torch.rand(1200, 2, dtype=torch.float64)
        >>> train_Y = torch.sin(6 * train_X).sum(-1, keepdim=True)
        >>> model = HilbertGPModel(train_X, train_Y)
        >>> mll = fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        >>> bool((model.posterior(train_X).mean - train_Y).abs().max() < 0.1)
        True
    """

    def __init__(
        self,
        train_X: Tensor,
        train_Y: Tensor,
        train_Yvar: Tensor | None = None,
        likelihood: Likelihood | None = None,
        covar_module: Kernel | None = None,
        mean_module: Mean | None = None,
        outcome_transform: OutcomeTransform | _DefaultType | None = DEFAULT,
        input_transform: InputTransform | None = None,
        *,
        cat_dims: Sequence[int] | None = None,
        data_fidelities: Sequence[int] | None = None,
        task_feature: int | None = None,
        output_tasks: Sequence[int] | None = None,
        bounds: Tensor | None = None,
        num_functions: int | None = None,
    ):
        super().__init__(
            train_X, train_Y, train_Yvar, likelihood, covar_module, mean_module, outcome_transform, input_transform,
            cat_dims=cat_dims, data_fidelities=data_fidelities, task_feature=task_feature, output_tasks=output_tasks,
            bounds=bounds,
        )  # fmt: skip
        self._has_default_kernel = covar_module is None and not self._columns.special
        self._max_functions = num_functions
        self._has_own_box = not self._hilbert_kernels()
        if self._has_own_box:
            _check_num_dims(len(self._columns.numbers))
            if num_functions is not None:
                self._expand_kernel()
        self._expand_if_many()
        self.to(train_X)

    def _hilbert_kernels(self) -> list[HilbertKernel]:
        """Those of the model; none while it is exact."""
        return [module for module in self.covar_module.modules() if isinstance(module, HilbertKernel)]

    @property
    def _num_functions(self) -> int:
        return max(kernel.expansion(self._num_columns(kernel)).num_functions for kernel in self._hilbert_kernels())

    def _num_columns(self, kernel: HilbertKernel) -> int:
        return self.train_inputs[0].shape[-1] if kernel.domain.num_dims is None else kernel.domain.num_dims

    def set_train_data(self, inputs: Any = None, targets: Tensor | None = None, strict: bool = True) -> None:
        """
        Replace the training data; with many observations an exact model becomes a reduced-rank one.

        :param inputs: Inputs.
        :param targets: Transformed outcomes.
        :param strict: Whether the shapes must stay.
        """
        super().set_train_data(inputs, targets, strict)
        self._expand_if_many()

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """
        As for SingleTaskGP. Where the state comes without a box (that of an exact model, or of a ModelListGP, which
        keeps tensors only) one is made for the lengthscales that were loaded.

        :param args: See SingleTaskGP.
        :param kwargs: See SingleTaskGP.
        """
        result = super().load_state_dict(*args, **kwargs)
        if self._has_own_box and self._hilbert_kernels() and self._needs_other_box():
            self.update_box()
        return result

    def _expand_if_many(self) -> None:
        x = self.train_inputs[0]
        num_functions = _default_num_functions(len(self._columns.numbers))
        if not self._hilbert_kernels() and x.shape[-2] > max(NUM_ROWS, num_functions):
            self._expand_kernel()

    def _expand_kernel(self) -> None:
        self.covar_module = _expand(self.covar_module, *self._range, self._columns, self._max_functions)

    # Fit

    def _fit(self, mll: MarginalLogLikelihood, **kwargs: Any) -> MarginalLogLikelihood:
        """Box and hyperparameters in turn, unless the model is exact or the box is the user's."""
        if not (self._has_own_box and self._hilbert_kernels()):
            return self._fit_as_botorch(mll, **kwargs)
        if self._columns.task is not None:
            kwargs = _with_options(kwargs, maxiter=STEPS_WITH_TASKS)
        mll.train()
        with torch.no_grad():
            x = self.transform_inputs(self.train_inputs[0])
        self._range = join_range(self._range, x)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ApproximationWarning)  # an optimiser may pass through what does not suit
            self._find_box(mll, x, **kwargs)
            mll.train()
            self.update_box()
            self._fit_within_box(mll, LAST_GAIN, **kwargs)
        self._check_box(x)
        self._check_shared_box(x)
        return mll

    def _find_box(self, mll: MarginalLogLikelihood, x: Tensor, **kwargs: Any) -> None:
        """
        Hyperparameters and a box that suit each other nearly. From those of an earlier fit a few steps may be enough;
        else an exact Gaussian process of some rows has the first look.

        :param mll: The marginal log likelihood that holds this model.
        :param x: Transformed inputs.
        :param kwargs: Of the fit.
        """
        if self._is_warm and self._try_box(mll, **kwargs):
            return
        mll.train()
        options = (kwargs.get("optimizer_kwargs") or {}).get("options")
        kernel = self.covar_module.base_kernel
        fit_pilot(x, self.train_targets, self.mean_module, kernel, self.likelihood, options)
        for _ in range(MAX_ROUNDS - 1):
            if self._try_box(mll, **kwargs):
                return

    def _try_box(self, mll: MarginalLogLikelihood, **kwargs: Any) -> bool:
        """A few steps in a box for the present lengthscales, and whether these then ask for no other box."""
        mll.train()
        self.update_box()
        self._fit_within_box(mll, FIRST_GAIN, **_with_options(kwargs, maxiter=FEW_STEPS))
        return not self._needs_other_box()

    def _fit_within_box(self, mll: MarginalLogLikelihood, gain: float, **kwargs: Any) -> MarginalLogLikelihood:
        """
        BoTorch's own fit, with lengthscales kept where the box represents them. It begins where an earlier round, or an
        exact Gaussian process of some rows, has ended; these hyperparameters are kept where all attempts fail.

        :param mll: The marginal log likelihood that holds this model.
        :param gain: With many rows a step with a smaller one is the last.
        :param kwargs: Of the fit.
        """
        num_rows = self.train_inputs[0].shape[-2]
        has_closure = any(kwargs.get(name) is not None for name in ("closure", "closure_kwargs"))
        if num_rows > self._num_functions and kwargs.get("optimizer") is None and not has_closure:
            kwargs = _with_options(kwargs, ftol=gain / num_rows)  # BoTorch divides by the number of rows
            kwargs["optimizer"] = fit_in_units
        if kwargs.get("optimizer") in (None, *BOUNDED_OPTIMIZERS):
            settings = dict(kwargs.get("optimizer_kwargs") or {})
            is_joint = DISPATCHER is not None or has_closure or kwargs.get("optimizer") is fit_in_units
            settings["bounds"] = {**self._bounds(mll, is_joint), **(settings.get("bounds") or {})}
            kwargs["optimizer_kwargs"] = settings
        before = deepcopy(mll.state_dict())
        try:
            return self._fit_as_botorch(mll, **kwargs)
        except ModelFittingError:
            mll.load_state_dict(before)
            warnings.warn(
                "All attempts of the optimiser ended early; the hyperparameters from before are kept. With little "
                "noise more functions (num_functions) make the likelihood smoother.",
                OptimizationWarning,
                stacklevel=2,
            )
            return mll.eval()

    def _bounds(self, mll: MarginalLogLikelihood, is_joint: bool) -> dict[str, tuple[Tensor, Tensor]]:
        """
        Bounds of raw lengthscales by name, within those of their constraints.

        :param mll: Knows the names.
        :param is_joint: Whether all members of a batch are optimised together, else one by one.
        """
        parameters, known = get_parameters_and_bounds(mll)
        names = {value: name for name, value in parameters.items()}
        bounds = {}
        for leaf in self.covar_module.base_kernel.modules():
            if not isinstance(leaf, Kernel) or not leaf.has_lengthscale or leaf.raw_lengthscale not in names:
                continue
            if isinstance(leaf, CategoricalKernel):  # needs no box
                continue
            name, raw = names[leaf.raw_lengthscale], leaf.raw_lengthscale
            shortest, longest = self._lengthscale_interval(leaf)
            lower, upper = known.get(name, (None, None))
            constraint = leaf.raw_lengthscale_constraint
            ends = [
                constraint.inverse_transform(end.to(raw).clamp(constraint.lower_bound, constraint.upper_bound))
                for end in (shortest, longest)
            ]
            ends[0] = ends[0] if lower is None else ends[0].clamp_min(torch.as_tensor(lower).to(raw))
            ends[1] = ends[1] if upper is None else ends[1].clamp_max(torch.as_tensor(upper).to(raw))
            is_single = is_joint or self._aug_batch_shape.numel() <= 1
            shape = raw.shape if is_single else raw.shape[-2:]
            bounds[name] = tuple(end.expand(shape).flatten() for end in ends)
        return bounds

    def _lengthscale_interval(self, leaf: Kernel) -> tuple[Tensor, Tensor]:
        """Between which lengthscales, each `(1, d)`, a kernel may move before there is a new box."""
        if self._has_default_kernel:
            kernel = self.covar_module
            half_range = (self._range[1] - self._range[0]) / 2
            missing = _missing(len(half_range))
            ends = represented_lengthscales(kernel.domain, half_range, kernel.num_basis, missing, growth=MAX_GROWTH)
            return ends[0].unsqueeze(0), ends[1].unsqueeze(0)
        longest = leaf.lengthscale.detach().reshape(-1, leaf.lengthscale.shape[-1]).amax(0, keepdim=True)
        return 1e-3 * longest, MAX_GROWTH * longest

    def _check_box(self, x: Tensor) -> None:
        """Say so if the lengthscales that were found, or that the data ask for, are too short for the functions."""
        kernel = self.covar_module
        if not isinstance(kernel.index_set, FullTensor):
            return
        if self._has_default_kernel:
            shortest, _ = self._lengthscale_interval(kernel.base_kernel)
            too_few = bool((kernel.base_kernel.lengthscale.detach().double() <= 1.01 * shortest).any())
        else:
            too_few = kernel.approximation_error(x.reshape(-1, x.shape[-1])) > MAX_MISSING
        if too_few:
            warnings.warn(
                f"{self._num_functions} functions are too few for the lengthscales that the data ask for. Raise "
                "num_functions.",
                ApproximationWarning,
                stacklevel=4,
            )

    def _check_shared_box(self, x: Tensor) -> None:
        """
        Say so if outcomes that share a box ask for boxes so different that it does not suit them all: where short
        lengthscales cut off long ones, or where in one of their own the same number of functions represents more.

        :param x: Transformed inputs.
        """
        kernel = self.covar_module
        if not self._has_default_kernel or self._aug_batch_shape.numel() == 1:
            return
        lengthscales = kernel.base_kernel.lengthscale.detach().reshape(-1, x.shape[-1])
        rows = x.reshape(-1, x.shape[-1])[:NUM_ROWS]
        asked = _box_for(kernel.base_kernel, *self._range).half_width  # by the longest, were there no short ones
        longest = self._lengthscale_interval(kernel.base_kernel)[1].to(lengthscales)
        is_cut = (lengthscales >= 0.99 * longest) & (longest < CUT * (self._range[1] - self._range[0]).to(longest))
        is_poor = bool((is_cut.any(0) & (asked > 1.01 * self._suitable_domain().half_width)).any())
        for lengthscale in lengthscales:
            single = RBFKernel(ard_num_dims=x.shape[-1]).to(x)
            single.lengthscale = lengthscale
            own = _box_for(single, *self._range).to(x)
            is_poor |= (
                _represented(kernel, single, own, rows)
                > _represented(kernel, single, kernel.domain, rows) + MAX_MISSING
            )
        if is_poor:
            warnings.warn(
                f"{len(lengthscales)} outcomes share one box and its {self._num_functions} functions, which do not "
                "suit the lengthscales of all of them. Make a model of each outcome: "
                "ModelListGP(HilbertGPModel(train_X, train_Y[:, :1]), ...).",
                ApproximationWarning,
                stacklevel=4,
            )

    def update_box(self) -> None:
        """
        Make the box for the present lengthscales.

        `fit_gpytorch_mll` does so by itself. Call it between steps of a training loop of your own, in training mode, or
        after you have set lengthscales by hand.
        """
        if self._has_own_box and self._hilbert_kernels():
            self.covar_module.domain = self._suitable_domain().to(self.train_inputs[0])

    def _suitable_domain(self) -> Domain:
        kernel = self.covar_module
        most = kernel.num_basis if self._has_default_kernel and isinstance(kernel.index_set, FullTensor) else None
        return _box_for(kernel.base_kernel, *self._range, most)

    def _needs_other_box(self) -> bool:
        needed = self._suitable_domain().half_width
        ratio = needed / self.covar_module.domain.half_width.to(needed)
        return bool((ratio.log().abs() > math.log(BOX_RATIO)).any())

    def forward(self, x: Tensor) -> MultivariateNormal:
        """
        The prior.

        :param x: Inputs `(..., n, d)`.
        """
        if self.training:
            x = self.transform_inputs(x)
        # BoTorch turns low-rank likelihoods off; with fewer rows than functions the dense one is indeed the faster.
        is_low_rank = bool(self._hilbert_kernels()) and x.shape[-2] > self._num_functions
        normal = ReducedRankNormal if is_low_rank else MultivariateNormal
        return normal(self.mean_module(x), self.covar_module(x))


def _default_num_functions(num_dims: int) -> int:
    return NUM_FUNCTIONS.get(num_dims, CROSS_NUM_FUNCTIONS)


def _with_options(kwargs: dict[str, Any], **wanted: float) -> dict[str, Any]:
    """
    Arguments of a fit by BoTorch's own optimiser, with options of L-BFGS-B where none are given, and with fewer steps
    where more are given; arguments of any other optimiser stay.

    :param kwargs: Of `fit_gpytorch_mll`.
    :param wanted: `maxiter`, `ftol`.
    """
    if kwargs.get("optimizer") not in (None, fit_gpytorch_mll_scipy):
        return kwargs
    settings = dict(kwargs.get("optimizer_kwargs") or {})
    options = {**wanted, **(settings.get("options") or {})}
    if "maxiter" in wanted:
        options["maxiter"] = min(wanted["maxiter"], options["maxiter"])
    return {**kwargs, "optimizer_kwargs": {**settings, "options": options}}


def _check_num_dims(num_dims: int) -> None:
    if num_dims > MAX_DIMS:
        raise SizeError(
            f"HilbertGPModel takes up to {MAX_DIMS} inputs; got {num_dims}. Use TKRRModel(train_X, train_Y), whose "
            "size is linear in their number, or pass covar_module=HilbertKernel(...) over a sum of kernels of few "
            "inputs each."
        )


def _expand(kernel: Kernel, lower: Tensor, upper: Tensor, columns: Columns, num_functions: int | None) -> HilbertKernel:
    """The kernel on a box around a range of inputs; each level of a category has all products of functions."""
    num_dims = max(len(columns.numbers), 1)
    if num_functions is None:
        num_functions = _default_num_functions(num_dims)
    copies = columns.num_copies(lower, upper)
    num_basis, index_set = _choose_functions(num_dims, max(num_functions // copies, 2**num_dims))
    return HilbertKernel(
        kernel,
        _box_for(kernel, lower, upper),
        num_basis,
        index_set=index_set,
        accepted_missing=MAX_MISSING if isinstance(index_set, FullTensor) else CROSS_ACCEPTED,
    )


def _box_for(kernel: Kernel, lower: Tensor, upper: Tensor, num_basis: int | None = None) -> Domain:
    """
    The box for a kernel at its present parameters.

    :param kernel: The kernel.
    :param lower: Lower ends `(D,)`.
    :param upper: Upper ends `(D,)`.
    :param num_basis: Functions per dimension, for the default kernel with all products of them: where a batch holds
        lengthscales so different that no box suits all, it suits the short ones.
    """
    num_dims = len(lower)
    if num_dims > MAX_FULL_DIMS:
        return choose_domain(kernel, lower, upper, CROSS_BOX_TOLERANCE * num_dims)
    domain = choose_domain(kernel, lower, upper, BOX_TOLERANCE)
    if num_basis is None or kernel.lengthscale.shape[:-1].numel() == 1:
        return domain
    shortest = kernel.lengthscale.detach().reshape(-1, num_dims).amin(0)
    return suit_short_lengthscales(
        domain, shortest, (upper - lower) / 2, num_basis, _missing(num_dims), room=MAX_GROWTH
    )


@torch.no_grad()
def _represented(kernel: HilbertKernel, single: Kernel, domain: Domain, x: Tensor) -> float:
    """
    The fraction of the prior variance of one outcome that as many functions represent in a box.

    :param kernel: That of all outcomes.
    :param single: The one of this outcome, with variance one.
    :param domain: The box.
    :param x: Inputs `(n, D)`.
    """
    own = HilbertKernel(single, domain, kernel.num_basis, index_set=kernel.index_set, accepted_missing=CROSS_ACCEPTED)
    return float(own.eval()(x, diag=True).mean())


def _missing(num_dims: int) -> float:
    """What may be missing in each input at either end of the lengthscales' interval."""
    return MISSING / num_dims if num_dims <= MAX_FULL_DIMS else 2 * MISSING


def _choose_functions(num_dims: int, num_functions: int) -> tuple[int, IndexSet]:
    """Functions per dimension, and which of their products are kept."""
    if num_dims <= MAX_FULL_DIMS:
        return max(int(num_functions ** (1 / num_dims) + 1e-9), 1), FullTensor()
    limit = 1
    while HyperbolicCross(limit + 1).size([limit + 1] * num_dims) <= num_functions:
        limit += 1
    return limit, HyperbolicCross(limit)


register_custom_fit(HilbertGPModel)
