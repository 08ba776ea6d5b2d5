"""The command line: ``gpytorch-tkrr compare``, ``fit`` and ``predict``."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .comparison.comparison import check_output, compare
from .comparison.contender import CONTENDERS
from .comparison.saved_model import load
from .data.whole_file import whole_file
from .errors import ExtrapolationWarning, InputError, TKRRError, TKRRWarning

if TYPE_CHECKING:
    import pandas as pd

    from .comparison.table_fit import FitOptions
    from .tables.dialect import Dialect
    from .tables.task import Task

#: What is taken of the flight delays where the command line does not say: about two minutes on two cores.
FLIGHT_SIZES = {"max_train": 10_000, "max_test": 4000, "splits": 1}

#: Exit code after Ctrl-C, as shells count: 128 and the number of the signal.
INTERRUPTED = 130

#: Exit code of a comparison in which most models have failed.
MOSTLY_FAILED = 1

FIT = (
    "Fit T-KRR, a low-rank tensor model, to a table. Prints what the columns are, a score of held-out rows and what "
    "each column does, and writes a file for `predict`."
)

FORMATS = "a .csv, .tsv, .xlsx, .parquet, .npz or .npy file; text may be compressed (.gz)"


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run a command.

    :param argv: Arguments; those of the process by default.
    :return: 0; 1 if most models of a comparison failed; 2 if something about the input is wrong; 130 if the command was
        interrupted.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning  # type: ignore[assignment]
            return args.run(args)
    except ModuleNotFoundError as error:
        print(f"gpytorch-tkrr {args.command}: {error}. Try pip install 'gpytorch_tkrr[compare]'.", file=sys.stderr)
        return 2
    except (TKRRError, OSError, ImportError) as error:
        print(f"gpytorch-tkrr {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return INTERRUPTED


def _show_warning(message: Any, category: type[Warning], *where: Any) -> None:
    """A sentence, without the line of code that it comes from."""
    if issubclass(category, TKRRWarning):
        print(f"Warning: {message}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("gpytorch-tkrr", description="Gaussian processes for many data and many inputs.")
    parser.add_argument("--version", action="version", version=f"gpytorch-tkrr {version('gpytorch_tkrr')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    command = commands.add_parser(
        "compare",
        help="which model for my data? trains several on the same splits and writes a report",
        description="Train models on random splits of a table; print a table of scores, write report.html and "
        "results.json. Without --data: flight delays, in about two minutes.",
    )
    _add_table(command, required=False)
    command.add_argument(
        "--models", nargs="+", choices=list(CONTENDERS), metavar="MODEL", help=f"any of {', '.join(CONTENDERS)}"
    )
    command.add_argument("--train-fraction", type=float, default=0.8, help="share of training rows (default: 0.8)")
    command.add_argument("--splits", type=int, help="random splits (default: 3; flight delays: 1)")
    command.add_argument("--max-train", type=int, help="largest number of training rows, drawn at random")
    command.add_argument("--max-test", type=int, help="largest number of test rows (default: 10000)")
    _add_noise(command, "noise of T-KRR, Bayesian, in a regression")
    command.add_argument("--time-limit", type=float, default=300.0, help="seconds per model and split (default: 300)")
    command.add_argument("--memory-limit", type=float, help="GB that a model may allocate (Linux)")
    command.add_argument("--output", type=Path, default=Path(), help="folder of the report (default: this one)")
    command.add_argument("--quiet", action="store_true", help="no progress bars")
    command.set_defaults(run=_compare)

    command = commands.add_parser("fit", help="fit T-KRR to a table", description=FIT)
    _add_table(command, required=True)
    command.add_argument(
        "--method",
        choices=["gibbs", "als"],
        default="gibbs",
        help="Gibbs sampling (default), or alternating least squares: one solution, approximate intervals",
    )
    command.add_argument(
        "--integrate-missing",
        action="store_true",
        help="inputs may be missing, also in predictions: f is averaged over the values of their column",
    )
    command.add_argument("--rank", type=int, help="R, the number of components")
    command.add_argument("--num-basis", type=int, help="M, the number of sines per input")
    _add_noise(command, "noise of a regression by Gibbs sampling")
    command.add_argument(
        "--transform",
        choices=["log", "yeo-johnson"],
        help="model transformed targets; predictions are transformed back",
    )
    for name, text in (("draws", "draws of each chain"), ("warmup", "warm-up sweeps"), ("chains", "chains")):
        command.add_argument(f"--num-{name}", type=int, help=f"{text} of Gibbs sampling (default: chosen for the data)")
    command.add_argument("--output", type=Path, default=Path("model.pt"), help="the model's file (default: model.pt)")
    command.add_argument("--quiet", action="store_true", help="no progress bar")
    command.add_argument(
        "--stream", action="store_true", help="read the file in batches, again and again; also under torchrun"
    )
    command.add_argument("--checkpoint", type=Path, help="file to resume from if the fit is stopped (implies --stream)")
    command.add_argument("--memory", type=float, default=2.0, help="GB that a streamed fit may use to keep rows")
    command.add_argument("--timeout", type=float, default=600.0, help="seconds to wait for another process (torchrun)")
    command.set_defaults(run=_fit)

    command = commands.add_parser(
        "predict", help="predict with a fitted model", description="Predict with a model that `fit` has written."
    )
    command.add_argument("--model", type=Path, required=True, help="the model's file")
    command.add_argument("--data", type=Path, required=True, help=f"the inputs: {FORMATS}")
    _add_dialect(command)
    command.add_argument("--drop-missing", action="store_true", help="rows with missing values get no prediction")
    command.add_argument(
        "--keep-columns", type=_names, default=[], metavar="A,B", help="columns of the table to repeat, such as an id"
    )
    command.add_argument(
        "--output",
        type=Path,
        default=Path("predictions.csv"),
        help="a .csv, .tsv, .xlsx or .parquet file (default: predictions.csv)",
    )
    command.add_argument("--force", action="store_true", help="overwrite an existing file")
    command.set_defaults(run=_predict)
    return parser


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _add_dialect(command: argparse.ArgumentParser) -> None:
    command.add_argument("--sep", help="character between columns (default: a comma, in .tsv files a tab)")
    command.add_argument("--encoding", help="encoding of a text file (default: UTF-8)")
    command.add_argument("--decimal", default=".", help="decimal mark of numbers (default: a point)")
    command.add_argument(
        "--missing-value",
        action="append",
        default=[],
        metavar="TEXT",
        help="text that marks a missing value, such as ?",
    )


def _add_noise(command: argparse.ArgumentParser, what: str) -> None:
    command.add_argument(
        "--noise",
        choices=["gaussian", "student", "by-inputs", "skewed", "auto"],
        default="auto",
        help=f"{what}: Gaussian, with heavy tails, with heavy tails and a variance that depends on the inputs, "
        "the same with skewed tails, or chosen with held-out training rows (default)",
    )


def _add_table(command: argparse.ArgumentParser, *, required: bool) -> None:
    command.add_argument("--data", type=Path, required=required, help=FORMATS)
    command.add_argument("--target", required=required, help="column to predict")
    command.add_argument("--inputs", nargs="+", metavar="COLUMN", help="input columns (default: all others)")
    command.add_argument("--exclude", nargs="+", default=[], metavar="COLUMN", help="columns not to use as inputs")
    command.add_argument(
        "--categorical", nargs="+", default=[], metavar="COLUMN", help="columns of numbers that are categories"
    )
    command.add_argument(
        "--task", choices=["regression", "classification"], help="default: classification if the target is not a number"
    )
    _add_dialect(command)
    command.add_argument("--drop-missing", action="store_true", help="drop rows with missing values")
    command.add_argument("--seed", type=int, default=0, help="seed of all random numbers (default: 0)")
    command.add_argument("--force", action="store_true", help="overwrite existing files")


def _compare(args: argparse.Namespace) -> int:
    from .tables import flights

    check_output(args.output, overwrite=args.force)
    sizes = {name: getattr(args, name) for name in FLIGHT_SIZES if getattr(args, name) is not None}
    if args.data is None:
        if args.target is not None or args.inputs is not None:
            raise InputError("--target and --inputs are columns of your own table: give --data as well.")
        frame, target = flights.load_new_york(), flights.COLUMNS[-1]
        x, y, sizes = frame.drop(columns=target).to_numpy(), frame[target].to_numpy(), {**FLIGHT_SIZES, **sizes}
        title, task = "Arrival delays in minutes of flights from New York, 2013", args.task
    else:
        frame, inputs, task = _read(args)
        x, y = _with_categories(frame[inputs], args.categorical), frame[args.target].to_numpy()
        title = f"{args.target} in {args.data.name}"
    result = compare(
        x,
        y,
        models=args.models,
        task=task,
        train_fraction=args.train_fraction,
        seed=args.seed,
        time_limit=args.time_limit,
        memory_limit=None if args.memory_limit is None else int(args.memory_limit * 1e9),
        progress=not args.quiet,
        noise=args.noise,
        title=title,
        **sizes,
    )
    print(f"\n{result}\n")
    for path in result.write(args.output, overwrite=args.force):
        print(path)
    if result.is_interrupted:
        return INTERRUPTED
    return MOSTLY_FAILED if result.has_failed else 0


def _with_categories(frame: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """Columns of numbers that are categories, as pandas calls them."""
    return frame.astype({name: "category" for name in names if name in frame.columns})


def _fit(args: argparse.Namespace) -> int:
    from .comparison.table_fit import FitOptions, fit_table
    from .data.parallel import is_launched

    _check_free(args.output, args.force, args.data)
    sweeps = {f"num_{name}": getattr(args, f"num_{name}") for name in ("draws", "warmup", "chains")}
    options = FitOptions(
        method=args.method,
        rank=args.rank,
        num_basis=args.num_basis,
        noise=args.noise,
        target_transform=args.transform,
        categorical=args.categorical,
        missing="integrate" if args.integrate_missing else None,
        sweeps={name: value for name, value in sweeps.items() if value is not None},
        seed=args.seed,
        progress=not args.quiet,
    )
    if args.stream or args.checkpoint is not None or is_launched():
        return _fit_stream(args, options)
    frame, inputs, task = _read(args)
    estimator, lines = fit_table(frame, args.target, inputs, task, options)
    for line in lines:
        print(line)
    estimator.save(args.output)
    print(args.output)
    return 0


def _fit_stream(args: argparse.Namespace, options: FitOptions) -> int:
    from .comparison.table_fit import fit_stream
    from .data.parallel import launched_processes
    from .tables.files import open_table
    from .tables.table import choose_inputs

    if args.drop_missing:
        raise InputError(
            "A file that is read in batches must have no gaps: --drop-missing needs the table in memory, in one "
            "process."
        )
    first = open_table(args.data, target=args.target, dialect=_dialect(args))
    exclude = list(args.exclude)
    if "" in first.columns and args.inputs is None:
        print("The column without a name is left out: pandas writes an index in this way.")
        exclude.append("")
    inputs = choose_inputs(first.columns, args.target, args.inputs, exclude)
    table = open_table(args.data, target=args.target, inputs=inputs, dialect=_dialect(args))
    with launched_processes(timeout=args.timeout) as processes:
        memory = int(args.memory * 1e9)
        estimator, lines = fit_stream(
            table, args.task, options, memory=memory, checkpoint=args.checkpoint, processes=processes
        )
        if processes.rank == 0:
            for line in lines:
                print(line)
            estimator.save(args.output)
            print(args.output)
    return 0


def _predict(args: argparse.Namespace) -> int:
    from .comparison.table_fit import predict_table
    from .tables.columns import require_columns
    from .tables.table import read_table, write_table

    _check_free(args.output, args.force, args.data, args.model)
    write_table(None, args.output)  # an error before the work, not after it
    estimator = load(args.model)
    frame = read_table(args.data, _dialect(args))
    require_columns(frame, args.keep_columns)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExtrapolationWarning)  # columns have names here
        predictions = predict_table(estimator, frame, drop_missing=args.drop_missing, keep=args.keep_columns)
    number = int(predictions["extrapolates"].eq(True).sum())
    if number:
        print(
            f"{number} of {len(predictions)} rows lie outside the range of the training rows, or have a category that "
            "these did not have: see the column 'extrapolates'."
        )
    with whole_file(args.output) as part:
        write_table(predictions, args.output, part)
    print(args.output)
    return 0


def _dialect(args: argparse.Namespace) -> Dialect:
    from .tables.dialect import Dialect

    sep = {"\\t": "\t", "tab": "\t"}.get(args.sep, args.sep)
    return Dialect(sep, args.encoding, args.decimal, tuple(args.missing_value))


def _read(args: argparse.Namespace) -> tuple[pd.DataFrame, list[str], Task]:
    """The table that the command line names, complete rows only, its inputs and its task."""
    from .tables.columns import require_columns
    from .tables.table import choose_inputs, read_table, require_complete, without_index
    from .tables.task import default_task

    if args.target is None:
        raise InputError("--target is missing: which column is to be predicted?")
    frame = read_table(args.data, _dialect(args))
    frame, left_out = without_index(frame, [args.target, *(args.inputs or ()), *args.exclude])
    for name in left_out:
        print(f"The column {name!r} has no name and numbers the rows, as pandas writes an index: it is left out.")
    inputs = choose_inputs(list(frame.columns), args.target, args.inputs, args.exclude)
    require_columns(frame, args.categorical)
    if frame.empty:
        raise InputError("The table has no rows.")
    complete = [args.target] if getattr(args, "integrate_missing", False) else [args.target, *inputs]
    frame = require_complete(frame, complete, drop_missing=args.drop_missing)
    task: Task = args.task or default_task(frame[args.target], args.target, ask=True)
    return frame, inputs, task


def _check_free(path: Path, force: bool, *sources: Path) -> None:
    """An error before the work, not after it."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; --output is the name of a file.")
    for source in sources:
        if path.exists() and source.exists() and path.samefile(source):
            raise InputError(f"--output {path} is a file that is read: it would be lost. Choose another name.")
    if path.exists() and not force:
        raise FileExistsError(f"{path} exists already. Use --force to overwrite it.")
    path.parent.mkdir(parents=True, exist_ok=True)


if __name__ == "__main__":
    sys.exit(main())
