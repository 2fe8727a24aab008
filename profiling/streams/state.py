"""A cache on disk, so that a killed stream goes on exactly where it was.

Only caches that do not grow are written down; a stream through one that grows is fed again from its start.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch

from artifacts.files import atomic_write

# Of what is in the file: another one is fed again.
_FORMAT = 3


def save_cache(path: Path, cache: Any, blocks: int, digest: str) -> None:
    """Write the state of a cache whose layers are all under policies; any other is left alone."""
    if not all(hasattr(layer, "state") for layer in cache.layers):
        return
    file = io.BytesIO()
    held = {"format": _FORMAT, "digest": digest, "blocks": blocks, "layers": [layer.state() for layer in cache.layers]}
    torch.save(held, file)
    atomic_write(path, file.getvalue())


def load_cache(path: Path, cache: Any, digest: str, most: int, device: torch.device) -> int:
    """Put a cache into the state that was written down, and return its number of blocks.

    0, and nothing done, without such a file, or where it is damaged, of another run, or has seen more than `most`
    blocks: the stream is then fed again.
    """
    try:
        held = torch.load(path, map_location=device, weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError):
        return 0
    if not isinstance(held, dict) or (held.get("format"), held.get("digest")) != (_FORMAT, digest):
        return 0
    if held["blocks"] > most:
        return 0
    for layer, state in zip(cache.layers, held["layers"], strict=True):
        layer.load_state(state)
    return int(held["blocks"])
