"""A model for many inputs and any number of observations: low-rank CP weights, sampled."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from botorch.acquisition.objective import PosteriorTransform
from botorch.exceptions.errors import UnsupportedError
from botorch.models.gpytorch import GPyTorchModel
from botorch.models.model import FantasizeMixin
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform, Standardize
from botorch.models.utils.gpytorch_modules import (
    get_covar_module_with_dim_scaled_prior,
    get_gaussian_likelihood_with_lognormal_prior,
)
from botorch.optim.fit import fit_gpytorch_mll_scipy, fit_gpytorch_mll_torch
from botorch.utils.types import DEFAULT, _DefaultType
from gpytorch.constraints import GreaterThan
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel, RBFKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from gpytorch.mlls import MarginalLogLikelihood
from gpytorch.models import GP
from gpytorch.priors import LogNormalPrior
from linear_operator import to_linear_operator
from linear_operator.operators import DiagLinearOperator, LowRankRootLinearOperator
from torch import Tensor, nn

from ..errors import ConvergenceWarning, InputError, NotFittedError
from ..features.box import choose_box
from ..features.separable import num_basis_needed
from ..hilbert.weights import WeightPosterior
from ..inference.als import fit_als
from ..inference.few_rows import sample_few_rows
from ..inference.gibbs import MAX_NUM_BASIS, TAIL, fit_gibbs
from ..model.rollback import rollback_on_error
from ..model.tkrr import TKRR
from .box import input_range, join_range
from .dispatch import register_custom_fit
from .outcomes import choose_outcomes, join_outcomes
from .pilot import fit_pilot

#: Variance added to every prediction, in units of the outcomes' variance: draws span a space of few dimensions.
JITTER = 1e-6

#: Up to so many observations the chains of a fit move side by side.
FEW_ROWS = 150

#: How many components there are then. With more components than observations a chain fits them from its first sweep on.
FEW_ROWS_RANK = 128

#: The same for many: what :func:`~gpytorch_tkrr.fit_gibbs` is called with.
MANY_ROWS_RANK = 16
MANY_ROWS_SETTINGS = {"num_chains": 1, "num_warmup": 20, "num_draws": 20}

#: Correlation that may be left between the edge of the search space and its image beyond the box: for few observations
#: the box only has to suit the lengthscales as they are.
FEW_ROWS_IMAGE = 0.025
MANY_ROWS_IMAGE = 0.001

#: BoTorch's lower bound of lengthscales on the unit cube.
MIN_LENGTHSCALE = 0.025


class TKRRModel(GPyTorchModel, GP, FantasizeMixin):
    r"""
    :class:`~gpytorch_tkrr.TKRR` as a BoTorch model: any number of inputs, a cost linear in the number of observations,
    and the uncertainty of sampled factors, with many observations also of the hyperparameters.

    The default kernel is that of SingleTaskGP. `fit_gpytorch_mll` first fits an exact Gaussian process with the same
    kernel, mean and likelihood to at most 500 rows and makes the box for its lengthscales. Then it samples: up to 150
    observations by chains that move side by side at these hyperparameters (:mod:`gpytorch_tkrr.inference.few_rows`),
    for more by :func:`~gpytorch_tkrr.fit_gibbs`, which goes on to learn them. Pass ``optimizer=tkrr.fit_gibbs`` or
    ``tkrr.fit_als`` to choose yourself, and their arguments as `optimizer_kwargs`. Several outcomes are independent
    models.

    A posterior is the Gaussian with the mean and the covariance of the draws,

    .. math:: f(x) = \bar f(x) + r(x)^\top z, \qquad z \sim N(0, I_S), \qquad
        r_s(x) = (f_s(x) - \bar f(x)) / \sqrt{S - 1},

    and conditioning on further observations is the exact Gaussian update of z, for fantasies in any number of batches.

    :param train_X: Inputs `(n, d)`.
    :param train_Y: Outcomes `(n, m)`.
    :param train_Yvar: Their noise variances, where known.
    :param kernel: A separable kernel, or one for each outcome; by default BoTorch's RBF kernel with its
        dimension-scaled prior, in units of the search space.
    :param rank: Number of components; by default 128 for up to 150 observations, 16 for more.
    :param num_basis: Number of sines, for all inputs or for each; by default as many as the lengthscales need.
    :param bounds: The search space, `(2, d)`, as for `optimize_acqf`; by default the unit cube.
    :param outcome_transform: As for SingleTaskGP: Standardize by default.
    :param input_transform: Applied to the inputs; its own parameters are not trained.

    Example:
        >>> import torch
        >>> from botorch.fit import fit_gpytorch_mll
        >>> from gpytorch.mlls import ExactMarginalLogLikelihood
        >>> from gpytorch_tkrr.botorch import TKRRModel
        >>> train_X = torch.rand(30, 8, dtype=torch.float64)
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
        *,
        kernel: Kernel | Sequence[Kernel] | None = None,
        rank: int | None = None,
        num_basis: int | Sequence[int] | None = None,
        bounds: Tensor | None = None,
        outcome_transform: OutcomeTransform | _DefaultType | None = DEFAULT,
        input_transform: InputTransform | None = None,
    ):
        super().__init__()
        self._validate_tensor_args(X=train_X, Y=train_Y, Yvar=train_Yvar)
        if train_X.dim() != 2:
            raise InputError(
                f"TKRRModel takes inputs (n, d) and outcomes (n, m); got {tuple(train_X.shape)} and "
                f"{tuple(train_Y.shape)}. Make one model per batch."
            )
        num_outputs = train_Y.shape[-1]
        with torch.no_grad():
            x = self.transform_inputs(train_X, input_transform)
        if outcome_transform is not None:
            is_default = isinstance(outcome_transform, _DefaultType)
            transform = Standardize(m=num_outputs) if is_default else cast(OutcomeTransform, outcome_transform)
            train_Y, train_Yvar = transform.train()(Y=train_Y, Yvar=train_Yvar, X=x)
            self.outcome_transform = transform
        if input_transform is not None:
            self.input_transform = input_transform
        self._num_outputs = num_outputs
        self._yvar = train_Yvar
        self.train_inputs = (train_X,)
        self.train_targets = train_Y.squeeze(-1) if num_outputs == 1 else train_Y.mT
        self._range = input_range(x, bounds, input_transform)
        if kernel is None:
            kernel = _make_kernel(*self._range)
        kernels = list(kernel) if isinstance(kernel, Sequence) else [copy.deepcopy(kernel) for _ in range(num_outputs)]
        if len(kernels) != num_outputs:
            raise InputError(f"Give one kernel, or one for each of the {num_outputs} outcomes; got {len(kernels)}.")
        self._has_default_rank = rank is None
        if rank is None:
            rank = _default_rank(len(x))
        self.models = nn.ModuleList()
        for i, each in enumerate(kernels):
            likelihood = _make_likelihood(None if train_Yvar is None else train_Yvar[:, i])
            domain = choose_box(each, *self._range, MANY_ROWS_IMAGE, room=0.0)
            model = TKRR(x, train_Y[:, i], likelihood, kernel=each, rank=rank, num_basis=num_basis, domain=domain)
            self.models.append(model)
        self.likelihood = self.models[0].likelihood if num_outputs == 1 else GaussianLikelihood(
            noise_constraint=GreaterThan(0.0), batch_shape=torch.Size([num_outputs])
        )  # fmt: skip
        self._updates: list[WeightPosterior | None] = [None] * num_outputs
        self.to(train_X)
        self._share_noise()

    @property
    def batch_shape(self) -> torch.Size:
        """Of fantasies; empty for a model that has not been conditioned."""
        shapes = [update.mean.shape[:-1] for update in self._updates if update is not None]
        return torch.broadcast_shapes(*shapes) if shapes else torch.Size()

    def model(self, i: int) -> TKRR:
        """
        The model of one outcome.

        :param i: Which outcome.
        """
        return cast(TKRR, self.models[i])

    def _share_noise(self) -> None:
        if self.num_outputs > 1:
            noise = torch.stack(
                [model.likelihood.noise.detach().reshape(1) for model in map(self.model, range(self.num_outputs))]
            )
            self.likelihood.initialize(noise=noise)

    # Fit

    def custom_fit(
        self,
        mll: MarginalLogLikelihood,
        *,
        optimizer: Callable[..., Any] | None = None,
        optimizer_kwargs: dict[str, Any] | None = None,
        closure: Any = None,
        closure_kwargs: Any = None,
        **ignore: Any,
    ) -> MarginalLogLikelihood:
        """
        What `fit_gpytorch_mll` calls.

        :param mll: The marginal log likelihood that holds this model.
        :param optimizer: :func:`~gpytorch_tkrr.fit_gibbs` or :func:`~gpytorch_tkrr.fit_als`; by default chains side by
            side for few observations, and `fit_gibbs` for many or where there are `optimizer_kwargs`.
        :param optimizer_kwargs: Their arguments. Without a `seed`, one is drawn from torch's generator. `options` are
            those of SciPy's L-BFGS-B, for the exact Gaussian process.
        :param closure: Not supported: there is no loss whose gradient is followed.
        :param closure_kwargs: Not supported.
        """
        if closure is not None or closure_kwargs is not None:
            raise UnsupportedError("TKRRModel is fitted by optimizer=fit_gibbs or fit_als, which take no closure.")
        settings = dict(optimizer_kwargs or {})
        seed, options = settings.pop("seed", None), settings.pop("options", None)
        _check_fit(optimizer, settings)
        num_rows = self.train_targets.shape[-1]
        is_few = optimizer is None and not settings and num_rows <= FEW_ROWS
        is_short = optimizer in (None, fit_gibbs) and not settings
        if is_short:
            settings = dict(MANY_ROWS_SETTINGS)
        with rollback_on_error(self):
            mll.train()
            with torch.no_grad():
                x = self.transform_inputs(self.train_inputs[0])
            self._range = join_range(self._range, x)
            for i, y in enumerate(self.train_targets.reshape(self.num_outputs, -1)):
                model, yvar = self.model(i), None if self._yvar is None else self._yvar[:, i]
                chosen = int(torch.randint(2**31, ())) if seed is None else seed
                if settings.get("num_warmup") != 0 or not model.is_fitted:  # else the draws are to be continued
                    model.resize(rank=_default_rank(num_rows) if self._has_default_rank else None)
                    self._fit_pilot(model, x, y, yvar, FEW_ROWS_IMAGE if is_few else MANY_ROWS_IMAGE, options)
                if is_few:
                    sample_few_rows(model, x, y, model.noise() if yvar is None else yvar, self._range, seed=chosen)
                    continue
                data = (x, y) if yvar is None else (x, y, model.noise().detach().to(x) / yvar)
                with warnings.catch_warnings():
                    if is_short:  # such a chain is meant to disagree with itself
                        warnings.simplefilter("ignore", ConvergenceWarning)
                    (optimizer or fit_gibbs)(model, data=data, **settings, seed=chosen)
            self._updates = [None] * self.num_outputs
            self._share_noise()
            return mll.eval()

    def _fit_pilot(
        self, model: TKRR, x: Tensor, y: Tensor, yvar: Tensor | None, image: float, options: dict[str, Any] | None
    ) -> None:
        """Hyperparameters of an exact Gaussian process, and a box and a basis that suit them."""
        likelihood = model.likelihood if yvar is None else FixedNoiseGaussianLikelihood(yvar)
        kernel = model.covar_module
        assert kernel is not None
        fit_pilot(x, y, model.mean_module, kernel, likelihood, options)
        domain = choose_box(kernel, *self._range, image, room=0.0).to(x)
        num_basis = None
        if model.adapts_num_basis:
            most = [MAX_NUM_BASIS] * x.shape[-1]
            num_basis = [max(num, 2) for num in num_basis_needed(kernel, domain, most, TAIL)]
        model.resize(domain=domain, num_basis=num_basis)

    def set_train_data(self, inputs: Any = None, targets: Tensor | None = None, strict: bool = True) -> None:
        """
        Replace the data that the next fit sees.

        :param inputs: Inputs `(n, d)`.
        :param targets: Transformed outcomes, `(n,)` or `(m, n)`.
        :param strict: Whether the shapes must stay.
        """
        old = {"inputs": self.train_inputs[0], "targets": self.train_targets}
        given = {"inputs": inputs if inputs is None or isinstance(inputs, Tensor) else inputs[0], "targets": targets}
        new = {name: old[name] if value is None else value for name, value in given.items()}
        for name, value in new.items():
            if strict and value.shape != old[name].shape:
                raise RuntimeError(f"{name}: expected shape {tuple(old[name].shape)}, found {tuple(value.shape)}.")
        if len(new["inputs"]) != new["targets"].shape[-1]:
            raise InputError(f"{len(new['inputs'])} inputs cannot have {new['targets'].shape[-1]} targets.")
        if self._yvar is not None and len(new["inputs"]) != len(self._yvar):
            raise UnsupportedError("The noise variances, train_Yvar, belong to the old rows. Make a new model.")
        self.train_inputs, self.train_targets = (new["inputs"],), new["targets"]

    # Posterior

    def forward(self, x: Tensor) -> MultivariateNormal:
        """
        The prior of the first outcome.

        :param x: Inputs `(..., n, d)`.
        """
        return self.models[0].forward(self.transform_inputs(x) if self.training else x)

    def posterior(  # type: ignore[override]
        self,
        X: Tensor,
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: PosteriorTransform | None = None,
    ) -> Any:
        """
        The posterior at given inputs.

        :param X: Inputs `(*batch, q, d)`.
        :param output_indices: Which outcomes; all by default.
        :param observation_noise: Whether to add the noise variance, or the (transformed) variances to add,
            `(*batch, q, m)`.
        :param posterior_transform: Applied to the result.
        """
        self.eval()
        x = self.transform_inputs(X)
        chosen = choose_outcomes(output_indices, self.num_outputs)
        normals = [self._normal(i, x, observation_noise) for i in chosen]
        return join_outcomes(self, normals, chosen, x, posterior_transform)

    def _normal(self, i: int, x: Tensor, observation_noise: bool | Tensor) -> MultivariateNormal:
        """One outcome at transformed inputs."""
        model = self.model(i)
        mean, root = self.mean_and_root(i, x)
        update = self._updates[i]
        if update is not None:
            mean = mean + (root @ update.mean.unsqueeze(-1)).squeeze(-1)
            root = root @ update.root
        extra = torch.full_like(mean, JITTER * _scale(self.train_targets.reshape(self.num_outputs, -1)[i]) ** 2)
        missing = model._missing_variance(model.warped(x))
        extra = extra if missing is None else extra + missing
        if isinstance(observation_noise, Tensor):
            extra = extra + observation_noise[..., i].double()
        elif observation_noise:
            extra = extra + model.noise().detach()
        mean, extra = torch.broadcast_tensors(mean, extra)
        root = root.expand(*mean.shape, root.shape[-1]).to(x.dtype)
        low_rank = (
            to_linear_operator(root @ root.mT) if root.shape[-2] <= root.shape[-1] else LowRankRootLinearOperator(root)
        )
        return MultivariateNormal(mean.to(x.dtype), low_rank + DiagLinearOperator(extra.to(x.dtype)))

    def mean_and_root(self, i: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """
        Mean and covariance root of one outcome before any conditioning, on the scale of the transformed outcomes.

        :param i: Which outcome.
        :param x: Transformed inputs `(..., n, d)`.
        :return: `(..., n)` and `(..., n, S)`, float64.
        """
        model = self.model(i)
        if not model.is_fitted:
            raise NotFittedError(
                "The model has not been fitted. Call fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, "
                "model)) first."
            )
        mean, root = model.posterior.mean_and_root(model.warped(x))
        return model.mean_module(x).double() + mean, root

    def draw_weights(self, i: int, sample_shape: torch.Size) -> Tensor:
        r"""
        Draw z of whole functions :math:`\bar f(x) + r(x)^\top z`: one of the model's own draws where there are any,
        a Gaussian draw after conditioning or after alternating least squares.

        :param i: Which outcome.
        :param sample_shape: How many.
        :return: `(*sample_shape, *batch, S)`, float64.
        """
        update = self._updates[i]
        if update is None:
            return self.model(i).posterior.draw_weights(sample_shape)
        shape = torch.Size([*sample_shape, *update.mean.shape[:-1], update.root.shape[-1]])
        noise = torch.randn(shape, dtype=torch.float64, device=update.root.device)
        return update.mean + (update.root @ noise.unsqueeze(-1)).squeeze(-1)

    # Further observations

    def condition_on_observations(self, X: Tensor, Y: Tensor, noise: Tensor | None = None, **kwargs: Any) -> TKRRModel:
        """
        The model after further observations: a Gaussian update of its draws, hyperparameters unchanged.

        :param X: Inputs `(*batch, n', d)`.
        :param Y: Outcomes `(*fantasies, *batch, n', m)`.
        :param noise: Their noise variances, on the scale of the transformed outcomes; by default the model's.
        """
        self.eval()
        x = self.transform_inputs(X)
        if hasattr(self, "outcome_transform"):
            Y, _ = self.outcome_transform(Y=Y, X=x)
        return self._conditioned(x, Y, noise)

    def get_fantasy_model(
        self, inputs: Tensor, targets: Tensor, noise: Tensor | None = None, **kwargs: Any
    ) -> TKRRModel:
        """
        GPyTorch's name for conditioning, for transformed data of one outcome.

        :param inputs: Inputs `(*batch, n', d)`.
        :param targets: Targets `(*fantasies, *batch, n')`.
        :param noise: Their noise variances.
        """
        return self._conditioned(inputs, targets.unsqueeze(-1), None if noise is None else noise.unsqueeze(-1))

    def _conditioned(self, x: Tensor, y: Tensor, noise: Tensor | None) -> TKRRModel:
        fantasy = copy.copy(self)
        fantasy._updates = []
        for i in range(self.num_outputs):
            model = self.model(i)
            mean, root = self.mean_and_root(i, x)
            update = self._updates[i]
            if update is None:
                eye = torch.eye(root.shape[-1], dtype=root.dtype, device=root.device)
                update = WeightPosterior(torch.zeros_like(eye[0]), eye)
            variance = (model.noise().detach() if noise is None else noise[..., i].double()).expand(mean.shape)
            missing = model._missing_variance(model.warped(x))
            variance = variance if missing is None else variance + missing
            fantasy._updates.append(update.condition(root, y[..., i].double() - mean, variance))
        return fantasy

    def subset_output(self, idcs: list[int]) -> TKRRModel:
        """
        The model of some of the outcomes.

        :param idcs: Which ones.
        """
        subset = copy.deepcopy(self)
        subset.models = nn.ModuleList(subset.models[i] for i in idcs)
        subset._num_outputs = len(idcs)
        targets = subset.train_targets.reshape(self.num_outputs, -1)[idcs]
        subset.train_targets = targets[0] if len(idcs) == 1 else targets
        subset._yvar = None if self._yvar is None else self._yvar[:, idcs]
        subset._updates = [subset._updates[i] for i in idcs]
        if hasattr(subset, "outcome_transform"):
            transform: Any = subset.outcome_transform
            subset.outcome_transform = transform.subset_output(idcs=idcs)
        if len(idcs) == 1:
            subset.likelihood = subset.models[0].likelihood
        elif self.num_outputs > 1:
            subset.likelihood = GaussianLikelihood(
                noise_constraint=GreaterThan(0.0), batch_shape=torch.Size([len(idcs)])
            ).to(targets)
            subset._share_noise()
        return subset


def _default_rank(num_rows: int) -> int:
    return FEW_ROWS_RANK if num_rows <= FEW_ROWS else MANY_ROWS_RANK


def _check_fit(optimizer: Callable[..., Any] | None, settings: dict[str, Any]) -> None:
    """Refuse what BoTorch's own ways to fit take and ours do not."""
    if optimizer in (fit_gpytorch_mll_scipy, fit_gpytorch_mll_torch):
        raise UnsupportedError("TKRRModel is fitted by optimizer=fit_gibbs or fit_als, not by gradients.")
    if optimizer in (None, fit_gibbs, fit_als):
        function = optimizer or fit_gibbs
        unknown = set(settings) - set(inspect.signature(function).parameters)
        if unknown:
            raise UnsupportedError(f"{function.__name__} takes no {', '.join(sorted(unknown))}; see its documentation.")


def _make_kernel(lower: Tensor, upper: Tensor) -> RBFKernel:
    """BoTorch's default kernel, with lengthscales in units of the range: on the unit cube the same."""
    num_dims = len(lower)
    unit = torch.where(upper > lower, upper - lower, torch.ones_like(lower))
    prior = get_covar_module_with_dim_scaled_prior(ard_num_dims=num_dims).lengthscale_prior
    loc = prior.loc.to(unit) + unit.log()
    scaled = LogNormalPrior(loc, prior.scale.to(unit).expand_as(loc).clone())  # a buffer that can be written to
    limit = GreaterThan(MIN_LENGTHSCALE * unit, transform=None, initial_value=scaled.mode)
    return RBFKernel(ard_num_dims=num_dims, lengthscale_prior=scaled, lengthscale_constraint=limit)


def _make_likelihood(yvar: Tensor | None) -> GaussianLikelihood:
    """A free noise variance with BoTorch's prior, or the mean of the known ones."""
    if yvar is None:
        return get_gaussian_likelihood_with_lognormal_prior()
    likelihood = GaussianLikelihood(noise_constraint=GreaterThan(0.0))
    likelihood.noise = yvar.mean()
    likelihood.raw_noise.requires_grad_(False)
    return likelihood


def _scale(y: Tensor) -> float:
    return float(y.std(unbiased=False)) or 1.0


register_custom_fit(TKRRModel)
