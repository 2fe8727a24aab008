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
from kernels.attention.checks import EIGHT_BITS
from kernels.index import SparseIndex
from runtime.attention.reasons import message, name_of
from runtime.attention.turns import Turns
from runtime.omnikv.roles import Role
from runtime.vllm.batch import KEY, Batch, Ones, Piece, Rest
from runtime.vllm.dense import Stream, attend_densely
from runtime.vllm.pages import Keys, given, parted, quantised, store
from runtime.vllm.served import Served, number_of, served
from runtime.vllm.snapkv import Snap, keep, rehearse

# Tokens of a page, where it is not known yet.
_PAGE = 64
# Whatever the parent is.
_Parent: Any = object


class Call(NamedTuple):
    """A step of one layer: query (T, H, D), key and value (T, G, D), the cache; output (T, H, D) is written to.

    given: the query as vLLM gives it, which may have 8 bits.
    """

    layer: Any
    query: Tensor
    given: Tensor
    key: Tensor | None
    value: Tensor | None
    cache: Tensor
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
        if not self.ours or self._served is None or not self._served.owns(layer):
            super().do_kv_cache_update(layer, key, value, kv_cache, slots)
            return
        if (stored := self._served.eight_bits(layer)) is not None:
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
        if attn_metadata is None and self._served is not None:
            self._rehearse(layer, _plain(layer, query, output))
        batch: Batch | None = getattr(attn_metadata, KEY, None)
        if batch is None or self._served is None:
            return super().forward(layer, *arguments, **more)
        turns, role = self._served.turns(layer, self.num_heads, self.num_kv_heads), self._served.role(layer)
        pieces = () if turns is None else batch.pieces
        steps, ones = ((), None) if role is None else (batch.steps, batch.ones)
        owned = self._served.owns(layer)
        if not pieces and not steps and ones is None and not owned:
            return super().forward(layer, *arguments, **more)
        if any(x is not None for x in (*scales, *more.values())):
            self._served.refuse("the output is to be quantised")
            return super().forward(layer, *arguments, **more)
        stored = self._served.eight_bits(layer)
        cache = kv_cache if stored is None else kv_cache.view(stored)
        call = Call(layer, _plain(layer, query, output), query, key, value, cache, output)
        done: list[Piece] = []
        indices = []
        try:
            for piece in pieces:
                assert turns is not None
                if (index := self._by_patterns(turns, batch, call, piece)) is not None:
                    indices.append(index)
                    done.append(piece)
                else:
                    self._served.counters.slower()
            if role is not None and ones is not None:
                self._decode(role, call, ones)
                done += ones.pieces
            for step in steps:
                assert role is not None
                self._verify(role, batch, call, step)
                done.append(step)
        except Exception as error:
            why = str(error) if isinstance(error, HeadwiseError) else name_of(error)
            if why is None or ((steps or ones) and self._served.agrees):
                raise
            self._served.refuse(why, "" if isinstance(error, HeadwiseError) else message(error))
            done.clear()
            indices.clear()
        number = number_of(layer.layer_name)
        assert number is not None
        for index in indices:
            self._served.counters.index(number, index)
        if owned:
            self._densely(batch, call, [piece for piece in batch.others(done) if not piece.generated])
            if isinstance(snap := self._served.keeps(layer), Snap):
                pages, windows = parted(cache, self.ours), self._served.windows
                keep(snap, windows, layer.layer_name, call.query, pages, output, batch, **self._how(_scales(call)[0]))
                _scale_values(call, [piece for piece in batch.every if piece.generated])
        elif (rest := batch.rest(done)) is not None:
            self._leave(call, rest)
        return output

    def _rehearse(self, layer: Any, query: Tensor) -> None:
        """In vLLM's profiling run, take what a step of this layer takes beside its output: vLLM leaves room for it.

        That is the index of the last chunk of the longest prompt, the scores and slots of decode by chosen tokens at
        the longest context, and the copies of the longest prompt of which a part is kept. Query is (T, H, D) with the
        most tokens that a step has.
        """
        assert self._served is not None
        k_len = self._served.longest
        q = query[-k_len:].transpose(0, 1)[None]
        turns, snap = self._served.turns(layer, self.num_heads, self.num_kv_heads), self._served.keeps(layer)
        # One page that stands for all of a context's.
        stored = self._served.eight_bits(layer) or query.dtype
        cache = query.new_zeros(1, self.num_kv_heads, _PAGE, 2 * query.shape[-1], dtype=stored)
        k, v = parted(cache, self.ours)
        if turns is not None and self._served.is_long(Piece(0, 0, q.shape[2], k_len)):
            table = torch.zeros(1, -(-k_len // _PAGE), dtype=torch.int32, device=query.device)
            turns.plan.build(q, k, scale=self.scale, block_table=table, k_len=k_len)
        if (role := self._served.role(layer)) is not None and role.filters:
            number = number_of(layer.layer_name)
            assert number is not None and self._served.chooser is not None
            self._served.chooser.rehearse(number, role, query, cache, self.ours, **self._how())
        if isinstance(snap, Snap):
            rehearse(snap, query, (k, v), k_len, **self._how())

    def _by_patterns(self, turns: Turns, batch: Batch, call: Call, piece: Piece) -> SparseIndex | None:
        """Write the sparse attention of a piece and give its index; None where dense attention is the faster."""
        q = call.query[piece.rows].transpose(0, 1)[None]
        lengths = piece.q_len, piece.k_len
        gains = turns.gains(q, call.cache, *lengths)
        if gains is False:
            return None
        built: list[SparseIndex] = []

        def sparse(out: Tensor) -> Tensor:
            keys = self._keys(batch, call, piece)
            how = self._how(keys.scales[0])
            index = turns.plan.build(q, keys.k, scale=how["scale"], block_table=keys.table, k_len=piece.k_len)
            built.append(index)
            sparse_attention(*(q, keys.k, keys.v, index), block_table=keys.table, out=out.transpose(0, 1)[None], **how)
            return out if keys.scales[1] == 1 else out.mul_(keys.scales[1])

        if gains:
            sparse(call.output[piece.rows])
        else:
            # Both ways are tried: the output is the last one's, so patterns write beside it.
            beside = torch.empty_like(call.output[piece.rows])
            dense = partial(self._alone, batch, call, piece)
            if (found := turns.measure(q, call.cache, lengths, partial(sparse, beside), dense)) is None:
                return None
            call.output[piece.rows] = found
        return built[-1]

    def _how(self, k_scale: float = 1.0) -> dict[str, Any]:
        softcap, sinks = self.logits_soft_cap or None, getattr(self, "sinks", None)
        return {"scale": self.scale * k_scale, "softcap": softcap, "sinks": sinks}

    def _keys(self, batch: Batch, call: Call, piece: Piece) -> Keys:
        if piece.q_len == piece.k_len and self.kv_sharing_target_layer_name is None and call.value is not None:
            assert call.key is not None
            return given(call.key[piece.rows], call.value[piece.rows])
        return Keys(*parted(call.cache, self.ours), _pages(batch, piece, call.cache)[None], _scales(call))

    def _decode(self, role: Role, call: Call, ones: Ones) -> None:
        """Write what requests with one new token attend to by the decode section."""
        assert self._served is not None and self._served.chooser is not None
        number = number_of(call.layer.layer_name)
        assert number is not None
        k_scale, v_scale = _scales(call)
        self._served.chooser.attend(
            *(number, role, ones, call.query, call.cache, call.output, self.ours, v_scale), **self._how(k_scale)
        )

    def _verify(self, role: Role, batch: Batch, call: Call, step: Piece) -> None:
        """Write what a request's several new tokens attend to by the decode section."""
        assert self._served is not None and self._served.chooser is not None
        number = number_of(call.layer.layer_name)
        assert number is not None
        q, pages = call.query[step.rows].transpose(0, 1)[None], _pages(batch, step, call.cache)
        k_scale, v_scale = _scales(call)
        found = self._served.chooser.verify(
            *(number, role, step.request, q, call.cache, pages, step.k_len, self.ours), **self._how(k_scale)
        )
        call.output[step.rows] = found[0].transpose(0, 1) * v_scale

    def _alone(self, batch: Batch, call: Call, piece: Piece) -> Tensor:
        """Write one request's dense attention: what it would be left to."""
        assert self._served is not None
        if self._served.owns(call.layer):
            self._densely(batch, call, (piece,))
        elif (rest := batch.rest(batch.others((piece,)))) is not None:
            self._leave(call, rest)
        return call.output[piece.rows]

    def _densely(self, batch: Batch, call: Call, pieces: Sequence[Piece]) -> None:
        assert self._served is not None
        cache, keeps = parted(call.cache, self.ours), self._served.keeps(call.layer)
        stream = keeps if isinstance(keeps, Stream) else None
        attend_densely(call.query, cache, call.output, batch, tuple(pieces), stream, **self._how(_scales(call)[0]))
        _scale_values(call, pieces)

    def _leave(self, call: Call, rest: Rest) -> None:
        """Have the parent serve the requests that are not sparse."""
        rows, stored = rest.rows, call.cache.dtype in EIGHT_BITS
        cache = call.cache.view(torch.uint8) if stored else call.cache
        q, k, v = (None if x is None else x[rows] for x in (call.given, call.key, call.value))
        if isinstance(rows, slice):
            super().forward(call.layer, q, k, v, cache, rest.metadata, call.output[rows])
            return
        apart = call.output.new_empty(rows.numel(), *call.output.shape[1:])
        super().forward(call.layer, q, k, v, cache, rest.metadata, apart)
        call.output[rows] = apart


def _scales(call: Call) -> tuple[float, float]:
    """What stored keys and values are to be multiplied by."""
    layer = call.layer
    return (layer._k_scale_float, layer._v_scale_float) if call.cache.dtype in EIGHT_BITS else (1.0, 1.0)


def _scale_values(call: Call, pieces: Sequence[Piece]) -> None:
    """Multiply what stored values came to, in the rows of these pieces."""
    if (v_scale := _scales(call)[1]) != 1:
        for piece in pieces:
            call.output[piece.rows] *= v_scale


def _plain(layer: Any, query: Tensor, output: Tensor) -> Tensor:
    """The query in the model's dtype: for a cache of 8 bits some backends of vLLM for GPUs are given one of 8 bits."""
    return query if query.dtype == output.dtype else query.to(output.dtype) * layer._q_scale_float


def _pages(batch: Batch, piece: Piece, kv_cache: Tensor) -> Tensor:
    return batch.block_table[piece.request, : -(-piece.k_len // kv_cache.shape[2])]


def is_ours(parent: type) -> bool | None:
    """Whether layers over a backend are ours alone; None for a backend whose cache is not known."""
    return {"CPU_ATTN": True, "FLASH_ATTN": False, "TRITON_ATTN": False}.get(str(parent.get_name()))  # type: ignore[attr-defined]
