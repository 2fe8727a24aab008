"""Artifacts whose caches are under policies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

import artifacts
from runtime import Headwise
from runtime.layers import attention_layers, sliding_layers


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
