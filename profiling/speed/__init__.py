"""Wall time: of kernels, of attention in a prefill, of Python; ratios and the cost table."""
