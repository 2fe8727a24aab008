"""The evaluation as a whole on a tiny model: runs, resumed runs, and written files."""

from __future__ import annotations

import shutil
from statistics import median
from typing import Any

import pytest

import artifacts
from artifacts import HeadwiseError
from profiling.evaluation import measure as evaluation
from profiling.evaluation import run as evaluation_run
from profiling.evaluation.record import evidence_of
from profiling.evaluation.report import Report
from profiling.models.loading import load_model
from profiling.prompts.held_out import Seen
from profiling.prompts.prompt import DEFAULT_TASKS, Prompt
from profiling.prompts.text_files import read_ids
from profiling.prompts.tokens import Encoder
from tests.profiling.conftest import LENGTH


def by_row(record: dict[str, Any]) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Figures of a record by task, method and measure."""
    return {(each["task"], each["method"], each["measure"]): each for each in record["figures"]}


def test_evaluate_writes_table_page_and_json(command, tmp_path, searched, capsys):
    record = command(
        f"--task niah_single_2 --task passkey --depths 0 1 --samples 2 --text {searched}/text.txt "
        "--methods headwise headwise+snapkv --repeats 2 --steps 2 --attach"
    )
    methods = ("dense", "headwise", "headwise+snapkv")
    assert tuple(each["name"] for each in record["methods"]) == methods
    figures = by_row(record)
    for name in methods:
        assert figures["niah_single_2:text.txt", name, "score"]["count"] == 2
        assert figures["passkey", name, "nll of the answer"]["count"] == 2
        assert figures["all answers", name, "score"]["count"] == 4
        assert (("text:text.txt", name, "perplexity") in figures) == ("+" not in name)
        assert figures["text:text.txt", name, "perplexity, last 128 tokens"]["value"] > 1
        assert (figures["passkey", name, "score"]["difference"] is None) == (name == "dense")
    cells = {(cell["method"], cell["depth"]) for cell in record["grid"]}
    assert cells == {(name, depth) for name in methods for depth in (0, 1)}
    assert {each["method"] for each in record["prefill"]} == {*methods, "dense_kernel"}
    decoded = {each["method"] for each in record["decode"]}
    assert decoded == {"dense", "dense_kernel", "headwise", "headwise+snapkv"}
    timed = next(each for each in record["prefill"] if each["method"] == "headwise")
    by_hand = {
        name: median(d / s for d, s in zip(rounds, timed["rounds"], strict=True))
        for name, rounds in timed["dense_rounds"].items()
    }
    assert timed["speedups"] == pytest.approx(by_hand)
    assert set(by_hand) == {"dense", "dense_kernel"}
    out = capsys.readouterr().out
    (line,) = (x for x in out.splitlines() if x.startswith("| headwise "))
    (alone,) = (each for each in record["attention"] if each["method"] == "headwise")
    assert set(alone["dense"]) == {"dense", "dense_kernel"}
    ratios = [f"{min(by_hand.values()):.2f}x", f"{by_hand['dense']:.2f}x"]
    assert line.split()[5:10:2] == [*ratios, f"{alone['seconds']:.3f}"]
    html = (tmp_path / "report" / "index.html").read_text()
    assert all(f">{ratio}</td>" in html for ratio in ratios)
    evidence = artifacts.load(tmp_path / "cfg.yaml").evidence.measurements
    score = next(each for each in evidence if each.name == "score: passkey")
    assert score.value == figures["passkey", "headwise", "score"]["value"]
    assert "--attach" in score.command
    baselines = {
        each.baseline_name: each.baseline
        for each in evidence
        if (each.name, each.unit) == ("prefill", "s")
    }
    assert set(baselines) == {"dense attention by sdpa", "dense attention by Headwise's kernel"}
    # The fastest one first: speed-ups are over it.
    assert list(baselines.values()) == sorted(baselines.values())
    assert next(each for each in evidence if each.name == "perplexity: text:text.txt").samples == 2


@pytest.mark.usefixtures("invented")
def test_evaluate_compares_other_artifacts(command, tmp_path):
    shutil.copy(tmp_path / "cfg.yaml", tmp_path / "paper.yaml")
    words = "--task passkey --samples 1 --no-speed --methods headwise"
    record = command(f"{words} paper-tail", extra=tmp_path / "paper.yaml")
    rows = {each["name"]: each for each in record["methods"]}
    assert list(rows) == ["dense", "headwise", "paper-tail", "paper"]
    assert rows["paper"]["source"] == "MInference 1.0's own search" != rows["headwise"]["source"]
    # Searched without a dense tail, it has that of the others here.
    assert rows["paper"]["density"] > rows["paper-tail"]["density"] > 0.5


@pytest.mark.usefixtures("invented")
def test_evaluate_quick_takes_few_prefills(command, monkeypatch):
    contexts = []
    trials = evaluation.trials

    def asking(*arguments):
        contexts.append(len(arguments[2]))
        return trials(*arguments)

    prefills = []

    def counting(*args, **options):
        loaded = load_model(*args, **options)

        def count(module, arguments, keywords):
            ids = arguments[0] if arguments else keywords["input_ids"]
            # But for decode.
            prefills.extend([ids.shape[1]] * (ids.shape[1] > LENGTH // 2))

        loaded.model.register_forward_pre_hook(count, with_kwargs=True)
        return loaded

    monkeypatch.setattr(evaluation, "trials", asking)
    monkeypatch.setattr(evaluation_run, "load_model", counting)
    record = command("--quick --steps 1")
    # Eight contexts under four methods, here without a model; three rounds of five, decode of
    # three, one pass for sizes, one for attention. A default search of 8,192 tokens takes as long
    # as 53 dense prefills.
    assert len(contexts) == 8 * 4 and len(prefills) == 3 * 5 + 3 + 1 + 1
    assert [len(each["rounds"]) for each in record["prefill"]] == [2] * 5
    assert len(record["decode"]) == 3
    names = [each["name"] for each in record["methods"]]
    assert names == ["dense", "headwise", "vertical_slash", "a_shape"]
    tasks = {each["task"] for each in record["figures"]}
    assert tasks == {"line_turns@questions=4", *map(str, DEFAULT_TASKS[1:]), "all answers"}
    assert record["memory"] == [] and len(record["prefill"]) == 5


@pytest.mark.parametrize("kept", [True, False])
def test_evaluate_attaches_to_the_artifact_that_was_measured(
    kept, command, invented, tmp_path, monkeypatch
):
    """Evidence that others add meanwhile stays; other patterns are another artifact."""
    file, real = tmp_path / "cfg.yaml", Report.write

    def meanwhile(report, folder):
        def change(now, arrays):
            if kept:
                other = {"name": "of another", "command": "another"}
                entry = evidence_of(report.record)[0].model_copy(update=other)
                added = now.evidence.with_measurements((entry,))
                return now.model_copy(update={"evidence": added}), arrays
            prefill = now.prefill.model_copy(update={"dense_below": 600})
            return now.model_copy(update={"prefill": prefill}), arrays

        artifacts.update(file, change)
        return real(report, folder)

    monkeypatch.setattr(Report, "write", meanwhile)
    words = "--task passkey --samples 1 --methods headwise --no-speed --attach"
    if kept:
        command(words)
        names = {each.name for each in artifacts.load(file).evidence.measurements}
        assert {"of another", "score: passkey"} <= names
        return
    with pytest.raises(HeadwiseError, match=r"replaced during .*\(different prefill\)"):
        command(words)
    # Nothing is lost.
    assert (tmp_path / "report" / "evaluation.json").exists()
    assert not artifacts.load(file).evidence.measurements


def test_evaluate_speed_only_runs_no_trials(command, invented):
    record = command("--speed-only --repeats 1")
    assert invented == [] and record["figures"] == record["decode"] == record["memory"] == []
    assert {each["method"] for each in record["prefill"]} == {"dense", "dense_kernel", "headwise"}
    assert [each["method"] for each in record["attention"]] == ["headwise"]


def test_evaluate_of_dense_attention_alone_times_no_patterns(command):
    record = command("--speed-only --repeats 1 --methods dense")
    assert {each["method"] for each in record["prefill"]} == {"dense", "dense_kernel"}
    assert record["attention"] == []


def test_evaluate_times_methods_that_are_the_same(command, tmp_path):
    """Without a dense tail `headwise-tail` is `headwise`, and so is a renamed artifact's row."""
    artifact, arrays = artifacts.load_pair(tmp_path / "cfg.yaml")
    assert artifact.prefill.dense_tail == 0
    record = command("--speed-only --repeats 1 --methods headwise headwise-tail")
    seconds = {each["method"]: each["seconds"] for each in record["attention"]}
    assert list(seconds) == ["headwise", "headwise-tail"]
    assert seconds["headwise"] == seconds["headwise-tail"] > 0
    words = "--speed-only --repeats 1 --methods headwise"
    rows = []
    for name in ("one", "two"):
        artifacts.save(artifact, tmp_path / f"{name}.yaml", arrays)
        record = command(words, extra=tmp_path / f"{name}.yaml")
        rows.append({each["method"]: each["seconds"] for each in record["attention"]})
    assert list(rows[1]) == ["headwise", "two"]
    assert list(rows[0].values()) == list(rows[1].values())


def test_evaluate_sums_attention_over_the_same_layers(command, tmp_path, monkeypatch):
    """With an artifact that has patterns in one layer, and then without it."""

    def counted(loaded, methods, length, layers):
        return dict.fromkeys(["dense", *(each.name for each in methods)], float(len(layers)))

    monkeypatch.setattr("profiling.evaluation.times.attention_seconds", counted)
    artifact = artifacts.load(tmp_path / "cfg.yaml")
    first = artifact.prefill.layers[0]
    imported = artifacts.Imported(format="minference", file="first.json", sha256="0" * 64)
    changes = {"layers": (first, None, None), "imported": imported}
    prefill = artifact.prefill.model_copy(update=changes)
    patterns = {name: artifact.patterns[name] for name in first}
    sections = {"patterns": patterns, "prefill": prefill, "search": None}
    artifacts.save(artifact.model_copy(update=sections), tmp_path / "first.yaml")

    words = "--speed-only --repeats 1 --methods headwise"
    both = command(words, extra=tmp_path / "first.yaml")["attention"]
    assert [(each["method"], each["seconds"]) for each in both] == [("headwise", 1), ("first", 1)]
    (alone,) = command(words)["attention"]
    assert (alone["method"], alone["seconds"], alone["dense"]) == ("headwise", 3, {"dense": 3})


def test_evaluate_kl_to_dense_of_prefills(command, searched):
    base = "--task line_asked --no-speed --samples 1 --seeds 2 --methods"
    text = f"--text {searched}/text.txt"
    figures = by_row(command(f"{base} headwise dense_kernel dense+snapkv {text}"))
    for task in ("line_asked", "text:text.txt"):
        own = figures[task, "headwise", "KL to dense"]
        exact = figures[task, "dense_kernel", "KL to dense"]
        assert 0 <= exact["value"] < own["value"] / 10
        # A prompt of each of two seeds. Nothing is nearer to dense attention than itself: no test.
        assert own["p"] is None and own["low"] < own["value"] < own["high"]
        for other in ("dense", "dense+snapkv"):
            assert (task, other, "KL to dense") not in figures
    assert figures["line_asked", "headwise", "KL to dense"]["count"] == 2

    # A method that is added later is compared with dense attention, too.
    later, alone = (by_row(command(f"{base} a_shape", out=out)) for out in ("report", "new"))
    row = ("line_asked", "a_shape", "KL to dense")
    assert later[row]["value"] == pytest.approx(alone[row]["value"], rel=1e-3)


def test_evaluate_of_equal_depths_asks_once(command, invented):
    words = "--task niah_single_2 --depths 0 0 --samples 1 --no-speed --methods dense"
    (cell,) = command(words)["grid"]
    assert (cell["depth"], cell["count"]) == (0, 1)


def test_evaluate_of_more_methods_and_tasks_runs_new_trials_only(command, invented):
    base = "--task passkey --no-speed --samples 3 --methods headwise"
    command(base)
    assert invented == ["dense", "headwise"] * 3
    invented.clear()
    command(f"{base} a_shape --task line_retrieval")
    counts = {name: invented.count(name) for name in ("dense", "headwise", "a_shape")}
    assert counts == {"dense": 3, "headwise": 3, "a_shape": 6}


@pytest.mark.usefixtures("invented")
def test_evaluate_reports_windows_that_the_search_saw(command, loaded, searched, tmp_path, capsys):
    """A text that the search saw whole is named in the table, the page and the JSON."""
    text = searched / "text.txt"
    artifact, arrays = artifacts.load_pair(tmp_path / "cfg.yaml")
    digests = Seen([Prompt(read_ids(Encoder(loaded.tokenizer), text), None)]).digests
    calibration = artifact.search.calibration.model_copy(
        update={"tasks": ("text:text.txt",), "lengths": (LENGTH,), "seen_windows": len(digests)}
    )
    info = artifact.search.model_copy(update={"calibration": calibration})
    arrays |= artifacts.window_arrays(digests)
    artifacts.save(artifact.model_copy(update={"search": info}), tmp_path / "cfg.yaml", arrays)
    words = "--no-speed --samples 2 --task passkey --task niah_single_2 --depths 0 1"
    assert command(f"{words} --text {text} --methods headwise")["seen_by_search"] == [
        {"task": "niah_single_2:text.txt", "length": LENGTH, "overlapping": 4, "samples": 4},
        {"task": "text:text.txt", "length": LENGTH, "overlapping": 2, "samples": 2},
    ]
    said = "2 of 2 prompts of text:text.txt at 900 tokens overlap"
    assert said in capsys.readouterr().out
    assert said in (tmp_path / "report" / "index.html").read_text()
