"""transformers' continuous batching: mixed requests in one step give the tokens that each gives alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

import artifacts
from artifacts import HeadwiseError
from runtime import Headwise, apply_dense, measured
from runtime.attention import turns
from runtime.attention.turns import Turns
from tests.runtime.omnikv import DECODE

LENGTHS = (200, 20, 150, 64, 129, 1)
ALONE: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def together(model: Any, prompts: list[list[int]], *, batch: int = 1024) -> list[list[int]]:
    """The tokens of all prompts, in one manager; `batch` is how many tokens a step takes."""
    config = ContinuousBatchingConfig(page_size=32, num_blocks=64, max_batch_tokens=batch, auto_switch_to_flash=False)
    generation = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
    outputs = model.generate_batch(
        prompts, generation_config=generation, continuous_batching_config=config, progress_bar=False
    )
    found = {tuple(each.prompt_ids): list(each.generated_tokens) for each in outputs.values()}
    return [found[tuple(prompt)] for prompt in prompts]


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma3"])
@pytest.mark.parametrize("batch", [1024, 160])
def test_requests_are_what_they_are_alone(batch: int, family: str, build: Any, artifact_for: Any, ids: Any) -> None:
    """With few tokens a step prompts come in chunks, beside others that decode."""
    model = build(family)
    prompts = [ids(length)[0].tolist() for length in LENGTHS]
    # Dense patterns: what chunks a prompt comes in changes nothing.
    loaded = Headwise(artifact_for(model, dense=True))
    with loaded.apply(model) as handle:
        alone = [model.generate(torch.tensor([p]), **ALONE)[0, len(p) :].tolist() for p in prompts]
        before = copy.deepcopy(handle.stats())
        assert together(model, prompts, batch=batch) == alone
        stats = handle.stats()
    assert stats["sparse"] > before["sparse"]
    assert stats["dense"]["decode by kernel"] > before["dense"].get("decode by kernel", 0)
    assert model.config._attn_implementation == "sdpa"


def test_a_long_prompt_is_sparse(build: Any, artifact_for: Any, ids: Any) -> None:
    model = build()
    prompts = [ids(length)[0].tolist() for length in (200, 250, 30)]
    with Headwise(artifact_for(model)).apply(model) as handle:
        alone = [model.generate(torch.tensor([p]), **ALONE)[0, len(p) :].tolist() for p in prompts]
        before = handle.stats()["sparse"]
        assert together(model, prompts) == alone
        assert handle.stats()["sparse"] == before + 2
        # And afterwards as before.
        assert model.generate(torch.tensor([prompts[0]]), **ALONE)[0, 200:].tolist() == alone[0]
        assert model.config._attn_implementation == "headwise"
    assert "init_continuous_batching" not in vars(model)


@pytest.mark.parametrize("gained", [False, True])
def test_a_chunk_on_a_past_is_served_the_faster_way(
    gained: bool, build: Any, artifact_for: Any, ids: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "folder", lambda: tmp_path)
    monkeypatch.setattr(turns, "LEAST", 1)
    monkeypatch.setattr(turns, "_MARGIN", float("inf") if gained else 0.0)
    both_ways: list[tuple[int, int]] = []
    former = Turns.measure

    def measure(self: Turns, q: Any, k: Any, lengths: tuple[int, int], *ways: Any) -> Any:
        both_ways.append(lengths)
        return former(self, q, k, lengths, *ways)

    monkeypatch.setattr(Turns, "measure", measure)
    model, prompt = build(), ids(250)[0].tolist()
    with Headwise(artifact_for(model, dense=True)).apply(model) as handle:
        alone = model.generate(torch.tensor([prompt]), **ALONE)[0, 250:].tolist()
        for _ in range(2):
            before = copy.deepcopy(handle.stats())
            # 160 tokens, and 90 behind them.
            assert together(model, [prompt], batch=160) == [alone]
            after = handle.stats()
            assert after["sparse"] - before["sparse"] == (4 if gained else 2)
            dense = after["dense"].get("dense by kernel", 0) - before["dense"].get("dense by kernel", 0)
            assert dense == (0 if gained else 2)
        # The second layer has the same patterns, and the second run knows.
        assert both_ways == [(90, 250)]


def test_dense_by_our_kernel_serves_it_too(build: Any, ids: Any) -> None:
    model = build()
    prompts = [ids(length)[0].tolist() for length in LENGTHS]
    expected = together(model, prompts)
    with apply_dense(model) as applied:
        assert together(model, prompts) == expected
        assert applied.settings.calls.total()["decode by kernel"] > 0
    assert together(model, prompts) == expected


@pytest.mark.parametrize("family", ["Llama", "Gemma3", "Gemma2"])
def test_without_dense_kernels_what_stays_dense_is_the_model_s(
    family: str, build: Any, artifact_for: Any, ids: Any, monkeypatch: Any
) -> None:
    """Windows, soft-caps, chunks and single tokens too: our kernel is not asked."""
    model = build(family)
    prompts = [ids(length)[0].tolist() for length in LENGTHS]
    expected = [model.generate(torch.tensor([p]), **ALONE)[0, len(p) :].tolist() for p in prompts]
    loaded = Headwise(artifact_for(model, rows=[None] * model.config.num_hidden_layers))
    for name in ("attend", "decode_attention"):
        monkeypatch.setattr(f"runtime.attention.paged.{name}", lambda *_, **__: pytest.fail("our kernel was asked"))
    with loaded.apply(model, dense_kernels=False) as handle:
        assert together(model, prompts, batch=160) == expected
        dense = handle.stats()["dense"]
    assert set(dense) == {"decode", "layer left alone"}


def test_what_is_not_served_is_refused_by_name(build: Any, artifact_for: Any, ids: Any) -> None:
    model = build(num_hidden_layers=6)
    plain = artifact_for(model)
    cache = artifacts.KVCache(policies={"full": artifacts.Full()}, layers=("full",) * 6)
    for changes, options, says in (
        ({"decode": artifacts.Decode(omnikv=DECODE)}, {}, "with a decode section"),
        ({"kv_cache": cache}, {}, "with a kv_cache section"),
    ):
        with Headwise(plain.model_copy(update=changes)).apply(model, **options):
            with pytest.raises(HeadwiseError, match=f"generate_batch is not served {says}"):
                together(model, [[5, 6, 7]])
            assert model.config._attn_implementation == "headwise"
    assert len(together(model, [[5, 6, 7]])[0]) == 6


def test_a_copy_of_the_model_has_its_own(build: Any, artifact_for: Any) -> None:
    model = build()
    with Headwise(artifact_for(model)).apply(model):
        made = copy.deepcopy(model)
    assert together(made, [[5, 6, 7]]) == together(model, [[5, 6, 7]])
    assert made.config._attn_implementation == "sdpa"


def test_a_model_without_a_head_has_nothing_to_batch(build: Any, ids: Any) -> None:
    model, prompt = build().model, ids(100)
    expected = model(prompt).last_hidden_state
    with apply_dense(model):
        torch.testing.assert_close(model(prompt).last_hidden_state, expected, atol=2e-4, rtol=1e-3)
    assert "init_continuous_batching" not in vars(model)
