"""Check that it is whole and signed by the holder of a key; exit status 2 if not."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from artifacts.cli.arguments import Json, YamlFile, deliver
from artifacts.cli.options import Arg, CommandConfig
from artifacts.errors import one_line
from artifacts.store.read import read_pair

EXAMPLES = """\
Get the public key from its holder by a way that you trust.
When a model is served: headwise.load("cfg.yaml", verify="me.pub").

examples:
  headwise verify cfg.yaml --key me.pub
  model_signing verify key cfg.yaml --signature cfg.yaml.sig --public_key me.pub
"""


class Config(CommandConfig):
    """File to check, and the public key."""

    file: YamlFile
    key: Annotated[Path, Arg("the signer's public key", metavar="PUBKEY")]
    as_json: Json = None


def run(config: Config) -> int:
    """Print one line, or one JSON object.

    Raises:
        HeadwiseError: the artifact is not signed by the key or is incomplete, the key is invalid,
            or model-signing is missing.
    """
    pair = read_pair(config.file, verify=config.key)
    content = pair.artifact.content_sha256
    whole = {"signed": True, "key": str(config.key), "content_sha256": content}
    facts = f"signed by {config.key}, content {content[:12]}"
    deliver(one_line(f"ok: {config.file} ({facts})"), whole, config.as_json)
    return 0
