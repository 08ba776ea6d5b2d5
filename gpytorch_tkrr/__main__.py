"""The command line: ``gpytorch-tkrr compare``, ``fit`` and ``predict``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .comparison.comparison import check_output, compare
from .comparison.contender import CONTENDERS
from .data.whole_file import whole_file
from .errors import InputError, TKRRError

if TYPE_CHECKING:
    import pandas as pd

    from .data.table import Columns

#: What is taken of the flight delays where the command line does not say: about two minutes on two cores.
FLIGHT_SIZES = {"max_train": 10_000, "max_test": 4000, "splits": 1}

#: Exit code after Ctrl-C, as shells count: 128 and the number of the signal.
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run a command.

    :param argv: Arguments; those of the process by default.
    :return: 0; 2 if something about the input is wrong; 130 if the command was interrupted.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    try:
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("gpytorch-tkrr", description="Gaussian processes for many data and many inputs.")
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
    command.add_argument("--time-limit", type=float, default=300.0, help="seconds per model and split (default: 300)")
    command.add_argument("--memory-limit", type=float, help="GB that a model may allocate (Linux)")
    command.add_argument("--output", type=Path, default=Path(), help="folder of the report (default: this one)")
    command.add_argument("--quiet", action="store_true", help="no progress bars")
    command.set_defaults(run=_compare)

    command = commands.add_parser("fit", help="fit T-KRR to a table", description="Fit T-KRR to a table.")
    _add_table(command, required=True)
    command.add_argument(
        "--method",
        choices=["gibbs", "als"],
        default="gibbs",
        help="Gibbs sampling (default), or alternating least squares: one solution, approximate intervals",
    )
    command.add_argument("--rank", type=int, help="R, the number of components")
    command.add_argument("--num-basis", type=int, help="M, the number of sines per input")
    command.add_argument("--output", type=Path, default=Path("model.pt"), help="the model's file (default: model.pt)")
    command.add_argument("--quiet", action="store_true", help="no progress bar")
    command.add_argument(
        "--stream", action="store_true", help="read the file in batches, again and again; also under torchrun"
    )
    command.add_argument("--checkpoint", type=Path, help="file to go on from if the fit is stopped (implies --stream)")
    command.add_argument(
        "--memory", type=float, default=2.0, help="GB that a streamed fit may use to keep what it read"
    )
    command.add_argument("--timeout", type=float, default=600.0, help="seconds to wait for another process (torchrun)")
    command.set_defaults(run=_fit)

    command = commands.add_parser(
        "predict", help="predict with a fitted model", description="Predict with a model that `fit` has written."
    )
    command.add_argument("--model", type=Path, required=True, help="the model's file")
    command.add_argument("--data", type=Path, required=True, help="a .csv, .parquet or .npz file with the inputs")
    command.add_argument("--drop-missing", action="store_true", help="rows with missing values get no prediction")
    command.add_argument("--output", type=Path, default=Path("predictions.csv"), help="default: predictions.csv")
    command.add_argument("--force", action="store_true", help="overwrite")
    command.set_defaults(run=_predict)
    return parser


def _add_table(command: argparse.ArgumentParser, *, required: bool) -> None:
    command.add_argument("--data", type=Path, required=required, help="a .csv, .parquet or .npz file")
    command.add_argument("--target", required=required, help="column to predict")
    command.add_argument("--inputs", nargs="+", metavar="COLUMN", help="input columns (default: all others)")
    command.add_argument(
        "--task", choices=["regression", "classification"], help="default: classification if the target has two values"
    )
    command.add_argument("--drop-missing", action="store_true", help="drop rows with missing values")
    command.add_argument("--one-hot", action="store_true", help="one-hot encode columns that are not numeric")
    command.add_argument("--seed", type=int, default=0, help="of all that is random (default: 0)")
    command.add_argument("--force", action="store_true", help="overwrite")


def _compare(args: argparse.Namespace) -> int:
    from .data import flights

    check_output(args.output, overwrite=args.force)
    sizes = {name: getattr(args, name) for name in FLIGHT_SIZES if getattr(args, name) is not None}
    if args.data is None:
        if args.target is not None or args.inputs is not None:
            raise InputError("--target and --inputs are columns of your own table: give --data as well.")
        frame, target = flights.load_new_york(), flights.COLUMNS[-1]
        x, y, sizes = frame.drop(columns=target).to_numpy(), frame[target].to_numpy(), {**FLIGHT_SIZES, **sizes}
        title = "Arrival delays in minutes of flights from New York, 2013"
    else:
        frame, columns = _read(args)
        x, y = columns.matrix(frame), frame[args.target].to_numpy()
        title = f"{args.target} in {args.data.name}"
    result = compare(
        x,
        y,
        models=args.models,
        task=args.task,
        train_fraction=args.train_fraction,
        seed=args.seed,
        time_limit=args.time_limit,
        memory_limit=None if args.memory_limit is None else int(args.memory_limit * 1e9),
        progress=not args.quiet,
        title=title,
        **sizes,
    )
    print(f"\n{result}\n")
    for path in result.write(args.output, overwrite=args.force):
        print(path)
    return INTERRUPTED if result.is_interrupted else 0


def _fit(args: argparse.Namespace) -> int:
    from .comparison.saved_model import fit_table
    from .data.parallel import is_launched

    _check_free(args.output, args.force)
    if args.stream or args.checkpoint is not None or is_launched():
        return _fit_stream(args)
    frame, columns = _read(args)
    model = fit_table(
        frame,
        columns,
        args.target,
        task=args.task,
        method=f"tkrr-{args.method}",
        rank=args.rank,
        num_basis=args.num_basis,
        seed=args.seed,
        progress=not args.quiet,
    )
    model.save(args.output)
    print(args.output)
    return 0


def _fit_stream(args: argparse.Namespace) -> int:
    from .comparison.saved_model import fit_file
    from .data.parallel import launched_processes

    if args.one_hot or args.drop_missing or args.task == "classification":
        raise InputError(
            "A file that is read in batches must hold numbers without gaps, and the target is regressed on: "
            "--one-hot, --drop-missing and --task classification need the table in memory, in one process."
        )
    with launched_processes(timeout=args.timeout) as processes:
        model = fit_file(
            args.data,
            args.target,
            inputs=args.inputs,
            method=f"tkrr-{args.method}",
            rank=args.rank,
            num_basis=args.num_basis,
            seed=args.seed,
            progress=not args.quiet,
            memory=int(args.memory * 1e9),
            checkpoint=args.checkpoint,
            processes=processes,
        )
        if processes.rank == 0:
            model.save(args.output)
            print(args.output)
    return 0


def _predict(args: argparse.Namespace) -> int:
    from .comparison.saved_model import SavedModel
    from .data.table import read_table

    _check_free(args.output, args.force)
    model = SavedModel.load(args.model)
    predictions = model.predict(read_table(args.data), drop_missing=args.drop_missing)
    with whole_file(args.output) as part:
        predictions.to_csv(part, index=False)
    print(args.output)
    return 0


def _read(args: argparse.Namespace) -> tuple[pd.DataFrame, Columns]:
    """The table that the command line names, complete rows only, and its inputs."""
    from .data.table import Columns, read_table, require_complete

    if args.target is None:
        raise InputError("--target is missing: which column is to be predicted?")
    frame = read_table(args.data)
    columns = Columns.choose(frame, target=args.target, inputs=args.inputs, one_hot=args.one_hot)
    return require_complete(frame, [args.target, *columns.inputs], drop_missing=args.drop_missing), columns


def _check_free(path: Path, force: bool) -> None:
    """An error before the work, not after it."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; --output is the name of a file.")
    if path.exists() and not force:
        raise FileExistsError(f"{path} exists already. Use --force to overwrite it.")
    path.parent.mkdir(parents=True, exist_ok=True)


if __name__ == "__main__":
    sys.exit(main())
