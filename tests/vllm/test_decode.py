"""Decode sections: tokens out of vLLM against those out of transformers by the same artifact."""

from __future__ import annotations

from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

import artifacts
from runtime.vllm import stats
from tests.vllm.conftest import ROWS, prompt
from tests.vllm.engines import Transformers, engine
from tests.vllm.test_snapkv import kept

PROMPTS = [prompt(1000), prompt(777, 1), prompt(20, 2), prompt(300, 3)]
# Of layers 0 to 2: the first is dense, the second chooses, the third reads what it chose.
SECTION: dict[str, Any] = {
    "filter_layers": (1,),
    "dense_layers": (0,),
    "selector": "last",
    "window": 1,
    "budget": 48,
}
TOKENS = 12
DECODE = artifacts.Decode(omnikv=artifacts.OmniKV(**SECTION))


def test_alone_and_together(model: str, artifact: Any, transformers: Transformers) -> None:
    path = artifact(decode=DECODE)
    wanted = [transformers.tokens(ids, artifact=path, tokens=TOKENS) for ids in PROMPTS]
    with engine(model, path) as served:
        assert [served.tokens([ids], TOKENS)[0] for ids in PROMPTS] == wanted
        assert served.tokens(PROMPTS, TOKENS) == wanted
        found = stats()
    # Steps after the prompt's, of the three prompts that are longer than the budget.
    assert found["prefills"] == {"sparse": 6, "short": 2} and found["decode"] == {
        "chosen": 2 * 3 * (TOKENS - 1)
    }
    assert found["tokens_read"] == 48
    # The section makes a difference, or agreement would say nothing.
    without = artifact()
    assert wanted != [transformers.tokens(ids, artifact=without, tokens=TOKENS) for ids in PROMPTS]


@pytest.mark.parametrize("rows", [ROWS, (None,) * 3], ids=["with patterns", "alone"])
def test_chunks_and_cached_prefixes(
    model: str, artifact: Any, transformers: Transformers, rows: Any
) -> None:
    path, shared = artifact(rows, decode=DECODE), prompt(700)
    first, second = shared + prompt(80, 1), shared + prompt(200, 2)
    settings: dict[str, Any] = {
        "max_num_batched_tokens": 512,
        "max_num_seqs": 8,
        "enable_prefix_caching": True,
    }
    with engine(model, path, **settings) as served:
        done = [served.generate([ids], TOKENS)[0] for ids in (first, second)]
        cuts = [served.cut(each) for each in done]
        mixed = served.generate(PROMPTS[1:], TOKENS)
        mixed_cuts = [served.cut(each) for each in mixed]
    assert cuts[0] == (0, [512, 268]) and cuts[1][0] > 0
    # Both continue what was cut so: the second begins with what the first left.
    with_first = transformers.tokens(first, cuts[0][1], artifact=path, tokens=TOKENS)
    assert list(done[0].outputs[0].token_ids) == with_first
    if rows is not ROWS:
        # Dense prefill is the same however it is cut.
        assert list(done[1].outputs[0].token_ids) == transformers.tokens(
            second, artifact=path, tokens=TOKENS
        )
    for each, (cached, chunks) in zip(mixed, mixed_cuts, strict=True):
        assert cached == 0
        wanted = transformers.tokens(each.prompt_token_ids, chunks, artifact=path, tokens=TOKENS)
        assert list(each.outputs[0].token_ids) == wanted, chunks


def test_what_was_preempted_chooses_again(
    model: str, artifact: Any, transformers: Transformers
) -> None:
    path, prompts = artifact((None,) * 3, decode=DECODE), [prompt(330, 20 + i) for i in range(3)]
    # A request grows from 11 pages to 15: not all three can end together.
    small = {
        "block_size": 32,
        "num_gpu_blocks_override": 40,
        "max_model_len": 512,
        "max_num_batched_tokens": 512,
    }
    with engine(model, path, **small) as served:
        made = served.tokens(prompts, 150)
        again = [cut for cut in served.cuts.values() if sum(cut) > 330 + 150]
    assert made == [transformers.tokens(ids, artifact=path, tokens=150) for ids in prompts]
    assert again


# Each of the last tokens has been seen before, so something is drafted after it.
NGRAMS = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 2,
    "prompt_lookup_min": 1,
}


def drafted(
    model: str, path: str, prompts: list[list[int]], drafts: dict[str, Any]
) -> tuple[list[list[int]], list[list[list[int]]], Any]:
    """Tokens with drafts, what was drafted for each step behind a prompt, and what was served."""
    with engine(model, path, speculative_config=drafts) as served:
        made = [served.tokens([ids], TOKENS)[0] for ids in prompts]
        return made, [each[1:] for each in served.drafts.values()], stats()


@pytest.fixture
def eagle(transformers: Transformers, tmp_path: Path) -> str:
    """The folder of an EAGLE head: the tiny model's last layer over its hidden states, so some
    drafts are right."""
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
def test_drafts(
    model: str, artifact: Any, transformers: Transformers, eagle: str, method: str
) -> None:
    with_model = {
        "method": method,
        "model": model if method == "draft_model" else eagle,
        "num_speculative_tokens": 2,
    }
    drafts = NGRAMS if method == "ngram" else with_model
    # Where the cache has several groups vLLM may spread the layers of a draft model over them, and
    # refuses that.
    path = artifact(kv_cache=None if method == "draft_model" else kept("snap", "full", "full"))
    prompts = [(prompt(90, i) * 9)[:length] for i, length in enumerate((700, 333))]
    # In a process of its own: after its drafts vLLM starts no other engine in the same one.
    with get_context("spawn").Pool(1) as apart:
        made, steps, found = apart.apply(drafted, (model, path, prompts, drafts))
    assert made == [transformers.tokens(ids, artifact=path, tokens=TOKENS) for ids in prompts]
    assert any(drafts for each in steps for drafts in each) and found["prefills"] == {"sparse": 2}
    # Layers of what makes drafts are the parent's.
    assert ("a draft model's, or another backend's" in found["layers"]) == (method != "ngram")


def test_drafts_are_verified_by_chosen_tokens(
    model: str, artifact: Any, transformers: Transformers
) -> None:
    path = artifact(decode=DECODE)
    prompts = [(prompt(90, i) * 9)[:length] for i, length in enumerate((700, 333))]
    with get_context("spawn").Pool(1) as apart:
        made, steps, found = apart.apply(drafted, (model, path, prompts, NGRAMS))
    # Drafts that are verified together choose together.
    wanted = [
        transformers.verified(ids, drafts, artifact=path, tokens=TOKENS)
        for ids, drafts in zip(prompts, steps, strict=True)
    ]
    assert made == wanted and {len(drafts) > 0 for each in steps for drafts in each} == {
        False,
        True,
    }
    assert found["decode"] == {"chosen": sum(map(len, steps))} and found["tokens_read"] == 48
