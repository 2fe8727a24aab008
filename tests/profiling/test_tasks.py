"""headwise tasks: the list, the prompts that it shows, and files for lm-evaluation-harness."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from artifacts import HeadwiseError
from profiling.harness.task_files import process_choices, process_results, write_task
from profiling.prompts.metrics import METRICS, score
from profiling.prompts.prompt import KINDS, Find, Prompt, make_prompts, parse_task
from profiling.quality.forced import negative_log_likelihood
from profiling.tasks import main
from tests.profiling.quality.test_trials import trial
from tests.profiling.tokenizers import MAKERS

ROOT = Path(__file__).parents[2]


def test_the_list_has_every_task_with_its_parameters(capsys):
    assert main([]) == 0
    listed = capsys.readouterr().out.split("\n\n")
    assert [entry.partition("\n")[0] for entry in listed] == [kind.usage for kind in KINDS.values()]
    for entry, kind in zip(listed, KINDS.values(), strict=True):
        assert all(f"    {parameter.name}: " in entry for parameter in kind.parameters)


def test_the_page_has_every_task_and_its_parameters():
    page = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|([^|]*)\|([^|]*)\|", page, flags=re.MULTILINE)
    rows = [row for row in rows if row[0] in KINDS]
    assert [name for name, _, _ in rows] == list(KINDS)
    for name, told, file in rows:
        parameters = [parameter.name for parameter in KINDS[name].parameters]
        assert re.findall(r"`(\w+)`", told) == parameters
        assert bool(file.strip()) == (KINDS[name].takes_file != "no")


@pytest.mark.parametrize("task", ["niah_multivalue", "line_turns", "line_asked"])
def test_a_prompt_is_shown_with_its_answers_and_where_they_lie(folder, loaded, capsys, task):
    asked = ["--task", task, "--model", str(folder), "--length", "2000"]
    assert main(asked) == 0
    whole = capsys.readouterr().out
    (prompt,) = make_prompts(task, loaded.tokenizer, length=2000, samples=1, seed=0)
    assert loaded.tokenizer.decode(prompt.input_ids) in whole
    assert (f"later turn: the last {prompt.turn} tokens\n" in whole) == bool(prompt.turn)
    assert whole.count("answer inside: ") == len(prompt.scored)
    if task == "niah_multivalue":
        for line in (f"answer: {prompt.answer}", f"references: {' | '.join(prompt.references)}"):
            assert f"\n{line}\n" in whole
        start, stop = prompt.finds[0].span
        first = rf"depth 0\.\d\d: One of .* is {prompt.references[0]}\."
        assert re.search(rf"found at: {start} to {stop}, {first}", whole)
        assert main([*asked, "--ends", "--samples", "2"]) == 0
        ends = capsys.readouterr().out
        assert ends.count("\n... 1600 tokens ...\n") == 2 and len(ends) < len(whole)


@pytest.mark.parametrize(
    ("task", "name", "metric"),
    [
        ("niah_single_3@depth=0.5", "headwise_niah_single_3_depth_0_5_500", "all"),
        ("line_turns@questions=2", "headwise_line_turns_questions_2_500", "begins"),
    ],
)
def test_a_task_is_two_files(loaded, folder, tmp_path, capsys, task, name, metric):
    """A later turn is one prompt with what it is asked about."""
    out = tmp_path / "new" / "tasks"
    how = f"--model {folder} --length 500 --samples 4 --seed 7 --lm-eval {out}"
    assert main(["--task", task, *how.split()]) == 0
    assert {path.name for path in out.iterdir()} == {f"{name}.yaml", f"{name}.jsonl"}
    text = (out / f"{name}.yaml").read_text()
    assert f"test: {out / name}.jsonl" in text
    assert text.endswith("!function profiling.harness.task_files.process_results\n")
    prompts = make_prompts(task, loaded.tokenizer, length=500, samples=4, seed=7)
    assert ("max_gen_toks: 128" in text) == (metric == "all")
    lines = [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]
    ids = [tuple(loaded.tokenizer(line["prompt"])["input_ids"]) for line in lines]
    assert ids == [prompt.input_ids for prompt in prompts]
    answers = [(line["answer"], line["metric"]) for line in lines]
    assert answers == [(prompt.answer, metric) for prompt in prompts]
    later = metric == "begins"
    assert [bool(prompt.turn) for prompt in prompts] == [later] * 4
    assert ("note: 4 of 4 prompts ask in a later turn" in capsys.readouterr().err) == later


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_prompts_that_do_not_survive_as_text_are_counted(make, tmp_path):
    from profiling.prompts.tokens import Encoder

    tokenizer = make()
    how = {"length": 400, "samples": 3, "seed": 1}
    (name,), changed, turned = write_task(tmp_path, parse_task("passkey"), tokenizer, **how)
    file = tmp_path / f"{name}.jsonl"
    texts = [json.loads(line)["prompt"] for line in file.read_text().splitlines()]
    encode = Encoder(tokenizer)
    prompts = make_prompts("passkey", tokenizer, **how)
    pairs = list(zip(texts, prompts, strict=True))
    other = [(*encode.prefix, *encode(text)) != prompt.input_ids for text, prompt in pairs]
    assert turned == 0 and changed == sum(other)
    assert not any(text.startswith("<s>") or prompt.answer in text[-9:] for text, prompt in pairs)


@pytest.mark.parametrize(
    ("task", "why"),
    [
        ("line_asked", "its answers stand inside the prompt"),
        ("facts@questions=2", "its answers stand inside the prompt"),
        ("text:README.md", "it asks for no answer"),
    ],
)
def test_tasks_without_an_answer_after_the_prompt_are_refused(folder, tmp_path, task, why):
    (tmp_path / "README.md").write_text("word " * 600)
    out = tmp_path / "tasks"
    task = task.replace("README.md", f"{tmp_path}/README.md")
    with pytest.raises(HeadwiseError, match=f"cannot be written for lm-evaluation-harness: {why}"):
        main(f"--task {task} --model {folder} --length 2600 --lm-eval {out}".split())
    assert not out.exists()


def test_a_forced_choice_is_a_task_of_its_own(loaded, tmp_path):
    """The harness puts each choice behind the prompt; its likelihoods give our choice."""
    task = "babilong_qa1"
    how = {"length": 2600, "samples": 1, "seed": 3}
    names = write_task(tmp_path, parse_task(task), loaded.tokenizer, **how).names
    assert names[1:] == (f"{names[0]}_choice",)
    text = (tmp_path / f"{names[1]}.yaml").read_text()
    assert "output_type: multiple_choice" in text and "doc_to_choice: compared" in text
    assert text.endswith("!function profiling.harness.task_files.process_choices\n")
    lines = [json.loads(line) for line in (tmp_path / f"{names[0]}.jsonl").read_text().splitlines()]
    for line, prompt in zip(lines, make_prompts(task, loaded.tokenizer, **how), strict=True):
        assert line["compared"][line["gold"]] == f" {prompt.answer}"
        assert not line["prompt"][-1].isspace()
        before = loaded.tokenizer(line["prompt"])["input_ids"]
        results = []
        for choice, tokens in zip(line["compared"], line["tokens"], strict=True):
            ids = loaded.tokenizer(line["prompt"] + choice)["input_ids"]
            assert ids[: len(before)] == before and len(ids) - len(before) == tokens
            losses = negative_log_likelihood(loaded.model, Prompt(tuple(ids), None))
            results.append((-float(losses[len(before) - 1 :].sum()), False))
        own = trial(loaded.model, loaded.tokenizer, prompt)["choice"]
        assert process_choices(line, results) == {"choice": own}
    fake = {"gold": 1, "tokens": [1, 4]}
    assert process_choices(fake, [(-1.0, False), (-3.9, False)]) == {"choice": 1}
    assert process_choices(fake, [(-1.0, True), (-4.0, False)]) == {"choice": 0}


ANSWERS = ("", "B", "The answer is B", " 17 and 23", "17, 23\nmore", "two\nwords", "x = 17")


@pytest.mark.parametrize("metric", ["begins", *METRICS])
def test_answers_are_scored_as_here(metric):
    finds = (Find("17", (0, 1)), Find("23", (1, 2), " and ")) if metric == "begins" else ()
    prompt = Prompt((0,), "17", finds, metric=metric, references=("17", "23"))
    doc = {"answer": "17", "metric": metric, "references": ["17", "23"]}
    doc["finds"] = [find.expected for find in finds]
    for text in ANSWERS:
        assert process_results(doc, [f"\n {text} "]) == {"score": score(prompt, text.strip())}
