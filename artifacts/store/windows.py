"""Digests of the text windows that a search has seen, which no report may use.

A digest is the SHA-256 of the window's token ids as little-endian int32. The array
`calibration.seen_windows` of the sidecar holds the digests, uint8 of shape (windows, 32).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from artifacts.errors import ArtifactError, shorten
from artifacts.schema.search import MAX_WINDOWS

if TYPE_CHECKING:
    from artifacts.store.sidecar import Array

SEEN_WINDOWS = "calibration.seen_windows"
_DIGEST = re.compile("[0-9a-f]{64}")


def window_arrays(digests: Iterable[str]) -> dict[str, Array]:
    """Make the sidecar array of digests (64 hex digits), sorted and unique; empty without any.

    Raises:
        ArtifactError: a digest is invalid, or there are more than 1,048,576.
    """
    import numpy as np

    unique = sorted(set(digests))
    if len(unique) > MAX_WINDOWS:
        raise ArtifactError(f"{len(unique)} windows, an artifact may list {MAX_WINDOWS}")
    if wrong := [digest for digest in unique if not _DIGEST.fullmatch(digest)]:
        raise ArtifactError(f"a window's digest must have 64 hex digits, got {shorten(wrong[0])}")
    listed = b"".join(map(bytes.fromhex, unique))
    if unique:
        return {SEEN_WINDOWS: np.frombuffer(listed, dtype=np.uint8).reshape(-1, 32)}
    return {}


def seen_windows(arrays: Mapping[str, Array]) -> frozenset[str]:
    """Return the digests in a sidecar, 64 hex digits each; empty without the array."""
    table = arrays.get(SEEN_WINDOWS)
    if table is None:
        return frozenset()
    return frozenset(bytes(row).hex() for row in table)
