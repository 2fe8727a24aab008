"""The package for Hugging Face's `kernels`, loaded by it: the conformance cases, its imports and its metadata."""

from __future__ import annotations

import ast
import importlib
import itertools
import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.attention import cpu
from kernels.index import SparseIndex
from kernels.native import hub
from kernels.patterns import LayerPlan, Pattern, make
from tests.kernels.test_attention import CASES, SERVERS, check, problem
from tests.sampling import sampled

KEPT = ("length 65", "9 heads on 3", "packed, q of k, tail, window", "packed queries, pages")
# What serves without a compiler: its code is compiled again for the package, a minute of the processor.
UNCOMPILED = (torch.float32, "reference")
# What a kernel may import: torch brings filelock, and triton to the builds that serve GPUs.
_ALLOWED = frozenset(("torch", "triton", "filelock"))


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "package"
    assert hub.main([str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def loaded(package: Path) -> Any:
    """The package as Hugging Face's loader gives it."""
    from kernels import get_local_kernel

    return get_local_kernel(package, backend="cpu")


def own(loaded: Any, index: SparseIndex) -> Any:
    """An index of ours as one of the package's."""
    values = {field.name: getattr(index, field.name) for field in fields(index) if field.init}
    if index.ragged is not None:
        values["ragged"] = loaded.Ragged(
            **{f.name: getattr(index.ragged, f.name) for f in fields(index.ragged) if f.init}
        )
    return loaded.SparseIndex(**values)


def test_it_is_another_module(loaded: Any) -> None:
    assert loaded.__name__.startswith("headwise_cpu_") and loaded.SparseIndex is not SparseIndex
    assert set(loaded.__all__) <= set(dir(loaded))
    with pytest.raises(ValueError, match="unknown backend 'fast'"):
        index = loaded.LayerPlan([loaded.make("dense")], 1).build(*torch.zeros(2, 1, 1, 1, 64))
        loaded.sparse_attention(*torch.zeros(3, 1, 1, 1, 64), index, backend="fast")
    there = {name for name in sys.modules if name.startswith(f"{loaded.__name__}.")}
    assert f"{loaded.__name__}.dispatch" in there


@pytest.mark.slow
@pytest.mark.exhaustive
def test_its_native_code_has_operators_of_its_own(loaded: Any) -> None:
    importlib.import_module(f"{loaded.__name__}.native.build").load()
    ours = importlib.import_module(f"{loaded.__name__}._ops").ops
    assert ours.engines(torch.float32) == torch.ops.headwise.engines(torch.float32) and ours is not torch.ops.headwise


@pytest.mark.parametrize("name", sampled(CASES, *KEPT))
@pytest.mark.parametrize(("dtype", "server"), sampled([*SERVERS, UNCOMPILED], UNCOMPILED))
def test_conformance(
    loaded: Any, dtype: torch.dtype, server: str, name: str, layer_of_unlike_heads: tuple[Pattern, ...]
) -> None:
    case = CASES[name]
    backend, _, engine = server.partition(" ")
    if engine and engine not in cpu.engines(dtype):
        pytest.skip(f"this processor or build has no engine {engine!r}")
    q, k, v, index, table, sinks, expected, expected_lse = problem(name, dtype, layer_of_unlike_heads)
    how: dict[str, Any] = {"softcap": case.softcap, "block_table": table, "sinks": sinks}
    if engine:
        module = importlib.import_module(f"{loaded.__name__}.attention.cpu")
        scale = case.head_dim**-0.5 if case.scale is None else case.scale
        out, lse = module.sparse_attention(q, k, v, own(loaded, index), scale=scale, engine=engine, **how)
    else:
        how |= {"scale": case.scale, "return_lse": True, "backend": backend}
        out, lse = loaded.sparse_attention(q, k, v, own(loaded, index), **how)
    check(out, expected, "out", dtype)
    check(lse, expected_lse, "lse", dtype)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_it_builds_the_same_indices(loaded: Any, layer_of_unlike_heads: tuple[Pattern, ...]) -> None:
    q, k = torch.randn(1, 6, 500, 64), torch.randn(1, 2, 500, 64)
    layer = list(itertools.islice(itertools.cycle(layer_of_unlike_heads), 6))
    theirs = [loaded.make(p.kind, **{f.name: getattr(p, f.name) for f in fields(p)}) for p in layer]
    assert [type(p).__module__.partition(".")[0] for p in theirs] == [loaded.__name__] * 6
    a, b = LayerPlan(layer, 2).build(q, k), loaded.LayerPlan(theirs, 2).build(q, k)
    assert torch.equal(a.sequence(0).to_mask(), b.sequence(0).to_mask())


def test_every_variant_imports_relatively(package: Path) -> None:
    variants = {path.name: path for path in (package / "build").iterdir()}
    assert set(variants) == {"torch-cpu", "torch-cuda", "torch-rocm"}
    for variant in variants.values():
        texts = {path: path.read_text() for path in variant.rglob("*.py")}
        assert len(texts) > 30 and not any("torch.ops.headwise." in text for text in texts.values())
        assert not any("(headwise," in path.read_text() for path in variant.rglob("*.cpp"))
        found = set()
        for path, text in texts.items():
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Import):
                    found |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.level == 0:
                    found.add(str(node.module).partition(".")[0])
                elif isinstance(node, ast.ImportFrom):
                    assert node.level <= len(path.relative_to(variant).parts), path
        assert found - sys.stdlib_module_names <= _ALLOWED


def test_the_metadata_is_theirs(package: Path) -> None:
    from kernels._rust import Digest, Metadata

    idents = set()
    for name, backend in (("torch-cpu", "cpu"), ("torch-cuda", "cuda"), ("torch-rocm", "rocm")):
        folder = package / "build" / name
        metadata = Metadata.read_from_file(folder / "metadata.json")
        assert (str(metadata.name), metadata.version, metadata.python_depends) == ("headwise-sparse-attention", 1, [])
        assert json.loads((folder / "metadata.json").read_text())["backend"] == {"type": backend}
        metadata.digest.validate(Digest.hash_variant(metadata.digest.algorithm, folder))
        idents.add(metadata.id)
    assert len(idents) == 3 and all(ident.isidentifier() for ident in idents)


def test_a_folder_with_something_else_is_left_alone(
    tmp_path: Path, package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(SystemExit) as left:
        hub.main([str(tmp_path)])
    assert left.value.code == 2 and "is not empty and holds no such package" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    # Its own is replaced.
    (package / "build" / "old").mkdir()
    hub.write(package)
    assert not (package / "build" / "old").exists()


@pytest.mark.exhaustive
def test_compiled_in_advance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels import get_local_kernel
    from kernels.native import prebuilt

    levels = prebuilt.levels()
    best = next(iter({level: how for level, how in levels.items() if how[1] <= prebuilt.processor_flags()}.items()))
    monkeypatch.setattr("kernels.native.prebuilt.levels", lambda: dict([best]))
    written = hub.write(tmp_path / "package", prebuild=True)
    assert written[-1].name == hub.aot_variant()
    # It is preferred, and needs no compiler.
    monkeypatch.setenv("PATH", "")
    loaded = get_local_kernel(tmp_path / "package", backend="cpu")
    assert "_aot_" in loaded.__name__
    q, k, v, index, *_, expected, _ = problem("9 heads on 3", torch.float32, (make("dense"),))
    check(loaded.sparse_attention(q, k, v, own(loaded, index), backend="cpu"), expected, "out", torch.float32)
