"""Conformance of resuming: every command with --fresh goes through every test here.

A run is interrupted after some of its jobs. The next one repeats no finished job, and its result is
that of a run that nothing interrupts. tests/profiling/test_ledger.py kills a process.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import artifacts
from artifacts import HeadwiseError
from headwise.__main__ import VERBS, main, parser_of
from profiling.ledger import Ledger
from profiling.models.loading import load_model
from runtime.fingerprint import fingerprint
from tests.conformance.test_commands import TYPED, files
from tests.sampling import sampled
from tests.search.conftest import by_head, tiny_model

__all__ = ["by_head", "files", "tiny_model"]

PAPER = "--model model --dtype float32 --out new.yaml --length 512 --budget 0.6 --no-picture"
# Of each command: options besides those of its small run, and its result.
RUNS = {
    "search": ("", "new.yaml"),
    "search --preset paper": ("", "new.yaml"),
    "evaluate": ("--samples 2 --no-memory", "report/evaluation.json"),
    "filters": ("", "new.yaml"),
    "kv": ("", "new.yaml"),
    "decode": ("--repeats 0 --json decode.json", "decode.json"),
    "stream": ("--tokens 96 --block 32 --chunk 32", "stream/stream.json"),
}
SMALL = TYPED | {"search --preset paper": f"{PAPER} --task passkey"}
# Commands that keep their resume file, so that methods can be added later.
KEEPS_LEDGER = ("evaluate",)
# Other settings than those of a command's run; jobs of other commands are named by their inputs.
OTHER = dict.fromkeys(("search", "search --preset paper", "filters", "kv"), "--seed 1")
OTHER["stream"] = "--stride 3"
RESUMABLE = {verb for verb in VERBS if "--fresh" in parser_of(verb)._option_string_actions}


def result(path: Path) -> Any:
    """Content of a result that does not depend on the time or the folder of a run."""
    if path.suffix == ".yaml":
        return artifacts.load(path).content_sha256
    record = json.loads(path.read_text())
    return untimed({name: record[name] for name in ("figures", "rows", "blocks") if name in record})


def untimed(value: Any) -> Any:
    """Leave out every field that has `second` in its name."""
    if isinstance(value, list):
        return [untimed(each) for each in value]
    if isinstance(value, dict):
        return {name: untimed(each) for name, each in value.items() if "second" not in name}
    return value


@pytest.fixture
def command(tiny_model, files, tmp_path, monkeypatch):
    """command(verb, out, *more): run a verb in a folder of that name, with a copy of the files."""

    def run(verb, out, *more, model=tiny_model):
        if not (tmp_path / out).exists():
            shutil.copytree(files, tmp_path / out, symlinks=True)
        monkeypatch.chdir(tmp_path / out)
        options, name = RUNS[verb]
        words = f"{verb} {SMALL[verb]} {options}".split()
        assert main([*words, "--model", str(model), *more]) in (0, None)
        return tmp_path / out / name

    return run


@pytest.fixture
def puts(monkeypatch):
    """puts(limit): names of the jobs finished from now on; interrupts the run after `limit`."""
    put = Ledger.put

    def record(limit=math.inf):
        names: list[str] = []

        def counted(ledger, unit, value):
            stored = put(ledger, unit, value)
            names.append(unit.name)
            if len(names) == limit:
                raise KeyboardInterrupt
            return stored

        monkeypatch.setattr(Ledger, "put", counted)
        return names

    return record


def test_resume_every_command_with_fresh_has_a_run():
    assert {words.split()[0] for words in RUNS} == RESUMABLE


# A third is within the jobs of the first cache of a stream, which has to be filled again.
AFTER = [(verb, share) for verb in RUNS for share in (0, 1 / 3, 1)]
THIRDS = [case for case in AFTER if case[1] == 1 / 3]


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "share"), sampled(AFTER, *THIRDS))
def test_resume_repeats_no_finished_job_and_finds_the_same(
    verb, share, command, puts, tmp_path, capsys
):
    jobs = puts()
    whole = result(command(verb, "whole"))
    limit = min(max(1, int(share * len(jobs))), len(jobs) - 1)
    assert limit
    finished = puts(limit)
    with pytest.raises(KeyboardInterrupt):
        command(verb, "resumed")
    name = RUNS[verb][1]
    assert not (tmp_path / "resumed" / name).exists()
    again = puts()
    capsys.readouterr()
    assert result(command(verb, "resumed")) == whole
    assert f"{limit} jobs are finished" in capsys.readouterr().err
    assert sorted([*finished, *again]) == sorted(jobs)
    assert bool(list((tmp_path / "resumed").rglob("*.ledger"))) == (verb in KEEPS_LEDGER)


@pytest.mark.slow
@pytest.mark.parametrize("verb", OTHER)
def test_resume_of_other_settings_is_refused_and_fresh_discards(verb, command, puts):
    puts(1)
    with pytest.raises(KeyboardInterrupt):
        command(verb, "out")
    other = OTHER[verb].split()
    with pytest.raises(HeadwiseError, match="--fresh"):
        command(verb, "out", *other)
    finished = puts(1)
    with pytest.raises(KeyboardInterrupt):
        command(verb, "out", *other, "--fresh")
    assert finished


@pytest.fixture
def almost(tiny_model, tmp_path):
    """A model of the same name and fingerprint whose weights differ in one element."""
    folder = tmp_path / "almost" / tiny_model.name
    shutil.copytree(tiny_model, folder)
    weights = load_file(folder / "model.safetensors")
    element = weights["model.layers.0.mlp.down_proj.weight"][0]
    element[1] += 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    models = [load_model(str(path)) for path in (tiny_model, folder)]
    hashes = [fingerprint(each.model, name=each.name).weights_sha256 for each in models]
    assert hashes[0] == hashes[1] and models[0].name == models[1].name
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("verb", [*RUNS, "decode --text"])
def test_command_ends_at_the_first_loss_that_is_no_number(verb, command, almost, puts, tmp_path):
    weights = load_file(almost / "model.safetensors")
    # A cache that rotates its keys is refused for keys that are no numbers.
    layer = 2 if verb == "stream" else 1
    element = weights[f"model.layers.{layer}.mlp.down_proj.weight"][0]
    element[1] = math.nan
    save_file(weights, almost / "model.safetensors", metadata={"format": "pt"})
    verb, *more = verb.split(" --text")
    more = ["--text", "text.txt"] if more else []
    with pytest.raises(HeadwiseError, match=r"not finite in float32.*--dtype"):
        command(verb, "out", *more, model=almost)
    assert not (tmp_path / "out" / RUNS[verb][1]).exists()


@pytest.mark.slow
@pytest.mark.parametrize("verb", RUNS)
def test_resume_of_other_weights_reuses_no_job(verb, command, puts, almost):
    finished = puts(1)
    with pytest.raises(KeyboardInterrupt):
        command(verb, "out")
    again = puts(1)
    if verb in OTHER:
        with pytest.raises(HeadwiseError, match=r"its sha256 of the model is .*--fresh"):
            command(verb, "out", model=almost)
        return
    with pytest.raises(KeyboardInterrupt):
        command(verb, "out", model=almost)
    assert again == finished
