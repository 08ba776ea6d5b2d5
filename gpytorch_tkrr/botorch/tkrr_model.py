"""A model for many inputs and any number of observations: low-rank CP weights, sampled."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from botorch.exceptions.errors import UnsupportedError
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.optim.fit import fit_gpytorch_mll_scipy, fit_gpytorch_mll_torch
from botorch.utils.types import DEFAULT, _DefaultType
from gpytorch import settings
from gpytorch.constraints import GreaterThan
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import (
    FixedNoiseGaussianLikelihood,
    GaussianLikelihood,
    HadamardGaussianLikelihood,
    Likelihood,
    StudentTLikelihood,
)
from gpytorch.means import Mean
from gpytorch.mlls import MarginalLogLikelihood
from linear_operator import to_linear_operator
from linear_operator.operators import DiagLinearOperator, LowRankRootLinearOperator
from torch import Tensor, nn

from ..chains.problem import MAX_NUM_BASIS, TAIL
from ..errors import ConvergenceWarning, InputError
from ..features.box import choose_box
from ..features.separable import num_basis_needed
from ..inference.als import fit_als
from ..inference.gibbs import fit_gibbs
from ..model.rollback import rollback_on_error
from ..model.tkrr import TKRR
from .box import join_range
from .dispatch import register_custom_fit
from .drop_in import DropInGP
from .outcomes import module_of_outcomes, read_outcome, write_outcomes
from .pilot import NUM_ROWS, fit_pilot
from .robust import OutlierLikelihood
from .sampled import SampledOutcome

#: R where nothing else is said, and what :func:`~gpytorch_tkrr.fit_gibbs` is called with.
RANK = 16
SETTINGS = {"num_chains": 1, "num_warmup": 20, "num_draws": 20}

#: Correlation that may be left between the edge of the search space and its image beyond the box.
IMAGE = 0.001

#: Where the sampled outcomes stand in a state_dict.
PREFIX = "outcomes."


class TKRRModel(DropInGP):
    r"""
    A :class:`~botorch.models.SingleTaskGP` that becomes, from 501 observations on, a :class:`~gpytorch_tkrr.TKRR`: any
    number of inputs, a cost linear in the number of observations, and the uncertainty of sampled factors, noise and
    hyperparameters.

    Up to 500 observations the exact process is the faster one, and the model is a SingleTaskGP in all it does: it is
    what a CP model of the same kernel tends to as its rank grows. With more observations, or where `rank`, `num_basis`
    or a StudentTLikelihood is given, `fit_gpytorch_mll` fits an exact process with the same modules to at most 500
    rows, makes the box for its lengthscales, and goes on from there by :func:`~gpytorch_tkrr.fit_gibbs`. Pass
    ``optimizer=tkrr.fit_gibbs`` or ``tkrr.fit_als`` to choose yourself, and their arguments as `optimizer_kwargs`.
    Several outcomes are independent.

    A posterior is the Gaussian with the mean and the covariance of the draws, and conditioning on further observations
    its exact update (:mod:`gpytorch_tkrr.botorch.sampled`). A
    :class:`TKRREnsemble` gives the draws one by one.

    :param train_X: Inputs `(n, d)`; while the model is exact also `(*batch, n, d)`.
    :param train_Y: Outcomes `(n, m)`.
    :param train_Yvar: Their noise variances, where known.
    :param likelihood: As for SingleTaskGP, or a StudentTLikelihood for outcomes with outliers.
    :param covar_module: A separable kernel; by default BoTorch's RBF kernel with its dimension-scaled prior, in units
        of the search space.
    :param mean_module: As for SingleTaskGP.
    :param outcome_transform: As for SingleTaskGP: Standardize by default.
    :param input_transform: Applied to the inputs.
    :param cat_dims: Columns that are categories, numbered 0, 1, ...; for the default kernel, as the next two.
    :param data_fidelities: Columns that are fidelities, 1 for the thing itself.
    :param task_feature: The column that holds the tasks, numbered 0, 1, ...; then the model stands in the place of a
        :class:`~botorch.models.MultiTaskGP`.
    :param output_tasks: Tasks of a posterior at inputs without that column; all by default.
    :param bounds: The search space, `(2, d)`, as for `optimize_acqf`; by default the unit cube.
    :param rank: Number of components; by default 16.
    :param num_basis: Number of sines, for all inputs or for each; by default as many as the lengthscales need.

    Example:
        >>> import torch
        >>> from botorch.fit import fit_gpytorch_mll
        >>> from gpytorch.mlls import ExactMarginalLogLikelihood
        >>> from gpytorch_tkrr.botorch import TKRRModel
        >>> train_X = torch.rand(600, 8, dtype=torch.float64)
        >>> train_Y = torch.sin(6 * train_X[:, :1]) + train_X[:, 1:2]
        >>> model = TKRRModel(train_X, train_Y, rank=4, num_basis=8)
        >>> mll = fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        >>> model.posterior(torch.rand(5, 2, 8, dtype=torch.float64)).mean.shape
        torch.Size([5, 2, 1])
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
        rank: int | None = None,
        num_basis: int | Sequence[int] | None = None,
    ):
        is_robust = isinstance(likelihood, StudentTLikelihood)
        super().__init__(
            train_X, train_Y, train_Yvar, None if is_robust else likelihood, covar_module, mean_module,
            outcome_transform, input_transform,
            cat_dims=cat_dims, data_fidelities=data_fidelities, task_feature=task_feature, output_tasks=output_tasks,
            bounds=bounds,
        )  # fmt: skip
        self._robust_likelihood = likelihood if is_robust else None
        self._has_default_mean = mean_module is None and task_feature is None
        self._rank, self._num_basis = rank, num_basis
        self.outcomes = nn.ModuleList()
        self.to(train_X)
        if rank is not None or num_basis is not None or is_robust:
            self._sample_outcomes()
        else:
            self._sample_if_many()

    @property
    def is_exact(self) -> bool:
        """Whether the model is a SingleTaskGP still."""
        return len(self.outcomes) == 0

    def outcome(self, i: int) -> SampledOutcome:
        """
        The sampled posterior of one outcome.

        :param i: Which outcome.
        """
        return cast(SampledOutcome, self.outcomes[i])

    @property
    def batch_shape(self) -> torch.Size:
        """Of training data while the model is exact, of fantasies when it is sampled."""
        if self.is_exact:
            return super().batch_shape
        return torch.broadcast_shapes(*(self.outcome(i).batch_shape for i in range(self._num_outputs)))

    def _sample_if_many(self) -> None:
        if self.is_exact and self.train_inputs[0].shape[-2] > NUM_ROWS:
            self._sample_outcomes()

    def _rows(self) -> tuple[Tensor, Tensor]:
        """Transformed inputs `(n, d)` and outcomes `(m, n)`."""
        with torch.no_grad():
            x = self.transform_inputs(self.train_inputs[0]) if self.training else self.train_inputs[0]
        return (x[0] if self._num_outputs > 1 else x), self.train_targets.reshape(self._num_outputs, -1)

    def _noise_variances(self) -> Tensor | None:
        """Known ones, `(m, n)`, or None."""
        if not isinstance(self.likelihood, FixedNoiseGaussianLikelihood):
            return None
        return self.likelihood.noise.reshape(self._num_outputs, -1)

    def _sample_outcomes(self) -> None:
        """From an exact model to one CP model for each outcome."""
        if len(self._input_batch_shape) > 0:
            raise InputError(
                f"From {NUM_ROWS + 1} observations on TKRRModel takes inputs (n, d) and outcomes (n, m); got inputs of "
                f"shape {tuple(self.train_inputs[0].shape)}. Make one model per batch and join them in a ModelListGP."
            )
        x, targets = self._rows()
        noise = self._noise_variances()
        for i, y in enumerate(targets):
            kernel = module_of_outcomes(self.covar_module, i, self._aug_batch_shape)
            mean = None if self._has_default_mean else module_of_outcomes(self.mean_module, i, self._aug_batch_shape)
            model = TKRR(
                x, y, self._likelihood_of(i, noise), kernel=kernel, mean_module=mean, rank=self._rank or RANK,
                num_basis=self._num_basis, domain=choose_box(kernel, *self._range, IMAGE, room=0.0),
            )  # fmt: skip
            self.outcomes.append(SampledOutcome(model))
        self.to(self.train_inputs[0])

    def _likelihood_of(self, i: int, noise: Tensor | None) -> Likelihood:
        if self._robust_likelihood is not None:
            return copy.deepcopy(self._robust_likelihood)
        if noise is None:
            return module_of_outcomes(self.likelihood, i, self._aug_batch_shape)
        likelihood = GaussianLikelihood(noise_constraint=GreaterThan(0.0))
        likelihood.noise = noise[i].mean()
        likelihood.raw_noise.requires_grad_(False)
        return likelihood

    # Fit

    def _fit(
        self,
        mll: MarginalLogLikelihood,
        *,
        optimizer: Callable[..., Any] | None = None,
        optimizer_kwargs: dict[str, Any] | None = None,
        closure: Any = None,
        closure_kwargs: Any = None,
        **kwargs: Any,
    ) -> MarginalLogLikelihood:
        """
        What `fit_gpytorch_mll` calls.

        :param mll: The marginal log likelihood that holds this model.
        :param optimizer: :func:`~gpytorch_tkrr.fit_gibbs` (the default where the model is sampled) or
            :func:`~gpytorch_tkrr.fit_als`; while the model is exact also BoTorch's.
        :param optimizer_kwargs: Their arguments. Without a `seed`, one is drawn from torch's generator. `options` are
            those of SciPy's L-BFGS-B, for the exact Gaussian process.
        :param closure: For an exact model only: a sampled one follows no gradient.
        :param closure_kwargs: As `closure`.
        """
        if self.is_exact and optimizer not in (fit_gibbs, fit_als):
            return self._fit_as_botorch(
                mll, optimizer=optimizer, optimizer_kwargs=optimizer_kwargs, closure=closure,
                closure_kwargs=closure_kwargs, **kwargs,
            )  # fmt: skip
        if closure is not None or closure_kwargs is not None:
            raise UnsupportedError("TKRRModel is fitted by optimizer=fit_gibbs or fit_als, which take no closure.")
        arguments = dict(optimizer_kwargs or {})
        seed, options = arguments.pop("seed", None), arguments.pop("options", None)
        _check_fit(optimizer, arguments)
        is_short = optimizer in (None, fit_gibbs) and not arguments
        if is_short:
            arguments = dict(SETTINGS)
        with rollback_on_error(self):
            mll.train()
            if self.is_exact:
                self._sample_outcomes()
            x, targets = self._rows()
            self._range = join_range(self._range, x)
            goes_on = arguments.get("num_warmup") == 0  # draws are to be continued
            if not (goes_on and all(self.outcome(i).model.is_fitted for i in range(self._num_outputs))):
                self._fit_pilots(options)
            noise = self._noise_variances()
            for i, y in enumerate(targets):
                model = self.outcome(i).model
                data = (x, y) if noise is None else (x, y, model.noise().detach().to(x) / noise[i])
                chosen = int(torch.randint(2**31, ())) if seed is None else seed
                with warnings.catch_warnings():
                    if is_short:  # such a chain is meant to disagree with itself
                        warnings.simplefilter("ignore", ConvergenceWarning)
                    (optimizer or fit_gibbs)(model, data=data, **arguments, seed=chosen)
                self.outcome(i).update = None
            self._write_hyperparameters()
            return mll.eval()

    def _fit_pilots(self, options: dict[str, Any] | None) -> None:
        """Hyperparameters of exact Gaussian processes, or those of a loaded fit, and boxes and bases that suit them."""
        x, targets = self._rows()
        noise = self._noise_variances()
        for i, y in enumerate(targets):
            model = self.outcome(i).model
            kernel, mean = model.covar_module, model.mean_module
            assert kernel is not None
            read_outcome(kernel, self.covar_module, i)
            read_outcome(mean, self.mean_module, i)
            likelihood = model.likelihood
            if noise is not None:
                likelihood.noise = noise[i].mean()
                likelihood = FixedNoiseGaussianLikelihood(noise[i])
            elif self._robust_likelihood is not None:
                single = module_of_outcomes(self.likelihood, i, self._aug_batch_shape)
                likelihood = OutlierLikelihood(single, min(len(y), NUM_ROWS), float(y.var(unbiased=False)))
            else:
                read_outcome(likelihood, self.likelihood, i)
            if not (self._is_warm and model.is_fitted):
                fit_pilot(x, y, mean, kernel, likelihood, options)
                if self._robust_likelihood is not None:
                    model.likelihood.noise = likelihood.noise.detach().mean()
            domain = choose_box(kernel, *self._range, IMAGE, room=0.0).to(x)
            num_basis = None
            if model.adapts_num_basis:
                most = [MAX_NUM_BASIS] * x.shape[-1]
                num_basis = [max(num, 2) for num in num_basis_needed(kernel, domain, most, TAIL)]
            model.resize(domain=domain, num_basis=num_basis)
            model.set_train_data(x, y, strict=False)

    @torch.no_grad()
    def _write_hyperparameters(self) -> None:
        """Kernel, mean and likelihood of BoTorch's model follow those of the outcomes."""
        models = [self.outcome(i).model for i in range(self._num_outputs)]
        write_outcomes(self.covar_module, [cast(Kernel, model.covar_module) for model in models])
        write_outcomes(self.mean_module, [model.mean_module for model in models])
        if self._robust_likelihood is not None:
            noise = torch.stack([_noise_variance(cast(StudentTLikelihood, model.likelihood)) for model in models])
            self.likelihood.initialize(noise=noise.reshape_as(self.likelihood.noise))
        elif self._noise_variances() is None:
            write_outcomes(self.likelihood, [model.likelihood for model in models])

    def set_train_data(self, inputs: Any = None, targets: Tensor | None = None, strict: bool = True) -> None:
        """
        Replace the data that the next fit sees.

        :param inputs: Inputs, for several outcomes `(m, n, d)`.
        :param targets: Transformed outcomes, `(n,)` or `(m, n)`.
        :param strict: Whether the shapes must stay.
        """
        super().set_train_data(inputs, targets, strict)
        self._sample_if_many()

    def load_state_dict(  # type: ignore[override]
        self, state_dict: Mapping[str, Any], strict: bool = True, keep_transforms: bool = True, assign: bool = False
    ) -> Any:
        """
        As for SingleTaskGP. Between an exact and a sampled model the modules that both have are loaded, so that a model
        with more observations starts where one with fewer ended. After the state of a sampled model the next fit needs
        no exact Gaussian process.

        :param state_dict: A state.
        :param strict: Whether all other keys must match.
        :param keep_transforms: As for SingleTaskGP.
        :param assign: As for SingleTaskGP.
        """
        own = {key: value for key, value in self.state_dict().items() if key.startswith(PREFIX)}
        has_outcomes = any(key.startswith(PREFIX) for key in state_dict)
        if self.is_exact or not has_outcomes:
            state_dict = {key: value for key, value in state_dict.items() if not key.startswith(PREFIX)} | own
        return super().load_state_dict(state_dict, strict, keep_transforms, assign)

    # Posterior

    def __call__(self, *args: Any, **kwargs: Any) -> MultivariateNormal:
        """
        The prior in training mode, else the posterior.

        :param args: Inputs `(..., n, d)`; with several outcomes `(..., m, n, d)`.
        """
        if self.is_exact or self.training or settings.prior_mode.on():
            return super().__call__(*args, **kwargs)
        (x,) = args
        inputs = [x]
        if self._num_outputs > 1:
            inputs = list(x.expand(*x.shape[:-3], self._num_outputs, *x.shape[-2:]).unbind(-3))
        parts = [outcome.predict(at) for outcome, at in zip(self.all_outcomes(), inputs, strict=True)]
        if self._num_outputs == 1:
            ((mean, root, extra),) = parts
        else:
            means, roots, extras = zip(*parts, strict=True)
            mean, extra = (torch.stack(torch.broadcast_tensors(*each), -2) for each in (means, extras))
            root = torch.stack(torch.broadcast_tensors(*roots), -3)
        mean, extra = torch.broadcast_tensors(mean, extra)
        root = root.expand(*mean.shape, root.shape[-1]).to(x.dtype)
        low_rank = (
            to_linear_operator(root @ root.mT) if root.shape[-2] <= root.shape[-1] else LowRankRootLinearOperator(root)
        )
        return MultivariateNormal(mean.to(x.dtype), low_rank + DiagLinearOperator(extra.to(x.dtype)))

    def all_outcomes(self) -> list[SampledOutcome]:
        """The sampled posteriors; none while the model is exact."""
        return [cast(SampledOutcome, each) for each in self.outcomes]

    # Further observations

    def condition_on_observations(self, X: Tensor, Y: Tensor, noise: Tensor | None = None, **kwargs: Any) -> Any:
        """
        The model after further observations; hyperparameters stay.

        :param X: Inputs `(*batch, n', d)`.
        :param Y: Outcomes `(*fantasies, *batch, n', m)`.
        :param noise: Their noise variances, on the scale of the transformed outcomes; by default the model's.
        """
        if self.is_exact:
            kwargs = kwargs if noise is None else {**kwargs, "noise": noise}
            return super().condition_on_observations(X, Y, **kwargs)
        self.eval()
        x = self.transform_inputs(self._with_task(X))
        if hasattr(self, "outcome_transform"):
            Y, _ = self.outcome_transform(Y=Y, X=x)
        return self._conditioned(x, Y, noise)

    def get_fantasy_model(self, inputs: Any, targets: Tensor, **kwargs: Any) -> Any:
        """
        GPyTorch's name for conditioning, for transformed data of one outcome.

        :param inputs: Inputs `(*batch, n', d)`.
        :param targets: Targets `(*fantasies, *batch, n')`.
        """
        if self.is_exact:
            return super().get_fantasy_model(inputs, targets, **kwargs)
        x = inputs if isinstance(inputs, Tensor) else inputs[0]
        noise = kwargs.get("noise")
        return self._conditioned(x, targets.unsqueeze(-1), None if noise is None else noise.unsqueeze(-1))

    def _conditioned(self, x: Tensor, y: Tensor, noise: Tensor | None) -> TKRRModel:
        each = [
            outcome.conditioned(x, y[..., i], self._own_noise(x, i) if noise is None else noise[..., i])
            for i, outcome in enumerate(self.all_outcomes())
        ]
        fantasy = copy.copy(self)
        fantasy._modules = {**self._modules, "outcomes": nn.ModuleList(each)}
        return fantasy

    def _own_noise(self, x: Tensor, i: int) -> Tensor:
        """Noise variances of new observations, `()` or `(..., n')`; where rows had their own, the mean of those."""
        noise = self.likelihood.noise.detach()
        if isinstance(self.likelihood, HadamardGaussianLikelihood):
            return noise.reshape(-1)[x[..., self._columns.task].long()]
        return noise.reshape(self._num_outputs, -1)[i].mean()

    def subset_output(self, idcs: list[int]) -> Any:
        """
        The model of some of the outcomes, or of some of the tasks.

        :param idcs: Their numbers.
        """
        subset = super().subset_output(idcs)
        if not self.is_exact and self._columns.task is None:
            subset.outcomes = nn.ModuleList([copy.deepcopy(self.outcome(i)) for i in idcs])
        return subset


def _noise_variance(likelihood: StudentTLikelihood) -> Tensor:
    """The variance of Student noise, or its squared scale where it has none."""
    degrees = likelihood.deg_free.detach()
    factor = torch.where(degrees > 2, degrees / (degrees - 2), torch.ones_like(degrees))
    return (likelihood.noise.detach() * factor).reshape(())


def _check_fit(optimizer: Callable[..., Any] | None, arguments: dict[str, Any]) -> None:
    """Refuse what BoTorch's own ways to fit take and ours do not."""
    if optimizer in (fit_gpytorch_mll_scipy, fit_gpytorch_mll_torch):
        raise UnsupportedError("A sampled TKRRModel is fitted by optimizer=fit_gibbs or fit_als, not by gradients.")
    if optimizer in (None, fit_gibbs, fit_als):
        function = optimizer or fit_gibbs
        unknown = set(arguments) - set(inspect.signature(function).parameters)
        if unknown:
            raise UnsupportedError(f"{function.__name__} takes no {', '.join(sorted(unknown))}; see its documentation.")


register_custom_fit(TKRRModel)
