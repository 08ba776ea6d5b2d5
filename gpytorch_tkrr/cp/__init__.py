"""One factor at a time: CP weights, sums over data, Gaussian conditionals."""
