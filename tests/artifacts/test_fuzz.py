"""Mutated artifacts and other tools' files: refused in one line, or read correctly.

`FUZZ=200000 pytest tests/artifacts/test_fuzz.py` is a long run.

Most mutants are whole YAML files with whole sidecars and right hashes, so only validation finds the
fault. Others fail early: text that is no YAML, a wrong header, a hash of something else.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import re
import signal
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

import artifacts
from artifacts import ArtifactError, HeadwiseError
from artifacts.commands import convert, diff, show, validate
from artifacts.store import strict_yaml
from artifacts.store.hashing import content_sha256
from tests.artifacts.conftest import (
    as_yaml,
    build,
    build_arrays,
    build_every_kind,
    hash_by_other_tools,
)

COUNT = int(os.environ.get("FUZZ", 300))
# Seconds of the processor for one mutant, which takes milliseconds; a busy machine makes nothing
# hang.
HANG = 20
FILES = Path(__file__).parent / "interop"
TEXTS = (
    "", "dense", "../x.safetensors", "/etc/passwd", "x.safetensors", "a" * 64,
    "a" * 65, "0" * 64, "\0",
    "\u2028", "\x1b[31m", "\U0001f4a5", "1e5", "null", "2025-01-31T12:00:00Z",
    "chosen.recall", "kv_retrieval",
)  # fmt: skip
NUMBERS = (
    0, -1, 1, 2, 3, 2**31, 2**63, 2**64, 10**39, -0.0, 0.5, 1.0, 1.0001, 1e308, 5e-324,
    float("nan"), float("inf"),
)  # fmt: skip
SNIPPETS = (
    b"&a ", b"*a", b"!!python/name:os.system ", b"!!int ", b"\n---\n", b"\n...\n", b"\n%TAG ! x\n",
    b"? ", b"<<: ",
    b"\t", b"\0", b"\xef\xbb\xbf", b"\xff", b"\xc2\x85", b"\xe2\x80\xa8", b"[", b"]", b"{", b"}",
    b"'", b'"', b"|\n",
    b">-\n", b"#", b": ", b"- ", b",", b"\r", b"\\x00", b"schema_version: 2\n", b"[" * 40,
)  # fmt: skip
ENTRIES = (
    {"dtype": "F64"}, {"dtype": "BF16"}, {"dtype": "F8_E4M3"}, {"dtype": "X"}, {"dtype": None},
    {"shape": [2**40]},
    {"shape": [-1]}, {"shape": []}, {"shape": [0, 2**60]}, {"shape": "x"}, {"data_offsets": [0,
    2**63]}, {"more": 1},
    {"data_offsets": [8, 0]}, {"data_offsets": [0, 0]}, {"data_offsets": []}, {"shape": [1] * 70},
)  # fmt: skip


def bases(folder: Path) -> list[tuple[str, bytes]]:
    """Fields as JSON and sidecar bytes: a small artifact, every kind, and one without arrays."""
    result = []
    path = folder / "cfg.yaml"
    for artifact, arrays in ((build(), build_arrays()), build_every_kind(), (build(), None)):
        saved = artifacts.save(artifact, path, arrays)
        data = b"" if saved.sidecar is None else path.with_name(saved.sidecar.file).read_bytes()
        result.append((json.dumps(strict_yaml.parse(path.read_bytes())), data))
    return result


def mutant(chance: random.Random, sources: list[tuple[str, bytes]]) -> tuple[bytes, bytes | None]:
    """Bytes of cfg.yaml, and of the sidecar that it names; None: there is none."""
    text, data = chance.choice(sources)
    fields = json.loads(text)
    kinds = chance.choices(("field", "field", "field", "sidecar", "text"), k=chance.randint(1, 4))
    for _ in range(kinds.count("field")):
        change_field(chance, fields)
    for _ in range(kinds.count("sidecar")):
        data = change_sidecar(chance, data)
    # Hashes are mostly made right, or nothing but hashes would ever be tested.
    if isinstance(fields.get("sidecar"), dict) and chance.randrange(3):
        fields["sidecar"]["sha256"] = hashlib.sha256(data).hexdigest()
    if chance.randrange(4):
        try:
            fields["content_sha256"] = content_sha256(fields)
        except (AttributeError, KeyError, TypeError, ValueError):
            fields["content_sha256"] = None
    lines = (f"{json.dumps(key)}: {as_yaml(value)}" for key, value in fields.items())
    written = "\n".join(lines).encode()
    for _ in range(kinds.count("text")):
        written = change_text(chance, written)
    return written, None if chance.randrange(20) == 0 else data


def value(chance: random.Random) -> Any:
    kind = chance.randrange(9)
    if kind < 3:
        return chance.choice(TEXTS)
    if kind < 6:
        return chance.choice(NUMBERS)
    if kind == 6:
        return [value(chance) for _ in range(chance.randrange(3))]
    if kind == 7:
        return {chance.choice(TEXTS): value(chance) for _ in range(chance.randrange(3))}
    return chance.choice((None, True, False))


def change_field(chance: random.Random, fields: Any) -> None:
    """Change one field somewhere, in place."""
    node = fields
    while node:
        key = chance.choice(list(node)) if isinstance(node, dict) else chance.randrange(len(node))
        child = node[key]
        if not (isinstance(child, dict | list) and child and chance.randrange(5)):
            break
        node = child
    else:
        return
    act = chance.randrange(10)
    if act <= 4:
        node[key] = value(chance)
    elif act == 5:
        del node[key]
    elif act == 6:
        node[key] = [child] if chance.random() < 0.5 else {"kind": child}
    elif act == 7 and isinstance(child, int | float):
        node[key] = child + chance.choice((-1, 1, 0.5, 10**6))
    elif isinstance(node, dict):
        node[chance.choice((*TEXTS, *map(str, fields)))] = copy.deepcopy(child)
    else:
        node.insert(key, copy.deepcopy(child))


def change_sidecar(chance: random.Random, data: bytes) -> bytes:
    act = chance.randrange(8)
    if act == 0:
        return data[: chance.randint(0, len(data))]
    if act == 1:
        return data + chance.randbytes(chance.randint(1, 8))
    if act == 2:
        return (
            struct.pack("<Q", chance.choice((0, 1, 8, len(data), 2**31, 2**63, 2**64 - 1)))
            + data[8:]
        )
    if act <= 5 and data:
        # Mostly among the numbers, where no format notices.
        place = chance.randrange(0 if act == 5 else len(data) // 4 * 3, len(data))
        return data[:place] + chance.randbytes(1) + data[place + 1 :]
    try:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        name = chance.choice(sorted(header))
        entry = header[name] | chance.choice(ENTRIES)
    except (ValueError, TypeError, IndexError):
        return data
    header[
        name
        if chance.random() < 0.5
        else chance.choice(("__metadata__", "static.mean.columns", "", "x"))
    ] = entry
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def change_text(chance: random.Random, text: bytes) -> bytes:
    place = chance.randint(0, len(text))
    length = chance.choice((0, 1, 1, 2, 20, 200, 10**6))
    act = chance.randrange(4)
    if act == 0:
        return text[:place] + text[place + max(1, length) :]
    if act == 1:
        return text[:place] + text[place : place + length] + text[place:]
    if act == 2:
        return text[:place] + chance.randbytes(chance.randint(1, 4)) + text[place + 1 :]
    return text[:place] + chance.choice(SNIPPETS) + text[place:]


def judge(folder: Path, text: bytes, data: bytes | None) -> str:
    """Outcome of a mutant in a word; raises where it is wrong."""
    path = folder / "cfg.yaml"
    path.write_bytes(text)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    stated = sidecar_of(text)
    named = stated.get("file", "")
    if data is not None and re.fullmatch(r"[\w.-]{1,200}\.safetensors", named):
        (folder / named).write_bytes(data)
    try:
        artifact, arrays = artifacts.load_pair(path)
    except ArtifactError as error:
        line = str(error)
        assert line.isprintable() and line.startswith(str(path)) and len(line) < 1200, line
        return next(
            (kind for kind in ("content_sha256", "sidecar", "YAML") if kind in line), "a field"
        )
    assert artifact.content_sha256 == hash_by_other_tools(strict_yaml.parse(text)), (
        "the content's hash is another"
    )
    if artifact.sidecar is None:
        assert arrays == {}
    else:
        right = data is not None and stated["sha256"] == hashlib.sha256(data).hexdigest()
        assert right, "the sidecar's hash is another"
    again_at = folder / "again.yaml"
    again = artifacts.save(artifact, again_at, arrays)
    # Another writer's sidecar may be laid out in another way.
    by_place = {"sidecar", "content_sha256"}
    assert again.model_dump(exclude=by_place) == artifact.model_dump(exclude=by_place)
    pair = {"before": path, "after": again_at}
    for verb, files in ((show, {"file": path}), (validate, {"file": path}), (diff, pair)):
        try:
            verb.run(verb.Config(**files))
        except HeadwiseError as error:
            assert str(error).isprintable(), verb
    return "loaded"


def sidecar_of(text: bytes) -> dict[str, str]:
    """The section of the text as PyYAML reads it, all values as text."""
    try:
        section = yaml.load(text, Loader=yaml.CBaseLoader)["sidecar"]
        return {key: value for key, value in section.items() if isinstance(value, str)}
    except (yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError, IndexError):
        return {}


def test_load_of_a_mutant_is_refused_or_matches_its_hashes(tmp_path):
    sources = bases(tmp_path)
    seen: Counter[str] = Counter()
    for seed in range(COUNT):
        # It ends the process; a timer that is left running would end whatever runs then.
        signal.setitimer(signal.ITIMER_PROF, HANG)
        try:
            seen[judge(tmp_path, *mutant(random.Random(seed), sources))] += 1
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    # Mutants that all end in the same way would be poor ones.
    for kind in ("loaded", "content_sha256", "sidecar", "a field", "YAML"):
        assert seen[kind] > COUNT // 150, seen


@pytest.mark.parametrize("name", ["head_patterns.json", "full_attention_heads.tsv", "config"])
def test_convert_of_a_mutated_file_is_refused_or_valid(tmp_path, name):
    """Read correctly or refused in one line, the model's configuration too."""
    model = (FILES / "model.json").read_bytes()
    heads = (FILES / (name if name != "config" else "head_patterns.json")).read_bytes()
    file = tmp_path / f"file{Path(name).suffix or '.json'}"
    config = tmp_path / "config.json"
    out = tmp_path / "o.yaml"
    for seed in range(COUNT // 10):
        chance = random.Random(seed)
        data = heads if name != "config" else model
        if chance.randrange(2) and not name.endswith(".tsv"):
            fields = json.loads(data)
            change_field(chance, fields)
            data = json.dumps(fields).encode()
        else:
            data = change_text(chance, data)
        file.write_bytes(heads if name == "config" else data)
        config.write_bytes(data if name == "config" else model)
        out.unlink(missing_ok=True)
        try:
            convert.run(convert.Config(file=file, out=out, config=config))
        except ArtifactError as error:
            assert "\n" not in str(error) and len(str(error)) < 1000 and not out.exists(), seed
        else:
            artifacts.load_pair(out)
            validate.run(validate.Config(file=out))
