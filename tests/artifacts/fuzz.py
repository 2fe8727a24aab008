"""python -m tests.artifacts.fuzz [COUNT [SEED]]: loads mutated artifacts, and looks at what is made of each.

Structure-aware: most mutants are whole YAML files with whole sidecars and right hashes, so that what is wrong with them
is found late, by validation; others have one thing wrong early: text that is no YAML, a header that lies, a hash of
something else. Whatever it is, a mutant is refused in one line, or it is what its hashes say, can be saved again, and
can be shown. A crash or anything else is shrunk and printed by hypothesis; a hang ends the process with its stack.
"""

from __future__ import annotations

import copy
import faulthandler
import hashlib
import json
import random
import re
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rfc8785
import yaml
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import artifacts
from artifacts import ArtifactError, strict_yaml
from artifacts.commands import diff, show, validate
from artifacts.hashing import content_sha256
from tests.artifacts.conftest import as_yaml, build, build_arrays, build_every_kind

# Hypothesis remembers what it has tried, which takes memory and time: many short runs rather than a long one.
BATCH = 2_000
# Seconds of the processor for one mutant, which takes milliseconds; a busy machine makes nothing hang.
HANG = 20
GOLDEN = Path(__file__).parent / "golden"

TEXTS = (
    "", "dense", "static_mean", "../x.safetensors", "/etc/passwd", "x.safetensors", "a" * 64, "a" * 65, "0" * 64, "\0",
    "\u2028", "\x1b[31m", "\U0001f4a5", "1e5", "null", "2025-01-31T12:00:00Z", "static.mean.columns",
    "kv_retrieval",
)  # fmt: skip
NUMBERS = (
    0, -1, 1, 2, 3, 2**31, 2**63, 2**64, 10**39, -0.0, 0.5, 1.0, 1.0001, 1e308, 5e-324, float("nan"), float("inf"),
)  # fmt: skip
SNIPPETS = (
    b"&a ", b"*a", b"!!python/name:os.system ", b"!!int ", b"\n---\n", b"\n...\n", b"\n%TAG ! x\n", b"? ", b"<<: ",
    b"\t", b"\0", b"\xef\xbb\xbf", b"\xff", b"\xc2\x85", b"\xe2\x80\xa8", b"[", b"]", b"{", b"}", b"'", b'"', b"|\n",
    b">-\n", b"#", b": ", b"- ", b",", b"\r", b"\\x00", b"schema_version: 2\n", b"[" * 40,
)  # fmt: skip
ENTRIES = (
    {"dtype": "F64"}, {"dtype": "BF16"}, {"dtype": "F8_E4M3"}, {"dtype": "X"}, {"dtype": None}, {"shape": [2**40]},
    {"shape": [-1]}, {"shape": []}, {"shape": [0, 2**60]}, {"shape": "x"}, {"data_offsets": [0, 2**63]}, {"more": 1},
    {"data_offsets": [8, 0]}, {"data_offsets": [0, 0]}, {"data_offsets": []}, {"shape": [1] * 70},
)  # fmt: skip
_WORD = re.compile(r'"([A-Za-z][A-Za-z0-9_.]*)"')


class Base:
    """A whole artifact to be mutated: its fields as JSON, and the bytes of its sidecar."""

    def __init__(self, path: Path) -> None:
        self.fields = json.dumps(strict_yaml.parse(path.read_bytes()))
        sidecar = json.loads(self.fields)["sidecar"]
        self.data = b"" if sidecar is None else path.with_name(sidecar["file"]).read_bytes()


def bases() -> list[Base]:
    """One of each schema version, one of every kind of pattern, and one without a sidecar."""
    found = [Base(path) for path in sorted(GOLDEN.glob("v*.yaml"))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cfg.yaml"
        for artifact, arrays in ((build(), build_arrays()), build_every_kind(), (build(), None)):
            artifacts.save(artifact, path, arrays)
            found.append(Base(path))
    return found


@st.composite
def mutants(draw: Callable[[Any], Any], known: list[Base]) -> tuple[bytes, bytes | None]:
    """The bytes of a YAML file named cfg.yaml, and those of the sidecar that it names; None: there is none.

    Hypothesis draws, and shrinks, which artifact is changed how often and where; each change is made by a seed of its
    own, as drawing all its parts would take longer than loading what comes of them.
    """
    base = draw(st.sampled_from(known))
    kinds = draw(st.lists(st.sampled_from(("field", "field", "field", "sidecar", "text")), min_size=1, max_size=4))
    chance = random.Random(draw(st.integers(0, 2**64 - 1)))
    fields, data = json.loads(base.fields), base.data
    for _ in range(kinds.count("field")):
        _change_field(chance, fields)
    for _ in range(kinds.count("sidecar")):
        data = _change_sidecar(chance, data)
    # Hashes are mostly made right, or nothing but hashes would ever be tested.
    if isinstance(fields.get("sidecar"), dict) and chance.randrange(3):
        fields["sidecar"]["sha256"] = hashlib.sha256(data).hexdigest()
    if chance.randrange(4):
        fields["content_sha256"] = _hash_or_none(fields)
    text = _written(fields, as_json=chance.random() < 0.5)
    for _ in range(kinds.count("text")):
        text = _change_text(chance, text)
    return text, None if chance.randrange(20) == 0 else data


def _value(chance: random.Random) -> Any:
    kind = chance.randrange(10)
    if kind < 3:
        return chance.choice(TEXTS)
    if kind < 6:
        return chance.choice(NUMBERS)
    if kind == 6:
        return "".join(chr(chance.choice((32, 127, 255, 0x2FFF, 0x10FFFF)) - chance.randrange(30)) for _ in range(4))
    if kind == 7:
        return [_value(chance) for _ in range(chance.randrange(3))]
    if kind == 8:
        return {chance.choice(TEXTS): _value(chance) for _ in range(chance.randrange(3))}
    return chance.choice((None, True, False))


def _change_field(chance: random.Random, fields: dict[str, Any]) -> None:
    """Change one field somewhere, in place."""
    node: Any = fields
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
        node[key] = _value(chance)
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


def _change_sidecar(chance: random.Random, data: bytes) -> bytes:
    act = chance.randrange(9)
    if act == 0:
        return data[: chance.randint(0, len(data))]
    if act == 1:
        return data + chance.randbytes(chance.randint(1, 8))
    if act == 2:
        return struct.pack("<Q", chance.choice((0, 1, 8, len(data), 2**31, 2**63, 2**64 - 1))) + data[8:]
    if 4 <= act <= 6 and data:
        # Mostly among the numbers, where no format notices.
        place = chance.randrange(0 if act == 6 else len(data) // 4 * 3, len(data))
        return data[:place] + chance.randbytes(1) + data[place + 1 :]
    try:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        name = chance.choice(sorted(header))
        entry = header[name] | chance.choice(ENTRIES)
    except (ValueError, TypeError, IndexError):
        return data
    header[name if chance.random() < 0.5 else chance.choice(("__metadata__", "static.mean.columns", "", "x"))] = entry
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def _hash_or_none(fields: dict[str, Any]) -> str | None:
    try:
        return content_sha256(fields)
    except ValueError:
        return None


def _written(fields: dict[str, Any], *, as_json: bool) -> bytes:
    if as_json:
        return as_yaml(fields).encode()
    # Much as strict_yaml.dump lays it out, which would take longer than all that follows: a line for each section and
    # for each of its fields, and no quotes around plain words.
    lines = []
    for key, value in fields.items():
        if isinstance(value, dict) and value:
            lines += [f"{json.dumps(key)}:", *(f"  {json.dumps(k)}: {as_yaml(v)}" for k, v in value.items())]
        else:
            lines.append(f"{json.dumps(key)}: {as_yaml(value)}")
    return _WORD.sub(r"\1", "\n".join(lines) + "\n").encode()


def _change_text(chance: random.Random, text: bytes) -> bytes:
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
    """What became of a mutant, in a word or two; raises AssertionError or what loading raises where it is wrong."""
    path = folder / "cfg.yaml"
    path.write_bytes(text)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    stated = _stated(text)
    named = stated.get("file", "")
    if data is not None and named.endswith(".safetensors") and not set(named) & set("/\\\0:") and len(named) < 200:
        (folder / named).write_bytes(data)
    try:
        artifact, arrays = artifacts.load_pair(path)
    except ArtifactError as error:
        line = str(error)
        assert line.isprintable() and line.startswith(str(path)) and len(line) < 1200, line
        return _kind_of(line[len(str(path)) + 2 :])
    assert stated["content_sha256"] == _hash_of(text), "the content's hash is another"
    if artifact.sidecar is None:
        assert arrays == {}
    else:
        assert data is not None and stated["sha256"] == hashlib.sha256(data).hexdigest(), (
            "the sidecar's hash is another"
        )
    again_at = folder / "again.yaml"
    again = artifacts.save(artifact, again_at, arrays)
    # Another writer's sidecar may be laid out in another way.
    by_place = {"sidecar", "content_sha256"}
    assert again.model_dump(exclude=by_place) == artifact.model_dump(exclude=by_place)
    for verb, files in (
        (show, {"file": path}),
        (validate, {"file": path}),
        (diff, {"before": path, "after": again_at}),
    ):
        try:
            verb.run(verb.Config(**files))
        except artifacts.HeadwiseError as error:
            assert str(error).isprintable(), verb
    return "loaded"


def _stated(text: bytes) -> dict[str, str]:
    """The hashes and the sidecar's name that the text states, read by PyYAML alone, all as text."""
    try:
        fields = yaml.load(text, Loader=getattr(yaml, "CBaseLoader", yaml.BaseLoader))
        sidecar = fields.get("sidecar") if isinstance(fields, dict) else None
    except (yaml.YAMLError, ValueError, TypeError):
        return {}
    found = {"content_sha256": fields.get("content_sha256", "")} if isinstance(fields, dict) else {}
    found |= sidecar if isinstance(sidecar, dict) else {}
    return {key: value for key, value in found.items() if isinstance(value, str)}


def _hash_of(text: bytes) -> str:
    """The content's hash as docs/artifact.md defines it, written down once more."""
    fields = strict_yaml.parse(text)
    for name in ("content_sha256", "created_at"):
        fields.pop(name)
    if fields["search"] is not None:
        fields["search"].pop("command")
    if fields["sidecar"] is not None:
        fields["sidecar"].pop("file")
    for entry in (*fields["evidence"]["measurements"], *fields["costs"]):
        entry.pop("command")
    return hashlib.sha256(rfc8785.dumps(fields)).hexdigest()


def _kind_of(line: str) -> str:
    for kind in ("content_sha256", "sidecar.sha256", "sidecar.file", "schema_version", "not valid YAML", "missing"):
        if kind in line:
            return kind
    return "line N" if line.startswith("line ") else "a field"


def run(count: int, first_seed: int = 0, *, shrink: bool = True) -> Counter[str]:
    """Judge `count` mutants; the same seed gives the same ones. Returns how many ended how."""
    known = bases()
    seen: Counter[str] = Counter()
    # The stack is printed, and then the signal does what it does: it ends the process.
    faulthandler.register(signal.SIGPROF, file=sys.__stderr__, chain=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def attempt(mutant: tuple[bytes, bytes | None]) -> None:
            signal.setitimer(signal.ITIMER_PROF, HANG)
            try:
                seen[judge(folder, *mutant)] += 1
            finally:
                # A timer that is left running would end whatever runs then.
                signal.setitimer(signal.ITIMER_PROF, 0)

        for batch in range(-(-count // BATCH)):
            limits = settings(
                max_examples=min(BATCH, count - batch * BATCH),
                deadline=None,
                database=None,
                phases=(Phase.generate, *((Phase.shrink,) if shrink else ())),
                suppress_health_check=list(HealthCheck),
            )
            seed(first_seed + batch)(limits(given(mutants(known))(attempt)))()
    return seen


def main(arguments: list[str]) -> None:
    """Print how many mutants ended how, and how long it took."""
    count, first_seed = (int(arguments[0]) if arguments else 10_000), (int(arguments[1]) if arguments[1:] else 0)
    started = time.monotonic()
    seen = run(count, first_seed)
    print(json.dumps({"mutants": sum(seen.values()), "seconds": round(time.monotonic() - started), **seen}))


if __name__ == "__main__":
    main(sys.argv[1:])
