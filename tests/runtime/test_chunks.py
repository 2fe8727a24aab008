"""OmniKV-prefill against the same thing written down in plain torch over full attention weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from runtime.omnikv import lane
from tests.runtime.omnikv import CLOSE, LAYERS, oracle, steps


def chunked(
    model: Any, prompt: Tensor, sizes: tuple[int, ...], cache: Any, **given: Tensor
) -> Tensor:
    """Logits of a prompt that is prefilled in chunks."""
    logits, at = [], 0
    for size in sizes:
        part = {
            name: x[:, : at + size] if name == "attention_mask" else x[:, at : at + size]
            for name, x in given.items()
        }
        logits.append(
            model(prompt[:, at : at + size], past_key_values=cache, use_cache=True, **part).logits
        )
        at += size
    assert at == prompt.shape[1]
    return torch.cat(logits, dim=1)


@pytest.fixture(params=["never", "packed"])
def offload(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where a cache keeps its keys and values; pages are so small that a chunk needs several."""
    monkeypatch.setattr("runtime.omnikv.bank._LEAST", 16)
    offload: str = request.param
    return offload


@pytest.mark.parametrize("sizes", [(100, 100, 100), (70, 66, 164), (200, 36, 64)])
@pytest.mark.parametrize("ratio", [0.25, 0.9])
@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_every_chunk_is_what_the_oracle_computes(
    family, ratio, sizes, offload, build, decoding, ids
) -> None:
    kinds = {"layer_types": ["full_attention", "sliding_attention"] + ["full_attention"] * 4}
    model = build(family, **LAYERS, **(kinds if family == "Gemma3" else {}))
    prompt, forced = ids(300), ids(3, seed=9)
    loaded = decoding(model, prefill_ratio=ratio, window=6, dense_layers=(0,))
    with oracle(model, loaded.artifact.decode.omnikv):
        cache = DynamicCache(config=model.config)
        expected = chunked(model, prompt, sizes, cache)
        after = steps(model, forced[:, :1], forced[:, 1:], cache)
    dense = chunked(model, prompt, sizes, DynamicCache(config=model.config))
    with loaded.apply(model, backend="auto", strict=True) as handle:
        cache = handle.new_cache(offload=offload)
        torch.testing.assert_close(chunked(model, prompt, sizes, cache), expected, **CLOSE)
        torch.testing.assert_close(
            steps(model, forced[:, :1], forced[:, 1:], cache), after, **CLOSE
        )
    torch.testing.assert_close(dense[:, : sizes[0]], expected[:, : sizes[0]], **CLOSE)
    assert (dense[:, -sizes[-1] :] - expected[:, -sizes[-1] :]).abs().max() > 0.05, (
        "the choice must bite"
    )


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_left_padded_chunks_are_their_sequences_alone(
    backend, offload, build, decoding, ids
) -> None:
    model, skipped, sizes = build(**LAYERS), (0, 30, 85, 120, 199), (100, 100, 100)
    prompts = [ids(300 - n, seed=n) for n in skipped]
    tokens = torch.cat(
        [torch.nn.functional.pad(p, (n, 0)) for p, n in zip(prompts, skipped, strict=True)]
    )
    real = torch.stack([torch.arange(300) >= n for n in skipped]).long()
    given = {"attention_mask": real, "position_ids": (real.cumsum(1) - 1).clamp(min=0)}
    with decoding(model, prefill_ratio=0.5).apply(model, backend=backend, strict=True) as handle:
        together = chunked(model, tokens, sizes, handle.new_cache(offload=offload), **given)
        for b, (prompt, n) in enumerate(zip(prompts, skipped, strict=True)):
            own = (
                tuple(size for size in (100 - n, 100, 100) if size > 0)
                if n < 100
                else (200 - n, 100)
            )
            alone = chunked(model, prompt, own, handle.new_cache(offload=offload))
            torch.testing.assert_close(together[b, n:], alone[0], **CLOSE)


def test_only_chosen_rows_of_the_past_are_fetched(build, decoding, ids, monkeypatch) -> None:
    staged = []
    former = lane.Lane.staging
    monkeypatch.setattr(
        lane.Lane,
        "staging",
        lambda self, rows, *more: (staged.append(rows), former(self, rows, *more))[1],
    )
    monkeypatch.setattr("runtime.omnikv.bank.Bank.read", None)
    model, prompt = build(**LAYERS), ids(300)
    with decoding(model, prefill_ratio=0.5).apply(model, backend="auto") as handle:
        chunked(model, prompt, (120, 100, 80), handle.new_cache(offload="packed"))
    assert staged == [50, 50, 40, 40], "two sparse layers, half a chunk each"


@pytest.mark.parametrize("sizes", [(40, 100), (300,), (250, 40)])
def test_where_nothing_is_chosen_a_chunk_is_dense(sizes, build, decoding, ids) -> None:
    model, prompt = build(**LAYERS), ids(sum(sizes))
    expected = chunked(model, prompt, sizes, DynamicCache(config=model.config))
    with decoding(model, prefill_ratio=0.5).apply(model, backend="auto") as handle:
        torch.testing.assert_close(
            chunked(model, prompt, sizes, handle.new_cache()), expected, **CLOSE
        )
