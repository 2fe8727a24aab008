"""The resume file of long commands: a folder next to the output, a file for each finished job.

A file is named by a hash of all that its result depends on, the model included, so it serves any
run and options. A command that is killed loses the job in progress alone. Figures of a model that
has no identity are not resumed.
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
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from safetensors import SafetensorError

from artifacts import HeadwiseError
from artifacts.errors import reason, shorten
from artifacts.files import atomic_write
from artifacts.store.pair import locked
from profiling.environment import versions
from profiling.ranks import Ranks
from profiling.values import from_bytes, to_bytes

if TYPE_CHECKING:
    from profiling.models.identity import Identity

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
        model: Identity,
        *,
        settings: Mapping[str, Any] | None = None,
        fresh: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        """Start the resume file, or resume an interrupted run; other ranks join the first.

        Args:
            out: the file that the command writes; the folder is `OUT.COMMAND.ledger` next to it.
            command: a word.
            model: that every job is measured on.
            settings: JSON that every job depends on. Other settings, or another model, would reuse
                nothing, which is a mistake more often than not. None accepts other models' jobs
                next to those of this run.
            fresh: discard earlier records.
            ranks: of this launch; one if None.

        Raises:
            HeadwiseError: another process writes the same output, an interrupted one had other
                settings, or the ranks have different models.
        """
        self._ranks = ranks or Ranks()
        self._resumes = model.unknown is None
        if not self._resumes:
            # Apart from those of other models, which stay.
            command = f"{command}.once"
            fresh = True
            if self._ranks.is_first:
                print(f"nothing of this run can be resumed: {model.unknown}", file=sys.stderr)
        self.folder = out.with_name(f"{out.name}.{command}.ledger")
        self._model = _shared_key(model, self._ranks)
        if settings is not None:
            settings = {"model": model.name, **settings, "sha256 of the model": self._model[:16]}
        self._settings: dict[str, Any] = json.loads(json.dumps(dict(settings or {})))
        self._versions = {"format": _FORMAT, **versions()}
        with ExitStack() as stack:
            if self._ranks.is_first:
                # The lock is the system's: it ends with its holder, however that ends.
                stack.enter_context(locked(self.folder, timeout=0))
            self._ranks.barrier()
            if fresh:
                self.remove()
            # Every rank: ranks on other machines may have a separate folder. No rank writes before
            # all are here.
            try:
                self.folder.mkdir(exist_ok=True)
                for path in self.folder.glob(".*.tmp"):
                    path.unlink(missing_ok=True)
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
        """Name a job; it depends on these values (JSON), model, settings and versions."""
        content = [name, dict(depends or {}), self._model, self._settings, self._versions]
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
        """Release it for others; finished jobs stay where they can be resumed."""
        is_useless = not self._resumes or not len(self)
        if self._ranks.is_first and os.path.isdir(self.folder) and is_useless:
            self.remove()
        self._stack.close()

    def _file(self, unit: Unit) -> Path:
        return self.folder / f"{unit.key}{_SUFFIX}"

    def _check_settings(self) -> None:
        """Compare settings with those of an interrupted run.

        Raises:
            HeadwiseError: they differ.
        """
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


def _shared_key(model: Identity, ranks: Ranks) -> str:
    """The key of the model, the same in every rank.

    Raises:
        HeadwiseError: the ranks have different models.
    """
    keys = ranks.gather_all(model.key)
    if model.unknown is None and len(set(keys)) > 1:
        raise HeadwiseError(
            f"ranks have loaded different models as {model.name}: give each the same weights"
        )
    return keys[0]


def _canonical(value: Any) -> bytes:
    """JSON in one form only. Unlike an artifact's it may hold infinity: a limit that is none."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
