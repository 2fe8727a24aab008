"""Measurements: the commands, and the packages that they use."""
