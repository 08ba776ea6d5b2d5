"""The experiments of Wesel & Batselier (2021) on UCI data: RFF, T-KRR and full KRR beside the numbers of the paper."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from gpytorch.kernels import RBFKernel
from torch import Tensor

import gpytorch_tkrr as tkrr

from . import datasets
from .harness import Report
from .protocol import (
    SWEEPS,
    Hyperparameters,
    Split,
    as_signs,
    exact_gp_hyperparameters,
    fit_krr,
    fit_rff,
    fit_tkrr,
    initial_factors,
    mean_sd_lengthscale,
    mean_squared_error,
    misclassification,
    split,
    tkrr_model,
    unit_scaler,
)


@dataclass(frozen=True)
class Experiment:
    """
    A row of the paper's Table 1.

    :param num_basis: M, the number of sines per dimension.
    :param rank: R.
    :param paper: Mean and standard deviation printed in the paper, by method.
    """

    num_basis: int
    rank: int
    paper: dict[str, tuple[float, float]]


EXPERIMENTS = {
    "yacht": Experiment(10, 25, {"RFF": (0.0021, 0.0018), "T-KRR": (0.0009, 0.0006), "KRR": (0.0007, 0.0004)}),
    "energy": Experiment(20, 10, {"RFF": (0.0275, 0.0075), "T-KRR": (0.0200, 0.0066), "KRR": (0.0200, 0.0087)}),
    "airfoil": Experiment(20, 10, {"RFF": (0.2180, 0.0336), "T-KRR": (0.1679, 0.0258), "KRR": (0.1587, 0.0232)}),
    "spambase": Experiment(40, 10, {"RFF": (0.3620, 0.0188), "T-KRR": (0.0935, 0.0095), "KRR": (0.0909, 0.0115)}),
    "adult": Experiment(40, 10, {"RFF": (0.3976, 0.0056), "T-KRR": (0.1596, 0.0046)}),
}
CLASSIFICATION_RIDGE = 1e-5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", choices=["banana", *EXPERIMENTS], help="the data set")
    parser.add_argument("--splits", type=int, default=10, help="random splits (banana: random starts)")
    datasets.add_arguments(parser)


def run(args: argparse.Namespace) -> Report:
    if args.splits < 1:
        raise ValueError(f"--splits must be at least 1; got {args.splits}.")
    data = datasets.load(args.name, data_dir=args.data_dir)
    if args.name == "banana":
        return banana(data, args.splits, args.output)
    report = table_row(data, EXPERIMENTS[args.name], args.splits)
    if args.name == "spambase":
        draw_convergence(*trace_convergence(data, EXPERIMENTS[args.name]), args.output)
        report.notes.append("paper_spambase.png: convergence on the first split.")
    return report


def table_row(data: datasets.Dataset, experiment: Experiment, splits: int) -> Report:
    """
    One row of Table 1.

    :param data: The data.
    :param experiment: Its settings and the paper's numbers.
    :param splits: Number of random splits.
    """
    errors: dict[str, list[float]] = {method: [] for method in experiment.paper}
    seconds: dict[str, list[float]] = {method: [] for method in experiment.paper}
    tuning = []
    for seed in range(splits):
        generator = torch.Generator().manual_seed(seed)
        parts = split(data, generator)
        start = time.perf_counter()
        theta = hyperparameters(data.task, parts)
        tuning.append(time.perf_counter() - start)
        for method, error, duration in compare(data.task, parts, experiment, theta, generator):
            errors[method].append(error)
            seconds[method].append(duration)

    measure = "misclassification" if data.task == "classification" else "MSE of standardised targets"
    rows, dims = data.x.shape
    report = Report(
        f"paper_{data.name}",
        f"{data.name}: N = {rows}, D = {dims}, M = {experiment.num_basis}, R = {experiment.rank}; "
        f"test {measure}, {splits} random splits 90/10",
    )
    for method, (paper_mean, paper_sd) in experiment.paper.items():
        report.add(
            method=method,
            mean=fmean(errors[method]),
            sd=stdev(errors[method]) if splits > 1 else None,
            paper_mean=paper_mean,
            paper_sd=paper_sd,
            seconds=fmean(seconds[method]),
        )
    if "KRR" not in experiment.paper:
        report.add(method="KRR (N/A: too many rows)")
    origin = (
        f"exact GP's marginal likelihood, {fmean(tuning):.3g} s per split"
        if data.task == "regression"
        else f"mean standard deviation of the inputs, ridge {CLASSIFICATION_RIDGE:g}"
    )
    report.notes.append(
        f"seconds: mean processor time of training on a split. Hyperparameters: {origin}. Data: {data.source}."
    )
    return report


def hyperparameters(task: datasets.Task, parts: Split) -> Hyperparameters:
    """
    Lengthscale and ridge, shared by all methods.

    :param task: Regression or classification.
    :param parts: The split.
    """
    if task == "classification":
        return Hyperparameters(mean_sd_lengthscale(parts.train_x), CLASSIFICATION_RIDGE)
    return exact_gp_hyperparameters(parts.train_x, parts.train_y)


def compare(
    task: datasets.Task,
    parts: Split,
    experiment: Experiment,
    theta: Hyperparameters,
    generator: torch.Generator,
) -> list[tuple[str, float, float]]:
    """
    Method, test error and seconds of training on one split.

    :param task: Regression or classification.
    :param parts: The split.
    :param experiment: The experiment.
    :param theta: Lengthscale and ridge.
    :param generator: Draws features and starts.
    """
    data = parts.train_x, parts.train_y, theta
    num_basis, rank = experiment.num_basis, experiment.rank
    measure = misclassification if task == "classification" else mean_squared_error
    results = []
    for method in experiment.paper:
        if method == "RFF":
            fitted = fit_rff(*data, num_features=num_basis * rank, generator=generator)
        elif method == "T-KRR":
            fitted = fit_tkrr(*data, num_basis=num_basis, rank=rank, generator=generator)
        else:
            fitted = fit_krr(*data)
        results.append((method, measure(fitted.predict(parts.test_x), parts.test_y), fitted.seconds))
    return results


# Figures


def banana(data: datasets.Dataset, starts: int, output: Path, *, ranks: tuple[int, ...] = (2, 4, 6, 144)) -> Report:
    """
    Decision boundaries of T-KRR for several ranks against that of the full Hilbert GP.

    :param data: The data; all of them are trained on.
    :param starts: Number of random starts; the first one is drawn.
    :param output: Directory of the figure.
    :param ranks: The ranks; from R = M on every weight matrix can be reached.
    """
    theta, num_basis = Hyperparameters(lengthscale=0.5, ridge=1e-6), 12
    raw = torch.from_numpy(data.x)
    x, y = unit_scaler(raw)(raw), as_signs(torch.from_numpy(data.y))
    side = torch.linspace(0, 1, 200, dtype=x.dtype)
    grid = torch.cartesian_prod(side, side)
    full = full_hilbert_gp(x, y, grid, theta, num_basis=num_basis)
    report = Report(
        "paper_banana",
        f"banana: N = {len(y)}, M = {num_basis}, lengthscale {theta.lengthscale:g}, ridge {theta.ridge:g}; agreement "
        f"with the decision of the full Hilbert GP on a 200 x 200 grid, random starts: {starts}",
    )
    boundaries: dict[int, Tensor] = {}
    for rank in ranks:
        agreement, error, seconds = [], [], []
        for seed in range(starts):
            fitted = fit_tkrr(
                x,
                y,
                theta,
                num_basis=num_basis,
                rank=rank,
                generator=torch.Generator().manual_seed(seed),
                penalty=tkrr.FrobeniusPenalty,
            )
            response = fitted.predict(grid)
            boundaries.setdefault(rank, response)
            agreement.append(1 - misclassification(response, as_signs(full)))
            error.append(misclassification(fitted.predict(x), y))
            seconds.append(fitted.seconds)
        report.add(
            rank=rank,
            agreement_mean=fmean(agreement),
            agreement_min=min(agreement),
            training_error=fmean(error),
            seconds=fmean(seconds),
        )
    _draw_banana(x, y, side, full, boundaries, output)
    report.notes.append(f"paper_banana.png: the boundaries of the first start. Data: {data.source}.")
    return report


def full_hilbert_gp(x: Tensor, y: Tensor, test_x: Tensor, theta: Hyperparameters, *, num_basis: int) -> Tensor:
    """
    The response `(n,)` of ridge regression on all M^D products of sines.

    :param x: Inputs `(N, D)` in [0, 1].
    :param y: Targets `(N,)`.
    :param test_x: Inputs `(n, D)`.
    :param theta: Lengthscale and ridge.
    :param num_basis: M, the number of sines per dimension.
    """
    base = RBFKernel().to(x)
    base.lengthscale = theta.lengthscale
    kernel = tkrr.HilbertKernel(base, tkrr.Domain(torch.full((x.shape[1],), 0.5), 1.0), num_basis)
    expansion = kernel.expansion()
    with torch.no_grad():
        root = expansion.variances().sqrt()
        features, test_features = expansion.features(x) * root, expansion.features(test_x) * root
    gram = features.mT @ features + theta.ridge * torch.eye(len(root), dtype=x.dtype)
    return test_features @ torch.linalg.solve(gram, features.mT @ y)


def _draw_banana(x: Tensor, y: Tensor, side: Tensor, full: Tensor, boundaries: dict[int, Tensor], output: Path) -> None:
    plt = _pyplot()
    figure, axes = plt.subplots(1, len(boundaries), figsize=(13, 3.8), layout="constrained", sharey=True)
    shape = (len(side), len(side))
    for axis, (rank, response) in zip(axes, boundaries.items(), strict=True):
        for sign, color in ((1, "tab:red"), (-1, "tab:blue")):
            axis.scatter(*x[y == sign].T, s=5, color=color, alpha=0.2, lw=0, rasterized=True)
        axis.contour(side, side, response.reshape(shape).mT, levels=[0.0], colors="black", linewidths=1.8)
        axis.contour(side, side, full.reshape(shape).mT, levels=[0.0], colors="gold", linewidths=1.5, linestyles="--")
        axis.set(title=f"R = {rank}", aspect="equal", xticks=[0, 0.5, 1], yticks=[0, 0.5, 1])
    lines = [
        plt.Line2D([], [], color="black", lw=1.8, label="T-KRR"),
        plt.Line2D([], [], color="gold", lw=1.5, ls="--", label="full Hilbert GP"),
    ]
    figure.legend(handles=lines, loc="outside lower center", ncols=2, frameon=False)
    _save(figure, output / "paper_banana.png")


def trace_convergence(data: datasets.Dataset, experiment: Experiment) -> tuple[list[float], dict[str, list[float]]]:
    """
    Loss after every factor update, and misclassification after the first update and after every sweep.

    :param data: The data; the first split is used.
    :param experiment: Its settings.
    """
    generator = torch.Generator().manual_seed(0)
    parts = split(data, generator)
    theta = hyperparameters(data.task, parts)
    sizes = {"num_basis": experiment.num_basis, "rank": experiment.rank}
    model = tkrr_model(parts.train_x, parts.train_y, theta.lengthscale, **sizes)
    factors = initial_factors(parts.train_x.shape[1], generator=generator, **sizes)
    errors: dict[str, list[float]] = {"training": [], "test": []}

    def record(model: tkrr.TKRR, update: int) -> None:
        if (update - 1) % (2 * (model.num_dims - 1)) == 0:
            errors["training"].append(misclassification(model.posterior.mean(parts.train_x), parts.train_y))
            errors["test"].append(misclassification(model.posterior.mean(parts.test_x), parts.test_y))

    penalty = tkrr.ColumnPenalty(theta.ridge)
    result = tkrr.fit_als(
        model, max_sweeps=SWEEPS, rel_tol=0.0, penalty=penalty, initial_factors=factors, callback=record
    )
    return result.objective, errors


def draw_convergence(loss: list[float], errors: dict[str, list[float]], output: Path) -> None:
    """
    The figure of the paper: normalised loss and misclassification.

    :param loss: Loss after every factor update.
    :param errors: Misclassification of training and test data after the first update and after every sweep.
    :param output: Directory of the figure.
    """
    plt = _pyplot()
    updates_per_sweep = (len(loss) - 1) / SWEEPS
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    axes[0].plot([i / updates_per_sweep for i in range(len(loss))], [value / loss[0] for value in loss], color="black")
    axes[0].set(title="Normalised loss, every factor update")
    for (label, values), style in zip(errors.items(), ("o-", "s--"), strict=True):
        axes[1].plot(values, style, ms=4, label=label)
    axes[1].set(title="Misclassification, every sweep", ylim=(0, None))
    axes[1].legend(frameon=False)
    for axis in axes:
        axis.set(xlabel="sweeps", xlim=(0, SWEEPS))
        axis.grid(alpha=0.3)
    _save(figure, output / "paper_spambase.png")


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    _pyplot().close(figure)
