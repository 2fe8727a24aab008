"""The options of a command line that limit what may be lost."""

from __future__ import annotations

import argparse
from typing import Any

from search.model.task_losses import MAX_KL, MAX_LOST, MAX_NLL, MAX_PERPLEXITY, Limits


def add_limits(p: argparse.ArgumentParser) -> None:
    """The options of a gate's limits."""
    p.add_argument("--max-kl", type=float, default=MAX_KL, help=f"nats a token to dense attention (default {MAX_KL})")
    p.add_argument(
        "--max-perplexity", type=float, default=MAX_PERPLEXITY, help=f"rise on text (default {MAX_PERPLEXITY})"
    )
    p.add_argument(
        "--max-nll", type=float, default=MAX_NLL, help=f"rise of -log p of right answers, nats a token ({MAX_NLL})"
    )
    p.add_argument(
        "--max-lost",
        type=float,
        default=MAX_LOST,
        help=f"share of right answers fewer than dense attention ({MAX_LOST})",
    )


def limits_of(options: dict[str, Any]) -> Limits:
    """Takes the limits out of a command line's options."""
    return Limits(**{name: options.pop(f"max_{name}") for name in ("kl", "perplexity", "nll", "lost")})
