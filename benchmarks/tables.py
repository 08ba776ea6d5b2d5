"""Tables as people have them: categories as modes beside one-hot coding and boosting, and several outputs.

Each category is one mode whose functions are indicators of its levels, or one mode of two values for each level
(one-hot coding; levels of few rows are joined). Boosting has native categories. All models see the same training rows,
and both of ours take the same sweeps. Flights have heavy tails: scores of boosting take Student noise that is fitted to
rows it has not seen.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import gpytorch
import numpy as np
import pandas as pd
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import IndexKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    GaussianLikelihood,
    MultitaskGaussianLikelihood,
    StudentTLikelihood,
)
from scipy import stats
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from torch import Tensor

import gpytorch_tkrr as tkrr

from . import datasets
from .harness import Report

#: One-hot coding joins levels with fewer training rows than this; boosting takes so many levels at most.
FEW_ROWS, MAX_LEVELS = 20, 254

NUM_OUTPUTS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=20_000, help="training rows, drawn at random")
    parser.add_argument("--test-rows", type=int, default=10_000, help="test rows, drawn at random from the others")
    parser.add_argument("--rank", type=int, default=12, help="R of our models")
    parser.add_argument("--sweeps", type=int, default=40, help="warm-up sweeps, and as many that are kept")
    parser.add_argument("--output-rows", type=int, default=300, help="training rows of the problem with 8 outputs")
    parser.add_argument("--output-seeds", type=int, default=3, help="how many such problems")
    parser.add_argument("--exact-rows", type=int, default=150, help="of which the exact multitask GP gets so many")
    parser.add_argument("--seed", type=int, default=0)
    datasets.add_arguments(parser)


def run(args: argparse.Namespace) -> Report:
    report = Report(
        "tables",
        f"Categories: {args.rows} training and {args.test_rows} test rows, rank {args.rank}, {args.sweeps} + "
        f"{args.sweeps} sweeps (flights: error = mean absolute error, in standard deviations of the delay; adult: "
        f"misclassified). Outputs: {NUM_OUTPUTS} of {args.output_rows} rows, half of the targets missing (error = RMSE "
        "of f, both in standard deviations of each output)",
    )
    for name in ("flights", "adult"):
        report.attempt(name, partial(compare_codings, report, name, args))
    report.attempt("outputs", lambda: compare_outputs(report, args))
    return report


# Categories


def compare_codings(report: Report, name: str, args: argparse.Namespace) -> None:
    """Rows of one table: modes, one-hot coding, boosting."""
    table, source = datasets.load_table(name, data_dir=args.data_dir)
    order = np.random.default_rng(args.seed).permutation(len(table))
    train, test = (table.iloc[order[a:b]] for a, b in ((0, args.rows), (args.rows, args.rows + args.test_rows)))
    target, is_class = table.columns[-1], name == "adult"
    categories = [column for column in table.columns[:-1] if table[column].dtype.kind not in "biuf"]
    y, y_test = (torch.tensor(part[target].to_numpy(dtype=float)) for part in (train, test))
    center, unit = (0.0, 1.0) if is_class else (y.mean(), y.std())
    y, y_test = (y - center) / unit, (y_test - center) / unit
    models: dict[str, Callable[[], tuple[Callable[[], tuple[float, float]], float, int]]] = {
        "modes": lambda: _fit(train, test, categories, y, y_test, is_class, args),
        "one-hot": lambda: _fit(*_one_hot(train, test, categories), [], y, y_test, is_class, args),
        "boosting": lambda: _boost(train, test, categories, y, y_test, is_class, args.seed),
    }
    for model, fit in models.items():
        score, seconds, size = fit()
        error, nll = score()
        report.add(data=name, model=model, error=error, nll=nll, seconds=seconds, size=size)
    report.notes.append(f"{name}: {source}; {', '.join(f'{c} {table[c].nunique()}' for c in categories)} levels.")


def _codes(train: pd.DataFrame, test: pd.DataFrame, categories: list[str]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Categories as numbers; levels that the training rows do not have get the number after the last."""
    train, test = train.iloc[:, :-1].copy(), test.iloc[:, :-1].copy()
    for column in categories:
        levels = pd.Index(train[column].unique())
        train[column], test[column] = levels.get_indexer(train[column]), levels.get_indexer(test[column])
        test.loc[test[column] < 0, column] = len(levels)
    return train.astype(float), test.astype(float)


def _one_hot(train: pd.DataFrame, test: pd.DataFrame, categories: list[str]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A column of zeros and ones for each level with enough training rows; all others have zeros."""
    parts: list[list[pd.DataFrame]] = [[], []]
    for column in categories:
        counts = train[column].value_counts()
        levels = counts[counts >= FEW_ROWS].index
        for part, rows in zip(parts, (train, test), strict=True):
            part.append(pd.DataFrame({f"{column} {level}": rows[column].eq(level).astype(float) for level in levels}))
    numbers = [rows.drop(columns=categories).iloc[:, :-1] for rows in (train, test)]
    targets = [rows.iloc[:, -1:] for rows in (train, test)]
    coded = [pd.concat([n, *p, t], axis=1) for n, p, t in zip(numbers, parts, targets, strict=True)]
    return coded[0], coded[1]


def _fit(
    train: pd.DataFrame,
    test: pd.DataFrame,
    categories: list[str],
    y: Tensor,
    y_test: Tensor,
    is_class: bool,
    args: argparse.Namespace,
) -> tuple[Callable[[], tuple[float, float]], float, int]:
    """Our model; its score, the seconds of the fit, and the number of weights."""
    x, x_test = (torch.tensor(part.to_numpy()) for part in _codes(train, test, categories))
    columns = list(train.columns)
    likelihood = (BernoulliLikelihood() if is_class else StudentTLikelihood()).double()
    start = time.perf_counter()
    model = tkrr.TKRR(x, y, likelihood, rank=args.rank, categorical=[columns.index(name) for name in categories])
    tkrr.fit_gibbs(model, num_warmup=args.sweeps, num_draws=args.sweeps, seed=args.seed)
    seconds = time.perf_counter() - start

    @torch.no_grad()
    def score() -> tuple[float, float]:
        prediction = model.predict(x_test)
        nll = -float(prediction.log_prob(y_test).mean())
        if is_class:
            return float(((prediction.mean > 0.5) != (y_test > 0.5)).double().mean()), nll
        return float((prediction.quantile(0.5) - y_test).abs().mean()), nll

    return score, seconds, sum(factor[0].numel() for factor in model.posterior.factors)


def _boost(
    train: pd.DataFrame,
    test: pd.DataFrame,
    categories: list[str],
    y: Tensor,
    y_test: Tensor,
    is_class: bool,
    seed: int,
) -> tuple[Callable[[], tuple[float, float]], float, int]:
    """Gradient boosting with native categories; rare levels beyond its limit are joined."""
    train, test = train.copy(), test.copy()
    for column in categories:
        frequent = train[column].value_counts().index[: MAX_LEVELS - 1]
        for rows in (train, test):
            rows[column] = rows[column].where(rows[column].isin(frequent), "other")
    x, x_test = _codes(train, test, categories)
    columns = list(x.columns)
    chosen = [columns.index(name) for name in categories]
    start = time.perf_counter()
    if is_class:
        classifier = HistGradientBoostingClassifier(categorical_features=chosen, early_stopping=True, random_state=seed)
        classifier.fit(x.to_numpy(), y.numpy())
        seconds = time.perf_counter() - start

        def score_classes() -> tuple[float, float]:
            p = classifier.predict_proba(x_test.to_numpy())[:, 1]
            truth = y_test.numpy() > 0.5
            return float(((p > 0.5) != truth).mean()), float(-np.log(np.where(truth, p, 1 - p)).mean())

        return score_classes, seconds, classifier.n_iter_ * 31
    regressor = HistGradientBoostingRegressor(
        loss="absolute_error", categorical_features=chosen, early_stopping=True, random_state=seed
    )
    held_out = np.arange(len(x)) % 10 == 0  # for the distribution of its errors
    regressor.fit(x[~held_out].to_numpy(), y.numpy()[~held_out])
    parameters = stats.t.fit(y.numpy()[held_out] - regressor.predict(x[held_out].to_numpy()))
    seconds = time.perf_counter() - start

    def score_numbers() -> tuple[float, float]:
        away = y_test.numpy() - regressor.predict(x_test.to_numpy())
        return float(np.abs(away).mean()), float(-stats.t.logpdf(away, *parameters).mean())

    return score_numbers, seconds, regressor.n_iter_ * 31


# Outputs


def make_outputs(num_rows: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Eight mixtures of three functions of four inputs, with noise of a fifth of their standard deviation."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(num_rows, 4, generator=generator, dtype=torch.float64)
    latent = torch.stack(
        [torch.sin(5 * x[:, 0]) * x[:, 1], torch.cos(4 * x[:, 1] + 2 * x[:, 2]), 3 * x[:, 2] ** 2 - x[:, 3]], -1
    )
    f = latent @ torch.randn(3, NUM_OUTPUTS, generator=generator, dtype=torch.float64)
    f = f / f.std(0)
    return x, f, f + 0.2 * torch.randn(f.shape, generator=generator, dtype=torch.float64)


def compare_outputs(report: Report, args: argparse.Namespace) -> None:
    """Rows of the problem with eight outputs, means over several problems."""
    scores: dict[str, list[tuple[float, float, float]]] = {}
    for seed in range(args.seed, args.seed + args.output_seeds):
        x, f, y = make_outputs(args.output_rows + 500, seed)
        observed = torch.rand(y.shape, generator=torch.Generator().manual_seed(seed)) < 0.5
        y_train = torch.where(observed, y, torch.nan)[: args.output_rows]
        test = slice(args.output_rows, None)
        for name, fit in (("outputs as a mode", _joint), ("independent", _independent), ("exact multitask GP", _exact)):
            start = time.perf_counter()
            predict = fit(x[: args.output_rows], y_train, args)
            seconds = time.perf_counter() - start
            mean, log_prob = predict(x[test], y[test])
            rmse = float((mean - f[test]).square().mean().sqrt())
            scores.setdefault(name, []).append((rmse, -float(log_prob.mean()), seconds))
    for name, values in scores.items():
        error, nll, seconds = np.mean(values, axis=0).tolist()
        report.add(data="outputs", model=name, error=error, nll=nll, seconds=seconds)
    report.notes.append(
        f"outputs: means of {args.output_seeds} problems; the exact GP (RBF kernel, IndexKernel of rank 3) sees the "
        f"first {args.exact_rows} of the rows."
    )


Predict = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def _joint(x: Tensor, y: Tensor, args: argparse.Namespace) -> Predict:
    model = tkrr.MultioutputTKRR(x, y, MultitaskGaussianLikelihood(NUM_OUTPUTS).double(), rank=args.rank)
    tkrr.fit_gibbs(model, num_warmup=100, num_draws=100, seed=args.seed)
    return lambda x, y: _scores(model.predict(x), y)


def _independent(x: Tensor, y: Tensor, args: argparse.Namespace) -> Predict:
    models = []
    for t in range(NUM_OUTPUTS):
        seen = ~y[:, t].isnan()
        model = tkrr.TKRR(x[seen], y[seen, t], GaussianLikelihood().double(), rank=args.rank)
        tkrr.fit_gibbs(model, num_warmup=100, num_draws=100, seed=args.seed)
        models.append(model)

    def predict(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        parts = [_scores(model.predict(x), y[:, t]) for t, model in enumerate(models)]
        return torch.stack([mean for mean, _ in parts], -1), torch.stack([density for _, density in parts], -1)

    return predict


def _scores(prediction: tkrr.Prediction, y: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return prediction.mean, prediction.log_prob(y)


class _HadamardGP(gpytorch.models.ExactGP):
    """GPyTorch's multitask GP of a long table: the last column is the task."""

    def __init__(self, x: Tensor, y: Tensor, likelihood: GaussianLikelihood):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = ScaleKernel(RBFKernel(ard_num_dims=4, active_dims=(0, 1, 2, 3)))
        self.tasks = IndexKernel(NUM_OUTPUTS, rank=3)

    def forward(self, x: Tensor) -> MultivariateNormal:
        task = x[..., -1:].long()
        return MultivariateNormal(self.mean_module(x), self.covar_module(x).mul(self.tasks(task)))


def _exact(x: Tensor, y: Tensor, args: argparse.Namespace) -> Predict:
    torch.manual_seed(args.seed)
    x, y = x[: args.exact_rows], y[: args.exact_rows]
    row, task = (~y.isnan()).nonzero(as_tuple=True)
    likelihood = GaussianLikelihood().double()
    model = _HadamardGP(torch.cat([x[row], task.unsqueeze(-1).double()], -1), y[row, task], likelihood).double()
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        loss = -objective(model(*model.train_inputs), model.train_targets)
        loss.backward()
        optimizer.step()
    model.eval()

    @torch.no_grad()
    def predict(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        tasks = torch.arange(NUM_OUTPUTS, dtype=x.dtype)
        table = torch.cat([x.repeat_interleave(NUM_OUTPUTS, 0), tasks.repeat(len(x)).unsqueeze(-1)], -1)
        both = [(d.mean, d.variance) for d in (likelihood(model(part)) for part in table.split(800))]
        mean, variance = (torch.cat(parts).reshape(y.shape) for parts in zip(*both, strict=True))
        return mean, torch.distributions.Normal(mean, variance.sqrt()).log_prob(y)

    return predict
