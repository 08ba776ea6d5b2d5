r"""Transforms of targets, so that skewed ones become nearly normal; predictions are transformed back."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.optimize import minimize_scalar

from ..errors import InputError

#: Names that `transform` takes.
TRANSFORMS = ("log", "yeo-johnson")


@dataclass(frozen=True)
class TargetTransform:
    r"""
    A monotone map g of targets: the logarithm, or that of Yeo and Johnson (2000), which takes negative ones too,

    .. math:: g(y) = \frac{(1 + y / s)^\lambda - 1}{\lambda} \;(y \ge 0), \qquad
        -\frac{(1 - y / s)^{2 - \lambda} - 1}{2 - \lambda} \;(y < 0),

    with the standard deviation s of the targets, so that units do not matter, and :math:`\lambda` of largest
    likelihood. Quantiles of y are g's inverse of the quantiles of g(y).

    :param kind: "log" or "yeo-johnson".
    :param power: :math:`\lambda`.
    :param scale: s.

    Example:
        >>> import numpy as np
        >>> from gpytorch_tkrr.sklearn.transform import TargetTransform
        >>> y = np.array([0.5, 2.0, 30.0])
        >>> np.allclose(TargetTransform.learn("log", y).inverse(np.log(y)), y)
        True
    """

    kind: str
    power: float = 1.0
    scale: float = 1.0

    @classmethod
    def learn(cls, kind: str, y: np.ndarray) -> TargetTransform:
        """
        The transform of training targets.

        :param kind: "log" or "yeo-johnson".
        :param y: Targets `(N,)`; NaN is left out.
        """
        if kind not in TRANSFORMS:
            raise InputError(f"target_transform must be one of {', '.join(TRANSFORMS)}, or None; got {kind!r}.")
        if kind == "log":
            bad = y[y <= 0]
            if len(bad):
                raise InputError(
                    f"target_transform='log' takes positive targets; {len(bad)} of {len(y)} are not, such as "
                    f"{bad[0]:g}. Try 'yeo-johnson'."
                )
            return cls(kind)
        y = y[~np.isnan(y)]
        scale = float(np.std(y)) or 1.0

        def loss(power: float) -> float:
            each = cls(kind, power, scale)
            variance = float(np.var(each(y)))
            return len(y) / 2 * np.log(max(variance, np.finfo(float).tiny)) - float(np.sum(each.log_slope(y)))

        return cls(kind, float(minimize_scalar(loss, bounds=(-2.0, 4.0), method="bounded").x), scale)

    def plain(self) -> dict[str, Any]:
        """Plain values, to be stored."""
        return asdict(self)

    def __call__(self, y: np.ndarray) -> np.ndarray:
        """
        g(y).

        :param y: Targets.
        """
        if self.kind == "log":
            return np.log(y)
        z = np.abs(y) / self.scale
        return np.where(y >= 0, _box_cox(z, self.power), -_box_cox(z, 2 - self.power))

    def inverse(self, g: np.ndarray) -> np.ndarray:
        """
        The target with a given g(y).

        :param g: Transformed values.
        """
        with np.errstate(over="ignore"):
            if self.kind == "log":
                return np.exp(g)
            positive = _inverse_box_cox(np.maximum(g, 0), self.power)
            negative = _inverse_box_cox(np.maximum(-g, 0), 2 - self.power)
        return np.where(g >= 0, positive, -negative) * self.scale

    def log_slope(self, y: np.ndarray) -> np.ndarray:
        """
        log g'(y), which a log density of y has more than that of g(y).

        :param y: Targets.
        """
        if self.kind == "log":
            return -np.log(y)
        sign = np.where(y >= 0, self.power - 1, 1 - self.power)
        return sign * np.log1p(np.abs(y) / self.scale) - np.log(self.scale)


class OutputTransforms(tuple[TargetTransform, ...]):
    """
    A transform for each of several outputs, `(..., T)`. NaN stays NaN.

    Example:
        >>> import numpy as np
        >>> from gpytorch_tkrr.sklearn.transform import learn_transform
        >>> y = np.array([[1.0, 2.0], [np.e, np.nan]])
        >>> learn_transform("log", y)(y).round(3).tolist()
        [[0.0, 0.693], [1.0, nan]]
    """

    def __call__(self, y: np.ndarray) -> np.ndarray:
        """
        g(y) of each output.

        :param y: Targets `(..., T)`.
        """
        return np.stack([each(y[..., t]) for t, each in enumerate(self)], axis=-1)

    def inverse(self, g: np.ndarray) -> np.ndarray:
        """
        The targets with given g(y).

        :param g: Transformed values `(..., T)`.
        """
        return np.stack([each.inverse(g[..., t]) for t, each in enumerate(self)], axis=-1)

    def log_slope(self, y: np.ndarray) -> np.ndarray:
        """
        log g'(y) of each output.

        :param y: Targets `(..., T)`.
        """
        return np.stack([each.log_slope(y[..., t]) for t, each in enumerate(self)], axis=-1)

    def plain(self) -> list[dict[str, Any]]:
        """Plain values, to be stored."""
        return [each.plain() for each in self]


def learn_transform(kind: str, y: np.ndarray) -> TargetTransform | OutputTransforms:
    """
    The transform of training targets.

    :param kind: "log" or "yeo-johnson".
    :param y: Targets `(N,)`, or `(N, T)` of several outputs, NaN where they were not observed.
    """
    if y.ndim == 1:
        return TargetTransform.learn(kind, y)
    return OutputTransforms(TargetTransform.learn(kind, column) for column in y.T)


def transform_from_plain(plain: Any) -> TargetTransform | OutputTransforms:
    """
    The transform that was stored.

    :param plain: As its `plain` returned it.
    """
    if isinstance(plain, list):
        return OutputTransforms(TargetTransform(**each) for each in plain)
    return TargetTransform(**plain)


def _box_cox(z: np.ndarray, power: float) -> np.ndarray:
    return np.log1p(z) if abs(power) < 1e-9 else np.expm1(power * np.log1p(z)) / power


def _inverse_box_cox(g: np.ndarray, power: float) -> np.ndarray:
    if abs(power) < 1e-9:
        return np.expm1(g)
    inside = np.maximum(power * g, -1 + 1e-15)  # with a negative power g has a bound
    return np.expm1(np.log1p(inside) / power)
