"""Tensor parallelism: two processes give the tokens that one gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import artifacts
from runtime import Headwise
from tests.runtime.omnikv import DECODE

_ROOT = Path(__file__).parents[2]


def _run(size: int, *folders: Path) -> list[dict[str, Any]]:
    """The answers to what is in each folder, by processes that are started once."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)),
            *(str(_ROOT / "tests/runtime/parallel.py"), str(size), *map(str, folders)),
        ],
        cwd=_ROOT,
        env={**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / "answers.json").read_text()) for folder in folders]


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
def test_two_processes_give_the_tokens_of_one_and_refuse_heads_that_do_not_divide(
    build: Any, artifact_for: Any, ids: Any, tmp_path: Path
) -> None:
    # transformers 5.16 and older shard a vocabulary only if it divides.
    sizes = {"num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 98}
    model, prompt = build("Llama", **sizes), ids(200, batch=2)
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "prompt.json").write_text(json.dumps(prompt.tolist()))
    sparse = artifact_for(model)
    streaming = artifacts.Streaming(sinks=4, window=60)
    mixed = artifacts.KVCache(
        policies={"full": artifacts.Full(), "stream": streaming, "h2o": artifacts.H2O(heavy=30, recent=30)},
        layers=(("full", "stream", "h2o", "stream"),) * 6,
    )
    configs = {
        "sparse": sparse,
        "omnikv": sparse.model_copy(update={"decode": artifacts.Decode(omnikv=DECODE)}),
        "mapped": sparse.model_copy(update={"decode": artifacts.Decode(omnikv=DECODE)}),
        "kept": sparse.model_copy(update={"kv_cache": mixed}),
    }
    expected, logits = {}, {}
    for name, artifact in configs.items():
        saved = artifacts.save(artifact, tmp_path / f"{name}.yaml")
        with Headwise(saved).apply(model) as handle:
            out = model.generate(
                prompt,
                past_key_values=handle.new_cache(),
                max_new_tokens=12,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            expected[name] = {"tokens": out[:, 200:].tolist(), "stats": handle.stats()}
            with torch.no_grad():
                logits[name] = model(prompt, past_key_values=handle.new_cache(), logits_to_keep=16).logits
    assert expected["sparse"]["stats"]["sparse"] == 6 and expected["omnikv"]["stats"]["decode"] > 0
    found, refused = _run(2, tmp_path, _indivisible(build, artifact_for, tmp_path / "indivisible"))
    # A process counts what its own heads read.
    here, of_all = (each["mapped"]["stats"].pop("tokens") for each in (found, expected))
    assert 1 < here < 90 and abs(here - of_all) < 5
    assert found == expected
    error = refused["cfg"]["error"]
    assert "2 query and 1 KV heads do not divide among 2 processes: use a number that divides both" in error
    for name, one in logits.items():
        for rank in range(2):
            several = torch.load(tmp_path / f"{name}.{rank}.pt")
            # Sums in another order: 1e-5 of the largest logit.
            assert (several - one).abs().max() <= 1e-5 * one.abs().max()


def _indivisible(build: Any, artifact_for: Any, folder: Path) -> Path:
    """A folder with a model whose heads do not divide among two processes, and an artifact for it."""
    # transformers itself shards such projections unevenly and fails in the forward.
    model = build("Llama", num_attention_heads=2, num_key_value_heads=1, vocab_size=98)
    model.save_pretrained(folder / "model")
    (folder / "prompt.json").write_text(json.dumps([[3] * 8]))
    artifacts.save(artifact_for(model), folder / "cfg.yaml")
    return folder
