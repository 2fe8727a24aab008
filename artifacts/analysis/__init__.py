"""Density, differences, sections and lint of artifacts."""
