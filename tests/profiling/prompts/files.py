"""Files for tasks that take one, and a plain count of the prompts that overlap."""

from __future__ import annotations

import json
import random
from array import array
from functools import lru_cache
from pathlib import Path

from profiling.prompts.held_out import text_of
from profiling.prompts.prompt import Prompt
from profiling.prompts.words import sentences

# Length of prompts in tokens at which every task fits.
LONG = 2000


def file_task(kind: str, path: Path, lengths: int) -> str:
    """Write a file of text for `lengths` prompts, without repetition; return its task."""
    source = sentences(random.Random(0))
    text = "".join(f"{i}. {next(source)}" for i in range(lengths * LONG // 20))
    if kind == "jsonl":
        records = [text[at : at + 2 * LONG] for at in range(0, lengths * LONG, 2 * LONG)]
        path.write_text("\n".join(json.dumps({"text": record}) for record in records))
    else:
        path.write_text(text[: lengths * LONG])
    return f"{kind}:{path}"


@lru_cache(maxsize=24)
def runs(prompt: Prompt) -> set[bytes]:
    """All runs of 127 tokens of a prompt's text."""
    ids = array("L", text_of(prompt))
    data, size = ids.tobytes(), ids.itemsize
    return {data[size * at : size * (at + 127)] for at in range(len(ids) - 126)}


def count_overlaps(prompts: list[Prompt], other_prompts: list[Prompt]) -> int:
    """Number of prompts that share 127 tokens of text in a row with one of the others."""
    windows = set().union(*map(runs, other_prompts))
    return sum(not windows.isdisjoint(runs(prompt)) for prompt in prompts)
