"""Measurements behind every claim of speed or accuracy: ``python -m benchmarks NAME``."""
