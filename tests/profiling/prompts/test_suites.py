"""Readers of published suites: the fields of their formats, their tasks' own metrics, a line for what is wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from artifacts import HeadwiseError
from profiling.prompts.infinitebench import FORMS
from profiling.prompts.longbench import DATASETS
from profiling.prompts.metrics import METRICS, score
from profiling.prompts.prompt import Prompt, digest, make_prompts, parse_task
from profiling.prompts.suites import cut_middle
from tests.profiling.tokenizers import MAKERS, byte_level

CONTEXT = "start {of} it. " + "The clock in the rain said nothing. " * 60 + "the {end} of it."
OPTIONS = ["the cat", "the dog", "the bird", "the cow"]


def longbench(dataset: str = "qasper", **more: Any) -> dict[str, Any]:
    """A record as the dataset's card describes it."""
    record = {"input": "Who {is} it?", "context": CONTEXT, "answers": ["the dog", "dog"], "length": 12}
    return record | {"dataset": dataset, "language": "en", "all_classes": None, "_id": "5d3a", **more}


def infinitebench(**more: Any) -> dict[str, Any]:
    return {"id": 3, "context": CONTEXT, "input": "What is it?", "answer": ["the dog"], "options": [], **more}


def ruler(**more: Any) -> dict[str, Any]:
    return {"index": 0, "input": CONTEXT + " Name them.", "outputs": ["123", "456"], "length": 500, **more}


def write(path: Path, *records: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


def made(task: str, *, length: int = 300, samples: int = 1, seed: int = 0, shorter: bool = False) -> list[Prompt]:
    return make_prompts(task, byte_level(bos=True), length=length, samples=samples, seed=seed, shorter=shorter)


def whole(task: str) -> tuple[Prompt, str]:
    (prompt,) = made(task, length=10**6, shorter=True)
    return prompt, byte_level().decode(prompt.input_ids)


@pytest.mark.parametrize("dataset", DATASETS)
def test_every_dataset_of_longbench(tmp_path: Path, dataset: str) -> None:
    right = {"classes": "the dog", "numbers": "Paragraph 7"}.get(DATASETS[dataset].metric.split("+")[-1], "the dog")
    classes = OPTIONS if "classes" in DATASETS[dataset].metric else None
    record = longbench(dataset, answers=["a thing", right], all_classes=classes and [*classes, "a thing"])
    prompt, text = whole(f"longbench:{write(tmp_path / 'file.jsonl', record)}")
    assert CONTEXT in text and text.count("{") == 2 + ("Who {is} it?" in text)
    asks = dataset not in ("gov_report", "multi_news", "vcsum", "passage_count", "lcc")
    assert asks <= ("Who {is} it?" in text)
    assert prompt.metric.split("+")[-1] in METRICS and prompt.new_tokens == DATASETS[dataset].new_tokens
    assert score(prompt, right) == 1 and score(prompt, "\n%%%") == 0


def test_longbench_has_its_21_datasets_and_infinitebench_its_12_tasks() -> None:
    assert len(DATASETS) == 21 and len(FORMS) == 12
    assert {form.metric for form in FORMS.values()} <= set(METRICS)


def test_the_file_or_a_parameter_may_name_the_dataset(tmp_path: Path) -> None:
    record = longbench()
    del record["dataset"]
    assert whole(f"longbench:{write(tmp_path / 'musique_e.jsonl', record)}")[0].new_tokens == 32
    file = write(tmp_path / "file.jsonl", record)
    assert whole(f"longbench@task=gov_report:{file}")[0].metric == "rouge_l"
    assert parse_task(f"longbench@task=gov_report:{file}").name == "longbench@task=gov_report:file.jsonl"


def test_tasks_by_example_are_scored_by_their_first_line(tmp_path: Path) -> None:
    file = write(tmp_path / "file.jsonl", longbench("trec", answers=["Date"], all_classes=["Date", "Place"]))
    prompt, _ = whole(f"longbench:{file}")
    assert prompt.choices == ("Date", "Place")
    assert score(prompt, "Date\nQuestion: where?\nType: Place") == 1
    assert score(prompt, "Date or Place") == 0.5


@pytest.mark.parametrize(
    ("task", "more", "right", "wrong"),
    [
        ("passkey", {"answer": ["71432"]}, "71432. 5", "5 71432"),
        ("number_string", {"answer": "0012233"}, "0012233", "12233"),
        ("kv_retrieval", {"answer": ["ab-12"]}, '"ab-12"', '"ab-13"'),
        ("longbook_sum_eng", {"answer": ["the dog barks\nand runs"]}, "The dog barks and runs.", "a cat"),
        ("longbook_choice_eng", {"options": OPTIONS}, "B. the dog", "C"),
        ("longbook_choice_eng", {"options": OPTIONS, "answer": ["the dog", "B"]}, "the answer is B", "A"),
        ("longbook_choice_eng", {"options": OPTIONS, "answer": "B"}, "the dog", "the cow"),
        ("longbook_qa_eng", {"answer": ["cat", "the dog"]}, "A dog!", "bird"),
        ("longbook_qa_chn", {"answer": ["北京"]}, "北京\u3002", "上海"),
        ("longdialogue_qa_eng", {"answer": ["JOHN"]}, "John", "Joan"),
        ("math_find", {"answer": [3]}, "3", "4"),
        ("math_find", {"answer": "2.5"}, "2.50", "25"),
        ("math_calc", {"answer": [1, 4, 8]}, "[1, 4, 8]", "[4, 1, 8]"),
        ("code_run", {"answer": [-14], "input": "What is the return value of func_1(-3)?"}, "It is -14.", "14"),
        ("code_debug", {"options": OPTIONS, "answer": ["the dog"]}, "B", "D"),
    ],
)
def test_every_task_of_infinitebench(tmp_path: Path, task: str, more: dict[str, Any], right: str, wrong: str) -> None:
    prompt, text = whole(f"infinitebench:{write(tmp_path / f'{task}.jsonl', infinitebench(**more))}")
    assert CONTEXT in text and prompt.new_tokens == FORMS[task].new_tokens
    assert score(prompt, right) == 1 and score(prompt, wrong) == 0
    if "options" in more:
        assert "\nA. the cat\nB. the dog\nC. the bird\nD. the cow\n" in text and prompt.references == ("B", "the dog")
    if task == "code_run":
        assert text.endswith("the return value of func_1(-3) is")


@pytest.mark.parametrize(
    ("name", "record", "metric", "new_tokens"),
    [
        ("niah_multivalue/validation.jsonl", ruler(), "all", 128),
        ("qa_1/test.jsonl", ruler(answer_prefix=" Answer:"), "any", 32),
        ("files/vt.jsonl", ruler(answer_prefix=None), "all", 30),
        ("files/cwe.jsonl", ruler(outputs="123"), "all", 120),
        ("files/fwe_2.jsonl", ruler(), "all", 50),
    ],
)
def test_rulers_own_files(tmp_path: Path, name: str, record: dict[str, Any], metric: str, new_tokens: int) -> None:
    file = write(tmp_path / name, record)
    prompt, text = whole(f"ruler:{file}")
    assert text.endswith("Name them. Answer:" if record.get("answer_prefix") else "Name them.")
    assert (prompt.metric, prompt.new_tokens) == (metric, new_tokens)
    assert score(prompt, "456") == (1 if metric == "any" else 0.5 if len(prompt.references) == 2 else 0)
    of_subset = file.stem in ("validation", "test")
    assert parse_task(f"ruler:{file}").name == f"ruler:{name if of_subset else file.name}"


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_what_is_too_long_loses_its_middle(tmp_path: Path, make: Any) -> None:
    tokenizer = make()
    file = write(tmp_path / "vt.jsonl", ruler())
    for length in (100, 101):
        (prompt,) = make_prompts(f"ruler:{file}", tokenizer, length=length, samples=1, seed=0)
        assert len(prompt.input_ids) == length
        text = tokenizer.decode(prompt.input_ids, skip_special_tokens=True)
        assert text.strip().startswith("start {of} it.") and text.endswith("the {end} of it. Name them.")
    assert cut_middle((1, 2, 3, 4, 5), 3) == (1, 4, 5) and cut_middle((1, 2), 3) == (1, 2)


def test_shorter_prompts_are_taken_only_where_that_is_wanted(tmp_path: Path) -> None:
    file = write(tmp_path / "vt.jsonl", *(ruler(input=f"{n} " + "word " * 30 * n) for n in range(1, 9)))
    lengths = {len(prompt.input_ids) for prompt in made(f"ruler:{file}", samples=8, shorter=True)}
    assert max(lengths) == 300 and len(lengths) == 3
    assert {len(prompt.input_ids) for prompt in made(f"ruler:{file}", samples=2)} == {300}
    with pytest.raises(
        HeadwiseError, match=r"vt.jsonl has \d prompts of at least 300 tokens, 8 are needed; the longest"
    ):
        made(f"ruler:{file}", samples=8)
    with pytest.raises(HeadwiseError, match=r"vt\.jsonl has 8 prompts, 9 are needed; the longest of its 8 has"):
        made(f"ruler:{file}", samples=9, shorter=True)


def test_the_seed_decides_the_order(tmp_path: Path) -> None:
    file = write(tmp_path / "vt.jsonl", *(ruler(input=f"{n}. {CONTEXT}") for n in range(9)))
    first, again, other = (digest(made(f"ruler:{file}", samples=3, seed=seed)) for seed in (5, 5, 6))
    assert first == again != other


@pytest.mark.parametrize(
    ("task", "content", "line"),
    [
        ("longbench", "", "qasper.jsonl is empty"),
        ("longbench", json.dumps(longbench())[:-20], "qasper.jsonl, line 1: not JSON: "),
        ("longbench", json.dumps(longbench()) + '\n{"input', "qasper.jsonl, line 2: not JSON: unterminated string"),
        ("longbench", "[]", "qasper.jsonl, line 1: not a JSON object: []"),
        ("longbench", '{"dataset": "qasper", "answers": ["a"]}', "line 1: no field input; it has dataset, answers"),
        ("longbench", json.dumps(longbench(context=3)), "line 1: context must be a string, got 3"),
        ("longbench", json.dumps(longbench(answers=[])), "line 1: answers must be strings or numbers, got []"),
        ("longbench", json.dumps(longbench(answers=[None])), "line 1: answers must be strings or numbers, got [None]"),
        ("longbench", json.dumps(longbench("trec")), "line 1: trec needs all_classes, the classes to choose from"),
        ("longbench", json.dumps(longbench("other")), "line 1: 'other' is no task of longbench; write longbench@task="),
        ("infinitebench", json.dumps(infinitebench()), "qasper.jsonl: 'qasper' is no task of infinitebench; write"),
        ("infinitebench@task=math_find", json.dumps(infinitebench()), "line 1: answer must be numbers, got 'the dog'"),
        ("infinitebench@task=code_debug", json.dumps(infinitebench()), "line 1: options must be strings or numbers"),
        (
            "infinitebench@task=code_debug",
            json.dumps(infinitebench(options=OPTIONS[:3])),
            "line 1: options must be 4, got 3",
        ),
        (
            "infinitebench@task=code_debug",
            json.dumps(infinitebench(options=OPTIONS, answer="a pig")),
            "line 1: the answer 'a pig' is none of the options",
        ),
        (
            "infinitebench@task=code_run",
            json.dumps(infinitebench(answer=1)),
            "line 1: input names no call such as func_1(2): 'What is it?'",
        ),
        ("ruler", json.dumps(ruler()), "qasper.jsonl: 'qasper' is no task of RULER; write ruler@task=NAME:FILE"),
        ("ruler@task=vt", json.dumps({"input": "a"}), "line 1: no field outputs; it has input"),
        ("ruler@task=vt", json.dumps(ruler(outputs={"a": 1})), "line 1: outputs must be strings or numbers"),
    ],
)
def test_bad_files(tmp_path: Path, task: str, content: str, line: str) -> None:
    file = tmp_path / "qasper.jsonl"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(HeadwiseError, match=re.escape(line)) as caught:
        made(f"{task}:{file}")
    assert "\n" not in str(caught.value) and str(tmp_path) not in str(caught.value)
