"""Hands out queries, keys and values of every attention layer at each step of decoding.

Shapes: H query heads, G KV heads, S prompt length, K keys (prompt and tokens decoded so far), D
head dim, E value dim; batch 1.

The prompt but for its end is prefilled densely, with memory linear in S; then tokens are fed one at
a time. One layer's scores of one query, H x K in fp32, are alive at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernels.logits import softmax
from profiling.inside.capture import LayerInputs, attending_with, capture_prefill
from runtime.attention.call import logits_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CAPTURE_NAME = "headwise_decode_capture"


@dataclass(frozen=True, eq=False, kw_only=True)
class StepInputs(LayerInputs):
    """Inputs of one layer for one query: q (1, H, 1, D), k (1, G, K, D), v (1, G, K, E).

    Attributes:
        visible: (K) bool, None where the query sees every key. A sliding layer's cache holds its
            window only.
    """

    visible: Tensor | None

    @cached_property
    def probabilities(self) -> Tensor:
        """Attention of each query head over the keys, (H, K) fp32; with sinks, sums are below 1."""
        groups = self.k.shape[1]
        q = self.q[0, :, 0].unflatten(0, (groups, -1))
        # One KV head at a time: the keys of all of them in fp32 would be twice the cache's layer.
        scores = [
            self.logits.compute(q[group], self.k[0, group], self.visible) for group in range(groups)
        ]
        return softmax(torch.cat(scores), self.logits.sinks)[0]

    def output(self) -> Tensor:
        """The attention's output (1, 1, H, E) in the values' dtype."""
        groups = self.v.shape[1]
        weights = self.probabilities.unflatten(0, (groups, -1))
        out = torch.cat([weights[group] @ self.v[0, group].float() for group in range(groups)])
        return out.to(self.v.dtype)[None, None]


def capture_decode(
    model: PreTrainedModel,
    input_ids: Tensor,
    visit: Callable[[int, StepInputs], None],
    done: Callable[[int], None],
    *,
    steps: int,
    tail: int = 0,
    continuation: Sequence[int] = (),
    avoid: Collection[int] = (),
) -> tuple[int, ...]:
    """Decode; call `visit(step, inputs)` for each layer of a step, then `done(step)`.

    Step t predicts the t-th new token: step 0 feeds the prompt's last token, step t the (t - 1)-th
    new one.

    Args:
        model: as for `capture`.
        input_ids: (1, S) on the model's device, S at least tail + 2.
        visit: is called with the step and a layer's inputs; may do anything but write to the
            tensors.
        done: is called with the step after its last layer.
        steps: how many, at least 1.
        tail: how many of the prompt's tokens before its last one are fed singly as well; these are
            steps -tail to -1.
        continuation: first new tokens; the model's own follow, decoded greedily.
        avoid: tokens that the model may not choose, such as those that end a text.

    Returns:
        The `steps` new tokens.

    Raises:
        HeadwiseError: as `capture`.
    """
    length = input_ids.shape[-1]
    if steps < 1 or tail < 0 or length < tail + 2:
        raise ValueError(f"steps and tail do not fit {length} tokens, got {steps} and {tail}")
    windows: dict[int, int | None] = {}
    start = length - 1 - tail
    prompt_ids = input_ids[0].tolist()
    new_tokens = list[int]()
    with torch.inference_mode():
        cache = capture_prefill(
            model,
            input_ids[:, :start],
            lambda inputs: windows.update({inputs.layer: inputs.sliding_window}),
        )
        run = _Run(visit, windows, step=-tail)
        token = _run.set(run)
        try:
            with attending_with(model, CAPTURE_NAME, _attention, _mask):
                for step in range(-tail, steps):
                    run.step = step
                    if step > 0:
                        token_id = new_tokens[step - 1]
                    else:
                        token_id = prompt_ids[length - 1 + step]
                    ids = torch.tensor([[token_id]], device=input_ids.device, dtype=torch.long)
                    output = model(input_ids=ids, past_key_values=cache, use_cache=True)
                    cache = output.past_key_values
                    done(step)
                    if step >= 0:
                        new_tokens.append(_next(output.logits[0, -1], step, continuation, avoid))
        finally:
            _run.reset(token)
    return tuple(new_tokens)


def _next(logits: Tensor, step: int, continuation: Sequence[int], avoid: Collection[int]) -> int:
    if step < len(continuation):
        return continuation[step]
    if avoid:
        logits = logits.index_fill(
            0, torch.tensor(sorted(avoid), device=logits.device, dtype=torch.long), float("-inf")
        )
    return int(logits.argmax())


@dataclass(eq=False)
class _Run:
    visit: Callable[[int, StepInputs], None]
    windows: dict[int, int | None]
    step: int


_run: ContextVar[_Run] = ContextVar("headwise_decode_capture")


def _mask(
    *args: Any, mask_function: Callable[..., Any] | None = None, **kwargs: Any
) -> Tensor | None:
    """One row: None where the query sees every key."""
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    if mask_function is None or mask_function is causal_mask_function:
        return None
    return sdpa_mask(
        *args, mask_function=mask_function, **{**kwargs, "allow_is_causal_skip": False}
    )


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Serve a layer: (1, H, 1, D), (1, G, K, D), (1, G, K, E) -> (1, 1, H, E)."""
    run = _run.get()
    layer = int(module.layer_idx)
    if attention_mask is None:
        visible = None
    else:
        visible = attention_mask[0, 0, 0, : key.shape[2]]
    inputs = StepInputs(
        layer=layer,
        q=query,
        k=key,
        v=value,
        logits=replace(logits_of(scaling, kwargs), window=None),
        sliding_window=run.windows[layer],
        visible=visible,
    )
    run.visit(run.step, inputs)
    return inputs.output(), None
