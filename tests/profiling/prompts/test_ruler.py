"""RULER's tasks can be solved from what their prompts hold, and only so."""

from __future__ import annotations

import itertools
import re
from collections import Counter

import pytest

from artifacts import HeadwiseError
from profiling.prompts import haystacks
from profiling.prompts.kind import Request
from profiling.prompts.tokens import Encoder
from tests.profiling.tokenizers import byte_level
from tests.typed import make_prompts


@pytest.mark.parametrize("task", ["niah_multikey_2", "niah_multikey_3"])
def test_multikey_needles_differ_in_their_key_alone(task):
    prompt = make_prompts(task, byte_level(), length=3000, samples=1, seed=0)[0]
    text = byte_level().decode(prompt.input_ids)
    keys = re.findall(r"\nOne of the secret \w+s of (\S+) is \S+\.", text)
    assert len(keys) == len(set(keys)) > 10


def test_needles_do_not_split_sentences(story):
    tokenizer = byte_level()
    task = f"niah_multivalue:{story}"
    for prompt in make_prompts(task, tokenizer, length=2000, samples=3, seed=0):
        text = tokenizer.decode(prompt.input_ids)
        hay = re.sub(r" One of the secret numbers of \S+ is \d+\.", "", text)
        hay = hay.partition("about them after it.\n")[2].partition("\n\nWhat are")[0]
        assert len(hay) > 400 and hay in story.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("length", "sizes"), [(4095, (20, 3, 1, 6, 1)), (9000, (40, 10, 3, 30, 3))]
)
def test_cwe_counts_equal_rulers(length, sizes):
    prompt = make_prompts("cwe", byte_level(), length=length, samples=1, seed=0)[0]
    whole = byte_level().decode(prompt.input_ids)
    _, shown, text = whole.split("Below is a numbered list of words.")
    size, *counts = sizes
    for part, (often, seldom) in ((shown, counts[:2]), (text, counts[2:])):
        counted = Counter(re.findall(r"\d+\. (\w+)", part.partition("Which")[0])).values()
        assert Counter(counted)[often] == 10 and Counter(counted)[seldom] == len(counted) - 10 > 0
        assert part == text or len(counted) == size


def test_fwe_counts_fall_with_the_rank():
    prompt = make_prompts("fwe@alpha=2", byte_level(), length=6000, samples=1, seed=0)[0]
    whole = byte_level().decode(prompt.input_ids)
    text = whole.partition("stand for nothing.")[2].partition("Which")[0]
    counts = [count for _, count in Counter(text.split()).most_common()]
    assert counts == [int(counts[0] / rank**2) for rank in range(1, len(counts) + 1)]
    assert Counter(text.split())["..."] == counts[0]


def test_haystack_of_a_file_is_a_part_of_it(tmp_path):
    text = "One. Two words!\nThree\u3002\u56db\u3002 " + "no stop " * 200 + "End."
    file = tmp_path / "odd.txt"
    file.write_text(text, encoding="utf-8")
    tokenizer = byte_level()
    whole = len(tokenizer(text)["input_ids"])
    encode = Encoder(tokenizer)
    for length in (310, 2 * whole):
        haystack = haystacks.read_file(
            Request(name="x", encode=encode, text=file, length=length, samples=1, seed=0)
        )
        assert len(haystack.cells) == max(1, whole // length)
        for cell, room in itertools.product(haystack.cells, (0, 1, 7, 300)):
            pieces = haystack.within(cell, room)
            assert sum(map(len, pieces)) == room and all(pieces)
            result = tokenizer.decode([token for piece in pieces for token in piece])
            assert result.strip("\ufffd") in text


def test_hide_inserts_at_the_nearest_bound():
    pieces = [(1, 1), (2, 2, 2, 2), (3, 3)]
    items, places = haystacks.hide([(7,), (8, 8), (9,)], [1, 0.3, 0], pieces)
    assert items == [(1, 1), (8, 8), (9,), (2, 2, 2, 2), (3, 3), (7,)]
    assert places == [5, 1, 2]
    assert haystacks.hide([(7,)], [0.5], []) == ([(7,)], [0])


def test_assemble_cuts_the_first_items():
    request = Request(
        name="passkey", encode=Encoder(byte_level(bos=True)), text=None, length=9, samples=1, seed=0
    )
    start = request.encode.prefix
    assert len(start) == 1
    ids, spans = request.assemble((1, 2), [(3, 3, 3), (4, 4), (5, 5)], (6,))
    assert ids == (*start, 1, 2, 3, 4, 4, 5, 5, 6)
    assert spans == [(3, 4), (4, 6), (6, 8)]
    ids, spans = request.assemble((1, 2), [(3,), (4, 4, 4), (5, 5)], (6, 6, 6))
    assert ids == (*start, 1, 2, 4, 5, 5, 6, 6, 6) and spans == [(3, 3), (3, 4), (4, 6)]


@pytest.mark.parametrize(("chains", "hops"), [(1000, 1000), (100, 200), (1, 1000)])
def test_vt_ends_for_any_number_of_variables(chains, hops):
    """There are only so many names of three letters, which the worked example has."""
    with pytest.raises(HeadwiseError, match=f"chains={chains} and hops={hops}|too small for vt"):
        make_prompts(
            f"vt@chains={chains},hops={hops}", byte_level(), length=4096, samples=1, seed=0
        )
