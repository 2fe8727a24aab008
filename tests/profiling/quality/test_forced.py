"""Answers under teacher forcing: their tokens, their losses, and the choices they are among."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from profiling.models.loading import LoadedModel
from profiling.prompts.prompt import Prompt, make_prompts
from profiling.quality.forced import answer_ids, compared, forced, negative_log_likelihood
from tests.profiling.tokenizers import MAKERS, byte_level


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("task", ["kv_retrieval", "two_stage_retrieval"])
def test_the_answers_ids_read_as_the_text_that_goes_on(make: Any, task: str) -> None:
    tokenizer = make()
    prompt = make_prompts(task, tokenizer, length=1500, samples=1, seed=0)[0]
    ids = answer_ids(tokenizer, prompt)
    asked = tokenizer.decode(prompt.input_ids)
    assert tokenizer.decode((*prompt.input_ids, *ids)) == asked + str(prompt.continuation)


def test_no_space_comes_twice() -> None:
    tokenizer = byte_level()
    ids = tuple(tokenizer("The key is ", add_special_tokens=False)["input_ids"])
    assert tokenizer.decode(answer_ids(tokenizer, Prompt(ids, "12"))) == "12"
    assert tokenizer.decode(answer_ids(tokenizer, Prompt(ids[:-1], "12"))) == " 12"


def test_accuracy_and_nll_of_known_logits() -> None:
    right = (3, 1, 4, 1)
    logits = torch.zeros(4, 10)
    # Sure of the first two tokens, and of a wrong one for the third; the last is as likely as any.
    logits[[0, 1, 2], [3, 1, 0]] = 100.0
    fit = forced(logits, right)
    assert len(fit.nll) == 4 and not fit.right and fit.token_accuracy == 2 / 4
    assert fit.mean == pytest.approx((100 + math.log(10)) / 4, rel=1e-3)
    assert fit.nll[:2] == pytest.approx((0, 0), abs=1e-3)
    assert forced(logits[:2], right[:2]).right


def test_the_loss_of_a_text_is_the_models_own(loaded: LoadedModel) -> None:
    ids = torch.randint(0, 256, (1, 600))
    with torch.no_grad():
        loss = loaded.model(ids, labels=ids).loss
    losses = negative_log_likelihood(loaded.model, Prompt(tuple(ids[0].tolist()), None))
    assert losses.shape == (599,) and losses.mean().item() == pytest.approx(loss.item(), rel=1e-4)


def test_a_forced_choice_compares_eight_at_most() -> None:
    many = Prompt((1,), "last", choices=(*"abcdefghij", "last"))
    assert compared(many) == (*"abcdefg", "last")


@pytest.mark.parametrize(
    "wrong", [{"turn": 3}, {"turn": -1}, {"scored": ((0, 1),)}, {"scored": ((1, 4),)}]
)
def test_a_turn_or_a_range_beyond_the_prompt(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"turn must be|scored ranges"):
        Prompt((1, 2, 3), None, **wrong)
