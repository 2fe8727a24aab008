"""Attention of transformers' interface: function.py, read first, asks a layer's servers in turn."""
