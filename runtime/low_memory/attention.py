"""Attention modules run a tile of tokens at a time, around one attention over all of them.

A module projects its tokens, rotates queries and keys, asks for attention, and projects what it gets. All of that but
attention treats each token by itself. So the module's own forward runs twice over the tiles: first up to where it asks
for attention, which keeps queries, keys and values and breaks off; then, with the whole prompt's attention known, to
its end. What stands between, the rotation's temporaries above all, has the size of a tile. Queries, keys and values
are projected twice, a tenth of a layer's matrix products outside attention.

Shapes: B batch, S tokens of the call, H query heads, G KV heads, D head dim, E value dim, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

from torch import Tensor, nn

from runtime.attention.masks import PrefillMask
from runtime.attention.state import taping
from runtime.low_memory.tiles import PROBE, Tiled, same, slices


class TiledAttention(Tiled):
    """An attention module that goes through transformers' attention interface."""

    def __init__(self, module: nn.Module, warn: Callable[[str], None], attend: Callable[..., Any]) -> None:
        """attend: the registered attention function."""
        super().__init__(module, warn)
        self._attend = attend

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output for hidden states (B, S, C)."""
        x = args[0] if args else kwargs.get("hidden_states")
        cuts = self._cuts(x)
        if cuts is None or not self._try(lambda: self._is_tileable(args, kwargs, cuts[-1])):
            return self.original(*args, **kwargs)
        tape = Tape(self.module, self.original, args, kwargs, cuts[-1], cuts[-1])
        try:
            tape.ask(slices(cuts))
        except _Untileable:
            return self.original(*args, **kwargs)
        query, key, value = tape.taken()
        if tape.given_cache is not None and tape.updated is not None:
            layer, rest, named = tape.updated
            key, value = tape.given_cache.update(key, value, layer, *rest, **named)
        # Of what the module handed on from its arguments, the whole is meant.
        asked = {name: kwargs.get(name, each) for name, each in tape.asked.items()}
        out, weights = self._attend(self.module, query, key, value, tape.given_mask, **asked)
        del query, key, value
        return tape.give(slices(cuts), out, weights)

    def _is_tileable(self, args: tuple[Any, ...], kwargs: dict[str, Any], size: int) -> bool:
        """Whether the first tokens come out of two tiles as they do out of one, before attention and after it."""
        results: list[tuple[Tensor, ...]] = []
        for cuts in ([PROBE[0], PROBE[-1]], list(PROBE)):
            tape = Tape(self.module, self.original, args, kwargs, size, PROBE[-1])
            try:
                tape.ask(slices(cuts))
                states = tape.taken()
                value = states[2].repeat_interleave(states[0].shape[1] // states[2].shape[1], dim=1)
                given = tape.give(slices(cuts), value.transpose(1, 2).contiguous(), None)
            except (_Untileable, AttributeError, IndexError, RuntimeError, TypeError, ValueError):
                return False
            results.append((*states, given[0] if isinstance(given, tuple) else given))
        return all(same(found, expected) for expected, found in zip(*results, strict=True))


class Tape:
    """The calls of an attention module on tiles of its arguments: what they ask attention for, then what they give.

    size: tokens of the arguments, by which tensors are recognised that have to be cut; length: how many of them matter.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        size: int,
        length: int,
    ) -> None:
        self.module, self._forward, self._args, self._kwargs, self._size = module, forward, args, kwargs, size
        self._length = length
        given = list(chain(args, kwargs.values()))
        self.given_mask = next((each for each in given if isinstance(each, PrefillMask)), None)
        self.given_cache = next((each for each in given if _is_cache(each)), None)
        # A tile is shown a mask and a cache that are only told by who they are.
        self._mask = None if self.given_mask is None else self.given_mask.empty()
        self._wholes: list[Tensor] = []
        self._states: tuple[Tensor, Tensor] | None = None
        self._place = slice(0, 0)
        self._out: tuple[Tensor, Tensor | None] | None = None
        # How the module updated its cache, keys and values left out, and how it asked for attention.
        self.updated: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = None
        self.asked: dict[str, Any] = {}

    def ask(self, places: Iterable[slice]) -> None:
        """Run the tiles up to where they ask for attention.

        Raises:
            _Untileable: they do not ask, or for something that a tile alone cannot answer.
        """
        for self._place in places:
            try:
                self._run()
            except _Reached:
                continue
            raise _Untileable

    def taken(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, H, S, D), keys (B, G, S, D) and values (B, G, S, E) of all tiles; the tape holds them no more."""
        query, key, value = self._wholes
        self._wholes, self._states = [], None
        return query, key, value

    def give(self, places: Iterable[slice], out: Tensor, weights: Tensor | None) -> Any:
        """Run the tiles to their end with attention's output (B, S, H, E): what the module gives for all of them."""
        self._out, whole, last = (out, weights), None, None
        for self._place in places:
            last = self._run()
            tile = last[0] if isinstance(last, tuple) else last
            if not isinstance(tile, Tensor) or tile.dim() != 3:
                raise _Untileable
            if whole is None:
                whole = tile.new_empty(tile.shape[0], self._length, tile.shape[2])
            whole[:, self._place] = tile
        return (whole, *last[1:]) if isinstance(last, tuple) else whole

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, asked: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """What the attention function does in a tile: take in what it is asked for, or give what is known by then."""
        if self._out is not None:
            return self._out[0][:, self._place], self._out[1]
        # A module that changes keys after it put them into the cache, or the mask, needs to see them whole.
        if mask is not self._mask or any(a is not b for a, b in zip((key, value), self._states or (), strict=False)):
            raise _Untileable
        tiles = (query, key, value)
        if not self._wholes:
            self._wholes = [tile.new_empty(*tile.shape[:2], self._length, tile.shape[3]) for tile in tiles[1:]]
            # As projections leave queries, so that what attention gives lies alike.
            rows = query.new_empty(query.shape[0], self._length, query.shape[1], query.shape[3])
            self._wholes.insert(0, rows.transpose(1, 2))
        for whole, tile in zip(self._wholes, tiles, strict=True):
            whole[:, :, self._place] = tile
        self.asked = asked
        raise _Reached

    def update(
        self, key: Tensor, value: Tensor, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """What the cache does in a tile: nothing but take note."""
        if any(isinstance(each, Tensor) for each in chain(args, kwargs.values())):
            raise _Untileable
        self._states, self.updated = (key, value), (layer, args, kwargs)
        return key, value

    def _run(self) -> Any:
        with taping(self):
            return self._forward(*self._cut(self._args), **self._cut(self._kwargs))

    def _cut(self, given: Any) -> Any:
        """An argument as a tile gets it."""
        if isinstance(given, PrefillMask):
            return self._mask
        if isinstance(given, Tensor):
            return self._cut_tensor(given)
        if isinstance(given, tuple | list):
            return type(given)(self._cut(each) for each in given)
        if isinstance(given, dict):
            return {name: self._cut(each) for name, each in given.items()}
        # Made anew each time: a tape that held it would hold all tensors until a collection of garbage.
        return _StandIn(self) if given is self.given_cache and given is not None else given

    def _cut_tensor(self, given: Tensor) -> Tensor:
        along = [dim for dim, size in enumerate(given.shape) if size == self._size]
        if not along:
            return given
        if len(along) > 1 and along[0] != 1:
            raise _Untileable
        place = self._place
        return given.narrow(along[0], place.start, place.stop - place.start).contiguous()


class _StandIn:
    """In place of the cache while tiles run: it takes keys and values, and can say nothing of tokens before."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape

    def update(self, key: Tensor, value: Tensor, layer: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self._tape.update(key, value, layer, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        raise _Untileable


# Not Exceptions: a model that catches those must not catch these.
class _Untileable(BaseException):
    """The module does something that a tile alone cannot answer."""


class _Reached(BaseException):
    """The tile has reached attention, and what it asks with is on the tape."""


def _is_cache(given: object) -> bool:
    from transformers import Cache

    return isinstance(given, Cache)
