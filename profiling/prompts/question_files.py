"""Questions with their answers and documents, out of the user's file: SQuAD's and HotpotQA's layouts and plain lists.

A file is SQuAD's (`data`, `paragraphs`, `qas`), a JSON array of records, or a record a line. A record has `question`,
`answers` or `answer`, and `context` or `contexts`: a string, strings, or HotpotQA's titles with sentences.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from artifacts import HeadwiseError
from artifacts.errors import shorten
from profiling.prompts.suites import json_object, json_value
from profiling.prompts.texts import read_text


@dataclass(frozen=True)
class Question:
    """A question; `documents` are its own and `near` those of the same article, as numbers of the file's documents."""

    text: str
    answers: tuple[str, ...]
    documents: tuple[int, ...]
    near: tuple[int, ...] = ()


@dataclass(frozen=True)
class QuestionFile:
    """All questions that have an answer, and all documents, none twice, in the order of the file."""

    questions: tuple[Question, ...]
    documents: tuple[str, ...]


def read_questions(file: Path) -> QuestionFile:
    """Read a file of questions.

    Raises:
        HeadwiseError: one line that names the file, the place in it, and what is wrong there.
    """
    documents: dict[str, int] = {}
    found: list[Question] = []
    for place, record in _records(file):
        near = _numbered(record.get("near", []), documents)
        own = _numbered(_contexts(record, place), documents)
        question = _field(record, ("question", "query", "input"), place)
        if not isinstance(question, str):
            raise HeadwiseError(f"{place}: the question must be a string, got {shorten(question)}")
        answers = _answers(_field(record, ("answers", "answer", "outputs"), place), place)
        if answers:
            others = tuple(number for number in near if number not in own)
            found.append(Question(question, answers, own, others))
    if not found:
        raise HeadwiseError(f"{file.name} has no question with an answer")
    return QuestionFile(tuple(found), tuple(documents))


def _records(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    text = read_text(file)
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise HeadwiseError(f"{file.name} is empty")
    first = lines[0][1].strip()
    if first.startswith("{") and first.endswith("}") and '"data"' not in first[:200]:
        for number, line in lines:
            place = f"{file.name}, line {number}"
            yield place, json_object(line, place)
        return
    whole = json_value(text, file.name)
    if isinstance(whole, dict) and isinstance(whole.get("data"), list):
        yield from _squad(whole["data"], file.name)
    elif isinstance(whole, list):
        for number, record in enumerate(whole, start=1):
            place = f"{file.name}, record {number}"
            if not isinstance(record, dict):
                raise HeadwiseError(f"{place}: not a JSON object: {shorten(record)}")
            yield place, record
    elif isinstance(whole, dict) and len(lines) > 1:
        yield f"{file.name}, record 1", whole
    else:
        raise HeadwiseError(f"{file.name}: neither SQuAD's layout, nor an array of records, nor a record a line")


def _squad(articles: list[Any], name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """SQuAD's nested layout as records; the paragraphs of an article are near one another."""
    for number, article in enumerate(articles, start=1):
        place = f"{name}, article {number}"
        paragraphs = _listed(article, "paragraphs", place)
        contexts = [_field(paragraph, ("context",), place) for paragraph in paragraphs]
        for paragraph in paragraphs:
            for question in _listed(paragraph, "qas", place):
                impossible = _field(question, ("question",), place) and question.get("is_impossible")
                answers = [] if impossible else question.get("answers")
                yield place, {**question, "answers": answers, "context": paragraph["context"], "near": contexts}


def _listed(record: Any, name: str, place: str) -> list[Any]:
    found = _field(record, (name,), place)
    if not isinstance(found, list):
        raise HeadwiseError(f"{place}: {name} must be an array, got {shorten(found)}")
    return found


def _field(record: Any, names: tuple[str, ...], place: str) -> Any:
    if not isinstance(record, dict):
        raise HeadwiseError(f"{place}: not a JSON object: {shorten(record)}")
    for name in names:
        if name in record:
            return record[name]
    raise HeadwiseError(f"{place}: no {' or '.join(names)}")


def _answers(value: Any, place: str) -> tuple[str, ...]:
    """A string, strings, records with a `text`, or one record of such arrays."""
    if isinstance(value, dict):
        value = value.get("text")
    items = value if isinstance(value, list) else [] if value is None else [value]
    texts: list[str] = []
    for item in items:
        text = item.get("text") if isinstance(item, dict) else item
        if not isinstance(text, str):
            raise HeadwiseError(f"{place}: an answer must be a string, got {shorten(text)}")
        texts += [text.strip()] if text.strip() else []
    return tuple(dict.fromkeys(texts))


def _contexts(record: dict[str, Any], place: str) -> list[str]:
    value = _field(record, ("context", "contexts"), place)
    if isinstance(value, dict):
        titles, sentences = _listed(value, "title", place), _listed(value, "sentences", place)
        value = [[title, said] for title, said in zip(titles, sentences, strict=False)]
    items = value if isinstance(value, list) else [value]
    found = []
    for item in items:
        if isinstance(item, list) and len(item) == 2 and isinstance(item[1], list):
            item = f"{item[0]}\n{''.join(map(str, item[1]))}"
        if not isinstance(item, str) or not item.strip():
            raise HeadwiseError(f"{place}: the context must be text, got {shorten(item)}")
        found.append(item)
    if not found:
        raise HeadwiseError(f"{place}: the context must be text, got []")
    return found


def _numbered(texts: list[Any], documents: dict[str, int]) -> tuple[int, ...]:
    found = [documents.setdefault(text, len(documents)) for text in texts if isinstance(text, str) and text.strip()]
    return tuple(dict.fromkeys(found))
