"""Artifacts to test with: small, with every kind of pattern, and a way to damage a file."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rfc8785

import artifacts

CREATED = "2025-11-21T12:00:00Z"


COSTS = artifacts.DeviceCosts(
    device="a processor",
    backend="cpu",
    versions={"torch": "2.13"},
    command="headwise bench --costs costs.safetensors",
    optimised=True,
    patterns=("a_shape", "vertical_slash"),
    dtypes=("bfloat16",),
)


def build(**changes: Any) -> artifacts.Artifact:
    patterns = (
        artifacts.VerticalSlash(vertical=100, slash=1800),
        artifacts.VerticalSlash(vertical=30, slash=2048, last_q=32),
        artifacts.AShape(sink=64, window=512),
        artifacts.BlockSparse(blocks=9),
        artifacts.Dense(),
    )
    names = [artifacts.pattern_name(pattern) for pattern in patterns]
    fields: dict[str, Any] = {
        "created_at": CREATED,
        "model": artifacts.ModelInfo(
            name="tiny",
            revision="12e45",
            architecture="LlamaForCausalLM",
            config_sha256="a" * 64,
            weights_sha256="b" * 64,
            num_layers=3,
            num_heads=4,
            num_kv_heads=2,
            head_dim=64,
            rope={"rope_theta": 100000.0, "factors": [1e-05, 2]},
            max_positions=8192,
        ),
        "search": artifacts.SearchInfo(
            tool_version="0.1.0",
            command="headwise search --model tiny --out cfg.yaml",
            preset="scaled",
            seed=7,
            calibration=artifacts.Calibration(
                tasks=("kv_retrieval",), lengths=(4096,), samples=1, sha256="c" * 64
            ),
            budget="0.25",
            target_density=0.25,
            device="cpu",
            dtype="bfloat16",
            kernel_backend="cpu",
            summary=artifacts.Summary(
                recall=0.93,
                error=1e-05,
                density=0.24,
                winners={"vertical_slash": 4, "a_shape": 2, "block_sparse": 1, "dense": 1},
            ),
        ),
        "patterns": dict(zip(names, patterns, strict=True)),
        "prefill": artifacts.Prefill(
            dense_below=4096,
            dense_tail=64,
            layers=(tuple(names[:4]), None, (names[0], names[0], names[2], names[4])),
        ),
        "evidence": artifacts.Evidence(
            measurements=(
                artifacts.Measurement(
                    name="prefill",
                    value=2.5,
                    unit="s",
                    baseline=3.75,
                    baseline_name="dense sdpa",
                    length=8192,
                    samples=5,
                    command="headwise bench cfg.yaml",
                    device="cpu",
                    versions={"torch": "2.13"},
                ),
            )
        ),
    }
    return artifacts.Artifact(**fields | changes)


def as_yaml(fields: Any, **how: Any) -> str:
    """JSON data as YAML on one line, with floats that every reader of YAML takes for floats."""
    return re.sub(r"(?<![\w.\"])(-?[0-9]+)(e[-+][0-9]+)", r"\1.0\2", json.dumps(fields, **how))


def replace_field(fields: Any, path: str, *value: Any) -> None:
    """Replace the field at a path such as prefill/layers/0; without a value it is left out."""
    *folders, last = [int(key) if key.isdigit() else key for key in path.split("/")]
    for key in folders:
        fields = fields[key]
    if value:
        (fields[last],) = value
    else:
        del fields[last]


def hash_by_other_tools(fields: dict[str, Any]) -> str:
    """The content's hash as docs/artifact.md defines it, by rfc8785; takes the fields apart."""
    for name in ("content_sha256", "created_at"):
        fields.pop(name)
    if fields["search"] is not None:
        fields["search"].pop("command")
    if fields["sidecar"] is not None:
        fields["sidecar"].pop("file")
    for entry in (*fields["evidence"].get("measurements", ()), *fields["costs"]):
        entry.pop("command")
    return hashlib.sha256(rfc8785.dumps(fields)).hexdigest()


def build_arrays() -> dict[str, np.ndarray]:
    recall = np.linspace(0.5, 1.0, 12, dtype=np.float32).reshape(3, 4)
    recall[1] = np.nan
    return {
        "chosen.recall": recall,
        "chosen.candidate": np.arange(12, dtype=np.int32).reshape(3, 4),
    }


def build_every_kind() -> tuple[artifacts.Artifact, dict[str, np.ndarray]]:
    """An artifact with every kind of pattern and every field of one, and its arrays."""
    small = build()
    patterns = (
        *small.patterns.values(),
        artifacts.TriShape(sink=64, window=512, last=128),
        artifacts.Dilated(sink=64, window=1024, dilation=2),
        artifacts.Strided(sink=64, window=256, stride=8),
        artifacts.Static(indices="mean"),
        artifacts.VerticalSlash(vertical=100, slash=1800, coverage=0.95),
        artifacts.BlockSparse(blocks=40, coverage=0.995, pool=16),
        artifacts.Dense(),
        artifacts.MemoryUnits(sink=128, window=1024, units=16, representatives=8),
        artifacts.SkipSoftmax(scale_factor=40.5),
    )
    names = [artifacts.pattern_name(pattern) for pattern in patterns]
    rows = (
        tuple(names[:4]),
        None,
        tuple(names[4:8]),
        tuple(names[8:12]),
        (*[names[11]] * 2, names[13], names[12]),
    )
    growth = artifacts.Growth(
        length=4096, powers={"vertical_slash": {"vertical": 0.5, "slash": 1.0}, "dense": {}}
    )
    figures = {"kl": 0.25, "recall": 0.9, "density": 0.2}
    fast = artifacts.Point(cost=0.5, speedup=4.0, **figures, lost=3)
    exact = artifacts.Point(cost=1.0, speedup=2.0, **figures | {"kl": 0.01}, lost=0)
    front = artifacts.Front(
        length=4096,
        unit="seconds",
        dense_cost=2.0,
        dense_right=14,
        measured_on="held_out",
        points=(fast, exact),
    )
    front_rows = (((names[2],) * 4, None, *[(names[3],) * 4] * 3), rows)
    held_out = artifacts.PromptSet(
        name="held-out passkey and kv_retrieval", prompts=32, sha256="d" * 64
    )
    evidence = artifacts.Evidence(
        verdict=artifacts.Verdict(proven=False, why="14 right answers of 16 contexts"),
        chosen_on=artifacts.PromptSet(name="gate", prompts=16, sha256="e" * 64),
        reported_on=held_out,
        tasks=(
            artifacts.TaskFigures(
                task="passkey",
                length=4096,
                prompts=16,
                kl=0.01,
                nll_rise=0.002,
                nll_rise_low=-0.001,
                nll_rise_high=0.005,
                answers=20,
                dense_right=14,
                lost=1,
                won=2,
                fewer_low=-0.4,
                fewer_high=0.3,
                perplexity_ratio=1.01,
            ),
            artifacts.TaskFigures(task="text", prompts=16, kl=0.02),
        ),
        measurements=small.evidence.measurements,
    )
    assert small.search is not None
    search = small.search.model_copy(
        update={
            "calibration": artifacts.Calibration(
                tasks=("kv_retrieval", "passkey"),
                lengths=(2048, 4096),
                samples=2,
                sha256="c" * 64,
                seen_windows=2,
            ),
            "allocation": "model",
            "cost": artifacts.SearchCost(unit="seconds", device="a processor"),
            "n_trials": 40,
        }
    )
    artifact = build(
        model=small.model.model_copy(update={"num_layers": 5}),
        patterns=dict(zip(names, patterns, strict=True)),
        search=search,
        prefill=artifacts.Prefill(
            dense_below=4096, dense_tail=64, growth=growth, layers=rows, front=front
        ),
        costs=(COSTS,),
        evidence=evidence,
        decode=artifacts.Decode(
            omnikv=artifacts.OmniKV(
                filter_layers=(3,),
                dense_layers=(0,),
                selector="exponential",
                window=8,
                budget=0.125,
                prefill_ratio=0.5,
                similarity=artifacts.Similarity(
                    kept=0.93,
                    evenly_spaced=0.91,
                    error=0.01,
                    top_k=512,
                    tasks=("passkey", "text:novel.txt"),
                ),
            )
        ),
        kv_cache=artifacts.KVCache(
            policies={
                "full": artifacts.Full(),
                "stream": artifacts.Streaming(sinks=4, window=1020, positions="original"),
                "h2o": artifacts.H2O(heavy=0.1, recent=512, normalised=True, eviction="greedy"),
                "snapkv": artifacts.SnapKV(budget=0.25, window=32, pool=5),
            },
            layers=(("h2o", "snapkv"), None, "stream", "full", "full"),
        ),
    )
    recall = np.linspace(0.5, 1.0, 20, dtype=np.float32).reshape(5, 4)
    recall[1] = np.nan
    return artifact, {
        "chosen.recall": recall,
        "static.mean.columns": np.array([*range(64), 99, 512, 700], dtype=np.int32),
        "static.mean.diagonals": np.array([0, 1, 2, 9], dtype=np.int32),
        "cost.0.pattern": np.array([0, 1], dtype=np.int32),
        "cost.0.sparse_seconds": np.array([0.5, 0.25]),
        **artifacts.front_arrays(artifact.patterns, front_rows),
        **artifacts.window_arrays(["f" * 64, "0" * 64]),
    }


@pytest.fixture
def every_kind() -> tuple[artifacts.Artifact, dict[str, np.ndarray]]:
    """See build_every_kind."""
    return build_every_kind()


@pytest.fixture
def make() -> Callable[..., artifacts.Artifact]:
    """make(field=value, ...) -> an artifact that was never saved."""
    return build


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    return build_arrays()


@pytest.fixture
def saved(tmp_path: Path, arrays: dict[str, np.ndarray]) -> Path:
    """The YAML file of a saved artifact with a sidecar."""
    path = tmp_path / "cfg.yaml"
    artifacts.save(build(), path, arrays)
    return path


@pytest.fixture
def edit(saved: Path) -> Callable[[str, str], Path]:
    """edit(old, new) -> the saved YAML file with its one `old` replaced by hand."""

    def edit(old: str, new: str) -> Path:
        text = saved.read_text()
        assert text.count(old) == 1, f"{old!r} must be there once"
        saved.write_text(text.replace(old, new))
        return saved

    return edit
