# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # From an ExactGP to T-KRR
#
# After this tutorial you can fit a function of many inputs with `TKRR`, by one solution or by draws.
#
# The first tutorial wrapped a kernel and stayed with `ExactGP`. That works for one to three inputs, because the full
# product basis has $M^D$ functions. With five inputs and ten sines each these are a hundred thousand; with eight inputs
# a hundred million.
#
# T-KRR keeps the product basis and gives up something else. The weights on it form a tensor with $D$ axes, and this
# tensor is restricted to low rank:
#
# $$f(x) = m(x) + \sum_{r=1}^R \prod_{d=1}^D z_d(x_d)^\top w_{dr}, \qquad z_d = \sqrt{v_d(\theta)}\, \phi_d .$$
#
# Only $D \cdot M \cdot R$ numbers are left to learn. If all factors but one are fixed, the model is linear, so training
# is a series of small least-squares problems ("alternating least squares"), without step sizes or batches to tune.
#
# This tutorial takes a working `ExactGP` and puts T-KRR beside it on the same data.

# %%
import copy
import math
import os
import textwrap
import time
import warnings

import gpytorch
import matplotlib.pyplot as plt
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood

import gpytorch_tkrr as tkrr

FAST = bool(os.environ.get("TKRR_TUTORIAL_FAST"))  # small settings, for tests
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
plt.rcParams.update({"figure.dpi": 110, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})
EXACT, TKRR, DATA = "tab:blue", "tab:orange", "0.35"


# %% [markdown]
# The data follow a classic of Friedman's: five inputs, the first two interact, the third is wavy, the last two are
# linear. The noise has variance one.


# %%
def truth(x):
    pair = 10 * torch.sin(math.pi * x[..., 0] * x[..., 1])
    return pair + 4 * torch.sin(10 * x[..., 2]) + 10 * x[..., 3] + 5 * x[..., 4]


def draw(num_rows):
    x = torch.rand(num_rows, 5)
    return x, truth(x) + torch.randn(num_rows)


train_x, train_y = draw(100 if FAST else 400)
test_x, test_y = draw(1000)


# %% [markdown]
# ## Side by side
#
# First the exact GP, as in GPyTorch's own tutorials.


# %%
class ExactModel(gpytorch.models.ExactGP):
    def __init__(self, train_x, train_y, likelihood, kernel):
        super().__init__(train_x, train_y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = kernel

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def train(model, num_steps):
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = -objective(model(*model.train_inputs), model.train_targets)
        loss.backward()
        optimizer.step()


likelihood = GaussianLikelihood()
kernel = ScaleKernel(RBFKernel(ard_num_dims=5))
kernel.outputscale = train_y.var()
exact = ExactModel(train_x, train_y, likelihood, kernel)
exact.mean_module.constant = train_y.mean()
train(exact, 10 if FAST else 80)
exact_prediction = likelihood.eval()(exact.eval()(test_x))

# %% [markdown]
# Now T-KRR. The constructor is that of an `ExactGP` with two more numbers, `rank` and `num_basis`. The training loop is
# one call. The last line is the same.
#
# The kernel and the likelihood carry the hyperparameters. Here they are those that the exact GP has just found. They
# might as well be set by hand, or loaded from a checkpoint.

# %%
tkrr_likelihood = copy.deepcopy(likelihood)
model = tkrr.TKRR(train_x, train_y, tkrr_likelihood, kernel=copy.deepcopy(kernel), rank=8, num_basis=12)
result = tkrr.fit_als(model, max_sweeps=20, seed=0)
tkrr_prediction = tkrr_likelihood.eval()(model.eval()(test_x))

print(result.message)
print(f"{sum(factor.numel() for factor in model.factors)} weights instead of {12**5}")

# %% [markdown]
# Inputs and targets were given in their own units: the box around the data, the mean and the scale of the targets are
# taken care of. `print(model.domain)` shows the box; pass your own `domain=` if you will predict beyond the range of
# the training data.
#
# How do the two compare?


# %%
def scores(prediction):
    with torch.no_grad():
        mean, sd = prediction.mean, prediction.stddev
        rmse = (mean - test_y).square().mean().sqrt()
        nlpd = -torch.distributions.Normal(mean, sd).log_prob(test_y).mean()
        coverage = ((mean - test_y).abs() < 1.96 * sd).double().mean()
    return float(rmse), float(nlpd), float(coverage)


def show(name, prediction):
    rmse, nlpd, coverage = scores(prediction)
    print(f"{name:<34} RMSE {rmse:.3f}   NLPD {nlpd:.3f}   within 95 % interval {coverage:.1%}")


show("exact GP", exact_prediction)
show("T-KRR, rank 8", tkrr_prediction)

# %%
line = torch.full((200, 5), 0.5)
line[:, 2] = torch.linspace(0, 1, 200)
with torch.no_grad():
    along = {"exact GP": (EXACT, exact(line)), "T-KRR": (TKRR, model(line))}

    figure, axes = plt.subplots(1, 3, figsize=(12, 3.7), width_ratios=[1, 1, 1.3], layout="constrained")
    pairs = [
        (axes[0], "predictive mean", exact_prediction.mean, tkrr_prediction.mean),
        (axes[1], "predictive sd", exact_prediction.stddev, tkrr_prediction.stddev),
    ]
    for axis, title, ours, theirs in pairs:
        ends = [min(ours.min(), theirs.min()), max(ours.max(), theirs.max())]
        axis.plot(ends, ends, color="k", lw=0.8)
        axis.plot(ours, theirs, ".", ms=3, alpha=0.5, color=DATA)
        axis.set(title=title, xlabel="exact GP", ylabel="T-KRR", aspect="equal")
    for name, (color, prediction) in along.items():
        lower, upper = prediction.confidence_region()
        axes[2].fill_between(line[:, 2], lower, upper, color=color, alpha=0.25, lw=0)
        axes[2].plot(line[:, 2], prediction.mean, color=color, lw=2, label=name)
    axes[2].plot(line[:, 2], truth(line), "k--", lw=1, label="truth")
    axes[2].set(title="along the third input, mean ± 2 sd of f", xlabel="third input (others 0.5)", ylabel="f")
    axes[2].legend()
    plt.show()

# %% [markdown]
# The means agree up to a fraction of the noise. The standard deviations of an observation agree where there are data
# nearby; in the corners, where the exact GP is least sure, T-KRR is surer. More on that below.
#
# ## What rank and num_basis do
#
# - `num_basis` is the number of sines per input. It limits the *detail* that the model can see in each input, and the
#   shortest lengthscale. Beyond what the kernel's lengthscales call for, more sines change nothing: the kernel gives
#   them no variance.
# - `rank` is the number of product terms. It limits how *rich the interplay* of the inputs can be.
#
# Both cost time: an update solves a system of size $M R$. If the basis is too small, a warning names the input. If the
# rank is too small, there is no warning: try a larger one.

# %%
ranks = [1, 2, 8] if FAST else [1, 2, 3, 4, 6, 8, 12]
counts = [4, 12] if FAST else [4, 5, 6, 12]
errors = {}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for num_basis in counts:
        for rank in ranks:
            trial = tkrr.TKRR(
                train_x, train_y, likelihood, kernel=copy.deepcopy(kernel), rank=rank, num_basis=num_basis
            )
            tkrr.fit_als(trial, seed=0)
            errors[num_basis, rank] = scores(likelihood(trial.eval()(test_x)))[0]
for warning in caught[:1]:  # each model has its own warning; the first is enough
    print(textwrap.fill(f"{warning.category.__name__}: {warning.message}", 110))

# %%
figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
for num_basis, shade in zip(counts, plt.cm.viridis(torch.linspace(0, 0.85, len(counts)).tolist()), strict=True):
    values = [errors[num_basis, rank] for rank in ranks]
    axis.plot(ranks, values, "o-", ms=4, color=shade, label=f"num_basis = {num_basis}")
axis.axhline(scores(exact_prediction)[0], color=EXACT, ls="--", label="exact GP")
axis.axhline(float((test_y - truth(test_x)).square().mean().sqrt()), color="k", ls=":", label="noise")
axis.set(xlabel="rank R", ylabel="test RMSE", yscale="log", ylim=(0.9, 7))
axis.set_xticks(ranks)
axis.set_yticks([1, 1.5, 2, 3, 4], labels=["1", "1.5", "2", "3", "4"])
axis.minorticks_off()
axis.legend(ncols=2)
plt.show()

# %% [markdown]
# Four sines do not resolve the waves of the third input, whatever the rank is; six nearly do. The function is a sum of
# few products, and rank 6 is enough for it. (At rank 4 some fits end in a local optimum, hence the bump.) A *low* rank
# is prior knowledge, too: here it predicts a little better than the exact GP, whose kernel expects interactions of all
# five inputs. With growing rank T-KRR tends to the exact GP.
#
# ## Learn the hyperparameters along the way
#
# Above, an exact GP had been trained first. With many data you would train it on a subset. Or let the fit do it:
# `learn_hyperparameters=True` moves lengthscales, outputscale and noise, by the evidence of one factor at a time. These
# moves do not touch the data, so they cost the same for a hundred rows and for a million. Priors and constraints on
# your kernel are respected.
#
# Without a kernel, `TKRR` uses `anova_kernel`: per input a constant, a linear and a smooth part. A term can then
# leave an input alone, or be linear in it, at no cost. This is the recommended kernel.

# %%
sweeps = 3 if FAST else 10
start = ScaleKernel(RBFKernel(ard_num_dims=5))
start.outputscale = train_y.var()
learned = tkrr.TKRR(train_x, train_y, GaussianLikelihood(), kernel=start, rank=8, num_basis=12)
tkrr.fit_als(learned, max_sweeps=sweeps, learn_hyperparameters=True, seed=0)

anova = tkrr.TKRR(train_x, train_y, GaussianLikelihood(), rank=8, num_basis=12)
tkrr.fit_als(anova, max_sweeps=sweeps, learn_hyperparameters=True, seed=0)

show("exact GP", exact_prediction)
show("T-KRR, its hyperparameters", tkrr_prediction)
show("T-KRR, learned", learned.likelihood.eval()(learned.eval()(test_x)))
show("T-KRR, ANOVA kernel, learned", anova.likelihood.eval()(anova.eval()(test_x)))

# %%
figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), width_ratios=[2, 1], layout="constrained")
bars = [(exact, "exact GP", EXACT, -0.2), (learned, "T-KRR", TKRR, 0.2)]
for each, name, color, shift in bars:
    lengthscale = each.covar_module.base_kernel.lengthscale.detach().flatten()
    axes[0].bar([d + shift for d in range(1, 6)], lengthscale.tolist(), width=0.38, color=color, label=name)
    axes[1].bar(name, each.likelihood.noise.item(), width=0.6, color=color)
axes[0].set(xlabel="input", ylabel="lengthscale", title="learned lengthscales")
axes[0].legend()
axes[1].axhline(1.0, color="k", ls="--", lw=1)
axes[1].set(title="learned noise (truth: 1)", ylabel="variance")
plt.show()

# %% [markdown]
# Both find that the third input needs the shortest lengthscale. The last two inputs are linear, so their best
# lengthscales are very long; a box of fixed width cannot represent lengthscales much longer than itself, and the fit
# stops there. A constant and a linear function are better for such inputs. The ANOVA kernel has them, and wins here.
#
# ## The uncertainty, and what it is not
#
# After the last update one more pass over the data collects, for each factor, the curvature of the objective with the
# other factors fixed. The variance of $f(x)$ is the sum over factors,
#
# $$\operatorname{var} f(x) = \sum_d g_d(x)^\top P_d^{-1} g_d(x),$$
#
# a block-wise Laplace approximation. It is the uncertainty *of the weights, given that the model is right*, around the
# one solution that was found. So it does not know
#
# - the error of a rank that is too small: there are fewer weights, and they are *better* determined;
# - correlations between the factors: with many terms that can stand in for each other it is too wide;
# - other solutions that fit as well.
#
# The next plot shows the first two, on test inputs. On the right, how often the interval mean ± 1.96 sd contains the
# true function value.

# %%
ranks = [2, 8] if FAST else [2, 3, 4, 6, 8, 12, 16]


def width_and_coverage(prediction):
    with torch.no_grad():
        inside = (prediction.mean - truth(test_x)).abs() < 1.96 * prediction.stddev
        return float(prediction.stddev.mean()), float(inside.double().mean())


by_rank = []
for rank in ranks:
    fit = tkrr.TKRR(train_x, train_y, likelihood, kernel=copy.deepcopy(kernel), rank=rank, num_basis=12)
    tkrr.fit_als(fit, seed=0)
    by_rank.append(width_and_coverage(fit.eval()(test_x)))

# %%
figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
titles = ["mean sd of f", "95 % intervals that contain f"]
for axis, title, values, reference in zip(
    axes, titles, zip(*by_rank, strict=True), width_and_coverage(exact(test_x)), strict=True
):
    axis.plot(ranks, values, "o-", color=TKRR, label="T-KRR")
    axis.axhline(reference, color=EXACT, ls="--", label="exact GP")
    axis.set(title=title, xlabel="rank R", ylim=(0, None))
axes[1].axhline(0.95, color="k", lw=0.8, ls=":", label="95 %")
axes[1].set_ylim(0, 1.02)
axes[1].legend(loc="lower right")
plt.show()

# %% [markdown]
# At rank 2 the model is wrong and sure of itself, and at rank 4 the intervals are still much too short. From rank 6 on,
# where the test error no longer falls, they are about right; at high rank they are a little too wide. So choose the
# rank by the test error, and take the next larger one if you need the intervals.
#
# ## Time against N
#
# Exact GP: one training step (a Cholesky factorisation and its gradient); training takes 50 to 100 of them. T-KRR: the
# *whole* fit, five sweeps and the covariance.

# %%
sizes = {"exact GP, one step": [250, 500, 1000, 2000], "T-KRR, whole fit": [250, 1000, 4000, 16_000, 64_000]}
if FAST:
    sizes = {name: rows[:2] for name, rows in sizes.items()}
seconds = {}
for name, rows in sizes.items():
    for num_rows in rows:
        x, y = draw(num_rows)
        if name.startswith("exact"):
            timed = ExactModel(x, y, GaussianLikelihood(), copy.deepcopy(kernel))
            with gpytorch.settings.max_cholesky_size(2000):
                train(timed, 1)  # warm up
                begin = time.perf_counter()
                train(timed, 1)
        else:
            begin = time.perf_counter()
            timed = tkrr.TKRR(x, y, copy.deepcopy(likelihood), kernel=copy.deepcopy(kernel), rank=8, num_basis=12)
            tkrr.fit_als(timed, max_sweeps=5, rel_tol=0.0, seed=0)
        seconds[name, num_rows] = time.perf_counter() - begin

figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
for (name, rows), color in zip(sizes.items(), [EXACT, TKRR], strict=True):
    axis.loglog(rows, [seconds[name, n] for n in rows], "o-", color=color, label=name)
axis.set(xlabel="number of data N", ylabel="seconds")
axis.legend()
axis.grid(alpha=0.3)
plt.show()

# %% [markdown]
# The exact GP grows like $N^3$. T-KRR grows like $N$, and at first not even that: small systems dominate. The times are
# those of the machine that built this page; `python -m benchmarks als_scaling` measures yours.
#
# **What to remember**
#
# - `TKRR(x, y, likelihood, rank=..., num_basis=...)`, then `fit_als(model)`; predict as with any GPyTorch model.
# - Start without a kernel (ANOVA) and with `learn_hyperparameters=True`, or bring hyperparameters from an exact GP on a
#   subset.
# - Raise `rank` until the test error stands still; raise `num_basis` when a warning asks for it.
# - The intervals know the weights' uncertainty, not that of the rank.
