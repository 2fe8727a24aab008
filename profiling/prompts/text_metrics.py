"""Measures of how near one text comes to another, each from 0 to 1: F1 of words, ROUGE-L and edit similarity.

Those of SQuAD (Rajpurkar et al. 2016), of Lin 2004 and of fuzzy matching: what LongBench and InfiniteBench score by.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Hashable, Sequence

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def words_of_answer(text: str) -> list[str]:
    """Lower case, without punctuation and articles: SQuAD's normalisation."""
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def words_of_summary(text: str) -> list[str]:
    """Lower-case runs of letters and digits: ROUGE's tokens, without stemming."""
    return re.findall(r"[a-z0-9]+", text.lower())


def characters(text: str) -> list[str]:
    """Lower-case characters without spaces and punctuation: for Chinese, which puts no spaces between words."""
    return [c for c in text.lower() if not c.isspace() and unicodedata.category(c)[0] not in "PS"]


def f1(given: Sequence[Hashable], expected: Sequence[Hashable]) -> float:
    """The harmonic mean of precision and recall of a bag of tokens."""
    same = sum((Counter(given) & Counter(expected)).values())
    return _harmonic(same, len(given), len(expected))


def rouge_l(given: Sequence[Hashable], expected: Sequence[Hashable]) -> float:
    """ROUGE-L: F1 of the longest common subsequence (Lin 2004, section 3.1)."""
    return _harmonic(common_length(given, expected), len(given), len(expected))


def rouge_l_summary(given: str, expected: str, tokens: Callable[[str], list[str]] = words_of_summary) -> float:
    """ROUGE-Lsum: ROUGE-L of texts of several lines, by the union of common subsequences (Lin 2004, section 3.2)."""
    mine, theirs = ([tokens(line) for line in text.split("\n") if tokens(line)] for text in (given, expected))
    left, wanted = Counter(w for line in mine for w in line), Counter(w for line in theirs for w in line)
    hits = 0
    for line in theirs:
        for at in sorted(set().union(*(_common_places(line, other) for other in mine))):
            # A word counts no more often than either text has it.
            if left[line[at]] and wanted[line[at]]:
                hits += 1
                left[line[at]] -= 1
                wanted[line[at]] -= 1
    return _harmonic(hits, sum(map(len, mine)), sum(map(len, theirs)))


def edit_similarity(given: str, expected: str) -> float:
    """1 minus insertions and deletions over the characters of both: the ratio of fuzzy string matching."""
    total = len(given) + len(expected)
    return 2 * common_length(given, expected) / total if total else 1.0


def common_length(a: Sequence[Hashable], b: Sequence[Hashable]) -> int:
    """Length of the longest common subsequence, 64 cells of its table at a time and more (Hyyrö 2004)."""
    places: dict[Hashable, int] = {}
    for at, token in enumerate(a):
        places[token] = places.get(token, 0) | 1 << at
    full = (1 << len(a)) - 1
    row = full
    for token in b:
        matches = row & places.get(token, 0)
        row = (row + matches | row - matches) & full
    return len(a) - row.bit_count()


def _common_places(line: Sequence[Hashable], other: Sequence[Hashable]) -> set[int]:
    """Where in `line` a longest common subsequence with `other` stands."""
    table = [[0] * (len(other) + 1)]
    for token in line:
        above, row = table[-1], [0]
        for at, their in enumerate(other):
            row.append(above[at] + 1 if token == their else max(above[at + 1], row[at]))
        table.append(row)
    found, i, j = set(), len(line), len(other)
    while i and j:
        if line[i - 1] == other[j - 1]:
            i, j = i - 1, j - 1
            found.add(i)
        elif table[i][j - 1] > table[i - 1][j]:
            j -= 1
        else:
            i -= 1
    return found


def _harmonic(same: int, given: int, expected: int) -> float:
    return 2 * same / (given + expected) if same else 0.0
