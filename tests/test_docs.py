"""What the documentation says holds: its code runs, its tables match the package."""

from __future__ import annotations

import doctest
import importlib.util
import inspect
import json
import re
from importlib import metadata

import pytest
import torch
from gpytorch.kernels import MaternKernel, ScaleKernel
from repository import PACKAGE, ROOT, is_installed, read

import gpytorch_tkrr
from benchmarks.__main__ import find_benchmarks
from benchmarks.harness import Report
from gpytorch_tkrr import errors

CLIENTS = {
    "botorch": "botorch",
    "pyro": "pyro-ppl",
    "sklearn": "scikit-learn",
}  # modules for other libraries -> what they need

_spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
generate = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(generate)


#: Pages with code -> what it needs beyond the package's own dependencies.
PAGES = {
    "README.md": [],
    "docs/index.md": [],
    "docs/comparing.md": ["pandas", "matplotlib", "cloudpickle"],
    "docs/estimators.md": ["pandas", "scikit-learn"],
    "docs/swapping.md": [],
    "docs/choosing.md": [],
    "docs/family.md": [],
    "docs/uncertainty.md": [],
    "docs/interpretation.md": ["matplotlib"],
    "docs/scaling.md": [],
    "docs/workflow.md": ["botorch", "pyro-ppl", "arviz"],
    "docs/troubleshooting.md": [],
    "docs/architecture.md": [],
}


@pytest.mark.parametrize("page", PAGES)
def test_code_runs(page):
    missing = [distribution for distribution in PAGES[page] if not is_installed(distribution)]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    blocks = re.findall(r"^```python\n(.*?)^```", read(page), re.MULTILINE | re.DOTALL)
    assert blocks
    if page == "README.md":
        blocks.remove(generate.example(ROOT))  # has a test of its own below
    # README.md speaks of the reader's own data and kernel.
    x = torch.rand(50, 2)
    names = {
        "train_x": x[:30],
        "train_y": torch.sin(6 * x[:30, 0]) + 0.1 * torch.randn(30),
        "test_x": x[30:],
        "base": ScaleKernel(MaternKernel(nu=2.5, ard_num_dims=2)),
    }
    for block in blocks:
        exec(compile(block, page, "exec"), names)


def public_names():
    """Every public name -> what it stands for; those for other libraries where they are installed."""
    names = {name: getattr(gpytorch_tkrr, name) for name in gpytorch_tkrr.__all__}
    for client, distribution in CLIENTS.items():
        if is_installed(distribution):
            module = getattr(gpytorch_tkrr, client)
            names.update({f"{client}.{name}": getattr(module, name) for name in module.__all__})
    return names


def test_api_page_has_every_public_name_once():
    if not all(map(is_installed, CLIENTS.values())):
        pytest.skip("needs the extras botorch and pyro")
    page = generate.api_page(gpytorch_tkrr, CLIENTS)
    named = re.findall(r"^\.\. auto\w+:: gpytorch_tkrr\.([\w.]+)$", page, re.MULTILINE)
    assert sorted(named) == sorted(public_names())


def test_public_names_have_an_example():
    """The examples themselves are run by ``pytest --doctest-modules gpytorch_tkrr``."""
    parser = doctest.DocTestParser()
    documented = {name: value.__doc__ or "" for name, value in public_names().items()}
    shown = {name for name, text in documented.items() if any(each.want for each in parser.get_examples(text))}
    assert [name for name in documented if name not in shown or "Example:" not in documented[name]] == []


def test_troubleshooting_has_a_section_for_every_error_and_warning():
    """Its first sentence is that of the class."""
    page = read("docs/troubleshooting.md")
    sections = re.findall(r"^### `(\w+)`\n\n(.+?)\n\n\*\*When\.\*\*", page, re.MULTILINE | re.DOTALL)
    assert len(sections) == page.count("\n### ")
    classes = {name: value for name, value in vars(errors).items() if isinstance(value, type)}
    assert {name: " ".join(text.split()) for name, text in sections} == {
        name: " ".join(inspect.getdoc(value).partition("\n\n")[0].split()) for name, value in classes.items()
    }
    for kind in ("Warning", "Error"):  # in the part of the page that is theirs
        part = re.search(rf"^## {kind}s\n(.*?)(?=^## )", page, re.MULTILINE | re.DOTALL).group(1)
        assert set(re.findall(r"^### `(\w+)`", part, re.MULTILINE)) == {n for n in classes if n.endswith(kind)}


def test_benchmark_page(tmp_path):
    assert "No results are stored" in generate.benchmark_page(tmp_path / "none")

    report = Report("speed_of_light", "Metres per second in a_vacuum", notes=["Measured at night."])
    report.add(medium="vacuum", speed=299792458, ratio=1.0)
    report.add(medium="wa|ter", speed=225000000)
    report.add(medium="glass", speed=2e8 + 0.25)
    report.write(tmp_path, options={"repeat": 3})
    page = generate.benchmark_page(tmp_path)
    assert "No results are stored" not in page
    assert "| medium | speed | ratio |\n| --- | ---: | ---: |\n| vacuum | 299792458 | 1 |" in page
    assert "| wa\\|ter | 225000000 |  |" in page and "| glass | 200000000 |" in page
    assert "a\\_vacuum" in page and "Measured at night." in page and "repeat = 3" in page
    assert f"torch {metadata.version('torch')}" in page and "![" not in page
    (tmp_path / "speed_of_light.png").touch()
    (figure,) = re.findall(r"!\[.*\]\((.*)\)", generate.benchmark_page(tmp_path))
    assert (generate.GENERATED / figure).resolve() == (tmp_path / "speed_of_light.png").resolve()


def test_files_named_in_the_docs_exist():
    for page in ("docs/mathematics.md", "docs/architecture.md", "docs/architecture.svg"):
        for name in re.findall(r"([\w/]+\.py)\b", read(page)):
            assert (PACKAGE / name).exists() or (ROOT / name).exists(), f"{page} names {name}"


def test_readme_example_prints_what_it_says(capsys):
    """Ten lines with the core dependencies alone; the last digits depend on the machine."""
    code = generate.example(ROOT)
    assert len([line for line in code.splitlines() if line]) <= 10
    exec(compile(code, "README.md", "exec"), {})
    said = re.search(r"<!-- output -->\n```text\n(.*?)\n```", read("README.md")).group(1)
    numbers = [[float(each) for each in re.findall(r"-?\d+\.\d+", text)] for text in (said, capsys.readouterr().out)]
    assert len(numbers[0]) == 3
    assert numbers[1] == pytest.approx(numbers[0], abs=0.05)


def test_readme_is_short_and_its_links_exist():
    text = read("README.md")
    assert len(text.splitlines()) < 250
    for link in re.findall(r"\]\((?!https?://|#)([^)#]*)", text):
        assert (ROOT / link).exists(), link


def test_benchmark_page_says_who_is_ahead():
    page = "\n".join(generate.rivals(ROOT / "benchmarks" / "results"))
    verdicts = re.findall(r"\| (ahead|even|behind) \|$", page, re.MULTILINE)
    assert {"ahead", "behind"} <= set(verdicts)  # losses are left in
    stored = json.loads(read("benchmarks/results/paper_yacht.json"))["rows"]
    ours = next(row["mean"] for row in stored if row["method"] == "T-KRR")
    assert f"| yacht | {ours:.4f} |" in page


def test_rivals_are_compared_on_common_folds(tmp_path):
    scores = {("T-KRR", 0): 0.5, ("T-KRR", 1): 9.0, ("SVGP", 0): 0.7, ("boosting", 0): 0.6, ("boosting", 1): 0.1}
    rows = [
        {"data": "set", "fold": fold, "N": 90, "model": model, "nlpd": score, "rmse": 2 * score}
        for (model, fold), score in scores.items()
    ]
    (tmp_path / "pool.json").write_text(json.dumps({"title": "A pool", "rows": rows}))
    page = "\n".join(generate.rivals(tmp_path))
    assert "| set | 90 | 1 | 0.500 | 1.000 | boosting | 0.600 | 1.200 | ahead |" in page


@pytest.mark.parametrize("name", list(generate.TABLES))
def test_pages_quote_stored_results(name: str):
    page, _ = generate.TABLES[name]
    assert f"<!-- table: {name} -->\n" in read(page)
    assert generate.with_table(ROOT, name) == read(page), "run python docs/generate.py"


def test_benchmarks_named_in_the_docs_exist():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "tutorials").glob("*.py")]
    named = {name for page in pages for name in re.findall(r"python -m benchmarks ([a-z]\w*)", read(page))}
    assert {"compare", "swap", "smoke", "pool"} <= named
    assert named <= set(find_benchmarks())


def test_readme_commands():
    commands = dict(re.findall(r"^<!-- command: (\w+) -->\n```sh\n(.*)\n```$", read("README.md"), re.MULTILINE))
    assert set(commands) == {"main", "test"}
    program, command = re.search(r"\.venv/bin/([\w-]+) (\w+) --output \w+$", commands["main"]).groups()
    assert f'\n{program} = "gpytorch_tkrr.__main__:main"\n' in read("pyproject.toml") and command == "compare"
    assert all("-c constraints.txt" in command for command in commands.values())
