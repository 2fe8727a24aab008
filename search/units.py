"""Independent units of work that several processes share: each is done once, whoever is killed over it."""

from __future__ import annotations

import base64
import json
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState
from tqdm import tqdm

from search.alive import STALE_SECONDS
from search.claims import Claims
from search.study import open_study
from search.workers import check_starter, is_worker

_POLL_SECONDS = 0.5
# A wait that a person begins to wonder about.
_SILENT_SECONDS = 10.0
# MySQL's TEXT holds 65,535 bytes.
_PIECE = 60_000
_ARRAY = "__array__"
# What a process claims while it does something of its own.
_IDLE = "idle/"


class Units:
    """Units by key, whose results are JSON values and numpy arrays.

    What one process put, all read back the same: tuples are lists then, and keys of mappings must be text.
    """

    def __init__(
        self,
        storage: BaseStorage,
        name: str,
        keys: Sequence[str],
        settings: Mapping[str, Any],
        *,
        fresh: bool = False,
        stale: float = STALE_SECONDS,
    ) -> None:
        """Start the units or join those of the same settings.

        Args:
            storage: as open_storage returns it.
            name: of this work among others in the storage.
            keys: all that is to be done, in the order in which it is handed out.
            settings: all that the results depend on; JSON.
            fresh: discard what was found before.
            stale: seconds without a sign of life after which a process counts as gone.

        Raises:
            HeadwiseError: the storage has unfinished work of that name with other settings.
        """
        if len(set(keys)) != len(keys):
            raise ValueError(f"keys must differ, got {list(keys)}")
        self.keys = tuple(keys)
        self._study = open_study(storage, name, settings, fresh=fresh)
        self.study_name = self._study.study_name
        self._claims = Claims(storage, self.study_name, stale=stale)
        self._claimed: dict[str, tuple[int, float]] = {}
        self._results: dict[str, Any] = {}
        self._finished = 0

    def claim(
        self,
        *,
        description: str = "units",
        progress: bool | None = None,
        choose: Callable[[Sequence[str]], str] | None = None,
        idle: Callable[[], bool] | None = None,
    ) -> Iterator[str]:
        """Keys for this process to work on, one at a time, until all are done by someone; put each before the next.

        Args:
            description: what the progress bar says.
            progress: whether to show one; None shows it on a terminal, in the first process only.
            choose: of the keys that nobody works on, the one to take; the first if None.
            idle: called where others work on all that is left: does a piece of what is this process's own to do
                anyway, and returns whether there was one. No process leaves before such pieces are over, so that
                what comes after the units, as timing is, has the machine for itself.
        """
        disable = None if progress is None and not is_worker() else not progress
        bar = tqdm(total=len(self.keys), desc=description, unit="unit", disable=disable)
        with bar, self._claims.working():
            while (key := self._next(bar, choose, idle)) is not None:
                try:
                    yield key
                    if key in self._claimed:
                        raise ValueError(f"{key} was claimed and has no result")
                finally:
                    if key in self._claimed:
                        self._abandon(key)

    def put(self, key: str, result: Any) -> None:
        """Record the result of a unit that was claimed; when this returns it survives a kill."""
        trial_id, began = self._claimed[key]
        text = _pack(json.dumps(result, default=_array_to_json, separators=(",", ":")).encode())
        pieces = [text[start : start + _PIECE] for start in range(0, len(text), _PIECE)]
        told = {f"result.{place}": piece for place, piece in enumerate(pieces)}
        self._claims.finish(trial_id, TrialState.COMPLETE, [time.monotonic() - began], {**told, "pieces": len(pieces)})
        del self._claimed[key]

    def results(self) -> dict[str, Any]:
        """The results so far, in the order of the keys."""
        done = self._claims.survey().done
        for key in self.keys:
            if key in done and key not in self._results:
                self._results[key] = _decode(done[key])
        return {key: self._results[key] for key in self.keys if key in self._results}

    def finish(self) -> None:
        """Note that the whole search is over: work with other settings may start under this name."""
        self._study.set_user_attr("finished", True)

    def _next(
        self, bar: tqdm[Any], choose: Callable[[Sequence[str]], str] | None, idle: Callable[[], bool] | None
    ) -> str | None:
        """The next key that this process has claimed; waits for what others do; None when all are done."""
        began = time.monotonic()
        told = is_worker()
        while True:
            check_starter()
            survey = self._claims.survey()
            self._finished = sum(key in survey.done for key in self.keys)
            bar.update(self._finished - bar.n)
            all_done = self._finished == len(self.keys)
            if all_done and not any(key.startswith(_IDLE) for key in survey.busy):
                return None
            free = [key for key in self.keys if key not in survey.done and key not in survey.busy]
            if free:
                key = choose(free) if choose else free[0]
                trial_id = self._claims.take(key)
                if trial_id is not None:
                    self._claimed[key] = trial_id, time.monotonic()
                    return key
                continue
            if idle is not None and not all_done:
                idle = idle if self._use_wait(idle) else None
                continue
            if not told and time.monotonic() - began > _SILENT_SECONDS:
                left = len(self.keys) - self._finished
                tqdm.write(f"waiting for {left} units that other processes work on", sys.stderr)
                told = True
            time.sleep(_POLL_SECONDS)

    def _use_wait(self, idle: Callable[[], bool]) -> bool:
        """A piece of a process's own, claimed, so that all see it; not where there is nothing to wait for any more."""
        trial_id = self._claims.take(f"{_IDLE}{self._claims.me}")
        if trial_id is None:
            return False
        try:
            done = self._claims.survey().done
            return not all(key in done for key in self.keys) and idle()
        finally:
            self._claims.give_up(trial_id)

    def _abandon(self, key: str) -> None:
        """After an error or an interruption: others need not find out by themselves that this unit is free."""
        trial_id, _ = self._claimed.pop(key)
        # An interpreter that is going down can write nothing; the process is gone then, and others see that.
        if sys.is_finalizing():
            return
        self._claims.give_up(trial_id)
        if not is_worker():
            line = f"{self._finished} of {len(self.keys)} units are finished; the same command goes on from there"
            tqdm.write(line, sys.stderr)


def _decode(trial: FrozenTrial) -> Any:
    told = trial.user_attrs
    text = "".join(told[f"result.{place}"] for place in range(told["pieces"]))
    return json.loads(_unpack(text), object_hook=_array_from_json)


def _pack(raw: bytes) -> str:
    return base64.b64encode(zlib.compress(raw)).decode()


def _unpack(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))


def _array_to_json(value: Any) -> dict[str, Any]:
    if isinstance(value, np.generic):
        value = np.asarray(value)
    if not isinstance(value, np.ndarray) or value.dtype.hasobject:
        raise TypeError(f"a result must be JSON or arrays of numbers, got {type(value).__name__}")
    return {_ARRAY: _pack(np.ascontiguousarray(value).tobytes()), "dtype": value.dtype.str, "shape": list(value.shape)}


def _array_from_json(found: dict[str, Any]) -> Any:
    if _ARRAY not in found:
        return found
    array: np.ndarray = (
        np.frombuffer(_unpack(found[_ARRAY]), dtype=np.dtype(found["dtype"])).reshape(found["shape"]).copy()
    )
    return array
