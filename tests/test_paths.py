"""A path that cannot be opened is one line, in every command and call that takes one."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import artifacts
import headwise
from artifacts import HeadwiseError
from artifacts.files import atomic_write, check_writable, out_folder
from artifacts.store.write import rehash, sign
from headwise.__main__ import main
from profiling.models.loading import load_config, load_model, load_tokenizer
from profiling.prompts.prompt import parse_task
from profiling.similarities.similarity_profile import load_profile
from tests.artifacts.conftest import arrays, make, make_key, saved

__all__ = ["arrays", "make", "saved"]

ROOT = Path(__file__).resolve().parents[1]


def wrong_paths(folder: Path) -> dict[str, str]:
    """Paths that the system refuses, each for another reason."""
    (folder / "file").write_text("x")
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "pipe")
    return {
        "long": "a" * 300 + ".yaml",
        "deep": "/".join(["a" * 100] * 50),
        "null": "a\0b.yaml",
        "through": str(folder / "file" / "cfg.yaml"),
        "loop": str(folder / "loop"),
        "pipe": str(folder / "pipe"),
        "device": "/dev/zero",
        "user": "~nobody-of-this-name/cfg.yaml",
    }


WRONG = ("long", "deep", "null", "through", "loop", "pipe", "device", "user")


@pytest.fixture
def wrong(request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return wrong_paths(tmp_path)[request.param]


@pytest.mark.parametrize("wrong", WRONG, indirect=True)
def test_python_functions_refuse_a_wrong_path_in_one_line(wrong, saved, make, arrays, tmp_path):
    make_key(tmp_path / "me.key", tmp_path / "me.pub")
    sign(saved, tmp_path / "me.key")
    readers = [
        headwise.load,
        artifacts.load_arrays,
        artifacts.load_pair,
        rehash,
        load_profile,
        load_model,
        load_config,
        load_tokenizer,
        lambda path: load_model(f"{path}.gguf"),
        lambda path: parse_task(f"text:{path}"),
        lambda path: sign(path, tmp_path / "me.key"),
        lambda path: sign(saved, path),
        lambda path: headwise.load(saved, verify=path),
        lambda path: artifacts.update(path, lambda *pair: pair),
    ]
    writers = [
        check_writable,
        lambda path: artifacts.save(make(), path, arrays),
        lambda path: artifacts.update(saved, lambda *pair: pair, out=path),
    ]
    if os.path.islink(wrong):
        # A write replaces a link.
        writers = []
    for call in (*readers, *writers):
        with pytest.raises(HeadwiseError) as caught:
            call(wrong)
        assert str(caught.value).isprintable() and len(str(caught.value)) < 1200
    if wrong.startswith(("~", "/dev")):
        return
    with pytest.raises(HeadwiseError), out_folder(wrong):
        pass


@pytest.mark.parametrize("wrong", ["long", "null", "through"], indirect=True)
def test_atomic_write_of_a_wrong_path_is_one_line(wrong, tmp_path):
    before = set(tmp_path.iterdir())
    with pytest.raises(HeadwiseError):
        atomic_write(wrong, b"x")
    assert set(tmp_path.iterdir()) == before


# Every option that is a path, with the words that a command needs besides.
OPTIONS = [
    "show PATH",
    "validate PATH",
    "validate --rehash PATH",
    "diff cfg.yaml PATH",
    "diff PATH cfg.yaml",
    "verify PATH --key me.pub",
    "verify cfg.yaml --key PATH",
    "sign PATH --key me.key",
    "sign cfg.yaml --key PATH",
    "schema --out PATH",
    "show cfg.yaml --json=PATH",
    "convert PATH --to minference --out heads.json",
    "convert PATH --from minference --out new.yaml",
    "convert cfg.yaml --to minference --out PATH",
    "convert heads.tsv --config PATH --out new.yaml",
    "convert heads.tsv --into PATH",
    "plot PATH --out picture",
    "plot cfg.yaml --out PATH/picture",
    "check PATH --model model",
    "check cfg.yaml --model PATH",
    "gate PATH --model none",
    "gate cfg.yaml --model PATH --length 9999",
    "gate cfg.yaml --model none --out PATH",
    "gate cfg.yaml --model none --task text:PATH",
    "search --model PATH --out new.yaml",
    "search --model none --out PATH",
    "search --model none --out new.yaml --task jsonl:PATH",
    "search --model none --out new.yaml --storage sqlite:///PATH",
    "search --model none --out new.yaml --budget 0.5 --preset paper --task text:PATH",
    "evaluate PATH --model none --out report",
    "evaluate cfg.yaml --model none --out PATH",
    "evaluate cfg.yaml --model none --out report --length 4096 --task text:PATH",
    "filters PATH --model none --out new.yaml",
    "filters cfg.yaml --model none --out PATH",
    "filters cfg.yaml --model none --out new.yaml --profile PATH",
    "kv PATH --model none --out new.yaml --target-share 0.5",
    "kv cfg.yaml --model none --out PATH --target-share 0.5",
    "decode PATH --model none",
    "decode --model none --methods dense+h2o --json=PATH",
    "similarity --model PATH --out profile",
    "similarity --model none --out PATH",
    "heatmaps PATH --model none --out pictures",
    "heatmaps --model none --out PATH",
    "heatmaps --profile PATH --out pictures",
    "stream --model none --out PATH --text text.txt --tokens 64",
    "stream --model none --out s --text PATH --tokens 64",
    "tasks --model PATH --task passkey --length 256",
    "tasks --model none --task text:PATH --length 256",
    "demo --model PATH --out out",
    "demo --model none --out PATH",
    "doctor --model PATH",
]


@pytest.mark.parametrize("wrong", ["long", "pipe"], indirect=True)
@pytest.mark.parametrize("words", OPTIONS)
def test_commands_refuse_a_wrong_path_in_one_line(words, wrong, tmp_path, make, arrays):
    artifacts.save(make(), "cfg.yaml", arrays)
    make_key(Path("me.key"), Path("me.pub"))
    Path("heads.tsv").write_text("0.1\t0.9\n")
    Path("text.txt").write_text("Some text.")
    before = {path.name for path in tmp_path.iterdir()}
    with pytest.raises(HeadwiseError) as caught:
        main([part.replace("PATH", wrong) for part in words.split()])
    assert str(caught.value).isprintable()
    assert {path.name for path in tmp_path.iterdir()} <= before | {"none"}


def test_no_code_asks_a_path_by_methods_that_raise():
    """Path.exists() and the like raise for a path that is too long, os.path's functions do not."""
    asks = re.compile(r"(?<!os\.path)\.(exists|is_file|is_dir|is_symlink|expanduser)\(")
    calls = []
    for package in ("artifacts", "headwise", "profiling", "runtime", "search"):
        for file in sorted((ROOT / package).rglob("*.py")):
            for number, line in enumerate(file.read_text().splitlines(), start=1):
                if asks.search(line):
                    calls.append(f"{file.relative_to(ROOT)}:{number} {line.strip()}")
    assert not calls
