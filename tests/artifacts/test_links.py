"""An artifact through symbolic links: read where they lead; a write replaces the link."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from artifacts import ArtifactError, HeadwiseError, load, load_arrays, save, update
from artifacts.store.write import rehash, sign
from headwise.__main__ import main
from tests.artifacts.conftest import files_of, make_key


@pytest.fixture
def version(saved):
    """The artifact's file in a folder v3, and the folder above it."""
    folder = saved.parent / "v3"
    folder.mkdir()
    for file in list(saved.parent.iterdir()):
        if file.is_file():
            file.rename(folder / file.name)
    return folder / saved.name


def linked(kind: str, version: Path) -> Path:
    """Make a link to the artifact, and return it."""
    root = version.parent.parent
    link = root / "current.yaml"
    match kind:
        case "absolute":
            link.symlink_to(version)
        case "relative":
            link.symlink_to(version.relative_to(root))
        case "chain":
            (root / "links").mkdir()
            (root / "links" / "next.yaml").symlink_to(os.path.join("..", "v3", version.name))
            link.symlink_to(os.path.join("links", "next.yaml"))
        case "folder":
            (root / "current").symlink_to(version.parent)
            link = root / "current" / version.name
        case "through a folder":
            (root / "current").symlink_to(version.parent)
            link.symlink_to(os.path.join("current", version.name))
        case "store of contents":
            # As the hub's cache has it: names link to contents, each next to each other.
            (root / "blobs").mkdir()
            for file in list(version.parent.iterdir()):
                content = root / "blobs" / str(abs(hash(file.name)))
                file.rename(content)
                file.symlink_to(os.path.join("..", "blobs", content.name))
            link.symlink_to(version.relative_to(root))
    return link


KINDS = ("absolute", "relative", "chain", "folder", "through a folder", "store of contents")


@pytest.mark.parametrize("kind", KINDS)
def test_load_of_a_link_reads_the_pair_that_it_leads_to(kind, version, tmp_path):
    right = load(version), load_arrays(version)
    make_key(tmp_path / "me.key", tmp_path / "me.pub")
    sign(version, tmp_path / "me.key")
    link = linked(kind, version)
    assert load(link, verify=tmp_path / "me.pub") == right[0]
    for name, array in load_arrays(link).items():
        np.testing.assert_array_equal(array, right[1][name])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("writer", ["save", "update", "rehash"])
def test_write_to_a_link_replaces_it_by_a_whole_pair(kind, writer, version, make, arrays, tmp_path):
    link = linked(kind, version)
    right = load(link), load_arrays(link)
    before = files_of(version.parent)
    if writer == "save":
        save(make(), link, {name: array + 1 for name, array in arrays.items()})
    if writer == "update":
        update(link, lambda artifact, old: (artifact, {**old, "new": np.ones(3)}))
    if writer == "rehash":
        rehash(link)
    if kind == "folder":
        load(version)
        return
    assert not link.is_symlink() and files_of(version.parent) == before
    assert load(link).model == right[0].model and load(version) == right[0]
    if writer == "update":
        assert load_arrays(link).keys() == right[1].keys() | {"new"}
    # It is whole without what it was a link to.
    alone = tmp_path / "alone"
    alone.mkdir()
    for file in tmp_path.glob("current.*"):
        shutil.copy(file, alone)
    assert load(alone / "current.yaml") == load(link)
    assert not list(tmp_path.glob(".*")), "no lock remains"


@pytest.mark.parametrize("kind", KINDS)
def test_sign_of_a_link_leaves_its_target_alone(kind, version, tmp_path):
    for name in ("old", "new"):
        make_key(tmp_path / f"{name}.key", tmp_path / f"{name}.pub")
    sign(version, tmp_path / "old.key")
    link = linked(kind, version)
    before = files_of(version.parent)
    sign(link, tmp_path / "new.key")
    load(link, verify=tmp_path / "new.pub")
    if kind != "folder":
        # Both signatures are of these bytes.
        load(link, verify=tmp_path / "old.pub")
        assert link.is_symlink() and files_of(version.parent) == before
    # A signature next to a link is of what the link led to.
    older = load(version).model_copy(update={"created_at": "2001-01-01T00:00:00Z"})
    save(older, version, load_arrays(version))
    with pytest.raises(ArtifactError, match=r"is no signature of|is not signed|is missing"):
        load(link, verify=tmp_path / "new.pub")


@pytest.mark.parametrize(
    ("target", "read", "write"),
    [
        ("gone/cfg.yaml", "no such file", None),
        ("current.yaml", "symbolic links", None),
        ("folder", "is a directory", "is a directory"),
        ("cfg.yaml/x.yaml", "not a directory", None),
    ],
)
def test_load_of_a_link_that_leads_nowhere_is_one_line(target, read, write, saved, make, arrays):
    (saved.parent / "folder").mkdir()
    saved.rename(saved.with_name("cfg.yaml"))
    link = saved.with_name("current.yaml")
    link.symlink_to(target)
    for call in (load, rehash, lambda path: update(path, lambda *pair: pair)):
        with pytest.raises(HeadwiseError, match=read):
            call(link)
    assert link.is_symlink()
    if write is None:
        save(make(), link, arrays)
        assert not link.is_symlink() and load(link).model.name == "tiny"
    else:
        with pytest.raises(HeadwiseError, match=write):
            save(make(), link, arrays)


def test_save_and_load_with_a_link_as_sidecar(saved, make, arrays, tmp_path):
    (sidecar,) = saved.parent.glob("*.safetensors")
    blob = sidecar.rename(tmp_path / "blob")
    sidecar.symlink_to(blob)
    assert load_arrays(saved).keys() == arrays.keys()
    blob.write_text("not for you")
    with pytest.raises(ArtifactError, match=r"sidecar\.sha256: says") as refused:
        load(saved)
    assert "not for you" not in str(refused.value)
    save(make(), saved, {name: array + 1 for name, array in arrays.items()})
    load(saved)
    assert not sidecar.is_symlink() and blob.read_text() == "not for you"


def test_convert_of_a_link_reads_the_config_next_to_its_target(tmp_path):
    """DuoAttention's table and its config.json."""
    (tmp_path / "a").mkdir()
    table = tmp_path / "a" / "full_attention_heads.tsv"
    table.write_text("0.1\t0.9\n0.2\t0.8\n")
    sizes = {"sink_size": 7, "recent_size": 99}
    table.with_name("config.json").write_text(json.dumps(sizes))
    (tmp_path / "table.tsv").symlink_to(table)
    shape = ["--heads", "4", "--head-dim", "16", "--max-positions", "2048"]
    options = ["--from", "duo_attention", *shape, "--out", str(tmp_path / "kv.yaml")]
    assert main(["convert", str(tmp_path / "table.tsv"), *options]) == 0
    policies = load(tmp_path / "kv.yaml").kv_cache.policies.values()
    assert {getattr(each, "sinks", None) for each in policies} == {None, 7}
