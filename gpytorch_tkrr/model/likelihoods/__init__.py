"""How targets are seen: one file for each observation model, registered for a likelihood class of GPyTorch."""

from . import fixed_noise, gaussian, negative_binomial, probit  # each registers itself

__all__ = ["fixed_noise", "gaussian", "negative_binomial", "probit"]
