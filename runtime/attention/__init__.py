"""Attention as transformers asks for it: function.py decides for each call, kernel.py is the way to
our kernels."""
