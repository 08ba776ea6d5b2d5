"""Change one line: HilbertKernel.from_tolerance against the exact GP, both trained the same way."""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import gpytorch
import torch
from gpytorch.kernels import Kernel, MaternKernel, PeriodicKernel, RBFKernel, RQKernel, ScaleKernel
from gpytorch.kernels import SpectralMixtureKernel as SpectralMixture
from torch import Tensor

import gpytorch_tkrr as tkrr

from .harness import Report


@dataclass(frozen=True)
class Problem:
    """
    Data and a kernel, at GPyTorch's default hyperparameters.

    :param name: Of the row in the table.
    :param kernel: Makes the kernel.
    :param function: The noise-free targets of inputs between 0 and 1.
    :param num_dims: D.
    :param num_rows: N.
    :param width: The inputs lie between 0 and this.
    :param noise: Standard deviation of the noise.
    :param optimizer: ``adam`` (0.1) or ``lbfgs``.
    :param steps: How many; of L-BFGS at most so many iterations.
    """

    name: str
    kernel: Callable[[], Kernel]
    function: Callable[[Tensor], Tensor]
    num_dims: int = 1
    num_rows: int = 300
    width: float = 1.0
    noise: float = 0.2
    optimizer: str = "adam"
    steps: int = 100

    def data(self) -> tuple[Tensor, Tensor]:
        """Inputs `(N, D)` and targets `(N,)`."""
        generator = torch.Generator().manual_seed(0)
        shape = self.num_rows, self.num_dims
        x = torch.rand(shape, generator=generator, dtype=torch.float64)
        noise = torch.randn(self.num_rows, generator=generator, dtype=torch.float64)
        return self.width * x, self.function(x) + self.noise * noise

    def test_inputs(self) -> Tensor:
        """Inputs over the range of the data `(n, D)`, its corners among them."""
        num = {1: 201, 2: 21, 3: 8}[self.num_dims]
        x, _ = self.data()
        sides = [torch.linspace(float(a), float(b), num, dtype=x.dtype) for a, b in zip(*x.aminmax(dim=0), strict=True)]
        return torch.cartesian_prod(*sides).reshape(-1, self.num_dims)


def _wave(x: Tensor) -> Tensor:
    return torch.sin(2 * math.pi * x[:, 0])


def _fast_wave(x: Tensor) -> Tensor:
    return torch.sin(40 * x[:, 0])


def _step(x: Tensor) -> Tensor:
    return torch.tanh(20 * (x[:, 0] - 0.4)) + torch.sin(5 * x[:, 0])


def _beats(x: Tensor) -> Tensor:
    return torch.cos(30 * x[:, 0]) * (1 + x[:, 0]) + 0.5 * torch.sin(11 * x[:, 0])


def _surface(x: Tensor) -> Tensor:
    return torch.sin(6 * x[:, 0]) * torch.cos(4 * x[:, 1])


def _volume(x: Tensor) -> Tensor:
    return torch.sin(4 * x[:, 0]) * torch.cos(3 * x[:, 1]) + x[:, 2] ** 2


def _spectral_mixture() -> Kernel:
    kernel = SpectralMixture(num_mixtures=3)
    means = torch.tensor([0.5, 2.0, 5.0]).reshape(3, 1, 1)
    kernel.initialize(mixture_means=means, mixture_scales=torch.tensor([0.2, 0.5, 0.5]).reshape(3, 1, 1))
    return kernel


PROBLEMS = [
    Problem("RBF, sine", lambda: ScaleKernel(RBFKernel()), _wave, num_rows=100, steps=50),
    Problem("RBF, sine, L-BFGS", lambda: ScaleKernel(RBFKernel()), _wave, num_rows=100, optimizer="lbfgs"),
    Problem("RBF, fast sine", lambda: ScaleKernel(RBFKernel()), _fast_wave),
    Problem("RBF, fast sine, 0 to 50", lambda: ScaleKernel(RBFKernel()), _fast_wave, width=50.0),
    Problem("Matern 5/2, step", lambda: ScaleKernel(MaternKernel(nu=2.5)), _step),
    Problem("Matern 3/2, step, L-BFGS", lambda: ScaleKernel(MaternKernel(nu=1.5)), _step, optimizer="lbfgs"),
    Problem("Matern 3/2, step, 0 to 20", lambda: ScaleKernel(MaternKernel(nu=1.5)), _step, width=20.0, noise=0.1),
    Problem("RQ, sine", lambda: ScaleKernel(RQKernel()), _wave),
    Problem("RQ, step, 0 to 10", lambda: ScaleKernel(RQKernel()), _step, width=10.0),
    Problem("periodic times RBF", lambda: ScaleKernel(PeriodicKernel() * RBFKernel()), _beats, width=5.0, noise=0.1),
    Problem("spectral mixture", _spectral_mixture, _beats, width=2.0, num_rows=150),
    Problem("RBF + Matern 3/2", lambda: ScaleKernel(RBFKernel()) + ScaleKernel(MaternKernel(nu=1.5)), _step),
    Problem("RBF, 2-D", lambda: ScaleKernel(RBFKernel(ard_num_dims=2)), _surface, 2, 500, noise=0.1, optimizer="lbfgs"),
    Problem("Matern 5/2, 2-D", lambda: ScaleKernel(MaternKernel(nu=2.5, ard_num_dims=2)), _surface, 2, 500, noise=0.1),
    Problem(
        "Matern 5/2, 2-D, 0 to 10",
        lambda: ScaleKernel(MaternKernel(nu=2.5, ard_num_dims=2)),
        _surface,
        2,
        500,
        width=10.0,
        noise=0.1,
    ),
    Problem("Matern 3/2, 2-D", lambda: ScaleKernel(MaternKernel(nu=1.5, ard_num_dims=2)), _surface, 2, 500),
    Problem("RBF, 3-D", lambda: ScaleKernel(RBFKernel(ard_num_dims=3)), _volume, 3, 500),
    Problem(
        "sum over inputs, 3-D",
        lambda: ScaleKernel(RBFKernel(active_dims=[0, 1])) + ScaleKernel(MaternKernel(nu=2.5, active_dims=[2])),
        _volume,
        3,
        500,
    ),
]


class Model(gpytorch.models.ExactGP):
    """
    The GP of GPyTorch's tutorials.

    :param x: Training inputs.
    :param y: Training targets.
    :param kernel: The kernel.
    """

    def __init__(self, x: Tensor, y: Tensor, kernel: Kernel):
        super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = kernel

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def train(model: Model, optimizer: str, steps: int) -> float:
    """
    Maximise the marginal likelihood.

    :param model: The model.
    :param optimizer: ``adam`` or ``lbfgs``.
    :param steps: How many.
    :return: Seconds.
    """
    start = time.perf_counter()
    model.train()
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)

    def closure() -> Tensor:
        stepper.zero_grad()
        loss = -objective(model(*model.train_inputs), model.train_targets)
        loss.backward()
        return loss

    stepper: torch.optim.Optimizer
    if optimizer == "adam":
        stepper = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(steps):
            stepper.step(closure)
    else:
        stepper = torch.optim.LBFGS(model.parameters(), max_iter=steps, line_search_fn="strong_wolfe")
        stepper.step(closure)
    return time.perf_counter() - start


def predict(model: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    """
    Mean and standard deviation of new observations.

    :param model: A trained model.
    :param x: `(n, D)`.
    """
    with torch.no_grad():
        prediction = model.likelihood(model.eval()(x))
        return prediction.mean, prediction.stddev


def compare(problem: Problem, tol: float) -> dict[str, float | int | str]:
    """
    One row of the table.

    :param problem: The problem.
    :param tol: The tolerance of `from_tolerance`.
    """
    x, y = problem.data()
    base = problem.kernel().double()
    exact = Model(x, y, copy.deepcopy(base)).double()
    swapped = Model(x, y, tkrr.HilbertKernel.from_tolerance(base, x, tol)).double()
    exact_seconds = train(exact, problem.optimizer, problem.steps)
    seconds = train(swapped, problem.optimizer, problem.steps)
    test_x = problem.test_inputs()
    (mean, sd), (exact_mean, exact_sd) = predict(swapped, test_x), predict(exact, test_x)
    kernel = swapped.covar_module
    return {
        "problem": problem.name,
        "mean": float((mean - exact_mean).abs().max() / y.std()),
        "sd": float((sd - exact_sd).abs().max() / y.std()),
        "bases": kernel.num_revisions + 1,
        "functions": kernel.expansion().num_functions,
        "seconds": seconds,
        "exact_seconds": exact_seconds,
    }


def compare_speed(problem: Problem, tol: float, repeat: int) -> dict[str, float | int | str]:
    """
    Training times of the swapped GP relative to those of the exact GP, the shortest of several.

    :param problem: The problem.
    :param tol: The tolerance of `from_tolerance`.
    :param repeat: How often.
    """
    x, y = problem.data()
    best = {"swapped": math.inf, "exact": math.inf}
    for _ in range(repeat):
        models = {
            "swapped": Model(x, y, tkrr.HilbertKernel.from_tolerance(problem.kernel().double(), x, tol)),
            "exact": Model(x, y, problem.kernel()),
        }
        for name, model in models.items():
            best[name] = min(best[name], train(model.double(), problem.optimizer, problem.steps))
        num_functions = models["swapped"].covar_module.expansion().num_functions
    return {
        "problem": f"{problem.name}, N = {problem.num_rows}",
        "functions": num_functions,
        "seconds": best["swapped"],
        "exact_seconds": best["exact"],
        "speedup": best["exact"] / best["swapped"],
    }


def compare_with_fixed(problem: Problem, tol: float, repeat: int) -> dict[str, float | int | str]:
    """
    Training time relative to that of a fixed basis which is the one that training ended with.

    :param problem: The problem.
    :param tol: The tolerance of `from_tolerance`.
    :param repeat: How often.
    """
    x, y = problem.data()
    best = {"swapped": math.inf, "fixed": math.inf}
    for _ in range(repeat):
        swapped = Model(x, y, tkrr.HilbertKernel.from_tolerance(problem.kernel().double(), x, tol)).double()
        best["swapped"] = min(best["swapped"], train(swapped, problem.optimizer, problem.steps))
        kernel = swapped.covar_module
        basis = copy.deepcopy(kernel.domain), kernel.num_basis
        fixed = Model(x, y, tkrr.HilbertKernel(problem.kernel().double(), *basis)).double()
        best["fixed"] = min(best["fixed"], train(fixed, problem.optimizer, problem.steps))
    return {
        "problem": f"{problem.name}, N = {problem.num_rows}",
        "bases": kernel.num_revisions + 1,
        "functions": kernel.expansion().num_functions,
        "seconds": best["swapped"],
        "fixed_seconds": best["fixed"],
        "ratio_to_fixed": best["swapped"] / best["fixed"],
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tol", type=float, default=3e-3)
    parser.add_argument("--repeat", type=int, default=2, help="timings of which the shortest counts")
    parser.add_argument("--rows", type=int, default=2_000, help="rows where the exact GP is timed")
    parser.add_argument("--many-rows", type=int, default=50_000, help="rows where a fixed basis is timed")
    parser.add_argument("--timed-steps", type=int, default=50, help="steps of training beside the exact GP")
    parser.add_argument("--only", nargs="*", help="names of problems; nothing else is measured then")


def _add(report: Report, measure: Callable[..., dict[str, float | int | str]], *args: Any) -> None:
    report.add(**measure(*args))


def run(args: argparse.Namespace) -> Report:
    report = Report("swap", f"The exact GP and its one-line swap, tol = {args.tol:g}")
    problems = [problem for problem in PROBLEMS if not args.only or problem.name in args.only]
    # Both deterministic: the exact GP by Cholesky at every size.
    with gpytorch.settings.max_cholesky_size(10**6), warnings.catch_warnings():
        warnings.simplefilter("ignore", gpytorch.utils.warnings.NumericalWarning)
        for problem in problems:
            report.attempt(problem.name, partial(_add, report, compare, problem, args.tol))
        for name in ("mean", "sd"):
            values = [row[name] for row in report.rows]
            report.notes.append(
                f"{name}: median {statistics.median(values):.4f}, largest {max(values):.4f} of the targets' sd"
            )
        if args.only:
            return report
        surface = next(problem for problem in PROBLEMS if problem.name == "Matern 5/2, 2-D")
        line = next(problem for problem in PROBLEMS if problem.name == "Matern 3/2, step, 0 to 20")
        for problem in (line, surface):
            rows = replace(problem, num_rows=args.rows, steps=args.timed_steps)
            report.attempt("speed", partial(_add, report, compare_speed, rows, args.tol, args.repeat))
        many = replace(surface, num_rows=args.many_rows)
        report.attempt("fixed basis", partial(_add, report, compare_with_fixed, many, args.tol, args.repeat))
    report.notes.append(
        "mean, sd: largest absolute difference from the exact GP over the data's range, divided by the targets' sd; sd "
        "of new observations. bases: how many were used in the training run. Times are those of whole training runs."
    )
    return report
