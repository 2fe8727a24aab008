"""What serving does to its process: what it imports, and how long prompts' memory is kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from runtime.allocator import in_huge_pages, keep_freed_memory

ALLOWED = {
    "annotated_types",
    "artifacts",
    "pydantic",
    "pydantic_core",
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


def test_runtime_imports_and_loads_an_artifact_with_the_artifact_s_packages_alone():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    packages = {name.partition(".")[0] for name in done.stdout.split()}
    # Cython and the build of Python leave modules of their own.
    private = {name for name in packages if name.startswith("_") or name == "cython_runtime"}
    assert "runtime" in packages
    assert packages - private - sys.stdlib_module_names <= ALLOWED


_ROOT = Path(__file__).parents[2]
_FAULTS = """
import resource
from runtime.allocator import keep_freed_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        bytearray(64 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
many = faults()
kept = keep_freed_memory()
faults()
print(kept, many, faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_what_is_freed_is_used_again():
    given = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", _FAULTS],
        cwd=_ROOT,
        env=given | {"PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    kept, many, few = done.stdout.split()
    if kept == "False":
        pytest.skip("another C library")
    # Three times 64 MiB in pages of 4 KiB are 49,152.
    assert int(many) > 40_000
    assert int(few) < int(many) / 20


@pytest.mark.parametrize(
    ("name", "value"),
    [("MALLOC_TRIM_THRESHOLD_", "131072"), ("GLIBC_TUNABLES", "glibc.malloc.mmap_max=100")],
)
def test_settings_of_the_user_s_own_stay(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    assert not keep_freed_memory.__wrapped__()


@pytest.mark.parametrize("size", [1, 1 << 20, (9 << 20) + 5])
def test_advice_changes_nothing_but_pages(size):
    tensor = torch.empty(size, dtype=torch.uint8)
    assert in_huge_pages(tensor) is tensor
    tensor.fill_(7)
    assert bool((tensor == 7).all())
