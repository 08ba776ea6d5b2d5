"""What a column is, told from pieces of it; and numbers, however they are written."""

from __future__ import annotations

from decimal import Decimal

import numpy as np
import pytest

pd = pytest.importorskip("pandas")

import gpytorch_tkrr as tkrr
from gpytorch_tkrr.tables.columns import MAX_LEVELS, Columns, scan


def test_a_column_whose_later_rows_are_text():
    pieces = [pd.DataFrame({"a": [0, 3]}), pd.DataFrame({"a": ["low", None, "high"]}, dtype=object)]
    (column,) = scan(pieces).inputs
    assert column.kind == "category" and {"high", "low"} <= set(column.levels)
    np.testing.assert_array_equal(
        column.encode(pieces[1]["a"])[[0, 2], 0], [column.levels.index("low"), column.levels.index("high")]
    )


def test_too_many_texts_are_refused_before_all_are_kept():
    piece = pd.DataFrame({"a": [f"name {i}" for i in range(MAX_LEVELS * 20 + 1)]})
    with pytest.raises(tkrr.InputError, match="'a'"):
        scan([piece, iter(())])


def test_a_new_level_of_an_ordered_column_is_refused():
    sizes = pd.Series(pd.Categorical(["s", "m", "l"], categories=["s", "m", "l"], ordered=True))
    columns = Columns.learn(pd.DataFrame({"size": sizes}))
    np.testing.assert_array_equal(columns.matrix(pd.DataFrame({"size": ["l", "s"]}))[:, 0], [2, 0])
    with pytest.raises(tkrr.InputError, match=r"'size' holds 'xl', which is none of its levels"):
        columns.matrix(pd.DataFrame({"size": ["s", "xl"]}))


def test_numbers_of_any_type():
    columns = Columns.learn(pd.DataFrame({"a": [1.0, 2.0, 5.0]}))
    written = pd.DataFrame({"a": ["3", " 4.5 ", True, Decimal("0.25"), 7, "  "]}, dtype=object)
    np.testing.assert_array_equal(columns.matrix(written)[:, 0], [3, 4.5, 1, 0.25, 7, np.nan])
    with pytest.raises(tkrr.InputError, match=r"'a' must hold numbers, but data row 2 has 'many'"):
        columns.matrix(pd.DataFrame({"a": [1.0, "many"]}, dtype=object))


def test_names_of_the_numbers_of_categories():
    table = pd.DataFrame({"kind": ["hut", "house", "hut"], "size": [1.0, 2.0, 3.0]})
    columns = Columns.learn(table)
    assert columns.expanded_names == ["kind=hut", "size"]
    np.testing.assert_array_equal(columns.expand(columns.matrix(table)), [[1, 1], [0, 2], [1, 3]])
