"""transformers' continuous batching, model.generate_batch: all requests of a step packed in a row, keys in pages.

transformers takes the names of its own attentions for it, and names with "flash" in them, which get no mask. So while a
manager is at work the model's configuration says PAGED_NAME; what it was comes back when the manager stops.

Shapes: T tokens of a step, H query heads, G KV heads, K keys of all requests, D head dim, E value dim, n requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from artifacts import HeadwiseError
from kernels.decode import decode_attention
from kernels.patterns import LayerPlan
from kernels.ragged import Ragged
from runtime.attention.calls import Call, no_kernel
from runtime.attention.kernel import attend_layer
from runtime.attention.own import attend_alone_as_before
from runtime.attention.state import Layer

# No 2 or 3 in it: those would have transformers hand out block tables that only flash attention reads.
PAGED_NAME = "headwise_flash"
# What a call says of the layer; the rest is about pages.
_OF_THE_MODEL = ("softcap", "s_aux", "sliding_window", "output_attentions", "is_causal")


class _Request(NamedTuple):
    """A request's new tokens among those of the step, and all of its tokens among the keys."""

    q_start: int
    q_len: int
    k_start: int
    k_len: int


class _Ones(NamedTuple):
    """Requests that ask one token each: rows of their queries, first keys and ends, (n,) each."""

    requests: tuple[_Request, ...]
    rows: Tensor
    starts: Tensor
    ends: Tensor


@dataclass(frozen=True)
class _Step:
    """What layers of one type are asked in a step: requests of several tokens, and those of one."""

    several: tuple[_Request, ...]
    ones: _Ones | None
    _ragged: dict[tuple[_Request, ...], Ragged] = field(default_factory=dict)

    def ragged(self, requests: tuple[_Request, ...]) -> Ragged:
        """Where these lie, made once for all layers."""
        if requests not in self._ragged:
            self._ragged[requests] = Ragged.of((0, *request) for request in requests)
        return self._ragged[requests]


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
    call = call.on(call.query, k, v, None)
    why = call.special or no_kernel(layer.settings.backend, call.query, k, v)
    if why is not None:
        raise HeadwiseError(f"generate_batch cannot serve this call: {why}")
    step = _step_of(lengths, more["cu_seq_lens_k"], call.window)
    out = _several(step, call, layer)
    if (ones := step.ones) is not None:
        if layer.settings.dense_kernels:
            layer.count("decode by kernel")
            found = _decode(ones, call, layer.settings.backend)
        else:
            layer.count("decode")
            found = _as_before(ones.requests, call)[0, :, ones.rows].transpose(0, 1)
        if out is None:
            out = found.new_zeros(1, call.query.shape[2], *found.shape[1:]).transpose(1, 2)
        out[0, :, ones.rows] = found.transpose(0, 1)
    if out is None:
        out = call.query.new_zeros(*call.query.shape[:3], v.shape[3])
    return out.transpose(1, 2)


def _several(step: _Step, call: Call, layer: Layer) -> Tensor | None:
    """(1, H, T, E) of the requests that ask several tokens, zeros for others; None where there are none."""
    q, k, v, settings, outs = call.query, call.key, call.value, layer.settings, []
    sparse: list[_Request] = []
    dense: list[_Request] = []

    def launch(requests: tuple[_Request, ...], plan: LayerPlan | None) -> Tensor:
        if plan is None and not settings.dense_kernels:
            return _as_before(requests, call)
        how: dict[str, Any] = {"scale": call.scale, "softcap": call.softcap, "sinks": call.sinks}
        window = None if plan is not None else call.window
        return attend_layer(layer, plan, q, k, v, window=window, ragged=step.ragged(requests), **how)

    for request in step.several:
        q_len, k_len = request.q_len, request.k_len
        long = layer.plan is not None and q_len >= layer.fewest and k_len >= layer.settings.dense_below
        gains = long and layer.gains(q, k, q_len, k_len)
        if gains is None:
            ways = partial(launch, (request,), layer.plan), partial(launch, (request,), None)
            if (done := layer.turns.measure(q, k, (q_len, k_len), *ways)) is not None:
                layer.count("sparse")
                outs.append(done)
                continue
        (sparse if gains else dense).append(request)
    by_model = "layer left alone" if layer.plan is None else "short"
    densely = "dense by kernel" if settings.dense_kernels else by_model
    for requests, plan, how in ((sparse, layer.plan, "sparse"), (dense, None, densely)):
        if requests:
            layer.count(how)
            outs.append(launch(tuple(requests), plan))
    # What a launch does not serve it leaves at zero.
    return reduce(Tensor.add_, outs) if outs else None


def _as_before(requests: Sequence[_Request], call: Call) -> Tensor:
    """(1, H, T, E) of these requests, one by one, by the attention that the model had; zeros for others."""
    more = {name: call.more[name] for name in _OF_THE_MODEL if name in call.more}
    out = call.query.new_zeros(1, call.query.shape[2], call.query.shape[1], call.value.shape[3])
    for request in requests:
        queries = slice(request.q_start, request.q_start + request.q_len)
        keys = slice(request.k_start, request.k_start + request.k_len)
        one = call.on(call.query[:, :, queries], call.key[:, :, keys], call.value[:, :, keys], None)
        out[:, queries] = attend_alone_as_before(replace(one, more=more))
    return out.transpose(1, 2)


def _decode(ones: _Ones, call: Call, backend: str) -> Tensor:
    """(n, H, E): each request's query over its own keys, which lie between others'."""
    k, v = call.key, call.value
    q = call.query[0, :, ones.rows].transpose(0, 1)[:, :, None]
    many = len(ones.starts)
    starts = ones.starts
    if call.window is not None:
        starts = torch.maximum(starts, ones.ends - call.window)
    out = decode_attention(
        *(q, k.expand(many, -1, -1, -1), v.expand(many, -1, -1, -1)),
        starts=starts,
        ends=ones.ends,
        scale=call.scale,
        softcap=call.softcap,
        sinks=call.sinks,
        backend=backend,
    ).out
    return out[:, :, 0]


def _step_of(cu_q: Tensor, cu_k: Tensor, window: int | None) -> _Step:
    """What a step asks, worked out by the first layer of each type and kept on the step's own list of lengths."""
    known: dict[int | None, _Step] = getattr(cu_q, "headwise", {})
    if window not in known:
        known[window] = _work_out(cu_q.tolist(), cu_k.tolist(), cu_q.device)
        cu_q.headwise = known  # type: ignore[attr-defined]
    return known[window]


def _work_out(cu_q: list[int], cu_k: list[int], device: torch.device) -> _Step:
    pairs = zip(pairwise(cu_q), pairwise(cu_k), strict=True)
    # Padding of a step has no queries.
    requests = [_Request(q[0], q[1] - q[0], k[0], k[1] - k[0]) for q, k in pairs if q[1] > q[0]]
    ones = tuple(each for each in requests if each.q_len == 1)
    several = tuple(each for each in requests if each.q_len > 1)
    if not ones:
        return _Step(several, None)
    places = [(each.q_start, each.k_start, each.k_len) for each in ones]
    rows, starts, k_lens = torch.tensor(places, dtype=torch.int32, device=device).unbind(1)
    return _Step(several, _Ones(ones, rows.long(), starts.contiguous(), starts + k_lens))


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
