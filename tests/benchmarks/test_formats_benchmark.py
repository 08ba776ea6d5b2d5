"""``python -m benchmarks formats`` at toy size."""

import argparse
import json

import pytest

pytest.importorskip("pandas")

from benchmarks import formats


def test_formats_have_about_as_many_weights():
    for rank, sizes in ((3, [17] * 6), (5, [17] * 8), (4, [3, 20, 9])):
        (train, num_train), (ordered, num_ordered), (cp, num_cp) = formats.formats_of(rank, sizes).values()
        assert ordered.is_undecided and (ordered.rank, num_ordered) == (train.rank, num_train)
        assert sum(h * m for h, m in zip(train.heights(sizes), sizes, strict=True)) == num_train
        assert abs(num_cp - num_train) <= sum(sizes) / 2
        assert cp.rank * sum(sizes) == num_cp


def test_rows_and_verdicts(tmp_path):
    parser = argparse.ArgumentParser()
    formats.add_arguments(parser)
    sizes = "--splits 2 --ranks 2 --num-basis 4 --draws 4 --rows 120 --sets".split()
    args = parser.parse_args([*sizes, "robot arm"])
    args.threads = 1
    report = formats.run(args)
    assert not [note for note in report.notes if note.startswith("FAILED")]
    assert len(report.rows) == 2 * 3 * 2 and {row["fit"] for row in report.rows} == {"Gibbs", "ALS"}
    verdicts = [note for note in report.notes if note.startswith("robot arm, ")]
    assert len(verdicts) == 2 and "TensorTrain, ordered (168 weights)" in verdicts[0] and "of 2 splits" in verdicts[0]
    path = report.write(tmp_path, options=vars(args))
    rows = json.loads(path.read_text())["rows"]
    assert formats.summarise(rows) == verdicts
