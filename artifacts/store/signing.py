"""Signatures with a local key in the format of OpenSSF Model Signing, without a network.

`cfg.yaml.sig` is a bundle over the YAML file, which contains the hash of the sidecar. The tool of
OpenSSF Model Signing can check it too:

    model_signing verify key cfg.yaml --signature cfg.yaml.sig --public_key PUBKEY
"""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import TypeAlias, cast

from artifacts.errors import ArtifactError, HeadwiseError, one_line, path_text, reason, shorten
from artifacts.files import followed, open_regular, read_regular

# A PEM file.
Key: TypeAlias = "str | os.PathLike[str]"

_MAX_BYTES = 2**16


def signature_path(path: Path) -> Path:
    """Return the path of the signature of the YAML file at `path`."""
    return path.with_name(f"{path.name}.sig")


def signature(path: Path, data: bytes, key: Key, passphrase: bytes | None = None) -> bytes:
    """Sign `data`, the checked bytes of the YAML file at `path`.

    Args:
        path: YAML file; the signature contains its name.
        data: bytes to sign.
        key: private key in PEM format on an elliptic curve (P-256, P-384 or P-521).
        passphrase: passphrase of an encrypted key.

    Raises:
        HeadwiseError: `key` is not such a key, or model-signing is not installed.
    """
    library = _library()
    _check_key(key)
    try:
        config = library.signing.Config().use_elliptic_key_signer(
            private_key=key, password=passphrase
        )
    # A key of another kind raises AttributeError.
    except Exception as error:
        raise HeadwiseError(_refusal(key, "private", error)) from None
    # Sign a copy: the file may be replaced after the check.
    with TemporaryDirectory() as folder:
        copy = Path(folder) / path.name
        copy.write_bytes(data)
        config.sign(copy, signature_path(copy))
        return signature_path(copy).read_bytes()


def check_signature(path: Path, data: bytes, key: Key) -> None:
    """Check that the holder of the public `key` signed `data`, the bytes of the file at `path`.

    Raises:
        ArtifactError: the signature is missing, or is by another key or over other bytes.
        HeadwiseError: `key` is not a public key, or model-signing is not installed.
    """
    library = _library()
    _check_key(key)
    try:
        config = library.verifying.Config().use_elliptic_key_verifier(public_key=key)
    except Exception as error:
        raise HeadwiseError(_refusal(key, "public", error)) from None
    config.set_hashing_config(library.hashing.Config())
    shown = path_text(path)
    # Next to the file, or to a link on the way to it.
    places = [place for place in followed(path) if os.path.exists(signature_path(place))]
    if not places:
        raise ArtifactError(
            f"{shown}: is not signed, {shorten(signature_path(path).name)} is missing"
        )
    for number, place in enumerate(places, start=1):
        file = signature_path(place)
        bundle = read_regular(file, _MAX_BYTES, "a signature")
        with TemporaryDirectory() as folder:
            # The signature has the name of its neighbor.
            copy = Path(folder) / place.name
            copy.write_bytes(data)
            signature_path(copy).write_bytes(bundle)
            try:
                config.verify(copy, signature_path(copy))
                return
            # The library does not wrap exceptions from a malformed bundle.
            except Exception as error:
                if number == len(places):
                    raise ArtifactError(
                        f"{shown}: {shorten(file.name)} is no signature of this file by "
                        f"{_shown(key)}, {_why(error)}"
                    ) from None


def _check_key(key: Key) -> None:
    """Check that the key can be opened: the library would wait for a pipe."""
    try:
        with open_regular(key):
            pass
    except (OSError, ValueError) as error:
        raise HeadwiseError(f"{_shown(key)}: the key cannot be read, {reason(error)}") from None


def _refusal(key: Key, kind: str, error: Exception) -> str:
    return f"{_shown(key)}: must be a {kind} key of P-256, P-384 or P-521 in PEM, {_why(error)}"


def _shown(key: Key) -> str:
    return path_text(key)


def _why(error: Exception) -> str:
    return one_line(f"got {type(error).__name__}: {error}")[:200]


def _library() -> ModuleType:
    try:
        import model_signing
    except ImportError:
        raise HeadwiseError(
            "signatures need the package model-signing: pip install 'headwise[sign]'"
        ) from None
    return cast(ModuleType, model_signing)
