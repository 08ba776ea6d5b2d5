"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """
    A file beside `path` to write to, which takes its place at the end. After an error nothing has changed.

    :param path: The file; it is replaced if it exists.

    Example:
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "answer.txt")
        ...     with whole_file(path) as part:
        ...         _ = part.write_text("42")
        ...     path.read_text(), len(list(path.parent.iterdir()))
        ('42', 1)
    """
    path = Path(path)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
