"""Answers under teacher forcing: their tokens, their losses, and shared contexts."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from profiling.prompts.prompt import Find, Prompt, make_prompts
from profiling.quality.answers import answer, answers
from profiling.quality.contexts import PIECE
from profiling.quality.forced import answer_ids, compared, forced, negative_log_likelihood
from tests.profiling.conftest import tiny
from tests.profiling.quality.forcing import forced_answers, generated
from tests.profiling.tokenizers import MAKERS, byte_level


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("task", ["kv_retrieval", "two_stage_retrieval"])
def test_the_answers_ids_read_as_the_text_that_goes_on(make: Any, task: str) -> None:
    tokenizer = make()
    prompt = make_prompts(task, tokenizer, length=1500, samples=1, seed=0)[0]
    ids = answer_ids(tokenizer, prompt)
    asked = tokenizer.decode(prompt.input_ids)
    assert tokenizer.decode((*prompt.input_ids, *ids)) == asked + str(prompt.continuation)


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


def asking(ids: tuple[int, ...], **more: Any) -> Prompt:
    return Prompt.to_find(ids, Find("wxyz", (0, 1)), **more)


def prompts_of_one_context() -> list[Prompt]:
    """Three questions over one context, one over another, and one without a later turn."""
    rng = random.Random(0)
    one, other = (tuple(rng.choices(range(3, 90), k=40)) for _ in range(2))
    turns = [tuple(rng.choices(range(3, 90), k=n)) for n in (5, PIECE + 3, 1)]
    asked = [
        asking((*context, *turn), turn=len(turn)) for context in (one, other) for turn in turns
    ]
    return [asked[0], asked[4], asked[1], asking(one), asked[2]]


def test_a_context_is_prefilled_once_for_all_its_questions() -> None:
    model = tiny("llama")
    fed: list[int] = []

    def count(module: Any, args: Any, keywords: dict[str, Any]) -> None:
        fed.append((args[0] if args else keywords["input_ids"]).shape[1])

    model.register_forward_pre_hook(count, with_kwargs=True)
    found = forced_answers(model, byte_level(), prompts_of_one_context())
    assert fed.count(40) == 2 and max(length for length in fed if length != 40) == PIECE
    assert [len(each) for each in found] == [1] * 5


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_each_question_is_answered_as_if_it_were_alone(family: str) -> None:
    model, tokenizer, prompts = tiny(family), byte_level(), prompts_of_one_context()
    together = forced_answers(model, tokenizer, prompts)
    for prompt, (found,) in zip(prompts, together, strict=True):
        expected = answer_ids(tokenizer, prompt)
        whole = negative_log_likelihood(model, Prompt(prompt.input_ids + expected, None))
        assert found.nll == pytest.approx(whole[-len(expected) :].tolist(), rel=1e-4, abs=1e-5)
    own = [generated(model, tokenizer, asking(prompt.input_ids)) for prompt in prompts]
    assert answers(model, tokenizer, prompts, label="") == own
    assert answers(model, tokenizer, prompts, label="", chunk=7) == own


def test_ranges_of_the_prompt_itself_are_answers_too() -> None:
    model, tokenizer = tiny("llama"), byte_level()
    end = tokenizer("#%+", add_special_tokens=False)["input_ids"]
    ids = (*random.Random(1).choices(range(3, 90), k=57), *end)
    prompt = asking(ids, scored=((20, 23), (1, 2), (50, 60)))
    found = forced_answers(model, tokenizer, [prompt])[0]
    losses = negative_log_likelihood(model, Prompt(ids, None)).tolist()
    assert [len(one.nll) for one in found[:3]] == [3, 1, 10]
    expected = losses[19:22] + losses[:1] + losses[49:]
    assert [x for one in found[:3] for x in one.nll] == pytest.approx(expected, rel=1e-4)
    assert found[3:] == forced_answers(model, tokenizer, [asking(ids)])[0]
    assert len(forced_answers(model, tokenizer, [replace(prompt, answer=None, finds=())])[0]) == 3


def test_a_task_may_allow_longer_answers() -> None:
    model, tokenizer = tiny("llama"), byte_level()
    lengths = []

    class Counted:
        pad_token_id, eos_token_id = None, None
        __call__ = staticmethod(tokenizer.__call__)

        @staticmethod
        def decode(ids: Any, skip_special_tokens: bool) -> str:
            lengths.append(len(ids))
            return ""

    for new_tokens in (None, 9):
        answer(model, Counted(), Prompt((5, 6, 7), "wx", new_tokens=new_tokens))
    short = len(tokenizer("wx", add_special_tokens=False)["input_ids"]) + 2
    assert lengths[1] in range(1, 10) and lengths[0] <= short


def test_a_forced_choice_compares_eight_at_most() -> None:
    many = Prompt((1,), "last", choices=(*"abcdefghij", "last"))
    assert compared(many) == (*"abcdefg", "last")


def test_no_space_comes_twice() -> None:
    tokenizer = byte_level()
    ids = tuple(tokenizer("The key is ", add_special_tokens=False)["input_ids"])
    assert tokenizer.decode(answer_ids(tokenizer, Prompt(ids, "12"))) == "12"
    assert tokenizer.decode(answer_ids(tokenizer, Prompt(ids[:-1], "12"))) == " 12"


@pytest.mark.parametrize(
    "wrong", [{"turn": 3}, {"turn": -1}, {"scored": ((0, 1),)}, {"scored": ((1, 4),)}]
)
def test_a_turn_or_a_range_beyond_the_prompt(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"turn must be|scored ranges"):
        Prompt((1, 2, 3), None, **wrong)
