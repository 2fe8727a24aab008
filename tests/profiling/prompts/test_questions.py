"""Questions over the user's file: every layout is read, and each prompt holds its own documents whole."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from artifacts import HeadwiseError
from profiling.prompts.metrics import score
from profiling.prompts.prompt import make_prompts
from profiling.prompts.question_files import read_questions
from tests.profiling.tokenizers import MAKERS, byte_level

PLACES = ("harbour", "market", "river", "bridge", "garden")


def fact(at: int) -> str:
    return f"The guard of the {PLACES[at % 5]} in town {at} is called Guard{at}. He has been there for {at + 2} years."


def squad() -> dict[str, Any]:
    """Three articles with ten paragraphs each; the last question of each has no answer."""
    paragraphs = [
        {
            "context": fact(at),
            "qas": [
                {
                    "id": f"q{at}",
                    "question": f"Who guards the {PLACES[at % 5]} in town {at}?",
                    "answers": []
                    if at % 10 == 9
                    else [{"text": f"Guard{at}", "answer_start": 3}, {"text": f"guard {at}"}],
                    "is_impossible": at % 10 == 9,
                }
            ],
        }
        for at in range(30)
    ]
    return {
        "version": "v2.0",
        "data": [{"title": str(n), "paragraphs": paragraphs[n * 10 : n * 10 + 10]} for n in range(3)],
    }


def hotpot() -> list[dict[str, Any]]:
    return [
        {
            "_id": str(at),
            "question": f"How many years has the guard of the {PLACES[at % 5]} in town {at} been there?",
            "answer": f"{at + 2} years",
            "context": [[f"Town {n}", [sentence + "." for sentence in fact(n).split(".")[:2]]] for n in (at, at + 1)],
        }
        for at in range(20)
    ]


def lines() -> str:
    return "\n".join(
        json.dumps({"question": f"Who is in town {at}?", "answers": [f"Guard{at}"], "context": fact(at)})
        for at in range(25)
    )


CONTENTS = {"squad": json.dumps(squad()), "hotpot": json.dumps(hotpot(), indent=1), "lines": lines() + "\n\n"}


@pytest.fixture(params=list(CONTENTS))
def asked(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / f"{request.param}.json"
    path.write_text(CONTENTS[request.param], encoding="utf-8")
    return path


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("length", [1300, 1301, 1777])
def test_prompts_hold_the_documents_that_answer(asked: Path, make: Any, length: int) -> None:
    tokenizer = make()
    task = "qa_2" if asked.stem == "hotpot" else "qa_1"
    seen = set()
    for prompt in make_prompts(f"{task}:{asked}", tokenizer, length=length, samples=4, seed=1):
        assert len(prompt.input_ids) == length
        text = tokenizer.decode(prompt.input_ids)
        question = re.findall(r"Question: (.*)\s\s?Answer:$", text)
        town = int(re.findall(r"town (\d+)", question[0])[0])
        seen.add(town)
        assert fact(town).split(".")[0] in text
        assert prompt.answer == (f"{town + 2} years" if asked.stem == "hotpot" else f"Guard{town}")
        assert score(prompt, f"It is {prompt.answer.upper()}.") == 1 and score(prompt, "Nobody") == 0
        numbers = re.findall(r"Document (\d+):", text)
        assert numbers == [str(number) for number in range(1, len(numbers) + 1)] and len(numbers) > 2
        (find,) = prompt.finds
        block = tokenizer.decode(prompt.input_ids[slice(*find.span)])
        assert prompt.answer in block and "Document" not in block
    assert len(seen) == 4, "each question once"


def test_every_length_is_met_whatever_the_documents_leave(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text(lines(), encoding="utf-8")
    tokenizer = byte_level(bos=True)
    for length in range(900, 1030):
        (prompt,) = make_prompts(f"qa_1:{file}", tokenizer, length=length, samples=1, seed=3)
        assert len(prompt.input_ids) == length
        assert prompt.answer is not None and f"called {prompt.answer}." in tokenizer.decode(prompt.input_ids)


def test_documents_of_the_same_article_come_first(tmp_path: Path) -> None:
    file = tmp_path / "squad.json"
    file.write_text(CONTENTS["squad"], encoding="utf-8")
    tokenizer = byte_level()
    for prompt in make_prompts(f"qa_1:{file}", tokenizer, length=700, samples=5, seed=0):
        text = tokenizer.decode(prompt.input_ids)
        assert len({int(town) // 10 for town in re.findall(r"in town (\d+)", text)}) == 1


def test_what_a_file_says(tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    file.write_text(CONTENTS["squad"], encoding="utf-8")
    found = read_questions(file)
    assert len(found.questions) == 27 and found.documents == tuple(map(fact, range(30)))
    assert found.questions[1].answers == ("Guard1", "guard 1") and found.questions[1].documents == (1,)
    assert found.questions[1].near == (0, *range(2, 10))
    # The layout of datasets' own SQuAD and HotpotQA.
    records = [
        {"question": "a?", "answers": {"text": ["x", "x", " y "], "answer_start": [0, 0, 1]}, "context": "t x y"},
        {"question": "b?", "answer": "z", "context": {"title": ["T", "U"], "sentences": [["1.", " 2."], ["z"]]}},
        {"query": "c?", "outputs": "w", "contexts": ["t x y", "v"]},
    ]
    file.write_text(json.dumps(records), encoding="utf-8")
    found = read_questions(file)
    assert [question.answers for question in found.questions] == [("x", "y"), ("z",), ("w",)]
    assert found.documents == ("t x y", "T\n1. 2.", "U\nz", "v")
    assert [question.documents for question in found.questions] == [(0,), (1, 2), (0, 3)]


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("", "bad.file is empty"),
        ("{", "bad.file: not JSON: "),
        (lines()[:-30], "bad.file, line 25: not JSON: unterminated string"),
        (json.dumps(squad())[:-9], "bad.file: not JSON: "),
        ("[1]", "bad.file, record 1: not a JSON object: 1"),
        ('{"question": "a"}', "bad.file, line 1: no context or contexts"),
        ('{"context": "a", "answer": "b"}', "bad.file, line 1: no question or query or input"),
        ('{"context": "a", "question": "b"}', "bad.file, line 1: no answers or answer or outputs"),
        ('{"context": "a", "question": 3, "answer": "b"}', "line 1: the question must be a string, got 3"),
        ('{"context": "a", "question": "b", "answer": 4}', "line 1: an answer must be a string, got 4"),
        ('{"context": [], "question": "b", "answer": "c"}', "line 1: the context must be text, got []"),
        ('{"context": [["t", 3]], "question": "b", "answer": "c"}', "line 1: the context must be text, got ['t', 3]"),
        ('{"context": {"title": 1, "sentences": []}, "question": "b", "answer": "c"}', "title must be an array, got 1"),
        ('{"context": "a", "question": "b", "answer": []}', "bad.file has no question with an answer"),
        ('{"data": [{"title": "x"}]}', "bad.file, article 1: no paragraphs"),
        ('{"data": [{"paragraphs": 1}]}', "bad.file, article 1: paragraphs must be an array, got 1"),
        ('{"data": [{"paragraphs": [{"context": "a", "qas": [3]}]}]}', "bad.file, article 1: not a JSON object: 3"),
        ('"text"', "bad.file: neither SQuAD's layout, nor an array of records, nor a record a line"),
        (lines(), "bad.file is too short for qa_1 at length 9000: with all of its 25 documents a prompt has"),
        (
            json.dumps({"question": "a?", "answer": "b", "context": "word " * 9000}),
            "bad.file has 0 questions whose documents fit into length 9000, 1 are needed; the smallest that",
        ),
    ],
)
def test_bad_files(tmp_path: Path, content: str, line: str) -> None:
    file = tmp_path / "bad.file"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(HeadwiseError, match=re.escape(line)) as caught:
        make_prompts(f"qa_1:{file}", byte_level(), length=9000, samples=1, seed=0)
    assert "\n" not in str(caught.value) and str(tmp_path) not in str(caught.value)
