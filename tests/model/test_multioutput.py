"""Several outputs, and long tables with a column of tasks."""

from __future__ import annotations

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.constraints import Positive
from gpytorch.kernels import IndexKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood, HadamardGaussianLikelihood, MultitaskGaussianLikelihood
from support.processes import run_processes

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.data.long_table import LongTable, _joined_moments
from gpytorch_tkrr.model.likelihoods.registry import observe

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # GPyTorch's IndexKernel in a product

T = 3
SCALES = torch.tensor([0.01, 1.0, 300.0], dtype=torch.float64)
FIT = {"num_warmup": 8, "num_draws": 6, "seed": 0}


def _data(num_rows: int = 120, missing: float = 0.4):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(num_rows, 2, generator=generator, dtype=torch.float64)
    latent = torch.stack([torch.sin(5 * x[:, 0]), x[:, 1] ** 2], -1)
    mix = torch.tensor([[1.0, -0.8, 0.5], [0.3, 1.0, -1.0]], dtype=torch.float64)
    f = (latent @ mix) * SCALES + torch.tensor([0.0, 5.0, -700.0], dtype=torch.float64)
    y = f + 0.1 * SCALES * torch.randn(num_rows, T, generator=generator, dtype=torch.float64)
    y[torch.rand(num_rows, T, generator=generator) < missing] = torch.nan
    return x, y, f


def _likelihood(**kwargs):
    return MultitaskGaussianLikelihood(T, noise_constraint=Positive(), **kwargs).double()


def test_outputs_are_a_mode_of_a_long_table():
    x, y, _ = _data()
    model = tkrr.MultioutputTKRR(x, y, _likelihood(), rank=3)
    tkrr.fit_gibbs(model, **FIT)

    mean, scale = (torch.from_numpy(moment(y.numpy(), axis=0)) for moment in (np.nanmean, np.nanstd))
    torch.testing.assert_close(model.output_mean, mean)
    torch.testing.assert_close(model.output_scale, scale)
    row, output = (~y.isnan()).nonzero(as_tuple=True)
    table = torch.cat([x[row], output.unsqueeze(-1).double()], -1)
    targets = ((y - mean) / scale)[row, output]
    likelihood = HadamardGaussianLikelihood(T, noise_constraint=Positive(), task_feature_index=-1).double()
    fresh = tkrr.MultioutputTKRR(x, y, _likelihood(), rank=3)
    plain = tkrr.TKRR(table, targets, likelihood, rank=3, kernel=fresh.covar_module, num_basis=fresh.num_basis)
    plain.resize(domain=fresh.domain)
    plain.adapts_num_basis, plain.max_num_basis = True, fresh.max_num_basis
    plain.is_flat_outside = plain.chooses_kernel = True
    tkrr.fit_gibbs(plain, **FIT)
    for ours, theirs in zip(model.posterior.factors, plain.posterior.factors, strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(model.posterior.noise, plain.posterior.noise * scale**2)
    with torch.no_grad():
        expected = plain.predict(table)
        ours = model.predict(x)
        torch.testing.assert_close(ours.mean[row, output], expected.mean * scale[output] + mean[output])
        torch.testing.assert_close(ours.stddev[row, output], expected.stddev * scale[output])
        log_prob = ours.log_prob(y)
        assert torch.equal(log_prob.isnan(), y.isnan())
        torch.testing.assert_close(log_prob[row, output], expected.log_prob(targets) - scale[output].log())
        noise = likelihood.noise.reshape(-1)[output]
        marginal = likelihood(plain.eval()(table), table)
        torch.testing.assert_close(marginal.variance, plain(table).variance + noise)


def test_calls_agree():
    x, y, f = _data()
    likelihood = _likelihood()
    model = tkrr.MultioutputTKRR(x, y, likelihood, rank=4)
    with torch.no_grad():
        prior = model(x[:5])
        long = model.mode_inputs(x[:5])
        scale = model.output_scale.repeat(5)
        expected = model.covar_module(long).to_dense() * scale * scale.unsqueeze(-1)
        torch.testing.assert_close(prior.covariance_matrix, expected)
    tkrr.fit_gibbs(model, num_warmup=40, num_draws=40, seed=0)
    model.eval()
    with torch.no_grad():
        joint, prediction, draws = model(x), model.predict(x), model.draws(x)
        assert isinstance(joint, gpytorch.distributions.MultitaskMultivariateNormal)
        assert joint.mean.shape == prediction.mean.shape == prediction.extrapolates.shape == (120, T)
        torch.testing.assert_close(joint.mean, prediction.mean)
        torch.testing.assert_close(draws.mean(0), prediction.mean)
        torch.testing.assert_close(joint.variance, draws.var(0))
        by_rows = joint[:4].covariance_matrix
        centered = (draws - draws.mean(0))[:, :4].reshape(40, -1)
        torch.testing.assert_close(by_rows, centered.mT @ centered / 39)
        noise = likelihood.task_noises + likelihood.noise
        torch.testing.assert_close(likelihood(joint).variance, joint.variance + noise)
        torch.testing.assert_close(noise, model.posterior.noise.mean(0))
        assert ((prediction.mean - f) / SCALES).square().mean().sqrt() < 0.1
        assert ((noise.sqrt() / SCALES - 0.1).abs() < 0.04).all()
    with pytest.warns(tkrr.ExtrapolationWarning, match="2 of 2 rows"):
        assert model.predict(x[:2] + 3).extrapolates.all()


def test_streams_and_state():
    x, y, _ = _data()
    whole = tkrr.MultioutputTKRR(x, y, _likelihood(), rank=2)
    tkrr.fit_gibbs(whole, **FIT)
    stream = tkrr.MultioutputTKRR(None, None, _likelihood(), rank=2)
    pandas = pytest.importorskip("pandas")
    batches = [(x[:50].numpy(), y[:50].numpy()), (pandas.DataFrame(x[50:].numpy()), pandas.DataFrame(y[50:].numpy()))]
    tkrr.fit_gibbs(stream, data=batches, memory=0, **FIT)
    loaded = tkrr.MultioutputTKRR(None, None, _likelihood())
    loaded.load_state_dict(whole.state_dict())
    with torch.no_grad():
        expected = whole.predict(x)
        for other in (stream, loaded):
            torch.testing.assert_close(other.predict(x).mean, expected.mean, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(other.predict(x).variance, expected.variance, rtol=1e-6, atol=1e-9)


def _fit_shard(group=None):
    x, y, _ = _data()
    model = tkrr.MultioutputTKRR(None, None, _likelihood(), rank=2)
    data = (x, y) if group is None else tkrr.Shard((x, y), group.rank(), group.size())
    tkrr.fit_gibbs(model, data=data, group=group, **FIT)
    return model.predict(x).mean.detach() / SCALES


@pytest.mark.slow
def test_processes_share_the_rows(tmp_path):
    expected = _fit_shard()
    for result in run_processes(_fit_shard, 2, tmp_path):
        torch.testing.assert_close(result, expected)


def test_moments_of_parts():
    x, y, _ = _data()
    whole = LongTable((x, y + 1e6), T).moments()
    expected = [np.nanmean((y + 1e6).numpy(), axis=0), np.nanstd((y + 1e6).numpy(), axis=0)]
    torch.testing.assert_close(whole, tuple(map(torch.from_numpy, expected)))
    parts = []

    class Recorder:
        def gather(self, part):
            parts.append(part)
            return [part]

    for start in (0, 37):
        rows = slice(start, 37 if start == 0 else None)
        LongTable((x[rows], y[rows] + 1e6), T).moments(Recorder())
    torch.testing.assert_close(_joined_moments([*parts, (None, torch.zeros(3, T))]), whole)


def test_own_kernels_and_priors():
    x, y, _ = _data(60)
    kernel = ScaleKernel(RBFKernel(ard_num_dims=2)).double()
    likelihood = _likelihood(noise_prior=gpytorch.priors.GammaPrior(1.1, 0.5))
    model = tkrr.MultioutputTKRR(x, y, likelihood, kernel=kernel, rank=2, output_rank=2)
    assert model.covar_module.kernels[0] is kernel
    assert isinstance(model.covar_module.kernels[1], IndexKernel)
    tkrr.fit_gibbs(model, **FIT)
    assert any("covar_factor" in name for name in model.posterior.hyperparameters)
    fixed = _likelihood()
    fixed.requires_grad_(False)
    fixed.task_noises, fixed.noise = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.05])
    model = tkrr.MultioutputTKRR(x, y, fixed, rank=2)
    tkrr.fit_gibbs(model, **FIT)
    torch.testing.assert_close(model.posterior.noise, torch.tensor([[0.15, 0.25, 0.35]]).double().expand(6, T))


def test_what_does_not_fit():
    x, y, _ = _data(30)
    with pytest.raises(tkrr.InputError, match="MultitaskGaussianLikelihood"):
        tkrr.MultioutputTKRR(x, y, GaussianLikelihood())
    with pytest.raises(tkrr.InputError, match="rank=0"):
        tkrr.MultioutputTKRR(x, y, MultitaskGaussianLikelihood(T, rank=1))
    with pytest.raises(tkrr.InputError, match=r"targets \(N, 3\)"):
        tkrr.MultioutputTKRR(x, y[:, :2], _likelihood())
    with pytest.raises(tkrr.InputError, match="No target of output 1"):
        tkrr.MultioutputTKRR(x, y.clone().index_fill_(1, torch.tensor([1]), torch.nan), _likelihood())
    wrong = x.clone()
    wrong[7] = torch.nan
    with pytest.raises(tkrr.InputError, match="Row 7 "):
        tkrr.fit_gibbs(tkrr.MultioutputTKRR(None, None, _likelihood()), data=(wrong, y), **FIT)
    model = tkrr.MultioutputTKRR(x, y, _likelihood(), rank=2)
    with pytest.raises(tkrr.InputError, match="fit_gibbs"):
        tkrr.fit_als(model)
    with pytest.raises(tkrr.InputError, match="2 columns"):
        model(torch.rand(4, 3))
    with pytest.raises(tkrr.InputError, match="task_feature_index"):
        tkrr.TKRR(x, y[:, 0].nan_to_num(), HadamardGaussianLikelihood(2))
    rows = observe(HadamardGaussianLikelihood(2, task_feature_index=0))
    with pytest.raises(tkrr.InputError, match="holds tasks, 0 to 1"):
        rows.function_rows(torch.tensor([[2.0, 0.0]]), {})
