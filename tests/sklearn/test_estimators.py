"""What the estimators do beyond scikit-learn's checks: tables, weights, more rows, transforms, files."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

pd = pytest.importorskip("pandas")
pytest.importorskip("sklearn")

import scipy.stats
from scipy.integrate import trapezoid
from sklearn.base import clone
from sklearn.compose import make_column_transformer
from sklearn.exceptions import DataConversionWarning
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.sklearn import HilbertRegressor, TKRRClassifier, TKRRRegressor
from gpytorch_tkrr.sklearn.transform import TargetTransform

SMALL = {"rank": 3, "num_basis": 6, "num_draws": 20, "num_warmup": 20, "random_state": 0}


@pytest.fixture(scope="module")
def table():
    rng = np.random.default_rng(0)
    X = pd.DataFrame(
        {
            "size": rng.uniform(1, 9, 150),
            "kind": rng.choice(["hut", "house", "castle"], 150),
            "sold": pd.date_range("2022-01-01", periods=150, freq="D"),
            "pool": rng.random(150) > 0.5,
        }
    )
    weekend = X["sold"].dt.day_of_week >= 5
    y = X["size"] + 3 * (X["kind"] == "castle") + X["pool"] + weekend + 0.1 * rng.normal(size=150)
    return X, y


@pytest.mark.parametrize("method", ["als", "gibbs"])
def test_all_kinds_of_columns_count(method, table):
    X, y = table
    model = TKRRRegressor(method=method, **SMALL).fit(X[:120], y[:120])
    assert list(model.feature_names_in_) == list(X.columns) and model.n_features_in_ == 4
    assert model.columns_.names == ["size", "kind", "sold.day", "sold.weekday", "pool"]
    assert model.score(X[120:], y[120:]) > 0.97  # without any of the columns it is below
    _, sd, quantiles = model.predict(X, return_std=True, return_quantiles=[0.1, 0.5, 0.9])
    assert quantiles.shape == (150, 3) and (np.diff(quantiles) > 0).all()
    assert np.allclose(model.sample_y(X, 2000).std(1), sd, rtol=0.15)
    new = X.assign(kind="tent")
    assert (model.predict(new, return_std=True)[1] > sd).all() and model.extrapolates(new).all()


def test_classes_of_any_kind(table):
    X, y = table
    labels = pd.cut(y, [-9, 4, 7, 99], labels=["low", "mid", "high"]).astype(str)
    model = TKRRClassifier(**SMALL).fit(X, labels)
    probabilities = model.predict_proba(X)
    assert probabilities.shape == (150, 3) and np.allclose(probabilities.sum(1), 1) and model.score(X, labels) > 0.9
    picked = probabilities[np.arange(150), np.searchsorted(model.classes_, labels)]
    assert np.allclose(model.log_predictive_density(X, labels), np.log(picked))
    shares = np.stack([(model.sample_y(X, 3000) == name).mean(1) for name in model.classes_], 1)
    assert np.abs(shares - probabilities).max() < 0.05
    model.partial_fit(X[:9], labels[:9])
    assert len(model.models()[0].train_targets) == 159
    later = TKRRClassifier(**SMALL).partial_fit(X, labels == "low", classes=[False, True])
    assert later.classes_.dtype == bool


def test_more_rows_go_on_from_the_last_fit(table):
    X, y = table
    model = TKRRRegressor(**SMALL).fit(X[:100], y[:100])
    before = model.score(X[130:], y[130:])
    model.partial_fit(X[100:130], y[100:130])
    assert len(model.model_.train_targets) == 130 and model.model_.posterior.num_draws == 20
    assert model.score(X[130:], y[130:]) > before - 0.02
    model.partial_fit(X[:2].assign(kind="tent"), y[:2])  # a level that needs another basis: fitted anew
    assert model.columns_.inputs[1].levels == ["castle", "house", "hut", "tent"]
    assert not model.extrapolates(X[:2].assign(kind="tent")).any()


@pytest.mark.filterwarnings("ignore:The chains disagree")  # short ones
def test_new_rows_of_gibbs_replace_the_draws():
    x = torch.rand(120, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.sin(6 * x[:, 0]) + x[:, 1]
    model = tkrr.TKRR(x[:80], y[:80], tkrr_likelihood(), rank=3, num_basis=8)
    tkrr.fit_gibbs(model, num_draws=10, num_warmup=20, num_chains=2, seed=0)
    sweeps = [chain["sweeps"] for chain in model.posterior.resume["chains"]]
    result = tkrr.fit_gibbs(model, new_rows=(x[80:], y[80:]), num_draws=12, num_warmup=10, seed=0)
    assert [chain["sweeps"] for chain in model.posterior.resume["chains"]] == [number + 22 for number in sweeps]
    assert len(model.train_targets) == 120 and 12 <= result.posterior.num_draws <= 24
    assert (model.predict(x).mean - y).abs().mean() < 0.1
    with pytest.raises(ValueError, match="Pass one of them"):
        tkrr.fit_gibbs(model, data=(x, y), new_rows=(x, y))


def tkrr_likelihood():
    import gpytorch

    return gpytorch.likelihoods.GaussianLikelihood()


def test_units_of_targets_do_not_matter(table, tmp_path):
    """GPyTorch's smallest noise, 1e-4, is that of targets of unit variance."""
    X, y = table
    options = {"method": "als", "rank": 2, "num_basis": 6, "random_state": 0}
    one, small = TKRRRegressor(**options).fit(X, y / y.std()), TKRRRegressor(**options).fit(X, 1e-5 * y / y.std())
    small.save(tmp_path / "model.pt")
    for model in (small, tkrr.load(tmp_path / "model.pt")):
        for part, other in zip(one.predict(X, return_std=True), model.predict(X, return_std=True), strict=True):
            assert np.allclose(part, 1e5 * other, rtol=1e-3, atol=1e-3)


def test_weights(table):
    """A row of weight zero is absent; a small weight says that a row is noisy."""
    X, y = table
    x = X[["size"]]
    weights = np.where(np.arange(150) < 100, 1.0, 0.0)
    options = {"method": "als", "rank": 2, "random_state": 0}
    weighted, fewer = TKRRRegressor(**options).fit(x, y, weights), TKRRRegressor(**options).fit(x[:100], y[:100])
    assert np.allclose(weighted.predict(x), fewer.predict(x), rtol=1e-6)
    wrong = y.where(weights > 0, 50.0)
    careful = TKRRRegressor(**options).fit(x, wrong, np.where(weights > 0, 1.0, 1e-6))
    assert np.abs(careful.predict(x) - fewer.predict(x)).mean() < 0.3
    with pytest.raises(tkrr.InputError, match="whole numbers"):
        TKRRClassifier(**SMALL).fit(x, y > 5, weights + 0.5)


def test_hilbert_regressor_is_the_exact_gp_with_categories_and_weights():
    """Against GPyTorch's exact GP with the same hyperparameters, a table of the Hamming kernel, a noise per row."""
    rng = np.random.default_rng(0)
    X = pd.DataFrame({"kind": rng.choice(["hut", "house", "castle"], 120), "size": rng.uniform(1, 9, 120)})
    y = 50 + np.sin(X["size"]) * (1 + (X["kind"] == "castle")) + 0.1 * rng.normal(size=120)
    weights = rng.uniform(0.2, 2, 120).round(2)
    model = HilbertRegressor(tol=1e-4, num_steps=40).fit(X, y, weights)
    new = pd.DataFrame({"size": [2.0, 5.0, 5.0, 5.0], "kind": ["hut", "hut", "castle", "tent"]})[["kind", "size"]]
    mean, sd, quantiles = model.predict(new, return_std=True, return_quantiles=[0.5, 0.975])
    assert np.allclose(quantiles[:, 0], mean) and np.allclose(quantiles[:, 1], mean + 1.959964 * sd)
    assert model.extrapolates(new).tolist() == [False, False, False, True]

    gp = model.model_
    scale, stationary, hamming = gp.covar_module.outputscale, *gp.covar_module.base_kernel.base_kernel.kernels
    with torch.no_grad():
        rows, there = (torch.as_tensor(model.columns_.matrix(part)) for part in (X, new))
        both = torch.cat([rows, there])
        size = (both[:, 1:] - model.shift_[1]) / model.scale_[1]
        differs = (both[:, :1] != both[:, 0]).double()
        covariance = scale * stationary.forward(size, size) * torch.exp(-differs / hamming.lengthscale)
        noise = gp.likelihood.noise
        known = covariance[:120, :120] + (noise / torch.as_tensor(weights)).diag()
        constant = gp.mean_module.constant
        z = (torch.tensor(y.to_list(), dtype=torch.float64) - model.target_shift_) / model.target_scale_ - constant
        gain = torch.linalg.solve(known, covariance[:120, 120:])
        exact = constant + gain.mT @ z
        variance = covariance[120:, 120:].diagonal() - (gain * covariance[:120, 120:]).sum(0) + noise
    assert np.abs(mean - (model.target_shift_ + model.target_scale_ * exact).numpy()).max() < 2e-3
    assert np.abs(sd / (model.target_scale_ * variance.sqrt()).numpy() - 1).max() < 2e-3
    draws = model.sample_y(new, 20_000)
    assert np.abs(draws.mean(1) - mean).max() < 0.03 and np.abs(draws.std(1) / sd - 1).max() < 0.03

    model.partial_fit(X[:5].assign(kind="tent"), y[:5], weights[:5])
    assert not model.extrapolates(new).any() and model.model_.sums.num_rows == 125
    with pytest.raises(tkrr.InputError, match="3 x 40"):
        HilbertRegressor().fit(X.assign(size=np.arange(120) % 40 + 0.0).astype({"size": "category"}), y)


def test_hilbert_regressor_of_two_inputs_is_the_exact_gp():
    """While Adam takes large steps, the sums over the rows stay those of the kernel's functions."""
    rng = np.random.default_rng(0)
    X = rng.uniform(0, 1, (60, 2))
    y = np.sin(6 * X[:, 0]) * X[:, 1] + 0.1 * rng.normal(size=60)
    model = HilbertRegressor(num_steps=6).fit(X, y)
    gp, rows = model.model_, (torch.as_tensor(X) - model.shift_) / model.scale_
    with torch.no_grad():
        covariance = gp.covar_module.base_kernel(rows).to_dense()
        z = (torch.as_tensor(y) - model.target_shift_) / model.target_scale_ - gp.mean_module.constant
        noisy = covariance + gp.likelihood.noise * torch.eye(60, dtype=torch.float64)
        exact = gp.mean_module.constant + covariance @ torch.linalg.solve(noisy, z)
    assert np.abs(model.predict(X) - (model.target_shift_ + model.target_scale_ * exact).numpy()).max() < 0.01 * y.std()


def test_weights_of_the_hilbert_regressor(table):
    X, y = table
    weights = np.where(np.arange(150) < 100, 1.0, 0.0)
    one, fewer = (HilbertRegressor(num_steps=5) for _ in range(2))
    one.fit(X[["size"]], y, weights), fewer.fit(X[:100][["size"]], y[:100])
    assert np.array_equal(one.predict(X[["size"]]), fewer.predict(X[["size"]]))


@pytest.mark.parametrize("estimator", [TKRRRegressor(method="als", rank=2), HilbertRegressor(num_steps=2)])
def test_a_fit_that_fails_changes_nothing(estimator, table):
    X, y = table
    X = X[["size", "kind"]]
    model = clone(estimator).set_params(random_state=0).fit(X[:100], y[:100])
    before, known = model.predict(X), model.columns_
    for call in (model.fit, model.partial_fit):
        for bad_x, bad_y in ((X.assign(kind="tent"), y.where(y.index != 3)), (X.assign(size=np.inf), y)):
            with pytest.raises(ValueError, match=r"NaN|infinity"):
                call(bad_x, bad_y)
    assert model.columns_ == known and np.array_equal(model.predict(X), before)


@pytest.fixture(scope="module")
def outputs(table):
    """Three targets of the table, in units that differ by 1e12, each seen in some rows only."""
    X, y = table
    y = np.stack([1e-6 * y, 5 - 2 * y, 1e6 * (X["size"] - 3)], 1)
    hidden = np.random.default_rng(1).random(y.shape) < 0.4
    return X, y, np.where(hidden, np.nan, y)


def test_several_outputs(outputs, tmp_path):
    X, y, seen = outputs
    hidden = np.isnan(seen)
    model = TKRRRegressor(**{**SMALL, "num_warmup": 60, "num_chains": 1}).fit(X, seen)
    mean, sd, quantiles = model.predict(X, return_std=True, return_quantiles=[0.1, 0.5, 0.9])
    assert mean.shape == sd.shape == y.shape and quantiles.shape == (150, 3, 3) and model.n_outputs_ == 3
    assert (np.diff(quantiles) > 0).all() and 0.9 < (np.abs(mean - y) < 3 * sd).mean()
    assert np.corrcoef(mean[hidden[:, 1], 1], y[hidden[:, 1], 1])[0, 1] > 0.98
    assert model.score(X, y) > 0.95
    assert model.sample_y(X, 7).shape == (150, 3, 7)
    density = model.log_predictive_density(X, seen)
    assert np.array_equal(np.isnan(density), hidden)
    assert np.allclose(np.nanmean(density, 0), scipy.stats.norm(mean, sd).logpdf(y).mean(0), atol=0.5)
    assert model.extrapolates(X.assign(kind="tent")).all() and model.extrapolates(X).shape == (150,)
    model.save(tmp_path / "model.pt")
    assert np.array_equal(tkrr.load(tmp_path / "model.pt").predict(X), mean)
    model.partial_fit(X[:9], y[:9])
    assert model.model_.train_targets.shape == (159, 3)
    with pytest.raises(tkrr.InputError, match="3 output"):
        model.partial_fit(X, y[:, 0])
    with pytest.raises(tkrr.InputError, match="MultiOutputRegressor"):
        TKRRRegressor(method="als").fit(X, y)
    with pytest.raises(tkrr.InputError, match="output 2"):
        TKRRRegressor(**SMALL).fit(X, np.where(np.arange(3) == 2, np.nan, y))
    with pytest.warns(DataConversionWarning, match="column-vector y"):
        column = TKRRRegressor(method="als", rank=2, random_state=0).fit(X, y[:, :1])
    assert column.predict(X).shape == (150,)  # as scikit-learn's own Gaussian process


def test_transforms_of_several_outputs(outputs):
    X, _, seen = outputs
    skewed = np.exp(seen / np.nanstd(seen, 0))
    model = TKRRRegressor(target_transform="log", **SMALL).fit(X, skewed)
    median = model.predict(X)
    assert np.nanmean(np.abs(np.log(median) - np.log(skewed))) < 0.3
    density = model.log_predictive_density(X, skewed)
    same = TKRRRegressor(**SMALL).fit(X, np.log(skewed)).log_predictive_density(X, np.log(skewed))
    assert np.allclose(density, same - np.log(skewed), equal_nan=True)


def test_missing_inputs(table):
    """A missing value of any kind is integrated over its column: against the mean over the training rows."""
    X, y = table
    holes = X.copy()
    rng = np.random.default_rng(0)
    holes["size"] = holes["size"].where(rng.random(150) > 0.1)
    holes["kind"] = holes["kind"].where(rng.random(150) > 0.1, None)
    with pytest.raises(tkrr.InputError, match="missing='integrate'"):
        TKRRRegressor(**SMALL).fit(holes, y)
    model = TKRRRegressor(missing="integrate", **SMALL).fit(holes, y)
    complete = holes.dropna()
    assert model.score(complete, y[complete.index]) > 0.9
    for name in ("size", "kind"):
        row = X.iloc[[7]].assign(**{name: None}).astype({"size": float})
        seen = holes[name].dropna()
        rows = pd.concat([X.iloc[[7]]] * len(seen)).assign(**{name: seen.to_numpy()})
        mean, sd = model.predict(rows, return_std=True)
        (one,), (spread,) = model.predict(row, return_std=True)
        assert abs(one - mean.mean()) < 1e-6 and abs(spread**2 - (sd**2).mean() - mean.var()) < 1e-3 * spread**2
    model.partial_fit(holes[:5], y[:5])
    assert len(model.model_.train_targets) == 155
    arrays = TKRRClassifier(missing="integrate", **SMALL).fit(holes[["size"]].to_numpy(), y > 6)
    assert arrays.score(complete[["size"]].to_numpy(), y[complete.index] > 6) > 0.7
    with pytest.raises(ValueError, match="infinity"):
        model.predict(X.assign(size=np.inf))


def test_the_logarithm_is_for_positive_targets():
    with pytest.raises(tkrr.InputError, match=r"2 of 4 are not, such as -3\. Try 'yeo-johnson'"):
        TargetTransform.learn("log", np.array([1.0, -3.0, 0.0, np.nan]))


def test_yeo_johnson_is_that_of_scipy():
    y = np.random.default_rng(0).gamma(1.0, size=400) - 0.3
    transform = TargetTransform.learn("yeo-johnson", y)
    _, power = scipy.stats.yeojohnson(y / y.std())
    assert abs(transform.power - power) < 1e-3
    assert np.allclose(transform(y), scipy.stats.yeojohnson(y / y.std(), transform.power))
    assert np.allclose(transform.inverse(transform(y)), y)
    step = 1e-6
    slope = (transform(y + step) - transform(y - step)) / (2 * step)
    assert np.allclose(np.log(slope), transform.log_slope(y), atol=1e-5)


@pytest.mark.parametrize("transform", ["log", "yeo-johnson"])
def test_transformed_targets(transform, table):
    X, y = table
    skewed = np.exp(y / 3)
    model = TKRRRegressor(target_transform=transform, method="als", rank=3, random_state=0).fit(X, skewed)
    median, quantiles = model.predict(X[:3], return_quantiles=[0.5])
    assert np.allclose(median, quantiles[:, 0])
    grid = np.linspace(1e-3, 500, 20001)
    density = np.exp(model.log_predictive_density(pd.concat([X[:1]] * len(grid)), grid))
    assert abs(trapezoid(density, grid) - 1) < 1e-3  # a density of y, not of g(y)


def test_files(table, tmp_path):
    X, y = table
    fitted = [
        TKRRRegressor(target_transform="log", **SMALL).fit(X, y),
        TKRRClassifier(**SMALL).fit(X, X["kind"]),
        HilbertRegressor(num_steps=5).fit(X[["size", "kind"]], y),
    ]
    for model in fitted:
        rows = X[list(model.feature_names_in_)]
        model.save(tmp_path / "model.pt")
        loaded, pickled = tkrr.load(tmp_path / "model.pt"), pickle.loads(pickle.dumps(model))
        for other in (loaded, pickled):
            assert (other.predict(rows) == model.predict(rows)).all()
        with pytest.raises(tkrr.InputError, match="holds no rows"):
            loaded.partial_fit(rows, y)
    own = TKRRRegressor(kernel=tkrr.anova_kernel(1), **SMALL).fit(X[["size"]], y)
    with pytest.raises(tkrr.InputError, match="pickle"):
        own.save(tmp_path / "own.pt")


def test_pipeline_and_grid_search(table):
    X, y = table
    columns = make_column_transformer(
        (StandardScaler(), ["size"]), ("passthrough", ["kind", "pool"]), verbose_feature_names_out=False
    ).set_output(transform="pandas")
    pipeline = make_pipeline(columns, TKRRRegressor(method="als", random_state=0))
    search = GridSearchCV(pipeline, {"tkrrregressor__rank": [1, 3]}, cv=2).fit(X, y)
    assert search.best_score_ > 0.8 and clone(search.best_estimator_).get_params()["tkrrregressor__rank"] in (1, 3)


def test_results_are_short_in_print(table):
    X, y = table
    for method in ("als", "gibbs"):
        shown = repr(TKRRRegressor(method=method, **SMALL).fit(X[["size"]], y).result_)
        assert len(shown.splitlines()) == 3 and len(shown) < 500


def test_bad_input(table):
    X, y = table
    with pytest.raises(tkrr.InputError, match="data row 4, column 'size'"):
        TKRRRegressor().fit(X.assign(size=X["size"].where(X.index != 3)), y)
    with pytest.raises(tkrr.InputError, match="method must be"):
        TKRRRegressor(method="magic").fit(X, y)
    with pytest.raises(tkrr.InputError, match="at most 3 inputs"):
        HilbertRegressor().fit(np.random.rand(20, 4), np.random.rand(20))
    with pytest.raises(tkrr.InputError, match="no column 'colour'"):
        TKRRRegressor(categorical=["colour"]).fit(X, y)
    with pytest.raises(tkrr.InputError, match="target_transform must be"):
        TKRRRegressor(target_transform="square").fit(X, y)
    with pytest.raises(tkrr.InputError, match="kernel must be a GPyTorch kernel; got a str"):
        TKRRRegressor(kernel="rbf").fit(X, y)


def test_classes_that_come_later():
    rng = np.random.default_rng(0)
    X, extra = rng.random((90, 1)), rng.random((30, 1))
    first = np.where(X[:, 0] > 0.5, "b", "a")
    model = TKRRClassifier(method="als", rank=2, num_basis=6, random_state=0)
    model.partial_fit(X, first, classes=["a", "b", "c"])
    probabilities = model.predict_proba(X)
    assert (
        probabilities.shape == (90, 3) and (probabilities[:, 2] == 0).all() and (model.predict(X) == first).mean() > 0.9
    )
    model.partial_fit(extra, np.where(extra[:, 0] > 0.5, "b", "a"))  # known classes: the last fit goes on
    assert len(model.models()[0].train_targets) == 120
    model.partial_fit(2 + extra, ["c"] * 30)  # a class without rows so far, outside of the box
    assert (model.predict(2 + extra) == "c").mean() > 0.9
    with pytest.raises(tkrr.InputError, match=r"'d' is none of \['a', 'b', 'c'\]"):
        model.partial_fit(extra, ["d"] * 30)


def test_rows_outside_the_box_are_fitted_anew():
    x = np.linspace(0, 1, 80)[:, None]
    model = TKRRRegressor(method="als", rank=2, num_basis=8, random_state=0).fit(x, np.sin(6 * x[:, 0]))
    model.partial_fit(x + 2, np.sin(6 * (x[:, 0] + 2)))
    assert not model.extrapolates(x + 2).any()
    assert model.score(x + 2, np.sin(6 * (x[:, 0] + 2))) > 0.9
