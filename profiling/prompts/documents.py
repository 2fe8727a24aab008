"""RULER's question answering (Hsieh et al. 2024, section 3.4): a question's documents among those of other questions.

A prompt is prefix + head + numbered documents + question. The first document may have lost its start.
"""

from __future__ import annotations

import itertools
import random

from artifacts import HeadwiseError
from profiling.prompts.haystacks import padding
from profiling.prompts.kind import RULER, Find, Kind, Prompt, Wanted
from profiling.prompts.question_files import Question, QuestionFile, read_questions
from profiling.prompts.tokens import Ids

_HEAD = "Below are some documents, and a question that one or more of them answer.\n"
_LABEL = "\nDocument {}:\n"
_QUESTION = (
    "\n\nAnswer the question from the documents above, in as few words as possible.\n\nQuestion: {question}\nAnswer:"
)
# What RULER lets a model answer with.
_NEW_TOKENS = 32


def questions(wanted: Wanted) -> list[Prompt]:
    """Questions of the user's file, each once and in random order; those whose documents do not fit are passed over."""
    file, length, samples = wanted.file, wanted.length, wanted.samples
    found = read_questions(file)
    documents = wanted.encode.each([text.strip() + "\n" for text in found.documents])
    labels = wanted.encode.each([_LABEL.format(number) for number in range(1, len(documents) + 1)])
    order = list(range(len(found.questions)))
    wanted.rng().shuffle(order)
    made: list[Prompt] = []
    smallest = None
    for which in order:
        prompt = _one(wanted, found, documents, labels, found.questions[which], wanted.rng(which))
        if isinstance(prompt, int):
            smallest = prompt if smallest is None else min(smallest, prompt)
            continue
        if len(prompt.input_ids) < length:
            raise HeadwiseError(
                f"{file.name} is too short for {wanted.name} at length {length}: with all of its {len(documents)} "
                f"documents a prompt has {len(prompt.input_ids)} tokens"
            )
        made.append(prompt)
        if len(made) == samples:
            return made
    small = f"; the smallest that does not fit needs {smallest} tokens" if smallest else ""
    raise HeadwiseError(
        f"{file.name} has {len(made)} questions whose documents fit into length {length}, {samples} are needed{small}"
    )


def _one(
    wanted: Wanted,
    file: QuestionFile,
    documents: list[Ids],
    labels: list[Ids],
    question: Question,
    rng: random.Random,
) -> Prompt | int:
    """The prompt, shorter than `length` where documents run out; or the length that the question's own ones need."""
    encode = wanted.encode
    head, asked = encode(_HEAD), encode(_QUESTION.format(question=question.text))
    chosen = list(question.documents)
    left = wanted.length - len(wanted.ids(head, asked))
    left -= sum(len(documents[at]) + len(label) for at, label in zip(chosen, labels, strict=False))
    if left < 0:
        return wanted.length - left
    cut: Ids = ()
    start: Ids = ()
    for other in _others(question, len(documents), rng):
        room = left - len(labels[len(chosen)])
        if room < 1:
            # Not even a label fits.
            start, left = padding(encode, left), 0
            break
        if len(documents[other]) > room:
            cut, left = documents[other][-room:], 0
            break
        chosen.append(other)
        left = room - len(documents[other])
    rng.shuffle(chosen)
    ids = [*wanted.ids(start, head)]
    spans: dict[int, tuple[int, int]] = {}
    placed = [(-1, cut)] * bool(cut) + [(at, documents[at]) for at in chosen]
    for label, (at, body) in zip(labels, placed, strict=False):
        ids += label
        spans[at] = (len(ids), len(ids) + len(body))
        ids += body
    answer = question.answers[0]
    holds = [spans[at] for at in question.documents if answer.lower() in file.documents[at].lower()]
    return Prompt(
        (*ids, *asked),
        answer,
        tuple(Find(f" {answer}", span) for span in holds[:1]),
        metric="any",
        references=question.answers,
        new_tokens=_NEW_TOKENS,
    )


def _others(question: Question, documents: int, rng: random.Random) -> itertools.chain[int]:
    """Documents that are not the question's own: those of its article first, as the hardest to tell from its own."""
    near = rng.sample(question.near, len(question.near))
    own = {*question.documents, *near}
    far = [at for at in range(documents) if at not in own]
    rng.shuffle(far)
    return itertools.chain(near, far)


def _kind(name: str, asks: str) -> Kind:
    scored = "any of its answers is named"
    return Kind(name=name, make=questions, takes_file="must", asks=asks, scored=scored, source=RULER)


KINDS = (
    _kind("qa_1", "a question of your file, out of its document and those of other questions (RULER: SQuAD)"),
    _kind("qa_2", "a question that takes several documents, among those of other questions (RULER: HotpotQA)"),
)
