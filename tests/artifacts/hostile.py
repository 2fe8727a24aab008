"""python -m tests.artifacts.hostile [--all]: files made to break a reader, and what reading each one costs.

A file is loaded and given to verbs in a process of its own, forked from one that has read an artifact already, so that
what it costs is what this file adds: seconds of the processor, and the growth of the largest resident set.

With --all every file goes to every verb. Without, a file that is refused, which all verbs do by the same call, goes to
two of them in turn, so that each has several; one that is accepted to every verb, and to two converters in turn, the
largest only to those that do more than read it and say no.
"""

from __future__ import annotations

import io
import json
import os
import resource
import struct
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout, suppress
from hashlib import sha256
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

import artifacts
from artifacts import Artifact, strict_yaml
from artifacts.__main__ import main as command
from artifacts.hashing import content_sha256
from artifacts.interop.formats import FORMATS
from artifacts.schema import SCHEMA_VERSION
from artifacts.signing import make_key
from tests.artifacts.conftest import as_yaml, build, build_arrays, build_every_kind

SIZE = 10 * 2**20
SECONDS = 10  # far above what any file takes (2 s on a quiet machine): it ends what hangs
MIB = 100
# Of these, accepted and as large as may be, reading alone takes most of the time that each verb may have.
LARGEST = ("a pattern a head", "much evidence")
MORE_THAN_READ = ("load", "show", "validate", "diff", "set", "merge")
ACCEPTED = (
    "rows of nothing", "a policy for all", "a pattern a head", "strided far away", "much evidence",
    "a sidecar of 220 MiB",
)  # fmt: skip


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
        ("counts without end", lambda f: _counted(f, 10**8)),
        ("more counts without end", lambda f: _counted(f, 10**9)),
        ("counts beyond floats", lambda f: _counted(f, 10**20)),
        ("more heads than any", lambda f: _counted(f, 4096)),
        ("null rows of many", lambda f: _counted(f, 10**8, kv_cache=None)),
        ("positions beyond floats", lambda f: f["model"].update(max_positions=1e30)),
        ("huge numbers", lambda f: f["model"].update(num_layers=10**39, num_heads=10**39)),
        ("fields of no version", lambda f: f.update(patterns=[], evidence=7)),
    ):
        fields = artifacts.load(_example()).model_dump(mode="json") | {"sidecar": None}
        change(fields)
        with suppress(ValueError):
            fields["content_sha256"] = content_sha256(fields)
        yield name, as_yaml(fields, ensure_ascii=False).encode()


def _counted(fields: dict[str, Any], heads: int, **more: Any) -> None:
    fields["model"].update(num_heads=heads, num_kv_heads=heads, num_layers=17)
    nothing = {
        "dense_below": 0,
        "dense_tail": 0,
        "growth": None,
        "layers": [None] * 17,
        "front": None,
        "imported": None,
    }
    fields.update(patterns={}, search=None, prefill=nothing, costs=[], decode=None)
    fields["kv_cache"] = {"policies": {"full": {"kind": "full"}}, "layers": ["full"] * 17, "imported": None}
    fields.update(more)


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
    spelled = b",".join(b'"%06x":{"dtype":"I8","shape":[0],"data\\u005foffsets":[0,0]}' % i for i in range(90_000))
    yield "many arrays, spelled otherwise", _header(b"{" + spelled + b"}")
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


def accepted_files() -> Iterator[tuple[str, Artifact, dict[str, np.ndarray]]]:
    """Artifacts that are as large, or as odd, as they may be: every verb has to end well with them, too."""
    small, _ = build_every_kind()
    model, tall = small.model, {"num_layers": 64, "num_heads": 1024, "num_kv_heads": 1024}
    nothing = small.model_copy(
        update={"prefill": artifacts.Prefill(dense_below=0, layers=(None,) * 64), "patterns": {}, "search": None}
    ).model_copy(update={"costs": (), "decode": None, "kv_cache": None, "model": model.model_copy(update=tall)})
    yield "rows of nothing", nothing, {}
    cache = artifacts.KVCache(policies={"full": artifacts.Full()}, layers=("full",) * 64)
    yield "a policy for all", nothing.model_copy(update={"kv_cache": cache}), {}
    shape = {"num_layers": 16, "num_heads": 1024, "num_kv_heads": 8, "max_positions": 2**31 - 1}
    searched = build().search
    for name, size, below in (("a pattern a head", 6_000, 4096), ("strided far away", 500, 2**23)):
        patterns = {f"p{i}": artifacts.Strided(sink=64, window=64 + i, stride=2 + i) for i in range(size)}
        rows = tuple(tuple(f"p{(layer * 1024 + head) % size}" for head in range(1024)) for layer in range(16))
        prefill = artifacts.Prefill(dense_below=below, layers=rows)
        update = {"patterns": patterns, "prefill": prefill, "search": searched, "costs": (), "decode": None}
        yield name, small.model_copy(update={**update, "kv_cache": None, "model": model.model_copy(update=shape)}), {}
    entry = small.evidence.measurements[0].model_copy(update={"name": "\U0001f4a5\x85" * 300})
    evidence = artifacts.Evidence(measurements=tuple(entry.model_copy(update={"value": float(i)}) for i in range(1500)))
    yield "much evidence", build(evidence=evidence), build_arrays()
    large = np.zeros(SIZE * 11, dtype=np.int8)
    arrays = {name: large.reshape(1, -1) for name in ("chosen.recall", "imported.prefill")}
    yield "a sidecar of 220 MiB", build(), arrays | {"imported.score": large[:0]}


def write_all(folder: Path) -> Iterator[tuple[str, Path]]:
    """Every hostile artifact in a folder of its own: its name, and the YAML file."""
    for number, (name, data) in enumerate((*yaml_files(), *artifact_files())):
        (folder / str(number)).mkdir()
        path = folder / str(number) / "cfg.yaml"
        path.write_bytes(data)
        yield name, path
    for name, artifact, arrays in accepted_files():
        path = folder / name / "cfg.yaml"
        path.parent.mkdir()
        artifacts.save(artifact, path, arrays)
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


def ways(key: Path) -> dict[str, Callable[[Path], object]]:
    """Every way to read an artifact: loading it, and each verb."""

    def verb(*words: str) -> Callable[[Path], object]:
        def run(path: Path) -> object:
            named = {"FILE": path, "EXAMPLE": _example(), "KEY": key, "PUB": key.with_name(f"{key.name}.pub")}
            with redirect_stdout(io.StringIO()):
                return command(
                    [str(named.get(word, word)) if "/" not in word else str(path.with_name(word[1:])) for word in words]
                )

        return run

    found = {
        "load": artifacts.load_pair,
        "show": verb("show", "FILE"),
        "show --json": verb("show", "FILE", "--json"),
        "validate": verb("validate", "FILE"),
        "diff": verb("diff", "FILE", "EXAMPLE"),
        "diff from": verb("diff", "EXAMPLE", "FILE"),
        "set": verb("set", "FILE", "prefill.dense_tail=128", "--out", "/set.yaml"),
        "merge": verb("merge", "FILE", "--decode", "EXAMPLE", "--out", "/merged.yaml"),
        "sign": verb("sign", "FILE", "--key", "KEY"),
        "verify": verb("verify", "FILE", "--key", "PUB"),
    }
    return found | {f"to {name}": verb("convert", "FILE", "--to", name, "--out", "/out.json") for name in FORMATS}


def costs(path: Path, these: dict[str, Callable[[Path], object]]) -> Iterator[dict[str, Any]]:
    """What ways to read, one after the other, say and cost: seconds of the processor each, MiB since the first, and the
    line, or None where it is read."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.close(reading)
        first = resource.getrusage(resource.RUSAGE_SELF)
        for name, way in these.items():
            before = resource.getrusage(resource.RUSAGE_SELF)
            # A hang ends here, with a signal; the limit counts whole seconds.
            most = int(before.ru_utime + before.ru_stime) + SECONDS + 1
            resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))
            said: dict[str, Any] = {"way": name, "line": None}
            try:
                way(path)
            except artifacts.HeadwiseError as error:
                said["line"] = str(error)
            except BaseException as error:
                said["crash"] = repr(error)[:500]
            after = resource.getrusage(resource.RUSAGE_SELF)
            said["seconds"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            said["mib"] = (after.ru_maxrss - first.ru_maxrss) / 1024
            os.write(writing, json.dumps(said).encode() + b"\n")
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as stream:
        yield from map(json.loads, stream)
    _, status = os.waitpid(child, 0)
    if status:
        yield {"way": "any", "line": None, "crash": f"ended with status {status}", "seconds": 0, "mib": 0}


def main() -> None:
    """Print a JSON line for each file and each way in which it is read."""
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder) / "me.key"
        make_key(key)
        # Imports and caches are no cost of a file.
        warm = Path(folder) / "warm" / "cfg.yaml"
        warm.parent.mkdir()
        artifacts.save(*build_every_kind()[:1], warm, build_every_kind()[1])
        for way in ways(key).values():
            with suppress(artifacts.HeadwiseError):
                way(warm)
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
        known = ways(key)
        converters = cycle([way for way in known if way.startswith("to ")])
        verbs = [way for way in known if not way.startswith("to ")]
        others = cycle([way for way in known if way != "load"])
        for name, path in json.loads((Path(folder) / "names.json").read_text()).items():
            if "--all" in sys.argv[1:]:
                chosen = list(known)
            elif name in LARGEST:
                chosen = list(MORE_THAN_READ)
            elif name in ACCEPTED:
                chosen = [*verbs, *islice(converters, 2)]
            else:
                chosen = ["load", *islice(others, 2)]
            # What is read may take as much for each way; what is refused is refused in the same place by all.
            for together in [[way] for way in chosen] if name in ACCEPTED else [chosen]:
                for found in costs(Path(path), {way: known[way] for way in together}):
                    print(json.dumps({"name": name, **found}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
