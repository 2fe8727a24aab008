"""Mixed into a parent's implementation: sparse prefill and decode by chosen tokens here, everything else there.

On a CPU, a layer that is served at all is served here alone, from pages laid out as our kernels read them best.

Shapes: T tokens of a step, H query heads and G KV heads of this process, K key length of a request, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from artifacts import HeadwiseError
from kernels.attention import sparse_attention
from kernels.index import SparseIndex
from runtime.attention.reasons import message, name_of
from runtime.attention.turns import Turns
from runtime.vllm.batch import KEY, Batch, Piece, Rest
from runtime.vllm.dense import Stream, attend_pages
from runtime.vllm.pages import Pages, pages_of, parted, quantised, store
from runtime.vllm.served import Served, ServedLayer, served
from runtime.vllm.snapkv import Snap, keep, rehearse

# Tokens of a page, where it is not known yet.
_PAGE = 64
# Whatever the parent is.
_Parent: Any = object


class LayerStep(NamedTuple):
    """A step of one layer: query (T, H, D), key and value (T, G, D), the cache; output (T, H, D) is written to.

    given: the query as vLLM gives it, which may have 8 bits. pages: of the cache.
    """

    layer: Any
    at: ServedLayer
    batch: Batch
    query: Tensor
    given: Tensor
    key: Tensor | None
    value: Tensor | None
    cache: Tensor
    pages: Pages
    output: Tensor


class SparseImpl(_Parent):
    """AttentionImpl of a parent, which it calls for all that is not sparse."""

    # Whether a layer that is served here keeps its cache as our kernels want it, which the parent cannot read.
    ours: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        from vllm.config import get_current_vllm_config

        super().__init__(*args, **kwargs)
        self._served: Served | None = served(get_current_vllm_config())
        self.is_served = self._served is not None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """The parent's; and where this layer drops tokens, vLLM is told so before it asks what each layer caches."""
        super().process_weights_after_loading(act_dtype)
        if self._served is not None:
            self._served.tell_cache(self)

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
        """Write keys and values (T, G, D) of a step into their slots (T,)."""
        if not self.ours or self._served is None or not (at := self._served.of(layer)).owns:
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
        arguments = (query, key, value, kv_cache, attn_metadata, output, *scales)
        at_work = self._served
        if at_work is None:
            return super().forward(layer, *arguments, **more)
        at = at_work.of(layer)
        if attn_metadata is None:
            self._rehearse(at, _plain(layer, query, output))
        batch: Batch | None = getattr(attn_metadata, KEY, None)
        if batch is None or not (at.owns or (at.turns and batch.pieces) or (at.role and batch.chosen)):
            return super().forward(layer, *arguments, **more)
        if any(x is not None for x in (*scales, *more.values())):
            at_work.counters.fell_back("the output is to be quantised")
            return super().forward(layer, *arguments, **more)
        cache = kv_cache if at.eight_bits is None else kv_cache.view(at.eight_bits)
        pages, plain = pages_of(layer, cache, self.ours), _plain(layer, query, output)
        step = LayerStep(layer, at, batch, plain, query, key, value, cache, pages, output)
        done = self._sparsely(step, at_work)
        if not at.owns:
            if (rest := batch.rest(done)) is not None:
                self._leave(step, rest)
            return output
        self._densely(step, [piece for piece in batch.others(done) if not piece.generated])
        if isinstance(at.keeps, Snap):
            how = self._how(pages.k_scale)
            keep(at.keeps, at_work.windows, layer.layer_name, plain, pages, output, batch, **how)
        return output

    def _sparsely(self, step: LayerStep, at_work: Served) -> list[Piece]:
        """Write what patterns and chosen tokens serve of a step; which requests that is, none where a kernel fails."""
        at, batch, chooser = step.at, step.batch, at_work.chooser
        assert at.number is not None
        chosen = () if at.role is None else batch.chosen
        done: list[Piece] = []
        indices = []
        try:
            for piece in batch.pieces if at.turns is not None else ():
                assert at.turns is not None
                if (index := self._by_patterns(step, at.turns, piece)) is not None:
                    indices.append(index)
                    done.append(piece)
                else:
                    at_work.counters.slower()
            for few in chosen:
                assert at.role is not None and chooser is not None
                how = self._how(step.pages.k_scale)
                chooser.attend(at.number, at.role, few, step.query, step.pages, step.output, **how)
                done += few.pieces
        except Exception as error:
            ours = isinstance(error, HeadwiseError)
            why = str(error) if ours else name_of(error)
            if why is None or (chosen and at_work.agrees):
                raise
            at_work.counters.fell_back(why, "" if ours else message(error))
            return []
        for index in indices:
            at_work.counters.index(at.number, index)
        return done

    def _rehearse(self, at: ServedLayer, query: Tensor) -> None:
        """In vLLM's profiling run, take what a step of this layer takes beside its output: vLLM leaves room for it.

        That is the index of the last chunk of the longest prompt, the scores and slots of decode by chosen tokens at
        the longest context, and the copies of the longest prompt of which a part is kept. Query is (T, H, D) with the
        most tokens that a step has.
        """
        assert self._served is not None
        k_len = self._served.longest
        q = query[-k_len:].transpose(0, 1)[None]
        # One page that stands for all of a context's.
        cache = query.new_zeros(1, self.num_kv_heads, _PAGE, 2 * query.shape[-1], dtype=at.eight_bits or query.dtype)
        pages = Pages(*parted(cache, self.ours))
        if at.turns is not None and self._served.is_long(Piece(0, 0, q.shape[2], k_len)):
            table = torch.zeros(1, -(-k_len // _PAGE), dtype=torch.int32, device=query.device)
            at.turns.plan.build(q, pages.k, scale=self.scale, block_table=table, k_len=k_len)
        if at.role is not None and at.role.filters:
            assert at.number is not None and self._served.chooser is not None
            self._served.chooser.rehearse(at.number, at.role, query, pages, **self._how())
        if isinstance(at.keeps, Snap):
            rehearse(at.keeps, query, pages, k_len, **self._how())

    def _by_patterns(self, step: LayerStep, turns: Turns, piece: Piece) -> SparseIndex | None:
        """Write the sparse attention of a piece and give its index; None where dense attention is the faster."""
        q, lengths = step.query[piece.rows].transpose(0, 1)[None], (piece.q_len, piece.k_len)
        gains = turns.gains(q, step.pages.k.transpose(1, 2), *lengths)
        if gains is False:
            return None
        built: list[SparseIndex] = []

        def sparse(out: Tensor) -> Tensor:
            k, v, k_scale, v_scale = step.pages
            table: Tensor | None = step.batch.pages(piece, step.pages.size)[None]
            if piece.q_len == piece.k_len and self.kv_sharing_target_layer_name is None and step.value is not None:
                # No other keys than those of this step, which are there as they were before they were stored.
                assert step.key is not None
                k, v = (x[piece.rows].transpose(0, 1)[None] for x in (step.key, step.value))
                table, k_scale, v_scale = None, 1.0, 1.0
            how = self._how(k_scale)
            index = turns.plan.build(q, k, scale=how["scale"], block_table=table, k_len=piece.k_len)
            built.append(index)
            sparse_attention(*(q, k, v, index), block_table=table, out=out.transpose(0, 1)[None], **how)
            return out if v_scale == 1 else out.mul_(v_scale)

        if gains:
            sparse(step.output[piece.rows])
        else:
            # Both ways are tried: the output is the last one's, so patterns write beside it.
            beside = torch.empty_like(step.output[piece.rows])
            ways = partial(sparse, beside), partial(self._alone, step, piece)
            if (found := turns.measure(q, step.pages.k.transpose(1, 2), lengths, *ways)) is None:
                return None
            step.output[piece.rows] = found
        return built[-1]

    def _how(self, k_scale: float = 1.0) -> dict[str, Any]:
        softcap, sinks = self.logits_soft_cap or None, getattr(self, "sinks", None)
        return {"scale": self.scale * k_scale, "softcap": softcap, "sinks": sinks}

    def _alone(self, step: LayerStep, piece: Piece) -> Tensor:
        """Write one request's dense attention: what it would be left to."""
        if step.at.owns:
            self._densely(step, (piece,))
        elif (rest := step.batch.rest(step.batch.others((piece,)))) is not None:
            self._leave(step, rest)
        return step.output[piece.rows]

    def _densely(self, step: LayerStep, pieces: Sequence[Piece]) -> None:
        stream, how = step.at.keeps if isinstance(step.at.keeps, Stream) else None, self._how(step.pages.k_scale)
        attend_pages(step.query, step.pages, step.output, step.batch, tuple(pieces), stream, **how)

    def _leave(self, step: LayerStep, rest: Rest) -> None:
        """Have the parent serve the requests that are not sparse."""
        rows, output = rest.rows, step.output
        cache = step.cache if step.at.eight_bits is None else step.cache.view(torch.uint8)
        q, k, v = (None if x is None else x[rows] for x in (step.given, step.key, step.value))
        if isinstance(rows, slice):
            super().forward(step.layer, q, k, v, cache, rest.metadata, output[rows])
            return
        apart = output.new_empty(rows.numel(), *output.shape[1:])
        super().forward(step.layer, q, k, v, cache, rest.metadata, apart)
        output[rows] = apart


def _plain(layer: Any, query: Tensor, output: Tensor) -> Tensor:
    """The query in the model's dtype: for a cache of 8 bits some backends of vLLM for GPUs are given one of 8 bits."""
    return query if query.dtype == output.dtype else query.to(output.dtype) * layer._q_scale_float


def is_ours(parent: type) -> bool | None:
    """Whether layers over a backend are ours alone; None for a backend whose cache is not known."""
    return {"CPU_ATTN": True, "FLASH_ATTN": False, "TRITON_ATTN": False}.get(str(parent.get_name()))  # type: ignore[attr-defined]
