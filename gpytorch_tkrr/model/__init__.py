"""What is fitted: the CP-weight model, its posteriors, its effects."""
