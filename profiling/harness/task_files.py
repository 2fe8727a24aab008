"""Our tasks as files of lm-evaluation-harness, and the score that the harness gives their answers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from artifacts import HeadwiseError
from artifacts.files import atomic_write, out_folder
from profiling.prompts.metrics import score
from profiling.prompts.prompt import Find, Prompt, Task, make_prompts
from profiling.prompts.tokens import Encoder
from profiling.quality.answers import new_tokens

PREFIX = "headwise"


def write_task(folder: Path, task: Task, tokenizer: Any, *, length: int, samples: int, seed: int) -> tuple[str, int]:
    """Write NAME.yaml and NAME.jsonl for one task at one length into a folder.

    Args:
        folder: for the harness's --include_path.
        task: one whose answers follow the prompt.
        tokenizer: the model's.
        length, samples, seed: see make_prompts.

    Returns:
        The task's name in the harness, and how many prompts have other tokens once they are text.

    Raises:
        HeadwiseError: see make_prompts; the prompts ask for no answer after their end; the folder cannot be
            made.
    """
    prompts = make_prompts(task, tokenizer, length=length, samples=samples, seed=seed, shorter=True)
    if why := _unfit(prompts):
        raise HeadwiseError(f"the task {task.kind!r} cannot be written for lm-evaluation-harness: {why}")
    name = re.sub(r"\W+", "_", f"{PREFIX} {task.name} {length}")
    texts = [_text(tokenizer, prompt) for prompt in prompts]
    lines = [json.dumps(_document(prompt, text)) for prompt, text in zip(prompts, texts, strict=True)]
    file = folder.absolute() / f"{name}.jsonl"
    limit = max(new_tokens(tokenizer, prompt) for prompt in prompts)
    with out_folder(folder):
        atomic_write(file, ("\n".join(lines) + "\n").encode())
        atomic_write(folder / f"{name}.yaml", _config(name, file, limit).encode())
    encode = Encoder(tokenizer)
    return name, sum((*encode.prefix, *encode(t)) != p.input_ids for t, p in zip(texts, prompts, strict=True))


def process_results(doc: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """What the harness calls for each answer: {"score": from 0 to 1}, by the metric that the task has here."""
    finds = tuple(Find(expected, (0, 0)) for expected in doc["finds"])
    prompt = Prompt(
        (0,),
        doc["answer"],
        finds,
        metric=doc["metric"],
        references=tuple(doc["references"]),
        choices=tuple(doc["choices"]),
    )
    return {"score": score(prompt, results[0].strip())}


def _unfit(prompts: Sequence[Prompt]) -> str | None:
    if any(prompt.turn for prompt in prompts):
        return "its questions come in a later turn"
    if any(prompt.scored for prompt in prompts):
        return "its answers stand inside the prompt"
    return "it asks for no answer" if any(prompt.answer is None for prompt in prompts) else None


def _text(tokenizer: Any, prompt: Prompt) -> str:
    """The prompt without what the tokenizer starts a sequence with, which the harness's model adds again."""
    ids = prompt.input_ids[len(Encoder(tokenizer).prefix) :]
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def _document(prompt: Prompt, text: str) -> dict[str, Any]:
    return {
        "prompt": text,
        "answer": prompt.answer,
        "metric": prompt.metric,
        "references": prompt.references,
        "choices": prompt.choices,
        "finds": [find.expected for find in prompt.finds],
    }


def _config(name: str, file: Path, limit: int) -> str:
    # A tag of YAML that dump has no value for.
    function = f"process_results: !function {__name__}.{process_results.__name__}\n"
    fields = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": [], "do_sample": False, "max_gen_toks": limit},
        "metric_list": [{"metric": "score", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1.0},
    }
    return yaml.safe_dump(fields, sort_keys=False) + function
