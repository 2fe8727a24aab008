"""Density, differences, merging and lint of artifacts."""
