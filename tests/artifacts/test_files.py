from __future__ import annotations

import os

import pytest

from artifacts import HeadwiseError
from artifacts.files import atomic_write, check_writable, out_folder


def test_atomic_write_replaces_the_file_and_keeps_its_mode(tmp_path):
    path = tmp_path / "a.bin"
    atomic_write(path, b"one")
    path.chmod(0o640)
    atomic_write(path, b"two")
    assert path.read_bytes() == b"two"
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_atomic_write_of_a_new_file_follows_the_umask(tmp_path):
    former = os.umask(0o027)
    try:
        atomic_write(tmp_path / "a.bin", b"")
    finally:
        os.umask(former)
    assert (tmp_path / "a.bin").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "cannot write ''"),
        (".", "it is a directory"),
        (os.devnull, "no regular"),
        ("none/cfg.yaml", r"the directory '.*none' does not exist"),
        ("file/cfg.yaml", r"the directory '.*file' is no directory"),
        ("x" * 201, "more than 200 bytes"),
    ],
)
def test_check_writable_names_path_and_reason(tmp_path, name, why):
    (tmp_path / "file").write_text("")
    with pytest.raises(HeadwiseError, match=why):
        check_writable(name and tmp_path / name)
    check_writable(tmp_path / "file")
    check_writable(tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    "write", [check_writable, lambda path: atomic_write(path, b"new")], ids=["check", "write"]
)
def test_write_into_a_folder_without_permission_is_refused(tmp_path, monkeypatch, write):
    """Root may write into any folder, so the refusal is played."""

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(HeadwiseError, match=r"cannot write '.*cfg\.yaml': permission denied"):
        write(tmp_path / "cfg.yaml")


def test_out_folder_is_removed_after_a_failure_if_empty(tmp_path):
    def fail(folder, write=None):
        with pytest.raises(KeyboardInterrupt), out_folder(folder):
            assert folder.is_dir()
            if write:
                (folder / write).touch()
            raise KeyboardInterrupt

    fail(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    fail(tmp_path / "a" / "b", "kept")
    assert (tmp_path / "a" / "b" / "kept").exists()
    fail(tmp_path / "a")
    with out_folder(tmp_path / "c"):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"a", "c"}
    with (
        pytest.raises(
            HeadwiseError, match=r"cannot make the folder '.*kept/below': not a directory"
        ),
        out_folder(tmp_path / "a" / "b" / "kept" / "below"),
    ):
        pass
