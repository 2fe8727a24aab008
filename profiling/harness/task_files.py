"""Our tasks as files of lm-evaluation-harness, and their scores there."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from artifacts import HeadwiseError
from artifacts.files import atomic_write, out_folder
from profiling.prompts.metrics import score
from profiling.prompts.prompt import Find, Prompt, Task, make_prompts
from profiling.prompts.tokens import Encoder
from profiling.quality.answers import new_tokens
from profiling.quality.forced import answer_ids, compared

PREFIX = "headwise"


class Written(NamedTuple):
    """Result of write_task.

    Attributes:
        names: of the tasks in the harness: its answers, and its forced choice where the prompts
            have one.
        changed: how many prompts have other tokens once they are text.
        turned: how many ask in a later turn, which the harness has no way to feed after its
            context.
    """

    names: tuple[str, ...]
    changed: int
    turned: int


def write_task(
    folder: Path, task: Task, tokenizer: Any, *, length: int, samples: int, seed: int
) -> Written:
    """Write NAME.jsonl, NAME.yaml and, with choices, NAME_choice.yaml into a folder.

    A question of a later turn is written behind its context, so that one prefill has both: the same
    answer under dense attention; patterns that look at the last queries know it.

    Args:
        folder: for the harness's --include_path.
        task: one whose answers follow the prompt.
        tokenizer: the model's.
        length, samples, seed: see make_prompts.

    Raises:
        HeadwiseError: see make_prompts; the prompts ask for no answer after their end, or for
            others inside; the folder cannot be made.
    """
    prompts = make_prompts(task, tokenizer, length=length, samples=samples, seed=seed)
    if why := _unfit(prompts):
        raise HeadwiseError(
            f"the task {task.kind!r} cannot be written for lm-evaluation-harness: {why}"
        )
    name = re.sub(r"\W+", "_", f"{PREFIX} {task.name} {length}")
    texts = [_text(tokenizer, prompt) for prompt in prompts]
    lines = [
        json.dumps(_document(tokenizer, prompt, text))
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    file = folder.absolute() / f"{name}.jsonl"
    configs = {name: _generated(max(new_tokens(tokenizer, prompt) for prompt in prompts))}
    if all(compared(prompt) for prompt in prompts):
        configs[f"{name}_choice"] = _CHOSEN
    with out_folder(folder):
        atomic_write(file, ("\n".join(lines) + "\n").encode())
        for each, fields in configs.items():
            atomic_write(folder / f"{each}.yaml", _config(each, file, fields).encode())
    encode = Encoder(tokenizer)
    changed = sum(
        (*encode.prefix, *encode(t)) != p.input_ids for t, p in zip(texts, prompts, strict=True)
    )
    return Written(tuple(configs), changed, sum(prompt.turn > 0 for prompt in prompts))


def process_results(doc: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Score an answer for the harness, from 0 to 1, by the metric of its task."""
    finds = tuple(Find(expected, (0, 0)) for expected in doc["finds"])
    prompt = Prompt(
        (0,),
        doc["answer"],
        finds,
        metric=doc["metric"],
        references=tuple(doc["references"]),
    )
    return {"score": score(prompt, results[0].strip())}


def process_choices(doc: dict[str, Any], results: Sequence[tuple[float, bool]]) -> dict[str, float]:
    """Score the log-likelihoods of compared answers for the harness: {"choice": 1 or 0}.

    The right one has to be the likeliest, a token on average.
    """
    losses = [
        -log_likelihood / tokens
        for (log_likelihood, _), tokens in zip(results, doc["tokens"], strict=True)
    ]
    right = losses.pop(doc["gold"])
    return {"choice": float(right < min(losses))}


def _unfit(prompts: Sequence[Prompt]) -> str | None:
    if any(prompt.scored for prompt in prompts):
        return "its answers stand inside the prompt"
    if any(prompt.answer is None for prompt in prompts):
        return "it asks for no answer"
    return None


def _text(tokenizer: Any, prompt: Prompt) -> str:
    """Decode a prompt without the tokenizer's prefix, which the harness's model adds again."""
    ids = prompt.input_ids[len(Encoder(tokenizer).prefix) :]
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def _document(tokenizer: Any, prompt: Prompt, text: str) -> dict[str, Any]:
    choices = compared(prompt)
    if prompt.answer in choices:
        right = choices.index(prompt.answer)
    else:
        right = None
    return {
        "prompt": text,
        "answer": prompt.answer,
        "metric": prompt.metric,
        "references": prompt.references,
        "finds": [find.expected for find in prompt.finds],
        # As the harness puts them behind the prompt, and how many tokens each has there.
        "compared": [f" {choice}" for choice in choices],
        "gold": right,
        "tokens": [
            len(answer_ids(tokenizer, replace(prompt, answer=choice, finds=())))
            for choice in choices
        ],
    }


def _generated(limit: int) -> dict[str, Any]:
    return {
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": [], "do_sample": False, "max_gen_toks": limit},
        "metric_list": [{"metric": "score", "aggregation": "mean", "higher_is_better": True}],
        "process_results": process_results,
    }


_CHOSEN: dict[str, Any] = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{prompt}}",
    "doc_to_choice": "compared",
    "doc_to_target": "gold",
    "target_delimiter": "",
    "metric_list": [{"metric": "choice", "aggregation": "mean", "higher_is_better": True}],
    "process_results": process_choices,
}


def _config(name: str, file: Path, fields: dict[str, Any]) -> str:
    # A tag of YAML that dump has no value for.
    function = f"process_results: !function {__name__}.{fields['process_results'].__name__}\n"
    fields_of_task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
        **{key: value for key, value in fields.items() if key != "process_results"},
        "metadata": {"version": 1.0},
    }
    return yaml.safe_dump(fields_of_task, sort_keys=False) + function
