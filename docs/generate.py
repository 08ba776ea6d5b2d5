"""Pages and tables that are made from the code, the tutorials and the benchmarks' results, so that they cannot drift.

``python docs/generate.py`` puts the tables of stored results into the pages that quote them, and draws the picture of
README.md's example.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

#: Where pages that are made go.
GENERATED = Path(__file__).parent / "generated"

#: The scores of ``python -m benchmarks pool`` that are compared; the first decides.
POOL = ("nlpd", "rmse")

#: Modules that a reader looks for first; the others follow by name, errors last.
FIRST = ("kernel", "model", "domain", "index_set")


def api_page(package: ModuleType, clients: Sequence[str] = ()) -> str:
    """
    Every public name, under the module that defines it.

    :param package: The package.
    :param clients: Its modules for other libraries, whose names are not imported from the top.
    """
    groups: dict[str, list[str]] = {}
    for name in package.__all__:
        groups.setdefault(getattr(package, name).__module__, []).append(name)
    lines = ["# API reference", "", f"All names are imported from the top: `import {package.__name__} as tkrr`.", ""]
    for module_name in sorted(groups, key=_position):
        summary = inspect.cleandoc(importlib.import_module(module_name).__doc__ or "").partition("\n\n")[0]
        lines += _api_section(f"{module_name.rpartition('.')[2]}.py", summary, package, groups[module_name])
    for name in clients:
        client = importlib.import_module(f"{package.__name__}.{name}")
        lines += _api_section(f"tkrr.{name}", inspect.cleandoc(client.__doc__ or ""), client, client.__all__)
    return "\n".join(lines)


def _api_section(heading: str, summary: str, module: ModuleType, names: Sequence[str]) -> list[str]:
    directives = [line for name in names for line in (*_directive(module, name), "")]
    return [f"## `{heading}`", "", "```{eval-rst}", summary, "", *directives, "```", ""]


def _position(module_name: str) -> tuple[bool, int, str]:
    name = module_name.rpartition(".")[2]
    return name == "errors", FIRST.index(name) if name in FIRST else len(FIRST), name


def _directive(package: ModuleType, name: str) -> list[str]:
    value = getattr(package, name)
    if not inspect.isclass(value):
        return [f".. autofunction:: {package.__name__}.{name}"]
    kind = "autoexception" if issubclass(value, Exception) else "autoclass"
    return [f".. {kind}:: {package.__name__}.{name}", "   :members:", "   :show-inheritance:"]


def benchmark_page(results: Path) -> str:
    """
    A section for every JSON file that ``python -m benchmarks`` has written: table, notes, settings, machine, figure.

    :param results: The folder of these files.
    """
    lines = [
        "# Benchmarks",
        "",
        "After this page you know how the models compare with their rivals, where they lose, and how to measure it.",
        "",
        *rivals(results),
        "## How the numbers were made",
        "",
        "The tables are made from the files that `python -m benchmarks NAME` writes to `benchmarks/results/`, each",
        "with the machine and the versions it was measured with. Ratios are measured side by side in one run.",
        "Run it yourself:",
        "",
        "```sh",
        'pip install -c constraints.txt -e ".[benchmarks]"',
        "python -m benchmarks         # lists them",
        "python -m benchmarks NAME    # runs one and writes its file",
        "```",
        "",
    ]
    paths = sorted(results.glob("*.json"))
    if not paths:
        lines += ["No results are stored with this copy of the documentation.", ""]
    for path in paths:
        lines += _benchmark_section(json.loads(path.read_text(encoding="utf-8")))
        figures = [path.with_suffix(".png"), GENERATED / f"{path.stem}.png"]
        for figure in filter(Path.exists, figures):
            lines += [f"![What {path.stem} measures, drawn]({Path(os.path.relpath(figure, GENERATED)).as_posix()})", ""]
    return "\n".join(lines)


def rivals(results: Path) -> list[str]:
    """
    Our error beside that of the strongest rival: published, where the same protocol has been published, and measured in
    the same run.

    :param results: The folder of stored results.
    """
    return [*_beside_published(results), *_beside_measured(results), ""]


def _beside_published(results: Path) -> list[str]:
    papers = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("paper_*.json"))]
    papers = [report for report in papers if all("method" in row for row in report["rows"])]
    if not papers:
        return []
    lines = [
        "## Beside published figures",
        "",
        "Test errors (mean squared error of standardised targets; for adult and spambase the share of wrong classes)",
        "with the protocol of Wesel & Batselier (2021): ten random splits, 90 % for training, M and R as in their",
        "paper. *Published* are the figures of its Table 1; the strongest of its methods is named. *Even*:",
        "by at most 2 %.",
        "",
        "| data | T-KRR here | T-KRR, published | strongest published | verdict |",
        "| --- | ---: | ---: | --- | --- |",
    ]
    for report in papers:
        rows = {row["method"]: row for row in report["rows"]}
        published = {name: row["paper_mean"] for name, row in rows.items() if row.get("paper_mean") is not None}
        best = min(published, key=lambda name: published[name])
        ours, name = rows["T-KRR"]["mean"], report["title"].partition(":")[0]
        verdict = _verdict(ours, published[best], 0.02 * published[best])
        own = f"{published['T-KRR']:.4g}" if "T-KRR" in published else ""
        lines.append(f"| {name} | {ours:.4f} | {own} | {published[best]:.4g} ({best}) | {verdict} |")
    return [*lines, ""]


def _beside_measured(results: Path) -> list[str]:
    pool = results / "pool.json"
    if not pool.exists():
        return []
    report = json.loads(pool.read_text(encoding="utf-8"))
    lines = [
        "## Beside rivals in the same run",
        "",
        f"{_escape(report['title'])}. Means over the folds on which all models of a set were run; lower is better.",
        "The strongest rival is the one with the smallest NLPD. *Even*: NLPD by at most 0.02.",
        "",
        "| data | N | folds | T-KRR: NLPD | RMSE | strongest rival | its NLPD | its RMSE | verdict |",
        "| --- | ---: | ---: | ---: | ---: | --- | ---: | ---: | --- |",
    ]
    for data in dict.fromkeys(row["data"] for row in report["rows"]):
        rows = [row for row in report["rows"] if row["data"] == data]
        models = list(dict.fromkeys(row["model"] for row in rows))
        folds = set.intersection(*({row["fold"] for row in rows if row["model"] == model} for model in models))
        scores = {
            model: [
                fmean(row[score] for row in rows if row["model"] == model and row["fold"] in folds) for score in POOL
            ]
            for model in models
            if folds
        }
        ours = scores.pop("T-KRR", None)
        if ours is not None and scores:
            best = min(scores, key=lambda name: scores[name][0])
            cells = [data, str(rows[0]["N"]), str(len(folds)), *(f"{each:.3f}" for each in ours), best]
            cells += [*(f"{each:.3f}" for each in scores[best]), _verdict(ours[0], scores[best][0], 0.02)]
            lines.append(f"| {' | '.join(cells)} |")
    return [
        *lines,
        "",
        "The sets and their ten folds are those of the public repository `treforevans/uci_datasets`; the robot arm is",
        "generated. On the same folds Yang et al. (2015, *A la carte*), Wilson et al. (2016, *Deep kernel learning*)",
        "and Evans & Nair (2018, *GP-GRIEF*) have published root-mean-square errors, in the units of the targets. A",
        "figure is quoted on this page only after its table and its protocol have been checked. This has not been",
        "possible for these papers yet, so none of their figures stands here.",
        "",
    ]


def _verdict(ours: float, rival: float, margin: float) -> str:
    return "even" if abs(ours - rival) <= margin else "ahead" if ours < rival else "behind"


def draw_history(results: Path, target: Path) -> None:
    """
    The ratios of ``python -m benchmarks smoke``, commit by commit.

    :param results: The folder of stored results.
    :param target: Where the figure goes.
    """
    stored = results / "smoke.json"
    if not stored.exists():
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = json.loads(stored.read_text(encoding="utf-8"))["rows"]
    names = [name for name in rows[-1] if name not in ("commit", "date")]
    figure, axes = plt.subplots(1, len(names), figsize=(2.1 * len(names), 2.2), layout="constrained")
    for axis, name in zip(axes, names, strict=True):
        axis.plot(range(len(rows)), [row.get(name) for row in rows], "o-", markersize=4)
        axis.set(title=name, ylim=(0, None), xticks=range(len(rows)))
        axis.set_xticklabels([row["commit"][:7] for row in rows], rotation=90, fontsize=6)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)
    plt.close(figure)


def example(root: Path) -> str:
    """
    The first example of README.md.

    :param root: The project.
    """
    found = re.search(
        r"^<!-- example -->\n```python\n(.*?)^```", (root / "README.md").read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    assert found is not None
    return found.group(1)


def draw_example(root: Path) -> None:
    """
    The function that README.md's example fits, along its first input.

    :param root: The project.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import torch

    names: dict[str, Any] = {}
    exec(compile(example(root), "README.md", "exec"), names)
    x = torch.full((200, 5), 0.5)
    x[:, 0], x[:, 1] = torch.linspace(0.005, 0.995, 200), 0.8
    with torch.no_grad():
        prediction = names["model"].predict(x)
        lower, mean, upper = prediction.quantile(0.025), prediction.mean, prediction.quantile(0.975)
    figure, axis = plt.subplots(figsize=(7, 2.8), layout="constrained")
    near = (names["x"][:, 1] - 0.8).abs() < 0.1
    axis.plot(names["x"][near, 0], names["y"][near], ".", color="0.6", label="rows with a second input near 0.8")
    axis.plot(x[:, 0], 0.8 * torch.sin(8 * x[:, 0]), "k--", linewidth=1, label="the function behind the data")
    axis.plot(x[:, 0], mean, label="prediction")
    axis.fill_between(x[:, 0], lower, upper, alpha=0.2, label="95 % interval of new observations")
    axis.set(xlabel="first input; the second is 0.8, the others 0.5", ylim=(-1.6, 1.3))
    axis.legend(fontsize=8, loc="lower center", ncol=2, frameon=False)
    figure.savefig(root / "docs" / "_static" / "example.png", dpi=110)
    plt.close(figure)


def _benchmark_section(report: dict[str, Any]) -> list[str]:
    columns = list(dict.fromkeys(column for row in report["rows"] for column in row))
    table = [columns, *([_cell(row.get(column)) for column in columns] for row in report["rows"])]
    right = [all(isinstance(row.get(column), int | float | None) for row in report["rows"]) for column in columns]
    lines = [f"| {' | '.join(_escape(cell) for cell in line)} |" for line in table]
    lines.insert(1, f"| {' | '.join('---:' if each else '---' for each in right)} |")
    options = ", ".join(f"{key} = {value}" for key, value in report["options"].items() if value is not None)
    machine = ", ".join(f"{key} {value}" for key, value in report["machine"].items())
    return [
        f"## {report['name']}",
        "",
        f"{_escape(report['title'])}.",
        "",
        *(lines if columns else []),
        "",
        *(line for note in report["notes"] for line in (_escape(note), "")),
        *([f"*Settings:* {_escape(options)}.", ""] if options else []),
        f"*Measured with:* {_escape(machine)}.",
        "",
    ]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def _escape(text: str) -> str:
    """Text as it stands, inside Markdown."""
    return "".join(f"\\{character}" if character in "|*_`$<" else character for character in str(text))


def comparison_table(report: dict[str, Any]) -> str:
    """
    The table of README.md, from the JSON of ``python -m benchmarks compare``; the best of each column in bold.
    """
    last = [name for name in ("chosen", "status") if name in report["rows"][0]]
    columns = ["model", "RMSE", "NLPD", "95 % coverage", "CRPS", "fit, s", "memory, MB", *last]
    lines = [f"| {' | '.join(columns)} |", f"| --- |{' ---: |' * 6}{' --- |' * len(last)}"]
    for row in report["rows"]:
        cells = [str(row[column]) for column in columns]
        lines.append(f"| {' | '.join(f'**{c[:-2]}**' if c.endswith(' *') else c for c in cells)} |")
    return "\n".join(lines)


def calibration_table(report: dict[str, Any]) -> str:
    """
    NLPD of all models, and coverage and seconds of ours, from the JSON of ``python -m benchmarks calibration``.
    """
    sets = list(dict.fromkeys(row["data"] for row in report["rows"]))
    models = list(dict.fromkeys(row["model"] for row in report["rows"]))
    rows = {(row["data"], row["model"]): row for row in report["rows"]}
    columns = ["data", "N", *models, f"coverage of {models[0]}", f"seconds: {models[0]}, {models[1]}"]
    lines = [f"| {' | '.join(columns)} |", f"| --- |{' ---: |' * (len(columns) - 1)}"]
    for data in sets:
        ours, rival = rows[data, models[0]], rows[data, models[1]]
        cells = [data, str(ours["N"])]
        cells += [f"{rows[data, model]['nlpd']:.2f} ± {rows[data, model]['nlpd_se']:.2f}" for model in models]
        cells += [f"{100 * ours['coverage']:.1f} %", f"{ours['seconds']:.1f}, {rival['seconds']:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def scaling_table(report: dict[str, Any]) -> str:
    """
    The tables of docs/scaling.md, from the JSON of ``python -m benchmarks weak_scaling``: the constants of the model,
    and what follows from them.
    """
    measured = [row for row in report["rows"] if row["kind"] == "measured"]
    lines = ["| R | processes | $t_\\text{row}$ | $t_\\text{solve}$ | $V$ | seconds of a sweep | efficiency |"]
    lines.append("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for row in measured:
        lines.append(
            f"| {row['R']} | {row['processes']} | {row['t_row_us']:.2f} µs | {row['t_solve_ms']:.1f} ms "
            f"| {row['kilobytes_per_update']:.0f} kB | {row['seconds_per_sweep']:.2f} | {row['efficiency']:.2f} |"
        )
    lines += ["", "From the rows of one process follows, on paper:", ""]
    lines += ["| R | rows | processes | seconds of a sweep | ten sweeps | efficiency |"]
    lines += ["| ---: | ---: | ---: | ---: | ---: | ---: |"]
    for row in report["rows"]:
        if row["kind"] == "on paper":
            power = len(str(row["rows"])) - 1
            lines.append(
                f"| {row['R']} | $10^{{{power}}}$ | {row['processes']} | {row['seconds_per_sweep']:.1f} "
                f"| {row['minutes_10_sweeps']:.1f} min | {100 * row['efficiency']:.1f} % |"
            )
    return "\n".join(lines)


def bayesopt_table(report: dict[str, Any]) -> str:
    """
    The tables of docs/workflow.md, from the JSON of ``python -m benchmarks bayesopt``: closed loops, one step
    against the number of observations, and outliers.
    """
    loops = [row for row in report["rows"] if row.get("median") is not None]
    lines = [
        "| function | model | seeds | best value: median | quartiles | error of the mean | s per step |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    same = [row for row in loops if row.get("difference") == 0]
    for row in loops:
        if row in same:
            continue
        others = [each for each in same if each["problem"] == row["problem"]]
        model = row["model"] + "".join(f"; {each['model']} (the same in {each['num_seeds']} loops)" for each in others)
        quartiles = f"{row['lower_quartile']:.2f} to {row['upper_quartile']:.2f}"
        error = "" if row["mean_error"] is None else f"{row['mean_error']:.2f}"
        lines.append(
            f"| {row['problem']} | {model} | {row['num_seeds']} | {row['median']:.2f} | {quartiles} | {error} "
            f"| {row['seconds_per_step']:.1f} |"
        )
    steps = [row for row in report["rows"] if row.get("rows") is not None]
    names = list(dict.fromkeys(row["model"] for row in steps))
    seconds = {(row["rows"], row["model"]): row["seconds_per_step"] for row in steps}
    lines += [
        "",
        f"| observations | {' | '.join(f'{name}, s' for name in names)} |",
        "| ---: " * (len(names) + 1) + "|",
    ]
    for num_rows in dict.fromkeys(row["rows"] for row in steps):
        cells = [f"{seconds[num_rows, name]:.1f}" if (num_rows, name) in seconds else "" for name in names]
        lines.append(f"| {num_rows} | {' | '.join(cells)} |")
    lines += ["", "| one outcome in ten corrupted | error | s |", "| --- | ---: | ---: |"]
    lines += [
        f"| {row['model']} | {row['error']:.2f} | {row['seconds_per_step']:.1f} |"
        for row in report["rows"]
        if row.get("error") is not None
    ]
    return "\n".join(lines)


def formats_table(report: dict[str, Any]) -> str:
    """
    Means over splits of tensor trains, in both orders of the inputs, and of CP weights, one row for each set, fit and
    rank.

    :param report: The benchmark's stored report.
    """
    lines = [
        "| data | fit | weights: train / CP | train, as given: NLPD / RMSE / s | ordered: NLPD / RMSE / s "
        "| CP: NLPD / RMSE / s | train better than CP in NLPD: as given / ordered |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    labels = ("TensorTrain", "TensorTrain, ordered", "CP")
    rows = report["rows"]
    for name, fit, rank in dict.fromkeys((row["data"], row["fit"], row["train_rank"]) for row in rows):
        own = [row for row in rows if (row["data"], row["fit"], row["train_rank"]) == (name, fit, rank)]
        cells, nlpd, weights = [], {}, {}
        for label in labels:
            each = sorted((row for row in own if row["format"] == label), key=lambda row: row["split"])
            means = [fmean(row[score] for row in each) for score in ("nlpd", "rmse", "seconds")]
            cells.append(f"rank {each[0]['rank']}: {means[0]:.2f} / {means[1]:.3f} / {means[2]:.1f}")
            nlpd[label], weights[label] = [row["nlpd"] for row in each], each[0]["weights"]
        wins = [sum(a < b for a, b in zip(nlpd[label], nlpd["CP"], strict=True)) for label in labels[:2]]
        sizes, verdict = f"{weights['TensorTrain']} / {weights['CP']}", f"{wins[0]} / {wins[1]} of {len(nlpd['CP'])}"
        lines.append(f"| {name} | {fit} | {sizes} | {' | '.join(cells)} | {verdict} |")
    return "\n".join(lines)


#: Tables that pages hold between ``<!-- table: NAME -->`` and ``<!-- end -->``: the benchmark's name -> page and maker.
TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "compare": ("README.md", comparison_table),
    "calibration": ("docs/uncertainty.md", calibration_table),
    "weak_scaling": ("docs/scaling.md", scaling_table),
    "bayesopt": ("docs/workflow.md", bayesopt_table),
    "formats": ("docs/choosing.md", formats_table),
}


def fill_tables(root: Path) -> None:
    """
    Put the tables of :data:`TABLES` into their pages, as far as their results are stored.

    :param root: The project.
    """
    for name, (page, _) in TABLES.items():
        write_if_changed(root / page, with_table(root, name))


def with_table(root: Path, name: str) -> str:
    """
    The text of a page with one of its tables made from stored results; as it is where none are stored.

    :param root: The project.
    :param name: The table's name.
    """
    page, make = TABLES[name]
    text, stored = (root / page).read_text(encoding="utf-8"), root / f"benchmarks/results/{name}.json"
    if not stored.exists():
        return text
    table = make(json.loads(stored.read_text(encoding="utf-8")))
    marks = re.compile(rf"(?<=<!-- table: {name} -->\n).*?(?=<!-- end -->)", re.DOTALL)
    return marks.sub(lambda _: table + "\n", text)


def tutorials(source: Path, target: Path) -> list[Path]:
    """
    The percent-format scripts of `source` as notebooks in `target`, to be executed by the build.

    :return: The notebooks.
    """
    import jupytext

    target.mkdir(parents=True, exist_ok=True)
    notebooks = []
    for path in sorted(source.glob("[0-9]*.py")):
        notebook = target / f"{path.stem}.ipynb"
        write_if_changed(notebook, jupytext.writes(jupytext.read(path, fmt="py:percent"), fmt="ipynb"))
        notebooks.append(notebook)
    return notebooks


def write_if_changed(path: Path, text: str) -> None:
    """Leaves an up-to-date file alone, so that an incremental build does as well."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    fill_tables(Path(__file__).parents[1])
    draw_example(Path(__file__).parents[1])
