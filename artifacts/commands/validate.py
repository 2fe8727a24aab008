"""validate: whether both files are whole, in one line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from artifacts.commands import Outcome, answer, file_arg, json_flag
from artifacts.store import read_pair

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

    file: Path = file_arg()
    as_json: Path | None = json_flag()


def run(config: Config) -> Outcome:
    """One line, or one JSON object.

    Raises:
        ArtifactError: the pair is not whole.
    """
    pair = read_pair(config.file)
    artifact, entries = pair.artifact, pair.entries
    file = artifact.sidecar.file if artifact.sidecar else None
    whole = {
        "valid": True,
        "file": str(config.file),
        "schema_version": artifact.schema_version,
        "content_sha256": artifact.content_sha256,
        "fingerprint": not artifact.model.unknown,
        "sidecar": file,
        "arrays": {name: {"dtype": e.dtype, "shape": list(e.shape)} for name, e in sorted(entries.items())},
    }
    beside = f"sidecar {file}, arrays: {len(entries)}" if file else "no sidecar"
    fits = f"; fits any model of its shape: {', '.join(unknown)} open" if (unknown := artifact.model.unknown) else ""
    facts = f"schema {artifact.schema_version}, content {artifact.content_sha256[:12]}, {beside}{fits}"
    return answer(config.as_json, whole, [f"ok: {config.file} ({facts})"])
