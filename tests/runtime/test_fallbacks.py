"""What cannot be served sparsely is served as before and said once; strict raises instead."""

import pytest
import torch

from artifacts import HeadwiseError
from runtime.attention.function import headwise_attention
from runtime.attention.mask import headwise_mask


def holes(prompt):
    real = torch.ones_like(prompt)
    real[:, 60:70] = 0
    return {"attention_mask": real}


def hand_made(prompt):
    return {
        "attention_mask": torch.ones(prompt.shape[1], prompt.shape[1], dtype=torch.bool).tril()[
            None, None
        ]
    }


MASKS = {"holes": holes, "hand_made": hand_made}


@pytest.mark.parametrize("mask", MASKS)
def test_an_unknown_mask_is_served_as_sdpa_would_and_said_once(mask, build, apply, ids, warnings):
    model, prompt = build(), ids(200)
    given = MASKS[mask](prompt)
    expected = model(prompt, **given).logits
    with apply(model) as handle:
        assert torch.equal(model(prompt, **given).logits, expected)
        model(prompt, **given)
        assert handle.stats()["sparse"] == 0
        assert len(warnings()) == 1 and "mask" in warnings()[0]
        model(prompt)
        assert handle.stats()["sparse"] == 2
    with apply(model, strict=True), pytest.raises(HeadwiseError, match="mask"):
        model(prompt, **given)


@pytest.mark.parametrize("family", ["Llama", "Gemma3", "GPTNeoX"])
@pytest.mark.parametrize("before", ["sdpa", "eager"])
def test_attention_weights_are_those_of_eager(before, family, build, apply, ids, warnings):
    model, prompt = build(family), ids(160, batch=2)
    real = torch.ones_like(prompt)
    real[0, :20] = 0
    model.set_attn_implementation("eager")
    expected = model(prompt, attention_mask=real, output_attentions=True)
    model.set_attn_implementation(before)
    with apply(model) as handle:
        found = model(prompt, attention_mask=real, output_attentions=True)
        assert handle.stats()["sparse"] == 0
        model(prompt, attention_mask=real, output_attentions=True)
    assert len(found.attentions) == len(expected.attentions) == model.config.num_hidden_layers
    for mine, theirs in zip(found.attentions, expected.attentions, strict=True):
        assert torch.equal(mine, theirs)
    torch.testing.assert_close(found.logits[1], expected.logits[1])
    assert [w for w in warnings() if "weights" in w] and len(warnings()) == 1
    with apply(model, strict=True), pytest.raises(HeadwiseError, match="attention weights"):
        model(prompt, output_attentions=True)


def test_attention_weights_for_a_configured_model(build, apply, ids):
    model, prompt = build(attn_implementation="eager"), ids(150)
    model.config.output_attentions = True
    expected = model(prompt).attentions
    with apply(model) as handle:
        found = model(prompt).attentions
        assert handle.stats()["sparse"] == 0
    assert len(found) == 2 and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_attention_weights_while_generating(build, apply, ids):
    model, prompt = build(attn_implementation="eager"), ids(150)
    options = {
        "max_new_tokens": 3,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_attentions": True,
    }
    expected = model.generate(prompt, **options)
    with apply(model):
        found = model.generate(prompt, **options)
    assert found.sequences.tolist() == expected.sequences.tolist()
    for mine, theirs in zip(found.attentions, expected.attentions, strict=True):
        assert len(mine) == 2 and all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_is_dense_with_the_same_gradients(checkpointing, build, apply, ids, warnings):
    model, prompt = build().train(), ids(200)
    if checkpointing:
        model.gradient_checkpointing_enable()

    def gradients():
        model.zero_grad()
        with torch.enable_grad():
            model(prompt, labels=prompt).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = gradients()
    with apply(model):
        found = gradients()
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert len(warnings()) == 1 and "gradients" in warnings()[0]


def test_gradient_checkpointing_without_gradients_is_sparse(build, apply, ids):
    model, prompt = build().train(), ids(200)
    with apply(model, strict=True):
        expected = model(prompt).logits
        model.gradient_checkpointing_enable()
        assert torch.equal(model(prompt).logits, expected)


def test_dropout_is_dense(build, apply, ids, warnings):
    model = build(attention_dropout=0.5).train()
    with apply(model) as handle:
        model(ids(200))
        assert handle.stats()["sparse"] == 0
    assert len(warnings()) == 1 and "dropout" in warnings()[0]


def test_bidirectional_attention_is_dense(build, apply, ids, warnings):
    model, prompt = build(), ids(200)
    expected = model(prompt, is_causal=False).logits
    with apply(model):
        assert torch.equal(model(prompt, is_causal=False).logits, expected)
    assert len(warnings()) == 1 and "not causal" in warnings()[0]


def test_a_position_bias_is_dense(build, apply, ids, warnings):
    model, prompt = build(), ids(200)
    bias = torch.zeros(1, 4, 200, 200)
    expected = model(prompt, position_bias=bias).logits
    with apply(model) as handle:
        assert torch.equal(model(prompt, position_bias=bias).logits, expected)
        assert handle.stats()["sparse"] == 0
    assert len(warnings()) == 1 and "position bias" in warnings()[0]


def test_no_fast_kernel_is_dense_and_named(build, apply, ids, warnings, monkeypatch):
    model, prompt = build(), ids(200)
    expected = model(prompt).logits
    monkeypatch.setattr(
        "kernels.dispatch.why_slow", lambda *qkv: "no fast kernel: cpu: no compiler"
    )
    with apply(model, backend="auto") as handle:
        assert torch.equal(model(prompt).logits, expected)
        assert handle.stats()["sparse"] == 0
    assert warnings() == ["serving densely: no fast kernel: cpu: no compiler"]


def test_strict_leaves_decode_short_prompts_and_sliding_layers_alone(build, apply, ids):
    model = build("Gemma3")
    with apply(model, strict=True):
        model.generate(ids(100), max_new_tokens=3, do_sample=False)
        model.generate(ids(200), max_new_tokens=3, do_sample=False)


def test_heads_other_than_planned_are_dense(build, apply, warnings):
    model = build()
    query = torch.randn(1, 2, 200, 64)
    key = torch.randn(1, 1, 200, 64)
    with apply(model) as handle:
        mask = headwise_mask(1, 200, 200, config=model.config)
        attention = model.model.layers[0].self_attn
        found, _ = headwise_attention(attention, query, key, key, mask)
        assert handle.stats()["sparse"] == 0
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, key, is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(found, expected.transpose(1, 2))
    assert len(warnings()) == 1 and "(2, 1)" in warnings()[0] and "(4, 2)" in warnings()[0]
