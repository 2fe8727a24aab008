"""Wall time of kernels and layers; ratios and baselines."""
