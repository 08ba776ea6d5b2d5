"""Hilbert-space features and low-rank CP weights for GPyTorch.

A kernel on a box is a weighted sum of products of fixed functions. The functions depend on the box alone and are
evaluated once; their variances come from the user's GPyTorch kernel object and carry every gradient, prior and
constraint.
"""

from .domain import Domain
from .errors import (
    ApproximationWarning,
    ConvergenceWarning,
    DenseFallbackWarning,
    DomainError,
    InputError,
    NotFittedError,
    OutOfDomainWarning,
    SeparableKernelWarning,
    SizeError,
    TKRRError,
    TKRRWarning,
    UnsupportedKernelError,
)

__version__ = "0.1.0"

__all__ = [
    "ApproximationWarning",
    "ConvergenceWarning",
    "DenseFallbackWarning",
    "Domain",
    "DomainError",
    "InputError",
    "NotFittedError",
    "OutOfDomainWarning",
    "SeparableKernelWarning",
    "SizeError",
    "TKRRError",
    "TKRRWarning",
    "UnsupportedKernelError",
]
