"""Measures: models, prompts, captured attention inputs, quality, latency, pictures. See docs/structure.md."""
