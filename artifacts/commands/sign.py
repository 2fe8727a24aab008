"""sign: a signature beside an artifact, which says that its holder vouches for it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from getpass import getpass
from pathlib import Path

from artifacts.cli.options import arg
from artifacts.commands import Outcome, answer, file_arg, json_flag
from artifacts.errors import HeadwiseError
from artifacts.store.read import load
from artifacts.store.signing import make_key
from artifacts.store.write import sign

SHORT = "sign it: FILE.sig, by which others see that it comes from you and was not changed"
EXAMPLES = """\
The artifact is checked first, and signed are the bytes that were checked: those of the YAML file,
which name the hash of the sidecar. A changed artifact has to be signed again. Move the three
files together.

KEY is an Ed25519 key in PEM, readable by you alone: keep it. KEY.pub is the public one: give it
to those who use your artifacts, by a way that they trust.

examples:
  headwise sign cfg.yaml --key me.key --new-key       once: makes me.key and me.key.pub, and signs
  headwise sign cfg.yaml --key me.key                 writes cfg.yaml.sig
  headwise sign cfg.yaml --key me.key --new-key --encrypt    asks for a passphrase, and so does sign
"""


@dataclass(frozen=True, kw_only=True)
class Config:
    """File to sign, the private key, and whether to make that first."""

    file: Path = file_arg()
    key: Path = arg("--key", metavar="KEY", type=Path, help="your private key")
    new_key: bool = arg(
        "--new-key", action="store_true", default=False, help="make KEY and KEY.pub first"
    )
    encrypt: bool = arg(
        "--encrypt", action="store_true", default=False, help="ask for a passphrase of the new key"
    )
    as_json: Path | None = json_flag()


def run(config: Config) -> Outcome:
    """The signature, and with --new-key two files more.

    Raises:
        HeadwiseError: the artifact is not whole, the key is none or not yours alone, or
            cryptography is missing; a new key is there already, or its passphrase is not the same
            twice.
    """
    if config.encrypt and not config.new_key:
        raise HeadwiseError("--encrypt is for a key that --new-key makes")
    lines = []
    if config.new_key:
        # No key is left behind where there is nothing to sign.
        load(config.file)
        if config.encrypt:
            passphrase = getpass("passphrase: ").encode()
        else:
            passphrase = None
        if passphrase == b"" or (passphrase and getpass("again: ").encode() != passphrase):
            raise HeadwiseError(
                "the passphrase is empty, or not the same twice: nothing was written"
            )
        public, _ = make_key(config.key, passphrase=passphrase)
        lines.append(f"wrote {config.key} (keep it) and {public} (give it away)")

    def ask() -> bytes:
        return getpass(f"passphrase of {config.key}: ").encode()

    file, fingerprint = sign(config.file, config.key, ask if sys.stdin.isatty() else None)
    lines.append(f"wrote {file}, signed by the key {fingerprint}")
    whole = {"signature": str(file), "key": str(config.key), "fingerprint": fingerprint}
    return answer(config.as_json, whole, lines)
