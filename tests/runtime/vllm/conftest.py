"""vLLM's side of the plugin without vLLM: a parent backend, steps with pages, and references.

Shapes: T tokens of a step, Q new tokens of a request, K its keys, H query heads, G KV heads, D head
dim.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import artifacts
from kernels.attention import AttentionCall
from kernels.logits import Logits
from kernels.patterns import LayerPlan, make
from kernels.patterns.dense import dense_index
from kernels.reference import Attention
from runtime.caches.paging import Paging
from runtime.omnikv.select import Selector
from runtime.vllm.builder import SparseBuilder
from runtime.vllm.counters import Counters
from runtime.vllm.engine import Engine, ServedLayer, number_of
from runtime.vllm.filters import FilterDecode
from runtime.vllm.forward import SparseImpl
from runtime.vllm.step import split_kv

H, G, D, PAGE = 4, 2, 32, 16
CLOSE: dict[str, Any] = {"atol": 2e-5, "rtol": 1e-5}
EIGHT = torch.float8_e4m3fn
SCALES = {"_k_scale_float": 0.5, "_v_scale_float": 0.25, "_q_scale_float": 0.125}
LAYER = SimpleNamespace(layer_name="model.layers.0.self_attn.attn", **SCALES)
# Layer 0 is dense, layer 1 selects tokens, and later layers read the selection.
SECTION: dict[str, Any] = {"filter_layers": (1,), "dense_layers": (0,), "selector": "last"}


@dataclass
class Common:
    """Fields of vLLM's CommonAttentionMetadata that the plugin reads."""

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


def common_of(q_lens: list[int], k_lens: list[int], table: Tensor, **more: Any) -> Common:
    """Return a step's metadata from each request's new tokens, keys and pages."""
    starts = torch.tensor([0, *q_lens]).cumsum(0).to(torch.int32)
    return Common(
        query_start_loc=starts,
        query_start_loc_cpu=starts.clone(),
        seq_lens=torch.tensor(k_lens, dtype=torch.int32),
        num_reqs=len(q_lens),
        num_actual_tokens=sum(q_lens),
        max_query_len=max(q_lens),
        max_seq_len=max(k_lens),
        block_table_tensor=table,
        slot_mapping=torch.zeros(sum(q_lens)),
        **more,
    )


def step(*requests: tuple[int, int]) -> Common:
    """Return a step of requests (queries, keys) with unordered pages and two rows of padding."""
    q_lens, k_lens = (list(part) for part in zip(*requests, strict=True))
    pages = [-(-k_len // PAGE) for k_len in k_lens]
    table = torch.zeros(len(requests) + 2, max(pages), dtype=torch.int32)
    for row, own in zip(table, torch.randperm(sum(pages)).split(pages), strict=False):
        row[: len(own)] = own
    return common_of([*q_lens, 0, 0], [*k_lens, 0, 0], table)


def slots_of(row: Tensor, positions: Tensor) -> Tensor:
    """Return the slots of a request's tokens by its pages."""
    return row[positions // PAGE].long() * PAGE + positions % PAGE


def interleaved(cache: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Write like vLLM's GPU backends."""
    cache[slots // PAGE, :, slots % PAGE] = torch.cat([key, value], dim=-1)


class Parent:
    """Dense backend implementation over a cache of plain pages."""

    scale = 0.2
    num_heads = H
    num_kv_heads = G
    logits_soft_cap = 0.0
    kv_sharing_target_layer_name = None
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
        k, v = split_kv(cache, ours=False)
        spans = pairwise(common.query_start_loc_cpu.tolist()[: common.num_reqs + 1])
        for i, (start, end) in enumerate(spans):
            if end > start:
                k_len = int(common.seq_lens[i])
                table = common.block_table_tensor[i, None, : -(-k_len // PAGE)]
                q = query[start:end].transpose(0, 1)[None]
                index = dense_index(1, H, end - start, k_len, q.device)
                logits = Logits(scale=self.scale)
                call = AttentionCall(q, k, v, index, logits=logits, block_table=table)
                out, _ = Attention.run(call)
                output[start:end] = out[0].transpose(0, 1)
        return output


class ParentsBuilder:
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any) -> None:
        pass

    def build(self, _: int, common: Any, fast_build: bool = False) -> Any:
        return SimpleNamespace(common=common, fast=fast_build)

    def build_for_cudagraph_capture(self, common: Any) -> Any:
        return self.build(0, common)


@pytest.fixture(params=[False, True], ids=["pages of the parent", "pages of ours"])
def ours(request):
    """Return True for pages in the layout of Headwise's kernels, as on a CPU."""
    return bool(request.param)


@pytest.fixture
def silent_parent(monkeypatch):
    """Have the parent's profiling run write zeros."""
    monkeypatch.setattr(Parent, "forward", lambda *args: args[-1].fill_(0))


@pytest.fixture
def index_builds(monkeypatch):
    """Return the arguments (q, k, options) of each index that is built."""
    calls: list[tuple[Tensor, Tensor, dict[str, Any]]] = []
    build = LayerPlan.build

    def record(self: LayerPlan, q: Tensor, k: Tensor, **options: Any) -> Any:
        calls.append((q, k, options))
        return build(self, q, k, **options)

    monkeypatch.setattr(LayerPlan, "build", record)
    return calls


@pytest.fixture
def stored():
    """dtype of an 8-bit cache, set by tests that use one."""


class PlainEngine(Engine):
    """Engine without vLLM's configuration: every layer is served as `layer`."""

    def __init__(self, layer: ServedLayer) -> None:
        artifact: Any = SimpleNamespace(
            prefill=SimpleNamespace(dense_below=128, dense_tail=0), evidence=artifacts.Evidence()
        )
        self.artifact = artifact
        self.longest = 512
        self.size = 1
        self.dense = None
        self.filter_decode = None
        self.needs_prompts = False
        self.counters = Counters()
        self.counting = None
        self.layer = layer

    def served_layer(self, module: Any) -> ServedLayer:
        return replace(self.layer, number=number_of(module.layer_name))

    def log(self, modules: Any) -> None:
        """Log nothing."""


class Impl(SparseImpl, Parent):
    pass


class Builder(SparseBuilder, ParentsBuilder):
    parents = ParentsBuilder


@pytest.fixture
def engine(ours, stored, monkeypatch):
    """Return an implementation and a builder over Parent with a separate plan.

    serve_by(**changes) changes how layers are served, and makes the builder anew.
    """
    arch = SimpleNamespace(rswa_window=None)
    config = SimpleNamespace(
        model_config=SimpleNamespace(model_arch_config=arch), speculative_config=None
    )
    contents = {
        "vllm": {},
        "vllm.config": {
            "get_current_vllm_config": lambda: config,
            "get_layers_from_vllm_config": lambda *_: {LAYER.layer_name: LAYER},
        },
        "vllm.model_executor": {},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.attention": {"Attention": object},
    }
    for name, values in contents.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("builder", "forward"):
        monkeypatch.setattr(f"runtime.vllm.{name}.engine_of", lambda config: at_work)
    patterns = [make("vertical_slash", vertical=70, slash=70), make("a_shape", sink=64, window=64)]
    plan = LayerPlan(patterns * 2, G)
    at_work = PlainEngine(
        ServedLayer(number=0, plan=plan, owned=True, eight_bits=stored, ours=ours)
    )
    engine = SimpleNamespace(at_work=at_work, config=config, patterns=patterns * 2, ours=ours)

    def serve_by(**changes: Any) -> None:
        at_work.layer = replace(at_work.layer, **changes)
        policy = at_work.layer.policy
        at_work.needs_prompts = policy is not None and policy.selects
        at_work.counting = None
        engine.builder = Builder(None, [LAYER.layer_name], config)

    engine.impl, engine.serve_by = Impl(), serve_by
    engine.impl.stored = stored
    serve_by()
    return engine


def poisoned(engine: Any, pages: int) -> Tensor:
    """Return an unwritten cache of `pages` pages, as vLLM allocates it."""
    cache = torch.full((pages, G, PAGE, 2 * D), float("nan"))
    return cache if engine.impl.stored is None else cache.to(engine.impl.stored).view(torch.uint8)


def put(
    engine: Any, cache: Tensor, key: Tensor, value: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor]:
    """Write keys and values (T, G, D) to their slots and return the values to read back."""
    stored = engine.impl.stored
    eight = [(x / scale).to(stored or x.dtype) for x, scale in ((key, 0.5), (value, 0.25))]
    if engine.ours:
        engine.impl.do_kv_cache_update(LAYER, key, value, cache, slots)
    elif stored is None:
        interleaved(cache, key, value, slots)
    else:
        interleaved(cache, *(x.view(torch.uint8) for x in eight), slots)
    return (key, value) if stored is None else (eight[0].float() * 0.5, eight[1].float() * 0.25)


def profile(engine: Any, query: Tensor, output: Tensor) -> None:
    """Run a layer as in vLLM's profiling run, which has neither keys nor pages."""
    engine.impl.forward(LAYER, query, None, None, torch.empty(0), None, output)


def filter_by(engine: Any, layers: range, requests: int, **section: Any) -> artifacts.OmniKV:
    """Serve the engine's layers by a decode section, and return it."""
    omnikv = artifacts.OmniKV(**SECTION | section)
    longest = engine.at_work.longest
    selector = Selector(omnikv, layers)
    engine.at_work.filter_decode = FilterDecode(selector, requests=requests, longest=longest)
    return omnikv


# Of a request: q (Q, H, D), k and v (K, G, D).
Inputs = tuple[Tensor, Tensor, Tensor]


def serve(
    engine: Any,
    common: Common,
    *,
    number: int = 0,
    metadata: Any = None,
    paging: Paging | None = None,
) -> tuple[list[Tensor], list[Inputs], Any]:
    """Return a layer's outputs (Q, H, D) for each request of a step, its inputs, and the
    metadata.

    Args:
        paging: of a layer that drops tokens; others own the pages of its gap.
    """
    cache = poisoned(engine, int(common.block_table_tensor.max()) + 1)
    query = torch.randn(common.num_actual_tokens, H, D)
    key, value = torch.full((2, common.num_actual_tokens, G, D), float("nan"))
    inputs = []
    spans = list(pairwise(common.query_start_loc_cpu.tolist()))
    spans = [(start, end) for start, end in spans if end > start]
    for i, (start, end) in enumerate(spans):
        k_len = int(common.seq_lens[i])
        slots = slots_of(common.block_table_tensor[i], torch.arange(k_len))
        k, v = put(engine, cache, *torch.randn(2, k_len, G, D), slots)
        if paging is not None and paging.window is not None:
            first = -(-int(paging.front) // PAGE)
            last = (k_len - (end - start) - paging.window + 1) // PAGE
            between = common.block_table_tensor[i, first : max(first, last)].long()
            cache[between] = poisoned(engine, len(between))
        key[start:end] = k[k_len - (end - start) :]
        value[start:end] = v[k_len - (end - start) :]
        inputs.append((query[start:end], k, v))
    if metadata is None:
        metadata = engine.builder.build(0, common)
    output = torch.full_like(query, float("nan"))
    layer = SimpleNamespace(layer_name=f"model.layers.{number}.self_attn.attn", **SCALES)
    assert engine.impl.forward(layer, query, key, value, cache, metadata, output) is output
    return [output[start:end] for start, end in spans], inputs, metadata


def by_plan(patterns: list[Any], inputs: Inputs, sinks: Tensor | None = None) -> Tensor:
    """Return the attention (Q, H, D) of a chunk by patterns, with learned logits per query head."""
    q, k, v = (x.transpose(0, 1)[None] for x in inputs)
    index = LayerPlan(patterns, G).build(q, k, scale=Parent.scale)
    out, lse = Attention.run(AttentionCall(q, k, v, index, logits=Logits(scale=Parent.scale)))
    if sinks is not None:
        out = out * (1 - 1 / (1 + torch.exp(lse - sinks[:, None])))[..., None]
    return out[0].transpose(0, 1)


def by_selection(inputs: Inputs, seen: Tensor | None = None) -> Tensor:
    """Return plain-torch attention (Q, H, D) of the last queries over each KV head's visible
    keys (G, K)."""
    weights = weights_of(inputs[0], inputs[1], seen)
    return torch.einsum("hqk,khd->qhd", weights, inputs[2].repeat_interleave(H // G, 1))


def weights_of(q: Tensor, k: Tensor, seen: Tensor | None = None) -> Tensor:
    """Return the probabilities (H, Q, K) of the last queries."""
    logits = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(H // G, 1)) * Parent.scale
    q_len, k_len = logits.shape[1:]
    mask = torch.ones(q_len, k_len).tril(k_len - q_len).bool()
    if seen is not None:
        mask = mask & seen.repeat_interleave(H // G, 0)[:, None]
    return logits.masked_fill(~mask, float("-inf")).softmax(-1)


def select_tokens(q: Tensor, k: Tensor, section: artifacts.OmniKV) -> Tensor:
    """Return the tokens (K,) that a filter layer selects, in plain torch."""
    scores = weights_of(q, k).amax((0, 1))
    scores[-len(q) :] = float("inf")
    seen = torch.zeros(len(k), dtype=torch.bool)
    seen[scores.topk(max(section.budget, len(q))).indices] = True
    return seen
