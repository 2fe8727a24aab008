"""Attention of transformers' interface: function.py, read first, selects a kernel for each call."""
