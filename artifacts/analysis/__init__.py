"""Density and sections of artifacts."""
