"""Measures: commands on top, and rooms for what they use."""

from artifacts.cli import interrupt  # noqa: F401, Ctrl-C from the first moment
