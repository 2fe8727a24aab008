"""What is wrong with a file is said in one line: the file, the field, the value and what would be right."""

from __future__ import annotations

import os

import numpy as np
import pytest

from artifacts import ArtifactError, load, load_arrays, save

SHA = "a" * 64

EDITS = [
    ("seed: 7", "seed: 8", ["content_sha256: says", "was changed after it was written"]),
    ("preset: scaled", "preset: fast", ["search.preset: must be 'paper' or 'scaled', got 'fast'"]),
    (
        "    recall: 0.93",
        "    recal: 0.93",
        ["search.summary.recal: unknown field, did you mean recall? (and 1 more)"],
    ),
    ("evidence:", "evidenc:", ["evidenc: unknown field, did you mean evidence?"]),
    ("    recall: 0.93", "    recall: 1.93", ["search.summary.recall: must be from 0 to 1, got 1.93"]),
    ("    recall: 0.93", "    recall: .nan", ["readers disagree about '.nan'"]),
    ("error: 1.0e-05", "error: -1.0e+999", ["search.summary.error: must be a finite number, got -inf"]),
    ("error: 1.0e-05", "error: -1.0", ["search.summary.error: must be at least 0", "got -1.0"]),
    ("    recall: 0.93", "    recall: '0.93'", ["search.summary.recall: must be a number, got '0.93'"]),
    ("seed: 7", "seed: 7.0", ["search.seed: must be a whole number, got 7.0"]),
    ("seed: 7", "seed: true", ["search.seed: must be a whole number, got true"]),
    ("seed: 7", "seed: ", ["search.seed: must be a whole number, got null"]),
    ("  name: tiny", "  name: ''", ["model.name: must not be empty"]),
    ("  name: tiny", "  name: 5", ["model.name: must be text, got 5"]),
    ("  name: tiny", "  name: tiny\n  name: other", ["line 7: the key 'name' is given twice"]),
    ("  name: tiny", "  name: &a tiny", ["line 6: anchors, aliases and tags are not allowed"]),
    ("  name: tiny", "  name: *a", ["line 6: anchors, aliases and tags are not allowed"]),
    ("  name: tiny", "  name: !!python/name:os.system tiny", ["line 6: anchors, aliases and tags are not allowed"]),
    (
        "factors: [1.0e-05, 2]",
        "factors: [1.0e-05, 1.0e+999]",
        ["model.rope: must hold finite numbers", "factors[1]"],
    ),
    ("num_kv_heads: 2", "num_kv_heads: 3", ["model: num_kv_heads must divide num_heads (4), got 3"]),
    ("num_layers: 3", "num_layers: 4", ["prefill.layers has 3 rows, the model has 4 layers"]),
    (
        "lengths: [4096]",
        "lengths: [4096, x]",
        ["search.calibration.lengths[1]: must be a whole number, got 'x'"],
    ),
    ("lengths: [4096]", "lengths: []", ["search.calibration.lengths: must not be empty"]),
    ("lengths: [4096]", "lengths: 4096", ["search.calibration.lengths: must be a list, got 4096"]),
    ("winners: {v", "winners: {w", ["search.summary.winners.wertical_slash: must be one of dense, a_shape,"]),
    ("blocks: 9, coverage: null", "blocks: 9, coverage: 1.5", ["patterns.bs_9.coverage: must be at most 1", "got 1.5"]),
    ("blocks: 9, coverage: null", "blocks: 9, coverage: 0.0", ["patterns.bs_9.coverage: must be more than 0"]),
    ("blocks: 9, coverage: null", "blocks: 9, coverage: half", ["bs_9.coverage: must be a number, got 'half'"]),
    ("vertical: 100,", "vertical: 0,", ["patterns.vs_100_1800.vertical: must be at least 1, got 0"]),
    ("last_q: 32", "last_q: 2048", ["patterns.vs_30_2048_q32.last_q: must be at most 1024, got 2048"]),
    ("kind: block_sparse", "kind: blocks", ["patterns.bs_9.kind: must be one of 'dense', ", "got 'blocks'"]),
    ("kind: block_sparse, ", "", ["patterns.bs_9.kind: missing, must be one of dense,"]),
    ("bs_9: {kind", "b/9: {kind", ["patterns.'b/9': must be a letter and then", "got 'b/9'"]),
    ("bs_9: {kind: block_sparse, blocks: 9, coverage: null}", "bs_9: 9", ["patterns.bs_9: must be a mapping, got 9"]),
    ("bs_9: {", "bs_8: {kind: dense}\n  bs_9: {", ["patterns.bs_8 is used by no head: remove it"]),
    (", bs_9]", ", bs_8]", ["prefill.layers[0][3]: no pattern is called 'bs_8', did you mean bs_9?"]),
    (", bs_9]", "]", ["prefill.layers[0] has 3 names, the model has 4 query heads"]),
    ("  - null", "  - [bs_9, null, bs_9, bs_9]", ["prefill.layers[1][1]: must be text, got null"]),
    ("  - null", "  - dense", ["prefill.layers[1]: must be a list, got 'dense'"]),
    ("    baseline: 3.75", "    baseline: null", ["evidence.measurements[0]: baseline and baseline_name go together"]),
    ("created_at: '2025", "created_at: 'x2025", ["created_at: must be a UTC time like"]),
    *(
        ("schema_version: 1", f"schema_version: {wrong}", [f"schema_version: this headwise reads 1, got {said}: "])
        for wrong, said in (("0", 0), ("9", 9), ("'1'", "'1'"), ("1.0", 1.0), ("true", True), ("", None))
    ),
    ("schema_version: 1", "version: 2", ["schema_version: this headwise reads 1, got None: "]),
    ("sidecar: {file: cfg", "sidecar: {file: ../cfg", ["sidecar.file: must be the bare name", "got '../cfg"]),
    ("sidecar: {file: cfg", "sidecar: {file: /cfg", ["sidecar.file: must be the bare name", "got '/cfg"]),
    ("sidecar: {file: cfg", "sidecar: {file: c:cfg", ["sidecar.file: must be the bare name", "got 'c:cfg"]),
    ("sidecar: {file: cfg", "sidecar: {file: other", ["sidecar.file: 'other.", "is missing"]),
]


def line(path) -> str:
    """The one line that loading gives."""
    with pytest.raises(ArtifactError) as caught:
        load(path)
    text = str(caught.value)
    assert text.isprintable() and len(text) < 400
    return text


@pytest.mark.parametrize(("old", "new", "expected"), EDITS, ids=[new.strip()[:40] for _, new, _ in EDITS])
def test_edited_by_hand(edit, old, new, expected):
    path = edit(old, new)
    text = line(path)
    assert text.startswith(f"{path}: ")
    for part in expected:
        assert part in text


def test_a_change_that_the_hash_leaves_out_is_no_damage(edit):
    assert load(edit("--model tiny", "--model ./tiny")).search.command.endswith("--model ./tiny --out cfg.yaml")


@pytest.mark.parametrize("share", [0.001, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999])
def test_cut_short(saved, share):
    data = saved.read_bytes()
    saved.write_bytes(data[: int(len(data) * share)])
    line(saved)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "the file is empty"),
        (b"# only a comment\n", "the file is empty"),
        (b"\xff\xfe\x00", "not UTF-8 text"),
        (b"name: \x00", "not valid YAML"),
        (b"just text", "must be a mapping"),
        (b"- 1", "must be a mapping"),
        (b"a: [1", "line "),
        (b"[" * 100_000, "nested more than"),
        (b"{a: 1, a: 2}", "given twice"),
        (b"? [a]\n: 1", "a key must be text"),
        (b"a: 1\n---\nb: 1", "but found another document"),
        (b"schema_version: 1", "created_at: missing"),
        (b"#" * (16 * 2**20 + 1), "has more than 16777216 bytes"),
    ],
)
def test_no_artifact_at_all(saved, data, expected):
    saved.write_bytes(data)
    assert expected in line(saved)


def test_missing_file_directory_and_device(tmp_path):
    assert line(tmp_path / "none.yaml").endswith("none.yaml: no such file")
    assert "is a directory" in line(tmp_path)
    assert "no regular file" in line(os.devnull)
    assert "a\\nb: no such file" in line(tmp_path / "a\nb")


def test_sidecar_missing_changed_or_a_directory(saved):
    (sidecar,) = saved.parent.glob("*.safetensors")
    data = sidecar.read_bytes()
    sidecar.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    for read in (load, load_arrays):
        with pytest.raises(ArtifactError, match=r"sidecar\.sha256: says .* was changed"):
            read(saved)
    sidecar.unlink()
    for read in (load, load_arrays):
        with pytest.raises(ArtifactError, match=r"sidecar\.file: .* is missing from .*belong together"):
            read(saved)
    assert load(saved, check_sidecar=False).model.name == "tiny"
    sidecar.mkdir()
    assert "is no regular file" in line(saved)


def test_sidecar_with_the_right_hash_that_is_no_safetensors(saved, make):
    """Only a writer other than save() could make one, and it still ends in one line."""
    import hashlib

    from artifacts import strict_yaml
    from artifacts.hashing import content_sha256

    (saved.parent / "x.safetensors").write_bytes(b"nonsense")
    fields = strict_yaml.parse(saved.read_text())
    fields["sidecar"] = {"file": "x.safetensors", "sha256": hashlib.sha256(b"nonsense").hexdigest()}
    fields["content_sha256"] = content_sha256(fields)
    saved.write_text(strict_yaml.dump(fields))
    assert load(saved, check_sidecar=False).model.name == "tiny"
    for read in (load, load_arrays):
        with pytest.raises(ArtifactError, match="is no safetensors file of arrays"):
            read(saved)


STATIC = [
    ("static.mean.columns", None, "patterns.static_mean: the sidecar has no array static.mean.columns"),
    ("static.mean.diagonals", None, "of static patterns it has: static.mean.columns"),
    ("static.mean.columns", np.array([1, 2]), "static.mean.columns must be one row of int32, got int64 of shape (2,)"),
    ("static.mean.columns", np.zeros((1, 2), np.int32), "must be one row of int32, got int32 of shape (1, 2)"),
    ("static.mean.columns", np.array([-1, 2], np.int32), "static.mean.columns must hold positions from 0 on, got -1"),
    ("static.mean.diagonals", np.array([0, 3, 3], np.int32), "static.mean.diagonals must be ascending, got 3 after 3"),
    ("static.mean.diagonals", np.array([0, 3, 1], np.int32), "must be ascending, got 1 after 3"),
]


@pytest.mark.parametrize(("name", "array", "expected"), STATIC, ids=[expected[-30:] for *_, expected in STATIC])
def test_arrays_of_static_patterns(tmp_path, every_kind, monkeypatch, name, array, expected):
    """Refused when they are written, and when a file that another writer made is read."""
    artifact, arrays = every_kind
    arrays = {key: value for key, value in (arrays | {name: array}).items() if value is not None}
    path = tmp_path / "cfg.yaml"
    with pytest.raises(ArtifactError) as refused:
        save(artifact, path, arrays)
    assert expected in str(refused.value) and list(tmp_path.iterdir()) == []
    with monkeypatch.context() as unchecked:
        unchecked.setattr("artifacts.store.check_arrays", lambda artifact, arrays: None)
        save(artifact, path, arrays)
    assert expected in line(path)
    with pytest.raises(ArtifactError, match="static"):
        load_arrays(path)
    assert load(path, check_sidecar=False).patterns["static_mean"].indices == "mean"


def test_static_patterns_need_a_sidecar(tmp_path, every_kind, monkeypatch):
    with pytest.raises(
        ArtifactError, match=r"static_mean: the array static\.mean\.columns must be in the sidecar, and"
    ):
        save(every_kind[0], tmp_path / "cfg.yaml")


def test_a_wrong_copy_is_refused_before_anything_is_written(tmp_path, make):
    artifact = make()
    broken = artifact.model_copy(update={"patterns": {}})
    with pytest.raises(ArtifactError, match=r"prefill\.layers\[0\]\[0\]: no pattern is called"):
        save(broken, tmp_path / "cfg.yaml")
    summary = artifact.search.summary.model_copy(update={"error": float("nan")})
    broken = artifact.model_copy(update={"search": artifact.search.model_copy(update={"summary": summary})})
    with pytest.raises(ArtifactError, match=r"search\.summary\.error: must be"):
        save(broken, tmp_path / "cfg.yaml")
    assert list(tmp_path.iterdir()) == []
