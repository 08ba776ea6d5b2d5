"""Draws reach ArviZ with the same groups from every sampler, and ArviZ's own functions run on them."""

from __future__ import annotations

import sys
import warnings

import gpytorch
import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood, GaussianLikelihood
from gpytorch.priors import LogNormalPrior
from models import GP

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.inference.arviz import by_chain, gathered
from gpytorch_tkrr.model.likelihoods.registry import observe

az = pytest.importorskip("arviz")
pyro = pytest.importorskip("pyro")
from nuts import run_nuts

GROUPS = {"posterior", "sample_stats", "log_likelihood", "posterior_predictive", "observed_data", "constant_data"}

pytestmark = [
    pytest.mark.filterwarnings("ignore::gpytorch_tkrr.TKRRWarning"),  # the chains are short, some lengthscales long
    pytest.mark.filterwarnings("ignore:Estimated shape parameter of Pareto distribution:UserWarning"),
    # ArviZ 0.23 uses what newer versions of Matplotlib and pandas deprecate.
    pytest.mark.filterwarnings("ignore:Passing a dict or None as alias_mapping"),
    pytest.mark.filterwarnings("ignore:The inplace keyword"),
]


@pytest.fixture(scope="module", autouse=True)
def no_display():
    pytest.importorskip("matplotlib").use("Agg")


@pytest.fixture(scope="module")
def data():
    torch.manual_seed(0)
    x = torch.rand(60, 2, dtype=torch.float64)
    return x, torch.sin(6 * x[:, 0]) + x[:, 1] + 0.2 * torch.randn(60, dtype=torch.float64)


@pytest.fixture(scope="module")
def gibbs(data):
    kernel = ScaleKernel(RBFKernel(ard_num_dims=2)).double()
    kernel.base_kernel.lengthscale = 0.5
    model = tkrr.TKRR(*data, GaussianLikelihood().double(), kernel=kernel, rank=3, num_basis=8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tkrr.ConvergenceWarning)
        return tkrr.fit_gibbs(model, num_draws=30, num_warmup=10, num_chains=2, seed=0)


@pytest.fixture(scope="module")
def process(data):
    """A Gaussian process and a run over its hyperparameters."""
    base = ScaleKernel(RBFKernel(ard_num_dims=2, lengthscale_prior=LogNormalPrior(-0.7, 0.5))).double()
    likelihood = GaussianLikelihood(noise_prior=LogNormalPrior(-3.0, 1.0))
    gp = GP(*data, likelihood, tkrr.HilbertKernel(base, tkrr.Domain(0.5, 2.0), 16)).double()

    def model(x, y):
        sampled = tkrr.pyro.sample_priors(gp)
        pyro.sample("y", sampled.likelihood(sampled(x)), obs=y)

    return gp, run_nuts(model, *data, warmup_steps=15, max_tree_depth=4)


@pytest.fixture(scope="module")
def weight_space(data):
    kernel = tkrr.HilbertKernel(RBFKernel(ard_num_dims=2).double(), tkrr.Domain(0.5, 2.0), 5)
    kernel.base_kernel.lengthscale = 0.5

    def model(x, y=None):
        f = tkrr.pyro.hilbert_gp("f", kernel, x)
        noise = pyro.sample("noise", pyro.distributions.LogNormal(-3.0, 1.0))
        with pyro.plate("rows", len(x)):
            return pyro.sample("y", pyro.distributions.Normal(f, noise.sqrt()), obs=y)

    return run_nuts(model, *data, warmup_steps=15, max_tree_depth=4)


@pytest.fixture(scope="module", params=["gibbs", "process", "weight_space"])
def exported(request):
    source = request.getfixturevalue(request.param)
    if request.param == "gibbs":
        return source.to_arviz(seed=0)
    return tkrr.pyro.to_arviz(source[1], source[0]) if request.param == "process" else tkrr.pyro.to_arviz(source)


def test_every_sampler_fills_the_same_groups(exported, data):
    assert {name.strip("/") for name in exported.groups()} >= GROUPS
    num_chains, num_draws = exported.posterior.sizes["chain"], exported.posterior.sizes["draw"]
    for group in ("log_likelihood", "posterior_predictive"):
        assert exported[group]["y"].shape == (num_chains, num_draws, 60)
        assert exported[group]["y"].dims == ("chain", "draw", "row")
    assert "noise" in exported.posterior and "f" in exported.posterior
    assert exported.sample_stats["deviance"].shape == (num_chains, num_draws)
    np.testing.assert_allclose(exported.observed_data["y"], data[1])
    np.testing.assert_allclose(exported.constant_data["x"], data[0])


def independent_variance(exported):
    """Noise, and what a basis does not represent of the kernel."""
    posterior = exported.posterior
    missing = posterior["missing_variance"].values if "missing_variance" in posterior else 0.0
    return posterior["noise"].values + missing


def test_log_likelihood_is_that_of_a_normal_around_f(exported, data):
    """At the rows whose f is exported, by scipy."""
    f = exported.posterior["f"]
    rows = f["watched_row"].values if "watched_row" in f.dims else np.arange(60)
    noise = independent_variance(exported)[..., None]
    expected = scipy.stats.norm.logpdf(data[1].numpy()[rows], f.values, np.sqrt(noise))
    np.testing.assert_allclose(exported.log_likelihood["y"].values[..., rows], expected, rtol=1e-6)


def test_replicated_targets_scatter_like_the_noise(exported):
    f = exported.posterior["f"]
    rows = f["watched_row"].values if "watched_row" in f.dims else np.arange(60)
    z = exported.posterior_predictive["y"].values[..., rows] - f.values
    z /= np.sqrt(independent_variance(exported)[..., None])
    assert abs(z.mean()) < 5 / np.sqrt(z.size) and 0.9 < z.std() < 1.1


def test_functions_of_arviz_run(exported):
    import matplotlib.pyplot as plt

    assert np.isfinite(az.loo(exported).elpd_loo)
    az.plot_trace(exported, var_names=["noise", "f"], compact=True)
    az.plot_ppc(exported, num_pp_samples=10)
    assert "noise" in az.summary(exported, var_names=["noise"]).index
    plt.close("all")


def test_compare_prefers_the_model_that_fits(gibbs, process, data):
    x, y = data
    constant = tkrr.TKRR(x, y, GaussianLikelihood().double(), kernel=gpytorch.kernels.ConstantKernel().double(), rank=1)
    flat = tkrr.fit_gibbs(constant, num_draws=20, num_warmup=5, seed=0)
    table = az.compare({
        "T-KRR": gibbs.to_arviz(seed=0),
        "Hilbert GP": tkrr.pyro.to_arviz(process[1], process[0]),
        "constant": flat.to_arviz(seed=0),
    })  # fmt: skip
    assert table.index[-1] == "constant"


def test_files(exported, tmp_path):
    """The names can be written to netCDF and read again."""
    pytest.importorskip("h5netcdf")
    exported.to_netcdf(tmp_path / "draws.nc")
    again = az.from_netcdf(tmp_path / "draws.nc")
    np.testing.assert_allclose(again.log_likelihood["y"], exported.log_likelihood["y"])


# Gibbs


def test_posterior_of_gibbs(gibbs):
    exported = gibbs.to_arviz(seed=0)
    names = set(exported.posterior.data_vars)
    assert names == {"noise", "outputscale", "base_kernel.lengthscale", "f"}
    assert exported.posterior["base_kernel.lengthscale"].shape == (2, 30, 2)
    second = gibbs.posterior.noise[gibbs.posterior.chains == 1]
    np.testing.assert_allclose(exported.posterior["noise"][1], second)
    f = gibbs.model.draws(gibbs.model.train_inputs[0])[gibbs.posterior.chains == 1]
    np.testing.assert_allclose(
        exported.posterior["f"][1], f.detach().numpy()[:, exported.posterior["watched_row"].values]
    )


def test_seed_and_rows(gibbs):
    first, second, third = (gibbs.to_arviz(seed=seed).posterior_predictive["y"].values for seed in (0, 0, 1))
    assert np.array_equal(first, second) and not np.array_equal(first, third)
    x, y = torch.rand(7, 2, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    rows = gibbs.to_arviz(data=(x, y), seed=0)
    density = np.log(np.exp(rows.log_likelihood["y"].values).mean((0, 1)))
    np.testing.assert_allclose(density, gibbs.log_predictive_density(x, y), rtol=1e-6)


def test_rows_in_chunks(gibbs, monkeypatch):
    whole = gibbs.to_arviz(seed=0).log_likelihood["y"].values
    monkeypatch.setattr(tkrr.inference.arviz, "CHUNK", 7 * 60)
    np.testing.assert_allclose(gibbs.to_arviz(seed=0).log_likelihood["y"].values, whole)


def test_a_model_without_data_asks_for_rows(gibbs, data):
    model = gibbs.model
    inputs, model.train_inputs = model.train_inputs, None
    try:
        with pytest.raises(tkrr.InputError, match="data="):
            gibbs.to_arviz()
        assert gibbs.to_arviz(data=data).observed_data["y"].shape == (60,)
    finally:
        model.train_inputs = inputs


def test_one_input_and_a_later_fit_by_als():
    x = torch.rand(30, dtype=torch.float64)
    noise = torch.full((30,), 0.04, dtype=torch.float64)
    likelihood = gpytorch.likelihoods.FixedNoiseGaussianLikelihood(noise)
    model = tkrr.TKRR(x, torch.sin(6 * x), likelihood, rank=2, num_basis=6)
    result = tkrr.fit_gibbs(model, num_draws=8, num_warmup=8, seed=0)
    assert result.to_arviz(data=(x[:7], x[:7]), noise=noise[:7]).log_likelihood["y"].shape == (1, 8, 7)
    tkrr.fit_als(model, seed=0)
    with pytest.raises(tkrr.NotFittedError, match="fit_als since"):
        result.to_arviz()


def test_without_arviz(gibbs, monkeypatch):
    monkeypatch.setitem(sys.modules, "arviz", None)
    with pytest.raises(ImportError, match=r"gpytorch_tkrr\[arviz\]"):
        gibbs.to_arviz()


# Pieces


def test_probit_observations_are_exact_in_the_tails():
    f = torch.tensor([-30.0, -1.0, 0.0, 2.0, 30.0], dtype=torch.float64)
    probit, parameters = observe(BernoulliLikelihood()), {"noise": torch.ones(())}
    for y, sign in ((torch.ones_like(f), 1), (torch.zeros_like(f), -1)):
        expected = scipy.special.log_ndtr(sign * f.numpy())
        np.testing.assert_allclose(probit.log_density(y, f, parameters, {}), expected, atol=1e-15)


def test_chains_are_told_apart_unless_they_count_differently():
    chains = torch.tensor([0, 0, 1, 1, 0, 1, 0])
    assert by_chain(torch.arange(6), chains[:6]).tolist() == [[0, 1, 4], [2, 3, 5]]
    assert by_chain(torch.arange(7), chains).tolist() == [[0, 1, 2, 3, 4, 5, 6]]


def test_elements_of_one_parameter_are_gathered():
    values = {"a[0]": torch.zeros(3), "a[1]": torch.ones(3), "b": torch.ones(3)}
    assert {name: tuple(value.shape) for name, value in gathered(values).items()} == {"a": (3, 2), "b": (3,)}
    assert gathered(values)["a"][0].tolist() == [0.0, 1.0]


def test_classification():
    x = torch.rand(60, 2, dtype=torch.float64)
    labels = (x[:, 0] + x[:, 1] > 1).double()
    model = tkrr.TKRR(x, labels, BernoulliLikelihood(), rank=2, num_basis=6)
    result = tkrr.fit_gibbs(model, num_draws=20, num_warmup=10, seed=0)
    exported = result.to_arviz(seed=0)
    assert "noise" not in exported.posterior
    density = np.log(np.exp(exported.log_likelihood["y"].values).mean((0, 1)))
    np.testing.assert_allclose(density, result.log_predictive_density(x, labels), rtol=1e-6, atol=1e-9)
    assert set(np.unique(exported.posterior_predictive["y"])) == {0.0, 1.0}
    assert np.isfinite(az.loo(exported).elpd_loo)
