"""Quality of a model under whatever attention is applied to it: perplexity, answers, and how near it is to the answer.

Shapes: S prompt length, A answer length, V vocabulary.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from artifacts import HeadwiseError
from profiling.prompts.metrics import score
from profiling.prompts.prompt import Prompt
from profiling.prompts.tokens import Encoder, Ids

# Logits turned to fp32 at once: V is large and the whole prompt's would be the biggest tensor of all.
_ROWS = 512


@torch.no_grad()
def negative_log_likelihood(model: Any, prompt: Prompt) -> torch.Tensor:
    """-log p of each token of the prompt given those before it, (S - 1) fp32, in one prefill."""
    ids = torch.tensor([prompt.input_ids], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
    targets = ids[0, 1:]
    return torch.cat(
        [
            torch.nn.functional.cross_entropy(rows.float(), expected, reduction="none")
            for rows, expected in zip(logits.split(_ROWS), targets.split(_ROWS), strict=True)
        ]
    )


def perplexity(model: Any, prompts: Sequence[Prompt]) -> float:
    """exp of the mean negative log-likelihood over all tokens of all prompts."""
    return math.exp(torch.cat([negative_log_likelihood(model, prompt) for prompt in prompts]).mean().item())


@dataclass(frozen=True)
class AnswerFit:
    """How a model takes to the right answer, token by token, each after the right ones before it.

    tokens: how many the answer has.
    token_accuracy: the share of them that the model thinks likeliest; 1 where its greedy answer is the right one.
    nll: -log p of one of them on average, in nats.
    """

    tokens: int
    token_accuracy: float
    nll: float


@torch.no_grad()
def answer_fit(model: Any, tokenizer: Any, prompt: Prompt) -> AnswerFit:
    """How near the model is to the right answer under teacher forcing: one forward over prompt and answer, S + A.

    It tells methods apart where few or no greedy answers are right.

    Raises:
        HeadwiseError: the prompt says no answer.
    """
    expected = answer_ids(tokenizer, prompt)
    ids = torch.tensor([(*prompt.input_ids, *expected)], device=model.device)
    # The logits of the whole prompt would be the biggest tensor of all.
    few = "logits_to_keep" in inspect.signature(model.forward).parameters
    kept = {"logits_to_keep": len(expected) + 1} if few else {}
    logits = model(input_ids=ids, use_cache=False, **kept).logits[0, -len(expected) - 1 : -1].float()
    targets = ids[0, -len(expected) :]
    return AnswerFit(
        tokens=len(expected),
        token_accuracy=(logits.argmax(-1) == targets).float().mean().item(),
        nll=torch.nn.functional.cross_entropy(logits, targets).item(),
    )


def answer_ids(tokenizer: Any, prompt: Prompt) -> Ids:
    """The ids of the right answer as they follow the prompt's: tokenizers differ on what the start of a text is."""
    text = prompt.continuation
    before = tokenizer.decode(prompt.input_ids[-1:])[-1:]
    if text is None or not text.strip():
        raise HeadwiseError("a prompt without an answer has none to compare with")
    if before.isspace():
        text = text.lstrip()
    encode = Encoder(tokenizer)
    anchor, whole = encode.each([before, before + text])
    return whole[len(anchor) :] if before and whole[: len(anchor)] == anchor else encode(text)


@torch.no_grad()
def answer(
    model: Any, tokenizer: Any, prompt: Prompt, *, extra_tokens: int = 2, cache: Callable[[], Any] | None = None
) -> str:
    """The model's greedy continuation: as many tokens as the task allows, or as the expected answer has and a few more.

    `cache` makes the cache to decode with; transformers' own if None.
    """
    ids = torch.tensor([prompt.input_ids], device=model.device)
    wanted = len(tokenizer(prompt.answer or "", add_special_tokens=False)["input_ids"])
    limit = max(prompt.new_tokens or 0, wanted + extra_tokens)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=limit,
        do_sample=False,
        past_key_values=cache() if cache else None,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
    )
    text: str = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    return text.strip()


def is_right(prompt: Prompt, given: str) -> bool:
    """Whether an answer is fully right by the metric of its task; none is where no answer is known."""
    return prompt.answer is not None and score(prompt, given) == 1


def answers(
    model: Any, tokenizer: Any, prompts: Sequence[Prompt], *, label: str, cache: Callable[[], Any] | None = None
) -> list[str]:
    """The greedy answers to all prompts, with progress; each with a cache of its own, as `answer` says."""
    turns = tqdm(prompts, desc=label, disable=None, leave=False)
    return [answer(model, tokenizer, prompt, cache=cache) for prompt in turns]
