"""Prints the digests of tasks' prompts: python -m tests.conformance.task_digests TASK..."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from profiling.prompts.prompt import digest
from tests.profiling.tokenizers import byte_level
from tests.typed import make_prompts


def digests(tasks: Sequence[str]) -> list[str]:
    tokenizer = byte_level()
    prompts = (make_prompts(task, tokenizer, length=2600, samples=1, seed=5) for task in tasks)
    return [digest(each) for each in prompts]


if __name__ == "__main__":
    print(*digests(sys.argv[1:]))
