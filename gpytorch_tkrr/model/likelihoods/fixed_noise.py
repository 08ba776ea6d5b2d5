r"""Gaussian noise of known variance: :math:`y_n = f(x_n) + \epsilon_n`, :math:`\epsilon_n \sim N(0, s_n^2)`."""

from __future__ import annotations

import math

import torch
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, Likelihood
from torch import Tensor

from ...errors import InputError
from .augmented import Augmentation, Parameters
from .base import Rows
from .gaussian import GaussianAugmentation, GaussianObservation
from .noise import NoiseModel
from .registry import register


@register(FixedNoiseGaussianLikelihood)
class FixedNoiseObservation(GaussianObservation):
    r"""
    Targets with known noise. A fit sees the mean variance :math:`\bar s^2` and row weights :math:`\bar s^2 / s_n^2`.

    :param likelihood: A FixedNoiseGaussianLikelihood with one variance for each training row, or one for all.
    """

    def check(self) -> None:
        if self.likelihood.noise.dim() > 1:
            raise InputError(
                f"The likelihood's noise has shape {tuple(self.likelihood.noise.shape)}; a CP-weight model takes (N,)."
            )

    @property
    def has_own_rows(self) -> bool:
        return self.likelihood.noise.numel() > 1

    def row_weights(self, num_rows: int) -> Tensor | None:
        noise = self.likelihood.noise.detach().double()
        if not self.has_own_rows:
            return None
        if noise.shape != (num_rows,):
            raise InputError(
                f"The likelihood has {noise.numel()} noise variances for {num_rows} training rows. Give the model a "
                "likelihood with one for each row."
            )
        return noise.mean() / noise

    def start_noise(self, variance: float) -> None:
        pass

    def noise_bound(self) -> float | None:
        return None

    def of_rows(self, index: Tensor) -> Likelihood:
        return FixedNoiseGaussianLikelihood(self.likelihood.noise[..., index])

    def augmentation(self, scale: float, offset: float) -> Augmentation:
        return GaussianAugmentation(NoiseModel(False, 0.0, math.inf), float(self.noise()), scale**2)

    def set_parameters(self, draws: Parameters) -> None:
        pass

    def rows(self, num_rows: int, is_training: bool, **given: Tensor | float) -> dict[str, Tensor]:
        noise = given.pop("noise", None)
        super().rows(num_rows, is_training, **given)
        own = self.likelihood.noise.detach().double()
        if noise is None:
            if self.has_own_rows and not (is_training and len(own) == num_rows):
                raise InputError(
                    f"The likelihood knows the noise variances of its {own.numel()} training rows, not those of the "
                    f"{num_rows} rows that are asked for. Pass noise=, one variance or one for each row."
                )
            return {"noise": own.reshape(-1).expand(num_rows)}
        values = torch.as_tensor(noise, dtype=torch.float64, device=own.device).detach().reshape(-1)
        if len(values) not in (1, num_rows) or not bool((torch.isfinite(values) & (values >= 0)).all()):
            raise InputError(f"noise must hold one finite variance, or one for each of {num_rows} rows; got {noise}.")
        return {"noise": (values + self.likelihood.second_noise).expand(num_rows)}

    def own_noise(self, parameters: Parameters, rows: Rows) -> Tensor:
        return rows["noise"]
