"""The search with one budget for the model: candidates, curves, allocation, refinement, gate,
costs, record."""
