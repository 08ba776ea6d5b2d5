"""Change one line: HilbertKernel.from_tolerance against the exact GP, both trained the same way."""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import gpytorch
import torch
from gpytorch.kernels import (
    ConstantKernel,
    Kernel,
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
)
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
    :param inputs: ``uniform``, ``normal`` (standardised), ``clusters``, or ``grid`` (integers).
    :param dtype: Of everything.
    :param mean: Makes the mean.
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
    inputs: str = "uniform"
    dtype: torch.dtype = torch.float64
    mean: Callable[[], gpytorch.means.Mean] = gpytorch.means.ConstantMean

    def _inputs(self, generator: torch.Generator) -> Tensor:
        shape = self.num_rows, self.num_dims
        if self.inputs == "uniform":
            return torch.rand(shape, generator=generator, dtype=torch.float64)
        normal = torch.randn(shape, generator=generator, dtype=torch.float64)
        if self.inputs == "normal":
            return normal
        if self.inputs == "clusters":
            centers = torch.rand(6, self.num_dims, generator=generator, dtype=torch.float64)
            return centers[torch.randint(6, (self.num_rows,), generator=generator)] + 0.03 * normal
        side = torch.arange(round(self.num_rows ** (1 / self.num_dims)), dtype=torch.float64)
        return torch.cartesian_prod(*[side] * self.num_dims).reshape(-1, self.num_dims)

    def data(self) -> tuple[Tensor, Tensor]:
        """Inputs `(N, D)` and targets `(N,)`."""
        generator = torch.Generator().manual_seed(0)
        x = self._inputs(generator)
        noise = torch.randn(len(x), generator=generator, dtype=torch.float64)
        unit = x if self.inputs == "uniform" else (x - x.amin(0)) / (x.amax(0) - x.amin(0))
        y = self.function(unit) + self.noise * noise
        return (self.width * x).to(self.dtype), y.to(self.dtype)

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


def _ripple(x: Tensor) -> Tensor:
    return torch.exp(-2 * x[:, 0]) * torch.sin(25 * x[:, 0]) + x[:, 0]


def _kink(x: Tensor) -> Tensor:
    return (x[:, 0] - 0.35).abs() + 0.4 * torch.sin(9 * x[:, 0])


def _trend(x: Tensor) -> Tensor:
    return 2 * x[:, 0] + 0.4 * torch.sin(14 * x[:, 0])


def _season(x: Tensor) -> Tensor:
    return torch.sin(45 * x[:, 0]) * (1 + x[:, 0]) + x[:, 0]


def _hill(x: Tensor) -> Tensor:
    return torch.exp(-8 * (x[:, :2] - 0.4).square().sum(-1)) + 0.5 * x[:, 1]


def _stripes(x: Tensor) -> Tensor:
    return torch.sin(9 * x[:, 0] + 4 * x[:, 1]) + 0.3 * x[:, 0]


def _valley(x: Tensor) -> Tensor:
    return torch.cos(3 * x[:, 0] + x[:, 1]) + 2 * (x[:, 2] - 0.5).square()


def _mixture(means: list[float], scales: list[float]) -> Kernel:
    kernel = SpectralMixture(num_mixtures=len(means))
    kernel.initialize(mixture_means=torch.tensor(means).reshape(-1, 1, 1))
    kernel.initialize(mixture_scales=torch.tensor(scales).reshape(-1, 1, 1))
    return kernel


def _matern(nu: float, **kwargs: Any) -> Kernel:
    return ScaleKernel(MaternKernel(nu=nu, **kwargs))


def _rbf(**kwargs: Any) -> Kernel:
    return ScaleKernel(RBFKernel(**kwargs))


#: Written down when the mechanism was ready, to see how it does on problems that it was not made with. Their first run
#: missed one by far (Matern 5/2 in clusters of two inputs: mean off by 0.097) and led to the finer start and the rule
#: for up to 500 rows in `hilbert/tolerance.py`; the others were not used for any choice.
HELD_OUT = [
    Problem("RBF, 0 to 0.001", _rbf, _ripple, 1, 150, 1e-3, 0.05, steps=200),
    Problem("RBF, 0 to 1000", _rbf, _ripple, 1, 200, 1e3, 0.2),
    Problem("RBF, little noise", _rbf, _wave, 1, 120, 3.0, 0.01, steps=300),
    Problem("Matern 1/2, normal", partial(_matern, 0.5), _kink, 1, 150, noise=0.1, inputs="normal"),
    Problem("Matern 3/2, clusters", partial(_matern, 1.5), _ripple, 1, 200, noise=0.05, inputs="clusters", steps=150),
    Problem("Matern 3/2, little noise", partial(_matern, 1.5), _kink, 1, 150, 2.0, 0.02, steps=200),
    Problem(
        "Matern 5/2, integers, L-BFGS",
        partial(_matern, 2.5),
        _ripple,
        1,
        150,
        noise=0.1,
        inputs="grid",
        optimizer="lbfgs",
    ),
    Problem("RQ, normal", lambda: ScaleKernel(RQKernel()), _ripple, 1, 200, noise=0.1, inputs="normal"),
    Problem("RBF + linear, 0 to 0.001", lambda: _rbf() + LinearKernel(), _trend, 1, 200, 1e-3, 0.1, steps=60),
    Problem("RBF + linear, 0 to 100", lambda: _rbf() + LinearKernel(), _trend, 1, 200, 100.0, 0.2),
    Problem(
        "constant + Matern 5/2, linear mean",
        lambda: ConstantKernel() + _matern(2.5),
        _trend,
        1,
        150,
        2.0,
        0.1,
        mean=partial(gpytorch.means.LinearMean, 1),
    ),
    Problem("periodic + RBF", lambda: ScaleKernel(PeriodicKernel()) + _rbf(), _season, 1, 200, 8.0, 0.1),
    Problem(
        "periodic times Matern 3/2",
        lambda: ScaleKernel(PeriodicKernel() * MaternKernel(nu=1.5)),
        _season,
        1,
        200,
        6.0,
        0.1,
    ),
    Problem(
        "spectral mixture of four",
        partial(_mixture, [0.3, 0.9, 1.7, 3.5], [0.1, 0.2, 0.3, 0.5]),
        _ripple,
        1,
        200,
        3.0,
        0.05,
    ),
    Problem(
        "spectral mixture, float32",
        partial(_mixture, [0.4, 1.8], [0.3, 0.3]),
        _ripple,
        1,
        150,
        2.0,
        0.1,
        dtype=torch.float32,
    ),
    Problem("RBF, float32", _rbf, _ripple, 1, 150, 4.0, 0.1, dtype=torch.float32),
    Problem("RBF, 2-D, normal", partial(_rbf, ard_num_dims=2), _hill, 2, 300, noise=0.05, inputs="normal"),
    Problem("RBF, 2-D, integers", _rbf, _stripes, 2, 289, noise=0.1, inputs="grid"),
    Problem("Matern 5/2, 2-D, normal", partial(_matern, 2.5), _hill, 2, 300, noise=0.05, inputs="normal", steps=60),
    Problem("Matern 5/2, 2-D, clusters", partial(_matern, 2.5), _stripes, 2, 300, noise=0.05, inputs="clusters"),
    Problem("Matern 3/2, 2-D, normal", partial(_matern, 1.5), _hill, 2, 300, noise=0.1, inputs="normal"),
    Problem(
        "Matern 3/2, 2-D, L-BFGS", partial(_matern, 1.5, ard_num_dims=2), _stripes, 2, 300, noise=0.2, optimizer="lbfgs"
    ),
    Problem("Matern 3/2, 2-D, float32", partial(_matern, 1.5), _hill, 2, 300, 3.0, 0.1, dtype=torch.float32),
    Problem("Matern 1/2, 2-D, much noise", partial(_matern, 0.5), _stripes, 2, 300, noise=0.5),
    Problem("RQ, 2-D, L-BFGS", lambda: ScaleKernel(RQKernel()), _hill, 2, 300, noise=0.05, optimizer="lbfgs"),
    Problem(
        "RBF times Matern 5/2, 2-D",
        lambda: ScaleKernel(RBFKernel(active_dims=[0]) * MaternKernel(nu=2.5, active_dims=[1])),
        _stripes,
        2,
        300,
        5.0,
        0.1,
    ),
    Problem(
        "RBF + Matern 3/2 + linear, 2-D",
        lambda: _rbf(active_dims=[0]) + _matern(1.5, active_dims=[1]) + LinearKernel(),
        _hill,
        2,
        300,
        noise=0.05,
    ),
    Problem("Matern 5/2, 2-D, 900 rows", partial(_matern, 2.5, ard_num_dims=2), _stripes, 2, 900, noise=0.1, steps=50),
    Problem("Matern 3/2, 2-D, 900 rows", partial(_matern, 1.5, ard_num_dims=2), _stripes, 2, 900, noise=0.2, steps=50),
    Problem("RBF, 3-D, normal", _rbf, _valley, 3, 400, noise=0.1, inputs="normal"),
    Problem("RBF, 3-D, L-BFGS", partial(_rbf, ard_num_dims=3), _valley, 3, 400, noise=0.05, optimizer="lbfgs"),
    Problem("Matern 5/2, 3-D", partial(_matern, 2.5, ard_num_dims=3), _valley, 3, 400, 2.0, 0.1, steps=60),
]


#: With more rows than are evaluated by the kernel itself in any case. Written down before any of them was run. The
#: first run missed one by far (RBF in clusters of two inputs: mean off by 0.109) and led to the earlier trigger of
#: small bases in `hilbert/tolerance.py`; the others were not used for any choice.
MORE_ROWS = [
    Problem("RBF, 700 rows", _rbf, _ripple, 1, 700, 30.0, 0.1),
    Problem("RBF, 600 rows, L-BFGS", _rbf, _fast_wave, 1, 600, 0.01, 0.3, optimizer="lbfgs"),
    Problem("Matern 5/2, 800 rows, normal", partial(_matern, 2.5), _kink, 1, 800, noise=0.05, inputs="normal"),
    Problem("Matern 3/2, 700 rows, 0 to 100", partial(_matern, 1.5), _step, 1, 700, 100.0, 0.2),
    Problem("RQ, 600 rows", lambda: ScaleKernel(RQKernel()), _beats, 1, 600, 3.0, 0.1, steps=60),
    Problem(
        "periodic times RBF, 600 rows", lambda: ScaleKernel(PeriodicKernel() * RBFKernel()), _season, 1, 600, 4.0, 0.2
    ),
    Problem("spectral mixture, 600 rows", partial(_mixture, [0.5, 2.0], [0.3, 0.4]), _beats, 1, 600, 3.0, 0.2),
    Problem("RBF + Matern 3/2, 700 rows", lambda: _rbf() + _matern(1.5), _trend, 1, 700, 5.0, 0.1),
    Problem("RBF, 2-D, 800 rows", partial(_rbf, ard_num_dims=2), _stripes, 2, 800, 20.0, 0.1),
    Problem("RBF, 2-D, 600 rows, clusters", _rbf, _hill, 2, 600, noise=0.05, inputs="clusters"),
    Problem("RBF, 2-D, 700 rows, L-BFGS", _rbf, _surface, 2, 700, noise=0.2, inputs="normal", optimizer="lbfgs"),
    Problem("Matern 5/2, 2-D, 1 000 rows", partial(_matern, 2.5), _hill, 2, 1000, 3.0, 0.1, steps=60),
    Problem("RBF, 3-D, 800 rows", partial(_rbf, ard_num_dims=3), _volume, 3, 800, 0.2, 0.1, steps=80),
    Problem("RBF, 3-D, 1 000 rows, normal", _rbf, _valley, 3, 1000, noise=0.2, inputs="normal", steps=60),
]

#: The problems by how they came about.
GROUPS = {"tuned on": PROBLEMS, "held out": HELD_OUT, "more rows": MORE_ROWS}


class Model(gpytorch.models.ExactGP):
    """
    The GP of GPyTorch's tutorials.

    :param x: Training inputs.
    :param y: Training targets.
    :param kernel: The kernel.
    :param mean: The mean; a ConstantMean by default.
    """

    def __init__(self, x: Tensor, y: Tensor, kernel: Kernel, mean: gpytorch.means.Mean | None = None):
        super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
        self.mean_module = gpytorch.means.ConstantMean() if mean is None else mean
        self.covar_module = kernel

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def train(model: Model, optimizer: str, steps: int) -> float:
    """
    Maximise the marginal likelihood.

    :param model: The model.
    :param optimizer: ``adam`` or ``lbfgs``.
    :param steps: How many.
    :return: Processor time in seconds.
    """
    start = time.process_time()
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
    return time.process_time() - start


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
    base = problem.kernel().to(problem.dtype)
    mean_module = problem.mean()  # one for all: LinearMean starts at random
    exact = Model(x, y, copy.deepcopy(base), copy.deepcopy(mean_module)).to(problem.dtype)
    test_x = problem.test_inputs()
    with gpytorch.settings.max_cholesky_size(10**6):  # deterministic
        exact_seconds = train(exact, problem.optimizer, problem.steps)
        expected = predict(exact, test_x)

    def swap() -> Model:
        kernel = tkrr.HilbertKernel.from_tolerance(copy.deepcopy(base), x, tol)
        return Model(x, y, kernel, copy.deepcopy(mean_module)).to(problem.dtype)

    def differences(model: Model) -> list[float]:
        pairs = zip(predict(model, test_x), expected, strict=True)
        return [float((own - other).abs().max() / y.std()) for own, other in pairs]

    swapped, reduced = swap(), swap()
    seconds = train(swapped, problem.optimizer, problem.steps)
    mean, sd = differences(swapped)
    with reduced.covar_module.by_functions():
        functions_seconds = train(reduced, problem.optimizer, problem.steps)
        functions_mean, functions_sd = differences(reduced)
    return {
        "problem": problem.name,
        "group": next((name for name, problems in GROUPS.items() if problem in problems), "other"),
        "rows": len(x),
        "mean": mean,
        "sd": sd,
        "is_exact": swapped.covar_module.is_exact,
        "functions_mean": functions_mean,
        "functions_sd": functions_sd,
        "bases": reduced.covar_module.num_revisions + 1,
        "functions": reduced.covar_module.expansion().num_functions,
        "seconds": seconds,
        "functions_seconds": functions_seconds,
        "exact_seconds": exact_seconds,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tol", type=float, default=3e-3)
    parser.add_argument("--only", nargs="*", help="names of problems")


def _add(report: Report, measure: Callable[..., dict[str, float | int | str]], *args: Any) -> None:
    report.add(**measure(*args))


def run(args: argparse.Namespace) -> Report:
    report = Report("swap", f"The exact GP and its one-line swap, tol = {args.tol:g}")
    problems = [each for group in GROUPS.values() for each in group if not args.only or each.name in args.only]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gpytorch.utils.warnings.NumericalWarning)
        warnings.simplefilter("ignore", gpytorch.utils.warnings.GPInputWarning)
        for problem in problems:
            report.attempt(problem.name, partial(_add, report, compare, problem, args.tol))
    for kind in GROUPS:
        rows = [row for row in report.rows if row.get("group") == kind]
        for name in ("mean", "sd", "functions_mean", "functions_sd") if rows else ():
            values = [row[name] for row in rows]
            report.notes.append(
                f"{kind}, {len(values)} problems, {name}: median {statistics.median(values):.4f}, largest "
                f"{max(values):.4f} of the targets' sd"
            )
    report.notes.append(
        "mean, sd: largest absolute difference from the exact GP over the data's range, divided by the targets' sd; sd "
        "of new observations. is_exact: whether the kernel was evaluated as it is in the end, as it always is up to "
        "500 rows; functions_mean, functions_sd: the same differences where functions are used in any case "
        "(`kernel.by_functions()`), with the number of bases in the training run and of functions at its end. Times "
        "are processor times of whole training runs; more rows: python -m benchmarks swap_speed."
    )
    return report
