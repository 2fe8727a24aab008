"""The search with a budget for each head, as published: MInference 1.0, Algorithm 1."""

PAPER_LENGTH = 30_000
PAPER_BUDGET = "a_shape:1024,4096"
