"""keygen: a pair of keys to sign artifacts with."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from artifacts.commands import Outcome, add_json
from artifacts.errors import one_line
from artifacts.signing import make_key

SHORT = "make a key to sign artifacts with, and the public one to check them by"
EXAMPLES = """\
FILE is the private key, readable by you alone: keep it. FILE.pub is the public one: give it to those
who use your artifacts, by a way that they trust. Both are Ed25519 keys in PEM.

examples:
  python -m artifacts keygen me.key                  writes me.key and me.key.pub
  python -m artifacts sign cfg.yaml --key me.key     then this
"""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Where to write the private key, and whether to answer as JSON."""

    file: Path
    as_json: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See Verb."""
    parser.add_argument("file", metavar="FILE", type=Path, help="the private key to write; FILE.pub is the public one")
    add_json(parser)


def run(config: Config) -> Outcome:
    """Two new files, and the fingerprint by which people tell keys apart.

    Raises:
        HeadwiseError: a file is there already or cannot be written, or cryptography is missing.
    """
    public, fingerprint = make_key(config.file)
    if config.as_json:
        whole = {"private": str(config.file), "public": str(public), "fingerprint": fingerprint}
        return Outcome(text=json.dumps(whole) + "\n")
    return Outcome(
        text=one_line(f"wrote {config.file} (keep it) and {public} (give it away), key {fingerprint}") + "\n"
    )
