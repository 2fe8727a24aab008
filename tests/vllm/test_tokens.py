"""Tokens of vLLM against those of transformers with the same artifact and the same chunks."""

from __future__ import annotations

from typing import Any

import pytest

import artifacts
from runtime.vllm import stats
from tests.vllm.conftest import DECODE, ROWS, kv_section, prompt
from tests.vllm.engines import engine

PROMPTS = [prompt(length, seed) for seed, length in enumerate((1000, 777, 20, 300, 256, 255))]
# With chunks of 512, the first prompt's window spans two chunks; the second's last chunk is one
# token.
CUT = [prompt(512 + 9, 6), prompt(2 * 512 + 1, 7)]
TOKENS = 12
NONE = (None,) * 3
CHUNKS: dict[str, Any] = {"max_num_batched_tokens": 512, "max_num_seqs": 8}
PREFIXES: dict[str, Any] = {"enable_prefix_caching": True}
WINDOW = artifacts.Streaming(sinks=0, window=70, positions="original")
# Rows, sections and settings.
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "patterns": (ROWS, {}, {}),
    "patterns, chunks": (ROWS, {}, CHUNKS),
    "decode": (ROWS, {"decode": DECODE}, {}),
    "decode, chunks": (ROWS, {"decode": DECODE}, CHUNKS),
    "streaming": (ROWS, {"kv_cache": kv_section("full", "stream", "stream")}, PREFIXES),
    "streaming, chunks": (
        ROWS,
        {"kv_cache": kv_section("full", "window", "window", window=WINDOW)},
        CHUNKS | PREFIXES,
    ),
    "snapkv": (ROWS, {"kv_cache": kv_section("snap", "full", ("snap", "wide"))}, PREFIXES),
    "snapkv, chunks": (NONE, {"kv_cache": kv_section("wide", "snap", "stream")}, CHUNKS),
}


@pytest.mark.parametrize("name", CASES)
def test_tokens_of_single_and_batched_prompts_match_transformers(
    name, model, artifact, transformers
):
    rows, sections, settings = CASES[name]
    prompts = PROMPTS + CUT * ("chunks" in name)
    path = artifact(rows, **sections)
    with engine(model, path, **settings) as served:
        done = [served.generate([ids], TOKENS)[0] for ids in prompts]
        done += served.generate(prompts, TOKENS)
        cuts = [served.cut(each) for each in done]
        report = stats()
    expected: dict[Any, list[int]] = {}
    for each, (cached, chunks) in zip(done, cuts, strict=True):
        # A layer that drops tokens has no reusable prefix.
        assert cached == 0
        ids = each.prompt_token_ids
        # SnapKV selects from the whole prompt, regardless of chunks.
        cut = [len(ids)] if "snapkv" in name else chunks
        key = (*ids, *cut)
        if key not in expected:
            expected[key] = transformers.tokens(ids, cut, artifact=path, tokens=TOKENS)
        assert list(each.outputs[0].token_ids) == expected[key], chunks
    if "chunks" in name:
        # Decode of the first prompts and chunks of later ones share steps.
        assert cuts[0] == (0, [512, 488]) and cuts[len(PROMPTS)] == (0, [512, 9])
        assert any(len(cut) > 1 and cut[0] < 512 for _, cut in cuts[len(prompts) :])
    else:
        assert report["prefills"] == {"sparse": 8, "short": 4}
    if "decode" in sections:
        assert report["tokens_read"] == 48
    # The section must change the tokens, or agreement would prove nothing.
    other = artifact(rows) if sections else None
    ids = done[0].prompt_token_ids
    wanted = transformers.tokens(ids, cuts[0][1], artifact=other, tokens=TOKENS)
    assert list(done[0].outputs[0].token_ids) != wanted


@pytest.mark.parametrize(
    ("block_size", "rows", "sections"),
    [(None, ROWS, {}), (32, ROWS, {}), (None, NONE, {"decode": DECODE})],
    ids=["patterns", "small pages", "decode"],
)
def test_tokens_with_cached_prefixes_match_transformers(
    model, artifact, transformers, block_size, rows, sections
):
    path, shared = artifact(rows, **sections), prompt(700)
    first, second, third = shared + prompt(80, 1), shared + prompt(200, 2), shared + prompt(30, 3)
    with engine(model, path, enable_prefix_caching=True, block_size=block_size) as served:
        done = [served.generate([ids])[0] for ids in (first, second, third)]
        cuts = [served.cut(each) for each in done]
    size = block_size or 128
    assert [cached for cached, _ in cuts] == [0, 700 // size * size, 700 // size * size]
    for each, (cached, chunks) in zip(done, cuts, strict=True):
        ids = each.prompt_token_ids
        if sections:
            # Dense prefill does not depend on the chunks.
            wanted = transformers.tokens(ids, artifact=path)
        else:
            _, wanted = transformers.continued(first, ids, cached, chunks, artifact=path)
        assert list(each.outputs[0].token_ids) == wanted


def test_dense_kernel_tokens_match_transformers(model, artifact, transformers):
    # The artifact is ignored, including its decode section.
    options = {"artifact": artifact(decode=DECODE), "dense": True}
    with engine(model, additional_config={"headwise": options}) as served:
        assert served.tokens(PROMPTS) == [transformers.tokens(ids) for ids in PROMPTS]
        report = stats()
    assert report["prefills"] == {"dense by kernel": 6}
    assert "decode" not in report
    # All layers have pages that vLLM's own attention could not read.
    assert report["layers"] == {"dense by kernel": "0-2"}


def test_compiled_model_tokens_match_transformers(model, artifact, transformers, monkeypatch):
    # vLLM's switch for tests: trace the model and run it without its compiler.
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")
    path = artifact()
    wanted = [transformers.tokens(ids, artifact=path) for ids in PROMPTS]
    with engine(model, path, enforce_eager=False) as served:
        assert served.tokens(PROMPTS) == wanted


def test_dense_artifact_equals_parent_bitwise(model, artifact):
    def outcome(path):
        with engine(model, path) as served:
            done = served.generate(PROMPTS, logprobs=1)
        return [
            [{t: p.logprob for t, p in step.items()} for step in each.outputs[0].logprobs]
            for each in done
        ]

    assert outcome(artifact((("dense",) * 4,) * 3)) == outcome(None)


def test_tensor_parallel_ranks_use_their_heads(model, artifact, transformers):
    from vllm import LLM, SamplingParams

    # KV heads of one process read tokens that heads of the other select, and retain unequal counts.
    path = artifact(decode=DECODE, kv_cache=kv_section(("snap", "wide"), "full", "full"))
    wanted = [transformers.tokens(ids, artifact=path) for ids in PROMPTS]
    llm = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        max_num_batched_tokens=16384,
        enable_prefix_caching=False,
        additional_config={"headwise": path},
        worker_extension_cls="runtime.vllm.Stats",
    )
    try:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
        done = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)
        report = llm.collective_rpc("headwise_stats")
    finally:
        llm.llm_engine.engine_core.shutdown()
    assert [list(each.outputs[0].token_ids) for each in done] == wanted
    assert [(each["rank"], each["prefills"]) for each in report] == [
        (rank, {"sparse": 4, "short": 2}) for rank in range(2)
    ]
