"""Factorisations that rounding does not upset."""

from __future__ import annotations

import math
import warnings

import torch
from linear_operator.utils.errors import NotPSDError
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor


def robust_cholesky(matrix: Tensor) -> Tensor:
    """
    Lower Cholesky factor of a positive definite matrix.

    Where rounding has made the matrix slightly indefinite, a jitter *relative to its diagonal* is added, from 1e-14
    upwards, with a warning once it is large enough to matter.

    :param matrix: `(..., M, M)`, symmetric.
    :return: `(..., M, M)`.
    """
    factor, jitter = jittered_cholesky(matrix)
    if jitter > 1e-10:
        warnings.warn(
            f"A matrix was not numerically positive definite; {jitter:.0e} of its diagonal was added. The noise is "
            "probably too small for the data.",
            NumericalWarning,
            stacklevel=2,
        )
    return factor


def jittered_cholesky(matrix: Tensor) -> tuple[Tensor, float]:
    """
    As :func:`robust_cholesky`, without a warning.

    :param matrix: `(..., M, M)`, symmetric.
    :return: `(..., M, M)`, and the largest jitter, relative to the diagonal, that was added.
    """
    factor, info = torch.linalg.cholesky_ex(matrix)
    if not info.any():
        return factor, 0.0
    if not torch.isfinite(matrix).all():
        raise NotPSDError(
            "The matrix to be factorised holds NaN or infinite values. Look for NaN in the targets, and for "
            "hyperparameters that became NaN in training (try a smaller step size)."
        )
    diagonal = matrix.diagonal(dim1=-2, dim2=-1).detach().abs()
    rounding = math.ceil(math.log10(1e-15 * matrix.shape[-1]))  # less would not help a large matrix
    for exponent in range(max(-14, rounding), -3):
        jitter = torch.where((info > 0).unsqueeze(-1), 10.0**exponent * diagonal, torch.zeros_like(diagonal))
        factor, failed = torch.linalg.cholesky_ex(matrix + torch.diag_embed(jitter))
        if not failed.any():
            return factor, 10.0**exponent
    raise NotPSDError("The matrix is not positive definite, even after adding 1e-4 of its diagonal.")


def steady_signs(vectors: Tensor) -> Tensor:
    """
    Signs that make the first large entry of each vector positive: that of an eigenvector is left to rounding.

    :param vectors: `(..., M)`.
    :return: `(..., 1)`, plus or minus one.
    """
    large = vectors.abs() > vectors.abs().amax(-1, keepdim=True) / 2
    first = large.to(vectors).argmax(-1, keepdim=True)
    return torch.where(vectors.gather(-1, first) < 0, -1.0, 1.0).to(vectors)
