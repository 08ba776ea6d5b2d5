# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A benchmark of Gaussian processes, with a model of your own
#
# After this tutorial you can compare models on your own table, and add one of your own.
#
# Which model should be swapped in for *your* data? The honest answer is a comparison: the same splits, the same scores,
# the same machine. On the command line it is
#
# ```sh
# gpytorch-tkrr compare --data my.csv --target price
# ```
#
# and in a notebook it is one function, `tkrr.compare`. This tutorial adds a model of its own to the table, reads the
# result, and looks at how far it can be trusted.

# %%
import os

import gpytorch
import torch
from sklearn.datasets import make_friedman1
from sklearn.ensemble import RandomForestRegressor

import gpytorch_tkrr as tkrr

FAST = bool(os.environ.get("TKRR_TUTORIAL_FAST"))  # small settings, for tests

# %% [markdown]
# Friedman's function has ten inputs, of which five matter: two interact, one enters as a square, two are linear. The
# noise has standard deviation one, so no model can have a smaller RMSE than that in the long run.

# %%
x, y = make_friedman1(n_samples=100 if FAST else 1500, n_features=5 if FAST else 10, noise=1.0, random_state=0)

# %% [markdown]
# ## A model of your own
#
# It is an object with two methods. `fit` gets tensors in float64, in the units of the data. `predict` returns the means
# and the standard deviations of new *observations*, noise included, since that is what the test targets are. Here it is
# an `ExactGP` with a Matérn kernel, as in GPyTorch's tutorials.


# %%
class Matern(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(ard_num_dims=x.shape[1]))

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


class MaternGP:
    name = "my Matérn GP"

    def fit(self, x, y):
        self.offset, self.scale = y.mean(), y.std()
        y = (y - self.offset) / self.scale
        self.model = Matern(x, y, gpytorch.likelihoods.GaussianLikelihood()).double()
        objective = gpytorch.mlls.ExactMarginalLogLikelihood(self.model.likelihood, self.model)
        optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        for _ in range(5 if FAST else 50):
            optimizer.zero_grad()
            loss = -objective(self.model(x), y)
            loss.backward()
            optimizer.step()
        self.model.eval()

    def predict(self, x):
        with torch.no_grad():
            observation = self.model.likelihood(self.model(x))
        return self.offset + self.scale * observation.mean, self.scale * observation.stddev


# %% [markdown]
# Regressors of scikit-learn can be used as they are. They predict a mean only, so the scores that need a distribution
# stay empty.
#
# Every model is trained in a process of its own. If one of them fails, takes longer than `time_limit` seconds or runs
# out of memory, the table says so, and the others go on.

# %%
known = ["mean", "linear", "tkrr-als"] if FAST else ["mean", "linear", "boosting", "exact", "additive-hilbert"]
known += [] if FAST else ["tkrr-als", "tkrr-gibbs"]
result = tkrr.compare(
    x,
    y,
    models=[*known, MaternGP(), RandomForestRegressor(n_estimators=20 if FAST else 200, random_state=0)],
    splits=2 if FAST else 3,
    time_limit=600,
    title="Friedman's function",
)
print(repr(result))

# %% [markdown]
# ## Reading the table
#
# `result.table()` is a table of text for people, `result.scores()` one of numbers, a row for each model and split.
# `print(result)` shows the table with a note on each model: how it was trained, and what it chose.

# %%
result.table()

# %% [markdown]
# - **RMSE** is the error of the mean.
# - **NLPD** also judges the width of the predicted distribution: being wrong and sure of it is expensive.
# - **95 % coverage** should be 95 %. The mean alone reaches that, too: an interval can be honest and useless.
# - **CRPS** is in the units of the target, like the RMSE, and judges the whole distribution.
#
# The spread over splits that follows the ± is that of one split. Models saw the same splits, so compare them pair by
# pair; differences vary less than the scores themselves.

# %%
scores = result.scores().pivot(index="split", columns="model", values="rmse")
difference = scores["my Matérn GP"] - scores["T-KRR, ALS"]
print(f"RMSE, Matérn - T-KRR: {difference.mean():.3f} ± {difference.std():.3f}")

# %% [markdown]
# ## Pictures
#
# Left and centre, lower is better and further left is faster. Right, the calibration curve: the share of test targets
# inside the central interval of each probability. Above the diagonal the intervals are too wide, below too narrow.

# %%
result.plot()

# %% [markdown]
# Predictions of one split with their 95 % intervals. A model that has learned nothing predicts the same value
# everywhere.

# %%
result.plot_predictions()

# %% [markdown]
# ## Keeping it
#
# `result.write("report")` writes a page that needs no other file, and all numbers as JSON, with the versions and the
# machine. Classification works the same way: with two different targets, of any kind, the scores are error, negative
# log likelihood and calibration error, and `predict` returns the probability of the second class.

# %%
group = torch.as_tensor(y) > 14
classes = tkrr.compare(x, group, models=["mean", "linear", "tkrr-als"], splits=2, time_limit=600)
print(classes.table().to_string())
