r"""Several outputs: the number of the output is one more mode of a CP-weight model."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.kernels import IndexKernel, Kernel, ProductKernel
from gpytorch.likelihoods import Likelihood
from linear_operator.operators import DiagLinearOperator
from torch import Tensor

from ..bases.domain import as_inputs, at_least_single
from ..data.long_table import LongTable
from ..data.parallel import ONE_PROCESS, Processes
from ..data.source import as_tensor, is_frame
from ..data.training import TrainingData
from ..errors import InputError
from .anova import output_kernel
from .likelihoods.base import Observation
from .likelihoods.registry import observe
from .likelihoods.tasks import TaskObservation
from .prediction import Prediction
from .tkrr import TKRR


class MultioutputTKRR(TKRR):
    r"""
    A :class:`~gpytorch_tkrr.TKRR` with T outputs,

    .. math:: f_t(x) = m_t + \sigma_t \sum_{r=1}^R b_{tr} \prod_{d=1}^D \phi_d(x_d)^\top a_{dr}, \qquad
        b_r \sim N(0, B),

    where :math:`m_t` and :math:`\sigma_t` are mean and standard deviation of the targets of output t, and the
    covariance B is that of an :class:`~gpytorch.kernels.IndexKernel`, learned with all else. Outputs share the
    functions of the inputs, and each has its own weights and its own noise. A target that is NaN was not observed.

    It is fitted by :func:`~gpytorch_tkrr.fit_gibbs`. Streams, files in parts and processes hold batches `(x, y)` with
    y of shape `(n, T)`. For a long table, with one target in each row and a column of tasks, use TKRR itself with a
    HadamardGaussianLikelihood and an IndexKernel or a :class:`~gpytorch_tkrr.CategoricalKernel` for that column.

    :param train_x: Training inputs `(N, D)`: a tensor, an array or a DataFrame; None for a model without data.
    :param train_y: Training targets `(N, T)`, NaN where not observed.
    :param likelihood: A MultitaskGaussianLikelihood of rank 0: its noise has one variance for each output.
    :param kernel: A separable kernel of the D inputs, for functions of unit variance; by default
        :func:`~gpytorch_tkrr.anova_kernel`. Without `active_dims` it gets those of the inputs.
    :param output_rank: The rank of what outputs have in common in B, beside a variance of their own.
    :param kwargs: As for TKRR.

    Example:
        >>> import torch, gpytorch, gpytorch_tkrr as tkrr
        >>> x = torch.rand(100, 2)
        >>> y = torch.stack([torch.sin(6 * x[:, 0]), 5 - 2 * torch.sin(6 * x[:, 0])], -1)
        >>> y[::2, 1] = float("nan")
        >>> likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=2)
        >>> model = tkrr.MultioutputTKRR(x, y, likelihood, rank=4)
        >>> result = tkrr.fit_gibbs(model, num_draws=20, num_warmup=30, seed=0)
        >>> likelihood(model.eval()(x)).mean.shape, model.predict(x).quantile(0.9).shape
        (torch.Size([100, 2]), torch.Size([100, 2]))
    """

    output_mean: Tensor
    output_scale: Tensor

    def __init__(
        self,
        train_x: Any,
        train_y: Any,
        likelihood: Likelihood,
        *,
        kernel: Kernel | None = None,
        output_rank: int = 1,
        **kwargs: Any,
    ):
        num_outputs = getattr(likelihood, "num_tasks", None)
        if not isinstance(observe(likelihood), TaskObservation) or num_outputs is None:
            raise InputError(
                f"Several outputs need a MultitaskGaussianLikelihood(num_tasks); got a {type(likelihood).__name__}."
            )
        self.__dict__["num_outputs"], self.__dict__["_output_rank"] = num_outputs, output_rank
        self.__dict__["_moments"] = None  # until there are buffers
        if kernel is not None:
            kernel = self._with_outputs(kernel, train_x, kwargs.get("domain"))
        super().__init__(train_x, train_y, likelihood, kernel=kernel, **kwargs)
        mean, scale = self._moments or (torch.full((num_outputs,), torch.nan), torch.ones(num_outputs))
        self.register_buffer("output_mean", mean.double())
        self.register_buffer("output_scale", scale.double())

    def _with_outputs(self, kernel: Kernel, train_x: Any, domain: Any) -> Kernel:
        """A kernel of the inputs times a covariance of the outputs."""
        num_dims = None if domain is None or domain.num_dims is None else domain.num_dims - 1
        if train_x is not None:
            num_dims = 1 if len(train_x.shape) == 1 else train_x.shape[-1]
        if num_dims is None:
            raise InputError(
                "A kernel of your own needs to know the number of inputs: give training data, or a Domain with one "
                "entry for each input and one more for the outputs."
            )
        if kernel.active_dims is None:
            kernel.active_dims = torch.arange(num_dims)
        dtype = next((parameter.dtype for parameter in kernel.parameters()), None)
        return ProductKernel(kernel, output_kernel(self.num_outputs, num_dims, rank=self._output_rank, dtype=dtype))

    # Data

    @property
    def observation(self) -> Observation:
        observation = observe(self.likelihood)
        assert isinstance(observation, TaskObservation)
        if "output_scale" in self._buffers:
            observation.scales = self.output_scale
        elif self._moments is not None:
            observation.scales = self._moments[1]
        return observation

    def _outputs(self, num_dims: int) -> IndexKernel:
        return output_kernel(self.num_outputs, num_dims - 1, rank=self._output_rank)

    def _known_num_dims(self) -> int | None:
        if self.domain is not None and self.domain.num_dims is not None:
            return self.domain.num_dims
        return None if self.train_inputs is None else self.train_inputs[0].shape[-1] + 1

    def _checked_rows(self, x: Any, y: Any) -> tuple[tuple[Tensor], Tensor]:
        x, y = (as_tensor(part) if isinstance(part, np.ndarray) or is_frame(part) else part for part in (x, y))
        as_inputs(x, allow_missing=self.missing is not None)
        x = x.unsqueeze(-1) if x.dim() == 1 else x
        x, y = at_least_single(x.detach()), at_least_single(y.detach())
        if x.dim() != 2 or y.shape != (len(x), self.num_outputs):
            raise InputError(
                f"Inputs must have shape (N, D) and targets (N, {self.num_outputs}), one column for each task of the "
                f"likelihood; got {tuple(x.shape)} and {tuple(y.shape)}."
            )
        if "output_mean" not in self._buffers and self._moments is None:
            self.__dict__["_moments"] = self._long_table((x, y)).moments()
        return (x,), y

    def _standardised(self, data: Any) -> LongTable:
        moments = (self.output_mean, self.output_scale) if "output_mean" in self._buffers else self._moments
        assert moments is not None
        return self._long_table(data, *moments)

    def _long_table(self, data: Any, *moments: Tensor) -> LongTable:
        return LongTable(data, self.num_outputs, *moments, allow_missing=self.missing is not None)

    def _source(self) -> LongTable:
        assert self.train_inputs is not None and self.train_targets is not None
        return self._standardised((self.train_inputs[0], self.train_targets))

    def training_data(self, data: Any = None, processes: Processes = ONE_PROCESS, *, memory: int = 0) -> TrainingData:
        """
        As that of :class:`TKRR`. The first data that the model sees also set mean and scale of each output.

        :param data: Batches `(x, y)` with y of shape `(n, T)`.
        :param processes: The processes that take part, each with rows of its own.
        :param memory: Bytes that may be used to keep the rows.
        """
        if data is None or isinstance(data, TrainingData):
            return super().training_data(data, processes, memory=memory)
        if bool(torch.isnan(self.output_mean).any()):
            mean, scale = self._long_table(data).moments(processes)
            self.output_mean, self.output_scale = mean.to(self.output_mean), scale.to(self.output_scale)
        return super().training_data(self._standardised(data), processes, memory=memory)

    def mode_inputs(self, x: Tensor) -> Tensor:
        return self._long(x).reshape(-1, x.shape[-1] + 1)

    def _long(self, x: Tensor) -> Tensor:
        """`(..., n, D)` -> `(..., n, T, D + 1)`: every input with every output."""
        x = x.unsqueeze(-2).expand(*x.shape[:-1], self.num_outputs, x.shape[-1])
        output = torch.arange(self.num_outputs, dtype=x.dtype, device=x.device).unsqueeze(-1)
        return torch.cat([x, output.expand(*x.shape[:-1], 1)], -1)

    def _inputs(self, x: Any) -> Tensor:
        """Inputs `(..., n, D)`, checked."""
        x = self.as_inputs(x)
        x = at_least_single(x.unsqueeze(-1) if x.dim() == 1 else x)
        if x.shape[-1] != self.num_dims - 1:
            raise InputError(f"Inputs must have {self.num_dims - 1} columns; got shape {tuple(x.shape)}.")
        return x

    # Calls

    def _in_units(self, x: Tensor, f: Tensor, rows: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        output = x[..., -1].long()
        scale = self.output_scale[output]
        if "spread" in rows:
            rows["spread"] = rows["spread"] * scale.square()
        return self.output_mean[output] + scale * f, rows

    def predict(self, x: Any, **rows: Tensor | float) -> Prediction:
        """
        As that of :class:`TKRR`, for all outputs: its mean and all else have the shape `(..., n, T)`.

        :param x: Inputs `(..., n, D)`.
        :param rows: Not used.
        """
        return super().predict(self._long(self._inputs(x)), **rows)

    def draws(self, x: Any) -> Tensor:
        """
        Whole functions drawn from the posterior, `(S, ..., n, T)`.

        :param x: Inputs `(..., n, D)`.
        """
        x = self._long(self._inputs(x))
        return self._in_units(x, super().draws(x).double(), {})[0].to(x.dtype)

    def _distinct_rows(self, x: Tensor) -> Tensor:
        return x[..., 0, :]

    def extrapolates(self, x: Any) -> Tensor:
        x = self.as_inputs(x)
        return super().extrapolates(x if x.shape[-1] == self.num_dims else self._long(self._inputs(x)))

    def __call__(self, x: Any, **kwargs: Any) -> MultitaskMultivariateNormal:
        x = self._inputs(x)
        rows = self._long(x).flatten(-3, -2)  # (..., n T, D + 1)
        plain = self.forward(rows) if self.training else super().__call__(rows, **kwargs)
        return self._as_multitask(plain, rows)

    def _as_multitask(self, plain: MultivariateNormal, rows: Tensor) -> MultitaskMultivariateNormal:
        output = rows[..., -1].long()
        scale, mean = self.output_scale[output].to(rows.dtype), self.output_mean[output].to(rows.dtype)
        diagonal = DiagLinearOperator(scale)
        covariance = diagonal @ plain.lazy_covariance_matrix @ diagonal
        shape = (*rows.shape[:-2], -1, self.num_outputs)
        return MultitaskMultivariateNormal((mean + scale * plain.mean).reshape(shape), covariance)
