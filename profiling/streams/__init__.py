"""Endless streams: what is streamed, how it is attended to, and what came out."""
