"""Check fields, hashes and sidecar; exit status 2 if something is wrong."""

from __future__ import annotations

from typing import Annotated

from artifacts.cli.arguments import Json, YamlFile, deliver
from artifacts.cli.options import Arg, CommandConfig
from artifacts.errors import one_line
from artifacts.store.read import read_pair
from artifacts.store.write import rehash

EXAMPLES = """\
A file that is not whole or not valid ends with one line and exit status 2.

After a change by hand, --rehash updates the content hash in the file. It refuses an invalid file.
The search's results and the measurements remain those of the artifact before the change.

examples:
  headwise validate cfg.yaml && scp cfg.yaml cfg.*.safetensors server:
  headwise validate --rehash cfg.yaml   after an edit of cfg.yaml
  headwise validate cfg.yaml --json     hash, sidecar, every array with dtype and shape
"""


class Config(CommandConfig):
    """File to check, and whether to update its hash first."""

    file: YamlFile
    rehash: Annotated[bool, Arg("update the content hash in the file, after a change by hand")] = (
        False
    )
    as_json: Json = None


def run(config: Config) -> int:
    """Print one line, or one JSON object.

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
    deliver(one_line(f"ok: {config.file} ({facts})"), whole, config.as_json)
    return 0
