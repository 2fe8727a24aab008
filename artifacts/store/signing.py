"""Signatures: Ed25519 over a context and the YAML's bytes, which name the sidecar's hash.

`cfg.yaml.sig` is three lines of text: the context, which key signed, and the signature in base64.
Signed are the first two lines and after them the YAML file, so that no signature can pass for one
of something else. Keys are PEM files, and other tools can check it too:

    head -n 2 cfg.yaml.sig | cat - cfg.yaml > signed; tail -n 1 cfg.yaml.sig | base64 -d > signature
    openssl pkeyutl -verify -pubin -inkey KEY.pub -rawin -in signed -sigfile signature

Needs the package cryptography, which is imported where it is used.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from artifacts.errors import ArtifactError, HeadwiseError, one_line, reason, shorten
from artifacts.files import atomic_write, check_writable, open_regular, write_secret

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

# A key file, or its text.
Key: TypeAlias = "str | os.PathLike[str] | bytes"
# Gives the passphrase of an encrypted key.
Ask: TypeAlias = Callable[[], bytes]

CONTEXT = "headwise artifact signature v1"
_LONGEST_KEY = 16_384
_LONGEST_SIGNATURE = 1_024
_LAYOUT = re.compile(rf"({CONTEXT}\nkey ([0-9a-f]{{16}})\n)([A-Za-z0-9+/]{{86}}==)\n".encode())


def signature_path(path: Path) -> Path:
    """Path of the signature of the YAML file at `path`."""
    return path.with_name(f"{path.name}.sig")


def make_key(path: str | os.PathLike[str], *, passphrase: bytes | None = None) -> tuple[Path, str]:
    """Write a private key to `path`, readable by its owner alone, and PATH.pub.

    Args:
        path: the private key's file.
        passphrase: encrypts it; None leaves it in the clear.

    Returns:
        The public key's path, and its fingerprint.

    Raises:
        HeadwiseError: either file is there already, or cannot be written.
    """
    _cryptography()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
    )

    private = Path(path)
    public = Path(f"{os.fspath(path)}.pub")
    for file in (private, public):
        check_writable(file)
        if file.exists():
            raise HeadwiseError(
                f"{one_line(str(file))}: is there already, and a key is never replaced: name "
                f"another"
            )
    key = Ed25519PrivateKey.generate()
    encryption = BestAvailableEncryption(passphrase) if passphrase else NoEncryption()
    write_secret(private, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))
    atomic_write(
        public, key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    )
    return public, _fingerprint(key.public_key())


def signature(data: bytes, key: Key, ask: Ask | None = None) -> tuple[bytes, str]:
    """Signature file for the bytes of a YAML file, and the public key's fingerprint.

    Args:
        data: the bytes that were read and checked.
        key: the private key.
        ask: gives the passphrase where the key is encrypted.

    Raises:
        HeadwiseError: `key` is no private Ed25519 key, others can read it, it is encrypted and its
            passphrase is missing or wrong; or cryptography is missing.
    """
    private = _private(key, ask)
    by = _fingerprint(private.public_key())
    head = f"{CONTEXT}\nkey {by}\n".encode()
    return head + base64.b64encode(private.sign(head + data)) + b"\n", by


def fingerprint(key: Key) -> str:
    """Fingerprint of a public key: 16 hex digits of the SHA-256 of its 32 bytes.

    Raises:
        HeadwiseError: `key` is no public Ed25519 key, or cryptography is missing.
    """
    return _fingerprint(_public(key))


def check_signature(path: Path, data: bytes, key: Key) -> str:
    """Check that the holder of `key` signed `data`, the bytes of the YAML file at `path`.

    Returns:
        The key's fingerprint.

    Raises:
        ArtifactError: there is no signature, or it is by another key or of other bytes.
        HeadwiseError: `key` is no public Ed25519 key, or cryptography is missing.
    """
    public = _public(key)
    from cryptography.exceptions import InvalidSignature

    file = signature_path(path)
    by = _fingerprint(public)
    shown = one_line(str(path))
    try:
        with open_regular(file) as stream:
            layout = _LAYOUT.fullmatch(stream.read(_LONGEST_SIGNATURE))
    except FileNotFoundError:
        raise ArtifactError(f"{shown}: is not signed, {shorten(file.name)} is missing") from None
    except OSError as error:
        raise ArtifactError(
            f"{shown}: {shorten(file.name)} cannot be read, {reason(error)}"
        ) from None
    if layout is None:
        raise ArtifactError(
            f"{shown}: {shorten(file.name)} is no {CONTEXT}: sign the artifact again"
        )
    if layout[2].decode() != by:
        raise ArtifactError(f"{shown}: is signed by the key {layout[2].decode()}, not by {by}")
    try:
        public.verify(base64.b64decode(layout[3]), layout[1] + data)
    except InvalidSignature:
        raise ArtifactError(
            f"{shown}: {shorten(file.name)} is no signature of this file by the key {by}: the file "
            "was changed after it was signed"
        ) from None
    return by


def _private(key: Key, ask: Ask | None) -> Ed25519PrivateKey:
    _cryptography()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    data, shown = _key_bytes(key, secret=True)
    if b"PUBLIC KEY" in data:
        raise HeadwiseError(f"{shown}: is a public key, signing takes the private one")
    passphrase = None
    if b"ENCRYPTED" in data:
        if ask is None:
            raise HeadwiseError(
                f"{shown}: is encrypted, and there is no terminal to ask for its passphrase"
            )
        passphrase = ask()
    private = _parsed(load_pem_private_key, data, password=passphrase)
    if private is None and passphrase is not None:
        raise HeadwiseError(f"{shown}: this is not its passphrase")
    if not isinstance(private, Ed25519PrivateKey):
        raise HeadwiseError(f"{shown}: is no private Ed25519 key in PEM; sign --new-key makes one")
    return private


def _public(key: Key) -> Ed25519PublicKey:
    _cryptography()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    data, shown = _key_bytes(key)
    if b"PRIVATE KEY" in data:
        raise HeadwiseError(
            f"{shown}: is a private key, keep it to yourself: verifying takes the public one"
        )
    public = _parsed(load_pem_public_key, data)
    if not isinstance(public, Ed25519PublicKey):
        raise HeadwiseError(f"{shown}: is no public Ed25519 key in PEM")
    return public


def _parsed(load: Callable[..., Any], data: bytes, **options: Any) -> Any:
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        return load(data, **options)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return None


def _key_bytes(key: Key, *, secret: bool = False) -> tuple[bytes, str]:
    if isinstance(key, bytes):
        return key, "the key"
    if not isinstance(key, str | os.PathLike):
        raise HeadwiseError(f"the key must be a file or the bytes of one, got {shorten(key)}")
    shown = one_line(os.fspath(key))
    try:
        with open_regular(key) as stream:
            mode = os.fstat(stream.fileno()).st_mode & 0o777
            data = stream.read(_LONGEST_KEY)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError):
            why = reason(error)
        else:
            why = str(error)
        raise HeadwiseError(f"{shown}: the key cannot be read, {why}") from None
    if secret and os.name == "posix" and mode & 0o077 and b"PRIVATE KEY" in data:
        raise HeadwiseError(
            f"{shown}: others can use the key (mode {mode:03o}): chmod 600 it, or make another"
        )
    return data, shown


def _fingerprint(public: Ed25519PublicKey) -> str:
    return hashlib.sha256(public.public_bytes_raw()).hexdigest()[:16]


def _cryptography() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise HeadwiseError(
            "signatures need the package cryptography: pip install 'headwise[sign]'"
        ) from None
