"""Change one line: how long whole training runs take, beside the exact GP and beside a basis that stays."""

from __future__ import annotations

import argparse
import copy
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import gpytorch
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from torch import Tensor

import gpytorch_tkrr as tkrr

from .harness import Report
from .swap import PROBLEMS, Model, Problem, train

#: Problems of :mod:`benchmarks.swap` that are timed beside the exact GP, with more rows.
TIMED = ("Matern 3/2, step, 0 to 20", "RQ, sine", "RBF, 2-D", "Matern 5/2, 2-D", "RBF, 3-D", "Matern 3/2, 2-D")


def _ripples(x: Tensor) -> Tensor:
    return torch.sin(22 * x[:, 0] + 9 * x[:, 1]) + torch.cos(14 * x[:, 1])


#: Timed beside a basis that stays. The first keeps the one that it starts with; lengthscales of the second shrink to a
#: fifth of their start while it is trained, and those of the third grow.
MANY_ROWS = [
    next(problem for problem in PROBLEMS if problem.name == "Matern 5/2, 2-D"),
    Problem("RBF, ripples, 2-D", lambda: ScaleKernel(RBFKernel(ard_num_dims=2)), _ripples, 2, noise=0.1),
    next(problem for problem in PROBLEMS if problem.name == "Matern 5/2, 2-D, 0 to 10"),
]


def compare_with_exact(problem: Problem, tol: float, repeat: int) -> dict[str, float | int | str]:
    """
    Training times of the swapped GP and of the exact GP, the shortest of several.

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
            rows = 10**6 if name == "exact" else 800  # deterministic
            with gpytorch.settings.max_cholesky_size(rows):
                best[name] = min(best[name], train(model.double(), problem.optimizer, problem.steps))
        kernel = models["swapped"].covar_module
    return {
        **_facts(problem, kernel, best["swapped"]),
        "exact_seconds": best["exact"],
        "speedup": best["exact"] / best["swapped"],
    }


def compare_with_fixed(problem: Problem, tol: float, repeat: int) -> dict[str, float | int | str]:
    """
    Training times of the swapped GP and of one whose basis is, from the start, the one that the first has in the end.

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
        fixed = tkrr.HilbertKernel(problem.kernel().double(), *basis, index_set=kernel.index_set)
        best["fixed"] = min(best["fixed"], train(Model(x, y, fixed).double(), problem.optimizer, problem.steps))
    return {
        **_facts(problem, kernel, best["swapped"]),
        "fixed_seconds": best["fixed"],
        "ratio_to_fixed": best["swapped"] / best["fixed"],
    }


def _facts(problem: Problem, kernel: tkrr.HilbertKernel, seconds: float) -> dict[str, float | int | str]:
    """What a row says of the swapped GP after its training."""
    return {
        "problem": f"{problem.name}, N = {problem.num_rows}",
        "steps": problem.steps,
        "bases": kernel.num_revisions + 1,
        "functions": kernel.expansion().num_functions,
        "seconds": seconds,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tol", type=float, default=3e-3)
    parser.add_argument("--repeat", type=int, default=2, help="timings of which the shortest counts")
    parser.add_argument("--rows", type=int, default=2_000, help="rows where the exact GP is timed, or 0")
    parser.add_argument("--many-rows", type=int, default=50_000, help="rows where a fixed basis is timed, or 0")
    parser.add_argument("--only", nargs="*", help="names of problems")
    parser.add_argument("--steps", type=int, default=100, help="steps of Adam in a training run")


def run(args: argparse.Namespace) -> Report:
    report = Report("swap_speed", f"Whole training runs of {args.steps} steps, tol = {args.tol:g}")
    pairs = [
        (compare_with_fixed, replace(problem, num_rows=args.many_rows)) for problem in MANY_ROWS if args.many_rows > 0
    ]
    pairs += [
        (compare_with_exact, replace(problem, num_rows=args.rows))
        for problem in PROBLEMS
        if problem.name in TIMED and args.rows > 0
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gpytorch.utils.warnings.NumericalWarning)
        for measure, problem in pairs:
            if args.only and problem.name not in args.only:
                continue
            timed = replace(problem, steps=args.steps, optimizer="adam")
            report.attempt(timed.name, partial(_add, report, measure, timed, args))
    report.notes.append(
        "Processor times of whole training runs, choices of bases included. fixed_seconds: the same training with the "
        "basis that the swapped GP ends with. bases: how many were used."
    )
    return report


def _add(
    report: Report,
    measure: Callable[[Problem, float, int], dict[str, float | int | str]],
    problem: Problem,
    args: argparse.Namespace,
) -> None:
    report.add(**measure(problem, args.tol, args.repeat))
