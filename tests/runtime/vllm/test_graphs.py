"""Decode sections in the vLLM plugin under CUDA graph replay for any requests.

A machine without a GPU has no graphs. A replay runs the captured step's operations again, on the
same memory, in the same order and without Python. These tests do the same, operation by operation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import artifacts
from kernels.decode import MAX_QUERIES
from runtime.vllm import step
from runtime.vllm.batch import KEY
from runtime.vllm.counters import Counters
from runtime.vllm.step import write_kv
from tests.runtime.vllm.conftest import (
    CLOSE,
    PAGE,
    Common,
    D,
    G,
    H,
    Parent,
    by_selection,
    common_of,
    filter_by,
    interleaved,
    select_tokens,
    slots_of,
)

LONGEST, REQUESTS = 512, 5
# Contexts of two steps; a context without keys is padding.
STEPS = ([300, 30, 97, 512, 0], [41, 511, 1, 64, 220])


class Tape(TorchDispatchMode):
    """Operations of a step, with the memory that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "_local_scalar_dense" not in str(func) and "nonzero" not in str(func), (
            "the host waits for the device"
        )
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        """Run the operations again; new memory of each call keeps its address."""
        for func, args, kwargs, out in self.calls:
            memory = {
                x.untyped_storage().data_ptr()
                for x in tree_leaves((args, kwargs))
                if isinstance(x, Tensor)
            }
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.untyped_storage().data_ptr() not in memory:
                    old.copy_(new)


@contextmanager
def unread(*host: Tensor) -> Iterator[None]:
    """Fail if the host reads any tensor but these, which are on the host."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("tolist", "item", "numpy", "cpu"):
            real = getattr(Tensor, name)

            def read(self: Tensor, *args: Any, real: Any = real, **kwargs: Any) -> Any:
                assert any(self is x for x in host), "the host waits for the device"
                return real(self, *args, **kwargs)

            patch.setattr(Tensor, name, read)
        yield


class Buffers:
    """State that vLLM keeps between steps: block table, lengths, queries, caches; and outputs."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        width = LONGEST // PAGE
        self.table = torch.zeros(REQUESTS, width, dtype=torch.int32)
        self.lengths = torch.ones(REQUESTS, dtype=torch.int32)
        self.query = torch.zeros(3, REQUESTS, H, D)
        self.caches = torch.zeros(3, REQUESTS * width + 1, G, PAGE, 2 * D)
        self.output = torch.zeros(3, REQUESTS, H, D)
        self.keys: list[list[Tensor]] = []

    def fill(self, lengths: list[int]) -> None:
        """Change the requests; unused pages hold NaN."""
        pages = (torch.randperm(self.caches.shape[1] - 1) + 1).to(torch.int32)
        self.table.copy_(pages.view(self.table.shape))
        self.lengths.copy_(torch.tensor(lengths))
        self.query.normal_()
        self.caches.fill_(float("nan"))
        self.keys = [[torch.randn(2, length, G, D) for length in lengths] for _ in range(3)]
        for cache, requests in zip(self.caches, self.keys, strict=True):
            for row, (k, v) in zip(self.table, requests, strict=True):
                slots = slots_of(row, torch.arange(len(k)))
                (write_kv if self._engine.ours else interleaved)(cache, k, v, slots)

    def common(self) -> Common:
        """Return a step's metadata as vLLM builds it."""
        common = common_of([1] * REQUESTS, self.lengths.tolist(), self.table)
        common.seq_lens_cpu_upper_bound = common.seq_lens
        common.seq_lens, common.max_seq_len = self.lengths, LONGEST
        return common

    def forward(self, metadata: Any) -> None:
        """Run layers 1, 2 and 3 of a step."""
        for i in range(3):
            layer = SimpleNamespace(layer_name=f"model.layers.{i + 1}.self_attn.attn")
            k = self.query[i, :, :G]
            self._engine.impl.forward(
                layer, self.query[i], k, k, self.caches[i], metadata, self.output[i]
            )

    def check(self, section: artifacts.OmniKV | None, lengths: list[int]) -> None:
        """Compare outputs with plain torch."""
        for request, length in enumerate(lengths):
            if not length:
                assert not self.output[:, request].any()
                continue
            selected = None
            if section is not None and count(section, length) < length:
                step_section = section.model_copy(update={"budget": count(section, length)})
                selected = select_tokens(
                    self.query[0, None, request], self.keys[0][request][0], step_section
                )
                selected = selected.expand(G, -1)
            for i in range(3):
                inputs = (self.query[i, None, request], *self.keys[i][request])
                expected = by_selection(inputs, selected if i else None)
                torch.testing.assert_close(self.output[i, None, request], expected, **CLOSE)


def count(section: artifacts.OmniKV, length: int) -> int:
    """Return the number of tokens in a budget."""
    budget = section.budget
    return budget if isinstance(budget, int) else math.ceil(length * budget)


@pytest.fixture(params=[{"budget": 40}, {"budget": 0.2}], ids=["tokens", "fraction"])
def section(request, engine):
    """Install a decode section in `engine`, whose builder captures like vLLM's."""
    section = filter_by(engine, range(4), REQUESTS, window=1, **request.param)
    engine.serve_by(plan=None)
    return section


def captured(engine: Any, buffers: Buffers) -> Tape:
    """Return the tape of a captured step without requests."""
    # vLLM runs a step once before capture.
    buffers.forward(engine.builder.build_for_cudagraph_capture(buffers.common()))
    common = buffers.common()
    metadata = engine.builder.build_for_cudagraph_capture(common)
    tape = Tape()
    with unread(common.query_start_loc_cpu), tape:
        buffers.forward(metadata)
    assert engine.at_work.counters.report() == Counters().report()
    return tape


@pytest.mark.parametrize("parts", [False, True], ids=["at once", "scores in parts"])
def test_captured_step_replays_for_any_requests(engine, section, parts, monkeypatch):
    if parts:
        monkeypatch.setattr("runtime.vllm.filters._SCORES", 2 * 4 * LONGEST * (H + 4 * G))
    assert_replays(engine, section)


def test_captured_step_over_all_keys_replays_for_any_requests(engine):
    assert_replays(engine, None)


def assert_replays(engine: Any, section: artifacts.OmniKV | None) -> None:
    buffers = Buffers(engine)
    tape = captured(engine, buffers)
    for lengths in (*STEPS, STEPS[0]):
        buffers.fill(lengths)
        buffers.output.fill_(float("nan"))
        tape.replay()
        buffers.check(section, lengths)


def test_step_reads_nothing_from_device(engine, section):
    buffers = Buffers(engine)
    lengths = [300, 30, 97, 512, 77]
    buffers.fill(lengths)
    common = buffers.common()
    bounds = common.seq_lens_cpu_upper_bound
    assert bounds is not None
    # Only the device knows the lengths; the host has upper bounds.
    bounds += 3
    with unread(common.query_start_loc_cpu, bounds):
        metadata = engine.builder.build(0, common)
        buffers.forward(metadata)
    buffers.check(section, lengths)
    assert getattr(metadata, KEY).decodes[0].k_len == 512 + 3
    # The host counts by upper bounds.
    read = [count(section, length + 3) for length in lengths]
    read = [tokens for tokens, length in zip(read, lengths, strict=True) if tokens < length + 3]
    counters = engine.at_work.counters
    assert counters.report()["decode"] == {"chosen": len(read)}
    assert counters.tokens_read == pytest.approx(sum(read) / len(read))


def test_profiling_run_allocates_memory_of_a_step(engine, section, monkeypatch):
    scored: list[Any] = []
    attend = step.decode_attention

    def record(q, k, v, **options):
        done = attend(q, k, v, **options)
        if done.scores is not None:
            scored.append((q.shape, done.scores.shape))
        return done

    monkeypatch.setattr(step, "decode_attention", record)
    buffers = Buffers(engine)
    with monkeypatch.context() as profiling:
        profiling.setattr(Parent, "forward", lambda *args: args[-1])
        buffers.forward(None)
    filter_decode = engine.at_work.filter_decode
    (slots,) = filter_decode._slots.values()
    held = slots.data_ptr()
    assert slots.shape == (REQUESTS, count(section, LONGEST))
    # This run selects no tokens.
    assert engine.at_work.counters.tokens_read is None and not filter_decode._tokens
    buffers.fill(STEPS[0])
    buffers.forward(engine.builder.build_for_cudagraph_capture(buffers.common()))
    whole, drafts, step_of_all = scored
    assert whole == step_of_all and slots.data_ptr() == held
    assert drafts == ((1, H, MAX_QUERIES, D), (1, G, LONGEST))
