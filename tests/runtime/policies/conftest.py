"""Artifacts whose caches are under policies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

import artifacts
from runtime import Headwise


@pytest.fixture
def keeping(artifact_for: Callable[..., Any]) -> Callable[..., Headwise]:
    """keeping(model, policy or {name: policy}, rows=None, **artifact) -> an artifact with dense prefill under policies.

    One policy serves every layer that does not slide; `rows` are those of kv_cache.layers.
    """

    def keeping(model: Any, policies: Any, rows: Sequence[Any] | None = None, **given: Any) -> Headwise:
        table = policies if isinstance(policies, dict) else {"it": policies}
        artifact = artifact_for(model, **{"dense": True, **given})
        if rows is None:
            rows = [None if row is None else next(iter(table)) for row in artifact.prefill.layers]
        section = artifacts.KVCache(policies=table, layers=tuple(rows))
        return Headwise(artifacts.Artifact(**{**dict(artifact), "kv_cache": section}))

    return keeping
