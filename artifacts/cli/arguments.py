"""Types of arguments that several commands share, each declared once, and `deliver`.

A Config takes one as the type of a field, or annotates it with another help text:

    model: ModelName
    out: Annotated[Out, Arg("artifact to write, such as cfg.yaml")]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from artifacts.cli.options import ADVANCED, LARGEST, Arg
from artifacts.errors import HeadwiseError

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
# --json without a file.
STDOUT = Path("-")


def _json_file(value: Path | None) -> Path | None:
    """Check that a file of --json can be written."""
    from artifacts.files import check_writable

    if value is not None and value != STDOUT:
        try:
            check_writable(value)
        except HeadwiseError as error:
            raise HeadwiseError(f"--json: {error}") from None
    return value


ArtifactFile = Annotated[Path, Arg("artifact, such as cfg.yaml", (), "ARTIFACT")]
"""The artifact, positional."""
YamlFile = Annotated[
    ArtifactFile, Arg("the artifact's YAML file, such as cfg.yaml", metavar="FILE")
]
"""The same, for commands that read nothing but an artifact."""
ModelName = Annotated[str, Arg("hub id, local folder, GGUF file, smollm2 or gemma3", None, "MODEL")]
Length = Annotated[int, Field(ge=0, le=LARGEST), Arg("tokens of a prompt")]
Out = Annotated[Path, Arg(metavar="FILE")]
"""The file to write."""
Json = Annotated[
    Path | None,
    AfterValidator(_json_file),
    Arg(
        "print one JSON object in place of the text, or write it to FILE",
        ("--json",),
        metavar="FILE",
        nargs="?",
    ),
]
"""--json [FILE]: None, STDOUT or a writable file; without .json use `--json=FILE`."""
Fresh = Annotated[bool, Arg("discard the resume file of an interrupted run")]
"""--fresh, for a command that resumes an interrupted run."""
Backend = Annotated[
    str, Arg("attention backend (default: the fastest that serves)", group=ADVANCED)
]
Picture = Annotated[bool, Arg("do not draw the pattern map", group=ADVANCED)]
Device = Annotated[
    str, Arg("cpu, cuda, cuda:1, ... (default: the GPU where torch sees one, else cpu)")
]
"""A torch device; profiling.models.device resolves "auto"."""
Dtype = Annotated[
    str,
    BeforeValidator(lambda name: DTYPES.get(name, name)),
    Arg(
        f"{', '.join(DTYPES.values())} (default bfloat16; float32 on a CPU without it)",
        metavar="DTYPE",
        choices=(*DTYPES.values(), *DTYPES),
        group=ADVANCED,
    ),
]
"""Dtype of the model or tensors; profiling.models.device resolves "auto" for the device."""
Seed = Annotated[int, Field(ge=0, le=LARGEST), Arg("of all that is drawn", group=ADVANCED)]
Revision = Annotated[str | None, Arg("revision of a hub model", metavar="REV", group=ADVANCED)]


def deliver(text: str, record: Mapping[str, Any] | str, to: Path | None) -> None:
    """Print the text, or the record with --json; --json FILE writes the record as well.

    Args:
        text: lines without the last line break.
        record: plain data, or JSON.
        to: of --json.
    """
    if to != STDOUT:
        print(text)
    deliver_json(record, to)


def deliver_json(record: Mapping[str, Any] | str, to: Path | None) -> None:
    """Write the record to the --json destination; do nothing without --json."""
    if to is None:
        return
    if isinstance(record, str):
        written = f"{record}\n"
    else:
        written = json.dumps(record, indent=1, default=str) + "\n"
    if to == STDOUT:
        sys.stdout.write(written)
    else:
        from artifacts.files import atomic_write

        atomic_write(to, written.encode())
