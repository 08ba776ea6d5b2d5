"""Several processes that fit one model, each with rows of its own, on :mod:`torch.distributed`.

All that they exchange are sums over their rows. Every process then does the same small algebra with the same sums and
the same random numbers, so that all of them hold the same weights.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import InputError, ProcessError

T = TypeVar("T")


class Processes:
    """
    The processes that share the data of a fit; this class: one process, which has nobody to talk to.

    :ivar rank: The number of this process.
    :ivar size: The number of processes.
    :ivar device: Where they exchange tensors.
    :ivar volume: Bytes that this process has handed to :meth:`sum` so far.
    """

    rank = 0
    size = 1
    device = torch.device("cpu")
    volume = 0

    def sum(self, tensor: Tensor) -> Tensor:
        """
        The sum of a tensor over all processes, the same bits in each of them.

        :param tensor: Of the same shape in all processes; it may be overwritten.
        """
        return tensor

    def gather(self, value: T) -> list[T]:
        """
        The values of all processes, in the order of their ranks.

        :param value: Something small that can be pickled.
        """
        return [value]

    def collect(self, function: Callable[[], T]) -> list[T]:
        """
        What a function returns in each process. Where it fails in one, all of them fail, and none waits for it.

        :param function: A function without arguments; its result is small and can be pickled.
        """
        return [function()]

    def share(self, value: T) -> T:
        """
        The value of the first process.

        :param value: Something small that can be pickled.
        """
        return self.gather(value)[0]


#: One process, which has nobody to talk to.
ONE_PROCESS = Processes()


class ProcessGroup(Processes):
    """
    The processes of a group of :mod:`torch.distributed`.

    Where another process ends or does not answer within the timeout of the group, every call raises a
    :class:`~gpytorch_tkrr.ProcessError`.

    :param group: The group, for instance ``torch.distributed.group.WORLD``.
    """

    def __init__(self, group: Any):
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise InputError("This process does not belong to the group. Call the fit only in those that do.")
        if dist.get_backend(group) == "nccl":
            self.device = torch.device("cuda", torch.cuda.current_device())

    def sum(self, tensor: Tensor) -> Tensor:
        total = tensor.to(self.device).contiguous()
        self.volume += total.numel() * total.element_size()
        with self._watched():
            dist.all_reduce(total, group=self.group)
        return total.to(tensor.device)

    def gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.size
        with self._watched():
            dist.all_gather_object(values, value, group=self.group)
        return values

    def collect(self, function: Callable[[], T]) -> list[T]:
        value: T | None = None
        error: Exception | None = None
        try:
            value = function()
        except Exception as caught:
            error = caught
        message = None if error is None else f"{type(error).__name__}: {error}"  # not every exception can be pickled
        answers = self.gather((value, message))
        if error is not None:
            raise error
        for rank, (_, message) in enumerate(answers):
            if message is not None:
                raise ProcessError(f"Process {rank} of {self.size} failed: {message}")
        return [value for value, _ in answers]  # type: ignore[misc]

    @contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise ProcessError(
                f"Process {self.rank} of {self.size} lost contact with the others: one of them has ended, or has not "
                "answered within the timeout of the process group. Look for its own error message; a fit that was "
                f"given a checkpoint can be resumed. ({str(error).strip().splitlines()[0]})"
            ) from error


def as_processes(group: Any) -> Processes:
    """
    What the fit functions make of their `group`.

    :param group: A group of :mod:`torch.distributed`, or None for one process.
    """
    if group is None:
        return ONE_PROCESS
    return group if isinstance(group, Processes) else ProcessGroup(group)


def is_launched() -> bool:
    """Whether this process was started by ``torchrun``."""
    return dist.is_torchelastic_launched()


@contextmanager
def launched_processes(*, timeout: float = 600.0) -> Iterator[Processes]:
    """
    The processes started by ``torchrun``, or one process where there is no ``torchrun``.

    They talk by NCCL where each has a GPU of its own and by Gloo otherwise.

    :param timeout: Seconds after which a process that does not answer counts as lost.
    """
    if not is_launched():
        yield ONE_PROCESS
        return
    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    if on_gpu:
        torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=timeout))
    try:
        yield ProcessGroup(dist.group.WORLD)
    finally:
        dist.destroy_process_group()
