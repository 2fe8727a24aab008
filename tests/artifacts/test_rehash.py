"""validate --rehash: a valid change by hand gets the right hash, an invalid one is refused."""

from __future__ import annotations

import json

import pytest

from artifacts import ArtifactError, HeadwiseError, load, load_pair
from artifacts.commands.validate import Config, run
from headwise.__main__ import main
from tests.artifacts.conftest import files_of


def edit(path, old, new):
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def test_rehash_keeps_a_valid_change_and_the_arrays(saved):
    before, arrays = load_pair(saved)
    edit(saved, "dense_below: 4096", "dense_below: 2048  # by hand")
    with pytest.raises(ArtifactError, match=r"content_sha256: says .* --rehash`"):
        load(saved)
    run(Config(file=saved, rehash=True))
    after, same = load_pair(saved)
    assert after.prefill.dense_below == 2048 and after.content_sha256 != before.content_sha256
    changed = {"prefill", "content_sha256"}
    assert after.model_dump(exclude=changed) == before.model_dump(exclude=changed)
    assert {name: array.tobytes() for name, array in same.items()} == {
        name: array.tobytes() for name, array in arrays.items()
    }


def test_rehash_of_a_whole_file_changes_no_byte(saved):
    before = files_of(saved.parent)
    run(Config(file=saved, rehash=True))
    assert files_of(saved.parent) == before


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("dense_below: 4096", "dense_below: many", "prefill.dense_below: Input should be a valid"),
        ("sidecar: {file: cfg", "sidecar: {file: other", "sidecar.file: 'other."),
    ],
)
def test_rehash_refuses_an_invalid_change(saved, old, new, says):
    edit(saved, old, new)
    before = files_of(saved.parent)
    with pytest.raises(HeadwiseError) as caught:
        run(Config(file=saved, rehash=True))
    assert says in str(caught.value) and str(caught.value).isprintable()
    assert files_of(saved.parent) == before


def test_rehash_command_prints_the_new_hash(saved, capsys):
    edit(saved, "dense_below: 4096", "dense_below: 2048")
    main(["validate", str(saved), "--rehash", "--json"])
    said = json.loads(capsys.readouterr().out)
    assert said["content_sha256"] == load(saved).content_sha256
