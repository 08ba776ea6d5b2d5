"""Exceptions and warnings of this package.

Every message says what came, what was expected and what to try. Warnings have classes of their own so that they can
be filtered by :mod:`warnings`.
"""

from __future__ import annotations


class TKRRError(Exception):
    """
    Base class of all exceptions raised by this package.

    Example:
        >>> import torch, gpytorch_tkrr as tkrr
        >>> try:
        ...     tkrr.compare(torch.rand(5, 2), torch.rand(5))
        ... except tkrr.TKRRError as error:  # whatever this package has to say
        ...     print(error)
        There are 5 rows; at least 20 are needed.
    """


class UnsupportedKernelError(TKRRError, TypeError):
    """
    A kernel, or a node inside a kernel tree, has no spectral density, basis or per-dimension form.

    Example:
        >>> import gpytorch, torch, gpytorch_tkrr as tkrr
        >>> kernel = gpytorch.kernels.ArcKernel(gpytorch.kernels.RBFKernel(), ard_num_dims=1)
        >>> try:
        ...     tkrr.spectral_density(kernel, torch.zeros(3, 1))
        ... except tkrr.UnsupportedKernelError as error:
        ...     print("ArcKernel" in str(error))
        True
    """


class DomainError(TKRRError, ValueError):
    """
    A box is malformed, or training data lie outside of it.

    Example:
        >>> import gpytorch, torch, gpytorch_tkrr as tkrr
        >>> try:
        ...     tkrr.Domain(0.0, -1.0)
        ... except tkrr.DomainError:
        ...     print("a box has a positive size")
        a box has a positive size
    """


class InputError(TKRRError, ValueError):
    """
    Inputs or targets have the wrong shape or hold NaN or infinite values.

    Example:
        >>> import torch, gpytorch_tkrr as tkrr
        >>> try:
        ...     tkrr.summarise((torch.tensor([[0.0], [torch.nan]]), torch.zeros(2)))
        ... except tkrr.InputError as error:
        ...     print(error)
        The inputs hold NaN or infinite values (the first is in row 1). Drop or impute these rows.
    """


class SizeError(TKRRError, ValueError):
    """
    The requested number of functions, or a dense matrix that would have to be formed, has no sensible size.

    Example:
        >>> import gpytorch_tkrr as tkrr
        >>> try:
        ...     tkrr.FullTensor().indices([30] * 6)  # 729 million functions
        ... except tkrr.SizeError as error:
        ...     print("HyperbolicCross" in str(error))  # what to use instead
        True
    """


class NotFittedError(TKRRError, RuntimeError):
    """
    A model was used for predictions before it was fitted.

    Example:
        >>> import gpytorch, torch, gpytorch_tkrr as tkrr
        >>> model = tkrr.TKRR(torch.rand(9, 2), torch.rand(9), gpytorch.likelihoods.GaussianLikelihood(), rank=2)
        >>> try:
        ...     model.posterior
        ... except tkrr.NotFittedError:
        ...     result = tkrr.fit_als(model, seed=0)
        >>> model.is_fitted
        True
    """


class ProcessError(TKRRError, RuntimeError):
    """
    Another process of a distributed fit has ended or does not answer.

    Example:
        >>> import gpytorch_tkrr as tkrr
        >>> def fit_or_wait(fit):
        ...     try:
        ...         return fit()  # with group= and checkpoint=
        ...     except tkrr.ProcessError:
        ...         return None  # another process is gone: start all of them again, and the fit goes on
        >>> issubclass(tkrr.ProcessError, RuntimeError)
        True
    """


class CheckpointError(TKRRError, ValueError):
    """
    A checkpoint is damaged, or belongs to other data, another model or another fit.

    Example:
        >>> import pathlib, tempfile, gpytorch, torch, gpytorch_tkrr as tkrr
        >>> model = tkrr.TKRR(torch.rand(9, 2), torch.rand(9), gpytorch.likelihoods.GaussianLikelihood(), rank=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "run.pt")
        ...     _ = path.write_text("something else")
        ...     try:
        ...         tkrr.fit_als(model, checkpoint=path)
        ...     except tkrr.CheckpointError as error:
        ...         print("is not a checkpoint" in str(error))
        True
    """


class NotApplicableError(TKRRError, TypeError):
    """
    A model of a comparison cannot take this task, or this number of inputs.

    Example:
        >>> import torch, gpytorch_tkrr as tkrr
        >>> class OnlyLarge:
        ...     def fit(self, x, y):
        ...         raise tkrr.NotApplicableError("it needs a thousand rows.")
        ...     def predict(self, x):
        ...         return x[:, 0]
        >>> result = tkrr.compare(torch.rand(30, 1), torch.rand(30), models=[OnlyLarge()], splits=1, isolate=False)
        >>> result.table().loc["OnlyLarge", "status"]
        'not applicable'
    """


class TKRRWarning(UserWarning):
    """
    Base class of all warnings issued by this package.

    Example:
        >>> import warnings, gpytorch_tkrr as tkrr
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", tkrr.TKRRWarning)  # none of them goes unnoticed
        >>> issubclass(tkrr.ConvergenceWarning, tkrr.TKRRWarning)
        True
    """


class ApproximationWarning(TKRRWarning):
    """
    The basis represents the kernel poorly at its current hyperparameters, after a fit.

    Example:
        >>> import warnings, gpytorch, torch, gpytorch_tkrr as tkrr
        >>> kernel = gpytorch.kernels.RBFKernel()
        >>> kernel.lengthscale = 0.01  # far too short for three functions
        >>> kernel = tkrr.HilbertKernel(kernel, tkrr.Domain(0.5, 1.0), num_basis=3)
        >>> x = torch.rand(9, 1)
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always", tkrr.ApproximationWarning)
        ...     kernel.check_approximation(x)
        >>> {warning.category.__name__ for warning in caught}
        {'ApproximationWarning'}
    """


class OutOfDomainWarning(TKRRWarning):
    """
    Predictions were made where the basis represents less than the kernel's prior variance.

    Example:
        >>> import warnings, gpytorch, torch, gpytorch_tkrr as tkrr
        >>> kernel = tkrr.HilbertKernel(gpytorch.kernels.RBFKernel(), tkrr.Domain(0.0, 3.0), num_basis=20).eval()
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always", tkrr.OutOfDomainWarning)
        ...     _ = kernel(torch.tensor([[0.0], [9.0]])).to_dense()
        >>> {warning.category.__name__ for warning in caught}
        {'OutOfDomainWarning'}
    """


class ExtrapolationWarning(TKRRWarning):
    """
    Rows lie outside the range of the training rows, where the data say nothing.

    Example:
        >>> import warnings, gpytorch, torch, gpytorch_tkrr as tkrr
        >>> x = torch.rand(50, 2)
        >>> model = tkrr.TKRR(x, x.sum(-1), gpytorch.likelihoods.GaussianLikelihood(), rank=2)
        >>> result = tkrr.fit_als(model, seed=0)
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always", tkrr.ExtrapolationWarning)
        ...     prediction = model.predict(torch.tensor([[0.5, 0.5], [0.5, 1.2]]))
        >>> prediction.extrapolates, {warning.category.__name__ for warning in caught}
        (tensor([False,  True]), {'ExtrapolationWarning'})
    """


class DenseFallbackWarning(TKRRWarning):
    """
    A low-rank structure is about to be thrown away for a dense N x N factorisation.

    Example:
        >>> import warnings, gpytorch, torch, gpytorch_tkrr as tkrr
        >>> x = torch.rand(50, 1)
        >>> kernel = tkrr.HilbertKernel(gpytorch.kernels.RBFKernel(), tkrr.Domain(0.5, 2.0), num_basis=9)
        >>> model = lambda x: gpytorch.distributions.MultivariateNormal(torch.zeros(50), kernel(x))
        >>> likelihood = gpytorch.likelihoods.GaussianLikelihood()
        >>> with warnings.catch_warnings(record=True) as caught, gpytorch.settings.fast_computations(log_prob=False):
        ...     warnings.simplefilter("always", tkrr.DenseFallbackWarning)
        ...     _ = likelihood(model(x)).log_prob(torch.zeros(50))
        >>> [warning.category.__name__ for warning in caught]
        ['DenseFallbackWarning']
    """


class SeparableKernelWarning(TKRRWarning):
    """
    A radial kernel is used as the product of its one-dimensional kernels.

    Example:
        >>> import warnings, gpytorch, torch, gpytorch_tkrr as tkrr
        >>> likelihood = gpytorch.likelihoods.GaussianLikelihood()
        >>> kernel = gpytorch.kernels.MaternKernel(ard_num_dims=2)
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always", tkrr.SeparableKernelWarning)
        ...     model = tkrr.TKRR(torch.rand(9, 2), torch.rand(9), likelihood, kernel=kernel, rank=2)
        >>> [warning.category.__name__ for warning in caught]
        ['SeparableKernelWarning']
    """


class ConstraintWarning(TKRRWarning):
    """
    A bound or a prior of a parameter, not the data, decides its value.

    Example:
        >>> import warnings, gpytorch, torch, gpytorch_tkrr as tkrr
        >>> x = torch.linspace(0, 1, 100).unsqueeze(-1)
        >>> y = 0.01 * torch.sin(9 * x[:, 0])  # far below the smallest noise that GPyTorch allows by default
        >>> model = tkrr.TKRR(x, y, gpytorch.likelihoods.GaussianLikelihood(), rank=2)
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always", tkrr.ConstraintWarning)
        ...     result = tkrr.fit_gibbs(model, num_warmup=20, num_draws=10, seed=0)
        >>> [warning.category.__name__ for warning in caught]
        ['ConstraintWarning']
    """


class ConvergenceWarning(TKRRWarning):
    """
    An iteration stopped before it converged.

    Example:
        >>> import warnings, gpytorch, torch, gpytorch_tkrr as tkrr
        >>> x = torch.linspace(0, 1, 100).unsqueeze(-1)
        >>> model = tkrr.TKRR(x, torch.sin(9 * x[:, 0]), gpytorch.likelihoods.GaussianLikelihood(), rank=4)
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always", tkrr.ConvergenceWarning)
        ...     result = tkrr.fit_gibbs(model, num_warmup=0, num_draws=4, num_chains=3, seed=0)  # hardly a beginning
        >>> [warning.category.__name__ for warning in caught]
        ['ConvergenceWarning']
    """


class StalePosteriorWarning(TKRRWarning):
    """
    The training data of a fitted model were replaced; its posterior is that of the old data.

    Example:
        >>> import warnings, gpytorch, torch, gpytorch_tkrr as tkrr
        >>> model = tkrr.TKRR(torch.rand(9, 2), torch.rand(9), gpytorch.likelihoods.GaussianLikelihood(), rank=2)
        >>> result = tkrr.fit_als(model, seed=0)
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always", tkrr.StalePosteriorWarning)
        ...     model.set_train_data(targets=torch.rand(9))
        >>> [warning.category.__name__ for warning in caught]
        ['StalePosteriorWarning']
    """
