"""Facts that are stated in more than one file agree."""

from __future__ import annotations

import re

from repository import read

import gpytorch_tkrr


def test_lowest_versions_are_the_declared_ones():
    declared = re.search(r"^dependencies = \[(.*?)^\]", read("pyproject.toml"), re.MULTILINE | re.DOTALL).group(1)
    bounds = dict(re.findall(r'"(\w+)>=([\d.]+)"', declared))
    lowest = dict(re.findall(r"^(\w+)==([\d.]+)$", read("constraints-lowest.txt"), re.MULTILINE))
    assert set(bounds) <= set(lowest) and len(bounds) == declared.count('"') // 2 - declared.count("python_version")
    extras = read("pyproject.toml").partition("[project.optional-dependencies]")[2]
    bounds |= {name: re.search(rf'"{name}>=([\d.]+)"', extras).group(1) for name in set(lowest) - set(bounds)}
    for name, bound in bounds.items():
        assert re.fullmatch(re.escape(bound) + r"(\.0)*", lowest[name])


def test_version():
    assert f"\nversion: {gpytorch_tkrr.__version__}\n" in read("CITATION.cff")


def test_public_names_exist():
    assert sorted(set(gpytorch_tkrr.__all__)) == sorted(gpytorch_tkrr.__all__)
    assert all(hasattr(gpytorch_tkrr, name) for name in gpytorch_tkrr.__all__)
