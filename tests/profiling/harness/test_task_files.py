"""Our tasks as files of lm-evaluation-harness: what is in them, and how answers out of the harness are scored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from artifacts import HeadwiseError
from profiling.harness.task_files import process_results
from profiling.prompts.metrics import METRICS, score
from profiling.prompts.prompt import Find, Prompt, make_prompts
from profiling.tasks import main
from tests.profiling.tokenizers import MAKERS
from tests.search.conftest import save_tiny

NAME = "headwise_niah_single_3_depth_0_5_500"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


def test_a_task_is_two_files(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoTokenizer

    out = tmp_path / "new" / "tasks"
    how = ["--length", "500", "--samples", "3", "--seed", "7", "--lm-eval", str(out)]
    assert main(["--task", "niah_single_3@depth=0.5", "--model", str(model), *how]) == 0
    assert capsys.readouterr() == (f"wrote the task {NAME} into {out}\n", "")
    assert {path.name for path in out.iterdir()} == {f"{NAME}.yaml", f"{NAME}.jsonl"}
    text = (out / f"{NAME}.yaml").read_text()
    assert f"test: {out / NAME}.jsonl" in text and "max_gen_toks: 128" in text
    assert text.endswith("process_results: !function profiling.harness.task_files.process_results\n")
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = make_prompts("niah_single_3@depth=0.5", tokenizer, length=500, samples=3, seed=7)
    lines = [json.loads(line) for line in (out / f"{NAME}.jsonl").read_text().splitlines()]
    assert [tuple(tokenizer(line["prompt"])["input_ids"]) for line in lines] == [p.input_ids for p in prompts]
    assert [(line["answer"], line["metric"]) for line in lines] == [(p.answer, "all") for p in prompts]


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_prompts_that_do_not_survive_as_text_are_counted(make: Any, tmp_path: Path) -> None:
    from profiling.harness.task_files import write_task
    from profiling.prompts.prompt import parse_task
    from profiling.prompts.tokens import Encoder

    tokenizer = make()
    how: dict[str, Any] = {"length": 400, "samples": 3, "seed": 1}
    name, changed = write_task(tmp_path, parse_task("passkey"), tokenizer, **how)
    lines = [json.loads(line)["prompt"] for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
    encode = Encoder(tokenizer)
    again = [(*encode.prefix, *encode(text)) for text in lines]
    prompts = make_prompts("passkey", tokenizer, **how)
    assert changed == sum(ids != prompt.input_ids for ids, prompt in zip(again, prompts, strict=True))
    assert all(
        not text.startswith("<s>") and prompt.answer not in text[-9:]
        for text, prompt in zip(lines, prompts, strict=True)
    )


@pytest.mark.parametrize(
    ("task", "why"),
    [
        ("line_turns", "its questions come in a later turn"),
        ("line_asked", "its answers stand inside the prompt"),
        ("prose", "it asks for no answer"),
    ],
)
def test_tasks_without_an_answer_after_the_prompt_are_refused(model: Path, tmp_path: Path, task: str, why: str) -> None:
    out = tmp_path / "tasks"
    with pytest.raises(HeadwiseError, match=f"'{task}' cannot be written for lm-evaluation-harness: {why}"):
        main(["--task", task, "--model", str(model), "--length", "800", "--lm-eval", str(out)])
    assert not out.exists()


def test_a_folder_that_cannot_be_made(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    command = ["--task", "fwe", "--model", str(model), "--length", "2500", "--lm-eval", str(tmp_path / "file")]
    with pytest.raises(HeadwiseError, match="cannot make the folder"):
        main(command)


ANSWERS = ("", "B", "The answer is B", " 17 and 23", "17, 23\nmore", "two\nwords", "x = 17")


@pytest.mark.parametrize("metric", ["begins", "first_line+f1", *METRICS])
def test_answers_are_scored_as_here(metric: str) -> None:
    finds = (Find("17", (0, 1)), Find("23", (1, 2), " and ")) if metric == "begins" else ()
    prompt = Prompt((0,), "17", finds, metric=metric, references=("17", "23"), choices=("17", "B"))
    doc = {"answer": "17", "finds": [f.expected for f in finds], "metric": metric}
    doc |= {"references": ["17", "23"], "choices": ["17", "B"]}
    for text in ANSWERS:
        assert process_results(doc, [f"\n {text} "]) == {"score": score(prompt, text.strip())}
