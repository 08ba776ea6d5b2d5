"""Imports go one way, as the table of rooms in docs/architecture.md says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from repository import PACKAGE, read, run_python


@dataclass(frozen=True)
class Room:
    """A row of the table: a folder, or a file beside the folders."""

    name: str
    below: tuple[str, ...]  # rooms whose files it may import
    files: tuple[str, ...]  # each may import those before it


def read_rooms() -> dict[str, Room]:
    """The table of rooms, lowest first."""
    rows = re.findall(r"^\| `([\w/.]+)` \| .* \| (.*) \| (.*) \|$", read("docs/architecture.md"), re.MULTILINE)
    rooms = {}
    for name, below, files in rows:
        name = name.rstrip("/").removesuffix(".py")
        rooms[name] = Room(
            name,
            tuple(each.rstrip("/").removesuffix(".py") for each in re.findall(r"`([\w/.]+)`", below)),
            tuple(re.findall(r"`(\w+)`", files)),
        )
    return rooms


ROOMS = read_rooms()
MODULES = {path.relative_to(PACKAGE).with_suffix("").as_posix() for path in PACKAGE.rglob("*.py")}


def room_of(module: str) -> str:
    """The room of a module such as `features/basis`; a file beside the folders is a room of its own."""
    return module.rpartition("/")[0] or module


def imports(source: str, module: str, modules: set[str] = MODULES) -> Iterator[str]:
    """
    The modules of the package that a source imports: at any depth, under `TYPE_CHECKING`, in functions, by relative or
    absolute names. A name that is no module stands for the package that it is taken from.
    """
    package = ["gpytorch_tkrr", *module.split("/")[:-1]]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            start = [*start, *(node.module.split(".") if node.module else [])]
            found = [[*start, alias.name] for alias in node.names]
        else:
            continue
        for parts in found:
            if parts[0] == "gpytorch_tkrr":
                path = "/".join(parts[1:])
                while path and path not in modules and f"{path}/__init__" not in modules:
                    path = path.rpartition("/")[0]
                yield path if path in modules else f"{path}/__init__".lstrip("/")


def violations(source: str, module: str, rooms: dict[str, Room] = ROOMS, modules: set[str] = MODULES) -> list[str]:
    """What a source imports against the table."""
    found = []
    here = rooms[room_of(module)]
    for target in imports(source, module, modules):
        room = room_of(target) if target != "__init__" else ""
        if room == here.name and room != module:
            files = here.files
            name, other = module.rpartition("/")[2], target.rpartition("/")[2]
            if other not in files[: files.index(name)]:
                found.append(f"{module} imports {target}, which does not stand before it in its room")
        elif room not in here.below:
            found.append(f"{module} imports {target or 'the package'}, and {here.name} does not lie above it")
    return found


def test_table_names_every_file_once():
    listed = [f"{room.name}/{file}" for room in ROOMS.values() for file in room.files]
    listed += [room.name for room in ROOMS.values() if not room.files]
    assert len(listed) == len(set(listed))
    assert {module for module in MODULES if not module.endswith("__init__")} == set(listed)


def test_rooms_lie_above_each_other():
    names = list(ROOMS)
    for position, room in enumerate(ROOMS.values()):
        assert set(room.below) <= set(names[:position]), f"{room.name} knows rooms that do not stand above its row"


@pytest.mark.parametrize("module", sorted(module for module in MODULES if not module.endswith("__init__")))
def test_imports_follow_the_table(module: str):
    assert violations((PACKAGE / f"{module}.py").read_text(encoding="utf-8"), module) == []


@pytest.mark.parametrize("module", sorted(module for module in MODULES if module.endswith("/__init__")))
def test_rooms_are_imported_by_file(module: str):
    """A file is imported by its name; only the clients have a face, and likelihoods register themselves."""
    source = (PACKAGE / f"{module}.py").read_text(encoding="utf-8")
    room = room_of(module)
    assert {room_of(target) for target in imports(source, module)} <= (
        {room} & {"botorch", "sklearn", "model/likelihoods"}
    )


@pytest.mark.parametrize(
    "line",
    [
        "from ..upper.b import thing",
        "from gpytorch_tkrr.upper.b import thing",
        "import gpytorch_tkrr.upper.b",
        "from ..upper import b",
        "def f():\n    from ..upper.b import thing",
        "if TYPE_CHECKING:\n    from ..upper.b import thing",
        "from .second import thing",
        "from .. import TKRR",
        "from gpytorch_tkrr import TKRR",
    ],
)
def test_imports_that_point_up_are_found(line: str):
    rooms = {"lower": Room("lower", (), ("first", "second")), "upper": Room("upper", ("lower",), ("b",))}
    modules = {"__init__", "lower/__init__", "lower/first", "lower/second", "upper/__init__", "upper/b"}
    assert violations(line, "lower/first", rooms, modules)
    assert not violations("from .first import thing\nimport torch", "lower/second", rooms, modules)
    assert not violations("from ..lower.second import thing", "upper/b", rooms, modules)


def test_import_loads_no_more_than_gpytorch_does():
    """In a process of its own: no installed package beyond what GPyTorch, SciPy and torch's checkpoint load."""
    code = (
        "import sys, gpytorch, scipy.optimize, scipy.special, torch.utils.checkpoint\n"  # SymPy, in torch 2.4
        "from pathlib import Path\n"
        "site = Path(gpytorch.__file__).parents[1]\n"
        "def packages():\n"
        "    files = [Path(getattr(m, '__file__', None) or '/') for m in list(sys.modules.values())]\n"
        "    return {f.relative_to(site).parts[0] for f in files if f.is_relative_to(site)}\n"
        "before = packages()\n"
        "import gpytorch_tkrr\n"
        "print(*sorted(packages() - before - {'gpytorch_tkrr'}))"
    )
    done = run_python(code)
    assert done.returncode == 0 and done.stdout.split() == [], done.stderr
