"""Which model for my data? All of them, on the same splits."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..data.whole_file import whole_file
from ..errors import InputError
from ..inference.noise_choice import make_noise
from ..tables.task import Task, TaskData, check_data

# isort: off
# They register their models, in the order of the table.
from . import baselines, gp_contenders, additive, kernel_machines, tkrr_contenders  # noqa: F401

# isort: on
from .contender import CONTENDERS
from .process import Isolation, Outcome, call, machine_facts
from .report import html_page, overview_figure, predictions_figure
from .trial import Split, Trial, as_trial, run_trial

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

#: Fewer rows are not split into training and test rows.
MIN_ROWS = 20

#: Imported once, not in the process of every model.
PRELOAD = ("sklearn.linear_model", "sklearn.ensemble")

#: Scores of each task, the way they are written.
SCORES: dict[Task, dict[str, str]] = {
    "regression": {"rmse": "RMSE", "nlpd": "NLPD", "coverage": "95 % coverage", "crps": "CRPS"},
    "classification": {"error": "error", "nll": "NLL", "calibration_error": "calibration error"},
}

_COSTS = {
    "fit_seconds": "fit, s",
    "predict_seconds": "predict, s",
    "memory": "memory, MB",
    "num_parameters": "parameters",
}

Model = Any  # an object with `fit` and `predict`


@dataclass(repr=False)
class Comparison:
    """
    What :func:`compare` found.

    :param title: What the data are.
    :param task: Regression or classification.
    :param trials: One for each model and split.
    :param facts: Rows, inputs, splits, limits, and the machine.
    :param notes: Name of a model -> how it was trained.

    Example:
        >>> import torch, gpytorch_tkrr as tkrr
        >>> x = torch.rand(100, 2)
        >>> result = tkrr.compare(x, x[:, 0] + x[:, 1], models=["mean", "linear"], splits=2, isolate=False)
        >>> list(result.table().columns[:4])
        ['RMSE', 'NLPD', '95 % coverage', 'CRPS']
        >>> result.scores().shape[0]  # a row for each model and split
        4
        >>> len(result.plot().axes)  # two scores against training time, and the calibration curve
        3
    """

    title: str
    task: Task
    trials: list[Trial]
    facts: dict[str, Any]
    notes: dict[str, str]

    def __repr__(self) -> str:
        models = list(dict.fromkeys(trial.model for trial in self.trials))
        done = sum(trial.status == "done" for trial in self.trials)
        return (
            f"Comparison of {len(models)} models, {self.task}: {self.title}\n"
            f"{done} of {len(self.trials)} trials done: {', '.join(models)}\n"
            "print(result) or result.table() shows the scores, result.write(folder) a report."
        )

    @property
    def has_failed(self) -> bool:
        """Whether most models have no score, of those that are made for such data."""
        statuses: dict[str, set[str]] = {}
        for trial in self.trials:
            statuses.setdefault(trial.model, set()).add(trial.status)
        fitting = [found for found in statuses.values() if found != {"not applicable"}]
        return sum("done" not in found for found in fitting) * 2 > len(fitting) or not fitting

    def __str__(self) -> str:
        return "\n".join([self.title, "", self.table().to_string(), "", *_LEGEND[self.task], *self.remarks()])

    @property
    def is_interrupted(self) -> bool:
        """Whether Ctrl-C has ended the comparison before all models were done."""
        return any(trial.status == "interrupted" for trial in self.trials)

    def scores(self) -> DataFrame:
        """All numbers: a row for each model and split."""
        import pandas as pd

        rows = [
            {
                "model": trial.model,
                "split": trial.split,
                "status": trial.status,
                **{name: trial.scores.get(name) for name in SCORES[self.task]},
                **{name: getattr(trial, name) for name in _COSTS},
            }
            for trial in self.trials
        ]
        return pd.DataFrame(rows)

    def table(self) -> DataFrame:
        """
        A row for each model: mean ± standard deviation over splits, the best score of each column with an asterisk, or
        several where they are equal. Where a model's training rows have decided something (the noise of T-KRR), the
        column "chosen" says what.

        Coverage is best where it is nearest to 95 %. Means are over the splits on which a model came to an end.
        """
        import pandas as pd

        head, *rows = self._cells()
        return pd.DataFrame(rows, columns=head).set_index("model")

    def plot(self) -> Figure:
        """Scores against training time, and the calibration curve."""
        return overview_figure(self.trials, self.task, SCORES[self.task])

    def plot_predictions(self) -> Figure:
        """Predictions against the actual values, a panel for each model."""
        return predictions_figure(self.trials, self.task)

    def remarks(self) -> list[str]:
        """How each model was trained, what it chose, and what prevented those that have no scores."""
        lines = [f"{name}: {note}" for name, note in self.notes.items() if note]
        lines += [f"{trial.model}: {trial.remark}" for trial in self.trials if trial.remark]
        lines += [f"{trial.model}: {trial.status}. {trial.message}" for trial in self.trials if trial.status != "done"]
        return list(dict.fromkeys(lines))

    def warnings(self) -> list[str]:
        """What was warned of while the models were trained, each once."""
        return list(dict.fromkeys(f"{trial.model}: {text}" for trial in self.trials for text in trial.warnings))

    def write(self, directory: str | Path, *, overwrite: bool = False) -> list[Path]:
        """
        Write ``report.html``, a page that needs no other file, and ``results.json``.

        :param directory: Made if it does not exist.
        :param overwrite: Whether files of these names may be replaced.
        :return: Both paths.
        """
        paths = check_output(directory, overwrite=overwrite)
        Path(directory).mkdir(parents=True, exist_ok=True)
        facts = ", ".join(f"{key} {value}" for key, value in self.facts.items() if value is not None)
        figures = [("Accuracy, time and calibration", self.plot()), ("Predictions", self.plot_predictions())]
        page = html_page(
            self.title, facts, self._cells(), [*_LEGEND[self.task], *self.remarks(), *self.warnings()], figures
        )
        for path, text in zip(paths, (page, self._json()), strict=True):
            with whole_file(path) as part:
                part.write_text(text, encoding="utf-8")
        return paths

    def _json(self) -> str:
        trials = []
        for trial in self.trials:
            content = asdict(trial)
            del content["prediction"]
            trials.append(content)
        content = {"title": self.title, "task": self.task, "facts": self.facts, "notes": self.notes, "trials": trials}
        return json.dumps(content, indent=2) + "\n"

    def _cells(self) -> list[list[str]]:
        names = list(dict.fromkeys(trial.model for trial in self.trials))
        columns = {**SCORES[self.task], **_COSTS}
        values = {name: {column: self._values(name, column) for column in columns} for name in names}
        best: set[tuple[str, str]] = set()
        for column in SCORES[self.task]:
            means = {name: fmean(values[name][column]) for name in names if values[name][column]}
            losses = {name: abs(mean - 0.95) if column == "coverage" else mean for name, mean in means.items()}
            least = min(losses.values(), default=math.inf)
            best |= {(name, column) for name, loss in losses.items() if math.isclose(loss, least, rel_tol=1e-9)}
        chosen = {name: self._chosen(name) for name in names}
        last = ["chosen", "status"] if any(chosen.values()) else ["status"]
        rows = [["model", *columns.values(), *last]]
        for name in names:
            cells = [
                _format(column, values[name][column]) + (" *" if (name, column) in best else "") for column in columns
            ]
            rows.append([name, *cells, *[chosen[name], self._status(name)][-len(last) :]])
        return rows

    def _chosen(self, name: str) -> str:
        found = [trial.chosen for trial in self.trials if trial.model == name and trial.chosen]
        counts = {each: found.count(each) for each in dict.fromkeys(found)}
        if len(counts) == 1:
            return found[0]
        return ", ".join(f"{each} ({count} of {len(found)})" for each, count in counts.items())

    def _values(self, name: str, column: str) -> list[float]:
        done = [trial for trial in self.trials if trial.model == name and trial.status == "done"]
        values = [trial.scores.get(column) if column in SCORES[self.task] else getattr(trial, column) for trial in done]
        return [value for value in values if value is not None]

    def _status(self, name: str) -> str:
        statuses = [trial.status for trial in self.trials if trial.model == name]
        missing = [status for status in statuses if status != "done"]
        if not missing:
            return ""
        return missing[0] if len(missing) == len(statuses) else f"{missing[0]} ({len(missing)} of {len(statuses)})"


_LEGEND: dict[Task, list[str]] = {
    "regression": [
        "RMSE and CRPS (continuous ranked probability score) are in the units of the target; NLPD is the mean negative "
        "log predictive density. Lower is better. Coverage: share of test targets inside the central 95 % interval.",
    ],
    "classification": [
        "error: share of wrong classes. NLL: mean negative log likelihood. Calibration error: mean distance between "
        "predicted probability and observed frequency, over ten bins. Lower is better.",
    ],
}
_LEGEND = {
    task: [
        *lines,
        "± is the standard deviation over splits; * marks the best mean. Memory is the peak beyond that of the process "
        "before training. Parameters: weights and hyperparameters that were trained.",
    ]
    for task, lines in _LEGEND.items()
}


def _format(column: str, values: Sequence[float]) -> str:
    if not values:
        return ""
    mean, spread = fmean(values), stdev(values) if len(values) > 1 else None
    if column == "num_parameters":
        return f"{mean:.0f}"
    if column == "memory":
        return f"{mean / 1e6:.0f}"
    if column == "coverage":
        return f"{mean:.1%}" + ("" if spread is None else f" ± {100 * spread:.1f}")
    if column.endswith("seconds"):
        return f"{mean:.2f}"
    digits = min(max(0, 3 - math.floor(math.log10(abs(mean)))), 4) if mean else 3
    return f"{mean:.{digits}f}" + ("" if spread is None else f" ± {spread:.{digits}f}")


def check_output(directory: str | Path, *, overwrite: bool) -> list[Path]:
    """
    The files that a comparison writes; FileExistsError if they may not be replaced.

    :param directory: The folder; it need not exist.
    :param overwrite: Whether files may be replaced.
    """
    directory = Path(directory)
    if directory.exists() and not directory.is_dir():
        raise NotADirectoryError(f"{directory} is a file; the report needs a folder.")
    paths = [directory / "report.html", directory / "results.json"]
    for path in paths:
        if path.exists() and not overwrite:
            raise FileExistsError(f"{path} exists already. Choose another folder, or overwrite it (--force).")
    return paths


def compare(
    x: Any,
    y: Any,
    *,
    models: Iterable[str | Model] | Mapping[str, Model] | None = None,
    task: Task | None = None,
    train_fraction: float = 0.8,
    splits: int = 3,
    max_train: int | None = None,
    max_test: int = 10_000,
    seed: int = 0,
    time_limit: float | None = 300.0,
    memory_limit: int | None = None,
    isolate: bool = True,
    progress: bool = False,
    noise: str = "auto",
    title: str = "Comparison of models",
) -> Comparison:
    """
    Train and score models on random splits of the same data.

    A model of your own is an object with `fit(x, y)` and `predict(x)`: tensors in, float64, in the units of the data;
    `predict` returns means and standard deviations of new observations, or means alone, or for classification the
    probability of class 1, or of each class `(n, K)`. It is copied for every split. Regressors of scikit-learn can be
    used as they are, and so can classifiers that have `predict_proba`. An attribute `name` is shown in the table,
    `num_parameters` as well.

    A model that raises, crashes, or exceeds a limit is reported as such; the others go on. After Ctrl-C the result
    holds what was finished (`result.is_interrupted`).

    Categories of a table (text, pandas' categorical type) are one column of level numbers for the models that know them
    (T-KRR, boosting), and a column of zeros and ones for each level for all others, your own ones included. Dates
    become numbers.

    :param x: Inputs `(N, D)`: a tensor, an array, or a DataFrame.
    :param y: Targets `(N,)`; for classification values of any kind.
    :param models: Names (see :data:`gpytorch_tkrr.comparison.contender.CONTENDERS`) and objects, or name -> object.
        By default all that are known.
    :param task: "regression" or "classification"; by default classification if `y` has two values or is not a number.
    :param train_fraction: Share of the rows used for training.
    :param splits: Number of random splits.
    :param max_train: Largest number of training rows, drawn at random.
    :param max_test: Largest number of test rows, drawn at random.
    :param seed: Seed of splits and models.
    :param time_limit: Seconds for each model and split; None for no limit.
    :param memory_limit: Bytes that a model may allocate; None for no limit. Linux only.
    :param isolate: Whether each model runs in its own process. If not, there are no limits and no peak memory.
    :param progress: Whether to show a progress bar for each model, and a line when it is done.
    :param noise: The noise of "T-KRR, Bayesian" in a regression: "gaussian", "student", "by-inputs" (with Student
        tails), "skewed" (by inputs, too), or "auto": chosen in each split with held-out training rows, see
        :func:`~gpytorch_tkrr.choose_noise`; the table shows the choice, the remarks its reason.
    :param title: What the data are, for the report.

    Example:
        >>> import torch
        >>> import gpytorch_tkrr as tkrr
        >>> class Nearest:
        ...     name = "nearest neighbour"
        ...     def fit(self, x, y):
        ...         self.x, self.y = x, y
        ...     def predict(self, x):
        ...         return self.y[torch.cdist(x, self.x).argmin(1)]
        >>> x = torch.rand(100, 2)
        >>> result = tkrr.compare(x, torch.sin(6 * x[:, 0]), models=["mean", Nearest()], splits=2, isolate=False)
        >>> list(result.table().index)
        ['mean', 'nearest neighbour']
        >>> result.table().loc["nearest neighbour", "RMSE"].endswith("*")
        True
    """
    data = check_data(x, y, task, min_rows=MIN_ROWS)
    if not 0 < train_fraction < 1 or splits < 1 or max_test < 1 or (max_train is not None and max_train < 2):
        raise InputError(
            "train_fraction must lie between 0 and 1, splits and max_test must be at least 1, max_train at least 2; "
            f"got {train_fraction}, {splits}, {max_test} and {max_train}."
        )
    for name, limit in (("time_limit", time_limit), ("memory_limit", memory_limit)):
        if limit is not None and not limit > 0:
            raise InputError(f"{name} must be positive; got {limit:g}.")
    if noise != "auto":
        make_noise(noise)  # a wrong name is found before the work
    contenders = _named(models, data, seed, progress, noise)
    expanded = torch.as_tensor(data.columns.expand(data.x.numpy()))
    trials: list[Trial] = []
    rows = list(_split_rows(len(data.y), train_fraction, splits, max_train, max_test, seed))
    num_threads = torch.get_num_threads()
    try:
        with _runner(isolate, time_limit, memory_limit) as run:
            for name, model in contenders.items():
                for number, (train, test) in enumerate(rows, 1):
                    x = data.x if getattr(model, "knows_levels", False) else expanded
                    split = Split(x[train], data.y[train], x[test], data.y[test])
                    trial = as_trial(
                        run(run_trial, name, copy.deepcopy(model), data.task, number, split, num_threads), name, number
                    )
                    trial.memory = trial.memory if isolate else None
                    trials.append(trial)
                    if progress:
                        print(_line(trial, data.task, len(rows)), flush=True)
    except KeyboardInterrupt:
        done = {(trial.model, trial.split) for trial in trials}
        left = [(name, number) for name in contenders for number in range(1, splits + 1) if (name, number) not in done]
        trials += [Trial(name, number, "interrupted") for name, number in left]
    facts = {
        "rows": len(data.y),
        "inputs": data.x.shape[1],
        "categories": len(data.columns.categories) or None,
        "classes": None if data.classes is None else ", ".join(data.classes),
        "training rows": len(rows[0][0]),
        "test rows": len(rows[0][1]),
        "splits": splits,
        "seed": seed,
        "time limit, s": time_limit if isolate else None,
        **machine_facts(),
    }
    notes = {name: getattr(model, "note", "") for name, model in contenders.items()}
    return Comparison(title, data.task, trials, facts, notes)


def _named(
    models: Iterable[str | Model] | Mapping[str, Model] | None, data: TaskData, seed: int, progress: bool, noise: str
) -> dict[str, Model]:
    """Name -> object."""
    if models is None:
        models = [name for name, maker in CONTENDERS.items() if getattr(maker, "is_default", True)]
    pairs = models.items() if isinstance(models, Mapping) else ((None, model) for model in models)
    named: dict[str, Model] = {}
    for name, model in pairs:
        if isinstance(model, str):
            if model not in CONTENDERS:
                raise InputError(f"There is no model {model!r}; known are {', '.join(CONTENDERS)}.")
            model = CONTENDERS[model](
                task=data.task,
                seed=seed,
                progress=progress,
                num_classes=len(data.classes or "01"),
                categories=data.columns.categories,
                noise=noise,
            )
        elif not (callable(getattr(model, "fit", None)) and callable(getattr(model, "predict", None))):
            raise InputError(f"A model needs the methods fit and predict; {type(model).__name__} lacks them.")
        name = name or getattr(model, "name", None) or getattr(model, "title", None) or type(model).__name__
        if name in named:
            raise InputError(f"Two models are called {name!r}. Give one of them another `name`.")
        named[name] = model
    if not named:
        raise InputError("There are no models to compare.")
    return named


def _split_rows(
    num_rows: int, train_fraction: float, splits: int, max_train: int | None, max_test: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    num_train = min(max(round(train_fraction * num_rows), 2), num_rows - 1)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(splits):
        order = torch.randperm(num_rows, generator=generator)
        yield order[:num_train][:max_train], order[num_train:][:max_test]


@contextmanager
def _runner(isolate: bool, time_limit: float | None, memory_limit: int | None) -> Iterator[Callable[..., Outcome]]:
    if not isolate:
        yield call
        return
    with Isolation(time_limit, memory_limit, preload=PRELOAD) as isolation:
        yield isolation.call


def _line(trial: Trial, task: Task, splits: int) -> str:
    head = f"{trial.model:<24} split {trial.split}/{splits}  "
    if trial.status != "done":
        return f"{head}{trial.status}: {trial.message}"
    scores = ", ".join(
        f"{label} {_format(name, [trial.scores[name]])}" for name, label in SCORES[task].items() if name in trial.scores
    )
    return f"{head}{scores}, fit {trial.fit_seconds:.1f} s"
