"""Density, differences and sections of artifacts."""
