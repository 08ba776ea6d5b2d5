"""Bayesian optimisation in closed loops, and one step after 20 000 observations: our models against SingleTaskGP."""

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
from functools import partial
from pathlib import Path
from typing import Any

import torch
from botorch.acquisition import LogExpectedImprovement
from botorch.exceptions.warnings import BotorchWarning
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.optim import optimize_acqf
from botorch.test_functions import Ackley, Hartmann, SyntheticTestFunction
from botorch.utils.transforms import unnormalize
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

#: The models of each problem; SingleTaskGP comes first.
LOOPS = {"hartmann6": list(MODELS), "ackley10": ["SingleTaskGP", "TKRRModel"]}


def make_problem(name: str) -> SyntheticTestFunction:
    """A test function to maximise."""
    problem = Hartmann(6, negate=True) if name == "hartmann6" else Ackley(10, negate=True)
    return problem.to(torch.float64)


def evaluate(problem: SyntheticTestFunction, x: Tensor) -> Tensor:
    """The function on the unit cube, `(n, 1)`."""
    bounds = torch.as_tensor(problem.bounds)
    return problem(unnormalize(x, bounds)).unsqueeze(-1)


def step(model_class: Callable[[Tensor, Tensor], Any], x: Tensor, y: Tensor) -> Tensor:
    """Fit, maximise LogEI from 8 starts, return the candidate `(1, d)`."""
    model = model_class(x, y)
    with warnings.catch_warnings():
        for category in (BotorchWarning, NumericalWarning, RuntimeWarning):
            warnings.simplefilter("ignore", category)
        fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        bounds = torch.tensor([[0.0], [1.0]]).to(x).expand(2, x.shape[-1])
        acquisition = LogExpectedImprovement(model, best_f=y.max())
        candidate, _ = optimize_acqf(
            acquisition, bounds, q=1, num_restarts=8, raw_samples=256, options={"batch_limit": 8, "maxiter": 100}
        )
    return candidate.detach()


def closed_loop(
    problem_name: str, model_class: Callable[[Tensor, Tensor], Any], seed: int, num_initial: int, num_evaluations: int
) -> list[float]:
    """The best value found after each evaluation; the initial points depend on the seed alone."""
    problem = make_problem(problem_name)
    torch.manual_seed(seed)
    x = SobolEngine(problem.dim, scramble=True, seed=seed).draw(num_initial).to(torch.float64)
    y = evaluate(problem, x)
    while len(x) < num_evaluations:
        candidate = step(model_class, x, y)
        x, y = torch.cat([x, candidate]), torch.cat([y, evaluate(problem, candidate)])
    return y.squeeze(-1).cummax(0).values.tolist()


def timed_loop(problem_name: str, name: str, seed: int, num_initial: int, num_evaluations: int) -> tuple[float, float]:
    """The best value of a closed loop, and its seconds per step with one thread; run in a process of its own."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    best = closed_loop(problem_name, MODELS[name], seed, num_initial, num_evaluations)[-1]
    return best, (time.perf_counter() - start) / max(num_evaluations - num_initial, 1)


def time_step(model_class: Callable[[Tensor, Tensor], Any], num_rows: int) -> float:
    """Seconds of one step after noisy observations of Hartmann-6."""
    problem = make_problem("hartmann6")
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(num_rows, problem.dim, generator=generator, dtype=torch.float64)
    y = evaluate(problem, x)
    y = y + 0.1 * y.std() * torch.randn(y.shape, generator=generator, dtype=torch.float64)
    torch.manual_seed(0)
    start = time.perf_counter()
    step(model_class, x, y)
    return time.perf_counter() - start


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--initial", type=int, default=12)
    parser.add_argument("--evaluations", type=int, default=60)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="which to run")
    parser.add_argument(
        "--previous", type=Path, help="a report with the same settings: its rows of models that are not run are kept"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="closed loops run at once")
    parser.add_argument("--rows", type=int, default=20_000, help="observations of our models in the timed step")
    parser.add_argument("--exact-rows", type=int, default=4_000, help="observations of SingleTaskGP in the timed step")


def run(args: argparse.Namespace) -> Report:
    report = Report("bayesopt", f"Best value after {args.evaluations} evaluations ({args.seeds} seeds), and one step")
    kept = _read_previous(args)
    report.attempt("closed loops", partial(_run_loops, report, args, kept))
    report.attempt("one step", partial(_time_steps, report, args, kept))
    report.notes.append(
        "Maximisation by LogEI, one candidate at a time; initial points of a seed are the same for all. Closed loops "
        "have one thread each."
    )
    report.notes.append(
        "reaches: whether the median is at least the lower quartile of SingleTaskGP. One step is a fit with default "
        "settings, the acquisition function and its maximisation."
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
    for name in ("seeds", "initial", "evaluations", "rows", "exact_rows"):
        if content["options"].get(name) != getattr(args, name):
            raise SystemExit(f"{args.previous} was made with {name} = {content['options'].get(name)}.")
    return {(row["problem"], row["model"]): row for row in content["rows"] if row["model"] in missing}


def _run_loops(report: Report, args: argparse.Namespace, kept: Rows) -> None:
    """All seeds of all models, then the quartiles of each."""
    keys = [(problem, name) for problem, names in LOOPS.items() for name in names]
    found: dict[tuple[str, str], dict[int, tuple[float, float]]] = {key: {} for key in keys if key not in kept}
    with ProcessPoolExecutor(args.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = {
            pool.submit(timed_loop, *key, seed, args.initial, args.evaluations): (key, seed)
            for seed in range(args.seeds)
            for key in found
        }
        for job in as_completed(jobs):
            key, seed = jobs[job]
            found[key][seed] = job.result()
            value, seconds = found[key][seed]
            print(f"{' '.join(key)} seed {seed}: {value:.4g}, {seconds:.2g} s per step", file=sys.stderr, flush=True)
    lower: dict[str, float] = {}
    for problem, name in keys:
        row = kept.get((problem, name)) or _summary(problem, name, found[problem, name], args.seeds)
        lower.setdefault(problem, row["lower_quartile"])  # SingleTaskGP comes first
        report.add(**{**row, "reaches": row["median"] >= lower[problem]})


def _summary(problem: str, name: str, loops: dict[int, tuple[float, float]], num_seeds: int) -> dict[str, Any]:
    best = [loops[seed][0] for seed in range(num_seeds)]
    quartiles = torch.quantile(torch.tensor(best), torch.tensor([0.25, 0.5, 0.75])).tolist()
    return {
        "problem": problem,
        "model": name,
        "lower_quartile": quartiles[0],
        "median": quartiles[1],
        "upper_quartile": quartiles[2],
        "reaches": None,
        "seconds_per_step": sum(seconds for _, seconds in loops.values()) / num_seeds,
        "seeds": " ".join(f"{value:.4g}" for value in best),
    }


def _time_steps(report: Report, args: argparse.Namespace, kept: Rows) -> None:
    exact = None
    for name, model_class in MODELS.items():
        row = kept.get(("hartmann6, noisy", name))
        rows = args.exact_rows if name == "SingleTaskGP" else args.rows
        seconds = time_step(model_class, rows) if row is None else row["seconds_per_step"]
        exact = seconds if exact is None else exact
        report.add(problem="hartmann6, noisy", model=name, rows=rows, seconds_per_step=seconds, speedup=exact / seconds)
