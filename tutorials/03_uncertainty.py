# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Uncertainty: what the draws say
#
# After this tutorial you can tell whether the intervals of a fitted `TKRR` can be trusted, and use its draws for
# decisions.
#
# The second tutorial fitted T-KRR by alternating least squares: one set of weights, hyperparameters set by hand or
# learned as points. `fit_gibbs` gives the posterior instead. It draws the weights, the noise and all hyperparameters
# of the kernel, and every draw is a *whole function*
#
# $$f_s(x) = m + \sum_{r=1}^R \prod_{d=1}^D \phi_d(x_d)^\top a_{sdr}, \qquad s = 1 \ldots S .$$
#
# There is nothing to tune. This tutorial puts the result beside an exact GP where that can run, in one and two
# dimensions, looks at what each input does, and shows four things that draws are good for.

# %%
import math
import os
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
EXACT, BAYES, DRAWS, DATA = "tab:blue", "tab:orange", "saddlebrown", "0.35"
NUM = {"num_draws": 10, "num_warmup": 10} if FAST else {"num_draws": 200, "num_warmup": 100}


# %% [markdown]
# ## One input
#
# Noisy values of a function, with a gap in which nothing is known. First the exact GP, trained by its marginal
# likelihood.


# %%
class ExactModel(gpytorch.models.ExactGP):
    def __init__(self, train_x, train_y):
        super().__init__(train_x, train_y, GaussianLikelihood())
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = ScaleKernel(RBFKernel(ard_num_dims=train_x.shape[-1]))
        self.mean_module.constant = train_y.mean()
        self.covar_module.outputscale = train_y.var()
        self.covar_module.base_kernel.lengthscale = 0.3

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def train_exact(x, y, num_steps=100):
    model = ExactModel(x, y)
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(3 if FAST else num_steps):
        optimizer.zero_grad()
        loss = -objective(model(x), y)
        loss.backward()
        optimizer.step()
    return model.eval()


x = torch.rand(60, 1)
x = torch.where((x > 0.5) & (x < 0.75), x - 0.5, x)
y = torch.sin(12 * x[:, 0]) + 0.7 * torch.cos(23 * x[:, 0]) + 0.2 * torch.randn(60)
exact = train_exact(x, y)

# %% [markdown]
# Then Bayesian T-KRR. Two lines, no hyperparameters. `model(x)` in eval mode is a `MultivariateNormal` with mean and
# covariance of the draws, so it goes wherever the exact GP's prediction goes; `model.draws(x)` has the functions
# themselves.

# %%
model = tkrr.TKRR(x, y, GaussianLikelihood(), rank=4)
result = tkrr.fit_gibbs(model, **NUM, seed=0)
print(result.summary())

# %% tags=["hide-input"]
grid = torch.linspace(0, 1, 400).unsqueeze(-1)
with torch.no_grad():
    predictions = {"exact GP": exact(grid), "Bayesian T-KRR": model.eval()(grid)}
    draws = model.draws(grid)  # (S, 400)
figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True, layout="constrained")
for axis, color, (title, prediction) in zip(axes, (EXACT, BAYES), predictions.items(), strict=True):
    lower, upper = prediction.confidence_region()
    axis.fill_between(grid[:, 0], lower, upper, color=color, alpha=0.2, lw=0, label="mean ± 2 sd of f")
    axis.plot(grid, prediction.mean, color=color, lw=2)
    axis.plot(x, y, ".", color=DATA, ms=4, label="data")
    axis.set(title=title, xlabel="x")
axes[1].plot(grid, draws[:: len(draws) // 5].T, color=DRAWS, lw=0.7)
axes[0].legend(loc="lower left")
axes[0].set_ylabel("y")
plt.show()

# %% [markdown]
# Both open up in the gap. They are not the same model: the exact GP has one kernel at one set of hyperparameters, the
# best one; T-KRR averages over lengthscales, amplitudes and the noise, and its default kernel adds a constant and a
# straight line to the smooth part. The thin lines are five of the draws.
#
# ## Two inputs
#
# The same in the plane, with a disk in which there are no data. The standard deviation must rise there and towards the
# edges.


# %%
def surface(x):
    return torch.sin(5 * x[..., 0]) * torch.cos(4 * x[..., 1]) + 0.1 * x[..., 0]


x = torch.rand(80 if FAST else 200, 2)
x = x[(x - torch.tensor([0.3, 0.15])).norm(dim=-1) > 0.22]
y = surface(x) + 0.2 * torch.randn(len(x))
exact = train_exact(x, y)
flat = tkrr.TKRR(x, y, GaussianLikelihood(), rank=8)
tkrr.fit_gibbs(flat, **NUM, seed=0)

# %% tags=["hide-input"]
side = torch.linspace(0, 1, 20 if FAST else 80)
plane = torch.cartesian_prod(side, side)  # the first input changes slowly
with torch.no_grad():
    outputs = {"exact GP": exact(plane), "Bayesian T-KRR": flat.eval()(plane)}
    pictures = {name: (output.mean, output.stddev) for name, output in outputs.items()}
UNIT_SQUARE = {"origin": "lower", "extent": (0, 1, 0, 1)}
top = max(float(sd.max()) for _, sd in pictures.values())
figure, axes = plt.subplots(2, 2, figsize=(7.6, 6.6), sharex=True, sharey=True, layout="constrained")
for row, (name, (mean, sd)) in zip(axes, pictures.items(), strict=True):
    for axis, values, limits, colors in zip(row, (mean, sd), ((-1.2, 1.2), (0, top)), ("RdBu_r", "magma"), strict=True):
        image = values.reshape(len(side), -1).T.numpy()
        picture = axis.imshow(image, **UNIT_SQUARE, cmap=colors, vmin=limits[0], vmax=limits[1])
        axis.plot(*x.T, ".", color="white" if colors == "magma" else "0.3", ms=1.5)
        axis.set_title(f"{name}: {'mean' if values is mean else 'standard deviation'} of f", fontsize=9)
        figure.colorbar(picture, ax=axis, shrink=0.85)
    row[0].set_ylabel("second input")
for axis in axes[1]:
    axis.set_xlabel("first input")
plt.show()

# %% [markdown]
# ## Is it calibrated?
#
# A 95 % interval should hold 95 % of new observations, a 50 % interval half of them. Count. The data are those of the
# second tutorial, five inputs after Friedman, and now neither noise nor lengthscales are told to T-KRR.


# %%
def friedman(x):
    pair = 10 * torch.sin(math.pi * x[..., 0] * x[..., 1])
    return pair + 4 * torch.sin(10 * x[..., 2]) + 10 * x[..., 3] + 5 * x[..., 4]


train_x, test_x = torch.rand(100 if FAST else 400, 5), torch.rand(1000, 5)
train_y, test_y = (friedman(rows) + torch.randn(len(rows)) for rows in (train_x, test_x))
exact = train_exact(train_x, train_y)
model = tkrr.TKRR(train_x, train_y, GaussianLikelihood(), rank=8)
result = tkrr.fit_gibbs(model, **NUM, seed=0)
with torch.no_grad():
    observations = {
        "exact GP": exact.likelihood(exact(test_x)),
        "Bayesian T-KRR": model.likelihood(model.eval()(test_x)),
    }
    for name, observation in observations.items():
        error = (observation.mean - test_y).square().mean().sqrt()
        density = torch.distributions.Normal(observation.mean, observation.stddev).log_prob(test_y).mean()
        print(f"{name:<15} RMSE {error:.2f} (the noise alone: 1.00), mean log density {density:.2f}")
    warnings.simplefilter("ignore", tkrr.ExtrapolationWarning)  # some test rows lie just outside the training range
    print(f"log density of the mixture of all draws: {result.log_predictive_density(test_x, test_y).mean():.2f}")

# %% tags=["hide-input"]
levels = torch.linspace(0.05, 0.99, 30)
figure, axis = plt.subplots(figsize=(4.2, 4), layout="constrained")
axis.plot([0, 1], [0, 1], color="0.7", lw=0.8)
for color, (name, observation) in zip((EXACT, BAYES), observations.items(), strict=True):
    level = 2 * torch.special.ndtr((test_y - observation.mean).abs() / observation.stddev) - 1  # that just holds y
    axis.plot(levels, (level < levels.unsqueeze(-1)).double().mean(-1), ".-", color=color, label=name)
axis.set(xlabel="level of the interval", ylabel="share of test data inside", aspect="equal")
axis.legend()
plt.show()

# %% [markdown]
# ## What does each input do?
#
# A sum of products can be averaged over any of its inputs in closed form. `main_effects` gives, for each draw, what an
# input does on its own when the others are averaged over, relative to the mean of $f$. The band is the spread of the
# draws, the dashed line is the truth.

# %%
names = ["x1", "x2", "x3", "x4", "x5"]
unit_cube = tkrr.UniformMeasure(torch.zeros(5), torch.ones(5))
effects = tkrr.main_effects(model, measure=unit_cube)
figure, axes = plt.subplots(1, 5, figsize=(12, 2.6), sharey=True, layout="constrained")
effects.plot(names, axes=axes)
with torch.no_grad():
    for d, axis in enumerate(axes):
        rows = torch.rand(2000, 1, 5).expand(-1, 100, 5).clone()
        rows[..., d] = effects.grids[d]
        truth = friedman(rows).mean(0)
        axis.plot(effects.grids[d], truth - truth.mean(), "--", color="0.4", lw=1)
plt.show()

# %% [markdown]
# Sobol indices say how much of the variance of $f$ an input explains: on its own (first order), and with all its
# interactions (total). Only `x1` and `x2` interact here, so only their total indices are clearly larger than their
# first-order indices. Each comes with its posterior interval.

# %%
print(tkrr.sobol_indices(model, measure=unit_cube).summary(names))

# %% [markdown]
# Averages need a distribution of the inputs. Here it is uniform; without `measure=` every input is distributed as its
# column of the training data.
#
# ## What draws are good for
#
# A mean and a variance answer questions about one point at a time. Whole functions answer questions about the function.
#
# ### How likely is it that a threshold is exceeded, and over how large an area?
#
# Back to the plane: the probability that $f$ exceeds 0.6 at a point is the share of draws that do. The *area* where it
# does is a property of the whole function; every draw has one.

# %%
with torch.no_grad():
    draws = flat.draws(plane)  # (S, n)
exceeds = draws > 0.6
area = exceeds.double().mean(-1)  # (S,)
low, high = area.quantile(torch.tensor([0.025, 0.975]))
true_area = (surface(plane) > 0.6).double().mean()
print(f"area above 0.6: {area.mean():.3f}, 95 % interval [{low:.3f}, {high:.3f}]; truth {true_area:.3f}")

# %% [markdown]
# ### Where is the maximum?
#
# The largest point of each draw is a draw of the location of the maximum. There are two candidates, one of them in the
# disk without data: most draws choose the one that the data show, some the other.

# %% tags=["hide-input"]
best = plane[draws.argmax(-1)]  # (S, 2)
print(f"{(best[:, 1] > 0.5).double().mean():.0%} of the draws have their maximum in the upper half")
figure, axes = plt.subplots(1, 2, figsize=(8.6, 3.8), sharey=True, layout="constrained")
picture = axes[0].imshow(exceeds.double().mean(0).reshape(len(side), -1).T.numpy(), **UNIT_SQUARE, vmin=0, vmax=1)
axes[0].contour(side, side, surface(plane).reshape(len(side), -1).T, levels=[0.6], colors="white", linestyles="--")
axes[0].set(title="probability of f > 0.6 (dashed: truth)", xlabel="x1", ylabel="x2")
figure.colorbar(picture, ax=axes[0], shrink=0.85)
axes[1].contourf(side, side, surface(plane).reshape(len(side), -1).T, levels=12, cmap="Greys", alpha=0.6)
axes[1].plot(*best.T, ".", color=DRAWS, alpha=0.4, label="maxima of the draws")
axes[1].plot(*plane[surface(plane).argmax()], "*", color="tab:red", ms=12, label="true maximum")
axes[1].set(title="where is the maximum?", xlabel="x1", aspect="equal")
axes[1].legend(loc="upper left", fontsize=8)
plt.show()

# %% [markdown]
# ### Thompson sampling
#
# To find a maximum with few evaluations, draw one function from the posterior and evaluate the truth where the *draw*
# is largest; repeat. Uncertain regions are visited because some draws are large there. One draw costs nothing extra
# once there is a posterior. These evaluations have no noise, and a model should be told what is known: a small noise,
# fixed.


# %%
def objective(x):
    return torch.sin(4 * x) + 0.3 * x


candidates = torch.linspace(0, 3, 301)
tried = torch.tensor([0.1, 1.1, 2.8])
for step in range(2 if FAST else 8):
    likelihood = GaussianLikelihood()
    likelihood.noise = 1e-3
    likelihood.raw_noise.requires_grad_(False)
    search = tkrr.TKRR(tried, objective(tried), likelihood, rank=2, domain=tkrr.Domain(1.5, 4.0), num_basis=30)
    tkrr.fit_gibbs(search, num_draws=4 if FAST else 20, num_warmup=10 if FAST else 60, seed=step)
    with torch.no_grad():
        functions = search.draws(candidates)
    tried = torch.cat([tried, candidates[functions[-1].argmax()].reshape(1)])
print("tried:", [f"{value:.2f}" for value in tried.tolist()])
print(f"best of them {objective(tried).max():.3f}, true maximum {objective(candidates).max():.3f}")

# %% tags=["hide-input"]
figure, axis = plt.subplots(figsize=(6.5, 3.4), layout="constrained")
axis.plot(candidates, functions.T, color=DRAWS, lw=0.4, alpha=0.7)
axis.plot(candidates, objective(candidates), "--", color=DATA, lw=1.2, label="truth")
axis.scatter(tried, objective(tried), c=range(len(tried)), cmap="viridis", zorder=3, label="tried, dark to bright")
axis.set(xlabel="x", ylabel="f", title="posterior draws before the last step")
axis.legend(loc="lower left", fontsize=8)
plt.show()

# %% [markdown]
# ### Any function of the function
#
# A slope, a crossing, a difference between two settings: compute it for each draw and look at the spread. Here the
# change of $f$ when `x1` goes from 0.2 to 0.8 with `x2` at 0.9, all else at 0.5. Draws are differentiable in their
# inputs, too.

# %%
settings = torch.tensor([[0.2, 0.9, 0.5, 0.5, 0.5], [0.8, 0.9, 0.5, 0.5, 0.5]])
with torch.no_grad():
    change = model.draws(settings).diff(dim=-1).squeeze(-1)  # (S,)
true_change = friedman(settings).diff().item()
print(f"change {change.mean():.2f} ± {change.std():.2f}, truth {true_change:.2f}")

# %% [markdown]
# ## Can the draws be trusted?
#
# One chain cannot tell whether it has missed something. Several chains can: where they disagree, split R-hat is well
# above one, and `fit_gibbs` warns. The effective sample size says how many independent draws the correlated ones are
# worth, for function values and hyperparameters. The factors themselves are not looked at: components may swap and
# signs may flip without any change of $f$.

# %%
with warnings.catch_warnings():
    if FAST:
        warnings.simplefilter("ignore", tkrr.ConvergenceWarning)  # ten draws do not agree on anything
    result = tkrr.fit_gibbs(model, **NUM, num_chains=2, seed=1)
print(result.message)
print(f"R-hat of function values {result.rhat['f']:.3f}, of the noise {result.rhat['noise']:.3f}")
print(f"effective sample size of function values {result.ess['f']:.0f}, of the noise {result.ess['noise']:.0f}")

# %% [markdown]
# More draws can be added to a fitted model (`num_warmup=0`), and `model.thin(num_draws)` keeps a few of them where the
# model must be small on disk.
