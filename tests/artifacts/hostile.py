"""python -m tests.artifacts.hostile: files of up to 10 MiB made to break a reader, and what reading each one costs.

Each file is read in a process of its own, forked from one that has read an artifact already, so that what it costs is
what this file adds: seconds of the processor, and the growth of the largest resident set.
"""

from __future__ import annotations

import json
import os
import resource
import struct
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import artifacts
from artifacts import strict_yaml
from artifacts.hashing import content_sha256
from artifacts.schema import SCHEMA_VERSION
from tests.artifacts.conftest import as_yaml, build, build_arrays

SIZE = 10 * 2**20
SECONDS = 2
MIB = 100


def _fill(unit: str | bytes, size: int = SIZE) -> bytes:
    unit = unit.encode() if isinstance(unit, str) else unit
    return unit * (size // len(unit))


def yaml_files() -> Iterator[tuple[str, bytes]]:
    """Hostile files in place of the YAML, by name."""
    yield "flow depth", _fill("[")
    yield "flow mappings", _fill("{a: ")
    yield "block depth", _fill("- ")
    yield "question marks", _fill("? ")
    yield "aliases", b"a: &a [x]\nb: &b [" + _fill("*a,")
    yield "laughs", b"".join(b"a%d: &a%d [%s]\n" % (i, i, b"*a%d," % (i - 1) * 9) for i in range(1, 10))
    yield "anchors", b"".join(b"- &a%d x\n" % i for i in range(SIZE // 12))
    yield "directives", b"".join(b"%%TAG !a%d! x\n" % i for i in range(SIZE // 15))
    yield "directives behind other line breaks", "".join(f"\x85%TAG !a{i}! x" for i in range(SIZE // 17)).encode()
    yield "list", b"[" + _fill("1,")
    yield "lists", b"[[" + b"], [".join([b"1," * 4000] * (SIZE // 8004)) + b"]]"
    yield "pairs", b"{" + b",".join(b"k%d: 1" % i for i in range(SIZE // 12))
    yield "one key", _fill("k") + b": 1"
    yield "one text", b"schema_version: '" + _fill("\U0001f4a5") + b"'"
    yield "one escaped text", b'schema_version: "' + _fill(r"\U0001F4A5") + b'"'
    yield "one plain text", b"schema_version: " + _fill("word ")
    yield "one number", b"schema_version: " + _fill("9")
    yield "blank", _fill(" \n")
    yield "comments", _fill("#\n")
    yield "documents", _fill("---\n")
    yield "document ends", _fill("...\n")
    yield "zeros", _fill(b"\0")
    yield "not UTF-8", _fill("x") + b"\xff"
    yield "percent signs", b"a: " + _fill("% ")
    yield "tags", b"[" + _fill("!!python/object/apply:os.system [x],")


def _example() -> Path:
    return Path(__file__).parent / "golden" / f"v{SCHEMA_VERSION}.yaml"


def artifact_files() -> Iterator[tuple[str, bytes]]:
    """Hostile fields in a file that is laid out as an artifact, with the right hash: validation has to stop them."""
    for name, change in (
        ("wrong names", lambda f: f["prefill"].update(layers=[[5] * 4000] * 24)),
        ("unknown names", lambda f: f["prefill"].update(layers=[["y" * 64] * 4000] * 24)),
        ("wrong points", lambda f: f["prefill"]["front"].update(points=[{"cost": "x"}] * 4096)),
        ("points with rows", lambda f: f["prefill"]["front"]["points"][0].update(layers=[["y" * 64] * 4000] * 20)),
        ("wrong rows", lambda f: f["prefill"].update(layers=[5] * 4096)),
        ("unknown fields", lambda f: f.update({f"field{i}": 1 for i in range(16_000)})),
        ("unknown fields of a pattern", lambda f: f["patterns"]["bs_9"].update({f"x{i}": 1 for i in range(16_000)})),
        ("long names", lambda f: f["patterns"].update({f"p{i:04}" * 180: {"kind": "dense"} for i in range(4_000)})),
        ("patterns without sizes", lambda f: f.update(patterns={f"p{i}": {"kind": "strided"} for i in range(16_000)})),
        (
            "near misses",
            lambda f: f.update(patterns={f"{i:05}".translate(_LETTERS) * 12: {"kind": "dense"} for i in range(16_000)}),
        ),
        ("empty evidence", lambda f: f["evidence"].update(measurements=[{}] * 4096, tasks=[{}] * 4096)),
        ("wrong cache rows", lambda f: f["kv_cache"].update(layers=[[5] * 4000] * 24)),
        ("wrong policies", lambda f: f["kv_cache"].update(policies={f"p{i}": _POLICY for i in range(16_000)})),
        ("deep rope", lambda f: f["model"].update(rope={f"k{i}": [[[[[1e300] * 9] * 5]]] for i in range(1_500)})),
        ("long texts", lambda f: f["search"].update({f"t{i}": "\U0001f4a5" * 16_000 for i in range(160)})),
        ("huge numbers", lambda f: f["model"].update(num_layers=10**39, num_heads=10**39)),
        ("fields of no version", lambda f: f.update(patterns=[], evidence=7)),
    ):
        fields = artifacts.load(_example()).model_dump(mode="json") | {"sidecar": None}
        change(fields)
        with suppress(ValueError):
            fields["content_sha256"] = content_sha256(fields)
        yield name, as_yaml(fields, ensure_ascii=False).encode()


_POLICY = {"kind": "h2o", "heavy": "x", "recent": "x", "normalised": 5}
_LETTERS = str.maketrans("0123456789", "abcdefghij")


def _header(entries: dict[str, Any] | bytes, data: bytes = b"") -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text + data


def sidecar_files() -> Iterator[tuple[str, bytes]]:
    """Hostile sidecars; the YAML beside them names their right hash."""
    empty = {"dtype": "I8", "shape": [0], "data_offsets": [0, 0]}
    yield "many arrays", _header({f"{i:x}": empty for i in range(SIZE // 65)})
    yield "as many arrays as may be", _header({f"{i:x}": empty for i in range(39_999)})
    yield "deep header", _header(_fill("["))
    yield "long header", _header({"x" * (SIZE - 100): empty})
    yield "long metadata", _header({"__metadata__": {f"k{i}": "v" for i in range(375_000)}})
    yield "header of zeros", bytes(SIZE)
    yield "header that lies", struct.pack("<Q", 2**63) + bytes(SIZE)
    yield "header of ten bytes more", struct.pack("<Q", SIZE + 10) + bytes(SIZE)
    yield "array larger than the file", _header({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}})
    yield "huge empty shape", _header({"a": {"dtype": "F32", "shape": [0, 2**60, 2**60], "data_offsets": [0, 0]}})
    yield "many dimensions", _header({"a": {"dtype": "I8", "shape": [1] * 100_000, "data_offsets": [0, 1]}}, b"x")
    yield "one large array", _header({"a": {"dtype": "I8", "shape": [SIZE], "data_offsets": [0, SIZE]}}, bytes(SIZE))


def write_all(folder: Path) -> Iterator[tuple[str, Path]]:
    """Every hostile artifact in a folder of its own: its name, and the YAML file."""
    for number, (name, data) in enumerate((*yaml_files(), *artifact_files())):
        (folder / str(number)).mkdir()
        path = folder / str(number) / "cfg.yaml"
        path.write_bytes(data)
        yield name, path
    for name, data in sidecar_files():
        path = folder / name / "cfg.yaml"
        path.parent.mkdir()
        artifacts.save(build(), path, build_arrays())
        fields = strict_yaml.parse(path.read_bytes())
        fields["sidecar"] = {"file": "x.safetensors", "sha256": sha256(data).hexdigest()}
        fields["content_sha256"] = content_sha256(fields)
        path.write_text(strict_yaml.dump(fields))
        path.with_name("x.safetensors").write_bytes(data)
        yield name, path


def cost(path: Path) -> dict[str, Any]:
    """What loading the artifact says and costs: seconds of the processor, MiB, and its line, or None where it loads."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.close(reading)
        before = resource.getrusage(resource.RUSAGE_SELF)
        seconds = before.ru_utime + before.ru_stime
        # A hang ends here, with a signal; the limit counts whole seconds.
        most = int(seconds) + SECONDS + 1
        resource.setrlimit(resource.RLIMIT_CPU, (most, most))
        said: dict[str, Any]
        try:
            artifacts.load_pair(path)
            said = {"line": None}
        except artifacts.ArtifactError as error:
            said = {"line": str(error)}
        except BaseException as error:
            said = {"line": None, "crash": repr(error)[:500]}
        after = resource.getrusage(resource.RUSAGE_SELF)
        said["seconds"] = after.ru_utime + after.ru_stime - seconds
        said["mib"] = (after.ru_maxrss - before.ru_maxrss) / 1024
        os.write(writing, json.dumps(said).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as stream:
        data = stream.read()
    _, status = os.waitpid(child, 0)
    return json.loads(data) if data else {"line": None, "crash": f"ended with status {status}"}


def main() -> None:
    """Print a JSON line for each file."""
    artifacts.load_pair(_example())
    with tempfile.TemporaryDirectory() as folder:
        # Made by another process: the one that reads must not have held them.
        if (maker := os.fork()) == 0:
            try:
                names = {name: str(path) for name, path in write_all(Path(folder))}
                (Path(folder) / "names.json").write_text(json.dumps(names))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        if os.waitpid(maker, 0)[1]:
            sys.exit("the hostile files could not be made")
        for name, path in json.loads((Path(folder) / "names.json").read_text()).items():
            print(json.dumps({"name": name, **cost(Path(path))}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
