"""Mixed into a parent's implementation: sparse prefill and decode by chosen tokens here, everything else there.

Shapes: T tokens of a step, H query heads and G KV heads of this process, K key length of a request, D head dim.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from artifacts import HeadwiseError
from kernels.attention import sparse_attention
from kernels.index import SparseIndex
from kernels.patterns import Dense, LayerPlan
from kernels.patterns.fixed import Fixed
from runtime.attention.reasons import message, name_of
from runtime.omnikv.roles import Role
from runtime.vllm.batch import KEY, Batch, Piece, Rest, is_long
from runtime.vllm.pages import Keys, Packed, given, packed, paged
from runtime.vllm.served import Served, number_of, served

# Whatever the parent is.
_Parent: Any = object


class SparseImpl(_Parent):
    """AttentionImpl of a parent, which it calls for all that is not sparse."""

    # Whether the parent's cache can be read where it lies.
    in_pages: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        from vllm.config import get_current_vllm_config

        super().__init__(*args, **kwargs)
        self._served: Served | None = served(get_current_vllm_config())
        self.is_served = self._served is not None
        self._reader: Packed | None = None

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
        if attn_metadata is None and self._served is not None:
            self._rehearse(layer, query)
        batch: Batch | None = getattr(attn_metadata, KEY, None)
        if batch is None or self._served is None:
            return super().forward(layer, *arguments, **more)
        plan = self._served.plan(layer, self.num_heads, self.num_kv_heads)
        role = self._served.role(layer)
        pieces = () if plan is None else batch.pieces
        steps = () if role is None else batch.steps
        if not pieces and not steps:
            return super().forward(layer, *arguments, **more)
        if any(x is not None for x in (*scales, *more.values())):
            self._served.refuse("the output is to be quantised")
            return super().forward(layer, *arguments, **more)
        indices = []
        try:
            for piece in pieces:
                assert plan is not None
                keys = self._keys(plan, layer, batch, piece, key, value, kv_cache)
                indices.append(self._attend(plan, query[piece.rows], keys, output[piece.rows]))
            for step in steps:
                assert role is not None
                self._decode(role, layer, batch, step, query[step.rows], kv_cache, output[step.rows])
        except Exception as error:
            why = str(error) if isinstance(error, HeadwiseError) else name_of(error)
            if why is None:
                raise
            self._served.refuse(why, "" if isinstance(error, HeadwiseError) else message(error))
            return super().forward(layer, *arguments, **more)
        number = number_of(layer.layer_name)
        assert number is not None
        for index in indices:
            self._served.counters.index(number, index)
        if (rest := batch.rest((*pieces, *steps))) is not None:
            self._leave(layer, rest, query, key, value, kv_cache, output)
        return output

    def _rehearse(self, layer: Any, query: Tensor) -> None:
        """In vLLM's profiling run, take what the last chunk of the longest prompt takes: vLLM leaves room for it.

        Query is (T, H, D) with the most tokens that a step has.
        """
        assert self._served is not None
        k_len = self._served.longest
        q = query[-k_len:].transpose(0, 1)[None]
        plan = self._served.plan(layer, self.num_heads, self.num_kv_heads)
        if plan is not None and is_long(Piece(0, 0, q.shape[2], k_len), self._served.dense_below):
            # Their values, too, where a cache has to be unpacked.
            held = query.new_zeros(1 if self.in_pages else 2, self.num_kv_heads, k_len, query.shape[-1])
            plan.build(q, held[:1], scale=self.scale)

    def _attend(self, plan: LayerPlan, query: Tensor, keys: Keys, output: Tensor) -> SparseIndex:
        """Write the sparse attention of one request, by the index that is returned: query (Q, H, D) -> output."""
        q = query.transpose(0, 1)[None]
        index = plan.build(q, keys.dense, scale=self.scale)
        sparse_attention(
            *(q, keys.k, keys.v, index),
            sinks=getattr(self, "sinks", None),
            scale=self.scale,
            softcap=self.logits_soft_cap or None,
            block_table=keys.table,
            out=output.transpose(0, 1)[None],
        )
        return index

    def _keys(
        self,
        plan: LayerPlan,
        layer: Any,
        batch: Batch,
        piece: Piece,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
    ) -> Keys:
        whole = piece.q_len == piece.k_len and self.kv_sharing_target_layer_name is None
        if whole and key is not None and value is not None:
            return given(key[piece.rows], value[piece.rows])
        reader = self._packed(layer, kv_cache) or paged
        return reader(kv_cache, _pages(batch, piece, kv_cache), piece.k_len, reads_keys(plan))

    def _packed(self, layer: Any, kv_cache: Tensor) -> Packed | None:
        """How the parent's cache is read, None where kernels read its pages."""
        if self._reader is None and not self.in_pages:
            self._reader = packed(self, layer, kv_cache)
        return self._reader

    def _decode(
        self, role: Role, layer: Any, batch: Batch, step: Piece, query: Tensor, kv_cache: Tensor, output: Tensor
    ) -> None:
        """Write what a request's new tokens attend to by the decode section: query (Q, H, D) -> output (Q, H, D)."""
        assert self._served is not None and self._served.chooser is not None
        number = number_of(layer.layer_name)
        assert number is not None
        found = self._served.chooser.attend(
            *(number, role, step.request, query.transpose(0, 1)[None], kv_cache, _pages(batch, step, kv_cache)),
            step.k_len,
            self._packed(layer, kv_cache),
            scale=self.scale,
            softcap=self.logits_soft_cap or None,
            sinks=getattr(self, "sinks", None),
        )
        output.copy_(found[0].transpose(0, 1))

    def _leave(
        self,
        layer: Any,
        rest: Rest,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        output: Tensor,
    ) -> None:
        """Have the parent serve the requests that are not sparse."""
        rows = rest.rows
        q, k, v = (None if x is None else x[rows] for x in (query, key, value))
        if isinstance(rows, slice):
            super().forward(layer, q, k, v, kv_cache, rest.metadata, output[rows])
            return
        apart = output.new_empty(rows.numel(), *output.shape[1:])
        super().forward(layer, q, k, v, kv_cache, rest.metadata, apart)
        output[rows] = apart


def _pages(batch: Batch, piece: Piece, kv_cache: Tensor) -> Tensor:
    return batch.block_table[piece.request, : -(-piece.k_len // kv_cache.shape[2])]


def reads_keys(plan: LayerPlan) -> bool:
    """Whether an index of the plan depends on what the keys are, not only on how many."""
    return not all(isinstance(pattern, Fixed | Dense) for pattern in plan.patterns)


def has_pages(parent: type) -> bool | None:
    """Whether a backend's cache is read where it lies; None for a backend whose cache is not known."""
    return {"CPU_ATTN": False, "FLASH_ATTN": True, "TRITON_ATTN": True}.get(str(parent.get_name()))  # type: ignore[attr-defined]
