"""Tokens out of vLLM against those out of transformers by the same artifact, cut into the same
chunks."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.vllm import stats
from tests.vllm.conftest import prompt
from tests.vllm.engines import Transformers, engine
from tests.vllm.test_decode import DECODE
from tests.vllm.test_snapkv import kept

PROMPTS = [
    prompt(1000),
    prompt(777, 1),
    prompt(20, 2),
    prompt(300, 3),
    prompt(256, 4),
    prompt(255, 5),
]
DENSE = (("dense",) * 4,) * 3


def test_whole_prompts_alone_and_together(
    model: str, artifact: Any, transformers: Transformers
) -> None:
    path = artifact()
    wanted = [transformers.tokens(ids, artifact=path) for ids in PROMPTS]
    dense = [transformers.tokens(ids) for ids in PROMPTS]
    # The artifact makes a difference, or agreement would say nothing.
    assert [a == b for a, b in zip(wanted, dense, strict=True)] == [
        False,
        False,
        True,
        False,
        False,
        True,
    ]
    with engine(model, path) as served:
        assert [served.tokens([ids])[0] for ids in PROMPTS] == wanted
        assert served.tokens(PROMPTS) == wanted
        found = stats()
    assert found["prefills"] == {"sparse": 8, "short": 4} and 0 < found["density"] < 0.9


def test_dense_by_our_kernel(model: str, artifact: Any, transformers: Transformers) -> None:
    # Nothing of the artifact is left, its decode section neither.
    given = {"artifact": artifact(decode=DECODE), "dense": True}
    with engine(model, additional_config={"headwise": given}) as served:
        assert served.tokens(PROMPTS) == [transformers.tokens(ids) for ids in PROMPTS]
        found = stats()
    assert (
        found["prefills"] == {"dense by kernel": 6}
        and found["density"] is None
        and "decode" not in found
    )
    # All layers have pages that vLLM's own attention could not read.
    assert found["layers"] == {"dense by kernel": "0-2"}


def test_chunks(model: str, artifact: Any, transformers: Transformers) -> None:
    path = artifact()
    with engine(model, path, max_num_batched_tokens=512, max_num_seqs=8) as served:
        done = [served.generate([ids])[0] for ids in PROMPTS] + served.generate(PROMPTS)
        cuts = [served.cut(each) for each in done]
    assert cuts[0] == (0, [512, 488])
    # Decode of the first prompts and chunks of the next share steps.
    assert any(len(chunks) > 1 and chunks[0] < 512 for _, chunks in cuts[len(PROMPTS) :])
    for each, (_, chunks) in zip(done, cuts, strict=True):
        wanted = transformers.tokens(each.prompt_token_ids, chunks, artifact=path)
        assert list(each.outputs[0].token_ids) == wanted, chunks


def test_a_compiled_model(
    model: str, artifact: Any, transformers: Transformers, monkeypatch: pytest.MonkeyPatch
) -> None:
    # vLLM's own switch for tests: traced as ever, and run without its compiler.
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")
    path = artifact()
    with engine(model, path, enforce_eager=False) as served:
        assert served.tokens(PROMPTS) == [
            transformers.tokens(ids, artifact=path) for ids in PROMPTS
        ]


@pytest.mark.parametrize("block_size", [None, 32])
def test_cached_prefixes(
    model: str, artifact: Any, transformers: Transformers, block_size: int | None
) -> None:
    path, shared = artifact(), prompt(700)
    first, second, third = shared + prompt(80, 1), shared + prompt(200, 2), shared + prompt(30, 3)
    with engine(model, path, enable_prefix_caching=True, block_size=block_size) as served:
        done = [served.generate([ids])[0] for ids in (first, second, third)]
        cuts = [served.cut(each) for each in done]
    size = block_size or 128
    assert [cached for cached, _ in cuts] == [0, 700 // size * size, 700 // size * size]
    for each, (cached, chunks) in zip(done, cuts, strict=True):
        _, wanted = transformers.continued(
            first, each.prompt_token_ids, cached, chunks, artifact=path
        )
        assert list(each.outputs[0].token_ids) == wanted


def test_a_dense_artifact_is_the_parent_to_the_bit(model: str, artifact: Any) -> None:
    def outcome(path: str | None) -> Any:
        with engine(model, path) as served:
            done = served.generate(PROMPTS, logprobs=1)
        return [
            (
                list(each.outputs[0].token_ids),
                [{t: p.logprob for t, p in step.items()} for step in each.outputs[0].logprobs],
            )
            for each in done
        ]

    assert outcome(artifact(DENSE)) == outcome(None)


@pytest.mark.parametrize("decoding", [False, True])
def test_heads_are_those_of_the_rank(
    model: str, artifact: Any, transformers: Transformers, decoding: bool
) -> None:
    from vllm import LLM, SamplingParams

    # By head: what KV heads of one process choose, those of the other read; they keep unlike
    # numbers of tokens.
    snaps = kept(("snap", "wide"), "full", "full")
    path = artifact(decode=DECODE, kv_cache=snaps) if decoding else artifact()
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
        asked = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
        done = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], asked, use_tqdm=False)
        found = llm.collective_rpc("headwise_stats")
    finally:
        llm.llm_engine.engine_core.shutdown()
    assert [list(each.outputs[0].token_ids) for each in done] == wanted
    assert [(each["rank"], each["prefills"]) for each in found] == [
        (rank, {"sparse": 4, "short": 2}) for rank in range(2)
    ]
    assert [("decode" in each) for each in found] == [decoding] * 2
    # Each rank has other heads, with other patterns.
    assert found[0]["density"] != found[1]["density"]
