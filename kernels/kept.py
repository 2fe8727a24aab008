"""Cache of a function's latest results, as many as a number of bytes has room for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

_Asked = ParamSpec("_Asked")
_Made = TypeVar("_Made")


class Kept(Generic[_Asked, _Made]):
    """A function of hashable positional arguments that keeps its results while there is room."""

    def __init__(
        self, make: Callable[_Asked, _Made], nbytes: Callable[[_Made], int], room: int
    ) -> None:
        """Keep results of `make`, `nbytes` each, up to `room` bytes; the last one stays."""
        self.__wrapped__ = make
        self._nbytes = nbytes
        self._room = room
        self._held = 0
        # The one not asked for longest is the first.
        self._made: dict[tuple[object, ...], tuple[_Made, int]] = {}
        self._lock = threading.Lock()

    def __call__(self, *asked: _Asked.args, **none: _Asked.kwargs) -> _Made:
        with self._lock:
            if (found := self._made.pop(asked, None)) is not None:
                self._made[asked] = found
                return found[0]
        # Two threads may both make it: that is no worse than one that waits.
        made = self.__wrapped__(*asked, **none)
        size = self._nbytes(made)
        with self._lock:
            self._held -= self._made.pop(asked, (made, 0))[1]
            self._made[asked] = made, size
            self._held += size
            while self._held > self._room and len(self._made) > 1:
                self._held -= self._made.pop(next(iter(self._made)))[1]
        return made


def kept(
    nbytes: Callable[[Any], int], room: int
) -> Callable[[Callable[_Asked, _Made]], Kept[_Asked, _Made]]:
    """A decorator: see Kept."""
    return lambda make: Kept(make, nbytes, room)
