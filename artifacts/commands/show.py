"""show: the artifact as a page, every field of it as JSON, or what a search knows of one head."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from artifacts.cli.command import FOUND
from artifacts.cli.options import arg
from artifacts.commands import Outcome, as_asked, file_arg, json_flag
from artifacts.errors import HeadwiseError, shorten
from artifacts.page.artifact import render
from artifacts.page.head import render_head
from artifacts.store.read import read_lenient

SHORT = "print it as a page: model, search, winners by kind, layer map, evidence"
EXAMPLES = """\
The page needs only the YAML file: a sidecar that is missing or changed is said there, in the line
`sidecar`, and the exit status is 3.

examples:
  headwise show cfg.yaml
  headwise show cfg.yaml --json | jq .search.summary
  headwise show cfg.yaml --head 12.3     what was tried for a head, its neighbours, its picture
"""


@dataclass(frozen=True, kw_only=True)
class Config:
    """File to show, one head of it, and whether as JSON."""

    file: Path = file_arg()
    head: str | None = arg(
        "--head", metavar="LAYER.HEAD", default=None, help="one head: its curve and its picture"
    )
    as_json: Path | None = json_flag()


def run(config: Config) -> Outcome:
    """The page, or the artifact as one JSON object.

    Raises:
        ArtifactError: the YAML file is not as it should be.
    """
    pair = read_lenient(config.file)
    if config.head is not None:
        return Outcome(text=f"{render_head(pair.artifact, pair.arrays, *_at(config.head))}\n")
    artifact = pair.artifact
    if artifact.sidecar:
        state = f"{artifact.sidecar.file} (arrays: {len(pair.arrays)})"
    else:
        state = "none"
    if pair.fault:
        # The page needs only the YAML, which may well travel without its arrays.
        state = f"PROBLEM: {pair.fault}"
    width = min(max(shutil.get_terminal_size((96, 24)).columns, 80), 100)
    text = render(artifact, file=config.file.name, arrays=pair.arrays, sidecar=state, width=width)
    if pair.fault:
        status = FOUND
    else:
        status = 0
    return as_asked(config.as_json, artifact.model_dump_json(), text, status=status)


def _at(text: str) -> tuple[int, int]:
    layer, _, head = text.partition(".")
    if not layer.isdecimal() or not head.isdecimal():
        raise HeadwiseError(
            f"--head must be a layer and a head of it, such as 12.3, got {shorten(text)}"
        )
    return int(layer), int(head)
