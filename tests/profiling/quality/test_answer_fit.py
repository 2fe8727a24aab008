"""Answers under teacher forcing: the tokens that are compared, and what is made of them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from artifacts import HeadwiseError
from profiling.prompts.prompt import Find, Prompt, make_prompts
from profiling.quality.answers import answer, answer_fit, answer_ids, negative_log_likelihood
from tests.profiling.conftest import tiny
from tests.profiling.tokenizers import MAKERS, byte_level


class Copier(torch.nn.Module):
    """Gives each token's successor in `right` a logit of its own, and all others none."""

    def __init__(self, vocabulary: int, right: dict[int, float]) -> None:
        super().__init__()
        self.device = torch.device("cpu")
        self.vocabulary, self.right = vocabulary, right
        self.seen: list[int] = []

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False, logits_to_keep: int = 0) -> Any:
        self.seen = input_ids[0].tolist()
        logits = torch.zeros(1, len(self.seen), self.vocabulary)
        for at, token in self.right.items():
            logits[0, at, int(token)] = 100.0
        return SimpleNamespace(logits=logits[:, -logits_to_keep:])


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("task", ["kv_retrieval", "passkey", "line_retrieval", "two_stage_retrieval"])
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


def test_accuracy_and_nll_of_a_known_model() -> None:
    tokenizer = byte_level()
    prompt = Prompt(tuple(tokenizer("The key is", add_special_tokens=False)["input_ids"]), "wxyz")
    expected = answer_ids(tokenizer, prompt)
    start = len(prompt.input_ids) - 1
    assert len(expected) > 3
    # Sure of the first two tokens, and of a wrong one for the third; the others are as likely as any.
    model = Copier(1000, {start: expected[0], start + 1: expected[1], start + 2: 0})
    fit = answer_fit(model, tokenizer, prompt)
    assert model.seen == [*prompt.input_ids, *expected]
    assert fit.tokens == len(expected)
    assert fit.token_accuracy == pytest.approx(2 / len(expected))
    assert fit.nll == pytest.approx((100 + (len(expected) - 3) * math.log(1000)) / len(expected), rel=1e-3)


def test_the_nll_is_that_of_the_whole_sequences_end() -> None:
    model, tokenizer = tiny("llama"), byte_level()
    ids = tuple(tokenizer("#%+", add_special_tokens=False)["input_ids"])
    prompt = Prompt.to_find(ids, Find("wxyz", (0, 1)))
    expected = answer_ids(tokenizer, prompt)
    assert max(ids + expected) < 97
    whole = negative_log_likelihood(model, Prompt(ids + expected, None))
    assert answer_fit(model, tokenizer, prompt).nll == pytest.approx(whole[-len(expected) :].mean().item(), rel=1e-5)


def test_a_prompt_without_an_answer() -> None:
    with pytest.raises(HeadwiseError, match="without an answer has none to compare with"):
        answer_fit(tiny("llama"), byte_level(), Prompt((1, 2), None))


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
