"""Decode sections in the vLLM plugin as a CUDA graph would replay them: captured for none, replayed
for any requests.

A machine without a GPU has no graphs. What one does is known: the operations of the captured step
run again, on the same memory and in the same order, and no Python does. So that is what is done
here, operation by operation."""

from __future__ import annotations

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
from runtime.omnikv.decode import OmniKV
from runtime.vllm.batch import KEY
from runtime.vllm.check import engine_misfits
from runtime.vllm.counters import Counters
from runtime.vllm.filters import Chooser
from runtime.vllm.step import store
from tests.runtime.test_vllm_parts import (
    PAGE,
    SECTION,
    Common,
    D,
    G,
    H,
    Parent,
    ParentsBuilder,
    by_choice,
    chosen_by,
    engine,
    interleaved,
    ours,
    stored,
)

__all__ = ["engine", "ours", "stored"]

LONGEST, REQUESTS = 512, 5
# Contexts of two steps; one without keys is padding.
STEPS = ([300, 30, 97, 512, 0], [41, 511, 1, 64, 220])


class Tape(TorchDispatchMode):
    """The operations of a step, with the memory that they read and write."""

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
        """Run them again; what is new memory at each call has the place that it had."""
        for func, args, kwargs, out in self.calls:
            given = {
                x.untyped_storage().data_ptr()
                for x in tree_leaves((args, kwargs))
                if isinstance(x, Tensor)
            }
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.untyped_storage().data_ptr() not in given:
                    old.copy_(new)


@contextmanager
def unread(*host: Tensor) -> Iterator[None]:
    """Nothing of a tensor may come to the host but of these, which lie there."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("tolist", "item", "numpy", "cpu"):
            real = getattr(Tensor, name)

            def read(self: Tensor, *args: Any, real: Any = real, **kwargs: Any) -> Any:
                assert any(self is x for x in host), "the host waits for the device"
                return real(self, *args, **kwargs)

            patch.setattr(Tensor, name, read)
        yield


class Buffers:
    """What vLLM keeps from step to step: block table, lengths, queries and caches; and our
    outputs."""

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
        """Other requests; pages of nobody hold NaN."""
        pages = (torch.randperm(self.caches.shape[1] - 1) + 1).to(torch.int32)
        self.table.copy_(pages.view(self.table.shape))
        self.lengths.copy_(torch.tensor(lengths))
        self.query.normal_()
        self.caches.fill_(float("nan"))
        self.keys = [[torch.randn(2, length, G, D) for length in lengths] for _ in range(3)]
        for cache, requests in zip(self.caches, self.keys, strict=True):
            for row, (k, v) in zip(self.table, requests, strict=True):
                at = torch.arange(len(k))
                slots = row[at // PAGE].long() * PAGE + at % PAGE
                (store if self._engine.ours else interleaved)(cache, k, v, slots)

    def common(self) -> Common:
        """The metadata of a step, as vLLM makes it."""
        starts = torch.arange(REQUESTS + 1, dtype=torch.int32)
        return Common(
            query_start_loc=starts,
            query_start_loc_cpu=starts.clone(),
            seq_lens=self.lengths,
            num_reqs=REQUESTS,
            num_actual_tokens=REQUESTS,
            max_query_len=1,
            max_seq_len=LONGEST,
            block_table_tensor=self.table,
            slot_mapping=torch.zeros(REQUESTS),
            seq_lens_cpu_upper_bound=torch.tensor(self.lengths.tolist(), dtype=torch.int32),
        )

    def forward(self, metadata: Any) -> None:
        """Layers 1, 2 and 3 of a step."""
        for i in range(3):
            layer = SimpleNamespace(layer_name=f"model.layers.{i + 1}.self_attn.attn")
            k = self.query[i, :, :G]
            self._engine.impl.forward(
                layer, self.query[i], k, k, self.caches[i], metadata, self.output[i]
            )

    def check(self, section: artifacts.OmniKV, lengths: list[int]) -> int:
        """Outputs against plain torch; how many tokens the KV heads of layers 2 and 3 read where
        they chose."""
        read = 0
        for request, length in enumerate(lengths):
            if not length:
                assert not self.output[:, request].any()
                continue
            count = (
                section.budget
                if isinstance(section.budget, int)
                else -(-length * section.budget // 1)
            )
            asked = section.model_copy(update={"budget": min(int(count), length)})
            chosen = chosen_by(self.query[0, None, request], self.keys[0][request][0], asked)
            for i in range(3):
                k, v = self.keys[i][request]
                seen = chosen.expand(G, -1) if i else None
                expected = by_choice(self.query[i, None, request], k, v, seen)
                torch.testing.assert_close(
                    self.output[i, None, request], expected, atol=2e-5, rtol=1e-5
                )
                read += int(seen.sum()) if seen is not None and asked.budget < length else 0
        return read


@pytest.fixture(params=[{"budget": 40}, {"budget": 0.2}], ids=["tokens", "share"])
def section(request: pytest.FixtureRequest, engine: Any) -> artifacts.OmniKV:
    """A decode section at work in `engine`, whose builder captures as vLLM's do."""
    section = artifacts.OmniKV(**SECTION, window=1, **request.param)
    omni = OmniKV(section, range(4), backend="auto")
    engine.at_work.chooser = Chooser(omni, requests=REQUESTS, longest=LONGEST)
    engine.layer["plan"] = None
    return section


@pytest.fixture(autouse=True)
def capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM's own builders."""
    monkeypatch.setattr(
        ParentsBuilder,
        "build_for_cudagraph_capture",
        lambda self, common: self.build(0, common),
        raising=False,
    )


@pytest.mark.parametrize("parts", [False, True], ids=["at once", "scores in parts"])
def test_a_captured_step_is_replayed_for_any_requests(
    engine: Any, section: artifacts.OmniKV, parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if parts:
        monkeypatch.setattr("runtime.vllm.filters._SCORES", 2 * 4 * LONGEST * (H + 4 * G))
    buffers, tape = Buffers(engine), Tape()
    # A run before the one that is captured, as vLLM has it.
    buffers.forward(engine.builder.build_for_cudagraph_capture(buffers.common()))
    common = buffers.common()
    metadata = engine.builder.build_for_cudagraph_capture(common)
    with unread(common.query_start_loc_cpu), tape:
        buffers.forward(metadata)
    assert engine.at_work.counters.report() == Counters().report()
    read, rows = 0, 0
    for lengths in (*STEPS, STEPS[0]):
        buffers.fill(lengths)
        buffers.output.fill_(float("nan"))
        tape.replay()
        read += buffers.check(section, lengths)
        rows += sum(engine.at_work.chooser.gains(length) for length in lengths)
    # What was read is counted on the device: of two layers with G heads.
    assert engine.at_work.chooser.selector.tokens_read == pytest.approx(read / (rows * 2 * G))


def test_a_captured_step_over_every_key_is_replayed_for_any_requests(engine: Any) -> None:
    buffers, tape = Buffers(engine), Tape()
    buffers.forward(engine.builder.build_for_cudagraph_capture(buffers.common()))
    common = buffers.common()
    metadata = engine.builder.build_for_cudagraph_capture(common)
    with unread(common.query_start_loc_cpu), tape:
        buffers.forward(metadata)
    every = artifacts.OmniKV(**SECTION, window=1, budget=LONGEST)
    for lengths in STEPS:
        buffers.fill(lengths)
        buffers.output.fill_(float("nan"))
        tape.replay()
        assert buffers.check(every, lengths) == 0


def test_steps_have_the_same_memory_whoever_is_served(
    engine: Any, section: artifacts.OmniKV, monkeypatch: pytest.MonkeyPatch
) -> None:
    import runtime.vllm.step as step

    seen: list[Any] = []
    attend = step.decode_attention

    def noted(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Any:
        held = (q, k, v, how["block_table"], how["ends"], how["tokens"])
        shapes = tuple(how["tokens"].shape) if how["tokens"] is not None else None
        seen.append(([(x.data_ptr(), x.shape, x.stride()) for x in held if x is not None], shapes))
        return attend(q, k, v, **how)

    monkeypatch.setattr(step, "decode_attention", noted)
    buffers = Buffers(engine)
    for lengths in STEPS:
        buffers.fill(lengths)
        buffers.forward(engine.builder.build_for_cudagraph_capture(buffers.common()))
    # One launch a layer.
    assert len(seen) == 2 * 3 and seen[:3] == seen[3:]
    slots = section.budget if isinstance(section.budget, int) else -(-LONGEST // 5)
    assert [shapes and shapes[-1] for _, shapes in seen[:3]] == [None, slots, slots]


def test_a_step_reads_nothing_back_and_asks_for_no_length(
    engine: Any, section: artifacts.OmniKV
) -> None:
    buffers = Buffers(engine)
    buffers.fill([300, 30, 97, 512, 77])
    common = buffers.common()
    assert common.seq_lens_cpu_upper_bound is not None
    # Lengths are known on the device alone; the host has bounds.
    common.seq_lens_cpu_upper_bound += 3
    host = [common.query_start_loc_cpu, common.seq_lens_cpu_upper_bound]
    with unread(*host):
        metadata = engine.builder.build(0, common)
        buffers.forward(metadata)
    buffers.check(section, [300, 30, 97, 512, 77])
    assert getattr(metadata, KEY).chosen[0].k_len == 512 + 3
    budget = 5 if isinstance(section.budget, float) else 4
    assert engine.at_work.counters.report()["decode"] == {"chosen": budget}


def test_the_profiling_run_takes_what_a_step_will_take(
    engine: Any, section: artifacts.OmniKV, monkeypatch: pytest.MonkeyPatch
) -> None:
    import runtime.vllm.step as step

    scored: list[Any] = []
    attend, rest = step.decode_attention, Parent.forward

    def noted(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Any:
        done = attend(q, k, v, **how)
        if done.scores is not None:
            scored.append((q.shape, done.scores.shape))
        return done

    monkeypatch.setattr(step, "decode_attention", noted)
    monkeypatch.setattr(Parent, "forward", lambda *args: args[-1])
    buffers = Buffers(engine)
    buffers.forward(None)
    chooser = engine.at_work.chooser
    (slots,) = chooser._slots.values()
    held = slots.data_ptr()
    assert slots.shape == (REQUESTS, section.budget if isinstance(section.budget, int) else 103)
    # Nothing is chosen by that.
    assert chooser.selector.tokens_read is None and not chooser._chosen
    monkeypatch.setattr(Parent, "forward", rest)
    buffers.fill(STEPS[0])
    buffers.forward(engine.builder.build_for_cudagraph_capture(buffers.common()))
    assert len(scored) == 2 and scored[0] == scored[1] and slots.data_ptr() == held


def test_batches_in_parts_are_refused() -> None:
    artifact: Any = SimpleNamespace(decode=object(), kv_cache=None)
    parallel = SimpleNamespace(pipeline_parallel_size=1, use_ubatching=True)
    config = SimpleNamespace(model_config=None, speculative_config=None, parallel_config=parallel)
    assert next(engine_misfits(artifact, config)).startswith(
        "batches in parts (--enable-dbo) are not served"
    )
