"""The entry of another tool's format, which its module has as FORMAT."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from artifacts.interop.report import Export, Import
from artifacts.interop.shape import ImportOptions
from artifacts.interop.source import Source

if TYPE_CHECKING:
    from artifacts.schema.artifact import Artifact
    from artifacts.store.sidecar import Array

Write = Callable[["Artifact", Mapping[str, "Array"], Path], Export]
# Options of ImportOptions that formats of prefill patterns read.
HEADS = ("dense_below", "dense_tail")


@dataclass(frozen=True, kw_only=True)
class Format:
    """File format of another tool.

    Attributes:
        about: description for the help.
        files: patterns of its files' names, such as *.tsv; none for any file that no other has.
        options: fields of ImportOptions that `read` uses in addition to the model.
        patterns: True if the format has prefill patterns of heads, for which recall is measurable.
    """

    name: str
    about: str
    read: Callable[[Source, ImportOptions], Import]
    write: Write
    files: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    patterns: bool = False
