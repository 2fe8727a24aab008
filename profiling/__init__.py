"""Measures: commands on top, and rooms for what they use."""
