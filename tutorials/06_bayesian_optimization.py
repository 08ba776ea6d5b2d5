# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Bayesian optimisation with BoTorch
#
# After this tutorial you can run Bayesian optimisation in BoTorch with the models of this package.
#
# BoTorch asks three things of a model: a posterior that can be differentiated in the inputs, fantasies (what would the
# model say had it seen this outcome?), and function draws. `HilbertGPModel` and `TKRRModel` give all three at a cost
# that does not grow with the cube of the number of observations.
#
# This tutorial swaps them for `SingleTaskGP` in an ordinary loop, looks at what they draw, and then takes a step after
# thousands of observations. It needs the extra `botorch`.

# %%
import os
import time
import warnings

import matplotlib.pyplot as plt
import torch
from botorch.acquisition import LogExpectedImprovement
from botorch.exceptions.warnings import BotorchWarning
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.optim import optimize_acqf
from botorch.sampling.pathwise import draw_matheron_paths
from botorch.test_functions import Ackley, Hartmann
from gpytorch.mlls import ExactMarginalLogLikelihood
from linear_operator.utils.warnings import NumericalWarning

import gpytorch_tkrr as tkrr

FAST = bool(os.environ.get("TKRR_TUTORIAL_FAST"))  # small settings, for tests
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
plt.rcParams.update({"figure.dpi": 110, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})
for category in (BotorchWarning, NumericalWarning, RuntimeWarning):
    warnings.simplefilter("ignore", category)  # BoTorch says when it starts an optimisation again
COLORS = {"SingleTaskGP": "tab:blue", "HilbertGPModel": "tab:orange", "TKRRModel": "tab:green"}
WIDTHS = {"SingleTaskGP": 7, "HilbertGPModel": 4, "TKRRModel": 1.5}  # equal curves lie on each other

# %% [markdown]
# ## One input, to look at
#
# The box of the model comes from the bounds of the search, not from the points seen so far. The posterior is that of an
# exact Gaussian process; the paths are whole functions, drawn exactly, and can be maximised one by one: Thompson
# sampling.


# %%
def fit(model_class, x, y, **kwargs):
    model = model_class(x, y)
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model), **kwargs)
    return model


def objective(x):
    return torch.sin(12 * x) * x + torch.cos(5 * x)


train_x = torch.tensor([[0.05], [0.2], [0.35], [0.6], [0.62]])
model = fit(tkrr.botorch.HilbertGPModel, train_x, objective(train_x))
grid = torch.linspace(0, 1, 200).unsqueeze(-1)
with torch.no_grad():
    posterior = model.posterior(grid)
    mean, sd = posterior.mean.squeeze(-1), posterior.variance.sqrt().squeeze(-1)
    paths = draw_matheron_paths(model, torch.Size([8]))(grid)  # (8, 200)
print(f"eight paths, with their maxima at {sorted(round(float(grid[i, 0]), 2) for i in paths.argmax(-1))}")

# %% tags=["hide-input"]
figure, axis = plt.subplots(figsize=(8, 3.5), layout="constrained")
axis.fill_between(grid[:, 0], mean - 2 * sd, mean + 2 * sd, color="tab:orange", alpha=0.2, lw=0, label="mean ± 2 sd")
axis.plot(grid, paths.T, color="saddlebrown", lw=0.7, alpha=0.7, label=["eight paths", *[None] * 7])
axis.plot(grid[paths.argmax(-1), 0], paths.amax(-1), "v", color="saddlebrown", ms=5, label="maxima of paths")
axis.plot(grid, objective(grid), "k--", lw=1, label="objective")
axis.plot(train_x, objective(train_x), "o", color="k", ms=5, label="observations")
axis.set(xlabel="x", ylabel="f")
axis.legend(loc="lower left", ncols=2)
plt.show()

# %% [markdown]
# ## Closed loops
#
# An ordinary loop: fit, maximise LogEI, evaluate, again. Only the class of the model changes. Hartmann's function has
# six inputs, which is for both models; Ackley's has ten, which is for `TKRRModel`. With so few observations all of them
# are the same exact process, and the curves lie on each other: nothing is lost by starting with them.


# %%
def evaluate(problem, x):
    lower, upper = problem.bounds
    return problem(lower + x * (upper - lower)).unsqueeze(-1)


def closed_loop(problem, model_class, seed, num_evaluations, num_initial=12):
    torch.manual_seed(seed)
    x = torch.quasirandom.SobolEngine(problem.dim, scramble=True, seed=seed).draw(num_initial).double()
    y = evaluate(problem, x)
    bounds = torch.tensor([[0.0], [1.0]]).expand(2, problem.dim)
    while len(x) < num_evaluations:
        model = fit(model_class, x, y)
        candidate, _ = optimize_acqf(
            LogExpectedImprovement(model, best_f=y.max()),
            bounds,
            q=1,
            num_restarts=2 if FAST else 6,
            raw_samples=16 if FAST else 128,
            options={"maxiter": 5 if FAST else 60},
        )
        x, y = torch.cat([x, candidate]), torch.cat([y, evaluate(problem, candidate)])
    return y.squeeze(-1).cummax(0).values


problems = {"Hartmann-6": Hartmann(6, negate=True), "Ackley-10": Ackley(10, negate=True)}
models = {
    "Hartmann-6": [SingleTaskGP, tkrr.botorch.HilbertGPModel, tkrr.botorch.TKRRModel],
    "Ackley-10": [SingleTaskGP, tkrr.botorch.TKRRModel],
}
num_evaluations = 13 if FAST else 30
best = {}
for name, problem in problems.items():
    for model_class in models[name]:
        start = time.perf_counter()
        best[name, model_class.__name__] = closed_loop(problem.double(), model_class, 0, num_evaluations)
        seconds = (time.perf_counter() - start) / (num_evaluations - 12)
        found = best[name, model_class.__name__][-1]
        print(f"{name}, {model_class.__name__}: best {found:.3f}, {seconds:.1f} s per step")

# %% tags=["hide-input"]
figure, axes = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
for axis, name in zip(axes, problems, strict=True):
    for model_class in models[name]:
        label = model_class.__name__
        steps = range(1, num_evaluations + 1)
        axis.step(steps, best[name, label], color=COLORS[label], lw=WIDTHS[label], label=label, where="post")
    axis.axvline(12, color="k", lw=0.8, ls=":", label="the model chooses from here on")
    axis.set(xlabel="evaluations", ylabel="best value", title=name)
axes[0].legend()
plt.show()

# %% [markdown]
# On Ackley's function, which is almost flat far from its maximum, none of them finds a better point in these few steps.
# One run each is a picture, not a measurement. `python -m benchmarks bayesopt` runs many seeds and prints quartiles.
#
# ## A step after many observations
#
# Say a log of past experiments is there, thousands of noisy rows. The exact model pays for each row with a row of an
# $N \times N$ matrix, at every step of the fit. Ours see the data once; then the cost is that of the functions.

# %%
problem = problems["Hartmann-6"]
sizes = {"SingleTaskGP": 60 if FAST else 1000, "HilbertGPModel": 200 if FAST else 10_000}
for model_class in (SingleTaskGP, tkrr.botorch.HilbertGPModel):
    num_rows = sizes[model_class.__name__]
    x = torch.rand(num_rows, 6)
    y = evaluate(problem, x) + 0.05 * torch.randn(num_rows, 1)
    start = time.perf_counter()
    options = {"options": {"maxiter": 3}} if FAST else {}
    large = fit(model_class, x, y, optimizer_kwargs=options)
    candidate, _ = optimize_acqf(
        LogExpectedImprovement(large, best_f=y.max()),
        torch.tensor([[0.0], [1.0]]).expand(2, 6),
        q=1,
        num_restarts=2,
        raw_samples=32,
        options={"maxiter": 20},
    )
    seconds = time.perf_counter() - start
    value = evaluate(problem, candidate).item()
    print(f"{model_class.__name__}, {num_rows} rows: {seconds:.1f} s, candidate of value {value:.2f}")

# %% [markdown]
# **What to remember**
#
# - Swap the class of the model; the loop stays. Give `bounds` unless the search space is the unit cube.
# - Up to six inputs `HilbertGPModel`, beyond `TKRRModel`. With a few hundred observations they are `SingleTaskGP`; with
#   thousands there is no choice.
# - `draw_matheron_paths` gives whole functions of both.
