"""Training: dense calls with the gradients of the model without an artifact, by every entry."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

import artifacts
from artifacts import HeadwiseError
from runtime import LoadedArtifact, apply_dense
from tests.runtime.conftest import POLICIES
from tests.runtime.omnikv import CLOSE, LAYERS


def trains(model, reentrant):
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})


def reentrant_with_attention_in_evaluation_mode(model):
    trains(model, reentrant=True)
    for layer in model.model.layers:
        layer.self_attn.eval()


def by_hand_in_evaluation_mode(model):
    def forward(hidden, original, **more):
        return checkpoint(partial(original, **more), hidden, use_reentrant=True)

    for layer in model.model.layers:
        layer.forward = partial(forward, original=layer.forward)


WAYS = {
    "train": torch.nn.Module.train,
    "eval": torch.nn.Module.eval,
    "checkpointed": partial(trains, reentrant=False),
    "reentrant": partial(trains, reentrant=True),
    "reentrant, attention in evaluation mode": reentrant_with_attention_in_evaluation_mode,
    "by hand in evaluation mode": by_hand_in_evaluation_mode,
}


def gradients(model, *chunks, cache=None):
    """Logits of the last chunk, and gradients of all weights by all chunks."""
    model.zero_grad()
    total = 0.0
    with torch.enable_grad():
        for chunk in chunks:
            options = {"use_cache": False} if cache is None else {"past_key_values": cache}
            logits = model(chunk, **options).logits
            total = total + logits.logsumexp(-1).mean()
        total.backward()
    return logits.detach(), [p.grad.clone() for p in model.parameters()]


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("applied", ["patterns", "filters", "dense"])
@pytest.mark.parametrize("way", WAYS)
def test_training_is_dense_and_gradients_match(
    way, applied, build, artifact_for, decoding, ids, warnings
):
    model, prompt = build(**LAYERS), ids(200)
    WAYS[way](model)
    expected = gradients(model, prompt)
    handle = {
        "patterns": lambda: LoadedArtifact(artifact_for(model)).apply(model, backend="reference"),
        "filters": lambda: decoding(model, prefill_ratio=0.1).apply(model, backend="reference"),
        "dense": lambda: apply_dense(model),
    }[applied]()
    with handle:
        torch.testing.assert_close(gradients(model, prompt), expected)
        assert "sparse" not in handle.stats() or handle.stats()["sparse"] == 0
        assert "dense by kernel" not in handle.stats()["dense"]
    if applied == "patterns":
        (line,) = warnings()
        assert ("training" if model.training else "gradients") in line


def test_compiled_training_is_dense_and_gradients_match(build, apply, ids, warnings, graphs):
    model, prompt = build(num_hidden_layers=1).train(), ids(200)
    expected = gradients(model, prompt)
    attention = model.model.layers[0].self_attn
    attention.forward = torch.compile(attention.forward, backend=graphs)
    with apply(model):
        torch.testing.assert_close(gradients(model, prompt), expected)
    assert len(warnings()) == 1 and "training" in warnings()[0]


@pytest.mark.parametrize("part", ["", "model", "model.layers.0", "model.layers.0.self_attn"])
def test_part_in_training_mode_without_gradients_is_dense(part, build, apply, ids, warnings):
    model, prompt = build(), ids(200)
    model.get_submodule(part).train()
    trained = 1 if "layers" in part else 2
    with apply(model) as handle:
        model(prompt)
        why = "the model is in training mode (use model.eval())"
        assert handle.stats() == {"sparse": 2 - trained, "dense": {why: trained}}
        assert warnings() == [f"serving densely: {why}"]
        model.eval()
        model(prompt)
        assert handle.stats()["sparse"] == 4 - trained
    model.train()
    with apply(model, strict=True), pytest.raises(HeadwiseError, match="training mode"):
        model(prompt)


@pytest.mark.parametrize("offload", ["never", "packed"])
@pytest.mark.parametrize("section", ["patterns", "filters"])
def test_training_in_chunks_keeps_gradients_of_earlier_chunks(
    section, offload, build, artifact_for, decoding, ids
):
    model = build(**LAYERS).train()
    chunks = ids(280).split((150, 100, 30), dim=1)
    expected = gradients(model, *chunks, cache=DynamicCache(config=model.config))
    headwise = LoadedArtifact(artifact_for(model)) if section == "patterns" else decoding(model)
    with headwise.apply(model, backend="reference") as handle:
        cache = handle.new_cache(offload=offload)
        torch.testing.assert_close(gradients(model, *chunks, cache=cache), expected)
        # The same cache goes on without gradients.
        model.eval()
        assert model(ids(1), past_key_values=cache).logits.isfinite().all()


def test_gradients_after_tokens_in_a_bank_raise(build, decoding, ids):
    model = build(**LAYERS)
    with decoding(model).apply(model) as handle:
        cache = handle.new_cache(offload="packed")
        model(ids(200), past_key_values=cache)
        with torch.enable_grad(), pytest.raises(HeadwiseError, match="offload='never'"):
            model(ids(20), past_key_values=cache)


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_refuse_training(policy, build, keeping, ids):
    model = build()
    with keeping(model, POLICIES[policy]).apply(model, backend="reference") as handle:
        model.train()
        with pytest.raises(HeadwiseError, match="cannot serve this call: the model is in training"):
            model(ids(200), past_key_values=handle.new_cache())
        model.eval().requires_grad_(False)
        # Only the keys of the first layer have gradients there.
        model.model.layers[0].self_attn.k_proj.weight.requires_grad_(True)
        with torch.enable_grad():
            with pytest.raises(HeadwiseError, match="cannot serve this call: gradients"):
                model(ids(200), past_key_values=handle.new_cache())
            by_hand_in_evaluation_mode(model)
            entered = model.get_input_embeddings()(ids(200)).requires_grad_(True)
            with pytest.raises(HeadwiseError, match="cannot serve this call: gradients"):
                model(inputs_embeds=entered, past_key_values=handle.new_cache())


def test_apply_to_model_in_training_mode_rehearses_in_evaluation_mode(build, keeping, ids):
    """Count positions inside the cache of a model that has dropout in training mode."""
    model, prompt = build(attention_dropout=0.5), ids(200)
    policy = artifacts.Streaming(sinks=4, window=60, positions="cache")
    model.train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    with keeping(model, policy).apply(model) as handle:
        assert [module.training for module in model.modules()] == modes
        handle.new_cache()
        model.eval()
        first = model(prompt, past_key_values=handle.new_cache()).logits
    fresh = build(attention_dropout=0.5)
    with keeping(fresh, policy).apply(fresh) as handle:
        torch.testing.assert_close(
            fresh(prompt, past_key_values=handle.new_cache()).logits, first, **CLOSE
        )
