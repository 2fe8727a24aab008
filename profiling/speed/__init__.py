"""Wall time: of kernels, of steps of decode; ratios, baselines and the cost table."""
