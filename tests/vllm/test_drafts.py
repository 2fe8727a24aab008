"""Speculative decoding with n-grams, an EAGLE head and a draft model, verified with the same
artifact as in transformers."""

from __future__ import annotations

from multiprocessing import get_context
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from runtime.vllm import stats
from tests.vllm.conftest import DECODE, kv_section, prompt
from tests.vllm.engines import engine

PROMPTS = [(prompt(90, i) * 9)[:length] for i, length in enumerate((700, 333))]
TOKENS = 12
# The last tokens occur earlier in the prompt, so n-grams draft a continuation.
NGRAMS = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 2,
    "prompt_lookup_min": 1,
}


def drafted(
    model: str, path: str, drafts: dict[str, Any]
) -> tuple[list[list[int]], list[list[list[int]]], Any]:
    """Return the tokens, the drafts of each step after a prompt, and the stats."""
    with engine(model, path, speculative_config=drafts) as served:
        tokens = [served.tokens([ids], TOKENS)[0] for ids in PROMPTS]
        return tokens, [each[1:] for each in served.drafts.values()], stats()


@pytest.fixture
def eagle(transformers, tmp_path):
    """Return the folder of an EAGLE head: the tiny model's last layer, so some drafts are right."""
    folder, tiny = tmp_path / "eagle", transformers.model
    LlamaConfig(**tiny.config.to_dict() | {"num_hidden_layers": 1}).save_pretrained(folder)
    last = tiny.model.layers[-1].state_dict()
    weights = {
        f"layers.0.{name}": held.clone()
        for name, held in last.items()
        if "input_layernorm" not in name
    }
    weights["embed_tokens.weight"] = tiny.model.embed_tokens.weight.detach().clone()
    size = tiny.config.hidden_size
    weights["fc.weight"] = torch.cat([torch.zeros(size, size), torch.eye(size)], dim=1)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.mark.parametrize("method", ["ngram", "eagle", "draft_model"])
def test_draft_tokens_match_transformers(model, artifact, transformers, eagle, method):
    with_model = {
        "method": method,
        "model": model if method == "draft_model" else eagle,
        "num_speculative_tokens": 2,
    }
    drafts = NGRAMS if method == "ngram" else with_model
    # With several cache groups, vLLM may spread a draft model's layers over them, and rejects that.
    path = artifact(
        kv_cache=None if method == "draft_model" else kv_section("snap", "full", "full")
    )
    # Use a separate process: after drafts vLLM starts no second engine in the same one.
    with get_context("spawn").Pool(1) as apart:
        tokens, steps, report = apart.apply(drafted, (model, path, drafts))
    assert tokens == [transformers.tokens(ids, artifact=path, tokens=TOKENS) for ids in PROMPTS]
    assert any(drafts for each in steps for drafts in each) and report["prefills"] == {"sparse": 2}
    # Layers of the draft model use the parent backend.
    assert ("a draft model's, or another backend's" in report["layers"]) == (method != "ngram")


def test_drafts_are_verified_with_selected_tokens(model, artifact, transformers):
    path = artifact(decode=DECODE)
    with get_context("spawn").Pool(1) as apart:
        tokens, steps, report = apart.apply(drafted, (model, path, NGRAMS))
    # Drafts that are verified together select tokens together.
    wanted = [
        transformers.verified(ids, drafts, artifact=path, tokens=TOKENS)
        for ids, drafts in zip(PROMPTS, steps, strict=True)
    ]
    assert tokens == wanted and {len(drafts) > 0 for each in steps for drafts in each} == {
        False,
        True,
    }
    assert report["decode"] == {"chosen": sum(map(len, steps))} and report["tokens_read"] == 48
