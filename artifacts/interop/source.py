"""Another tool's file, read as what it is: text from somewhere, to be believed in nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from artifacts.errors import ArtifactError, shorten
from artifacts.files import read_regular
from artifacts.schema.fields import Imported

if TYPE_CHECKING:
    from artifacts.store.sidecar import Array

# A hundred layers of a hundred heads, a value a line, come to 1.5 MiB.
MAX_BYTES = 4 * 2**20


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file's path and bytes; errors of its methods lack its name, which errors.naming adds."""

    path: Path
    data: bytes

    @classmethod
    def read(cls, path: Path) -> Source:
        """The file at `path`.

        Raises:
            ArtifactError: as artifacts.files.read_regular(), at 4 MiB.
        """
        return cls(path=path, data=read_regular(path, MAX_BYTES, "a file of head patterns"))

    def text(self) -> str:
        """Its text. Raises ArtifactError where it is not UTF-8."""
        try:
            return self.data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ArtifactError(f"not UTF-8 text (byte {error.start})") from None

    def json(self) -> Any:
        """The JSON value in it.

        Raises:
            ArtifactError: it is no JSON, has a key twice, a NaN or an infinity, or is nested too
                deep.
        """
        try:
            return json.loads(self.text(), object_pairs_hook=_unique, parse_constant=_constant)
        except json.JSONDecodeError as error:
            raise ArtifactError(
                f"line {error.lineno}: not valid JSON, {error.msg.lower()}"
            ) from None
        except RecursionError:
            raise ArtifactError("nested too deep") from None
        except ArtifactError:
            raise
        except ValueError:
            # A whole number of thousands of digits, which Python refuses to read.
            raise ArtifactError("holds a number of too many digits") from None

    def mapping(self) -> dict[str, Any]:
        """The JSON object in it. Raises ArtifactError as json(), and where it is another value."""
        value = self.json()
        if not isinstance(value, dict):
            raise ArtifactError(f"must be a JSON object, got {shorten(value)}")
        return value

    def imported(self, format: Any, scores: Any = None) -> Imported:
        """Section's record of the file that it comes from."""
        name = self.path.name.encode(errors="replace").decode()
        return Imported(
            format=format, file=name, sha256=hashlib.sha256(self.data).hexdigest(), scores=scores
        )

    def kept(self, section: str) -> dict[str, Array]:
        """Array with the file's bytes, to be written again."""
        import numpy as np

        return {f"imported.{section}": np.frombuffer(self.data, dtype=np.uint8)}


def original(
    section: str, imported: Imported | None, arrays: Mapping[str, Array], *formats: str
) -> Source | None:
    """File that a section was imported from, if it has one of these formats and was kept."""
    name = f"imported.{section}"
    entry = header(arrays).get(name)
    if (
        imported is None
        or imported.format not in formats
        or entry is None
        or entry.nbytes > MAX_BYTES
    ):
        return None
    source = Source(path=Path(imported.file), data=arrays[name].tobytes())
    if hashlib.sha256(source.data).hexdigest() == imported.sha256:
        return source
    return None


def array(arrays: Mapping[str, Array], name: str, shape: tuple[int, ...]) -> Array | None:
    """The array of this name and shape; one of another shape, which may be large, is not read."""
    entry = header(arrays).get(name)
    if entry is not None and entry.shape == shape:
        return arrays[name]
    return None


def header(arrays: Mapping[str, Array]) -> Mapping[str, Any]:
    """Header entries of a sidecar's arrays, or the arrays themselves."""
    return getattr(arrays, "entries", arrays)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ArtifactError(f"the key {shorten(twice)} is given twice: remove one")
    return made


def _constant(name: str) -> Any:
    raise ArtifactError(f"holds {name}: numbers must be finite")
