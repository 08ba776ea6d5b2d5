"""What a fit did."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..model.draws import DrawsPosterior
from .arviz import draws_to_arviz

if TYPE_CHECKING:
    from ..model.tkrr import TKRR


@dataclass(repr=False)
class ALSResult:
    """
    What a fit by alternating least squares did.

    :param objective: Squared error plus penalty after each factor update, in the units of the targets.
    :param sweeps: Number of whole sweeps 1 -> D -> 1.
    :param converged: Whether the last sweep improved the objective by less than `rel_tol`.
    :param message: Why it stopped, and what to try next.

    Example:
        >>> import gpytorch, torch, gpytorch_tkrr as tkrr
        >>> x = torch.rand(100, 2)
        >>> likelihood = gpytorch.likelihoods.GaussianLikelihood()
        >>> likelihood.noise = 0.01
        >>> model = tkrr.TKRR(x, x[:, 0] * x[:, 1], likelihood, rank=2)
        >>> result = tkrr.fit_als(model, max_sweeps=3, rel_tol=0.0, seed=0)
        >>> result.sweeps, len(result.objective), result.objective[-1] < result.objective[0]
        (3, 7, True)
        >>> result.message.partition(";")[0]
        'Stopped after 3 sweeps'
    """

    objective: list[float] = field(default_factory=list)
    sweeps: int = 0
    converged: bool = False
    message: str = ""

    def __repr__(self) -> str:
        ends = f"{self.objective[0]:.6g} at first, {self.objective[-1]:.6g} at last" if self.objective else "unknown"
        state = "converged" if self.converged else "not converged"
        sweeps = "1 sweep" if self.sweeps == 1 else f"{self.sweeps} sweeps"
        return f"ALSResult: {sweeps}, {state}\nobjective {ends}\n{self.message}"


@dataclass(repr=False)
class GibbsResult:
    """
    What a fit by Gibbs sampling did.

    :param model: The fitted model.
    :param posterior: All draws.
    :param rhat: Split R-hat of the noise, of each hyperparameter, and the largest over watched function values.
    :param ess: Effective sample sizes of the same.
    :param effective_rank: Mean number of components that carry more than a thousandth of f's variance.
    :param message: What was done, and what to try next.

    Example:
        >>> import gpytorch, torch, gpytorch_tkrr as tkrr
        >>> x = torch.rand(100, 2)
        >>> model = tkrr.TKRR(x, torch.sin(6 * x[:, 0]), gpytorch.likelihoods.GaussianLikelihood(), rank=3)
        >>> result = tkrr.fit_gibbs(model, num_draws=20, num_warmup=20, seed=0)
        >>> result.posterior.num_draws, sorted(result.ess)[-2:]
        (20, ['noise', 'outputscale'])
        >>> result.log_predictive_density(x[:5], torch.sin(6 * x[:5, 0])).shape
        torch.Size([5])
    """

    model: TKRR
    posterior: DrawsPosterior
    rhat: dict[str, float]
    ess: dict[str, float]
    effective_rank: float
    message: str

    def __repr__(self) -> str:
        head = f"GibbsResult: {self.posterior.num_draws} draws, effective rank {self.effective_rank:.1f}"
        names = [name for name in self.rhat if name not in self.posterior.hyperparameters]  # f and noise
        rhat, ess = max(self.rhat[name] for name in names), min(self.ess[name] for name in names)
        worst = f"of f and noise: largest R-hat {rhat:.2f}, smallest effective sample size {ess:.0f}; see summary()"
        return f"{head}\n{worst}\n{self.message}"

    def summary(self) -> str:
        """A table: mean, standard deviation, 95 % interval, R-hat and effective sample size of each quantity."""
        rows: list[tuple[str, ...]] = [("", "mean", "sd", "2.5 %", "97.5 %", "R-hat", "ESS")]
        for name, values in {**self.posterior.parameters, **self.posterior.hyperparameters}.items():
            if name not in self.rhat:
                continue
            low, high = torch.quantile(values, torch.tensor([0.025, 0.975], dtype=values.dtype, device=values.device))
            numbers = (values.mean(), values.std(), low, high)
            tail = (f"{self.rhat[name]:.3f}", f"{self.ess[name]:.0f}")
            rows.append((name, *(f"{float(number):.4g}" for number in numbers), *tail))
        functions = [name for name in self.rhat if name not in {row[0] for row in rows}]
        for name in functions:
            tail = (f"{self.rhat[name]:.3f}", f"{self.ess[name]:.0f}")
            rows.append((f"{name} (worst watched value)", "", "", "", "", *tail))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join(
                cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        return "\n".join([*lines, f"effective rank {self.effective_rank:.1f}", self.message])

    @torch.no_grad()
    def log_predictive_density(self, x: Tensor, y: Tensor, **rows: Tensor | float) -> Tensor:
        r"""
        The log density of the predictive mixture, :math:`\log \frac1S \sum_s p(y \mid f_s(x), \theta_s)`, smoothed
        where the noise is small beside the spread of the draws: the
        :meth:`~gpytorch_tkrr.model.prediction.Prediction.log_prob` of `model.predict(x)`.

        :param x: Inputs `(n, D)`.
        :param y: Targets `(n,)`.
        :param rows: See :meth:`TKRR.predict`.
        :return: `(n,)`.
        """
        return self.model.predict(x, **rows).log_prob(y)

    def to_arviz(self, data: Any = None, *, seed: int | None = None, **rows: Tensor | float) -> Any:
        """
        The model's draws as ArviZ's InferenceData (a DataTree from ArviZ 1.0 on), for `az.plot_trace`, `az.plot_ppc`,
        `az.loo` and `az.compare`.

        Groups: the posterior of noise, hyperparameters and f at up to 50 rows; sample stats; the log likelihood of each
        row; replicated targets (posterior predictive); observed and constant data.

        :param data: Rows `(x, y)` to report on; by default the training data.
        :param seed: Seed of the replicated targets.
        :param rows: See :meth:`TKRR.predict`.
        :raises ImportError: Where ArviZ is not installed (extra `arviz`).
        """
        return draws_to_arviz(self.model, data, seed=seed, **rows)
