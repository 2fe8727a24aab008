"""Held-out prompts share nothing with what a search looked at."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from artifacts import HeadwiseError, window_arrays
from profiling.prompts.held_out import Seen, held_out, seeded_prompts, unseen_prompts
from profiling.prompts.prompt import Prompt, make_prompts
from profiling.prompts.words import sentences
from tests.profiling.stories import story
from tests.profiling.tokenizers import byte_level

LENGTH = 1000


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_level()


def overlap(a: Prompt, b: Prompt) -> int:
    """Length of the longest common stretch from the second or last token of `a` in `b`, roughly."""
    inside = bytes(t % 256 for t in b.input_ids)
    return sum(
        bytes(t % 256 for t in a.input_ids[at : at + 100]) in inside
        for at in range(0, LENGTH - 100)
    )


@pytest.mark.parametrize("seed", range(6))
def test_windows_of_a_short_text_do_not_overlap(tokenizer: Any, tmp_path: Path, seed: int) -> None:
    task = story(tmp_path / "a.txt", 5 * LENGTH)
    seen = make_prompts(task, tokenizer, length=LENGTH, samples=1, seed=seed)
    found = held_out([task], tokenizer, length=LENGTH, samples=1, seed=seed, seen=Seen(seen))
    assert len(found) == 1 and overlap(found[0], seen[0]) == 0


def test_windows_of_other_seeds_are_others_and_what_was_seen_is_counted(
    tokenizer: Any, tmp_path: Path
) -> None:
    task = story(tmp_path / "a.txt", 40 * LENGTH)
    how: dict[str, Any] = {"length": LENGTH, "samples": 2}
    found = seeded_prompts(task, tokenizer, seeds=(5, 6, 7), seen=Seen(), **how)
    alone = unseen_prompts(task, tokenizer, seed=5, seen=Seen(), **how)
    assert found.prompts[:2] == alone.prompts and len(found.prompts) == 6 and found.overlapping == 0
    assert not any(overlap(a, b) for a in found.prompts[:4] for b in found.prompts[4:])
    short = story(tmp_path / "b.txt", 3 * LENGTH)
    seen = Seen(make_prompts(short, tokenizer, length=2 * LENGTH, samples=1, seed=0))
    assert (
        seeded_prompts(
            short, tokenizer, seeds=(5, 6), seen=seen, length=LENGTH, samples=1
        ).overlapping
        == 2
    )


@pytest.mark.parametrize("start", [0, 1, 63, 64, 100])
def test_127_tokens_in_a_row_are_known_wherever_they_lie(start: int) -> None:
    ids = tuple(range(400))
    seen = Seen([Prompt(input_ids=ids, answer=None)])

    def among_others(count: int) -> Prompt:
        return Prompt(
            input_ids=(*range(1000, 1037), *ids[start : start + count], *range(2000, 2100)),
            answer=None,
        )

    assert seen.overlaps(among_others(127))
    # Fewer hold a whole window that is remembered only where they lie so.
    assert seen.overlaps(among_others(126)) == (start % 64 != 1)


def test_windows_that_are_held_out_are_apart_from_one_another_too(
    tokenizer: Any, tmp_path: Path
) -> None:
    task = story(tmp_path / "a.txt", 7 * LENGTH)
    for seed in range(4):
        seen = make_prompts(task, tokenizer, length=LENGTH, samples=1, seed=seed)
        a, b = held_out([task], tokenizer, length=LENGTH, samples=2, seed=seed, seen=Seen(seen))
        assert overlap(a, b) == overlap(b, a) == 0 == overlap(a, seen[0])


def test_a_text_that_was_seen_whole_has_nothing_to_hold_out(tokenizer: Any, tmp_path: Path) -> None:
    task = story(tmp_path / "a.txt", 16 * LENGTH // 10)
    seen = make_prompts(task, tokenizer, length=LENGTH, samples=1, seed=0)
    with pytest.raises(
        HeadwiseError, match=r"text:a\.txt is too short to hold prompts out: 1 x 1000 tokens"
    ) as error:
        held_out([task], tokenizer, length=LENGTH, samples=1, seed=0, seen=Seen(seen))
    assert "\n" not in str(error.value)


def test_records_of_a_file_are_others(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "asked.jsonl"
    source = sentences(random.Random(1))
    texts = ["".join(f"{r}.{i} {next(source)}" for i in range(60)) for r in range(3)]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    for seed in range(5):
        seen = make_prompts(f"jsonl:{path}", tokenizer, length=LENGTH, samples=1, seed=seed)
        found = held_out(
            [f"jsonl:{path}"], tokenizer, length=LENGTH, samples=1, seed=seed, seen=Seen(seen)
        )
        assert found != seen
    everything = make_prompts(f"jsonl:{path}", tokenizer, length=LENGTH, samples=3, seed=0)
    with pytest.raises(HeadwiseError, match="too short"):
        held_out(
            [f"jsonl:{path}"], tokenizer, length=LENGTH, samples=1, seed=0, seen=Seen(everything)
        )


def test_tasks_made_by_rule_have_other_seeds_and_come_once(tokenizer: Any) -> None:
    tasks = ["passkey", "kv_retrieval", "passkey"]
    seen = [
        p for task in tasks for p in make_prompts(task, tokenizer, length=LENGTH, samples=2, seed=0)
    ]
    found = held_out(tasks, tokenizer, length=LENGTH, samples=2, seed=0, seen=Seen(seen))
    assert len(found) == 4 and not set(found) & set(seen)
    assert found == held_out(tasks, tokenizer, length=LENGTH, samples=2, seed=0, seen=Seen(seen))


@pytest.mark.parametrize("change", ["renamed", "edited"])
def test_a_renamed_and_an_edited_file_stay_honest(
    tokenizer: Any, tmp_path: Path, change: str
) -> None:
    """Seen windows are known by their tokens in the sidecar, not by a file's name."""
    task = story(tmp_path / "a.txt", 4 * LENGTH)
    seen = make_prompts(task, tokenizer, length=LENGTH, samples=1, seed=0)
    arrays = window_arrays(Seen(seen).digests)
    text = (tmp_path / "a.txt").read_text()
    (tmp_path / "b.txt").write_text(text if change == "renamed" else f"Edited. {text[3:]}")
    again = f"text:{tmp_path / 'b.txt'}"
    known = Seen.by([arrays])
    assert known.digests == Seen(seen).digests
    some = [
        p
        for s in range(8)
        for p in make_prompts(again, tokenizer, length=LENGTH, samples=1, seed=s)
    ]
    assert any(map(known.overlaps, some)), (
        "no window of the changed file would have been a test of anything"
    )
    for seed in range(4):
        found = held_out([again], tokenizer, length=LENGTH, samples=1, seed=seed, seen=known)
        assert overlap(found[0], seen[0]) == 0
