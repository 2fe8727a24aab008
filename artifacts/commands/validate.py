"""validate: whether both files are whole and the record is valid."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from artifacts.cli.options import arg
from artifacts.commands import Outcome, answer, file_arg, json_flag
from artifacts.store.read import read_pair
from artifacts.store.write import rehash

SHORT = "check fields, hashes and sidecar; exit status 2 if something is wrong"
EXAMPLES = """\
A file that is not whole or not valid ends with one line and exit status 2.

After a change by hand --rehash writes the file anew with the right content hash. It refuses what is
not valid. What the search found and what was measured is of the artifact before the change.

examples:
  headwise validate cfg.yaml && scp cfg.yaml cfg.*.safetensors server:
  headwise validate --rehash cfg.yaml   after an edit of cfg.yaml
  headwise validate cfg.yaml --json     hash, sidecar, every array with dtype and shape
"""


@dataclass(frozen=True, kw_only=True)
class Config:
    """File to check, and whether to update its hash first."""

    file: Path = file_arg()
    rehash: bool = arg(
        "--rehash",
        action="store_true",
        default=False,
        help="write the file anew with the right content hash, after a change by hand",
    )
    as_json: Path | None = json_flag()


def run(config: Config) -> Outcome:
    """Return one line, or one JSON object.

    Raises:
        ArtifactError: the pair is incomplete.
        HeadwiseError: with --rehash, the file cannot be written.
    """
    if config.rehash:
        rehash(config.file)
    pair = read_pair(config.file)
    artifact = pair.artifact
    file = None
    sidecar_text = "no sidecar"
    if artifact.sidecar:
        file = artifact.sidecar.file
        sidecar_text = f"sidecar {file}, arrays: {len(pair.arrays)}"
    fits = ""
    if unknown := artifact.model.unknown:
        fits = f"; fits any model of its shape: {', '.join(unknown)} open"
    whole = {
        "valid": True,
        "file": str(config.file),
        "schema_version": artifact.schema_version,
        "content_sha256": artifact.content_sha256,
        "fingerprint": not unknown,
        "sidecar": file,
        "arrays": {
            name: {"dtype": str(array.dtype), "shape": list(array.shape)}
            for name, array in sorted(pair.arrays.items())
        },
    }
    facts = (
        f"schema {artifact.schema_version}, content {artifact.content_sha256[:12]}, "
        f"{sidecar_text}{fits}"
    )
    return answer(config.as_json, whole, [f"ok: {config.file} ({facts})"])
