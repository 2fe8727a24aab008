"""Refused files, each with one line: the file, the field, the value and the allowed values.

Each hostile file is read in a separate process, within 150 MiB and 10 s.
"""

from __future__ import annotations

import json
import os
import resource
import struct
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

import artifacts
from artifacts import ArtifactError, load, load_arrays, load_pair, save
from artifacts.cli.command import FOUND
from artifacts.schema.validation import to_artifact
from artifacts.store import strict_yaml
from artifacts.store.hashing import canonical_json, content_of, content_sha256
from artifacts.store.write import rehash
from headwise.__main__ import main
from tests.artifacts.conftest import as_yaml, build, build_every_kind, counting, replace_field
from tests.sampling import sampled

HERE = Path(__file__).parent
ROWS = [
    [cell.strip() for cell in row.split("|", 2)]
    for row in (HERE / "refused_fields.txt").read_text().splitlines()
    if not row.startswith("#")
]


@pytest.mark.parametrize(("path", "value", "says"), ROWS, ids=["=".join(row[:2]) for row in ROWS])
def test_to_artifact_of_a_wrong_field_names_it(every_kind, path, value, says):
    fields = every_kind[0].model_dump(mode="json")
    replace_field(fields, path, *([json.loads(value)] if value else []))
    with pytest.raises(ArtifactError) as caught:
        to_artifact(fields)
    message = str(caught.value)
    assert says in message
    names_field_alone = " " not in says
    if names_field_alone and value and not isinstance(json.loads(value), dict | list):
        assert repr(json.loads(value)) in message


def line(path) -> str:
    """The one line of the error of loading."""
    with pytest.raises(ArtifactError) as caught:
        load(path)
    text = str(caught.value)
    assert text.isprintable() and len(text) < 400
    return text


# Text of the saved file, its replacement (None: of the whole file), and a part of the error.
EDITS = [
    ("seed: 7", "seed: 8", "content_sha256: "),
    ("    recall: 0.93", "    recal: 0.93", "search.summary.recall: "),
    ("evidence:", "evidenc:", "evidence: missing"),
    ("  name: tiny", "  name: tiny\n  name: other", "line 7: the key 'name'"),
    ("bs_9: {", "bs_8: {kind: dense}\n  bs_9: {", "patterns.bs_8 "),
    ("schema_version: 1", "schema_version: 9", "schema_version: this headwise reads 1, got 9"),
    ("schema_version: 1", "schema_version: true", "got True"),
    ("schema_version: 1", "version: 2", "got None"),
    ("sidecar: {file: cfg", "sidecar: {file: other", "sidecar.file: 'other."),
    (None, "", "the file is empty"),
    (None, b"\xff\xfe\x00", "not UTF-8 text"),
    (None, "just text", "must be a mapping"),
    (None, "a: [1", "line "),
    (None, "schema_version: 1", "created_at: missing"),
    (None, "#" * (16 * 2**20 + 1), "more than 16777216 bytes"),
]


@pytest.mark.parametrize(("old", "new", "says"), EDITS, ids=range(len(EDITS)))
def test_load_of_an_edited_file_names_the_field(saved, old, new, says):
    text = saved.read_text()
    if old is not None:
        assert text.count(old) == 1
        new = text.replace(old, new)
    saved.write_bytes(new if isinstance(new, bytes) else new.encode())
    refused = line(saved)
    assert refused.startswith(f"{saved}: ") and says in refused


def test_load_of_a_file_of_another_version_says_search_again(saved):
    fields = strict_yaml.parse(saved.read_bytes())
    fields["prefill"]["stride"] = fields["prefill"].pop("dense_tail")
    saved.write_text(as_yaml(fields))
    assert "another version" not in line(saved)
    fields["content_sha256"] = content_sha256(fields)
    saved.write_text(as_yaml(fields))
    refused = line(saved)
    assert "prefill.stride: " in refused and "another version of headwise" in refused


def test_load_of_a_missing_file_directory_or_device_is_refused(tmp_path):
    assert "is a directory" in line(tmp_path)
    assert "no regular file" in line(os.devnull)
    assert "a\\nb: no such file" in line(tmp_path / "a\nb")


def test_load_with_a_missing_or_changed_sidecar_is_refused(saved):
    (sidecar,) = saved.parent.glob("*.safetensors")
    data = sidecar.read_bytes()
    sidecar.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    for read in (load, load_arrays, rehash):
        with pytest.raises(ArtifactError, match=r"sidecar\.sha256: "):
            read(saved)
    sidecar.unlink()
    for read in (load, load_arrays, rehash):
        with pytest.raises(ArtifactError, match=r"sidecar\.file: .* missing"):
            read(saved)
    assert load(saved, check_sidecar=False).model.name == "tiny"


def with_sidecar(path, file, data):
    """Name the file in the YAML, with its right hash, and write it."""
    fields = strict_yaml.parse(path.read_bytes())
    fields["sidecar"] = {"file": file, "sha256": sha256(data).hexdigest()}
    fields["content_sha256"] = content_sha256(fields)
    path.write_text(strict_yaml.dump(fields))
    if file == "x.safetensors":
        path.with_name(file).write_bytes(data)


@pytest.mark.parametrize(
    "name",
    ["../cfg.safetensors", "/etc/passwd", "..\\cfg.safetensors", "..", "c:y.safetensors",
     "y.safetensors/", "y.safetensors\0", "passwd"],
)  # fmt: skip
def test_load_with_a_sidecar_in_another_folder_is_refused(saved, name):
    with_sidecar(saved, name, b"")
    assert "sidecar.file: " in line(saved)


# An array of the sidecar, its change (None removes it), and a part of the error.
ARRAYS = [
    ("calibration.seen_windows", lambda a: None, "says 2, "),
    ("chosen.recall", lambda a: np.full((5, 4), 0.5), "in layer 1: "),
    ("chosen.recall", lambda a: np.full((5, 4), np.nan), "in layer 0: "),
    ("chosen.recall", lambda a: a[:4], "(4, 4), the model has 5 layers of 4 heads"),
    ("candidates.0.recall", lambda a: np.ones((5, 3)), "(5, 3), the model has 5 layers"),
    ("imported.full_attention", lambda a: np.ones((5, 4)), "5 layers of 2 heads"),
]


@pytest.mark.parametrize(("name", "change", "says"), ARRAYS)
def test_save_and_load_refuse_wrong_arrays(tmp_path, every_kind, monkeypatch, name, change, says):
    """Refused when they are written, and when a file that another writer made is read."""
    artifact, arrays = every_kind
    arrays[name] = change(arrays.get(name))
    arrays = {key: array for key, array in arrays.items() if array is not None}
    path = tmp_path / "cfg.yaml"
    with pytest.raises(ArtifactError) as refused:
        save(artifact, path, arrays)
    assert says in str(refused.value) and list(tmp_path.iterdir()) == []
    with monkeypatch.context() as unchecked:
        unchecked.setattr("artifacts.store.write.check_arrays", lambda artifact, arrays: None)
        save(artifact, path, arrays)
    assert says in line(path)


def test_load_of_a_pipe_or_device_is_refused_at_once(saved, tmp_path):
    (sidecar,) = saved.parent.glob("*.safetensors")
    sidecar.unlink()
    os.mkfifo(sidecar)
    assert "cannot be read, is no regular file" in line(saved)
    sidecar.unlink()
    sidecar.symlink_to("/dev/zero")
    assert "is no regular file" in line(saved)
    os.mkfifo(tmp_path / "pipe.yaml")
    assert "pipe.yaml: cannot be read, is no regular file" in line(tmp_path / "pipe.yaml")


@pytest.mark.skipif(
    not Path("/proc/self/pagemap").exists(), reason="needs a file that says nothing of its size"
)
def test_load_of_a_file_without_a_size_stops_at_the_limit(saved, monkeypatch):
    """Regular, of size 0 and hundreds of gigabytes long."""
    monkeypatch.setattr("artifacts.store.sidecar.MAX_SIDECAR", 2**20)
    monkeypatch.setattr("artifacts.store.read.MAX_BYTES", 2**20)
    (sidecar,) = saved.parent.glob("*.safetensors")
    for file in (sidecar, saved):
        file.unlink()
        file.symlink_to("/proc/self/pagemap")
        assert "has more than 1048576 bytes" in line(saved)


SIZE = 10 * 2**20
LAUGHS = b"".join(b"a%d: &a%d [%s]\n" % (i, i, b"*a%d," % (i - 1) * 9) for i in range(1, 10))
# In place of the YAML, each a unit that is repeated to 10 MiB.
TEXTS = {
    "flow depth": b"[",
    "block depth": b"- ",
    "blank": b" \n",
    "documents": b"---\n",
    "zeros": b"\0",
    "directives": b"%TAG !a! x\n",
    "directives behind other line breaks": b"\xc2\x85%TAG !a! x",
    "list": b"[1" + b",1" * 8000,
    "laughs": LAUGHS,
    "one text": "\U0001f4a5".encode(),
    "pairs": b"- {a: 1}\n",
}
LETTERS = str.maketrans("0123456789", "abcdefghij")
POLICY = {"kind": "h2o", "heavy": "x", "recent": "x", "normalised": 5}


def counted(heads):
    """Changes to a model of `heads` heads."""
    prefill = {"dense_below": 0, "dense_tail": 0, "layers": [None] * 17}
    cache = {"policies": {"full": {"kind": "full"}}, "layers": ["full"] * 17, "imported": None}

    def change(fields):
        fields["model"].update(num_heads=heads, num_kv_heads=heads, num_layers=17)
        fields.update(patterns={}, search=None, prefill=fields["prefill"] | prefill)
        fields.update(decode=None, kv_cache=cache)

    return change


# In a file that is laid out as an artifact, with the right hash: validation has to stop them.
FIELDS = {
    "wrong names": lambda f: f["prefill"].update(layers=[[5] * 4000] * 24),
    "unknown names": lambda f: f["prefill"].update(layers=[["y" * 64] * 4000] * 24),
    "unknown fields": lambda f: f.update({f"field{i}": 1 for i in range(16_000)}),
    "long names": lambda f: f["patterns"].update(
        {f"p{i:04}" * 180: {"kind": "dense"} for i in range(4_000)}
    ),
    "patterns without sizes": lambda f: f.update(
        patterns={f"p{i}": {"kind": "a_shape"} for i in range(16_000)}
    ),
    "near misses": lambda f: f.update(
        patterns={f"{i:05}".translate(LETTERS) * 12: {"kind": "dense"} for i in range(16_000)}
    ),
    "wrong policies": lambda f: f["kv_cache"].update(
        policies={f"p{i}": POLICY for i in range(10_000)}
    ),
    "deep rope": lambda f: f["model"].update(
        rope={f"k{i}": [[[[[1e300] * 9] * 5]]] for i in range(1_500)}
    ),
    "counts without end": counted(10**8),
    "counts beyond floats": counted(10**20),
}


# Like patterns without sizes, these have too many wrong values.
TOO_MANY = ("wrong names", "wrong policies")
# Half a second each.
SLOW = ("unknown names", "near misses", "deep rope")
ONCE = [name for name in FIELDS if name not in (*TOO_MANY, *SLOW)]


def header(entries, data=b""):
    text = entries
    if not isinstance(entries, bytes):
        text = json.dumps(entries, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text + data


def array_of(shape, end):
    return header({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}}, b"x")


EMPTY = {"dtype": "I8", "shape": [0], "data_offsets": [0, 0]}
SPELLED = b'"%06x":{"dtype":"I8","shape":[0],"data\\u005foffsets":[0,0]}'
# In place of the sidecar; the YAML names its right hash.
SIDECARS = {
    "nonsense": b"nonsense",
    "many arrays": header({f"{i:x}": EMPTY for i in range(SIZE // 65)}),
    "many arrays, spelled otherwise": header(
        b"{" + b",".join(SPELLED % i for i in range(90_000)) + b"}"
    ),
    "long header": header({"x" * (SIZE - 100): EMPTY}),
    "header that lies": struct.pack("<Q", 2**63) + bytes(SIZE),
    "array larger than the file": array_of([2**40], 2**42),
    "many dimensions": array_of([1] * 100_000, 4),
    "larger than any": bytes(2**26 + 1),
}


def costs_little(read):
    """Report of read() in a separate process, limited to 150 MiB more and 10 s of CPU time."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        used = resource.getrusage(resource.RUSAGE_SELF)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + 150 * 2**20
        seconds = int(used.ru_utime + used.ru_stime) + 11
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        try:
            said = f"read: {read()}"
        except artifacts.HeadwiseError as error:
            said = f"refused: {error}"
        except BaseException as error:
            said = f"crash: {error!r:.300}"
        os.write(writing, said.encode()[:4000])
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as stream:
        said = stream.read().decode()
    assert os.waitpid(child, 0)[1] == 0
    return said


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.parametrize("name", sampled([*TEXTS, *FIELDS, *SIDECARS], *TEXTS, *ONCE, *SIDECARS))
def test_load_of_a_hostile_file_is_refused_within_memory_and_time(saved, name):
    if name in TEXTS:
        begin = b"a: '" if name == "one text" else b""
        saved.write_bytes(begin + TEXTS[name] * (SIZE // len(TEXTS[name])))
    elif name in FIELDS:
        fields = load(HERE / "golden" / "v1.yaml").model_dump(mode="json") | {"sidecar": None}
        FIELDS[name](fields)
        if name != "counts beyond floats":
            content = canonical_json(content_of(fields))
            fields["content_sha256"] = sha256(content).hexdigest()
        saved.write_bytes(as_yaml(fields, ensure_ascii=False).encode())
    else:
        with_sidecar(saved, "x.safetensors", SIDECARS[name])
    said = costs_little(lambda: load_pair(saved))
    assert said.startswith(f"refused: {saved}: ") and said.isprintable() and len(said) < 1000, said
    if name in ("wrong names", "patterns without sizes"):
        assert "fields are not as the schema has them" in said


LARGE = ("windows far away", "much evidence", "a sidecar of 50 MiB")


def large():
    """Artifacts that are as large, or as odd, as they may be, and the arrays of one."""
    small, _ = build_every_kind()
    wide = {"num_layers": 16, "num_heads": 1024, "num_kv_heads": 8, "max_positions": 2**31 - 1}
    windows = [artifacts.AShape(sink=64, window=64 + 4096 * i) for i in range(500)]
    named = [f"p{i}" for i in range(500)]
    rows = tuple(tuple(f"p{(1024 * i + head) % 500}" for head in range(1024)) for i in range(16))
    far = small.model_copy(
        update={
            "patterns": {f"p{i}": pattern for i, pattern in enumerate(windows)},
            "prefill": artifacts.Prefill(dense_below=2**23, layers=rows),
            "search": counting(build().search, rows, {name: windows[0] for name in named}),
            "model": small.model.model_copy(update=wide),
            **{"decode": None, "kv_cache": None},
        }
    )
    entry = small.evidence.measurements[0].model_copy(update={"name": "\U0001f4a5\x85" * 300})
    many = tuple(entry.model_copy(update={"value": float(i)}) for i in range(600))
    zeros = np.zeros((1, SIZE * 5 // 2), dtype=np.int8)
    return {
        "windows far away": (far, {}),
        "much evidence": (build(evidence=artifacts.Evidence(measurements=many)), {}),
        "a sidecar of 50 MiB": (build(), {"similarity.mass": zeros, "imported.prefill": zeros}),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(LARGE, LARGE[0]))
def test_commands_on_the_largest_artifacts_succeed(tmp_path, name):
    artifact, arrays = large()[name]
    save(artifact, tmp_path / "cfg.yaml", arrays)
    for verb, files in (("show", 1), ("validate", 1), ("diff", 2)):
        words = [verb, *[str(tmp_path / "cfg.yaml")] * files]
        said = costs_little(lambda words=words: main(words))
        assert said in ("read: 0", f"read: {FOUND}"), verb
