"""Held-out prompts share nothing with the prompts of a search, or report the overlaps."""

from __future__ import annotations

import json
import random
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from artifacts import HeadwiseError, window_arrays
from profiling.prompts.held_out import GATE_SET, Seen, is_seed_of_search, text_of, unit_means, units
from profiling.prompts.prompt import KINDS, Prompt
from profiling.prompts.words import sentences
from tests import typed as module
from tests.profiling.prompts.files import LONG, count_overlaps, file_task
from tests.profiling.tokenizers import byte_level, metaspace
from tests.typed import make_prompts, seeded_prompts, unseen_prompts

LENGTH = 1000
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


def story_of(number: int) -> str:
    """A text of more than LENGTH tokens like no other one."""
    source = sentences(random.Random(number))
    return "".join(f"{number}.{i} {next(source)}" for i in range(60))


def common(a: Prompt, b: Prompt) -> bool:
    """True if 100 tokens in a row are in both, compared as bytes."""
    own, inside = (bytes(token % 256 for token in prompt.input_ids) for prompt in (a, b))
    return any(own[at : at + 100] in inside for at in range(LENGTH - 99))


def prompts_of(task: str, tokenizer: Any, samples: int = 1, seed: int = 0) -> list[Prompt]:
    return make_prompts(task, tokenizer, length=LENGTH, samples=samples, seed=seed)


def held_out(task: str, tokenizer: Any, samples: int, seed: int, seen: Seen) -> list[Prompt]:
    return module.held_out([task], tokenizer, length=LENGTH, samples=samples, seed=seed, seen=seen)


def test_seeds_of_a_search_are_those_of_its_held_out_prompts(tokenizer):
    options = {"length": LENGTH, "samples": 1, "seed": 3, "seen": Seen()}
    for number in (0, 1, GATE_SET):
        (prompt,) = module.held_out(["passkey"], tokenizer, number=number, **options)
        seed = 3 + module.held.SEED * (1 + number * module.held._STRIDE)
        assert prompts_of("passkey", tokenizer, seed=seed) == [prompt]
        assert is_seed_of_search(seed, 3) and not is_seed_of_search(seed, 4)
    assert is_seed_of_search(3, 3) and not is_seed_of_search(2, 3)


def test_seeded_prompts_differ_by_seed_and_count_overlaps(tokenizer, tmp_path):
    task = story(tmp_path / "a.txt", 40 * LENGTH)
    options = {"length": LENGTH, "samples": 2}
    several = seeded_prompts(task, tokenizer, seeds=range(5, 10), seen=Seen(), **options)
    alone = unseen_prompts(task, tokenizer, seed=5, seen=Seen(), **options)
    assert several.prompts[:2] == alone.prompts and several.overlapping == 0
    by_seed = [several.prompts[at : at + 2] for at in range(0, 10, 2)]
    for first, second in combinations(by_seed, 2):
        assert not any(common(a, b) for a in first for b in second)
    short = story(tmp_path / "b.txt", 3 * LENGTH)
    seen = Seen(make_prompts(short, tokenizer, length=2 * LENGTH, samples=1, seed=0))
    options = {"seeds": (5, 6), "seen": seen, "length": LENGTH, "samples": 1}
    assert seeded_prompts(short, tokenizer, **options).overlapping == 2


@pytest.mark.parametrize("start", [0, 1, 63, 64])
def test_seen_finds_127_tokens_at_any_offset(start):
    ids = tuple(range(400))
    seen = Seen([Prompt(input_ids=ids, answer=None)])

    def among_others(count):
        shared = ids[start : start + count]
        return Prompt((*range(1000, 1037), *shared, *range(2000, 2100)), None)

    assert seen.overlaps(among_others(127))
    # Fewer hold a whole window that is remembered only where they lie so.
    assert seen.overlaps(among_others(126)) == (start % 64 != 1)


def test_held_out_of_a_text_seen_whole_is_refused(tokenizer, tmp_path):
    task = story(tmp_path / "a.txt", 16 * LENGTH // 10)
    seen = Seen(prompts_of(task, tokenizer))
    with pytest.raises(HeadwiseError, match=r"text:a\.txt is too short .*: 1 x 1000 tokens"):
        held_out(task, tokenizer, 1, 0, seen)
    unseen = unseen_prompts(task, tokenizer, length=LENGTH, samples=3, seed=0, seen=seen)
    assert unseen.overlapping == 1 and unseen.prompts == prompts_of(task, tokenizer, 3)


def test_held_out_of_generated_tasks_uses_other_seeds(tokenizer):
    tasks = ["passkey", "kv_retrieval", "passkey"]
    seen = [prompt for task in tasks for prompt in prompts_of(task, tokenizer, 2)]
    options = {"length": LENGTH, "samples": 2, "seed": 0, "seen": Seen(seen)}
    prompts = module.held_out(tasks, tokenizer, **options)
    assert len(prompts) == 4 and not set(prompts) & set(seen)
    assert prompts == module.held_out(tasks, tokenizer, **options)
    # Where prompts are only to be unseen, they are left as they are.
    result = unseen_prompts("passkey", tokenizer, **options)
    assert (result.prompts, result.overlapping) == (seen[:2], 0)


def test_held_out_of_a_renamed_and_edited_file_is_disjoint(tokenizer, tmp_path):
    """Seen windows are known by their tokens in the sidecar, not by a file's name."""
    task = story(tmp_path / "a.txt", 4 * LENGTH)
    seen = prompts_of(task, tokenizer)
    text = (tmp_path / "a.txt").read_text()
    (tmp_path / "b.txt").write_text(f"Edited. {text[3:]}")
    again = f"text:{tmp_path / 'b.txt'}"
    remembered = Seen.by([window_arrays(Seen(seen).digests)])
    assert remembered.digests == Seen(seen).digests
    windows = [prompts_of(again, tokenizer, seed=seed)[0] for seed in range(8)]
    assert any(map(remembered.overlaps, windows)), "no window would have been a test of anything"
    for seed in range(4):
        assert not common(held_out(again, tokenizer, 1, seed, remembered)[0], seen[0])


def test_unseen_prompts_replaces_seen_windows(tokenizer, tmp_path):
    task = story(tmp_path / "a.txt", 30 * LENGTH)
    seen = prompts_of(task, tokenizer, 6)
    default = prompts_of(task, tokenizer, 10, 8)
    unseen = [each for each in default if not any(common(each, other) for other in seen)]
    assert len(unseen) < len(default)
    options = {"length": LENGTH, "samples": 10, "seed": 8}
    result = unseen_prompts(task, tokenizer, seen=Seen(seen), **options)
    assert result.overlapping == 0
    assert [len(each.input_ids) for each in result.prompts] == [LENGTH] * 10
    assert not any(common(each, other) for each in result.prompts for other in seen)
    # Unseen prompts stay, and the new ones differ from them and from one another.
    assert set(unseen) <= set(result.prompts)
    assert not any(common(a, b) for i, a in enumerate(result.prompts) for b in result.prompts[:i])
    assert result == unseen_prompts(task, tokenizer, seen=Seen(seen), **options)
    assert unseen_prompts(task, tokenizer, seen=Seen(), **options).prompts == default


def test_seeded_prompts_overlaps_do_not_depend_on_the_depth(tokenizer, tmp_path):
    file = file_task("passkey", tmp_path / "a.txt", 6).partition(":")[2]
    seen = Seen(make_prompts(f"text:{file}", tokenizer, length=LONG, samples=1, seed=0))
    options = {"length": LONG, "samples": 1, "seeds": (0, 1), "seen": seen}
    result = [
        seeded_prompts(f"passkey@depth={depth}:{file}", tokenizer, **options)
        for depth in (0, 0.3, 1)
    ]
    assert len({tuple(map(text_of, each.prompts)) for each in result}) == 1


@pytest.mark.parametrize("kind", [name for name in OF_FILES if name != "jsonl"])
def test_seen_finds_overlaps_across_tasks_of_one_file(kind, tmp_path):
    tokenizer = metaspace()
    file = file_task(kind, tmp_path / "a.txt", 4).partition(":")[2]
    whole = make_prompts(f"text:{file}", tokenizer, length=2 * LONG, samples=1, seed=0)
    task = f"{kind}:{file}"
    overlaps = 0
    for seed in range(4):
        (prompt,) = make_prompts(task, tokenizer, length=LONG, samples=1, seed=seed)
        (window,) = make_prompts(f"text:{file}", tokenizer, length=LONG, samples=1, seed=seed)
        for own, theirs in ((prompt, whole), (window, [prompt])):
            if count_overlaps([own], theirs):
                overlaps += 1
                assert Seen(theirs).overlaps(own)
    assert overlaps


@pytest.mark.parametrize("kind", ["niah_single_1", "vt"])
def test_unseen_prompts_ignores_repeated_filler(kind, tokenizer):
    seen, other = prompts_of(kind, tokenizer, 2)
    assert count_overlaps([other], [seen]) == 1
    options = {"length": LENGTH, "samples": 2, "seed": 1, "seen": Seen([seen])}
    assert unseen_prompts(kind, tokenizer, **options).overlapping == 0
    assert len(module.held_out([kind], tokenizer, **options)) == 2


def test_units_join_prompts_that_are_not_independent(tokenizer, tmp_path):
    story(tmp_path / "a.txt", 8 * LENGTH)
    (tmp_path / "copy.txt").write_text((tmp_path / "a.txt").read_text())
    (tmp_path / "again.txt").write_text((tmp_path / "a.txt").read_text()[: LENGTH // 2] * 16)

    def counts(*tasks: str, samples: int = 3) -> list[int]:
        made = [
            prompt
            for task in tasks
            for prompt in prompts_of(task.replace(":", f":{tmp_path}/"), tokenizer, samples)
        ]
        return sorted(map(len, units(made)))

    # Filler, generated or all alike, is part of a task; windows of a text share nothing.
    for task in ("passkey", "niah_single_1", "vt", "prose", "text:a.txt", "niah_single_2:a.txt"):
        assert counts(task) == [1, 1, 1], task
    assert counts("line_turns@questions=2", samples=4) == [2, 2]
    # Other parameters change the same prompt.
    assert counts("passkey@depth=0", "passkey@depth=1") == [2, 2, 2]
    assert counts("kv_retrieval", "kv_retrieval@question_first=1", "passkey") == [1, 1, 1, 2, 2, 2]
    # Other needles in one text, in a copy of it, and a text that repeats itself.
    pairs = [2] * len(counts("text:a.txt", samples=9))
    assert len(pairs) > 3
    assert counts("text:a.txt", "passkey:a.txt", samples=9) == pairs
    assert counts("niah_single_2:copy.txt", "niah_single_3:a.txt", samples=9) == pairs
    assert counts("text:again.txt") == [3]


def test_units_of_questions_on_one_document_are_one(tokenizer, tmp_path):
    path = tmp_path / "asked.jsonl"
    texts = [story_of(number) for number in range(3)]
    lines = [{"prompt": f"{text} Question {at}?"} for text in texts for at in range(4)]
    path.write_text("\n".join(map(json.dumps, lines)))
    made = prompts_of(f"jsonl:{path}", tokenizer, 99)
    documents = units(made)
    assert [len(unit) for unit in documents] == [4, 4, 4]
    values = [float(at in documents[1]) for at in range(12)]
    assert unit_means(values, documents) == [0, 1, 0]
    # Those that are held out share nothing at all.
    assert len(held_out(f"jsonl:{path}", tokenizer, 3, 0, Seen())) == 3
    with pytest.raises(HeadwiseError, match="too short"):
        held_out(f"jsonl:{path}", tokenizer, 4, 0, Seen())
