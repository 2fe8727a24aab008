"""Attention of transformers' interface: function.py, read first, chooses a kernel for each call."""
