"""verify: whether an artifact is whole and signed by the holder of a key."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from artifacts.commands import Outcome, add_file, add_json
from artifacts.errors import one_line
from artifacts.signing import fingerprint
from artifacts.store import load_pair

SHORT = "check that it is whole and signed by the holder of a key; exit status 2 if not"
EXAMPLES = """\
Get the public key from its holder by a way that you trust; the fingerprint is what to compare.
When a model is served: runtime.load("cfg.yaml", verify="me.key.pub").

examples:
  python -m artifacts verify cfg.yaml --key me.key.pub
  openssl pkeyutl -verify -pubin -inkey me.key.pub -rawin -in cfg.yaml -sigfile cfg.yaml.sig
"""


@dataclass(frozen=True, kw_only=True)
class Config:
    """What to check by which public key."""

    file: Path
    key: Path
    as_json: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See Verb."""
    add_file(parser)
    parser.add_argument("--key", metavar="PUBKEY", type=Path, required=True, help="the signer's public key")
    add_json(parser)


def run(config: Config) -> Outcome:
    """One line, or one JSON object.

    Raises:
        HeadwiseError: it is not signed by the key, not whole, the key is none, or cryptography is missing.
    """
    artifact, _ = load_pair(config.file, verify=config.key)
    key = fingerprint(config.key)
    if config.as_json:
        whole = {"signed": True, "fingerprint": key, "content_sha256": artifact.content_sha256}
        return Outcome(text=json.dumps(whole) + "\n")
    facts = f"signed by the key {key}, content {artifact.content_sha256[:12]}"
    return Outcome(text=one_line(f"ok: {config.file} ({facts})") + "\n")
