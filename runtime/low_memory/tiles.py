"""Modules that treat each token by itself, run a tile of tokens at a time: what they make in between stays small.

Shapes: B batch, S tokens of a call, T tokens of a tile, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

# Tokens of a tile, all sequences together: enough to keep matrix units busy, little beside a long prompt.
TOKENS = {"cpu": 1024}
TOKENS_ELSEWHERE = 4096
# Bytes of logits from which on a caller hears of them.
LOGITS = 1 << 30
# Where the first tokens of a call are cut to see whether a module treats each by itself.
PROBE = (0, 7, 16)


class Tiled:
    """Stands in for the forward of one module, on that instance alone; `remove` takes it off again.

    Classes are not touched, and hooks on the module see whole tensors as ever: only modules inside it see tiles. A copy
    of the module, deep or pickled, has the plain forward.
    """

    def __init__(self, module: nn.Module, warn: Callable[[str], None]) -> None:
        """Take the place; `warn` hears of a module that cannot be tiled."""
        self.module, self._warn = module, warn
        # The forward that was there: the class's, or a function of another library's on the instance (accelerate's).
        self.original: Callable[..., Any] = module.forward
        self._was_own = "forward" in vars(module)
        self._active = True
        self._fits: bool | None = None
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def __reduce__(self) -> tuple[Any, ...]:
        # What a copy or a pickle gets needs no Headwise to be read.
        owner = SimpleNamespace(forward=self.original) if self._was_own else self.module
        return getattr, (owner, "forward")

    def remove(self) -> None:
        """Give the module its forward back. What another library has put over it stays, and goes straight through."""
        self._active = False
        if self.module.__dict__.get("forward") is not self:
            return
        if self._was_own:
            self.module.forward = self.original
        else:
            del self.module.forward

    def _cuts(self, x: object) -> list[int] | None:
        """Where to cut the tokens of (B, S, C); None for a call that is served whole."""
        if not self._active or self._fits is False or torch.compiler.is_compiling() or torch.is_grad_enabled():
            return None
        if not isinstance(x, Tensor) or x.dim() != 3 or not x.is_floating_point():
            return None
        step = max(TOKENS.get(x.device.type, TOKENS_ELSEWHERE) // max(x.shape[0], 1), PROBE[-1])
        return None if x.shape[1] <= step else [*range(0, x.shape[1], step), x.shape[1]]

    def _try(self, is_tileable: Callable[[], bool]) -> bool:
        """Whether the module can be tiled, found out once."""
        if self._fits is None:
            self._fits = is_tileable()
            if not self._fits:
                name = type(self.module).__name__
                self._warn(f"{name} is run over whole prompts: it does not treat each token by itself")
        return self._fits


class PositionWise(Tiled):
    """A norm, an MLP, a mixture of experts: hidden states in, tensors of as many tokens out, each token by itself."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output: (B, S, ...) or (B * S, ...), or a tuple of such."""
        given = (*args, *kwargs.values())
        x = given[0] if len(given) == 1 else None
        cuts = self._cuts(x)
        if cuts is None or _recorded():
            return self.original(*args, **kwargs)
        assert isinstance(x, Tensor)
        name = next(iter(kwargs), None)

        def run(tile: Tensor) -> Any:
            return self.original(tile) if name is None else self.original(**{name: tile})

        if not self._try(lambda: _each_by_itself(run, x)):
            return run(x)
        return _joined(run, x, cuts)


class Logits(Tiled):
    """The head of a language model: says what the logits of all tokens take, where they are asked for."""

    def __call__(self, x: Tensor) -> Any:
        """The logits."""
        if self._active and not torch.compiler.is_compiling() and x.dim() == 3:
            width = self.module.get_parameter("weight").shape[0]
            size = x.shape[0] * x.shape[1] * width * x.element_size()
            if size > LOGITS:
                self._warn(
                    f"logits of {x.shape[1]} tokens were asked for, {size / 2**30:.1f} GiB: "
                    "pass logits_to_keep=1, as generate() does"
                )
        return self.original(x)


def slices(cuts: list[int]) -> Iterator[slice]:
    """The tiles between these places."""
    return (slice(start, stop) for start, stop in pairwise(cuts))


def same(found: Tensor, expected: Tensor) -> bool:
    """Whether two results are equal but for the rounding of products of other sizes; a NaN equals a NaN."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    wide, other = found.float(), expected.float()
    apart = (wide - other).abs().nan_to_num_(0, 0, 0)
    limit = min(64 * torch.finfo(expected.dtype).eps, 0.1) * other.nan_to_num(0, 0, 0).abs().amax()
    return bool((apart <= limit).all() & (wide.isfinite() == other.isfinite()).all())


def _each_by_itself(run: Callable[[Tensor], Any], x: Tensor) -> bool:
    """Whether the first tokens come out of two tiles as they do out of one."""
    start = x[:, : PROBE[-1]].contiguous()
    whole = run(start)
    parts = whole if isinstance(whole, tuple) else (whole,)
    rows = x.shape[0], PROBE[-1]
    if not all(isinstance(part, Tensor) and _by_token(part, *rows) is not None for part in parts):
        return False
    tiles = _joined(run, start, list(PROBE))
    found = tiles if isinstance(tiles, tuple) else (tiles,)
    return all(same(each, part) for each, part in zip(found, parts, strict=True))


def _joined(run: Callable[[Tensor], Any], x: Tensor, cuts: list[int]) -> Any:
    """What the module gives for (B, S, C), from what it gives for each tile."""
    batch, length, _ = x.shape
    wholes: list[Tensor] = []
    result: Any = None
    for place in slices(cuts):
        result = run(x[:, place].contiguous())
        tiles = result if isinstance(result, tuple) else (result,)
        for at, tile in enumerate(tiles):
            rows = _by_token(tile, batch, place.stop - place.start)
            assert rows is not None
            if at == len(wholes):
                wholes.append(rows.new_empty(batch, length, *rows.shape[2:]))
            wholes[at][:, place] = rows
    last = result if isinstance(result, tuple) else (result,)
    parts = [
        whole if tile.dim() == whole.dim() else whole.flatten(0, 1) for whole, tile in zip(wholes, last, strict=True)
    ]
    return tuple(parts) if isinstance(result, tuple) else parts[0]


def _by_token(part: Tensor, batch: int, length: int) -> Tensor | None:
    """An output as (batch, length, ...), if it is so or has both in one; None if it is neither."""
    if part.shape[:2] == (batch, length):
        return part
    return part.unflatten(0, (batch, length)) if part.dim() and part.shape[0] == batch * length else None


def _recorded() -> bool:
    """Whether transformers records what modules inside give, such as a router's logits: it counts their calls."""
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:
        return False
    return bool(set(_active_collector.get() or ()) - {"hidden_states", "attentions", "_hidden_states_layers"})
