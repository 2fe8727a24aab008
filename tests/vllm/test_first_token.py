"""benchmarks/vllm_ttft.py on a tiny model: what it prints, never how fast that was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import artifacts

ROOT = Path(__file__).parents[2]

_ENGINE = json.dumps({"dtype": "float32", "skip_tokenizer_init": True, "disable_log_stats": True})

WAYS = ["vLLM's own attention", "dense by Headwise's kernel", "Headwise"]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks/vllm_ttft.py"), *words]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )


def test_all_three_ways_are_told(model: str, artifact: Any) -> None:
    command = [
        artifact(),
        "--model",
        model,
        "--length",
        "400",
        "--repeats",
        "2",
        "--engine",
        _ENGINE,
    ]
    *rows, ratio, record = run(*command).stdout.splitlines()[-5:]
    assert [row.partition("  ")[0] for row in rows] == WAYS
    assert ratio.startswith("400 tokens: ") and "density of the sparse layers 0." in ratio
    assert (
        "as fast as the fastest dense baseline" in ratio
        and "as fast as vLLM's own attention" in ratio
    )
    found = json.loads(record)
    assert {way: [len(each) for each in seconds] for way, seconds in found["seconds"].items()} == {
        "dense": [1, 1],
        "dense_kernel": [1, 1],
        "artifact": [1, 1],
    }
    assert found["served"]["prefills"] == {"sparse": 3}


def test_later_tokens(model: str, artifact: Any) -> None:
    section = artifacts.OmniKV(
        filter_layers=(1,), dense_layers=(0,), selector="last", window=1, budget=48
    )
    path = artifact((None,) * 3, decode=artifacts.Decode(omnikv=section))
    how = [
        "--model",
        model,
        "--length",
        "200",
        "--tokens",
        "5",
        "--repeats",
        "1",
        "--engine",
        _ENGINE,
    ]
    *rows, ratio, record = run(path, *how).stdout.splitlines()[-5:]
    assert [row.partition("  ")[0] for row in rows] == WAYS and "s a later token" in rows[-1]
    assert ratio.startswith("200 tokens: ")
    found = json.loads(record)
    assert found["served"]["decode"] == {"chosen": 8} and [
        len(each) for each in found["seconds"]["dense"]
    ] == [2]


def test_no_speed_where_nothing_was_sparse(model: str, artifact: Any) -> None:
    command = [
        artifact(),
        "--model",
        model,
        "--length",
        "100",
        "--repeats",
        "1",
        "--engine",
        _ENGINE,
    ]
    done = run(*command)
    assert done.returncode == 2 and "error: no prefill of 100 tokens was sparse" in done.stderr
