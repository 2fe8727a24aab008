"""SnapKV against its definition over full rows of attention; prompts in chunks, turns, generation,
crop, memory."""

from __future__ import annotations

import math
import tracemalloc
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

import artifacts
from artifacts import HeadwiseError, SnapKV, Streaming
from runtime import memory_report
from runtime.caches import snapkv
from runtime.caches.policy import Step
from tests.runtime.caches.feeding import fed
from tests.runtime.caches.oracle import OneHead, attending, calls, probabilities

CLOSE = {"atol": 3e-4, "rtol": 1e-3}
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def definition(policy: SnapKV, sizes: tuple[int, ...]) -> OneHead:
    """One KV head by SnapKV, section 4: of a prompt its window stays, and what the window's pooled
    votes rank first."""

    def one_head(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        out, kept = torch.zeros(*q.shape[:2], v.shape[1]), list[int]()
        for begin, end in calls(q.shape[1], sizes):
            votes = torch.zeros(q.shape[1])
            for t in range(begin, end):
                kept.append(t)
                weights = probabilities(q[:, t], k, kept, scale)
                out[:, t] = weights @ v[kept]
                if t >= end - policy.window:
                    votes[kept] += weights.sum(0)
            if end - begin < max(2, policy.window):
                continue
            budget = policy.budget
            if isinstance(budget, float):
                budget = math.ceil(Fraction(str(budget)) * end)
            earlier, own = kept[: -policy.window], kept[-policy.window :]
            half = policy.pool // 2
            pooled = {
                p: sum(votes[other].item() for other in earlier[max(0, i - half) : i + half + 1])
                for i, p in enumerate(earlier)
            }
            best = sorted(earlier, key=lambda p: -pooled[p])[: max(0, budget - policy.window)]
            kept = sorted(best) + own
        return out

    return one_head


POLICIES = [
    SnapKV(budget=30, window=8, pool=5),
    SnapKV(budget=0.4, window=8, pool=7),
    SnapKV(budget=20, window=19, pool=1),
    SnapKV(budget=0.05, window=16, pool=3),
    SnapKV(budget=12, window=1, pool=3),
    SnapKV(budget=500, window=8, pool=5),
]


@pytest.mark.parametrize(
    "sizes", [(80, 1), (33, 1), (40, 1, 1, 30, 1), (25, 5, 25, 1), (7, 1), (100,)], ids=str
)
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{p.budget}-{p.window}-{p.pool}")
def test_a_query_sees_what_the_definition_keeps(policy, sizes, build, keeping, ids):
    model, tokens = build(), ids(100, batch=2)
    with attending(model, definition(policy, sizes)):
        expected = model(tokens, use_cache=False).logits
    with keeping(model, policy).apply(model) as handle:
        torch.testing.assert_close(fed(model, tokens, sizes, handle.new_cache()), expected, **CLOSE)


@pytest.mark.parametrize("heads", [(4, 1), (4, 4), (8, 2)])
def test_query_heads_of_a_kv_head_vote_together(heads, build, keeping, ids):
    policy, tokens = SnapKV(budget=30, window=8, pool=5), ids(90)
    model = build(num_attention_heads=heads[0], num_key_value_heads=heads[1])
    with attending(model, definition(policy, (80, 1))):
        expected = model(tokens, use_cache=False).logits
    with keeping(model, policy).apply(model) as handle:
        torch.testing.assert_close(
            fed(model, tokens, (80, 1), handle.new_cache()), expected, **CLOSE
        )


def test_a_prompt_is_attended_to_by_the_artifact_s_patterns(build, keeping, apply, ids):
    model, tokens = build(), ids(200)
    rows = [["vs_70_70", "a_64_64", "bs_2", "a_64_64"]] * 2
    policy = SnapKV(budget=40, window=16)
    with keeping(model, policy, patterns=rows).apply(model, backend="reference") as handle:
        cache = handle.new_cache()
        found = model(tokens, past_key_values=cache).logits
        assert handle.stats() == {"sparse": 2, "kept": 2, "dense": {}}
        assert [layer.kept for layer in memory_report(cache).layers] == [40, 40]
        model(tokens[:, :1], past_key_values=cache)
    with apply(model, rows=rows, strict=True):
        torch.testing.assert_close(found, model(tokens).logits, **CLOSE)


def test_kept_rows_are_in_the_order_of_the_text() -> None:
    policy = snapkv.SnapKV(artifacts.SnapKV(budget=30, window=8, pool=3))
    torch.manual_seed(0)
    v = torch.arange(200.0)[None, None, :, None].expand(1, 2, 200, 8).contiguous()
    policy.attend(_call(torch.randn(1, 4, 200, 8), torch.randn(1, 2, 200, 8), v))
    assert policy.values is not None
    rows = policy.values[0, :, :30, 0]
    assert (rows.diff(dim=1) > 0).all()
    assert rows[:, -8:].tolist() == [list(range(192, 200))] * 2
    assert not torch.equal(rows[0], rows[1])


def _call(q: Tensor, k: Tensor, v: Tensor) -> Step:
    return Step(q=q, k=k, v=v, scale=1.0, softcap=None, backend="cpu", prefill=lambda q, k, v: v)


def test_a_softcap_goes_into_the_votes(build, keeping, ids):
    policy, tokens, found = SnapKV(budget=20, window=8), ids(100), []
    model = build("Gemma2", layer_types=["full_attention"] * 2, attn_logit_softcapping=0.5)
    for backend in ("reference", "auto"):
        with keeping(model, policy).apply(model, backend=backend) as handle:
            found.append(fed(model, tokens, (80, 1), handle.new_cache()))
    torch.testing.assert_close(*found, **CLOSE)
    with keeping(model, SnapKV(budget=200, window=8)).apply(model) as handle:
        whole = fed(model, tokens, (80, 1), handle.new_cache())
    torch.testing.assert_close(whole, model(tokens, use_cache=False).logits, **CLOSE)


def test_sequences_of_unlike_lengths_are_served_as_each_alone(build, keeping, ids):
    model, lengths = build(), (60, 60, 33, 9, 1)
    prompts = [ids(n, seed=seed)[0] for seed, n in enumerate(lengths)]
    tokens = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    real = torch.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        tokens[row, -len(prompt) :], real[row, -len(prompt) :] = prompt, 1
    with keeping(model, SnapKV(budget=20, window=8)).apply(model) as handle:
        alone = [
            model.generate(
                p[None], past_key_values=handle.new_cache(), max_new_tokens=30, **GREEDY
            )[0, len(p) :]
            for p in prompts
        ]
        found = model.generate(
            tokens,
            attention_mask=real,
            past_key_values=handle.new_cache(),
            max_new_tokens=30,
            **GREEDY,
        )
    assert torch.equal(found[:, tokens.shape[1] :], torch.stack(alone))


def test_beams_give_what_one_sequence_by_itself_gives(build, keeping, ids):
    model, prompt = build(), ids(70)
    with keeping(model, SnapKV(budget=20, window=16)).apply(model) as handle:
        out = model.generate(
            prompt,
            past_key_values=handle.new_cache(),
            max_new_tokens=20,
            num_beams=3,
            output_scores=True,
            return_dict_in_generate=True,
            **GREEDY,
        )
        again = fed(model, out.sequences, (70, 1), handle.new_cache())
    logs = again.log_softmax(-1)[0, 69:-1].gather(1, out.sequences[0, 70:, None]).sum()
    torch.testing.assert_close(out.sequences_scores[0] * 20, logs, atol=1e-3, rtol=1e-3)


def test_generated_tokens_are_taken_back_and_a_compressed_prompt_is_not(build, keeping, ids):
    model, tokens = build(), ids(100)
    with keeping(model, SnapKV(budget=20, window=8)).apply(model) as handle:
        expected = fed(model, tokens, (70, 1), handle.new_cache())
        cache = handle.new_cache()
        fed(model, torch.cat([tokens[:, :80], ids(9, seed=3)], dim=1), (70, 1), cache)
        cache.crop(-9)
        torch.testing.assert_close(
            fed(model, tokens[:, 80:], (1,), cache), expected[:, 80:], **CLOSE
        )
        with pytest.raises(HeadwiseError, match="cannot take 31 tokens back"):
            cache.crop(-31)
        assert [layer.kept for layer in memory_report(cache).layers] == [50, 50]


def test_a_prompt_that_cost_nothing_is_taken_back(build, keeping, ids):
    model, tokens = build(), ids(100)
    with keeping(model, SnapKV(budget=1.0, window=8)).apply(model) as handle:
        cache = handle.new_cache()
        fed(model, tokens, (50, 1, 40), cache)
        cache.crop(-60)
        for state in (layer.policies[0] for layer in cache.layers):
            assert (state.seen, state.kept) == (40, 40)
        found = fed(model, tokens[:, 40:], (10,), cache)
    torch.testing.assert_close(found, model(tokens).logits[:, 40:], **CLOSE)


def test_kv_heads_of_unlike_policies_are_each_as_in_a_layer_of_their_own(build, keeping, ids):
    model, tokens = build(num_hidden_layers=1), ids(60)
    policy, seen = SnapKV(budget=16, window=8), list[Tensor]()
    module = model.model.layers[0].self_attn.o_proj
    hook = module.register_forward_pre_hook(
        lambda _, given: seen.append(given[0].unflatten(-1, (4, -1)))
    )
    found = []
    for table, rows in (
        ({"it": policy}, None),
        ({"other": Streaming(sinks=2, window=9), "it": policy}, [("other", "it")]),
    ):
        with keeping(model, table, rows=rows).apply(model) as handle:
            seen.clear()
            fed(model, tokens, (20, 11, 1), handle.new_cache())
        found.append(torch.cat(seen, dim=1))
    hook.remove()
    torch.testing.assert_close(found[1][:, :, 2:], found[0][:, :, 2:], **CLOSE)


def test_memory_of_a_prompt_is_freed(build, keeping, ids):
    model, tokens = build(), ids(4000)
    with keeping(model, SnapKV(budget=0.1, window=32)).apply(model) as handle:
        cache = handle.new_cache()
        fed(model, tokens, (4000,), cache)
        one = 2 * 2 * 64 * 4
        for layer in memory_report(cache).layers:
            assert (layer.seen, layer.kept) == (4000, 400)
            assert layer.device <= one * (400 + 256)


def test_bf16_is_near_and_keeps_its_type(build, keeping, ids):
    model, tokens = build().to(torch.bfloat16), ids(100)
    with keeping(model, SnapKV(budget=200, window=16)).apply(model) as handle:
        cache = handle.new_cache()
        logits = fed(model, tokens, (60, 1), cache).float()
    assert cache.layers[0].policies[0].keys.dtype == torch.bfloat16
    expected = model(tokens).logits.float()
    assert (logits - expected).norm() / expected.norm() < 0.05


def test_a_generated_token_takes_its_own_memory_only() -> None:
    """The room grows by a share of itself, and between that nothing moves and nothing is left
    behind."""
    policy = snapkv.SnapKV(artifacts.SnapKV(budget=30, window=8))
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 100, 16), torch.randn(1, 2, 100, 16), torch.randn(1, 2, 100, 16)
    policy.attend(_call(q, k, v))
    one = tuple(x[:, :, :1].contiguous() for x in (q, k, v))
    moved, lay = 0, None
    tracemalloc.start()
    for step in range(10_000):
        if step == 100:
            before = tracemalloc.get_traced_memory()[0]
        policy.attend(_call(*one))
        assert policy.keys is not None
        moved, lay = moved + (policy.keys.data_ptr() != lay), policy.keys.data_ptr()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    # Python's smallest object has 16 bytes; other threads of the process allocate some thousand.
    assert grown < 16 * 9700
    assert moved <= 40
    assert (policy.seen, policy.kept) == (10_100, 10_030)
    assert policy.keys.shape[2] <= 1.13 * policy.kept + 256
