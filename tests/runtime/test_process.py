"""Serving in a process: imports, memory, leftover objects, and requests in several threads."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch

from artifacts import HeadwiseError
from kernels.patterns import LayerPlan, make
from runtime import LoadedArtifact
from runtime.allocator import in_huge_pages, keep_freed_memory
from runtime.attention import applied
from tests.runtime.omnikv import LAYERS

ALLOWED = {
    "annotated_types",
    "artifacts",
    "pydantic",
    "pydantic_core",
    "rfc8785",
    "runtime",
    "typing_extensions",
    "typing_inspection",
    "yaml",
}
CODE = """
import sys
before = set(sys.modules)
import runtime
try: runtime.load("missing.yaml")
except ValueError: pass
print(*(set(sys.modules) - before))
"""


def printed(code: str) -> list[str]:
    """Return the words that code prints in a separate Python without malloc settings."""
    root = Path(__file__).parents[2]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        env=environment | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_runtime_import_and_load_need_only_artifact_packages():
    packages = {name.partition(".")[0] for name in printed(CODE)}
    # Cython and Python's build leave extra modules.
    private = {name for name in packages if name.startswith("_") or name == "cython_runtime"}
    assert "runtime" in packages
    assert packages - private - sys.stdlib_module_names <= ALLOWED


_APPLY = """
import sys
import artifacts, runtime
from artifacts.schema.fields import Imported
from runtime.fingerprint import fingerprint
from tests.runtime.tiny import tiny_model
model = tiny_model("Llama")
origin = Imported(format="minference", file="patterns.json", sha256="0" * 64)
artifact = artifacts.Artifact(
    model=fingerprint(model, name="tiny"),
    search=None,
    patterns={"a": artifacts.AShape(sink=64, window=64)},
    prefill=artifacts.Prefill(dense_below=128, layers=(("a",) * 4,) * 2, imported=origin),
)
runtime.LoadedArtifact(artifact).apply(model)
print(*sys.modules)
"""


def test_apply_of_a_prefill_artifact_imports_no_plug_in():
    names = printed(_APPLY)
    plug_ins = ("runtime.omnikv", "runtime.caches", "runtime.vllm")
    assert "runtime.attention.servers" in names
    assert [name for name in names if name.startswith(plug_ins)] == []


_FAULTS = """
import resource
from runtime.allocator import keep_freed_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        bytearray(64 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
many = faults()
supported = keep_freed_memory()
faults()
print(supported, many, faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_keep_freed_memory_reuses_pages():
    supported, many, few = printed(_FAULTS)
    if supported == "False":
        pytest.skip("another C library")
    # Three times 64 MiB in 4 KiB pages are 49,152 pages.
    assert int(many) > 40_000
    assert int(few) < int(many) / 20


@pytest.mark.parametrize(
    ("name", "value"),
    [("MALLOC_TRIM_THRESHOLD_", "131072"), ("GLIBC_TUNABLES", "glibc.malloc.mmap_max=100")],
)
def test_keep_freed_memory_respects_user_settings(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    assert not keep_freed_memory.__wrapped__()


@pytest.mark.parametrize("size", [1, 1 << 20, (9 << 20) + 5])
def test_huge_page_advice_keeps_values(size):
    tensor = torch.empty(size, dtype=torch.uint8)
    assert in_huge_pages(tensor) is tensor
    tensor.fill_(7)
    assert bool((tensor == 7).all())


def held() -> Counter[str]:
    """Count objects alive since gc.freeze() by type, and the entries of the runtime's tables."""
    gc.collect()
    alive = Counter(type(thing).__qualname__ for thing in gc.get_objects())
    return alive + Counter({"configurations": len(applied._configs)})


def flat(work: Callable[[], object], times: int) -> None:
    """Assert that a round of `work` leaves no objects behind.

    A leak adds one object per round, at least, after each of two spans. Other activity in the
    process, such as a message to a pytest worker, occurs in one span only.
    """
    for _ in range(times):
        work()
    # The first count fills Python's own caches.
    held()
    counts = [held()]
    for _ in range(2):
        for _ in range(times):
            work()
        counts.append(held())
    grown = (counts[1] - counts[0]) & (counts[2] - counts[1])
    assert {name: more for name, more in grown.items() if more >= times} == {}


@pytest.fixture
def _few_objects():
    """Freeze existing objects, so the collector counts only new ones."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("work", ["serve", "generate", "fail", "drop"])
@pytest.mark.usefixtures("_few_objects")
def test_serving_leaves_no_objects(work, build, artifact_for, decoding, ids):
    model, filtering, prompt = build(), build(**LAYERS), ids(140)
    plain = LoadedArtifact(artifact_for(model))
    handle = decoding(filtering, prefill_ratio=0.5).apply(filtering)

    def serve():
        with plain.apply(model) as served:
            model(prompt)
            served.stats()

    def generate():
        options = {"max_new_tokens": 2, "do_sample": False}
        filtering.generate(prompt, past_key_values=handle.new_cache(), **options)

    def fail():
        cache = handle.new_cache()
        filtering(prompt, past_key_values=cache, use_cache=True)
        with pytest.raises(HeadwiseError, match="only the third size may differ"):
            filtering(ids(3, batch=2), past_key_values=cache, use_cache=True)

    def drop():
        dropped = build()
        plain.apply(dropped)
        dropped(prompt)

    flat({"serve": serve, "generate": generate, "fail": fail, "drop": drop}[work], 3)


OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}


@pytest.fixture(autouse=True)
def _in_turns():
    """Switch threads as often as Python can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def counts(stats: dict[str, Any]) -> dict[str, int]:
    flat = {name: value for name, value in stats.items() if isinstance(value, int)}
    return flat | stats["dense"]


def test_two_threads_serve_two_models_with_two_artifacts(build, artifact_for, decoding, ids):
    plain, choosing = build(), build(seed=1, **LAYERS)
    prompts = [ids(length, seed=length) for length in (200, 90, 150)] * 2
    handles = {
        id(plain): LoadedArtifact(artifact_for(plain)).apply(plain),
        id(choosing): decoding(choosing).apply(choosing),
    }

    def run(request):
        model, prompt = request
        cache = handles[id(model)].new_cache()
        return model.generate(prompt, past_key_values=cache, **OPTIONS)[
            0, prompt.shape[1] :
        ].tolist()

    requests = [(model, prompt) for prompt in prompts for model in (plain, choosing)]
    alone = [run(request) for request in requests]
    before = {key: handle.stats() for key, handle in handles.items()}
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(run, requests))
    assert together == alone
    for key, handle in handles.items():
        after = handle.stats()
        assert counts(after) == {how: 2 * count for how, count in counts(before[key]).items()}
        handle.undo()
    assert before[id(choosing)]["decode"] > 0 and before[id(plain)]["sparse"] > 0


def test_apply_and_undo_while_another_model_serves(build, artifact_for, ids):
    busy, other, prompt = build(), build(seed=1), ids(200)
    headwise, one_at_a_time = LoadedArtifact(artifact_for(other)), Lock()
    with LoadedArtifact(artifact_for(busy)).apply(busy, strict=True) as handle:
        expected = busy(prompt).logits

        def serve(_):
            with torch.inference_mode():
                return busy(prompt).logits

        def change(_):
            # A second artifact for the model is rejected.
            with one_at_a_time:
                headwise.apply(other).undo()

        with ThreadPoolExecutor(3) as pool:
            served, changed = pool.map(serve, range(10)), pool.map(change, range(10))
            assert all(torch.equal(logits, expected) for logits in served)
            list(changed)
        assert handle.stats() == {"sparse": 22, "dense": {}}


def test_fault_in_several_threads_warns_once(build, artifact_for, ids, warnings, monkeypatch):
    def fails(*args, **kwargs):
        raise RuntimeError("std::bad_alloc")

    model, prompt = build(), ids(200)
    monkeypatch.setattr("kernels.registry.run_by", fails)
    with LoadedArtifact(artifact_for(model)).apply(model) as handle, ThreadPoolExecutor(4) as pool:

        def run(_):
            with torch.no_grad():
                model(prompt)

        list(pool.map(run, range(20)))
        assert handle.stats() == {"sparse": 0, "dense": {"out of memory": 40}}
    assert warnings() == ["serving densely: out of memory: std::bad_alloc"]


def test_plan_at_is_thread_safe():
    plan = LayerPlan([make("vertical_slash", vertical=100, slash=100)] * 2, 1, length=256)
    lengths = [64 * (1 + n % 40) for n in range(4000)]
    with ThreadPoolExecutor(8) as pool:
        actual = list(pool.map(plan.at, lengths))
    for length, grown in zip(lengths, actual, strict=True):
        assert grown.patterns == plan.at(length).patterns
