"""How answers of several parts are scored, from 0 to 1: sets of nodes, numbered lines, traces, texts said again.

Each takes what a model wrote and the references of a prompt, as its task's authors score it; where this differs, the
docstring says how.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher

_FINAL = "Final Answer:"
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = ("a ", "an ", "the ")
_SMALL = frozenset(["a", "an", "the", "is", "in", "at", "of", "it"])
_EQUATION = re.compile(r"\s*(\d+) ([-+*/]) (\d+) = (\d+)\s*")
_STEP = re.compile(r"(?mi)^[ \t]*- Step (\d+):.*$")
_MARK = 10
# Takes the lines of a text that count.
Lines = Callable[[str], list[str]]


def nodes(text: str, references: Sequence[str]) -> float:
    """F1 of the set of nodes in the last `Final Answer: [...]`, or in the first line where the prompt ends with that.

    Both empty is 1. OpenAI's formula gives 1 to any answer that is wholly wrong; here that is 0.
    """
    line = text.rpartition(_FINAL)[2] if _FINAL in text else text.strip()
    inside = re.match(r"\s*\[([^\]]*)", line.partition("\n")[0])
    given = {node.strip() for node in inside[1].split(",") if node.strip()} if inside else set()
    return _f1(given, set(references)) if inside else 0.0


def chapters(text: str, references: Sequence[str]) -> float:
    """Intersection over union of the numbers before the closing tag. Both empty is 1."""
    given, right = set(re.findall(r"\d+", _tagged(text, "answer"))), set(references)
    return len(given & right) / len(given | right) if given | right else 1.0


def numbered(text: str, references: Sequence[str]) -> float:
    """The share of the references that stand after their numbers, in any case, without articles; 1 if none is asked."""
    given = dict[str, str]()
    for number, value in re.findall(r"(?m)^\s*(\d+)\.\s*(.*)$", _tagged(text, "answer")):
        given.setdefault(number, _plain(value))
    right = [given.get(str(at)) == _plain(each) for at, each in enumerate(references, start=1)]
    return sum(right) / len(right) if right else 1.0


def item(text: str, references: Sequence[str]) -> float:
    """Whether the answer is a reference, in any case, without an article."""
    return float(any(_plain(_tagged(text, "answer")) == _plain(reference) for reference in references))


def marked(text: str, references: Sequence[str]) -> float:
    """0 where the answer does not begin with the random string; else the ratio of difflib.SequenceMatcher after it.

    OpenAI compares all of a chat model's reply. Here it is the first line, which every answer is: models without a chat
    template go on with the next turn.
    """
    reference, given = references[0], text.strip().partition("\n")[0]
    if not given.startswith(reference[:_MARK]):
        return 0.0
    return SequenceMatcher(None, given[_MARK:].strip(), reference[_MARK:].strip()).ratio()


def countdown(text: str, references: Sequence[str]) -> float:
    """Whether the equations within <Solution> are true, use each number once, and end at the target."""
    right = _equations(references[0])
    given = _equations(text)
    if right is None or given is None or len(given) != len(right):
        return 0.0
    # The reference's operands that it did not make itself are the numbers of the puzzle.
    left = Counter(number for a, _, b, _ in right for number in (a, b)) - Counter(value for *_, value in right[:-1])
    for a, sign, b, value in given:
        used = Counter((a, b))
        if not used <= left or not _true(a, sign, b, value):
            return 0.0
        left = left - used + Counter([value])
    return float(list(left.elements()) == [right[-1][3]])


def lines_in_turn(lines: Lines) -> Callable[[str, Sequence[str]], float]:
    """The share of the reference's lines that come in turn before the first that differs.

    LongProc counts the line that differs too, of a route only. Here it counts nowhere: an answer that is wrong from its
    start is worth 0, and a wrong line no more than a missing one.
    """

    def share(text: str, references: Sequence[str]) -> float:
        given, right = lines(text), lines(references[0])
        same = next((at for at, (a, b) in enumerate(zip(given, right, strict=False)) if a != b), None)
        count = min(len(given), len(right)) if same is None else same
        return count / len(right) if right else float(not given)

    return share


def same_lines(lines: Lines) -> Callable[[str, Sequence[str]], float]:
    """Whether the lines are those of the reference, and as many."""
    return lambda text, references: float(lines(text) == lines(references[0]))


def lines_before(last: str) -> Lines:
    """The lines of a text, without those that are empty and what follows `last`."""
    return lambda text: [line.strip() for line in text.partition(last)[0].splitlines() if line.strip()]


def steps(text: str) -> list[str]:
    """The lines `- Step i: ...` of a story without case, punctuation and words such as `is` and `the`.

    As LongProc, other lines are passed over: a model goes on with the next story. So are the steps of that one, whose
    numbers begin anew.
    """
    found, last = list[str](), 0
    for line in _STEP.finditer(text):
        if int(line[1]) <= last:
            break
        last = int(line[1])
        words = line[0].lower().translate(_NO_PUNCTUATION).split()
        found.append(" ".join(word for word in words if word not in _SMALL))
    return found


def _tagged(text: str, tag: str) -> str:
    """What stands within a tag, which the prompt may have opened."""
    return text.partition(f"</{tag}>")[0].rpartition(f"<{tag}>")[2].strip()


def _plain(text: str) -> str:
    found = text.lower().strip().rstrip(".")
    return next((found.removeprefix(article) for article in _ARTICLES if found.startswith(article)), found)


def _equations(text: str) -> list[tuple[int, str, int, int]] | None:
    """Of the first solution; None where there is none, or a line in it is no equation."""
    _, opened, rest = text.partition("<Solution>")
    lines = [_EQUATION.fullmatch(line) for line in rest.partition("</Solution>")[0].splitlines() if line.strip()]
    if not opened or not lines:
        return None
    found = [(int(m[1]), m[2], int(m[3]), int(m[4])) for m in lines if m]
    return found if len(found) == len(lines) else None


def _true(a: int, sign: str, b: int, value: int) -> bool:
    if sign == "/":
        return b != 0 and a == b * value
    return value == {"+": a + b, "-": a - b, "*": a * b}[sign]


def _f1(given: set[str], right: set[str]) -> float:
    if not given and not right:
        return 1.0
    same = len(given & right)
    return 2 * same / (len(given) + len(right))
