"""kv_cache sections: layers that keep their first and last tokens, and the memory that vLLM gets
back."""

from __future__ import annotations

from typing import Any

import pytest

import artifacts
from runtime.vllm import stats
from tests.vllm.conftest import ROWS, prompt
from tests.vllm.engines import Engine, Transformers, engine

PROMPTS = [prompt(1000), prompt(777, 1), prompt(20, 2), prompt(300, 3)]
TOKENS = 12
STREAM = artifacts.Streaming(sinks=4, window=100, positions="original")


def section(*layers: str, **policies: Any) -> artifacts.KVCache:
    known = {"stream": STREAM, "full": artifacts.Full()} | policies
    return artifacts.KVCache(
        policies={name: known[name] for name in dict.fromkeys(layers)}, layers=layers
    )


def pool(served: Engine) -> Any:
    """vLLM's pages, and the tables of its groups of layers."""
    return served.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager


@pytest.mark.parametrize(
    "window", [STREAM, artifacts.Streaming(sinks=0, window=70, positions="original")]
)
@pytest.mark.parametrize("chunk", [16384, 512])
def test_tokens(
    model: str, artifact: Any, transformers: Transformers, window: Any, chunk: int
) -> None:
    path = artifact(ROWS, kv_cache=section("full", "stream", "stream", stream=window))
    with engine(
        model, path, max_num_batched_tokens=chunk, max_num_seqs=8, enable_prefix_caching=True
    ) as served:
        done = [served.generate([ids], TOKENS)[0] for ids in PROMPTS] + served.generate(
            PROMPTS, TOKENS
        )
        cuts = [served.cut(each) for each in done]
    for each, (cached, chunks) in zip(done, cuts, strict=True):
        # No prefix is found again: its middle is gone.
        assert cached == 0
        wanted = transformers.tokens(each.prompt_token_ids, chunks, artifact=path, tokens=TOKENS)
        assert list(each.outputs[0].token_ids) == wanted, chunks
    # The section makes a difference, or agreement would say nothing.
    without = artifact(ROWS)
    assert list(done[0].outputs[0].token_ids) != transformers.tokens(
        PROMPTS[0], artifact=without, tokens=TOKENS
    )


def test_pages_go_back(model: str, artifact: Any) -> None:
    path = artifact((None,) * 3, kv_cache=section("stream", "stream", "full"))
    held, fits = {}, {}
    for name, given in (("streams", path), ("keeps", None)):
        with engine(
            model, given, block_size=32, max_num_batched_tokens=256, max_model_len=2048
        ) as served:
            manager = pool(served)
            whole = manager.block_pool.get_num_free_blocks()
            fewest = whole
            scheduler = served.llm.llm_engine.engine_core.engine_core.scheduler
            schedule = scheduler.schedule

            def watched(
                *args: Any, schedule: Any = schedule, manager: Any = manager, **kwargs: Any
            ) -> Any:
                nonlocal fewest
                planned = schedule(*args, **kwargs)
                fewest = min(fewest, manager.block_pool.get_num_free_blocks())
                return planned

            scheduler.schedule = watched
            served.tokens([prompt(1900)], TOKENS)
            config = manager.kv_cache_config
            assert manager.block_pool.get_num_free_blocks() == whole
            # A page of the pool is one of each layer of a group.
            layers = max(len(group.layer_names) for group in config.kv_cache_groups)
            held[name], fits[name] = (whole - fewest) * layers, whole * layers
    # 1,911 tokens are 60 pages of a layer. A window of 100 tokens behind 4 holds at most 6 beside
    # the 8 of a chunk.
    assert held["keeps"] == 3 * 60 and 60 + 2 * 5 <= held["streams"] <= 60 + 2 * 14
    assert abs(fits["streams"] - fits["keeps"]) < 10


def test_what_is_served_is_told(model: str, artifact: Any) -> None:
    path = artifact(ROWS, kv_cache=section("stream", "full", "full"))
    with engine(model, path) as served:
        served.tokens([prompt(300)])
        found = stats()
    assert found["layers"] == {
        "it keeps its first and last tokens, by kv_cache": "0",
        "left alone by the artifact": "1",
        "sparse": "2",
    }
