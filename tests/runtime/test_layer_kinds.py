"""The kind of each layer matches the model's own mask, for every causal architecture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import artifacts
from artifacts import HeadwiseError
from runtime import LoadedArtifact
from runtime.layers import attention_layers, layer_kind, window_of
from tests.runtime.batches import attending
from tests.runtime.every_architecture import WINDOW, architectures, tiny_causal
from tests.sampling import sampled

LENGTH = 50
# Architectures that need a tiny model; older versions of transformers do not have all of them.
KNOWN = (
    "cohere2",
    "exaone4",
    "exaone_moe",
    "gemma2",
    "gemma3_text",
    "gemma3n_text",
    "gemma4_text",
    "gpt_oss",
    "inkling_text",
    "kolibri1",
    "llama4_text",
    "minimax",
    "mistral",
    "mllama",
    "nemotron_h",
    "phi3",
    "phimoe",
    "qwen2",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
)
# Models whose attention does not follow the configuration: Doge builds custom masks, and Moshi's
# window is only in its cache.
OTHERWISE = ("doge", "moshi")


def seen_masks(model: Any) -> dict[int, torch.Tensor]:
    """Return each layer's mask (Q, K) from a forward pass of the model's own code."""
    masks = {}

    def attention(module, q, k, v, attention_mask=None, **kwargs):
        if attention_mask is None:
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        elif attention_mask.dtype == torch.bool:
            mask = attention_mask[0, 0]
        else:
            mask = attention_mask[0, 0] == 0
        masks[getattr(module, "layer_idx", None)] = mask
        for unknown in ("softcap", "s_aux"):
            kwargs.pop(unknown, None)
        return sdpa_attention_forward(module, q, k, v, attention_mask, **kwargs)

    with attending(model, attention), torch.no_grad():
        model(input_ids=torch.randint(3, 97, (1, LENGTH)), use_cache=False)
    return masks


@pytest.mark.parametrize(
    "model_type", sampled(architectures(), *(name for name in KNOWN if name in architectures()))
)
@pytest.mark.filterwarnings("ignore")
def test_layer_kind_matches_model_mask(model_type):
    if model_type in OTHERWISE:
        pytest.skip("the masks do not follow the configuration")
    try:
        model = tiny_causal(model_type)
        modules = attention_layers(model)
        masks = seen_masks(model)
    except HeadwiseError as error:
        pytest.skip(f"refused: {error}")
    except Exception as error:
        if model_type in KNOWN:
            raise
        pytest.skip(f"no tiny model: {error!r}")
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    for layer, module in modules.items():
        kind = layer_kind(module.config, layer, module)
        if kind == "full":
            assert torch.equal(masks[layer], causal), layer
        if kind == "sliding":
            assert window_of(module) in (WINDOW, WINDOW + 1)
            assert torch.equal(masks[layer], causal.triu(1 - window_of(module))), layer
        types = getattr(module.config, "layer_types", None)
        # Layers of other inputs are not called; layers that select keys have a causal mask.
        chooses = types is not None and types[layer] == "indexed_attention"
        if kind == "other" and layer in masks and not chooses:
            assert not torch.equal(masks[layer], causal), layer


def kv_cache(*rows: str | None) -> dict[str, Any]:
    table = {"f": artifacts.Full()} if any(rows) else {}
    return {"kv_cache": artifacts.KVCache(policies=table, layers=rows)}


def decode(*filters: int, dense: tuple[int, ...] = ()) -> dict[str, Any]:
    omnikv = artifacts.OmniKV(filter_layers=filters, dense_layers=dense, budget=64)
    return {"decode": artifacts.Decode(omnikv=omnikv)}


PATTERNS = {
    "patterns": {"dense": artifacts.Dense()},
    "prefill": artifacts.Prefill(dense_below=128, layers=(("dense",) * 4, None)),
}
UNNAMED, NAMED = kv_cache(None, None), kv_cache("f", "f")
CHUNKED, SLIDES = "is of the type chunked_attention", "slides over a window already"
EVERY = "the layer sees every token"
# Sections for two layers, of which only the second sees every token.
FAULTS = [
    ("Llama4", PATTERNS, f"prefill.layers[0] must be null: the layer {CHUNKED}"),
    ("Llama4", NAMED, f"kv_cache.layers[0] must be null: the layer {CHUNKED}"),
    ("Llama4", decode(0), f"filter layer 0 {CHUNKED}: decode can filter in the layers 1"),
    ("Llama4", decode(1, dense=(0,)), f"decode.omnikv.dense_layers must not name 0: it {CHUNKED}"),
    ("Exaone4", UNNAMED, f"kv_cache.layers[1] must name a policy, such as full: {EVERY}"),
    ("Exaone4", NAMED, f"kv_cache.layers[0] must be null: the layer {SLIDES}"),
    ("Exaone4", decode(0), f"filter layer 0 {SLIDES}: decode can filter in the layers 1"),
    ("Qwen3Next", PATTERNS, "prefill.layers[0] must be null: the layer has no attention here"),
    ("Qwen3Next", NAMED, "kv_cache.layers[0] must be null: the layer has no attention here"),
]


@pytest.mark.parametrize(("family", "section", "fault"), FAULTS)
def test_apply_rejects_section_for_layer_of_other_kind(family, section, fault, build, artifact_for):
    assert_rejects(build(family), artifact_for, section, fault)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [("Mistral", {"sliding_window": 32}), ("Llama4", {"layer_types": ["chunked_attention"] * 2})],
)
def test_apply_rejects_decode_section_without_full_layers(family, sizes, build, artifact_for):
    fault = "decode must be left out: no layer of this model sees every token"
    assert_rejects(build(family, **sizes), artifact_for, decode(0), fault)


def assert_rejects(model: Any, artifact_for: Any, section: dict[str, Any], fault: str) -> None:
    headwise = LoadedArtifact(artifact_for(model, rows=[None, None]).model_copy(update=section))
    for ask in (headwise.apply, headwise.new_cache):
        with pytest.raises(HeadwiseError) as error:
            ask(model)
        assert str(error.value) == fault
