"""Caches under policies in every causal architecture of transformers: served, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from artifacts import Full, HeadwiseError, Streaming
from profiling.quality.method import Method
from runtime import LoadedArtifact, apply_dense
from runtime.layers import attention_layers, sliding_layers, text_config
from tests.runtime.batches import fed
from tests.runtime.every_architecture import architectures, one_layer, tiny_causal

CLOSE: dict[str, Any] = {"atol": 2e-3, "rtol": 1e-3}
STREAM = Streaming(sinks=4, window=12)
# Reasons for rejection, by the text of the message.
CAUSES = {
    "falcon_h1": "LinearAttentionAndFullAttentionLayer in transformers: the kv_cache section",
    "zaya": "LinearAttentionAndFullAttentionLayer in transformers: the kv_cache section",
    "inkling_text": "LinearAttentionAndSlidingWindowAttentionLayer in transformers: the kv_cache",
    "gemma3n_text": "reads the keys and values of another layer",
    "minimax": "no cache for MiniMaxForCausalLM: it takes a cache class of its own .MiniMaxCache.",
    "diffllama": r"layer 0 \(DiffLlamaAttention\) computes with keys or values between its cache",
    "jetmoe": r"layer 0 \(JetMoeAttention\) computes with keys or values between its cache",
    "doge": r"layer 0 \(DogeAttention\) computes with keys or values between its cache",
}
# Rotations by rotated part and embedding.
ROTATIONS = {
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {},
    "gpt_neox": {},
    "stablelm": {"partial_rotary_factor": 0.25},
    "persimmon": {},
    "glm4": {},
    "cohere": {},
    "ernie4_5": {},
    "nanochat": {},
    "olmo3": {},
    "gemma3_text": {},
    "gemma4_text": {},
}
# Models whose cache slides and whose mask does not: their output depends on the cache.
UNLIKE_THEMSELVES = {"moshi"}
# Reads the keys of cache layers itself.
READS_CACHE = {"mllama"}
exhaustive = pytest.mark.exhaustive


@pytest.fixture
def under(keeping):
    """Return under(model, policy): an artifact with the policy for each layer without a window."""

    def under(model: Any, policy: Any) -> LoadedArtifact:
        modules = attention_layers(model)
        free = modules.keys() - sliding_layers(modules)
        numbers = range(text_config(model).num_hidden_layers)
        rows = [("it" if number in free else None) for number in numbers]
        return keeping(model, policy, rows, [None for _ in numbers])

    return under


def streamed(model: Any, tokens: Tensor, at: int) -> Tensor:
    """Return a token's logits by the definition of STREAM, in a model of one layer.

    A token's keys and values do not depend on other tokens. The visible tokens can therefore run as
    a separate text, whose positions are those of the cache.
    """
    first = range(min(STREAM.sinks, at + 1))
    last = range(max(STREAM.sinks, at + 1 - STREAM.window), at + 1)
    return model(tokens[:, [*first, *last]], use_cache=False).logits[0, -1]


def assert_streams(model: Any, tokens: Tensor, under: Any) -> None:
    """Assert that a model of one layer is served by STREAM, or is refused in one line."""
    with under(model, STREAM).apply(model) as handle:
        for sizes in ((1,), (30, 5, 1)):
            actual = fed(model, tokens, sizes, handle.new_cache())[0]
            for at in (3, 10, 15, 16, 20, 34, 39, 43):
                torch.testing.assert_close(actual[at], streamed(model, tokens, at), **CLOSE)


@pytest.mark.parametrize("model_type", sorted(ROTATIONS.keys() & set(architectures())))
def test_streaming_cache_positions_match_each_rotation(model_type, ids, under):
    model = one_layer(model_type, **ROTATIONS[model_type])
    assert_streams(model, ids(44), under)


@pytest.mark.parametrize(
    "model_type", ["llama", "phi", "glm4", "gemma4_text", "persimmon", "olmo3", "smollm3"]
)
def test_streaming_in_bfloat16_is_close_to_float32(model_type, ids, under):
    model = one_layer(model_type).bfloat16()
    with under(model, STREAM).apply(model) as handle:
        actual = fed(model, ids(44), (40, 1), handle.new_cache()).float()
    exact = one_layer(model_type)
    with under(exact, STREAM).apply(exact) as handle:
        expected = fed(exact, ids(44), (40, 1), handle.new_cache())
    assert (actual - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("model_type", sorted(CAUSES.keys() & set(architectures())))
def test_new_cache_rejects_unsupported_model_before_prompt(model_type, under):
    model = tiny_causal(model_type)
    former = model.config._attn_implementation
    with (
        pytest.raises(HeadwiseError, match=CAUSES[model_type]) as error,
        under(model, Full()).apply(model) as handle,
    ):
        handle.new_cache()
    assert "\n" not in str(error.value)
    assert model.config._attn_implementation == former


def test_new_cache_without_sections_rejects_model_with_cache_class_of_its_own(ids):
    model = tiny_causal("minimax")
    with apply_dense(model) as handle:
        with pytest.raises(HeadwiseError, match=CAUSES["minimax"]) as error:
            handle.new_cache()
        assert "\n" not in str(error.value)
        # It makes its own.
        assert model(ids(44), use_cache=True).past_key_values.get_seq_length() == 44
    dense = Method(name="dense", make=lambda: None, identity="dense")
    with pytest.raises(HeadwiseError, match=CAUSES["minimax"]):
        dense.cache(model)


def test_new_cache_rejects_model_that_takes_no_cache(monkeypatch):
    model = tiny_causal("llama")

    def forward(self, input_ids=None, **options):
        raise AssertionError

    with apply_dense(model) as handle:
        for cls in (type(model), type(model.model)):
            monkeypatch.setattr(cls, "forward", forward)
        with pytest.raises(HeadwiseError, match="forward takes no past_key_values; leave"):
            handle.new_cache()


def refused(error: HeadwiseError) -> bool:
    """Return True if an error is one line that does not blame the caller."""
    return "\n" not in str(error) and "apply the artifact" not in str(error)


@exhaustive
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "model_type", [each for each in architectures() if each not in UNLIKE_THEMSELVES]
)
def test_full_policy_matches_no_policy_or_is_rejected(model_type, ids, under):
    tokens = ids(44)
    try:
        model = tiny_causal(model_type)
    except Exception as error:
        pytest.skip(f"no tiny model: {error!r}")
    try:
        expected = fed(model, tokens, (40, 1))
    except Exception as error:
        # Models that accept no transformers cache, or need more than tokens.
        expected = None
        why = error
    for policy in (Full(), Streaming(sinks=4, window=60, positions="original")):
        try:
            with under(model, policy).apply(model) as handle:
                cache = handle.new_cache()
                if expected is None:
                    pytest.skip(str(why))
                actual = fed(model, tokens, (40, 1), cache)
        except HeadwiseError as error:
            assert refused(error)
            continue
        torch.testing.assert_close(actual, expected, **CLOSE)


@exhaustive
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "model_type", [each for each in architectures() if each not in READS_CACHE]
)
def test_streaming_cache_positions_match_or_are_rejected(model_type, ids, under):
    try:
        model = one_layer(model_type)
        fed(model, ids(44), (40, 1))
    except Exception as error:
        pytest.skip(f"not with one layer: {error}")
    try:
        if len(attention_layers(model)) > 1 or sliding_layers(attention_layers(model)):
            pytest.skip("more than one layer, or one that slides")
        assert_streams(model, ids(44), under)
    except HeadwiseError as error:
        assert refused(error)
