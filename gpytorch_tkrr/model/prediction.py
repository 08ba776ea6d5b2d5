r"""The distribution of new observations, for any likelihood and either posterior."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError
from .likelihoods.augmented import Parameters
from .likelihoods.base import Observation

#: Rows that are evaluated at a time.
PIECE_ROWS = 1024

#: Values of f that are kept between calls, over all rows and draws: 128 MB. More are computed again in each call.
MAX_KEPT = 2**24

#: Quantiles are exact to this fraction of the width of the distribution.
REL_TOL = 1e-13

#: The search for a quantile stops after so many steps at the latest; smooth distributions need about ten.
MAX_STEPS = 200

#: In the search for a quantile of whole numbers every so many steps the bounds are halved; about two steps are needed.
HALVE_EVERY = 3


class Prediction:
    r"""
    The predictive distribution of y at each input, an equal mixture over draws of f and of the likelihood's parameters,

    .. math:: p(y \mid x) = \frac1S \sum_s \int p(y \mid f, \theta_s)\, N(f; m_s(x), v_s(x))\, df.

    After :func:`~gpytorch_tkrr.fit_gibbs` :math:`m_s` are the drawn functions and :math:`v_s` is zero, save where the
    basis represents the kernel poorly; after :func:`~gpytorch_tkrr.fit_als` S is one, with the posterior mean and
    variance of f. All answers are in the dtype of the inputs. If the inputs require gradients, all answers except
    quantiles and samples are differentiable in these; otherwise they hold no gradients and can be plotted as they are.
    Made by :meth:`gpytorch_tkrr.TKRR.predict`.

    :param observation: The distribution of y given f.
    :param components: Means `(S, n)` of f at inputs `(n, D)`, and what is known of the rows there, by name: `spread`,
        the variances of f, `(S, n)` or `(n,)`; and what functions of the inputs say.
    :param parameters: Parameters of the observation model, each `(S, ...)`.
    :param x: Inputs `(..., n, D)`.
    :param rows: What is known of each row, tensors with as many elements as there are rows.
    :param extrapolates: Which rows lie outside the training range, `(..., n)`; by default none.
    :param is_sample: Whether the means are a sample of draws.

    Example:
        >>> import torch, gpytorch, gpytorch_tkrr as tkrr
        >>> x = torch.rand(100, 2)
        >>> y = torch.sin(6 * x[:, 0]) * x[:, 1]
        >>> model = tkrr.TKRR(x, y, gpytorch.likelihoods.GaussianLikelihood(), rank=3, num_basis=8)
        >>> result = tkrr.fit_als(model, seed=0)
        >>> prediction = model.predict(x)
        >>> isinstance(prediction, tkrr.Prediction), bool((prediction.quantile(0.05) < prediction.mean).all())
        (True, True)
        >>> torch.allclose(prediction.cdf(prediction.quantile(0.9)), torch.tensor(0.9))
        True
    """

    def __init__(
        self,
        observation: Observation,
        components: Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]],
        parameters: Parameters,
        x: Tensor,
        rows: Mapping[str, Tensor],
        extrapolates: Tensor | None = None,
        *,
        is_sample: bool = False,
    ):
        #: Which rows lie outside the range of the training rows, `(..., n)`.
        self.extrapolates = torch.zeros_like(x[..., 0], dtype=torch.bool) if extrapolates is None else extrapolates
        self._observation, self._components = observation, components
        self._parameters = {name: values.detach() for name, values in parameters.items()}
        self._is_differentiable = x.requires_grad and torch.is_grad_enabled()
        self._x, self._rows = x.reshape(-1, x.shape[-1]), rows
        self._shape, self._dtype = x.shape[:-1], x.dtype
        self._smooths = is_sample and not (observation.has_link or observation.has_limits)
        self._kept: list[tuple[Tensor, dict[str, Tensor]]] | None = None

    def __repr__(self) -> str:
        outside = int(self.extrapolates.sum())
        rows = "1 row" if outside == 1 else f"{outside} rows"
        return f"Prediction of shape {tuple(self._shape)}, {rows} outside the training range"

    @property
    def mean(self) -> Tensor:
        """Mean of y, `(..., n)`; for two classes the probability of class 1."""
        return self._join([self._moments(f, rows)[0] for f, rows in self._pieces()])

    @property
    def variance(self) -> Tensor:
        """Variance of y, `(..., n)`: the mean of the variances plus the variance of the means."""
        return self._join([self._moments(f, rows)[1] for f, rows in self._pieces()])

    @property
    def stddev(self) -> Tensor:
        """Standard deviation of y, `(..., n)`."""
        return self.variance.sqrt()

    @property
    def noise(self) -> NoiseLevel:
        """
        Standard deviation of the noise at each input, with its uncertainty, for targets with additive noise:
        constant, of each row, or with a HeteroskedasticLikelihood a function of the inputs.
        """
        variances = [self._observation.noise_variance(f, self._parameters, rows) for f, rows in self._pieces()]
        draws = torch.cat(variances, -1).sqrt().to(self._dtype)
        return NoiseLevel(draws.reshape(len(draws), *self._shape))

    @property
    def probabilities(self) -> Tensor:
        """Probabilities of the classes, `(..., n, K)`; for two classes and for ordered ones."""
        num_classes = self._observation.num_classes
        if not num_classes:
            raise InputError("There are no classes: targets are numbers. Ask for mean, quantile, cdf or log_prob.")
        classes = torch.arange(num_classes, device=self._x.device).reshape(-1, *[1] * len(self._shape))
        return self.log_prob(classes.expand(-1, *self._shape)).exp().movedim(0, -1)

    def log_prob(self, y: Tensor) -> Tensor:
        """
        Log density of targets; log probability for classes and counts.

        :param y: Targets `(*k, ..., n)`: one for each input, or k of them.
        :return: `(*k, ..., n)`.
        """
        parts = []
        for (f, rows), targets in zip(self._smoothed(), self._split(y), strict=True):
            densities = self._observation.log_density(targets, f, self._parameters, rows)  # (k, S, n)
            parts.append(torch.logsumexp(densities, -2) - math.log(densities.shape[-2]))
        return self._join(parts, y)

    def cdf(self, y: Tensor) -> Tensor:
        """
        Probability of a target that is not larger.

        :param y: Targets `(*k, ..., n)`: one for each input, or k of them.
        :return: `(*k, ..., n)`.
        """
        parts = []
        for (f, rows), targets in zip(self._smoothed(), self._split(y), strict=True):
            parts.append(self._observation.cdf(targets, f, self._parameters, rows).mean(-2))
        return self._join(parts, y)

    @torch.no_grad()
    def quantile(self, q: float | Tensor) -> Tensor:
        """
        The smallest y with a probability of at least q not to be exceeded.

        :param q: Probabilities between 0 and 1, a number or `(*k,)`.
        :return: `(*k, ..., n)`.
        """
        q = torch.as_tensor(q, dtype=torch.float64, device=self._x.device)
        if not bool(((q > 0) & (q < 1)).all()):
            raise InputError(f"Quantiles are defined for probabilities between 0 and 1; got {q.tolist()}.")
        parts = [self._quantiles(q.reshape(-1, 1), f, rows) for f, rows in self._smoothed()]
        return self._joined(parts, (*q.shape, *self._shape))

    def confidence_region(self) -> tuple[Tensor, Tensor]:
        """
        The central 95 % interval of y, two tensors `(..., n)`. It has the name that GPyTorch's distributions give to
        mean ± 2 standard deviations; here it is made of quantiles.
        """
        lower, upper = self.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
        return lower, upper

    @torch.no_grad()
    def sample(self, num_samples: int, *, seed: int | None = None) -> Tensor:
        """
        Draws of y. Those of one row of the result share a draw of f, where the model holds draws; after ALS the inputs
        are drawn independently (for joint samples: ``likelihood(model(x)).sample()``).

        :param num_samples: How many.
        :param seed: Seed; by default torch's own random numbers give one.
        :return: `(num_samples, ..., n)`.
        """
        generator = torch.Generator(self._x.device)
        generator.manual_seed(int(torch.randint(2**31, ())) if seed is None else seed)
        chosen, parts = None, []
        for f, rows in self._pieces():
            if chosen is None:
                chosen = torch.randint(len(f), (num_samples,), generator=generator, device=f.device)
                parameters = {name: values[chosen] for name, values in self._parameters.items()}
            rows = {name: values[chosen] if values.dim() == 2 else values for name, values in rows.items()}
            parts.append(self._observation.sample(f[chosen], parameters, rows, generator))
        return self._joined(parts, (num_samples, *self._shape))

    def _pieces(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Values of f `(S, n)`, and what is known of the rows, piece by piece."""
        if self._kept is not None:
            yield from self._kept
            return
        kept: list[tuple[Tensor, dict[str, Tensor]]] = []
        num_kept = 0
        for start in range(0, max(len(self._x), 1), PIECE_ROWS):
            piece = slice(start, start + PIECE_ROWS)
            with torch.set_grad_enabled(self._is_differentiable):  # kept for calls with and without gradients
                f, rows = self._components(self._x[piece])
            rows.update({name: values[piece] for name, values in self._rows.items()})
            num_kept += f.numel()
            if num_kept <= MAX_KEPT:
                kept.append((f, rows))
            yield f, rows
        if num_kept <= MAX_KEPT:
            self._kept = kept

    def _smoothed(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        r"""
        As :meth:`_pieces`, for densities. Where f is a sample of S draws and the noise is small beside their spread, a
        mixture of the noise about each would be a row of spikes. So a draw stands for a normal distribution, such that
        with the noise it is as wide as a kernel density of the targets asks for, :math:`(4 / 3 S)^{1/5}` of their
        standard deviation (Silverman 1986). Draws move towards their mean, so that mean and variance stay (West 1993).
        Most often the noise is wide enough, and nothing is done.
        """
        for f, rows in self._pieces():
            added = self._added_width(f, rows) if self._smooths and len(f) > 1 else None
            if added is not None and bool((added > 0).any()):
                mean = f.mean(0)
                between = (f - mean).square().mean(0).clamp(min=1e-300)
                f = mean + (1 - added / between).sqrt() * (f - mean)
                rows = {**rows, "spread": added + rows["spread"] if "spread" in rows else added}
            yield f, rows

    def _added_width(self, f: Tensor, rows: dict[str, Tensor]) -> Tensor:
        """The variance that each draw is given beside the noise, `(n,)`."""
        between = (f - f.mean(0)).square().mean(0)
        within = self._observation.variance(f, self._parameters, rows).mean(0)
        lacking = (4 / (3 * len(f))) ** 0.4 * (between + within) - within
        return torch.where(torch.isfinite(lacking), lacking.clamp(min=0), torch.zeros_like(lacking))

    def _split(self, y: Tensor) -> Iterator[Tensor]:
        """Targets `(k, 1, n)` of each piece."""
        targets = torch.as_tensor(y, device=self._x.device)
        if targets.shape[targets.dim() - len(self._shape) :] != self._shape:
            raise InputError(
                f"Targets must have shape (..., {', '.join(map(str, self._shape))}); got {tuple(y.shape)}."
            )
        num_each = math.prod(targets.shape[: targets.dim() - len(self._shape)])
        targets = self._observation.decode(self._observation.encode(targets)).reshape(num_each, 1, len(self._x))
        return iter(targets.split(PIECE_ROWS, dim=-1))

    def _join(self, parts: list[Tensor], y: Tensor | None = None) -> Tensor:
        return self._joined(parts, self._shape if y is None else y.shape)

    def _joined(self, parts: list[Tensor], shape: tuple[int, ...] | torch.Size) -> Tensor:
        return torch.cat(parts, -1).reshape(shape).to(self._dtype)

    def _moments(self, f: Tensor, rows: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Mean and variance of the mixture, `(n,)` each."""
        means = self._observation.mean(f, self._parameters, rows)  # (S, n)
        within = self._observation.variance(f, self._parameters, rows)
        mean = means.mean(0)
        return mean, within.mean(0) + (means - mean).square().mean(0)

    def _quantiles(self, q: Tensor, f: Tensor, rows: dict[str, Tensor]) -> Tensor:
        """Quantiles `(k, n)` for probabilities `(k, 1)`."""
        if self._observation.is_discrete:
            return self._whole_quantiles(q, f, rows)

        def excess(y: Tensor) -> Tensor:
            return self._observation.cdf(y.unsqueeze(-2), f, self._parameters, rows).mean(-2) - q

        middle, variance = self._moments(f, rows)
        width = variance.sqrt()
        width = torch.where(torch.isfinite(width) & (width > 0), width, 1 + middle.abs())
        lower, upper = ((middle + sign * 4 * width).expand(len(q), -1) for sign in (-1, 1))
        while (low := excess(lower) >= 0).any():
            lower = torch.where(low, lower - 2 * (upper - lower), lower)
        while (low := excess(upper) < 0).any():
            upper = torch.where(low, upper + 2 * (upper - lower), upper)
        return find_root(excess, lower, upper, REL_TOL * (upper - lower))

    def _whole_quantiles(self, q: Tensor, f: Tensor, rows: dict[str, Tensor]) -> Tensor:
        """The same for whole numbers, from 0 on."""
        mean, variance = self._moments(f, rows)
        z = torch.special.ndtri(q)
        skew = 2 * variance / mean.clamp(min=1e-300) - 1  # in standard deviations, were it negative binomial
        guess = torch.nan_to_num(mean + z * variance.sqrt() + (z.square() - 1) * skew / 6)
        row = torch.arange(f.shape[-1], device=f.device).expand_as(guess).reshape(-1)
        level = q.expand_as(guess).reshape(-1)

        def probability(y: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
            own = {name: values[..., row[index]] for name, values in rows.items()}
            at = (y, f[:, row[index]], self._parameters, own)
            return self._observation.cdf(*at).mean(0), self._observation.log_density(*at).exp().mean(0)

        largest = float(self._observation.num_classes or math.inf) - 1
        return find_whole(probability, level, guess.reshape(-1).round(), largest).reshape(guess.shape)


@dataclass(frozen=True)
class NoiseLevel:
    """
    The standard deviation of the noise at each input.

    :param draws: In each draw, `(S, ..., n)`; S is 1 after ALS.

    Example:
        >>> import torch
        >>> from gpytorch_tkrr.model.prediction import NoiseLevel
        >>> level = NoiseLevel(torch.tensor([[1.0, 4.0], [3.0, 4.0]]))
        >>> level.mean, level.stddev, level.quantile(0.5)
        (tensor([2., 4.]), tensor([1., 0.]), tensor([2., 4.]))
    """

    draws: Tensor

    def __repr__(self) -> str:
        return f"NoiseLevel of shape {tuple(self.draws.shape[1:])}, {len(self.draws)} draws; see mean and quantile(q)"

    @property
    def mean(self) -> Tensor:
        """Posterior mean, `(..., n)`."""
        return self.draws.mean(0)

    @property
    def stddev(self) -> Tensor:
        """Posterior standard deviation, `(..., n)`."""
        return self.draws.std(0, correction=0)

    def quantile(self, q: float | Tensor) -> Tensor:
        """
        Posterior quantiles.

        :param q: Probabilities, a number or `(*k,)`.
        :return: `(*k, ..., n)`.
        """
        q = torch.as_tensor(q, dtype=self.draws.dtype, device=self.draws.device)
        return self.draws.quantile(q.reshape(-1), dim=0).reshape(*q.shape, *self.draws.shape[1:])


def find_root(function: Callable[[Tensor], Tensor], lower: Tensor, upper: Tensor, tolerance: Tensor) -> Tensor:
    """
    The root of increasing functions, many at once (Chandrupatla 1997: inverse quadratic interpolation where that is
    safe, bisection elsewhere). Where a function jumps past zero, the upper side of the jump.

    :param function: Values of all functions at a point for each.
    :param lower: Points where they are negative.
    :param upper: Points where they are not.
    :param tolerance: How far from the root a point may be, beyond the rounding of its own value.

    Example:
        >>> import torch
        >>> from gpytorch_tkrr.model.prediction import find_root
        >>> targets, lower, upper = torch.tensor([8.0, 27.0]), torch.zeros(2), torch.full((2,), 9.0)
        >>> find_root(lambda y: y**3 - targets, lower, upper, torch.tensor(1e-6))
        tensor([2., 3.])
    """
    eps = torch.finfo(lower.dtype).eps
    a, b, c = upper, lower, upper  # the root lies between a and b; c is an earlier end
    fa, fb, fc = function(a), function(b), function(upper)
    t = torch.full_like(lower, 0.5)
    for _ in range(MAX_STEPS):
        new = a + t * (b - a)
        value = function(new)
        same = (value >= 0) == (fa >= 0)
        c, fc = torch.where(same, a, b), torch.where(same, fa, fb)
        b, fb = torch.where(same, b, a), torch.where(same, fb, fa)
        a, fa = new, value
        limit = (2 * eps * torch.maximum(a.abs(), b.abs()) + tolerance) / (b - a).abs()
        if bool(((limit >= 1) | (fa == 0)).all()):
            break
        xi, phi = (a - b) / (c - b), (fa - fb) / (fc - fb)
        quadratic = fa / (fb - fa) * fc / (fb - fc) + (c - a) / (b - a) * fa / (fc - fa) * fb / (fc - fb)
        is_safe = (phi**2 < xi) & ((1 - phi) ** 2 < 1 - xi) & torch.isfinite(quadratic)
        t = torch.where(is_safe, quadratic, torch.full_like(t, 0.5))
        limit = limit.clamp(max=0.5)
        t = torch.minimum(torch.maximum(t, limit), 1 - limit)
    return torch.where(fa >= 0, a, b)


def find_whole(
    probability: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], level: Tensor, guess: Tensor, largest: float
) -> Tensor:
    """
    Quantiles of distributions of whole numbers 0, 1, ..., many at once: Newton's steps between bounds, for those that
    are not found yet. One evaluation tells the distribution function at two numbers, as the probability of the upper
    one is their difference.

    :param probability: Distribution functions and probabilities at numbers `(m,)`, of the distributions with an index
        `(m,)`.
    :param level: The probabilities that the quantiles have, `(K,)`.
    :param guess: Where to begin, `(K,)`.
    :param largest: The largest number that occurs, may be infinite.

    Example:
        >>> import scipy.stats, torch
        >>> from gpytorch_tkrr.model.prediction import find_whole
        >>> poisson = scipy.stats.poisson([3.0, 400.0])
        >>> def probability(y, index):
        ...     own = scipy.stats.poisson(torch.tensor([3.0, 400.0])[index])
        ...     return torch.as_tensor(own.cdf(y)), torch.as_tensor(own.pmf(y))
        >>> level = torch.tensor([0.5, 0.9], dtype=torch.float64)
        >>> find_whole(probability, level, torch.zeros_like(level), torch.inf), poisson.ppf(level)
        (tensor([  3., 426.], dtype=torch.float64), array([  3., 426.]))
    """
    y, lower, upper = guess.clamp(0.0, largest), torch.full_like(guess, -1.0), torch.full_like(guess, largest)
    left = torch.arange(len(y), device=y.device)[upper - lower > 1]
    step = 0
    while len(left):
        step += 1
        now, q = y[left], level[left]
        cdf, p = probability(now, left)
        is_above, is_below = cdf - p >= q, cdf < q  # of the quantile
        lower[left] = torch.where(is_below, now, torch.where(is_above, lower[left], now - 1))
        upper[left] = torch.where(is_below, upper[left], torch.where(is_above, now - 1, now))
        low, high = lower[left], upper[left]
        high = torch.where(torch.isinf(high), 2 * now + 2, high)
        newton = now + torch.where(is_below, ((q - cdf) / p).ceil(), -((cdf - q) / p).floor())
        is_safe = (newton > low) & (newton <= high) & (step % HALVE_EVERY > 0)
        y[left] = torch.where(is_safe, newton, ((low + high) / 2).ceil())
        left = left[upper[left] - low > 1]
    return upper
