"""Caches for transformers: growing in place, or dropping tokens by a policy."""
