"""keygen: a pair of keys to sign artifacts with."""

from __future__ import annotations

from dataclasses import dataclass
from getpass import getpass
from pathlib import Path

from artifacts.commands import Outcome, answer, file_arg, json_flag
from artifacts.errors import HeadwiseError
from artifacts.options import arg
from artifacts.signing import make_key

SHORT = "make a key to sign artifacts with, and the public one to check them by"
EXAMPLES = """\
FILE is the private key, readable by you alone: keep it. FILE.pub is the public one: give it to those
who use your artifacts, by a way that they trust. Both are Ed25519 keys in PEM.

examples:
  python -m artifacts keygen me.key                  writes me.key and me.key.pub
  python -m artifacts keygen me.key --encrypt        asks for a passphrase, and so does sign
  python -m artifacts sign cfg.yaml --key me.key     then this
"""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Where to write the private key, and whether to encrypt it."""

    file: Path = file_arg(help="the private key to write; FILE.pub is the public one")
    encrypt: bool = arg("--encrypt", action="store_true", default=False, help="ask for a passphrase")
    as_json: Path | None = json_flag()


def run(config: Config) -> Outcome:
    """Two new files, and the fingerprint by which people tell keys apart.

    Raises:
        HeadwiseError: a file is there already or cannot be written, two passphrases differ, or cryptography is missing.
    """
    passphrase = getpass("passphrase: ").encode() if config.encrypt else None
    if passphrase == b"" or (passphrase and getpass("again: ").encode() != passphrase):
        raise HeadwiseError("the passphrase is empty, or not the same twice: nothing was written")
    public, fingerprint = make_key(config.file, passphrase=passphrase)
    whole = {"private": str(config.file), "public": str(public), "fingerprint": fingerprint}
    line = f"wrote {config.file} (keep it) and {public} (give it away), key {fingerprint}"
    return answer(config.as_json, whole, [line])
