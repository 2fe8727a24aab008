"""What is asked about the heads of an artifact."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from artifacts import arguments
from artifacts.options import shared


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked about which artifact: one head (layer, head), all heads of a layer (layer, None), or all."""

    file: Path = shared(arguments.add_artifact, "artifact with its sidecar, such as cfg.yaml", dest="file")
    layer: int | None = None
    head: int | None = None
    model: str | None = shared(
        arguments.add_model, f"draw the head on a prompt: {arguments.MODEL}", required=False, default=None
    )
    length: int | None = shared(arguments.add_length, "tokens of that prompt (default: as searched)", default=None)
    task: str | None = shared(arguments.add_task, "of that prompt (default: as searched)", several=False, default=None)
    dtype: str | None = shared(
        partial(arguments.add_dtype, default=None), "of the model (default: as searched)", default=None
    )
    device: str = shared(arguments.add_device, default="cpu")
    out: Path | None = shared(
        arguments.add_out,
        "where the picture goes (default: beside the artifact)",
        metavar="FOLDER",
        required=False,
        default=None,
    )
    command: str = ""
