"""H2O against its definition, token by token over full rows of attention; memory, chunks, batches,
turns, drafts."""

from __future__ import annotations

import math
import tracemalloc
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

import artifacts
from artifacts import H2O, Full, HeadwiseError, Streaming
from runtime import memory_report
from runtime.caches import h2o
from runtime.caches.policy import Step
from tests.runtime.caches.feeding import fed
from tests.runtime.caches.oracle import OneHead, attending, calls, probabilities

CLOSE = {"atol": 3e-4, "rtol": 1e-3}
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def definition(policy: H2O, sizes: tuple[int, ...]) -> OneHead:
    """One KV head by H2O, section 4: sums of the probabilities that tokens got, and after each call
    the lowest go.

    "greedy" is the same with calls of one token each (Algorithm 1).
    """
    sizes = (1,) if policy.eviction == "greedy" else sizes

    def one_head(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        out, kept, score = (
            torch.zeros(*q.shape[:2], v.shape[1]),
            list[int](),
            torch.zeros(q.shape[1]),
        )
        for begin, end in calls(q.shape[1], sizes):
            for t in range(begin, end):
                kept.append(t)
                weights = probabilities(q[:, t], k, kept, scale)
                out[:, t] = weights @ v[kept]
                score[kept] += weights.sum(0)
            recent = count(policy.recent, end)
            while len(kept) > count(policy.heavy, end) + recent:
                old = [p for p in kept if p < end - recent]
                rank = {p: score[p].item() / (end - p if policy.normalised else 1) for p in old}
                kept.remove(min(old, key=lambda p: rank[p]))
        return out

    return one_head


def count(budget: int | float, seen: int) -> int:
    return math.ceil(Fraction(str(budget)) * seen) if isinstance(budget, float) else budget


POLICIES = [
    H2O(heavy=6, recent=10),
    H2O(heavy=6, recent=10, normalised=True),
    H2O(heavy=0.1, recent=0.2),
    H2O(heavy=0.15, recent=7, normalised=True),
    H2O(heavy=9, recent=0),
    H2O(heavy=0, recent=0.25),
    H2O(heavy=6, recent=10, eviction="greedy"),
    H2O(heavy=0.2, recent=0.1, eviction="greedy", normalised=True),
]


@pytest.mark.parametrize("sizes", [(1,), (5,), (33, 1), (17, 20, 1, 1, 3), (90,)], ids=str)
@pytest.mark.parametrize(
    "policy", POLICIES, ids=lambda p: f"{p.heavy}-{p.recent}-{p.eviction}-{p.normalised}"
)
def test_a_query_sees_what_the_definition_keeps(policy, sizes, build, keeping, ids):
    model, tokens = build(), ids(90, batch=2)
    with attending(model, definition(policy, sizes)):
        expected = model(tokens, use_cache=False).logits
    with keeping(model, policy).apply(model) as handle:
        cache = handle.new_cache()
        torch.testing.assert_close(fed(model, tokens, sizes, cache), expected, **CLOSE)
    kept = count(policy.heavy, 90) + count(policy.recent, 90)
    assert [(layer.seen, layer.kept) for layer in memory_report(cache).layers] == [(90, kept)] * 2
    # As many as it says, and none twice.
    for layer in cache.layers:
        for state in layer.policies:
            for row in state.positions[:, :, :kept].flatten(0, 1):
                assert len(set(row.tolist())) == kept


@pytest.mark.parametrize("heads", [(4, 1), (4, 4), (8, 2)])
def test_query_heads_of_a_kv_head_vote_together(heads, build, keeping, ids):
    policy = H2O(heavy=8, recent=8)
    model = build(num_attention_heads=heads[0], num_key_value_heads=heads[1])
    tokens = ids(70)
    with attending(model, definition(policy, (40, 1))):
        expected = model(tokens, use_cache=False).logits
    with keeping(model, policy).apply(model) as handle:
        torch.testing.assert_close(
            fed(model, tokens, (40, 1), handle.new_cache()), expected, **CLOSE
        )


def test_greedy_eviction_is_the_same_however_tokens_come(build, keeping, ids):
    model, tokens = build(), ids(80)
    for policy in (
        H2O(heavy=10, recent=10, eviction="greedy"),
        H2O(heavy=0.2, recent=0.2, eviction="greedy"),
    ):
        with keeping(model, policy).apply(model) as handle:
            one_by_one = fed(model, tokens, (1,), handle.new_cache())
            for sizes in [(80,), (7,), (30, 1), (64, 16)]:
                torch.testing.assert_close(
                    fed(model, tokens, sizes, handle.new_cache()), one_by_one, **CLOSE
                )


def test_chunks_are_the_same_as_one_prompt_until_the_budget_is_spent(build, keeping, ids):
    model, tokens = build(), ids(80)
    with keeping(model, H2O(heavy=20, recent=20)).apply(model) as handle:
        chunked = fed(model, tokens, (9, 20, 11, 40), handle.new_cache())
        torch.testing.assert_close(
            chunked, fed(model, tokens, (40, 40), handle.new_cache()), **CLOSE
        )
    with keeping(model, H2O(heavy=60, recent=20)).apply(model) as handle:
        kept = fed(model, tokens, (9, 20), handle.new_cache())
    torch.testing.assert_close(kept, model(tokens).logits, **CLOSE)


def test_what_scores_highest_stays_though_it_is_old() -> None:
    """One key that every query looks at is kept beside the latest, and the others go in turn."""
    policy, q = h2o.H2O(H2O(heavy=1, recent=2)), torch.zeros(1, 1, 1, 8)
    q[..., 0] = 4.0
    for t in range(20):
        k = torch.zeros(1, 1, 1, 8)
        k[..., 0] = 5.0 if t == 3 else 0.0
        policy.attend(_call(q, k, k))
        assert policy.kept == min(t + 1, 3)
        if t > 4:
            assert policy.positions is not None
            assert set(policy.positions[0, 0, :3].tolist()) == {3, t - 1, t}


def _call(q: Tensor, k: Tensor, v: Tensor, backend: str = "reference") -> Step:
    return Step(q=q, k=k, v=v, scale=1.0, softcap=None, backend=backend, prefill=lambda q, k, v: v)


def test_a_softcap_goes_into_scores_and_output(build, keeping, ids):
    model, tokens = build("Gemma2", layer_types=["full_attention"] * 2), ids(60)
    with keeping(model, H2O(heavy=100, recent=100)).apply(model) as handle:
        found = fed(model, tokens, (30, 20, 1), handle.new_cache())
    torch.testing.assert_close(found, model(tokens, use_cache=False).logits, **CLOSE)


def test_backends_and_dtypes_agree(build, keeping, ids):
    model, tokens = build(), ids(100)
    policies = keeping(model, H2O(heavy=10, recent=20))
    found = []
    for backend in ("reference", "auto"):
        with policies.apply(model, backend=backend) as handle:
            found.append(fed(model, tokens, (60, 1), handle.new_cache()))
    torch.testing.assert_close(*found, **CLOSE)
    narrow = build().to(torch.bfloat16)
    with keeping(narrow, H2O(heavy=100, recent=100)).apply(narrow) as handle:
        cache = handle.new_cache()
        logits = fed(narrow, tokens, (60, 1), cache)
    assert cache.layers[0].policies[0].keys.dtype == torch.bfloat16
    assert cache.layers[0].policies[0].scores.dtype == torch.float32
    expected = narrow(tokens).logits.float()
    assert (logits.float() - expected).norm() / expected.norm() < 0.05


def test_sequences_of_unlike_lengths_are_served_as_each_alone(build, keeping, ids):
    model, lengths = build(), (40, 40, 17, 5, 1)
    prompts = [ids(n, seed=seed)[0] for seed, n in enumerate(lengths)]
    tokens = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    real = torch.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        tokens[row, -len(prompt) :], real[row, -len(prompt) :] = prompt, 1
    with keeping(model, H2O(heavy=0.2, recent=0.2)).apply(model) as handle:
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


def test_kv_heads_of_unlike_policies_are_each_as_in_a_layer_of_their_own(build, keeping, ids):
    model, tokens = build(num_hidden_layers=1), ids(60)
    policy = H2O(heavy=8, recent=8)
    seen: list[Tensor] = []
    module = model.model.layers[0].self_attn.o_proj
    hook = module.register_forward_pre_hook(
        lambda _, given: seen.append(given[0].unflatten(-1, (4, -1)))
    )
    for table, rows in (
        ({"it": policy}, None),
        ({"other": Streaming(sinks=2, window=9), "it": policy}, [("it", "other")]),
        ({"other": Full(), "it": policy}, [("other", "it")]),
    ):
        with keeping(model, table, rows=rows).apply(model) as handle:
            fed(model, tokens, (60,), handle.new_cache())
            cache = handle.new_cache()
            seen.clear()
            fed(model, tokens, (20, 11, 1), cache)
        heads = torch.cat(seen, dim=1)
        if rows is None:
            expected = heads
            continue
        mine = slice(0, 2) if rows[0][0] == "it" else slice(2, 4)
        torch.testing.assert_close(heads[:, :, mine], expected[:, :, mine], **CLOSE)
        assert memory_report(cache).layers[0].mean_kept < 40
    hook.remove()


def test_layers_that_slide_roll_beside_layers_under_h2o(build, keeping, ids):
    model, tokens = build("Gemma3"), ids(90)
    with keeping(model, H2O(heavy=50, recent=50)).apply(model) as handle:
        cache = handle.new_cache()
        found = fed(model, tokens, (40, 30, 1), cache)
    torch.testing.assert_close(found, model(tokens).logits, **CLOSE)
    assert [layer.kept for layer in memory_report(cache).layers] == [32, 90, 90]


@pytest.mark.parametrize("policy", [H2O(heavy=8, recent=8), H2O(heavy=0.2, recent=0.2)], ids=str)
def test_a_cache_of_inference_mode_goes_on_without(policy, build, keeping, ids):
    model, tokens = build(), ids(60)
    with keeping(model, policy).apply(model) as handle:
        expected = fed(model, tokens, (40, 1), handle.new_cache())
        cache = handle.new_cache()
        with torch.inference_mode():
            fed(model, tokens[:, :50], (40, 1), cache)
        torch.testing.assert_close(
            fed(model, tokens[:, 50:], (1,), cache), expected[:, 50:], **CLOSE
        )


def test_turns_go_on_where_the_cache_is(build, keeping, ids):
    policy, sizes = H2O(heavy=10, recent=10), (30, 1, 1, 1, 25, 1)
    model, tokens = build(), ids(70)
    with attending(model, definition(policy, sizes)):
        expected = model(tokens, use_cache=False).logits
    with keeping(model, policy).apply(model) as handle:
        cache = handle.new_cache()
        torch.testing.assert_close(fed(model, tokens, sizes, cache), expected, **CLOSE)
        cache.reset()
        torch.testing.assert_close(fed(model, tokens, sizes, cache), expected, **CLOSE)


@pytest.mark.parametrize(
    "policy", [H2O(heavy=8, recent=8), H2O(heavy=8, recent=8, eviction="greedy")], ids=str
)
def test_beams_give_what_one_sequence_by_itself_gives(policy, build, keeping, ids):
    model, prompt = build(), ids(70)
    with keeping(model, policy).apply(model) as handle:
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


def test_tokens_are_not_taken_back_from_sums(build, keeping, ids):
    model, tokens = build(), ids(20)
    with keeping(model, H2O(heavy=100, recent=100)).apply(model) as handle:
        cache = handle.new_cache()
        first = fed(model, tokens, (20,), cache)
        with pytest.raises(HeadwiseError, match="cannot take 3 tokens back"):
            cache.crop(-3)
        cache.crop(-20)
        torch.testing.assert_close(fed(model, tokens, (20,), cache), first)


def test_memory_of_a_prompt_is_freed(build, keeping, ids):
    model, tokens = build(), ids(1000)
    with keeping(model, H2O(heavy=0.1, recent=0.1)).apply(model) as handle:
        for sizes in [(1000,), (300,), (900, 1)]:
            cache = handle.new_cache()
            fed(model, tokens, sizes, cache)
            # 2 x 64 fp32 numbers for each of 2 KV heads; a score and a position add 8 bytes to 512.
            full = 2 * 2 * 64 * 4 * 1000
            for layer in memory_report(cache).layers:
                assert (layer.seen, layer.kept) == (1000, 200)
                assert 0.2 * full <= layer.device <= 0.22 * full


def test_ten_thousand_steps_take_no_memory_and_move_nothing() -> None:
    policy = h2o.H2O(artifacts.H2O(heavy=20, recent=12))
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 1, 16), torch.randn(1, 2, 1, 16)

    def steps(number: int) -> None:
        for _ in range(number):
            policy.attend(_call(q, k.normal_(), v, backend="cpu"))

    steps(100)
    lie = {name: (tensor.data_ptr(), tensor.shape) for name, tensor in policy.tensors().items()}
    tracemalloc.start()
    steps(200)
    before = tracemalloc.get_traced_memory()[0]
    steps(9700)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert {
        name: (tensor.data_ptr(), tensor.shape) for name, tensor in policy.tensors().items()
    } == lie
    assert set(lie) == {"keys", "values", "scores", "positions"}
    # Python's smallest object has 16 bytes; other threads of the process allocate some thousand.
    assert grown < 16 * 9700
    assert (policy.seen, policy.kept) == (10000, 32)


def test_a_step_writes_its_own_rows_only() -> None:
    """Beside the new token's and the dropped one's rows everything stays as it is."""
    torch.manual_seed(0)
    policy = h2o.H2O(artifacts.H2O(heavy=300, recent=200))
    x = torch.randn(1, 2, 900, 16)
    policy.attend(_call(torch.randn(1, 4, 900, 16), x, x, backend="cpu"))
    for _ in range(50):
        assert policy.keys is not None
        before, pointer = policy.keys[:, :, :500].clone(), policy.keys.data_ptr()
        x = torch.randn(1, 2, 1, 16)
        policy.attend(_call(torch.randn(1, 4, 1, 16), x, x, backend="cpu"))
        assert policy.keys.data_ptr() == pointer
        assert ((policy.keys[:, :, :500] != before).any(-1).sum(-1) <= 1).all()
