from __future__ import annotations

import gzip

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pd = pytest.importorskip("pandas")
pytest.importorskip("pyarrow")

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.data.source import Shard, as_source
from gpytorch_tkrr.data.training import TrainingData

N = 103
COLUMNS = ["month", "hour", "distance", "delay"]


def make_frame(num_rows=N):
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "month": rng.integers(1, 13, num_rows),
            "hour": rng.integers(0, 24, num_rows).astype(np.int16),
            "distance": rng.uniform(50, 3000, num_rows).astype(np.float32),
            "delay": rng.normal(10, 30, num_rows),
            "carrier": rng.choice(["AA", "UA"], num_rows),
        }
    )


def write(frame, folder, kind):
    """The file, and the names that its columns have there."""
    path = folder / f"flights.{kind}"
    if kind == "parquet":
        frame.to_parquet(path, row_group_size=17)
    elif kind == "folder":
        path.mkdir()
        for i, start in enumerate(range(0, len(frame), 40)):
            frame[start : start + 40].to_parquet(path / f"part-{i}.parquet", row_group_size=15)
    elif kind.startswith("csv"):
        frame.to_csv(path, index=False)
    elif kind == "npz":
        np.savez_compressed(path, **{name: frame[name].to_numpy() for name in COLUMNS})
    else:
        np.save(path, frame[COLUMNS].to_numpy(np.float64))
    return path, dict(zip(COLUMNS, range(4) if kind == "npy" else COLUMNS, strict=True))


KINDS = ["parquet", "folder", "csv", "csv.gz", "npy", "npz"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_gives_the_same_batches_again_and_again(tmp_path, kind):
    frame = make_frame()
    path, names = write(frame, tmp_path, kind)
    inputs = ["distance", "month"]
    source = tkrr.open_table(
        path, target=names["delay"], inputs=[names[name] for name in inputs], weight=names["hour"], batch_rows=10
    )
    assert source.num_rows == N
    for _ in range(2):
        batches = list(source)
        assert max(len(x) for x, _, _ in batches) <= 10
        x, y, weight = (torch.cat(parts) for parts in zip(*batches, strict=True))
        assert x.dtype == y.dtype == torch.float64
        np.testing.assert_allclose(x, frame[inputs].to_numpy(np.float64), rtol=1e-6)
        np.testing.assert_allclose(y, frame["delay"], rtol=1e-12)
        np.testing.assert_array_equal(weight, frame["hour"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 5, 200])
def test_shards_have_every_row_once(tmp_path, kind, size):
    path, names = write(make_frame(), tmp_path, kind)
    source = tkrr.open_table(path, target=names["delay"], inputs=[names["month"], names["distance"]], batch_rows=7)
    shards = [Shard(source, rank, size) for rank in range(size)]
    whole, parts = list(source), [batch for shard in shards for batch in shard]
    for k in range(2):
        assert torch.equal(torch.cat([batch[k] for batch in parts]), torch.cat([batch[k] for batch in whole]))
    assert [shard.num_rows for shard in shards] == [sum(len(y) for _, y in shard) for shard in shards]
    assert max(shard.num_rows for shard in shards) - min(shard.num_rows for shard in shards) <= 1


def test_default_inputs_are_all_other_columns(tmp_path):
    frame = make_frame().drop(columns="carrier")
    path, _ = write(frame, tmp_path, "parquet")
    source = tkrr.open_table(path, target="delay", weight="hour")
    assert source.inputs == ["month", "distance"]


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_columns_that_cannot_be_used_are_named(tmp_path, kind):
    path, _ = write(make_frame(), tmp_path, kind)
    with pytest.raises(tkrr.InputError, match=r"no column 'arrival'.*month, hour"):
        tkrr.open_table(path, target="arrival")
    with pytest.raises(tkrr.InputError, match=r"'carrier'.*no numbers but (values of type.*string|'..' in row 0)"):
        list(tkrr.open_table(path, target="delay"))
    with pytest.raises(tkrr.InputError, match="no file"):
        tkrr.open_table(tmp_path / "missing.parquet", target="delay")
    with pytest.raises(tkrr.InputError, match="must end in"):
        tkrr.open_table(tmp_path / "flights.xlsx", target="delay")


@pytest.mark.parametrize("kind", ["parquet", "csv", "npy", "npz"])
def test_the_first_missing_value_is_named(tmp_path, kind):
    frame = make_frame()
    frame.loc[[61, 90], "distance"] = np.nan
    path, names = write(frame, tmp_path, kind)
    source = tkrr.open_table(path, target=names["delay"], inputs=[names["month"], names["distance"]], batch_rows=25)
    with pytest.raises(tkrr.InputError, match=r"inputs hold NaN.*row 61\b"):
        TrainingData(source)
    with pytest.raises(tkrr.InputError, match=r"row 61\b"):
        TrainingData(Shard(source, 1, 2))


def test_missing_integers_of_parquet_are_missing_values(tmp_path):
    frame = make_frame().astype({"month": "Int64"})
    frame.loc[12, "month"] = pd.NA
    path, _ = write(frame, tmp_path, "parquet")
    with pytest.raises(tkrr.InputError, match=r"row 12\b"):
        TrainingData(tkrr.ParquetSource(path, target="delay", inputs=["month"]))


def test_csv_with_quotes_blank_lines_and_a_byte_order_mark(tmp_path):
    path = tmp_path / "data.csv.gz"
    with gzip.open(path, "wt", encoding="utf-8-sig") as file:
        file.write('"a, b",y\n"1",2\n\n3,4\n')
    (batch,) = tkrr.CSVSource(path, target="y")
    assert batch[0].tolist() == [[1.0], [3.0]] and batch[1].tolist() == [2.0, 4.0]
    path = tmp_path / "ragged.csv"
    path.write_text("a,y\n1,2\n3\n")
    with pytest.raises(tkrr.InputError, match=r"Row 1 .* has 1 columns"):
        list(tkrr.CSVSource(path, target="y"))


def test_arrays_that_cannot_be_used_are_refused(tmp_path):
    np.save(tmp_path / "s.npy", np.array([["a"], ["b"]]))
    with pytest.raises(tkrr.InputError, match="must hold numbers"):
        tkrr.NpySource(tmp_path / "s.npy", target=0)
    np.savez(tmp_path / "l.npz", x=np.zeros(4), y=np.zeros(5))
    with pytest.raises(tkrr.InputError, match="differ in length"):
        list(tkrr.NpzSource(tmp_path / "l.npz", target="y"))
    np.savez(tmp_path / "f.npz", x=np.asfortranarray(np.zeros((3, 2))), y=np.zeros(3))
    with pytest.raises(tkrr.InputError, match="C order"):
        list(tkrr.NpzSource(tmp_path / "f.npz", target="y"))
    np.savez(tmp_path / "m.npz", x=np.arange(6).reshape(3, 2), y=np.zeros(3))
    ((x, _),) = tkrr.NpzSource(tmp_path / "m.npz", target="y", inputs=["x1"])
    assert x.tolist() == [[1.0], [3.0], [5.0]]
    np.save(tmp_path / "short.npy", np.zeros((3, 2)))
    (tmp_path / "short.npy").write_bytes((tmp_path / "short.npy").read_bytes()[:-8])
    with pytest.raises(tkrr.InputError, match="cannot be read"):
        tkrr.NpySource(tmp_path / "short.npy", target=0)


@pytest.mark.parametrize("kind", KINDS)
def test_columns_are_named_or_numbered(tmp_path, kind):
    frame = make_frame()[COLUMNS]
    path, _ = write(frame, tmp_path, kind)
    for target, inputs in ((3, [0, -2]), (-1, [-4, 2])):
        source = tkrr.open_table(path, target=target, inputs=inputs)
        x, y = (torch.cat(parts) for parts in zip(*source, strict=True))
        np.testing.assert_allclose(x, frame[["month", "distance"]], rtol=1e-6)
        np.testing.assert_allclose(y, frame["delay"], rtol=1e-12)
    with pytest.raises(tkrr.InputError, match="no column 4"):
        tkrr.open_table(path, target=4)


def test_a_column_is_used_once(tmp_path):
    path, _ = write(make_frame(), tmp_path, "csv")
    for options in ({"inputs": ["hour", "delay"]}, {"inputs": ["hour", "hour"]}, {"weight": "delay"}):
        with pytest.raises(tkrr.InputError, match="named twice"):
            tkrr.open_table(path, target="delay", **options)
    path.write_text("a,a,b,y\n1,2,3,4\n")
    with pytest.raises(tkrr.InputError, match="more than one column 'a'"):
        tkrr.open_table(path, target="y")
    assert tkrr.open_table(path, target="y", inputs=["b"]).num_rows == 1


@pytest.mark.parametrize("kind", ["parquet", "npy", "npz", "csv"])
def test_files_without_content_are_refused(tmp_path, kind):
    path = tmp_path / f"empty.{kind}"
    path.write_bytes(b"")
    with pytest.raises(tkrr.InputError, match=r"empty\.\w+ (cannot be read|has no column)"):
        tkrr.open_table(path, target=0)
    path, names = write(make_frame(0), tmp_path, kind)
    with pytest.raises(tkrr.InputError, match="no rows"):
        TrainingData(tkrr.open_table(path, target=names["delay"], inputs=[names["month"]]))


def test_arrays_of_any_number_type_and_order(tmp_path):
    table = np.random.default_rng(0).integers(0, 100, (50, 3))
    for dtype in (np.float32, np.float16, np.int8, np.uint64, np.bool_):
        for order in "CF":
            np.save(tmp_path / "t.npy", np.array(table, dtype=dtype, order=order))
            source = tkrr.NpySource(tmp_path / "t.npy", target=2, batch_rows=7)
            x, y = (torch.cat(parts) for parts in zip(*source, strict=True))
            np.testing.assert_array_equal(np.column_stack([x, y]), table.astype(dtype).astype(float))


def test_columns_of_parquet_that_are_numbers(tmp_path):
    """Booleans, small integers, half precision; many row groups, of which a batch may span several."""
    frame = pd.DataFrame(
        {"b": [True, False] * 25, "i": np.arange(50, dtype=np.uint8), "h": np.arange(50, dtype=np.float16), "y": 0.5}
    )
    frame.to_parquet(tmp_path / "t.parquet", row_group_size=3)
    x, _ = (torch.cat(p) for p in zip(*tkrr.open_table(tmp_path / "t.parquet", target="y", batch_rows=7), strict=True))
    np.testing.assert_array_equal(x, frame[["b", "i", "h"]].to_numpy(float))
    frame["b"] = frame["b"].astype("boolean")
    frame.loc[31, "b"] = pd.NA
    frame.to_parquet(tmp_path / "t.parquet", row_group_size=3)
    with pytest.raises(tkrr.InputError, match=r"row 31\b"):
        TrainingData(tkrr.open_table(tmp_path / "t.parquet", target="y"))


def test_files_of_a_folder_must_agree(tmp_path):
    pd.DataFrame({"a": [1.0], "y": [1.0]}).to_parquet(tmp_path / "0.parquet")
    pd.DataFrame({"b": [1.0], "y": [1.0]}).to_parquet(tmp_path / "1.parquet")
    with pytest.raises(tkrr.InputError, match=r"1\.parquet has no column 'a'"):
        list(tkrr.open_table(tmp_path, target="y"))


@pytest.mark.parametrize("text", ["a, y\r\n1,2\r\n3,4\r\n", "y,a\n2,1\n4,3", '"a","y"\n1,2\n"3"," 4"\n'])
def test_lines_of_a_csv_file(tmp_path, text):
    path = tmp_path / "data.csv"
    path.write_bytes(text.encode())
    (batch,) = tkrr.CSVSource(path, target="y", inputs=["a"])
    assert batch[0].tolist() == [[1.0], [3.0]] and batch[1].tolist() == [2.0, 4.0]


def test_lines_of_a_csv_file_that_do_not_fit(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("a,y\n1,2\n3,4,5\n")
    with pytest.raises(tkrr.InputError, match=r"Row 1 .* has 3 columns; its first line names 2"):
        list(tkrr.CSVSource(path, target="y"))
    path.write_text('a,n,y\n1,"two\nlines",2\n3,"one, line",4\n')
    with pytest.raises(tkrr.InputError, match="line break"):
        list(tkrr.CSVSource(path, target="y", inputs=["a"]))
    path.write_text('a,n,y\n1,"one, line",2\n3,NA,NA\n')
    ((x, y),) = tkrr.CSVSource(path, target="y", inputs=["a"])
    assert x.tolist() == [[1.0], [3.0]] and y[0] == 2.0 and y[1].isnan()


def test_arrays_that_are_not_asked_for_may_hold_anything(tmp_path):
    """Names of airports beside columns of flights, for instance."""
    codes = np.array(["JFK", "SFO"])
    np.savez(tmp_path / "t.npz", codes=codes, objects=codes.astype(object), scalar=3, x=np.arange(3), y=np.arange(3))
    ((x, y),) = tkrr.NpzSource(tmp_path / "t.npz", target="y", inputs=["x"])
    assert x[:, 0].tolist() == y.tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(tkrr.InputError, match="Name those to use"):
        list(tkrr.NpzSource(tmp_path / "t.npz", target="y"))
    np.savez(tmp_path / "t.npz", x=np.array(["a", "b"]), y=np.arange(2))
    with pytest.raises(tkrr.InputError, match=r"x\.npy must hold numbers"):
        list(tkrr.NpzSource(tmp_path / "t.npz", target="y"))


@given(st.integers(0, 60), st.integers(1, 9), st.integers(1, 20))
def test_shards_of_any_iterable(num_rows, size, batch_rows):
    y = torch.arange(num_rows)
    batches = [
        (y[start : start + batch_rows, None], y[start : start + batch_rows]) for start in range(0, num_rows, batch_rows)
    ]
    parts = [batch for rank in range(size) for batch in Shard(batches, rank, size)]
    assert [int(v) for _, targets in parts for v in targets] == list(range(num_rows))


def test_a_memory_map_is_a_source(tmp_path):
    path, _ = write(make_frame(), tmp_path, "npy")
    table = np.load(path, mmap_mode="r")
    source = as_source((table[:, :3], table[:, 3]))
    assert isinstance(source, tkrr.ArraySource)
    for _ in range(2):
        x, y = (torch.cat(parts) for parts in zip(*source, strict=True))
        np.testing.assert_array_equal(np.column_stack([x, y]), table)
    with pytest.raises(tkrr.InputError, match="same number of rows"):
        as_source((np.zeros((3, 2)), np.zeros(4)))
