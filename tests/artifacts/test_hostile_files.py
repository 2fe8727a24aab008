"""Files made to break a reader: one line each, within 100 MiB and 2 s of the processor, and nothing is executed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from hashlib import sha256
from pathlib import Path

import pytest

from artifacts import ArtifactError, load, load_arrays, load_pair, save, strict_yaml
from artifacts.__main__ import main
from artifacts.command_line import FOUND
from artifacts.hashing import content_sha256
from artifacts.sidecar import Sidecar
from artifacts.validation import to_artifact
from tests.artifacts.hostile import ACCEPTED, MIB

# What ends well: these files are large and right.
HARMLESS = {"as many arrays as may be", "one large array"}


@pytest.mark.parametrize("options", [[], pytest.param(["--all"], marks=pytest.mark.exhaustive)])
def test_every_hostile_file_ends_in_one_line_and_costs_little_whatever_reads_it(options):
    command = [sys.executable, "-m", "tests.artifacts.hostile", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    files, ways = {file["name"] for file in found}, Counter(file["way"] for file in found)
    assert len(files) > 55 and len(ways) > 18 and min(ways.values()) > 5 and ways["load"] == len(files)
    assert not options or set(ways.values()) == {len(files)}
    for file in found:
        assert "crash" not in file, file
        if file["way"] == "load":
            assert (file["line"] is None) == (file["name"] in {*HARMLESS, *ACCEPTED}), file
        assert file["line"] is None or (file["line"].isprintable() and len(file["line"]) < 1000), file
        # What reads all arrays, to give them away or to write them again, holds them.
        whole = file["name"] == "a sidecar of 220 MiB" and file["way"] in ("load", "set", "merge")
        # A file that takes longer than the processor's limit in hostile.py ends as a crash.
        assert whole or file["mib"] <= MIB, file


@pytest.mark.parametrize(
    "name",
    ["../cfg.safetensors", "/etc/passwd", "..\\\\cfg.safetensors", "a/../../b.safetensors", "..", ".safetensors",
     "c:x.safetensors", "x.safetensors/", "x.safetensors\\0", "passwd"],
)  # fmt: skip
def test_a_sidecar_elsewhere_is_refused_whatever_its_hash(saved, name):
    fields = strict_yaml.parse(saved.read_bytes())
    fields["sidecar"] = {"file": name, "sha256": sha256(b"").hexdigest()}
    fields["content_sha256"] = content_sha256(fields)
    saved.write_text(strict_yaml.dump(fields))
    with pytest.raises(ArtifactError, match=r"sidecar\.file: must be the bare name"):
        load(saved)


def replaced(saved):
    """The path of the saved artifact's sidecar, from which the sidecar was taken away."""
    (sidecar,) = saved.parent.glob("*.safetensors")
    sidecar.unlink()
    return sidecar


def test_a_pipe_or_a_device_in_place_of_a_file_is_never_waited_for(saved, tmp_path):
    sidecar = replaced(saved)
    os.mkfifo(sidecar)
    for read in (load, load_arrays):
        with pytest.raises(ArtifactError, match=r"sidecar\.file: .* cannot be read, is no regular file"):
            read(saved)
    sidecar.unlink()
    sidecar.symlink_to("/dev/zero")
    with pytest.raises(ArtifactError, match="is no regular file"):
        load(saved)
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(ArtifactError, match=r"pipe\.yaml: cannot be read, is no regular file"):
        load(tmp_path / "pipe.yaml")


def test_a_link_is_read_and_its_bytes_are_hashed_like_any(saved, tmp_path):
    """Caches of downloaded files are made of links."""
    (sidecar,) = saved.parent.glob("*.safetensors")
    blob = sidecar.rename(tmp_path / "blob")
    sidecar.symlink_to(blob)
    assert load_arrays(saved)["chosen.recall"].shape == (3, 4)
    secret = tmp_path / "secret"
    secret.write_text("not for you")
    sidecar.unlink()
    sidecar.symlink_to(secret)
    with pytest.raises(ArtifactError, match=r"sidecar\.sha256: says") as caught:
        load_arrays(saved)
    assert "not for you" not in str(caught.value)
    sidecar.unlink()
    sidecar.symlink_to(sidecar)
    with pytest.raises(ArtifactError, match="cannot be read"):
        load(saved)


def test_a_link_is_replaced_and_not_written_through(saved, make, arrays, tmp_path):
    target = tmp_path / "precious.yaml"
    target.write_text("kept")
    link = tmp_path / "link.yaml"
    link.symlink_to(target)
    save(make(), link, arrays)
    assert target.read_text() == "kept" and not link.is_symlink()
    assert load_pair(link)[0].model.name == "tiny"


def test_a_sidecar_larger_than_any_is_not_read(saved):
    sidecar = replaced(saved)
    with open(sidecar, "wb") as file:
        file.truncate(2**30 + 1)
    with pytest.raises(ArtifactError, match=r"has more than 268435456 bytes, the most that one may have"):
        load(saved)


@pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="needs a file that says nothing of its size")
def test_a_file_that_says_nothing_of_its_size_is_not_read_to_its_end(saved, monkeypatch):
    """Regular, of size 0 and hundreds of gigabytes long."""
    monkeypatch.setattr("artifacts.sidecar.MAX_SIDECAR", 2**20)
    monkeypatch.setattr("artifacts.store.MAX_BYTES", 2**20)
    sidecar = replaced(saved)
    sidecar.symlink_to("/proc/self/pagemap")
    with pytest.raises(ArtifactError, match=r"sidecar\.file: .* has more than 1048576 bytes"):
        load(saved)
    saved.unlink()
    saved.symlink_to("/proc/self/pagemap")
    with pytest.raises(ArtifactError, match=r"has more than 1048576 bytes, too large for an artifact's YAML file"):
        load(saved)


def test_what_serves_reads_the_arrays_that_serve(tmp_path, every_kind, monkeypatch):
    save(every_kind[0], tmp_path / "cfg.yaml", every_kind[1])
    read, real = [], Sidecar.__getitem__
    monkeypatch.setattr(Sidecar, "__getitem__", lambda self, name: read.append(name) or real(self, name))
    serving = {"front.rows", "static.mean.columns", "static.mean.diagonals"}
    assert load_pair(tmp_path / "cfg.yaml", names=())[1].keys() == set(read) == serving
    assert load_pair(tmp_path / "cfg.yaml", names=("chosen.recall", "none"))[1].keys() == serving | {"chosen.recall"}
    assert load_pair(tmp_path / "cfg.yaml")[1].keys() == every_kind[1].keys()


def test_nothing_in_a_file_is_executed(saved, monkeypatch, tmp_path):
    """Every way to make PyYAML call something is a tag; the hostile files have one, this has them all."""
    trace = tmp_path / "trace"
    for tag in ("object/apply:os.system", "object/new:os.system", "name:os.system", "module:os", "object:os.system"):
        saved.write_text(f"schema_version: !!python/{tag} ['touch {trace}']\n")
        with pytest.raises(ArtifactError, match="line 1: anchors, aliases and tags are not allowed"):
            load(saved)
    assert not trace.exists()


@pytest.mark.parametrize("where", ["lengths", "patterns"])
def test_sizes_that_no_model_has_break_no_verb(tmp_path, every_kind, where, capsys):
    artifact, arrays = every_kind
    fields = artifact.model_dump(mode="json")
    if where == "lengths":
        fields["model"]["max_positions"] = 2**31 - 1
        fields["search"]["calibration"]["lengths"] = [2**31 - 1]
    else:
        for pattern in fields["patterns"].values():
            pattern.update(
                {name: 2**31 - 1 for name in ("sink", "window", "vertical", "slash", "blocks") if name in pattern}
            )
    for name in ("odd", "same"):
        save(to_artifact(fields), tmp_path / f"{name}.yaml", arrays)
    odd, same = str(tmp_path / "odd.yaml"), str(tmp_path / "same.yaml")
    for words in (["show", odd], ["validate", odd], ["diff", odd, same]):
        assert main(words) in (0, FOUND), words
        assert capsys.readouterr().out
