"""Calibration and test prompts: seeded, of exact length in tokens, the same in every process.

Tasks: key-value retrieval over UUIDs ("Lost in the Middle", Liu et al. 2023, section 3; MInference's
calibration), pass key retrieval (Mohtashami & Jaggi 2023), windows of a text, prompts of a JSON lines file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from artifacts import HeadwiseError
from artifacts.errors import shorten
from profiling.tokens import Encoder


@dataclass(frozen=True)
class Prompt:
    """Token ids, special tokens included, and what a right greedy answer starts with, where that is known."""

    input_ids: tuple[int, ...]
    answer: str | None


@dataclass(frozen=True)
class Task:
    """What to make prompts of; `name` is the same on every machine: of the file it has the last part only."""

    kind: str
    file: Path | None = None

    @property
    def name(self) -> str:
        return self.kind if self.file is None else f"{self.kind}:{self.file.name}"


# Whether a kind takes a file: "no", "may" or "must".
_TAKES_FILE = {"kv_retrieval": "no", "passkey": "may", "text": "must", "jsonl": "must"}
TASKS = "kv_retrieval, passkey, passkey:FILE, text:FILE, jsonl:FILE"


def parse_task(text: str) -> Task:
    """Read `kv_retrieval`, `passkey`, `passkey:FILE`, `text:FILE` or `jsonl:FILE`.

    Raises:
        HeadwiseError: none of these, or the file is not there.
    """
    kind, colon, file = text.partition(":")
    takes = _TAKES_FILE.get(kind)
    if takes is None or (colon and takes == "no"):
        raise HeadwiseError(f"unknown task {shorten(text)}; known: {TASKS}")
    if not file and (colon or takes == "must"):
        raise HeadwiseError(f"the task {kind!r} needs a file: {kind}:FILE")
    if not file:
        return Task(kind)
    path = Path(file).expanduser()
    if not path.is_file():
        wrong = "is not a file" if path.exists() else "does not exist"
        raise HeadwiseError(f"the file {shorten(file)} of the task {kind!r} {wrong}")
    return Task(kind, path)


def make_prompts(task: str | Task, tokenizer: Any, *, length: int, samples: int, seed: int) -> list[Prompt]:
    """Make `samples` prompts of exactly `length` tokens.

    Args:
        task: as parse_task reads it.
        tokenizer: any transformers tokenizer; what it starts a sequence with counts among the `length` tokens.
        length: in tokens.
        samples: how many prompts; different ones.
        seed: the same seed, tokenizer and file give the same prompts.

    Raises:
        HeadwiseError: unknown task; a file that is missing, empty, malformed or too short; a length that the
            question alone fills.
    """
    from profiling.retrieval import kv_retrieval, passkey
    from profiling.texts import lines, windows

    task = parse_task(task) if isinstance(task, str) else task
    for name, value in (("length", length), ("samples", samples)):
        if value < 1:
            raise HeadwiseError(f"{name} must be at least 1, got {value}")
    makers = {"kv_retrieval": kv_retrieval, "passkey": passkey, "text": windows, "jsonl": lines}
    made = makers[task.kind](Encoder(tokenizer), task.file, length, samples, seed)
    prompts = [Prompt(ids, answer) for ids, answer in made]
    assert len(prompts) == samples and all(len(prompt.input_ids) == length for prompt in prompts)
    return prompts


def digest(prompts: Sequence[Prompt]) -> str:
    """sha256 over the ids and answers, in hexadecimal."""
    content = [[list(prompt.input_ids), prompt.answer] for prompt in prompts]
    return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()
