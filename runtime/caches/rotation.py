"""Rotates keys and queries on to other positions, with the model's own rotary embedding.

Rotations add up: what was rotated to position p and then by d stands at p + d (RoFormer, section
3.2.2).

Shapes: B batch, H heads, n tokens, D head dim.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from artifacts import HeadwiseError

_CLOSE = 1e-3


class Rotation:
    """Rotary embedding of one kind of layer.

    Raises:
        HeadwiseError: the model has none that rotates by the position alone.
    """

    def __init__(self, model: nn.Module, module: nn.Module) -> None:
        """Take the rotation of `module`, an attention layer of `model`."""
        self._name = type(model).__name__
        code = inspect.unwrap(type(module).forward)
        self._apply: Any = code.__globals__.get("apply_rotary_pos_emb")
        self._rotary = _rotary(model, module)
        if self._apply is None or self._rotary is None:
            raise self._refused("it has no rotary embedding")
        self._layer_type = getattr(module, "layer_type", None)
        self._takes_type = "layer_type" in inspect.signature(self._rotary.forward).parameters
        kinds = getattr(self._rotary, "rope_type", "default")
        if isinstance(kinds, dict):
            kind = kinds.get(self._layer_type, "default")
        else:
            kind = kinds
        if kind in ("dynamic", "longrope"):
            raise self._refused(f"its rotary embedding of type {kind!r} changes with the length")
        self._known: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        self._check(getattr(module, "head_dim", None) or 64)

    def shift(self, x: Tensor, by: Tensor) -> Tensor:
        """Rotate tokens (B, H, n, D) on by `by` (n) or (1) positions, which may be negative."""
        cos, sin = self._angles(by, x.device)
        # Some models' code casts to the dtype of what it rotates: fp32 throughout.
        rotated, _ = self._apply(x.float(), x.float(), cos, sin)
        result: Tensor = rotated.to(x.dtype)
        return result

    def _angles(self, by: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines (1, n, D), without an embedding's factor on attention: x has it."""
        if by.numel() == 1:
            key = tuple(by.tolist())
        else:
            key = None
        if key is not None and key in self._known and self._known[key][0].device == device:
            return self._known[key]
        assert self._rotary is not None
        kind = {"layer_type": self._layer_type} if self._takes_type else {}
        probe = torch.zeros(1, device=device, dtype=torch.float32)
        zero = torch.zeros(1, 1, dtype=torch.long, device=device)
        factor = self._rotary(probe, zero, **kind)[0]
        cos, sin = (part / factor for part in self._rotary(probe, by.to(device)[None], **kind))
        if key is not None:
            # All layers of a step ask for the same one.
            self._known = {key: (cos, sin)}
        return cos, sin

    def _check(self, head_dim: int) -> None:
        """Check that rotations add up, whatever the model's code does."""
        assert self._rotary is not None
        device = next((buffer.device for buffer in self._rotary.buffers()), torch.device("cpu"))
        x = torch.randn(
            1, 1, 1, head_dim, generator=torch.Generator().manual_seed(0), dtype=torch.float32
        ).to(device)
        there = self.shift(x, torch.tensor([7]))
        further = torch.tensor([-3])
        direct = self.shift(x, torch.tensor([4]))
        if not torch.allclose(self.shift(there, further), direct, atol=_CLOSE):
            raise self._refused("its rotary embedding is not a rotation by the position")

    def _refused(self, why: str) -> HeadwiseError:
        return HeadwiseError(
            f"positions of {self._name} cannot be counted inside the cache: {why}; set positions: "
            f"original"
        )


def _rotary(model: nn.Module, module: nn.Module) -> nn.Module | None:
    """Rotary embedding of an attention layer: its own, or that of the innermost model around it."""
    name = next((name for name, part in model.named_modules() if part is module), "")
    while True:
        part = model.get_submodule(name)
        for child in ("rotary_emb", "rotary_embedding"):
            rotary = getattr(part, child, None)
            if isinstance(rotary, nn.Module):
                return rotary
        if not name:
            return None
        name = name.rpartition(".")[0]
