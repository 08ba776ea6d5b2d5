# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A Hilbert kernel in an ExactGP
#
# After this tutorial you can replace the kernel of an `ExactGP` by a `HilbertKernel`, check its error, and draw whole
# functions.
#
# You have an `ExactGP` that works and more data than it can handle. This tutorial changes one line of it, looks at
# what changed, and shows how to check that the change was harmless.
#
# `HilbertKernel` wraps a GPyTorch kernel. On a box around the data it replaces the kernel by a finite sum,
#
# $$k(x, x') \approx \sum_i v_i(\theta)\, \phi_i(x)\, \phi_i(x').$$
#
# The functions $\phi_i$ are sine waves that are zero at the ends of the box. They do not depend on the kernel, so they
# are evaluated once. The variances $v_i$ come from your kernel object and change with its hyperparameters.

# %%
import os
import textwrap
import time
import warnings

import gpytorch
import matplotlib.pyplot as plt
import torch
from gpytorch.kernels import MaternKernel, PeriodicKernel, PolynomialKernel, RBFKernel, RQKernel, ScaleKernel

import gpytorch_tkrr as tkrr

FAST = bool(os.environ.get("TKRR_TUTORIAL_FAST"))  # small settings, for tests
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
plt.rcParams.update({"figure.dpi": 110, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})
EXACT, HILBERT, DRAWS, DATA = "tab:blue", "tab:orange", "saddlebrown", "0.35"


# %% [markdown]
# ## Change one line
#
# An ordinary model and an ordinary training loop. Nothing in them is specific to this package.


# %%
class Model(gpytorch.models.ExactGP):
    def __init__(self, train_x, train_y, covar_module):
        super().__init__(train_x, train_y, gpytorch.likelihoods.GaussianLikelihood())
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = covar_module

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def train(model, num_steps=80, lr=0.1):
    model.train()
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for _ in range(3 if FAST else num_steps):
        optimizer.zero_grad()
        loss = -objective(model(*model.train_inputs), model.train_targets)
        loss.backward()
        optimizer.step()
    return model.eval()


# %% [markdown]
# The data: 600 noisy values of a function of one variable, with a gap. (Up to 500 rows `from_tolerance` would evaluate
# your kernel as it is, because functions save no time there; with more rows it uses the functions.)

# %%
x = torch.rand(600)
x = torch.where((x > 0.5) & (x < 0.75), x - 0.5, x)
y = torch.sin(12 * x) + 0.7 * torch.cos(23 * x) + 0.2 * torch.randn(600)


def smooth_kernel():
    kernel = RBFKernel()
    kernel.lengthscale = 0.1
    return ScaleKernel(kernel)


exact = train(Model(x, y, smooth_kernel()))
hilbert = train(Model(x, y, tkrr.HilbertKernel.from_tolerance(smooth_kernel(), x, tol=1e-4)))  # the one line

# %% [markdown]
# Both models predict the same mean and the same band. The thin lines are new: an exact GP can only be sampled *at the
# inputs you ask for*, at a cubic cost in their number. `draw_posterior_functions` draws *whole functions*. Evaluate one
# anywhere, as often as you like; it stays the same function.

# %%
grid = torch.linspace(0, 1, 400)
with torch.no_grad():
    exact_prediction, hilbert_prediction = exact(grid), hilbert(grid)
    functions = tkrr.draw_posterior_functions(hilbert, 4, generator=torch.Generator().manual_seed(1))
    draws = functions(grid)  # (4, 400)
print(f"largest difference of the means: {(exact_prediction.mean - hilbert_prediction.mean).abs().max():.0e}")

# %% tags=["hide-input"]
figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True, layout="constrained")
panels = [("exact GP", EXACT, exact_prediction), ("HilbertKernel", HILBERT, hilbert_prediction)]
for axis, (title, color, prediction) in zip(axes, panels, strict=True):
    lower, upper = (bound.detach() for bound in prediction.confidence_region())
    axis.fill_between(grid, lower, upper, color=color, alpha=0.2, lw=0, label="mean ± 2 sd of f")
    axis.plot(grid, prediction.mean, color=color, lw=2)
    axis.plot(x, y, ".", color=DATA, ms=2, label="data")
    axis.set(title=title, xlabel="x")
    axis.legend(loc="lower left")
axes[1].plot(grid, draws.T, color=DRAWS, lw=0.8)
axes[0].set_ylabel("y")
plt.show()

# %% [markdown]
# The small difference has two parts: the approximation of the kernel, and the slightly different hyperparameters that
# training found with it. Parameters, priors and constraints live on *your* kernel object:

# %%
for name, parameter in hilbert.named_parameters():
    print(f"{name:<58} {parameter.item(): .3f}")

# %% [markdown]
# ## How good is the approximation?
#
# `approximation_error(x)` measures $\max |K_\text{approx} - K| / k(0)$ on your inputs. Two things make it:
#
# - **the box is too small**: the sines are zero at its ends, and this is felt inside. The error at the edge of the
#   data is about $k(2 (L - h))$, with $L$ the half width of the box and $h$ that of the data. More functions do not
#   help.
# - **too few functions**: what is left out is the tail of the spectral density. It falls fast for smooth kernels.
#
# A wider box needs more functions for the same detail: only the ratio of the two counts.

# %%
inputs = torch.linspace(-1, 1, 200)
bases = {"RBF, lengthscale 0.3": RBFKernel(), "Matérn-5/2, lengthscale 0.3": MaternKernel(nu=2.5)}
factors = [1.1, 1.25, 1.5, 2.0]  # half width of the box / half range of the data
counts = [4, 6, 8, 12, 16, 24, 32, 48, 64, 96]

errors, choices = {}, {}
for title, base in bases.items():
    base.lengthscale = 0.3
    for factor in factors:
        box = tkrr.Domain.from_data(inputs, boundary_factor=factor)
        kernels = [tkrr.HilbertKernel(base, box, num_basis=m) for m in counts]
        errors[title, factor] = [kernel.approximation_error(inputs) for kernel in kernels]
    for tol in (1e-2, 1e-4):
        choices[title, tol] = tkrr.HilbertKernel.from_tolerance(base, inputs, tol=tol)

# %% tags=["hide-input"]
figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
for axis, title in zip(axes, bases, strict=True):
    for factor, shade in zip(factors, plt.cm.viridis([0.0, 0.3, 0.6, 0.85]), strict=True):
        axis.loglog(counts, errors[title, factor], "o-", ms=3, color=shade, label=f"box {factor:g} × data")
    for tol, marker in [(1e-2, "*"), (1e-4, "P")]:
        kernel = choices[title, tol]
        mark = {"marker": marker, "ms": 12, "color": "tab:red", "ls": "", "label": f"from_tolerance, tol = {tol:g}"}
        axis.loglog(kernel.num_basis, [kernel.approximation_error(inputs)], **mark)
    axis.set(title=title, xlabel="number of functions M", ylim=(1e-16, 5))
    axis.set_xticks([4, 8, 16, 32, 64, 128, 256], labels=["4", "8", "16", "32", "64", "128", "256"])
    axis.minorticks_off()
axes[0].set_ylabel("approximation error")
axes[0].legend(loc="lower left", fontsize=8)
plt.show()

# %% [markdown]
# Each line falls while functions are added. Then it becomes flat, because the box is too small. `from_tolerance`
# chooses the box and the number together. Its marks lie far below the tolerance: where more functions cost little, as
# with one input, it takes some in reserve, so that the lengthscale can change during training before a new choice is
# needed.
#
# Training moves the hyperparameters, and the kernel chooses again when the error comes near the tolerance.
# `num_revisions` counts these choices:

# %%
kernel = hilbert.covar_module
print(f"{kernel.num_basis[0]} functions on {kernel.domain} after {kernel.num_revisions} new choice(s)")
print(f"error after training: {kernel.approximation_error(x):.2g}")

# %% [markdown]
# A kernel with a box and a number that you give keeps them. If more than 5 % of its variance is missing after training,
# the first prediction gives an `ApproximationWarning`. It tells whether the box or the number is too small.
#
# ## Two inputs
#
# The functions are now products of sines, one for each pair of frequencies: $M_1 \times M_2$ of them. Here 3000
# observations on the unit square, with a corner left out.

# %%
points = torch.rand(4000, 2)
points = points[~((points > 0.6).all(-1))][: 500 if FAST else 3000]


def surface(points):
    return torch.sin(7 * points[..., 0]) * torch.cos(5 * points[..., 1]) + points[..., 0]


matern = MaternKernel(nu=2.5, ard_num_dims=2)
matern.lengthscale = torch.tensor([0.4, 0.5])
kernel = tkrr.HilbertKernel.from_tolerance(ScaleKernel(matern), points, tol=1e-2)
print(f"{kernel.num_basis} sines, {kernel.expansion().num_functions} products, box {kernel.domain}")

model = train(Model(points, surface(points) + 0.2 * torch.randn(len(points)), kernel), num_steps=50)

# %%
side = torch.linspace(0, 1, 60)
mesh = torch.stack(torch.meshgrid(side, side, indexing="ij"), dim=-1)  # (60, 60, 2)
with torch.no_grad():
    prediction = model(mesh.reshape(-1, 2))

# %% tags=["hide-input"]
pictures = {
    "truth": surface(mesh),
    "posterior mean": prediction.mean.reshape(60, 60),
    "posterior sd": prediction.stddev.reshape(60, 60),
}
figure, axes = plt.subplots(1, 3, figsize=(11, 3.5), sharey=True, layout="constrained")
for axis, (title, picture) in zip(axes, pictures.items(), strict=True):
    colors = {"cmap": "magma"} if title == "posterior sd" else {"cmap": "viridis", "vmin": -1.0, "vmax": 1.8}
    shown = axis.pcolormesh(side.numpy(), side.numpy(), picture.T.numpy(), shading="nearest", **colors)
    axis.plot([0.6, 0.6, 1.0], [1.0, 0.6, 0.6], color="w", lw=1, ls="--")
    axis.set(title=title, xlabel="first input", aspect="equal")
    figure.colorbar(shown, ax=axis, shrink=0.85)
axes[0].set_ylabel("second input")
plt.show()

# %% [markdown]
# No data lie beyond the dashed line, and the standard deviation says so.
#
# The full product grows like $M^D$: it is a tool for one to three inputs. For four to six there are smaller index
# sets, and sums of kernels over a few inputs each are cheap at any number of inputs.

# %%
cross = tkrr.HyperbolicCross(limit=64)
print("all products, 4 inputs, 16 sines each:  ", tkrr.FullTensor().size([16] * 4))
print("those with j1 j2 j3 j4 <= 64:           ", cross.size([16] * 4))

# %% [markdown]
# ## Near the end of the box, and beyond it
#
# Sines vanish at the ends of the box. Left alone, the model would be *certain* there that the function equals its
# mean. It is not left alone: wherever the functions carry less than 95 % of the prior variance $k(x, x)$, the missing
# part is added back as independent variance, and one warning says how many points and which inputs are concerned.
#
# Here the box is made narrow on purpose, and we predict far outside of it.

# %%
box = tkrr.Domain.from_data(x, boundary_factor=1.4)
edge = train(Model(x, y, tkrr.HilbertKernel(smooth_kernel(), box, num_basis=32)), num_steps=40)

far = torch.linspace(-0.6, 1.6, 500)
with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    prediction = edge(far)
for warning in caught:
    print(textwrap.fill(f"{warning.category.__name__}: {warning.message}", 110))

# %%
expansion = edge.covar_module.expansion()
with torch.no_grad():
    features = expansion.features(far.unsqueeze(-1))  # (500, 32)
    represented = features.square() @ expansion.variances() / expansion.prior_variance(far.unsqueeze(-1))
    draws = tkrr.draw_posterior_functions(edge, 4, generator=torch.Generator().manual_seed(2))(far)

# %% tags=["hide-input"]
lower, upper = prediction.confidence_region()
left, right = (float(box.center + sign * box.half_width) for sign in (-1, 1))

figure, axes = plt.subplots(2, 1, figsize=(9, 5.5), sharex=True, height_ratios=[3, 1], layout="constrained")
axes[0].fill_between(far, lower, upper, color=HILBERT, alpha=0.2, lw=0, label="mean ± 2 sd of f")
axes[0].plot(far, draws.T, color=DRAWS, lw=0.8)
axes[0].plot(far, prediction.mean, color=HILBERT, lw=2)
axes[0].plot(x, y, ".", color=DATA, ms=2, label="data")
axes[0].set(ylabel="y", ylim=(-2.8, 2.8))
axes[1].plot(far, represented, color="k", lw=1.2, label="carried by the functions")
axes[1].fill_between(far, represented, 1, where=represented < 0.95, color=HILBERT, alpha=0.4, lw=0, label="added back")
axes[1].set(xlabel="x", ylabel="share of k(x, x)", ylim=(0, 1.15))
for axis in axes:
    axis.axvspan(left, right, color="0.5", alpha=0.08, lw=0, label="the box")
axes[0].legend(loc="upper center", ncols=3)
axes[1].legend(loc="lower center", ncols=3, fontsize=8)
plt.show()

# %% [markdown]
# The band opens to the prior and stays there, as that of an exact GP does. Mean and function draws (thin lines) are
# made of the sines alone: they have a kink at the end of the box, and beyond it they are the prior mean. So make
# the box from the range *that you will predict on*: `Domain.from_bounds(lower, upper)`. Training data outside the box
# are an error.
#
# ## A kernel built from parts
#
# Trees of kernels are taken apart. Constant, linear, polynomial and periodic kernels have bases of their own. A
# periodic kernel times a decaying one has a spectral density: copies of the decaying kernel's, shifted to the
# harmonics. So the classic model of a rising, seasonal series works as it stands. Here is a made-up one, monthly for
# 30 years:

# %%
years = torch.arange(0, 30, 1 / 12)
season = torch.sin(2 * torch.pi * years) + 0.35 * torch.cos(4 * torch.pi * years)
season = season * (1 + 0.25 * torch.sin(2 * torch.pi * years / 21))  # the season itself drifts
wiggle = 0.6 * torch.sin(2 * torch.pi * years / 7.3) * torch.cos(2 * torch.pi * years / 19)
level = 340 + 1.2 * years + 0.015 * years.square() + 2.5 * season + wiggle + 0.3 * torch.randn(len(years))

horizon = torch.arange(0, 38, 1 / 24)  # eight years beyond the data
decades = (years - 15) / 10
target = (level - level.mean()) / level.std()


def seasonal_kernel():
    trend = ScaleKernel(PolynomialKernel(power=2))
    trend.outputscale = 0.1
    periodic, decay = PeriodicKernel(), RBFKernel()
    periodic.period_length = 0.1  # decades
    periodic.lengthscale = 2.0
    decay.lengthscale = 1.0
    periodic.raw_period_length.requires_grad_(False)
    season = ScaleKernel(periodic * decay)
    season.outputscale = 0.05
    irregular = RQKernel()
    irregular.lengthscale = 0.3
    rough = ScaleKernel(irregular)
    rough.outputscale = 0.01
    return trend + season + rough


# %% [markdown]
# Choosing by hand is easy once you know the highest frequency that matters. The sines have the frequencies
# $\omega_j = \pi j / (2 L)$. To reach the third harmonic of the year, $\omega = 3 \cdot 2 \pi / p$, we need
# $M = 2 L \omega / \pi = 12 L / p$ of them, and a few more for the width of its peak. (`from_tolerance` looks for such
# peaks too.)

# %%
box = tkrr.Domain.from_bounds(torch.tensor([-1.5]), (horizon[-1:] - 15) / 10, boundary_factor=2.0)
num_basis = int(12 * box.half_width / 0.1) + 20
kernel = tkrr.HilbertKernel(seasonal_kernel(), box, num_basis=num_basis)
print(f"{kernel.expansion().num_functions} functions on {box}, error {kernel.approximation_error(decades):.1e}")

series = Model(decades, target, kernel)
series.likelihood.noise = 0.01
series = train(series, num_steps=60, lr=0.05)

# %%
with torch.no_grad():
    forecast = series.likelihood(series((horizon - 15) / 10))
mean = level.mean() + level.std() * forecast.mean
sd = level.std() * forecast.stddev

# %% tags=["hide-input"]
figure, axes = plt.subplots(1, 2, figsize=(11, 3.8), width_ratios=[2, 1], layout="constrained")
for axis in axes:
    axis.fill_between(horizon, mean - 2 * sd, mean + 2 * sd, color=HILBERT, alpha=0.3, lw=0, label="mean ± 2 sd of y")
    axis.plot(horizon, mean, color=HILBERT, lw=1, label="mean")
    axis.plot(years, level, ".", color=DATA, ms=2, label="data")
    axis.axvline(years[-1], color="k", lw=0.8, ls=":")
    axis.set_xlabel("year")
axes[0].set_ylabel("level")
axes[0].legend(loc="upper left")
axes[1].set(xlim=(26, 38), ylim=(float(mean[horizon > 26].min()) - 4, float(mean.max()) + 4), title="the last years")
plt.show()

# %% [markdown]
# Each part does what its kernel says. The trend goes on. The season goes on too, less and less certain, for its kernel
# lets it drift. The irregular part is forgotten after a few years.
#
# ## What it buys
#
# The data enter the likelihood through $\Phi^\top \Phi$ and $\Phi^\top (y - m)$. The first, the expensive one, does
# not depend on the hyperparameters and is computed once. What is left of a training step is algebra with small
# matrices.


# %%
def milliseconds_per_step(model, repeat=5):
    model.train()
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    seconds = []
    for _ in range(repeat + 1):  # the first one fills the cache
        start = time.perf_counter()
        model.zero_grad()
        loss = -objective(model(*model.train_inputs), model.train_targets)
        loss.backward()
        seconds.append(time.perf_counter() - start)
    return 1e3 * min(seconds[1:])


sizes = {"exact": [250, 500, 1000, 2000], "Hilbert": [250, 1000, 4000, 16_000, 64_000]}
if FAST:
    sizes = {"exact": [100, 200], "Hilbert": [100, 200, 400]}
measured = {}
for name, rows in sizes.items():
    for num_rows in rows:
        x = torch.rand(num_rows, 2)
        kernel = ScaleKernel(MaternKernel(nu=2.5, ard_num_dims=2))
        if name == "Hilbert":
            kernel = tkrr.HilbertKernel.from_tolerance(kernel, x, tol=1e-2)
        model = Model(x, surface(x) + 0.2 * torch.randn(num_rows), kernel)
        with gpytorch.settings.max_cholesky_size(2000):
            measured[name, num_rows] = milliseconds_per_step(model, repeat=3)

# %% tags=["hide-input"]
figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
labels = {"exact": "exact GP (Cholesky)", "Hilbert": f"HilbertKernel, {kernel.expansion().num_functions} functions"}
for name, color in [("exact", EXACT), ("Hilbert", HILBERT)]:
    axis.loglog(sizes[name], [measured[name, n] for n in sizes[name]], "o-", color=color, label=labels[name])
axis.set(xlabel="number of data N", ylabel="milliseconds per training step")
axis.legend()
axis.grid(alpha=0.3)
plt.show()

# %% [markdown]
# The times are those of the machine that built this page. `python -m benchmarks hilbert_training` measures yours, and
# compares with random Fourier features.
#
# **What to remember**
#
# - Wrap the kernel: `HilbertKernel.from_tolerance(kernel, x)`. The rest of the code stays.
# - Give `bounds=` if you will predict outside the range of the training inputs.
# - `approximation_error(x)` measures the error on your inputs.
# - One to three inputs by full products; four to six by `HyperbolicCross` or `TotalDegree`; sums of kernels beyond.
