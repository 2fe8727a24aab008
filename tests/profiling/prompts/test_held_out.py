"""Held-out prompts share nothing with what a search looked at, or say how many do."""

from __future__ import annotations

import json
import random
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from artifacts import HeadwiseError, window_arrays
from profiling.prompts import held_out as module
from profiling.prompts.held_out import GATE_SET, Seen, seeded_prompts, text_of, unseen_prompts
from profiling.prompts.prompt import KINDS, Prompt, make_prompts
from profiling.prompts.words import sentences
from tests.profiling.tokenizers import byte_level, metaspace

LENGTH = 1000
# Into which every task goes.
LONG = 3000
# Every task that takes a file.
OF_FILES = [name for name, kind in KINDS.items() if kind.takes_file != "no"]


@pytest.fixture(scope="module")
def tokenizer():
    return byte_level()


def story(path: Path, characters: int) -> str:
    """Write a text in which no stretch comes twice; return the task of its windows."""
    source = sentences(random.Random(0))
    path.write_text("".join(f"{i}. {next(source)}" for i in range(4000))[:characters])
    return f"text:{path}"


def common(a: Prompt, b: Prompt) -> bool:
    """True if 100 tokens in a row are in both, compared as bytes."""
    own, inside = (bytes(token % 256 for token in prompt.input_ids) for prompt in (a, b))
    return any(own[at : at + 100] in inside for at in range(LENGTH - 99))


def prompts_of(task: str, tokenizer: Any, samples: int = 1, seed: int = 0) -> list[Prompt]:
    return make_prompts(task, tokenizer, length=LENGTH, samples=samples, seed=seed)


def held_out(task: str, tokenizer: Any, samples: int, seed: int, seen: Seen) -> list[Prompt]:
    return module.held_out([task], tokenizer, length=LENGTH, samples=samples, seed=seed, seen=seen)


def test_windows_of_a_short_text_do_not_overlap(tokenizer, tmp_path):
    for lengths, samples, seed in ((5, 1, 0), (5, 1, 1), (7, 2, 0), (7, 2, 1)):
        task = story(tmp_path / "a.txt", lengths * LENGTH)
        seen = prompts_of(task, tokenizer, seed=seed)
        prompts = held_out(task, tokenizer, samples, seed, Seen(seen))
        assert len(prompts) == samples and not any(common(each, seen[0]) for each in prompts)
        assert not common(prompts[0], prompts[-1]) or samples == 1


def test_windows_of_other_seeds_are_others_and_what_was_seen_is_counted(tokenizer, tmp_path):
    task = story(tmp_path / "a.txt", 40 * LENGTH)
    asked = {"length": LENGTH, "samples": 2}
    several = seeded_prompts(task, tokenizer, seeds=range(5, 10), seen=Seen(), **asked)
    alone = unseen_prompts(task, tokenizer, seed=5, seen=Seen(), **asked)
    assert several.prompts[:2] == alone.prompts and several.overlapping == 0
    by_seed = [several.prompts[at : at + 2] for at in range(0, 10, 2)]
    for first, second in combinations(by_seed, 2):
        assert not any(common(a, b) for a in first for b in second)
    short = story(tmp_path / "b.txt", 3 * LENGTH)
    seen = Seen(make_prompts(short, tokenizer, length=2 * LENGTH, samples=1, seed=0))
    asked = {"seeds": (5, 6), "seen": seen, "length": LENGTH, "samples": 1}
    assert seeded_prompts(short, tokenizer, **asked).overlapping == 2


@pytest.mark.parametrize("start", [0, 1, 63, 64])
def test_127_tokens_in_a_row_are_known_wherever_they_lie(start):
    ids = tuple(range(400))
    seen = Seen([Prompt(input_ids=ids, answer=None)])

    def among_others(count):
        shared = ids[start : start + count]
        return Prompt((*range(1000, 1037), *shared, *range(2000, 2100)), None)

    assert seen.overlaps(among_others(127))
    # Fewer hold a whole window that is remembered only where they lie so.
    assert seen.overlaps(among_others(126)) == (start % 64 != 1)


def test_a_text_that_was_seen_whole_has_nothing_to_hold_out(tokenizer, tmp_path):
    task = story(tmp_path / "a.txt", 16 * LENGTH // 10)
    seen = Seen(prompts_of(task, tokenizer))
    with pytest.raises(HeadwiseError, match=r"text:a\.txt is too short .*: 1 x 1000 tokens"):
        held_out(task, tokenizer, 1, 0, seen)
    unseen = unseen_prompts(task, tokenizer, length=LENGTH, samples=3, seed=0, seen=seen)
    assert unseen.overlapping == 3 and unseen.prompts == prompts_of(task, tokenizer, 3)


def test_prompts_that_are_held_out_are_apart_from_one_another(tokenizer, tmp_path):
    """A text of three windows, one of them seen: two others could only overlap."""
    task = story(tmp_path / "a.txt", 4 * LENGTH)
    seen = Seen(prompts_of(task, tokenizer))
    assert len(held_out(task, tokenizer, 1, 0, seen)) == 1
    with pytest.raises(HeadwiseError, match="too short to hold prompts out: 2 x 1000 tokens"):
        held_out(task, tokenizer, 2, 0, seen)


def test_records_of_a_file_are_others(tokenizer, tmp_path):
    path = tmp_path / "asked.jsonl"
    source = sentences(random.Random(1))
    texts = ["".join(f"{r}.{i} {next(source)}" for i in range(60)) for r in range(3)]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    task = f"jsonl:{path}"
    for seed in range(5):
        seen = prompts_of(task, tokenizer, seed=seed)
        assert held_out(task, tokenizer, 1, seed, Seen(seen)) != seen
    with pytest.raises(HeadwiseError, match="too short"):
        held_out(task, tokenizer, 1, 0, Seen(prompts_of(task, tokenizer, 3)))


def test_tasks_made_by_rule_have_other_seeds_and_come_once(tokenizer):
    tasks = ["passkey", "kv_retrieval", "passkey"]
    seen = [prompt for task in tasks for prompt in prompts_of(task, tokenizer, 2)]
    asked = {"length": LENGTH, "samples": 2, "seed": 0, "seen": Seen(seen)}
    prompts = module.held_out(tasks, tokenizer, **asked)
    assert len(prompts) == 4 and not set(prompts) & set(seen)
    assert prompts == module.held_out(tasks, tokenizer, **asked)
    # Where prompts are only to be unseen, they are left as they are.
    made = unseen_prompts("passkey", tokenizer, **asked)
    assert (made.prompts, made.overlapping) == (seen[:2], 0)


def test_a_file_that_is_renamed_and_edited_stays_honest(tokenizer, tmp_path):
    """Seen windows are known by their tokens in the sidecar, not by a file's name."""
    task = story(tmp_path / "a.txt", 4 * LENGTH)
    seen = prompts_of(task, tokenizer)
    text = (tmp_path / "a.txt").read_text()
    (tmp_path / "b.txt").write_text(f"Edited. {text[3:]}")
    again = f"text:{tmp_path / 'b.txt'}"
    known = Seen.by([window_arrays(Seen(seen).digests)])
    assert known.digests == Seen(seen).digests
    windows = [prompts_of(again, tokenizer, seed=seed)[0] for seed in range(8)]
    assert any(map(known.overlaps, windows)), "no window would have been a test of anything"
    for seed in range(4):
        assert not common(held_out(again, tokenizer, 1, seed, known)[0], seen[0])


def test_windows_that_a_search_saw_are_replaced(tokenizer, tmp_path):
    task = story(tmp_path / "a.txt", 40 * LENGTH)
    seen = prompts_of(task, tokenizer, 6)
    usual = prompts_of(task, tokenizer, 10, 7)
    unseen = [each for each in usual if not any(common(each, other) for other in seen)]
    assert len(unseen) < len(usual)
    asked = {"length": LENGTH, "samples": 10, "seed": 7}
    made = unseen_prompts(task, tokenizer, seen=Seen(seen), **asked)
    assert made.overlapping == 0 and [len(each.input_ids) for each in made.prompts] == [LENGTH] * 10
    assert not any(common(each, other) for each in made.prompts for other in seen)
    # Those that nobody saw stay, and what comes in their place says something else than they do.
    assert set(unseen) <= set(made.prompts)
    assert not any(common(a, b) for i, a in enumerate(made.prompts) for b in made.prompts[:i])
    assert made == unseen_prompts(task, tokenizer, seen=Seen(seen), **asked)
    assert unseen_prompts(task, tokenizer, seen=Seen(), **asked).prompts == usual


def file_task(kind: str, path: Path, lengths: int) -> str:
    """Write a file of so many prompts in which no stretch comes twice; return its task."""
    source = sentences(random.Random(0))
    text = "".join(f"{i}. {next(source)}" for i in range(lengths * LONG // 20))
    if kind == "jsonl":
        records = [text[at : at + 2 * LONG] for at in range(0, lengths * LONG, 2 * LONG)]
        path.write_text("\n".join(json.dumps({"text": record}) for record in records))
    else:
        path.write_text(text[: lengths * LONG])
    return f"{kind}:{path}"


def runs(prompt: Prompt) -> set[tuple[int, ...]]:
    """All runs of 127 tokens of a prompt's text."""
    ids = text_of(prompt)
    return {ids[at : at + 127] for at in range(len(ids) - 126)}


def count_overlaps(prompts: list[Prompt], others: list[Prompt]) -> int:
    """Number of prompts that share 127 tokens of text in a row with one of the others."""
    known = set().union(*map(runs, others))
    return sum(not known.isdisjoint(runs(prompt)) for prompt in prompts)


@pytest.mark.parametrize("kind", OF_FILES)
def test_text_spans_of_a_file_task_are_one_window_of_the_file(kind, tokenizer, tmp_path):
    task = file_task(kind, tmp_path / "a.txt", 8)
    text = (tmp_path / "a.txt").read_text()
    for prompt in make_prompts(task, tokenizer, length=LONG, samples=3, seed=0):
        window = tokenizer.decode(text_of(prompt))
        assert len(window) > LONG // 2 and window in text
        inside = {at for span in prompt.text_spans for at in range(*span)}
        rest = [token for at, token in enumerate(prompt.input_ids) if at not in inside]
        other = tokenizer.decode(rest)
        assert not any(other[at : at + 30] in text for at in range(len(other) - 29))


@pytest.mark.parametrize("kind", OF_FILES)
def test_held_out_prompts_of_a_long_file_share_nothing_with_other_sets(kind, tokenizer, tmp_path):
    task = file_task(kind, tmp_path / "a.txt", 30)
    asked = {"length": LONG, "samples": 2}
    sets = [make_prompts(task, tokenizer, seed=0, **asked)]
    seen = Seen(sets[0])
    for number in (0, 1, GATE_SET):
        sets.append(module.held_out([task], tokenizer, seed=0, seen=seen, number=number, **asked))
        seen.add(*sets[-1])
    made = seeded_prompts(task, tokenizer, seeds=(0, 1), seen=seen, **asked)
    assert made.overlapping == 0
    sets.append(made.prompts)
    for first, second in combinations(sets, 2):
        assert count_overlaps(first, second) == 0
    assert all(count_overlaps([a], [b]) == 0 for a, b in combinations(made.prompts, 2))


@pytest.mark.parametrize("kind", OF_FILES)
def test_seeded_prompts_of_a_short_file_count_all_overlaps(kind, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_ROUNDS", 4)
    task = file_task(kind, tmp_path / "a.txt", 6)
    seen = make_prompts(task, tokenizer, length=LONG, samples=2, seed=0)
    asked = {"length": LONG, "samples": 2, "seeds": (0, 1)}
    made = seeded_prompts(task, tokenizer, seen=Seen(seen), **asked)
    assert made.overlapping == count_overlaps(made.prompts, seen)
    whole = Seen(make_prompts(task, tokenizer, length=LONG, samples=3, seed=3) + seen)
    assert seeded_prompts(task, tokenizer, seen=whole, **asked).overlapping > 0


def test_overlaps_are_the_same_at_every_depth_of_a_hidden_key(tokenizer, tmp_path):
    file = file_task("passkey", tmp_path / "a.txt", 6).partition(":")[2]
    seen = Seen(make_prompts(f"text:{file}", tokenizer, length=LONG, samples=1, seed=0))
    asked = {"length": LONG, "samples": 1, "seeds": (0, 1), "seen": seen}
    made = [
        seeded_prompts(f"passkey@depth={depth}:{file}", tokenizer, **asked) for depth in (0, 0.3, 1)
    ]
    assert len({tuple(map(text_of, each.prompts)) for each in made}) == 1


@pytest.mark.parametrize("kind", [name for name in OF_FILES if name != "jsonl"])
def test_overlaps_are_found_across_tasks_of_one_file(kind, tmp_path):
    tokenizer = metaspace()
    file = file_task(kind, tmp_path / "a.txt", 4).partition(":")[2]
    whole = make_prompts(f"text:{file}", tokenizer, length=2 * LONG, samples=1, seed=0)
    task = f"{kind}:{file}"
    found = 0
    for seed in range(4):
        (prompt,) = make_prompts(task, tokenizer, length=LONG, samples=1, seed=seed)
        (window,) = make_prompts(f"text:{file}", tokenizer, length=LONG, samples=1, seed=seed)
        for own, theirs in ((prompt, whole), (window, [prompt])):
            if count_overlaps([own], theirs):
                found += 1
                assert Seen(theirs).overlaps(own)
    assert found


@pytest.mark.parametrize("kind", ["niah_single_1", "vt"])
def test_repeated_filler_of_a_generated_task_is_no_overlap(kind, tokenizer):
    seen, other = prompts_of(kind, tokenizer, 2)
    assert count_overlaps([other], [seen]) == 1
    asked = {"length": LENGTH, "samples": 2, "seed": 1, "seen": Seen([seen])}
    assert unseen_prompts(kind, tokenizer, **asked).overlapping == 0
    assert len(module.held_out([kind], tokenizer, **asked)) == 2
