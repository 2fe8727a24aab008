"""Signatures: what the key's holder signed loads, and nothing else does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import partial

import pytest

import runtime
from artifacts import ArtifactError, HeadwiseError, load, load_arrays, load_pair, save
from artifacts.__main__ import main
from artifacts.commands import sign as sign_verb
from artifacts.store import read as store
from artifacts.store.signing import CONTEXT, fingerprint, make_key, signature_path
from artifacts.store.write import sign


@pytest.fixture
def key(tmp_path):
    """The path of a private key; the public one is beside it."""
    folder = tmp_path / "keys"
    folder.mkdir()
    make_key(folder / "me.key")
    return folder / "me.key"


@pytest.fixture
def public(key):
    return key.with_name("me.key.pub")


def test_what_was_signed_loads_and_so_it_does_without_asking(saved, key, public):
    target, by = sign(saved, key)
    assert target == signature_path(saved) and by == fingerprint(public)
    assert target.read_text().splitlines()[:2] == [CONTEXT, f"key {by}"]
    artifact, arrays = load_pair(saved, verify=public)
    for verify in (None, public, str(public), public.read_bytes()):
        assert load(saved, verify=verify) == artifact
    assert load(saved, verify=public, check_sidecar=False) == artifact
    assert load_arrays(saved, verify=public).keys() == arrays.keys()
    assert runtime.load(saved, verify=public).artifact == artifact


def refusal(saved, public):
    """The one line that loading with a key gives; every way to load gives it."""
    lines = set()
    yaml_only = partial(load, check_sidecar=False)
    for read in (load, load_arrays, load_pair, yaml_only, runtime.load):
        with pytest.raises(ArtifactError) as caught:
            read(saved, verify=public)
        lines.add(str(caught.value))
    (line,) = lines
    assert line.isprintable() and len(line) < 400
    return line


def test_the_signature_is_of_every_byte_and_comes_before_the_content(saved, key, public):
    """Commands and times are in nobody's hash, but a reader may copy a command."""
    sign(saved, key)
    saved.write_text(saved.read_text().replace("--model tiny", "--model evil"))
    assert "--model evil" in load(saved).search.command
    assert "is no signature of this file by the key" in refusal(saved, public)
    saved.write_text("[" * 1000)
    assert "is no signature of this file by the key" in refusal(saved, public)


def test_every_bit_of_file_and_signature_counts(saved, key, public):
    sign(saved, key)
    for path, said in (
        (saved, "is no signature of this file"),
        (signature_path(saved), r"cfg\.yaml(\.sig|: is signed)"),
    ):
        data = path.read_bytes()
        for place in range(0, len(data), max(1, len(data) // 15)):
            path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
            with pytest.raises(ArtifactError, match=said):
                load(saved, verify=public)
        path.write_bytes(data)
    load(saved, verify=public)


def test_a_changed_sidecar_is_refused_though_the_yaml_is_signed(saved, key, public):
    sign(saved, key)
    (sidecar,) = saved.parent.glob("*.safetensors")
    data = sidecar.read_bytes()
    sidecar.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ArtifactError, match=r"sidecar\.sha256: says"):
        load_pair(saved, verify=public)


def test_an_artifact_saved_again_has_to_be_signed_again(saved, key, public, make, arrays):
    assert "is not signed, 'cfg.yaml.sig' is missing" in refusal(saved, public)
    sign(saved, key)
    arrays["chosen.recall"][0, 0] = 0.75
    save(make(), saved, arrays)
    assert "is not signed, 'cfg.yaml.sig' is missing" in refusal(saved, public)
    sign(saved, key)
    load_pair(saved, verify=public)


def test_another_key_or_no_signature_at_all(saved, key, public, tmp_path):
    sign(saved, key)
    other, _ = make_key(tmp_path / "other.key")
    keys = f"is signed by the key {fingerprint(public)}, not by {fingerprint(other)}"
    assert keys in refusal(saved, other)
    signature = signature_path(saved)
    for data in (b"", b"x" * 64, b"x" * 10**6, signature.read_bytes().replace(b"v1", b"v2")):
        signature.write_bytes(data)
        assert f"is no {CONTEXT}" in refusal(saved, public)
    signature.unlink()
    os.mkfifo(signature)
    assert "cannot be read, is no regular file" in refusal(saved, public)


def test_only_a_whole_artifact_is_signed(saved, key):
    saved.write_text(saved.read_text().replace("seed: 7", "seed: 8"))
    with pytest.raises(ArtifactError, match="was changed after it was written"):
        sign(saved, key)
    assert not signature_path(saved).exists()


def test_what_is_no_key_or_one_of_another_kind(saved, key, public, tmp_path):
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    other = X25519PrivateKey.generate()
    private = other.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())
    of_other = other.public_key().public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo)
    sign(saved, key)
    wrong = tmp_path / "wrong"
    empty = b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n"
    signing = "is a public key, signing takes the private one"
    none = "is no public Ed25519 key in PEM"
    for data, signs, verifies in (
        (b"", "is no private Ed25519 key", none),
        (b"nonsense", "is no private Ed25519 key", none),
        (empty, signing, none),
        (of_other, signing, none),
        (private, "is no private Ed25519 key", "is a private key, keep it to yourself"),
    ):
        wrong.write_bytes(data)
        wrong.chmod(0o600)
        for given, named in ((wrong, "wrong"), (data, "the key")):
            with pytest.raises(HeadwiseError, match=f"{named}: {verifies}"):
                load(saved, verify=given)
            with pytest.raises(HeadwiseError, match=f"{named}: {signs}"):
                sign(saved, given)
    # The pair's own keys, taken for each other.
    with pytest.raises(HeadwiseError, match=f"pub: {signing}"):
        sign(saved, public)
    with pytest.raises(HeadwiseError, match="key: is a private key, keep it to yourself"):
        load(saved, verify=key)
    with pytest.raises(HeadwiseError, match="none: the key cannot be read, no such file"):
        load(saved, verify=tmp_path / "none")


def test_a_key_is_its_owners_alone_and_never_replaced(key, public):
    assert key.stat().st_mode & 0o777 == 0o600
    for path in (key, public):
        kept = path.read_bytes()
        other = public if path == key else key
        other.rename(other.with_suffix(".away"))
        with pytest.raises(HeadwiseError, match="is there already, and a key is never replaced"):
            make_key(key)
        other.with_suffix(".away").rename(other)
        assert path.read_bytes() == kept


def test_what_is_signed_is_what_was_checked(saved, key, public, monkeypatch):
    """A file that is replaced during the check gets no signature."""
    checked, read = saved.read_bytes(), store.check_arrays

    def replaced(*given):
        saved.write_bytes(checked.replace(b"--model tiny", b"--model evil"))
        return read(*given)

    monkeypatch.setattr(store, "check_arrays", replaced)
    sign(saved, key)
    with pytest.raises(ArtifactError, match="is no signature of this file"):
        load(saved, verify=public)
    saved.write_bytes(checked)
    monkeypatch.undo()
    load(saved, verify=public)


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_a_key_that_others_can_use_signs_nothing(saved, key, mode):
    key.chmod(mode)
    says = rf"me\.key: others can use the key \(mode {mode:03o}\): chmod 600"
    with pytest.raises(HeadwiseError, match=says):
        sign(saved, key)
    assert not signature_path(saved).exists()


def test_an_encrypted_key_is_asked_for(saved, tmp_path, monkeypatch):
    key = tmp_path / "me.key"
    asked = []

    def typed(*more, answers):
        """Sign with the key, where the answers are typed at a terminal."""
        replies = iter(answers)
        monkeypatch.setattr(
            sign_verb, "getpass", lambda prompt: asked.append(prompt) or next(replies)
        )
        main(["sign", str(saved), "--key", str(key), *more])

    for wrong in (("secret", "secrat"), ("",)):
        says = "the passphrase is empty, or not the same twice: nothing was written"
        with pytest.raises(HeadwiseError, match=says):
            typed("--new-key", "--encrypt", answers=wrong)
        assert not key.exists()
    with pytest.raises(HeadwiseError, match="--encrypt is for a key that --new-key makes"):
        typed("--encrypt", answers=())
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    typed("--new-key", "--encrypt", answers=("secret",) * 3)
    assert b"ENCRYPTED" in key.read_bytes()
    typed(answers=("secret",))
    load(saved, verify=tmp_path / "me.key.pub")
    with pytest.raises(HeadwiseError, match=r"me\.key: this is not its passphrase"):
        typed(answers=("wrong",))
    assert asked[-1] == f"passphrase of {key}: "
    with pytest.raises(HeadwiseError, match="is encrypted, and there is no terminal to ask"):
        sign(saved, key)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_openssl_checks_the_same_signature(saved, key, public):
    sign(saved, key)
    shell = (
        "head -n 2 cfg.yaml.sig | cat - cfg.yaml > signed; tail -n 1 cfg.yaml.sig | base64 -d > "
        f"signature; openssl pkeyutl -verify -pubin -inkey {public} -rawin -in signed -sigfile "
        "signature"
    )
    done = subprocess.run(["sh", "-c", shell], cwd=saved.parent, capture_output=True, text=True)
    if "unknown option" in done.stderr.lower():
        pytest.skip("this openssl knows no -rawin")
    assert done.returncode == 0, done.stderr


def test_signatures_are_an_extra(saved):
    """Without the package artifacts load; a signature names what to install."""
    code = (
        "import sys; sys.modules['cryptography'] = None\nfrom artifacts import load\n"
        f"load({str(saved)!r})\nprint('loaded')\nload({str(saved)!r}, verify=b'key')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "loaded\n", done.stderr
    assert "signatures need the package cryptography: pip install 'headwise[sign]'" in done.stderr
