"""Rotates keys and queries to other positions with the model's own rotary embedding.

Rotations add up: a vector rotated to position p and then by d is at p + d (RoFormer, section
3.2.2).

Models differ in which embedding a layer has, how much of a head it rotates, which part, and which
elements form a pair. None of this is read from the model's code. One forward computes the keys of
the same tokens at two positions: a layer's rotation is the one that maps the first to the second.

Shapes: B batch, H heads, n tokens, D head dim, R rotated elements of a head.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from artifacts import HeadwiseError
from kernels.copies import on_device
from runtime.caches.rehearsal import POSITIONS, keys_at_two_positions
from runtime.layers import layer_type

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Largest relative error of a layer's keys under its rotation; half precision rounds them twice.
_CLOSE = 1e-3
_CLOSE_HALF = 0.03
# Types of rotary embeddings whose angles depend on the longest position of a call.
_BY_LENGTH = ("dynamic", "longrope")


@dataclass(frozen=True, eq=False)
class Rotation:
    """Rotary embedding of a layer.

    Attributes:
        rotary: the model's module, (x, position_ids) -> cosines and sines, or complex numbers.
        options: its other arguments.
        axes: how many positions a token has (3 in models with images), all the same; 0 for one.
        repeated: "halves" or "neighbors" if the module returns each pair's angle twice.
        interleaved: neighbors form a pair; else an element of the first half and one of the second.
        last: the rotated part is the end of a head, else its beginning.
        sign: -1 where the model rotates backwards.
    """

    rotary: nn.Module
    options: dict[str, Any]
    axes: int = 0
    repeated: str = ""
    interleaved: bool = False
    last: bool = False
    sign: int = 1
    # Of the last positions of sequences: all layers of a step ask for the same.
    _cached: dict[Any, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False, repr=False)

    def shift(self, x: Tensor, by: tuple[int, ...] | Tensor) -> Tensor:
        """Rotate tokens (B, H, n, D) on by some positions, which may be negative.

        Args:
            x: (B, H, n, D), rotated to their old positions.
            by: of each sequence, or of each token (n,).
        """
        if isinstance(by, Tensor):
            cos, sin = self._shifts(by[None])
        else:
            cos, sin = self._cached_shifts(by, x.device)
        size = 2 * cos.shape[-1]
        if self.last:
            rotated = slice(x.shape[-1] - size, None)
        else:
            rotated = slice(0, size)
        part = x[..., rotated].float()
        if self.interleaved:
            one, other = part.unflatten(-1, (-1, 2)).unbind(-1)
        else:
            one, other = part.chunk(2, dim=-1)
        turned = one * cos - other * sin, other * cos + one * sin
        result = x.clone()
        if self.interleaved:
            result[..., rotated] = torch.stack(turned, dim=-1).flatten(-2).to(x.dtype)
        else:
            result[..., rotated] = torch.cat(turned, dim=-1).to(x.dtype)
        return result

    def _cached_shifts(self, by: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
        angles = self._cached.get((by, device))
        if angles is None:
            if len(by) == 1:
                # Neither waits for the device.
                positions = torch.full((1, 1), by[0], dtype=torch.long, device=device)
            else:
                positions = on_device(by, device)[:, None]
            angles = self._shifts(positions)
            self._cached.clear()
            self._cached[by, device] = angles
        return angles

    def _shifts(self, by: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines (B, 1, n, R / 2), without an embedding's factor: keys have it."""
        cos, sin = self._pairs(by)
        factor, _ = self._pairs(torch.zeros_like(by[:1, :1]))
        return (cos / factor)[:, None], (sin / factor)[:, None] * self.sign

    def _pairs(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines (B, n, R / 2) of positions (B, n)."""
        cos, sin = self._all(positions)
        if self.repeated == "halves":
            return cos.chunk(2, dim=-1)[0], sin.chunk(2, dim=-1)[0]
        if self.repeated == "neighbors":
            return cos[..., 0::2], sin[..., 0::2]
        return cos, sin

    def _all(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        if self.axes:
            positions = positions.expand(self.axes, -1, -1)
        x = torch.zeros(1, dtype=torch.float32, device=positions.device)
        angles = self.rotary(x, positions, **self.options)
        if isinstance(angles, Tensor):
            return angles.real, angles.imag
        cos, sin = angles
        if cos.dim() == 4:
            return cos[0], sin[0]
        return cos, sin


# Rotations by model and layer: None for a layer that does not rotate, or the reason why none fits.
_rotations: weakref.WeakKeyDictionary[nn.Module, dict[int, Rotation | str | None]] = (
    weakref.WeakKeyDictionary()
)


def rotation_of(model: PreTrainedModel, module: nn.Module) -> Rotation | None:
    """Rotation of an attention layer's keys; None where the layer does not rotate them.

    The first call for a model is a forward of a few tokens.

    Raises:
        HeadwiseError: the layer has no rotation by the position alone.
    """
    number = cast(int, module.layer_idx)
    rotations = _rotations.setdefault(model, {})
    if number not in rotations:
        candidates = list(_candidates(model, module))
        reason = _unfit(candidates, module)
        if reason is None:
            rehearsal = keys_at_two_positions(model)
            reason = rehearsal.failure
        if reason is not None:
            raise _refused(model, reason)
        rotations[number] = _fitting(candidates, rehearsal.keys, number, rotations)
    result = rotations[number]
    if isinstance(result, str):
        raise _refused(model, result)
    return result


def _refused(model: nn.Module, reason: str) -> HeadwiseError:
    return HeadwiseError(
        f"positions of {type(model).__name__} cannot be counted inside the cache: {reason}; set "
        f"positions: original"
    )


def _candidates(model: nn.Module, module: nn.Module) -> Iterator[Rotation]:
    """Rotary embeddings of the models around a layer, the innermost first.

    One that takes a type of layer is a candidate with each, the layer's own first.
    """
    own = _type_of(module)
    kinds = [own, *dict.fromkeys(getattr(module.config, "layer_types", None) or ())]
    name = next(name for name, part in model.named_modules() if part is module)
    while True:
        for child in model.get_submodule(name).children():
            for rotary in child if isinstance(child, nn.ModuleList) else (child,):
                if "Rotary" not in type(rotary).__name__:
                    continue
                takes = inspect.signature(rotary.forward).parameters
                if "layer_type" in takes:
                    for kind in dict.fromkeys(kind for kind in kinds if kind is not None):
                        yield Rotation(rotary, {"layer_type": kind})
                elif "position_ids" in takes:
                    yield Rotation(rotary, {})
        if not name:
            return
        name = name.rpartition(".")[0]


def _type_of(module: nn.Module) -> str | None:
    """Type of a layer as its rotary embedding takes it."""
    number = cast(int, module.layer_idx)
    return layer_type(module.config, number) or getattr(module, "layer_type", None)


def _unfit(candidates: list[Rotation], module: nn.Module) -> str | None:
    """Reason why no candidate can be a layer's rotation, None where one can."""
    if not candidates:
        return "it has no rotary embedding"
    for candidate in candidates:
        kind = getattr(candidate.rotary, "rope_type", "default")
        if isinstance(kind, dict):
            kind = kind.get(_type_of(module), "default")
        if kind in _BY_LENGTH:
            return f"its rotary embedding of type {kind!r} changes with the length"
    return None


def _fitting(
    candidates: list[Rotation],
    keys: dict[int, Tensor],
    number: int,
    rotations: dict[int, Rotation | str | None],
) -> Rotation | str | None:
    """The candidate that takes a layer's keys from one position to the other.

    Args:
        candidates: rotary embeddings of the models around the layer.
        keys: those of the rehearsal, by layer.
        number: number of the layer.
        rotations: those of other layers, of which an equal one is reused; a string is a reason.
    """
    if all(_error(None, each) <= _limit(each) for each in keys.values()):
        return "its keys do not depend on position_ids"
    own = keys[number]
    options: list[Rotation | None] = [None]
    for candidate in candidates:
        options += _variants(candidate, own)
    errors = [_error(option, own) for option in options]
    best = min(range(len(options)), key=errors.__getitem__)
    if not errors[best] <= _limit(own):
        return f"the keys of layer {number} are not rotated by their position alone"
    result = options[best]
    for other in rotations.values():
        if isinstance(other, Rotation) and result is not None and _same(result, other):
            return other
    return result


def _variants(candidate: Rotation, keys: Tensor) -> Iterator[Rotation]:
    """A rotary embedding with each layout of the rotated elements."""
    positions = torch.tensor([POSITIONS], dtype=torch.long, device=keys.device)
    for axes in (0, 3):
        with_axes = replace(candidate, axes=axes)
        try:
            cos, _ = with_axes._all(positions)
        except Exception:
            continue
        repeated = ""
        if cos.shape[-1] % 2 == 0:
            one, other = cos.chunk(2, dim=-1)
            if torch.equal(one, other):
                repeated = "halves"
            elif torch.equal(cos[..., 0::2], cos[..., 1::2]):
                repeated = "neighbors"
        size = cos.shape[-1] if repeated else 2 * cos.shape[-1]
        if size > keys.shape[-1]:
            return
        for interleaved, last, sign in product((False, True), (False, True), (1, -1)):
            yield replace(
                with_axes, repeated=repeated, interleaved=interleaved, last=last, sign=sign
            )
        return


def _error(rotation: Rotation | None, keys: Tensor) -> float:
    """Relative error of the second keys as the first ones, rotated."""
    first, second = keys.chunk(2)
    if rotation is not None:
        first = rotation.shift(first, (POSITIONS[1] - POSITIONS[0],))
    scale = second.float().norm().clamp(min=torch.finfo(torch.float32).tiny)
    return float((first.float() - second.float()).norm() / scale)


def _limit(keys: Tensor) -> float:
    return _CLOSE if keys.dtype in (torch.float32, torch.float64) else _CLOSE_HALF


def _same(first: Rotation, second: Rotation) -> bool:
    ours, theirs = vars(first).copy(), vars(second).copy()
    del ours["_cached"], theirs["_cached"]
    return ours == theirs
