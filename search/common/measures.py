"""What every search measures of each head with each candidate, by the names that the sidecar has for it."""

from __future__ import annotations

MEASURES = ("error", "recall", "density")
# What a search adds that has one budget for the model.
OF_MODEL = ("objective", "change", "seconds", "flops")
# A head's drift is counted from this error up: bfloat16 alone puts dense attention's output 0.002 off.
DRIFT_FLOOR = 0.01
