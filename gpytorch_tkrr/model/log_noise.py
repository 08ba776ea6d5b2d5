"""The log variance of noise that depends on the inputs, as a function that can be looked at like f."""

from __future__ import annotations

import torch
from torch import Tensor

from .draws import DrawsPosterior
from .extrapolation import HeldInputs


class LogNoise:
    r"""
    Draws of the log variance :math:`\log s^2 + g(x)` of the noise (with Student tails of its squared scale), which is
    `model.log_noise` after :func:`~gpytorch_tkrr.fit_gibbs` with a
    :class:`~gpytorch_tkrr.HeteroskedasticLikelihood`. It may take the place of the model in
    :func:`~gpytorch_tkrr.main_effects` and :func:`~gpytorch_tkrr.sobol_indices`.

    :param posterior: Draws of g.
    :param constant: Its value in each draw where g is zero, `(S,)`.
    :param held: Inputs as g sees them.
    :param train_inputs: The training inputs of the model; None where it holds none.
    """

    def __init__(
        self, posterior: DrawsPosterior, constant: Tensor, held: HeldInputs, train_inputs: tuple[Tensor, ...] | None
    ):
        self.posterior, self.constant, self.warped, self.train_inputs = posterior, constant, held, train_inputs
        self.training_range = held.known

    @torch.no_grad()
    def draws(self, x: Tensor) -> Tensor:
        """
        The log variance in every draw.

        :param x: Inputs `(..., n, D)`, or `(n,)` for one dimension.
        :return: `(S, ..., n)`.
        """
        x = x.unsqueeze(-1) if x.dim() == 1 else x
        g = self.posterior.functions(self.warped(x.double()))
        return (g + self.constant.reshape(-1, *[1] * (g.dim() - 1))).to(x.dtype)
