"""Targets as they are: T-KRR with every likelihood, SVGP and boosted trees, on flights, known truths and the pool.

Part `flights`: delays of flights from New York, 2013. Part `splits`: the same with other rows, for `auto` and boosted
trees, since large delays are so few that one split says little of the error of the mean. Part `truth`: one generated
set for each likelihood, whose noise, dispersion, cut points or censoring is known. Part `gaussian`: generated sets
whose noise is Gaussian, where other kinds of noise can only lose. Part `pool`: sets of `DATA_DIR/pool`, where these are
found.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpytorch.likelihoods import GaussianLikelihood, Likelihood, StudentTLikelihood
from torch import Tensor

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.comparison.baselines import GradientBoosting
from gpytorch_tkrr.comparison.contender import Contender
from gpytorch_tkrr.comparison.distribution import NUM_SAMPLES, Distribution, distribution_scores
from gpytorch_tkrr.comparison.gp_contenders import SVGP, StudentSVGP
from gpytorch_tkrr.inference.noise_choice import NOISES

from . import datasets, pool
from .harness import Report

PARTS = ("flights", "splits", "truth", "gaussian", "pool")

#: Sets of the pool by default: small ones with heavy tails (autompg, servo) and without (concreteslump, machine), as
#: their degrees of freedom say.
SETS = ("autompg", "concreteslump", "machine", "servo")

LIKELIHOODS: dict[str, Callable[[], Likelihood]] = {
    "gaussian": GaussianLikelihood,
    "student": StudentTLikelihood,
    "by inputs": tkrr.HeteroskedasticLikelihood,
    "by inputs, student": partial(tkrr.HeteroskedasticLikelihood, student=True),
    "by inputs, skewed": partial(tkrr.HeteroskedasticLikelihood, skewed=True),
}

Parts = tuple[Tensor, Tensor, Tensor, Tensor]
Made = tuple[Distribution, str]
Fit = Callable[[Tensor, Tensor, Tensor, int], Made]


class Normal:
    """
    Normal distributions as others are.

    :param mean: `(n,)`.
    :param stddev: `(n,)`.
    """

    def __init__(self, mean: Tensor, stddev: Tensor):
        self.mean, self.stddev = mean, stddev
        self._normal = torch.distributions.Normal(mean, stddev)
        self.log_prob, self.cdf = self._normal.log_prob, self._normal.cdf

    def sample(self, num_samples: int, *, seed: int | None = None) -> Tensor:
        """
        Draws `(num_samples, n)`.

        :param num_samples: How many of each.
        :param seed: Seed.
        """
        generator = torch.Generator().manual_seed(seed or 0)
        z = torch.randn(num_samples, len(self.mean), dtype=self.mean.dtype, generator=generator)
        return self.mean + self.stddev * z


#: With fewer rows than this, T-KRR has one chain of these sizes. Its defaults are several chains there, which are
#: weighed with Gaussian noise only: kinds of noise would not be compared alone.
FEW_ROWS = 8000
RANK, NUM_WARMUP, NUM_DRAWS = 16, 80, 60


def fit_ours(likelihood: Callable[[], Likelihood], x: Tensor, y: Tensor, test_x: Tensor, seed: int) -> Made:
    """T-KRR in the units of the data."""
    is_small = len(y) < FEW_ROWS
    model = tkrr.TKRR(x, y, likelihood(), rank=RANK if is_small else None)
    num_warmup, num_draws = (NUM_WARMUP, NUM_DRAWS) if is_small else (None, None)
    tkrr.fit_gibbs(model, num_warmup=num_warmup, num_draws=num_draws, seed=seed)
    facts = {name: values for name, values in model.posterior.parameters.items() if name == "deg_free"}
    return model.predict(test_x), ", ".join(f"{name} {float(values.mean()):.1f}" for name, values in facts.items())


def fit_auto(x: Tensor, y: Tensor, test_x: Tensor, seed: int) -> Made:
    """T-KRR with the noise that its training rows choose."""
    choice = tkrr.choose_noise(x, y, seed=seed)
    made, _ = fit_ours(NOISES[choice.kind], x, y, test_x, seed)
    return made, choice.message


def fit_contender(contender: Callable[..., Contender], x: Tensor, y: Tensor, test_x: Tensor, seed: int) -> Made:
    """A model of the comparison."""
    model = contender(seed=seed)
    model.fit(x, y)
    made = model.predict(test_x)
    return made if isinstance(made, Distribution) else Normal(*made), ""


MODELS: dict[str, Fit] = {
    **{f"T-KRR, {name}": partial(fit_ours, likelihood) for name, likelihood in LIKELIHOODS.items()},
    "T-KRR, auto": fit_auto,
    "SVGP": partial(fit_contender, SVGP),
    "SVGP, Student": partial(fit_contender, StudentSVGP),
    "boosting": partial(fit_contender, GradientBoosting),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="which to run")
    parser.add_argument("--rows", type=int, default=10_000, help="training rows of the flights")
    parser.add_argument("--test-rows", type=int, default=4000, help="test rows of the flights")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="of flights and pool")
    parser.add_argument("--sets", nargs="+", choices=pool.SETS, default=list(SETS), help="of the pool")
    parser.add_argument("--fold", type=int, default=0, help="of the pool")
    parser.add_argument("--splits", type=int, default=3, help="of the flights, in the part `splits`")
    parser.add_argument("--gaussian-sets", type=int, default=4, help="generated sets of each size")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--previous",
        nargs="+",
        type=Path,
        default=[],
        help="earlier reports, latest first: what is not run is kept",
    )
    datasets.add_arguments(parser)


def run(args: argparse.Namespace) -> Report:
    torch.set_num_threads(args.threads or 1)
    report = Report("observations", "Test scores in units of the standardised target, one thread each")
    if "flights" in args.parts:
        report.attempt("flights", partial(_run_models, report, args, "flights"))
    if "splits" in args.parts:
        report.attempt(SPLITS, partial(_run_splits, report, args))
    if "truth" in args.parts:
        for name, problem in TRUTHS.items():
            report.attempt(name, partial(_run_truth, report, name, problem, args.seed))
    if "gaussian" in args.parts:
        for name, num_rows in GAUSSIAN_ROWS.items():
            report.attempt(name, partial(_run_gaussian, report, name, num_rows, args.gaussian_sets))
    if "pool" in args.parts:
        for name in args.sets:
            if pool._directory(args, name) is not None:
                report.attempt(name, partial(_run_models, report, args, name))
    done = {(row["data"], row["model"]) for row in report.rows}
    for path in args.previous:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        report.rows += [row for row in rows if (row["data"], row["model"]) not in done]
        done |= {(row["data"], row["model"]) for row in rows}
    args.previous = len(args.previous)  # not where they were
    places = ["flights", SPLITS, *TRUTHS, *GAUSSIAN_ROWS, *pool.SETS]
    report.rows.sort(key=lambda row: places.index(row["data"]))
    report.notes += [
        "rmse: of the mean, mae: of the median, coverage: of the central 95 % interval. seconds: processor time of "
        "training and prediction, one thread. "
        f"T-KRR: its defaults; up to {FEW_ROWS} rows rank {RANK}, one chain of {NUM_WARMUP} + {NUM_DRAWS} sweeps; auto "
        "decides by training rows held out. SVGP: 512 inducing points. boosting: one model of the mean and 13 of "
        "quantiles. gaussian noise: means over generated sets, 2 000 test rows each; facts: losses against Gaussian "
        "noise, and what auto chose.",
        *check_targets(report.rows),
    ]
    return report


def flights(args: argparse.Namespace, seed: int) -> Parts:
    """
    Random rows of the flights from New York.

    :param args: The options.
    :param seed: Seed of the rows.
    """
    data = datasets.load("airline_nyc2013", data_dir=args.data_dir)
    order = torch.randperm(len(data.y), generator=torch.Generator().manual_seed(seed))
    x, y = torch.from_numpy(data.x)[order], torch.from_numpy(data.y)[order]
    end = args.rows + args.test_rows
    return x[: args.rows], y[: args.rows], x[args.rows : end], y[args.rows : end]


def _run_models(report: Report, args: argparse.Namespace, name: str) -> None:
    parts = flights(args, args.seed) if name == "flights" else pool.load(args, name, args.fold)
    for model in args.models:
        row = evaluate(MODELS[model], parts, args.seed)
        report.add(data=name, N=len(parts[1]), D=parts[0].shape[1], model=model, **row)


#: The name of the flights where other rows are taken, too; what is averaged over them.
SPLITS = "flights, several splits"
AVERAGED = ("nlpd", "rmse", "mae", "crps", "coverage", "seconds")


def _run_splits(report: Report, args: argparse.Namespace) -> None:
    """Means over splits; the facts give the error of the mean in each, and what was chosen."""
    for model in ("T-KRR, auto", "boosting"):
        rows = [evaluate(MODELS[model], flights(args, seed), seed) for seed in range(args.splits)]
        means = {name: sum(row[name] for row in rows) / len(rows) for name in AVERAGED}
        facts = "rmse " + ", ".join(f"{row['rmse']:.3f}" for row in rows)
        kinds = [row["facts"].split(".")[0].removeprefix("Noise: ") for row in rows]
        facts += "; noise " + ", ".join(kinds) if all(kinds) else ""
        report.add(data=SPLITS, N=args.rows, D=8, model=model, **means, facts=facts)


def evaluate(fit: Fit, parts: Parts, seed: int) -> dict[str, Any]:
    """
    Scores and seconds of a model on one split.

    :param fit: The model.
    :param parts: Training inputs and targets, test inputs and targets.
    :param seed: Seed.
    """
    x, y, test_x, test_y = parts
    torch.manual_seed(seed)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", tkrr.TKRRWarning)
        start = time.process_time()
        with torch.enable_grad():
            made, facts = fit(x, y, test_x, seed)
        scores, _ = distribution_scores(test_y, made, seed=seed)
        seconds = time.process_time() - start
        median = made.sample(NUM_SAMPLES, seed=seed).median(0).values
    unit = float(y.std())
    scores["nlpd"] -= math.log(unit)
    scores["mae"] = float((test_y - median).abs().mean())
    scores.update({name: scores[name] / unit for name in ("rmse", "crps", "mae")})
    order = ("nlpd", "rmse", "mae", "crps", "coverage")
    return {**{name: scores[name] for name in order}, "seconds": seconds, "facts": facts}


# Generated sets whose truth is known


def _inputs(seed: int, num: int) -> tuple[Tensor, Tensor, torch.Generator]:
    """Inputs, a function of three of them, and what random numbers come from."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(num, 4, dtype=torch.float64, generator=generator)
    return x, torch.sin(6 * x[:, 0]) + 2 * x[:, 1] * x[:, 2], generator


def _student(shape: float, num: int, generator: torch.Generator) -> Tensor:
    half = torch.full((num,), shape / 2, dtype=torch.float64)
    weight = torch._standard_gamma(half, generator=generator) / half
    return torch.randn(num, dtype=torch.float64, generator=generator) / weight.sqrt()


def _noise_facts(model: tkrr.TKRR, x: Tensor, sd: Tensor) -> dict[str, float]:
    level = model.predict(x).noise
    inside = (level.quantile(0.05) <= sd) & (sd <= level.quantile(0.95))
    error = float((level.mean / sd).log().square().mean().sqrt())
    return {"true": float(sd.mean()), "found": float(level.mean.mean()), "log_error": error,
            "covered": float(inside.double().mean())}  # fmt: skip


def constant_noise(seed: int, x: Tensor, f: Tensor, generator: torch.Generator) -> dict[str, float]:
    """Constant noise, found by the model whose noise depends on the inputs."""
    y = f + 0.3 * torch.randn(len(f), dtype=torch.float64, generator=generator)
    return _noise_facts(_fit(x, y, tkrr.HeteroskedasticLikelihood(), seed), x, torch.full_like(f, 0.3))


def varying_noise(seed: int, x: Tensor, f: Tensor, generator: torch.Generator) -> dict[str, float]:
    """Noise whose standard deviation grows tenfold with one input and waves with another."""
    sd = 0.1 * torch.exp(2.3 * x[:, 3] + 0.5 * torch.sin(6 * x[:, 0]))
    y = f + sd * torch.randn(len(f), dtype=torch.float64, generator=generator)
    return _noise_facts(_fit(x, y, tkrr.HeteroskedasticLikelihood(), seed), x, sd)


def _found(draws: Tensor, true: float) -> dict[str, float]:
    low, high = draws.quantile(0.05).item(), draws.quantile(0.95).item()
    return {"true": true, "found": draws.mean().item(), "log_error": abs(math.log(draws.mean().item() / true)),
            "covered": float(low <= true <= high)}  # fmt: skip


def tails(seed: int, x: Tensor, f: Tensor, generator: torch.Generator) -> dict[str, float]:
    """Student noise of 4 degrees of freedom."""
    model = _fit(x, f + 0.3 * _student(4.0, len(f), generator), StudentTLikelihood(), seed)
    return _found(model.posterior.parameters["deg_free"], 4.0)


def counts(seed: int, x: Tensor, f: Tensor, generator: torch.Generator) -> dict[str, float]:
    """Counts with mean exp(f + 0.5) and dispersion 3."""
    shape = torch.full_like(f, 3.0)
    rate = torch._standard_gamma(shape, generator=generator) / 3.0 * (f + 0.5).exp()
    model = _fit(x, torch.poisson(rate, generator=generator), tkrr.NegativeBinomialLikelihood(), seed)
    return _found(model.posterior.parameters["dispersion"], 3.0)


def grades(seed: int, x: Tensor, f: Tensor, generator: torch.Generator) -> dict[str, float]:
    """Four ordered classes; the distance of the outer cut points is 2."""
    latent = f + torch.randn(len(f), dtype=torch.float64, generator=generator)
    y = torch.bucketize(latent, torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64))
    model = _fit(x, y, tkrr.OrdinalLikelihood(4), seed)
    cuts = model.posterior.parameters["cutpoints"]
    return _found(cuts[:, -1] - cuts[:, 0], 2.0)


def censored(seed: int, x: Tensor, f: Tensor, generator: torch.Generator) -> dict[str, float]:
    """Targets that an instrument cuts off at 1.5; the noise is 0.3."""
    y = (f + 0.3 * torch.randn(len(f), dtype=torch.float64, generator=generator)).clamp(max=1.5)
    model = _fit(x, y, tkrr.CensoredLikelihood(high=1.5), seed)
    return _found(model.posterior.noise.sqrt(), 0.3)


def _fit(x: Tensor, y: Tensor, likelihood: Likelihood, seed: int) -> tkrr.TKRR:
    model = tkrr.TKRR(x, y, likelihood, rank=8)
    tkrr.fit_gibbs(model, num_warmup=100, num_draws=100, seed=seed)
    return model


def delays(seed: int, x: Tensor, f: Tensor, generator: torch.Generator) -> dict[str, float]:
    """The mean of targets above f by an exponential number, whose size grows with an input."""
    size = 0.2 * torch.exp(1.5 * x[:, 3])
    late = -torch.rand(len(f), dtype=torch.float64, generator=generator).log()
    y = f + size * late + 0.1 * torch.randn(len(f), dtype=torch.float64, generator=generator)
    mean = _fit(x, y, tkrr.HeteroskedasticLikelihood(skewed=True), seed).predict(x).mean.detach()
    error = float((mean - f - size).square().mean().sqrt())
    return {"true": float((f + size).mean()), "found": float(mean.mean()), "log_error": error / float((f + size).std())}


TRUTHS: dict[str, Callable[[int, Tensor, Tensor, torch.Generator], dict[str, float]]] = {
    "constant noise": constant_noise,
    "noise by inputs": varying_noise,
    "tails": tails,
    "delays": delays,
    "counts": counts,
    "ordered classes": grades,
    "censored": censored,
}


def _run_truth(report: Report, name: str, problem: Callable[..., dict[str, float]], seed: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tkrr.TKRRWarning)
        start = time.process_time()
        found = problem(seed, *_inputs(seed, 2000))
    report.add(data=name, N=2000, D=4, model="T-KRR", **found, seconds=time.process_time() - start)


# Generated sets whose noise is Gaussian

GAUSSIAN_ROWS = {f"gaussian noise, {num_rows} rows": num_rows for num_rows in (100, 300, 1000)}
NUM_TEST_ROWS = 2000


def gaussian_losses(num_rows: int, seed: int) -> dict[str, tuple[float, float, str]]:
    """
    Scores on a set with Gaussian noise: NLPD in units of the standardised target, seconds of processor time, and what
    was chosen, by model.

    :param num_rows: N.
    :param seed: Seed of the set and of the fits.
    """
    x, f, generator = _inputs(1000 * num_rows + seed, num_rows + NUM_TEST_ROWS)
    y = f + 0.3 * torch.randn(len(f), dtype=torch.float64, generator=generator)
    start = time.process_time()
    kind = tkrr.choose_noise(x[:num_rows], y[:num_rows], seed=seed).kind
    choosing, found = time.process_time() - start, {}
    for name in dict.fromkeys(["gaussian", "student", kind]):
        start = time.process_time()
        prediction, _ = fit_ours(NOISES[name], x[:num_rows], y[:num_rows], x[num_rows:], seed)
        with torch.no_grad():
            nlpd = -float(prediction.log_prob(y[num_rows:]).mean()) - math.log(float(y[:num_rows].std()))
        found[name] = nlpd, time.process_time() - start, ""
    return {**found, "auto": (found[kind][0], choosing + found[kind][1], kind)}


def _run_gaussian(report: Report, name: str, num_rows: int, num_sets: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tkrr.TKRRWarning)
        found = [gaussian_losses(num_rows, seed) for seed in range(num_sets)]
    for kind in ("gaussian", "student", "auto"):
        losses = [each[kind][0] - each["gaussian"][0] for each in found]
        chosen = [each[kind][2] for each in found]
        facts = f"loses {min(losses):.4f} to {max(losses):.4f}" if kind != "gaussian" else ""
        if kind == "auto":
            facts += "; " + ", ".join(f"{each} {chosen.count(each)}" for each in dict.fromkeys(chosen))
        nlpd = sum(each[kind][0] for each in found) / num_sets
        seconds = sum(each[kind][1] for each in found) / num_sets
        report.add(data=name, N=num_rows, D=4, model=f"T-KRR, {kind}", nlpd=nlpd, seconds=seconds, facts=facts)


def check_targets(rows: list[dict]) -> list[str]:
    """
    One sentence for each claim about the flights, and about sets where Gaussian noise is best: whether it holds.

    :param rows: The rows of the report.
    """
    found = {(row["data"], row["model"]): row for row in rows}
    claims: dict[str, bool] = {}
    for name in ("flights", SPLITS):
        ours, trees = found.get((name, "T-KRR, auto")), found.get((name, "boosting"))
        if ours is not None and trees is not None:
            claims[f"{name}: NLPD of auto at most 0.85"] = ours["nlpd"] <= 0.85
            claims[f"{name}: RMSE of auto not above boosting's by more than 2 %"] = ours["rmse"] <= 1.02 * trees["rmse"]
            claims[f"{name}: MAE of auto below boosting's"] = ours["mae"] < trees["mae"]
    for name in dict.fromkeys(row["data"] for row in rows):
        plain = found.get((name, "T-KRR, gaussian"))
        others = {kind: found.get((name, f"T-KRR, {kind}")) for kind in ("student", "auto")}
        if plain is None or name == "flights" or "nlpd" not in plain:
            continue
        for kind, row in others.items():
            if row is not None:
                claims[f"{name}: {kind} loses at most 0.01 NLPD"] = row["nlpd"] <= plain["nlpd"] + 0.01
    return [f"{'met' if holds else 'MISSED'}: {claim}." for claim, holds in claims.items()]
