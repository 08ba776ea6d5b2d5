"""The limit of many components: hyperparameters with f integrated out, and draws of f, against dense algebra."""

from __future__ import annotations

import warnings

import gpytorch
import numpy as np
import pytest
import torch

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.chains import limit_chain, pool
from gpytorch_tkrr.chains.chain import Chain
from gpytorch_tkrr.chains.problem import GibbsProblem
from gpytorch_tkrr.cp.design import DenseRows
from gpytorch_tkrr.data.source import TensorSource
from gpytorch_tkrr.inference import gibbs
from gpytorch_tkrr.sampling import plan
from gpytorch_tkrr.sampling.process import ProcessChain


def make_model(num_rows=40, *, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(num_rows, 3, generator=generator, dtype=torch.float64)
    y = torch.sin(5 * x[:, 0]) * x[:, 1] + x[:, 2] + 0.1 * torch.randn(num_rows, generator=generator).double()
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    return tkrr.TKRR(x, 3 * y, likelihood, **options).double()


def make_posterior(model, data=None):
    training = model.training_data(data)
    model.prepare(training)
    problem = GibbsProblem(model, training, None, 1 << 30, 0)
    assert problem.choose_plan(None, None, None).num_processes == 3
    chain = limit_chain.LimitChain(problem, 0)
    chain.begin()
    chain.joint.set(chain.slots, chain.coordinates)
    chain.sweeps = chain.ends[0]
    return chain._posterior()


def dense_kernel(posterior, x1, x2):
    """The kernel of the functions, by the features and nothing else."""
    total = posterior.outputscale().detach() * posterior.unit
    for d, mode in enumerate(posterior.separable.modes):
        v = mode.covariance().to_dense().detach()
        total = total * (mode.basis(x1[:, d]) @ v @ mode.basis(x2[:, d]).mT)
    return total


@torch.no_grad()
@pytest.mark.parametrize("weighted", [False, True])
def test_density_is_the_dense_one_and_its_gradient_that_of_differences(weighted):
    model = make_model()
    x, y = model.train_inputs[0], model.train_targets
    weight = torch.rand(len(y), dtype=torch.float64) + 0.5 if weighted else torch.ones(len(y), dtype=torch.float64)
    posterior = make_posterior(model, [(x, y, weight)] if weighted else None)
    hyper, slots = posterior.hyperparameters, posterior.slots
    mean = model.mean_module.constant.detach().double()

    def reference():
        noise = model.likelihood.noise.detach().double()
        covariance = dense_kernel(posterior, x, x) + torch.diag(noise / weight)
        density = torch.distributions.MultivariateNormal(mean.expand(len(y)), covariance).log_prob(y)
        return float(density) + hyper.log_prior(slots)

    here = hyper.get(slots)
    value, gradient = posterior.expand()
    offset = value - reference()
    for i in slots:
        sides = []
        for step in (1e-5, -1e-5):
            moved = here.clone()
            moved[i] += step
            assert hyper.set(slots, moved)
            sides.append(reference())
            assert posterior.expand()[0] - sides[-1] == pytest.approx(offset, abs=1e-7)
        assert float(gradient[i]) == pytest.approx((sides[0] - sides[1]) / 2e-5, rel=1e-4, abs=1e-5)
    hyper.set(slots, here)


@torch.no_grad()
def test_draws_have_mean_and_variance_of_the_process_and_rows_their_density():
    model = make_model(25)
    posterior = make_posterior(model)
    ProcessChain(posterior, np.random.default_rng(1)).ascend(30)
    x, y = model.train_inputs[0], model.train_targets
    test = torch.rand(7, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    mean, unit = model.mean_module.constant.detach().double(), posterior.unit**0.5
    noise = model.likelihood.noise.detach().double()
    root = torch.linalg.cholesky(dense_kernel(posterior, x, x) + noise * torch.eye(25, dtype=torch.float64))
    cross = dense_kernel(posterior, test, x)
    exact = mean + cross @ torch.cholesky_solve((y - mean).unsqueeze(-1), root)[:, 0]
    variance = dense_kernel(posterior, test, test) - cross @ torch.cholesky_solve(cross.mT, root)
    rng, values = np.random.default_rng(2), []
    for _ in range(2000):
        factors, _ = posterior.draw(rng)
        parts = [basis.basis(test[:, d]) @ factors[d].mT for d, basis in enumerate(posterior.separable.modes)]
        values.append(mean + unit * torch.stack(parts).prod(0).sum(-1))
    values = torch.stack(values)
    error = variance.diagonal().sqrt() / 2000**0.5
    assert ((values.mean(0) - exact).abs() < 5 * error).all()
    torch.testing.assert_close(values.mT.cov(), variance, rtol=0.0, atol=0.2 * float(variance.diagonal().max()))
    features = [mode.basis(test[:, d]) for d, mode in enumerate(posterior.separable.modes)]
    rows = DenseRows(features, (exact + 0.3 - mean) / unit, torch.ones(7, dtype=torch.float64))
    expected = torch.distributions.Normal(exact, (variance.diagonal() + noise).sqrt()).log_prob(exact + 0.3)
    found = posterior.log_densities(rows) - np.log(unit) - 0.5 * np.log(2 * np.pi)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.fixture
def short(monkeypatch):
    """Two chains, one of each kind, and few sweeps."""
    monkeypatch.setattr(plan, "CHAINS", {1000: (2, 100, 1)})
    monkeypatch.setattr(plan, "FIRST_STAGE", 12)
    monkeypatch.setattr(plan, "FEW_DRAWS", 6)
    monkeypatch.setattr(plan, "MANY_DRAWS", 6)
    monkeypatch.setattr(limit_chain, "FIRST_STEPS", 20)
    monkeypatch.setattr(pool, "IDLE_WEIGHT", 0.0)
    monkeypatch.setattr(pool, "stacking_weights", lambda scores: torch.tensor([0.5, 0.5], dtype=torch.float64))


def fit(model, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tkrr.ConvergenceWarning)
        return tkrr.fit_gibbs(model, seed=0, **options)


def test_a_fit_has_both_kinds_of_chains_goes_on_and_is_saved(short):
    model = make_model(60)
    x, y = model.train_inputs[0], model.train_targets
    result = fit(model)
    assert "2 chains (1 in the limit of many components)" in result.message
    assert result.posterior.chains.bincount().tolist() == [6, 6] and model.rank == result.posterior.rank == 60 + 64
    assert (model.predict(x).mean - y).square().mean().sqrt() < 0.3
    by_chain = result.posterior.functions(model.warped(x)).reshape(2, 6, 60).mean(1)
    assert (by_chain[0] - by_chain[1]).square().mean().sqrt() < 0.3 * y.std()
    loaded = make_model(60)
    loaded.load_state_dict(model.state_dict())
    torch.testing.assert_close(loaded.predict(x).mean, model.predict(x).mean)
    with torch.no_grad():
        before = model.predict(x).mean
        again = fit(model, num_warmup=0, num_draws=4)
        assert again.posterior.chains.bincount().tolist() == [10, 10]
        assert (model.predict(x).mean - before).square().mean().sqrt() < 0.3
    more = torch.rand(5, 3, dtype=torch.float64)
    result = fit(model, new_rows=(more, torch.sin(5 * more[:, 0]) * more[:, 1] + more[:, 2]))
    assert result.posterior.rank == 65 + 64 and model.train_targets.shape == (65,)


def test_processes_batches_and_interruptions_change_nothing(short, monkeypatch, tmp_path):
    fits = []
    sweep = Chain.sweep
    for num_workers, batch_rows, stop in ((1, 1000, None), (2, 1000, None), (1, 17, None), (1, 1000, 5), (1, 1000, 12)):
        monkeypatch.setattr(gibbs, "num_parallel", lambda num=num_workers: num)
        model = make_model(60)
        data = TensorSource(*model.train_inputs, model.train_targets, batch_rows=batch_rows)
        options = {"data": data}
        if stop is not None:
            options["checkpoint"] = tkrr.Checkpoint(tmp_path / f"{stop}.pt", seconds=0)
            count = 0

            def stopped(self, stop=stop):
                nonlocal count
                count += 1
                if count == stop:
                    raise KeyboardInterrupt
                sweep(self)

            monkeypatch.setattr(Chain, "sweep", stopped)
            with pytest.raises(KeyboardInterrupt):
                fit(model, **options)
            monkeypatch.setattr(Chain, "sweep", sweep)
        fit(model, **options)
        fits.append(model.predict(torch.full((1, 3), 0.4, dtype=torch.float64)).mean)
    assert torch.equal(fits[0], fits[1]) and torch.equal(fits[0], fits[3]) and torch.equal(fits[0], fits[4])
    torch.testing.assert_close(fits[0], fits[2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("unit", [1e-7, 1e6])
def test_units_of_targets_without_noise_do_not_matter(short, unit):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(60, 2, generator=generator, dtype=torch.float64)
    y = torch.exp(3 * x[:, 0]) * x[:, 1]
    predictions = []
    for scale in (1.0, unit):
        likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=gpytorch.constraints.Positive()).double()
        model = tkrr.TKRR(x, scale * y, likelihood)
        result = fit(model)
        assert "1 in the limit" in result.message
        predictions.append(model.predict(x).mean / scale)
    torch.testing.assert_close(*predictions, rtol=0.0, atol=1e-3 * float(y.std()))
    assert (predictions[1] - y).square().mean().sqrt() < 0.1 * y.std()
