"""The list of tasks, the prompts shown of them, and the page about them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import LlamaConfig

from profiling.prompts.prompt import KINDS, make_prompts
from profiling.tasks import main
from tests.profiling.conftest import GROUPED
from tests.profiling.tokenizers import byte_level

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model's folder that holds no weights."""
    path = tmp_path_factory.mktemp("model")
    byte_level(bos=True).save_pretrained(path)
    LlamaConfig(**GROUPED).save_pretrained(path)
    return str(path)


def test_the_list_has_every_task_with_its_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    listed = capsys.readouterr().out.split("\n\n")
    assert [entry.partition("\n")[0] for entry in listed] == [kind.usage for kind in KINDS.values()]
    for entry, kind in zip(listed, KINDS.values(), strict=True):
        assert all(f"    {parameter.name}: " in entry for parameter in kind.parameters)


def test_the_page_has_every_task_and_its_parameters() -> None:
    page = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|([^|]*)\|([^|]*)\|", page, flags=re.MULTILINE)
    table = {
        name: (re.findall(r"`(\w+)`", told), file.strip())
        for name, told, file in rows
        if name in KINDS
    }
    assert list(table) == list(KINDS)
    for name, (told, file) in table.items():
        assert told == [parameter.name for parameter in KINDS[name].parameters]
        assert bool(file) == (KINDS[name].takes_file != "no")


def test_a_prompt_is_shown_with_its_answer_and_where_it_lies(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--task", "niah_multivalue", "--model", folder, "--length", "1500"]
    assert main(arguments) == 0
    whole = capsys.readouterr().out
    (prompt,) = make_prompts(
        "niah_multivalue", byte_level(bos=True), length=1500, samples=1, seed=0
    )
    assert byte_level().decode(prompt.input_ids) in whole
    for line in (f"answer: {prompt.answer}", f"references: {' | '.join(prompt.references)}"):
        assert f"\n{line}\n" in whole
    start, stop = prompt.finds[0].span
    assert re.search(
        rf"found at: {start} to {stop}, depth 0\.\d\d: One of .* is {prompt.references[0]}\.", whole
    )
    assert main([*arguments, "--ends", "--samples", "2"]) == 0
    ends = capsys.readouterr().out
    assert ends.count("\n... 1100 tokens ...\n") == 2 and len(ends) < len(whole)


def test_a_later_turn_and_answers_inside_are_shown(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for task in ("line_turns", "line_asked"):
        (prompt,) = make_prompts(task, byte_level(bos=True), length=2000, samples=1, seed=0)
        assert main(["--task", task, "--model", folder, "--length", "2000"]) == 0
        shown = capsys.readouterr().out
        assert (f"later turn: the last {prompt.turn} tokens\n" in shown) == bool(prompt.turn)
        assert shown.count("answer inside: ") == len(prompt.scored)
