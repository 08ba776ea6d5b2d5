"""Run one benchmark: ``python -m benchmarks NAME [options]``; without a name, list them all.

A benchmark is a module of this package with a docstring, ``add_arguments(parser)`` and ``run(args) -> Report``.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import benchmarks

RESULTS = Path(__file__).parent / "results"


def find_benchmarks() -> dict[str, str]:
    """Name and one-line description of every benchmark, found without importing any of them."""
    found = {}
    for info in pkgutil.iter_modules(benchmarks.__path__):
        spec = info.module_finder.find_spec(info.name, None)
        if spec is None or spec.origin is None:
            continue
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in tree.body):
            found[info.name] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


def overview(found: dict[str, str]) -> str:
    """The list that is printed when no benchmark is named."""
    width = max(map(len, found), default=0)
    lines = [f"  {name:<{width}}  {description}" for name, description in sorted(found.items())]
    return "\n".join(["usage: python -m benchmarks NAME [options]", "", "benchmarks:", *(lines or ["  (none)"])])


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run the benchmark named by the first argument, print its table and write its JSON.

    :param argv: The arguments; those of the command line if None.
    :return: The exit code.
    """
    name, *rest = [*(sys.argv[1:] if argv is None else argv)] or ["--help"]
    found = find_benchmarks()
    if name in ("-h", "--help"):
        print(overview(found))
        return 0
    if name not in found:
        print(f"There is no benchmark {name!r}.\n\n{overview(found)}", file=sys.stderr)
        return 2

    module = importlib.import_module(f"benchmarks.{name}")
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {name}", description=module.__doc__)
    module.add_arguments(parser)
    parser.add_argument("--threads", type=int, help="threads of torch (default: torch's own choice)")
    parser.add_argument("--output", type=Path, default=RESULTS, help="directory of the JSON file")
    args = parser.parse_args(rest)
    if args.threads is not None:
        torch.set_num_threads(args.threads)

    report = module.run(args)
    print(report.table())
    path = report.write(args.output, options=vars(args))
    print(f"\nwritten: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
