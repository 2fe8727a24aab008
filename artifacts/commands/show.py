"""show: the artifact as a page, or every field of it as JSON."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from artifacts.commands import Outcome, as_asked, file_arg, json_flag
from artifacts.page import ARRAYS, render
from artifacts.store import look

SHORT = "print it as a page: model, search, winners by kind, layer map, evidence"
EXAMPLES = """\
The page needs only the YAML file: a sidecar that is missing or changed is said there, in the line `sidecar`.

examples:
  python -m artifacts show cfg.yaml
  python -m artifacts show cfg.yaml --json | jq .search.summary
"""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Which file, and whether as JSON."""

    file: Path = file_arg()
    as_json: Path | None = json_flag()


def run(config: Config) -> Outcome:
    """The page, or the artifact as one JSON object.

    Raises:
        ArtifactError: the YAML file is not as it should be.
    """
    pair = look(config.file)
    artifact, entries = pair.artifact, pair.entries
    shape = (artifact.model.num_layers, artifact.model.num_heads)
    fitting = [name for name in ARRAYS if name in entries and entries[name].shape[-2:] == shape]
    state = f"{artifact.sidecar.file} (arrays: {len(entries)})" if artifact.sidecar else "none"
    if pair.fault:
        # The page needs only the YAML, which may well travel without its arrays.
        state = f"PROBLEM: {pair.fault}"
    width = min(max(shutil.get_terminal_size((96, 24)).columns, 80), 100)
    arrays = {name: pair.arrays[name] for name in fitting}
    text = render(artifact, file=config.file.name, arrays=arrays, sidecar=state, width=width)
    return as_asked(config.as_json, artifact.model_dump_json(), text)
