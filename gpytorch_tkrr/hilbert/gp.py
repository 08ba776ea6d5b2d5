"""A Gaussian process that has read its data once and keeps sums over them only."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from gpytorch import settings
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ConstantMean, Mean, ZeroMean
from gpytorch.models import GP
from linear_operator.operators import ConstantDiagLinearOperator, LinearOperator
from torch import Tensor

from ..bases.covariance import Covariance
from ..data.parallel import as_processes
from ..data.source import as_source
from ..errors import InputError, NotFittedError, UnsupportedKernelError
from ..operators.operator import HilbertLinearOperator
from .feature_sums import FeatureSums, collect_sums, hilbert_part, low_rank_part
from .kernel import HilbertKernel
from .prediction import HilbertPredictionStrategy, by_functions


class HilbertGP(GP):
    r"""
    A Gaussian process with a :class:`~gpytorch_tkrr.HilbertKernel` for data of any size, read in batches.

    One pass collects :math:`\Phi^\top \Phi`, :math:`\Phi^\top y`, :math:`\Phi^\top 1`, :math:`y^\top y` and N. After
    it, training and prediction need no data, and give the same results as an :class:`~gpytorch.models.ExactGP` with the
    same kernel. Memory does not depend on N.

    Use it like an ExactGP: in train mode ``model(*model.train_inputs)`` is the prior at the data, and
    :class:`~gpytorch.mlls.ExactMarginalLogLikelihood` evaluates it at ``model.train_targets``; in eval mode
    ``model(x)`` is the posterior. The model does not keep the rows: `train_inputs` holds only those at the edges of the
    data, and `train_targets` is a placeholder.

    With a kernel from :meth:`~gpytorch_tkrr.HilbertKernel.from_tolerance` the data are read again, a few times in a
    training run, when the hyperparameters need another basis; the model keeps a reference to `data` for this. A copy or
    a loaded model has no data to read and keeps its basis.

    :param data: `(x, y)`, or an iterable of such batches, see `data` of :func:`~gpytorch_tkrr.fit_als`; None for a
        model that will be loaded from a `state_dict`. In `(x, y, weight)` the weight divides the noise variance of its
        row, together with the variance that the functions miss.
    :param likelihood: A GaussianLikelihood.
    :param kernel: A :class:`~gpytorch_tkrr.HilbertKernel`, or one inside a ScaleKernel; stored as `covar_module`. Its
        box must hold all inputs; :func:`~gpytorch_tkrr.summarise` tells their range.
    :param mean_module: A ConstantMean or ZeroMean; by default a ConstantMean that starts at the mean of the targets.
    :param group: See `group` of :func:`~gpytorch_tkrr.fit_als`: each process passes its own rows, and all processes
        have the sums over all rows.

    Example:
        >>> import gpytorch, torch, gpytorch_tkrr as tkrr
        >>> batches = [(x, torch.sin(6 * x[:, 0])) for x in torch.rand(10, 100, 1)]
        >>> domain = tkrr.Domain.from_bounds(torch.zeros(1), torch.ones(1), boundary_factor=4.0)
        >>> kernel = tkrr.HilbertKernel(gpytorch.kernels.RBFKernel(), domain, num_basis=30)
        >>> model = tkrr.HilbertGP(batches, gpytorch.likelihoods.GaussianLikelihood(), kernel)
        >>> mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        >>> for _ in range(20):
        ...     optimizer.zero_grad()
        ...     loss = -mll(model(*model.train_inputs), model.train_targets)
        ...     loss.backward()
        ...     optimizer.step()
        >>> x = torch.linspace(0.1, 0.9, 5).unsqueeze(-1)
        >>> bool((model.likelihood(model.eval()(x)).mean - torch.sin(6 * x[:, 0])).abs().max() < 0.01)
        True
    """

    def __init__(
        self,
        data: Any,
        likelihood: GaussianLikelihood,
        kernel: Kernel,
        *,
        mean_module: Mean | None = None,
        group: Any = None,
    ):
        super().__init__()
        if not isinstance(likelihood, GaussianLikelihood) or likelihood.noise.numel() != 1:
            raise InputError(
                "HilbertGP takes a GaussianLikelihood with one noise variance for all rows; got a "
                f"{type(likelihood).__name__}."
            )
        if not isinstance(mean_module, (ConstantMean, ZeroMean, type(None))):
            raise InputError(
                "HilbertGP keeps no rows, so its mean must be a ConstantMean or a ZeroMean; got a "
                f"{type(mean_module).__name__}. Subtract another mean from the targets, or put a LinearKernel into the "
                "kernel."
            )
        self.likelihood = likelihood
        self.covar_module = kernel
        self.mean_module = ConstantMean().to(likelihood.noise) if mean_module is None else mean_module
        _check_kernel(kernel)
        self._source = None if data is None else as_source(data)
        self._processes = as_processes(group)
        source, processes = self._source, self._processes
        self.sums = FeatureSums.empty() if source is None else collect_sums(kernel, source, processes)
        if data is not None and mean_module is None:
            self.mean_module.initialize(constant=self.sums.shift + self.sums.total / self.sums.mass)
        self._strategy: HilbertPredictionStrategy | None = None
        self._summed = None if source is None else self._functions()  # what the sums are of

    def _functions(self) -> tuple[Hashable, list[Tensor]]:
        """All that the kernel's functions depend on."""
        part = hilbert_part(self.covar_module)
        columns = range(self.sums.rows.shape[-1]) if part.active_dims is None else part.active_dims.tolist()
        expansion = part.expansion(len(columns))
        parameters = [tensor.detach().double().cpu() for tensor in expansion.basis_parameters()]
        return (expansion.structure, tuple(columns)), parameters

    @property
    def train_inputs(self) -> tuple[Tensor]:
        """The rows of inputs at the edges of the data, `(P, D)`: all that is kept of them."""
        if self.sums.num_rows == 0:
            raise NotFittedError("The model has seen no data. Pass data, or load a state_dict.")
        return (self.sums.rows.to(self.likelihood.noise.dtype),)

    @property
    def train_targets(self) -> Tensor:
        """Stands for the targets in :class:`~gpytorch.mlls.ExactMarginalLogLikelihood`: `(N,)`, all NaN, no memory."""
        return self.likelihood.noise.new_full((), torch.nan).expand(self.sums.num_rows)

    def _constant(self) -> Tensor:
        """The value of the mean."""
        return self.mean_module(self.train_inputs[0][:1]).squeeze(-1)

    def _follow(self) -> None:
        """See to it that the sums are those of the kernel's functions."""
        num_dims = self.train_inputs[0].shape[-1]
        part, summed = hilbert_part(self.covar_module), self.sums.basis
        num_columns = num_dims if part.active_dims is None else len(part.active_dims)
        if self._source is None:
            if summed.numel() and not torch.equal(part.basis(num_columns), summed):
                part.set_basis(summed)
            part.keep_basis()
            if self._summed is not None and not _are_same(self._summed, self._functions()):
                raise InputError(
                    "The kernel's functions are others than those that the sums over the data are of, and the data are "
                    "not there to be read again. Make the model anew from the data."
                )
            self._summed = self._functions()
            return
        part.follow()
        functions = self._functions()
        if self._summed is None or not _are_same(self._summed, functions):
            self._summed = functions
            self.sums, self._strategy = collect_sums(self.covar_module, self._source, self._processes), None

    def _missing(self) -> Tensor:
        """Weighted mean over the rows of the variance that the functions do not represent, `(1,)`."""
        kernel, scale = self.covar_module, 1.0
        while not isinstance(kernel, HilbertKernel):
            kernel, scale = kernel.base_kernel, scale * kernel.outputscale.double()
        rows = self.sums.rows if kernel.active_dims is None else self.sums.rows[:, kernel.active_dims]
        return scale * self.sums.mean_missing(kernel.expansion(rows.shape[-1]), rows)

    def _low_rank(self) -> HilbertLinearOperator:
        """Functions and covariance of the kernel, which must be those that the sums are of."""
        low_rank = low_rank_part(self.covar_module, self.train_inputs[0])
        if low_rank.num_features != len(self.sums.rhs):
            raise InputError(
                f"The kernel has {low_rank.num_features} functions, but the sums over the data are of "
                f"{len(self.sums.rhs)}. Make the model with the kernel that it was saved with."
            )
        if low_rank.lazy_features is None:
            raise _trained_basis()
        return low_rank

    @torch.no_grad()
    def _tell_noise(self, low_rank: HilbertLinearOperator, constant: Tensor) -> None:
        """Tell the kernel how precise the data are, for its tolerance."""
        squares = low_rank.prior.mix_gram(self.sums.gram).diagonal(dim1=-2, dim2=-1)
        prior = (squares * low_rank.prior.variances).sum(-1) / self.sums.mass
        _, square = self.sums.centered(constant)
        mean = (self.sums.total - (constant - self.sums.shift) * self.sums.mass) / self.sums.mass
        spread = square / self.sums.mass - mean.square()
        noise = self.likelihood.noise.double().mean() * self.sums.count / self.sums.mass
        hilbert_part(self.covar_module).tell_noise(prior, noise, spread)

    def forward(self, x: Tensor) -> MultivariateNormal:
        """
        The prior.

        :param x: Inputs `(..., n, D)`.
        """
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))

    def __call__(self, *inputs: Tensor, **kwargs: Any) -> MultivariateNormal:
        with by_functions(self.covar_module):
            return self._call(*inputs)

    def _call(self, *inputs: Tensor) -> MultivariateNormal:
        if self.training:
            if len(inputs) != 1 or not torch.equal(inputs[0], self.train_inputs[0]):
                raise RuntimeError(
                    "In train mode a HilbertGP is called as model(*model.train_inputs): it has kept sums over its data "
                    "only. For predictions call model.eval() first."
                )
            self._follow()
            constant, low_rank = self._constant(), self._low_rank()
            self._tell_noise(low_rank, constant)
            operator = SummedLinearOperator(
                low_rank.variances, constant, self._missing(), sums=self.sums, mixing=low_rank.mixing
            )
            return SummedNormal(
                constant.detach().expand(self.sums.num_rows),
                operator,
            )
        self._follow()
        (x,) = inputs
        x = x.unsqueeze(-1) if x.dim() == 1 else x
        if x.shape[-1] != self.train_inputs[0].shape[-1]:
            num_dims = self.train_inputs[0].shape[-1]
            raise InputError(f"Inputs must have {num_dims} columns, as the data; got shape {tuple(x.shape)}.")
        prior = self.forward(x)
        if settings.prior_mode.on():
            return prior
        mean, covariance = self.prediction_strategy.exact_prediction(
            prior.mean, prior.lazy_covariance_matrix, prior.lazy_covariance_matrix
        )
        return MultivariateNormal(mean, covariance)

    @property
    def prediction_strategy(self) -> HilbertPredictionStrategy:
        """Predicts from the posterior of the weights, which is computed once after training."""
        is_detached = settings.detach_test_caches.on()
        if self._strategy is not None and is_detached:
            return self._strategy
        with torch.set_grad_enabled(torch.is_grad_enabled() and not is_detached):
            noise = self.likelihood.noise + self._missing()
            posterior = self.sums.posterior(self._low_rank().prior, self._constant(), noise)
        prior = self.forward(self.train_inputs[0])
        strategy = HilbertPredictionStrategy(
            self.train_inputs, prior, self.train_targets, self.likelihood, self.covar_module, posterior=posterior
        )
        if is_detached:
            self._strategy = strategy
        return strategy

    def train(self, mode: bool = True) -> HilbertGP:
        if mode:
            self._strategy = None
        elif self.training and self._source is not None:  # a copy, which has no data, predicts with the same functions
            self._follow()
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True) -> HilbertGP:
        self._strategy = None
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args: Any) -> None:
        self._strategy, self._summed = None, None
        super()._load_from_state_dict(*args)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_strategy": None, "_source": None}


def _are_same(left: tuple[Hashable, list[Tensor]], right: tuple[Hashable, list[Tensor]]) -> bool:
    """Whether functions are the same, up to the rounding of a model that has been in single precision."""
    return left[0] == right[0] and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-6, atol=0.0) for a, b in zip(left[1], right[1], strict=True)
    )


def _check_kernel(kernel: Kernel) -> None:
    parts = [module for module in kernel.modules() if isinstance(module, HilbertKernel)]
    if len(parts) != 1:
        raise UnsupportedKernelError(
            f"HilbertGP takes a HilbertKernel, scaled or not; got a {type(kernel).__name__} that holds {len(parts)} of "
            "them. Put the whole kernel inside one HilbertKernel(kernel, domain, num_basis)."
        )
    if kernel.batch_shape:
        raise UnsupportedKernelError(
            f"HilbertGP takes no batch of kernels; got batch_shape {tuple(kernel.batch_shape)}."
        )
    (part,) = parts
    if part.domain.num_dims is None:
        return
    if any(tensor.requires_grad for tensor in part.expansion().basis_parameters()):
        raise _trained_basis()


def _trained_basis() -> UnsupportedKernelError:
    return UnsupportedKernelError(
        "The basis functions depend on a parameter that is trained (the period of a PeriodicKernel), but the data are "
        "read once only. Fix it: kernel.raw_period_length.requires_grad_(False)."
    )


class SummedLinearOperator(LinearOperator):
    r"""
    Stands for :math:`\Phi V \Phi^\top`, or :math:`\Phi V \Phi^\top + s^2 I`, of rows that are no longer there.

    :param variances: v, `(M,)`.
    :param constant: The mean of all rows.
    :param missing: Mean over the rows of the variance that the functions do not represent, a scalar.
    :param noise: :math:`s^2`, a scalar, or None.
    :param sums: Sums over the rows.
    :param mixing: T, `(M, M)`, where :math:`V = T \operatorname{diag}(v) T^\top`; None for the identity.
    """

    def __init__(
        self,
        variances: Tensor,
        constant: Tensor,
        missing: Tensor,
        noise: Tensor | None = None,
        *,
        sums: FeatureSums,
        mixing: Tensor | None = None,
    ):
        super().__init__(variances, constant, missing, *([] if noise is None else [noise]), sums=sums, mixing=mixing)
        self.variances, self.constant, self.missing, self.noise = variances, constant, missing, noise
        self.sums, self.mixing = sums, mixing

    @property
    def prior(self) -> Covariance:
        """V."""
        return Covariance(self.variances.double(), self.mixing)

    @property
    def dtype(self) -> torch.dtype:
        return self.variances.dtype

    def _size(self) -> torch.Size:
        return torch.Size((self.sums.num_rows, self.sums.num_rows))

    def _transpose_nonbatch(self) -> SummedLinearOperator:
        return self

    def __add__(self, other: Any) -> LinearOperator:
        if self.noise is None and isinstance(other, ConstantDiagLinearOperator):
            noise = other.diag_values.squeeze(-1)
            return self.__class__(
                self.variances, self.constant, self.missing, noise, sums=self.sums, mixing=self.mixing
            )
        return self._refuse()

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            "The covariance of the training rows is not available: a HilbertGP keeps sums over its data only. Their "
            "log marginal likelihood is, and predictions are made in eval mode."
        )

    _matmul = _diagonal = _getitem = _get_indices = to_dense = add_diagonal = _refuse


class SummedNormal(MultivariateNormal):
    """
    The distribution of targets that are known by sums over them.

    :param mean: Their mean, `(N,)`.
    :param covariance_matrix: A :class:`SummedLinearOperator`.
    """

    def log_prob(self, value: Tensor) -> Tensor:
        """
        The log density at the targets that were summed.

        :param value: ``model.train_targets``, which stands for them.
        """
        covariance = self.lazy_covariance_matrix
        if value.shape != self.event_shape or value.stride() != (0,) or not bool(value[:1].isnan().all()):
            raise InputError(
                "The targets are known by sums over them only: pass model.train_targets, which stands for them; got a "
                f"tensor of shape {tuple(value.shape)}."
            )
        if covariance.noise is None:
            covariance._refuse()
        noise = covariance.noise + covariance.missing
        log_prob = covariance.sums.log_marginal(covariance.prior, covariance.constant, noise)
        return log_prob.squeeze().to(covariance.dtype)
