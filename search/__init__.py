"""Finds the cheapest attention pattern that each head can live with, and writes it as an artifact."""

from artifacts.command_line import require

require("optuna")
