"""8-bit caches: tokens of vLLM against those of a rounded cache in transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import artifacts
from runtime.vllm import stats
from tests.vllm.conftest import DENSE_BELOW, ROWS, kv_section, prompt
from tests.vllm.engines import Transformers, engine
from tests.vllm.test_start import attention

pytestmark = pytest.mark.skipif(
    not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()),
    reason="vLLM has caches of 8 bits on CPUs with AVX-512 or AMX alone",
)
PROMPTS = [prompt(1000), prompt(777, 1), prompt(20, 2), prompt(300, 3)]
TOKENS = 12
SCALES = (0.5, 0.25)
# Policies that keep every token of these prompts.
WHOLE = {
    "stream": artifacts.Streaming(sinks=4, window=2000, positions="original"),
    "snap": artifacts.SnapKV(budget=2000, window=32),
}


class EightBits(DynamicCache):
    """Cache with keys and values rounded to 8 bits.

    Whole prompts that a layer serves by patterns are not rounded during their prefill.
    """

    def __init__(self, config: Any, stored: torch.dtype, rows: Any) -> None:
        super().__init__(config=config)
        self._stored, self._rows = stored, rows

    def update(
        self, k: Tensor, v: Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        whole = (
            not self.get_seq_length(layer)
            and k.shape[2] >= DENSE_BELOW
            and self._rows[layer] is not None
        )
        held = (
            (x / scale).to(self._stored).float() * scale
            for x, scale in zip((k, v), SCALES, strict=True)
        )
        actual = super().update(*held, layer, *args, **kwargs)
        return (k, v) if whole else actual


@pytest.mark.parametrize(
    ("name", "stored", "rows", "policies"),
    [
        ("fp8", torch.float8_e4m3fn, (ROWS[0], ROWS[2], ROWS[0]), None),
        ("fp8_e5m2", torch.float8_e5m2, ROWS, kv_section("full", "stream", "snap", **WHOLE)),
    ],
    ids=["e4m3", "e5m2, kv_cache"],
)
def test_eight_bit_cache_tokens_match_transformers(
    model: str,
    artifact: Any,
    transformers: Transformers,
    name: str,
    stored: torch.dtype,
    rows: Any,
    policies: Any,
) -> None:
    path = artifact(rows, kv_cache=policies)
    with engine(
        model, path, max_num_batched_tokens=512, max_num_seqs=8, kv_cache_dtype=name
    ) as served:
        for layer in attention(served)[1]:
            assert layer.kv_cache.dtype == torch.uint8
            layer._k_scale_float, layer._v_scale_float = SCALES
        done = [served.generate([ids], TOKENS)[0] for ids in PROMPTS]
        cuts = [served.cut(each)[1] for each in done]
        assert stats()["prefills"] == {"sparse": 5, "short": 1}
    path = artifact(rows)
    for each, chunks in zip(done, cuts, strict=True):
        ids, actual = each.prompt_token_ids, list(each.outputs[0].token_ids)
        with transformers._applied(path):
            cache = EightBits(transformers.model.config, stored, rows)
            assert actual == transformers._generate(cache, ids, chunks, TOKENS), chunks
        # The tokens must differ from those without rounding, or the comparison proves nothing.
        assert actual != transformers.tokens(ids, chunks, artifact=path, tokens=TOKENS)
