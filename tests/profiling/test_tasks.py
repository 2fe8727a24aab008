"""headwise tasks: the list, and the prompts that it shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headwise.__main__ import main
from profiling.prompts.prompt import KINDS
from tests.typed import make_prompts

ROOT = Path(__file__).parents[2]


def test_tasks_command_lists_every_task_and_parameter(capsys):
    assert main(["tasks"]) == 0
    listed = capsys.readouterr().out.split("\n\n")
    assert [entry.partition("\n")[0] for entry in listed] == [kind.usage for kind in KINDS.values()]
    for entry, kind in zip(listed, KINDS.values(), strict=True):
        assert all(f"    {parameter.name}: " in entry for parameter in kind.parameters)


def test_tasks_page_has_every_task_and_parameter(capsys):
    page = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
    assert main(["tasks", "--markdown"]) == 0
    assert capsys.readouterr().out in page, "`headwise tasks --markdown` prints the tables"


@pytest.mark.parametrize("task", ["niah_multivalue", "line_turns", "line_asked"])
def test_tasks_command_shows_a_prompt_with_answers_and_spans(folder, loaded, capsys, task):
    words = ["--task", task, "--model", str(folder), "--length", "2000"]
    assert main(["tasks", *words]) == 0
    whole = capsys.readouterr().out
    (prompt,) = make_prompts(task, loaded.tokenizer, length=2000, samples=1, seed=0)
    assert loaded.tokenizer.decode(prompt.input_ids) in whole
    assert (f"later turn: the last {prompt.turn} tokens\n" in whole) == bool(prompt.turn)
    assert whole.count("answer inside: ") == len(prompt.scored)
    if task == "niah_multivalue":
        for line in (f"answer: {prompt.answer}", f"references: {' | '.join(prompt.references)}"):
            assert f"\n{line}\n" in whole
        start, stop = prompt.evidence[0].span
        first = rf"depth 0\.\d\d: One of .* is {prompt.references[0]}\."
        assert re.search(rf"found at: {start} to {stop}, {first}", whole)
        assert main(["tasks", *words, "--ends", "--samples", "2"]) == 0
        ends = capsys.readouterr().out
        assert ends.count("\n... 1600 tokens ...\n") == 2 and len(ends) < len(whole)
