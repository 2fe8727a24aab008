"""Mixed into a parent's implementation: a layer that an artifact serves is served here, any other by the parent.

On a CPU its pages are laid out as our kernels read them best; on a GPU they are the parent's.

Shapes: T tokens of a step, H query heads and G KV heads of this process, K key length of a request, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from artifacts import HeadwiseError, Streaming
from kernels.attention import sparse_attention
from kernels.index import SparseIndex
from kernels.patterns import LayerPlan
from runtime.attention.reasons import message, name_of
from runtime.vllm.batch import KEY, Batch, Piece
from runtime.vllm.layers import ServedLayer
from runtime.vllm.pages import PAGE, Pages, parted, quantised, store
from runtime.vllm.served import Served, served
from runtime.vllm.snapkv import Snap
from runtime.vllm.step import LayerStep

# Whatever the parent is.
_Parent: Any = object


class SparseImpl(_Parent):
    """AttentionImpl of a parent, which it calls for layers that are not served here."""

    # Whether a layer that is served here keeps its cache as our kernels want it, which the parent cannot read.
    ours: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        from vllm.config import get_current_vllm_config

        super().__init__(*args, **kwargs)
        at_work = served(get_current_vllm_config())
        assert at_work is not None, "the parent's own implementation serves without an artifact"
        self._served: Served = at_work

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """The parent's; and where this layer drops tokens, vLLM is told so before it asks what each layer caches."""
        super().process_weights_after_loading(act_dtype)
        self._served.tell_cache(self)

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
        """Write keys and values (T, G, D) of a step into their slots (T,)."""
        at = self._served.of(layer)
        if not (self.ours and at.owns):
            super().do_kv_cache_update(layer, key, value, kv_cache, slots)
            return
        if (stored := at.eight_bits) is not None:
            key, value = quantised(key, layer._k_scale_float, stored), quantised(value, layer._v_scale_float, stored)
        store(kv_cache, key, value, slots)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        *scales: Any,
        **more: Any,
    ) -> Tensor:
        """query (T, H, D), key and value (T, G, D); writes output (T, H, D)."""
        arguments = (layer, query, key, value, kv_cache, attn_metadata, output, *scales)
        at = self._served.of(layer)
        if attn_metadata is None:
            self._rehearse(at, query.to(output.dtype))
        batch: Batch | None = getattr(attn_metadata, KEY, None)
        if batch is None or not at.owns:
            return super().forward(*arguments, **more)
        if any(x is not None for x in (*scales, *more.values())):
            self._served.counters.fell_back("the output is to be quantised")
            return super().forward(*arguments, **more)
        pages = Pages.of(layer, kv_cache, self.ours, at.eight_bits)
        # For a cache of 8 bits some backends of vLLM for GPUs are given a query of 8 bits.
        plain = query if query.dtype == output.dtype else query.to(output.dtype) * layer._q_scale_float
        step = LayerStep(batch, plain, pages, output, self._how(pages.k_scale), key, value)
        done = self._sparsely(at, step)
        step.attend(batch.left(done), at.keeps if isinstance(at.keeps, Streaming) else None)
        if isinstance(at.keeps, Snap):
            at.keeps.keep(step)
        return output

    def _sparsely(self, at: ServedLayer, step: LayerStep) -> list[Piece]:
        """Write what patterns and chosen tokens serve of a step; which requests that is, none where a kernel fails."""
        assert at.number is not None
        chooser, counters = self._served.chooser, self._served.counters
        pieces = () if at.plan is None else step.batch.pieces
        chosen = () if at.role is None else step.batch.chosen
        done: list[Piece] = []
        indices = []
        try:
            for piece in pieces:
                assert at.plan is not None
                indices.append(self._by_patterns(at.plan, step, piece))
                done.append(piece)
            for few in chosen:
                assert at.role is not None and chooser is not None
                chooser.attend(at.number, at.role, few, step)
                done += few.pieces
        except Exception as error:
            ours = isinstance(error, HeadwiseError)
            why = str(error) if ours else name_of(error)
            # A process that gives up where processes choose together would leave the others waiting.
            if why is None or (chosen and chooser is not None and chooser.omni.group is not None):
                raise
            counters.fell_back(why, "" if ours else message(error))
            return []
        for index in indices:
            counters.index(at.number, index)
        return done

    def _by_patterns(self, plan: LayerPlan, step: LayerStep, piece: Piece) -> SparseIndex:
        """Write the sparse attention of a piece and give its index."""
        q, out, pages = step.of(piece)
        table: Tensor | None = pages
        (k, v, _, v_scale), how = step.pages, step.how
        whole = piece.q_len == piece.k_len and self.kv_sharing_target_layer_name is None
        if whole and step.key is not None and step.value is not None:
            # No other keys than those of this step, which are there as they were before they were stored.
            k, v = (x[piece.rows].transpose(0, 1)[None] for x in (step.key, step.value))
            table, v_scale, how = None, 1.0, self._how()
        index = plan.build(q, k, scale=how["scale"], block_table=table, k_len=piece.k_len)
        sparse_attention(q, k, v, index, block_table=table, out=out, **how)
        if v_scale != 1:
            out.mul_(v_scale)
        return index

    def _rehearse(self, at: ServedLayer, query: Tensor) -> None:
        """In vLLM's profiling run, take what a step of this layer takes beside its output: vLLM leaves room for it.

        That is the index of the last chunk of the longest prompt, the scores and slots of decode by chosen tokens at
        the longest context, and the copies of the longest prompt of which a part is kept. Query is (T, H, D) with the
        most tokens that a step has.
        """
        k_len = self._served.longest
        query = query[-k_len:]
        # One page that stands for all of a context's.
        cache = query.new_zeros(1, self.num_kv_heads, PAGE, 2 * query.shape[-1], dtype=at.eight_bits or query.dtype)
        table = torch.zeros(1, -(-k_len // PAGE), dtype=torch.int32, device=query.device)
        step = LayerStep(Batch(block_table=table), query, Pages(*parted(cache, self.ours)), query, self._how())
        piece = Piece(0, 0, len(query), k_len, prompt=k_len)
        if at.plan is not None and self._served.is_long(piece):
            q = query.transpose(0, 1)[None]
            at.plan.build(q, step.pages.k, scale=self.scale, block_table=table, k_len=k_len)
        if at.role is not None and at.role.filters:
            assert at.number is not None and self._served.chooser is not None
            self._served.chooser.rehearse(at.number, at.role, step)
        if isinstance(at.keeps, Snap):
            voting = query.new_zeros(1, query.shape[1], min(at.keeps.window, k_len), query.shape[2])
            at.keeps.move(step, voting, piece)

    def _how(self, k_scale: float = 1.0) -> dict[str, Any]:
        softcap, sinks = self.logits_soft_cap or None, getattr(self, "sinks", None)
        return {"scale": self.scale * k_scale, "softcap": softcap, "sinks": sinks}
