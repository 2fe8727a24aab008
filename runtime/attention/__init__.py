"""Attention as transformers asks for it: function.py decides, kernel.py calls our kernels."""
