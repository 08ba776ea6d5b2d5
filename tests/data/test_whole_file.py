"""Files are written whole or not at all."""

from __future__ import annotations

import pytest

from gpytorch_tkrr.data.whole_file import whole_file


def test_replaces_at_the_end_and_an_error_changes_nothing(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), whole_file(path) as part:
        part.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    with whole_file(str(path)) as part:
        part.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]
