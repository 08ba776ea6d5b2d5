"""Models side by side on the same data: the command `compare`, and saved models."""
