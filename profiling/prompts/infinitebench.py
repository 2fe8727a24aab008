"""InfiniteBench's files (Zhang et al. 2024): JSON lines with context, input, answer and options, a file for each task.

The words around a record's own are ours, so that scores compare methods on one model and not with published ones.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from artifacts import HeadwiseError
from artifacts.errors import shorten
from profiling.prompts.kind import Kind, Prompt, Wanted
from profiling.prompts.suites import TASK, Asked, Record, name_in, prompts_of

_LETTERS = "ABCD"
_HIDDEN = "Something important is hidden in the text below. You will be asked for it.\n\n{context}\n\n{input}"
_CALL = re.compile(r"\w+\(-?\d+\)")


@dataclass(frozen=True)
class _Form:
    text: str
    metric: str
    new_tokens: int


# The metrics and lengths of answers are InfiniteBench's own.
FORMS = {
    "passkey": _Form(_HIDDEN + "\n\nThe pass key is", "first_integer", 6),
    "number_string": _Form(_HIDDEN + "\n\nThe sequence of digits is", "first_integer", 12),
    "kv_retrieval": _Form("Find the value of a key in the JSON below.\n\n{context}\n\n{input}", "word", 50),
    "longbook_sum_eng": _Form("{context}\n\nSummarise the book above.\n\nSummary:", "rouge_l_summary", 1200),
    "longbook_choice_eng": _Form(
        "{context}\n\nChoose the right answer to a question about the book above.\n\nQuestion: {input}\n{options}\n\n"
        "The letter of the right answer is",
        "letter",
        40,
    ),
    "longbook_qa_eng": _Form(
        "{context}\n\nAnswer a question about the book above in a few words.\n\nQuestion: {input}\nAnswer:", "f1", 40
    ),
    "longbook_qa_chn": _Form("{context}\n\n根据上面的书简短地回答.\n\n问题: {input}\n回答:", "f1_zh", 40),
    "longdialogue_qa_eng": _Form(
        "{context}\n\nIn the script above, $$MASK$$ stands for the name of one character.\n\nThe name is", "word", 40
    ),
    "math_find": _Form("{context}\n\n{input}", "first_number", 3),
    "math_calc": _Form(
        "Work the expression out from left to right and list the value after each number.\n\n"
        "Expression: 2 + 5 - 3\nValues: [2, 7, 4]\n\nExpression: {context}\nValues:",
        "integers_in_turn",
        30000,
    ),
    "code_run": _Form("{context}\n\nWith the functions above, the return value of {call} is", "last_integer", 5),
    "code_debug": _Form(
        "{context}\n\nOne function of the code above has an error in it that was put there.\n\n{options}\n\n"
        "The letter of that function is",
        "letter",
        5,
    ),
}


def infinitebench(wanted: Wanted, *, task: str | None = None) -> list[Prompt]:
    """Prompts of one of InfiniteBench's files, which are named after their tasks."""
    name = name_in(wanted.name, FORMS, task or wanted.file.stem, wanted.file.name)
    return prompts_of(wanted, lambda record: _ask(record, name))


def _ask(record: Record, name: str) -> Asked:
    form, text = FORMS[name], FORMS[name].text
    numeric = form.metric in ("first_number", "last_integer", "integers_in_turn")
    answers = record.numbers("answer") if numeric else record.texts("answer")
    options: tuple[str, ...] = ()
    if "{options}" in text:
        options = record.texts("options")
        answers = _lettered(answers, options, record.place)
        listed = "\n".join(f"{letter}. {option}" for letter, option in zip(_LETTERS, options, strict=False))
        text = text.replace("{options}", listed)
    if "{call}" in text:
        call = _CALL.search(record.text("input"))
        if call is None:
            raise HeadwiseError(
                f"{record.place}: input names no call such as func_1(2): {shorten(record.text('input'))}"
            )
        text = text.replace("{call}", call[0])
    if "{input}" in text:
        text = text.replace("{input}", record.text("input"), 1)
    # A context may hold braces, so it goes in last and as it is.
    text = text.replace("{context}", record.text("context"), 1)
    return Asked(text, answers, form.metric, form.new_tokens, options)


def _lettered(answers: tuple[str, ...], options: tuple[str, ...], place: str) -> tuple[str, ...]:
    """The letter of the right option, then the option itself, whichever of the two the record gives."""
    if len(options) != len(_LETTERS):
        raise HeadwiseError(f"{place}: options must be {len(_LETTERS)}, got {len(options)}")
    for answer in answers:
        if answer in options:
            return _LETTERS[options.index(answer)], answer
    for answer in answers:
        if answer in _LETTERS and len(answer) == 1:
            return answer, options[_LETTERS.index(answer)]
    raise HeadwiseError(f"{place}: the answer {shorten(answers[0])} is none of the options")


KINDS = (
    Kind(
        name="infinitebench",
        make=infinitebench,
        takes_file="must",
        parameters=(TASK,),
        asks="what the records of one of InfiniteBench's files ask",
        scored="as InfiniteBench scores the task",
        source="InfiniteBench, Zhang et al. 2024",
    ),
)
