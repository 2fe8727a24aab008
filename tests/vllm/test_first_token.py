"""benchmarks/vllm_ttft.py on a tiny model: what it prints, never how fast that was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.vllm.conftest import DECODE

ROOT = Path(__file__).parents[2]

_ENGINE = json.dumps({"dtype": "float32", "skip_tokenizer_init": True, "disable_log_stats": True})

WAYS = ["vLLM's own attention", "dense by Headwise's kernel", "Headwise"]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks/vllm_ttft.py"), *words, "--engine", _ENGINE]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_all_three_ways_are_told(model, artifact):
    path = artifact(decode=DECODE)
    how = ["--model", model, "--length", "400", "--tokens", "5", "--repeats", "1"]
    *rows, ratio, record = run(path, *how).stdout.splitlines()[-5:]
    assert [row.partition("  ")[0] for row in rows] == WAYS and "s a later token" in rows[-1]
    assert ratio.startswith("400 tokens: ")
    found = json.loads(record)
    assert {way: [len(each) for each in seconds] for way, seconds in found["seconds"].items()} == {
        "dense": [2],
        "dense_kernel": [2],
        "artifact": [2],
    }
    assert found["served"]["prefills"] == {"sparse": 2}
    assert found["served"]["decode"] == {"chosen": 8}
