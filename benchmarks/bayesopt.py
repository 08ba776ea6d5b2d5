"""Bayesian optimisation: closed loops, the time of a step against the number of observations, and outliers."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
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

from .finished import Finished
from .harness import Report

#: A way to make a model from inputs and outcomes.
Maker = Callable[[Tensor, Tensor], Any]

EXACT = "SingleTaskGP"

#: Models as they are by default, and in the form that they have with many observations from the first one on.
MODELS: dict[str, Maker] = {
    EXACT: SingleTaskGP,
    "HilbertGPModel": HilbertGPModel,
    "TKRRModel": TKRRModel,
    "HilbertGPModel(num_functions=1250)": partial(HilbertGPModel, num_functions=1250),
    "TKRRModel(rank=16)": partial(TKRRModel, rank=16),
}
DEFAULTS = [EXACT, "HilbertGPModel", "TKRRModel"]
OWN_FORMS = [EXACT, "HilbertGPModel(num_functions=1250)", "TKRRModel(rank=16)"]

ROBUST_MODELS: dict[str, Maker] = {
    EXACT: SingleTaskGP,
    "RobustRelevancePursuit": RobustRelevancePursuitSingleTaskGP,
    "TKRRModel, Student": lambda x, y: TKRRModel(x, y, likelihood=StudentTLikelihood()),
}

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
    """

    name: str
    problem: str
    initial: int
    evaluations: int
    noise: float = 0.0


@dataclass(frozen=True)
class Contest:
    """
    A loop and who runs it.

    :param loop: The loop.
    :param models: Keys of `MODELS`, the exact one first.
    :param num_seeds: How many times each.
    """

    loop: Loop
    models: list[str]
    num_seeds: int


def make_contests(args: argparse.Namespace) -> list[Contest]:
    """
    Few observations without noise; the same by the models' own forms; then so many noisy ones that the defaults differ.

    :param args: Sizes.
    """
    contests = []
    for name in PROBLEMS:
        loop = Loop(name, name, args.initial, args.evaluations)
        contests.append(Contest(loop, _for_problem(DEFAULTS, name), args.seeds))
    evaluations, num_seeds = args.own_forms
    for name in PROBLEMS:
        loop = Loop(f"{name}, own forms", name, args.initial, evaluations)
        contests.append(Contest(loop, _for_problem(OWN_FORMS, name), num_seeds))
    for model, sizes in (("TKRRModel", args.many), ("HilbertGPModel", args.more)):
        num_rows, steps, num_seeds = sizes
        for name in PROBLEMS:
            models = _for_problem([EXACT, model], name)
            if len(models) > 1:
                loop = Loop(f"{name}, {num_rows} noisy", name, num_rows, num_rows + steps, 0.1)
                contests.append(Contest(loop, models, num_seeds))
    return [contest for contest in contests if contest.num_seeds]


def _for_problem(models: Iterable[str], problem: str) -> list[str]:
    is_small = make_problem(problem).dim <= MAX_HILBERT_DIMS
    return [name for name in models if is_small or not name.startswith("HilbertGPModel")]


def make_problem(name: str) -> SyntheticTestFunction:
    """A test function to maximise."""
    return PROBLEMS[name]().to(torch.float64)


def evaluate(problem: SyntheticTestFunction, x: Tensor) -> Tensor:
    """The function on the unit cube, `(n, 1)`."""
    bounds = torch.as_tensor(problem.bounds)
    return problem(unnormalize(x, bounds)).unsqueeze(-1)


@contextmanager
def without_remarks() -> Iterator[None]:
    """BoTorch's remarks on its optimisers are not what is measured."""
    with warnings.catch_warnings():
        for category in (BotorchWarning, NumericalWarning, RuntimeWarning):
            warnings.simplefilter("ignore", category)
        warnings.filterwarnings("ignore", "Converting a tensor with requires_grad")  # BoTorch's relevance pursuit
        yield


def fit(model: Any) -> Any:
    """BoTorch's fit, with its default settings."""
    with without_remarks():
        fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    return model


def step(make: Maker, x: Tensor, y: Tensor) -> tuple[Tensor, Any]:
    """Fit, maximise LogEI from 4 starts, return the candidate `(1, d)` and the model."""
    model = fit(make(x, y))
    with without_remarks():
        bounds = torch.tensor([[0.0], [1.0]]).to(x).expand(2, x.shape[-1])
        with torch.no_grad():  # of many noisy values the largest is luck
            best = model.posterior(x).mean.max() if len(x) > 100 else y.max()
        acquisition = LogExpectedImprovement(model, best_f=best)
        candidate, _ = optimize_acqf(
            acquisition, bounds, q=1, num_restarts=4, raw_samples=128, options={"batch_limit": 4, "maxiter": 100}
        )
    return candidate.detach(), model


def start_loop(loop: Loop, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Initial inputs, values without noise, outcomes, and the noise's standard deviation, by the seed alone."""
    problem = make_problem(loop.problem)
    torch.manual_seed(seed)
    x = SobolEngine(problem.dim, scramble=True, seed=seed).draw(loop.initial).to(torch.float64)
    values = evaluate(problem, x)
    scale = loop.noise * values.std()
    return x, values, values + scale * torch.randn_like(values), scale


def closed_loop(loop: Loop, make: Maker, seed: int) -> tuple[list[float], Any]:
    """The best value without noise after each evaluation, and the model that chose the last one."""
    problem = make_problem(loop.problem)
    x, values, y, scale = start_loop(loop, seed)
    model = None
    while len(x) < loop.evaluations:
        torch.manual_seed(1000 * seed + len(x))  # the same starts for all models
        candidate, model = step(make, x, y)
        value = evaluate(problem, candidate)
        x, values = torch.cat([x, candidate]), torch.cat([values, value])
        y = torch.cat([y, value + scale * torch.randn_like(value)])
    return values.squeeze(-1).cummax(0).values.tolist(), model


def mean_error(model: Any, problem: SyntheticTestFunction) -> float:
    """Error of the posterior mean at 500 new inputs, relative to the standard deviation of the function there."""
    generator = torch.Generator().manual_seed(1000)
    x = torch.rand(500, problem.dim, generator=generator, dtype=torch.float64)
    values = evaluate(problem, x)
    with torch.no_grad():
        return float((model.posterior(x).mean - values).square().mean().sqrt() / values.std())


def timed_loop(loop: Loop, name: str, seed: int) -> tuple[float, float, float | None]:
    """
    The best value of a closed loop, its processor seconds per step with one thread, and, with many observations, the
    error of its last model. It is run in its own process.
    """
    torch.set_num_threads(1)
    start = time.process_time()
    best, model = closed_loop(loop, MODELS[name], seed)
    seconds = (time.process_time() - start) / max(loop.evaluations - loop.initial, 1)
    return best[-1], seconds, mean_error(model, make_problem(loop.problem)) if loop.noise else None


def noisy_hartmann(num_rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Observations of Hartmann-6 with a tenth of their standard deviation as noise."""
    problem = make_problem("hartmann6")
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(num_rows, problem.dim, generator=generator, dtype=torch.float64)
    y = evaluate(problem, x)
    return x, y + 0.1 * y.std() * torch.randn(y.shape, generator=generator, dtype=torch.float64)


def time_step(make: Maker, num_rows: int) -> float:
    """Processor seconds of one step after noisy observations; the shortest of three where that takes little time."""
    x, y = noisy_hartmann(num_rows)
    best = float("inf")
    for _ in range(3):
        torch.manual_seed(0)
        start = time.process_time()
        step(make, x, y)
        best = min(best, time.process_time() - start)
        if best > 10:
            break
    return best


def outlier_error(name: str, num_rows: int, seed: int) -> tuple[float, float]:
    """Error of the mean after corrupted observations, and the processor seconds of the fit."""
    problem = make_problem("hartmann6")
    x, y = noisy_hartmann(num_rows, seed)
    y[::10] = y.mean() + 5 * y.std()
    torch.manual_seed(seed)
    start = time.process_time()
    model = fit(ROBUST_MODELS[name](x, y))
    seconds = time.process_time() - start
    return mean_error(model, problem), seconds


PARTS = ("same", "loops", "steps", "outliers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="which to run (default: all)")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--initial", type=int, default=12)
    parser.add_argument("--evaluations", type=int, default=20)
    parser.add_argument(
        "--own-forms", type=int, nargs=2, metavar=("EVALUATIONS", "SEEDS"), default=[20, 2],
        help="loops of the forms that models have with many rows",
    )  # fmt: skip
    names = ("ROWS", "STEPS", "SEEDS")
    parser.add_argument(
        "--many", type=int, nargs=3, metavar=names, default=[600, 2, 10], help="loops of TKRRModel after many rows"
    )
    parser.add_argument(
        "--more", type=int, nargs=3, metavar=names, default=[1300, 1, 5], help="loops of HilbertGPModel after more"
    )
    parser.add_argument("--finished", type=Path, help="a file that keeps finished pieces; a later run goes on from it")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="closed loops run at once")
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[20, 60, 200, 500, 1_000, 2_000, 3_000, 5_000, 20_000],
        help="observations of the timed steps",
    )  # fmt: skip
    parser.add_argument("--exact-rows", type=int, default=3_000, help="most observations of SingleTaskGP in those")
    parser.add_argument("--corrupted", type=int, nargs=2, default=[150, 3], metavar=("ROWS", "SEEDS"))


def run(args: argparse.Namespace) -> Report:
    report = Report("bayesopt", f"Best value after {args.evaluations} evaluations ({args.seeds} seeds), and one step")
    finished = Finished(args.finished)
    parts = {"same": compare_candidates, "loops": run_loops, "steps": time_steps, "outliers": compare_outliers}
    for name in args.parts:
        report.attempt(name, partial(parts[name], report, args, finished))
    if "steps" in args.parts:
        plot_steps(report.rows, args.output / "bayesopt.png")
    report.notes.append(
        "Maximisation by LogEI, one candidate at a time; initial observations and starts of a seed are the same for "
        "all. Seconds are processor time of one thread. Up to 500 observations (HilbertGPModel in six dimensions: "
        "1 250) both models are a SingleTaskGP: `difference` is the largest between their candidates and its own, or "
        "between the best values of their loops and of its own with the same seeds. Own forms: those that models have "
        "with many observations, from the first one on. Values are those without noise. mean_error: that of the last "
        "model's posterior mean at 500 new inputs, relative to the function's standard deviation; median over seeds."
    )
    report.notes.append(
        "reaches: whether the median is at least the lower quartile of SingleTaskGP. One step is a fit with default "
        "settings, the acquisition function and its maximisation. times_faster: than SingleTaskGP with as many "
        "observations, or with its most where it has fewer. Corrupted: one outcome in ten is replaced by one that is "
        "five standard deviations away; the error is that of the mean at new inputs, relative to the outcomes' "
        "standard deviation, its median over seeds."
    )
    return report


def compare_candidates(report: Report, args: argparse.Namespace, finished: Finished) -> None:
    """The first candidate of all seeds: how far the default models are from SingleTaskGP."""
    torch.set_num_threads(1)
    for problem in PROBLEMS:
        loop = Loop(problem, problem, args.initial, args.initial)
        for name in _for_problem(DEFAULTS[1:], problem):
            differences = []
            for seed in range(args.seeds):
                key = ["same", asdict(loop), name, seed]
                if key not in finished:
                    x, _, y, _ = start_loop(loop, seed)
                    candidates = []
                    for each in (EXACT, name):
                        torch.manual_seed(seed)
                        candidates.append(step(MODELS[each], x, y)[0])
                    finished[key] = float((candidates[0] - candidates[1]).abs().max())
                differences.append(finished[key])
            report.add(problem=problem, model=name, num_seeds=args.seeds, difference=max(differences))


def run_loops(report: Report, args: argparse.Namespace, finished: Finished) -> None:
    """All seeds of all models, then the quartiles of each."""
    contests = make_contests(args)
    keys = [
        (contest.loop, name, seed)
        for seed in range(max(contest.num_seeds for contest in contests))
        for contest in contests
        for name in contest.models
        if seed < contest.num_seeds
    ]
    open_keys = [key for key in keys if _as_json(*key) not in finished]
    with ProcessPoolExecutor(args.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = {pool.submit(timed_loop, *key): key for key in open_keys}
        for job in as_completed(jobs):
            loop, name, seed = jobs[job]
            value, seconds, error = job.result()
            finished[_as_json(loop, name, seed)] = [value, seconds, error]
            print(f"{loop.name} {name} seed {seed}: {value:.4g}, {seconds:.2g} s per step", file=sys.stderr, flush=True)
    for contest in contests:
        results = {
            name: [finished[_as_json(contest.loop, name, seed)] for seed in range(contest.num_seeds)]
            for name in contest.models
        }
        lower = _summary(contest.loop, EXACT, results[EXACT])["lower_quartile"]
        for name, own in results.items():
            row = _summary(contest.loop, name, own)
            row["reaches"] = row["median"] >= lower
            if name != EXACT and contest.loop.name in PROBLEMS:  # models that are a SingleTaskGP
                row["difference"] = max(abs(a[0] - b[0]) for a, b in zip(own, results[EXACT], strict=True))
            report.add(**row)


def _as_json(loop: Loop, name: str, seed: int) -> list[Any]:
    return ["loop", asdict(loop), name, seed]


def _summary(loop: Loop, name: str, results: list[tuple[float, float, float | None]]) -> dict[str, Any]:
    best, seconds, errors = (list(each) for each in zip(*results, strict=True))
    quartiles = torch.quantile(torch.tensor(best, dtype=torch.float64), torch.tensor([0.25, 0.5, 0.75]).double())
    return {
        "problem": loop.name,
        "model": name,
        "evaluations": loop.evaluations,
        "num_seeds": len(results),
        "lower_quartile": float(quartiles[0]),
        "median": float(quartiles[1]),
        "upper_quartile": float(quartiles[2]),
        "reaches": None,
        "mean_error": float(torch.tensor(errors, dtype=torch.float64).quantile(0.5)) if loop.noise else None,
        "seconds_per_step": sum(seconds) / len(results),
        "seeds": " ".join(f"{value:.4g}" for value in best),
    }


def time_steps(report: Report, args: argparse.Namespace, finished: Finished) -> None:
    """One step of each default model, for each number of observations."""
    torch.set_num_threads(1)
    exact: float | None = None
    for num_rows in args.rows:
        for name in DEFAULTS:
            if name == EXACT and num_rows > args.exact_rows:
                continue
            key = ["step", num_rows, name]
            if key not in finished:
                finished[key] = time_step(MODELS[name], num_rows)
            seconds = finished[key]
            exact = seconds if name == EXACT else exact
            report.add(
                problem=f"one step, {num_rows} rows", model=name, rows=num_rows, seconds_per_step=seconds,
                times_faster=None if exact is None else exact / seconds,
            )  # fmt: skip


def plot_steps(rows: Iterable[dict[str, Any]], path: Path) -> None:
    """
    The time of a step against the number of observations.

    :param rows: Those of the report.
    :param path: Of the picture.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(5.5, 3.6), layout="constrained")
    for name, style in zip(DEFAULTS, ("ks--", "C0o-", "C1^-"), strict=True):
        points = [(row["rows"], row["seconds_per_step"]) for row in rows if row.get("rows") and row["model"] == name]
        axis.loglog(*zip(*points, strict=True), style, label=name, markersize=5)
    axis.set_xlabel("observations")
    axis.set_ylabel("processor seconds of a step")
    axis.set_title("Hartmann-6 with noise: fit, LogEI, candidate", fontsize=10)
    axis.grid(alpha=0.3)
    axis.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def compare_outliers(report: Report, args: argparse.Namespace, finished: Finished) -> None:
    """The error of robust models after corrupted observations."""
    torch.set_num_threads(1)
    num_rows, seeds = args.corrupted
    for name in ROBUST_MODELS:
        errors, times = [], []
        for seed in range(seeds):
            key = ["outliers", num_rows, name, seed]
            if key not in finished:
                finished[key] = outlier_error(name, num_rows, seed)
            errors.append(finished[key][0])
            times.append(finished[key][1])
        report.add(
            problem=f"hartmann6, {num_rows} corrupted", model=name, num_seeds=seeds,
            error=float(torch.tensor(errors).median()), seconds_per_step=sum(times) / seeds,
        )  # fmt: skip
