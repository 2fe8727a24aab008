"""Files of suites and questions with random damage: prompts that can be scored, or one line that says what is wrong."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from artifacts import HeadwiseError
from profiling.prompts.metrics import score
from profiling.prompts.prompt import make_prompts
from tests.profiling.prompts.test_questions import hotpot, lines, squad
from tests.profiling.prompts.test_suites import OPTIONS, infinitebench, longbench, ruler
from tests.profiling.tokenizers import byte_level

FILES = {
    "longbench": [longbench(), longbench("trec", all_classes=["a", "the dog"])],
    "infinitebench@task=code_debug": [infinitebench(options=OPTIONS)],
    "infinitebench@task=math_calc": [infinitebench(answer=[1, 2])],
    "infinitebench@task=code_run": [infinitebench(answer=3, input="What is f(3)?")],
    "infinitebench@task=longbook_sum_eng": [infinitebench()],
    "ruler@task=vt": [ruler()],
    "qa_1": [json.loads(line) for line in lines().split("\n")],
    "qa_2": [hotpot()],
    "qa_1@": [squad()],
}
ODD = [
    None,
    3,
    -1.5,
    True,
    "",
    [],
    {},
    [None],
    ["x", 3],
    {"text": 3},
    {"title": 1, "sentences": 2},
    "\ud83d",
    float("nan"),
]


def changed(value: Any, rng: random.Random) -> Any:
    """The value with some of its parts left out and some replaced."""
    if rng.random() < 0.06:
        return rng.choice(ODD)
    if isinstance(value, dict):
        return {name: changed(part, rng) for name, part in value.items() if rng.random() > 0.03}
    return [changed(part, rng) for part in value] if isinstance(value, list) else value


def damaged(text: bytes, rng: random.Random) -> bytes:
    """The text cut off, or with some bytes replaced or left out."""
    at = rng.randrange(len(text))
    return rng.choice([text[:at], text[:at] + rng.randbytes(2) + text[at + 2 :], text[:at] + text[at + 9 :]])


@pytest.mark.parametrize("task", FILES)
def test_damage_ends_in_a_score_or_in_one_line(tmp_path: Path, task: str) -> None:
    rng, tokenizer, file = random.Random(task), byte_level(bos=True), tmp_path / "file.jsonl"
    outcomes = set()
    for turn in range(60):
        records = FILES[task]
        text = "\n".join(json.dumps(changed(record, rng) if turn % 3 else record) for record in records).encode()
        file.write_bytes(text if turn % 3 else damaged(text, rng))
        try:
            (prompt,) = make_prompts(
                f"{task.removesuffix('@')}:{file}", tokenizer, length=600, samples=1, seed=turn, shorter=True
            )
        except HeadwiseError as error:
            assert "\n" not in str(error) and len(str(error)) < 400 and str(tmp_path) not in str(error)
            outcomes.add("error")
        else:
            assert all(0 <= score(prompt, given) <= 1 for given in ("", "the answer is B", "1 2 3", str(prompt.answer)))
            outcomes.add("prompt")
    assert outcomes == {"error", "prompt"}
