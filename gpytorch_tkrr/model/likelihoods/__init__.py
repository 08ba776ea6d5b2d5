"""How targets are seen: one file for each observation model, registered for a likelihood class of GPyTorch."""

from . import censored, fixed_noise, gaussian, negative_binomial, ordinal, probit, student  # each registers itself

__all__ = ["censored", "fixed_noise", "gaussian", "negative_binomial", "ordinal", "probit", "student"]
