"""Engine start with a matching artifact, with one that does not fit, and without; benchmark
output."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import artifacts
from headwise.__main__ import main
from runtime.vllm import stats
from runtime.vllm.options import HASH_KEY
from tests.vllm.conftest import DECODE, prompt
from tests.vllm.engines import Engine, engine


def attention(served: Engine) -> tuple[Any, list[Any], list[Any]]:
    """Return an engine's configuration, attention layers and metadata builders."""
    core = served.llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    layers = list(runner.vllm_config.compilation_config.static_forward_context.values())
    builders = [group.get_metadata_builder() for groups in runner.attn_groups for group in groups]
    return runner.vllm_config, layers, builders


def test_engine_without_artifact_uses_parent(model):
    from vllm.v1.attention.backends.cpu_attn import (
        CPUAttentionBackendImpl,
        CPUAttentionMetadataBuilder,
    )

    with engine(model) as served:
        config, layers, builders = attention(served)
        assert {type(layer.impl) for layer in layers} == {CPUAttentionBackendImpl}
        assert [type(builder) for builder in builders] == [CPUAttentionMetadataBuilder]
        assert config.additional_config == {} and stats() == {}
        served.tokens([prompt(300)])


def test_stats_count_prefills(model, artifact):
    path = artifact()
    with engine(model, path) as served:
        config, _, _ = attention(served)
        # The hash is part of the key of vLLM's compile cache.
        assert config.additional_config[HASH_KEY] == artifacts.load(path).content_sha256
        served.tokens([prompt(300)])
        assert stats()["prefills"] == {"sparse": 1}
        assert stats()["prefill_tokens"] == {"sparse": 300}


def test_check_command_starts_vllm(model, artifact, capsys):
    assert main(["check", artifact(), "--model", model]) == 0
    program, *words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    # The `vllm` command of a CPU build ends with a traceback here.
    folder = Path(sys.executable).parent
    command = [folder / program, *words, "--help=all"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "--additional-config" in done.stdout, done.stderr[-500:]


def refused(model: str, options: Any, **settings: Any) -> str:
    """Return the error message of an engine's start."""
    settings["additional_config"] = {"headwise": options}
    with pytest.raises(artifacts.HeadwiseError) as error, engine(model, **settings):
        pass
    assert "\n" not in str(error.value)
    return str(error.value)


def test_engine_start_rejects_artifact_that_does_not_fit(model, artifact, tmp_path):
    path = artifact()
    assert "has the content hash" in refused(model, {"artifact": path, "content_sha256": "0" * 64})
    loaded = artifacts.load(path)
    other = loaded.model_copy(update={"model": loaded.model.model_copy(update={"head_dim": 128})})
    artifacts.save(other, tmp_path / "other.yaml")
    assert "another model: head_dim is 128 in the artifact (tiny), 64 in this model" in refused(
        model, str(tmp_path / "other.yaml")
    )
    section = artifacts.KVCache(policies={"s": artifacts.SnapKV()}, layers=("s",) * 3)
    drafts = {"method": "draft_model", "model": model, "num_speculative_tokens": 2}
    message = refused(model, artifact(kv_cache=section), speculative_config=drafts)
    assert (
        "speculative decoding by draft_model is not served where kv_cache drops tokens" in message
    )


def benchmark(*words: str) -> subprocess.CompletedProcess[str]:
    """Run benchmarks/vllm_ttft.py; the tests check its output, not its speed."""
    root = Path(__file__).parents[2]
    settings = {"dtype": "float32", "skip_tokenizer_init": True, "disable_log_stats": True}
    command = [sys.executable, str(root / "benchmarks/vllm_ttft.py"), *words]
    command += ["--engine", json.dumps(settings), "--repeats", "1"]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_benchmark_reports_no_speed_without_sparse_prefill(model, artifact):
    done = benchmark(artifact(), "--model", model, "--length", "100")
    assert done.returncode == 2 and "error: no prefill of 100 tokens was sparse" in done.stderr


def test_benchmark_reports_all_three_backends(model, artifact):
    words = ["--model", model, "--length", "400", "--tokens", "5"]
    *rows, ratio, record = benchmark(artifact(decode=DECODE), *words).stdout.splitlines()[-5:]
    ways = ["vLLM's own attention", "dense by Headwise's kernel", "Headwise"]
    assert [row.partition("  ")[0] for row in rows] == ways and "s a later token" in rows[-1]
    assert ratio.startswith("400 tokens: ")
    result = json.loads(record)
    counts = {way: [len(each) for each in seconds] for way, seconds in result["seconds"].items()}
    assert counts == {"dense": [2], "dense_kernel": [2], "artifact": [2]}
    assert result["served"]["prefills"] == {"sparse": 2}
    assert result["served"]["decode"] == {"chosen": 8}
