r"""Ordered classes: between which cut points :math:`z = f(x) + \epsilon` lies, with standard normal noise.

Given f and the cut points, each z is a normal number between two bounds; given all z, the model is a regression with
noise variance 1 (Albert & Chib 1993). The cut points are drawn with z integrated out: given z they could move only
between neighbouring values of it, that is hardly at all where rows are many (Cowles 1996). Every second one is drawn at
a time, since a class depends on two neighbours. Before they are ordered, cut points are N(0, 5^2).
"""

from __future__ import annotations

import numpy as np
import torch
from gpytorch.likelihoods.likelihood import _OneDimensionalLikelihood
from torch import Tensor
from torch.distributions import Categorical

from ...data.keyed import row_uniform
from ...data.source import Batch, Working
from ...data.training import Summary
from ...errors import InputError
from ..augmentation.candidates import NUM_CANDIDATES, choose, steps
from .augmented import Augmentation, Parameters, SumRows
from .base import Observation, Rows, per_row
from .registry import register

#: Standard deviation of the normal prior of cut points.
CUT_SD = 5.0


class OrdinalLikelihood(_OneDimensionalLikelihood):
    r"""
    Ordered classes 0, ..., K - 1 with probabilities :math:`\Phi(c_{k + 1} - f) - \Phi(c_k - f)` (ordered probit), for
    :class:`~gpytorch_tkrr.TKRR` with :func:`~gpytorch_tkrr.fit_gibbs`, and for GPyTorch's ApproximateGP.

    :param num_classes: K, at least 2.

    Example:
        >>> import torch, gpytorch_tkrr as tkrr
        >>> x = torch.rand(150, 1)
        >>> y = torch.bucketize(4 * x[:, 0] + 0.5 * torch.randn(150), torch.tensor([1.0, 3.0]))  # 0, 1 and 2
        >>> model = tkrr.TKRR(x, y, tkrr.OrdinalLikelihood(3), rank=2, num_basis=6)
        >>> result = tkrr.fit_gibbs(model, num_draws=20, num_warmup=20, seed=0)
        >>> p = model.predict(torch.tensor([[0.05], [0.5], [0.95]])).probabilities
        >>> p.shape, p.argmax(-1).tolist()
        (torch.Size([3, 3]), [0, 1, 2])
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        if isinstance(num_classes, float) or num_classes < 2:
            raise InputError(f"num_classes must be an integer, at least 2; got {num_classes}.")
        self.num_classes = int(num_classes)
        cuts = torch.special.ndtri(torch.arange(1, self.num_classes, dtype=torch.float64) / self.num_classes)
        #: The first cut point, and the logarithms of the distances between neighbours.
        self.raw_cutpoints = torch.nn.Parameter(_raw(cuts).to(torch.get_default_dtype()))

    @property
    def cutpoints(self) -> Tensor:
        """The cut points in their order, `(K - 1,)`."""
        return torch.cat([self.raw_cutpoints[:1], self.raw_cutpoints[1:].exp()]).cumsum(0)

    @cutpoints.setter
    def cutpoints(self, value: Tensor) -> None:
        value = torch.as_tensor(value).to(self.raw_cutpoints)
        if value.shape != self.raw_cutpoints.shape or not bool((value.diff() > 0).all()):
            raise InputError(f"There must be {self.num_classes - 1} increasing cut points; got {value.tolist()}.")
        self.initialize(raw_cutpoints=_raw(value))

    def forward(self, function_samples: Tensor, *args: object, **kwargs: object) -> Categorical:
        """
        The distribution of the class.

        :param function_samples: Values of f `(..., n)`.
        """
        edges = torch.nn.functional.pad(self.cutpoints, (1, 1), value=torch.inf)
        edges = torch.cat([-edges[:1], edges[1:]]) - function_samples.unsqueeze(-1)
        return Categorical(logits=log_between(edges[..., :-1], edges[..., 1:]))


def _raw(cuts: Tensor) -> Tensor:
    return torch.cat([cuts[:1], cuts.diff().log()])


def log_between(a: Tensor, b: Tensor) -> Tensor:
    r"""
    :math:`\log(\Phi(b) - \Phi(a))`, exact in the tails.

    :param a: Lower bounds, may be infinite.
    :param b: Upper bounds, larger.

    Example:
        >>> import torch
        >>> from gpytorch_tkrr.model.likelihoods.ordinal import log_between
        >>> log_between(torch.tensor(-torch.inf), torch.tensor(0.0)).exp()
        tensor(0.5000)
    """
    upper_tail = a > 0
    a, b = torch.where(upper_tail, -b, a), torch.where(upper_tail, -a, b)
    log_b = torch.special.log_ndtr(b)
    return log_b + torch.log(-torch.expm1(torch.special.log_ndtr(a) - log_b))


def truncated_normal(a: Tensor, b: Tensor, u: Tensor) -> Tensor:
    """
    Standard normal numbers between bounds.

    :param a: Lower bounds `(n,)`, may be infinite.
    :param b: Upper bounds `(n,)`, larger.
    :param u: Uniform numbers `(n,)`.
    """
    upper_tail = a > 0
    low, high = torch.where(upper_tail, -b, a), torch.where(upper_tail, -a, b)
    log_p = torch.logaddexp(torch.special.log_ndtr(low), log_between(low, high) + u.log())
    z = torch.special.ndtri(log_p.exp().clamp(min=torch.finfo(torch.float64).tiny))
    return torch.where(upper_tail, -z, z).clamp(a, b)


@register(OrdinalLikelihood)
class OrdinalObservation(Observation):
    """
    Ordered classes. Predictions speak of their numbers: the mean is the mean class.

    :param likelihood: An OrdinalLikelihood.
    """

    is_discrete = True
    has_link = True
    has_least_squares = False

    def __init__(self, likelihood: OrdinalLikelihood) -> None:
        super().__init__(likelihood)
        self.num_classes = likelihood.num_classes

    def encode(self, y: Tensor) -> Tensor:
        y = y.double()
        wrong = (y != y.round()) | (y < 0) | (y >= self.num_classes)
        if bool(wrong.any()):
            raise InputError(
                f"With an OrdinalLikelihood of {self.num_classes} classes targets must be 0, ..., "
                f"{self.num_classes - 1}; got {y[wrong].unique()[:5].tolist()}."
            )
        return y

    def start_mean(self, summary: Summary) -> float:
        return 0.0  # the cut points have a mean of their own

    def augmentation(self, scale: float, offset: float) -> Augmentation:
        cuts = self.likelihood.cutpoints.detach().double()
        return OrdinalAugmentation(cuts, self.likelihood.raw_cutpoints.requires_grad, offset)

    def set_parameters(self, draws: Parameters) -> None:
        if "cutpoints" in draws:
            self.likelihood.cutpoints = draws["cutpoints"].mean(0)

    def _edges(self, f: Tensor, parameters: Parameters, rows: Rows) -> list[Tensor]:
        """Cut points minus f, in standard deviations of z, K + 1 tensors `(*P, n)`."""
        sd = (1 + rows["spread"]).sqrt() if "spread" in rows else 1.0
        inner = [(per_row(cut) - f) / sd for cut in parameters["cutpoints"].unbind(-1)]
        return [torch.full_like(f, -torch.inf), *inner, torch.full_like(f, torch.inf)]

    def _above(self, f: Tensor, parameters: Parameters, rows: Rows) -> list[Tensor]:
        """Probabilities of classes above 0, above 1, ..., K - 1 tensors `(*P, n)`."""
        edges = self._edges(f, parameters, rows)[1:-1]
        return [torch.special.erfc(edge / 2**0.5) / 2 for edge in edges]

    def log_density(self, y: Tensor, f: Tensor, parameters: Parameters, rows: Rows) -> Tensor:
        edges = self._edges(f, parameters, rows)
        total = torch.full(torch.broadcast_shapes(y.shape, f.shape), -torch.inf, dtype=f.dtype, device=f.device)
        for k in range(self.num_classes):
            total = torch.where(y == k, log_between(edges[k], edges[k + 1]), total)
        return total

    def mean(self, f: Tensor, parameters: Parameters, rows: Rows) -> Tensor:
        return torch.stack(self._above(f, parameters, rows)).sum(0)

    def variance(self, f: Tensor, parameters: Parameters, rows: Rows) -> Tensor:
        above = self._above(f, parameters, rows)
        square = torch.stack([(2 * k + 1) * p for k, p in enumerate(above)]).sum(0)
        return square - self.mean(f, parameters, rows).square()

    def cdf(self, y: Tensor, f: Tensor, parameters: Parameters, rows: Rows) -> Tensor:
        above = self._above(f, parameters, rows)
        total = torch.zeros(torch.broadcast_shapes(y.shape, f.shape), dtype=f.dtype, device=f.device)
        for k, p in enumerate([*above, torch.zeros_like(f)]):
            total = torch.where(y >= k, 1 - p, total)
        return total

    def sample(self, f: Tensor, parameters: Parameters, rows: Rows, generator: torch.Generator) -> Tensor:
        u = torch.rand(f.shape, dtype=f.dtype, device=f.device, generator=generator)
        return torch.stack([(u < p).to(f) for p in self._above(f, parameters, rows)]).sum(0)


class OrdinalAugmentation(Augmentation):
    """
    Latent targets, drawn anew at each visit, and cut points.

    :param cutpoints: Where they start, `(K - 1,)`.
    :param is_free: Whether they are drawn.
    :param offset: The mean of f.
    """

    def __init__(self, cutpoints: Tensor, is_free: bool, offset: float):
        self.cutpoints, self.offset = cutpoints, offset
        self.free = ("cutpoints",) if is_free else ()

    def start(self) -> Parameters:
        return {"noise": torch.ones((), dtype=torch.float64), "cutpoints": self.cutpoints.cpu()}

    def before_sweep(
        self, parameters: Parameters, sum_rows: SumRows, rng: np.random.Generator, progress: float
    ) -> Parameters:
        if not self.free:
            return parameters
        cuts = parameters["cutpoints"].clone()
        for first in range(min(2, len(cuts))):
            self._draw(cuts, range(first, len(cuts), 2), sum_rows, rng)
        return {**parameters, "cutpoints": cuts}

    def _draw(self, cuts: Tensor, chosen: range, sum_rows: SumRows, rng: np.random.Generator) -> None:
        """New values of cut points that are no neighbours, in place."""
        edges = _padded(cuts)
        candidates = torch.from_numpy(np.stack([float(cuts[j]) + steps(rng) for j in chosen]))  # (J, K)

        def log_likelihood(batch: Batch, f: Tensor, first_row: int) -> Tensor:
            label = batch.y.long()
            # Of the two edges of class k, cut points k - 1 and k, the one that is drawn, if there is any.
            is_upper = (label - chosen.start) % 2 == 0
            cut = torch.where(is_upper, label, label - 1)
            known = (cut >= 0) & (cut < len(cuts))
            label, is_upper, cut, f = label[known], is_upper[known, None], cut[known] // 2, f[known] + self.offset
            edge = candidates.to(f.device)[cut]  # (n, K)
            lower = torch.where(is_upper, edges.to(f.device)[label, None], edge) - f[:, None]
            upper = torch.where(is_upper, edge, edges.to(f.device)[label + 1, None]) - f[:, None]
            inside = upper > lower
            log_p = torch.where(inside, log_between(lower, torch.where(inside, upper, lower + 1)), -torch.inf)
            return torch.zeros_like(candidates).to(f.device).index_add_(0, cut, log_p).reshape(-1)

        total = sum_rows(log_likelihood, candidates.numel()).cpu().reshape(-1, NUM_CANDIDATES)
        total = total - candidates.square() / (2 * CUT_SD**2)
        for row, j in enumerate(chosen):
            inside = (candidates[row] > edges[j]) & (candidates[row] < edges[j + 2])
            log_p = torch.where(inside, total[row], -torch.inf).numpy()
            cuts[j] = candidates[row, choose(log_p, rng)]

    def working(self, parameters: Parameters, rng: np.random.Generator) -> Working:
        key, edges = int(rng.integers(2**62)), _padded(parameters["cutpoints"])

        def latent(batch: Batch, f: Tensor, first_row: int) -> tuple[Tensor, None]:
            label, own, mean = batch.y.long(), edges.to(f.device), self.offset + f
            u = row_uniform(batch.num_rows, first_row, key, f.device)
            return truncated_normal(own[label] - mean, own[label + 1] - mean, u), None

        return latent


def _padded(cuts: Tensor) -> Tensor:
    """With the edges of the first and the last class, `(K + 1,)`."""
    end = cuts.new_full((1,), torch.inf)
    return torch.cat([-end, cuts, end])
