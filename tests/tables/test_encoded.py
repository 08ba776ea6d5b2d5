"""Rows of files as numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gpytorch_tkrr as tkrr

pd = pytest.importorskip("pandas")

from gpytorch_tkrr.tables.columns import scan
from gpytorch_tkrr.tables.encoded import EncodedSource


@pytest.mark.parametrize("batch_rows", [1, 3, 100])
@pytest.mark.parametrize("without", [[], [0], [4, 5, 6], [0, 1, 10], [2, 9, 10]])
def test_rows_are_left_out(tmp_path, batch_rows, without):
    path = tmp_path / "rows.csv"
    pd.DataFrame({"kind": list("abcabcabcab"), "y": np.arange(11.0)}).to_csv(path, index=False)
    table = tkrr.open_table(path, target="y", batch_rows=batch_rows)
    columns = scan(table.frames(0, table.num_rows, table.inputs))
    source = EncodedSource(table, columns, lambda y: y.to_numpy(dtype=float), without=np.array(without, dtype=np.int64))
    kept = [row for row in range(11) if row not in without]
    assert source.num_rows == len(kept)
    for start in range(len(kept)):
        for stop in range(start + 1, len(kept) + 1):
            batches = list(source.rows(start, stop))
            assert torch.cat([y for _, y in batches]).tolist() == kept[start:stop]
            assert torch.cat([x for x, _ in batches])[:, 0].tolist() == [row % 3 for row in kept[start:stop]]
    shards = [y for rank in range(3) for _, y in tkrr.Shard(source, rank, 3)]
    assert torch.cat(shards).tolist() == kept
