"""Endless streams: perplexity and cache size by cache policy."""
