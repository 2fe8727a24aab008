"""Finds the cheapest attention pattern that each head can live with; writes the artifact."""

from artifacts.cli import interrupt  # noqa: F401, Ctrl-C from the first moment
