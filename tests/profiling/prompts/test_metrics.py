"""Metrics against values worked out by hand."""

from __future__ import annotations

import random

import pytest

from artifacts import HeadwiseError
from profiling.prompts.metrics import METRICS, score
from profiling.prompts.prompt import Find, Prompt
from profiling.prompts.text_metrics import common_length, edit_similarity, f1, rouge_l, rouge_l_summary
from profiling.quality.answers import is_right


def prompt(metric: str, *references: str, choices: tuple[str, ...] = ()) -> Prompt:
    return Prompt((1,), references[0], metric=metric, references=references, choices=choices)


@pytest.mark.parametrize(
    ("metric", "references", "text", "expected"),
    [
        ("begins", ["123"], " 123, I think", 1),
        ("begins", ["123"], "It is 123", 0),
        ("begins", ["no", "yes"], "yes.", 1),
        ("exact", ["a b"], " a b\n", 1),
        ("exact", ["a b"], "a b c", 0),
        ("all", ["One", "two", "3", "4"], "ONE, then 3 and 33", 2 / 4),
        ("any", ["One", "two"], "it is oNe", 1),
        ("any", ["One", "two"], "it is three", 0),
        # "cat sat on mat" against "cat on mat": 3 of 4 and 3 of 3.
        ("f1", ["The cat on a mat!"], "a cat sat on the mat", 2 * 3 / 7),
        ("f1", ["dog", "cat"], "Cat.", 1),
        ("f1", ["dog"], "the", 0),
        # 3 characters in common of 4 given and 3 expected; the signs do not count.
        ("f1_zh", ["北京市"], "在北京市。", 2 * 3 / 7),
        # Longest common subsequence "police the gunman": 3 of 4 words on both sides (Lin 2004, section 3.1).
        ("rouge_l", ["police killed the gunman"], "police kill the gunman", 3 / 4),
        ("rouge_l", ["police killed the gunman"], "the gunman kill police", 2 / 4),
        ("rouge_l_zh", ["警察开枪"], "警察。没开枪", 2 * 4 / 9),
        # Lin 2004, section 3.2: w1 w2 w3 w4 w5 against two lines, union 4 of 5; precision 4 of 10.
        ("rouge_l_summary", ["w1 w2 w3 w4 w5"], "w1 w2 w6 w7 w8\nw1 w3 w8 w9 w5", 2 * 4 / 15),
        ("numbers", ["Paragraph 7"], "Paragraph 7", 1),
        ("numbers", ["Paragraph 7"], "Paragraph 7 or 17", 1 / 2),
        ("numbers", ["段落12"], "段落12", 1),
        ("numbers", ["3"], "none", 0),
        # 'return x' and 'return y' share 7 of 8 characters.
        ("code_line", ["return y"], "```python\n# comment\nreturn x\nmore", 7 / 8),
        ("code_line", ["x"], "# only a comment", 0),
        ("word", ["ab-12"], 'It is "ab-12".', 1),
        ("word", ["ab-12"], "ab-123", 0),
        ("word", ["JOHN"], "Maybe John?", 1),
        ("first_integer", ["0712"], "is 0712, not 5", 1),
        ("first_integer", ["712"], "5 or 712", 0),
        ("first_number", ["2.5"], "about 2.50 or 3", 1),
        ("first_number", ["-3"], "-3", 1),
        ("first_number", ["3"], "none", 0),
        ("last_integer", ["-14"], "It returns 5, so: `-14`.", 1),
        ("last_integer", ["14"], "14 is the value", 0),
        ("last_integer", ["3.0"], "So 3", 1),
        ("last_integer", ["3"], "9" * 5000, 0),
        ("integers_in_turn", ["1", "4", "8", "9"], "[1, 4, 7, 9]", 2 / 4),
        ("letter", ["B", "the dog"], "B", 1),
        ("letter", ["B", "the dog"], "(B) the dog", 1),
        ("letter", ["B", "the dog"], "I'd say the answer is: B", 1),
        ("letter", ["B", "the dog"], "the answer is a secret, C", 0),
        ("letter", ["B", "the dog"], "the dog", 1),
        ("letter", ["B", "the dog"], "Both", 0),
        ("letter", ["B", "the dog"], "", 0),
        ("first_line+f1", ["dog"], "\ndog\ncat and more", 1),
        ("f1", ["dog"], "\ndog\ncat", 2 / 3),
    ],
)
def test_metrics(metric: str, references: list[str], text: str, expected: float) -> None:
    assert score(prompt(metric, *references), text) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Number of people", 1),
        ("Number of people, or a date", 1 / 2),
        ("Number", 0),
        ("a date", 0),
    ],
)
def test_a_class_counts_less_among_others_and_parts_of_its_name_do_not(text: str, expected: float) -> None:
    asked = prompt("classes", "Number of people", choices=("Number", "Number of people", "date"))
    assert score(asked, text) == expected


def test_what_a_prompt_does_not_say_is_an_error_and_no_answer_is_right() -> None:
    with pytest.raises(HeadwiseError, match="without an answer cannot be scored"):
        score(Prompt((1,), None), "a")
    with pytest.raises(HeadwiseError, match="unknown metric 'bleu'; known: begins, exact, all"):
        score(prompt("bleu", "a"), "a")
    assert not is_right(Prompt((1,), None), "a")


def test_right_is_right_by_the_tasks_own_metric() -> None:
    assert is_right(prompt("all", "1", "2"), "It is 2 and 1")
    assert not is_right(prompt("all", "1", "2"), "1")
    several = Prompt.to_find(
        (1,), Find(" 1", (0, 1)), Find(" 2", (0, 1), lead=","), metric="all", references=("1", "2")
    )
    assert several.answer == "1, 2" and several.continuation == " 1, 2"
    assert score(several, "2, 1") == 1


def test_every_metric_lies_within_0_and_1() -> None:
    rng = random.Random(0)
    for name in METRICS:
        for _ in range(30):
            text, *references = ("".join(rng.choices("AB12 .,\n", k=rng.randint(0, 12))) for _ in range(3))
            numeric = name in ("first_number", "last_integer", "integers_in_turn")
            references = [str(rng.randint(1, 20)) for _ in range(2)] if numeric else references
            assert 0 <= score(prompt(name, *references, choices=("A", "B")), text) <= 1


def test_common_length_against_the_table_of_the_definition() -> None:
    rng = random.Random(1)
    for _ in range(50):
        a, b = ("".join(rng.choices("abc", k=rng.randint(0, 90))) for _ in range(2))
        table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
        for i, x in enumerate(a):
            for j, y in enumerate(b):
                table[i + 1][j + 1] = table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
        assert common_length(a, b) == table[-1][-1]


def test_empty_texts() -> None:
    assert f1([], []) == rouge_l([], []) == rouge_l_summary("", "") == 0
    assert edit_similarity("", "") == 1 and edit_similarity("", "a") == 0
