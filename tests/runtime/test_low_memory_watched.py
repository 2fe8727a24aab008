"""low_memory together with watch, min_recall, sizes that grow, and packed prompts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from artifacts import Growth
from runtime import Headwise
from runtime.attention import masks
from runtime.low_memory import tiles

CLOSE = {"atol": 1e-4, "rtol": 1e-3}
GROWTH = Growth(length=300, powers={"vertical_slash": {"vertical": 1.0, "slash": 0.5}, "a_shape": {"window": 1.0}})


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TOKENS", {"cpu": 48})
    monkeypatch.setattr(masks, "LARGE", 4096)


def left_padded(prompt: Tensor) -> dict[str, Tensor]:
    real = torch.ones_like(prompt)
    real[0, :60] = 0
    return {"attention_mask": real, "position_ids": (real.cumsum(1) - 1).clamp(min=0)}


def packed(prompt: Tensor) -> dict[str, Any]:
    at = torch.cat([torch.arange(90), torch.arange(prompt.shape[1] - 90)])
    return {"position_ids": at.expand(len(prompt), -1), "use_cache": False}


@pytest.mark.parametrize("growth", [None, GROWTH], ids=["fixed", "grown"])
@pytest.mark.parametrize("shape", [left_padded, packed])
@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Gemma3", "GptOss"])
def test_the_same_is_computed_and_seen(
    family: str, shape: Any, growth: Any, build: Any, artifact_for: Any, ids: Any
) -> None:
    """Heads of unlike recall, so that some go dense; among the models are soft-caps, sliding layers and sinks."""
    model, prompt = build(family), ids(400, batch=2)
    headwise, found = Headwise(artifact_for(model, growth=growth)), []
    given = shape(prompt)
    real = given.get("attention_mask", torch.ones_like(prompt)).bool()
    for low_memory in (False, True):
        for min_recall in (None, 0.8):
            with headwise.apply(model, watch=True, min_recall=min_recall, low_memory=low_memory) as handle:
                found.append((model(prompt, **given).logits[real], handle.stats()))
    (plain, seen), (bounded, less), *lows = found
    assert seen["sparse"] > 0 and not torch.allclose(plain, bounded, **CLOSE)
    for (logits, stats), (expected, wanted) in zip(lows, ((plain, seen), (bounded, less)), strict=True):
        torch.testing.assert_close(logits, expected, **CLOSE)
        assert (stats["sparse"], stats["dense"]) == (wanted["sparse"], wanted["dense"])
        for report in (*stats["layers"].values(), *wanted["layers"].values()):
            report.pop("seconds", None)
        torch.testing.assert_close(stats["layers"], wanted["layers"], **CLOSE)
