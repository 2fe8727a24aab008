"""Memory of a cache with room at its end: a new token costs its own bytes, not a copy of all before
it.

Shapes: B batch, G KV heads, Q new tokens; what follows them, such as the head dim, is any.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.allocator import in_huge_pages

# Room for new tokens beyond what is needed now: at least so many, and a share of the whole.
_ROOM = 256
_SHARE = 8


def room_for(needed: int) -> int:
    """Tokens to have memory for where `needed` are there: those, and as many new ones as make a
    copy worth it."""
    return needed + max(_ROOM, needed // _SHARE)


def with_room(memory: Tensor, used: int, needed: int, room: int) -> Tensor:
    """Memory (B, G, at least `needed`, ...) with the first `used` tokens of `memory`: the same
    where it suffices.

    room: for how many tokens new memory is.
    """
    # What was made in inference mode cannot be written to outside of it.
    writable = torch.is_inference_mode_enabled() or not memory.is_inference()
    if memory.shape[2] >= needed and writable:
        return memory
    made = in_huge_pages(memory.new_empty(*memory.shape[:2], room, *memory.shape[3:]))
    made[:, :, :used] = memory[:, :, :used]
    return made
