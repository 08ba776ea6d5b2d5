"""Exceptions and warnings of this package.

Every message says what came, what was expected and what to try. Warnings have classes of their own so that they can
be filtered by :mod:`warnings`.
"""

from __future__ import annotations


class TKRRError(Exception):
    """Base class of all exceptions raised by this package."""


class UnsupportedKernelError(TKRRError, TypeError):
    """A kernel, or a node inside a kernel tree, has no spectral density, basis or per-dimension form."""


class DomainError(TKRRError, ValueError):
    """A box is malformed, or training data lie outside of it."""


class InputError(TKRRError, ValueError):
    """Inputs or targets have the wrong shape or hold NaN or infinite values."""


class SizeError(TKRRError, ValueError):
    """The requested number of functions is below one or larger than what is sensible."""


class NotFittedError(TKRRError, RuntimeError):
    """A posterior was asked of a model that has not been fitted."""


class ProcessError(TKRRError, RuntimeError):
    """Another process of a distributed fit has ended or does not answer."""


class CheckpointError(TKRRError, ValueError):
    """A checkpoint is damaged, or belongs to other data, another model or another fit."""


class NotApplicableError(TKRRError, TypeError):
    """A model of a comparison cannot take this task, or this number of inputs."""


class TKRRWarning(UserWarning):
    """Base class of all warnings issued by this package."""


class ApproximationWarning(TKRRWarning):
    """The basis represents the kernel poorly at its current hyperparameters."""


class OutOfDomainWarning(TKRRWarning):
    """Predictions were asked where the basis represents less than the kernel's prior variance."""


class DenseFallbackWarning(TKRRWarning):
    """A low-rank structure is about to be thrown away for a dense N x N factorisation."""


class SeparableKernelWarning(TKRRWarning):
    """A radial kernel is used as the product of its one-dimensional kernels."""


class ConstraintWarning(TKRRWarning):
    """A bound of a parameter, not the data, decides its value."""


class ConvergenceWarning(TKRRWarning):
    """An iteration stopped before it converged."""


class StalePosteriorWarning(TKRRWarning):
    """The training data of a fitted model were replaced; its posterior is that of the old data."""
