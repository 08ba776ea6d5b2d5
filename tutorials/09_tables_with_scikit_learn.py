# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Tables with categories and dates, in scikit-learn
#
# After this tutorial you can use the estimators in scikit-learn's pipelines and searches, on tables as they are.
#
# `tkrr.sklearn` has estimators that take a table as it is: numbers, text, booleans, dates. They predict distributions,
# and they work inside pipelines, grid searches and cross-validation. This tutorial makes a table of bicycle rentals
# whose truth is known, and goes through all of these.

# %%
import os
import tempfile
import warnings

import matplotlib.dates as mdates
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from sklearn.compose import ColumnTransformer
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.model_selection import GridSearchCV, KFold, cross_val_score, train_test_split
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler

import gpytorch_tkrr as tkrr

plt.rcParams.update({"figure.dpi": 110, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})
# In every fold some rows lie a little outside the range of the others; `extrapolates` tells which.
warnings.simplefilter("ignore", tkrr.ExtrapolationWarning)

FAST = bool(os.environ.get("TKRR_TUTORIAL_FAST"))  # small settings, for tests
NUM_ROWS = 120 if FAST else 1500
SWEEPS = {"num_draws": 6, "num_warmup": 8, "num_chains": 1} if FAST else {}

# %%
rng = np.random.default_rng(0)
day = pd.Timestamp("2023-01-01") + pd.to_timedelta(np.sort(rng.integers(0, 2 * 365, NUM_ROWS)), unit="D")
season = np.sin(2 * np.pi * (day.day_of_year / 365.25 - 0.3))
weather = rng.choice(["clear", "cloudy", "rain"], NUM_ROWS, p=[0.5, 0.3, 0.2])
station = rng.choice([f"S{number}" for number in range(12)], NUM_ROWS)
popularity = dict(zip(sorted(set(station)), rng.normal(size=12), strict=False))
temperature = 12 + 9 * season + rng.normal(scale=3, size=NUM_ROWS)
wet = (weather == "rain").astype(float)
X = pd.DataFrame({"day": day, "weather": weather, "station": station, "temperature": temperature})
known = 30 + 8 * season + 6 * np.array([popularity[name] for name in station]) - 9 * wet * (day.day_of_week < 5)
y = np.asarray(known + rng.normal(scale=2, size=NUM_ROWS))
X.head()

# %% [markdown]
# ## Fit and predict
#
# Nothing has to be encoded. A category is one mode of the tensor, whatever the number of its levels. A date becomes a
# day count, a season and a weekday.

# %%
train_X, test_X, train_y, test_y = train_test_split(X, y, test_size=0.25, random_state=0)
model = tkrr.sklearn.TKRRRegressor(random_state=0, **SWEEPS).fit(train_X, train_y)
for column in model.columns_.inputs:
    print(f"{column.name}: {column.describe()}")

# %%
prediction, sd, quantiles = model.predict(test_X, return_std=True, return_quantiles=[0.05, 0.95])
inside = np.mean((quantiles[:, 0] <= test_y) & (test_y <= quantiles[:, 1]))
print(f"R^2 {model.score(test_X, test_y):.3f}, 90 % intervals hold {inside:.0%} of the test rows")

# %% [markdown]
# A station that the training rows did not have gets the variance of the prior, and it is flagged.

# %%
new = test_X.head(3).assign(station="opened yesterday")
print("standard deviations:", model.predict(new, return_std=True)[1].round(1), "before:", sd[:3].round(1))
print("extrapolates:", model.extrapolates(new))

# %% [markdown]
# Two years at one station in clear weather, and all stations on one day: lines and dots are the model's means, bands
# and bars its 90 % intervals of new observations, crosses the truth. The small kink at the turn of the year is there
# because the season is a number from 0 (1 January) to 1 (31 December), and the model does not know that its ends meet.

# %%
days = pd.date_range("2023-01-01", "2024-12-30", freq="7D")  # Sundays
wave = np.sin(2 * np.pi * (days.day_of_year / 365.25 - 0.3))
years = pd.DataFrame({"day": days, "weather": "clear", "station": "S0", "temperature": 12 + 9 * wave})
names = sorted(popularity, key=popularity.get)
stations = pd.DataFrame({"day": days[80], "weather": "clear", "station": names, "temperature": 12 + 9 * wave[80]})
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.5), sharey=True)
mean, interval = model.predict(years, return_quantiles=[0.05, 0.95])
left.fill_between(days, *interval.T, alpha=0.3, label="90 % interval")
left.plot(days, mean, label="mean")
left.plot(days, 30 + 8 * wave + 6 * popularity["S0"], "kx", markersize=4, label="truth")
left.set(title="station S0, clear Sundays", xlabel="day", ylabel="rentals per day")
left.xaxis.set_major_locator(mdates.MonthLocator(bymonth=(1, 7)))
left.xaxis.set_major_formatter(mdates.DateFormatter("%b %Y"))
left.legend(loc="lower center", fontsize=8, ncols=3)
mean, interval = model.predict(stations, return_quantiles=[0.05, 0.95])
right.errorbar(names, mean, yerr=np.abs(interval.T - mean), fmt="o", capsize=3)
right.plot(names, [30 + 8 * wave[80] + 6 * popularity[name] for name in names], "kx")
right.set(title=f"all stations, {days[80]:%d %B %Y}", xlabel="station")
figure.tight_layout()
plt.show()

# %% [markdown]
# ## A pipeline, and a grid search over the rank
#
# Inside a `ColumnTransformer` columns can be scaled, dropped or replaced; `set_output` keeps their names and types. The
# score is the mean log predictive density, which judges means and intervals together.


# %%
def log_density(estimator, X, y):
    rows = estimator[:-1].transform(X)
    return float(estimator[-1].log_predictive_density(rows, y).mean())


columns = ColumnTransformer(
    [("scale", StandardScaler(), ["temperature"]), ("keep", "passthrough", ["day", "weather", "station"])],
    verbose_feature_names_out=False,
).set_output(transform="pandas")
pipeline = Pipeline([("columns", columns), ("model", tkrr.sklearn.TKRRRegressor(method="als", random_state=0))])
grid = {"model__rank": [1, 2] if FAST else [1, 2, 4, 8]}
search = GridSearchCV(pipeline, grid, scoring=log_density, cv=KFold(3, shuffle=True, random_state=0))
search.fit(train_X, train_y)
print(
    pd.DataFrame(search.cv_results_)[["param_model__rank", "mean_test_score", "mean_fit_time"]].to_string(index=False)
)

# %% [markdown]
# ## Beside boosted trees

# %%
trees = HistGradientBoostingRegressor(categorical_features="from_dtype", random_state=0)
dates = X["day"].dt
numbers = X.assign(day=dates.year * 366 + dates.day_of_year, season=dates.day_of_year, weekday=dates.day_of_week)
numbers = numbers.astype({"weather": "category", "station": "category"})
folds = KFold(3, shuffle=True, random_state=1)
for name, estimator, table in (("T-KRR", model, X), ("boosting", trees, numbers)):
    scores = cross_val_score(estimator, table, y, cv=folds, scoring="neg_root_mean_squared_error")
    print(f"{name:>8}: RMSE {-scores.mean():.2f} (noise alone: 2.00)")

# %% [markdown]
# ## Several outputs, gaps in the inputs
#
# Rentals and returns are counted at the same time, but returns were written down on half of the days only, and the
# thermometer failed now and then. Targets with two columns are one model, which learns what the outputs have in common;
# `missing="integrate"` averages over what an input may have been.

# %%
both = np.stack([y, 5 + 0.9 * known + rng.normal(scale=2, size=NUM_ROWS)], axis=1)
seen = np.where(rng.random(both.shape) < [0.0, 0.5], np.nan, both)
gaps = X.assign(temperature=X["temperature"].where(rng.random(NUM_ROWS) > 0.1))
two = tkrr.sklearn.TKRRRegressor(missing="integrate", random_state=0, **SWEEPS).fit(gaps, seen)
hidden = np.isnan(seen[:, 1])
error = np.sqrt(np.mean((two.predict(gaps)[hidden, 1] - both[hidden, 1]) ** 2))
print(f"returns that were not written down: RMSE {error:.2f} (noise alone: 2.00)")

# %% [markdown]
# ## More rows, and a file
#
# `partial_fit` appends rows and lets the chain go on from where it stood. `save` writes a file that `tkrr.load` reads
# without executing anything in it; `gpytorch-tkrr fit` and `predict` use the same files.

# %%
model.partial_fit(test_X, test_y)
with tempfile.TemporaryDirectory() as folder:
    model.save(f"{folder}/rentals.pt")
    loaded = tkrr.load(f"{folder}/rentals.pt")
print("the same predictions:", np.allclose(loaded.predict(test_X), model.predict(test_X)))
