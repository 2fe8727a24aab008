"""Memory of long prompts on a CPU: kept when freed, in a plain process, and left alone where the
user has a say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from runtime.allocator import in_huge_pages, keep_freed_memory

_ROOT = Path(__file__).parents[2]
_FAULTS = """
import resource, torch
from runtime.allocator import keep_freed_memory
torch.set_num_threads(1)
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.empty(64 << 20, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
many = faults()
kept = keep_freed_memory()
faults()
print(kept, many, faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_what_is_freed_is_used_again() -> None:
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
    # Ten times 64 MiB in pages of 4 KiB are 163,840.
    assert int(many) > 100_000
    assert int(few) < int(many) / 20


@pytest.mark.parametrize(
    ("name", "value"),
    [("MALLOC_TRIM_THRESHOLD_", "131072"), ("GLIBC_TUNABLES", "glibc.malloc.mmap_max=100")],
)
def test_settings_of_the_user_s_own_stay(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert not keep_freed_memory.__wrapped__()


@pytest.mark.parametrize("size", [1, 1 << 20, (9 << 20) + 5])
def test_advice_changes_nothing_but_pages(size: int) -> None:
    tensor = torch.empty(size, dtype=torch.uint8)
    assert in_huge_pages(tensor) is tensor
    tensor.fill_(7)
    assert bool((tensor == 7).all())
