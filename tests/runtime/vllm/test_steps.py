"""vLLM plugin steps without an agreement test: parent pages as on a GPU, 8-bit caches, learned
sinks, failures, and the profiling run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import artifacts
from kernels.decode import MAX_QUERIES
from kernels.patterns import LayerPlan, make
from runtime.caches.paging import Paging
from runtime.caches.snapkv import SnapKV
from runtime.vllm.batch import prefills_of, requests_of
from runtime.vllm.counters import Counters
from runtime.vllm.engine import ServedLayer
from runtime.vllm.policy_host import PagedPolicy
from runtime.vllm.step import quantised, split_kv, write_kv
from tests.runtime.vllm.conftest import (
    CLOSE,
    EIGHT,
    LAYER,
    PAGE,
    Common,
    D,
    G,
    H,
    Parent,
    PlainEngine,
    by_plan,
    by_selection,
    filter_by,
    poisoned,
    profile,
    put,
    select_tokens,
    serve,
    slots_of,
    step,
)

DENSE = [make("dense")] * H
SINKS = torch.tensor([0.5, 9.0, -30.0, 2.0])
stored_as = pytest.mark.parametrize("stored", [None, EIGHT], ids=["as they are", "8 bits"])


def test_step_selects_sparse_chunks(monkeypatch):
    monkeypatch.setattr("runtime.attention.context.MIN_BEHIND_A_PAST", 128)
    at_work: Any = PlainEngine(ServedLayer(number=0))
    # Decode, two chunks after a past, short and long prompts, and drafts, which are not prefills.
    common = step((1, 300), (127, 300), (128, 300), (127, 127), (130, 130), (200, 200), (4, 300))
    common.is_prefilling = torch.tensor([False, *[True] * 5, False])
    prefills = prefills_of(common, requests_of(common))
    assert [chunk.row for chunk in prefills] == [1, 2, 3, 4, 5]
    assert [chunk.row for chunk in prefills if at_work.is_sparse(chunk)] == [2, 4, 5]
    # Shorter prompts would be all dense tail.
    at_work.artifact.prefill.dense_tail = 150
    assert [chunk.row for chunk in prefills if at_work.is_sparse(chunk)] == [5]


@stored_as
@pytest.mark.parametrize(
    "requests",
    [
        [(1, 40), (100, 300), (10, 10), (200, 200), (64, 100), (1, 500)],
        [(1, 40), (63, 300), (1, 300)],
    ],
    ids=["sparse and dense", "dense"],
)
def test_step_computes_each_request_separately(engine, requests):
    outputs, inputs, _ = serve(engine, step(*requests))
    long = [q_len >= 64 and k_len >= 128 for q_len, k_len in requests]
    for sparse, out, request in zip(long, outputs, inputs, strict=True):
        expected = by_plan(engine.patterns if sparse else DENSE, request)
        torch.testing.assert_close(out, expected, **CLOSE)
    report = engine.at_work.counters.report()
    assert report["prefills"].get("sparse", 0) == sum(long)
    assert report["prefills"]["short"] == sum(q_len > 1 for q_len, _ in requests) - sum(long)


@pytest.mark.parametrize("stored", [EIGHT])
def test_eight_bit_queries_match_reference(engine, stored):
    """Pass 8-bit queries, as some GPU backends of vLLM receive them with an 8-bit cache."""
    common = step((100, 300))
    cache = poisoned(engine, int(common.block_table_tensor.max()) + 1)
    query = torch.randn(100, H, D).to(stored)
    slots = slots_of(common.block_table_tensor[0], torch.arange(300))
    k, v = put(engine, cache, *torch.randn(2, 300, G, D), slots)
    output = torch.empty(100, H, D)
    metadata = engine.builder.build(0, common)
    engine.impl.forward(LAYER, query, k[200:], v[200:], cache, metadata, output)
    expected = by_plan(engine.patterns, (query.float() * 0.125, k, v))
    torch.testing.assert_close(output, expected, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_quantised_values_saturate_at_dtype_max(dtype):
    largest = torch.finfo(dtype).max
    actual = quantised(torch.tensor([1e9, -1e9, 0.5 * largest, 0.3, 0.0]).bfloat16(), 0.5, dtype)
    assert actual.dtype == torch.uint8
    wide = actual.view(dtype).float()
    assert wide[:3].tolist() == [largest, -largest, largest] and wide[4] == 0
    assert float((wide[3] - 0.6).abs()) <= 0.6 * torch.finfo(dtype).eps


@pytest.mark.parametrize("length", [1, 53])
@pytest.mark.parametrize("padded_pages", [False, True])
def test_write_kv_pages_return_stored_values(length, padded_pages):
    whole = torch.full((7, G + padded_pages, PAGE, 2 * D), float("nan"))
    cache = whole[:, :G]
    pages = torch.randperm(6)[: -(-length // PAGE)].to(torch.int32) + 1
    key, value = torch.randn(2, length + 3, G, D)
    at = torch.arange(length)
    # Padding at the end of a step has no slot.
    write_kv(cache, key, value, torch.cat([slots_of(pages, at), torch.full((2,), -1)]))
    for held, source in zip(split_kv(cache, ours=True), (key, value), strict=True):
        assert torch.equal(held[pages[at // PAGE].long(), at % PAGE], source[:length])
    assert cache[[page for page in range(1, 7) if page not in pages]].isnan().all()


@pytest.mark.parametrize(
    ("stored", "sinks", "window"), [(None, 4, 50), (EIGHT, 20, 64), (None, 0, 30), (None, 3, 1000)]
)
def test_streaming_layers_match_reference(engine, sinks, window):
    stream = Paging(front=sinks, window=window)
    engine.serve_by(policy=PagedPolicy((stream,)), plan=None)
    engine.impl.sinks = SINKS
    requests = [(1, 40), (100, 300), (1, 10), (200, 200), (3, 90), (1, 300)]
    outputs, inputs, _ = serve(engine, step(*requests), paging=stream)
    for out, (q, k, v) in zip(outputs, inputs, strict=True):
        at = torch.arange(len(k))
        expected = []
        for i in range(len(q)):
            last = len(k) - len(q) + i
            seen = ((at < sinks) | (at > last - window)) & (at <= last)
            # A learned logit is a key without a value.
            logits = torch.einsum("hd,khd->hk", q[i], k[seen].repeat_interleave(H // G, 1))
            both = torch.cat([logits * Parent.scale, SINKS[:, None]], dim=1)
            weights = both.softmax(1)[:, :-1]
            expected.append(torch.einsum("hk,khd->hd", weights, v[seen].repeat_interleave(2, 1)))
        torch.testing.assert_close(out, torch.stack(expected), **CLOSE)


@stored_as
def test_layers_read_tokens_selected_by_filter_layers(engine):
    section = filter_by(engine, range(4), requests=4, budget=40, window=1)
    # Decode, short and long; a prefill; drafts of two lengths to verify.
    common = step((1, 300), (1, 30), (130, 130), (1, 97), (3, 200), (2, 333), (3, 150))
    metadata = engine.builder.build(0, common)
    chose: dict[int, Tensor] = {}
    # Layer 0 attends to all tokens and selects none.
    assert set(engine.at_work.filter_decode.roles) == {1, 2, 3}
    for number in (0, 1, 2, 3):
        outputs, inputs, _ = serve(engine, common, number=number, metadata=metadata)
        for request in (0, 3, 4, 5, 6):
            q, k, _ = inputs[request]
            if number == 1:
                chose[request] = select_tokens(q, k, section)
                assert not chose[request].all()
            seen = None if number < 2 else chose[request].expand(G, -1)
            torch.testing.assert_close(
                outputs[request], by_selection(inputs[request], seen), **CLOSE
            )
    assert engine.at_work.counters.report()["decode"] == {"chosen": 5}
    assert engine.at_work.counters.tokens_read == 40


def test_filter_layer_failure_makes_other_layers_dense(engine):
    filter_by(engine, range(1, 3), requests=1, budget=40, window=1)
    (out,), (inputs,), _ = serve(engine, step((1, 300)), number=2)
    torch.testing.assert_close(out, by_selection(inputs), **CLOSE)
    assert engine.at_work.counters.report()["fallbacks"] == {
        "filter layer 1 selected no tokens in this step": 1
    }


def test_attention_sinks_match_reference(engine):
    engine.impl.sinks = SINKS
    (out,), (inputs,), _ = serve(engine, step((100, 200)))
    torch.testing.assert_close(out, by_plan(engine.patterns, inputs, SINKS), **CLOSE)


def test_kernel_failure_makes_step_dense(engine, monkeypatch, caplog):
    def fails(*_, **__):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("runtime.vllm.forward.sparse_attention", fails)
    with caplog.at_level(logging.WARNING, logger="vllm.headwise"):
        for _ in range(2):
            (out,), (inputs,), _metadata = serve(engine, step((200, 200)))
            torch.testing.assert_close(out, by_plan(DENSE, inputs), **CLOSE)
    assert len(caplog.records) == 1 and "out of memory: no room" in caplog.text
    assert engine.at_work.counters.report()["fallbacks"] == {"out of memory": 2}


def test_prompt_longer_than_evidence_is_logged_once(engine, caplog):
    task = artifacts.TaskFigures(task="prose", length=200, prompts=2, kl=0.01)
    engine.at_work.artifact.evidence = artifacts.Evidence(tasks=(task,))
    with caplog.at_level(logging.WARNING, logger="vllm.headwise"):
        engine.builder.build(0, step((200, 200), (1, 400)))
        assert caplog.records == []
        for _ in range(2):
            engine.builder.build(0, step((150, 150), (250, 250)))
    (record,) = caplog.records
    assert "a prompt of 250 tokens is longer than the 200 up to which" in record.message


def test_layers_not_owned_use_parent_forward(engine, monkeypatch):
    # Another layer of the group is owned: the builder's.
    engine.at_work.layer = replace(engine.at_work.layer, owned=False, plan=None)
    calls: list[Any] = []

    def forward(self, *args):
        calls.append(args)
        return args[-1].fill_(1)

    monkeypatch.setattr(Parent, "forward", forward)
    metadata = engine.builder.build(0, step((1, 40), (130, 300)))
    query, output = torch.randn(131, H, D), torch.zeros(131, H, D)
    engine.impl.forward(LAYER, query, None, None, torch.empty(0), metadata, output)
    ((layer, first_query, *_),) = calls
    assert layer is LAYER and first_query is query and output.min() == 1


def test_fused_output_quantization_is_rejected(engine):
    assert engine.impl.fused_output_quant_supported("fp8") is False
    args = [LAYER, torch.randn(1, H, D), None, None, torch.empty(0), None, torch.empty(1, H, D)]
    with pytest.raises(artifacts.HeadwiseError, match="no quantised output from a layer served"):
        engine.impl.forward(*args, output_scale=torch.ones(1))


@pytest.mark.parametrize(
    "change", [{"causal": False}, {"mm_req_doc_ranges": {}}, {"rswa_prefix_lens": torch.ones(1)}]
)
def test_non_causal_step_uses_parent_or_is_rejected(engine, change):
    common = step((200, 200))
    for name, value in change.items():
        setattr(common, name, value)
    if engine.ours:
        with pytest.raises(artifacts.HeadwiseError, match="a step is not plainly causal"):
            engine.builder.build(0, common)
    else:
        assert not hasattr(engine.builder.build(0, common), "headwise")


def test_chunk_index_is_built_from_pages(engine, index_builds):
    patterns = [
        make("vertical_slash", vertical=70, slash=70),
        make("block_sparse", blocks=2),
        make("block_sparse", blocks=3, coverage=0.8),
        make("a_shape", sink=64, window=64),
    ]
    engine.serve_by(plan=LayerPlan(patterns, G))
    (out,), (inputs,), _ = serve(engine, step((100, 300)))
    ((_, held, options),) = index_builds
    torch.testing.assert_close(out, by_plan(patterns, inputs), **CLOSE)
    assert held.shape[1:] == (PAGE, G, D) and not held.is_contiguous()
    assert options["k_len"] == 300 and options["block_table"].shape == (1, -(-300 // PAGE))


@pytest.mark.parametrize(("longest", "wanted"), [(512, [(200, 512)]), (100, [])])
@pytest.mark.usefixtures("silent_parent")
def test_profiling_run_builds_index_of_longest_prompt(engine, longest, wanted, index_builds):
    engine.at_work.longest = longest
    output = torch.ones(200, H, D)
    profile(engine, torch.randn(200, H, D).to(EIGHT), output)
    assert not output.any()
    built = [(q.shape[2], options["k_len"]) for q, _, options in index_builds]
    # Two launches on one page show whether the kernels can be built.
    assert built == [(64, 64)] * 2 + wanted


class Operations(TorchDispatchMode):
    """Names of the operations that torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_steps_run_the_same_operations(engine):
    common = step((200, 200))
    runs = []
    for _ in range(34):
        inputs = torch.randn(200, H, D), *torch.randn(2, 200, G, D)
        cache = poisoned(engine, int(common.block_table_tensor.max()) + 1)
        output = torch.empty(200, H, D)
        metadata = engine.builder.build(0, common)
        with Operations() as ran:
            engine.impl.forward(LAYER, *inputs, cache, metadata, output)
        runs.append(ran.names)
    # The first run creates state that all shapes share.
    assert all(run == runs[1] for run in runs[2:])
    assert engine.at_work.counters.report()["prefills"] == {"sparse": 34}


def test_counters_run_no_torch_operations():
    counters = Counters()
    with Operations() as ran:
        counters.step([("sparse", 200), ("short", 10)], [40, 60])
        counters.fell_back("out of memory", "no room")
        report = counters.report()
    assert not ran.names and counters.tokens_read == 50
    assert report == {
        "prefills": {"sparse": 1, "short": 1},
        "prefill_tokens": {"sparse": 200, "short": 10},
        "decode": {"chosen": 2},
        "fallbacks": {"out of memory": 1},
    }


def test_prefills_are_logged_when_their_count_doubles(caplog):
    counters = Counters()
    with caplog.at_level(logging.INFO, logger="vllm.headwise"):
        for _ in range(7):
            counters.step([("sparse", 200)])
            counters.step([], [40])
        counters.step([("short", 10)])
    assert caplog.messages == [
        "Headwise has served 1 prefills: 1 sparse (200 tokens)",
        "Headwise has served 2 prefills: 2 sparse (400 tokens)",
        "Headwise has served 4 prefills: 4 sparse (800 tokens)",
        "Headwise has served 8 prefills: 7 sparse (1400 tokens), 1 short (10 tokens)",
    ]


def peak_memory(run: Callable[[], Any]) -> int:
    """Return the peak bytes that torch allocates during `run`."""
    with torch.profiler.profile(profile_memory=True) as profile:
        run()
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate((event.nbytes() for event in events), initial=0))


def layer_of_patterns(engine: Any) -> Common:
    return step((256, 1024))


def layer_that_streams(engine: Any) -> Common:
    stream = Paging(front=4, window=256)
    engine.serve_by(policy=PagedPolicy((stream,)), plan=None)
    return step((256, 1024))


def layer_that_selects(engine: Any) -> Common:
    paging = SnapKV.paging(artifacts.SnapKV(budget=40, window=8, pool=5))
    snap = PagedPolicy((paging,) * G, prompts=8)
    engine.serve_by(policy=snap, plan=None)
    common = step((256, 1024))
    common.rswa_prefix_lens = torch.tensor([1024, 0, 0], dtype=torch.int32)
    return common


def filter_layer(engine: Any, requests: int = 8) -> Common:
    engine.at_work.longest = 1024
    filter_by(engine, range(2), requests, filter_layers=(0,), dense_layers=(), budget=40)
    engine.serve_by(plan=None)
    return step(*[(1, 1024)] * requests)


def filter_layer_with_drafts(engine: Any) -> Common:
    filter_layer(engine, requests=1)
    return step((MAX_QUERIES, 1024))


LAYERS = [
    layer_of_patterns,
    layer_that_streams,
    layer_that_selects,
    filter_layer,
    filter_layer_with_drafts,
]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.__name__)
@pytest.mark.usefixtures("silent_parent")
def test_largest_step_allocates_no_more_than_profiling_run(engine, layer):
    common = layer(engine)
    engine.at_work.longest = 1024
    query, output = torch.randn(2, 256, H, D)
    # A first run builds kernels and shared state.
    profile(engine, query, output)
    rehearsed = peak_memory(lambda: profile(engine, query, output))
    metadata = engine.builder.build(0, common)
    tokens = common.num_actual_tokens
    key, value = torch.randn(2, tokens, G, D)
    cache = torch.zeros(int(common.block_table_tensor.max()) + 1, G, PAGE, 2 * D)

    def serve_step():
        args = LAYER, query[:tokens], key, value, cache, metadata, output[:tokens]
        engine.impl.forward(*args)

    taken = peak_memory(serve_step)
    # Extra memory: a log-sum-exp per query, and the output that decode is copied from.
    assert taken <= rehearsed + 4 * tokens * H + output.nbytes * tokens // 256
