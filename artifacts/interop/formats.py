"""Supported formats of other tools, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from artifacts.errors import ArtifactError, one_line
from artifacts.interop import duo_attention, modelopt, read_heads, write_heads
from artifacts.interop.report import Export, Import
from artifacts.interop.shape import ImportOptions
from artifacts.interop.source import Source

if TYPE_CHECKING:
    from artifacts.schema.artifact import Artifact
    from artifacts.store.sidecar import Array

Write = Callable[["Artifact", Mapping[str, "Array"], Path], Export]


@dataclass(frozen=True, kw_only=True)
class Format:
    """File format of another tool.

    Attributes:
        about: description for the help.
        options: fields of ImportOptions that `read` uses in addition to the model.
        patterns: True if the format has prefill patterns of heads, for which recall is measurable.
    """

    about: str
    write: Write
    read: Callable[[Source, ImportOptions], Import]
    options: tuple[str, ...] = ()
    patterns: bool = False


_HEADS = ("dense_below", "dense_tail")
FORMATS: dict[str, Format] = {
    "minference": Format(
        about="MInference's JSON list of head patterns, also within AngelSlim's best_pattern",
        read=read_heads.read,
        write=write_heads.write,
        options=_HEADS,
        patterns=True,
    ),
    "modelopt": Format(
        about="ModelOpt's sparse_attention_config, alone or in config.json",
        read=modelopt.read,
        write=modelopt.write,
        options=_HEADS,
        patterns=True,
    ),
    "duo_attention": Format(
        about="DuoAttention's full_attention_heads.tsv, next to its config.json",
        read=duo_attention.read,
        write=duo_attention.write,
        options=("sinks", "window", "threshold", "sparsity"),
    ),
}


def guess(file: Path) -> str:
    """Return the format of a file from its name.

    Raises:
        ArtifactError: the name is that of an artifact.
    """
    if file.suffix in (".yaml", ".yml"):
        raise ArtifactError(
            f"{one_line(str(file))}: is an artifact by its name: say with --to what to write from "
            f"it"
        )
    if file.suffix == ".tsv":
        return "duo_attention"
    if file.name == "config.json":
        return "modelopt"
    return "minference"
