"""Ways to fit the CP-weight model, and what they return."""
