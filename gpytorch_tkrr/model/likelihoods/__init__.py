"""How targets are seen: one file for each observation model, registered for a likelihood class of GPyTorch."""

from . import censored, fixed_noise, gaussian, heteroskedastic, negative_binomial, ordinal, probit, student

__all__ = [
    "censored",
    "fixed_noise",
    "gaussian",
    "heteroskedastic",
    "negative_binomial",
    "ordinal",
    "probit",
    "student",
]  # each registers itself
