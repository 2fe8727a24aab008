"""The prompts of a search: how many are held out, and that the default tasks serve long lengths."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from artifacts import HeadwiseError
from profiling.models.loading import load_tokenizer
from profiling.prompts.held_out import GATE_SET, Seen
from profiling.prompts.words import sentences
from search.model.acceptance import ROUNDS
from search.model.config import ModelSearch
from search.model.prompts import calibration_prompts, held_out_prompts, held_out_sets
from tests.profiling.tokenizers import byte_level

CONFIG = ModelSearch(model="m", out=Path("cfg.yaml"))
LOADED: Any = SimpleNamespace(tokenizer=byte_level())


def test_held_out_prompts_have_more_contexts_than_calibration():
    tasks = CONFIG.held_out_tasks
    assert tasks == ("facts", "prose")
    prompts = held_out_prompts(tasks, LOADED, length=4096, samples=2, seed=0, seen=Seen(), number=0)
    contexts = dict.fromkeys((prompt.task, prompt.context) for prompt in prompts)
    assert [task for task, _ in contexts] == ["facts"] * 8 + ["prose"] * 4


def test_question_file_holds_out_four_contexts_if_available(tmp_path):
    """Its answers are tested over contexts like generated ones; a text has two windows."""
    for lines, expected in ((40, 4), (3, 2), (1, 1)):
        file = tmp_path / f"{lines}.jsonl"
        prompts = [
            {"prompt": f"{number} {chr(97 + number % 26)} " * 99, "answer": str(number)}
            for number in range(lines)
        ]
        file.write_text("\n".join(map(json.dumps, prompts)) + "\n")
        task = f"jsonl:{file}"
        prompts = held_out_prompts(
            (task,), LOADED, length=256, samples=1, seed=0, seen=Seen(), number=0
        )
        assert len({prompt.context for prompt in prompts}) == expected


@pytest.mark.parametrize(("lengths", "expected"), [(40, 4), (5, 2)])
def test_held_out_hidden_key_prompts_are_fewer_in_a_short_file(lengths, expected, tmp_path):
    source = sentences(random.Random(0))
    text = "".join(f"{number}. {next(source)}" for number in range(4000))
    file = tmp_path / "book.txt"
    file.write_text(text[: lengths * 1024])
    config = CONFIG.replace(tasks=(f"passkey:{file}",))
    seen = Seen(calibration_prompts(config, LOADED, 1024))
    options: Any = {"length": 1024, "samples": 1, "seed": 0, "seen": seen}
    prompts = held_out_prompts(config.tasks, LOADED, number=GATE_SET, **options)
    assert len(prompts) == expected and not any(map(seen.overlaps, prompts))


def test_too_many_windows_are_rejected_before_any_work(monkeypatch):
    """Later sets, generated after a failure, are limited by the listed windows."""
    config = CONFIG.replace(tasks=("passkey",), length=1024)
    sets = list(held_out_sets(config, LOADED, 1024, Seen()))
    count = len(Seen(sets[0]).digests)
    two = len(Seen([*sets[0], *sets[1]]).digests)
    monkeypatch.setattr("search.model.prompts.MAX_WINDOWS", count - 1)
    with pytest.raises(
        HeadwiseError, match=rf"are {count} windows .* at most {count - 1} .* fewer --samples"
    ):
        next(held_out_sets(config, LOADED, 1024, Seen()))
    monkeypatch.setattr("search.model.prompts.MAX_WINDOWS", two)
    assert list(held_out_sets(config, LOADED, 1024, Seen())) == sets[:2]
    # The gate tries as many budgets, and headwise gate has a separate set.
    assert len(sets) == ROUNDS
    own = held_out_prompts(
        ("passkey",), LOADED, length=1024, samples=1, seed=0, seen=Seen(), number=GATE_SET
    )
    assert not {prompt.context for prompt in own} & {
        prompt.context for made in sets for prompt in made
    }


def test_length_too_short_for_default_tasks_error_names_sufficient_length():
    """The error names only tasks the user requested; at 4,096 tokens the defaults fit."""
    arguments: dict[str, Any] = {"samples": 1, "seed": 0, "seen": Seen(), "number": GATE_SET}
    for length in (256, 1500):
        says = rf"^--length {length} is too short for the held-out prompts; 4096 is enough$"
        with pytest.raises(HeadwiseError, match=says):
            held_out_prompts(CONFIG.held_out_tasks, LOADED, length=length, **arguments)
        with pytest.raises(HeadwiseError, match=rf"^length {length} is too small for facts: "):
            held_out_prompts(("facts",), LOADED, length=length, **arguments)
    says = r"^--length 256 is too short for the calibration prompts; 1024 is enough$"
    with pytest.raises(HeadwiseError, match=says):
        calibration_prompts(CONFIG, LOADED, 256)
    assert calibration_prompts(CONFIG, LOADED, 1024)
    with pytest.raises(HeadwiseError, match=r"^length 256 is too small for chain: "):
        calibration_prompts(CONFIG.replace(tasks=("chain",)), LOADED, 256)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.model
def test_default_tasks_generate_128k_token_prompts():
    """Calibration and a held-out set: no text is too short, and the two are disjoint."""
    config = ModelSearch(
        model="smollm2", out=Path("cfg.yaml"), length=131_072, beyond_positions=True
    )
    loaded: Any = SimpleNamespace(tokenizer=load_tokenizer("smollm2"))
    prompts = calibration_prompts(config, loaded, 131_072)
    assert list(dict.fromkeys(prompt.task for prompt in prompts)) == list(config.tasks)
    seen = Seen(prompts)
    before = Seen(prompts)
    first = next(held_out_sets(config, loaded, 131_072, seen))
    assert {len(prompt.input_ids) for prompt in [*prompts, *first]} == {131_072}
    assert {prompt.task for prompt in first} == {"facts", "prose"} == {*config.held_out_tasks}
    # Of questions that share a context one is enough.
    contexts = {prompt.context: prompt for prompt in first}.values()
    assert not any(map(before.overlaps, contexts)) and all(map(seen.overlaps, contexts))
