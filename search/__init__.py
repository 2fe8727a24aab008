"""Finds the cheapest attention pattern that each head can live with, and writes it as an artifact."""
