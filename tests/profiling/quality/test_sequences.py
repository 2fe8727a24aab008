"""Prompts with their answers as sequences, and losses against all logits of a dense pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import kl_div

from artifacts import HeadwiseError
from kernels.attention import sparse_attention
from kernels.patterns import LayerPlan, make
from kernels.patterns.dense import dense_index
from profiling.inside.capture import attending
from profiling.prompts.prompt import Prompt
from profiling.quality.sequences import Reference, TokenSequence, planned, sequences
from tests.profiling.prompts.files import LONG, file_task
from tests.profiling.tokenizers import byte_level
from tests.runtime.tiny import tiny_model
from tests.typed import make_prompts

CONTEXT = 200


@pytest.fixture(scope="module")
def model():
    return tiny_model("Llama")


@pytest.fixture(scope="module")
def one(model):
    """Four answers, of which dense attention predicts the second, behind the context's last token;
    the last ends the sequence."""
    ids = torch.randint(3, 97, (CONTEXT + 30,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.no_grad():
        ids[CONTEXT] = int(model(torch.tensor([ids[:CONTEXT]])).logits[0, -1].argmax())
    answers = ((50, 52), (CONTEXT, CONTEXT + 1), (205, 209), (229, 230))
    return TokenSequence(task="kv", ids=tuple(ids), context=CONTEXT, answers=answers)


def test_sequences_of_one_text_are_one_unit(tmp_path):
    tokenizer = byte_level()
    file = file_task("text", tmp_path / "a.txt", 4).partition(":")[2]
    prompts = [
        prompt
        for task in (f"passkey:{file}", f"niah_single_2:{file}", "kv_retrieval")
        for prompt in make_prompts(task, tokenizer, length=LONG, samples=2, seed=0)
    ]
    names = [sequence.unit for sequence in sequences(prompts, tokenizer)]
    assert set(names[:2]) == set(names[2:4]) and len(set(names)) == 4


def test_sequences_join_prompts_of_one_context():
    tokenizer = byte_level()

    def encode(text):
        return tuple(tokenizer(text)["input_ids"])

    def asked(text, answer):
        turn = encode(text)
        ids, scored = context + turn, ((3, 5),)
        return Prompt(ids, answer, turn=len(turn), task="line_turns", scored=scored)

    context = encode("The pass key is 1234567. The river and the old clerk in the rain.")
    other = Prompt(encode("A second text in which nothing is asked."), None, task="prose")
    prompts = [asked("\nKey:", "1234567"), other, asked("\nWho:", "clerk")]
    result = sequences(prompts, tokenizer)
    assert [sequence.task for sequence in result] == ["line_turns", "prose"]
    shared, text = result
    assert shared.context == len(context) and shared.ids[: len(context)] == context
    assert shared.answers[0] == (3, 5) and not shared.is_text
    # Each question follows the one before and its right answer; what follows an answer is a new
    # line.
    read = [tokenizer.decode(shared.ids[start:stop]) for start, stop in shared.answers[1:]]
    assert [answer.strip() for answer in read] == ["1234567", "clerk"]
    assert tokenizer.decode(shared.ids[len(context) :]) == "\nKey: 1234567\n\nWho: clerk\n"
    assert shared.answer_tokens == sum(stop - start for start, stop in shared.answers)
    assert text.is_text and text.ids == other.input_ids and text.context == len(text.ids)


def test_digest_depends_on_ids_context_and_answers(one):
    rest = [
        replace(one, ids=(*one.ids[:-1], 96 - one.ids[-1] % 2)),
        replace(one, context=CONTEXT - 1),
        replace(one, answers=one.answers[:-1]),
    ]
    assert len({one.digest, *(other.digest for other in rest)}) == 4
    assert replace(one, task="another").digest == one.digest


def plans() -> dict[int, LayerPlan]:
    return {1: LayerPlan([make("a_shape", sink=64, window=8)] * 4, 2, dense_tail=0)}


def logits_of(model: Any, one: TokenSequence, attention: Any) -> torch.Tensor:
    with torch.no_grad(), attending(model, attention):
        return model(torch.tensor([one.ids])).logits[0].double().log_softmax(-1)


def test_planned_attention_after_the_context_is_dense(model, one):
    seen = []

    def visit(inputs):
        q, k, v = inputs.q, inputs.k, inputs.v
        result = planned(plans(), CONTEXT)(inputs)
        length = q.shape[2]
        index = dense_index(1, 4, length, length, q.device)
        dense = sparse_attention(q, k, v, index, logits=inputs.logits)
        after = slice(CONTEXT, None)
        torch.testing.assert_close(result[:, :, after], dense[:, :, after], atol=1e-5, rtol=1e-4)
        q, k, v = (x[:, :, :CONTEXT] for x in (q, k, v))
        index = plans()[1].build(q, k, scale=inputs.scale)
        sparse = sparse_attention(q, k, v, index, logits=inputs.logits, backend="reference")
        expected = sparse if inputs.layer == 1 else dense[:, :, :CONTEXT]
        torch.testing.assert_close(result[:, :, :CONTEXT], expected, atol=1e-4, rtol=1e-3)
        seen.append(inputs.layer)
        return result

    logits_of(model, one, visit)
    assert seen == [0, 1]


def test_reference_losses_equal_those_of_all_logits(model, one):
    reference = Reference(model, [one])
    result = reference.losses(0, plans())
    dense = logits_of(model, one, planned({}, CONTEXT))
    sparse = logits_of(model, one, planned(plans(), CONTEXT))
    at = torch.linspace(0, CONTEXT - 2, CONTEXT - 1).long()
    ids = torch.tensor(one.ids)
    kl = kl_div(sparse, dense, log_target=True, reduction="none").sum(-1)
    nll, dense_nll = (-of[:-1].gather(1, ids[1:, None])[:, 0] for of in (sparse, dense))
    np.testing.assert_allclose(result.kl, kl[at], atol=3e-3, rtol=2e-2)
    scored = torch.cat([torch.arange(start - 1, stop - 1) for start, stop in one.answers])
    np.testing.assert_allclose(result.nll, nll[scored], atol=1e-3)
    np.testing.assert_allclose(result.dense_nll, dense_nll[scored], atol=5e-3)
    assert result.kl.mean() > 0.001 and result.answer_tokens.tolist() == [2, 1, 4, 1]
    for number, (start, stop) in enumerate(one.answers):
        own = slice(start - 1, stop - 1)
        assert result.answer_nll[number] == pytest.approx(float(nll[own].sum()), rel=1e-3)
        expected = float(dense_nll[own].sum())
        assert result.answer_dense_nll[number] == pytest.approx(expected, rel=2e-3)
        for right, of in ((result.right, sparse), (result.dense_right, dense)):
            assert right[number] == bool((of[own].argmax(-1) == ids[start:stop]).all())
        for clear, of in ((result.clear, sparse), (result.dense_clear, dense)):
            logits = of[own].gather(1, ids[start:stop, None])[:, 0]
            others = of[own].scatter(1, ids[start:stop, None], float("-inf")).max(-1).values
            smoothed = torch.special.ndtr((logits - others).double() / 0.5).prod()
            assert clear[number] == pytest.approx(float(smoothed), abs=2e-2)
    everything = reference.losses(0, {})
    for right in (everything.right, everything.dense_right):
        assert right.tolist() == [False, True, False, False]
    assert everything.kl.max() < 2e-3


def test_reference_reuses_the_logits_of_a_pass(model, one):
    alone, reused = Reference(model, [one]), Reference(model, [one])
    dense, targets = logits_of(model, one, planned({}, CONTEXT)), torch.tensor(one.ids[1:])
    nll, likeliest = -dense[:-1].gather(1, targets[:, None])[:, 0].float(), dense[:-1].argmax(-1)
    own = dense[:-1].gather(1, targets[:, None])
    others = dense[:-1].scatter(1, targets[:, None], float("-inf"))
    margin = (own - others.max(-1, keepdim=True).values)[:, 0].float()
    reused.set_dense(0, dense[reused.positions(0)], nll, likeliest, margin)
    for name, value in vars(alone.losses(0, plans())).items():
        np.testing.assert_allclose(getattr(reused.losses(0, plans()), name), value, atol=5e-3)


def test_reference_refuses_a_model_without_logits_to_keep(one):
    with pytest.raises(HeadwiseError, match="Linear has no logits_to_keep"):
        Reference(torch.nn.Linear(1, 1), [one])


def test_losses_that_are_no_number_name_task_and_first_head(model, one, monkeypatch):
    plan = LayerPlan([make("a_shape", sink=64, window=64)] * 4, 2)

    def broken(q, k, v, index, **options):
        out = sparse_attention(q, k, v, index, **options)
        if float(index.density().mean()) < 1:
            out[:, 2] = torch.nan
        return out

    monkeypatch.setattr("profiling.quality.sequences.sparse_attention", broken)
    reference = Reference(model, [one])
    reference.losses(0, {})
    said = r"kv: losses of the patterns are not finite in float32 \(first in head 1\.2\)"
    with pytest.raises(HeadwiseError, match=said):
        reference.losses(0, {1: plan})
    monkeypatch.undo()
    other = tiny_model("Llama")
    other.model.layers[0].mlp.down_proj.weight.data[0, 1] = torch.nan
    said = r"kv: losses of dense attention are .* \(first in the input of layer 1\)"
    with pytest.raises(HeadwiseError, match=said):
        Reference(other, [one]).losses(0, {1: plan})
