"""Signatures of artifacts: Ed25519 over the YAML file's bytes, which name the sidecar's hash, in a file beside it.

`cfg.yaml.sig` holds the 64 bytes of the signature and nothing else, and keys are PEM files, so that other tools can
check it too: openssl pkeyutl -verify -pubin -inkey KEY.pub -rawin -in cfg.yaml -sigfile cfg.yaml.sig

Needs the package cryptography, which is imported where it is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from artifacts.errors import ArtifactError, HeadwiseError, one_line, shorten
from artifacts.files import atomic_write, check_writable, open_regular

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

# A key file, or its text.
Key: TypeAlias = "str | os.PathLike[str] | bytes"

_LONGEST_KEY = 16_384
_SIGNATURE = 64


def signature_path(path: Path) -> Path:
    """Where the signature of the YAML file at `path` lies."""
    return path.with_name(f"{path.name}.sig")


def make_key(path: str | os.PathLike[str]) -> tuple[Path, str]:
    """Write a new private key to `path`, readable by its owner alone, and the public one beside it with .pub.

    Returns:
        The public key's path, and its fingerprint.

    Raises:
        HeadwiseError: either file is there already, or cannot be written.
    """
    _cryptography()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    private, public = Path(path), Path(f"{os.fspath(path)}.pub")
    for file in (private, public):
        check_writable(file)
        if file.exists():
            raise HeadwiseError(f"{one_line(str(file))}: is there already, and a key is never replaced: name another")
    key = Ed25519PrivateKey.generate()
    _write_secret(private, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    atomic_write(public, key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return public, _fingerprint(key.public_key())


def sign(path: str | os.PathLike[str], key: Key) -> tuple[Path, str]:
    """Check the artifact at `path` and write its signature by the private `key` beside it.

    Returns:
        The signature's path, and the fingerprint of the public key.

    Raises:
        ArtifactError: the artifact is not whole.
        HeadwiseError: `key` is no private Ed25519 key, the signature cannot be written, or cryptography is missing.
    """
    from artifacts.lock import locked
    from artifacts.store import load_pair, read_yaml

    path = Path(path)
    private = _private(key)
    # What is signed is what was checked: nobody writes in between.
    with locked(path):
        load_pair(path)
        target = signature_path(path)
        atomic_write(target, private.sign(read_yaml(path)))
    return target, _fingerprint(private.public_key())


def fingerprint(key: Key) -> str:
    """By which people tell the public `key` from another: the first 16 hex digits of the SHA-256 of its 32 bytes.

    Raises:
        HeadwiseError: `key` is no public Ed25519 key, or cryptography is missing.
    """
    return _fingerprint(_public(key))


def check_signature(path: Path, data: bytes, key: Key) -> None:
    """Check that `data`, the bytes of the YAML file at `path`, are signed by the holder of the public `key`.

    Raises:
        ArtifactError: there is no signature, or it is by another key or of other bytes.
        HeadwiseError: `key` is no public Ed25519 key, or cryptography is missing.
    """
    public = _public(key)
    from cryptography.exceptions import InvalidSignature

    file = signature_path(path)
    shown = one_line(str(path))
    try:
        with open_regular(file) as stream:
            signature = stream.read(_SIGNATURE + 1)
    except FileNotFoundError:
        raise ArtifactError(f"{shown}: is not signed, {shorten(file.name)} is missing") from None
    except OSError as error:
        raise ArtifactError(f"{shown}: {shorten(file.name)} cannot be read, {_reason(error)}") from None
    if len(signature) != _SIGNATURE:
        raise ArtifactError(f"{shown}: {shorten(file.name)} is no Ed25519 signature, which has {_SIGNATURE} bytes")
    try:
        public.verify(signature, data)
    except InvalidSignature:
        raise ArtifactError(
            f"{shown}: {shorten(file.name)} is no signature of this file by the key {_fingerprint(public)}: "
            "the file was changed after it was signed, or another key signed it"
        ) from None


def _private(key: Key) -> Ed25519PrivateKey:
    _cryptography()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    data, shown = _key_bytes(key)
    if b"PUBLIC KEY" in data:
        raise HeadwiseError(f"{shown}: is a public key, signing takes the private one")
    if b"ENCRYPTED" in data:
        raise HeadwiseError(f"{shown}: is encrypted, give it in the clear: openssl pkey -in KEY -out CLEAR")
    private = _parsed(lambda: load_pem_private_key(data, password=None))
    if not isinstance(private, Ed25519PrivateKey):
        raise HeadwiseError(f"{shown}: is no private Ed25519 key in PEM; python -m artifacts keygen makes one")
    return private


def _public(key: Key) -> Ed25519PublicKey:
    _cryptography()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    data, shown = _key_bytes(key)
    if b"PRIVATE KEY" in data:
        raise HeadwiseError(f"{shown}: is a private key, keep it to yourself: verifying takes the public one")
    public = _parsed(lambda: load_pem_public_key(data))
    if not isinstance(public, Ed25519PublicKey):
        raise HeadwiseError(f"{shown}: is no public Ed25519 key in PEM")
    return public


def _parsed(load: Any) -> Any:
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        return load()
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return None


def _key_bytes(key: Key) -> tuple[bytes, str]:
    if isinstance(key, bytes):
        return key, "the key"
    shown = one_line(os.fspath(key))
    try:
        with open_regular(key) as stream:
            return stream.read(_LONGEST_KEY), shown
    except OSError as error:
        raise HeadwiseError(f"{shown}: the key cannot be read, {_reason(error)}") from None


def _write_secret(path: Path, data: bytes) -> None:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            with open(handle, "wb") as file:
                file.write(data)
        except BaseException:
            with contextlib.suppress(OSError):
                path.unlink()
            raise
    except OSError as error:
        raise HeadwiseError(f"cannot write {shorten(str(path), 400)}: {_reason(error)}") from error


def _fingerprint(public: Ed25519PublicKey) -> str:
    return hashlib.sha256(public.public_bytes_raw()).hexdigest()[:16]


def _cryptography() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise HeadwiseError("signatures need the package cryptography: pip install 'headwise[sign]'") from None


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
