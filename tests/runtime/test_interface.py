"""Forwards that were replaced: refused if they bypass the attention interface, else served."""

from __future__ import annotations

import functools
import types
from functools import partial

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import ModelHook, add_hook_to_module
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention

from artifacts import HeadwiseError
from runtime import apply_dense


def projected(self, hidden_states):
    """Return q, k and v (B, heads, Q, D)."""
    return [
        layer(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        for layer in (self.q_proj, self.k_proj, self.v_proj)
    ]


def own(self, hidden_states, **options):
    """Compute attention without the interface."""
    q, k, v = projected(self, hidden_states)
    out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return self.o_proj(out.transpose(1, 2).flatten(2)), None


class Subclass(LlamaAttention):
    def forward(self, hidden_states, **options):
        return own(self, hidden_states)


class Kernel:
    """A library's object in place of a forward."""

    def __init__(self, module):
        self.module = module

    def __call__(self, hidden_states, **options):
        return own(self.module, hidden_states)

    def forward(self, hidden_states, **options):
        return own(self.module, hidden_states)


def hooked(attention):
    attention.forward = types.MethodType(own, attention)
    add_hook_to_module(attention, ModelHook())


def named_like_the_former(attention):
    attention.forward = functools.wraps(attention.forward)(partial(own, attention))


def around_its_layer(layer):
    def forward(hidden_states, **options):
        return hidden_states + own(attention, hidden_states)[0]

    attention = layer.self_attn
    layer.forward = forward


BYPASSING = {
    "method": lambda attention: setattr(attention, "forward", types.MethodType(own, attention)),
    "partial": lambda attention: setattr(attention, "forward", partial(own, attention)),
    "object": lambda attention: setattr(attention, "forward", Kernel(attention)),
    "method of an object": lambda attention: setattr(
        attention, "forward", Kernel(attention).forward
    ),
    "hook around it": hooked,
    "subclass": lambda attention: setattr(attention, "__class__", Subclass),
    "wraps": named_like_the_former,
}


@pytest.mark.parametrize("way", [*BYPASSING, "layer"])
def test_apply_rejects_forward_that_bypasses_interface(way, build, apply, ids):
    model = build()
    layer = model.model.layers[1]
    if way == "layer":
        around_its_layer(layer)
    else:
        BYPASSING[way](layer.self_attn)
    model(ids(20), use_cache=False)
    place = r"model\.layers\.1" if way == "layer" else r"model\.layers\.1\.self_attn"
    why = f"the forward of {place} in this LlamaForCausalLM is .*never calls transformers' att"
    for applied in (apply, apply_dense):
        with pytest.raises(HeadwiseError, match=why) as error:
            applied(model)
        assert "\n" not in str(error.value)
    assert model.config._attn_implementation == "sdpa"


def test_apply_rejects_patched_class(build, apply, monkeypatch):
    model = build()
    with apply(model), monkeypatch.context() as patch:
        patch.setattr(LlamaAttention, "forward", own)
        with pytest.raises(HeadwiseError, match="computes its own attention"):
            apply(build())
    with apply(build()):
        pass


def closure(attention):
    former = attention.forward

    def forward(*args, **options):
        return former(*args, **options)

    attention.forward = forward


def stored(attention):
    def forward(self, *args, **options):
        return self.former(*args, **options)

    attention.former = attention.forward
    attention.forward = types.MethodType(forward, attention)


def by_its_class(attention):
    def forward(self, *args, **options):
        return LlamaAttention.forward(self, *args, **options)

    attention.forward = types.MethodType(forward, attention)


def helper(self, q, k, v, mask, options):
    name = self.config._attn_implementation
    return ALL_ATTENTION_FUNCTIONS[name](self, q, k, v, mask, scaling=self.scaling, **options)


def own_by_interface(attention):
    def forward(self, hidden_states, position_embeddings, attention_mask, **options):
        q, k, v = projected(self, hidden_states)
        q, k = modeling_llama.apply_rotary_pos_emb(q, k, *position_embeddings)
        out, weights = helper(self, q, k, v, attention_mask, {})
        return self.o_proj(out.flatten(2)), weights

    attention.forward = types.MethodType(forward, attention)


class Calls(Subclass):
    def forward(self, *args, **options):
        return super(Subclass, self).forward(*args, **options)


def two_hooks(attention):
    add_hook_to_module(attention, ModelHook())
    add_hook_to_module(attention, ModelHook(), append=True)


def checkpointed(attention):
    attention.forward = partial(checkpoint, attention.forward, use_reentrant=False)


def compiled(attention):
    attention.forward = torch.compile(attention.forward, backend="eager")


SERVED = {
    "closure": closure,
    "stored": stored,
    "class": by_its_class,
    "own by interface": own_by_interface,
    "super": lambda attention: setattr(attention, "__class__", Calls),
    "hooks": two_hooks,
    "checkpoint": checkpointed,
    "compiled": compiled,
    "offloaded": cpu_offload,
}


@pytest.mark.parametrize("way", SERVED)
def test_apply_serves_forward_that_calls_the_former(way, build, apply, ids):
    expected_model, model, prompt = build(), build(), ids(200)
    with apply(expected_model):
        expected = expected_model(prompt, use_cache=False).logits
    for layer in model.model.layers:
        SERVED[way](layer.self_attn)
        if way in ("closure", "stored", "hooks", "checkpoint"):
            SERVED[way](layer)
    if way in ("closure", "stored", "hooks"):
        SERVED[way](model.model)
    with apply(model, strict=True) as handle:
        torch.testing.assert_close(model(prompt, use_cache=False).logits, expected)
        assert handle.stats()["sparse"] == 2


@pytest.mark.parametrize("way", ["checkpoint", "compile"])
def test_apply_serves_wrapped_attention_module(way, build, apply, ids):
    model, prompt = build(), ids(200)
    for layer in model.model.layers:
        if way == "checkpoint":
            layer.self_attn = checkpoint_wrapper(layer.self_attn)
        else:
            layer.self_attn = torch.compile(layer.self_attn, backend="eager")
    # A new module is in training mode.
    model.eval()
    with apply(model, strict=True) as handle:
        assert model(prompt).logits.isfinite().all()
        assert handle.stats()["sparse"] == 2
    assert [name for name, each in model.named_modules() if "_headwise_layer" in vars(each)] == []
