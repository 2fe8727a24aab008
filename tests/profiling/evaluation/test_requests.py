"""Requests of an evaluation: names of artifacts, tasks, lengths, and the units of its prompts."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

import artifacts
from artifacts import HeadwiseError
from artifacts.cli.parser import read
from artifacts.store.hashing import canonical_json
from headwise.__main__ import parser_of
from profiling.evaluation import measure
from profiling.evaluation import run as evaluation_run
from profiling.evaluation.config import Config
from profiling.evaluation.measure import tasks_of
from profiling.evaluation.method_table import TAIL, method_names
from profiling.evaluation.methods import Methods, beside_of
from profiling.prompts.held_out import SEED
from profiling.prompts.prompt import DEFAULT_TASKS, KINDS, Task
from tests.profiling.conftest import LENGTH


def config_of(words: str) -> Config:
    line = f"{words} --model elsewhere"
    return read(parser_of("evaluate"), Config, line.split(), "")


def changed(artifact: Any, **sections: Any) -> Any:
    """An artifact with other fields in some of its sections."""
    update = {
        name: getattr(artifact, name).model_copy(update=fields) for name, fields in sections.items()
    }
    return artifact.model_copy(update=update)


@pytest.fixture
def saved(searched, tmp_path):
    """saved(name, **sections): the file of the searched artifact with some fields changed."""
    artifact, arrays = artifacts.load_pair(searched / "cfg.yaml")

    def save(name, **sections):
        file = tmp_path / f"{name}.yaml"
        file.parent.mkdir(exist_ok=True)
        artifacts.save(changed(artifact, **sections), file, arrays)
        return file

    return save


@pytest.mark.parametrize(
    "name",
    ["headwise", "dense", "dense-tail", "vertical_slash-tail", "dense+own", "headwise+h2o", "all"],
)
def test_beside_of_refuses_the_name_of_a_method(saved, name):
    with pytest.raises(HeadwiseError, match=rf"there is a method {re.escape(name)} already"):
        beside_of([saved(name)])


@pytest.mark.parametrize(
    ("names", "taken"),
    [
        (("foo", "foo-tail"), "foo-tail"),
        (("foo-tail", "foo"), "foo-tail"),
        (("a/foo", "b/foo"), "foo"),
    ],
)
def test_beside_of_refuses_artifacts_whose_methods_have_one_name(saved, names, taken):
    with pytest.raises(HeadwiseError, match=rf"there is a method {taken} already"):
        beside_of(map(saved, names))


def test_beside_of_refuses_an_artifact_without_patterns(searched, tmp_path):
    artifact = artifacts.load(searched / "cfg.yaml")
    empty = changed(artifact, prefill={"layers": (None,) * artifact.model.num_layers})
    file = tmp_path / "cache.yaml"
    artifacts.save(empty.model_copy(update={"patterns": {}, "search": None}), file)
    with pytest.raises(HeadwiseError, match="has no patterns"):
        beside_of([file])


def test_methods_of_other_artifacts_are_found_by_their_whole_names(loaded, searched):
    own, arrays = artifacts.load_pair(searched / "cfg.yaml")
    names = ("foo-tail", "omnikv", "random", "x+y", "a:b=c")
    others = {name: (own, arrays) for name in names}
    empty = changed(own, prefill={"layers": (None,) * own.model.num_layers})
    # Also next to an artifact without patterns.
    for artifact in (own, empty.model_copy(update={"patterns": {}})):
        known = method_names(artifact, others)
        methods = Methods(loaded, artifact, other_artifacts=others)
        for name in names:
            for method, tail in ((name, artifact.prefill.dense_tail or TAIL), (f"{name}-tail", 0)):
                assert method in known
                served = methods.make(method, LENGTH).headwise
                assert served is not None and served.artifact.prefill.dense_tail == tail
                assert ("without a dense tail" in methods.says(method)[0]) == (not tail)


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        (
            {"prefill": {"dense_below": 901}},
            "--length 900 is below the dense_below of .*other.yaml, 901",
        ),
        ({"model": {"max_positions": 512}}, "--length 900 is more than the 512 positions"),
        ({"model": {"weights_sha256": "0" * 64}}, "do not go together: .* weights_sha256 is "),
    ],
)
def test_evaluate_refuses_what_any_artifact_cannot_serve(
    saved, sections, says, tmp_path, monkeypatch
):
    """In any order, before the model is loaded."""
    monkeypatch.setattr(evaluation_run, "load_model", None)
    files = [str(saved("good")), str(saved("other", **sections))]
    for order in (files, files[::-1]):
        config = config_of(f"{' '.join(order)} --length {LENGTH} --out {tmp_path}/out")
        with pytest.raises(HeadwiseError, match=says):
            evaluation_run.run(config)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("searched_with", "words", "seed"),
    [
        (0, "--task passkey --seed 0", 0),
        (1002, "--seeds 3", 1002),
        (7, f"--task prose --task chain --seed {SEED + 7}", SEED + 7),
    ],
)
def test_evaluate_refuses_the_seed_of_a_search(
    searched_with, words, seed, saved, tmp_path, monkeypatch
):
    """Of any artifact, before the model is loaded; of tasks that make their prompts."""
    monkeypatch.setattr(evaluation_run, "load_model", None)
    file = saved("other", search={"seed": searched_with})
    words = f"{saved('good', search={'seed': 5})} {file} --length {LENGTH} {words}"
    with pytest.raises(HeadwiseError, match=f"seed {seed} are those of the search of {file}, "):
        evaluation_run.run(config_of(f"{words} --out {tmp_path}/out"))
    assert not (tmp_path / "out").exists()


def test_check_seeds_allows_other_seeds_and_tasks_with_texts(searched):
    file = searched / "cfg.yaml"
    artifact = artifacts.load(file)
    assert artifact.search is not None and artifact.search.seed == 0

    def check(words, own=artifact):
        quality = evaluation_run.quality_of(config_of(f"cfg.yaml --out report {words}"), own)
        measure.check_seeds(file, own, quality)

    check("--seed 1 --seeds 9")
    # Windows of a text are compared one by one.
    check("--seed 0 --task prose")
    check("--seed 0 --speed-only")
    check("--seed 0", artifact.model_copy(update={"search": None}))
    with pytest.raises(HeadwiseError, match=r"whose seed was 0 \(passkey\).* such as 1000"):
        check("--seed 0 --task prose --task passkey")


def test_quality_of_default_length_is_the_searched_one_of_all_artifacts(searched):
    artifact = artifacts.load(searched / "cfg.yaml")
    assert artifact.search is not None
    unsearched = artifact.model_copy(update={"search": None})

    def of(origin=artifact, positions=1 << 20, **prefill):
        fields = {"dense_below": 128, **prefill}
        return changed(origin, model={"max_positions": positions}, prefill=fields)

    def length(first, *others, more=""):
        config = config_of(f"cfg.yaml --out report {more}")
        named = {str(number): other for number, other in enumerate(others)}
        return evaluation_run.quality_of(config, first, named).lengths

    for more in ("", "--speed-only"):
        assert length(of(), more=more) == (LENGTH,)
        assert length(of(length=4096), more=more) == (4096,)
        assert length(of(), of(length=2048), more=more) == (2048,)
        # No search is known of a conversion.
        assert length(of(unsearched), more=more) == (8192,)
        assert length(of(unsearched, positions=2048), more=more) == (2048,)
        # Never dense, and never beyond the positions.
        assert length(of(), of(dense_below=3000), more=more) == (3000,)
        assert length(of(length=1 << 21), more=more) == (1 << 20,)
    assert length(of(length=4096), of(dense_below=3000), more="--quick") == (3000,)


def test_quality_of_default_tasks(searched):
    artifact = artifacts.load(searched / "cfg.yaml")

    def defaults(more=""):
        config = config_of(f"cfg.yaml --out report {more}")
        quality = evaluation_run.quality_of(config, artifact)
        return quality.tasks, quality.lengths

    assert defaults() == (DEFAULT_TASKS, (LENGTH,))
    assert defaults("--quick")[0] != DEFAULT_TASKS
    assert defaults("--speed-only") == ((), (LENGTH,))
    assert defaults("--length 800 700 --task passkey") == ((Task("passkey"),), (700, 800))


def test_quality_of_keeps_the_methods_named_beside_all(searched):
    artifact = artifacts.load(searched / "cfg.yaml")
    config = config_of("cfg.yaml --out report --methods all dense+snapkv:budget=0.1 a_shape")
    methods = evaluation_run.quality_of(config, artifact, {"other": artifact}).methods
    every = method_names(artifact, ("other",))
    assert methods == (*every, "dense+snapkv:budget=0.1") and methods[0] == "dense"


def test_tasks_of_adds_the_text_to_each_needle_task(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    for folder in (".", "other"):
        (tmp_path / folder / "a.txt").write_text("A text.")

    def tasks(*names):
        options = " ".join(f"--task {name}" for name in names)
        config = config_of(f"cfg.yaml --out report --text a.txt {options}")
        return tuple(map(str, tasks_of(config.tasks, config.text)))

    assert tasks("niah_single_2") == ("niah_single_2:a.txt", "text:a.txt")
    assert tasks("niah_single_2@depth=0.50") == ("niah_single_2@depth=0.5:a.txt", "text:a.txt")
    every = tasks("passkey", "all", "niah_single_2@depth=1", "niah_single_2", "text:./a.txt")
    free = {name for name, kind in KINDS.items() if kind.takes_file != "must"}
    needles = {"niah_single_2:a.txt", "niah_single_2@depth=1.0:a.txt"}
    assert set(every) == free - {"niah_single_2"} | needles | {"text:a.txt"}
    assert len(every) == len(set(every))
    # A file that a task names stays; the same file is one task, however its path is written.
    whole = f"niah_single_2:{tmp_path / 'a.txt'}"
    assert tasks("niah_single_2", whole) == (whole, "text:a.txt")
    with pytest.raises(HeadwiseError, match=r"two tasks niah_single_2:a\.txt"):
        tasks("niah_single_2", "niah_single_2:other/a.txt")
    assert tasks_of([Task("niah_single_2")], None) == (Task("niah_single_2"),)


@pytest.mark.usefixtures("invented")
def test_evaluate_units_of_a_short_text_are_its_disjoint_windows(
    command, tmp_path, capsys, monkeypatch
):
    """Over all seeds and tasks; each prompt is hashed once, whatever the methods."""
    text = "".join(f"{at}. Nobody saw ship {at * at} on its long way. " for at in range(90))
    windows = len(text) // LENGTH
    assert windows == 4
    (tmp_path / "a.txt").write_text(text)
    lines = [{"prompt": f"{text} Question {at}?", "answer": "no"} for at in range(3)]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, lines)))
    hashed = []

    def counted(value):
        hashed.append("input_ids" in value)
        return canonical_json(value)

    monkeypatch.setattr(measure, "canonical_json", counted)
    record = command(
        f"--task niah_single_2 --task niah_single_3:{tmp_path}/a.txt "
        f"--task jsonl:{tmp_path}/b.jsonl --text {tmp_path}/a.txt "
        "--no-speed --samples 3 --seeds 2 --depths 0 1 --methods a_shape"
    )
    counts = {
        (each["task"], each["measure"]): (each["count"], each["questions"])
        for each in record["figures"]
        if each["method"] == "a_shape"
    }
    assert counts["text:a.txt", "perplexity"] == (windows, windows)
    assert counts["niah_single_2:a.txt", "score"] == (windows, 2 * windows)
    # Questions on one document, and needles in one window, are one unit.
    assert counts["jsonl:b.jsonl", "score"] == (1, 3)
    assert counts["all answers", "score"][0] <= windows
    assert sum(hashed) == 2 * windows + windows + 3 + windows
    about = {"length": LENGTH, "samples": 6}
    assert record["fewer_prompts"] == [
        {"task": "niah_single_2:a.txt", **about, "prompts": 2 * windows, "samples": 12},
        {"task": "niah_single_3:a.txt", **about, "prompts": windows},
        {"task": "jsonl:b.jsonl", **about, "prompts": 3},
        {"task": "text:a.txt", **about, "prompts": windows},
    ]
    says = f"{windows} of 6 prompts of text:a.txt at {LENGTH} tokens: there is no more text"
    assert says in capsys.readouterr().out
    assert says in (tmp_path / "report" / "index.html").read_text()
    # One unit has no interval.
    (alone,) = (
        each
        for each in record["figures"]
        if (each["task"], each["measure"]) == ("jsonl:b.jsonl", "nll of the answer")
        and each["method"] == "a_shape"
    )
    assert alone["low"] is alone["high"] is alone["difference_low"] is None
