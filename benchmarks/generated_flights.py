"""Flights like those of the Airline set, generated on disk: the eight inputs of Hensman et al. (2018) and a delay."""

from __future__ import annotations

import os
from pathlib import Path

import gpytorch
import numpy as np
import torch

import gpytorch_tkrr as tkrr

NUM_BASIS = 40

COLUMNS = ("Month", "DayofMonth", "DayOfWeek", "plane_age", "AirTime", "Distance", "ArrTime", "DepTime", "ArrDelay")
LOWER = (1, 1, 1, 0, 15.0, 30.0, 0, 0)
UPPER = (12, 31, 7, 40, 700.0, 5000.0, 1439, 1439)

#: The variance of the noise, relative to that of the delays without it about 2.
NOISE = 2.0

_CHUNK = 100_000


def generate(chunk: int, num_rows: int) -> np.ndarray:
    """
    Rows of one chunk of the data; the same chunk always holds the same rows.

    Months, days, ages and minutes of the day are integers, air time and distance are not.

    :param chunk: The number of the chunk.
    :param num_rows: Its length.
    :return: `(n, 9)`, float64, the delay last.
    """
    rng = np.random.default_rng([0, chunk])
    month, day, weekday = (rng.integers(1, high + 1, num_rows) for high in (12, 31, 7))
    age = np.minimum(rng.gamma(2.0, 6.0, num_rows).astype(int), 40)
    departure = np.clip(rng.normal(810, 280, num_rows), 0, 1439).astype(int)
    distance = np.clip(rng.gamma(1.6, 450.0, num_rows), 30.0, 5000.0)
    air_time = np.clip(distance / 7.5 + rng.normal(20, 8, num_rows), 15.0, 700.0)
    arrival = (departure + air_time.astype(int) + 30) % 1440
    hour = departure / 1440
    signal = (
        2.0 * hour**2 * (1 + 0.5 * np.cos(2 * np.pi * (month - 7) / 12))
        + 0.8 * np.sin(2 * np.pi * weekday / 7) * (hour > 0.6)
        + 0.5 * np.exp(-distance / 800) * np.cos(4 * np.pi * hour)
        + 0.02 * age * np.cos(2 * np.pi * month / 12)
        - 0.004 * (air_time - distance / 7.5)
    )
    delay = signal + rng.normal(0, NOISE**0.5, num_rows)
    return np.column_stack([month, day, weekday, age, air_time, distance, arrival, departure, delay])


def write_flights(path: Path, num_rows: int, *, first_chunk: int = 0) -> None:
    """
    Write a .npy file of flights, chunk by chunk, unless one of this length is there.

    :param path: The file.
    :param num_rows: N.
    :param first_chunk: The number of the first chunk.
    """
    if path.exists() and np.load(path, mmap_mode="r").shape == (num_rows, len(COLUMNS)):
        return
    part = path.with_name(path.name + ".part")
    table = np.lib.format.open_memmap(part, "w+", np.float64, (num_rows, len(COLUMNS)))
    for number, start in enumerate(range(0, num_rows, _CHUNK), start=first_chunk):
        stop = min(start + _CHUNK, num_rows)
        table[start:stop] = generate(number, stop - start)
    table.flush()
    del table
    os.replace(part, path)


def make_model(rank: int) -> tkrr.TKRR:
    """
    A model as in Wesel & Batselier (2021): RBF, the box twice as wide as the data, fixed hyperparameters.

    :param rank: R.
    """
    lower, upper = torch.tensor(LOWER, dtype=torch.float64), torch.tensor(UPPER, dtype=torch.float64)
    kernel = gpytorch.kernels.RBFKernel(ard_num_dims=len(LOWER)).double()
    kernel.lengthscale = 0.25 * (upper - lower)
    domain = tkrr.Domain.from_bounds(lower, upper, boundary_factor=2.0)
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    return tkrr.TKRR(None, None, likelihood, kernel=kernel, rank=rank, num_basis=NUM_BASIS, domain=domain)
