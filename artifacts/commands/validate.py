"""validate: whether both files are whole, in one line."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from artifacts.commands import Outcome, add_file, add_json
from artifacts.errors import one_line
from artifacts.store import load_pair

SHORT = "check fields, hashes and sidecar; exit status 2 and one line if anything is wrong"
EXAMPLES = """\
It says whether the files are what was written. Whether what was written is sensible, `lint` says.

examples:
  python -m artifacts validate cfg.yaml && scp cfg.yaml cfg.*.safetensors server:
  python -m artifacts validate cfg.yaml --json     hash, sidecar, and every array with dtype and shape
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
    """One line, or one JSON object.

    Raises:
        ArtifactError: the pair is not whole.
    """
    artifact, arrays = load_pair(config.file)
    file = artifact.sidecar.file if artifact.sidecar else None
    if config.as_json:
        whole = {
            "valid": True,
            "file": str(config.file),
            "schema_version": artifact.schema_version,
            "content_sha256": artifact.content_sha256,
            "sidecar": file,
            "arrays": {name: {"dtype": str(a.dtype), "shape": list(a.shape)} for name, a in sorted(arrays.items())},
        }
        return Outcome(text=json.dumps(whole) + "\n")
    beside = f"sidecar {file}, arrays: {len(arrays)}" if file else "no sidecar"
    facts = f"schema {artifact.schema_version}, content {artifact.content_sha256[:12]}, {beside}"
    return Outcome(text=one_line(f"ok: {config.file} ({facts})") + "\n")
