"""What the plugin writes into vLLM's own objects, since vLLM has no other way."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import artifacts
from runtime.caches.snapkv import SnapKV
from runtime.vllm.engine import ServedLayer
from runtime.vllm.policy_host import PagedPolicy
from tests.runtime.vllm.conftest import G, PlainEngine, step

SNAPKV = PagedPolicy((SnapKV.paging(artifacts.SnapKV(budget=40, window=8)),) * G)


@pytest.mark.parametrize("selects", [True, False])
def test_builder_asks_for_lengths_of_prompts_only_to_select(selects, engine):
    """vLLM passes them to models with a window over their replies, which the parent must not see.

    A second engine of a process has a configuration of its own, so that nothing is to be undone.
    """
    engine.serve_by(policy=SNAPKV if selects else None, plan=None)
    window = engine.config.model_config.model_arch_config.rswa_window
    assert window == (engine.at_work.longest if selects else None)
    common = step((30, 200))
    if selects:
        common.rswa_prefix_lens = torch.tensor([190, 0, 0], dtype=torch.int32)
    metadata = engine.builder.build(0, common)
    assert metadata.common.rswa_prefix_lens is None
    chunks = [(chunk.q_len, chunk.prompt) for chunk in metadata.headwise.requests]
    assert chunks == ([(20, 190), (10, 190)] if selects else [(30, 0)])


def test_layer_that_drops_tokens_answers_with_own_specification(monkeypatch):
    specs: Any = ModuleType("runtime.vllm.specs")
    specs.paged_spec = lambda full, pagings, longest: (full, pagings, longest)
    monkeypatch.setitem(sys.modules, "runtime.vllm.specs", specs)

    class Attention:
        impl = SimpleNamespace(sinks=None)

        def get_kv_cache_spec(self, config: Any) -> str:
            return f"full, {config}"

    module, other = Attention(), Attention()
    at_work = PlainEngine(ServedLayer(number=0))
    at_work._set_spec(module, ServedLayer(number=0, policy=SNAPKV, owned=True), SNAPKV)
    assert module.get_kv_cache_spec("config") == ("full, config", SNAPKV.every, 512)
    # No other layer of the class answers so.
    assert other.get_kv_cache_spec("config") == "full, config"


def test_layer_with_attention_sinks_cannot_select(monkeypatch):
    module = SimpleNamespace(impl=SimpleNamespace(sinks=torch.zeros(4)))
    at_work = PlainEngine(ServedLayer(number=0))
    with pytest.raises(artifacts.HeadwiseError, match=r"layers\[3\] .* uses attention sinks"):
        at_work._set_spec(module, ServedLayer(number=3, policy=SNAPKV, owned=True), SNAPKV)
