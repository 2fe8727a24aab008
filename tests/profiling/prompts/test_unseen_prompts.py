"""Prompts that a search saw are replaced, or counted where there are no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from profiling.prompts.held_out import Seen, overlap_sentence, unseen_prompts
from profiling.prompts.prompt import Prompt, make_prompts
from tests.profiling.stories import story
from tests.profiling.tokenizers import byte_level

LENGTH, SEED = 1000, 7


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_level()


def made(task: str, tokenizer: Any, samples: int, seed: int = SEED) -> list[Prompt]:
    return make_prompts(task, tokenizer, length=LENGTH, samples=samples, seed=seed)


def common(a: Prompt, b: Prompt) -> bool:
    """True if 100 tokens in a row are in both, compared as texts."""
    inside = bytes(t % 256 for t in b.input_ids)
    return any(
        bytes(t % 256 for t in a.input_ids[at : at + 100]) in inside for at in range(LENGTH - 99)
    )


def found(task: str, tokenizer: Any, samples: int, seen: list[Prompt]) -> tuple[list[Prompt], int]:
    made = unseen_prompts(
        task, tokenizer, length=LENGTH, samples=samples, seed=SEED, seen=Seen(seen)
    )
    prompts, overlapping, _ = made
    assert len(prompts) == samples and all(len(prompt.input_ids) == LENGTH for prompt in prompts)
    return prompts, overlapping


@pytest.mark.parametrize("search", range(4))
def test_windows_that_a_search_saw_are_replaced(
    search: int, tokenizer: Any, tmp_path: Path
) -> None:
    task = story(tmp_path / "a.txt", 40 * LENGTH)
    seen = made(task, tokenizer, 6, search)
    usual = made(task, tokenizer, 10)
    assert any(common(one, other) for one in usual for other in seen)
    prompts, overlapping = found(task, tokenizer, 10, seen)
    assert overlapping == 0 and not any(common(one, other) for one in prompts for other in seen)
    # Those that nobody saw stay, and what comes in their place says something else than they do.
    assert {p for p in usual if not any(common(p, other) for other in seen)} <= set(prompts)
    assert not any(common(a, b) for i, a in enumerate(prompts) for b in prompts[:i])
    assert (prompts, overlapping) == found(task, tokenizer, 10, seen)


def test_without_a_search_they_are_the_usual_ones(tokenizer: Any, tmp_path: Path) -> None:
    task = story(tmp_path / "a.txt", 12 * LENGTH)
    assert found(task, tokenizer, 5, []) == (made(task, tokenizer, 5), 0)


def test_a_text_that_is_too_short_says_how_many_were_seen(tokenizer: Any, tmp_path: Path) -> None:
    task = story(tmp_path / "a.txt", int(1.6 * LENGTH))
    seen = made(task, tokenizer, 1, 1)
    prompts, overlapping = found(task, tokenizer, 3, seen)
    assert overlapping == 3 and prompts == made(task, tokenizer, 3)
    told = overlap_sentence("text:a.txt", LENGTH, overlapping, 3)
    assert (
        told.startswith("3 of 3 prompts of text:a.txt at 1000 tokens overlap") and "\n" not in told
    )


def test_tasks_made_by_rule_are_left_as_they_are(tokenizer: Any) -> None:
    seen = made("passkey", tokenizer, 3)
    assert found("passkey", tokenizer, 3, seen) == (seen, 0)
