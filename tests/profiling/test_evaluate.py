"""The evaluation as a whole on a tiny model: runs, resumed runs, and written files."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

import artifacts
from artifacts import HeadwiseError
from artifacts.cli.options import config_of
from profiling.evaluate import main, parser
from profiling.evaluation import measure as evaluation
from profiling.evaluation import run as evaluation_run
from profiling.evaluation.config import Config
from profiling.evaluation.page import page
from profiling.models.loading import LoadedModel, load_model
from profiling.prompts.held_out import Seen
from profiling.prompts.prompt import DEFAULT_TASKS, Prompt
from profiling.prompts.settings import Setting
from profiling.prompts.texts import read_ids
from profiling.prompts.tokens import Encoder
from search.published.search import HeadSearch, run
from tests.search.conftest import save_tiny

LENGTH = 900
METHODS = ("headwise", "a_shape", "headwise+snapkv")


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate")
    model = save_tiny(folder / "tiny")
    (folder / "text.txt").write_text(
        "It was a long way to the sea, and nobody had been there. " * 400
    )
    run(
        HeadSearch(
            model=str(model),
            out=folder / "cfg.yaml",
            length=LENGTH,
            budget="0.8",
            dtype="float32",
            command="x",
        )
    )
    return folder


Command = Callable[..., dict[str, Any]]


@pytest.fixture
def command(searched: Path, tmp_path: Path) -> Command:
    for file in searched.glob("cfg*"):
        shutil.copy(file, tmp_path / file.name)

    def call(*more: str, out: str = "report", beside: Path | None = None) -> dict[str, Any]:
        configs = [str(tmp_path / "cfg.yaml"), *([] if beside is None else [str(beside)])]
        base = ["--model", str(searched / "tiny"), *configs, "--out", str(tmp_path / out)]
        main([*base, "--length", str(LENGTH), "--dtype", "float32", "--no-memory", *more])
        found: dict[str, Any] = json.loads((tmp_path / out / "evaluation.json").read_text())
        return found

    return call


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the methods of all trials that are really run."""
    made: list[str] = []
    real = evaluation.trials

    def counted(model: Any, tokenizer: Any, prompts: Any, method: Any) -> Any:
        made.extend([method.name] * len(prompts))
        return real(model, tokenizer, prompts, method)

    monkeypatch.setattr(evaluation, "trials", counted)
    return made


def test_one_run_gives_a_table_a_page_and_a_json(
    command: Command, tmp_path: Path, searched: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = command(
        *("--task", "niah_single_2", "--task", "passkey", "--depths", "0", "1", "--samples", "2"),
        *(
            "--text",
            str(searched / "text.txt"),
            "--methods",
            *METHODS,
            "--repeats",
            "2",
            "--steps",
            "2",
            "--attach",
        ),
    )
    methods = ("dense", *METHODS)
    assert tuple(each["name"] for each in record["methods"]) == methods
    keys = {(each["task"], each["method"], each["measure"]): each for each in record["figures"]}
    for name in methods:
        assert keys["niah_single_2:text.txt", name, "score"]["count"] == 2
        assert keys["passkey", name, "nll of the answer"]["count"] == 2
        assert keys["all answers", name, "score"]["count"] == 4
        assert (("text:text.txt", name, "perplexity") in keys) == ("+" not in name)
        assert keys["text:text.txt", name, "perplexity, last 128 tokens"]["value"] > 1
        assert (keys["passkey", name, "score"]["difference"] is None) == (name == "dense")
    assert {(cell["method"], cell["depth"]) for cell in record["grid"]} == {
        (n, d) for n in methods for d in (0, 1)
    }
    assert {each["method"] for each in record["prefill"]} == {*methods, "dense_kernel"}
    assert {each["method"] for each in record["decode"]} == {
        "dense",
        "dense_kernel",
        "headwise",
        "headwise+snapkv",
    }
    assert record["crossover"]["measured"][-1][0] == LENGTH
    timed = next(each for each in record["prefill"] if each["method"] == "headwise")
    by_hand = [
        median(d / s for d, s in zip(timed["dense_rounds"][name], timed["rounds"], strict=True))
        for name in ("dense", "dense_kernel")
    ]
    assert list(timed["speedups"].values()) == pytest.approx(by_hand)
    shown = capsys.readouterr().out
    assert "headwise+snapkv" in shown and "index.html" in shown
    (line,) = (line for line in shown.splitlines() if line.startswith("headwise "))
    (alone,) = (each for each in record["attention"] if each["method"] == "headwise")
    assert set(alone["dense"]) == {"dense", "dense_kernel"}
    assert line.split()[2:5] == [
        f"{min(by_hand):.2f}x",
        f"{by_hand[0]:.2f}x",
        f"{alone['seconds']:.3f}",
    ]
    said = shown.splitlines()
    assert said[0].startswith("Seconds to the first token of 900 tokens: ")
    assert said[1].startswith("Attention alone, index builds included: ")
    assert (
        said[2].startswith("Accuracy of all answers: dense ")
        and " of 6 questions, difference " in said[2]
    )
    table = said.index(
        "900 tokens (+ better, - worse than dense beyond chance, ? too few prompts to tell)"
    )
    assert [line.split()[0] for line in said[table + 1 : table + 4]] == [
        "first",
        "dense",
        "dense_kernel",
    ]
    html = (tmp_path / "report" / "index.html").read_text()
    assert html == page(record)
    assert re.search(
        r"\d(, no difference beyond noise)?\) (as|than) the fastest dense baseline", html
    )
    assert "<script" not in html and not re.search(r"(src|href)=|url\(|@import", html)
    evidence = artifacts.load(tmp_path / "cfg.yaml").evidence.measurements
    entry = next(each for each in evidence if each.name == "score: passkey")
    assert (
        entry.value == keys["passkey", "headwise", "score"]["value"] and "--attach" in entry.command
    )
    beside = {
        each.baseline_name: each.baseline
        for each in evidence
        if each.name == "prefill" and each.unit == "s"
    }
    assert set(beside) == {"dense attention by sdpa", "dense attention by Headwise's kernel"}
    # The fastest one first: it is what a speed-up is against.
    assert list(beside.values()) == sorted(beside.values())
    assert next(each for each in evidence if each.name == "perplexity: text:text.txt").samples == 2


def test_other_artifacts_are_rows_of_their_own(
    command: Command, searched: Path, tmp_path: Path
) -> None:
    paper = HeadSearch(
        model=str(searched / "tiny"), out=tmp_path / "paper.yaml", length=LENGTH, budget="0.8"
    )
    run(replace(paper, calibration="passkey", dtype="float32", picture=False, command="x"))
    asked = ("--task", "passkey", "--samples", "1", "--no-speed", "--methods", "headwise")
    rows = {
        each["name"]: each for each in command(*asked, "paper-tail", beside=paper.out)["methods"]
    }
    assert list(rows) == ["dense", "headwise", "paper-tail", "paper"]
    assert rows["paper"]["source"] == "MInference 1.0's own search" != rows["headwise"]["source"]
    # Searched without a dense tail, it has that of the others here.
    assert rows["paper"]["density"] > rows["paper-tail"]["density"] > 0.5
    shutil.copy(tmp_path / "cfg.yaml", tmp_path / "headwise.yaml")
    with pytest.raises(HeadwiseError, match="there is a method headwise already, rename the file"):
        command(*asked, beside=tmp_path / "headwise.yaml")


def test_quick_is_a_first_look_of_few_prefills(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefills: list[int] = []

    def counting(*args: Any, **options: Any) -> LoadedModel:
        loaded = load_model(*args, **options)

        def count(module: Any, given: Any, keywords: dict[str, Any]) -> None:
            ids = given[0] if given else keywords["input_ids"]
            # But for the questions of later turns and for decode.
            prefills.extend([ids.shape[1]] * (ids.shape[1] > LENGTH // 2))

        loaded.model.register_forward_pre_hook(count, with_kwargs=True)
        return loaded

    monkeypatch.setattr(evaluation_run, "load_model", counting)
    record = command("--quick", "--steps", "1")
    # Eight contexts under four methods; three rounds of five, decode of three, one pass for sizes,
    # one for attention. A default search of 8,192 tokens takes as long as 53 dense prefills.
    assert len(prefills) == 8 * 4 + 3 * 5 + 3 + 1 + 1
    assert [each["name"] for each in record["methods"]] == [
        "dense",
        "headwise",
        "vertical_slash",
        "a_shape",
    ]
    assert {each["task"] for each in record["figures"]} == {
        "line_turns@questions=4",
        *DEFAULT_TASKS[1:],
        "all answers",
    }
    assert record["crossover"] is None and record["memory"] == [] and len(record["prefill"]) == 5


def test_speed_only_asks_nothing(
    command: Command, trials: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = command("--speed-only", "--repeats", "1")
    assert trials == [] and record["figures"] == record["decode"] == record["memory"] == []
    assert {each["method"] for each in record["prefill"]} == {"dense", "dense_kernel", "headwise"}
    assert [each["method"] for each in record["attention"]] == ["headwise"]
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("Seconds to the first token of 900 tokens: ")
    assert said[1].startswith("Attention alone, index builds included: ")
    assert said[2] == "" and "first token s" in said[4]
    assert (
        "Seconds to the first token of 900 tokens: "
        in (tmp_path / "report" / "index.html").read_text()
    )


def test_fidelity_is_beside_dense_attention_and_kept(
    command: Command,
    searched: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = (
        "--task",
        "line_asked",
        "--task",
        "passkey",
        "--text",
        str(searched / "text.txt"),
        "--no-speed",
        "--fidelity",
    )
    asked += (
        "--methods",
        "headwise",
        "oracle_tiles",
        "dense+snapkv",
        "--samples",
        "2",
        "--seeds",
        "2",
    )
    record = command(*asked)
    found = {(each["task"], each["method"], each["measure"]): each for each in record["figures"]}
    for task in ("line_asked", "passkey", "text:text.txt", "all answers"):
        assert (
            found[task, "headwise", "KL to dense"]["value"]
            > 0
            < found[task, "headwise", "recall"]["value"]
            < 1
        )
        assert 0 <= found[task, "oracle_tiles", "tokens as dense's"]["value"] <= 1
        assert (task, "oracle_tiles", "recall") not in found and (
            task,
            "dense",
            "KL to dense",
        ) not in found
        assert (task, "dense+snapkv", "KL to dense") not in found
        assert ((task, "headwise", "answers as dense's") in found) == (task != "text:text.txt")
    # Two prompts of each of two seeds; nothing to be tested: nothing is nearer to dense attention
    # than itself.
    kept = found["line_asked", "headwise", "KL to dense"]
    assert kept["count"] == 4 and kept["p"] is None and kept["low"] < kept["value"] < kept["high"]
    assert ("passkey", "dense+snapkv", "answers as dense's") in found
    html, shown = (tmp_path / "report" / "index.html").read_text(), capsys.readouterr().out
    assert (
        "Agreement with dense attention&#x27;s predictions" in html
        and "900 tokens, vs dense attention's predictions" in shown
    )
    monkeypatch.setattr(evaluation, "Reference", None)
    assert command(*asked)["figures"] == record["figures"]


def test_a_model_with_settings_is_asked_those_tasks(
    searched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = Setting(task="vt", length=LENGTH, measure="score", count=9, dense=0.5, low=0.2, high=0.8)
    some = [
        row,
        replace(row, task="chain", dense=0.1),
        replace(row, task="cwe"),
        replace(row, task="fwe", length=1800),
    ]
    monkeypatch.setattr(evaluation_run, "settings", lambda model: some if model == "tiny" else [])

    def asked(*more: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
        base = [str(searched / "cfg.yaml"), "--model", "elsewhere", "--out", "report"]
        config = config_of(Config, vars(parser().parse_args([*base, *more])))
        quality = evaluation_run.quality_of(config, artifacts.load(config.configs[0]))
        return quality.tasks, quality.lengths

    assert asked() == asked("--quick") == (("vt", "cwe", "prose"), (LENGTH,))
    assert (
        asked("--quick", "--length", "700")[0]
        == asked("--length", "700")[0]
        == ("vt", "cwe", "fwe", "prose")
    )
    assert asked("--speed-only")[0] == ()
    assert asked("--length", "700", "800") == (("vt", "cwe", "fwe", "prose"), (700, 800))
    assert (
        asked("--task", "passkey")[0] == ("passkey",)
        and LENGTH not in asked("--task", "passkey")[1]
    )
    # What the artifact serves densely there is asked at the length of models without settings.
    monkeypatch.setattr(
        evaluation_run, "settings", lambda model: [replace(each, length=20) for each in some]
    )
    served = artifacts.load(searched / "cfg.yaml").prefill.dense_below
    assert served > 20 and asked() == (("vt", "cwe", "fwe", "prose"), asked("--task", "passkey")[1])


def test_what_is_there_is_not_run_again(command: Command, trials: list[str]) -> None:
    asked = ("--task", "passkey", "--no-speed", "--samples")
    first = command(*asked, "2", "--methods", "headwise")
    assert trials == ["dense"] * 2 + ["headwise"] * 2
    trials.clear()
    assert command(*asked, "2", "--methods", "headwise")["figures"] == first["figures"]
    assert trials == []
    command(*asked, "2", "--methods", "headwise", "a_shape", "vertical")
    assert trials == ["a_shape"] * 2 + ["vertical"] * 2
    trials.clear()
    command(
        "--task",
        "passkey",
        "--task",
        "line_retrieval",
        "--no-speed",
        "--samples",
        "1",
        "--methods",
        "headwise",
    )
    assert trials.count("dense") <= 2 and "a_shape" not in trials


def test_a_killed_run_goes_on_where_it_was(
    command: Command, trials: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("--task", "passkey", "--no-speed", "--samples", "3", "--methods", "headwise")
    counted = evaluation.trials

    def killed(*given: Any) -> Any:
        if len(trials) == 4:
            raise KeyboardInterrupt
        return counted(*given)

    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "trials", killed)
        with pytest.raises(KeyboardInterrupt):
            command(*asked)
    record = command(*asked)
    assert len(trials) == 6
    assert record["figures"] == command(*asked, out="other")["figures"]


def test_the_crossover_becomes_dense_below_where_it_is_wanted(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from profiling.evaluation.speed import Timed

    def pretended(loaded: Any, methods: Any, length: int, *, repeats: int) -> dict[str, Timed]:
        # The model's own attention never catches up; the kernel's, which is the fastest dense
        # baseline, at 600 tokens.
        dense = {"model": (9.0 * length,), "kernel": (float(length),)}
        return {
            m.name: Timed(
                seconds=(length / 2 + 300.0 if m.name == "headwise" else dense["kernel"][0],),
                **dense,
            )
            for m in methods
        }

    for place in ("profiling.evaluation.speed", "profiling.evaluation.times"):
        monkeypatch.setattr(f"{place}.prefill_times", pretended)
    monkeypatch.setattr("profiling.evaluation.times.decode_times", lambda *_, **__: {})
    monkeypatch.setattr("profiling.evaluation.times._PLAIN", ())
    asked = ("--task", "passkey", "--samples", "1", "--methods", "headwise")
    record = command(*asked)
    assert 600 < record["crossover"]["length"] <= 664
    assert artifacts.load(tmp_path / "cfg.yaml").prefill.dense_below == LENGTH // 2
    command(*asked, "--set-dense-below")
    assert (
        artifacts.load(tmp_path / "cfg.yaml").prefill.dense_below == record["crossover"]["length"]
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--length", "256"), "below the artifact's dense_below of 450"),
        (("--length", "5000"), "more than the 1024 positions"),
        (("--methods", "a_shap"), "unknown method 'a_shap'"),
    ],
)
def test_what_cannot_be_is_one_line(command: Command, options: tuple[str, ...], says: str) -> None:
    with pytest.raises(HeadwiseError, match=re.escape(says)):
        command(*options)


@pytest.mark.slow
def test_peak_memory_is_that_of_a_process_of_its_own(searched: Path) -> None:
    from profiling.evaluation.methods import Methods
    from profiling.memory_use.peak_memory import peak_of
    from profiling.models.loading import load_model

    spec = str(searched / "tiny")
    loaded = load_model(spec, dtype="float32")
    methods = Methods(loaded, *artifacts.load_pair(searched / "cfg.yaml"))
    found = {
        name: peak_of(loaded, methods.make(name, LENGTH), LENGTH, spec=spec, revision=None)
        for name in ("dense_kernel", "headwise")
    }
    # Keys and values alone: 3 layers of 2 heads of 16 numbers of 4 bytes, twice.
    assert all(value >= 3 * 2 * 16 * 4 * 2 * LENGTH // 2 for value in found.values()), found


def test_windows_that_the_search_saw_are_told(
    searched: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A text that the search saw whole is named in the table, the page and the JSON."""
    text = searched / "text.txt"
    artifact, arrays = artifacts.load_pair(searched / "cfg.yaml")
    assert artifact.search is not None
    tokenizer = load_model(str(searched / "tiny"), dtype="float32").tokenizer
    everything = Prompt(read_ids(Encoder(tokenizer), text), None)
    digests = Seen([everything]).digests
    arrays = {**arrays, **artifacts.window_arrays(digests)}
    calibration = artifact.search.calibration.model_copy(
        update={"tasks": ("text:text.txt",), "lengths": (LENGTH,), "seen_windows": len(digests)}
    )
    info = artifact.search.model_copy(update={"calibration": calibration})
    artifacts.save(artifact.model_copy(update={"search": info}), tmp_path / "cfg.yaml", arrays)
    main(
        [
            *(
                "--model",
                str(searched / "tiny"),
                str(tmp_path / "cfg.yaml"),
                "--out",
                str(tmp_path / "out"),
            ),
            *("--length", str(LENGTH), "--dtype", "float32", "--no-speed", "--samples", "2"),
            *("--task", "passkey", "--text", str(text), "--methods", "headwise"),
        ]
    )
    record = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert record["seen_by_search"] == [
        {"task": "text:text.txt", "length": LENGTH, "overlapping": 2, "samples": 2},
    ]
    said = "2 of 2 prompts of text:text.txt at 900 tokens overlap what the search looked at"
    assert said in capsys.readouterr().out and said in (tmp_path / "out" / "index.html").read_text()
