r"""What a fitted CP-weight model says about each input: main effects and Sobol indices, in closed form.

Let the inputs be independent, each with a distribution of its own. With the moments of one mode,

.. math:: m_d = E\,\phi_d(x_d), \qquad \mu_{dr} = a_{dr}^\top m_d, \qquad
    K_d = A_d \operatorname{cov}(\phi_d) A_d^\top, \qquad C_d = K_d + \mu_d \mu_d^\top \quad (R \times R),

every expectation of :math:`f(x) = \sum_r \prod_d \phi_d(x_d)^\top a_{dr}` is a sum over pairs of components of
products over modes:

.. math::
    E f &= \textstyle\sum_r \prod_d \mu_{dr}, \\
    E[f \mid x_d] - E f &= \textstyle\sum_r (\phi_d(x_d) - m_d)^\top a_{dr} \prod_{k \ne d} \mu_{kr}, \\
    \operatorname{var} E[f \mid x_d] &= \textstyle\sum_{rs} (K_d)_{rs} \prod_{k \ne d} \mu_{kr} \mu_{ks}, \\
    E \operatorname{var}[f \mid x_{-d}] &= \textstyle\sum_{rs} (K_d)_{rs} \prod_{k \ne d} (C_k)_{rs}.

The second line is a main effect, the third and fourth, divided by :math:`\operatorname{var} f`, are the first-order and
total Sobol indices. Applied to every draw of a posterior they come with their uncertainty.

Reference: Sobol' (2001), *Global sensitivity indices for nonlinear mathematical models and their Monte Carlo
estimates*.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from gpytorch.means import ConstantMean, ZeroMean
from torch import Tensor

from ..cp.format import WeightFormat
from ..errors import InputError
from .log_noise import LogNoise
from .low_rank import require_low_rank
from .measure import EmpiricalMeasure, Functions, Measure, UniformMeasure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .tkrr import TKRR


#: Products of two components, over all modes, that are worked on at a time.
MAX_PAIRS = 1 << 24


@dataclass(frozen=True)
class _Modes:
    """Factors of S functions with the moments of each mode: D tensors `(S, K, M)` and `(K, S)`."""

    format: WeightFormat
    functions: list[Functions]
    factors: list[Tensor]
    moments: list[tuple[Tensor, Tensor]]
    means: list[Tensor]
    constant: Tensor
    measure: Measure

    def covariances(self, draws: slice) -> list[Tensor]:
        """
        Covariances of the projections of each mode, D tensors `(K, K, S)`.

        :param draws: For which draws.
        """
        pairs = zip(self.factors, self.moments, strict=True)
        return [(factor[draws] @ cov @ factor[draws].mT).movedim(0, -1) for factor, (_, cov) in pairs]


def _functions_of(model: TKRR | LogNoise, d: int) -> Functions:
    """The functions of one input in the user's units, through the input warp where there is one."""
    basis, num_dims = model.posterior.bases[d], len(model.posterior.bases)
    return lambda x: basis(model.warped(x.unsqueeze(-1).expand(-1, num_dims))[:, d])


def _constant_of(model: TKRR | LogNoise) -> Tensor:
    """What is added to the sum of products, `(S,)` or `(1,)`."""
    if isinstance(model, LogNoise):
        return model.constant
    if not isinstance(model.mean_module, ConstantMean | ZeroMean):
        raise InputError(
            f"Effects are known in closed form for a constant mean; got a {type(model.mean_module).__name__}."
        )
    return model.mean_module(torch.zeros(1, len(model.posterior.bases), device=model.posterior.device)).double()


@torch.no_grad()
def _integrate(model: TKRR | LogNoise, measure: Measure | None) -> _Modes:
    if not isinstance(model, LogNoise):
        require_low_rank(model, "What computes effects and indices")
    factors, constant = model.posterior.factors, _constant_of(model)
    if measure is None:
        if model.train_inputs is None:
            raise InputError(
                "The model holds no training data: pass measure=EmpiricalMeasure(x) or UniformMeasure(lower, upper)."
            )
        table = model.train_inputs[0]
        measure = EmpiricalMeasure(table if isinstance(model, LogNoise) else model.mode_inputs(table))
    if measure.lower.numel() != len(factors):
        raise InputError(f"The measure has {measure.lower.numel()} inputs; the model has {len(factors)}.")
    functions = [_functions_of(model, d) for d in range(len(factors))]
    levels = {} if model.training_range is None else model.training_range.levels
    moments = []
    for d, phi in enumerate(functions):
        own = measure
        if d in levels and isinstance(measure, UniformMeasure):  # every level seen counts the same
            table = levels[d].to(measure.lower.device).unsqueeze(-1).expand(-1, len(factors))
            own = EmpiricalMeasure(table)
        moments.append(own.moments(d, phi))
    means = [(factor @ mean).mT for factor, (mean, _) in zip(factors, moments, strict=True)]
    return _Modes(model.posterior.format, functions, factors, moments, means, constant, measure)


def _few(values: Sequence[float], most: int = 8) -> str:
    """Numbers in a line of text, the first of many."""
    shown = ", ".join(f"{value:.3g}" for value in values[:most])
    return shown if len(values) <= most else f"{shown}, ..."


@dataclass(frozen=True)
class MainEffects:
    """
    What each input does on its own, averaged over all others, relative to the mean of f.

    :param grids: Points of each input, D tensors `(n,)`; the levels of a category.
    :param draws: The effect in every draw, D tensors `(S, n)`; S is 1 after ALS.
    :param expectation: The mean of f in every draw, `(S,)`.
    :param categorical: The inputs that are categories.

    Example:
        >>> import gpytorch, torch, gpytorch_tkrr as tkrr
        >>> x = torch.rand(200, 2)
        >>> model = tkrr.TKRR(x, 3 * x[:, 0], gpytorch.likelihoods.GaussianLikelihood(), rank=2, num_basis=6)
        >>> result = tkrr.fit_gibbs(model, num_draws=20, num_warmup=20, seed=0)
        >>> effects = tkrr.main_effects(model)
        >>> rise = effects.mean(0)[-1] - effects.mean(0)[0]
        >>> bool((rise - 3).abs() < 0.3)
        True
        >>> lower, upper = effects.band(0, level=0.9)
        >>> bool((lower <= upper).all())
        True
    """

    grids: list[Tensor]
    draws: list[Tensor]
    expectation: Tensor
    categorical: tuple[int, ...] = ()

    def __repr__(self) -> str:
        sizes = [float(self.mean(d).std(correction=0)) for d in range(len(self.grids))]
        mean = float(self.expectation.mean())
        first = f"MainEffects of {len(sizes)} inputs, {len(self.expectation)} draws; mean of f {mean:.4g}"
        return f"{first}\nstandard deviation over each range: {_few(sizes)}\nsee mean(d), band(d) and plot()"

    def mean(self, d: int) -> Tensor:
        """
        Posterior mean of an effect, `(n,)`.

        :param d: The input.
        """
        return self.draws[d].mean(0)

    def band(self, d: int, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """
        Pointwise interval of an effect, two tensors `(n,)`.

        :param d: The input.
        :param level: Its posterior probability.
        """
        tail = (1 - level) / 2
        return self.draws[d].quantile(tail, dim=0), self.draws[d].quantile(1 - tail, dim=0)

    def plot(
        self, names: Sequence[str] | None = None, *, level: float = 0.95, axes: Sequence[Axes] | None = None
    ) -> list[Axes]:
        """
        One panel per input: mean and band, on one vertical scale (needs matplotlib).

        :param names: Names of the inputs.
        :param level: Posterior probability of the band.
        :param axes: D axes to draw on; a new figure by default.
        :return: The axes.
        """
        names = [f"x{d + 1}" for d in range(len(self.grids))] if names is None else list(names)
        if len(names) != len(self.grids):
            raise InputError(f"There are {len(self.grids)} inputs; got {len(names)} names.")
        panels = _panels(len(self.grids)) if axes is None else list(axes)
        for d, axis in enumerate(panels):
            x = self.grids[d].cpu()
            is_category = d in self.categorical
            line = axis.plot(x, self.mean(d).cpu(), "o" if is_category else "-")[0]
            if self.draws[d].shape[0] > 1 and is_category:
                axis.vlines(x, *(end.cpu() for end in self.band(d, level)), color=line.get_color(), alpha=0.5)
            elif self.draws[d].shape[0] > 1:
                low, high = self.band(d, level)
                axis.fill_between(x, low.cpu(), high.cpu(), color=line.get_color(), alpha=0.2, lw=0)
            axis.axhline(0, color="0.7", lw=0.8, zorder=0)
            axis.set_xlabel(names[d])
        panels[0].set_ylabel("main effect")
        return panels


def _panels(num: int) -> list[Any]:
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("plot needs matplotlib: pip install matplotlib, or gpytorch_tkrr[plot].") from error
    columns = min(num, 4)
    rows = math.ceil(num / columns)
    _, grid = pyplot.subplots(
        rows, columns, figsize=(3 * columns, 2.4 * rows), sharey=True, squeeze=False, layout="constrained"
    )
    for spare in grid.flat[num:]:
        spare.remove()
    return list(grid.flat[:num])


def main_effects(model: TKRR | LogNoise, *, measure: Measure | None = None, num_points: int = 100) -> MainEffects:
    r"""
    Main effects :math:`E[f \mid x_d] - E f` of all inputs, with their posterior uncertainty.

    With a BernoulliLikelihood they are effects on the latent function.

    :param model: A fitted model; after ALS the effects have no bands. Or its `log_noise`: effects on the log variance
        of noise that depends on the inputs.
    :param measure: Distribution of the inputs; by default :class:`EmpiricalMeasure` of the training data.
    :param num_points: Points of each grid, evenly spaced over the range of the input; the grid of a category holds its
        levels.

    Example:
        >>> import torch, gpytorch
        >>> import gpytorch_tkrr as tkrr
        >>> x = torch.rand(200, 2)
        >>> y = torch.sin(6 * x[:, 0]) + 0.1 * torch.randn(200)
        >>> model = tkrr.TKRR(x, y, gpytorch.likelihoods.GaussianLikelihood(), rank=4, num_basis=8)
        >>> result = tkrr.fit_gibbs(model, num_draws=20, num_warmup=30, seed=0)
        >>> effects = tkrr.main_effects(model)
        >>> effects.draws[0].shape
        torch.Size([20, 100])
        >>> bool(effects.mean(0).abs().max() > 5 * effects.mean(1).abs().max())
        True
    """
    modes = _integrate(model, measure)
    lower, upper = modes.measure.lower, modes.measure.upper
    fraction = torch.linspace(0, 1, num_points, dtype=torch.float64, device=lower.device)
    others = modes.format.products_but_one(modes.means)  # D tensors (K, S)
    levels = {} if model.training_range is None else model.training_range.levels
    grids, draws = [], []
    for d, functions in enumerate(modes.functions):
        grid = lower[d].double() + fraction * (upper[d] - lower[d]).double()
        grid = levels[d].to(grid.device) if d in levels else grid
        weights = (others[d].mT.unsqueeze(-2) @ modes.factors[d]).squeeze(-2)  # (S, M)
        with torch.no_grad():
            effect = weights @ (functions(grid) - modes.moments[d][0]).mT  # (S, n)
        grids.append(grid.to(lower.dtype))
        draws.append(effect.to(lower.dtype))
    expectation = (others[0] * modes.means[0]).sum(0) + modes.constant
    return MainEffects(grids, draws, expectation.to(lower.dtype), tuple(levels))


@dataclass(frozen=True)
class SobolIndices:
    """
    Shares of the variance of f that inputs explain.

    :param first: First-order indices: what an input explains on its own, `(S, D)`; S is 1 after ALS.
    :param total: Total indices: what is left to an input once all others are known, `(S, D)`.
    :param variance: Variance of f, `(S,)`.

    Example:
        >>> import torch, gpytorch_tkrr as tkrr
        >>> indices = tkrr.SobolIndices(torch.tensor([[0.7, 0.1]]), torch.tensor([[0.9, 0.3]]), torch.ones(1))
        >>> print(indices.summary(["speed", "load"]))
               first order                 total
        speed  0.700 [0.700, 0.700]        0.900 [0.900, 0.900]
        load   0.100 [0.100, 0.100]        0.300 [0.300, 0.300]
    """

    first: Tensor
    total: Tensor
    variance: Tensor

    def __repr__(self) -> str:
        first = f"SobolIndices of {self.first.shape[1]} inputs, {self.first.shape[0]} draws; see summary()"
        means = (_few(share.mean(0).tolist()) for share in (self.first, self.total))
        return "{}\nfirst order: {}\ntotal:       {}".format(first, *means)

    def interval(self, level: float = 0.95) -> dict[str, tuple[Tensor, Tensor]]:
        """
        Posterior intervals of the indices `first` and `total`, each two tensors `(D,)`.

        :param level: Their posterior probability.
        """
        tail = (1 - level) / 2
        both = {"first": self.first, "total": self.total}
        return {name: (v.quantile(tail, dim=0), v.quantile(1 - tail, dim=0)) for name, v in both.items()}

    def summary(self, names: Sequence[str] | None = None, *, level: float = 0.95) -> str:
        """
        A table: posterior mean and interval of every index, the largest total index first.

        :param names: Names of the inputs.
        :param level: Posterior probability of the intervals.
        """
        num_dims = self.first.shape[-1]
        names = [f"x{d + 1}" for d in range(num_dims)] if names is None else list(names)
        if len(names) != num_dims:
            raise InputError(f"There are {num_dims} inputs; got {len(names)} names.")
        intervals = self.interval(level)
        width = max(map(len, names))
        lines = [f"{'':{width}}  first order{'':15}  total"]
        for d in self.total.mean(0).argsort(descending=True).tolist():
            cells = [
                f"{float(values[:, d].mean()):.3f} [{float(low[d]):.3f}, {float(high[d]):.3f}]".ljust(26)
                for values, (low, high) in ((self.first, intervals["first"]), (self.total, intervals["total"]))
            ]
            lines.append(f"{names[d]:{width}}  {'  '.join(cells)}".rstrip())
        return "\n".join(lines)


def sobol_indices(model: TKRR | LogNoise, *, measure: Measure | None = None) -> SobolIndices:
    r"""
    First-order and total Sobol indices of all inputs, with their posterior uncertainty.

    .. math:: S_d = \frac{\operatorname{var} E[f \mid x_d]}{\operatorname{var} f}, \qquad
        T_d = \frac{E \operatorname{var}[f \mid x_{-d}]}{\operatorname{var} f}.

    They are about f without noise, and about independent inputs. The sum of :math:`S_d` is at most one; it is one for
    an additive function.

    :param model: A fitted model; after ALS the indices have no uncertainty. Or its `log_noise`.
    :param measure: Distribution of the inputs; by default :class:`EmpiricalMeasure` of the training data.

    Example:
        >>> import torch, gpytorch
        >>> import gpytorch_tkrr as tkrr
        >>> x = torch.rand(200, 2)
        >>> y = torch.sin(6 * x[:, 0]) + 0.1 * torch.randn(200)
        >>> model = tkrr.TKRR(x, y, gpytorch.likelihoods.GaussianLikelihood(), rank=4, num_basis=8)
        >>> result = tkrr.fit_gibbs(model, num_draws=20, num_warmup=30, seed=0)
        >>> indices = tkrr.sobol_indices(model)
        >>> bool(indices.first.mean(0)[0] > 0.9), bool(indices.total.mean(0)[1] < 0.1)
        (True, True)
    """
    modes = _integrate(model, measure)
    num_draws, entries = len(modes.factors[0]), sum(factor.shape[1] ** 2 for factor in modes.factors)
    size = max(MAX_PAIRS // entries, 1)
    parts = [_indices(modes, slice(start, start + size)) for start in range(0, num_draws, size)]
    first, total, variance = (torch.cat(each) for each in zip(*parts, strict=True))
    safe = torch.where(variance > 0, variance, torch.ones_like(variance)).unsqueeze(-1)
    dtype = modes.measure.lower.dtype
    return SobolIndices((first / safe).to(dtype), (total / safe).to(dtype), variance.to(dtype))


def _indices(modes: _Modes, draws: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Variances that inputs explain alone and with others, each `(S, D)`, and that of f, `(S,)`, for some draws."""
    form = modes.format
    own = form.pairs(modes.covariances(draws))  # D tensors (K^2, S)
    pairs = form.pairs([mean[:, draws].unsqueeze(0) * mean[:, draws].unsqueeze(1) for mean in modes.means])
    seconds = [covariance + pair for covariance, pair in zip(own, pairs, strict=True)]
    return (
        _sum_with_others(form, own, pairs),
        _sum_with_others(form, own, seconds),
        _variance(form, own, pairs, seconds),
    )


def _sum_with_others(form: WeightFormat, own: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """For each mode the sum over pairs of terms of its own products times those of all other modes, `(S, D)`."""
    products = form.products_but_one(others)
    values = [(matrix * product).sum(0) for matrix, product in zip(own, products, strict=True)]
    return torch.stack(values, dim=-1).clamp(min=0)


def _variance(form: WeightFormat, own: Sequence[Tensor], pairs: Sequence[Tensor], seconds: Sequence[Tensor]) -> Tensor:
    """var f as what each input adds to those before it: a sum of terms that are not negative, `(S,)`."""
    if len(own) == 1:
        return own[0].sum(0).clamp(min=0)
    chain = form.chain(len(own))
    after: list[Tensor | None] = [None]
    for d in chain[:0:-1]:
        after.append(form.retreat(seconds[d].clone(), after[-1]))
    before: Tensor | None = None
    variance = torch.zeros_like(own[0][0])
    for d, later in zip(chain, reversed(after), strict=True):
        variance = variance + (own[d] * form.join(before, later)).sum(0).clamp(min=0)
        before = None if later is None else form.advance(before, pairs[d].clone())
    return variance
