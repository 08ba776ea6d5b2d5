"""Random numbers that turn a likelihood into a regression, and what else observation models share."""
