"""Mixed into a parent's implementation and metadata builder: sparse prefill here, everything else there.

Shapes: T tokens of a step, H query heads and G KV heads of this process, K key length of a request, D head dim.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from artifacts import HeadwiseError
from kernels.attention import sparse_attention
from kernels.patterns import LayerPlan
from runtime.attention.reasons import message, name_of
from runtime.vllm.batch import Batch, Piece, is_long, pieces_of, rest_of
from runtime.vllm.pages import Keys, Reader, given, packed, paged
from runtime.vllm.served import Served, number_of, served

# The attribute of a parent's metadata that holds the Batch, where one is served sparsely.
_BATCH = "headwise"

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
        self._reader: Reader | None = None

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
        batch: Batch | None = getattr(attn_metadata, _BATCH, None)
        if batch is None or self._served is None:
            return super().forward(layer, *arguments, **more)
        plan = self._served.plan(layer, self.num_heads, self.num_kv_heads)
        if plan is None:
            return super().forward(layer, *arguments, **more)
        if any(x is not None for x in (*scales, *more.values())):
            self._served.refuse("the output is to be quantised")
            return super().forward(layer, *arguments, **more)
        try:
            for piece in batch.pieces:
                keys = self._keys(layer, batch, piece, key, value, kv_cache)
                self._attend(layer, plan, query[piece.rows], keys, output[piece.rows])
        except Exception as error:
            why = str(error) if isinstance(error, HeadwiseError) else name_of(error)
            if why is None:
                raise
            self._served.refuse(why if isinstance(error, HeadwiseError) else f"{why}: {message(error)}")
            return super().forward(layer, *arguments, **more)
        if batch.rest is not None:
            self._leave(layer, batch, query, key, value, kv_cache, output)
        return output

    def _attend(self, layer: Any, plan: LayerPlan, query: Tensor, keys: Keys, output: Tensor) -> None:
        """Write the sparse attention of one request: query (Q, H, D) -> output (Q, H, D)."""
        assert self._served is not None
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
        number = number_of(layer.layer_name)
        assert number is not None
        self._served.counters.index(number, index)

    def _keys(
        self, layer: Any, batch: Batch, piece: Piece, key: Tensor | None, value: Tensor | None, kv_cache: Tensor
    ) -> Keys:
        whole = piece.q_len == piece.k_len and self.kv_sharing_target_layer_name is None
        if whole and key is not None and value is not None:
            return given(key[piece.rows], value[piece.rows])
        if self._reader is None:
            self._reader = paged if self.in_pages else packed(self, layer, kv_cache)
        pages = batch.block_table[piece.request, : -(-piece.k_len // kv_cache.shape[2])]
        return self._reader(kv_cache, pages, piece.k_len)

    def _leave(
        self,
        layer: Any,
        batch: Batch,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        output: Tensor,
    ) -> None:
        """Have the parent serve the requests that are not sparse."""
        rows = batch.rest_rows
        assert rows is not None
        q, k, v = (None if x is None else x[rows] for x in (query, key, value))
        if isinstance(rows, slice):
            super().forward(layer, q, k, v, kv_cache, batch.rest, output[rows])
            return
        apart = output.new_empty(rows.numel(), *output.shape[1:])
        super().forward(layer, q, k, v, kv_cache, batch.rest, apart)
        output[rows] = apart


class SparseBuilder(_Parent):
    """AttentionMetadataBuilder of a parent, which parts a step's batch."""

    # The metadata of one group of layers is not that of another with other pages put in: the parts have pages, too.
    supports_update_block_table: bool = False
    parent: type

    def __new__(cls, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        # The class is asked for where no configuration is known.
        if served(vllm_config) is None:
            return cls.parent(kv_cache_spec, layer_names, vllm_config, *args, **kwargs)
        return super().__new__(cls)

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        from vllm.config import get_layers_from_vllm_config
        from vllm.model_executor.layers.attention import Attention

        super().__init__(kv_cache_spec, layer_names, vllm_config, *args, **kwargs)
        self._served: Served | None = None
        at_work = served(vllm_config)
        assert at_work is not None
        every = get_layers_from_vllm_config(vllm_config, Attention)
        at_work.say(list(every.values()))
        if any(at_work.why_dense(every[name]) is None for name in layer_names if name in every):
            self._served = at_work
            if at_work.counting is None:
                at_work.counting = self

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """The parent's, without graphs of prefill: what is chosen for one prompt would be replayed for another."""
        from vllm.v1.attention.backend import AttentionCGSupport

        parents = super().get_cudagraph_support(vllm_config, kv_cache_spec)
        if served(vllm_config) is None or parents != AttentionCGSupport.ALWAYS:
            return parents
        return AttentionCGSupport.UNIFORM_BATCH

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """The parent's metadata of the whole step, and beside it what is sparse of it."""
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if self._served is None:
            return metadata
        found = pieces_of(common_attn_metadata)
        long = tuple(piece for piece in found if is_long(piece, self._served.dense_below))
        if found and self._served.counting is self:
            for piece in found:
                self._served.counters.piece("sparse" if piece in long else "short", piece.q_len)
            self._served.tell()
        if long:
            setattr(metadata, _BATCH, self._part(common_attn_metadata, long))
        return metadata

    def _part(self, common: Any, long: tuple[Piece, ...]) -> Batch:
        table = common.block_table_tensor
        rest = rest_of(common, long)
        if rest is None:
            return Batch(pieces=long, block_table=table)
        # A fast build keeps nothing in buffers that the metadata of the whole step is still to be read from.
        metadata = super().build(0, rest[0], fast_build=True)
        return Batch(pieces=long, block_table=table, rest=metadata, rest_rows=rest[1])


def has_pages(parent: type) -> bool | None:
    """Whether a backend's cache is read where it lies; None for a backend whose cache is not known."""
    return {"CPU_ATTN": False, "FLASH_ATTN": True, "TRITON_ATTN": True}.get(str(parent.get_name()))  # type: ignore[attr-defined]
