"""show: the artifact as a page, or every field of it as JSON."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from artifacts.cli.command import FOUND
from artifacts.commands import Outcome, as_asked, file_arg, json_flag
from artifacts.page.artifact import render
from artifacts.store.read import read_lenient

SHORT = "print it as a page: model, search, winners by kind, layer map, evidence"
EXAMPLES = """\
The page needs only the YAML file: a sidecar that is missing or changed is said there, in the line
`sidecar`, and the exit status is 3.

examples:
  headwise show cfg.yaml
  headwise show cfg.yaml --json | jq .search.summary
"""


@dataclass(frozen=True, kw_only=True)
class Config:
    """File to show, and whether to print JSON."""

    file: Path = file_arg()
    as_json: Path | None = json_flag()


def run(config: Config) -> Outcome:
    """Return the page, or the artifact as one JSON object.

    Raises:
        ArtifactError: the YAML file is invalid.
    """
    pair = read_lenient(config.file)
    artifact = pair.artifact
    if artifact.sidecar:
        state = f"{artifact.sidecar.file} (arrays: {len(pair.arrays)})"
    else:
        state = "none"
    if pair.fault:
        # The page needs only the YAML file, which is often copied without its arrays.
        state = f"PROBLEM: {pair.fault}"
    width = min(max(shutil.get_terminal_size((96, 24)).columns, 80), 100)
    text = render(artifact, file=config.file.name, arrays=pair.arrays, sidecar=state, width=width)
    if pair.fault:
        status = FOUND
    else:
        status = 0
    return as_asked(config.as_json, artifact.model_dump_json(), text, status=status)
