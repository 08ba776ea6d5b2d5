"""What stands in the place of a SingleTaskGP."""

from __future__ import annotations

import copy
import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from botorch.acquisition.objective import PosteriorTransform
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.transforms.input import InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.models.utils import add_output_dim, gpt_posterior_settings
from botorch.posteriors import GPyTorchPosterior
from botorch.utils.datasets import SupervisedDataset
from botorch.utils.types import _DefaultType
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.means import Mean
from gpytorch.mlls import MarginalLogLikelihood
from torch import Tensor

from ..errors import InputError
from .box import input_range
from .columns import read_columns
from .kernels import TaskMean, default_kernel, task_likelihood
from .outcomes import module_of_outcomes
from .units import fit_in_units


class DropInGP(SingleTaskGP):
    """
    A :class:`~botorch.models.SingleTaskGP` with a fit of its own, which may call BoTorch's, columns of other kinds, and
    a posterior that can be asked for any of its outcomes.

    With a column of tasks it is a :class:`~botorch.models.MultiTaskGP`: a posterior at inputs with that column is one
    of the tasks named there; at inputs without it, one of all `output_tasks`.

    :param train_X: Inputs `(*batch, n, d)`.
    :param train_Y: Outcomes `(*batch, n, m)`.
    :param train_Yvar: Their noise variances, where known.
    :param likelihood: As for SingleTaskGP.
    :param covar_module: As for SingleTaskGP.
    :param mean_module: As for SingleTaskGP.
    :param outcome_transform: As for SingleTaskGP.
    :param input_transform: As for SingleTaskGP.
    :param cat_dims: Columns of categories.
    :param data_fidelities: Columns of fidelities.
    :param task_feature: The column of tasks.
    :param output_tasks: Tasks of a posterior at inputs without that column.
    :param bounds: The search space, `(2, d)`.
    """

    def __init__(
        self,
        train_X: Tensor,
        train_Y: Tensor,
        train_Yvar: Tensor | None,
        likelihood: Likelihood | None,
        covar_module: Kernel | None,
        mean_module: Mean | None,
        outcome_transform: OutcomeTransform | _DefaultType | None,
        input_transform: InputTransform | None,
        *,
        cat_dims: Sequence[int] | None,
        data_fidelities: Sequence[int] | None,
        task_feature: int | None,
        output_tasks: Sequence[int] | None,
        bounds: Tensor | None,
    ):
        with torch.no_grad():
            x = self.transform_inputs(train_X, input_transform)
        columns = read_columns(x, cat_dims, data_fidelities, task_feature, output_tasks)
        self._columns = columns
        ends = input_range(x, bounds, input_transform)
        if covar_module is None:
            _, batch_shape = self.get_batch_dimensions(train_X=train_X, train_Y=train_Y)
            covar_module = default_kernel(*ends, columns, batch_shape)
        if columns.task is not None:
            if train_Y.shape[-1] != 1:
                raise InputError(
                    f"With task_feature the outcomes are (n, 1); got {tuple(train_Y.shape)}. Make one model per "
                    "outcome and join them in a ModelListGP."
                )
            mean_module = TaskMean(columns) if mean_module is None else mean_module
            if likelihood is None and train_Yvar is None:
                likelihood = task_likelihood(columns)
        super().__init__(
            train_X=train_X,
            train_Y=train_Y,
            train_Yvar=train_Yvar,
            likelihood=likelihood,
            covar_module=covar_module,
            mean_module=mean_module,
            outcome_transform=outcome_transform,
            input_transform=input_transform,
        )
        self._output_tasks = list(range(columns.num_tasks)) if output_tasks is None else list(output_tasks)
        self._range = ends  # what a box must hold

    @classmethod
    def construct_inputs(
        cls,
        training_data: SupervisedDataset,
        *,
        categorical_features: list[int] | None = None,
        fidelity_features: list[int] | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """
        Arguments of the constructor, as Ax asks for them.

        :param training_data: The data.
        :param categorical_features: Columns of categories.
        :param fidelity_features: Columns of fidelities.
        :param options: Further arguments of the constructor.
        """
        unknown = set(options) - set(inspect.signature(cls).parameters)
        if unknown:
            raise TypeError(f"{cls.__name__} takes no {', '.join(sorted(unknown))}; see its documentation.")
        inputs: dict[str, Any] = {**super().construct_inputs(training_data=training_data), **options}
        if categorical_features:
            inputs["cat_dims"] = list(categorical_features)
        if fidelity_features:
            inputs["data_fidelities"] = list(fidelity_features)
        return inputs

    #: While BoTorch handles the outcomes of a model with tasks as what they are, one column.
    _is_one_column = False

    @property
    def num_outputs(self) -> int:
        """m; with tasks the number of `output_tasks`."""
        return self._num_outputs if self._columns.task is None or self._is_one_column else len(self._output_tasks)

    @contextmanager
    def _as_one_column(self) -> Iterator[None]:
        self._is_one_column = True
        try:
            yield
        finally:
            self._is_one_column = False

    def _extract_targets_and_noise(self) -> Any:
        with self._as_one_column():
            return super()._extract_targets_and_noise()

    def _restore_targets_and_noise(self, *args: Any, **kwargs: Any) -> None:
        with self._as_one_column():
            super()._restore_targets_and_noise(*args, **kwargs)

    def _apply_noise(self, *args: Any, **kwargs: Any) -> Any:
        with self._as_one_column():
            return super()._apply_noise(*args, **kwargs)

    # Fit

    _is_fitted_as_botorch = False

    #: Whether the hyperparameters are those of an earlier fit, also with fewer observations.
    _is_warm = False

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """
        As for SingleTaskGP. The next fit starts from there, and takes less.

        :param args: See SingleTaskGP.
        :param kwargs: See SingleTaskGP.
        """
        result = super().load_state_dict(*args, **kwargs)
        self._is_warm = True
        return result

    @property
    def custom_fit(self) -> Callable[..., MarginalLogLikelihood]:
        """What `fit_gpytorch_mll` calls; BoTorch's own way to fit is taken where it is missing."""
        if self._is_fitted_as_botorch:
            raise AttributeError("custom_fit: this is a fit by BoTorch's own way.")
        return self._fit

    @abstractmethod
    def _fit(self, mll: MarginalLogLikelihood, **kwargs: Any) -> MarginalLogLikelihood: ...

    def _fit_as_botorch(self, mll: MarginalLogLikelihood, **kwargs: Any) -> MarginalLogLikelihood:
        """
        The fit of a SingleTaskGP; one that starts warm is in units of its hyperparameters, for then these are known.

        :param mll: The marginal log likelihood that holds this model.
        :param kwargs: As for `fit_gpytorch_mll`.
        """
        has_own_way = any(kwargs.get(name) is not None for name in ("optimizer", "closure", "closure_kwargs"))
        if self._is_warm and self._aug_batch_shape.numel() <= 1 and not has_own_way:
            kwargs["optimizer"] = fit_in_units
        self._is_fitted_as_botorch = True
        try:
            return fit_gpytorch_mll(mll, **kwargs)
        finally:
            self._is_fitted_as_botorch = False

    # Outcomes

    def posterior(  # type: ignore[override]
        self,
        X: Tensor,
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: PosteriorTransform | None = None,
    ) -> Any:
        """
        The posterior at given inputs.

        :param X: Inputs `(*batch, q, d)`; with tasks also without their column.
        :param output_indices: Which outcomes, also counted from the end, or which tasks; all by default.
        :param observation_noise: Whether to add the noise variance, or the (transformed) variances to add,
            `(*batch, q, m)`.
        :param posterior_transform: Applied to the result.
        """
        if self._columns.task is not None and X.shape[-1] < self._columns.num_dims:
            return self._posterior_of_tasks(X, output_indices, observation_noise, posterior_transform)
        if output_indices is None or self._num_outputs == 1:
            return super().posterior(X, None, observation_noise, posterior_transform)
        self.eval()
        x = self.transform_inputs(X)
        chosen = [range(self._num_outputs)[i] for i in output_indices]
        with gpt_posterior_settings():
            batch, dim = add_output_dim(X=x, original_batch_shape=self._input_batch_shape)
            normal = self._apply_noise(X=batch, mvn=self(batch), observation_noise=observation_noise)
            mean, covariance = normal.mean, normal.lazy_covariance_matrix
            normals = [MultivariateNormal(mean.select(dim, i), covariance[(slice(None),) * dim + (i,)]) for i in chosen]
        joint = normals[0] if len(normals) == 1 else MultitaskMultivariateNormal.from_independent_mvns(normals)
        posterior: Any = GPyTorchPosterior(distribution=joint)
        if hasattr(self, "outcome_transform"):
            transform: Any = self.outcome_transform
            if chosen != list(range(self._num_outputs)):
                transform = transform.subset_output(chosen)
            posterior = transform.untransform_posterior(posterior, X=x)
        return posterior if posterior_transform is None else posterior_transform(posterior=posterior, X=x)

    def _posterior_of_tasks(
        self,
        X: Tensor,
        tasks: list[int] | None,
        observation_noise: bool | Tensor,
        posterior_transform: PosteriorTransform | None,
    ) -> Any:
        """The joint posterior of several tasks at inputs without their column, one outcome for each."""
        tasks = self._output_tasks if tasks is None else tasks
        if isinstance(observation_noise, Tensor):  # (*batch, q, T')
            observation_noise = observation_noise.mT.reshape(*observation_noise.shape[:-2], -1, 1)
        self.eval()
        x = self.transform_inputs(self._columns.with_tasks(X, tasks))  # (*batch, T' q, d)
        with gpt_posterior_settings():
            normal = self._apply_noise(X=x, mvn=self(x), observation_noise=observation_noise)
        if len(tasks) > 1:
            mean = normal.mean.unflatten(-1, (len(tasks), -1)).mT  # (*batch, q, T')
            normal = MultitaskMultivariateNormal(mean, normal.lazy_covariance_matrix, interleaved=False)
        posterior: Any = GPyTorchPosterior(distribution=normal)
        if hasattr(self, "outcome_transform"):
            transform: Any = self.outcome_transform
            posterior = transform.untransform_posterior(posterior, X=X)
        return posterior if posterior_transform is None else posterior_transform(posterior=posterior, X=X)

    def condition_on_observations(self, X: Tensor, Y: Tensor, **kwargs: Any) -> Any:  # type: ignore[override]
        """
        The model after further observations; hyperparameters stay.

        :param X: Inputs `(*batch, n', d)`; with one output task also without its column.
        :param Y: Outcomes `(*fantasies, *batch, n', m)`.
        :param kwargs: As for SingleTaskGP.
        """
        return super().condition_on_observations(self._with_task(X), Y, **kwargs)

    def _with_task(self, X: Tensor) -> Tensor:
        """Inputs with the column of tasks."""
        if self._columns.task is None or X.shape[-1] == self._columns.num_dims:
            return X
        if len(self._output_tasks) > 1:
            raise InputError(
                f"New observations need the column of their tasks: inputs (..., {self._columns.num_dims}); got "
                f"{tuple(X.shape)}. It may be left out where output_tasks names one task."
            )
        return self._columns.with_tasks(X, self._output_tasks)

    def subset_output(self, idcs: list[int]) -> Any:
        """
        The model of some of the outcomes, for any kernel.

        :param idcs: Numbers of the outcomes to keep.
        """
        subset: Any = copy.deepcopy(self)
        if self._columns.task is not None:
            subset._output_tasks = [self._output_tasks[i] for i in idcs]
            return subset
        if self.num_outputs == 1 or idcs == list(range(self.num_outputs)):
            return subset
        chosen: int | list[int] = idcs if len(idcs) > 1 else idcs[0]
        subset._num_outputs = len(idcs)
        subset._aug_batch_shape = self._aug_batch_shape[:-1] + torch.Size([len(idcs)] if len(idcs) > 1 else [])
        subset.train_inputs = tuple(x[..., chosen, :, :] for x in subset.train_inputs)
        subset.train_targets = subset.train_targets[..., chosen, :]
        subset.prediction_strategy = None
        for name in ("mean_module", "covar_module", "likelihood"):
            setattr(subset, name, module_of_outcomes(getattr(self, name), chosen, self._aug_batch_shape))
        if hasattr(subset, "outcome_transform"):
            subset.outcome_transform = subset.outcome_transform.subset_output(idcs=idcs)
        return subset
