"""Hilbert-space features and low-rank CP weights for GPyTorch.

A kernel on a box is a weighted sum of products of fixed functions. The functions depend on the box alone and are
evaluated once; their variances come from the user's GPyTorch kernel object and carry every gradient, prior and
constraint.
"""

from importlib import import_module as _import_module
from typing import Any as _Any

from .bases.domain import Domain
from .bases.index_set import Ellipsoid, FullTensor, HyperbolicCross, IndexSet, TotalDegree
from .comparison.comparison import Comparison, compare
from .comparison.saved_model import load
from .cp.order import ByInteraction, InputOrder
from .cp.penalty import ColumnPenalty, FactorPenalty, FrobeniusPenalty, Penalty
from .cp.train import TensorTrain
from .cp.weights import CP
from .data.checkpoint import Checkpoint
from .data.source import ArraySource, Shard
from .data.training import Summary, summarise
from .errors import (
    ApproximationWarning,
    CheckpointError,
    ConstraintWarning,
    ConvergenceWarning,
    DenseFallbackWarning,
    DomainError,
    ExtrapolationWarning,
    InputError,
    NotApplicableError,
    NotFittedError,
    OutOfDomainWarning,
    ProcessError,
    SeparableKernelWarning,
    SizeError,
    StalePosteriorWarning,
    TKRRError,
    TKRRWarning,
    UnsupportedKernelError,
)
from .families.fourier_series import FourierSeries
from .families.gauss_hermite import GaussHermite
from .families.gauss_legendre import GaussLegendre
from .families.map_kernel import MapKernel
from .families.polynomial import Polynomial
from .families.random_fourier import RandomFourier
from .families.trigonometric import Trigonometric
from .families.variational_fourier import VariationalFourier
from .features.categorical import CategoricalKernel, IndicatorKernel
from .features.finite import register_finite_basis
from .features.spectral import register_spectral_density, spectral_density
from .features.stationary import Sines
from .hilbert.distribution import ReducedRankMultitaskNormal, ReducedRankNormal
from .hilbert.functions import FunctionDraws, draw_posterior_functions, draw_prior_functions
from .hilbert.gp import HilbertGP
from .hilbert.kernel import HilbertKernel
from .inference.als import fit_als
from .inference.gibbs import fit_gibbs
from .inference.hinge import Hinge, SquaredHinge
from .inference.noise_choice import NoiseChoice, choose_noise
from .inference.one_vs_rest import OneVsRest
from .inference.results import ALSResult, GibbsResult
from .model.anova import CenteredLinearKernel, anova_kernel
from .model.effects import EmpiricalMeasure, MainEffects, SobolIndices, UniformMeasure, main_effects, sobol_indices
from .model.likelihoods.censored import CensoredLikelihood
from .model.likelihoods.heteroskedastic import HeteroskedasticLikelihood
from .model.likelihoods.negative_binomial import NegativeBinomialLikelihood
from .model.likelihoods.ordinal import OrdinalLikelihood
from .model.multioutput import MultioutputTKRR
from .model.prediction import NoiseLevel, Prediction
from .model.tkrr import TKRR
from .model.warp import InputWarp
from .tables.files import CSVSource, NpySource, NpzSource, ParquetSource, open_table

__version__ = "0.2.0"

__all__ = [
    "CP",
    "TKRR",
    "ALSResult",
    "ApproximationWarning",
    "ArraySource",
    "ByInteraction",
    "CSVSource",
    "CategoricalKernel",
    "CensoredLikelihood",
    "CenteredLinearKernel",
    "Checkpoint",
    "CheckpointError",
    "ColumnPenalty",
    "Comparison",
    "ConstraintWarning",
    "ConvergenceWarning",
    "DenseFallbackWarning",
    "Domain",
    "DomainError",
    "Ellipsoid",
    "EmpiricalMeasure",
    "ExtrapolationWarning",
    "FactorPenalty",
    "FourierSeries",
    "FrobeniusPenalty",
    "FullTensor",
    "FunctionDraws",
    "GaussHermite",
    "GaussLegendre",
    "GibbsResult",
    "HeteroskedasticLikelihood",
    "HilbertGP",
    "HilbertKernel",
    "Hinge",
    "HyperbolicCross",
    "IndexSet",
    "IndicatorKernel",
    "InputError",
    "InputOrder",
    "InputWarp",
    "MainEffects",
    "MapKernel",
    "MultioutputTKRR",
    "NegativeBinomialLikelihood",
    "NoiseChoice",
    "NoiseLevel",
    "NotApplicableError",
    "NotFittedError",
    "NpySource",
    "NpzSource",
    "OneVsRest",
    "OrdinalLikelihood",
    "OutOfDomainWarning",
    "ParquetSource",
    "Penalty",
    "Polynomial",
    "Prediction",
    "ProcessError",
    "RandomFourier",
    "ReducedRankMultitaskNormal",
    "ReducedRankNormal",
    "SeparableKernelWarning",
    "Shard",
    "Sines",
    "SizeError",
    "SobolIndices",
    "SquaredHinge",
    "StalePosteriorWarning",
    "Summary",
    "TKRRError",
    "TKRRWarning",
    "TensorTrain",
    "TotalDegree",
    "Trigonometric",
    "UniformMeasure",
    "UnsupportedKernelError",
    "VariationalFourier",
    "anova_kernel",
    "choose_noise",
    "compare",
    "draw_posterior_functions",
    "draw_prior_functions",
    "fit_als",
    "fit_gibbs",
    "load",
    "main_effects",
    "open_table",
    "register_finite_basis",
    "register_spectral_density",
    "sobol_indices",
    "spectral_density",
    "summarise",
]

#: Modules for other libraries, imported when they are first used.
_CLIENTS = ("botorch", "pyro", "sklearn")


def __getattr__(name: str) -> _Any:
    if name in _CLIENTS:
        return _import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
