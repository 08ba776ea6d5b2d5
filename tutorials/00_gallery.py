# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Gallery
#
# After this page you have seen what the package does, in seven pictures with their code, and know which page to open
# next.

# %%
import gpytorch
import matplotlib.pyplot as plt
import torch
from gpytorch.kernels import MaternKernel, PeriodicKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood, GaussianLikelihood

import gpytorch_tkrr as tkrr

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
plt.rcParams.update({"figure.dpi": 110, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})

# %% [markdown]
# ## A Gaussian process on 20 000 rows
#
# `HilbertKernel` replaces the kernel of an `ExactGP`. Training takes seconds; the exact process would need a matrix of
# 20 000 x 20 000 numbers. More: [a Hilbert kernel in an ExactGP](01_hilbert_kernel).


# %%
class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y, kernel):
        super().__init__(x, y, GaussianLikelihood())
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = tkrr.HilbertKernel.from_tolerance(kernel, x, bounds=torch.tensor([[-0.5], [12.5]]))

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def train(model, num_steps=60):
    model.train()
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = -mll(model(*model.train_inputs), model.train_targets)
        loss.backward()
        optimizer.step()
    return model.eval()


x = torch.cat([torch.rand(10_000, 1) * 4, 7 + torch.rand(10_000, 1) * 5])
y = torch.sin(2 * x[:, 0]) + 0.3 * torch.cos(7 * x[:, 0]) + 0.4 * torch.randn(len(x))
model = train(Model(x, y, ScaleKernel(MaternKernel(nu=2.5))))
grid = torch.linspace(-0.5, 12.5, 400).unsqueeze(-1)
with torch.no_grad():
    f = model(grid)
    lower, upper = f.mean - 2 * f.stddev, f.mean + 2 * f.stddev
_, axis = plt.subplots(figsize=(8, 3), layout="constrained")
axis.plot(x[::40], y[::40], ".", color="0.7", markersize=3, label="every 40th row")
axis.plot(grid, f.mean, "C0", label="mean")
axis.fill_between(grid[:, 0], lower, upper, alpha=0.25, label="mean ± 2 sd of f")
axis.set(xlabel="x", ylabel="y", ylim=(-3, None))
axis.legend(loc="lower center", ncol=3)
plt.show()

# %% [markdown]
# ## Whole functions
#
# Draws from the posterior are functions that you can evaluate anywhere, for example for Thompson sampling. In the gap
# without data they differ. More: [whole functions](../swapping.md#whole-functions).

# %%
functions = tkrr.draw_posterior_functions(model, 8)
_, axis = plt.subplots(figsize=(8, 2.6), layout="constrained")
with torch.no_grad():
    axis.plot(grid, functions(grid).mT, linewidth=0.9)
axis.set(xlabel="x", ylabel="f(x)")
plt.show()

# %% [markdown]
# ## Sums of kernels
#
# Sums and products of kernels are expanded part by part. Here a smooth trend and a season, continued beyond the data
# (dotted line). The season goes on; the trend slowly returns to the mean, because that is what an RBF kernel expects.

# %%
x = torch.linspace(0, 8, 400).unsqueeze(-1)
y = 0.1 * x[:, 0] ** 2 + torch.sin(2 * torch.pi * x[:, 0]) * (1 + 0.1 * x[:, 0]) + 0.3 * torch.randn(400)
season = PeriodicKernel()
season.period_length = 1.0
trend = ScaleKernel(RBFKernel())
trend.base_kernel.lengthscale = 5.0
model = train(Model(x, y, trend + ScaleKernel(season)), 150)
grid = torch.linspace(0, 12, 500).unsqueeze(-1)
with torch.no_grad():
    prediction = model.likelihood(model(grid))
_, axis = plt.subplots(figsize=(8, 2.8), layout="constrained")
axis.plot(x, y, ".", color="0.6", markersize=3, label="data")
axis.plot(grid, prediction.mean, label="mean")
axis.fill_between(grid[:, 0], *prediction.confidence_region(), alpha=0.25, label="mean ± 2 sd of y")
axis.axvline(8, color="0.5", linestyle=":")
axis.set(xlabel="year", ylabel="y")
axis.legend(loc="upper left")
plt.show()

# %% [markdown]
# ## Many inputs
#
# `TKRR` is for functions of many inputs. Here are ten inputs, of which three matter. The picture shows the main effects
# of the first four with their uncertainty; the fourth input has none. More: [interpretation](../interpretation.md).

# %%
x = torch.rand(300, 10)
y = torch.sin(6 * x[:, 0]) + 4 * x[:, 1] * x[:, 2] + 0.5 * torch.randn(300)
model = tkrr.TKRR(x, y, GaussianLikelihood(), rank=8, num_basis=10)
tkrr.fit_gibbs(model, num_draws=60, num_warmup=60, num_chains=1, seed=0)
effects = tkrr.main_effects(model)
_, axes = plt.subplots(1, 4, figsize=(10, 2.4), sharey=True, layout="constrained")
for d, axis in enumerate(axes):
    axis.plot(effects.grids[d], effects.mean(d))
    axis.fill_between(effects.grids[d], *effects.band(d), alpha=0.25)
    axis.set(xlabel=f"input {d + 1}")
axes[0].set_ylabel("main effect")
plt.show()

# %% [markdown]
# ## Noise that is not the same everywhere
#
# `HeteroskedasticLikelihood` learns how the noise depends on the inputs. More:
# [which noise?](../uncertainty.md#which-noise)

# %%
x = torch.rand(1_000, 1)
y = torch.sin(6 * x[:, 0]) + (0.05 + 0.5 * x[:, 0] ** 2) * torch.randn(1_000)
model = tkrr.TKRR(x, y, tkrr.HeteroskedasticLikelihood(), rank=1, num_basis=12)
tkrr.fit_gibbs(model, num_draws=60, num_warmup=60, num_chains=1, seed=0)
grid = torch.linspace(0.005, 0.995, 200).unsqueeze(-1)
with torch.no_grad():
    prediction = model.predict(grid)
    mean, lower, upper = prediction.mean, prediction.quantile(0.025), prediction.quantile(0.975)
_, axis = plt.subplots(figsize=(8, 2.8), layout="constrained")
axis.plot(x, y, ".", color="0.7", markersize=3, label="data")
axis.plot(grid, mean, label="mean")
axis.fill_between(grid[:, 0], lower, upper, alpha=0.25, label="95 % interval of y")
axis.set(xlabel="x", ylabel="y")
axis.legend(loc="lower left")
plt.show()

# %% [markdown]
# ## Classes
#
# A `BernoulliLikelihood` makes `TKRR` a probit classifier; probabilities are averaged over the draws.

# %%
x = 4 * torch.rand(800, 2) - 2
radius = x.square().sum(-1).sqrt()
y = (torch.rand(800) < torch.sigmoid(6 * (1.2 - radius))).double()
model = tkrr.TKRR(x, y, BernoulliLikelihood(), rank=4, num_basis=12)
tkrr.fit_gibbs(model, num_draws=60, num_warmup=60, num_chains=1, seed=0)
side = torch.linspace(-1.97, 1.97, 60)
with torch.no_grad():
    probability = model.predict(torch.cartesian_prod(side, side)).mean.reshape(60, 60)
_, axis = plt.subplots(figsize=(4.6, 4), layout="constrained")
drawn = axis.contourf(side, side, probability.mT, levels=10, cmap="RdBu_r", vmin=-0.3, vmax=1.3)
axis.plot(*x[y == 1].mT, "^", color="k", markersize=3, label="class 1")
axis.plot(*x[y == 0].mT, "o", color="w", markersize=3, markeredgecolor="0.4", markeredgewidth=0.4, label="class 0")
axis.set(xlabel="first input", ylabel="second input", aspect="equal")
axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncol=2)
plt.colorbar(drawn, label="probability of class 1")
plt.show()

# %% [markdown]
# ## How good is the expansion?
#
# The largest error of the kernel matrix against the number of functions, for three kernels. The smoother the kernel,
# the fewer functions it needs; with 64 functions the RBF kernel is exact to rounding and leaves the picture.
# More: [choosing M, R and the box](../choosing.md).

# %%
x = torch.linspace(0, 1, 200)
kernels = {"RBF": RBFKernel(), "Matérn 5/2": MaternKernel(nu=2.5), "Matérn 3/2": MaternKernel(nu=1.5)}
counts = [8, 16, 32, 64, 128]
_, axis = plt.subplots(figsize=(6, 3), layout="constrained")
for name, kernel in kernels.items():
    kernel.lengthscale = 0.2
    box = tkrr.Domain(0.5, 2.0)
    errors = [float(tkrr.HilbertKernel(kernel, box, num_basis=count).approximation_error(x)) for count in counts]
    axis.loglog(counts, errors, "o-", label=name)
axis.set(xlabel="number of functions, M", ylabel="largest error / variance", ylim=(1e-8, 1))
axis.set_xticks(counts, labels=[str(count) for count in counts])
axis.minorticks_off()
axis.legend()
plt.show()
