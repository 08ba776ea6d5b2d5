"""Hilbert-space features and low-rank CP weights for GPyTorch.

A kernel on a box is a weighted sum of products of fixed functions. The functions depend on the box alone and are
evaluated once; their variances come from the user's GPyTorch kernel object and carry every gradient, prior and
constraint.
"""

from .distribution import ReducedRankNormal
from .domain import Domain
from .draws import FunctionDraws, draw_posterior_functions, draw_prior_functions
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
from .index_set import FullTensor, HyperbolicCross, IndexSet, TotalDegree
from .kernel import HilbertKernel
from .spectral import register_spectral_density, spectral_density

__version__ = "0.1.0"

__all__ = [
    "ApproximationWarning",
    "ConvergenceWarning",
    "DenseFallbackWarning",
    "Domain",
    "DomainError",
    "FullTensor",
    "FunctionDraws",
    "HilbertKernel",
    "HyperbolicCross",
    "IndexSet",
    "InputError",
    "NotFittedError",
    "OutOfDomainWarning",
    "ReducedRankNormal",
    "SeparableKernelWarning",
    "SizeError",
    "TKRRError",
    "TKRRWarning",
    "TotalDegree",
    "UnsupportedKernelError",
    "draw_posterior_functions",
    "draw_prior_functions",
    "register_spectral_density",
    "spectral_density",
]
