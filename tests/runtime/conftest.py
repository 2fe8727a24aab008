"""Tiny random models, artifacts for them, and another sparse path: sdpa with the index as a
mask."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import artifacts
from kernels.patterns import Growth, LayerPlan, make
from runtime import Handle, Headwise
from runtime.fingerprint import fingerprint
from runtime.layers import attention_layers, sliding_layers
from tests.runtime.omnikv import DECODE, LateLane
from tests.runtime.tiny import DENSE_BELOW, SIZES, tiny_model

SPARSE: dict[str, dict[str, Any]] = {
    "a_64_64": {"kind": "a_shape", "sink": 64, "window": 64},
    "vs_70_70": {"kind": "vertical_slash", "vertical": 70, "slash": 70},
    "vs_10_130_q8": {"kind": "vertical_slash", "vertical": 10, "slash": 130, "last_q": 8},
    "bs_2": {"kind": "block_sparse", "blocks": 2},
}
CLASSES = {
    "dense": artifacts.Dense,
    "a_shape": artifacts.AShape,
    "vertical_slash": artifacts.VerticalSlash,
    "block_sparse": artifacts.BlockSparse,
}


@pytest.fixture(autouse=True)
def _torch() -> Iterator[None]:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    # Everything here is tiny: on a busy machine threads only wait for each other.
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


@pytest.fixture
def build() -> Callable[..., Any]:
    """build(family, seed=0, **config) -> a random causal model in evaluation mode."""

    def build(family: str = "Llama", seed: int = 0, **changes: Any) -> Any:
        return tiny_model(family, seed, **changes)

    return build


def search_info() -> artifacts.SearchInfo:
    """Of no meaning here: the runtime reads nothing of it."""
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
def artifact_for() -> Callable[..., artifacts.Artifact]:
    """artifact_for(model, dense=, dense_below=, rows=, growth=) -> an artifact with mixed patterns
    for it."""

    def artifact_for(
        model: Any,
        *,
        dense: bool = False,
        dense_below: int = DENSE_BELOW,
        rows: Any = None,
        growth: artifacts.Growth | None = None,
    ) -> artifacts.Artifact:
        rows = sparse_rows(model.config.get_text_config()) if rows is None else rows
        if dense:
            rows = [None if row is None else ["dense"] * len(row) for row in rows]
        used = {name for row in rows if row is not None for name in row}
        table = {"dense": {"kind": "dense"}} | SPARSE
        patterns = {
            name: CLASSES[sizes["kind"]](**sizes) for name, sizes in table.items() if name in used
        }
        layers = tuple(None if row is None else tuple(row) for row in rows)
        return artifacts.Artifact(
            model=fingerprint(model, name="tiny"),
            search=search_info(),
            patterns=patterns,
            prefill=artifacts.Prefill(dense_below=dense_below, growth=growth, layers=layers),
        )

    return artifact_for


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of tiny prompts are worth an index from 64 tokens on, also behind a past."""
    monkeypatch.setattr("runtime.attention.state.MIN_BEHIND_A_PAST", 64)


@pytest.fixture
def apply(artifact_for: Callable[..., artifacts.Artifact]) -> Callable[..., Handle]:
    """apply(model, **options, **artifact) -> the handle of a fresh artifact applied to it, by the
    reference."""

    def apply(
        model: nn.Module,
        *,
        strict: bool = False,
        backend: str = "reference",
        **changes: Any,
    ) -> Handle:
        made = Headwise(artifact_for(model, **changes))
        return made.apply(model, strict=strict, backend=backend)

    return apply


@pytest.fixture
def decoding(artifact_for: Any) -> Callable[..., Any]:
    """decoding(model, **changes of the section) -> a Headwise whose artifact has a decode
    section."""

    def decoding(model: Any, **changes: Any) -> Headwise:
        section = artifacts.Decode(omnikv=DECODE.model_copy(update=changes))
        return Headwise(
            artifact_for(model, dense=True, dense_below=64).model_copy(update={"decode": section})
        )

    return decoding


@pytest.fixture
def keeping(artifact_for: Callable[..., Any]) -> Callable[..., Headwise]:
    """keeping(model, policy or {name: policy}, rows=None, patterns=None) -> an artifact with a
    kv_cache section.

    rows: of kv_cache.layers; the first policy for every layer that does not slide if None.
    patterns: prefill's rows of names, dense if None."""

    def keeping(
        model: Any,
        policies: Any,
        rows: Sequence[Any] | None = None,
        patterns: Sequence[Any] | None = None,
    ) -> Headwise:
        table = policies if isinstance(policies, dict) else {"it": policies}
        artifact = artifact_for(model, dense=patterns is None, rows=patterns)
        if rows is None:
            sliding = sliding_layers(attention_layers(model))
            rows = [
                None if layer in sliding else next(iter(table))
                for layer in range(artifact.model.num_layers)
            ]
            table = table if any(rows) else {}
        section = artifacts.KVCache(policies=table, layers=tuple(rows))
        return Headwise(artifacts.Artifact(**{**dict(artifact), "kv_cache": section}))

    return keeping


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Banks with a LateLane, and pages so small that a prompt needs several."""
    monkeypatch.setattr("runtime.omnikv.bank.Lane", LateLane)
    monkeypatch.setattr("runtime.omnikv.bank._LEAST", 16)


@contextmanager
def served_by(model: Any, attention: Callable[..., Any]) -> Iterator[None]:
    """The model with another attention function, which gets sdpa's masks."""
    AttentionInterface.register("masked", attention)
    AttentionMaskInterface.register("masked", sdpa_mask)
    former = model.config._attn_implementation
    model.set_attn_implementation("masked")
    try:
        yield
    finally:
        model.set_attn_implementation(former)


@pytest.fixture
def masked() -> Callable[[Any], Any]:
    """`with masked(model)`: unpadded prefill through sdpa with the mask that each layer's index
    comes to."""

    @contextmanager
    def masked(
        model: Any,
        dense_below: int = DENSE_BELOW,
        *,
        rows: Any = None,
        growth: artifacts.Growth | None = None,
    ) -> Iterator[None]:
        rows = sparse_rows(model.config.get_text_config()) if rows is None else rows
        grows = None if growth is None else Growth(length=growth.length, powers=growth.powers)

        def attention(
            module: Any, q: Any, k: Any, v: Any, mask: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, None]:
            row = rows[module.layer_idx]
            scale, softcap, sinks = (
                kwargs["scaling"],
                kwargs.pop("softcap", None),
                kwargs.pop("s_aux", None),
            )
            q_len, k_len = q.shape[2], k.shape[2]
            if row is not None and q_len >= 64 and k_len >= dense_below:
                plan = LayerPlan([make(**SPARSE[name]) for name in row], k.shape[1], growth=grows)
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

        with served_by(model, attention):
            yield

    return masked


@pytest.fixture
def ids() -> Callable[..., torch.Tensor]:
    """ids(length, batch=1, seed=0) -> random tokens (batch, length), none of them special."""

    def ids(length: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * length + seed)
        return torch.randint(3, SIZES["vocab_size"], (batch, length), generator=generator)

    return ids


@pytest.fixture
def graphs() -> Callable[..., Any]:
    """A backend of torch.compile that runs graphs as they are; graphs.made has them."""
    torch._dynamo.reset()

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        backend.made.append(graph)
        return graph.forward

    backend.made = []
    return backend


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """warnings() -> what the runtime has said so far."""
    caplog.set_level(logging.WARNING, logger="headwise")
    return lambda: [r.getMessage() for r in caplog.records if r.name == "headwise"]
