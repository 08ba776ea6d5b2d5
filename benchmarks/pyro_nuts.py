"""One leapfrog step of NUTS over a GP's hyperparameters: HilbertKernel against RFFKernel with as many features."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import pyro
import torch
from gpytorch.priors import GammaPrior, LogNormalPrior
from pyro.infer.mcmc.util import initialize_model
from pyro.ops.integrator import potential_grad

from gpytorch_tkrr.pyro import sample_priors

from .exact_gp import SwappableGP, hilbert_model, make_data, rff_model
from .harness import Report, best_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, nargs="+", default=[5_000, 20_000])
    parser.add_argument(
        "--num-basis", type=int, default=14, help="sines per dimension; their square is the feature count"
    )
    parser.add_argument("--repeat", type=int, default=5)


def with_priors(model: SwappableGP) -> SwappableGP:
    """Priors of the noise, the output scale and the lengthscales."""
    scale = model.covar_module
    base = getattr(scale.base_kernel, "base_kernel", scale.base_kernel)
    model.likelihood.register_prior("noise_prior", LogNormalPrior(-4.0, 1.0), "noise")
    scale.register_prior("outputscale_prior", GammaPrior(2.0, 2.0), "outputscale")
    base.register_prior("lengthscale_prior", LogNormalPrior(-1.0, 0.5), "lengthscale")
    return model


def leapfrog(model: SwappableGP, sample: Callable[[SwappableGP], SwappableGP]) -> Callable[[], object]:
    """Potential energy and its gradient, all that a step of NUTS computes, at a fixed point."""

    def joint() -> None:
        sampled = sample(model)
        pyro.sample("y", sampled.likelihood(sampled(*model.train_inputs)), obs=model.train_targets)

    point, potential, _, _ = initialize_model(joint)
    point = {site: torch.full_like(value, -1.0) for site, value in point.items()}
    return lambda: potential_grad(potential, point)


def run(args: argparse.Namespace) -> Report:
    num_features = args.num_basis**2
    report = Report(
        "pyro_nuts", f"One step of NUTS over 4 hyperparameters of a GP on 2 inputs, {num_features} features"
    )
    for num_rows in args.rows:
        x, y = make_data(num_rows, torch.float64)
        ours = with_priors(hilbert_model(x, y, args.num_basis))
        rff = with_priors(rff_model(x, y, num_features))
        candidates = {
            "ours": leapfrog(ours, sample_priors),
            "copied": leapfrog(ours, SwappableGP.pyro_sample_from_prior),
            "rff": leapfrog(rff, SwappableGP.pyro_sample_from_prior),
            "rff_shared": leapfrog(rff, sample_priors),
        }
        best = best_of(candidates, repeat=args.repeat, warmup=2)
        report.add(
            rows=num_rows,
            hilbert_ms=1e3 * best["ours"],
            hilbert_copied_ms=1e3 * best["copied"],
            rff_ms=1e3 * best["rff_shared"],
            rff_copied_ms=1e3 * best["rff"],
            speedup=best["rff_shared"] / best["ours"],
            speedup_copied=best["rff"] / best["copied"],
        )
    report.notes.append(
        "copied: hyperparameters by GPyTorch's pyro_sample_from_prior, which copies the model at every step; else by "
        "gpytorch_tkrr.pyro.sample_priors. Best of several interleaved steps, Gram matrix cached."
    )
    return report
