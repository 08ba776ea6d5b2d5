"""A lock on a file that ends with its process, however that ends."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO

from ..errors import CheckpointError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl


class FileLock:
    """
    A lock that one process holds at a time, held by the operating system on a file beside the one that it protects.

    :param path: The file to be protected.
    """

    def __init__(self, path: Path):
        self.path = Path(f"{path}.lock")
        self._file: IO[bytes] | None = None

    def acquire(self) -> bool:
        """
        Take the lock.

        :return: False where another holds it.
        """
        while True:
            file = self.path.open("ab")
            try:
                _lock(file)
            except OSError as error:
                file.close()
                if error.errno in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
                    return False
                raise CheckpointError(f"{self.path} cannot be locked ({error}). Use another file system.") from error
            if self._is_current(file):  # and not one that its last holder has removed meanwhile
                self._file = file
                return True
            file.close()

    def release(self) -> None:
        """Give the lock back, if it is held, and remove its file."""
        if self._file is None:
            return
        if sys.platform == "win32":
            self._file.close()
            with suppress(OSError):  # taken by another in between
                self.path.unlink()
        else:
            self.path.unlink(missing_ok=True)
            self._file.close()
        self._file = None

    def _is_current(self, file: IO[bytes]) -> bool:
        try:
            return os.path.samestat(os.fstat(file.fileno()), os.stat(self.path))
        except FileNotFoundError:
            return False


def _lock(file: IO[bytes]) -> None:
    if sys.platform == "win32":
        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
