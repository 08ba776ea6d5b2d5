"""Several processes with rows of their own do what one process does with all rows."""

from __future__ import annotations

import os
import signal
import time

import gpytorch
import pytest
import torch
import torch.distributed as dist
from gpytorch.kernels import RBFKernel, ScaleKernel
from processes import results_of, run_processes, start_processes

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.parallel import ONE_PROCESS, as_processes
from gpytorch_tkrr.source import Shard, TensorSource, TrainingData
from gpytorch_tkrr.sums import Design

N = 200
CUTS = [0, 57, 57, 200]  # the second of three processes has no rows
DOMAIN = tkrr.Domain(torch.full((3,), 0.5), 1.5)


def make_data():
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(N, 3, dtype=torch.float64, generator=generator)
    x[:, 1] = (x[:, 1] * 4).round() / 4
    y = 5 + torch.sin(5 * x[:, 0]) * x[:, 1] + x[:, 2]
    return x, y + 0.1 * torch.randn(N, dtype=torch.float64, generator=generator)


def source_of(rows):
    x, y = make_data()
    return TensorSource(x[rows], y[rows], batch_rows=23)


def make_model():
    kernel = ScaleKernel(RBFKernel(ard_num_dims=3)).double()
    kernel.base_kernel.lengthscale = 0.4
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    likelihood.noise = 0.01
    return tkrr.TKRR(None, None, likelihood, kernel=kernel, rank=3, num_basis=7, domain=DOMAIN)


def own_rows(group):
    rank = dist.get_rank(group) if group is not None else 0
    return slice(CUTS[rank], CUTS[rank + 1]) if group is not None else slice(0, N)


def fit_everything(group=None):
    """The same calls in one process and in several."""
    data = source_of(own_rows(group))
    processes = as_processes(group)
    results = {}
    training = TrainingData(data, processes=processes)
    results["summary"] = training.summary
    results["first_row"] = training.first_row
    model = make_model()
    bases = [mode.basis for mode in model.separate().modes]
    generator = torch.Generator().manual_seed(0)
    factors = [torch.randn(3, basis.num_functions, dtype=torch.float64, generator=generator) for basis in bases]
    design = Design(training, bases)
    results["sums"] = [design.sums(d, factors, torch.ones(3, dtype=torch.float64)).pack() for d in range(3)]
    results["marginals"] = design.marginals()

    kernel = tkrr.HilbertKernel(RBFKernel(active_dims=[0]).double(), DOMAIN, [6, 1, 1])
    gp = tkrr.HilbertGP(data, gpytorch.likelihoods.GaussianLikelihood().double(), kernel, group=group)
    results["hilbert"] = gp.sums.state_dict()
    return results


def flatten(value):
    """All tensors and numbers of a result, as tensors."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in flatten(item)]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in flatten(item)]
    if isinstance(value, tkrr.Summary):
        return flatten(vars(value))
    return [torch.as_tensor(value, dtype=torch.float64)]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return fit_everything(), run_processes(fit_everything, 3, tmp_path_factory.mktemp("processes"))


def test_sums_are_those_of_one_process(results):
    one, several = results
    for key in ("summary", "sums", "marginals", "hilbert"):
        for rank in range(3):
            for left, right in zip(flatten(one[key]), flatten(several[rank][key]), strict=True):
                scale = float(left.abs().max()) if left.numel() else 1.0
                torch.testing.assert_close(right, left, rtol=1e-10, atol=1e-10 * scale, msg=lambda m: f"{key}: {m}")


def test_all_processes_hold_the_same_bits(results):
    _, several = results
    for key in several[0].keys() - {"first_row"}:
        for other in several[1:]:
            for left, right in zip(flatten(several[0][key]), flatten(other[key]), strict=True):
                assert torch.equal(left, right), key


def test_rows_are_numbered_over_all_processes(results):
    assert [result["first_row"] for result in results[1]] == [0, 57, 57]


def test_one_process_talks_to_nobody():
    assert as_processes(None) is ONE_PROCESS and not dist.is_initialized()
    assert ONE_PROCESS.gather(3) == [3] and ONE_PROCESS.share("a") == "a"
