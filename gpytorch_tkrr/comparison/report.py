"""Figures of a comparison, and the page that holds them."""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import torch

from ..tables.task import Task
from .distribution import level_coverage
from .scores import LEVELS, reliability, sure_of
from .trial import Trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Test rows drawn in a panel of predictions.
NUM_POINTS = 150

#: Bins of a reliability curve with fewer test rows are not drawn.
MIN_COUNT = 10

#: Shorter training times are drawn as this one.
MIN_SECONDS = 0.01

_COLORS = "0.55 0.25 tab:brown tab:blue tab:cyan tab:purple tab:green tab:olive tab:pink tab:orange tab:red".split()
_COLORS += ["navy", "teal", "goldenrod"]
_MARKERS = "osDv^<>pPX*"


def overview_figure(trials: Sequence[Trial], task: Task, labels: dict[str, str]) -> Figure:
    """
    Scores against training time, and the calibration curve.

    :param trials: Those that are done are shown.
    :param task: Regression or classification.
    :param labels: Name of a score -> how it is written.
    """
    scored = [trial for trial in trials if trial.status == "done"]
    names = list(dict.fromkeys(trial.model for trial in scored))
    figure = _figure(3 * 3.5 + 2.2, 3.6)
    axes = figure.subplots(1, 3)
    for axis, score in zip(axes, list(labels)[:2], strict=False):
        _draw_cost(axis, scored, names, score, labels[score])
    _draw_calibration(axes[2], scored, names, task)
    labelled = axes[0].get_legend_handles_labels()
    if labelled[0]:
        figure.legend(*labelled, loc="outside right center", frameon=False)
    return figure


def predictions_figure(trials: Sequence[Trial], task: Task) -> Figure:
    """
    A panel per model: predictions with their intervals against the actual values, or probabilities of each class.

    :param trials: The first that is done of each model is shown.
    :param task: Regression or classification.
    """
    shown: dict[str, Trial] = {}
    for trial in trials:
        if trial.status == "done":
            shown.setdefault(trial.model, trial)
    columns = min(4, max(1, len(shown)))
    rows = max(1, math.ceil(len(shown) / columns))
    figure = _figure(3.1 * columns, 2.9 * rows)
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=task == "regression").flatten()
    for axis, trial in zip(panels, shown.values(), strict=False):
        (_draw_predictions if task == "regression" else _draw_probabilities)(axis, trial)
        axis.set_title(trial.model, fontsize=10)
    for axis in panels[len(shown) :]:
        axis.set_visible(False)
    if task == "classification" and shown:
        panels[0].legend(frameon=False, fontsize=8)
    for axis in panels[max(0, len(shown) - columns) : len(shown)]:
        axis.tick_params(labelbottom=True)  # also where the panel below is empty
    figure.supxlabel("actual" if task == "regression" else "predicted probability", fontsize=10)
    figure.supylabel("predicted, with 95 % interval" if task == "regression" else "test rows", fontsize=10)
    return figure


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Figures need matplotlib: pip install gpytorch_tkrr[compare].") from error

    class ShownFigure(Figure):
        """Notebooks show it also where pyplot has drawn nothing yet."""

        def _repr_png_(self) -> bytes:
            return _png(self)

    return ShownFigure(figsize=(width, height), dpi=130, layout="constrained")


def _style(names: Sequence[str], name: str) -> dict[str, Any]:
    place = names.index(name)
    return {"color": _COLORS[place % len(_COLORS)], "marker": _MARKERS[place % len(_MARKERS)]}


def _draw_cost(axis: Axes, trials: Sequence[Trial], names: Sequence[str], score: str, label: str) -> None:
    for name in names:
        done = [trial for trial in trials if trial.model == name and score in trial.scores]
        if done:
            seconds = fmean(trial.fit_seconds or 0.0 for trial in done)
            values = [trial.scores[score] for trial in done]
            spread = stdev(values) if len(values) > 1 else None
            place = max(seconds, MIN_SECONDS), fmean(values)
            axis.errorbar(*place, yerr=spread, linestyle="none", elinewidth=1, label=name, **_style(names, name))
    axis.set(xscale="log", xlabel="seconds to train", title=f"{label}, lower is better")
    _tidy(axis)


def _draw_calibration(axis: Axes, trials: Sequence[Trial], names: Sequence[str], task: Task) -> None:
    axis.plot([0, 1], [0, 1], color="0.8", linewidth=1)
    for name in names:
        done = [
            trial for trial in trials if trial.model == name and ("level" in trial.prediction or task != "regression")
        ]
        if not done:
            continue
        values = {key: torch.cat([trial.prediction[key] for trial in done]) for key in done[0].prediction}
        if task == "regression":
            nominal = list(LEVELS)
            observed = [level_coverage(values["level"], probability) for probability in LEVELS]
        else:
            predicted, frequency, count = reliability(*sure_of(values["y"], values["probability"]))
            nominal, observed = predicted[count >= MIN_COUNT].tolist(), frequency[count >= MIN_COUNT].tolist()
        axis.plot(nominal, observed, markersize=3.5, linewidth=1, **_style(names, name))
    if task == "regression":
        axis.set(xlabel="probability of the interval", title="share of test targets inside")
    else:
        axis.set(xlabel="predicted probability", title="observed frequency")
    _tidy(axis)


def _draw_predictions(axis: Axes, trial: Trial) -> None:
    y, mean = trial.prediction["y"], trial.prediction["mean"]
    low, high = torch.quantile(y, torch.tensor([0.005, 0.995], dtype=y.dtype)).tolist()
    margin = 0.1 * (high - low)
    rows = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))[:NUM_POINTS]
    rows = rows[(y[rows] >= low - margin) & (y[rows] <= high + margin)]  # no points that the frame cuts
    axis.plot([low, high], [low, high], color="0.6", linewidth=1)
    if "level" in trial.prediction:
        lower, upper = (trial.prediction[name][rows] for name in ("lower", "upper"))
        axis.vlines(y[rows], lower, upper, color="tab:blue", alpha=0.18)
    axis.plot(y[rows], mean[rows], ".", color="navy", markersize=3.5)
    axis.set(xlim=(low - margin, high + margin), ylim=(low - 3 * margin, high + 3 * margin))
    _tidy(axis)


def _draw_probabilities(axis: Axes, trial: Trial) -> None:
    probability = trial.prediction["probability"]
    y, sure = sure_of(trial.prediction["y"], probability)
    groups = [sure[y == value].numpy() for value in (0, 1)]
    is_several = probability.dim() == 2 and probability.shape[1] > 2
    labels = ["another class", "the most probable class"] if is_several else ["class 0", "class 1"]
    axis.hist(groups, bins=20, range=(0, 1), stacked=True, color=["0.7", "tab:orange"], label=labels)
    _tidy(axis)


def _tidy(axis: Axes) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.title.set_fontsize(10)
    axis.tick_params(labelsize=8)


# The page

_STYLE = """
body {font: 16px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; color: #222}
table {border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.9rem}
.wide {overflow-x: auto}
th, td {padding: 0.25rem 0.7rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap}
th:first-child, td:first-child, td:last-child {text-align: left}
.best {font-weight: 700}
img {max-width: 100%}
"""


def html_page(
    title: str,
    facts: str,
    table: Sequence[Sequence[str]],
    notes: Sequence[str],
    figures: Sequence[tuple[str, Figure]],
) -> str:
    """
    A page that needs no other file.

    :param title: Its heading.
    :param facts: A paragraph about the data and the machine.
    :param table: Rows of cells, the first is the header; the best values end with an asterisk.
    :param notes: Sentences below the table.
    :param figures: Headings and figures.
    """
    head, *body = table
    rows = ["<tr>" + "".join(f"<th>{html.escape(cell)}</th>" for cell in head) + "</tr>"]
    rows += ["<tr>" + "".join(map(_cell, row)) + "</tr>" for row in body]
    items = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    pictures = "".join(
        f'<h2>{html.escape(heading)}</h2><img alt="{html.escape(heading)}" src="{_data_uri(figure)}">'
        for heading, figure in figures
    )
    title = html.escape(title)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1><p>{html.escape(facts)}</p>"
        f'<div class="wide"><table>{"".join(rows)}</table></div><ul>{items}</ul>{pictures}</body></html>\n'
    )


def _cell(text: str) -> str:
    return f'<td class="best">{html.escape(text)}</td>' if text.endswith("*") else f"<td>{html.escape(text)}</td>"


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _data_uri(figure: Figure) -> str:
    return f"data:image/png;base64,{base64.b64encode(_png(figure)).decode('ascii')}"
