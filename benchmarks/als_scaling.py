"""Seconds of ALS, one update of each of the D factors, against N, D, M and R, with slopes on a logarithmic scale."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import gpytorch
import torch

from benchmarks.harness import Report, best_of
from gpytorch_tkrr import TKRR, Domain, FrobeniusPenalty
from gpytorch_tkrr.inference.factor_updates import ALSFit

BASE = {"N": 50_000, "D": 8, "M": 20, "R": 5}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--N", type=int, nargs="+", default=[10_000, 30_000, 100_000, 300_000, 1_000_000])
    parser.add_argument("--D", type=int, nargs="+", default=[4, 8, 16, 32, 96])
    parser.add_argument("--M", type=int, nargs="+", default=[5, 10, 20, 40, 80])
    parser.add_argument("--R", type=int, nargs="+", default=[1, 2, 5, 10, 20, 40])
    parser.add_argument("--repeat", type=int, default=2, help="rounds; the best counts")


def run(args: argparse.Namespace) -> Report:
    report = Report(
        "als_scaling",
        "Seconds of one update of each of the D factors; " + ", ".join(f"{k} = {v}" for k, v in BASE.items()),
    )
    curves: dict[str, list[tuple[int, float]]] = {}
    for name in BASE:
        curve = curves.setdefault(name, [])
        for value in getattr(args, name):
            sizes = {**BASE, name: value}
            if name == "M":
                sizes["N"] = max(sizes["N"], 10 * value**2 * sizes["R"])
            seconds = _seconds(**sizes, repeat=args.repeat)
            # M is compared at equal N: the larger N that N >= 10 M^2 R asks for is divided out.
            comparable = seconds * BASE["N"] / sizes["N"] if name == "M" else seconds
            curve.append((value, comparable))
            report.add(varied=name, value=value, **sizes, seconds=seconds, slope=_last_slope(curve))
        report.notes.append(f"slope in {name}: {_slope(curve):.2f} overall")
    report.notes.append("slope: of log seconds in log value. Float64, products over modes kept in memory.")
    _plot(curves, args.output / "als_scaling.png")
    return report


def _seconds(N: int, D: int, M: int, R: int, repeat: int) -> float:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(N, D, dtype=torch.float64, generator=generator)
    y = torch.sin(6 * x[:, 0]) * x[:, 1] + 0.1 * torch.randn(N, dtype=torch.float64, generator=generator)
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()).double()
    kernel.base_kernel.lengthscale = 0.4
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    model = TKRR(x, y, likelihood, kernel=kernel, rank=R, num_basis=M, domain=Domain(0.5, 1.5))
    order = [*range(1, D), *range(D - 2, -1, -1)]
    with torch.no_grad():
        training = model.training_data(memory=16 << 30)
        model.prepare(training)
        fit = ALSFit(model, training, FrobeniusPenalty(), False, 16 << 30)
        fit.start(None, torch.Generator().manual_seed(0))
        objective: list[float] = []
        fit.update(0, objective)

        def sweep() -> None:
            for d in order:
                fit.update(d, objective)

        return best_of({"sweep": sweep}, repeat=repeat, warmup=0)["sweep"] * D / len(order)


def _last_slope(curve: list[tuple[int, float]]) -> float | None:
    return None if len(curve) < 2 else _slope(curve[-2:])


def _slope(curve: list[tuple[int, float]]) -> float:
    """Least-squares slope of log seconds in log value."""
    xs, ys = [math.log(value) for value, _ in curve], [math.log(seconds) for _, seconds in curve]
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - x_mean) ** 2 for x in xs)
    return sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / spread if spread else math.nan


def _plot(curves: dict[str, list[tuple[int, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(curves), figsize=(4 * len(curves), 3.5), layout="constrained")
    for axis, (name, curve) in zip(axes, curves.items(), strict=True):
        values, seconds = zip(*curve, strict=True)
        axis.loglog(values, seconds, "o-", label=f"slope {_slope(curve):.2f}")
        axis.loglog(values, [seconds[0] * value / values[0] for value in values], "--", color="0.6", label="linear")
        axis.set_xticks(values, [f"{value:,}" for value in values], rotation=45)
        axis.minorticks_off()
        axis.set_xlabel(name)
        axis.legend()
    axes[0].set_ylabel("seconds per pass over the factors")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
