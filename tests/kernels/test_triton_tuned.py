"""Builds that were timed on a GPU: when they are taken, and when they are not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import dispatch
from kernels.attention import triton_tuned
from kernels.attention.triton_launch import Launch, choose

DEVICE = torch.device("cuda", 0)
NAME = "NVIDIA H100 80GB HBM3"
FAST = Launch(rows=2, keys=32, warps=8, stages=4, registers=255)
SHORT = Launch(rows=1, keys=32, warps=4, stages=4)
BULK = Launch(rows=2, keys=128, warps=8, stages=3, registers=255, descriptors=True)
BUILDS = {
    ("paired", 64, False): SHORT, ("paired", 128, False): FAST, ("paired", 128, True): BULK,
    ("lists", 128, False): SHORT,
}  # fmt: skip


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """write(text) puts it where the device's builds are kept."""
    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: NAME)

    def write(text: str) -> None:
        file = triton_tuned.path(NAME)
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        triton_tuned._timed.cache_clear()

    triton_tuned._timed.cache_clear()
    yield write
    triton_tuned._timed.cache_clear()
    dispatch.say_once.cache_clear()


def best(
    dim: int, *, has_tiles: bool = False, itemsize: int = 2, device: torch.device = DEVICE, bulk: bool = False
) -> Launch:
    return triton_tuned.best(device, "sm_90", dim=dim, itemsize=itemsize, has_tiles=has_tiles, bulk=bulk)


def table(dim: int, *, has_tiles: bool = False, itemsize: int = 2) -> Launch:
    return choose("sm_90", dim=dim, itemsize=itemsize, has_tiles=has_tiles)


def test_a_timed_build_serves_its_head_dim_and_those_padded_to_it(write: Callable[[str], None]) -> None:
    assert best(128) == table(128) != FAST
    write(triton_tuned.text(BUILDS))
    assert [best(dim) for dim in (33, 64, 65, 80, 128)] == [SHORT, SHORT, FAST, FAST, FAST]
    assert best(128, has_tiles=True) == SHORT
    # Not every call has what descriptors are made of.
    assert best(128, bulk=True) == best(80, bulk=True) == BULK and best(64, bulk=True) == SHORT
    # Nothing was timed for these.
    assert best(256) == table(256) and best(32) == table(32) and best(64, has_tiles=True) == table(64, has_tiles=True)
    assert best(128, itemsize=4) == table(128, itemsize=4)
    assert best(128, device=torch.device("cpu")) == table(128)


@pytest.mark.parametrize("stale", ["kernel", "triton"])
def test_builds_of_another_kernel_or_triton_are_not_taken(write: Callable[[str], None], stale: str) -> None:
    write(json.dumps(json.loads(triton_tuned.text(BUILDS)) | {stale: "another"}))
    assert best(128) == table(128)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda found: found["builds"][0].update(keys=48),
        lambda found: found["builds"][0].update(heads="lists", rows=2),
        lambda found: found["builds"][0].update(colour="red"),
        lambda found: found["builds"][0].pop("stages"),
        lambda found: found.pop("builds"),
    ],
)
def test_what_is_no_build_is_said_once_and_not_taken(
    write: Callable[[str], None], spoil: Callable[[Any], object], caplog: pytest.LogCaptureFixture
) -> None:
    found = json.loads(triton_tuned.text(BUILDS))
    spoil(found)
    write(json.dumps(found))
    assert [best(128), best(128)] == [table(128)] * 2
    assert len(caplog.records) == 1 and "the timed builds of triton" in caplog.text


def test_a_file_that_is_no_json_is_said_and_not_taken(
    write: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    write("{")
    assert best(128) == table(128) and "the timed builds of triton" in caplog.text
