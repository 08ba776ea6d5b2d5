r"""Which noise the targets have: decided by each fit's own training rows.

A fifth of (at most :data:`MAX_ROWS`) training rows is held out, the rest is fitted by short chains with every kind of
noise, and the log predictive density of the rows held out decides. The kinds are ordered from the simplest on. A later
one is chosen only where its gain over the best before it is

- larger than its standard error, row by row: no single row decides; and
- in total, over all rows held out, larger than log 20: if these rows came from what the simpler kind predicts, the
  ratio of the densities of both would have the mean 1, and would exceed 20 with a probability of 1 / 20 at most.

Where the rows cannot tell, the noise is Gaussian. The standard error alone would not do: chance exceeds it for one kind
in six, and there are three kinds beside the first.

A density can also be bought by giving up the mean: where many targets are equal, heavy tails take structure for
outliers. So a later kind is not chosen either where its squared error is much larger.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from gpytorch.likelihoods import GaussianLikelihood, Likelihood, StudentTLikelihood
from torch import Tensor

from ..data.source import as_tensor
from ..errors import InputError, TKRRWarning
from ..model.likelihoods.heteroskedastic import HeteroskedasticLikelihood
from ..model.tkrr import TKRR
from .gibbs import fit_gibbs

#: Kinds of noise by name, the simplest first.
NOISES: dict[str, Callable[[], Likelihood]] = {
    "gaussian": GaussianLikelihood,
    "student": StudentTLikelihood,
    "by-inputs": partial(HeteroskedasticLikelihood, student=True),  # its tails may turn out Gaussian
    "skewed": partial(HeteroskedasticLikelihood, skewed=True),
}

#: Rows that take part in the decision at most, and the share of them that is held out.
MAX_ROWS, HELD_OUT = 5000, 0.2

#: A kind is chosen where the rows held out are at least so many times as probable as with a simpler one.
MIN_RATIO = 20.0

#: A kind is not chosen where the root-mean-square error of the rows held out is larger by this factor.
MAX_ERROR = 1.2

#: Fewer rows than this held out decide nothing.
MIN_HELD_OUT = 10

#: Rank, sweeps of the warm-up and draws of the short chains.
RANK, NUM_WARMUP, NUM_DRAWS = 8, 60, 40

#: Whole numbers of which at least this share are zeros look like counts.
ZEROS = 0.1


@dataclass(frozen=True, repr=False)
class NoiseChoice:
    """
    What :func:`choose_noise` found.

    :param kind: The kind of noise: "gaussian", "student", "by-inputs" or "skewed".
    :param scores: Mean log predictive density of the rows held out, by kind; empty where rows were too few.
    :param gains: How much better each kind is than the best one before it, with its standard error.
    :param num_held_out: How many rows were held out.
    :param hint: A hint that the targets may need another likelihood, such as counts; usually empty.
    :param errors: Root-mean-square error of the rows held out, by kind.

    Example:
        >>> import gpytorch_tkrr as tkrr
        >>> choice = tkrr.NoiseChoice("student", {"gaussian": -1.3, "student": -0.8}, {"student": (0.5, 0.02)}, 800)
        >>> print(choice.message)
        Noise: student. Log predictive density of 800 training rows held out: gaussian -1.300, student -0.800.
        >>> type(choice.likelihood()).__name__
        'StudentTLikelihood'
    """

    kind: str
    scores: dict[str, float]
    gains: dict[str, tuple[float, float]]
    num_held_out: int
    hint: str = ""
    errors: dict[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"NoiseChoice: {self.message}"

    def likelihood(self) -> Likelihood:
        """A new likelihood of the chosen kind."""
        return make_noise(self.kind)

    @property
    def message(self) -> str:
        """One sentence or two: what was chosen, and why."""
        if self.scores:
            scores = ", ".join(f"{kind} {score:.3f}" for kind, score in self.scores.items())
            reason = f"Log predictive density of {self.num_held_out} training rows held out: {scores}."
        else:
            reason = f"There are too few rows to hold some out and compare (at least {MIN_HELD_OUT} are needed)."
        return " ".join(part for part in (f"Noise: {self.kind}.", reason, self.hint) if part)


def make_noise(kind: str) -> Likelihood:
    """
    A new likelihood.

    :param kind: See :data:`NOISES`.
    """
    if kind not in NOISES:
        raise InputError(f"noise must be one of {', '.join(NOISES)}, auto; got {kind!r}.")
    return NOISES[kind]()


@torch.no_grad()
def choose_noise(
    x: Tensor,
    y: Tensor,
    *,
    kinds: Sequence[str] | None = None,
    rank: int = RANK,
    num_basis: int | None = None,
    categorical: Sequence[int] = (),
    missing: Any = None,
    seed: int = 0,
) -> NoiseChoice:
    """
    Choose the noise of a regression with held-out training rows: see :mod:`gpytorch_tkrr.inference.noise_choice`.

    :param x: Training inputs `(N, D)`.
    :param y: Training targets `(N,)`, numbers.
    :param kinds: The kinds of noise to try, the simplest first; by default all of :data:`NOISES`.
    :param rank: R of the short chains.
    :param num_basis: Sines per input of the short chains; by default the model's own choice.
    :param categorical: The columns that are categories.
    :param missing: What inputs that are NaN mean, as for :class:`~gpytorch_tkrr.TKRR`.
    :param seed: Seed of the rows and the chains.

    Example:
        >>> import torch, gpytorch_tkrr as tkrr
        >>> generator = torch.Generator().manual_seed(0)
        >>> x = torch.rand(300, 2, generator=generator)
        >>> y = x[:, 0] + 0.1 * torch.randn(300, generator=generator)
        >>> y[::10] += 5.0  # outliers
        >>> tkrr.choose_noise(x, y, kinds=["gaussian", "student"], rank=2, num_basis=5).kind
        'student'
    """
    kinds = list(NOISES) if kinds is None else list(kinds)
    likelihoods = {kind: make_noise(kind) for kind in kinds}  # a wrong name is found before the work
    x, y = as_tensor(x).double(), as_tensor(y).double().reshape(-1)
    x = x.unsqueeze(-1) if x.dim() == 1 else x
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed)).to(y.device)[:MAX_ROWS]
    num_held_out, hint = round(HELD_OUT * len(order)), hint_at_counts(y) or ""
    if num_held_out < MIN_HELD_OUT or len(kinds) == 1:
        return NoiseChoice(kinds[0], {}, {}, 0, hint)
    held_out, rest = order[:num_held_out], order[num_held_out:]
    best, scores, gains = kinds[0], {}, {}
    densities: dict[str, Tensor] = {}
    options: dict[str, Any] = {"num_basis": num_basis, "categorical": categorical, "missing": missing}
    errors: dict[str, float] = {}
    for kind, likelihood in likelihoods.items():
        model = TKRR(x[rest], y[rest], likelihood.double(), rank=rank, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TKRRWarning)  # about rows held out, and chains that are short on purpose
            fit_gibbs(model, num_draws=NUM_DRAWS, num_warmup=NUM_WARMUP, seed=seed)
            prediction = model.predict(x[held_out])
            densities[kind] = prediction.log_prob(y[held_out])
        errors[kind] = float((prediction.mean - y[held_out]).square().mean().sqrt())
        scores[kind] = float(densities[kind].mean())
        if kind != best:
            difference = densities[kind] - densities[best]
            gains[kind] = float(difference.mean()), float(difference.std()) / math.sqrt(num_held_out)
            is_clear = gains[kind][0] > max(gains[kind][1], math.log(MIN_RATIO) / num_held_out)
            best = kind if is_clear and errors[kind] <= MAX_ERROR * errors[best] else best
    return NoiseChoice(best, scores, gains, num_held_out, hint, errors)


def hint_at_counts(y: Tensor) -> str | None:
    """
    A sentence where targets look like counts: whole numbers, none negative, many zeros, and more than two values.

    :param y: Targets `(N,)`.

    Example:
        >>> import torch
        >>> from gpytorch_tkrr.inference.noise_choice import hint_at_counts
        >>> hint_at_counts(torch.tensor([0.0, 0.0, 1.0, 3.0]))
        'The targets are whole numbers with many zeros: if they are counts, use a NegativeBinomialLikelihood.'
        >>> hint_at_counts(torch.tensor([0.0, 0.5])) is None
        True
    """
    whole = bool((y >= 0).all()) and bool((y == y.round()).all())
    if not whole or float((y == 0).double().mean()) < ZEROS or y.unique().numel() < 3:
        return None
    return "The targets are whole numbers with many zeros: if they are counts, use a NegativeBinomialLikelihood."
