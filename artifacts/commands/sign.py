"""Sign it: FILE.sig, by which others see that it comes from you and was not changed."""

from __future__ import annotations

import sys
from getpass import getpass
from pathlib import Path
from typing import Annotated

from artifacts.cli.arguments import Json, YamlFile, deliver
from artifacts.cli.options import Arg, CommandConfig
from artifacts.errors import one_line
from artifacts.files import read_regular
from artifacts.store.write import sign

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


class Config(CommandConfig):
    """File to sign, and the private key."""

    file: YamlFile
    key: Annotated[Path, Arg("your private key", metavar="KEY")]
    as_json: Json = None


def run(config: Config) -> int:
    """Write the signature; an encrypted key prompts for its passphrase on the terminal.

    Raises:
        HeadwiseError: the artifact is incomplete, the key is invalid, or model-signing is missing.
    """
    passphrase = None
    if b"ENCRYPTED" in read_regular(config.key, _LARGEST_KEY, "a key") and sys.stdin.isatty():
        passphrase = getpass(f"passphrase of {config.key}: ").encode()
    file = sign(config.file, config.key, passphrase)
    whole = {"signature": str(file), "key": str(config.key)}
    deliver(one_line(f"wrote {file}"), whole, config.as_json)
    return 0
