"""Flight delays: T-KRR as in Wesel & Batselier (2021) beside SVGP, an additive Hilbert GP and RFF."""

from __future__ import annotations

import argparse
import time
import warnings

import gpytorch
import torch
from gpytorch.kernels import AdditiveKernel, RBFKernel, ScaleKernel
from torch import Tensor

import gpytorch_tkrr as tkrr

from . import datasets
from .exact_gp import SwappableGP
from .harness import Report
from .protocol import Hyperparameters, Method, fit_rff, fit_tkrr, mean_sd_lengthscale, mean_squared_error, split
from .svgp import fit_svgp

NUM_BASIS = 40
RANKS = (5, 10, 15, 20)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=100_000, help="flights, drawn at random; two thirds train")
    parser.add_argument("--svgp-epochs", type=int, default=30, help="0 leaves SVGP out")
    parser.add_argument("--hilbert-steps", type=int, default=100, help="steps of Adam of the additive Hilbert GP")
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

    def add(name: str, method: Method) -> None:
        report.add(
            method=name, mse=mean_squared_error(method.predict(parts.test_x), parts.test_y), seconds=method.seconds
        )

    for rank in RANKS:
        add(f"T-KRR, R = {rank}", fit_tkrr(x, y, theta, num_basis=NUM_BASIS, rank=rank, generator=generator))
    num_features = NUM_BASIS * max(RANKS)
    add(f"RFF, {num_features} features", fit_rff(x, y, theta, num_features=num_features, generator=generator))
    add("additive Hilbert GP", fit_additive_hilbert(x, y, steps=args.hilbert_steps))
    if args.svgp_epochs:
        add(f"SVGP, {args.svgp_epochs} epochs", train_svgp(x, y, epochs=args.svgp_epochs))
    report.notes += [
        f"T-KRR and RFF: lengthscale {theta.lengthscale:.3g} (mean standard deviation of the inputs), ridge 100 / N; "
        f"M = {NUM_BASIS}, 10 sweeps.",
        f"additive Hilbert GP: {NUM_BASIS} functions per input, marginal likelihood, {args.hilbert_steps} steps of "
        "Adam (0.1). SVGP: 512 inducing points, ARD RBF, batches of 1024, Adam (0.01), float32.",
        f"Another year and other airports than in the paper, whose numbers do not apply. Data: {data.source}.",
    ]
    return report


def fit_additive_hilbert(x: Tensor, y: Tensor, *, steps: int) -> Method:
    """
    An exact GP with a sum of one-dimensional Hilbert kernels, trained by its marginal likelihood.

    :param x: Inputs `(N, D)` in [0, 1].
    :param y: Targets `(N,)`, standardised.
    :param steps: Steps of Adam.

    Reference: Solin & Särkkä (2020), *Hilbert space methods for reduced-rank Gaussian process regression*.
    """
    start = time.perf_counter()
    num_dims = x.shape[1]
    kernel = AdditiveKernel(*(ScaleKernel(RBFKernel(active_dims=[d])) for d in range(num_dims)))
    for part in kernel.kernels:
        part.base_kernel.lengthscale, part.outputscale = 0.2, 1 / num_dims
    domain = tkrr.Domain(torch.full((num_dims,), 0.5), 1.0)
    model = SwappableGP(x, y, tkrr.HilbertKernel(kernel, domain, NUM_BASIS)).to(x)
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tkrr.ApproximationWarning)  # the paper's box cuts long lengthscales
        for _ in range(steps):
            optimizer.zero_grad()
            loss = -objective(model(x), y)
            loss.backward()
            optimizer.step()
    model.eval()

    @torch.no_grad()
    def predict(test: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", tkrr.OutOfDomainWarning)
            return torch.cat([model(rows).mean for rows in test.split(8192)])

    predict(x[:1])  # the posterior over the weights belongs to training
    return Method(predict, time.perf_counter() - start)


def train_svgp(x: Tensor, y: Tensor, *, epochs: int) -> Method:
    """
    A sparse variational GP.

    :param x: Inputs `(N, D)` in [0, 1].
    :param y: Targets `(N,)`, standardised.
    :param epochs: Passes over the data.
    """
    start = time.perf_counter()
    model = fit_svgp(x, y, epochs=epochs, lengthscale=0.2)
    return Method(lambda test: model.predict(test)[0], time.perf_counter() - start)
