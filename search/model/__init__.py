"""The search with one budget for the model, from candidates to gate and record."""
