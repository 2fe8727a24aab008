"""Teacher-forced answers, and trials against generation and a pass over prompt and answer."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import artifacts
from profiling.evaluation.methods import Methods
from profiling.evaluation.rows import PERPLEXITY, rows_of
from profiling.prompts.prompt import Evidence, Prompt
from profiling.quality.answers import answer, ends, new_tokens
from profiling.quality.contexts import TURN_CHUNK
from profiling.quality.forced import answer_ids, forced
from profiling.quality.method import Method
from profiling.quality.trials import BLOCK, POSITIONS, context_log_probs, trials
from runtime.fingerprint import fingerprint
from tests.profiling.conftest import text_losses, tiny
from tests.profiling.tokenizers import MAKERS, byte_level
from tests.typed import make_prompts

DENSE = Method(
    name="dense", make=lambda: None, density=1.0, kept=1.0, identity="dense", evicts=False, sizes=""
)


def trial(model: Any, tokenizer: Any, prompt: Prompt, method: Method = DENSE) -> dict[str, Any]:
    """Run one trial of a prompt under a method that is applied to the model."""
    return next(trials(model, tokenizer, [prompt], method)).record


def answer_losses(model: Any, tokenizer: Any, prompt: Prompt) -> Tensor:
    """-log p of each token of the right answer, by one pass over the prompt and the answer."""
    right = answer_ids(tokenizer, prompt)
    losses = text_losses(model, prompt.input_ids + right)
    return losses[-len(right) :]


def generated(
    model: Any, tokenizer: Any, prompt: Prompt, cache: Callable[[], Any] | None = None
) -> str:
    """The greedy answer by transformers' own generation."""
    ids = torch.tensor([prompt.input_ids], device=model.device)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens(tokenizer, prompt),
        do_sample=False,
        past_key_values=cache() if cache else None,
        pad_token_id=0,
        eos_token_id=list(ends(model, tokenizer)),
    )
    return str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)).strip()


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("task", ["kv_retrieval", "two_stage_retrieval"])
def test_answer_ids_decode_to_the_continuation(make, task):
    tokenizer = make()
    prompt = make_prompts(task, tokenizer, length=1500, samples=1, seed=0)[0]
    ids = answer_ids(tokenizer, prompt)
    question = tokenizer.decode(prompt.input_ids)
    assert tokenizer.decode((*prompt.input_ids, *ids)) == question + str(prompt.continuation)


def test_answer_ids_have_no_second_space():
    tokenizer = byte_level()
    ids = tuple(tokenizer("The key is ", add_special_tokens=False)["input_ids"])
    assert tokenizer.decode(answer_ids(tokenizer, Prompt(ids, "12"))) == "12"
    assert tokenizer.decode(answer_ids(tokenizer, Prompt(ids[:-1], "12"))) == " 12"


def test_forced_accuracy_and_nll_of_known_logits():
    right = (3, 1, 4, 1)
    logits = torch.zeros(4, 10)
    # Sure of the first two tokens, and of a wrong one for the third; the last is as likely as any.
    logits[[0, 1, 2], [3, 1, 0]] = 100.0
    fit = forced(logits, right)
    assert len(fit.nll) == 4 and not fit.right and fit.token_accuracy == 2 / 4
    assert fit.mean == pytest.approx((100 + math.log(10)) / 4, rel=1e-3)
    assert fit.nll[:2] == pytest.approx((0, 0), abs=1e-3)
    assert forced(logits[:2], right[:2]).right


def test_token_losses_equal_the_models_loss(loaded):
    ids = torch.randint(0, 256, (1, 600))
    with torch.no_grad():
        loss = loaded.model(ids, labels=ids).loss
    losses = text_losses(loaded.model, ids[0].tolist())
    assert losses.shape == (599,) and losses.mean().item() == pytest.approx(loss.item(), rel=1e-4)


def asking(ids: tuple[int, ...], **more: Any) -> Prompt:
    return Prompt.answered_by(ids, Evidence("wxyz", (0, 1)), **more)


def prompts_of_one_context() -> list[Prompt]:
    """Three questions over one context, one over another, and one without a later turn."""
    rng = random.Random(0)
    one, other = (tuple(rng.choices(range(3, 90), k=40)) for _ in range(2))
    turns = [tuple(rng.choices(range(3, 90), k=n)) for n in (5, TURN_CHUNK + 3, 1)]
    question = [
        asking((*context, *turn), turn=len(turn)) for context in (one, other) for turn in turns
    ]
    return [question[0], question[4], question[1], asking(one), question[2]]


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_trials_of_one_context_share_its_prefill(family):
    model, tokenizer, prompts = tiny(family), byte_level(), prompts_of_one_context()
    fed = []

    def count(module, args, keywords):
        fed.append((args[0] if args else keywords["input_ids"]).shape[1])

    with model.register_forward_pre_hook(count, with_kwargs=True):
        run = list(trials(model, tokenizer, prompts, DENSE))
    assert fed.count(40) == 2 and max(length for length in fed if length != 40) == TURN_CHUNK
    records = {each.number: each.record for each in run}
    for each in run:
        expected = context_log_probs(model, prompts[each.number].context)
        assert expected.shape[0] == 39
        torch.testing.assert_close(each.log_probs, expected, atol=1e-4, rtol=1e-4)
    own = [generated(model, tokenizer, asking(prompt.input_ids)) for prompt in prompts]
    for number, prompt in enumerate(prompts):
        assert records[number]["text"] == own[number]
        losses = answer_losses(model, tokenizer, prompt)
        assert records[number]["nll"] == pytest.approx(losses.mean().item(), rel=1e-4)
    assert [answer(model, tokenizer, prompt) for prompt in prompts] == own


def test_trials_score_answers_inside_a_prompt():
    model = tiny("Llama")
    ids = tuple(random.Random(1).choices(range(3, 90), k=60))
    ranges = ((20, 23), (1, 2), (50, 60))
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    losses = [-logits[at - 1, ids[at]].item() for at in range(1, 60)]
    means = [sum(losses[start - 1 : stop - 1]) / (stop - start) for start, stop in ranges]
    result = trial(model, byte_level(), asking(ids, scored=ranges))
    assert result["nll"] == pytest.approx(sum(means) / 3, rel=1e-4)
    likeliest = tuple(logits[:-1].argmax(-1).tolist())
    # The last range is the model's own prediction.
    right = (*ids[:59], likeliest[58])
    result = trial(model, byte_level(), asking(right, scored=((20, 23), (59, 60))))
    assert result["score"] == 1 / 2 and result["token_accuracy"] == 1 / 2


def test_trials_score_the_expected_answer_as_right(loaded):
    blank = Prompt(tuple(range(60, 90)), "x" * 6)
    own = generated(loaded.model, loaded.tokenizer, blank)[:4]
    result = trial(loaded.model, loaded.tokenizer, Prompt(blank.input_ids, own))
    assert result["score"] == 1.0


def test_trials_of_a_text_have_a_loss_per_block(loaded):
    ids = torch.randint(0, 256, (700,), generator=torch.Generator().manual_seed(0))
    prompt = Prompt(tuple(ids.tolist()), None)
    result = trial(loaded.model, loaded.tokenizer, prompt)
    losses = text_losses(loaded.model, prompt.input_ids)
    blocks = [losses[:BLOCK].mean().item(), losses[BLOCK:].mean().item()]
    assert result["blocks"] == pytest.approx(blocks) and result["block_tokens"] == [256, 443]
    place = {"task": "t", "length": 700, "method": "m", "prompt": "0", "unit": "0"}
    row = next(row for row in rows_of(result, **place) if row.measure == PERPLEXITY)
    assert row.value == pytest.approx(losses.mean().item(), rel=1e-6)
    assert result["forced"] == pytest.approx(losses[-128:].mean().item(), rel=1e-5)
    log_probs = next(trials(loaded.model, loaded.tokenizer, [prompt], DENSE)).log_probs
    assert log_probs is not None and len(log_probs) == POSITIONS
    with torch.no_grad():
        whole = loaded.model(ids[None]).logits[0].log_softmax(-1)
    torch.testing.assert_close(log_probs[0], whole[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(log_probs[-1], whole[698], atol=1e-4, rtol=1e-4)
    evicting = replace(DENSE, name="x", identity="x", evicts=True)
    decoded = trial(loaded.model, loaded.tokenizer, prompt, evicting)
    assert decoded["blocks"] is decoded["block_tokens"] is None
    assert decoded["forced"] == pytest.approx(result["forced"], rel=1e-4)


@pytest.mark.parametrize("name", ["dense+omnikv", "dense+h2o", "dense+streaming", "dense+own"])
def test_trials_with_a_cache_equal_generation(loaded, name):
    own = {}
    if name == "dense+omnikv":
        omnikv = artifacts.OmniKV(filter_layers=(0,), budget=50)
        own["decode"] = artifacts.Decode(omnikv=omnikv)
    if name == "dense+own":
        policy = artifacts.H2O(heavy=30, recent=20, eviction="greedy")
        own["kv_cache"] = artifacts.KVCache(policies={"x": policy}, layers=("x",) * 3)
    artifact = artifacts.Artifact(
        model=fingerprint(loaded.model, name="tiny"),
        search=None,
        patterns={},
        prefill=artifacts.Prefill(dense_below=0, layers=(None,) * 3),
        **own,
    )
    method = Methods(loaded, artifact, share=0.1).make(name, 300)
    prompt = make_prompts("passkey", loaded.tokenizer, length=300, samples=1, seed=3)[0]
    model, tokenizer = loaded.model, loaded.tokenizer
    with method.apply(model):
        result = trial(model, tokenizer, prompt, method)
        assert result["text"] == generated(model, tokenizer, prompt, lambda: method.cache(model))
    whole = trial(model, tokenizer, prompt)
    assert result["nll"] != pytest.approx(whole["nll"], rel=1e-3), "nothing was dropped"


def test_trials_with_references_alone_have_no_nll(loaded):
    """It may also have an answer as long as its task allows."""
    prompt = Prompt(tuple(range(60, 90)), None, metric="all", references=("zzzzzz",), new_tokens=9)
    result = trial(loaded.model, loaded.tokenizer, prompt)
    assert (result["score"], result["nll"], result["token_accuracy"]) == (0.0, None, None)
    assert result["text"] == generated(loaded.model, loaded.tokenizer, prompt)
    limits = [new_tokens(loaded.tokenizer, each) for each in (prompt, Prompt((5,), "wx"))]
    assert limits == [9, len(loaded.tokenizer("wx", add_special_tokens=False)["input_ids"]) + 2]


def test_answers_stop_once_the_score_is_final():
    model = tiny("Llama")
    tokenizer = byte_level()
    ids = tuple(range(3, 40))
    free = Prompt(ids, None, metric="all", references=("no such text",), new_tokens=12)
    whole = answer(model, tokenizer, free)
    half = whole[: max(1, len(whole) // 2)]
    named = replace(free, references=(half,))
    cut = answer(model, tokenizer, named)
    assert whole.startswith(cut) and half in cut and len(cut) < len(whole)
