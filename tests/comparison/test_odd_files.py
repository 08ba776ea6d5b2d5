"""Seventy odd and bad files through the command line: what each of them gets."""

from __future__ import annotations

import gzip

import numpy as np
import pytest

pd = pytest.importorskip("pandas")
pytest.importorskip("pyarrow")
pytest.importorskip("openpyxl")
pytest.importorskip("sklearn")

from gpytorch_tkrr.__main__ import main

N = 24
SIZE = np.linspace(1, 10, N)
FRAME = pd.DataFrame(
    {
        "size": SIZE,
        "kind": ["hut", "house", "castle"] * 8,
        "age": np.arange(N) % 7,
        "price": 10 * SIZE + np.arange(N) % 3,
    }
)


def csv(frame=FRAME, **options):
    return lambda path: frame.to_csv(path, **{"index": False, **options})


def text(content, encoding="utf-8"):
    return lambda path: path.write_bytes(content.encode(encoding) if isinstance(content, str) else content)


def changed(name, values):
    return FRAME.assign(**{name: values})


def one_bad(name, value):
    return changed(name, [value, *FRAME[name].tolist()[1:]])


CSV = FRAME.to_csv(index=False)
DAYS = pd.date_range("2024-01-30", periods=N, freq="D")

#: name of the file -> how it is written, further arguments, what is printed; a text that starts with "ok" is no error.
CASES = {
    # Read as they are
    "plain.csv": (csv(), [], "ok Regression of 'price': 24 rows, 3 inputs"),
    "packed.csv.gz": (lambda path: path.write_bytes(gzip.compress(CSV.encode())), [], "ok 3 categories"),
    "tabs.tsv": (csv(sep="\t"), [], "ok 3 categories: castle, house, hut"),
    "bom.csv": (text("\ufeff" + CSV), [], "ok 24 rows"),
    "windows.csv": (text(CSV.replace("\n", "\r\n")), [], "ok 24 rows"),
    "spaces.csv": (text(CSV.replace(",", ", ")), [], "ok 3 categories"),
    "blank_lines.csv": (text(CSV.replace("\n", "\n\n")), [], "ok 24 rows"),
    "quoted.csv": (csv(quoting=1), [], "ok 3 inputs"),
    "commas.csv": (csv(changed("kind", ["a, b", "c", "d"] * 8)), [], "ok 3 categories: a, b, c, d"),
    "table.parquet": (lambda path: FRAME.to_parquet(path), [], "ok 24 rows"),
    "table.xlsx": (lambda path: FRAME.to_excel(path, index=False), [], "ok 24 rows"),
    "arrays.npz": (lambda path: np.savez(path, x=np.stack([SIZE, SIZE**2], 1), price=SIZE), [], "ok 2 inputs"),
    "array.npy": (lambda path: np.save(path, np.stack([SIZE, SIZE**2], 1)), ["--target", "1"], "ok 1 inputs"),
    "semicolons.csv": (csv(sep=";"), ["--sep", ";"], "ok 3 inputs"),
    "comma_decimals.csv": (csv(sep=";", decimal=","), ["--sep", ";", "--decimal", ","], "ok 3 inputs"),
    "latin.csv": (text(CSV.replace("hut", "Hütte"), "latin-1"), ["--encoding", "latin-1"], "ok Hütte"),
    "unicode_names.csv": (csv(FRAME.rename(columns={"size": "größe 📏"})), [], "ok größe 📏"),
    "index.csv": (csv(index=True), [], "ok numbers the rows, as pandas writes an index: it is left out"),
    "booleans.csv": (csv(changed("age", FRAME["age"] > 3)), [], "ok 3 inputs"),
    "dates.csv": (csv(changed("age", DAYS.astype(str))), [], "ok a date, taken apart into day, weekday"),
    "german_dates.csv": (csv(changed("age", DAYS.strftime("%d.%m.%Y"))), [], "ok taken apart into day, weekday"),
    "day_first.csv": (csv(changed("age", DAYS.strftime("%d/%m/%Y"))), [], "ok taken apart into day, weekday"),
    "times.csv": (
        csv(changed("age", [f"2024-01-01 {h:02d}:30" for h in range(N)])),
        [],
        "ok a date, taken apart into day, hour",
    ),
    "question_marks.csv": (csv(one_bad("age", "?")), ["--missing-value", "?", "--drop-missing"], "ok 23 rows"),
    "gaps.csv": (csv(one_bad("size", None)), ["--drop-missing"], "ok 23 rows"),
    "gaps_integrated.csv": (csv(one_bad("size", None)), ["--integrate-missing"], "ok 24 rows"),
    "gap_in_kind.tsv": (csv(one_bad("kind", None), sep="\t"), ["--integrate-missing", "--stream"], "ok 24 rows"),
    "streamed.txt.gz": (
        lambda path: path.write_bytes(gzip.compress(CSV.encode())),
        ["--stream"],
        "ok too few rows to hold 10 out for a score",
    ),
    "codes.csv": (csv(), ["--categorical", "age"], "ok 7 categories: 0, 1, 2, 3, 4"),
    "constant_input.csv": (csv(changed("age", 1)), [], "ok 3 inputs"),
    "big_numbers.csv": (csv(changed("price", FRAME["price"] * 1e12)), [], "ok 24 rows"),
    "classes.csv": (csv(), ["--target", "kind"], "ok Classification of 'kind'"),
    "numbers_as_classes.csv": (csv(changed("price", [0, 1] * 12)), ["--task", "classification"], "ok Classification"),
    "excluded.csv": (csv(changed("name", [f"n{i}" for i in range(N)])), ["--exclude", "name", "kind"], "ok 2 inputs"),
    # Refused, with a sentence that says what to do
    "empty.csv": (text(""), [], "cannot be read"),
    "names_only.csv": (text("size,price\n"), [], "no rows"),
    "one_row.csv": (csv(FRAME.head(1)), [], "constant"),
    "no_names.csv": (text("\n".join(f"{i},{i + 0.5}" for i in range(30))), [], "not the names of columns"),
    "ragged.csv": (text(CSV + "1,2,3,4,5,6\n"), [], "Expected 4 fields in line 26, saw 6"),
    "other_separator.csv": (csv(sep=";"), [], "separated by ';'? Say so by --sep"),
    "other_encoding.csv": (text(CSV.replace("hut", "Hütte"), "latin-1"), [], "--encoding latin-1"),
    "unknown_encoding.csv": (csv(), ["--encoding", "klingon"], "unknown encoding"),
    "wrong_suffix.docx": (csv(), [], "must end in .csv"),
    "no_parquet.parquet": (text("size,price\n"), [], "cannot be read"),
    "no_excel.xlsx": (text("size,price\n"), [], "cannot be read"),
    "cut.csv.gz": (lambda path: path.write_bytes(gzip.compress(CSV.encode())[:40]), [], "cannot be read"),
    "twice.csv": (text(CSV.replace("size,kind,age", "size,kind,size")), [], "more than one column 'size'"),
    "commas_everywhere.csv": (csv(sep=";", decimal=","), [], "separated by ';'? Say so by --sep"),
    "streamed.xlsx": (lambda path: FRAME.to_excel(path, index=False), ["--stream"], "leave out --stream"),
    "streamed_gap.csv": (csv(one_bad("size", None)), ["--stream"], "missing value) in data row 1, column 'size'"),
    "streamed_huge.csv": (csv(one_bad("age", 1e300)), ["--stream"], "contains 1e+300 in data row 1, column 'age'"),
    "streamed_semicolons.csv": (csv(sep=";"), ["--stream"], "separated by ';'? Say so by --sep"),
    "misspelt.csv": (csv(), ["--target", "prize"], "Did you mean 'price'?"),
    "missing.csv": (csv(one_bad("size", None)), [], "the first is data row 1, column 'size'"),
    "no_target_value.csv": (csv(one_bad("price", None)), [], "column 'price'"),
    "empty_column.csv": (csv(changed("age", None)), [], "The column 'age' is empty"),
    "bad_value.csv": (csv(one_bad("age", "o7")), [], "holds numbers, but data row 1 has 'o7'"),
    "bad_target.csv": (csv(one_bad("price", "10 EUR")), [], "holds numbers, but data row 1 has '10 EUR'"),
    "bad_date.csv": (
        csv(changed("age", [*DAYS.astype(str)[:-1], "soon"])),
        [],
        "holds dates, but data row 24 has 'soon'",
    ),
    "which_date.csv": (csv(changed("age", ["01/02/2024", "03/04/2024"] * 12)), [], "day first or month first"),
    "decimal_commas.csv": (csv(sep=";", decimal=","), ["--sep", ";"], "--decimal ,"),
    "huge.csv": (csv(one_bad("size", 1e300)), [], "contains 1e+300 in data row 1, column 'size'"),
    "huge_target.csv": (csv(one_bad("price", 1e300)), [], "beyond float64"),
    "infinite.csv": (csv(one_bad("size", np.inf)), [], "missing or infinite"),
    "two_numbers.csv": (csv(changed("price", [0, 1] * 12)), [], "0 and 1: are these classes or numbers?"),
    "constant_target.csv": (csv(changed("price", 5)), [], "constant: all values are 5"),
    "names.csv": (csv(pd.concat([changed("kind", [f"n{i}{j}" for j in range(N)]) for i in range(3)])), [], "--exclude"),
    "only_target.csv": (csv(FRAME[["price"]]), [], "There are no inputs"),
    "date_target.csv": (csv(changed("price", DAYS.astype(str))), [], "is a date"),
    "folder.csv": (lambda path: path.mkdir(), [], "is a folder"),
    "nowhere.csv": (lambda path: None, [], "There is no file"),
}


def test_there_are_seventy():
    assert len(CASES) >= 70


@pytest.mark.filterwarnings("ignore::gpytorch_tkrr.TKRRWarning")  # small fits of few rows
@pytest.mark.parametrize("name", CASES)
def test_odd_file(name, tmp_path, capsys):
    write, arguments, expected = CASES[name]
    write(tmp_path / name)
    output = tmp_path / "model.pt"
    command = ["fit", "--data", str(tmp_path / name), "--output", str(output), "--quiet"]
    options = ["--target", "price", "--method", "als", "--rank", "2", "--num-basis", "4"]
    code = main([*command, *options, *arguments])
    printed = capsys.readouterr()
    if expected.startswith("ok "):
        assert code == 0 and expected[3:] in printed.out, printed
        assert output.exists()
    else:
        assert code == 2 and expected in printed.err and "Traceback" not in printed.err, printed
        assert len(printed.err.strip().splitlines()) == 1 and not output.exists()
