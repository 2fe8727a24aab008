"""show: the artifact as a page, or every field of it as JSON."""

from __future__ import annotations

import argparse
import shutil
from dataclasses import dataclass
from pathlib import Path

from artifacts.commands import Outcome, add_file, add_json
from artifacts.errors import ArtifactError
from artifacts.page import render
from artifacts.store import load, load_arrays

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

    file: Path
    as_json: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See Verb."""
    add_file(parser)
    add_json(parser)


def run(config: Config) -> Outcome:
    """The page, or the artifact as one JSON object.

    Raises:
        ArtifactError: the YAML file is not as it should be.
    """
    artifact = load(config.file, check_sidecar=False)
    if config.as_json:
        return Outcome(text=artifact.model_dump_json() + "\n")
    width = min(max(shutil.get_terminal_size((96, 24)).columns, 80), 100)
    if artifact.sidecar is None:
        return Outcome(text=render(artifact, file=config.file.name, arrays={}, sidecar="none", width=width))
    try:
        arrays = load_arrays(config.file)
        state = f"{artifact.sidecar.file} (arrays: {len(arrays)})"
    except ArtifactError as error:
        # The page needs only the YAML, which may well travel without its arrays.
        arrays, state = {}, f"PROBLEM: {error}"
    return Outcome(text=render(artifact, file=config.file.name, arrays=arrays, sidecar=state, width=width))
