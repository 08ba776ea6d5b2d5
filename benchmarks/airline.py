"""Flight delays: T-KRR as in Wesel & Batselier (2021) beside SVGP, RFF and additive GPs (Hilbert, VFF, exact)."""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gpytorch
import torch
from gpytorch.kernels import AdditiveKernel, Kernel, MaternKernel, RBFKernel, ScaleKernel
from torch import Tensor

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.features.expansion import BasisFamily

from . import datasets
from .exact_gp import SwappableGP
from .harness import Report
from .protocol import Hyperparameters, Method, fit_rff, fit_tkrr, mean_sd_lengthscale, split
from .svgp import fit_svgp

NUM_BASIS = 40
RANKS = (5, 10, 15, 20)
PARTS = ("tkrr", "rff", "additive", "svgp")
A_HILBERT, A_VFF = "additive Hilbert GP", "A-VFF"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=100_000, help="flights, drawn at random; two thirds train")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="which methods to run")
    parser.add_argument("--previous", type=Path, help="an earlier report: what it holds and is not run is kept")
    parser.add_argument("--svgp-epochs", type=int, default=30)
    parser.add_argument("--hilbert-steps", type=int, default=100, help="steps of Adam of the additive models")
    parser.add_argument("--exact-rows", type=int, default=1000, help="training rows of the exact additive GP; 0: none")
    parser.add_argument("--seed", type=int, default=0)
    datasets.add_arguments(parser)


def run(args: argparse.Namespace) -> Report:
    data = datasets.load("airline_nyc2013", data_dir=args.data_dir)
    generator = torch.Generator().manual_seed(args.seed)
    torch.manual_seed(args.seed)
    parts = split(data, generator, train=2 / 3, rows=args.rows)
    x, y = parts.train_x, parts.train_y
    num_rows = len(y) + len(parts.test_y)
    theta = Hyperparameters(mean_sd_lengthscale(x), ridge=100 / num_rows)
    report = Report(
        "airline",
        f"Flights from New York, 2013: N = {num_rows} (2/3 training), D = {x.shape[1]}; standardised test MSE",
    )

    errors: dict[str, Tensor] = {}

    def add(name: str, method: Method) -> None:
        errors[name] = (method.predict(parts.test_x) - parts.test_y).square()
        error = float(errors[name].std()) / len(parts.test_y) ** 0.5
        report.add(method=name, mse=float(errors[name].mean()), mse_se=error, seconds=method.seconds)

    for rank in RANKS if "tkrr" in args.parts else ():
        add(f"T-KRR, R = {rank}", fit_tkrr(x, y, theta, num_basis=NUM_BASIS, rank=rank, generator=generator))
    num_features = NUM_BASIS * max(RANKS)
    if "rff" in args.parts:
        add(f"RFF, {num_features} features", fit_rff(x, y, theta, num_features=num_features, generator=generator))
    if "additive" in args.parts:
        _run_additive(report, args, x, y, add, errors)
    if "svgp" in args.parts:
        add(f"SVGP, {args.svgp_epochs} epochs", train_svgp(x, y, epochs=args.svgp_epochs))
    report.rows = keep_earlier(report.rows, args.previous)
    if args.previous is not None:
        report.notes.append(f"Measured in this run: {', '.join(args.parts)}; the other rows in an earlier one.")
    report.notes += [
        f"T-KRR and RFF: lengthscale {theta.lengthscale:.3g} (mean standard deviation of the inputs), ridge 100 / N; "
        f"M = {NUM_BASIS}, 10 sweeps.",
        f"Additive models: marginal likelihood, {args.hilbert_steps} steps of Adam (0.1), {NUM_BASIS} functions per "
        "input; RBF kernels, A-VFF: Matern 3/2. A-GPR is exact, on some of the training rows. "
        "SVGP: 512 inducing points, ARD RBF, batches of 1024, Adam (0.01), float32.",
        "seconds: processor time of training.",
        f"Another year and other airports than in the paper, whose numbers do not apply. Data: {data.source}.",
    ]
    return report


def _run_additive(
    report: Report,
    args: argparse.Namespace,
    x: Tensor,
    y: Tensor,
    add: Callable[[str, Method], None],
    errors: dict[str, Tensor],
) -> None:
    """The additive models; the first two are compared."""
    add(A_HILBERT, fit_additive(x, y, steps=args.hilbert_steps, base=RBFKernel, basis=tkrr.Sines()))
    matern = partial(MaternKernel, nu=1.5)
    add(A_VFF, fit_additive(x, y, steps=args.hilbert_steps, base=matern, basis=tkrr.VariationalFourier()))
    report.notes.append(check_additive(errors))
    if args.exact_rows:
        name = f"A-GPR, {args.exact_rows} rows"
        add(name, fit_additive(x[: args.exact_rows], y[: args.exact_rows], steps=args.hilbert_steps, base=RBFKernel))


def keep_earlier(rows: list[dict[str, Any]], previous: Path | None) -> list[dict[str, Any]]:
    """
    The rows of this run, and those of an earlier one for methods that were not run.

    :param rows: Of this run.
    :param previous: The file of the earlier report; None for none.
    """
    if previous is None:
        return rows
    earlier = json.loads(previous.read_text(encoding="utf-8"))["rows"]
    new = {row["method"]: row for row in rows}
    known = [row["method"] for row in earlier]
    return [new.get(row["method"], row) for row in earlier] + [row for row in rows if row["method"] not in known]


def fit_additive(
    x: Tensor, y: Tensor, *, steps: int, base: Callable[..., Kernel], basis: BasisFamily | None = None
) -> Method:
    """
    A GP with a sum of one-dimensional kernels, trained by its marginal likelihood.

    :param x: Inputs `(N, D)` in [0, 1].
    :param y: Targets `(N,)`, standardised.
    :param steps: Steps of Adam.
    :param base: Makes the kernel of one input.
    :param basis: Functions that represent it; None for an exact GP.

    References: Duvenaud, Nickisch & Rasmussen (2011), *Additive Gaussian processes*; Hensman, Durrande & Solin (2018),
    *Variational Fourier features for Gaussian processes*; Solin & Särkkä (2020), *Hilbert space methods for
    reduced-rank Gaussian process regression*.
    """
    start = time.process_time()
    num_dims = x.shape[1]
    kernel: Kernel = AdditiveKernel(*(ScaleKernel(base(active_dims=[d])) for d in range(num_dims)))
    for part in kernel.kernels:
        part.base_kernel.lengthscale, part.outputscale = 0.2, 1 / num_dims
    if basis is not None:
        domain = tkrr.Domain(torch.full((num_dims,), 0.5), 1.0)
        kernel = tkrr.HilbertKernel(kernel, domain, NUM_BASIS, basis=basis)
    model = SwappableGP(x, y, kernel).to(x)
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with warnings.catch_warnings(), gpytorch.settings.max_cholesky_size(len(y)):
        warnings.simplefilter("ignore", tkrr.ApproximationWarning)  # the paper's box cuts long lengthscales
        for _ in range(steps):
            optimizer.zero_grad()
            loss = -objective(model(x), y)
            loss.backward()
            optimizer.step()
    model.eval()

    @torch.no_grad()
    def predict(test: Tensor) -> Tensor:
        with warnings.catch_warnings(), gpytorch.settings.max_cholesky_size(len(y)):
            warnings.simplefilter("ignore")
            return torch.cat([model(rows).mean for rows in test.split(8192)])

    predict(x[:1])  # the posterior over the weights belongs to training
    return Method(predict, time.process_time() - start)


def check_additive(errors: dict[str, Tensor]) -> str:
    """
    Whether the two additive models of all rows agree.

    :param errors: Squared test errors of each method, `(n,)`.
    """
    left, right = errors[A_VFF], errors[A_HILBERT]
    bound = 2 * float(right.std()) / len(right) ** 0.5
    difference = float(left.mean() - right.mean())
    return (
        f"{'met' if abs(difference) <= bound else 'MISSED'}: {A_VFF} within two standard errors of {A_HILBERT} "
        f"(difference {difference:.4f}, two standard errors {bound:.4f})."
    )


def train_svgp(x: Tensor, y: Tensor, *, epochs: int) -> Method:
    """
    A sparse variational GP.

    :param x: Inputs `(N, D)` in [0, 1].
    :param y: Targets `(N,)`, standardised.
    :param epochs: Passes over the data.
    """
    start = time.process_time()
    model = fit_svgp(x, y, epochs=epochs, lengthscale=0.2)
    return Method(lambda test: model.predict(test)[0], time.process_time() - start)
