"""How the loss on a prompt's own tokens depends on what each head puts out, to first order, by one backward pass.

Shapes: S tokens, H query heads, E value dim, V vocabulary, M hidden size.

Layers are computed again on the way back: of each its input and the gradient are alive in the end, and nothing that
grows with the square of S.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import checkpoint

from profiling.inside.capture import LayerInputs, Run, attend_densely, attending_with, layer_mask, masks_of
from runtime.layers import text_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "headwise_gradients"
# Logits that are held at once.
_LOGITS = 1 << 24
# Tokens by which the logits that a model computes are compared with those that are put together here.
_TRIED = 16


def loss_gradients(
    model: PreTrainedModel, input_ids: Tensor, *, wanted: Callable[[LayerInputs], bool] = lambda inputs: True
) -> dict[int, Tensor] | None:
    """Gradients of the summed loss -log p(next token) by the outputs of dense attention.

    Args:
        model: any transformers causal model that profiling.inside.capture serves. It is left as it was.
        input_ids: (1, S) on the model's device, without padding.
        wanted: whether a layer is asked for, from what it attends with; what this raises ends the pass.

    Returns:
        By layer (S, H, E) in the model's dtype: adding d to what a head puts out at token t adds g[t] . d to the loss
        of the prompt, to first order. None where a model makes its logits in a way of its own, cannot be
        differentiated, or has gradients that its dtype does not hold.
    """
    edges: dict[int, GradientEdge] = {}
    asked: set[int] = set()
    run = Run(lambda inputs: asked.add(inputs.layer) if wanted(inputs) else None)
    forward = False

    def attention(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        layer = getattr(module, "layer_idx", None)
        layer = run.visits if layer is None else int(layer)
        out, weights = attend_densely(run, module, *args, **kwargs)
        # Not when a layer is computed again on the way back. Of the tensor nothing is kept.
        if forward and layer in asked and out.requires_grad:
            edges[layer] = get_gradient_edge(out)
        return out, weights

    attending = attending_with(model, NAME, attention, layer_mask)
    try:
        with torch.enable_grad(), masks_of(run), attending, _recomputing(model), _inputs_with_gradients(model):
            head = _head_of(model, input_ids[:, :_TRIED])
            if head is None:
                return None
            asked.clear()
            run.visits, forward = 0, True
            states: Tensor = _states(model, input_ids)
            forward = False
            if set(edges) != asked:
                return None
            if not asked:
                return {}
            by_states = _by_states(states.detach(), input_ids, head)
            found = torch.autograd.grad(states, list(edges.values()), by_states, allow_unused=True)
    finally:
        # The attention stays registered with transformers, and with it all that it knows.
        layers = list(edges)
        edges.clear()
    known = {layer: gradient[0] for layer, gradient in zip(layers, found, strict=True) if gradient is not None}
    return known if set(known) == asked and all(one.isfinite().all() for one in known.values()) else None


def _states(model: PreTrainedModel, input_ids: Tensor) -> Any:
    """(1, S, M) the last hidden states; None where the model's base returns something else."""
    return getattr(model.base_model(input_ids=input_ids, use_cache=False), "last_hidden_state", None)


def _by_states(states: Tensor, input_ids: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
    """Gradient of the summed loss by the last hidden states (1, S, M); of the last token, which nothing follows, 0."""
    found = torch.zeros_like(states)
    length = states.shape[1] - 1
    rows = max(1, _LOGITS // head(states[:, :1]).shape[-1])
    for start in range(0, length, rows):
        part = states[:, start : min(start + rows, length)].requires_grad_(True)
        logits = head(part)[0].float()
        targets = input_ids[0, start + 1 : start + 1 + part.shape[1]].to(logits.device)
        loss = nn.functional.cross_entropy(logits, targets, reduction="sum")
        (found[:, start : start + part.shape[1]],) = torch.autograd.grad(loss, part)
    return found


@torch.no_grad()
def _head_of(model: PreTrainedModel, input_ids: Tensor) -> Callable[[Tensor], Tensor] | None:
    """From last hidden states to logits, as the model does it: a linear map, with the soft-cap or factor of its config.

    None where that does not come to the model's own logits.
    """
    head, config = model.get_output_embeddings(), text_config(model)
    softcap = getattr(config, "final_logit_softcapping", None)
    factors = [1.0]
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        factors.append(1 / divisor)
    if (factor := getattr(config, "logit_scale", None)) is not None:
        factors.append(factor)

    def logits_of(states: Tensor, factor: float) -> Tensor:
        logits: Tensor = head(states)
        if factor != 1:
            logits = logits * factor
        return softcap * torch.tanh(logits / softcap) if softcap else logits

    states = _states(model, input_ids)
    if head is None or states is None:
        return None
    wanted = model(input_ids=input_ids, use_cache=False).logits.float()
    for factor in factors:
        if (logits_of(states, factor).float() - wanted).abs().max() <= 0.02 * wanted.abs().max():
            return lambda given: logits_of(given, factor)
    return None


@contextmanager
def _inputs_with_gradients(model: PreTrainedModel) -> Iterator[None]:
    """Parameters need no gradients for this: what enters the first layer has them."""

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output.detach().requires_grad_(True)

    handle = model.get_input_embeddings().register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _recomputing(model: PreTrainedModel) -> Iterator[None]:
    """Layers keep their inputs and are computed again on the way back, where transformers can."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not getattr(model, "supports_gradient_checkpointing", False):
        layers = []
    before = [vars(layer).get("forward") for layer in layers]
    try:
        for layer in layers:
            # Through the layer's own switch it would have to be in training, and some drop out by that.
            vars(layer)["forward"] = partial(again, layer.forward)
        yield
    finally:
        for layer, was in zip(layers, before, strict=True):
            del vars(layer)["forward"]
            if was is not None:
                vars(layer)["forward"] = was
