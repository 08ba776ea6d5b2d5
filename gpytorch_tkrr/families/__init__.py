"""Functions for stationary kernels beside the sines, and feature maps with a kernel of their own."""
