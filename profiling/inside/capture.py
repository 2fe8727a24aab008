"""Hands out queries, keys and values of every attention layer during one dense forward pass.

Shapes: B batch (1 here), H query heads, G KV heads, S prompt length, D head dim, E value dim.

The pass goes through an attention function of our own, registered with transformers; no forward is
replaced. One layer's tensors are alive at a time and no S x S tensor is ever made, masks included:
memory grows linearly with S.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from artifacts import HeadwiseError
from kernels import registry
from kernels.call import Operands
from kernels.logits import Logits
from profiling.inside.dense import LayerMask, blockwise_attention
from runtime.attention.call import logits_of
from runtime.attention.dense import fastest_dense
from runtime.layers import attention_layers, text_config
from runtime.training import in_evaluation_mode

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CAPTURE_NAME = "headwise_capture"


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerInputs:
    """Inputs of one attention layer after position encoding, for reading during the visit.

    Attributes:
        q: (1, H, S, D).
        k: (1, G, S, D).
        v: (1, G, S, E), not repeated for grouped queries.
        logits: scale, soft-cap and learned sinks; what a query sees is in sliding_window.
        sliding_window: keys that a query sees, itself included (or a chunk's size); None where it
            sees all.
    """

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    logits: Logits
    sliding_window: int | None

    @property
    def scale(self) -> float:
        """Factor on the products of queries and keys."""
        return self.logits.factor(self.q.shape[3])


Visit = Callable[[LayerInputs], Tensor | None]
"""Receives a layer's inputs. An output (1, H, S, E) that it returns replaces that of dense
attention."""


def capture(model: PreTrainedModel, input_ids: Tensor, visit: Visit) -> None:
    """Run one dense forward pass and call `visit` once for each attention layer, in order.

    Args:
        model: any transformers causal model whose attention goes through AttentionInterface. It is
            left unchanged, also if `visit` raises.
        input_ids: (1, S) on the model's device, without padding.
        visit: may do anything but write to the tensors. The pass continues with the output that it
            returns, or with that of dense attention if it returns None.

    Raises:
        HeadwiseError: no attention arrives, or one that is not causal or has a bias.
    """
    _pass(model, input_ids, visit, use_cache=False)


def capture_prefill(model: PreTrainedModel, input_ids: Tensor, visit: Visit) -> Any:
    """Run `capture` and return the cache that the pass fills, transformers' own."""
    return _pass(model, input_ids, visit, use_cache=True).past_key_values


def _pass(model: PreTrainedModel, input_ids: Tensor, visit: Visit, *, use_cache: bool) -> Any:
    if input_ids.dim() != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] < 1:
        raise ValueError(f"input_ids must have the shape (1, S), got {tuple(input_ids.shape)}")
    with torch.inference_mode(), attending(model, visit) as run:
        output = _forward(model, input_ids, use_cache)
    if not run.visits:
        name = type(model).__name__
        raise HeadwiseError(
            f"model without attention that Headwise can serve: {name} asked for none in this pass"
        )
    return output


@contextmanager
def attending(model: PreTrainedModel, visit: Visit) -> Iterator[Run]:
    """Hand the layers of every forward pass in this context to `visit`.

    Raises:
        HeadwiseError: the model has no attention that Headwise can reach.
    """
    _check_layers(model)
    run = Run(visit)
    with masks_of(run), attending_with(model, CAPTURE_NAME, _attention, layer_mask):
        yield run


def _check_layers(model: PreTrainedModel) -> None:
    # Beforehand: an attention of another sort may stumble over the mask that ours asks for.
    try:
        attention_layers(model)
    except HeadwiseError as error:
        raise HeadwiseError(f"model without attention that Headwise can serve: {error}") from error


@dataclass(eq=False)
class Run:
    """One pass: the function called for each layer, the number of layers, and the masks it made."""

    visit: Visit
    visits: int = 0
    masks: dict[int, LayerMask] = field(default_factory=dict)


_run: ContextVar[Run] = ContextVar("headwise_capture")


@contextmanager
def masks_of(run: Run) -> Iterator[None]:
    """Make this run own the masks that `layer_mask` makes."""
    token = _run.set(run)
    try:
        yield
    finally:
        _run.reset(token)


@contextmanager
def attending_with(
    model: PreTrainedModel, name: str, attention: Callable[..., Any], mask: Callable[..., Any]
) -> Iterator[None]:
    """Put an attention and a mask function in place of the model's; dropout is off."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    config = text_config(model)
    former = config._attn_implementation
    with in_evaluation_mode(model):
        try:
            # The key "" leaves nested configurations, such as a vision tower's, alone.
            config._attn_implementation = {"": name}
            yield
        finally:
            config._attn_implementation = {"": former}


def _forward(model: PreTrainedModel, input_ids: Tensor, use_cache: bool) -> Any:
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        # Given as a number, Gemma 4 cuts the queries of its last layers to as many.
        last = torch.tensor([input_ids.shape[1] - 1], dtype=torch.long, device=input_ids.device)
        return model(input_ids=input_ids, use_cache=use_cache, logits_to_keep=last)
    return model.base_model(input_ids=input_ids, use_cache=use_cache)


def layer_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """Return None for a causal layer, else the mask's shape over one element.

    The element represents the LayerMask.
    """
    from transformers.masking_utils import causal_mask_function

    if mask_function is None or mask_function is causal_mask_function:
        return None
    if local_size is None:
        raise HeadwiseError(
            "the model's mask is not plainly causal over the prompt: Headwise is for causal models"
        )
    standin = torch.ones(1, dtype=torch.bool, device=kwargs.get("device", "cpu"))
    mask = LayerMask(standin, mask_function, local_size, bool(kwargs.get("use_vmap")))
    _run.get().masks[standin.untyped_storage().data_ptr()] = mask
    return standin.expand(batch_size, 1, q_length, kv_length)


def _attention(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return attend_densely(_run.get(), module, *args, **kwargs)


def attend_densely(run: Run, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Serve a layer: (1, H, S, D), (1, G, S, D), (1, G, S, E) -> (1, S, H, E).

    Called as transformers calls attention.
    """
    inputs, mask = inputs_of(run, module, *args, **kwargs)
    run.visits += 1
    out = run.visit(inputs)
    if out is None:
        out = dense_output(inputs, mask)
    return out.transpose(1, 2).contiguous(), None


def inputs_of(
    run: Run,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[LayerInputs, LayerMask | None]:
    """Collect a layer's inputs, and its mask where it is not plainly causal.

    Arguments are transformers'.
    """
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        layer = run.visits
    else:
        layer = int(layer)
    mask = _known(run, layer, attention_mask)
    _refuse(module, layer, query, key, kwargs)
    inputs = LayerInputs(
        layer=layer,
        q=query,
        k=key,
        v=value,
        logits=replace(logits_of(scaling, kwargs), window=None),
        sliding_window=None if mask is None else mask.local_size,
    )
    return inputs, mask


def dense_output(inputs: LayerInputs, mask: LayerMask | None) -> Tensor:
    """Compute dense attention (1, H, S, E), by this machine's fastest where the layer is plain."""
    q = inputs.q
    k = inputs.k
    v = inputs.v
    logits = inputs.logits
    is_plain = mask is None and logits.sinks is None and not torch.is_grad_enabled()
    # sdpa has no soft-cap, and no kernel computes in float64.
    if logits.softcap is not None and not registry.fast("attention", Operands(q, k, v))[0]:
        is_plain = False
    if is_plain:
        return fastest_dense(q, k, v, logits=logits)
    return blockwise_attention(q, k, v, logits=logits, mask=mask)


def _known(run: Run, layer: int, attention_mask: Tensor | None) -> LayerMask | None:
    if attention_mask is None:
        return None
    mask = run.masks.get(attention_mask.untyped_storage().data_ptr())
    if mask is None:
        raise HeadwiseError(
            f"layer {layer} attends with a mask or a bias of its own: only causal attention can be "
            f"captured"
        )
    return mask


def _refuse(
    module: nn.Module, layer: int, query: Tensor, key: Tensor, kwargs: dict[str, Any]
) -> None:
    causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise HeadwiseError(
            f"layer {layer} of {type(module).__name__} is not causal: Headwise is for causal models"
        )
    if kwargs.get("position_bias") is not None:
        raise HeadwiseError(
            f"layer {layer} adds a position bias to its scores, which Headwise does not know"
        )
    if query.shape[2] != key.shape[2]:
        raise HeadwiseError(
            f"layer {layer} has {query.shape[2]} queries and {key.shape[2]} keys: not "
            f"self-attention"
        )
