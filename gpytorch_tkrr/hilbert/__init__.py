"""The reduced-rank kernel inside GPyTorch: operator, likelihood, prediction."""
