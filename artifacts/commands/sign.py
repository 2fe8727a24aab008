"""sign: a signature beside an artifact, which says that its holder vouches for it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from getpass import getpass
from pathlib import Path

from artifacts.commands import Outcome, answer, file_arg, json_flag
from artifacts.options import arg
from artifacts.store import sign

SHORT = "sign it: FILE.sig, by which others see that it comes from you and was not changed"
EXAMPLES = """\
The artifact is checked first, and signed are the bytes that were checked: those of the YAML file, which name
the hash of the sidecar. A changed artifact has to be signed again. Move the three files together.

examples:
  python -m artifacts keygen me.key                  once
  python -m artifacts sign cfg.yaml --key me.key     writes cfg.yaml.sig
"""


@dataclass(frozen=True, kw_only=True)
class Config:
    """What to sign by which private key."""

    file: Path = file_arg()
    key: Path = arg("--key", metavar="KEY", type=Path, help="your private key, from keygen")
    as_json: Path | None = json_flag()


def run(config: Config) -> Outcome:
    """One new file.

    Raises:
        HeadwiseError: the artifact is not whole, the key is none or not yours alone, or cryptography is missing.
    """
    asked = (lambda: getpass(f"passphrase of {config.key}: ").encode()) if sys.stdin.isatty() else None
    file, fingerprint = sign(config.file, config.key, asked)
    whole = {"signature": str(file), "fingerprint": fingerprint}
    return answer(config.as_json, whole, [f"wrote {file}, signed by the key {fingerprint}"])
