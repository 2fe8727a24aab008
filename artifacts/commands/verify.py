"""verify: whether an artifact is whole and signed by the holder of a key."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from artifacts.cli.options import arg
from artifacts.commands import Outcome, answer, file_arg, json_flag
from artifacts.store.read import read_pair

SHORT = "check that it is whole and signed by the holder of a key; exit status 2 if not"
EXAMPLES = """\
Get the public key from its holder by a way that you trust.
When a model is served: headwise.load("cfg.yaml", verify="me.pub").

examples:
  headwise verify cfg.yaml --key me.pub
  model_signing verify key cfg.yaml --signature cfg.yaml.sig --public_key me.pub
"""


@dataclass(frozen=True, kw_only=True)
class Config:
    """File to check, and the public key."""

    file: Path = file_arg()
    key: Path = arg("--key", metavar="PUBKEY", type=Path, help="the signer's public key")
    as_json: Path | None = json_flag()


def run(config: Config) -> Outcome:
    """Return one line, or one JSON object.

    Raises:
        HeadwiseError: the artifact is not signed by the key or is incomplete, the key is invalid,
            or model-signing is missing.
    """
    pair = read_pair(config.file, verify=config.key)
    content = pair.artifact.content_sha256
    whole = {"signed": True, "key": str(config.key), "content_sha256": content}
    facts = f"signed by {config.key}, content {content[:12]}"
    return answer(config.as_json, whole, [f"ok: {config.file} ({facts})"])
