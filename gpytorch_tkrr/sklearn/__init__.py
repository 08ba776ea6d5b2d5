"""Estimators for scikit-learn: tables in, predictive distributions out.

Many inputs by low-rank CP weights (:class:`TKRRRegressor`, :class:`TKRRClassifier`), few by Hilbert-space features
(:class:`HilbertRegressor`).
"""

try:
    import sklearn as _sklearn  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError("gpytorch_tkrr.sklearn needs scikit-learn: pip install 'gpytorch_tkrr[sklearn]'.") from error

from .classifier import TKRRClassifier
from .hilbert_regressor import HilbertRegressor
from .regressor import TKRRRegressor

__all__ = ["HilbertRegressor", "TKRRClassifier", "TKRRRegressor"]
