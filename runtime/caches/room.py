"""Memory of a cache with room at its end: a new token costs its own bytes, not a copy of all before it.

Shapes: B batch, G KV heads, Q new tokens, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.allocator import in_huge_pages

# Room for new tokens beyond what is needed now: at least so many, and a share of the whole.
_ROOM = 256
_SHARE = 8


def with_room(former: Tensor | None, new: Tensor, used: int, needed: int, most: int | None = None) -> Tensor:
    """Memory (B, G, at least `needed`, D) whose first `used` tokens are those of `former`; the same where it suffices.

    new: (B, G, Q, D), for its sizes and type. most: never more tokens than that.
    """
    if former is not None and former.dim() == 4 and former.shape[2] >= needed and writable(former):
        return former
    room = needed + max(_ROOM, needed // _SHARE)
    made = in_huge_pages(new.new_empty(*new.shape[:2], room if most is None else min(room, most), new.shape[3]))
    if former is not None and used:
        made[:, :, :used] = former[:, :, :used]
    return made


def append(memory: Tensor | None, new: Tensor, used: int) -> Tensor:
    """Memory with room whose first `used` tokens are those of `memory`, and those after them `new` (B, G, Q, D)."""
    needed = used + new.shape[2]
    made = with_room(memory, new, used, needed)
    made[:, :, used:needed] = new
    return made


def writable(memory: Tensor) -> bool:
    """Whether a new token can be written: memory made in inference mode cannot be outside of it."""
    return torch.is_inference_mode_enabled() or not memory.is_inference()
