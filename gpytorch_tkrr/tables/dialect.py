"""How a text file of columns is written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: What separates the columns of a text file, by the end of its name without that of a compression.
SEPARATORS = {".csv": ",", ".tsv": "\t", ".tab": "\t", ".txt": ","}

#: Ends of names of compressed files.
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zip")


@dataclass(frozen=True)
class Dialect:
    r"""
    How a text file is written.

    :param sep: What separates columns; None for a comma, in .tsv files a tab.
    :param encoding: Of its characters; None for UTF-8.
    :param decimal: What separates the digits of a number.
    :param missing_values: What stands for a missing value, beside nothing, NA, NaN, null and the like.

    Example:
        >>> from gpytorch_tkrr.tables.dialect import Dialect
        >>> Dialect().separator("flights.tsv.gz"), Dialect(sep=";").separator("flights.csv")
        ('\t', ';')
    """

    sep: str | None = None
    encoding: str | None = None
    decimal: str = "."
    missing_values: tuple[str, ...] = ()

    def separator(self, path: str | Path) -> str:
        """
        What separates the columns of a file.

        :param path: The file.
        """
        return self.sep or SEPARATORS.get(suffix_of(path), ",")

    def options(self, path: str | Path) -> dict[str, Any]:
        """
        What pandas' `read_csv` is told.

        :param path: The file.
        """
        return {
            "sep": self.separator(path),
            "encoding": self.encoding or "utf-8-sig",
            "decimal": self.decimal,
            "na_values": list(self.missing_values),
            "skipinitialspace": True,
            "low_memory": False,
        }


def advise_separator(names: list[str], sep: str) -> str:
    """
    A sentence where the columns of a file seem to be separated by something else; empty where they do not.

    :param names: The names in its first line.
    :param sep: What it was read with.

    Example:
        >>> from gpytorch_tkrr.tables.dialect import advise_separator
        >>> advise_separator(["size;price"], ",")
        "Its first line is one name, 'size;price'. Are its columns separated by ';'? Say so by --sep ';'"
    """
    if len(names) != 1:
        return ""
    others = {other: names[0].count(other) for other in (";", "\t", ",", "|") if other != sep}
    best = max(others, key=lambda other: others[other])
    if not others[best]:
        return ""
    shown = {"\t": "'\\t'"}.get(best, f"'{best}'")
    return f"Its first line is one name, {names[0]!r}. Are its columns separated by {best!r}? Say so by --sep {shown}"


def suffix_of(path: str | Path) -> str:
    """
    The end of a name, without that of a compression.

    :param path: The file.
    """
    suffixes = [suffix.lower() for suffix in Path(path).suffixes if suffix.lower() not in COMPRESSIONS]
    return suffixes[-1] if suffixes else ""
