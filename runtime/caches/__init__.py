"""Caches for transformers: such as grow in place, and such as drop tokens by a policy."""
