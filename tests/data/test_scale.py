"""Streams: memory that does not grow with the rows, and devices."""

from __future__ import annotations

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.kernels import RBFKernel

import gpytorch_tkrr as tkrr
from benchmarks.generated_flights import LOWER, UPPER, make_model, write_flights
from benchmarks.harness import peak_memory

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def stream_als(path):
    source = tkrr.NpySource(path, target=len(LOWER))
    tkrr.fit_als(make_model(2), data=source, max_sweeps=0, seed=0, memory=32 << 20)


def stream_hilbert_gp(path):
    domain = tkrr.Domain.from_bounds(torch.tensor(LOWER), torch.tensor(UPPER), boundary_factor=2.0)
    kernel = tkrr.HilbertKernel(RBFKernel(active_dims=[7]), domain, [1] * 7 + [30])
    kernel.base_kernel.lengthscale = 300.0
    model = tkrr.HilbertGP(tkrr.NpySource(path, target=len(LOWER)), gpytorch.likelihoods.GaussianLikelihood(), kernel)
    loss = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    loss(model(*model.train_inputs), model.train_targets).backward()


@pytest.mark.slow
@pytest.mark.parametrize("function", [stream_als, stream_hilbert_gp])
def test_peak_memory_does_not_grow_with_the_rows(tmp_path, function):
    peaks = []
    for num_rows in (400_000, 1_600_000):  # 29 and 115 MB
        path = tmp_path / f"{num_rows}.npy"
        write_flights(path, num_rows)
        peaks.append(min(peak_memory(function, path) for _ in range(2)))  # the allocator's share varies by 40 MB
    assert peaks[1] - peaks[0] < 43e6  # half of what the file grows


@pytest.mark.parametrize("device", DEVICES)
def test_streams_are_fitted_on_the_device_of_the_model(tmp_path, device):
    """Rows come from a file, so they start on the CPU."""
    rng = np.random.default_rng(0)
    x = rng.uniform(size=(300, 2))
    np.save(tmp_path / "table.npy", np.column_stack([x, np.sin(5 * x[:, 0]) * x[:, 1] + 0.05 * rng.normal(size=300)]))
    source = tkrr.NpySource(tmp_path / "table.npy", target=2, batch_rows=70)
    domain = tkrr.Domain(torch.full((2,), 0.5), 1.5)
    test_x = torch.rand(20, 2, dtype=torch.float64)

    def predict(device):
        kernel = RBFKernel(ard_num_dims=2)
        kernel.lengthscale = 0.4
        likelihood = gpytorch.likelihoods.GaussianLikelihood()
        model = tkrr.TKRR(None, None, likelihood, kernel=kernel, rank=3, num_basis=8, domain=domain)
        model = model.double().to(device)
        checkpoint = tkrr.Checkpoint(tmp_path / f"{device}.pt", seconds=0)
        for max_sweeps in (2, 4):  # the second goes on from the file
            tkrr.fit_als(model, data=source, max_sweeps=max_sweeps, rel_tol=0.0, seed=0, checkpoint=checkpoint)
        prediction = model.eval()(test_x.to(device))
        assert prediction.mean.device.type == device
        tkrr.fit_gibbs(model, data=source, num_warmup=4, num_draws=4, seed=0)
        assert model.draws(test_x.to(device)).device.type == device
        return prediction.mean.detach().cpu()

    torch.testing.assert_close(predict(device), predict("cpu"), rtol=1e-6, atol=1e-6)
