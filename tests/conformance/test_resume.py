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
from tests.sampling import sampled
from tests.search.conftest import by_head, tiny_model

__all__ = ["by_head", "tiny_model"]

SMALL = "--model MODEL --dtype float32"
LIMITS = "--max-kl 99 --max-perplexity 99 --max-nll 99 --max-lost 1"
# Of each command: a small run, and its result in the folder OUT.
RUNS = {
    "search": (
        f"{SMALL} --out OUT/new.yaml --length 512 --budget 0.8 --cost flops --no-picture "
        f"--samples 1 --task passkey {LIMITS}",
        "new.yaml",
    ),
    "search --preset paper": (
        f"{SMALL} --out OUT/new.yaml --length 512 --budget 0.6 --task passkey --no-picture",
        "new.yaml",
    ),
    "evaluate": (
        f"CONFIG {SMALL} --out OUT --length 512 --task passkey --samples 2 --no-speed --no-memory "
        "--methods dense headwise",
        "evaluation.json",
    ),
    "filters": (
        f"CONFIG {SMALL} --out OUT/new.yaml --length 256 --steps 2 --task passkey --filters 1 "
        "--samples 1 --sparse 0.3",
        "new.yaml",
    ),
    "kv": (
        f"CONFIG {SMALL} --out OUT/new.yaml --length 256 --task passkey --forced 4 --samples 1 "
        "--target-share 0.5",
        "new.yaml",
    ),
    "decode": (
        f"{SMALL} --methods dense+snapkv:budget=90,window=8 dense+streaming:window=28 --samples 1 "
        "--length 256 --repeats 0 --json OUT/decode.json",
        "decode.json",
    ),
    "stream": (
        f"{SMALL} --out OUT --text TEXT --tokens 96 --block 32 --chunk 32 "
        "--policy streaming:sinks=4,window=28 --recompute 32",
        "stream.json",
    ),
}
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
def command(tiny_model, by_head, tmp_path):
    """command(verb, out, *more): run a verb into a folder of that name."""
    text = tmp_path / "text.txt"
    text.write_text("The clerk counted seven boats. " * 20)
    places = {"MODEL": tiny_model, "CONFIG": by_head, "TEXT": text}

    def run(verb, out, *more, model=tiny_model):
        places["MODEL"] = model
        words, name = RUNS[verb]
        folder = tmp_path / out
        folder.mkdir(exist_ok=True)
        for place, path in {**places, "OUT": folder}.items():
            words = words.replace(place, str(path))
        assert main([*verb.split(), *words.split(), *more]) in (0, None)
        return folder / name

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
    assert bool(list((tmp_path / "resumed").glob("*.ledger"))) == (verb in KEEPS_LEDGER)


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
    if more:
        text = tmp_path / "text.txt"
        more = f"--text {text}".split()
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
