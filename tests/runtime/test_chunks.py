"""OmniKV-prefill against the same thing written down in plain torch over full attention weights."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from runtime.omnikv import lane
from tests.runtime.caches.feeding import fed
from tests.runtime.omnikv import CLOSE, LAYERS, late, oracle

__all__ = ["late"]
SLIDING = {"layer_types": ["full_attention", "sliding_attention"] + ["full_attention"] * 4}


@pytest.mark.parametrize(
    ("family", "ratio", "sizes", "offload"),
    [
        ("Llama", 0.25, (100, 100, 100), "packed"),
        ("Llama", 0.9, (70, 66, 164), "never"),
        ("Gemma3", 0.25, (70, 66, 164), "packed"),
        ("Gemma3", 0.25, (200, 36, 64), "never"),
    ],
)
def test_every_chunk_is_what_the_oracle_computes(
    family, ratio, sizes, offload, late, build, decoding, ids
) -> None:
    model = build(family, **LAYERS, **(SLIDING if family == "Gemma3" else {}))
    tokens, sizes = ids(303), (*sizes, 1)
    loaded = decoding(model, prefill_ratio=ratio, window=6, dense_layers=(0,))
    with oracle(model, loaded.artifact.decode.omnikv):
        expected = fed(model, tokens, sizes, DynamicCache(config=model.config))
    dense = fed(model, tokens, sizes, DynamicCache(config=model.config))
    with loaded.apply(model, backend="auto", strict=True) as handle:
        found = fed(model, tokens, sizes, handle.new_cache(offload=offload))
    torch.testing.assert_close(found, expected, **CLOSE)
    torch.testing.assert_close(dense[:, : sizes[0]], expected[:, : sizes[0]], **CLOSE)
    assert (dense - expected)[:, 236:300].abs().max() > 0.05, "the choice must bite"


@pytest.mark.parametrize(("backend", "offload"), [("reference", "never"), ("auto", "packed")])
def test_left_padded_chunks_are_their_sequences_alone(
    backend, offload, late, build, decoding, ids
) -> None:
    model, skipped = build(**LAYERS), (0, 85, 120, 199)
    tokens = ids(300, batch=len(skipped))
    real = torch.ones_like(tokens)
    for row, n in enumerate(skipped):
        real[row, :n] = 0
    with decoding(model, prefill_ratio=0.5).apply(model, backend=backend, strict=True) as handle:
        cache = handle.new_cache(offload=offload)
        together = fed(model, tokens, (100,), cache, attention_mask=real)
        for row, n in enumerate(skipped):
            cache = handle.new_cache(offload=offload)
            own = fed(model, tokens[row : row + 1, n:], (100 - n % 100, 100), cache)
            torch.testing.assert_close(together[row, n:], own[0], **CLOSE)


def test_only_chosen_rows_of_the_past_are_fetched(build, decoding, ids, monkeypatch) -> None:
    staged = []
    former = lane.Lane.staging

    def noted(self, rows, *more):
        staged.append(rows)
        return former(self, rows, *more)

    monkeypatch.setattr(lane.Lane, "staging", noted)
    monkeypatch.setattr("runtime.omnikv.bank.Bank.read", None)
    model = build(**LAYERS)
    with decoding(model, prefill_ratio=0.5).apply(model, backend="auto") as handle:
        fed(model, ids(300), (120, 100, 80), handle.new_cache(offload="packed"))
    assert staged == [50, 50, 40, 40], "two sparse layers, half a chunk each"


@pytest.mark.parametrize("sizes", [(40, 100), (250, 40)])
def test_where_nothing_is_chosen_a_chunk_is_dense(sizes, build, decoding, ids) -> None:
    model, prompt = build(**LAYERS), ids(sum(sizes))
    expected = fed(model, prompt, sizes, DynamicCache(config=model.config))
    with decoding(model, prefill_ratio=0.5).apply(model, backend="auto") as handle:
        found = fed(model, prompt, sizes, handle.new_cache())
    torch.testing.assert_close(found, expected, **CLOSE)
