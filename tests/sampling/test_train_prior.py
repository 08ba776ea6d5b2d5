"""Draws of tensor trains: their prior has the kernel's covariance, and the sampler has the posterior as its limit."""

from __future__ import annotations

import math

import gpytorch
import numpy as np
import pytest
import scipy.stats
import torch
from gpytorch.kernels import AdditiveKernel, ConstantKernel, ProductKernel, RBFKernel, ScaleKernel
from models import gaussian, rbf

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.cp.design import Design
from gpytorch_tkrr.data.source import TensorSource
from gpytorch_tkrr.data.training import TrainingData
from gpytorch_tkrr.features.separable import separate
from gpytorch_tkrr.model.likelihoods.gaussian import GaussianAugmentation
from gpytorch_tkrr.model.likelihoods.noise import NoiseModel
from gpytorch_tkrr.sampling.hyperparameters import Hyperparameters
from gpytorch_tkrr.sampling.priors import GibbsState
from gpytorch_tkrr.sampling.sampler import GibbsSampler
from gpytorch_tkrr.sampling.train_prior import SoftBondPrior

NOISE = scipy.stats.lognorm(0.5, scale=0.2)


def draw_precisions(prior: SoftBondPrior, rng: np.random.Generator) -> torch.Tensor:
    """Of f as a whole, which is 1, and of all bonds, from the prior."""
    bonds = [rng.gamma(prior.shape, 1 / prior.rate(b), rank) for b, rank in enumerate(prior.ranks, start=1)]
    return torch.from_numpy(np.concatenate([[1.0], *bonds]))


def draw_cores(prior: SoftBondPrior, sizes: list[int], rng: np.random.Generator) -> GibbsState:
    """Whitened cores and their precisions, from the prior."""
    bonds, places = [1, *prior.ranks, 1], [prior.chain.index(d) for d in range(len(sizes))]
    heights = [bonds[place] * bonds[place + 1] for place in places]
    factors = [torch.zeros(*shape, dtype=torch.float64) for shape in zip(heights, sizes, strict=True)]
    state = prior.start(factors, {}, torch.empty(0))
    state.precisions = draw_precisions(prior, rng)
    state.factors = [
        torch.from_numpy(rng.standard_normal(factor.shape)) / prior.rows(state, d).sqrt().unsqueeze(-1)
        for d, factor in enumerate(factors)
    ]
    return state


@pytest.mark.parametrize("ranks", [[3, 5], [2, 4, 4, 3], []], ids=len)
def test_the_covariance_of_the_prior_is_the_kernel(ranks):
    """Given the precisions the variances of all paths add up; their mean is one."""
    prior, rng = SoftBondPrior(ranks), np.random.default_rng(0)
    totals = []
    for _ in range(400):
        state = draw_cores(prior, [1] * (len(ranks) + 1), rng)
        total = torch.ones(1, 1, dtype=torch.float64)
        for d, left in enumerate([1, *ranks]):
            total = total @ (1 / prior.rows(state, d)).reshape(left, -1)  # variances of the entries of a core
        totals.append(float(total))
    error = np.std(totals) / math.sqrt(len(totals))
    assert abs(np.mean(totals) - 1) <= 4 * error + 1e-12


def test_the_variance_of_a_path_over_many_inputs_has_a_bounded_spread():
    prior, rng = SoftBondPrior([3] * 199), np.random.default_rng(0)
    taus = np.array([rng.gamma(prior.shape, 1 / prior.rate(bond), 1000) for bond in range(1, 200)])
    assert 3.0 < np.std(2 * np.log(taus).sum(0)) < 4.5


class _Problem:
    """A tiny model of three inputs whose prior can be drawn from."""

    num_dims, num_rows, num_basis = 3, 12, 3

    def __init__(self, order=None):
        self.form = tkrr.TensorTrain(2, order)
        factors = []
        for d in range(self.num_dims):
            constant = ConstantKernel(active_dims=(d,))
            constant.constant = torch.tensor(0.5)
            constant.raw_constant.requires_grad_(False)
            smooth = RBFKernel(active_dims=(d,))
            smooth.lengthscale = 0.7
            factors.append(AdditiveKernel(constant, smooth))
        self.kernel = ScaleKernel(ProductKernel(*factors)).double()
        self.kernel.outputscale = 1.0
        self.separable = separate(self.kernel, tkrr.Domain(torch.full((3,), 0.5), 1.5), self.num_basis, self.num_dims)
        self.hyper = Hyperparameters(self.kernel, self.separable, torch.full((3,), 0.5, dtype=torch.float64))
        self.x = torch.rand(self.num_rows, self.num_dims, dtype=torch.float64)
        noise = NoiseModel(True, 1e-6, math.inf, lambda value: float(NOISE.logpdf(value)))
        self.augmentation = GaussianAugmentation(noise, 1.0, 1.0)
        self.grids = [torch.linspace(0, 1, 9, dtype=torch.float64)] * self.num_dims
        self.bases = [mode.basis for mode in self.separable.modes]

    def sampler(self, y, rng):
        design = Design(TrainingData(TensorSource(self.x, y)), self.bases, weights=self.form)
        options = (self.separable, self.hyper, 1.0, self.augmentation, self.grids, rng)
        return GibbsSampler(design, *options, rank=2, weights=self.form)

    def draw_prior(self, rng):
        index = list(range(len(self.hyper.slots)))
        sampler = self.sampler(torch.zeros(self.num_rows, dtype=torch.float64), rng)
        while True:
            self.hyper.set(index, self.hyper.prior_draw(rng))
            sampler.refresh()
            if sampler.is_represented(index):
                break
        state = draw_cores(sampler.prior, [mode.num_functions for mode in self.separable.modes], rng)
        roots = [(covariance.variances * sampler.prior_factor).sqrt() for covariance in sampler.covariances]
        state.factors = [factor * root for factor, root in zip(state.factors, roots, strict=True)]
        state.parameters = {"noise": torch.tensor(float(NOISE.rvs(random_state=rng)), dtype=torch.float64)}
        state.steps = torch.full((len(index),), -0.7, dtype=torch.float64)
        return state

    def values(self, state):
        factors = [factor.unsqueeze(0) for factor in state.scaled_factors()]
        return self.form.functions(self.bases, factors, self.x)[0]

    def statistics(self, state):
        f, tau = self.values(state), state.precisions[1:]
        sizes = [factor.norm().log() for factor in state.scaled_factors()]
        hyper = self.hyper.get(range(len(self.hyper.slots))).tolist()
        others = [state.parameters["noise"].log(), tau[:2].log().sum(), tau[2:].log().sum(), f[0], f.abs().log().mean()]
        return [*hyper, *map(float, (*others, *sizes))]


@torch.no_grad()
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_the_sampler_leaves_the_joint_distribution_invariant(order):
    """Parameters from the prior, data from the model, then sweeps: still the prior's distribution (Geweke 2004)."""
    with torch.enable_grad():
        problem = _Problem(order)
    rng, before, after = np.random.default_rng(1), [], []
    for _ in range(120):
        before.append(problem.statistics(problem.draw_prior(rng)))
        state = problem.draw_prior(rng)
        noise = torch.from_numpy(rng.standard_normal(problem.num_rows)) * state.parameters["noise"].sqrt()
        sampler = problem.sampler(problem.values(state) + noise, rng)
        for sweep in range(3):
            sampler.sweep(state, order if sweep % 2 == 0 else order[::-1])
        after.append(problem.statistics(state))
    for a, b in zip(np.transpose(before), np.transpose(after), strict=True):
        assert scipy.stats.ks_2samp(a, b).pvalue > 1e-3


def _check_calibration(num_fits, num_warmup, num_draws, thin):
    """Ranks of function values and noise among their draws (Talts et al. 2018), with a kernel that is known."""
    rng = np.random.default_rng(3)
    x = torch.from_numpy(rng.random((20, 3)))
    kernel = rbf(0.5, 4.0, ard=3)
    for parameter in kernel.parameters():
        parameter.requires_grad_(False)
    ranks = []
    for seed in range(num_fits):
        likelihood = gaussian(0.3)
        likelihood.noise_covar.register_prior("noise_prior", gpytorch.priors.LogNormalPrior(-1.2, 0.5), "noise")
        options = {"domain": tkrr.Domain(torch.full((3,), 0.5), 1.1), "mean_module": gpytorch.means.ZeroMean()}
        model = tkrr.TKRR(None, None, likelihood, kernel=kernel, weights=tkrr.TensorTrain(2), num_basis=4, **options)
        modes = model.separate().modes
        state = draw_cores(SoftBondPrior([2, 2]), [4, 4, 4], rng)
        factors = [
            (factor * (mode.covariance().variances.detach() * 4.0 ** (1 / 3)).sqrt()).unsqueeze(0)
            for factor, mode in zip(state.factors, modes, strict=True)
        ]
        f = model.weights.functions([mode.basis for mode in modes], factors, x)[0]
        noise = rng.lognormal(-1.2, 0.5)
        y = f + math.sqrt(noise) * torch.from_numpy(rng.standard_normal(20))
        with torch.no_grad():
            tkrr.fit_gibbs(model, data=(x, y), num_warmup=num_warmup, num_draws=num_draws, seed=seed)
            draws = torch.cat([model.draws(x[:2]), model.posterior.noise.unsqueeze(-1)], dim=-1)[thin - 1 :: thin]
        below = (draws < torch.tensor([*f[:2].tolist(), noise], dtype=torch.float64)).sum(0).numpy()
        ranks.append((below + rng.random(3)) / (len(draws) + 1))
    for values in np.transpose(ranks):
        assert scipy.stats.kstest(values, "uniform").pvalue > 1e-3, np.sort(values).round(2)


def test_ranks_are_uniform():
    _check_calibration(24, 30, 40, 5)


@pytest.mark.slow
def test_many_ranks_are_uniform():
    _check_calibration(120, 60, 120, 10)


def make_data(num_rows=150):
    generator = torch.Generator().manual_seed(2)
    x = torch.rand(num_rows, 3, dtype=torch.float64, generator=generator)
    y = torch.sin(6 * x[:, 0]) * (1 + x[:, 2]) + x[:, 1] ** 2
    return x, y + 0.1 * torch.randn(num_rows, dtype=torch.float64, generator=generator)


def make_model(x, y, likelihood=None, rank=3, **options):
    likelihood = gaussian(0.1) if likelihood is None else likelihood
    return tkrr.TKRR(x, y, likelihood, weights=tkrr.TensorTrain(rank), num_basis=6, **options)


def test_draws_find_the_function_and_the_noise():
    x, y = make_data(400)
    model = make_model(x, 50 + 7 * y, gaussian(1.0))
    result = tkrr.fit_gibbs(model, num_warmup=40, num_draws=60, seed=0)
    truth = 50 + 7 * (torch.sin(6 * x[:, 0]) * (1 + x[:, 2]) + x[:, 1] ** 2)
    draws = model.draws(x)
    error = draws.mean(0) - truth
    assert error.square().mean().sqrt() < 0.4 and 0.5 < (error / draws.std(0)).square().mean().sqrt() < 1.6
    assert 0.08 < model.likelihood.noise.sqrt().item() / 7 < 0.12
    assert 1 <= result.effective_rank <= 3 and model.rank == 3
    torch.testing.assert_close(tkrr.sobol_indices(model).variance.mean(), truth.var(), rtol=0.1, atol=0.0)


@pytest.mark.filterwarnings("ignore::gpytorch_tkrr.ConvergenceWarning")  # chains are short
def test_a_chain_goes_on_and_a_state_is_restored(tmp_path):
    x, y = make_data()
    options = {"num_draws": 8, "num_chains": 2, "seed": 0}
    whole = make_model(x, y)
    tkrr.fit_gibbs(whole, num_warmup=20, **options)
    path = tmp_path / "run.pt"
    with pytest.raises(KeyboardInterrupt):
        tkrr.fit_gibbs(make_model(x, y), num_warmup=20, checkpoint=_Stopping(path), **options)
    resumed = make_model(x, y)
    tkrr.fit_gibbs(resumed, num_warmup=20, checkpoint=path, **options)
    torch.testing.assert_close(resumed.draws(x), whole.draws(x), rtol=1e-10, atol=1e-10)
    loaded = tkrr.TKRR(None, None, gaussian(0.1)).double()
    loaded.load_state_dict(whole.state_dict())
    assert torch.equal(loaded.draws(x), whole.draws(x)) and loaded.weights.kind == "train"
    tkrr.fit_gibbs(whole, num_warmup=0, num_draws=8, seed=1)
    assert whole.posterior.num_draws == 32
    assert torch.equal(whole.draws(x)[:16], loaded.draws(x))


class _Stopping(tkrr.Checkpoint):
    """Ctrl-C in the second chain."""

    def __init__(self, path):
        super().__init__(path, seconds=0)
        self.left = 35

    def save(self, state, *, last=False):
        super().save(state, last=last)
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def test_streamed_rows_give_the_same_draws():
    x, y = make_data()
    whole, streamed = make_model(x, y), make_model(x, y)
    tkrr.fit_gibbs(whole, num_warmup=6, num_draws=4, seed=0)
    tkrr.fit_gibbs(streamed, data=TensorSource(x, y, batch_rows=41), num_warmup=6, num_draws=4, seed=0, memory=0)
    torch.testing.assert_close(whole.draws(x), streamed.draws(x), rtol=1e-5, atol=1e-5)


def test_dropped_indices_of_bonds_leave_the_rest_as_it_was():
    prior, rng = SoftBondPrior([3, 4]), np.random.default_rng(0)
    state = draw_cores(prior, [4, 5, 6], rng)
    state.log_scales = [torch.randn(len(factor), dtype=torch.float64) for factor in state.factors]
    full = tkrr.TensorTrain(4).shown(state.scaled_factors())
    alive = torch.tensor([False, True, False, True, False, False, False, False])  # of f, of bond 1, of bond 2
    energies = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.1, 0.2, 0.4, 0.3])
    prior.keep(state, alive, energies)  # the strongest of bond 2 is kept in any case
    kept = tkrr.TensorTrain(4).shown(state.scaled_factors())
    expected = [full[0][:, :, [0, 2]], full[1][[0, 2]][:, :, [2]], full[2][[2]]]
    for core, other in zip(kept, expected, strict=True):
        torch.testing.assert_close(core, other)
    assert len(state.precisions) == 1 + 2 + 1
    padded = tkrr.TensorTrain(4).resized(state.scaled_factors(), [3, 12, 4])
    assert [tuple(factor.shape) for factor in padded] == [(3, 4), (12, 5), (4, 6)]
    for factor, other in zip(tkrr.TensorTrain(4).resized(padded, [2, 2, 1]), state.scaled_factors(), strict=True):
        torch.testing.assert_close(factor, other)


@pytest.mark.parametrize("kind", ["probit", "student", "heteroskedastic"])
def test_other_observation_models(kind):
    x, y = make_data()
    likelihoods = {
        "probit": gpytorch.likelihoods.BernoulliLikelihood,
        "student": gpytorch.likelihoods.StudentTLikelihood,
        "heteroskedastic": tkrr.HeteroskedasticLikelihood,
    }
    targets = (y > y.median()).to(y) if kind == "probit" else y
    model = make_model(x, targets, likelihoods[kind]().double())
    tkrr.fit_gibbs(model, num_warmup=25, num_draws=10, seed=0)
    prediction = model.predict(x)
    if kind == "probit":
        assert ((prediction.mean > 0.5) == (targets > 0.5)).double().mean() > 0.9
    else:
        assert (prediction.mean - y).square().mean().sqrt() < 0.2


def test_one_input_and_a_start_from_als():
    x, y = make_data()
    one = make_model(x[:, 0], y)
    assert tkrr.fit_gibbs(one, num_warmup=5, num_draws=5, seed=0).effective_rank == 1.0
    model = make_model(x, y)
    tkrr.fit_als(model, seed=0)
    tkrr.fit_gibbs(model, num_warmup=5, num_draws=5, seed=0)
    assert (model.predict(x).mean - y).square().mean().sqrt() < 0.15


def test_several_classes():
    x, y = make_data()
    labels = (y > y.quantile(0.3)).long() + (y > y.quantile(0.7)).long()
    model = tkrr.OneVsRest(x, labels, weights=tkrr.TensorTrain(2), num_basis=5)
    model.fit(num_draws=8, num_warmup=12, seed=0)
    assert all(each.weights.kind == "train" for each in model.models)
    assert (model.class_probabilities(x).argmax(-1) == labels).double().mean() > 0.8
