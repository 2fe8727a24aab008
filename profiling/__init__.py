"""Measures: commands on top, and rooms for what they use."""

from artifacts import interrupt  # noqa: F401, Ctrl-C from the first moment
