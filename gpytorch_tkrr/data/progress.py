"""A progress bar, or nothing."""

from __future__ import annotations

from typing import Any


class ProgressBar:
    """
    Counts steps and shows a short text beside them.

    :param bar: A tqdm bar, or None to stay silent.
    """

    def __init__(self, bar: Any = None):
        self._bar = bar

    def update(self, text: str) -> None:
        """
        One step done.

        :param text: What to show beside the bar.
        """
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update()

    def skip(self, steps: int) -> None:
        """
        Steps that were announced and are not needed.

        :param steps: How many.
        """
        if self._bar is not None:
            self._bar.update(steps)

    def close(self) -> None:
        """The end."""
        if self._bar is not None:
            self._bar.close()


def progress_bar(progress: bool, total: int, description: str, unit: str, *, done: int = 0) -> ProgressBar:
    """
    A bar on the screen where one is wanted.

    :param progress: Whether it is.
    :param total: Number of steps.
    :param description: Stands before the bar.
    :param unit: What a step is.
    :param done: Steps done before, by a fit that is resumed.
    """
    if not progress:
        return ProgressBar()
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise ImportError("progress=True needs tqdm: pip install tqdm, or gpytorch_tkrr[progress].") from error
    return ProgressBar(tqdm(total=total, initial=done, desc=description, unit=unit))
