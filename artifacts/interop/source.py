"""File of another tool, read as untrusted text."""

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

# 100 layers of 100 heads with one value per line take 1.5 MiB.
MAX_BYTES = 4 * 2**20


@dataclass(frozen=True, kw_only=True)
class Source:
    """Path and bytes of a file; errors.naming adds the file name to errors of the methods."""

    path: Path
    data: bytes

    @classmethod
    def read(cls, path: Path) -> Source:
        """Read the file at `path`.

        Raises:
            ArtifactError: as in artifacts.files.read_regular(), with a limit of 4 MiB.
        """
        return cls(path=path, data=read_regular(path, MAX_BYTES, "a file of head patterns"))

    def text(self) -> str:
        """Decode the text.

        Raises:
            ArtifactError: the file is not UTF-8.
        """
        try:
            return self.data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ArtifactError(f"not UTF-8 text (byte {error.start})") from None

    def json(self) -> Any:
        """Parse the JSON value.

        Raises:
            ArtifactError: the text is not JSON, has a duplicate key, a NaN or an infinity, or is
                nested too deep.
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
            # Python refuses to parse whole numbers with thousands of digits.
            raise ArtifactError("holds a number of too many digits") from None

    def mapping(self) -> dict[str, Any]:
        """Parse the JSON object.

        Raises:
            ArtifactError: as in json(), or the value is not an object.
        """
        value = self.json()
        if not isinstance(value, dict):
            raise ArtifactError(f"must be a JSON object, got {shorten(value)}")
        return value

    def imported(self, format: Any, scores: Any = None) -> Imported:
        """Return the record of the imported file, for a section."""
        name = self.path.name.encode(errors="replace").decode()
        return Imported(
            format=format, file=name, sha256=hashlib.sha256(self.data).hexdigest(), scores=scores
        )

    def kept(self, section: str) -> dict[str, Array]:
        """Return an array with the bytes of the file, for a later export."""
        import numpy as np

        return {f"imported.{section}": np.frombuffer(self.data, dtype=np.uint8)}


def original(
    section: str, imported: Imported | None, arrays: Mapping[str, Array], *formats: str
) -> Source | None:
    """Return the imported file of a section if it is stored and has one of these formats."""
    name = f"imported.{section}"
    stored = arrays.get(name)
    if (
        imported is None
        or imported.format not in formats
        or stored is None
        or stored.nbytes > MAX_BYTES
    ):
        return None
    source = Source(path=Path(imported.file), data=stored.tobytes())
    if hashlib.sha256(source.data).hexdigest() == imported.sha256:
        return source
    return None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ArtifactError(f"the key {shorten(twice)} appears twice: remove one")
    return result


def _constant(name: str) -> Any:
    raise ArtifactError(f"holds {name}: numbers must be finite")
