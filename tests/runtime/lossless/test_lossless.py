"""Lossless decode: the tokens of dense attention, or their distribution, whatever drafts were worth."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from artifacts import HeadwiseError
from runtime import Headwise
from runtime.lossless.generate import standing
from runtime.lossless.pace import MOST, Pace, Plan
from tests.runtime.omnikv import LAYERS

SEEN = {"do_sample": False, "pad_token_id": 0}


def dense(model: Any, prompt: torch.Tensor, **how: Any) -> Any:
    return model.generate(prompt, past_key_values=DynamicCache(config=model.config), **SEEN | how)


@pytest.mark.parametrize("drafts", [0, 1, 4, MOST])
@pytest.mark.parametrize(
    ("family", "backend"), [("Llama", "reference"), ("Llama", "auto"), ("Gemma3", "auto"), ("Qwen3", "auto")]
)
def test_greedy_tokens_are_those_of_dense_attention(family, drafts, backend, build, decoding, ids) -> None:
    kinds = {"layer_types": ["sliding_attention"] + ["full_attention"] * 5} if family == "Gemma3" else {}
    model, prompt = build(family, **LAYERS, **kinds), ids(150)
    section = {"dense_layers": (1,)} if family == "Gemma3" else {}
    expected = dense(model, prompt, max_new_tokens=40, eos_token_id=None)
    with decoding(model, **section).apply(model, backend=backend) as handle:
        loop = handle.lossless(drafts=drafts)
        found = model.generate(prompt, custom_generate=loop, max_new_tokens=40, eos_token_id=None, **SEEN)
        stats = handle.stats()
    assert found.tolist() == expected.tolist()
    seen = stats["lossless"]
    assert seen["accepted"] + seen["rounds"] + seen["dense_steps"] == 39
    if drafts:
        # Of random models one writes a word for ever, and the others what no draft foresees.
        assert seen["accepted"] == seen["drafted"] if family == "Gemma3" else seen["accepted"] < seen["drafted"]
        assert seen["tokens_per_round"] == 1 + seen["accepted"] / seen["rounds"] and stats["decode"] > 0


def test_scores_cache_and_a_second_turn_are_those_of_dense_attention(build, decoding, ids) -> None:
    model, prompt = build(**LAYERS), ids(150)
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "repetition_penalty": 1.3}
    asked |= {"max_new_tokens": 20, "eos_token_id": None, **SEEN}
    first = dense(model, prompt, **asked)
    more = torch.cat([first.sequences, ids(9, seed=3)], dim=1)
    second = model.generate(more, past_key_values=first.past_key_values, **asked)
    with decoding(model).apply(model, backend="reference") as handle:
        cache = handle.new_cache(offload="never")
        found = model.generate(prompt, past_key_values=cache, custom_generate=handle.lossless(drafts=5), **asked)
        assert found.past_key_values is cache and cache.get_seq_length() == 169
        again = model.generate(more, past_key_values=cache, custom_generate=handle.lossless(drafts=5), **asked)
    for mine, theirs in ((found, first), (again, second)):
        assert mine.sequences.tolist() == theirs.sequences.tolist()
        for name in ("scores", "logits"):
            torch.testing.assert_close(torch.cat(mine[name]), torch.cat(theirs[name]), atol=3e-4, rtol=1e-3)


@pytest.mark.parametrize("padding", [0, 30])
def test_it_stops_where_dense_attention_stops(padding, build, decoding, ids) -> None:
    model, prompt = build(**LAYERS), ids(150)
    mask = torch.ones_like(prompt)
    mask[:, :padding] = 0
    free = dense(model, prompt, attention_mask=mask, max_new_tokens=40, eos_token_id=None)[0, 150:].tolist()
    last = free[17]
    expected = dense(model, prompt, attention_mask=mask, max_new_tokens=40, eos_token_id=last)
    assert expected.shape[1] == 150 + free.index(last) + 1
    with decoding(model).apply(model, backend="reference") as handle:
        asked = {"attention_mask": mask, "max_new_tokens": 40, "eos_token_id": last}
        found = model.generate(prompt, custom_generate=handle.lossless(drafts=7), **asked, **SEEN)
    assert found.tolist() == expected.tolist()


def test_samples_have_the_distribution_of_the_verifying_scores() -> None:
    """Pairs of tokens by the rule, against p(a) p(b | a) computed outright: chi-squared at a fixed seed."""
    torch.manual_seed(5)
    size, count = 5, 20_000
    p = [torch.randn(size) * 1.5, torch.randn(size, size) * 1.5]
    q = [p[0] + torch.randn(size) * 2, p[1] + torch.randn(size, size) * 2]
    pairs: Counter[tuple[int, int]] = Counter()
    stood = 0
    for _ in range(count):
        a = torch.multinomial(q[0].softmax(-1), 1)
        b = torch.multinomial(q[1][a[0]].softmax(-1), 1)
        scores = torch.stack([p[0], p[1][a[0]], torch.zeros(size)])
        new = standing(torch.cat([a, b]), torch.stack([q[0], q[1][a[0]]]), scores).tolist()
        stood += len(new) > 1
        if len(new) == 1:
            new += torch.multinomial(p[1][new[0]].softmax(-1), 1).tolist()
        pairs[new[0], new[1]] += 1
    expected = (p[0].softmax(-1)[:, None] * p[1].softmax(-1) * count).flatten()
    found = torch.tensor([pairs[i, j] for i in range(size) for j in range(size)], dtype=torch.float32)
    # 24 degrees of freedom: beyond 51.2 in one of 1,000 fair samples.
    assert float(((found - expected) ** 2 / expected).sum()) < 51.2
    accepted = torch.minimum(p[0].softmax(-1), q[0].softmax(-1)).sum()
    assert 0.2 < accepted < 0.9, "drafts must be refused at times, or nothing is tested"
    assert stood / count == pytest.approx(float(accepted), abs=0.02)


def test_sampled_text_has_the_distribution_of_dense_attention(build, decoding, ids) -> None:
    """The third token of many generations against its probability under dense attention, every beginning enumerated."""
    model, prompt = build(**LAYERS, vocab_size=8, eos_token_id=None), ids(150) % 7 + 1
    warp = {"do_sample": True, "top_k": 3, "temperature": 1.5, "pad_token_id": 0}
    count = 500
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for begin, weight in expected.items():
            tokens = torch.cat([prompt[0], torch.tensor(begin, dtype=torch.long)])[None]
            best = (model(tokens).logits[0, -1] / 1.5).topk(3)
            for token, share in zip(best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True):
                longer[*begin, token] = weight * share
        expected = longer
    found: Counter[tuple[int, ...]] = Counter()
    with decoding(model, budget=4).apply(model, backend="cpu") as handle:
        loop = handle.lossless(drafts=2)
        cache = handle.new_cache(offload="never")
        torch.manual_seed(11)
        for _ in range(count):
            # All but the prompt's last token stay from one text to the next.
            cache.crop(-max(cache.get_seq_length() - 149, 0))
            out = model.generate(prompt, past_key_values=cache, custom_generate=loop, max_new_tokens=4, **warp)
            found[tuple(out[0, 150:153].tolist())] += 1
        stats = loop.stats()
    assert 0.1 < stats["accepted"] / stats["drafted"] < 0.95
    assert set(found) <= set(expected)
    chi = sum((found[key] - count * share) ** 2 / (count * share) for key, share in expected.items())
    # Beyond mean and four standard deviations of 26 degrees of freedom.
    assert chi < 26 + 4 * math.sqrt(52)


def test_pace_drafts_where_drafts_gain_and_is_off_where_they_do_not() -> None:
    def after(length: int, draft: float, share: int, pace: Pace) -> Plan:
        pace.begin()
        for _ in range(30):
            plan = pace.plan(length, 100)
            pace.saw(plan, plan.drafts * share // 100, draft * plan.drafts, 1.0 + 0.02 * plan.drafts)
        return plan

    pace = Pace(None)
    assert after(1000, 0.2, 100, pace).drafts == MOST and pace.off_below == 0
    assert 0 < after(1000, 0.2, 70, pace).drafts < MOST
    assert after(1000, 0.9, 60, pace) == Plan(0, False) and pace.off_below == 1250
    assert after(1249, 0.2, 100, pace) == Plan(0, False), "known not to gain: nothing is tried"
    assert after(1250, 0.2, 100, pace).drafts == MOST
    assert Pace(6).plan(1000, 100) == Plan(0, True), "nothing was chosen yet"
    assert pace.plan(2000, 3).drafts <= 3 and pace.plan(2000, -1).drafts == 0


def test_what_cannot_be_served_is_refused_by_name(build, decoding, artifact_for, ids) -> None:
    model, prompt = build(**LAYERS), ids(150)
    with Headwise(artifact_for(model)).apply(model) as handle, pytest.raises(HeadwiseError, match="needs a decode sec"):
        handle.lossless()
    with decoding(model).apply(model) as handle:
        loop = handle.lossless(drafts=2)
        for message, given in (
            ("one sequence at a time, without beams: got a batch of 2 ", {"inputs": ids(150, batch=2)}),
            ("num_beams=2", {"inputs": prompt, "num_beams": 2}),
            ("use_cache=True", {"inputs": prompt, "use_cache": False}),
            ("output_attentions=True", {"inputs": prompt, "output_attentions": True, "return_dict_in_generate": True}),
            ("all tokens at hand", {"inputs": prompt, "past_key_values": handle.new_cache(offload="packed")}),
        ):
            with pytest.raises(HeadwiseError, match=message):
                model.generate(custom_generate=loop, max_new_tokens=4, **SEEN, **given)
        with pytest.raises(HeadwiseError, match="drafts must be None or a whole number of 0 to 15, got 16"):
            handle.lossless(drafts=16)
        other = build(seed=1, **LAYERS)
        with pytest.raises(HeadwiseError, match="this is another"):
            other.generate(prompt, custom_generate=loop, max_new_tokens=4, **SEEN)
    with pytest.raises(HeadwiseError, match="undone"):
        model.generate(prompt, custom_generate=loop, max_new_tokens=4, **SEEN)
