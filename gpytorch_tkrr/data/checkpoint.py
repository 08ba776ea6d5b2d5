"""Long fits survive: what a fit needs to go on is saved after its sweeps, whole or not at all.

A checkpoint is one file: a line that says what it is, the SHA-256 of the rest, and the rest, tensors and numbers as
written by :func:`torch.save`. It is read without running any code from it.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, InputError
from .identity import Incomparable, module_identity
from .lock import FileLock
from .parallel import ONE_PROCESS, Processes
from .training import Summary

MAGIC = b"gpytorch_tkrr checkpoint 3\n"

#: By so much two numbers may differ that come from sums over the same data in another order.
ROUNDING = 1e-9

#: Names of what is known of a fit: variances of the targets, and beginnings of those of means, which may be near zero.
VARIANCES = ("data.variance", "variance of the data")
MEANS = ("data.mean", "mean of the data", "the mean function", "model.mean_module")

#: What a model itself holds, beside kernel, likelihood, mean, box and warp, that a fit depends on.
MODEL_SETTINGS = ("rank", "adapts_rank", "num_basis", "adapts_num_basis", "max_num_basis", "fits_mean")


class Checkpoint:
    """
    A file that lets a fit go on where it was stopped; see `checkpoint` of :func:`~gpytorch_tkrr.fit_als`.

    If the file exists, the fit starts from what it holds, provided that it was written by a fit of the same kind with
    the same settings, of the same model to the same data. In one process the end is the same, bit for bit, as without
    the interruption. The file stays after the fit: remove it to fit anew. While a fit uses the file, no other can.

    The model is compared as it is before the fit: classes, parameters, which of them are free, constraints, priors and
    all other attributes of kernel, likelihood and mean; functions by their code. Weights of an earlier fit are not
    compared, so that a fit that was interrupted in the same Python process can go on, too.

    :param path: The file.
    :param seconds: The least time between two writes; a fit writes at the end of its sweeps only.

    Example:
        >>> import tempfile, torch, gpytorch
        >>> import gpytorch_tkrr as tkrr
        >>> x = torch.rand(50, 2)
        >>> def fit(max_sweeps, path):
        ...     model = tkrr.TKRR(x, x[:, 0] * x[:, 1], gpytorch.likelihoods.GaussianLikelihood(), rank=2)
        ...     checkpoint = tkrr.Checkpoint(path, seconds=0)
        ...     return tkrr.fit_als(model, max_sweeps=max_sweeps, rel_tol=0.0, seed=0, checkpoint=checkpoint)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     first = fit(2, f"{folder}/run.pt")
        ...     second = fit(3, f"{folder}/run.pt")  # does the third sweep only
        >>> second.sweeps, second.objective[:4] == first.objective[:4]
        (3, True)
    """

    def __init__(self, path: str | Path, *, seconds: float = 10.0):
        self.path, self.seconds = Path(path), seconds
        self._identity: Mapping[str, Any] = {}
        self._processes = ONE_PROCESS
        self._written = -math.inf
        self._lock = FileLock(self.path)

    def open(self, identity: Mapping[str, Any], processes: Processes = ONE_PROCESS) -> dict[str, Any] | None:
        """
        What an earlier fit has saved, or None where there is no file. The first process reads it for all.

        :param identity: What the fit, its model and its data are known by.
        :param processes: The processes that take part.
        """
        self._identity, self._processes = identity, processes
        return processes.collect(self._load)[0]

    def close(self) -> None:
        """Let others use the file; the fit is over."""
        self._lock.release()

    def save(self, state: Callable[[], dict[str, Any]], *, last: bool = False) -> None:
        """
        Save, unless the last time is too short ago. The first process writes.

        :param state: Returns what the fit needs to go on: numbers, strings, tensors, lists and dictionaries.
        :param last: Whether the fit is over, so that this must be written.
        """
        if self._processes.rank == 0 and (last or time.monotonic() - self._written >= self.seconds):
            self._write({"identity": self._identity, "state": state()})
            self._written = time.monotonic()

    def _load(self) -> dict[str, Any] | None:
        if self._processes.rank != 0:
            return None
        for name, value in self._identity.items():
            if isinstance(value, Incomparable):
                raise CheckpointError(
                    f"{name} is a {value}, which cannot be compared with that of another fit. Keep it out of the "
                    "model, or fit without a checkpoint."
                )
        folder = self.path.parent
        if not folder.is_dir():
            raise CheckpointError(f"The folder of the checkpoint {self.path} does not exist. Make it first.")
        if self.path.is_dir() or not os.access(folder, os.W_OK):
            raise CheckpointError(f"The checkpoint {self.path} is a folder, or lies in one that cannot be written to.")
        self.close()  # a fit that failed early may have left it open
        if not self._lock.acquire():
            raise CheckpointError(
                f"The checkpoint {self.path} is used by another fit that is running. Name another file."
            )
        try:
            return self._read() if self.path.exists() else None
        except CheckpointError:
            self.close()
            raise

    def _write(self, content: dict[str, Any]) -> None:
        buffer = io.BytesIO()
        torch.save(content, buffer)
        payload = buffer.getbuffer()
        part = self.path.with_name(self.path.name + ".part")
        try:
            with part.open("wb") as file:
                file.write(MAGIC + hashlib.sha256(payload).digest())
                file.write(payload)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, self.path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise CheckpointError(
                f"The checkpoint {self.path} could not be written ({error}). What was written before it is still there."
            ) from error

    def _read(self) -> dict[str, Any]:
        content = self.path.read_bytes()
        head = len(MAGIC) + hashlib.sha256().digest_size
        remedy = "Remove it to start anew, or name another file."
        if not content.startswith(MAGIC):
            raise CheckpointError(f"{self.path} is not a checkpoint of this version of gpytorch_tkrr. {remedy}")
        payload = content[head:]
        if content[len(MAGIC) : head] != hashlib.sha256(payload).digest():
            raise CheckpointError(f"The checkpoint {self.path} is damaged. {remedy}")
        try:
            loaded = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
            saved, state = dict(loaded["identity"]), dict(loaded["state"])
        except Exception as error:  # whatever torch and pickle raise for another content
            raise CheckpointError(
                f"The checkpoint {self.path} holds something else, or more than tensors and numbers. {remedy}"
            ) from error
        name = difference(self._identity, saved)
        if name is not None:
            raise CheckpointError(
                f"The checkpoint {self.path} belongs to another fit: {name} was {show(saved.get(name))} and is now "
                f"{show(self._identity.get(name))}. {remedy}"
            )
        return state


class NoCheckpoint(Checkpoint):
    """Nothing is saved."""

    def __init__(self) -> None:
        super().__init__("")

    def open(self, identity: Mapping[str, Any], processes: Processes = ONE_PROCESS) -> None:
        return None

    def save(self, state: Callable[[], dict[str, Any]], *, last: bool = False) -> None:
        pass


def as_checkpoint(checkpoint: Checkpoint | str | Path | None) -> Checkpoint:
    """
    What the fit functions make of their `checkpoint`.

    :param checkpoint: A checkpoint, its path, or None.
    """
    if checkpoint is None:
        return NoCheckpoint()
    return checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint)


def fit_identity(kind: str, model: nn.Module, summary: Summary, **settings: Any) -> dict[str, Any]:
    """
    What a fit is known by: its kind and settings, the data, the model before the fit changes it.

    :param kind: The name of the fit function.
    :param model: The model.
    :param summary: The data.
    :param settings: Numbers and strings.
    """
    data = {f"data.{name}": getattr(summary, name) for name in ("num_rows", "num_dims", "mean", "variance")}
    data.update({f"data.{name}": getattr(summary, name).cpu() for name in ("lower", "upper", "fingerprint")})
    identity = {"kind": kind, **settings, **data}
    identity.update({f"model.{name}": getattr(model, name) for name in MODEL_SETTINGS if hasattr(model, name)})
    identity["model.weights"] = getattr(getattr(model, "weights", None), "kind", None)
    for name, module in model.named_children():
        identity.update(module_identity(module, f"model.{name}"))
    return identity


def require_same_fit(identity: Mapping[str, Any], processes: Processes) -> None:
    """
    An error, in all processes, where one of them fits something else.

    :param identity: What the fit of this process is known by.
    :param processes: The processes that take part.
    """
    first, *others = processes.gather(identity)
    for rank, other in enumerate(others, start=1):
        name = difference(first, other)
        if name is not None:
            raise InputError(
                f"Process {rank} fits something else than process 0: {name} is {show(other.get(name))} there and "
                f"{show(first.get(name))} here. All processes must make the same model with the same settings; only "
                "their rows differ."
            )


def move_tensors(value: Any, device: torch.device) -> Any:
    """
    The same nested lists, tuples and dictionaries with all tensors on a device.

    :param value: What a checkpoint held.
    :param device: The device.
    """
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: move_tensors(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(move_tensors(item, device) for item in value)
    return value


def difference(left: Mapping[str, Any], right: Mapping[str, Any]) -> str | None:
    """
    The first name whose values differ, numbers by more than the rounding of sums over data in another order: relative
    to the numbers themselves, since they have units, means of targets also to the targets' deviation.

    :param left: Names and values: numbers, strings, tensors.
    :param right: Others.
    """
    variances = [values.get(name) for values in (left, right) for name in VARIANCES]
    spread = math.sqrt(max((value for value in variances if isinstance(value, float)), default=0.0))
    for name in {**left, **right}:
        slack = ROUNDING * spread if name.startswith(MEANS) else 0.0
        if not _same(left.get(name), right.get(name), slack):
            return name
    return None


def _same(left: Any, right: Any, slack: float) -> bool:
    """Equal, numbers up to the rounding of sums over data in another order."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.shape == right.shape and torch.allclose(left.double(), right.double(), rtol=ROUNDING, atol=slack)
    if isinstance(left, float) and isinstance(right, float):
        return math.isclose(left, right, rel_tol=ROUNDING, abs_tol=slack)
    return type(left) is type(right) and bool(left == right)


def show(value: Any) -> str:
    """
    A value in an error message, not longer than a line.

    :param value: A value of :func:`difference`.
    """
    text = str(value.tolist()) if isinstance(value, Tensor) else repr(value)
    return text if len(text) < 80 else text[:77] + "..."
