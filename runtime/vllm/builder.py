"""Prepares a step: vLLM's metadata builder, which also sorts the batch for layers served here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from artifacts import HeadwiseError
from kernels.decode import MAX_QUERIES
from runtime.attention.chunk import Chunk
from runtime.vllm.batch import (
    KEY,
    Batch,
    prefills_of,
    requests_of,
    special,
    split_at_prompts,
)
from runtime.vllm.counters import SPARSE
from runtime.vllm.engine import Engine, drafts_of, engine_of

# Whatever the parent is.
_Parent: Any = object


class SparseBuilder(_Parent):
    """AttentionMetadataBuilder over a parent's."""

    # The batch holds pages, too: it cannot be updated to another group's block table.
    supports_update_block_table: bool = False
    parents: type
    # True while a step is built that is captured in a graph and replayed for others.
    _captured: bool = False

    def __new__(
        cls, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Make a builder; the parent's own if the engine serves no artifact."""
        if engine_of(vllm_config) is None:
            return cls.parents(kv_cache_spec, layer_names, vllm_config, *args, **kwargs)
        return super().__new__(cls)

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        from vllm.config import get_layers_from_vllm_config
        from vllm.model_executor.layers.attention import Attention

        super().__init__(kv_cache_spec, layer_names, vllm_config, *args, **kwargs)
        engine = engine_of(vllm_config)
        assert engine is not None
        self._engine: Engine = engine
        engine.log(get_layers_from_vllm_config(vllm_config, Attention).values())
        modules = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
        layers = [engine.served_layer(module) for module in modules.values()]
        policies = [layer.policy for layer in layers if layer.policy is not None]
        self._drops = bool(policies)
        self._splits_at_prompts = any(policy.selects for policy in policies)
        # vLLM's host has upper bounds of lengths where drafts were verified.
        self._exact = self._drops or (
            engine.filter_decode is not None and drafts_of(vllm_config) > 0
        )
        # True if the parent can read the pages of all layers of the group.
        self._readable = not self._drops and not any(layer.ours for layer in layers)
        self._owned = any(layer.owned for layer in layers)
        if self._owned:
            engine.counting = engine.counting or self
        self._gets_prompts = engine.needs_prompts
        if self._gets_prompts:
            # The only way to the lengths of prompts: vLLM passes them to builders for models with a
            # window over generated tokens (R-SWA). It reads this when a layer or a builder is made
            # and when a step begins: no layer's attention changes.
            vllm_config.model_config.model_arch_config.rswa_window = engine.longest

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """Support of the parent, without graphs of steps that depend on the host.

        Decode over every key can be replayed, and decode by selected tokens where each request has
        one new token.
        """
        from vllm.v1.attention.backend import AttentionCGSupport as Support

        parents = super().get_cudagraph_support(vllm_config, kv_cache_spec)
        engine = engine_of(vllm_config)
        if engine is None:
            return parents
        ours = Support.UNIFORM_BATCH
        if engine.filter_decode is not None:
            single = Support.UNIFORM_SINGLE_TOKEN_DECODE
            ours = single if engine.filter_decode.captures else Support.NEVER
        if engine.artifact.kv_cache is not None or drafts_of(vllm_config) >= MAX_QUERIES:
            ours = Support.NEVER
        return min(parents, ours, key=lambda support: support.value)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """Metadata of the parent; a decode section is captured for contexts of any length."""
        self._captured = True
        try:
            return super().build_for_cudagraph_capture(common_attn_metadata)
        finally:
            self._captured = False

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        """Metadata of the parent for the whole step, with the Batch of the layers served here."""
        common = common_attn_metadata
        prompts = common.rswa_prefix_lens
        if self._gets_prompts:
            common = replace(common, rswa_prefix_lens=None)
        metadata = super().build(common_prefix_len, common, fast_build)
        if self._owned:
            batch = self._batch(common, prompts)
            if batch is not None:
                setattr(metadata, KEY, batch)
        return metadata

    def _batch(self, common: Any, prompts: Any) -> Batch | None:
        """Batch of a step, None where the parent serves all of it."""
        engine = self._engine
        if special(common):
            if self._readable:
                return None
            raise HeadwiseError("a step is not plainly causal, and our pages are not vLLM's")
        requests = requests_of(common, exact=self._exact)
        if self._splits_at_prompts:
            requests = split_at_prompts(requests, prompts.tolist())
        prefills = prefills_of(common, requests)
        batch = Batch(
            block_table=common.block_table_tensor,
            requests=requests,
            sparse=tuple(filter(engine.is_sparse, prefills)),
            lengths=None if self._drops else common.seq_lens,
            captured=self._captured,
        )
        over_budget: list[Chunk] = []
        reads: list[int] = []
        if engine.filter_decode is not None:
            batch.decodes, over_budget = engine.filter_decode.groups(batch)
            reads = [engine.filter_decode.reads(chunk) for chunk in over_budget]
        if engine.counting is self and not self._captured:
            dense = set(prefills).difference(batch.sparse, over_budget)
            counts = [(SPARSE, chunk.q_len) for chunk in batch.sparse]
            counts += [(engine.dense or "short", chunk.q_len) for chunk in dense]
            engine.counters.step(counts, reads)
            engine.check_length(batch.sparse)
        return batch
