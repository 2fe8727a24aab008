"""Finds the cheapest attention pattern that each head can live with, and writes it as an
artifact."""

from artifacts import interrupt  # noqa: F401, Ctrl-C from the first moment
