"""From a kernel object to functions and their variances: box, basis, spectral density, expansion."""
