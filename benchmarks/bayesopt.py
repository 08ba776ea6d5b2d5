"""Bayesian optimisation: closed loops, the time of a step against the number of observations, and outliers."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from botorch.acquisition import LogExpectedImprovement
from botorch.exceptions.warnings import BotorchWarning
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.robust_relevance_pursuit_model import RobustRelevancePursuitSingleTaskGP
from botorch.optim import optimize_acqf
from botorch.test_functions import Ackley, Hartmann, Levy, Rosenbrock, SyntheticTestFunction
from botorch.utils.transforms import unnormalize
from gpytorch.likelihoods import StudentTLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor
from torch.quasirandom import SobolEngine

from gpytorch_tkrr.botorch import HilbertGPModel, TKRRModel

from .harness import Report

MODELS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "SingleTaskGP": SingleTaskGP,
    "HilbertGPModel": HilbertGPModel,
    "TKRRModel": TKRRModel,
}

#: Rows of a report by problem and model.
Rows = dict[tuple[str, str], dict[str, Any]]

PROBLEMS: dict[str, Callable[[], SyntheticTestFunction]] = {
    "hartmann6": lambda: Hartmann(6, negate=True),
    "ackley10": lambda: Ackley(10, negate=True),
    "levy4": lambda: Levy(4, negate=True),
    "rosenbrock8": lambda: Rosenbrock(8, negate=True),
}

#: Up to so many inputs `HilbertGPModel` is used, too.
MAX_HILBERT_DIMS = 6


@dataclass(frozen=True)
class Loop:
    """
    A closed loop.

    :param name: Of the rows in the table.
    :param problem: A key of `PROBLEMS`.
    :param initial: Observations at the start.
    :param evaluations: Observations at the end.
    :param noise: Standard deviation of the noise, relative to that of the initial outcomes.
    :param seeds: How many.
    """

    name: str
    problem: str
    initial: int
    evaluations: int
    noise: float
    seeds: int

    @property
    def models(self) -> list[str]:
        """Those that are compared; SingleTaskGP comes first."""
        num_dims = make_problem(self.problem).dim
        return [name for name in MODELS if name != "HilbertGPModel" or num_dims <= MAX_HILBERT_DIMS]


def make_loops(args: argparse.Namespace) -> list[Loop]:
    """
    Few observations of each function without noise, then many noisy ones of the first.

    :param args: Sizes.
    """
    few = [Loop(name, name, args.initial, args.evaluations, 0.0, args.seeds) for name in PROBLEMS]
    many = args.many_initial
    noisy = Loop(f"hartmann6, {many} noisy", "hartmann6", many, many + args.many_evaluations, 0.1, args.many_seeds)
    return [*few, noisy]


def make_problem(name: str) -> SyntheticTestFunction:
    """A test function to maximise."""
    return PROBLEMS[name]().to(torch.float64)


def evaluate(problem: SyntheticTestFunction, x: Tensor) -> Tensor:
    """The function on the unit cube, `(n, 1)`."""
    bounds = torch.as_tensor(problem.bounds)
    return problem(unnormalize(x, bounds)).unsqueeze(-1)


def fit(model: Any) -> Any:
    """BoTorch's fit, without its remarks."""
    with warnings.catch_warnings():
        for category in (BotorchWarning, NumericalWarning, RuntimeWarning):
            warnings.simplefilter("ignore", category)
        warnings.filterwarnings("ignore", "Converting a tensor with requires_grad")  # BoTorch's relevance pursuit
        fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    return model


def step(model_class: Callable[[Tensor, Tensor], Any], x: Tensor, y: Tensor) -> Tensor:
    """Fit, maximise LogEI from 8 starts, return the candidate `(1, d)`."""
    model = fit(model_class(x, y))
    with warnings.catch_warnings():
        for category in (BotorchWarning, NumericalWarning, RuntimeWarning):
            warnings.simplefilter("ignore", category)
        bounds = torch.tensor([[0.0], [1.0]]).to(x).expand(2, x.shape[-1])
        with torch.no_grad():
            best = (
                model.posterior(x).mean.max() if len(x) > 100 else y.max()
            )  # of many noisy values the largest is luck
        acquisition = LogExpectedImprovement(model, best_f=best)
        candidate, _ = optimize_acqf(
            acquisition, bounds, q=1, num_restarts=8, raw_samples=256, options={"batch_limit": 8, "maxiter": 100}
        )
    return candidate.detach()


def closed_loop(loop: Loop, model_class: Callable[[Tensor, Tensor], Any], seed: int) -> list[float]:
    """The best value without noise after each evaluation; the initial observations depend on the seed alone."""
    problem = make_problem(loop.problem)
    torch.manual_seed(seed)
    x = SobolEngine(problem.dim, scramble=True, seed=seed).draw(loop.initial).to(torch.float64)
    values = evaluate(problem, x)
    scale = loop.noise * values.std()
    y = values + scale * torch.randn_like(values)
    while len(x) < loop.evaluations:
        candidate = step(model_class, x, y)
        value = evaluate(problem, candidate)
        x, values = torch.cat([x, candidate]), torch.cat([values, value])
        y = torch.cat([y, value + scale * torch.randn_like(value)])
    return values.squeeze(-1).cummax(0).values.tolist()


def timed_loop(loop: Loop, name: str, seed: int) -> tuple[float, float]:
    """The best value of a closed loop, and its seconds per step with one thread; run in a process of its own."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    best = closed_loop(loop, MODELS[name], seed)[-1]
    return best, (time.perf_counter() - start) / max(loop.evaluations - loop.initial, 1)


def noisy_hartmann(num_rows: int) -> tuple[Tensor, Tensor]:
    """Observations of Hartmann-6 with a tenth of their standard deviation as noise."""
    problem = make_problem("hartmann6")
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(num_rows, problem.dim, generator=generator, dtype=torch.float64)
    y = evaluate(problem, x)
    return x, y + 0.1 * y.std() * torch.randn(y.shape, generator=generator, dtype=torch.float64)


def time_step(model_class: Callable[[Tensor, Tensor], Any], num_rows: int) -> float:
    """Seconds of one step after noisy observations; the shorter of two where that takes little time."""
    x, y = noisy_hartmann(num_rows)
    best = float("inf")
    for _ in range(2):
        torch.manual_seed(0)
        start = time.perf_counter()
        step(model_class, x, y)
        best = min(best, time.perf_counter() - start)
        if best > 10:
            break
    return best


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--initial", type=int, default=12)
    parser.add_argument("--evaluations", type=int, default=36)
    parser.add_argument("--many-initial", type=int, default=600, help="observations before the loop with many of them")
    parser.add_argument("--many-evaluations", type=int, default=6, help="evaluations of that loop")
    parser.add_argument("--many-seeds", type=int, default=5, help="seeds of that loop")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="which to run")
    parser.add_argument(
        "--previous", type=Path, help="a report with the same settings: its rows of models that are not run are kept"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="closed loops run at once")
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[20, 60, 200, 500, 1_000, 2_000, 5_000, 20_000],
        help="observations of the timed steps",
    )  # fmt: skip
    parser.add_argument("--exact-rows", type=int, default=2_000, help="most observations of SingleTaskGP in those")
    parser.add_argument("--corrupted-rows", type=int, default=150, help="observations, a tenth of them corrupted")


def run(args: argparse.Namespace) -> Report:
    report = Report("bayesopt", f"Best value after {args.evaluations} evaluations ({args.seeds} seeds), and one step")
    kept = _read_previous(args)
    report.attempt("closed loops", partial(_run_loops, report, args, kept))
    report.attempt("one step", partial(_time_steps, report, args, kept))
    report.attempt("outliers", partial(_compare_outliers, report, args))
    report.notes.append(
        "Maximisation by LogEI, one candidate at a time; initial observations of a seed are the same for all. Closed "
        "loops have one thread each. Up to 500 observations all three models are the same exact process. Values are "
        "those without noise."
    )
    report.notes.append(
        "reaches: whether the median is at least the lower quartile of SingleTaskGP. One step is a fit with default "
        "settings, the acquisition function and its maximisation. times_faster: than SingleTaskGP with as many "
        "observations, or with its most where it has fewer. Corrupted: one outcome in ten is replaced by one that is "
        "five standard deviations away; the error is that of the mean at new inputs, relative to the outcomes' "
        "standard deviation."
    )
    return report


def _read_previous(args: argparse.Namespace) -> Rows:
    """Rows of an earlier report by problem and model, without those of models that are run again."""
    missing = set(MODELS) - set(args.models)
    if args.previous is None:
        if missing:
            raise SystemExit(f"--previous must name a report that has {', '.join(sorted(missing))}.")
        return {}
    content = json.loads(args.previous.read_text(encoding="utf-8"))
    names = ("seeds", "initial", "evaluations", "many_initial", "many_evaluations", "many_seeds", "rows", "exact_rows")
    for name in names:
        if content["options"].get(name) != getattr(args, name):
            raise SystemExit(f"{args.previous} was made with {name} = {content['options'].get(name)}.")
    return {(row["problem"], row["model"]): row for row in content["rows"] if row["model"] in missing}


def _run_loops(report: Report, args: argparse.Namespace, kept: Rows) -> None:
    """All seeds of all models, then the quartiles of each."""
    keys = [(loop, name) for loop in make_loops(args) for name in loop.models]
    found: dict[tuple[Loop, str], dict[int, tuple[float, float]]] = {
        (loop, name): {} for loop, name in keys if (loop.name, name) not in kept
    }
    with ProcessPoolExecutor(args.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = {pool.submit(timed_loop, *key, seed): (key, seed) for key in found for seed in range(key[0].seeds)}
        for job in as_completed(jobs):
            (loop, name), seed = jobs[job]
            found[loop, name][seed] = job.result()
            value, seconds = found[loop, name][seed]
            print(f"{loop.name} {name} seed {seed}: {value:.4g}, {seconds:.2g} s per step", file=sys.stderr, flush=True)
    lower: dict[str, float] = {}
    for loop, name in keys:
        row = kept.get((loop.name, name)) or _summary(loop, name, found[loop, name])
        lower.setdefault(loop.name, row["lower_quartile"])  # SingleTaskGP comes first
        report.add(**{**row, "reaches": row["median"] >= lower[loop.name]})


def _summary(loop: Loop, name: str, results: dict[int, tuple[float, float]]) -> dict[str, Any]:
    best = [results[seed][0] for seed in range(loop.seeds)]
    quartiles = torch.quantile(torch.tensor(best, dtype=torch.float64), torch.tensor([0.25, 0.5, 0.75]).double())
    return {
        "problem": loop.name,
        "model": name,
        "evaluations": loop.evaluations,
        "num_seeds": loop.seeds,
        "lower_quartile": float(quartiles[0]),
        "median": float(quartiles[1]),
        "upper_quartile": float(quartiles[2]),
        "reaches": None,
        "seconds_per_step": sum(seconds for _, seconds in results.values()) / loop.seeds,
        "seeds": " ".join(f"{value:.4g}" for value in best),
    }


def _time_steps(report: Report, args: argparse.Namespace, kept: Rows) -> None:
    exact: float | None = None
    for num_rows in args.rows:
        problem = f"one step, {num_rows} rows"
        for name, model_class in MODELS.items():
            if name == "SingleTaskGP" and num_rows > args.exact_rows:
                continue
            row = kept.get((problem, name))
            seconds = time_step(model_class, num_rows) if row is None else row["seconds_per_step"]
            exact = seconds if name == "SingleTaskGP" else exact
            times_faster = None if exact is None else exact / seconds
            report.add(problem=problem, model=name, rows=num_rows, seconds_per_step=seconds, times_faster=times_faster)


def _compare_outliers(report: Report, args: argparse.Namespace) -> None:
    problem = make_problem("hartmann6")
    x, y = noisy_hartmann(args.corrupted_rows)
    y[::10] = y.mean() + 5 * y.std()
    test_x = torch.rand(500, problem.dim, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    test_y = evaluate(problem, test_x)
    models: dict[str, Callable[[], Any]] = {
        "SingleTaskGP": lambda: SingleTaskGP(x, y),
        "RobustRelevancePursuit": lambda: RobustRelevancePursuitSingleTaskGP(x, y),
        "TKRRModel, Student": lambda: TKRRModel(x, y, likelihood=StudentTLikelihood()),
    }
    for name, make in models.items():
        torch.manual_seed(0)
        start = time.perf_counter()
        model = fit(make())
        seconds = time.perf_counter() - start
        with torch.no_grad():
            error = (model.posterior(test_x).mean - test_y).square().mean().sqrt() / test_y.std()
        report.add(problem="hartmann6, corrupted", model=name, error=float(error), seconds_per_step=seconds)
