"""Finds the cheapest attention pattern that each head can live with; writes the artifact."""
