"""Tiny random models, artifacts for them, and a second sparse path: sdpa with the index as a
mask."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

import artifacts
from kernels.attention import cpu as attention_cpu
from kernels.decode import cpu as decode_cpu
from kernels.patterns import LayerPlan, make
from kernels.reference import Attention, Decode
from kernels.registry import CannotBuildError
from runtime import LoadedArtifact
from runtime.fingerprint import fingerprint
from runtime.layers import attention_layers, full_layers
from tests.artifacts.conftest import counting
from tests.runtime.batches import attending
from tests.runtime.omnikv import DECODE, LateCopyEngine
from tests.runtime.tiny import DENSE_BELOW, SIZES, tiny_model

SPARSE = {
    "a_64_64": artifacts.AShape(sink=64, window=64),
    "vs_70_70": artifacts.VerticalSlash(vertical=70, slash=70),
    "vs_10_130_q8": artifacts.VerticalSlash(vertical=10, slash=130, last_q=8),
    "bs_2": artifacts.BlockSparse(blocks=2),
}
POLICIES: dict[str, Any] = {
    "full": artifacts.Full(),
    "streaming": artifacts.Streaming(sinks=4, window=60),
    "h2o": artifacts.H2O(heavy=32, recent=32),
    "snapkv": artifacts.SnapKV(budget=64, window=16),
}


@pytest.fixture(autouse=True)
def _torch():
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    # The models are tiny: on a busy machine more threads only wait for each other.
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


@pytest.fixture
def build():
    """Return build(family, seed=0, **config), which makes a random causal model in evaluation
    mode."""
    return tiny_model


def search_info(rows: Any, patterns: Any) -> artifacts.SearchInfo:
    """Return the search section of an artifact with these rows; the runtime ignores it."""
    return counting(_search_info(), rows, patterns)


@cache
def _search_info() -> artifacts.SearchInfo:
    golden = artifacts.load(Path(__file__).parents[1] / "artifacts" / "golden" / "v1.yaml").search
    calibration = golden.calibration.model_copy(update={"seen_windows": 0})
    return golden.model_copy(update={"calibration": calibration, "cost": None})


def sparse_rows(config: Any) -> list[list[str] | None]:
    names = list(SPARSE)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return [
        [names[(layer + head) % len(names)] for head in range(config.num_attention_heads)]
        if kind == "full_attention"
        else None
        for layer, kind in enumerate(kinds)
    ]


@pytest.fixture
def artifact_for():
    """Return artifact_for(model, dense=, dense_below=, rows=, searched=), which mixes patterns."""

    def artifact_for(model, *, dense=False, dense_below=DENSE_BELOW, rows=None, searched=None):
        rows = sparse_rows(model.config.get_text_config()) if rows is None else rows
        if dense:
            rows = [None if row is None else ["dense"] * len(row) for row in rows]
        used = {name for row in rows if row is not None for name in row}
        table = {"dense": artifacts.Dense()} | SPARSE
        layers = tuple(None if row is None else tuple(row) for row in rows)
        return artifacts.Artifact(
            model=fingerprint(model, name="tiny"),
            search=search_info(layers, table),
            patterns={name: pattern for name, pattern in table.items() if name in used},
            prefill=artifacts.Prefill(dense_below=dense_below, length=searched, layers=layers),
        )

    return artifact_for


@pytest.fixture(autouse=True)
def short_turns(monkeypatch):
    """Build an index for chunks of 64 tokens or more, also after a past."""
    monkeypatch.setattr("runtime.attention.context.MIN_BEHIND_A_PAST", 64)


@pytest.fixture
def apply(artifact_for):
    """Return apply(model, **options, **artifact), which applies a new artifact with the
    reference backend and returns the handle."""

    def apply(model, *, strict=False, backend="reference", **changes):
        loaded = LoadedArtifact(artifact_for(model, **changes))
        return loaded.apply(model, strict=strict, backend=backend)

    return apply


@pytest.fixture
def decoding(artifact_for):
    """Return decoding(model, **section changes), which makes a LoadedArtifact with a decode
    section."""

    def decoding(model, **changes):
        section = artifacts.Decode(omnikv=DECODE.model_copy(update=changes))
        return LoadedArtifact(
            artifact_for(model, dense=True, dense_below=64).model_copy(update={"decode": section})
        )

    return decoding


@pytest.fixture
def keeping(artifact_for):
    """Return keeping(model, policy, rows=None, patterns=None), which makes an artifact with a
    kv_cache section.

    Args:
        policy: one policy, or {name: policy}.
        rows: of kv_cache.layers; if None, the first policy for every layer that does not slide.
        patterns: rows of pattern names for prefill, dense if None.
    """

    def keeping(model, policies, rows=None, patterns=None):
        table = policies if isinstance(policies, dict) else {"it": policies}
        artifact = artifact_for(model, dense=patterns is None, rows=patterns)
        if rows is None:
            full = full_layers(attention_layers(model))
            rows = [
                next(iter(table)) if layer in full else None
                for layer in range(artifact.model.num_layers)
            ]
        table = table if any(rows) else {}
        section = artifacts.KVCache(policies=table, layers=tuple(rows))
        return LoadedArtifact(artifacts.Artifact(**{**dict(artifact), "kv_cache": section}))

    return keeping


@pytest.fixture
def late(monkeypatch):
    """Use banks with a LateCopyEngine, and pages so small that a prompt needs several."""
    monkeypatch.setattr("runtime.omnikv.bank.CopyEngine", LateCopyEngine)
    monkeypatch.setattr("runtime.omnikv.bank._MIN_TOKENS", 16)


@pytest.fixture
def masked():
    """Return masked(model): unpadded prefill through sdpa, with each layer's index as the mask."""

    def masked(model, searched=None):
        rows = sparse_rows(model.config.get_text_config())

        def attention(module, q, k, v, mask, **kwargs):
            row = rows[module.layer_idx]
            scale = kwargs["scaling"]
            softcap = kwargs.pop("softcap", None)
            sinks = kwargs.pop("s_aux", None)
            q_len, k_len = q.shape[2], k.shape[2]
            if row is not None and q_len >= 64 and k_len >= DENSE_BELOW:
                patterns = [make(**SPARSE[name].model_dump()) for name in row]
                plan = LayerPlan(patterns, k.shape[1], length=searched)
                mask = plan.build(q, k, scale=scale).to_mask()
            elif softcap is None and sinks is None:
                return sdpa_attention_forward(module, q, k, v, mask, **kwargs)
            elif mask is None:
                mask = torch.ones(q_len, k_len, dtype=torch.bool).tril(k_len - q_len)
            group = q.shape[1] // k.shape[1]
            logits = (q @ repeat_kv(k, group).transpose(2, 3)).float() * scale
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            logits = logits.masked_fill(~mask, float("-inf"))
            if sinks is not None:
                sinks = sinks.float().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
                logits = torch.cat([logits, sinks], dim=-1)
            weights = logits.softmax(-1)[..., :k_len].to(q.dtype)
            return (weights @ repeat_kv(v, group)).transpose(1, 2).contiguous(), None

        return attending(model, attention)

    return masked


@pytest.fixture
def ids():
    """Return ids(length, batch=1, seed=0): random tokens (batch, length), none of them special."""

    def ids(length, batch=1, seed=0):
        generator = torch.Generator().manual_seed(1000 * length + seed)
        return torch.randint(3, SIZES["vocab_size"], (batch, length), generator=generator)

    return ids


@pytest.fixture
def graphs():
    """Return a torch.compile backend that runs graphs uncompiled and lists them in
    graphs.compiled."""
    torch._dynamo.reset()

    def backend(graph, inputs):
        backend.compiled.append(graph)
        return graph.forward

    backend.compiled = []
    return backend


@pytest.fixture
def warnings(caplog):
    """Return warnings(), which lists the runtime's messages."""
    caplog.set_level(logging.WARNING, logger="headwise")
    return lambda: [r.getMessage() for r in caplog.records if r.name == "headwise"]


@pytest.fixture
def unbuildable(monkeypatch):
    """No kernel can be built, and the reference must not serve."""

    def fails(*_: Any, **__: Any) -> Any:
        raise CannotBuildError("its kernel failed to build: RuntimeError: no assembler")

    def refuses(call: Any) -> Any:
        raise AssertionError("the reference served")

    for module in (attention_cpu, decode_cpu):
        monkeypatch.setattr(module, "run", fails)
    for oracle in (Attention, Decode):
        monkeypatch.setattr(oracle, "run", refuses)
