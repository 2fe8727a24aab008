"""Says what is odd about an artifact that is whole: what an expert would ask about before serving with it."""

from artifacts.lint.finding import SEVERITIES, Finding, Severity
from artifacts.lint.run import CHECKS, lint

__all__ = ["CHECKS", "SEVERITIES", "Finding", "Severity", "lint"]
