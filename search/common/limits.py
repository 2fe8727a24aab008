"""The options of a command line that limit what may be lost."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from search.model.task_losses import Limits

_SAYS = {
    "kl": "nats a token to dense attention",
    "perplexity": "rise on text",
    "nll": "rise of -log p of right answers, nats a token",
    "lost": "share of right answers fewer than dense attention",
}


def add_limits(p: argparse.ArgumentParser) -> None:
    """The options of a gate's limits."""
    for field in fields(Limits):
        says = f"{_SAYS[field.name]} (default {field.default})"
        p.add_argument(f"--max-{field.name}", type=float, default=field.default, help=says)


def limits_of(options: dict[str, Any]) -> Limits:
    """Takes the limits out of a command line's options."""
    return Limits(**{name: options.pop(f"max_{name}") for name in _SAYS})
