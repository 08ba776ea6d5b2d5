"""A sparse variational GP, shared by the benchmarks that compare with one."""

from __future__ import annotations

import gpytorch
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from gpytorch_tkrr.comparison.gp_contenders import VariationalModel


class SVGP(VariationalModel):
    """
    A sparse variational GP with its likelihood.

    :param inducing_points: Where the inducing points start, `(m, D)`.
    """

    def __init__(self, inducing_points: Tensor):
        super().__init__(inducing_points)
        self.likelihood = gpytorch.likelihoods.GaussianLikelihood()

    @torch.no_grad()
    def predict(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """
        Predictive mean and variance of targets, each `(n,)`, float64.

        :param x: Inputs `(n, D)`.
        """
        self.eval()
        parts = [self.likelihood(self(rows)) for rows in x.float().split(8192)]
        return torch.cat([p.mean for p in parts]).double(), torch.cat([p.variance for p in parts]).double()


def fit_svgp(
    x: Tensor,
    y: Tensor,
    *,
    epochs: int,
    min_steps: int = 0,
    lengthscale: float | None = None,
    num_inducing: int = 512,
    batch_size: int = 1024,
) -> SVGP:
    """
    A sparse variational GP trained by Adam, in float32.

    :param x: Inputs `(N, D)`, scaled.
    :param y: Targets `(N,)`, standardised.
    :param epochs: Passes over the data.
    :param min_steps: Least number of steps; there are more passes where the data are few.
    :param lengthscale: Where the lengthscales start; GPyTorch's default if None.
    :param num_inducing: Number of inducing points, drawn from the data.
    :param batch_size: Rows per step.

    Reference: Hensman, Matthews & Ghahramani (2015), *Scalable variational Gaussian process classification*.
    """
    x, y = x.float(), y.float()
    model = SVGP(x[torch.randperm(len(x))[:num_inducing]])
    if lengthscale is not None:
        model.covar_module.base_kernel.lengthscale = lengthscale
    objective = gpytorch.mlls.VariationalELBO(model.likelihood, model, num_data=len(y))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(x, y), batch_size=batch_size, shuffle=True)
    for _ in range(max(epochs, -(-min_steps // len(loader)))):
        for rows, targets in loader:
            optimizer.zero_grad()
            loss = -objective(model(rows), targets)
            loss.backward()
            optimizer.step()
    return model.eval()
