"""Pyro runs on Hilbert kernels and CP weights: the real library, short chains, outside oracles."""

from __future__ import annotations

import copy

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ConstantMean
from gpytorch.priors import GammaPrior, LogNormalPrior, NormalPrior
from linear_operator.utils.errors import NanError, NotPSDError
from models import GP

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.hilbert.sampled import is_numerical_failure

pyro = pytest.importorskip("pyro")
from nuts import run_nuts
from pyro import poutine
from pyro.infer import MCMC, NUTS, Predictive
from pyro.infer.mcmc.util import initialize_model
from pyro.ops.integrator import potential_grad

DOMAIN = tkrr.Domain(0.5, 2.0)


def base_kernel(num_dims=1):
    rbf = RBFKernel(ard_num_dims=num_dims, lengthscale_prior=LogNormalPrior(-1.0, 0.5))
    return ScaleKernel(rbf, outputscale_prior=GammaPrior(2.0, 2.0)).double()


def hilbert_kernel(num_dims=1, num_basis=16):
    return tkrr.HilbertKernel(base_kernel(num_dims), DOMAIN, num_basis)


def process(x, y, kernel):
    """A Gaussian process with priors on all its hyperparameters."""
    likelihood = GaussianLikelihood(noise_prior=LogNormalPrior(-3.0, 1.0)).double()
    return GP(x, y, likelihood, kernel, ConstantMean(constant_prior=NormalPrior(0.0, 1.0)).double())


def data(num_rows=40, num_dims=1):
    x = torch.rand(num_rows, num_dims, dtype=torch.float64)
    return x, torch.sin(6 * x[:, 0]) + 0.1 * torch.randn(num_rows, dtype=torch.float64)


def collapsed(gp, sample=None):
    """A Pyro model over the hyperparameters of a Gaussian process."""

    def model(x, y):
        sampled = gp.pyro_sample_from_prior() if sample is None else sample(gp)
        pyro.sample("y", sampled.likelihood(sampled(x)), obs=y)

    return model


# Hyperparameters, weights integrated out


@pytest.mark.parametrize("sample", [None, tkrr.pyro.sample_priors], ids=["pyro_sample_from_prior", "sample_priors"])
def test_potential_is_that_of_the_exact_process(sample):
    """The same sites, and the same joint density and gradient as with the base kernel at many functions."""
    x, y = data()
    results = []
    for kernel, draw in [(hilbert_kernel(num_basis=40), sample), (base_kernel(), None)]:
        init, potential, _, _ = initialize_model(collapsed(process(x, y, kernel), draw), (x, y))
        values = torch.tensor([-1.0, -0.2, -3.0, 0.3], dtype=torch.float64)
        point = {site: values[i].expand_as(value).clone() for i, (site, value) in enumerate(sorted(init.items()))}
        gradient, energy = potential_grad(potential, point)
        results.append((len(init), energy, *(gradient[site].flatten() for site in sorted(gradient))))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)


def test_both_ways_to_sample_have_the_same_sites():
    gp = process(*data(), hilbert_kernel())
    sites = [
        {name: site["value"].shape for name, site in poutine.trace(draw).get_trace().nodes.items() if "prior" in name}
        for draw in (gp.pyro_sample_from_prior, lambda: tkrr.pyro.sample_priors(gp))
    ]
    assert len(sites[0]) == 4 and sites[0] == sites[1]


def test_twin_leaves_the_module_alone():
    gp = process(*data(), hilbert_kernel())
    before = copy.deepcopy(gp.state_dict())
    twin = tkrr.pyro.sample_priors(gp)
    assert twin.covar_module.base_kernel.outputscale != gp.covar_module.base_kernel.outputscale
    assert isinstance(gp.covar_module.base_kernel.raw_outputscale, torch.nn.Parameter)
    assert all(torch.equal(value, before[name]) for name, value in gp.state_dict().items())
    assert twin.train_inputs[0] is gp.train_inputs[0]


def test_a_kernel_becomes_random_without_copies():
    """GPyTorch copies a module for every level of the tree; what is drawn must still not reach the original."""
    kernel = hilbert_kernel()
    drawn = kernel.pyro_sample_from_prior()
    assert drawn.domain is kernel.domain
    assert drawn.base_kernel.outputscale != kernel.base_kernel.outputscale
    assert isinstance(kernel.base_kernel.raw_outputscale, torch.nn.Parameter)


def test_a_mean_that_is_not_drawn_does_not_bring_the_rows_back():
    """Its parameter needs a gradient in GPyTorch's copies, but the sums over the rows are the same at every step."""
    x, y = data()
    gp = process(x, y, hilbert_kernel())
    gp.mean_module = ConstantMean().double()
    init, potential, _, _ = initialize_model(collapsed(gp), (x, y))
    features = gp.covar_module._cache.content[2]
    projected = features._known.projected[1]
    potential_grad(potential, init)
    assert features._known.projected[1] is projected


@pytest.mark.filterwarnings("ignore::gpytorch_tkrr.TKRRWarning")  # hardly any warm-up: long lengthscales
def test_features_are_computed_once_in_a_run_and_shared_by_the_predictions(count_features):
    x, y = data(80)
    gp = process(x, y, hilbert_kernel())
    mcmc = run_nuts(collapsed(gp), x, y, num_samples=6, warmup_steps=3, max_tree_depth=3)
    assert count_features == [80]
    gp.pyro_load_from_samples(mcmc.get_samples())
    gp.eval()
    assert gp(torch.rand(7, 1, dtype=torch.float64)).mean.shape == (6, 7)
    assert count_features[0] == 80 and count_features[1] <= 64  # where the approximation is checked, once per fit
    assert count_features[2:] == [7]


@pytest.mark.parametrize("num_dims", [1, 2])
def test_predictions_from_samples_are_those_of_one_model_each(num_dims):
    x, y = data(30, num_dims)
    sites = {
        "covar_module.base_kernel.base_kernel.lengthscale_prior": 0.3 + 0.3 * torch.rand(4, 1, num_dims),
        "covar_module.base_kernel.outputscale_prior": 0.5 + torch.rand(4),
        "likelihood.noise_covar.noise_prior": 0.01 + 0.1 * torch.rand(4, 1),
        "mean_module.mean_prior": torch.randn(4),
    }
    sites = {name: values.double() for name, values in sites.items()}
    batch = process(x, y, hilbert_kernel(num_dims, 12))
    batch.pyro_load_from_samples(sites)
    test_x = torch.rand(6, num_dims, dtype=torch.float64)
    together = batch.eval().likelihood(batch(test_x))
    functions = tkrr.draw_posterior_functions(batch, 2000)(test_x)  # (2000, 4, 6)
    for i in range(4):
        single = process(x, y, hilbert_kernel(num_dims, 12))
        single.covar_module.base_kernel.base_kernel.lengthscale = sites[
            "covar_module.base_kernel.base_kernel.lengthscale_prior"
        ][i]
        single.covar_module.base_kernel.outputscale = sites["covar_module.base_kernel.outputscale_prior"][i]
        single.likelihood.noise = sites["likelihood.noise_covar.noise_prior"][i]
        single.mean_module.constant.data.fill_(sites["mean_module.mean_prior"][i])
        latent = single.eval()(test_x)
        expected = single.likelihood(latent)
        torch.testing.assert_close(together.mean[i], expected.mean)
        torch.testing.assert_close(together.covariance_matrix[i], expected.covariance_matrix)
        error = (functions[:, i].mean(0) - latent.mean) / (latent.stddev / 2000**0.5)
        assert error.abs().max() < 5


def test_draws_of_the_mean_parameter_agree_with_the_closed_form():
    """With all else fixed the posterior of a constant mean is Gaussian and known."""
    x, y = data(30)
    kernel = tkrr.HilbertKernel(ScaleKernel(RBFKernel()).double(), DOMAIN, 20)
    kernel.base_kernel.base_kernel.lengthscale = 0.4
    gp = process(x, y, kernel)
    del gp.likelihood.noise_covar._priors["noise_prior"]
    gp.likelihood.noise = 0.05
    mcmc = run_nuts(collapsed(gp, tkrr.pyro.sample_priors), x, y, num_samples=200, warmup_steps=30, max_tree_depth=3)
    draws = mcmc.get_samples()["mean_module.mean_prior"]
    covariance = kernel(x).to_dense().detach() + 0.05 * torch.eye(30)
    precision = 1 + torch.linalg.solve(covariance, torch.ones(30, dtype=torch.float64)).sum()
    mean = torch.linalg.solve(covariance, y).sum() / precision
    assert (draws.mean() - mean).abs() < 5 / (50 * precision).sqrt()  # a quarter of the draws are worth something
    assert 0.7 < draws.std() * precision.sqrt() < 1.4


# Steps that fail


@pytest.mark.parametrize("error", [NotPSDError("a"), NanError("b"), torch.linalg.LinAlgError("c"), OverflowError("d")])
def test_numerical_failures_are_recognised(error):
    assert is_numerical_failure(error)


@pytest.mark.parametrize("error", [ValueError("shape"), RuntimeError("size mismatch"), tkrr.DomainError("outside")])
def test_mistakes_are_not_taken_for_numerical_failures(error):
    assert not is_numerical_failure(error)


def test_distributions_of_nan_are_failures():
    with pytest.raises(ValueError) as caught:
        torch.distributions.Normal(torch.tensor(float("nan")), 1.0)
    assert is_numerical_failure(caught.value)


@pytest.mark.parametrize(
    "failure", [NotPSDError("not positive definite"), NanError("NaN")], ids=lambda e: type(e).__name__
)
def test_a_bad_step_is_rejected(failure):
    """Beyond a wall the likelihood fails: the run goes on and stays on the near side."""
    x, y = data(20)
    gp = process(x, y, hilbert_kernel())

    def model():
        sampled = tkrr.pyro.sample_priors(gp)
        scale = sampled.covar_module.base_kernel.outputscale
        if scale.requires_grad and scale > 1.0:  # a leapfrog step, not the calls that tell Pyro the sites
            raise failure
        pyro.sample("y", sampled.likelihood(sampled(x)), obs=y)

    start = {
        "covar_module.base_kernel.outputscale_prior": torch.tensor(-1.0),
        "covar_module.base_kernel.base_kernel.lengthscale_prior": torch.full((1, 1), -1.0, dtype=torch.float64),
        "likelihood.noise_covar.noise_prior": torch.full((1,), -3.0, dtype=torch.float64),
        "mean_module.mean_prior": torch.tensor(0.0),
    }
    pyro.set_rng_seed(0)
    nuts = NUTS(model, max_tree_depth=4)
    mcmc = MCMC(nuts, num_samples=20, warmup_steps=10, initial_params=start, disable_progbar=True)
    mcmc.run()
    draws = mcmc.get_samples()["covar_module.base_kernel.outputscale_prior"]
    assert draws.max() <= 1.0 and len(draws.unique()) > 5
    assert sum(len(steps) for steps in mcmc.diagnostics()["divergences"].values()) > 0


def test_a_mistake_in_the_model_is_raised():
    x, y = data(20)
    gp = process(x, y, hilbert_kernel())

    def model():
        gp.pyro_sample_from_prior()
        raise tkrr.InputError("a mistake")

    with pytest.raises(tkrr.InputError, match="a mistake"):
        MCMC(NUTS(model), num_samples=2, warmup_steps=1, disable_progbar=True).run()


# Weight space


def simulate(function, num_draws):
    """Independent functions, `(num_draws, N)`: a plate gives one for each of its entries."""
    with pyro.plate("draws", num_draws):
        return function()


def test_prior_covariance_of_a_hilbert_function():
    x = torch.rand(6, 2, dtype=torch.float64)
    kernel = tkrr.HilbertKernel(ScaleKernel(RBFKernel(ard_num_dims=2)).double(), DOMAIN, 10)
    draws = simulate(lambda: tkrr.pyro.hilbert_gp("f", kernel, x), 20_000)
    torch.testing.assert_close(draws.T @ draws / 20_000, kernel(x).to_dense().detach(), atol=0.04, rtol=0)


@pytest.mark.parametrize("rank", [1, 8])
def test_prior_covariance_of_a_cp_function_is_the_kernel_at_any_rank(rank):
    x = torch.rand(5, 3, dtype=torch.float64)
    kernel = ScaleKernel(RBFKernel(ard_num_dims=3)).double()
    kernel.outputscale = 2.0
    draws = simulate(lambda: tkrr.pyro.cp_function("f", kernel, x, domain=DOMAIN, rank=rank, num_basis=8), 50_000)
    torch.testing.assert_close(draws.T @ draws / 50_000, kernel(x).to_dense().detach(), atol=0.2, rtol=0)


def test_cp_function_is_the_product_of_its_factors():
    x = torch.rand(5, 2, dtype=torch.float64)
    kernel = ScaleKernel(RBFKernel(ard_num_dims=2)).double()
    trace = poutine.trace(tkrr.pyro.cp_function).get_trace("f", kernel, x, domain=DOMAIN, rank=3, num_basis=6)
    weights = [trace.nodes[f"f.weights_{d}"]["value"] for d in range(2)]
    modes = tkrr.features.separable.separate(kernel, DOMAIN, 6, 2).modes
    expected = torch.zeros(5, dtype=torch.float64)
    for r in range(3):
        parts = [m.basis(x[:, d]) @ (m.variances().sqrt() * weights[d][r]) for d, m in enumerate(modes)]
        expected += parts[0] * parts[1] * (kernel.outputscale / 3).sqrt()
    torch.testing.assert_close(trace.nodes["f"]["value"], expected)


def test_priors_of_the_kernel_become_sites():
    x = torch.rand(5, 2, dtype=torch.float64)
    names = {"base_kernel.lengthscale_prior", "outputscale_prior"}
    trace = poutine.trace(tkrr.pyro.hilbert_gp).get_trace("f", hilbert_kernel(2, 6), x)
    assert set(trace.stochastic_nodes) == {"f.weights", *(f"f.base_kernel.{name}" for name in names)}
    trace = poutine.trace(tkrr.pyro.cp_function).get_trace("g", base_kernel(2), x, domain=DOMAIN, rank=2)
    assert set(trace.stochastic_nodes) == {"g.weights_0", "g.weights_1", *(f"g.{name}" for name in names)}


def test_a_sampled_kernel_is_not_sampled_again():
    x = torch.rand(5, 1, dtype=torch.float64)

    def model():
        kernel = tkrr.pyro.sample_priors(hilbert_kernel(1, 6), "k")
        return tkrr.pyro.hilbert_gp("f", kernel, x) + tkrr.pyro.hilbert_gp("g", kernel, x)

    sites = {"k.base_kernel.outputscale_prior", "k.base_kernel.base_kernel.lengthscale_prior"}
    assert set(poutine.trace(model).get_trace().stochastic_nodes) == {"f.weights", "g.weights", *sites}


def test_a_scale_around_a_hilbert_kernel():
    x = torch.rand(5, 1, dtype=torch.float64)
    kernel = ScaleKernel(tkrr.HilbertKernel(RBFKernel(), DOMAIN, 12)).double()
    kernel.outputscale = 9.0
    draws = simulate(lambda: tkrr.pyro.hilbert_gp("f", kernel, x), 2000)
    torch.testing.assert_close(draws.var(0), kernel(x, diag=True).detach(), rtol=0.2, atol=0)


def test_mistakes_are_named():
    x = torch.rand(5, 1, dtype=torch.float64)
    with pytest.raises(tkrr.InputError, match="HilbertKernel"):
        tkrr.pyro.hilbert_gp("f", base_kernel(), x)
    with pytest.raises(tkrr.DomainError):
        tkrr.pyro.hilbert_gp("f", hilbert_kernel(), x + 10)
    with pytest.raises(tkrr.InputError, match="before the plate"), pyro.plate("groups", 3):
        tkrr.pyro.hilbert_gp("f", hilbert_kernel(), x)
    kernel = RBFKernel()
    kernel.register_prior("p", GammaPrior(1.0, 1.0), lambda module: module.lengthscale)
    with pytest.raises(tkrr.InputError, match="setting_closure"):
        tkrr.pyro.sample_priors(kernel)


def test_poisson_regression():
    """Counts with a known rate: the posterior finds it, and predicts at new inputs."""
    x = torch.linspace(0, 1, 80, dtype=torch.float64)
    log_rate = 1.5 + torch.sin(6 * x)
    counts = torch.poisson(log_rate.exp())
    kernel = hilbert_kernel(num_basis=10)

    def model(x, y=None):
        level = pyro.sample("level", pyro.distributions.Normal(0.0, 2.0))
        f = tkrr.pyro.hilbert_gp("f", kernel, x)
        with pyro.plate("rows", len(x)):
            return pyro.sample("y", pyro.distributions.Poisson((level + f).exp()), obs=y)

    mcmc = run_nuts(model, x, counts, num_samples=40, warmup_steps=30, max_tree_depth=4)
    new = torch.linspace(0.05, 0.95, 7, dtype=torch.float64)
    samples = mcmc.get_samples()
    predicted = Predictive(model, samples)(new)
    rates = predicted["f"].reshape(40, 7) + samples["level"].unsqueeze(-1)
    error = rates.mean(0) - (1.5 + torch.sin(6 * new))
    assert error.abs().max() < 4 * rates.std(0).max() and rates.std(0).max() < 0.5
    assert predicted["y"].shape == (40, 7)


def test_hierarchical_functions():
    """One common function and one deviation per group: a plate gives a function for each of its entries."""
    x = torch.rand(30, 1, dtype=torch.float64)
    group = torch.arange(30) % 3
    y = torch.sin(6 * x[:, 0]) + group.double() * x[:, 0] + 0.1 * torch.randn(30, dtype=torch.float64)
    common, own = hilbert_kernel(num_basis=8), hilbert_kernel(num_basis=6)

    def model(x, group, y=None):
        shared = tkrr.pyro.hilbert_gp("common", common, x)
        kernel = tkrr.pyro.sample_priors(own, "own_kernel")
        with pyro.plate("groups", 3):
            deviation = tkrr.pyro.hilbert_gp("own", kernel, x)  # (3, N)
        f = shared + deviation[group, torch.arange(len(x))]
        with pyro.plate("rows", len(x)):
            return pyro.sample("y", pyro.distributions.Normal(f, 0.1), obs=y)

    trace = poutine.trace(model).get_trace(x, group)
    assert trace.nodes["own"]["value"].shape == (3, 30) and trace.nodes["own.weights"]["value"].shape == (3, 6)
    mcmc = run_nuts(model, x, group, y, num_samples=12, warmup_steps=25, max_tree_depth=4)
    fitted = Predictive(model, mcmc.get_samples(), return_sites=["y"])(x, group)["y"].mean(0)
    assert (fitted - y).square().mean() < 0.1


def test_single_precision():
    x = torch.rand(20, 2)
    f = tkrr.pyro.hilbert_gp("f", hilbert_kernel(2, 6).float(), x)
    g = tkrr.pyro.cp_function("g", base_kernel(2).float(), x, domain=DOMAIN, rank=2)
    assert f.dtype == g.dtype == torch.float32
