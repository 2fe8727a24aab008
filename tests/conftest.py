"""For every test: one thread a process, a cache of Triton and torch.compile builds, and one skipped
line for all GPU tests.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# Before torch is imported, and for every process that a test starts: two workers of pytest-xdist
# share two cores, and everything here is small. Tests of threads ask for them with
# torch.set_num_threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The tests of kernels ask torch for deterministic algorithms; cuBLAS wants this for them.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# Beside the native kernels, so that one folder is all that a machine of CI has to keep between
# runs.
CACHE = Path(os.environ.get("HEADWISE_CACHE") or Path.home() / ".cache" / "headwise")
os.environ.setdefault("TRITON_CACHE_DIR", str(CACHE / "triton"))
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(CACHE / "inductor"))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files with slow tests come first: a worker that begins one last works on alone.

    Without a GPU the first test marked `gpu` skips for all of them, and says how many they are."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu:
        return
    import torch

    if torch.cuda.is_available():
        return
    first, *rest = gpu
    first.add_marker(pytest.mark.skip(reason=f"no GPU: {len(gpu)} tests need one"))
    left_out = set(rest)
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=rest)


@pytest.fixture(autouse=True)
def _cpu_by_default(request, monkeypatch):
    """Where there is a GPU, commands of tests that are not marked `gpu` run on the CPU too."""
    device = sys.modules.get("profiling.models.device")
    if device is None or request.node.get_closest_marker("gpu"):
        return
    import torch

    if torch.cuda.is_available():
        cached = {"auto": "cpu"}
        monkeypatch.setattr(device, "resolve_device", lambda name: cached.get(name, name))


@pytest.fixture(scope="session", autouse=True)
def _native_code():
    """On a machine that has none yet the first worker compiles the native code, and the others wait
    for it."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    from filelock import FileLock

    from kernels.native import build

    CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(CACHE / "tests.lock"):
        build.load()


@pytest.fixture(scope="session", autouse=True)
def _no_flush():
    """Skip os.fsync: it waits for the disk, and no test simulates a power failure."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _long_texts():
    """Tokenise a long text once for all tokenizers that are alike: each command loads its own."""
    from profiling.prompts import tokens

    cached: dict[tuple[str, Callable[[], str]], tokens.Ids] = {}
    real = tokens.Encoder.whole

    def whole(encoder: tokens.Encoder, text: Callable[[], str]) -> tokens.Ids:
        own = tokens._WHOLE.setdefault(encoder._tokenizer, {})
        if text not in own and encoder._backend is not None:
            alike = (encoder._backend.to_str(), text)
            if alike not in cached:
                cached[alike] = real(encoder, text)
            own[text] = cached[alike]
        return real(encoder, text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens.Encoder, "whole", whole)
        yield
