"""transformers' continuous batching, model.generate_batch: all requests of a step packed in a row, keys in pages.

transformers takes the names of its own attentions for it, and names with "flash" in them, which get no mask. So while a
manager is at work the model's configuration says PAGED_NAME; what it was comes back when the manager stops.

Shapes: T tokens of a step, H query heads, G KV heads, K keys of all requests, D head dim, E value dim, n requests.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from artifacts import HeadwiseError
from kernels.decode import decode_attention
from kernels.ragged import Ragged
from runtime.attention.calls import Call, no_kernel, special
from runtime.attention.kernel import attend_layer
from runtime.attention.state import Layer

# No 2 or 3 in it: those would have transformers hand out block tables that only flash attention reads.
PAGED_NAME = "headwise_flash"


class _Steps(NamedTuple):
    """Requests that ask one token each: rows of their queries, first keys and ends, (n,) each."""

    rows: Tensor
    starts: Tensor
    ends: Tensor


class _Paged(NamedTuple):
    """What a step does in layers of one type: requests served sparsely, densely, and by the decode kernel."""

    long: Ragged | None
    short: Ragged | None
    steps: _Steps | None


def attend_paged(call: Call, layer: Layer) -> Tensor:
    """(1, T, H, E) of the packed tokens (1, H, T, D) of all requests; writes their keys and values to the cache.

    Raises:
        HeadwiseError: the call asks for what no kernel does.
    """
    more = dict(call.more)
    lengths = more["cu_seq_lens_q"]
    k, v = more["cache"].update(
        key_states=call.key, value_states=call.value, layer_idx=call.module.layer_idx, kwargs=more
    )
    why = special(call) or no_kernel(layer.settings.backend, call.query, k, v)
    if why is not None:
        raise HeadwiseError(f"generate_batch cannot serve this call: {why}")
    step = _step_of(lengths, more["cu_seq_lens_k"], call.window, layer)
    how: dict[str, Any] = {"scale": call.scale, "softcap": call.softcap}
    out: Tensor | None = None
    for ragged, plan in ((step.long, layer.plan), (step.short, None)):
        if ragged is not None:
            window = None if plan is not None else call.window
            done = attend_layer(layer, plan, call.query, k, v, sinks=call.sinks, window=window, ragged=ragged, **how)
            # What a launch does not serve it leaves at zero.
            out = done if out is None else out.add_(done)
            layer.count("sparse" if plan is not None else "dense by kernel")
    if step.steps is not None:
        layer.count("decode by kernel")
        found = _decode(step.steps, call, k, v, layer.settings.backend)
        if out is None:
            out = found.new_zeros(1, call.query.shape[2], *found.shape[1:]).transpose(1, 2)
        out[0, :, step.steps.rows] = found.transpose(0, 1)
    if out is None:
        out = call.query.new_zeros(*call.query.shape[:3], v.shape[3])
    return out.transpose(1, 2)


def _decode(steps: _Steps, call: Call, k: Tensor, v: Tensor, backend: str) -> Tensor:
    """(n, H, E): each request's query over its own keys, which lie between others'."""
    q = call.query[0, :, steps.rows].transpose(0, 1)[:, :, None]
    many = len(steps.starts)
    starts = steps.starts
    if call.window is not None:
        starts = torch.maximum(starts, steps.ends - call.window)
    out = decode_attention(
        *(q, k.expand(many, -1, -1, -1), v.expand(many, -1, -1, -1)),
        starts=starts,
        ends=steps.ends,
        scale=call.scale,
        softcap=call.softcap,
        sinks=call.sinks,
        backend=backend,
    ).out
    return out[:, :, 0]


def _step_of(cu_q: Tensor, cu_k: Tensor, window: int | None, layer: Layer) -> _Paged:
    """What a step does, worked out by the first layer of each sort and kept on the step's own list of lengths."""
    known: dict[Any, _Paged] = getattr(cu_q, "headwise", {})
    key = (window, layer.plan is None)
    if key not in known:
        known[key] = _work_out(cu_q.tolist(), cu_k.tolist(), layer, cu_q.device)
        cu_q.headwise = known  # type: ignore[attr-defined]
    return known[key]


def _work_out(cu_q: list[int], cu_k: list[int], layer: Layer, device: torch.device) -> _Paged:
    requests = [
        (q[0], q[1] - q[0], k[0], k[1] - k[0])
        for q, k in zip(pairwise(cu_q), pairwise(cu_k), strict=True)
        # Padding of a step has none.
        if q[1] > q[0]
    ]
    ones = [(q_start, k_start, k_len) for q_start, q_len, k_start, k_len in requests if q_len == 1]
    several = [each for each in requests if each[1] > 1]
    below = layer.settings.dense_below
    long = [each for each in several if layer.plan is not None and each[1] >= layer.fewest and each[3] >= below]
    steps = None
    if ones:
        rows, starts, k_lens = torch.tensor(ones, dtype=torch.int32, device=device).unbind(1)
        steps = _Steps(rows.long(), starts.contiguous(), starts + k_lens)
    return _Paged(_ragged(long), _ragged([each for each in several if each not in long]), steps)


def _ragged(requests: list[tuple[int, int, int, int]]) -> Ragged | None:
    return Ragged.of((0, *request) for request in requests) if requests else None


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
