"""Request memory: pages of dropped tokens are freed, and preempted requests are recomputed."""

from __future__ import annotations

import pytest

from tests.vllm.conftest import DECODE, kv_section, prompt
from tests.vllm.engines import engine

NONE = (None,) * 3


@pytest.mark.parametrize(
    ("sections", "pages"),
    [({"decode": DECODE}, 40), ({"kv_cache": kv_section("snap", "snap", "full")}, 75)],
    ids=["decode", "snapkv"],
)
def test_preempted_request_selects_tokens_again(model, artifact, transformers, sections, pages):
    path, prompts = artifact(NONE, **sections), [prompt(330, 20 + i) for i in range(3)]
    # A request grows from 11 pages per layer to 15, so all three cannot finish together.
    small = {
        "block_size": 32,
        "num_gpu_blocks_override": pages,
        "max_model_len": 512,
        "max_num_batched_tokens": 512,
    }
    with engine(model, path, **small) as served:
        tokens = served.tokens(prompts, 150)
        again = [cut for cut in served.cuts.values() if sum(cut) > 330 + 150]
    assert tokens == [transformers.tokens(ids, artifact=path, tokens=150) for ids in prompts]
    assert again


# 951 tokens need 30 pages per layer, and 188 of 940 need 6; the last page holds generated tokens. A
# window of 100 tokens needs 4 or 5 pages, and the 4 tokens before it need one.
@pytest.mark.parametrize(("name", "pages"), [("full", {30}), ("snap", {6 + 1}), ("stream", {5, 6})])
def test_dropped_pages_are_freed(model, artifact, name, pages):
    path = artifact(NONE, kv_cache=kv_section(name, name, "full"))
    # Memory for four complete requests.
    blocks = 129 if name == "full" else 3 * 128 + 1
    small = {
        "block_size": 32,
        "num_gpu_blocks_override": blocks,
        "max_model_len": 1024,
        "max_num_batched_tokens": 256,
    }
    with engine(model, path, **small) as served:
        manager = served.scheduler.kv_cache_manager
        layers = max(len(group.layer_names) for group in manager.kv_cache_config.kv_cache_groups)
        assert (blocks - 1) * layers == 3 * 128
        served.tokens([prompt(940)], 12)
        held = served.used[-1] * layers
        served.tokens([prompt(940, i) for i in range(8)], 60)
        assert manager.block_pool.get_num_free_blocks() == blocks - 1
    assert held in {30 + 2 * each for each in pages}
    peak = max(served.running)
    assert peak == 4 if name == "full" else peak >= 6
