r"""The logarithm of a squared standard normal number as a mixture of ten normal distributions.

:math:`e^2 = \sigma^2 \chi^2_1` makes :math:`\log e^2 = \log \sigma^2 + \xi`: a log variance is seen with additive noise
:math:`\xi` of a known distribution, which is normal given one of ten components. So log variances are sampled as a
regression is.

Reference: Omori, Chib, Shephard & Nakajima (2007), *Stochastic volatility with leverage: fast and efficient likelihood
inference*, Table 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...data.keyed import row_uniform

#: Probabilities, means and variances of the components.
PROBABILITIES = (0.00609, 0.04775, 0.13057, 0.20674, 0.22715, 0.18842, 0.12047, 0.05591, 0.01575, 0.00115)
MEANS = (1.92677, 1.34744, 0.73504, 0.02266, -0.85173, -1.97278, -3.46788, -5.55246, -8.68384, -14.65000)
VARIANCES = (0.11265, 0.17788, 0.26768, 0.40611, 0.62699, 0.98583, 1.57469, 2.54498, 4.16591, 7.33342)

#: Beyond this the normal components fall off faster than the distribution itself, of which it has 4e-5: smaller values
#: are moved here, so that a residual of nearly zero does not count as much evidence for a small variance.
SMALLEST = -20.0


def draw_components(xi: Tensor, first_row: int, key: int) -> tuple[Tensor, Tensor]:
    r"""
    Mean and variance of the component that each row belongs to, drawn given :math:`\xi`.

    :param xi: :math:`\xi` of the rows of a batch, `(n,)`.
    :param first_row: The number of the first row among the rows of all processes.
    :param key: A number for this draw of all rows.
    :return: `(n,)` each.

    Example:
        >>> import torch
        >>> from gpytorch_tkrr.model.augmentation.log_chi_squared import draw_components
        >>> xi = torch.randn(20000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).square().log()
        >>> mean, variance = draw_components(xi, 0, key=7)
        >>> abs(((xi - mean) / variance.sqrt()).std() - 1).item() < 0.02  # normal within a component
        True
    """
    means, variances, p = (xi.new_tensor(column) for column in (MEANS, VARIANCES, PROBABILITIES))
    log_p = p.log() - 0.5 * variances.log() - 0.5 * (xi.unsqueeze(-1) - means).square() / variances  # (n, 10)
    cumulative = torch.softmax(log_p, -1).cumsum(-1)
    u = row_uniform(len(xi), first_row, key, xi.device).unsqueeze(-1)
    index = (u > cumulative).sum(-1).clamp(max=len(MEANS) - 1)
    return means[index], variances[index]
