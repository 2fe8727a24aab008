"""What every search measures of each head with each candidate, by the names that the sidecar has for it."""

from __future__ import annotations

MEASURES = ("error", "recall", "density")
