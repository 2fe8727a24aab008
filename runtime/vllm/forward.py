"""Attention of a layer's step: vLLM's implementation, but for the layers served here.

On a CPU their pages are laid out as our kernels read them best; on a GPU they are the parent's.

Shapes: T tokens of a step, H query heads and G KV heads of this process, D head dim.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from artifacts import HeadwiseError
from kernels.attention import sparse_attention
from kernels.logits import Logits
from kernels.patterns import LayerPlan
from kernels.registry import NoKernelError
from runtime.attention.chunk import Chunk
from runtime.attention.failures import error_category, message
from runtime.vllm.batch import KEY, Batch, Group
from runtime.vllm.engine import Engine, ServedLayer, engine_of
from runtime.vllm.step import PAGE, LayerStep, quantised, split_kv, write_kv

# Whatever the parent is.
_Parent: Any = object


class SparseImpl(_Parent):
    """AttentionImpl over a parent's, which serves layers that are not served here."""

    # True if layers served here have pages for our kernels, which the parent cannot read.
    ours: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        from vllm.config import get_current_vllm_config

        super().__init__(*args, **kwargs)
        engine = engine_of(get_current_vllm_config())
        assert engine is not None, "the parent's own implementation serves without an artifact"
        self._engine: Engine = engine

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """The parent's; the engine's layers are all there now."""
        super().process_weights_after_loading(act_dtype)
        self._engine.prepare()

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor
    ) -> None:
        """Write keys and values (T, G, D) of a step into their slots (T,)."""
        served = self._engine.served_layer(layer)
        if not served.ours:
            super().do_kv_cache_update(layer, key, value, kv_cache, slots)
            return
        if served.eight_bits is not None:
            key = quantised(key, layer._k_scale_float, served.eight_bits)
            value = quantised(value, layer._v_scale_float, served.eight_bits)
        write_kv(kv_cache, key, value, slots)

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """No: vLLM quantises what our kernels have written."""
        return False

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        **scales: Tensor | None,
    ) -> Tensor:
        """Attend: query (T, H, D), key and value (T, G, D); writes output (T, H, D)."""
        arguments = (layer, query, key, value, kv_cache, attn_metadata, output)
        served = self._engine.served_layer(layer)
        if not served.owned:
            return super().forward(*arguments, **scales)
        if any(scale is not None for scale in scales.values()):
            # vLLM asks one layer for all of them, which may be a draft model's.
            off = """--compilation-config '{"pass_config": {"fuse_attn_quant": false}}'"""
            raise HeadwiseError(
                f"no quantised output from a layer served by an artifact: use {off}"
            )
        if attn_metadata is None:
            try:
                self._profile_memory(served, query.to(output.dtype))
            except NoKernelError as error:
                self._leave_to_parent(served, error)
        batch: Batch | None = getattr(attn_metadata, KEY, None)
        if batch is None:
            return super().forward(*arguments)
        if query.dtype != output.dtype:
            # With a cache of 8 bits, vLLM passes a query of 8 bits to some backends for GPUs.
            query = query.to(output.dtype).mul_(layer._q_scale_float)
        k_scale = v_scale = 1.0
        if served.eight_bits is not None:
            kv_cache = kv_cache.view(served.eight_bits)
            k_scale = layer._k_scale_float
            v_scale = layer._v_scale_float
        k, v = split_kv(kv_cache, served.ours)
        step = LayerStep(
            batch=batch,
            query=query,
            output=output,
            k=k,
            v=v,
            v_scale=v_scale,
            logits=self._logits(k_scale),
            own=None if key is None or value is None else (key, value),
        )
        try:
            done = self._sparsely(served, step)
            if served.policy is None:
                step.attend(done)
            else:
                served.policy.attend(step, done)
        except NoKernelError as error:
            self._leave_to_parent(served, error)
            return super().forward(*arguments)
        return output

    def _leave_to_parent(self, served: ServedLayer, error: NoKernelError) -> None:
        """Count a step of a layer that vLLM's own attention serves, for no kernel of ours can.

        Raises:
            HeadwiseError: it cannot read the layer's pages.
        """
        if served.ours or served.policy is not None:
            raise HeadwiseError(
                f"layer {served.number} cannot be served, and vLLM's own attention cannot read its "
                f"cache: {error}"
            ) from error
        self._engine.counters.fell_back("vLLM's own attention serves", str(error))

    def _sparsely(self, served: ServedLayer, step: LayerStep) -> list[Chunk]:
        """Write attention of the requests that patterns and selected tokens serve.

        Returns these requests; none if a kernel fails.
        """
        engine = self._engine
        groups: tuple[Group, ...] = ()
        if engine.filter_decode is not None and served.number in engine.filter_decode.roles:
            groups = step.batch.decodes
        done: list[Chunk] = []
        try:
            if served.plan is not None:
                for chunk in step.batch.sparse:
                    self._by_patterns(served.plan, step, chunk)
                    done.append(chunk)
            for group in groups:
                assert engine.filter_decode is not None and served.number is not None
                engine.filter_decode.attend(served.number, group, step)
                done += group.chunks
        except Exception as error:
            ours = isinstance(error, HeadwiseError)
            why = str(error) if ours else error_category(error)
            # Processes select together: if one stopped here, the others would wait for it.
            if why is None or (groups and engine.size > 1):
                if isinstance(error, NoKernelError):
                    raise HeadwiseError(str(error)) from error
                raise
            engine.counters.fell_back(why, "" if ours else message(error))
            return []
        return done

    def _by_patterns(self, plan: LayerPlan, step: LayerStep, chunk: Chunk) -> None:
        """Write the sparse attention of a chunk."""
        query, out, pages = step.request(chunk)
        table: Tensor | None = pages
        whole = chunk.q_len == chunk.k_len and self.kv_sharing_target_layer_name is None
        if whole and step.own is not None:
            # All keys are of this step: read them unquantized, not from the cache.
            k, v = (x[chunk.queries].transpose(0, 1)[None] for x in step.own)
            step = replace(step, k=k, v=v, v_scale=1.0, logits=self._logits())
            table = None
        logits = step.logits
        index = plan.build(query, step.k, scale=logits.scale, block_table=table, k_len=chunk.k_len)
        sparse_attention(query, step.k, step.v, index, logits=logits, block_table=table, out=out)
        step.rescale(out)

    def _profile_memory(self, served: ServedLayer, query: Tensor) -> None:
        """Use the memory of this layer's largest step, in vLLM's profiling run.

        Each kernel is launched, so that one which cannot be built shows when the engine starts.
        vLLM then leaves as much free: for the index of the last chunk of the longest prompt, for
        scores and slots of decode by selected tokens at the longest context, and for the copies of
        a policy.

        Args:
            served: the layer.
            query: (T, H, D) with the maximum of tokens in a step.
        """
        k_len = self._engine.longest
        query = query[-k_len:]
        # One page, used for all pages of a context.
        dtype = served.eight_bits or query.dtype
        cache = query.new_zeros(1, self.num_kv_heads, PAGE, 2 * query.shape[-1], dtype=dtype)
        table = torch.zeros(1, -(-k_len // PAGE), dtype=torch.int32, device=query.device)
        k, v = split_kv(cache, served.ours)
        step = LayerStep(
            batch=Batch(block_table=table),
            query=query,
            output=query,
            k=k,
            v=v,
            logits=self._logits(),
        )
        chunk = Chunk(0, 0, len(query), 0, k_len, prompt=k_len)
        self._build_kernels(served, step)
        if served.plan is not None and self._engine.is_sparse(chunk):
            q = query.transpose(0, 1)[None]
            served.plan.build(q, k, scale=self.scale, block_table=table, k_len=k_len)
        if served.number is not None and self._engine.filter_decode is not None:
            self._engine.filter_decode.profile_memory(served.number, step)
        if served.policy is not None:
            served.policy.profile_memory(step, chunk)

    def _build_kernels(self, served: ServedLayer, step: LayerStep) -> None:
        """Launch each kernel that may serve this layer once, on one page of keys."""
        table = torch.zeros(1, 1, dtype=torch.int32, device=step.query.device)
        prompt = Chunk(0, 0, PAGE, 0, PAGE)
        batch = Batch(block_table=table, requests=(prompt,))
        query = step.query.new_zeros(PAGE, *step.query.shape[1:])
        keys = query.new_zeros(PAGE, step.k.shape[2], query.shape[-1])
        step = replace(step, batch=batch, query=query, output=query.clone(), own=None)
        if served.plan is not None:
            for own in (None, (keys, keys)):
                self._by_patterns(served.plan, replace(step, own=own), prompt)
        step.attend(())
        tokens = table.new_zeros(1, 1)
        for chunk in (prompt._replace(q_len=1), prompt._replace(q_len=2)):
            (group,) = batch.groups([chunk])
            step.decode(group)
            if served.policy is not None or self._engine.filter_decode is not None:
                step.decode(group, tokens)
            if served.policy is not None:
                step.decode(group, tokens.repeat(1, step.k.shape[2])[..., None])

    def _logits(self, k_scale: float = 1.0) -> Logits:
        softcap = self.logits_soft_cap or None
        return Logits(self.scale * k_scale, softcap, getattr(self, "sinks", None))
