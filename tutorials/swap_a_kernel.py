"""Change one line of an ExactGP and compare: the same data, the same training loop, then twenty times the data."""

from __future__ import annotations

import os
import time

import gpytorch
import torch
from torch import Tensor

import gpytorch_tkrr as tkrr

FAST = bool(os.environ.get("TKRR_TUTORIAL_FAST"))
SMALL, LARGE, NUM_STEPS = (200, 1000, 5) if FAST else (1000, 20_000, 40)


class Model(gpytorch.models.ExactGP):
    def __init__(self, train_x: Tensor, train_y: Tensor, covar_module: gpytorch.kernels.Kernel):
        super().__init__(train_x, train_y, gpytorch.likelihoods.GaussianLikelihood())
        self.likelihood.noise = 0.1
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = covar_module

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def base_kernel() -> gpytorch.kernels.Kernel:
    kernel = gpytorch.kernels.MaternKernel(nu=2.5, ard_num_dims=2)
    kernel.lengthscale = 0.5
    return gpytorch.kernels.ScaleKernel(kernel)


def make_data(num_rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Noisy values of a smooth surface over the unit square; the noise has standard deviation 0.1."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(num_rows, 2, generator=generator)
    surface = torch.sin(7 * x[:, 0]) * torch.cos(5 * x[:, 1]) + torch.exp(-20 * (x - 0.6).square().sum(-1))
    return x, surface + 0.1 * torch.randn(num_rows, generator=generator)


def train(model: Model) -> float:
    """Adam on the marginal likelihood; returns the milliseconds of the median step."""
    model.train()
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)  # the likelihood's noise is one of them
    seconds = []
    for _ in range(NUM_STEPS):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = -objective(model(*model.train_inputs), model.train_targets)
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    return 1e3 * float(torch.tensor(seconds).median())


def evaluate(model: Model, test_x: Tensor, test_y: Tensor) -> tuple[float, float]:
    """Root mean squared error and mean negative log predictive density of new observations."""
    model.eval()
    with torch.no_grad():
        predicted = model.likelihood(model(test_x))
        rmse = (predicted.mean - test_y).square().mean().sqrt()
        nlpd = -torch.distributions.Normal(predicted.mean, predicted.stddev).log_prob(test_y).mean()
    return float(rmse), float(nlpd)


def main() -> None:
    torch.manual_seed(0)
    test_x, test_y = make_data(2000, seed=1)
    print(f"{'kernel':<14}{'rows':>8}{'ms / step':>11}{'RMSE':>8}{'NLPD':>9}{'functions':>11}{'kernel error':>14}")
    for num_rows, swapped in [(SMALL, False), (SMALL, True), (LARGE, True)]:
        x, y = make_data(num_rows, seed=0)
        kernel = base_kernel()
        if swapped:
            kernel = tkrr.HilbertKernel.from_tolerance(kernel, x, tol=1e-2)  # the one line
        model = Model(x, y, kernel)
        with gpytorch.settings.max_cholesky_size(SMALL):  # the exact GP by Cholesky, not by stochastic estimates
            milliseconds = train(model)
            rmse, nlpd = evaluate(model, test_x, test_y)
        functions, error = "", ""
        if isinstance(kernel, tkrr.HilbertKernel):
            functions, error = str(kernel.expansion().num_functions), f"{kernel.approximation_error(x):.3f}"
        name = type(kernel).__name__ if swapped else "exact"
        print(f"{name:<14}{num_rows:>8}{milliseconds:>11.1f}{rmse:>8.4f}{nlpd:>9.4f}{functions:>11}{error:>14}")
    print("\nRMSE and NLPD of 2000 new observations, noise 0.1; kernel error: max |K_approx - K| / k(0) after training")


if __name__ == "__main__":
    main()
