"""Models for BoTorch: few inputs by Hilbert-space features, many by low-rank CP weights.

Importing this module also registers pathwise sampling for :class:`~gpytorch_tkrr.HilbertKernel`.
"""

try:
    import botorch as _botorch  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError("gpytorch_tkrr.botorch needs BoTorch: pip install 'gpytorch_tkrr[botorch]'.") from error

from .ensemble import TKRREnsemble
from .hilbert_model import HilbertGPModel
from .pathwise import HilbertFeatureMap
from .tkrr_model import TKRRModel

__all__ = ["HilbertFeatureMap", "HilbertGPModel", "TKRREnsemble", "TKRRModel"]
