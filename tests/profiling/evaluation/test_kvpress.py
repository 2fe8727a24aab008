"""An evaluation in kvpress's result folders, field by field, and read as its leaderboard reads them."""

from __future__ import annotations

import ast
import csv
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from artifacts import HeadwiseError
from profiling.evaluation.kvpress import write_results
from profiling.evaluation.measure import Outcome
from profiling.prompts.prompt import Prompt, make_prompts
from tests.profiling.tokenizers import byte_level

TOKENIZER = byte_level(bos=True)
RECORD: dict[str, Any] = {
    "methods": [
        {"name": "dense", "length": 4096, "kept": 1.0, "sizes": ""},
        {"name": "headwise+snapkv", "length": 4096, "kept": 0.125, "sizes": "budget 0.125"},
        {"name": "dense", "length": 512, "kept": None, "sizes": ""},
    ],
    "settings": {"device": "cpu", "dtype": "bfloat16", "seed": 1000},
}


def outcome(task: str, method: str, prompts: list[Prompt], *found: tuple[str, float], length: int = 4096) -> Outcome:
    records = tuple({"text": text, "score": score} for text, score in found)
    return Outcome(task=task, length=length, depth=None, method=method, records=records, prompts=tuple(prompts))


def asked(answer: str, *references: str, turn: int = 0, **more: Any) -> Prompt:
    return Prompt((*TOKENIZER("some text")["input_ids"],), answer, references=references, turn=turn, **more)


def read(folder: Path) -> tuple[list[dict[str, str]], dict[str, Any], dict[str, Any]]:
    assert {path.name for path in folder.iterdir() if path.is_file()} == {
        "predictions.csv",
        "metrics.json",
        "config.yaml",
    }
    with (folder / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return rows, json.loads((folder / "metrics.json").read_text()), yaml.safe_load((folder / "config.yaml").read_text())


def test_every_field(tmp_path: Path) -> None:
    vt = [asked("A, B", "A", "B", metric="all", new_tokens=30), asked("C, D", "C", "D", metric="all", new_tokens=30)]
    found = ('it is "A",\nnot b', 1.0), ("", 1 / 3)
    outcomes = [outcome("vt@hops=2", "headwise+snapkv", vt, *found)]
    outcomes += [outcome("ruler:niah_single_1/validation.jsonl", "headwise+snapkv", vt[:1], ("B", 0.5))]
    (folder,) = write_results(tmp_path, RECORD, outcomes, TOKENIZER, model="org/toy")
    assert folder == tmp_path / "ruler__4096__org--toy__headwise+snapkv__0.88__query_aware"
    rows, metrics, config = read(folder)
    common = {"question": "", "answer_prefix": "", "max_new_tokens": "30", "compression_ratio": "0.875"}
    assert rows == [
        common | {"task": "vt", "answer": "['A', 'B']", "predicted_answer": 'it is "A",\nnot b'},
        common | {"task": "vt", "answer": "['C', 'D']", "predicted_answer": ""},
        common | {"task": "niah_single_1", "answer": "['A', 'B']", "predicted_answer": "B"},
    ]
    assert metrics == {"vt": {"string_match": 66.67}, "niah_single_1": {"string_match": 50.0}}
    assert (folder / "metrics.json").read_text().startswith('{\n    "vt": {\n        "string_match"')
    nothing = (
        "fraction",
        "max_new_tokens",
        "max_context_length",
        "needle_depth",
        "compression_interval",
        "target_size",
    )
    assert list(config) == [
        *("dataset", "data_dir", "model", "device", "press_name", "compression_ratio"),
        *("key_channel_compression_ratio", *nothing[:3], "query_aware", *nothing[3:], "hidden_states_buffer_size"),
        *("output_dir", "log_level", "model_kwargs", "press_init_command", "seed", "fp8"),
    ]
    assert config | {name: None for name in nothing} == {name: None for name in config} | {
        "dataset": "ruler",
        "data_dir": "4096",
        "model": "org/toy",
        "device": "cpu",
        "press_name": "headwise+snapkv",
        "compression_ratio": 0.875,
        "query_aware": True,
        "output_dir": str(tmp_path),
        "log_level": "INFO",
        "model_kwargs": {"dtype": "bfloat16"},
        "press_init_command": "headwise+snapkv(budget 0.125)",
        "seed": 1000,
        "fp8": False,
    }
    assert config["fraction"] == 1.0


def test_a_folder_for_each_dataset_length_method_and_way_of_asking(tmp_path: Path) -> None:
    early, late = asked("x"), asked("y", turn=3)
    outcomes = [outcome("passkey", "dense", [early], ("x", 1.0), length=512)]
    outcomes += [outcome("line_turns", "dense", [late], ("z", 0.0)), outcome("cwe", "dense", [early], ("x", 1.0))]
    outcomes += [outcome("cwe", "headwise+snapkv", [early], ("x", 1.0))]
    names = [path.name for path in write_results(tmp_path, RECORD, outcomes, TOKENIZER, model="toy")]
    assert names == [
        "headwise__512__toy__dense__0.00__query_aware",
        "headwise__4096__toy__dense__0.00",
        "ruler__4096__toy__dense__0.00__query_aware",
        "ruler__4096__toy__headwise+snapkv__0.88__query_aware",
    ]
    rows, metrics, config = read(tmp_path / names[1])
    # The later turn is the question, and an answer is a list as in all their data sets.
    assert rows[0]["question"] == TOKENIZER.decode(late.input_ids[-3:]) and ast.literal_eval(rows[0]["answer"]) == ["y"]
    assert metrics == {"line_turns": {"score": 0.0}} and config["query_aware"] is False
    # Again: nothing is written over.
    again = write_results(tmp_path, RECORD, outcomes[:1], TOKENIZER, model="toy")
    again += write_results(tmp_path, RECORD, outcomes[:1], TOKENIZER, model="toy")
    assert again == [tmp_path / names[0] / "1", tmp_path / names[0] / "2"]
    assert read(again[0])[:2] == read(tmp_path / names[0])[:2]


def test_what_has_no_answer_after_its_prompt_is_left_out(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("It was a long way to the sea, and nobody had been there. " * 100)
    tasks = ("line_asked", f"text:{text}")
    prompts = {task: make_prompts(task, TOKENIZER, length=800, samples=1, seed=0) for task in tasks}
    outcomes = [outcome(task, "dense", made, ("", 0.5)) for task, made in prompts.items()]
    assert write_results(tmp_path / "out", RECORD, outcomes, TOKENIZER, model="toy") == []
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(HeadwiseError, match="cannot make the folder"):
        write_results(
            tmp_path / "out", RECORD, [outcome("cwe", "dense", [asked("x")], ("", 0.0))], TOKENIZER, model="m"
        )
