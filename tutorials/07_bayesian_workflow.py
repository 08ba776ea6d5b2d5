# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Checking and comparing models with ArviZ and Pyro
#
# After this tutorial you can check chains and compare models with ArviZ, and put a Hilbert GP into a Pyro model.
#
# A posterior is where the work of a Bayesian begins: have the chains converged, does the model produce data that look
# like ours, which of two models predicts better? ArviZ answers these questions for any sampler. `fit_gibbs`, and NUTS
# over the hyperparameters of a Gaussian process with `HilbertKernel`, hand their draws to it with the same groups, so
# that a T-KRR model and a Hilbert GP can be compared like any two models.
#
# This tutorial needs the extras `arviz` and `pyro`.

# %%
import os
import warnings

import arviz as az
import gpytorch
import matplotlib.pyplot as plt
import numpy as np
import pyro
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.priors import GammaPrior, LogNormalPrior
from pyro.infer import MCMC, NUTS, Predictive

import gpytorch_tkrr as tkrr

FAST = bool(os.environ.get("TKRR_TUTORIAL_FAST"))  # small settings, for tests
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
pyro.set_rng_seed(0)
plt.rcParams.update({"figure.dpi": 110, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})
# ArviZ 0.23 uses what newer versions of Matplotlib and pandas deprecate.
warnings.filterwarnings("ignore", "Passing a dict or None as alias_mapping|The inplace keyword")
warnings.filterwarnings("ignore", "Estimated shape parameter of Pareto distribution")  # the table of az.loo counts them
if FAST:
    warnings.simplefilter("ignore", tkrr.TKRRWarning)  # a few steps do not converge

# %% [markdown]
# ## The data
#
# Two inputs that interact, and noise whose size we pretend not to know.

# %%
num_rows = 60 if FAST else 250
train_x = torch.rand(num_rows, 2)
train_y = torch.sin(6 * train_x[:, 0] * train_x[:, 1]) + train_x[:, 0] + 0.2 * torch.randn(num_rows)

# %% [markdown]
# ## T-KRR, drawn by Gibbs sampling
#
# Two chains; the priors are the documented defaults.

# %%
model = tkrr.TKRR(train_x, train_y, GaussianLikelihood(), rank=3 if FAST else 8, num_basis=8 if FAST else 16)
settings = {"num_draws": 15, "num_warmup": 10} if FAST else {"num_draws": 200, "num_warmup": 150}
result = tkrr.fit_gibbs(model, num_chains=2, seed=0, **settings)
tkrr_draws = result.to_arviz(seed=0)
print(tkrr_draws)

# %% [markdown]
# `posterior` holds the noise, every hyperparameter by its name in the kernel, and the values of $f$ at fifty rows: the
# factors themselves are not identified, the function is. First the usual look at the chains.

# %%
az.plot_trace(tkrr_draws, var_names=["noise", "f"], coords={"watched_row": tkrr_draws.posterior["watched_row"][:5]})
plt.tight_layout()
plt.show()

# %% [markdown]
# ## A Hilbert GP, drawn by NUTS
#
# The same kernel family as an `ExactGP`. The weights are integrated out, so that NUTS sees four hyperparameters only.
# `sample_priors` draws whatever has a prior, and the likelihood is exact: features and Gram matrix are computed at the
# first step and never again. A step at which a factorisation fails is rejected.


# %%
class HilbertProcess(gpytorch.models.ExactGP):
    def __init__(self, x, y):
        super().__init__(x, y, GaussianLikelihood(noise_prior=LogNormalPrior(-3.0, 1.0)))
        self.mean_module = gpytorch.means.ConstantMean()
        base = ScaleKernel(
            RBFKernel(ard_num_dims=2, lengthscale_prior=LogNormalPrior(-0.7, 0.5)),
            outputscale_prior=GammaPrior(2.0, 1.0),
        )
        self.covar_module = tkrr.HilbertKernel(base, tkrr.Domain.from_data(x, boundary_factor=4.0), 8 if FAST else 18)

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


gp = HilbertProcess(train_x, train_y)


def hyperparameters(x, y):
    sampled = tkrr.pyro.sample_priors(gp)
    pyro.sample("y", sampled.likelihood(sampled(x)), obs=y)


nuts = NUTS(hyperparameters, max_tree_depth=2 if FAST else 10)
mcmc = MCMC(nuts, num_samples=10 if FAST else 200, warmup_steps=5 if FAST else 100, disable_progbar=True)
mcmc.run(train_x, train_y)
gp_draws = tkrr.pyro.to_arviz(mcmc, gp)
print(az.summary(gp_draws, var_names=["~f"], kind="stats"))

# %% [markdown]
# Given the process, the export draws one function from its posterior for every draw of the hyperparameters, and the
# log likelihood is that of each row given the function: the same quantity as for T-KRR.
#
# ## Posterior predictive checks
#
# Targets replicated by each model beside the observed ones. A model that misses a feature of the data shows here.

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), sharex=True)
for ax, (name, draws) in zip(axes, {"T-KRR": tkrr_draws, "Hilbert GP": gp_draws}.items(), strict=True):
    az.plot_ppc(draws, num_pp_samples=10 if FAST else 60, ax=ax, random_seed=0, textsize=9)
    ax.set(title=name, ylim=(None, 1.4 * ax.get_ylim()[1]))
    ax.legend(loc="upper left", fontsize=7)
plt.tight_layout()
plt.show()

# %% [markdown]
# ## Leave-one-out
#
# `az.loo` estimates how well each row would be predicted had it been left out, from the draws alone. The Pareto
# diagnostics count the rows for which the estimate cannot be trusted ("bad"): a few per cent of them do little harm.

# %%
print(az.loo(tkrr_draws))

# %% [markdown]
# `az.compare` ranks models by it. A third model that sees the first input only stands in for a wrong one.

# %%
first_only = ScaleKernel(RBFKernel(active_dims=(0,)))
narrow = tkrr.TKRR(train_x, train_y, GaussianLikelihood(), kernel=first_only, rank=2, num_basis=8 if FAST else 16)
narrow_draws = tkrr.fit_gibbs(narrow, num_chains=2, seed=0, **settings).to_arviz(seed=0)
table = az.compare({"T-KRR": tkrr_draws, "Hilbert GP": gp_draws, "first input only": narrow_draws})
print(table[["rank", "elpd_loo", "p_loo", "elpd_diff", "dse"]].round(1).to_string())

# %% [markdown]
# The two models that see both inputs agree within the standard error of their difference; the third is far behind.
#
# ## Predictions that average over hyperparameters
#
# `pyro_load_from_samples` turns the process into a batch with one member per draw. All members share the features.

# %%
gp.pyro_load_from_samples(mcmc.get_samples())
gp.eval()
test_x = torch.rand(5, 2)
with torch.no_grad():
    prediction = gp.likelihood(gp(test_x))
    print("one row per draw:", tuple(prediction.mean.shape))
    print("Hilbert GP", prediction.mean.mean(0).numpy().round(2))
    print("T-KRR     ", model.eval()(test_x).mean.numpy().round(2))

# %% [markdown]
# ## Any likelihood: the function as a site of a Pyro model
#
# Where the likelihood is not Gaussian the weights cannot be integrated out. `hilbert_gp` puts them into the Pyro model
# as standard normal variables, which NUTS likes. Here counts over a day, with a rate that is never negative.

# %%
hour = torch.linspace(0, 24, 24 if FAST else 96)
counts = torch.poisson(torch.exp(1.2 + torch.sin(2 * torch.pi * (hour - 8) / 24)))
base = ScaleKernel(RBFKernel(lengthscale_prior=LogNormalPrior(1.6, 0.3)), outputscale_prior=GammaPrior(2.0, 2.0))
kernel = tkrr.HilbertKernel(base, tkrr.Domain.from_data(hour, boundary_factor=2.5), num_basis=12 if FAST else 20)


def arrivals(hour, counts=None):
    level = pyro.sample("level", pyro.distributions.Normal(0.0, 2.0))
    f = tkrr.pyro.hilbert_gp("f", kernel, hour)
    with pyro.plate("rows", len(hour)):
        return pyro.sample("counts", pyro.distributions.Poisson((level + f).exp()), obs=counts)


nuts = NUTS(arrivals, max_tree_depth=3 if FAST else 8)
mcmc = MCMC(nuts, num_samples=10 if FAST else 200, warmup_steps=10 if FAST else 200, disable_progbar=True)
mcmc.run(hour, counts)
draws = tkrr.pyro.to_arviz(mcmc)
rate = (draws.posterior["level"] + draws.posterior["f"]).values.reshape(-1, len(hour))
new_counts = Predictive(arrivals, mcmc.get_samples())(torch.tensor([3.0, 12.0, 20.0]))["counts"]
print("mean counts at 3, 12 and 20 o'clock:", new_counts.double().mean(0).numpy().round(1))

fig, ax = plt.subplots(figsize=(6, 3), layout="constrained")
low, middle, high = np.quantile(np.exp(rate), [0.05, 0.5, 0.95], axis=0)
hours = hour.numpy()
ax.bar(hours, counts.numpy(), width=0.8 * (hours[1] - hours[0]), color="0.85", label="counts")
ax.fill_between(hours, low, high, alpha=0.3, color="tab:orange", lw=0)
ax.plot(hours, middle, color="tab:orange", label="rate, median and 90 %")
ax.set(xlabel="hour", ylabel="arrivals")
ax.legend()
plt.show()

# %% [markdown]
# Without Pyro, a regression of counts is one line. The dispersion of the negative binomial distribution is drawn, too;
# where it is much larger than the counts, these are nearly Poisson.

# %%
arrivals_model = tkrr.TKRR(hour.unsqueeze(-1), counts, tkrr.NegativeBinomialLikelihood())  # the line
tkrr.fit_gibbs(arrivals_model, seed=0, **settings)
with torch.no_grad():
    mean = arrivals_model.predict(torch.tensor([[3.0], [12.0], [20.0]])).mean
dispersion = float(arrivals_model.posterior.parameters["dispersion"].mean())
print("mean counts at 3, 12 and 20 o'clock:", mean.numpy().round(1), f"dispersion {dispersion:.0f}")

# %% [markdown]
# With more inputs than three, `tkrr.pyro.cp_function(name, kernel, x, domain=..., rank=...)` is the low-rank function
# in the same place. Inside a plate both give one function for each of its entries: that is a hierarchical model. The
# page "In your workflow" has short examples of each.
