"""The search with a budget for each head, as published: MInference 1.0, Algorithm 1."""
