"""Quality of a model under whatever attention is applied to it: the loss of a text, and greedy
answers.

Shapes: S prompt length, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch

from profiling.progress import bar
from profiling.prompts.metrics import score
from profiling.prompts.prompt import Prompt
from profiling.quality.contexts import prefilled

# Logits turned to fp32 at once: V is large and the whole prompt's would be the biggest tensor of
# all.
_ROWS = 512
# Tokens that an answer may have beside the right one's.
_EXTRA = 2


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


def answer(
    model: Any, tokenizer: Any, prompt: Prompt, *, cache: Callable[[], Any] | None = None
) -> str:
    """The model's greedy continuation, of at most `new_tokens`.

    `cache` makes the cache to decode with; transformers' own if None.
    """
    return answers(model, tokenizer, [prompt], label="", cache=cache)[0]


@torch.no_grad()
def answers(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    *,
    label: str,
    cache: Callable[[], Any] | None = None,
) -> list[str]:
    """The greedy answers to all prompts, with progress; each has a cache of its own, a shared
    context one prefill."""
    # Generation feeds the last token of a later turn itself.
    later = {number: prompt for number, prompt in enumerate(prompts) if prompt.turn}
    before = [replace(p, input_ids=p.input_ids[:-1], turn=p.turn - 1) for p in later.values()]
    turns = [(number, None) for number in range(len(prompts)) if number not in later]
    held = ((list(later)[one.number], one.cache) for one in prefilled(model, before, cache=cache))
    found: dict[int, str] = {}
    for number, own in bar(chain(turns, held), desc=label, total=len(prompts)):
        made = own if own is not None or cache is None else cache()
        found[number] = _generated(model, tokenizer, prompts[number], made)
    return [found[number] for number in range(len(prompts))]


def _generated(model: Any, tokenizer: Any, prompt: Prompt, cache: Any) -> str:
    ids = torch.tensor([prompt.input_ids], device=model.device)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens(tokenizer, prompt),
        do_sample=False,
        past_key_values=cache,
        pad_token_id=tokenizer.pad_token_id
        if tokenizer.pad_token_id is not None
        else tokenizer.eos_token_id,
    )
    text: str = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    return text.strip()


def new_tokens(tokenizer: Any, prompt: Prompt) -> int:
    """How many tokens an answer may have: what the task allows, or as many as the expected one and
    a few more."""
    return (
        prompt.new_tokens
        or len(tokenizer(prompt.answer or "", add_special_tokens=False)["input_ids"]) + _EXTRA
    )


def ends(model: Any, tokenizer: Any) -> set[int]:
    """The tokens that end an answer."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    found = configured if isinstance(configured, list) else [configured]
    return {token for token in (*found, tokenizer.eos_token_id) if token is not None}


def is_right(prompt: Prompt, given: str) -> bool:
    """Whether an answer is fully right by the metric of its task; none is where no answer is
    known."""
    return prompt.answer is not None and score(prompt, given) == 1
