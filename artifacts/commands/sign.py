"""sign: a signature beside an artifact, which says that its holder vouches for it."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from artifacts.commands import Outcome, add_file, add_json
from artifacts.errors import one_line
from artifacts.signing import sign

SHORT = "sign it: FILE.sig, by which others see that it comes from you and was not changed"
EXAMPLES = """\
The artifact is checked first. The signature holds for the bytes of the YAML file, which name the hash of
the sidecar; a changed artifact has to be signed again. Move the three files together.

examples:
  python -m artifacts keygen me.key                  once
  python -m artifacts sign cfg.yaml --key me.key     writes cfg.yaml.sig
"""


@dataclass(frozen=True, kw_only=True)
class Config:
    """What to sign by which private key."""

    file: Path
    key: Path
    as_json: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See Verb."""
    add_file(parser)
    parser.add_argument("--key", metavar="KEY", type=Path, required=True, help="your private key, from keygen")
    add_json(parser)


def run(config: Config) -> Outcome:
    """One new file.

    Raises:
        HeadwiseError: the artifact is not whole, the key is none, or cryptography is missing.
    """
    file, fingerprint = sign(config.file, config.key)
    if config.as_json:
        return Outcome(text=json.dumps({"signature": str(file), "fingerprint": fingerprint}) + "\n")
    return Outcome(text=one_line(f"wrote {file}, signed by the key {fingerprint}") + "\n")
