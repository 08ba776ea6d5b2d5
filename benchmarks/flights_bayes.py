"""Flight delays with uncertainty: Bayesian T-KRR, with nothing given and with a rank, and SVGP-512; 100 000 rows."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import gpytorch
import torch
from torch import Tensor

import gpytorch_tkrr as tkrr

from . import datasets
from .harness import Report
from .scores import Mixture
from .svgp import fit_svgp

Predict = Callable[[Tensor], Mixture]

OURS = "Bayesian T-KRR"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=100_000, help="training rows, drawn at random")
    parser.add_argument("--test-rows", type=int, default=100_000, help="test rows, drawn at random from the others")
    parser.add_argument(
        "--rank",
        type=int,
        default=12,
        help="R of the second T-KRR, with 100 warm-up sweeps and 100 draws; 0 leaves it out",
    )
    parser.add_argument("--svgp-epochs", type=int, default=30, help="0 leaves SVGP out")
    parser.add_argument("--seed", type=int, default=0)
    datasets.add_arguments(parser)


def run(args: argparse.Namespace) -> Report:
    data = datasets.load("airline_nyc2013", data_dir=args.data_dir)
    order = torch.randperm(len(data.y), generator=torch.Generator().manual_seed(args.seed))
    x, y = torch.from_numpy(data.x)[order], torch.from_numpy(data.y)[order]
    end = args.rows + args.test_rows
    train, test = (x[: args.rows], y[: args.rows]), (x[args.rows : end], y[args.rows : end])
    report = Report(
        "flights_bayes",
        f"Flights from New York, 2013: {len(train[1])} training and {len(test[1])} test rows, D = {x.shape[1]}; "
        "scores in units of the standardised target",
    )
    models: dict[str, Callable[[], Predict]] = {OURS: lambda: train_bayesian(*train, seed=args.seed)}
    if args.rank:
        models[f"{OURS}, rank {args.rank}"] = lambda: train_bayesian(*train, seed=args.seed, rank=args.rank)
    if args.svgp_epochs:
        models["SVGP-512"] = lambda: train_svgp(*train, epochs=args.svgp_epochs, seed=args.seed)
    center, unit = train[1].mean(), train[1].std()
    for name, train_model in models.items():
        start = time.process_time()
        predict = train_model()
        trained = time.process_time()
        parts = []
        for rows, targets in zip(test[0].split(4096), test[1].split(4096), strict=True):
            mixture, target = predict(rows).rescaled(center, unit), (targets - center) / unit
            tail = mixture.distribution_function(target)
            inside = ((tail > 0.025) & (tail < 0.975)).double()
            parts.append(torch.stack([(mixture.mean - target).square(), -mixture.log_density(target), inside]))
        mse, nlpd, coverage = torch.cat(parts, dim=-1).mean(-1).tolist()
        seconds = {"seconds": trained - start, "predict_seconds": time.process_time() - trained}
        report.add(model=name, mse=mse, nlpd=nlpd, coverage=coverage, **seconds)
    report.notes += [
        f"{OURS}: raw data, nothing given; with a rank: one chain, 100 warm-up sweeps and 100 draws. SVGP: 512 "
        f"inducing points, ARD RBF, batches of 1024, Adam (0.01), {args.svgp_epochs} epochs, standardised inputs, "
        f"float32. coverage: of the central 95 % interval. Seconds are processor time. Data: {data.source}.",
        *check_targets(report.rows),
    ]
    return report


def train_bayesian(x: Tensor, y: Tensor, *, seed: int, rank: int | None = None) -> Predict:
    """
    Bayesian T-KRR with the default kernel, in the user's units.

    :param x: Inputs `(N, D)`.
    :param y: Targets `(N,)`.
    :param seed: Seed.
    :param rank: R, with 100 sweeps before and 100 draws; None to leave all that to the fit.
    """
    model = tkrr.TKRR(x, y, gpytorch.likelihoods.GaussianLikelihood(), rank=rank)
    num_sweeps = None if rank is None else 100
    result = tkrr.fit_gibbs(model, num_draws=num_sweeps, num_warmup=num_sweeps, seed=seed)
    model.eval()

    @torch.no_grad()
    def predict(test_x: Tensor) -> Mixture:
        means = model.draws(test_x)
        return Mixture(means, result.posterior.noise.unsqueeze(-1).expand_as(means))

    return predict


def train_svgp(x: Tensor, y: Tensor, *, epochs: int, seed: int) -> Predict:
    """
    SVGP on standardised data.

    :param x: Inputs `(N, D)`.
    :param y: Targets `(N,)`.
    :param epochs: Passes over the data.
    :param seed: Seed.
    """
    torch.manual_seed(seed)
    center, unit = x.mean(0), x.std(0)
    model = fit_svgp((x - center) / unit, (y - y.mean()) / y.std(), epochs=epochs)

    def predict(test_x: Tensor) -> Mixture:
        mean, variance = model.predict((test_x - center) / unit)
        return Mixture(mean.unsqueeze(0), variance.unsqueeze(0)).rescaled(-y.mean() / y.std(), 1 / y.std())

    return predict


def check_targets(rows: list[dict]) -> list[str]:
    """
    One sentence for each claim: whether it holds in these rows.

    :param rows: The rows of the report.
    """
    ours, *others = rows
    claims = {
        "MSE <= 0.55": ours["mse"] <= 0.55,
        "NLPD <= 1.11": ours["nlpd"] <= 1.11,
    }
    for other in others:
        if other["model"].startswith(OURS):
            continue
        for score in ("mse", "nlpd", "seconds"):
            claims[f"{score} not above that of {other['model']}"] = ours[score] <= other[score]
    return [f"{'met' if holds else 'MISSED'}: {claim}." for claim, holds in claims.items()]
