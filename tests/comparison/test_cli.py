"""The command line: tables of all kinds in, reports, models and predictions out, exit code 2 for bad input."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch
from repository import run_python

pd = pytest.importorskip("pandas")
pytest.importorskip("pyarrow")

import gpytorch_tkrr as tkrr
import gpytorch_tkrr.__main__
from gpytorch_tkrr.__main__ import main
from gpytorch_tkrr.comparison import comparison
from gpytorch_tkrr.tables.table import read_table

QUICK = ["--models", "mean", "linear", "--splits", "1", "--quiet"]

#: A fit of a second.
SMALL = ["--rank", "3", "--num-basis", "6", "--num-draws", "15", "--num-warmup", "15", "--noise", "gaussian", "--quiet"]


def run(*arguments):
    """The exit code."""
    return main([str(argument) for argument in arguments])


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    """Processes of their own have tests of their own."""
    monkeypatch.setattr(gpytorch_tkrr.__main__, "compare", functools.partial(tkrr.compare, isolate=False))


@pytest.fixture(scope="module")
def frame():
    """Prices of three kinds of things, by size and age."""
    rng = np.random.default_rng(0)
    size, age = rng.uniform(1, 10, 120), rng.integers(0, 30, 120)
    kind = rng.choice(["hut", "house", "castle"], 120)
    price = 100 * size - age + 500 * (kind == "castle") + rng.normal(size=120)
    return pd.DataFrame({"kind": kind, "size": size, "age": age, "price": price})


@pytest.fixture
def table(frame, tmp_path):
    path = tmp_path / "things.csv"
    frame.to_csv(path, index=False)
    return path


def fails(capsys, *arguments):
    """Exit code 2; returns the sentence."""
    assert main([str(argument) for argument in arguments]) == 2
    sentence = capsys.readouterr().err
    assert sentence.startswith(f"gpytorch-tkrr {arguments[0]}: ") and "Traceback" not in sentence
    return sentence


@pytest.mark.parametrize("number", [1, 2])
def test_an_interrupted_comparison_exits_by_130_and_keeps_what_was_finished(table, tmp_path, monkeypatch, number):
    run, calls = comparison.run_trial, []

    def interrupted(name, *args):
        calls.append(name)
        if len(calls) == number:
            raise KeyboardInterrupt
        return run(name, *args)

    monkeypatch.setattr(comparison, "run_trial", interrupted)
    arguments = ["compare", "--data", table, "--target", "price", *QUICK, "--output", tmp_path / "out"]
    assert main([str(argument) for argument in arguments]) == 130
    stored = json.loads((tmp_path / "out" / "results.json").read_text())
    expected = ["done", "interrupted"] if number == 2 else ["interrupted", "interrupted"]
    assert [trial["status"] for trial in stored["trials"]] == expected
    assert (tmp_path / "out" / "report.html").exists()


def test_compare(table, tmp_path, capsys):
    arguments = ["compare", "--data", table, "--target", "price", *QUICK, "--output", tmp_path / "out"]
    assert main([str(argument) for argument in arguments]) == 0
    printed = capsys.readouterr().out
    assert "linear" in printed and "RMSE" in printed and "report.html" in printed
    stored = json.loads((tmp_path / "out" / "results.json").read_text())
    assert (
        stored["title"] == "price in things.csv"
        and stored["facts"]["inputs"] == 3
        and stored["facts"]["categories"] == 1
    )
    assert "--force" in fails(capsys, *arguments)
    assert main([*(str(argument) for argument in arguments), "--force"]) == 0


def test_compare_flights(tmp_path, capsys):
    sizes = ["--max-train", "50", "--max-test", "20"]
    assert main(["compare", *QUICK, *sizes, "--output", str(tmp_path)]) == 0
    stored = json.loads((tmp_path / "results.json").read_text())
    assert stored["facts"]["rows"] == 273853 and stored["facts"]["training rows"] == 50


def test_formats_hold_the_same_table(frame, tmp_path):
    frame = frame.drop(columns="kind").astype(float)
    frame.to_csv(tmp_path / "a.csv.gz", index=False)
    frame.to_parquet(tmp_path / "a.parquet")
    np.savez(tmp_path / "a.npz", **{name: frame[name].to_numpy() for name in frame})
    for name in ("a.csv.gz", "a.parquet", "a.npz"):
        pd.testing.assert_frame_equal(read_table(tmp_path / name), frame)
    np.savez(tmp_path / "b.npz", x=frame[["size", "age"]].to_numpy(), y=frame["price"].to_numpy())
    assert list(read_table(tmp_path / "b.npz").columns) == ["x0", "x1", "y"]


def test_bad_tables(frame, table, tmp_path, capsys):
    data = ["compare", "--data", table, *QUICK, "--output", tmp_path / "out"]
    assert "There is no file" in fails(capsys, "compare", "--data", tmp_path / "none.csv", "--target", "y")
    assert "--target is missing" in fails(capsys, *data)
    assert "no column 'prize'. Did you mean 'price'?" in fails(capsys, *data, "--target", "prize")
    assert "no column 'colour'" in fails(capsys, *data, "--target", "price", "--inputs", "size", "colour")
    assert "among the inputs" in fails(capsys, *data, "--target", "price", "--inputs", "price")
    assert "named twice: size, size" in fails(capsys, *data, "--target", "price", "--inputs", "size", "size")
    assert "--data" in fails(capsys, "compare", "--target", "price")

    frame.assign(size=frame["size"].where(frame["age"] > 3)).to_csv(table, index=False)
    sentence = fails(capsys, *data, "--target", "price", "--inputs", "size", "age")
    first = int((frame["age"] <= 3).to_numpy().argmax()) + 1
    assert f"data row {first}, column 'size'" in sentence and "--drop-missing" in sentence
    arguments = [*data, "--target", "price", "--inputs", "size", "age", "--drop-missing"]
    assert main([str(argument) for argument in arguments]) == 0
    stored = json.loads((tmp_path / "out" / "results.json").read_text())
    assert stored["facts"]["rows"] == int((frame["age"] > 3).sum())

    frame.assign(price=1.0).to_csv(table, index=False)
    assert "constant" in fails(capsys, *data, "--target", "price", "--inputs", "size", "--force")
    frame.head(0).to_csv(table, index=False)
    assert "no rows" in fails(capsys, *data, "--target", "price", "--force")
    frame.head(5).to_csv(table, index=False)
    assert "5 rows; at least 20" in fails(capsys, *data, "--target", "price", "--inputs", "size", "--force")
    for name, content in [("x.txt", b"1"), ("x.csv", b""), ("x.npz", b"no"), ("x.parquet", b"no")]:
        (tmp_path / name).write_bytes(content)
        assert name in fails(capsys, "compare", "--data", tmp_path / name, "--target", "y")
    np.savez(tmp_path / "x.npz", x=np.ones((3, 2)), y=np.ones(4))
    assert "different lengths" in fails(capsys, "compare", "--data", tmp_path / "x.npz", "--target", "y")


def test_limits(table, tmp_path, capsys):
    data = ["compare", "--data", table, "--target", "price", "--inputs", "size", *QUICK, "--output", tmp_path / "out"]
    assert "time_limit must be positive" in fails(capsys, *data, "--time-limit", "0")
    assert "memory_limit must be positive" in fails(capsys, *data, "--memory-limit", "0")


def test_output_of_the_wrong_kind(table, tmp_path, capsys):
    inputs = ["--data", table, "--target", "price", "--inputs", "size"]
    assert "is a file" in fails(capsys, "compare", *inputs, *QUICK, "--output", table, "--force")
    assert "is a folder" in fails(capsys, "fit", *inputs, "--output", tmp_path, "--force")
    assert "is a folder" in fails(capsys, "predict", "--model", table, "--data", table, "--output", tmp_path, "--force")


def test_streamed_tables_are_checked(frame, table, tmp_path, capsys):
    fit = ["fit", "--data", table, "--target", "price", "--stream", "--quiet", "--output", tmp_path / "model.pt"]
    assert "no column 'prize'" in fails(capsys, *fit, "--target", "prize")
    assert "There is no file" in fails(capsys, *fit, "--data", tmp_path / "none.csv")
    frame.assign(age=frame["age"].where(frame["age"] > 3)).to_csv(table, index=False)
    assert "NaN" in fails(capsys, *fit, "--inputs", "size", "age")
    frame.assign(price=1.0).to_csv(table, index=False)
    for method in ("als", "gibbs"):
        assert "constant: all values are 1." in fails(capsys, *fit, "--inputs", "size", "--method", method)
    frame.assign(price="dear").to_csv(table, index=False)
    assert "constant: all values are dear." in fails(capsys, *fit)
    frame.assign(age=["?", *frame["age"][1:]]).to_csv(table, index=False)
    assert "holds numbers, but data row 1 has '?'" in fails(capsys, *fit)
    assert "--drop-missing" in fails(capsys, *fit, "--drop-missing")


def test_unknown_arguments(capsys):
    for arguments in (["compare", "--models", "svpg"], [], ["fit"]):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 2
    assert "usage" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["als", "gibbs"])
def test_fit_and_predict(method, frame, table, tmp_path, capsys):
    model, predictions = tmp_path / "model.pt", tmp_path / "predictions.csv"
    fit = ["fit", "--data", table, "--target", "price", "--method", method, *SMALL, "--output", model]
    assert run(*fit) == 0
    assert not list(tmp_path.glob("*.part"))
    printed = capsys.readouterr().out
    assert "Regression of 'price': 120 rows, 3 inputs." in printed and "3 categories: castle, house, hut" in printed
    assert "Score of 12 held-out rows" in printed and "Noise: gaussian." in printed
    assert "highest for castle" in printed and "rises" in printed.split("size")[1].splitlines()[0]
    shuffled = frame[["age", "price", "kind", "size"]].iloc[::-1]  # other columns, another order
    shuffled.to_csv(tmp_path / "new.csv", index=False)
    predict = ["predict", "--model", model, "--data", tmp_path / "new.csv", "--output", predictions]
    assert run(*predict) == 0
    answer = pd.read_csv(predictions)
    assert list(answer.columns) == ["mean", "sd", "lower", "upper", "extrapolates"]
    assert np.abs(answer["mean"] - shuffled["price"].to_numpy()).mean() < 30  # of prices between 70 and 1500

    loaded = tkrr.load(model)
    assert len(loaded.model_.training_range.lower) == 3 and loaded.facts_["rows"] == 120
    inputs = shuffled[["kind", "size", "age"]]
    prediction = loaded.model_.predict(torch.as_tensor(loaded.columns_.matrix(inputs)))
    for name, level in (("lower", 0.025), ("upper", 0.975)):  # the quantiles of a new observation
        probability = prediction.cdf(torch.from_numpy(answer[name].to_numpy().copy()))
        assert np.allclose(probability.detach(), level, atol=1e-6)
    assert np.allclose(loaded.predict(inputs), answer["mean"], rtol=1e-8)

    capsys.readouterr()
    assert "--force" in fails(capsys, *fit) and "--force" in fails(capsys, *predict)
    missing = shuffled.assign(size=shuffled["size"].where(shuffled["age"] > 3))
    missing.to_csv(tmp_path / "new.csv", index=False)
    assert "missing" in fails(capsys, *predict, "--force")
    assert run(*predict, "--force", "--drop-missing", "--keep-columns", "kind,age") == 0
    partly = pd.read_csv(predictions)
    assert list(partly.columns[:3]) == ["kind", "age", "mean"] and (partly["kind"] == shuffled["kind"].to_numpy()).all()
    assert partly["mean"].isna().tolist() == (shuffled["age"] <= 3).tolist()
    pd.testing.assert_series_equal(partly["mean"].dropna(), answer["mean"][partly["mean"].notna()], rtol=1e-8)

    capsys.readouterr()
    shuffled.drop(columns="age").to_csv(tmp_path / "new.csv", index=False)
    assert "no column 'age'" in fails(capsys, *predict, "--force")
    shuffled.assign(kind="tent").to_csv(tmp_path / "new.csv", index=False)
    assert run(*predict, "--force") == 0  # a kind that nobody has seen: flagged, and wider than the others
    unseen = pd.read_csv(predictions)
    assert unseen["extrapolates"].all() and (unseen["sd"] > answer["sd"]).all()
    assert "not a model" in fails(capsys, "predict", "--model", table, "--data", table, "--output", tmp_path / "p.csv")
    assert "no file" in fails(capsys, "predict", "--model", tmp_path / "none.pt", "--data", table, "--force")


def test_outputs_have_the_format_of_their_name(frame, table, models, tmp_path, capsys):
    predict = ["predict", "--model", models["regression"], "--data", table, "--keep-columns", "kind", "--output"]
    for name in ("p.csv", "p.csv.gz", "p.tsv", "p.parquet", "p.xlsx"):
        assert run(*predict, tmp_path / name) == 0
    (tmp_path / "p.csv").read_text()
    tables = [read_table(tmp_path / name) for name in ("p.csv", "p.csv.gz", "p.tsv", "p.parquet", "p.xlsx")]
    for other in tables[1:]:
        pd.testing.assert_frame_equal(tables[0], other, check_dtype=False, rtol=1e-12)
    assert (tmp_path / "p.parquet").read_bytes()[:4] == b"PAR1"
    assert "written as .csv" in fails(capsys, *predict, tmp_path / "p.json")


def test_what_is_read_is_never_overwritten(table, models, tmp_path, capsys):
    before = table.read_bytes()
    fit = ["fit", "--data", table, "--target", "price", *SMALL, "--force", "--output", table]
    assert "would be lost" in fails(capsys, *fit)
    predict = ["predict", "--model", models["regression"], "--data", table, "--force", "--output"]
    assert "would be lost" in fails(capsys, *predict, table.parent / "." / table.name)
    assert "would be lost" in fails(capsys, *predict, models["regression"])
    assert table.read_bytes() == before


def test_a_refused_comparison_leaves_no_folder(table, tmp_path, capsys):
    fails(capsys, "compare", "--data", table, "--target", "prize", *QUICK, "--output", tmp_path / "new" / "out")
    assert not (tmp_path / "new").exists()


def test_exit_code_where_most_models_fail(table, tmp_path, monkeypatch):
    for name in ("linear", "mean"):
        monkeypatch.setattr(comparison.CONTENDERS[name], "fit", lambda *ignore: 1 / 0)
    arguments = ["compare", "--data", table, "--target", "price", "--splits", 1, "--quiet"]
    assert run(*arguments, "--models", "mean", "linear", "boosting", "--output", tmp_path / "a") == 1
    assert run(*arguments, "--models", "mean", "boosting", "--output", tmp_path / "b") == 0


def test_streamed_categories_and_classes(frame, table, tmp_path, capsys):
    """Levels and classes by one pass: the same model as from memory, where nothing is held out."""
    frame = frame.assign(kind=np.where(frame["kind"] == "hut", "Hütte", frame["kind"])).head(90)  # none held out
    frame.to_csv(table, index=False, sep=";", decimal=",", encoding="latin-1")
    dialect = ["--sep", ";", "--decimal", ",", "--encoding", "latin-1"]
    for target in ("price", "kind"):
        files = tmp_path / f"{target}1.pt", tmp_path / f"{target}2.pt"
        fit = ["fit", "--data", table, "--target", target, *SMALL, *dialect, "--output"]
        assert run(*fit, files[0]) == 0 and run(*fit, files[1], "--stream") == 0
        assert "in batches" in capsys.readouterr().out
        one, other = map(tkrr.load, files)
        inputs = frame.drop(columns=target)
        predict = "predict" if target == "price" else "predict_proba"
        assert np.allclose(getattr(one, predict)(inputs), getattr(other, predict)(inputs), rtol=1e-3)
    assert one.classes_.tolist() == ["Hütte", "castle", "house"]


@pytest.mark.parametrize(("target", "said"), [("price", "RMSE"), ("kind", "wrong")])
def test_rows_of_a_stream_are_held_out(frame, table, tmp_path, capsys, target, said):
    model = tmp_path / "model.pt"
    assert run("fit", "--data", table, "--target", target, *SMALL, "--stream", "--output", model) == 0
    number = len(frame) // 10
    assert f"Score of {number} held-out rows: " in (out := capsys.readouterr().out) and said in out
    assert tkrr.load(model).facts_["rows"] == len(frame)


def test_transformed_targets(frame, table, tmp_path, capsys):
    frame.assign(price=np.exp(frame["price"] / 200)).to_csv(table, index=False)
    fit = ["fit", "--data", table, "--target", "price", *SMALL, "--method", "als", "--output", tmp_path / "model.pt"]
    assert run(*fit, "--transform", "log") == 0
    predict = ["predict", "--model", tmp_path / "model.pt", "--data", table, "--output", tmp_path / "p.csv"]
    assert run(*predict) == 0
    answer = pd.read_csv(tmp_path / "p.csv")
    assert list(answer.columns) == ["median", "sd", "lower", "upper", "extrapolates"]
    y = np.exp(frame["price"] / 200)
    assert (answer["lower"] > 0).all() and ((answer["lower"] < y) & (y < answer["upper"])).mean() > 0.85
    assert np.abs(np.log(answer["median"] / y)).mean() < 0.1
    assert "positive targets" in fails(capsys, *fit, "--force", "--transform", "log", "--target", "age")
    assert "is for numbers" in fails(capsys, *fit, "--force", "--transform", "log", "--target", "kind")


def test_version(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0 and tkrr.__version__ in capsys.readouterr().out


@pytest.fixture(scope="module")
def models(frame, tmp_path_factory):
    """Files of fitted models, by their task."""
    x, options = frame[["size", "age"]], {"method": "als", "rank": 2, "num_basis": 4, "random_state": 0}
    paths = {task: tmp_path_factory.mktemp(task) / "model.pt" for task in ("regression", "classification")}
    tkrr.sklearn.TKRRRegressor(**options).fit(x, frame["price"]).save(paths["regression"])
    tkrr.sklearn.TKRRClassifier(**options).fit(x, frame["price"] > 600).save(paths["classification"])
    return paths


def other_content(kind, model, path):
    """Write what is no model, or no longer one."""
    content = torch.load(model, weights_only=True)
    whole = model.read_bytes()
    if kind == "folder":
        path.mkdir()
    elif kind == "archive":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("readme.txt", "other content")
    elif kind == "TorchScript":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("other/constants.pkl", b"")
            archive.writestr("other/data.pkl", b"")
    elif kind == "half a state":
        state = content["state"]["model"]
        half = {name: state[name] for name in list(state)[::2]}
        torch.save({**content, "state": {**content["state"], "model": half}}, path)
    elif kind in ("tensor", "list", "state", "other format", "other estimator"):
        values = {
            "tensor": torch.rand(3),
            "list": [1, 2],
            "state": content["state"],
            "other format": {"format": 99},
            "other estimator": {**content, "estimator": "Pipeline"},
        }
        torch.save(values[kind], path)
    else:
        cut = {"empty": b"", "text": b"size,age\n1,2\n", "truncated": whole[: len(whole) // 2], "bytes": whole[7:]}
        path.write_bytes(cut[kind])


@pytest.mark.parametrize(
    "kind",
    [
        *("empty", "text", "truncated", "bytes", "folder", "archive", "TorchScript"),
        *("tensor", "list", "state", "half a state", "other format", "other estimator"),
    ],
)
def test_files_that_are_no_model(kind, models, table, tmp_path, capsys):
    path = tmp_path / "other.pt"
    other_content(kind, models["regression"], path)
    message = fails(capsys, "predict", "--model", path, "--data", table, "--output", tmp_path / "p.csv")
    assert str(path) in message and len(message.splitlines()) == 1
    assert {"folder": "is a folder", "other format": "has format 99"}.get(kind, "is not a model") in message
    assert not (tmp_path / "p.csv").exists()


@pytest.mark.parametrize("rows", ["none", "all incomplete"])
@pytest.mark.parametrize("task", ["regression", "classification"])
def test_no_rows_give_an_empty_prediction(rows, task, frame, models, tmp_path):
    table, output = tmp_path / "new.csv", tmp_path / "p.csv"
    new = frame.iloc[:0] if rows == "none" else frame.iloc[:2].assign(age=np.nan)
    new.to_csv(table, index=False)
    arguments = ["predict", "--model", models[task], "--data", table, "--output", output, "--drop-missing"]
    assert main([str(argument) for argument in arguments]) == 0
    answer = pd.read_csv(output, skip_blank_lines=False)
    names = ["mean", "sd", "lower", "upper"] if task == "regression" else ["probability", "class"]
    assert list(answer.columns) == [*names, "extrapolates"]
    assert len(answer) == len(new) and answer.isna().all(axis=None)


def test_fit_and_predict_classes(frame, table, tmp_path):
    frame.assign(dear=np.where(frame["price"] > 600, "yes", "no")).drop(columns="price").to_csv(table, index=False)
    fit = ["fit", "--data", table, "--target", "dear", "--method", "als", *SMALL, "--output", tmp_path / "model.pt"]
    assert run(*fit) == 0
    predict = ["predict", "--model", tmp_path / "model.pt", "--data", table, "--output", tmp_path / "p.csv"]
    assert run(*predict) == 0
    answer = pd.read_csv(tmp_path / "p.csv")
    assert list(answer.columns) == ["probability", "class", "extrapolates"]
    assert (answer["class"] == np.where(frame["price"] > 600, "yes", "no")).mean() > 0.9
    assert ((answer["probability"] >= 0.5) == (answer["class"] == "yes")).all()


def test_several_classes(frame, table, tmp_path, capsys):
    fit = ["fit", "--data", table, "--target", "kind", *SMALL, "--output", tmp_path / "model.pt"]
    assert run(*fit) == 0
    assert "Classification of 'kind'" in capsys.readouterr().out
    assert run("predict", "--model", tmp_path / "model.pt", "--data", table, "--output", tmp_path / "p.csv") == 0
    answer = pd.read_csv(tmp_path / "p.csv")
    names = [f"probability {name}" for name in ("castle", "house", "hut")]
    assert list(answer.columns) == ["class", *names, "extrapolates"] and np.allclose(answer[names].sum(axis=1), 1)
    assert (answer["class"] == frame["kind"]).mean() > 0.6  # castles are told by their price
    compare = ["compare", "--data", table, "--target", "kind", "--splits", 1, "--quiet", "--output", tmp_path / "out"]
    assert run(*compare, "--models", "mean", "linear", "boosting", "svgp", "exact") == 0
    trials = json.loads((tmp_path / "out" / "results.json").read_text())["trials"]
    assert [trial["status"] for trial in trials] == ["done"] * 3 + ["not applicable"] * 2
    assert trials[1]["scores"]["nll"] < trials[0]["scores"]["nll"]


def test_a_missing_package_names_the_extra(table):
    code = "import sys; sys.modules['pandas'] = None\nfrom gpytorch_tkrr.__main__ import main\n"
    done = run_python(f"{code}sys.exit(main(['compare', '--data', {str(table)!r}, '--target', 'price']))")
    assert done.returncode == 2 and "gpytorch_tkrr[compare]" in done.stderr and "Traceback" not in done.stderr


def test_as_a_module(table, tmp_path):
    command = [sys.executable, "-m", "gpytorch_tkrr", "compare", "--data", str(table), "--target", "price"]
    options = ["--inputs", "size", "age", "--models", "mean", "linear", "--splits", "1", "--output", str(tmp_path)]
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "linear" in done.stdout and (tmp_path / "report.html").exists()
