"""Captured queries, keys and values, gradients, the residual stream and attention rows."""
