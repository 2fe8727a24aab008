"""transformers' continuous batching, model.generate_batch: all requests of a step packed in a row, keys in pages.

transformers takes the names of its own attentions for it, and names with "flash" in them, which get no mask. So while a
manager is at work the model's configuration says PAGED_NAME; what it was comes back when the manager stops.

Shapes: T tokens of a step, H query heads, G KV heads, K keys of all requests, D head dim, E value dim, n requests.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial, reduce
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from artifacts import HeadwiseError
from kernels.decode import decode_attention
from kernels.ragged import Ragged
from runtime.attention.calls import Call, no_kernel
from runtime.attention.kernel import attend
from runtime.attention.layout import Layout, Part
from runtime.attention.own import attend_alone_as_before
from runtime.attention.reasons import Verdict

# No 2 or 3 in it: those would have transformers hand out block tables that only flash attention reads.
PAGED_NAME = "headwise_flash"
# What a call says of the layer; the rest is about pages.
_OF_THE_MODEL = ("softcap", "s_aux", "sliding_window", "output_attentions", "is_causal", "position_bias")


def attend_paged(call: Call) -> Tensor:
    """(1, T, H, E) of the packed tokens (1, H, T, D) of all requests; writes their keys and values to the cache.

    Raises:
        HeadwiseError: the call asks for what no kernel does.
    """
    more, layer, q = dict(call.more), call.layer, call.query
    settings = layer.settings
    cu_q = more["cu_seq_lens_q"]
    # It puts the lengths of its layer's keys into `more`.
    k, v = more["cache"].update(
        key_states=call.key, value_states=call.value, layer_idx=call.module.layer_idx, kwargs=more
    )
    of_the_model = {name: more[name] for name in _OF_THE_MODEL if name in more}
    call = replace(call, key=k, value=v, mask=None, more=of_the_model)
    why = call.special or no_kernel(settings.backend, q, k, v)
    if why is not None:
        raise HeadwiseError(f"generate_batch cannot serve this call: {why}")
    layout = _layout_of(cu_q, more["cu_seq_lens_k"], call)
    ones = tuple(part for part in layout.parts if part.q_len == 1)
    outs = _several(call, layout)
    # What a launch does not serve it leaves at zero.
    out = reduce(Tensor.add_, outs) if outs else q.new_zeros(1, q.shape[2], q.shape[1], v.shape[3])
    if ones and settings.dense_kernels:
        layer.count("decode by kernel")
        _decode_to(out, call, layout.launch(ones).ragged, settings.backend)
    elif ones:
        layer.count("decode")
        out += _as_before(call, ones)
    return out


def _several(call: Call, layout: Layout) -> list[Tensor]:
    """(1, T, H, E) of requests that ask several tokens, zeros for others, until all of those are served."""
    q, k, layer, outs = call.query, call.key, call.layer, []
    settings, verdict = layer.settings, Verdict(layer.settings.backend)

    def by_patterns(parts: tuple[Part, ...]) -> Tensor:
        return attend(call, layout.launch(parts), layer.plan, verdict)

    def densely(parts: tuple[Part, ...]) -> Tensor:
        if not settings.dense_kernels:
            return _as_before(call, parts)
        return attend(call, layout.launch(parts), None, verdict, window=call.window)

    dense = [part for part in layout.parts if part.q_len > 1]
    sparse = []
    for part in () if layer.plan is None else layout.long(settings.dense_below, layer.fewest).parts:
        lengths = part.q_len, part.k_len
        gains = layer.gains(q, k, *lengths)
        if gains is None:
            done = layer.turns.measure(q, k, lengths, partial(by_patterns, (part,)), partial(densely, (part,)))
            if done is not None:
                layer.count("sparse")
                outs.append(done)
                dense.remove(part)
        elif gains:
            sparse.append(part)
            dense.remove(part)
    if sparse:
        layer.count("sparse")
        outs.append(by_patterns(tuple(sparse)))
    if dense:
        by_model = "layer left alone" if layer.plan is None else "short"
        layer.count("dense by kernel" if settings.dense_kernels else by_model)
        outs.append(densely(tuple(dense)))
    return outs


def _as_before(call: Call, parts: tuple[Part, ...]) -> Tensor:
    """(1, T, H, E) of these requests, one by one, by the attention that the model had; zeros for others."""
    out = call.query.new_zeros(1, call.query.shape[2], call.query.shape[1], call.value.shape[3])
    for part in parts:
        out[:, part.places[1]] = attend_alone_as_before(call.part(part))
    return out


def _decode_to(out: Tensor, call: Call, ones: Ragged | None, backend: str) -> None:
    """Write each of these requests' query over its own keys, which lie between others', to `out` (1, T, H, E)."""
    assert ones is not None
    _, rows, _, starts, k_lens = ones.table(out.device).unbind(1)
    rows, ends = rows.long(), starts + k_lens
    k, v = (x.expand(len(ones), -1, -1, -1) for x in (call.key, call.value))
    found = decode_attention(
        *(call.query[0, :, rows].transpose(0, 1)[:, :, None], k, v),
        starts=starts.contiguous() if call.window is None else torch.maximum(starts, ends - call.window),
        ends=ends,
        scale=call.scale,
        softcap=call.softcap,
        sinks=call.sinks,
        backend=backend,
    ).out
    out[0, rows] = found[:, :, 0]


def _layout_of(cu_q: Tensor, cu_k: Tensor, call: Call) -> Layout:
    """What a step asks, worked out by the first layer of each type and kept on the step's own list of lengths."""
    known: dict[int | None, Layout] = getattr(cu_q, "headwise", {})
    if call.window not in known:
        pairs = zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True)
        # Padding of a step has no queries.
        parts = tuple(Part(0, q[0], q[1] - q[0], k[0], k[1] - k[0]) for q, k in pairs if q[1] > q[0])
        known[call.window] = Layout(0, call.query.shape[2], call.key.shape[2], None, pages=parts)
        cu_q.headwise = known  # type: ignore[attr-defined]
    return known[call.window]


class Batching:
    """Stands for a model's init_continuous_batching, on that instance alone; `remove` takes it off again."""

    def __init__(self, model: Any, config: Any, refused: str | None) -> None:
        """config: the language part's configuration. refused: why no manager may be made, None where one may."""
        self._model, self._config, self._refused = model, config, refused
        self._original = model.init_continuous_batching
        # An instance's own attribute goes before its class's method.
        model.init_continuous_batching = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A manager whose steps Headwise serves.

        Raises:
            HeadwiseError: the artifact, or the device, cannot be served so.
        """
        if self._refused is not None:
            raise HeadwiseError(f"generate_batch is not served {self._refused}")
        former = self._config._attn_implementation
        self._config._attn_implementation = type(former)(PAGED_NAME, former.former)
        try:
            manager = self._original(*args, **kwargs)
        except BaseException:
            self._config._attn_implementation = former
            raise
        stop = manager.stop

        def stopped(*more: Any, **given: Any) -> None:
            try:
                stop(*more, **given)
            finally:
                manager.stop = stop
                if self._config._attn_implementation == PAGED_NAME:
                    self._config._attn_implementation = former

        manager.stop = stopped
        return manager

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._model, "init_continuous_batching")

    def remove(self) -> None:
        """Give the model its own back."""
        if vars(self._model).get("init_continuous_batching") is self:
            del self._model.init_continuous_batching
