"""Functions and where they live: the box, functions of one input, their products, the covariance of their weights."""
