"""The resume file of long commands: a folder next to the output, a file for each finished job.

A unit's file is named by a hash of all that its result depends on, so whatever it is asked for
again by, another run or other options, a unit that is there is right. Killed at any moment, a
command loses the unit in hand.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError

from artifacts import HeadwiseError
from artifacts.errors import shorten
from artifacts.files import atomic_write
from artifacts.store.pair import locked
from profiling.environment import versions
from profiling.ranks import Ranks
from profiling.values import from_bytes, to_bytes

_FORMAT = 1
_SETTINGS = "settings.json"
_SUFFIX = ".unit"


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A piece of work.

    Attributes:
        key: 64 hex digits, of its name and all that its result depends on.
    """

    name: str
    key: str


class Ledger:
    """The finished units of one command's work for one output.

    Values are JSON values with numpy arrays among them, and come back as
    profiling.values.from_bytes returns them, from put() too: a run that was interrupted and one
    that was not compute on the same."""

    def __init__(
        self,
        out: Path,
        command: str,
        *,
        settings: Mapping[str, Any] | None = None,
        fresh: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        """Start the resume file, or go on with an interrupted run's; other ranks join the first.

        Args:
            out: the file that the command writes; the ledger is `OUT.COMMAND.ledger` beside it.
            command: a word.
            settings: JSON that every unit depends on. A run with others would use nothing of what
                is there, which is a mistake more often than not.
            fresh: discard what is there.
            ranks: of this launch; one if None.

        Raises:
            HeadwiseError: another process is at work for the same output, or an interrupted one had
                other settings.
        """
        self.folder = out.with_name(f"{out.name}.{command}.ledger")
        self._ranks = ranks or Ranks()
        # In their order: of several that differ the first is named.
        self._settings: dict[str, Any] = json.loads(json.dumps(dict(settings or {})))
        self._versions = {"format": _FORMAT, **versions()}
        with ExitStack() as stack:
            if self._ranks.is_first:
                # The system's: it ends with its holder, however that ends.
                stack.enter_context(locked(self.folder, timeout=0))
            self._ranks.barrier()
            # By every rank: those of other machines may have a folder of their own.
            self._make(fresh)
            self._ranks.barrier()
            if self._ranks.is_first:
                self._begin()
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        """Number of finished jobs, of this run and of others like it."""
        return sum(1 for _ in self.folder.glob(f"*{_SUFFIX}"))

    def __contains__(self, unit: Unit) -> bool:
        return self.get(unit) is not None

    def unit(self, name: str, depends: Mapping[str, Any] | None = None) -> Unit:
        """Name a job; it depends on these values (JSON), the settings and package versions."""
        content = [name, dict(depends or {}), self._settings, self._versions]
        return Unit(name=name, key=hashlib.sha256(_canonical(content)).hexdigest())

    def get(self, unit: Unit) -> Any:
        """The value of a finished unit, else None: also where its file is damaged."""
        try:
            data = self._file(unit).read_bytes()
            if hashlib.sha256(data[32:]).digest() != data[:32]:
                return None
            stored = from_bytes(data[32:])
        except (OSError, SafetensorError, ValueError, KeyError):
            return None
        if stored["key"] == unit.key:
            return stored["value"]
        return None

    def put(self, unit: Unit, value: Any) -> Any:
        """Keep a job's value durably, and return it as get() does."""
        if value is None:
            raise ValueError(f"{unit.name}: None is no value, it says that there is none")
        data = to_bytes({"name": unit.name, "key": unit.key, "value": value})
        atomic_write(self._file(unit), hashlib.sha256(data).digest() + data)
        return from_bytes(data)["value"]

    def once(self, unit: Unit, find: Callable[[], Any]) -> Any:
        """The unit's value: what is kept, or else what `find` returns, which is kept."""
        value = self.get(unit)
        if value is None:
            return self.put(unit, find())
        return value

    def run(
        self,
        units: Sequence[Unit],
        work: Callable[[Unit], Any],
        *,
        costs: Sequence[float] | None = None,
        needs: Sequence[str] | None = None,
        has: Sequence[str] = (),
        done: Callable[[int], object] | None = None,
    ) -> list[Any]:
        """Compute the values of all jobs, in order, in every rank; missing ones are dealt to ranks.

        Args:
            units: the same in every rank.
            work: finds the value of one.
            costs: how long each takes, in any unit; all the same if None.
            needs: for each what a rank makes for it first, as costly as itself, and then has;
                nothing if None.
            has: what this rank has of that.
            done: called with how many of all units are done: those from before, then after each of
                this rank with as many of the others', and at the end with all.
        """
        held: dict[str, Any] = {
            unit.key: found for unit in units if (found := self.get(unit)) is not None
        }
        # A rank that starts late may find what another has just finished: dealt is what nobody had
        # at first.
        by_rank = [set(keys) for keys in self._ranks.gather_all(sorted(held))]
        left = [
            at for at, unit in enumerate(units) if not any(unit.key in keys for keys in by_rank)
        ]
        if needs is None:
            held_by = []
        else:
            held_by = [set(theirs) for theirs in self._ranks.gather_all(list(has))]
        if costs is None:
            left_costs = None
        else:
            left_costs = [costs[at] for at in left]
        if needs is None:
            left_needs = None
        else:
            left_needs = [needs[at] for at in left]
        mine = self._ranks.deal(
            left,
            left_costs,
            needs=left_needs,
            has=held_by,
        )

        def show(count: int) -> None:
            if done is not None:
                done(len(units) - len(left) + round(len(left) * count / max(1, len(mine))))

        show(0)
        for count, at in enumerate(mine, start=1):
            held[units[at].key] = self.put(units[at], work(units[at]))
            show(count)
        if self._ranks.count > 1:
            sent = set().union(*by_rank[: self._ranks.rank])
            held = self._ranks.gather(
                {key: value for key, value in held.items() if key not in sent}
            )
        if done is not None:
            done(len(units))
        return [held[unit.key] for unit in units]

    def remove(self) -> None:
        """Delete it: the output is written."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Let others have it; what is in it stays."""
        if self._ranks.is_first and self.folder.is_dir() and not len(self):
            self.remove()
        self._stack.close()

    def _file(self, unit: Unit) -> Path:
        return self.folder / f"{unit.key}{_SUFFIX}"

    def _make(self, fresh: bool) -> None:
        if fresh:
            self.remove()
        try:
            self.folder.mkdir(exist_ok=True)
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            raise HeadwiseError(
                f"cannot make the folder {shorten(str(self.folder), 400)}: {why}"
            ) from None

    def _begin(self) -> None:
        """Compare settings, and clear away what a kill left half-written."""
        for beside in self.folder.glob(".*.tmp"):
            beside.unlink(missing_ok=True)
        file = self.folder / _SETTINGS
        try:
            stored = json.loads(file.read_bytes())
        except (OSError, ValueError):
            stored = None
        if isinstance(stored, dict) and len(self):
            settings = self._settings
            changed = [
                key
                for key in {**settings, **stored}
                if _canonical(settings.get(key)) != _canonical(stored.get(key))
            ]
            if changed:
                raise HeadwiseError(
                    f"{self.folder} belongs to another run: its {changed[0]} is "
                    f"{shorten(stored.get(changed[0]))}, not "
                    f"{shorten(settings.get(changed[0]))}; repeat that command to finish it, or "
                    f"pass --fresh to "
                    "discard it"
                )
            print(f"going on with {self.folder}: {len(self)} units are finished", file=sys.stderr)
        atomic_write(file, json.dumps(self._settings, indent=1).encode() + b"\n")


def _canonical(value: Any) -> bytes:
    """JSON in one form only. Unlike an artifact's it may hold infinity: a limit that is none."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
