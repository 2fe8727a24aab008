"""One dense pass forward and back: outputs of every head, and first-order effects on a loss.

Shapes: S tokens, H query heads, G KV heads, D head dim, E value dim, V vocabulary, M hidden size.

Attention goes through Headwise's own kernels both ways. Of each layer its input and its attention's
output are kept on the way forth, nothing that grows with the square of S; on the way back layers
are computed again one at a time, and one layer's gradients are alive at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from kernels.gradient import attention_gradients
from profiling.inside.capture import (
    LayerInputs,
    Run,
    attend_densely,
    attending_with,
    inputs_of,
    layer_mask,
    masks_of,
)
from profiling.inside.head_fidelity import dense_of_layer
from runtime.layers import text_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "headwise_gradients"
# Logits that are held at once.
_LOGITS = 1 << 24
# Logits turned to fp32 at once, where only margins are computed.
_MARGIN_ROWS = 128
# Tokens by which the logits that a model computes are compared with those that are put together
# here.
_TRIED = 16
_NONE = torch.zeros(0, dtype=torch.float32, device="cpu")


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerGradients:
    """One layer on the way back, for reading during the visit.

    Attributes:
        out: (1, H, S, E) dense attention's output.
        lse: (1, H, S) its log-sum-exp.
        by_out: (1, H, S, E) the gradient of the loss by `out`: adding d to a head's output at
            token t adds by_out[t] . d to the loss, to first order.
    """

    inputs: LayerInputs
    out: Tensor
    lse: Tensor
    by_out: Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class DensePass:
    """Predictions of the model on the tokens.

    Attributes:
        nll: (S - 1,) fp32 -log p of each token but the first.
        likeliest: (S - 1,) the likeliest in its place. Where some tokens are marked as an answer's,
            both are of these and of those after the positions that are kept.
        margin: (S - 1,) fp32 logit of each token, less the highest of the others; of marked tokens.
        log_probs: (P, V) fp16 at the positions that were asked for.
        gradients: whether layers were visited on the way back; if not, `fault` is the reason.
    """

    nll: Tensor
    likeliest: Tensor
    margin: Tensor
    log_probs: Tensor
    gradients: bool
    fault: str | None = None


def gradient_pass(
    model: PreTrainedModel,
    input_ids: Tensor,
    answers: Tensor,
    visit: Callable[[LayerGradients], None],
    *,
    wanted: Callable[[LayerInputs], bool] = lambda inputs: True,
    keep: Tensor | None = None,
    backend: str = "auto",
) -> DensePass:
    """Run forward and back over a prompt; call `visit` for each wanted layer, the last first.

    Sliding-window layers are left to torch and not visited.

    The loss is the sum of -log p over all tokens; where some are marked as an answer's, it is the
    sum of -log(p/(1-p)) over those alone: log-odds do not go flat where the model is sure of its
    answer.

    Args:
        model: any transformers causal model that profiling.inside.capture serves. It is left as it
            was.
        input_ids: (1, S) on the model's device, without padding.
        answers: (S,) bool, which tokens are an answer's; all False for a text.
        visit: may do anything but write to the tensors.
        wanted: whether a layer is visited, from its inputs; an exception that it raises ends the
            pass.
        keep: (P,) positions whose predictions of the next token are returned.
        backend: the attention backend, as for kernels.attention.sparse_attention.
    """
    if keep is None:
        keep = torch.zeros(0, dtype=torch.long, device=input_ids.device)
    run = Run(lambda inputs: None)
    outputs: dict[int, tuple[Tensor, Tensor]] = {}

    def attention(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        inputs, mask = inputs_of(run, module, *args, **kwargs)
        run.visits += 1
        if mask is not None:
            return attend_densely(run, module, *args, **kwargs)
        if wanted(inputs):
            watch = visit
        else:
            watch = None
        out: Tensor = _Dense.apply(inputs.q, inputs.k, inputs.v, inputs, outputs, watch, backend)
        return out.transpose(1, 2).contiguous(), None

    fault = _why_none(model)
    if fault is not None:
        with masks_of(run), attending_with(model, NAME, attention, layer_mask):
            return _without(model, input_ids, keep, fault)
    with (
        torch.enable_grad(),
        masks_of(run),
        attending_with(model, NAME, attention, layer_mask),
        _recomputing(model),
        _frozen(model),
    ):
        head = _head_of(model, input_ids[:, :_TRIED])
        outputs.clear()
        run.visits = 0
        with _entry(model) as entered:
            states = _states(model, input_ids)
        if head is None or states is None or not states.requires_grad:
            name = type(model).__name__
            return _without(
                model,
                input_ids,
                keep,
                f"{name} makes its logits in a way of its own, or has no gradients",
            )
        by_states, predicted = _losses(states.detach(), input_ids, answers, head, keep)
        if not bool(by_states.isfinite().all()):
            fault = "the loss is not finite"
            return replace(predicted, gradients=False, fault=fault)
        torch.autograd.grad(states, entered[0], by_states)
    return predicted


def _why_none(model: PreTrainedModel) -> str | None:
    """Reason why no gradients can be taken; None where they may be."""
    if torch.is_inference_mode_enabled():
        return "torch.inference_mode is on"
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_inference():
            return f"{name} was made in torch.inference_mode: load the model outside of it"
    return None


class _Dense(torch.autograd.Function):
    """Dense causal attention by Headwise's kernels, with a visit on the way back."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        inputs: LayerInputs,
        cached: dict[int, tuple[Tensor, Tensor]],
        visit: Callable[[LayerGradients], None] | None,
        backend: str,
    ) -> Tensor:
        # Computed once: a layer's output is reused when the layer is recomputed.
        if inputs.layer not in cached:
            cached[inputs.layer] = dense_of_layer(inputs, backend=backend)
        ctx.save_for_backward(q, k, v)
        # The tensors come again on the way back; here they would stay for all layers at once.
        ctx.about = replace(inputs, q=_NONE, k=_NONE, v=_NONE), cached, visit
        return cached[inputs.layer][0].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (by_out,) = gradients
        inputs, cached, visit = ctx.about
        q, k, v = ctx.saved_tensors
        out, lse = cached.pop(inputs.layer)
        if visit is not None:
            inputs = replace(inputs, q=q.detach(), k=k.detach(), v=v.detach())
            visit(LayerGradients(inputs=inputs, out=out, lse=lse, by_out=by_out))
        # With learned sinks too: they are in the output and in the log-sum-exp, and have no value
        # vectors.
        gradients_of_inputs = attention_gradients(q, k, v, out, lse, by_out, logits=inputs.logits)
        return *gradients_of_inputs, None, None, None, None


def _states(model: PreTrainedModel, input_ids: Tensor) -> Any:
    """(1, S, M) the last hidden states; None where the model's base returns something else."""
    return getattr(
        model.base_model(input_ids=input_ids, use_cache=False), "last_hidden_state", None
    )


def _losses(
    states: Tensor,
    input_ids: Tensor,
    answers: Tensor,
    head: Callable[[Tensor], Tensor],
    keep: Tensor,
) -> tuple[Tensor, DensePass]:
    """Compute the loss' gradient by the last hidden states (1, S, M), and the predictions."""
    gradient = torch.zeros_like(states)
    length = states.shape[1] - 1
    width = head(states[:, :1]).shape[-1]
    nll = torch.full((length,), torch.nan, device=states.device, dtype=torch.float32)
    likeliest = torch.zeros(length, dtype=torch.long, device=states.device)
    margin = torch.zeros_like(nll)
    log_probs = torch.zeros(len(keep), width, dtype=torch.float16, device=states.device)
    # If some tokens are answers, predictions of the other tokens are not needed, and logits are
    # the main cost here.
    before = answers[1:].nonzero()[:, 0]
    needed = torch.arange(length + 1, device=states.device)
    if len(before):
        needed = torch.cat([keep, before]).unique()
    for positions in needed.split(max(1, _LOGITS // width)):
        part = states[:, positions].requires_grad_(True)
        logits = head(part)[0].float()
        here = torch.isin(keep, positions)
        log_probs[here] = (
            logits.detach()[torch.searchsorted(positions, keep[here])]
            .log_softmax(-1)
            .clamp_min_(-1e4)
            .half()
        )
        # The last token is followed by none.
        logits = logits[positions < length]
        rows = positions[positions < length]
        targets = input_ids[0, rows + 1].to(logits.device)
        lost = cross_entropy(logits, targets, reduction="none")
        nll[rows] = lost.detach()
        likeliest[rows] = logits.detach().argmax(-1)
        if len(before):
            margin[rows] = margins(logits.detach(), targets)
            # log(p / (1 - p)) from log p, stable at both ends.
            rest = logits.scatter(1, targets[:, None], float("-inf")).logsumexp(-1)
            odds = logits.gather(1, targets[:, None])[:, 0] - rest
            loss = -(odds * answers[rows + 1]).sum()
        else:
            loss = lost.sum()
        if loss.requires_grad and len(rows):
            gradient[:, positions] = torch.autograd.grad(loss, part)[0]
    return gradient, DensePass(
        nll=nll, likeliest=likeliest, margin=margin, log_probs=log_probs, gradients=True
    )


def margins(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute the logits of targets (N), less the highest others, from (N, V): (N) fp32."""
    parts = []
    for rows, expected in zip(logits.split(_MARGIN_ROWS), targets.split(_MARGIN_ROWS), strict=True):
        scores = rows.float()
        others = scores.scatter(1, expected[:, None], float("-inf")).max(-1).values
        parts.append(scores.gather(1, expected[:, None])[:, 0] - others)
    return torch.cat(parts)


@torch.no_grad()
def _without(model: PreTrainedModel, input_ids: Tensor, keep: Tensor, fault: str) -> DensePass:
    """Make a DensePass without gradients, for a model that has none."""
    logits = model(input_ids=input_ids, use_cache=False).logits[0]
    targets = input_ids[0, 1:].to(logits.device)
    parts = list(zip(logits[:-1].split(512), targets.split(512), strict=True))
    nll = torch.cat([cross_entropy(a.float(), b, reduction="none") for a, b in parts])
    return DensePass(
        nll=nll,
        likeliest=logits[:-1].argmax(-1),
        margin=torch.cat([margins(a, b) for a, b in parts]),
        log_probs=logits[keep].float().log_softmax(-1).clamp_min_(-1e4).half(),
        gradients=False,
        fault=fault,
    )


@torch.no_grad()
def _head_of(model: PreTrainedModel, input_ids: Tensor) -> Callable[[Tensor], Tensor] | None:
    """Find the map from last hidden states to logits: linear, with the config's soft-cap or factor.

    None if the result differs from the model's own logits.
    """
    head = model.get_output_embeddings()
    config = text_config(model)
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
        if softcap:
            return softcap * torch.tanh(logits / softcap)
        return logits

    states = _states(model, input_ids)
    if head is None or states is None:
        return None
    wanted = model(input_ids=input_ids, use_cache=False).logits.float()
    for factor in factors:
        if (logits_of(states, factor).float() - wanted).abs().max() <= 0.02 * wanted.abs().max():
            return lambda hidden: logits_of(hidden, factor)
    return None


@contextmanager
def _entry(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Give the first layer's input gradients; parameters need none."""
    entered: list[Tensor] = []

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        entered.append(output.detach().requires_grad_(True))
        return entered[-1]

    handle = model.get_input_embeddings().register_forward_hook(hook)
    try:
        yield entered
    finally:
        handle.remove()


@contextmanager
def _frozen(model: PreTrainedModel) -> Iterator[None]:
    """No weight asks for a gradient: the graph would hold each one that asks until the way back.

    Offloaded weights are new tensors at each use, so they are looked up by name.
    """
    names = [name for name, weight in model.named_parameters() if weight.requires_grad]
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    try:
        yield
    finally:
        for name in names:
            model.get_parameter(name).requires_grad_(True)


@contextmanager
def _recomputing(model: PreTrainedModel) -> Iterator[None]:
    """Layers keep their inputs and are computed again on the way back, where transformers can.

    Each to its end: accelerate's hook after a layer's last linear map takes its weights away again.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    layers = [
        module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    if not getattr(model, "supports_gradient_checkpointing", False):
        layers = []
    before = [vars(layer).get("forward") for layer in layers]
    try:
        for layer in layers:
            # Through the layer's own switch it would have to be in training, and some drop out by
            # that.
            vars(layer)["forward"] = partial(again, layer.forward)
        with set_checkpoint_early_stop(False):
            yield
    finally:
        for layer, was in zip(layers, before, strict=True):
            del vars(layer)["forward"]
            if was is not None:
                vars(layer)["forward"] = was
