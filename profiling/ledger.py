"""The resume file of long commands: a folder next to the output, a file for each finished job.

A file is named by a hash of all that its result depends on, so it serves any run and options. A
command that is killed loses the job in progress alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Self

from safetensors import SafetensorError

from artifacts import HeadwiseError
from artifacts.errors import reason, shorten
from artifacts.files import atomic_write
from artifacts.store.pair import locked
from profiling.environment import versions
from profiling.ranks import Ranks
from profiling.values import from_bytes, to_bytes

_FORMAT = 1
_SETTINGS = "settings.json"
_SUFFIX = ".unit"


class Unit(NamedTuple):
    """A job: its name, and a key of 64 hex digits from all that its result depends on."""

    name: str
    key: str


class Ledger:
    """Finished jobs of one command for one output.

    Values are JSON with numpy arrays, and come back as profiling.values.from_bytes returns them,
    from put() too: an interrupted run and an uninterrupted one compute on the same.
    """

    def __init__(
        self,
        out: Path,
        command: str,
        *,
        settings: Mapping[str, Any] | None = None,
        fresh: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        """Start the resume file, or resume an interrupted run; other ranks join the first.

        Args:
            out: the file that the command writes; the folder is `OUT.COMMAND.ledger` next to it.
            command: a word.
            settings: JSON that every job depends on. Other settings would reuse nothing, which is
                a mistake more often than not.
            fresh: discard earlier records.
            ranks: of this launch; one if None.

        Raises:
            HeadwiseError: another process writes the same output, or an interrupted one had other
                settings.
        """
        self.folder = out.with_name(f"{out.name}.{command}.ledger")
        self._ranks = ranks or Ranks()
        self._settings: dict[str, Any] = json.loads(json.dumps(dict(settings or {})))
        self._versions = {"format": _FORMAT, **versions()}
        with ExitStack() as stack:
            if self._ranks.is_first:
                # The lock is the system's: it ends with its holder, however that ends.
                stack.enter_context(locked(self.folder, timeout=0))
            self._ranks.barrier()
            if fresh:
                self.remove()
            try:
                # Every rank: ranks on other machines may have a separate folder.
                self.folder.mkdir(exist_ok=True)
            except (OSError, ValueError) as error:
                raise HeadwiseError(
                    f"cannot make the folder {shorten(str(self.folder), 400)}: {reason(error)}"
                ) from None
            self._ranks.barrier()
            if self._ranks.is_first:
                self._check_settings()
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
        """Return the value of a finished job, else None: also where its file is damaged."""
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
        """Store a job's value durably, and return it as get() does."""
        if value is None:
            raise ValueError(f"{unit.name}: None is no value, it means that there is none")
        data = to_bytes({"name": unit.name, "key": unit.key, "value": value})
        atomic_write(self._file(unit), hashlib.sha256(data).digest() + data)
        return from_bytes(data)["value"]

    def once(self, unit: Unit, find: Callable[[], Any]) -> Any:
        """Return the job's value: the stored one, else what `find` returns, which is stored."""
        value = self.get(unit)
        if value is None:
            return self.put(unit, find())
        return value

    def remove(self) -> None:
        """Delete it: the output is written."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Release it for others; finished jobs stay."""
        if self._ranks.is_first and os.path.isdir(self.folder) and not len(self):
            self.remove()
        self._stack.close()

    def _file(self, unit: Unit) -> Path:
        return self.folder / f"{unit.key}{_SUFFIX}"

    def _check_settings(self) -> None:
        """Compare settings with those of an interrupted run, and remove its half-written files.

        Raises:
            HeadwiseError: they differ.
        """
        for path in self.folder.glob(".*.tmp"):
            path.unlink(missing_ok=True)
        file = self.folder / _SETTINGS
        try:
            stored = json.loads(file.read_bytes())
        except (OSError, ValueError):
            stored = None
        if isinstance(stored, dict) and len(self):
            own = self._settings
            # As text: NaN equals itself.
            changed = [
                key
                for key in {**own, **stored}
                if _canonical(own.get(key)) != _canonical(stored.get(key))
            ]
            if changed:
                raise HeadwiseError(
                    f"{self.folder} belongs to another run: its {changed[0]} is "
                    f"{shorten(stored.get(changed[0]))}, not {shorten(own.get(changed[0]))}; "
                    "repeat that command to finish it, or pass --fresh to discard it"
                )
            print(f"resuming from {self.folder}: {len(self)} jobs are finished", file=sys.stderr)
        atomic_write(file, json.dumps(self._settings, indent=1).encode() + b"\n")


def _canonical(value: Any) -> bytes:
    """JSON in one form only. Unlike an artifact's it may hold infinity: a limit that is none."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
