"""sign: a signature next to an artifact, by which its holder vouches for it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from getpass import getpass
from pathlib import Path

from artifacts.cli.options import arg
from artifacts.commands import Outcome, answer, file_arg, json_flag
from artifacts.files import read_regular
from artifacts.store.write import sign

SHORT = "sign it: FILE.sig, by which others see that it comes from you and was not changed"
EXAMPLES = """\
The artifact is checked first, and signed are the bytes that were checked: those of the YAML file,
which name the hash of the sidecar. A changed artifact has to be signed again. Move the three
files together.

KEY is a private key of an elliptic curve (P-256, P-384 or P-521) in PEM: keep it. Give the public
one to those who use your artifacts, by a way that they trust. The signature has the format of
OpenSSF Model Signing (pip install 'headwise[sign]'); nothing is sent anywhere.

examples:
  openssl ecparam -name prime256v1 -genkey -noout -out me.key   once; then the public key:
  openssl ec -in me.key -pubout -out me.pub
  headwise sign cfg.yaml --key me.key         writes cfg.yaml.sig
"""
_LARGEST_KEY = 2**16


@dataclass(frozen=True, kw_only=True)
class Config:
    """File to sign, and the private key."""

    file: Path = file_arg()
    key: Path = arg("--key", metavar="KEY", type=Path, help="your private key")
    as_json: Path | None = json_flag()


def run(config: Config) -> Outcome:
    """Write the signature; an encrypted key prompts for its passphrase on the terminal.

    Raises:
        HeadwiseError: the artifact is incomplete, the key is invalid, or model-signing is missing.
    """
    passphrase = None
    if b"ENCRYPTED" in read_regular(config.key, _LARGEST_KEY, "a key") and sys.stdin.isatty():
        passphrase = getpass(f"passphrase of {config.key}: ").encode()
    file = sign(config.file, config.key, passphrase)
    whole = {"signature": str(file), "key": str(config.key)}
    return answer(config.as_json, whole, [f"wrote {file}"])
