"""kv_cache sections: layers that keep a part of each prompt (SnapKV), and the memory that vLLM gets
back."""

from __future__ import annotations

from typing import Any

import pytest

import artifacts
from runtime.vllm import stats
from tests.vllm.conftest import ROWS, prompt
from tests.vllm.engines import Transformers, engine
from tests.vllm.fits import watch
from tests.vllm.test_streaming import STREAM, pool, section

# The last is shorter than a window.
PROMPTS = [prompt(1000), prompt(777, 1), prompt(300, 3), prompt(20, 2)]
TOKENS = 12
SNAPS: dict[str, Any] = {
    "snap": artifacts.SnapKV(budget=0.2, window=32, pool=7),
    "wide": artifacts.SnapKV(budget=150, window=40, pool=1),
}
NONE = (None,) * 3


def kept(*layers: Any) -> artifacts.KVCache:
    """A section of these layers."""
    names = [name for row in layers for name in ((row,) if isinstance(row, str) else row)]
    made = section(*dict.fromkeys(names), **SNAPS)
    return made.model_copy(update={"layers": layers})


@pytest.mark.parametrize("rows", [ROWS, NONE], ids=["with patterns", "alone"])
def test_whole_prompts(model: str, artifact: Any, transformers: Transformers, rows: Any) -> None:
    path = artifact(rows, kv_cache=kept("snap", "full", ("snap", "wide")))
    with engine(model, path, enable_prefix_caching=True) as served:
        done = [served.generate([ids], TOKENS)[0] for ids in PROMPTS] + served.generate(
            PROMPTS, TOKENS
        )
        found = stats()
        assert [served.cut(each) for each in done] == [
            (0, [len(each.prompt_token_ids)]) for each in done
        ]
    wanted = [transformers.tokens(ids, artifact=path, tokens=TOKENS) for ids in PROMPTS]
    assert [list(each.outputs[0].token_ids) for each in done] == wanted * 2
    assert (found["density"] is not None) == (rows is ROWS)
    # The section makes a difference, or agreement would say nothing.
    without = artifact(rows)
    assert wanted != [transformers.tokens(ids, artifact=without, tokens=TOKENS) for ids in PROMPTS]


def test_chunks_are_chosen_from_as_a_whole(
    model: str, artifact: Any, transformers: Transformers
) -> None:
    path = artifact(NONE, kv_cache=kept("wide", "snap", "stream"))
    # The windows of the first lie in two chunks; one of the second is its last alone.
    prompts = [prompt(512 + 9, 4), prompt(2 * 512 + 1, 5), *PROMPTS]
    with engine(model, path, max_num_batched_tokens=512, max_num_seqs=8) as served:
        done = [served.generate([ids], TOKENS)[0] for ids in prompts] + served.generate(
            prompts, TOKENS
        )
        cuts = [served.cut(each)[1] for each in done]
    assert cuts[:2] == [[512, 9], [512, 512, 1]] and any(
        len(cut) > 1 for cut in cuts[len(prompts) :]
    )
    wanted = [transformers.tokens(ids, artifact=path, tokens=TOKENS) for ids in prompts]
    assert [list(each.outputs[0].token_ids) for each in done] == wanted * 2


def test_what_was_preempted_is_chosen_again(
    model: str, artifact: Any, transformers: Transformers
) -> None:
    path, prompts = (
        artifact(NONE, kv_cache=kept("snap", "snap", "full")),
        [prompt(330, 20 + i) for i in range(3)],
    )
    # A request grows from 19 pages to 31: not all three can end together.
    small = {
        "block_size": 32,
        "num_gpu_blocks_override": 75,
        "max_model_len": 512,
        "max_num_batched_tokens": 512,
    }
    with engine(model, path, **small) as served:
        made = served.tokens(prompts, 150)
        again = [cut for cut in served.cuts.values() if sum(cut) > 330 + 150]
    assert made == [transformers.tokens(ids, artifact=path, tokens=150) for ids in prompts]
    assert again


def test_pages_go_back(model: str, artifact: Any) -> None:
    path, held, fits, most = artifact(NONE, kv_cache=kept("snap", "snap", "full")), {}, {}, {}
    for name, given in (("snap", path), ("all", None)):
        # Room for four whole requests.
        settings = {
            "block_size": 32,
            "num_gpu_blocks_override": 129 if given is None else 3 * 128 + 1,
        }
        with engine(
            model, given, max_num_batched_tokens=256, max_model_len=1024, **settings
        ) as served:
            used, running = watch(served)
            config = pool(served).kv_cache_config
            served.tokens([prompt(940)], TOKENS)
            layers = max(len(group.layer_names) for group in config.kv_cache_groups)
            held[name], fits[name] = used[-1] * layers, (config.num_blocks - 1) * layers
            served.tokens([prompt(940, i) for i in range(8)], 60)
            most[name] = max(running)
            assert pool(served).block_pool.get_num_free_blocks() == config.num_blocks - 1
    # 951 tokens are 30 pages of a layer, 188 of 940 are 6; the last page is that of what is
    # generated.
    assert held == {"all": 3 * 30, "snap": 30 + 2 * (6 + 1)} and fits["all"] == fits["snap"]
    assert most["all"] == 4 and most["snap"] >= 6


def test_layers_that_are_served_elsewhere_are_told(
    model: str, artifact: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path = artifact(ROWS, kv_cache=kept("snap", "full", "stream"))
    with caplog.at_level("INFO", logger="vllm.headwise"), engine(model, path):
        pass
    assert "; layers 0 keep 20% of each prompt, as its last queries choose" in caplog.text
    assert (
        STREAM.window == 100
        and "layers 2 dense: it keeps its first and last tokens, by kv_cache" in caplog.text
    )
