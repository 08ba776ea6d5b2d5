# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Flight delays at scale
#
# After this tutorial you can fit a file of any size, stop and resume, and use several processes.
#
# ALS, Gibbs sampling and the Hilbert kernel need the data only through sums over the rows. So the rows can stay in a
# file that is larger than memory, a fit that was stopped can go on, and several processes can share the work. This
# tutorial does all of it with the flights that left New York in 2013.
#
# A quarter of a million rows would fit into memory, of course. They are enough to see how it works, and nothing below
# changes with a hundred times as many. It needs the extras `compare` (the flights), `parquet` and `plot`.

# %%
import os
import tempfile
import time
import warnings
from pathlib import Path

import gpytorch
import matplotlib.pyplot as plt
import pyarrow
import pyarrow.parquet
import torch
from gpytorch.kernels import AdditiveKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.tables.flights import load_new_york

FAST = bool(os.environ.get("TKRR_TUTORIAL_FAST"))  # small settings, for tests
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
plt.rcParams.update({"figure.dpi": 110, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})
if FAST:
    warnings.simplefilter("ignore", tkrr.TKRRWarning)  # few rows and sweeps: held-out flights outside of the box
ALS, BAYES, ADDITIVE, DATA = "tab:orange", "tab:red", "tab:green", "0.25"

# %% [markdown]
# ## The data are a file
#
# Eight inputs: the date, the age of the plane, air time, distance, and the times of arrival and departure in minutes.
# The target is the delay at arrival, in minutes. One flight in ten is held out in a file of its own.
#
# The rows are shuffled only so that the first rows are a fair sample of all, for a figure further down. A fit does not
# care about their order: it adds up *all* of them before it moves, so there are no batches to be drawn at random.

# %%
folder = Path(tempfile.mkdtemp())
flights = load_new_york().sample(2000 if FAST else None, frac=None if FAST else 1.0, random_state=0)
num_test = len(flights) // 10
for name, rows in {"test": flights[:num_test], "train": flights[num_test:]}.items():
    table = pyarrow.Table.from_pandas(rows, preserve_index=False)
    pyarrow.parquet.write_table(table, folder / f"{name}.parquet", row_group_size=50_000)
del flights, rows, table

# %% [markdown]
# `open_table` opens a Parquet, CSV, .npy or .npz file, or a folder of Parquet files, and reads nothing yet. It is an
# iterable of batches `(x, y)`, in which one batch at a time is in memory. An object of your own that can be iterated
# again and again, such as a `DataLoader`, goes in the same places.

# %%
train = tkrr.open_table(folder / "train.parquet", target="ArrDelay")
test = tkrr.open_table(folder / "test.parquet", target="ArrDelay", batch_rows=8192)
x, y = next(iter(train))
print(f"{train.num_rows} rows of {len(train.inputs)} inputs; the first batch has shape {tuple(x.shape)}")

# %% [markdown]
# `summarise` makes one pass. A fit makes the same one first, to choose the box and the default kernel.

# %%
summary = tkrr.summarise(train)
print(f"mean delay {summary.mean:.1f} min, standard deviation {summary.variance**0.5:.1f} min")
for name, lower, upper, distinct in zip(
    train.inputs, summary.lower, summary.upper, summary.num_distinct(), strict=True
):
    print(f"{name:<12} {lower:6g} to {upper:5g}, {distinct} distinct values in a sample")

# %% [markdown]
# ## Alternating least squares from the file
#
# The model is made without data, the rows come with the call. `memory` bounds what the fit may keep: batches that it
# has read and products over modes, as far as they fit. The rest is read again, in every pass. So memory does not grow
# with the number of rows; `python -m benchmarks airline_scale` measures that.


# %%
def new_model():
    return tkrr.TKRR(None, None, GaussianLikelihood(), rank=4 if FAST else 16)


settings = {"learn_hyperparameters": True, "max_sweeps": 2 if FAST else 6, "rel_tol": 0.0, "seed": 0}
start = time.perf_counter()
model = new_model()
result = tkrr.fit_als(model, data=train, memory=256 << 20, **settings)
print(f"{time.perf_counter() - start:.0f} s. {result.message}")

# %% [markdown]
# ## A fit that is stopped goes on
#
# With `checkpoint=` the fit saves what it needs to go on, after its sweeps and at most every ten seconds (here: after
# every sweep). Let a power failure be an exception in the middle of the third sweep.

# %%
num_dims = len(train.inputs)
failure = 1 + (1 if FAST else 2) * 2 * (num_dims - 1) + 5


def power_failure(model, update):
    if update == failure:
        raise RuntimeError("The power has failed.")


checkpoint = tkrr.Checkpoint(folder / "run.pt", seconds=0)
try:
    tkrr.fit_als(new_model(), data=train, memory=256 << 20, checkpoint=checkpoint, callback=power_failure, **settings)
except RuntimeError as error:
    print(f"{error} The checkpoint has {checkpoint.path.stat().st_size / 1e3:.0f} kB.")

# %% [markdown]
# The same call again, as a script would make it when it is started anew: it reads the file and does the sweeps that are
# missing. The end is the same as without the failure, bit for bit.

# %%
resumed = new_model()
again = tkrr.fit_als(resumed, data=train, memory=256 << 20, checkpoint=checkpoint, **settings)
same = all(torch.equal(a, b) for a, b in zip(model.factors, resumed.factors, strict=True))
print(f"{again.message}\nthe same factors as without the failure: {same}")

# %% [markdown]
# A checkpoint of other data, another model or other settings is refused by name, and so is a damaged file.

# %%
try:
    tkrr.fit_als(new_model(), data=train, checkpoint=checkpoint, **{**settings, "seed": 1})
except tkrr.CheckpointError as error:
    print(str(error).replace(str(folder), "folder"))

# %% [markdown]
# ## Scores, also in batches
#
# Nothing needs all test rows at once either. RMSE is in minutes; the coverage is that of 95 % intervals.


# %%
def predict(model, rows):
    with torch.no_grad():
        parts = [(y, model.likelihood(model(x))) for x, y in rows]
    return (torch.cat(part) for part in zip(*((y, new.mean, new.stddev) for y, new in parts), strict=True))


def score(name, model):
    actual, mean, sd = predict(model.eval(), test)
    rmse = (actual - mean).square().mean().sqrt()
    inside = ((actual - mean).abs() < 1.96 * sd).double().mean()
    print(f"{name:<28} RMSE {rmse:.2f} min, coverage {inside:.1%}")
    return rmse.item()


error = score("T-KRR, ALS", model)

# %% [markdown]
# Delays are far from normal: most flights are early, and a few are hours late. A Gaussian likelihood has one variance
# for all of them, so the overall coverage can be right while intervals are too wide for most flights.
#
# ## A Hilbert GP from one pass
#
# A Gaussian process with a `HilbertKernel` needs the sums $\Phi^\top \Phi$, $\Phi^\top y$, $\Phi^\top 1$, $y^\top y$
# and N, no more. `HilbertGP` collects them in one pass and lets go of the rows. Hyperparameters are then trained as
# those of any `ExactGP`, by the exact marginal likelihood of all rows, in steps whose cost does not depend on N.
#
# With eight inputs the kernel is a sum of one kernel for each: an additive model.


# %%
def fit_additive(rows, num_steps=10 if FAST else 100):
    kernels = [ScaleKernel(RBFKernel(active_dims=[d])) for d in range(num_dims)]
    for kernel, width in zip(kernels, summary.upper - summary.lower, strict=True):
        kernel.outputscale, kernel.base_kernel.lengthscale = summary.variance / num_dims, width / 4
    domain = tkrr.Domain.from_bounds(summary.lower, summary.upper, boundary_factor=3.0)
    likelihood = GaussianLikelihood()
    likelihood.noise = summary.variance
    model = tkrr.HilbertGP(rows, likelihood, tkrr.HilbertKernel(AdditiveKernel(*kernels), domain, num_basis=40))
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = -objective(model(*model.train_inputs), model.train_targets)  # placeholders: the model holds sums
        loss.backward()
        optimizer.step()
    return model


start = time.perf_counter()
additive = fit_additive(train, num_steps=0)
print(f"one pass over {train.num_rows} rows: {time.perf_counter() - start:.1f} s")
start = time.perf_counter()
additive = fit_additive(train)
print(f"pass and training: {time.perf_counter() - start:.1f} s")
error = score("additive Hilbert GP", additive)

# %% [markdown]
# ## Is it worth taking all rows?
#
# `Shard(source, 0, k)` is the first of k equal parts of a source. Both models, on parts that grow:

# %%
parts = [8, 1] if FAST else [256, 64, 16, 4, 1]
numbers, errors = [], {"additive Hilbert GP": [], "T-KRR, ALS": []}
for k in parts:
    rows = tkrr.Shard(train, 0, k)
    numbers.append(rows.num_rows)
    small = new_model()
    tkrr.fit_als(small, data=rows, **settings)
    errors["T-KRR, ALS"].append(score(f"T-KRR, {rows.num_rows} rows", small))
    errors["additive Hilbert GP"].append(score(f"additive, {rows.num_rows} rows", fit_additive(rows)))

# %% tags=["hide-input"]
figure, axis = plt.subplots(figsize=(6, 3.4), layout="constrained")
for (name, values), color, marker in zip(errors.items(), (ADDITIVE, ALS), "so", strict=True):
    axis.plot(numbers, values, color=color, marker=marker)
    axis.annotate(name, (numbers[-1], values[-1]), (6, 0), textcoords="offset points", color=color, va="center")
axis.axhline(summary.variance**0.5, color="0.7", lw=1)
axis.annotate(
    "no model: the mean", (numbers[0], summary.variance**0.5), (0, 4), textcoords="offset points", color="0.5"
)
axis.set(xscale="log", xlabel="training rows", ylabel="RMSE, minutes")
plt.show()

# %% [markdown]
# With a thousand rows the two models are close. The additive model soon stops improving; T-KRR is less restricted and
# improves with every further row.
#
# ## Draws from the same file
#
# `fit_gibbs` takes the same `data`, `memory` and `checkpoint`. The chain starts from the solution of `fit_als`, so a
# short warm-up is enough.

# %%
start = time.perf_counter()
drawn = tkrr.fit_gibbs(
    model, data=train, num_warmup=5 if FAST else 30, num_draws=5 if FAST else 30, seed=0, memory=256 << 20
)
print(f"{time.perf_counter() - start:.0f} s. {drawn.message}")
error = score("T-KRR, Bayesian", model)

# %% [markdown]
# The mean of thirty draws predicts better than one solution. Thirty draws of one chain are too few to trust the tails
# of the posterior: look at `drawn.rhat` and `drawn.ess`, and use `checkpoint=` for a longer run.
#
# ## Reading the result
#
# Mean delays of held-out flights by the hour of departure, in early summer and in autumn. Points are the flights
# themselves (bars: two standard errors), lines the models' predictions for the very same flights.

# %%
hour, month = train.inputs.index("DepTime"), train.inputs.index("Month")
test_x = torch.cat([x for x, _ in test])
actual, bayes, _ = predict(model, test)
_, additive_mean, _ = predict(additive.eval(), test)
departure = (test_x[:, hour] // 60).long()

# %% tags=["hide-input"]
figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
for axis, (title, first, last) in zip(axes, [("June and July", 6, 7), ("September to November", 9, 11)], strict=True):
    season = (test_x[:, month] >= first) & (test_x[:, month] <= last)
    groups = {h: season & (departure == h) for h in range(5, 23)}
    groups = {h: rows for h, rows in groups.items() if rows.sum() > (2 if FAST else 30)}
    hours = list(groups)
    mean = [actual[rows].mean() for rows in groups.values()]
    error = [2 * actual[rows].std() / rows.sum().sqrt() for rows in groups.values()]
    axis.errorbar(hours, mean, error, fmt="o", color=DATA, ms=4, elinewidth=1, label="flights held out")
    for values, color, style, name in [
        (additive_mean, ADDITIVE, "--", "additive Hilbert GP"),
        (bayes, BAYES, "-", "T-KRR, Bayesian"),
    ]:
        axis.plot(hours, [values[rows].mean() for rows in groups.values()], style, color=color, label=name)
    axis.axhline(0, color="0.8", lw=0.8, zorder=0)
    axis.set(title=title, xlabel="hour of departure", xticks=range(6, 23, 4))
axes[0].set_ylabel("mean delay at arrival, minutes")
axes[0].legend(loc="upper left")
plt.show()

# %% [markdown]
# Delays build up in the course of a day, in early summer far more than in autumn. A sum of one function for each input
# cannot say that: its two curves have the same shape, so it is too high in summer mornings and too low in the evenings.
# A sum of *products* can.
#
# ## Several processes
#
# Each process reads its part of the rows and they exchange sums, one `all_reduce` for each factor update. All end with
# the same model. In a script `train.py`, started by `torchrun --nproc-per-node 2 train.py`:
#
# ```python
# import torch.distributed as dist
#
# dist.init_process_group("gloo")  # "nccl" with GPUs
# rows = tkrr.Shard(train, dist.get_rank(), dist.get_world_size())
# tkrr.fit_als(model, data=rows, group=dist.group.WORLD, checkpoint="run.pt", learn_hyperparameters=True, seed=0)
# ```
#
# Without a line of code, for regression on a file of numbers:
#
# ```sh
# torchrun --nproc-per-node 2 -m gpytorch_tkrr fit \
#     --data train.parquet --target ArrDelay --output model.pt --checkpoint run.pt
# gpytorch-tkrr predict --model model.pt --data test.parquet --output predictions.csv
# ```
#
# What is exchanged are sums over rows, and it does not matter who adds them up. Here are two shards, one after the
# other in this process:

# %%
halves = [tkrr.summarise(tkrr.Shard(train, rank, 2)) for rank in range(2)]
together = halves[0] + halves[1]
print([half.num_rows for half in halves], together.num_rows, f"{together.mean:.6f}", f"{summary.mean:.6f}")

# %% [markdown]
# The page on scaling up has the rest: which sources there are, what is sent and how much, and how far it goes on paper.
# `python -m benchmarks airline_scale` runs six million generated and three million real flights, and
# `python -m benchmarks weak_scaling` several processes.
