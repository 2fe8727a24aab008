"""Signatures: only files signed with the key load."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial

import pytest

import runtime
from artifacts import ArtifactError, HeadwiseError, load, load_arrays, load_pair, save
from artifacts.commands import sign as sign_verb
from artifacts.store import read as store
from artifacts.store.signing import signature_path
from artifacts.store.write import sign
from headwise.__main__ import main
from tests.artifacts.conftest import make_key


@pytest.fixture
def key(tmp_path):
    """The path of a private key; the public one is next to it."""
    folder = tmp_path / "keys"
    folder.mkdir()
    make_key(folder / "me.key", folder / "me.pub")
    return folder / "me.key"


@pytest.fixture
def public(key):
    return key.with_name("me.pub")


def test_load_signed_artifact_accepts_its_key(saved, key, public):
    assert sign(saved, key) == signature_path(saved)
    artifact, arrays = load_pair(saved, verify=public)
    for verify in (None, public, str(public)):
        assert load(saved, verify=verify) == artifact
    assert load(saved, verify=public, check_sidecar=False) == artifact
    assert load_arrays(saved, verify=public).keys() == arrays.keys()
    assert runtime.load(saved, verify=public).artifact == artifact


def refusal(saved, public):
    """The error of loading with a key, the same for every way to load."""
    lines = set()
    yaml_only = partial(load, check_sidecar=False)
    for read in (load, load_arrays, load_pair, yaml_only, runtime.load):
        with pytest.raises(ArtifactError) as caught:
            read(saved, verify=public)
        lines.add(str(caught.value))
    (line,) = lines
    assert line.isprintable() and len(line) < 600
    return line


def test_load_changed_artifact_or_other_key_is_refused_before_it_is_parsed(saved, key, public):
    """Commands and times are in nobody's hash, but a reader may copy a command."""
    sign(saved, key)
    make_key(key.with_name("other.key"), key.with_name("other.pub"))
    assert "is no signature of this file by" in refusal(saved, key.with_name("other.pub"))
    saved.write_text(saved.read_text().replace("--model tiny", "--model evil"))
    assert "--model evil" in load(saved).search.command
    assert "is no signature of this file by" in refusal(saved, public)
    saved.write_text("[" * 1000)
    assert "is no signature of this file by" in refusal(saved, public)


def test_load_damaged_signature_is_refused(saved, key, public):
    sign(saved, key)
    signature = signature_path(saved)
    whole = signature.read_bytes()
    place = whole.index(b'"payload":"') + 50
    changed = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
    for data in (b"", b"{}", changed):
        signature.write_bytes(data)
        assert "is no signature of this file" in refusal(saved, public)
    signature.write_bytes(b"x" * 10**6)
    assert "has more than 65536 bytes, too large for a signature" in refusal(saved, public)
    signature.unlink()
    os.mkfifo(signature)
    assert "cannot be read, is no regular file" in refusal(saved, public)


def test_save_removes_the_signature(saved, key, public, make, arrays):
    assert "is not signed, 'cfg.yaml.sig' is missing" in refusal(saved, public)
    sign(saved, key)
    arrays["chosen.recall"][0, 0] = 0.75
    save(make(), saved, arrays)
    assert "is not signed, 'cfg.yaml.sig' is missing" in refusal(saved, public)
    sign(saved, key)
    load_pair(saved, verify=public)


def test_load_checks_the_bytes_that_it_parses(saved, key, public, monkeypatch):
    """A file that is replaced during the check gains nothing."""
    sign(saved, key)
    signed, check = saved.read_bytes(), store.check_signature
    saved.write_bytes(signed.replace(b"--model tiny", b"--model evil"))

    def replaced(*arguments):
        saved.write_bytes(signed)
        return check(*arguments)

    monkeypatch.setattr(store, "check_signature", replaced)
    with pytest.raises(ArtifactError, match="is no signature of this file"):
        load(saved, verify=public)


def test_sign_changed_artifact_is_refused(saved, key):
    saved.write_text(saved.read_text().replace("seed: 7", "seed: 8"))
    with pytest.raises(ArtifactError, match="was changed after it was written"):
        sign(saved, key)
    assert not signature_path(saved).exists()


def test_sign_and_load_refuse_other_files_as_keys(saved, key, public, tmp_path):
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    make_key(tmp_path / "ed.key", tmp_path / "ed.pub", Ed25519PrivateKey.generate())
    (tmp_path / "empty").touch()
    sign(saved, key)
    for wrong in ("empty", "ed.key", "ed.pub"):
        with pytest.raises(HeadwiseError, match=f"{wrong}: must be a public key of P-256"):
            load(saved, verify=tmp_path / wrong)
        with pytest.raises(HeadwiseError, match=f"{wrong}: must be a private key of P-256"):
            sign(saved, tmp_path / wrong)
    with pytest.raises(HeadwiseError, match=r"me\.pub: must be a private key"):
        sign(saved, public)
    with pytest.raises(HeadwiseError, match=r"me\.key: must be a public key"):
        load(saved, verify=key)
    with pytest.raises(HeadwiseError, match="none: the key cannot be read, no such file"):
        load(saved, verify=tmp_path / "none")


def test_sign_covers_the_checked_bytes(saved, key, public, monkeypatch):
    """A file that is replaced during the check gets no signature."""
    checked, read = saved.read_bytes(), store.check_arrays

    def replaced(*arguments):
        saved.write_bytes(checked.replace(b"--model tiny", b"--model evil"))
        return read(*arguments)

    monkeypatch.setattr(store, "check_arrays", replaced)
    sign(saved, key)
    with pytest.raises(ArtifactError, match="is no signature of this file"):
        load(saved, verify=public)
    saved.write_bytes(checked)
    monkeypatch.undo()
    load(saved, verify=public)


def test_sign_asks_for_the_passphrase_of_an_encrypted_key(saved, key, public, monkeypatch):
    from cryptography.hazmat.primitives import serialization as s

    plain = s.load_pem_private_key(key.read_bytes(), None)
    encryption = s.BestAvailableEncryption(b"secret")
    key.write_bytes(plain.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, encryption))
    with pytest.raises(HeadwiseError, match=r"me\.key: must be a private key .* encrypted"):
        sign(saved, key)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr(sign_verb, "getpass", lambda prompt: "wrong")
    with pytest.raises(HeadwiseError, match=r"me\.key: must be a private key"):
        main(["sign", str(saved), "--key", str(key)])
    monkeypatch.setattr(sign_verb, "getpass", lambda prompt: "secret")
    main(["sign", str(saved), "--key", str(key)])
    load(saved, verify=public)


def test_model_signing_checks_the_same_signature(saved, key, public):
    sign(saved, key)
    words = ["verify", "key", str(saved), "--signature", str(signature_path(saved))]
    words = ["model_signing", *words, "--public_key", str(public)]
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_load_without_the_extra_names_it(saved):
    """Without the package artifacts load; a signature names what to install."""
    code = (
        "import sys; sys.modules['model_signing'] = None\nfrom artifacts import load\n"
        f"load({str(saved)!r})\nprint('loaded')\nload({str(saved)!r}, verify='key')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "loaded\n", done.stderr
    assert "signatures need the package model-signing: pip install 'headwise[sign]'" in done.stderr
