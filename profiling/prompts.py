"""Calibration and test prompts: seeded, of exact length in tokens, the same in every process.

Tasks: key-value retrieval over UUIDs ("Lost in the Middle", Liu et al. 2023, section 3; MInference's
calibration), pass key retrieval (Mohtashami & Jaggi 2023), line retrieval (LongEval, Li et al. 2023), two-stage
retrieval (OmniKV, appendix A) and multi-hop questions, whose answers need two finds, windows of a text, prompts of a
JSON lines file.
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
class Find:
    """One thing that an answer takes out of the prompt.

    expected: the text that a right greedy answer has for it, its leading space included.
    span: half-open range of token positions of the block that says it.
    lead: what leads on to it from the find before it; empty for the first, for which the prompt's end asks.
    """

    expected: str
    span: tuple[int, int]
    lead: str = ""


@dataclass(frozen=True)
class Prompt:
    """Token ids, special tokens included, and what a right greedy answer starts with, where that is known.

    finds: where in the prompt the answer lies, in the order in which it is put together; empty where unknown.
    """

    input_ids: tuple[int, ...]
    answer: str | None
    finds: tuple[Find, ...] = ()

    @classmethod
    def to_find(cls, input_ids: tuple[int, ...], *finds: Find) -> Prompt:
        """A prompt whose answer is what it takes to find, in turn."""
        return cls(input_ids, "".join(find.lead + find.expected for find in finds).strip(), finds)


@dataclass(frozen=True)
class Task:
    """What to make prompts of; `name` is the same on every machine: of the file it has the last part only."""

    kind: str
    file: Path | None = None

    @property
    def name(self) -> str:
        return self.kind if self.file is None else f"{self.kind}:{self.file.name}"


# Whether a kind takes a file: "no", "may" or "must".
_TAKES_FILE = {
    "kv_retrieval": "no",
    "passkey": "may",
    "line_retrieval": "no",
    "two_stage_retrieval": "no",
    "multi_hop": "may",
    "text": "must",
    "jsonl": "must",
}
TASKS = (
    "kv_retrieval, passkey, passkey:FILE, line_retrieval, two_stage_retrieval, multi_hop, multi_hop:FILE, "
    "text:FILE, jsonl:FILE"
)


def parse_task(text: str) -> Task:
    """Read a task as TASKS lists them, such as `kv_retrieval` or `passkey:FILE`.

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
    from profiling.hops import multi_hop
    from profiling.lines import line_retrieval, two_stage_retrieval
    from profiling.retrieval import kv_retrieval, passkey
    from profiling.texts import lines, windows

    task = parse_task(task) if isinstance(task, str) else task
    for name, value in (("length", length), ("samples", samples)):
        if value < 1:
            raise HeadwiseError(f"{name} must be at least 1, got {value}")
    makers = {
        "kv_retrieval": kv_retrieval,
        "passkey": passkey,
        "line_retrieval": line_retrieval,
        "two_stage_retrieval": two_stage_retrieval,
        "multi_hop": multi_hop,
        "text": windows,
        "jsonl": lines,
    }
    prompts = makers[task.kind](Encoder(tokenizer), task.file, length, samples, seed)
    assert len(prompts) == samples and all(len(prompt.input_ids) == length for prompt in prompts)
    return prompts


def digest(prompts: Sequence[Prompt]) -> str:
    """sha256 over the ids and answers, in hexadecimal."""
    content = [[list(prompt.input_ids), prompt.answer] for prompt in prompts]
    return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()
