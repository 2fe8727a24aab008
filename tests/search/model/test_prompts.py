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
from profiling.prompts.prompt import Prompt
from profiling.prompts.words import sentences
from search.model.config import ModelSearch
from search.model.prompts import NoMoreText, calibration_prompts, length_of
from search.model.proof import KINDS
from tests.profiling.tokenizers import byte_level
from tests.typed import HeldOut

CONFIG = ModelSearch(model="m", out=Path("cfg.yaml"))
LOADED: Any = SimpleNamespace(tokenizer=byte_level())


def held_out(tasks: tuple[str, ...], length: int, **changes: Any) -> HeldOut:
    options: dict[str, Any] = {"length": length, "samples": 1, "seed": 0, "seen": Seen()}
    return HeldOut(tasks, LOADED, **options | changes)


def contexts(prompts: list[Prompt]) -> list[str]:
    return [task for task, _ in dict.fromkeys((each.task, each.context) for each in prompts)]


def test_batches_have_contexts_of_the_tasks_of_their_kind():
    tasks = CONFIG.held_out_tasks
    assert list(map(str, tasks)) == ["facts", "prose"]
    batches = held_out(tasks, 4096, samples=2)
    first = batches.first
    text, answer = batches.take("text", 4), batches.take("answer", 4)
    assert [*text, *answer] == first
    assert contexts(text) == ["prose"] * 8 and contexts(answer) == ["facts"] * 8
    assert contexts(batches.take("answer", 1)) == ["facts"] * 2


def test_batches_share_no_context():
    batches = held_out(("passkey", "prose"), 1024)
    made = [batches.take(kind, 4) for _ in range(3) for kind in KINDS]
    seen = [each.context for batch in made for each in batch]
    assert len(set(seen)) == len(seen) == 24
    # The command headwise gate takes others than a search.
    gate = held_out(("passkey", "prose"), 1024, first=GATE_SET)
    assert not {each.context for each in gate.take("answer", 4)} & set(seen)


def test_question_file_holds_out_the_contexts_that_it_has(tmp_path):
    for lines, expected in ((40, 4), (3, 2), (1, 1)):
        file = tmp_path / f"{lines}.jsonl"
        prompts = [
            {"prompt": f"{number} {chr(97 + number % 26)} " * 99, "answer": str(number)}
            for number in range(lines)
        ]
        file.write_text("\n".join(map(json.dumps, prompts)) + "\n")
        batches = held_out((f"jsonl:{file}",), 256)
        assert len({prompt.context for prompt in batches.take("answer", 4)}) == expected


@pytest.mark.parametrize(("lengths", "expected"), [(40, 4), (5, 2)])
def test_held_out_hidden_key_prompts_are_fewer_in_a_short_file(lengths, expected, tmp_path):
    source = sentences(random.Random(0))
    text = "".join(f"{number}. {next(source)}" for number in range(4000))
    file = tmp_path / "book.txt"
    file.write_text(text[: lengths * 1024])
    config = CONFIG.replace(tasks=(f"passkey:{file}",))
    calibration = Seen(calibration_prompts(config, LOADED, 1024))
    batches = held_out(config.tasks, 1024, seen=Seen(digests=calibration.digests))
    prompts = batches.take("answer", 4)
    assert len(prompts) == expected and not any(map(calibration.overlaps, prompts))


def test_text_that_ends_has_no_further_batch(tmp_path):
    file = tmp_path / "book.txt"
    file.write_text("".join(f"{number}. " for number in range(2000))[: 5 * 1024])
    batches = held_out((f"text:{file}",), 1024)
    assert len(batches.take("text", 4)) == 4 and batches.take("text", 4) == []


def test_round_without_prompts_of_one_task_is_refused(tmp_path):
    """The other tasks of its kind would hide a text that has ended."""
    file = tmp_path / "book.txt"
    file.write_text("".join(f"{number}. " for number in range(2000))[: 5 * 1024])
    batches = held_out(("prose", f"text:{file}", "passkey"), 1024)
    assert batches.kinds == KINDS
    first = {prompt.task for prompt in batches.take("text", 4, every=True)}
    assert first == {"prose", "text:book.txt"}
    with pytest.raises(NoMoreText, match=r"^text:book\.txt has no text left .*; take a longer"):
        batches.take("text", 4, every=True)
    # A further look of a round is measured on the other texts.
    assert {prompt.task for prompt in batches.take("text", 4)} == {"prose"}


def test_too_many_windows_are_rejected_before_any_work(monkeypatch):
    """Later batches are limited by the listed windows, too."""
    batches = held_out(("passkey",), 1024)
    first, second = (batches.take("answer", 4) for _ in range(2))
    count = len(Seen(first).digests)
    two = len(Seen([*first, *second]).digests)
    monkeypatch.setattr("search.model.prompts.MAX_WINDOWS", count - 1)
    with pytest.raises(
        HeadwiseError, match=rf"are {count} windows .* at most {count - 1} .* fewer --samples"
    ):
        held_out(("passkey",), 1024)
    monkeypatch.setattr("search.model.prompts.MAX_WINDOWS", two)
    batches = held_out(("passkey",), 1024)
    assert [batches.take("answer", 4) for _ in range(3)] == [first, second, []]
    with pytest.raises(NoMoreText, match=rf"at most {two} windows .* fewer --samples or a shorter"):
        batches.take("answer", 4, every=True)


def test_length_too_short_for_default_tasks_error_names_sufficient_length():
    """The error names only tasks the user requested; at 2,048 tokens the defaults fit."""
    for length in (256, 1100):
        says = rf"^--length {length} is too short for the held-out prompts; 2048 is enough$"
        with pytest.raises(HeadwiseError, match=says):
            held_out(CONFIG.held_out_tasks, length)
        with pytest.raises(HeadwiseError, match=rf"^length {length} is too small for facts: "):
            held_out(("facts",), length)
    says = r"^--length 256 is too short for the calibration prompts; 1024 is enough$"
    with pytest.raises(HeadwiseError, match=says):
        calibration_prompts(CONFIG, LOADED, 256)
    assert calibration_prompts(CONFIG, LOADED, 1024)
    with pytest.raises(HeadwiseError, match=r"^length 256 is too small for chain: "):
        calibration_prompts(CONFIG.replace(tasks=("chain",)), LOADED, 256)


def test_dense_tail_of_the_whole_default_length_is_refused():
    """The default length is known once the model is."""
    model: Any = SimpleNamespace(name="m", max_positions=1024)
    assert length_of(CONFIG.replace(dense_tail=1023), model) == 1024
    says = r"^--dense-tail must be below the --length of 1024, got 2000: every query would be dense"
    with pytest.raises(HeadwiseError, match=says):
        length_of(CONFIG.replace(dense_tail=2000), model)


def test_two_files_of_one_name_are_refused(tmp_path):
    files = [tmp_path / folder / "own.txt" for folder in ("a", "b")]
    for file in files:
        file.parent.mkdir()
        file.write_text("".join(f"{number}. " for number in range(2000)))
    with pytest.raises(
        HeadwiseError, match=r"^--task has two tasks text:own\.txt: their files need"
    ):
        held_out([f"text:{file}" for file in files], 1024)
    twice = (files[0], tmp_path / "a" / ".." / "a" / "own.txt")
    assert len(held_out([f"text:{file}" for file in twice], 1024).tasks) == 1


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
    assert list(dict.fromkeys(prompt.task for prompt in prompts)) == [
        task.name for task in config.tasks
    ]
    seen = Seen(prompts)
    before = Seen(prompts)
    sizes = {"length": 131_072, "samples": 1, "seed": 0}
    first = HeldOut(config.held_out_tasks, loaded, **sizes, seen=seen).first
    assert {len(prompt.input_ids) for prompt in [*prompts, *first]} == {131_072}
    asked = {task.name for task in config.held_out_tasks}
    assert {prompt.task for prompt in first} == {"facts", "prose"} == asked
    # Of questions that share a context one is enough.
    contexts = {prompt.context: prompt for prompt in first}.values()
    assert not any(map(before.overlaps, contexts)) and all(map(seen.overlaps, contexts))
